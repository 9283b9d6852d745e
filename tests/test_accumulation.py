"""The sum over keys of one row: against exact arithmetic, and on a row whose every carry is known."""

from __future__ import annotations

import math

import pytest
import torch
from layer_captures import make_layer, random_layer, tied_layer

from attention import AttentionSpec
from probes.accumulation import accumulate, count_ones


def test_the_last_sum_is_o_bar() -> None:
    layer = random_layer()
    sums = accumulate(layer, 1, 2, 20, 5)
    s = layer.q_BTHD[1, 20, 2].double() @ layer.k_BTHD[1, :21, 2].double().T * layer.scale
    p_bar = torch.exp(s - s.max())
    expected = (p_bar * layer.v_BTHD[1, :21, 2, 5].double()).sum()
    assert sums.high_S[-1].item() == pytest.approx(expected.item(), rel=1e-5)
    assert sums.low_S[-1].item() == sums.low_S[-1].bfloat16().item()
    assert sums.error_S.shape == (21,)


def test_ones_and_ties_of_a_tied_head() -> None:
    ones = count_ones(tied_layer())
    assert (ones.ones_BHT[:, 1, 1:] == 2).all()
    assert (ones.ones_BHT[:, 1, 0] == 1).all()
    assert all((ties[:, 1, 1:] == 2).all() for ties in ones.ties_BHT.values())
    assert ones.ones_BHT[:, [0, 2]].float().mean() < 1.2


def test_a_probability_rounds_to_one_within_2_to_the_minus_9() -> None:
    """1e-3 misses half of the band in which BF16 rounds exp(S - m) to 1."""
    q = torch.zeros(1, 2, 1, 2)
    q[..., 0] = 1.0
    k = torch.zeros(1, 2, 1, 2)
    k[0, 0, 0, 0] = -0.0015
    layer = make_layer(q, k, torch.ones_like(q), torch.ones_like(q), scale=1.0)
    counts = count_ones(layer)
    assert counts.ones_BHT[0, 0, 1] == 2
    assert {name: ties[0, 0, 1].item() for name, ties in counts.ties_BHT.items()} == {"exact": 1, "1e-3": 1, "2^-9": 2}


def test_a_probability_that_is_drawn_is_one_as_often_as_it_is_near() -> None:
    """exp(-0.0015) = 0.9985 lies 0.616 of the way from 1 - 2^-8 to 1: rounded to nearest it is always 1."""
    n = 2048
    q = torch.zeros(n, 2, 1, 2)
    q[..., 0] = 1.0
    k = torch.zeros(n, 2, 1, 2)
    k[:, 0, 0, 0] = -0.0015
    spec = AttentionSpec(preset="flash_stochastic_p")
    layer = make_layer(q, k, torch.ones_like(q), torch.ones_like(q), spec=spec, scale=1.0)
    share = (count_ones(layer).ones_BHT[:, 0, 1] == 2).double().mean().item()
    chance = 1 - (1 - math.exp(k[0, 0, 0, 0].bfloat16().item())) * 2**8
    assert share == pytest.approx(chance, abs=4 * (chance * (1 - chance) / n) ** 0.5)
    # The sum over keys of a single row starts from the same draws.
    drawn = [accumulate(layer, b, 0, 1, 0).one_S[0].item() for b in range(16)]
    assert drawn == (count_ones(layer).ones_BHT[:16, 0, 1] == 2).tolist()
