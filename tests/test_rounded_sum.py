"""Site ``divisor``: O divided by the sum of the P_bar that P_bar V reads, in the PyTorch reference. Kernels: test_flash_triton.py."""

from __future__ import annotations

import pytest
import torch
from attention_cases import Problem, make, oracle, run
from torch import Tensor

import attention
from attention import AttentionConfig, AttentionSpec
from errors import UserError

TILES = ("tile_q=16", "tile_k=16")
CPU = torch.device("cpu")


def rounded(*sites: str, preset: str = "flash_rounded_sum") -> AttentionSpec:
    return AttentionSpec(preset=preset, sites=(*TILES, *sites))


def weighted_mean(p: Problem) -> Tensor:
    """Sum of round(P_bar) V over the sum of round(P_bar), float64, [B, T, H, D]; P_bar from the row maximum of the whole row."""
    q, k, v = (x.double().transpose(1, 2) for x in (p.q, p.k, p.v))
    s = q @ k.mT * q.shape[-1] ** -0.5
    s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    p_bar = torch.exp(s - s.amax(dim=-1, keepdim=True)).to(p.q.dtype).double()
    return (p_bar @ v / p_bar.sum(dim=-1, keepdim=True)).transpose(1, 2)


def test_o_is_a_mean_by_the_weights_that_are_read() -> None:
    p = make("random", torch.bfloat16, CPU)
    whole = ("tile_q=0", "tile_k=0", "exponent=subtracted", "output=fp32")
    found, plain = (run(p, AttentionSpec(sites=(*whole, *extra)))[0].double() for extra in (("divisor=rounded",), ()))
    expected = weighted_mean(p)
    assert (found - expected).norm() / expected.norm() < 1e-5  # but for P_bar at a boundary of BF16
    assert (plain - expected).norm() / expected.norm() > 1e-4


def test_a_value_that_all_keys_have_is_kept() -> None:
    """One tile, so that no sum is rescaled: sums of BF16 numbers in FP32 are exact, v times the sum over the sum is v."""
    p = make("random", torch.bfloat16, CPU)
    p = Problem(p.q, p.k, p.v[:, :1].expand_as(p.v).contiguous(), p.do)
    kept, drifting = (
        run(
            p, AttentionSpec(sites=("tile_q=0", "tile_k=0", "exponent=subtracted", f"divisor={divisor}", "output=fp32"))
        )[0]
        for divisor in ("rounded", "unrounded")
    )
    assert (kept - p.v.float()).abs().max() <= 2.0**-22 * p.v.float().abs().max()
    assert (drifting - p.v.float()).abs().max() > 2.0**-12 * p.v.float().abs().max()


@pytest.mark.parametrize("delta", ["rowsum_p_dp", "recomputed_o"])
def test_the_backward_pass_has_l(delta: str) -> None:
    p = make("random", torch.bfloat16, CPU)
    plain, other = (run(p, rounded(f"delta={delta}", f"divisor={divisor}")) for divisor in ("unrounded", "rounded"))
    assert not torch.equal(plain[0], other[0])
    assert all(torch.equal(a, b) for a, b in zip(plain[1:], other[1:], strict=True))


def test_the_o_for_delta_is_divided_by_it_too() -> None:
    p = make("random", torch.bfloat16, CPU)
    for site in ("delta_output=fp32", "delta_output=residual16"):
        plain, other = (run(p, rounded(site, f"divisor={divisor}")) for divisor in ("unrounded", "rounded"))
        assert not torch.equal(plain[1], other[1])
    # Unrounded, O for delta and O are one number.
    same = (run(p, rounded("output=fp32", site)) for site in ("delta_output=fp32", "delta_output=output"))
    assert all(torch.equal(a, b) for a, b in zip(*same, strict=True))


def test_where_p_bar_is_not_rounded_it_is_l() -> None:
    p = make("random", torch.bfloat16, CPU)
    plain, other = (run(p, rounded("probabilities=fp32", f"divisor={d}")) for d in ("unrounded", "rounded"))
    assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))


def test_it_sums_what_was_drawn() -> None:
    p = make("random", torch.bfloat16, CPU)
    p = Problem(p.q, p.k, p.v[:, :1].expand_as(p.v).contiguous(), p.do)
    drawn = run(p, rounded("probabilities_rounding=stochastic", "output=fp32"), seed=3)[0]
    assert (drawn - p.v.float()).abs().max() < 2.0**-20 * p.v.float().abs().max()


def test_statistics_round_it() -> None:
    p = make("random", torch.bfloat16, CPU)
    fine, coarse = (run(p, rounded(*sites))[0] for sites in ((), ("statistics=m3",)))
    assert not torch.equal(fine, coarse)
    assert (fine.double() - oracle(p)[0]).norm() < (coarse.double() - oracle(p)[0]).norm()


def test_others_refuse_it() -> None:
    plans = AttentionConfig(default=AttentionSpec(preset="standard", sites=("divisor=rounded",))).resolve(1, 2)
    with pytest.raises(UserError, match="it divides by l before P is rounded"):
        attention.check(plans, device=CPU, dtype=torch.bfloat16, head_dim=16)
    with pytest.raises(UserError, match=r"sdpa_flash = 'hardware divisor=rounded'"):
        AttentionSpec(preset="sdpa_flash", sites=("divisor=rounded",)).resolve()
    with pytest.raises(UserError, match=r"divisor = 'l': expected one of unrounded, rounded"):
        AttentionSpec(sites=("divisor=l",)).resolve()
