"""Planted cases: the head with tied maxima, V and dO of one sign is named, and no other; healthy models are not accused."""

from __future__ import annotations

import pytest
import torch
from planted_models import BATCHES, SHAPE, T, healthy, plant, subject

from attention import AttentionSpec
from autopsy.measure import examine

SEEDS = range(8)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_planted_head_is_named_and_no_other(seed: int) -> None:
    layer, head = seed % SHAPE.n_layer, seed % SHAPE.n_head
    findings = examine(subject(plant(healthy(seed), layer, head, seed=seed), seed))
    assert [(h.layer, h.head) for h in findings.biased] == [(layer, head)]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_healthy_model_is_not_accused(seed: int) -> None:
    findings = examine(subject(healthy(seed), seed))
    assert {h.finding for h in findings.heads} == {"unbiased"}


@pytest.mark.parametrize("seed", range(5))
def test_ties_and_one_signed_v_alone_are_not_enough(seed: int) -> None:
    """dO has no sign of its own: O is biased, and is seen to be, but delta is not."""
    head = seed % SHAPE.n_head
    model = plant(healthy(seed), 1, head, seed=seed, one_signed_do=False)
    findings = examine(subject(model, seed, frequent=0.0))
    evidence = findings.head(1, head)
    assert evidence.rows_of_ones > 0.5
    assert evidence.one_signed == 1
    assert evidence.output_outward_z > 3
    assert findings.biased == []


@pytest.mark.parametrize("preset", ["flash_delta_from_p", "flash_recompute_o", "standard"])
def test_a_repaired_planted_model_is_not_accused(preset: str) -> None:
    model = plant(healthy(1, AttentionSpec(preset=preset, numerics="rounded_forward")), 1, 2, seed=1)
    assert examine(subject(model, 1)).biased == []


def test_the_same_weights_under_kernel_numerics_are_not_accused() -> None:
    """Kernels divide by l before they round: with all of V alike, ties go either way (tests/test_bias.py)."""
    for seed in range(3):
        model = plant(healthy(seed, AttentionSpec(numerics="hardware")), 1, 2, seed=seed)
        assert examine(subject(model, seed)).biased == []


def test_the_chain_of_the_planted_head() -> None:
    """Every link of Figure 1 is there in the planted head, and none in the others."""
    findings = examine(subject(plant(healthy(3), 1, 3, seed=3), 3))
    planted = findings.head(1, 3)
    assert planted.tied_rows > 0.5
    assert planted.rows_of_ones > 0.5
    assert planted.one_signed == 1
    assert planted.output_outward > 0.2
    assert planted.coherence > 0.5
    assert planted.pull > 0.5
    assert planted.top_share > 0.9
    others = [h for h in findings.heads if (h.layer, h.head) != (1, 3)]
    assert max(h.rows_of_ones for h in others) < 0.2
    assert max(h.coherence for h in others) < 0.2
    assert max(h.pull for h in others) < 0.2


def test_norm_and_logit_are_those_of_the_model() -> None:
    model = healthy(0)
    findings = examine(subject(model, 0))
    rows = model.w_q(2)[16:32]
    assert findings.head(2, 1).w_q_norm == pytest.approx(torch.linalg.matrix_norm(rows, 2).item(), rel=1e-5)
    largest = -torch.inf
    for batch in range(BATCHES):
        layer = subject(model, 0).capture(batch, [2])[0]
        q, k = layer.q_BTHD[:, :, 1].float(), layer.k_BTHD[:, :, 1].float()
        logits = (q @ k.mT / 4).masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf)
        largest = max(largest, logits.max().item())
    assert findings.head(2, 1).max_logit == pytest.approx(largest, rel=1e-5)
