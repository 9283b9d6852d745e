"""``flash_consistent``: the backward pass has the forward pass's own P and O, so that rows of dS sum to 0 with no product more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attention.numerics import HARDWARE, Numerics
from attention.presets import PRESETS
from attention.reference.flash import flash_reference, row_residuals

SEED = torch.zeros((), dtype=torch.int64)


def numerics(preset: str, **sites: Any) -> Numerics:
    return HARDWARE.with_sites(PRESETS[preset].of(HARDWARE) | sites)


def tensors(logits: float, time: int = 200) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k with a part that all keys have in common, v of one sign, dO: [1, time, 2, 32], BF16."""
    draw = torch.Generator().manual_seed(3)
    q, k, v, do = (torch.randn(1, time, 2, 32, generator=draw) for _ in range(4))
    q = logits * q / q.norm(dim=-1, keepdim=True)
    k = k + 2 * torch.randn(1, 1, 2, 32, generator=draw)
    return tuple(x.bfloat16() for x in (q, k, -v.abs(), do))


def largest_residual(preset: str, logits: float, softcap: float = 0.0, **sites: Any) -> float:
    """The largest |rowsum(dS)|, dS unrounded, over the root mean square of dO V^T: what FP32 sums leave is near 1e-6."""
    q, k, v, do = tensors(logits)
    n = numerics(preset, score_gradients="fp32", tile_k=16, tile_q=32, **sites)
    r, _ = row_residuals(q, k, v, do, n, seed=SEED, scale=1.0, softcap=softcap)
    dp = torch.einsum("bthd,bshd->bhts", do.float(), v.float())
    return (r.abs().max() / dp.square().mean().sqrt()).item()


@pytest.mark.parametrize("logits", [1.0, 30.0, 1e5])
def test_rows_of_ds_sum_to_zero_at_any_size_of_the_logits(logits: float) -> None:
    assert largest_residual("flash_consistent", logits) < 1e-5
    assert largest_residual("flash", logits) > 1e-3


def test_rows_of_ds_sum_to_zero_behind_a_soft_cap() -> None:
    """m counts in natural units there, and is not exactly a multiple of ln 2."""
    assert largest_residual("flash_consistent", 30.0, softcap=20.0) < 2e-5
    assert largest_residual("flash", 30.0, softcap=20.0) > 1e-3


@pytest.mark.parametrize("without", ["row_max_rounding", "backward_probabilities", "delta_output"])
def test_each_of_its_sites_is_needed(without: str) -> None:
    """Tiles are several, so that P_bar of early tiles was formed with an earlier m."""
    assert largest_residual("flash_consistent", 30.0, **{without: getattr(HARDWARE, without)}) > 1e-4


def test_p_bar_does_not_depend_on_the_m_it_was_formed_with() -> None:
    """One tile has one m, many tiles have many: O differs by the order of FP32 sums alone."""
    q, k, v, _ = tensors(30.0)

    def difference(preset: str) -> float:
        whole, tiled = (
            flash_reference(
                q,
                k,
                v,
                numerics(preset, output="fp32", delta_output="output", tile_k=tile).key(),
                seed=SEED,
                scale=1.0,
                causal=True,
                softcap=0.0,
            )
            for tile in (0, 16)
        )
        return ((whole - tiled).abs().max() / v.float().abs().max()).item()

    assert difference("flash_consistent") < 1e-5 < 1e-4 < difference("flash")
