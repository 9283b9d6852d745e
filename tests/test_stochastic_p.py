"""P_bar rounded stochastically, by ``flash_reference``: what the draws depend on, and what they leave alone.

Their bits are in tests/test_rounding.py, their bias in tests/test_bias.py, the kernels in tests/test_flash_triton.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_cases import make, run, share_apart, weights_seen

import attention
from attention import AttentionConfig, AttentionSpec

TILES = ("tile_q=16", "tile_k=8")
STOCHASTIC_P = AttentionSpec(preset="flash_stochastic_p")
SHAPE = (2, 45, 2, 16)


@pytest.mark.parametrize("tiles", [(0, 0), (1, 1), (7, 64), (64, 7), (13, 0), (16, 20)])
def test_p_bar_is_drawn_alike_in_any_tiles(tiles: tuple[int, int]) -> None:
    spec = replace(STOCHASTIC_P, sites=(f"tile_q={tiles[0]}", f"tile_k={tiles[1]}"))
    whole = weights_seen(STOCHASTIC_P, torch.device("cpu"), SHAPE)
    assert share_apart(weights_seen(spec, torch.device("cpu"), SHAPE), whole) == 0


def test_p_bar_is_drawn_anew_for_another_seed_and_otherwise_than_to_nearest() -> None:
    """A value at x between its neighbours: two draws differ with probability 2 x (1 - x), draw and nearest with min(x, 1 - x)."""
    device = torch.device("cpu")
    drawn, again, nearest = (
        weights_seen(spec, device, SHAPE, seed=seed)
        for spec, seed in ((STOCHASTIC_P, 3), (STOCHASTIC_P, 4), (AttentionSpec(), 3))
    )
    assert share_apart(drawn, again) == pytest.approx(1 / 3, abs=0.05)
    assert share_apart(drawn, nearest) == pytest.approx(1 / 4, abs=0.05)


def test_p_bar_is_drawn_apart_in_every_batch_entry_and_head() -> None:
    """All rows and heads with the same q and k: what differs are the draws."""
    q = torch.zeros(2, 8, 2, 16, dtype=torch.bfloat16)
    k = torch.randn(1, 8, 1, 16, generator=torch.Generator().manual_seed(0)).expand(q.shape).bfloat16()
    plan = AttentionConfig(flash_backend="flash_reference", default=STOCHASTIC_P).resolve(1, 2)[0]
    q = q + 1
    o = attention.run(q, k, k, plan, rounding_seed=torch.tensor(0))
    heads = o.transpose(1, 2).flatten(0, 1)
    assert all(not torch.equal(heads[i], heads[j]) for i in range(4) for j in range(i))


@pytest.mark.parametrize("preset", ["flash_delta_from_p", "flash_recompute_o"])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_the_backward_pass_has_nothing_of_the_draws_of_p_bar_but_o(preset: str, softcap: float) -> None:
    """L and P are of unrounded P_bar, and P^T dO rounds to nearest: where delta does not read O, gradients are the same bits."""
    p = make("random", torch.bfloat16, torch.device("cpu"))
    plain, drawn = (
        run(p, AttentionSpec(preset=preset, sites=(*TILES, *extra)), softcap=softcap)
        for extra in ((), ("probabilities_rounding=stochastic",))
    )
    assert not torch.equal(plain[0], drawn[0])
    assert all(torch.equal(a, b) for a, b in zip(plain[1:], drawn[1:], strict=True))


def test_delta_reads_the_o_that_p_bars_draw_made() -> None:
    p = make("random", torch.bfloat16, torch.device("cpu"))
    one, other = (run(p, STOCHASTIC_P, seed=seed) for seed in (1, 2))
    assert not torch.equal(one[1], other[1])
    assert torch.equal(one[3], other[3])
