"""The row normalizer: Algorithm 3, its range limit, and the bound of the safe form."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention.mask import NO_MASK
from attention.numerics import Numerics
from attention.plan import AttentionSpec
from attention.reference.flash import _forward
from attention.reference.stabilize import tile_row_max

PAPER_V2 = AttentionSpec(preset="flash_stable").resolve()
PAPER_V1 = AttentionSpec(preset="flash_stable_exact_ties").resolve()
SAFE = AttentionSpec(preset="flash_stable_safe").resolve()


def row_max(scores: list[float], numerics: Numerics) -> float:
    return tile_row_max(torch.tensor([scores]), numerics).item()


def test_algorithm_3_by_cases() -> None:
    assert row_max([3.0, 1.0], PAPER_V2) == 3.0  # no tie: unchanged
    assert row_max([3.0, 3.0, 1.0], PAPER_V2) == 6.0  # r_m > 0: beta * r_m
    assert row_max([-3.0, -3.0, -9.0], PAPER_V2) == 0.0  # r_m < 0: 0
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


@settings(max_examples=200, deadline=None)
@given(st.lists(finite, min_size=1, max_size=8))
def test_the_shift_above_the_row_maximum_is_bounded_by_the_cap(scores: list[float]) -> None:
    tile = torch.tensor([scores + scores], dtype=torch.float32)
    shift = (tile_row_max(tile, SAFE).double() - tile.amax(dim=-1, keepdim=True).double()).item()
    # The addition rounds to FP32: half a unit in the last place beyond the cap at the most.
    assert 0 <= shift <= SAFE.row_max_cap + abs(max(scores)) * 2.0**-24 + 7 * 2.0**-23
