"""Rows: of dS, which sum to zero by ``delta=rowsum_p_dp_normalized`` and ``row_residual``; of P, with a floor of their sum.

A feature of K that is 1 in every key shows the sum of dS: dQ has scale * rowsum(dS) there. ``row_sum_floor``, ``hidden_tiles`` and
``row_max=scaled`` are held to Algorithm 3 with a floor, in FP64. Kernels run as in ``test_kernels``.
"""

import functools
import math
from dataclasses import replace

import kernel_tests
import pytest
import torch
from attention_cases import Problem, causal_scores, run, same
from kernel_tests import Runner
from torch import Tensor

from attention import AttentionSpec
from attention.check.captured import Inputs
from attention.check.measures import exact
from attention.numerics import FP32, PUBLISHED, SITES, Numerics, parse_site
from attention.reference.flash import row_residuals

BLOCKS = ("tile_q=16", "tile_k=16")
runner = kernel_tests.runner


@functools.cache
def common_keys(shape: tuple[int, ...], logit: float, dtype: torch.dtype, *, ones: bool = False) -> Problem:
    """Keys with a part in common, and logits whose largest is ``logit``; by the CPU's generator, so that devices share it."""
    generator = torch.Generator().manual_seed(11)
    q, k, v, do = (torch.randn(shape, generator=generator) for _ in range(4))
    k = k + 2 * torch.randn(shape[-1], generator=generator)
    if ones:
        k[..., 0] = 1.0
    s = causal_scores(q.transpose(1, 2), k.transpose(1, 2), shape[-1] ** -0.5)
    return Problem(*(x.to(dtype) for x in (q * (logit / s.max()), k, v, do)))


def moved(p: Problem, device: torch.device) -> Problem:
    return Problem(*(x.to(device) for x in (p.q, p.k, p.v, p.do)))


def row_sums(p: Problem, *sites: str, preset: str = "flash", backend: str = "flash_reference") -> Tensor:
    """rowsum(dS) as dQ has it, over the root mean square of dQ's other features."""
    dq = run(p, AttentionSpec(preset=preset, sites=(*BLOCKS, *sites), backend=backend))[1].double()
    return dq[..., 0] / dq[..., 1:].square().mean().sqrt()


def test_the_normalized_delta_keeps_them_at_zero_where_l_is_coarse(runner: Runner) -> None:
    p = moved(common_keys((1, 48, 2, 16), 20.0, torch.float32, ones=True), runner.device)
    coarse = ("logsumexp=m4", "score_gradients=fp32")
    left = [
        row_sums(p, f"delta={delta}", *coarse, backend=runner.backend).square().mean().sqrt()
        for delta in ("rowsum_p_dp_normalized", "rowsum_p_dp")
    ]
    assert left[0] < 1e-5 < 1e-2 < left[1]


@pytest.mark.parametrize(("rounded", "saved"), [("input", "m4"), ("m3", "fp32")])
def test_taken_out_they_are_zero(rounded: str, saved: str, runner: Runner) -> None:
    """To the rounding of P in P K for corrected rows, exactly but for FP32's sums with the mean key; also where P does not sum to 1."""
    p = moved(common_keys((1, 48, 2, 16), 60.0, torch.float32, ones=True), runner.device)
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
    p = moved(common_keys((1, 64, 2, 16), 5.0, torch.bfloat16), runner.device)
    q, k, v, do = (x.transpose(1, 2) for x in (p.q, p.k, p.v, p.do))
    exact_dq = exact(Inputs(q, k, v, do, scale=0.25))[0][1].transpose(1, 2)

    def found(chosen: str) -> tuple[float, Tensor, Tensor]:
        sites = (*BLOCKS, f"row_residual={chosen}")
        _, dq, dk, dv = run(p, AttentionSpec(preset="flash_consistent", sites=sites, backend=runner.backend))
        return (dq.double() - exact_dq).norm().item(), dk, dv

    kept, centered = found("kept"), found("centered_keys")
    assert centered[0] < 0.75 * kept[0]
    assert same(kept[1:], centered[1:])


def test_rows_whose_p_is_zero_throughout_have_no_gradient(runner: Runner) -> None:
    """L of logits of 641 is 768 with one mantissa bit: exp(-127) is 0 in FP32, and 0 / 0 must not come of it."""
    p = moved(common_keys((1, 20, 1, 16), 1.0, torch.float32), runner.device)
    p.q.zero_()[..., 0], p.k.zero_()[..., 0] = 4 * 641.0, 1.0
    for sites in (("delta=rowsum_p_dp_normalized",), ("row_residual=corrected_rows",)):
        coarse = (*BLOCKS, "logsumexp=m1", "exponent=subtract_first", *sites)
        gradients = run(p, AttentionSpec(sites=coarse, backend=runner.backend))[1:]
        assert all(torch.equal(x, torch.zeros_like(x)) for x in gradients)


