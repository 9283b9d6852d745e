"""Site ``delta_error``: what is added to delta, seen from outside, in the reference."""

from __future__ import annotations

import pytest
import torch
from attention_cases import Problem, make, run
from torch import Tensor

from attention import AttentionSpec
from attention.reference.flash import row_deltas
from errors import UserError

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


def test_all_of_what_rounding_makes_is_the_delta_of_flash() -> None:
    p = make("random", torch.float32, torch.device("cpu"), SHAPE)
    assert close(deltas(p, "delta_error=rounding", "delta_error_size=1"), deltas(p, preset="flash"))
    assert close(errors(p, "rounding", -0.5), -0.5 * errors(p, "rounding", 1.0))
    assert errors(p, "rounding", 1.0).abs().mean() > 1e-3


def test_rows_are_chosen_by_their_probabilities() -> None:
    p = make("random", torch.float32, torch.device("cpu"), SHAPE)
    p.k[:, 1::4] = p.k[:, ::4]  # of four keys two are equal
    p.q[:, 20:30] *= 40  # one key, or a pair, has all the weight
    scores = (p.q.transpose(1, 2) @ p.k.permute(0, 2, 3, 1)).double() / 4
    weights = scores.masked_fill(torch.ones(40, 40).triu(1).bool(), -torch.inf).softmax(dim=-1).sort(dim=-1).values
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


def test_an_error_needs_a_delta_from_p() -> None:
    with pytest.raises(UserError, match="delta_error = 'random': expected none where delta is rowsum_do_o"):
        AttentionSpec(sites=("delta_error=random",))
