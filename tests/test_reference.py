"""What presets and sites do in the reference: the row normalizer of Algorithm 3, ``flash_consistent``, errors added to delta."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import Problem, causal_scores, make, relative_errors, results, run
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention import AttentionSpec, scaled_dot_product_attention
from attention.mask import NO_MASK
from attention.numerics import HARDWARE, Numerics
from attention.presets import PRESETS
from attention.reference.flash import _forward, row_deltas, row_residuals
from attention.reference.stabilize import tile_row_max
from attention.rounding import COLUMN_SIGN_STREAM, ROW_SIGN_STREAM, random_bits

PAPER_V2 = AttentionSpec(preset="flash_stable").resolve()
PAPER_V1 = AttentionSpec(preset="flash_stable_exact_ties").resolve()
SAFE = AttentionSpec(preset="flash_stable_safe").resolve()


def row_max(scores: list[float], numerics: Numerics) -> float:
    return tile_row_max(torch.tensor([scores]), numerics).item()


def test_algorithm_3_by_cases() -> None:
    assert row_max([3.0, 1.0], PAPER_V2) == 3.0  # no tie: unchanged
    assert row_max([3.0, 3.0, 1.0], PAPER_V2) == 6.0  # r_m > 0: beta * r_m
    assert row_max([-3.0, -3.0, -9.0], PAPER_V2) == 0.0  # r_m < 0: 0
    assert row_max([-3.0, -3.0, -9.0], replace(PAPER_V2, row_max_gamma=1.5)) == -4.5  # gamma * r_m
    assert row_max([0.0, 0.0], PAPER_V2) == 0.0
    assert row_max([3.0, 3.0], PAPER_V1) == 21.0  # beta 7


def test_the_tolerance_decides_what_is_a_tie() -> None:
    near = [3.0, 3.0 - 5e-4]
    assert row_max(near, PAPER_V2) == 6.0
    assert row_max(near, PAPER_V1) == 3.0
    band = [3.0, 3.0 - 1.5e-3]  # its exp rounds to 1 in BF16, and the published tolerance misses it
    assert torch.tensor(math.exp(-1.5e-3)).to(torch.bfloat16).item() == 1.0
    assert row_max(band, PAPER_V2) == 3.0
    assert row_max(band, SAFE) > 3.0


def attention_row(scores: Tensor, numerics: Numerics) -> tuple[Tensor, Tensor]:
    """O and L of single queries whose scores over C keys are given [N, C]; V is 1 everywhere, so that O must be 1.

    m is subtracted first: the FMA's exponential has a range of its own.
    """
    numerics = replace(numerics, exponent="subtract_first")
    n, c = scores.shape
    q = torch.ones(n, 1, 1, 1)
    k, v = scores.reshape(n, c, 1, 1), torch.ones(n, c, 1, 1)
    o, _, lse = _forward(q, k, v, torch.tensor(0), numerics.key(), 1.0, False, 0.0, None, *NO_MASK)
    return o.flatten(), lse.flatten()


def test_the_published_form_leaves_its_range_and_the_safe_one_does_not() -> None:
    for scores in ([110.0, 110.0, 0.0], [-110.0, -110.0, -300.0], [1e5, 1e5, 0.0]):
        published, _ = attention_row(torch.tensor([scores]), PAPER_V2)
        safe, _ = attention_row(torch.tensor([scores]), SAFE)
        assert published.isnan().all()  # l underflows to 0 and 0 / 0 is NaN
        assert safe.item() == pytest.approx(1.0, abs=1e-6)


largest = 3.4028234663852886e38
finite = st.floats(-largest, largest, width=32, allow_nan=False)
moderate = st.floats(-200, 200, width=32, allow_nan=False)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.one_of(finite, moderate, st.sampled_from([88.5, -88.5, 1e5, 0.0])), min_size=1, max_size=12),
    st.integers(1, 4),
    st.sampled_from(["hardware", "rounded_forward"]),
)
def test_no_finite_scores_underflow_or_overflow_the_safe_form(scores: list[float], tile: int, base: str) -> None:
    """l >= exp(-row_max_cap) after every tile, in any order of scores and with any tiles, hence O is finite and is V's 1."""
    numerics = replace(AttentionSpec(preset="flash_stable_safe", numerics=base).resolve(), tile_k=tile)
    doubled = torch.tensor([scores + scores], dtype=torch.float32)  # every value tied at least once
    o, lse = attention_row(doubled, numerics)
    assert o.item() == pytest.approx(1.0, abs=1e-5)
    # L = m + log l, and m <= r_m + cap, so l = exp(L - m) >= exp(-cap) is L >= r_m.
    exact = torch.logsumexp(doubled.double(), dim=-1)
    assert lse.double().item() == pytest.approx(exact.item(), rel=1e-5, abs=1e-4)


SEED = torch.zeros((), dtype=torch.int64)


