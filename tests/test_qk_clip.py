"""training/qk_clip.py: the maxima that attention keeps, and the clip."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attention import AttentionConfig, AttentionSpec
from model import GPT, QUERY_CHUNK, ModelConfig, initialize, largest_logits
from training import qk_clip
from training.qk_clip import clip_factors, clip_qk, forget_logits

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


def logits_of(attn: torch.nn.Module, dtype: torch.dtype = torch.float32) -> Tensor:
    """Logits [H, T, T] of one layer for a fixed input, without mask."""
    x = torch.randn(16, C, generator=torch.Generator().manual_seed(6), dtype=torch.float32).to(dtype)
    q, k = (x @ attn.c_attn.weight.to(dtype).T + attn.c_attn.bias.to(dtype))[:, : 2 * C].split(C, dim=-1)
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
    assert torch.equal(largest_logits(q, k), causal.amax(dim=(0, 2, 3)))


def test_logits_of_the_future_do_not_count() -> None:
    q, k = torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4)
    q[0, 0], k[0, 1] = 5.0, 5.0  # the first query meets the second key: not allowed to
    assert largest_logits(q, k).item() == 0.0


def test_large_negative_logits_do_not_count() -> None:
    q = torch.ones(1, 1, 2, 4)
    assert largest_logits(q, torch.stack([-q[:, :, 0], q[:, :, 0]], dim=2)).tolist() == [-2.0, 2.0]


def test_largest_logits_are_float32_under_autocast() -> None:
    q, k = (torch.randn(1, 8, 2, 4, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
    with torch.autocast("cpu", torch.bfloat16):
        inside = largest_logits(q, k)
    assert torch.equal(inside, largest_logits(q, k))


def test_maxima_run_over_micro_steps() -> None:
    model, seen = make(), []
    for seed in (1, 2, 3):
        fresh = make()
        fresh(tokens(seed))
        seen.append(fresh.attentions()[1].max_logit_H)
        model(tokens(seed))
    assert torch.equal(model.attentions()[1].max_logit_H, torch.stack(seen).amax(dim=0))


def test_evaluation_leaves_the_maxima_alone() -> None:
    model = make().eval()
    model(tokens())
    assert model.attentions()[0].max_logit_H.tolist() == [-math.inf] * 4


def test_keeping_maxima_changes_no_gradient() -> None:
    gradients = []
    for tau in (0.0, 1.0):
        model = make(qk_clip_tau=tau)
        model(tokens(1), tokens(2))[1].backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_maxima_are_no_part_of_the_state() -> None:
    assert make().state_dict().keys() == make(qk_clip_tau=0.0).state_dict().keys()


def test_gamma_is_tau_over_the_maximum_and_at_most_one() -> None:
    assert clip_factors(torch.tensor([[400.0, 100.0, 50.0, -3.0]]), 100.0).tolist() == [[0.25, 1.0, 1.0, 1.0]]


def test_maxima_that_are_not_finite_clip_nothing() -> None:
    assert clip_factors(torch.tensor([math.inf, math.nan, -math.inf]), 100.0).tolist() == [1.0, 1.0, 1.0]


def test_a_gamma_of_a_quarter_scales_logits_to_the_last_bit() -> None:
    model = make()
    before = logits_of(model.attentions()[0])
    set_maxima(model, [1.0, 4.0, 0.5, 4.0], [0.0] * 4)  # sqrt(1 / 4) is a power of two: no rounding anywhere
    clip_qk(model)
    after = logits_of(model.attentions()[0])
    assert torch.equal(after[[1, 3]], 0.25 * before[[1, 3]])
    assert torch.equal(after[[0, 2]], before[[0, 2]])


def test_any_gamma_scales_logits_up_to_the_rounding_of_the_weights() -> None:
    model = make()
    attn = model.attentions()[1]
    x = torch.randn(16, C, generator=torch.Generator().manual_seed(6)).double()
    before, size = logits_of(attn, torch.float64), torch.zeros(4, 16, 16, dtype=torch.float64)
    q, k = (x.abs() @ attn.c_attn.weight.double().abs().T + attn.c_attn.bias.double().abs())[:, : 2 * C].split(
        C, dim=-1
    )
    for head in range(4):
        rows = slice(head * D, (head + 1) * D)
        size[head] = q[:, rows] @ k[:, rows].T / math.sqrt(D)
    maxima = [3.0, 7.0, 1.7, 11.0]
    set_maxima(model, [0.0] * 4, maxima)
    clip_qk(model)
    gamma = clip_factors(torch.tensor(maxima), 1.0).double()[:, None, None]
    # Relative errors: sqrt 1/2 ulp and each product 1/2 ulp, twice (q and k) = 2 eps/2 * 2; gamma's own is common to both sides.
    bound = 2 * torch.finfo(torch.float32).eps * gamma * size
    assert ((logits_of(attn, torch.float64) - gamma * before).abs() <= bound).all()


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


def test_values_and_their_biases_are_left_alone() -> None:
    model, original = make(), make()
    set_maxima(model, [9.0] * 4, [9.0] * 4)
    clip_qk(model)
    for attn, old in zip(model.attentions(), original.attentions(), strict=True):
        assert torch.equal(attn.c_attn.weight[2 * C :], old.c_attn.weight[2 * C :])
        assert torch.equal(attn.c_attn.bias[2 * C :], old.c_attn.bias[2 * C :])


def test_a_model_without_biases_is_clipped() -> None:
    config = replace(TINY, bias=False)
    model = GPT(config, AttentionConfig(default=AttentionSpec(preset="standard")).resolve(2, 4))
    initialize(model, 1)
    before = model.w_k(1).clone()
    set_maxima(model, [0.0] * 4, [4.0] * 4)
    clip_qk(model)
    assert torch.equal(model.w_k(1), 0.5 * before)


def test_nothing_over_tau_changes_no_bit() -> None:
    model, original = make(), make()
    set_maxima(model, [1.0] * 4, [-math.inf] * 4)
    clip_qk(model)
    pairs = zip(model.parameters(), original.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


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


def test_clip_without_tau_is_an_error() -> None:
    with pytest.raises(ValueError, match="qk_clip_tau"):
        clip_qk(make(qk_clip_tau=0.0))