FLOOR, BETA = 1e-10, 2.0
FORMS = {
    "floor": ("row_max=stabilized",),
    "visited": ("row_max=stabilized", "hidden_tiles=visited"),
    "scaled": ("row_max=scaled", "hidden_tiles=visited"),
    "scaled, skipped": ("row_max=scaled",),
}


def tied_rows() -> Problem:
    """Rows whose largest score is attained by many keys or by one, from -60 to 60; FP32."""
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(1, 50, 1, 16, generator=generator).round()
    k[:, :, :, 0] = 1.0
    k[:, ::2, :, 1:] = 0.0  # every other key is the same one
    q = torch.zeros(1, 50, 1, 16)
    q[0, :, 0, 0] = torch.linspace(-60, 60, 50)[torch.randperm(50, generator=generator)]
    q[0, :, 0, 1] = torch.tensor([0.0, 2.0, -3.0, 0.5])[torch.arange(50) % 4]
    v, do = (torch.randn(q.shape, generator=generator) for _ in range(2))
    return Problem(q * 4, k, v, do)  # exact, as is the scale


def oracle(p: Problem, tile: int, *, floor: float, visited: bool) -> Tensor:
    """O in FP64: Algorithm 3 of arXiv 2510.04212 one row and one tile at a time, with the floor of its code."""
    q, k, v = (x[0, :, 0].double() for x in (p.q, p.k, p.v))
    s = (q @ k.mT) / math.sqrt(q.shape[1])
    o = torch.zeros_like(q)
    for row in range(len(q)):
        m, total, acc = -math.inf, 0.0, torch.zeros(q.shape[1]).double()
        for start in range(0, len(k), tile):
            scores = s[row, start : min(start + tile, row + 1)]
            if not len(scores) and not visited:
                continue
            r = scores.max().item() if len(scores) else -math.inf
            if not len(scores) or (scores >= r - 1e-3).sum() > 1:
                r = BETA * r if r > 0 else 0.0
            new = max(m, r)
            p_bar = torch.exp(scores - new)
            total = math.exp(m - new) * total + max(p_bar.sum().item(), floor)
            acc = math.exp(m - new) * acc + p_bar @ v[start : start + len(scores)]
            m = new
        o[row] = acc / total
    return o


def sites(form: str, tile: int, *more: str) -> tuple[str, ...]:
    return (*FORMS[form], f"row_sum_floor={FLOOR}", "row_max_tolerance=1e-3", f"tile_k={tile}", "tile_q=16", *more)


@pytest.mark.parametrize(("tile", "exponent"), [(16, "fma"), (48, "separate_multiply")])
@pytest.mark.parametrize("form", FORMS)
def test_rows_come_out_scaled_as_by_the_floor(runner: Runner, form: str, tile: int, exponent: str) -> None:
    p = tied_rows()
    expected = oracle(p, tile, floor=FLOOR, visited="skipped" not in form and form != "floor")
    found = _forward(p, runner, AttentionSpec(preset="flash", sites=sites(form, tile, f"exponent={exponent}")))
    plain = _forward(p, runner, AttentionSpec(preset="flash", sites=("tile_k=16", f"exponent={exponent}")))
    # Half the rows or more are scaled down, so that a floor without effect would fail.
    scale = expected.norm(dim=-1) / plain.norm(dim=-1)
    assert (scale < 0.9).double().mean() > 0.3
    assert (scale > 0.99).any()
    # By the FMA, the exponent at m has an error of half a unit of m, which is up to 120 here.
    assert ((found - expected).norm(dim=-1) <= 1e-4 * expected.norm(dim=-1)).all()


def test_the_floor_leaves_row_sums_of_ds_that_no_rounding_makes() -> None:
    """P sums to a < 1 where the floor counts, and rows of P (dP - delta) to (1 - a) delta."""
    p, tile = tied_rows(), 16
    values = dict(parse_site(text) for text in sites("visited", tile))

    def r(numerics: Numerics, p: Problem) -> Tensor:
        found = row_residuals(p.q, p.k, p.v, p.do, numerics, seed=torch.zeros((), dtype=torch.int64), scale=1 / 4)
        return found[0, 0].double()

    o = oracle(p, tile, floor=FLOOR, visited=True)
    a = oracle(replace(p, v=torch.ones_like(p.v)), tile, floor=FLOOR, visited=True)[:, 0]
    expected = (1 - a) * (p.do[0, :, 0].double() * o).sum(-1)
    assert expected.abs().max() > 0.1
    assert (r(FP32.with_sites(values), p) - expected).abs().max() < 1e-5  # scores to 60 in FP32: exp is 4e-6 off
    half = Problem(*(x.bfloat16() for x in (p.q, p.k, p.v, p.do)))
    # The published roundings change these r by no more than they make without Algorithm 3.
    by_rounding = r(PUBLISHED, half).norm()
    assert by_rounding < expected.norm()
    assert (r(PUBLISHED.with_sites(values), half) - expected).norm() < by_rounding


def _forward(p: Problem, runner: Runner, spec: AttentionSpec) -> Tensor:
    return run(moved(p, runner.device), replace(spec, backend=runner.backend))[0][0, :, 0].double().cpu()
