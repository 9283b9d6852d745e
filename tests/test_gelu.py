"""GELU's formula against torch's own and fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fused.gelu import gelu


def value_and_slope(function, h: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
    h = h.detach().requires_grad_()
    a = function(h)
    (slope,) = torch.autograd.grad(a, h, torch.ones_like(a))
    return a.detach().double(), slope.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gelu_and_its_slope_are_as_near_to_fp64_as_torchs(dtype: torch.dtype, device: torch.device) -> None:
    h = (3 * torch.randn(50_000, generator=torch.Generator().manual_seed(0))).to(dtype).to(device)
    exact, by_torch, ours = (
        value_and_slope(f, x) for f, x in ((functional.gelu, h.double()), (functional.gelu, h), (gelu, h))
    )
    for true, theirs, found in zip(exact, by_torch, ours, strict=True):
        assert (found - true).abs().max() <= 1.5 * (theirs - true).abs().max()
        assert (found - true).square().mean() <= 1.1 * (theirs - true).square().mean()


def test_gelu_of_zero_infinity_and_nan(device: torch.device) -> None:
    h = torch.tensor([0.0, -0.0, 1e4, -1e4, torch.nan], device=device)
    assert torch.equal(gelu(h)[:4], torch.tensor([0.0, 0.0, 1e4, 0.0], device=device))
    assert gelu(h)[4].isnan()
