"""Attention sinks, one more logit a head in the denominator, against fp64: in PyTorch, and in Triton's interpreter or on a GPU."""

from __future__ import annotations

from typing import Any

import kernel_tests
import pytest
import torch
from attention_cases import assert_as_exact
from kernel_tests import INTERPRETED, Runner, pass_in_the_interpreter
from torch import Tensor

import attention
from attention import AttentionConfig, AttentionSpec, scaled_dot_product_attention
from attention.mask import NO_MASK, Mask
from errors import UserError

pytest.importorskip("triton")

runner, poisoned_memory = kernel_tests.runner, kernel_tests.poisoned_memory
here = pytest.mark.skipif(INTERPRETED, reason="no kernel in it")
T, H = 40, 16


def tensors(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    """q, k, v, sinks and dO; sinks from far below the scores to far above."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(2, T, heads, 16, generator=generator) for heads in (H, H // 2, H // 2, H))
    sinks = torch.linspace(-9, 7, H)
    return *(x.to(device, dtype) for x in (q, k, v)), sinks.to(device), do.to(device, dtype)


def formula(given: tuple[Tensor, ...], dtype: torch.dtype, softcap: float = 0.0, window: int = T) -> tuple[Tensor, ...]:
    """O, dQ, dK, dV and the gradient of the sinks, by a softmax over the scores and the sink, whose weight is dropped."""
    leaves = [x.to(dtype).requires_grad_() for x in given[:4]]
    q, k, v = (x.transpose(1, 2).repeat_interleave(H // x.shape[2], dim=1) for x in leaves[:3])
    t = torch.arange(T, device=q.device)
    hidden = (t > t[:, None]) | (t <= t[:, None] - window)
    s = q @ k.mT * 0.25
    s = softcap * torch.tanh(s / softcap) if softcap else s
    s = s.masked_fill(hidden, -torch.inf)
    sinks = leaves[3][:, None, None].expand(2, H, T, 1)
    o = (torch.softmax(torch.cat((s, sinks), dim=-1), dim=-1)[..., :-1] @ v).transpose(1, 2)
    return o.detach(), *torch.autograd.grad(o, leaves, given[4].to(dtype))


def computed(given: tuple[Tensor, ...], spec: AttentionSpec, **settings: Any) -> tuple[Tensor, ...]:
    leaves = [x.detach().clone().requires_grad_() for x in given[:4]]
    plan = AttentionConfig(default=spec).resolve(1, leaves[0].shape[2])[0]
    seed = torch.tensor(0, device=leaves[0].device)
    o = attention.run(*leaves[:3], plan, rounding_seed=seed, sinks=leaves[3], **settings)
    return o.detach(), *torch.autograd.grad(o, leaves, given[4].to(o.dtype))


def assert_exact(spec: AttentionSpec, device: torch.device, mask: Mask = NO_MASK, **form: Any) -> None:
    """O and all gradients: errors against FP64 at most twice those of the formula in BF16. ``form``: of ``formula``."""
    given = tensors(device)
    baseline, exact = (formula(given, dtype, **form) for dtype in (torch.bfloat16, torch.float64))
    found = computed(given, spec, mask=mask, softcap=form.get("softcap", 0.0))
    assert_as_exact(found[:4], baseline[:4], exact[:4])
    error, allowed = ((x[4].double() - exact[4]).norm() for x in (found, baseline))
    assert error <= 2 * allowed


@pytest.mark.skipif(INTERPRETED, reason="this is the pytest it starts")
@pytest.mark.timeout(600)
def test_the_kernels_in_tritons_interpreter() -> None:
    pass_in_the_interpreter(__file__)


@pytest.mark.parametrize(
    ("preset", "sites"),
    [
        ("flash", ()),
        ("flash_consistent", ()),
        ("flash_delta_from_p", ("exponent=subtract_first", "saved_statistics=max_and_sum")),
        ("flash_delta_normalized", ("exponent=separate_multiply",)),
        ("flash", ("tile_k=16", "tile_product=m20")),
    ],
)
def test_as_exact_as_the_formula(preset: str, sites: tuple[str, ...], runner: Runner) -> None:
    assert_exact(AttentionSpec(preset=preset, sites=sites, backend=runner.backend), runner.device)


def test_as_exact_behind_a_softcap(runner: Runner) -> None:
    assert_exact(AttentionSpec(backend=runner.backend), runner.device, softcap=3.0)


def test_as_exact_behind_a_window(runner: Runner) -> None:
    t = torch.arange(T, device=runner.device)
    mask = Mask(ranges=torch.stack(((t - 6).clamp(min=0), t + 1)).expand(2, 2, T))
    assert_exact(AttentionSpec(backend=runner.backend), runner.device, mask, window=7)


@here
def test_standard_attention_is_as_exact_as_the_formula() -> None:
    assert_exact(AttentionSpec(preset="standard"), torch.device("cpu"))


def row_sums(preset: str, runner: Runner) -> Tensor:
    """rowsum(dS) over the keys plus the sink's term of 64 rows, each the only one of its head, relative to the largest term.

    A feature of K that is 1 where that of Q is 0 has scale * rowsum(dS) as its dQ.
    """
    generator = torch.Generator().manual_seed(0)
    q, do = (torch.randn(1, 1, 64, 16, generator=generator) for _ in range(2))
    k, v = (torch.randn(1, T, 64, 16, generator=generator) + 1 for _ in range(2))
    q[..., 0], k[..., 0] = 0, 1
    given = (
        *(x.to(runner.device) for x in (q, k, v)),
        torch.full((64,), 1.0, device=runner.device),
        do.to(runner.device),
    )
    sites = ("probabilities=bf16", "output=bf16")
    _, dq, *_, dsinks = computed(given, AttentionSpec(preset=preset, sites=sites, backend=runner.backend), causal=False)
    return (dq[0, 0, :, 0] / 0.25 + dsinks) / dsinks.abs().max()


def test_by_flash_consistent_rows_of_ds_sum_to_zero_over_the_keys_and_the_sink(runner: Runner) -> None:
    assert row_sums("flash_consistent", runner).abs().max() < 1e-5
    assert row_sums("flash", runner).abs().max() > 1e-3


@here
def test_sinks_of_the_drop_in_are_learned() -> None:
    given = tensors(torch.device("cpu"))
    leaves = [x.transpose(1, 2).contiguous().requires_grad_() for x in given[:3]]
    sinks = given[3].clone().requires_grad_()
    o = scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True, scale=0.25, sinks=sinks)
    (found,) = torch.autograd.grad(o, sinks, given[4].transpose(1, 2))
    exact = formula(given, torch.float64)[4]
    torch.testing.assert_close(found.double(), exact, rtol=0.02, atol=0.02 * exact.abs().max().item())


@here
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"sinks": torch.zeros(3)}, "sinks have shape [3]: expected [4]"),
        ({"sinks": torch.zeros(4), "numerics": "sdpa_math"}, "it has no attention sink"),
        ({"sinks": torch.zeros(4), "numerics": "flash_corrected_rows"}, "row_residual"),
    ],
)
def test_sinks_that_cannot_be_served_are_refused(change: dict[str, Any], reason: str) -> None:
    x = torch.zeros(1, 4, 8, 16)
    with pytest.raises((ValueError, UserError)) as error:
        scaled_dot_product_attention(x, x, x, **change)
    assert reason in str(error.value)