def numerics(preset: str, **sites: Any) -> Numerics:
    return HARDWARE.with_sites(PRESETS[preset].of(HARDWARE) | sites)


def largest_residual(preset: str, logits: float, softcap: float = 0.0, **sites: Any) -> float:
    """The largest |rowsum(dS)|, dS unrounded, over the root mean square of dO V^T: what FP32 sums leave is near 1e-6.

    All keys have a part in common, and V is of one sign.
    """
    draw = torch.Generator().manual_seed(3)
    q, k, v, do = (torch.randn(1, 200, 2, 32, generator=draw) for _ in range(4))
    q, k = logits * q / q.norm(dim=-1, keepdim=True), k + 2 * torch.randn(1, 1, 2, 32, generator=draw)
    q, k, v, do = (x.bfloat16() for x in (q, k, -v.abs(), do))
    n = numerics(preset, score_gradients="fp32", tile_k=16, tile_q=32, **sites)
    r = row_residuals(q, k, v, do, n, seed=SEED, scale=1.0, softcap=softcap)
    dp = torch.einsum("bthd,bshd->bhts", do.float(), v.float())
    return (r.abs().max() / dp.square().mean().sqrt()).item()


@pytest.mark.parametrize(("logits", "softcap"), [(1.0, 0), (30.0, 0), (1e5, 0), (30.0, 20)])
def test_rows_of_ds_sum_to_zero_at_any_size_of_the_logits(logits: float, softcap: float) -> None:
    """Behind a soft-cap m counts in natural units, and is not exactly a multiple of ln 2."""
    assert largest_residual("flash_consistent", logits, softcap) < (2e-5 if softcap else 1e-5)
    assert largest_residual("flash", logits, softcap) > 1e-3


@pytest.mark.parametrize("without", ["row_max_rounding", "backward_probabilities", "delta_output"])
def test_each_of_its_sites_is_needed(without: str) -> None:
    """Tiles are several, so that P_bar of early tiles was formed with an earlier m."""
    assert largest_residual("flash_consistent", 30.0, **{without: getattr(HARDWARE, without)}) > 1e-4


SHAPE = (2, 40, 3, 16)
FP32 = ("exponent=subtract_first", "output=m3")


def deltas(p: Problem, *sites: str, seed: int = 3, preset: str = "flash_delta_from_p") -> Tensor:
    numerics = AttentionSpec(preset=preset, sites=(*FP32, *sites)).resolve()
    return row_deltas(p.q, p.k, p.v, p.do, numerics, seed=torch.tensor(seed), scale=0.25)


def errors(p: Problem, kind: str, size: float, rows: str = "all", seed: int = 3) -> Tensor:
    """e over rms(delta), [B, H, T]."""
    exact = deltas(p)
    dosed = deltas(p, f"delta_error={kind}", f"delta_error_size={size}", f"delta_error_rows={rows}", seed=seed)
    return (dosed - exact) / exact.square().mean(dim=-1, keepdim=True).sqrt()


def close(a: Tensor, b: Tensor | float) -> bool:
    return torch.allclose(a, torch.as_tensor(b).expand_as(a), rtol=1e-5, atol=1e-5)


def test_random_and_constant_errors_have_the_same_size() -> None:
    p = make("random", torch.float32, torch.device("cpu"), SHAPE)
    assert close(errors(p, "constant", -0.5), -0.5)
    drawn = errors(p, "random", 0.5)
    assert close(drawn.abs(), 0.5)
    assert drawn.mean().abs() < 0.5 * 4 / drawn.numel() ** 0.5
    assert torch.equal(drawn, errors(p, "random", 0.5))
    assert not torch.equal(drawn.sign(), errors(p, "random", 0.5, seed=4).sign())


def test_an_error_by_scale_is_a_part_of_delta() -> None:
    p = make("random", torch.float32, torch.device("cpu"), SHAPE)
    assert close(deltas(p, "delta_error=scale", "delta_error_size=0.25"), 1.25 * deltas(p))


def test_a_p_in_delta_alone_is_over_its_own_sum() -> None:
    """An unrounded P there is that of standard attention, whatever O was divided by."""
    p = make("random", torch.float32, torch.device("cpu"), SHAPE)
    own = "probabilities=m3", "divisor=rounded", "delta_output=fp32", "probabilities_in_delta=fp32"
    assert close(deltas(p, *own, preset="flash"), deltas(p))


@pytest.mark.parametrize("delta_output", ["output", "fp32", "low16"])
@pytest.mark.parametrize("delta_sum", ["delta_sum=fp32", "delta_sum=m3"])
def test_all_of_what_rounding_makes_is_the_delta_of_flash(delta_output: str, delta_sum: str) -> None:
    """With O as it is passed on, also where ``delta_output`` is another one."""
    p = make("random", torch.float32, torch.device("cpu"), SHAPE)
    all_of_it = "delta_error=rounding", "delta_error_size=1", f"delta_output={delta_output}", delta_sum
    assert close(deltas(p, *all_of_it), deltas(p, delta_sum, preset="flash"))
    assert close(errors(p, "rounding", -0.5), -0.5 * errors(p, "rounding", 1.0))
    assert errors(p, "rounding", 1.0).abs().mean() > 1e-3


