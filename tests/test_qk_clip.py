"""training/qk_clip.py: the maxima that attention keeps, and the clip."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attention import AttentionConfig, AttentionSpec
from attention.watching.measure import QUERY_CHUNK, largest_logits
from model import GPT, ModelConfig, initialize
from training import qk_clip
from training.qk_clip import clip_qk, forget_logits

TINY = ModelConfig(n_layer=2, n_head=4, n_embd=32, block_size=16, vocab_size=50, vocab_multiple=1, qk_clip_tau=1.0)
D, C = TINY.head_width, TINY.n_embd


def make(**changes: Any) -> GPT:
    """A model with biases that matter and heads whose logits differ in size."""
    config = replace(TINY, bias=True, **changes)
    plans = AttentionConfig(default=AttentionSpec(preset="standard")).resolve(config.n_layer, config.n_head)
    model = GPT(config, plans)
    initialize(model, 3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for attn in model.attentions():
            attn.c_attn.bias.normal_(0.0, 0.5, generator=generator)
            for head in range(config.n_head):
                attn.c_attn.weight[head * D : (head + 1) * D] *= 10.0 * (head + 1)
    return model


def tokens(seed: int = 5) -> Tensor:
    return torch.randint(50, (3, 16), generator=torch.Generator().manual_seed(seed))


def logits_of(attn: torch.nn.Module) -> Tensor:
    """Logits [H, T, T] of one layer for a fixed input, without mask."""
    x = torch.randn(16, C, generator=torch.Generator().manual_seed(6))
    q, k = (x @ attn.c_attn.weight.T + attn.c_attn.bias)[:, : 2 * C].split(C, dim=-1)
    # One head at a time: a batched product may pick another order of summation when a neighbor changes.
    heads = [slice(h * D, (h + 1) * D) for h in range(4)]
    return torch.stack([q[:, rows] @ k[:, rows].T / math.sqrt(D) for rows in heads])


def set_maxima(model: GPT, *rows: list[float]) -> None:
    for attn, row in zip(model.attentions(), rows, strict=True):
        attn.max_logit_H.copy_(torch.tensor(row))


@pytest.mark.parametrize("T", [1, 16, QUERY_CHUNK, 2 * QUERY_CHUNK + 7])
def test_largest_logits_are_those_of_the_whole_causal_matrix(T: int) -> None:
    generator = torch.Generator().manual_seed(7)
    # Integers: every product and sum is exact, whatever the order.
    q, k = (torch.randint(-9, 10, (2, T, 3, 4), generator=generator).float() for _ in range(2))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 2
    causal = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -math.inf)
    assert torch.equal(largest_logits(q, k, scale=0.5), causal.amax(dim=(0, 2, 3)))


def test_maxima_run_over_micro_steps() -> None:
    model, seen = make(), []
    for seed in (1, 2, 3):
        fresh = make()
        fresh(tokens(seed))
        seen.append(fresh.attentions()[1].max_logit_H)
        model(tokens(seed))
    assert torch.equal(model.attentions()[1].max_logit_H, torch.stack(seen).amax(dim=0))


def test_a_gamma_of_a_quarter_scales_logits_to_the_last_bit() -> None:
    model = make()
    before = logits_of(model.attentions()[0])
    set_maxima(model, [1.0, 4.0, 0.5, 4.0], [0.0] * 4)  # sqrt(1 / 4) is a power of two: no rounding anywhere
    clip_qk(model)
    after = logits_of(model.attentions()[0])
    assert torch.equal(after[[1, 3]], 0.25 * before[[1, 3]])
    assert torch.equal(after[[0, 2]], before[[0, 2]])


def test_after_the_clip_the_same_batch_has_its_largest_logit_at_tau() -> None:
    # The first layer's input does not depend on any attention.
    model = make(qk_clip_tau=1.0)
    model(tokens())
    first = model.attentions()[0].max_logit_H.clone()
    clip_qk(model)
    model(tokens())
    second = model.attentions()[0].max_logit_H
    assert (first > 1.0).any()
    torch.testing.assert_close(second, first.clamp(max=1.0))


def test_all_processes_clip_by_the_common_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = torch.tensor([[16.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    monkeypatch.setattr(qk_clip, "all_reduce_max", lambda own: torch.maximum(own, elsewhere))
    model = make()
    before = logits_of(model.attentions()[0])
    set_maxima(model, [4.0, 4.0, 0.0, 0.0], [0.0] * 4)
    clip_qk(model)
    factors = torch.tensor([1 / 16, 1 / 4, 1.0, 1.0])  # squares of powers of two: no rounding anywhere
    assert torch.equal(logits_of(model.attentions()[0]), factors[:, None, None] * before)


@pytest.mark.parametrize("start_over", [clip_qk, forget_logits])
def test_the_next_step_starts_with_no_maxima(start_over: Any) -> None:
    model = make()
    model(tokens())
    start_over(model)
    assert model.attentions()[1].max_logit_H.tolist() == [-math.inf] * 4
