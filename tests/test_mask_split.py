"""``split``: a mask of bools is given back exactly as key ranges and padding, or refused."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attention.mask import Split, split


def joined(ranges: Tensor, keys: Tensor) -> Tensor:
    s = torch.arange(keys.shape[1])
    first, last = ranges[..., None].unbind(1)
    return (s >= first) & (s < last) & keys[:, None]


def test_every_small_mask_that_is_ranges_and_padding_is_found_and_no_other() -> None:
    """All 512 masks of three queries and three keys, against all ranges and all paddings."""
    ranges = torch.tensor(list(itertools.product(range(4), repeat=6))).view(-1, 2, 3)
    ranges = ranges[(ranges.diff(dim=2) >= 0).all(dim=2).all(dim=1)]
    paddings = torch.tensor(list(itertools.product([False, True], repeat=3)))
    servable = {tuple(x) for p in paddings for x in joined(ranges, p.expand(len(ranges), 3)).flatten(1).tolist()}
    for bits in itertools.product([False, True], repeat=9):
        mask = torch.tensor(bits).view(1, 3, 3)
        if bits in servable:
            assert torch.equal(joined(*split(mask)[:2]), mask)
        else:
            with pytest.raises(ValueError, match="batch entry 0: query"):
                split(mask)


@st.composite
def parts(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Ranges and padding of any lengths."""
    B, T, S = (draw(st.integers(1, most)) for most in (3, 12, 12))
    ends = st.lists(st.integers(0, S), min_size=T, max_size=T).map(sorted)
    ranges = torch.tensor([[draw(ends), draw(ends)] for _ in range(B)])
    return ranges, torch.tensor(draw(st.lists(st.booleans(), min_size=B * S, max_size=B * S))).view(B, S)


@given(parts())
def test_ranges_and_padding_are_given_back(given_parts: tuple[Tensor, Tensor]) -> None:
    mask = joined(*given_parts)
    found: Split = split(mask)
    assert torch.equal(joined(found.ranges, found.keys), mask)
    assert (found.ranges.diff(dim=2) >= 0).all()
    assert found.padded != torch.equal(joined(found.ranges, torch.ones_like(found.keys)), mask)