def test_rows_are_chosen_by_their_probabilities() -> None:
    p = make("random", torch.float32, torch.device("cpu"), SHAPE)
    p.k[:, 1::4] = p.k[:, ::4]  # of four keys two are equal
    p.q[:, 20:30] *= 40  # one key, or a pair, has all the weight
    scores = causal_scores(*(x.transpose(1, 2).double() for x in (p.q, p.k)), 0.25)
    weights = scores.softmax(dim=-1).sort(dim=-1).values
    tied = weights[..., -2] > 0.999 * weights[..., -1]
    one_hot = weights[..., -1] > 0.999
    assert 0.1 < tied.double().mean() < 0.9
    assert 0.1 < one_hot.double().mean() < 0.9
    for rows, expected in (("tied", tied), ("untied", ~tied), ("one_hot", one_hot)):
        assert torch.equal(errors(p, "constant", 0.5, rows) != 0, expected)
        if rows != "one_hot":
            drawn = errors(p, "constant", 0.5, f"as_many_as_{rows}") != 0
            assert torch.equal(drawn.sum(dim=-1), expected.sum(dim=-1))
            assert not torch.equal(drawn, expected)


def test_zero_sum_noise_leaves_rows_of_ds_at_a_sum_of_zero() -> None:
    """Where a feature of K is 1 and the same of Q is 0, dQ is scale times the sum of the row of dS."""
    p = make("random", torch.float32, torch.device("cpu"), SHAPE)
    p.q[..., 0], p.k[..., 0] = 0.0, 1.0
    beside = (*FP32, "delta_error_size=0.5")
    specs = [
        AttentionSpec(preset="flash_delta_from_p", backend="flash_reference", sites=(*beside, f"delta_error={kind}"))
        for kind in ("none", "zero_sum", "random")
    ]
    plain, noisy, dosed = (run(p, spec)[1] for spec in specs)
    assert noisy[..., 0].abs().max() < 1e-5 < 1e-3 < dosed[..., 0].abs().min()
    assert (noisy - plain).norm() > 0.1 * (dosed - plain).norm()


def test_zero_sum_noise_of_heads_that_share_keys_has_the_signs_of_their_keys() -> None:
    """dQ and dK against matrices."""
    p, size, seed = make("random", torch.float32, torch.device("cpu"), (2, 40, 4, 16)), 0.5, torch.tensor(3)
    q, k, v, do = (x.transpose(1, 2) for x in (p.q, p.k[:, :, :2], p.v[:, :, :2], p.do))
    sites = (*FP32, f"delta_error_size={size}", "delta_error=zero_sum")
    spec = AttentionSpec(preset="flash_delta_from_p", backend="flash_reference", sites=sites)
    settings = {"is_causal": True, "enable_gqa": True, "rounding_seed": seed}
    _, dq, dk, _ = results(scaled_dot_product_attention, (q, k, v), do, numerics=spec, **settings)
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    weights, dp = causal_scores(q, k, 0.25).softmax(dim=-1), do @ v.mT
    of_rows, of_keys = (
        2.0 * (random_bits(seed, stream, torch.Size(shape)) & 1) - 1
        for stream, shape in ((ROW_SIGN_STREAM, (2, 4, 40)), (COLUMN_SIGN_STREAM, (2, 40, 2)))
    )
    error = size * (weights * dp).sum(dim=-1).square().mean(dim=-1, keepdim=True).sqrt() * of_rows
    dp = dp + error[..., None] * of_keys.mT.repeat_interleave(2, dim=1)[:, :, None]
    ds = 0.25 * weights * (dp - (weights * dp).sum(dim=-1, keepdim=True))
    exact = ds @ k, (ds.mT @ q).unflatten(1, (2, 2)).sum(dim=2)
    assert max(relative_errors((dq, dk), exact)) < 1e-5


@pytest.mark.parametrize("site", ["values", "values_in_dp", "output_gradient", "output_gradient_in_dv"])
@pytest.mark.parametrize("fmt", ["int8_row", "e2m1_nv_stochastic", "int8_tensor"])
def test_zero_sum_noise_leaves_v_and_do_rounded_as_they_are(site: str, fmt: str) -> None:
    p = make("random", torch.float32, torch.device("cpu"), SHAPE)
    p.v[:] = p.v / 100  # signs are larger
    beside = ("delta_error_size=1e-6", f"{site}={fmt}")
    specs = [
        AttentionSpec(preset="flash_delta_from_p", backend="flash_reference", sites=(*beside, f"delta_error={kind}"))
        for kind in ("none", "zero_sum")
    ]
    plain, noisy = (run(p, spec) for spec in specs)
    assert max(relative_errors(noisy, plain)) < 1e-5
