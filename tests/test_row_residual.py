"""Rows of dS sum to zero in exact arithmetic: ``delta=rowsum_p_dp_normalized`` restores it, ``row_residual`` takes out what is left.

A feature of K that is 1 in every key shows the sum: dQ has scale * rowsum(dS) there. Kernels run as in ``test_kernels``.
"""

from __future__ import annotations

import functools

import kernel_tests
import pytest
import torch
from attention_cases import Problem, run
from kernel_tests import Runner

from attention import AttentionSpec
from attention.check.captured import Inputs
from attention.check.measures import exact
from attention.numerics import SITES

BLOCKS = ("tile_q=16", "tile_k=16")
runner, poisoned_memory = kernel_tests.runner, kernel_tests.poisoned_memory


@functools.cache
def common_keys(
    shape: tuple[int, ...],
    *,
    logit: float,
    common: float = 2.0,
    ones: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Problem:
    """Keys with a part in common, and logits whose largest is ``logit``; by the CPU's generator, so that devices share it."""
    generator = torch.Generator().manual_seed(11)
    q, k, v, do = (torch.randn(shape, generator=generator) for _ in range(4))
    k = k + common * torch.randn(shape[-1], generator=generator)
    if ones:
        k[..., 0] = 1.0
    s = torch.einsum("bthd,bshd->bhts", q, k).tril() * shape[-1] ** -0.5
    return Problem(*(x.to(dtype) for x in (q * (logit / s.max()), k, v, do)))


def moved(p: Problem, device: torch.device) -> Problem:
    return Problem(*(x.to(device) for x in (p.q, p.k, p.v, p.do)))


def row_sums(p: Problem, *sites: str, preset: str = "flash", backend: str = "flash_reference") -> torch.Tensor:
    """rowsum(dS) as dQ has it, over the root mean square of dQ's other features."""
    dq = run(p, AttentionSpec(preset=preset, sites=(*BLOCKS, *sites), backend=backend))[1].double()
    return dq[..., 0] / dq[..., 1:].square().mean().sqrt()


def test_the_normalized_delta_keeps_them_at_zero_where_l_is_coarse(runner: Runner) -> None:
    p = moved(common_keys((1, 48, 2, 16), logit=20.0, ones=True, dtype=torch.float32), runner.device)
    coarse = ("logsumexp=m4", "score_gradients=fp32")
    left = [
        row_sums(p, f"delta={delta}", *coarse, backend=runner.backend).square().mean().sqrt()
        for delta in ("rowsum_p_dp_normalized", "rowsum_p_dp")
    ]
    assert left[0] < 1e-5 < 1e-2 < left[1]


@pytest.mark.parametrize(("rounded", "saved"), [("input", "m4"), ("m3", "fp32")])
def test_taken_out_they_are_zero(rounded: str, saved: str, runner: Runner) -> None:
    """To the rounding of P in P K for corrected rows, exactly but for FP32's sums with the mean key; also where P does not sum to 1."""
    p = moved(common_keys((1, 48, 2, 16), logit=60.0, ones=True, dtype=torch.float32), runner.device)
    sites = ("output=bf16", "probabilities=bf16", f"score_gradients={rounded}", f"logsumexp={saved}")
    left = {
        name: row_sums(p, *sites, f"row_residual={name}", backend=runner.backend).square().mean().sqrt()
        for name in SITES["row_residual"].choices
    }
    assert left["kept"] > 1e-3
    assert left["centered_keys"] < 1e-5
    assert left["corrected_rows"] < left["kept"] * 2.0**-7


def test_beside_flash_consistent_the_mean_key_takes_out_what_the_rounding_of_ds_leaves(runner: Runner) -> None:
    """Of dQ, against FP64; dK and dV stay as they are."""
    p = moved(common_keys((1, 64, 2, 16), logit=5.0), runner.device)
    q, k, v, do = (x.transpose(1, 2) for x in (p.q, p.k, p.v, p.do))
    exact_dq = exact(Inputs(q, k, v, do, scale=0.25))[0][1].transpose(1, 2)

    def found(chosen: str) -> tuple[float, torch.Tensor, torch.Tensor]:
        sites = (*BLOCKS, f"row_residual={chosen}")
        _, dq, dk, dv = run(p, AttentionSpec(preset="flash_consistent", sites=sites, backend=runner.backend))
        return (dq.double() - exact_dq).norm().item(), dk, dv

    kept, centered = found("kept"), found("centered_keys")
    assert centered[0] < 0.75 * kept[0]
    assert all(torch.equal(a, b) for a, b in zip(kept[1:], centered[1:], strict=True))


def test_rows_whose_p_is_zero_throughout_have_no_gradient(runner: Runner) -> None:
    """L of logits of 641 is 768 with one mantissa bit: exp(-127) is 0 in FP32, and 0 / 0 must not come of it."""
    p = moved(common_keys((1, 20, 1, 16), logit=1.0, dtype=torch.float32), runner.device)
    p.q.zero_()[..., 0], p.k.zero_()[..., 0] = 4 * 641.0, 1.0
    for sites in (("delta=rowsum_p_dp_normalized",), ("row_residual=corrected_rows",)):
        coarse = (*BLOCKS, "logsumexp=m1", "exponent=subtract_first", *sites)
        gradients = run(p, AttentionSpec(sites=coarse, backend=runner.backend))[1:]
        assert all(torch.equal(x, torch.zeros_like(x)) for x in gradients)
