"""GELU's formula and the look-up's gradient against torch's own and fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fused.embedding import lookup
from fused.gelu import gelu


def value_and_slope(function, h: Tensor) -> tuple[Tensor, Tensor]:
    h = h.detach().requires_grad_()
    a = function(h)
    (slope,) = torch.autograd.grad(a, h, torch.ones_like(a))
    return a.detach().double(), slope.double()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gelu_and_its_slope_are_as_near_to_fp64_as_torchs(dtype: torch.dtype, device: torch.device) -> None:
    h = (3 * torch.randn(50_000, generator=torch.Generator().manual_seed(0))).to(dtype).to(device)
    exact, by_torch, ours = (
        value_and_slope(f, x) for f, x in ((functional.gelu, h.double()), (functional.gelu, h), (gelu, h))
    )
    for true, theirs, found in zip(exact, by_torch, ours, strict=True):
        assert (found - true).abs().max() <= 1.5 * (theirs - true).abs().max()
        assert (found - true).square().mean() <= 1.1 * (theirs - true).square().mean()


def test_gelu_of_zero_infinity_and_nan(device: torch.device) -> None:
    h = torch.tensor([0.0, -0.0, 1e4, -1e4, torch.nan], dtype=torch.bfloat16, device=device)
    assert torch.equal(gelu(h)[:4], torch.tensor([0.0, 0.0, 1e4, 0.0], dtype=torch.bfloat16, device=device))
    assert gelu(h)[4].isnan()


def test_the_look_up_and_its_gradient_are_torchs(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(37, 8, generator=generator).to(device)
    # Half of all tokens are one.
    tokens = (torch.randint(37, (4, 50), generator=generator) * (torch.rand(4, 50, generator=generator) < 0.5)).to(
        device
    )
    results = []
    for function in (lookup, functional.embedding):
        weight = table.clone().requires_grad_()
        found = function(tokens, weight)
        (gradient,) = torch.autograd.grad(found.square().sum(), weight)
        results.append((found.detach(), gradient))
    for ours, torchs in zip(*results, strict=True):
        assert torch.equal(ours, torchs)


def test_the_table_gradient_is_a_sound_operator() -> None:
    arguments = (torch.randn(12, 8), torch.randint(5, (12,)), 5)
    torch.library.opcheck(
        torch.ops.fused.table_gradient.default, arguments, test_utils=("test_schema", "test_faketensor")
    )
