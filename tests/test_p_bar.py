"""P_bar as P_bar V reads it, in the reference: drawn (site ``probabilities_rounding``), and what O is divided by (site ``divisor``).

The bits of the draws are in test_rounding.py, their bias in test_bias.py, the kernels in test_kernels.py.
"""

from __future__ import annotations

import pytest
import torch
from attention_cases import Problem, make, run, share_apart, weights_seen
from torch import Tensor

from attention import AttentionSpec

CPU = torch.device("cpu")
TILES = ("tile_q=16", "tile_k=16")
WHOLE = ("tile_q=0", "tile_k=0", "exponent=subtract_first", "output=fp32")
STOCHASTIC = AttentionSpec(preset="flash_stochastic_p")
SHAPE = (2, 45, 2, 16)


def random() -> Problem:
    return make("random", torch.bfloat16, CPU)


def one_value() -> Problem:
    """V is the same at all keys."""
    p = random()
    return Problem(p.q, p.k, p.v[:, :1].expand_as(p.v).contiguous(), p.do)


def equal(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def by_divisor(p: Problem, *sites: str, tiles: tuple[str, ...] = TILES, seed: int = 0) -> list[tuple[Tensor, ...]]:
    """With O divided by the sum of the rounded P_bar, and by l."""
    return [run(p, AttentionSpec(sites=(*tiles, f"divisor={d}", *sites)), seed=seed) for d in ("rounded", "unrounded")]


@pytest.mark.parametrize("tiles", [(0, 0), (1, 1), (7, 64), (64, 7), (16, 20)])
def test_p_bar_is_drawn_alike_in_any_tiles(tiles: tuple[int, int]) -> None:
    spec = AttentionSpec(preset="flash_stochastic_p", sites=(f"tile_q={tiles[0]}", f"tile_k={tiles[1]}"))
    assert share_apart(weights_seen(spec, CPU, SHAPE), weights_seen(STOCHASTIC, CPU, SHAPE)) == 0


@pytest.mark.parametrize("delta", ["rowsum_p_dp", "recomputed_o"])
@pytest.mark.parametrize("site", ["probabilities_rounding=stochastic", "divisor=rounded"])
def test_the_backward_pass_has_nothing_of_it_but_o(site: str, delta: str) -> None:
    """L and P are of unrounded P_bar: where delta does not read O, gradients are the same bits."""
    plain, other = (run(random(), AttentionSpec(sites=(*TILES, f"delta={delta}", *extra))) for extra in ((), (site,)))
    assert not torch.equal(plain[0], other[0])
    assert equal(plain[1:], other[1:])


def test_o_is_a_mean_by_the_weights_that_are_read() -> None:
    p = random()
    q, k, v = (x.double().transpose(1, 2) for x in (p.q, p.k, p.v))
    s = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(torch.ones(40, 40, dtype=torch.bool).triu(1), -torch.inf)
    p_bar = torch.exp(s - s.amax(dim=-1, keepdim=True)).to(p.q.dtype).double()
    expected = (p_bar @ v / p_bar.sum(dim=-1, keepdim=True)).transpose(1, 2)
    found, plain = (x[0].double() for x in by_divisor(p, tiles=WHOLE))
    assert (found - expected).norm() / expected.norm() < 1e-5  # but for P_bar at a boundary of BF16
    assert (plain - expected).norm() / expected.norm() > 1e-4


def test_the_sum_is_of_what_was_drawn() -> None:
    p = one_value()
    drawn = by_divisor(p, "probabilities_rounding=stochastic", "output=fp32", seed=3)[0][0]
    assert (drawn - p.v.float()).abs().max() < 2.0**-20 * p.v.float().abs().max()
