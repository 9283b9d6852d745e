"""What ``capture`` returns is what attention saw and what training differentiates; and it leaves nothing behind."""

from __future__ import annotations

import contextlib
import dataclasses
import math

import pytest
import torch
from torch import Tensor

import attention
from attention import AttentionConfig, AttentionRule, AttentionSpec
from model import GPT, ModelConfig, initialize
from probes.capture import LayerCapture, capture

B, T = 2, 24
BASE = ModelConfig(n_layer=3, n_head=4, n_embd=32, block_size=32, vocab_size=64, vocab_multiple=1)
VARIANTS = {
    "plain": BASE,
    "qk_norm": dataclasses.replace(BASE, qk_norm=True),
    "gated": dataclasses.replace(BASE, gated_attention=True),
    "softcap": dataclasses.replace(BASE, attention_softcap=5.0),
    "llama": dataclasses.replace(BASE, position="rotary", norm="rms", activation="swiglu"),
}
MIXED = AttentionConfig(
    flash_backend="flash_reference",
    default=AttentionSpec(preset="flash"),
    rules=(AttentionRule(layers=(1,), heads=(0, 2), attention=AttentionSpec(preset="flash_o_fp32_delta_nearest")),),
)


def make(config: ModelConfig, plans: AttentionConfig | None = None) -> GPT:
    model = GPT(
        config, (plans or AttentionConfig(flash_backend="flash_reference")).resolve(config.n_layer, config.n_head)
    )
    initialize(model, seed=3)
    return model


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 64, (B, T + 1), generator=torch.Generator().manual_seed(5))
    return tokens[:, :-1], tokens[:, 1:]


def autocast(dtype: torch.dtype = torch.bfloat16) -> contextlib.AbstractContextManager[object]:
    return torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32)


def captured(model: GPT, dtype: torch.dtype = torch.bfloat16, **options: object) -> list[LayerCapture]:
    return capture(model, *batch(), autocast=autocast(dtype), **options)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("plans", [None, MIXED], ids=["one group", "two groups"])
def test_q_k_v_give_o_by_attention_run(variant: str, plans: AttentionConfig | None) -> None:
    for layer in captured(make(VARIANTS[variant], plans)):
        o = attention.run(
            layer.q_BTHD, layer.k_BTHD, layer.v_BTHD, layer.plan, rounding_seed=torch.tensor(0), softcap=layer.softcap
        )
        assert torch.equal(o, layer.o_BTHD)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_of_the_weights_follow_from_what_was_captured(variant: str) -> None:
    """dO through attention and ``c_attn`` gives the gradient of W_v that ``backward`` gives: dO is training's own."""
    model = make(VARIANTS[variant])
    model.train()
    layers = captured(model, torch.float32)
    model(*batch())[1].backward()
    for layer, module in zip(layers, model.attentions(), strict=True):
        q, k, v = (x.clone().requires_grad_() for x in (layer.q_BTHD, layer.k_BTHD, layer.v_BTHD))
        o = attention.run(q, k, v, layer.plan, rounding_seed=torch.tensor(0), softcap=layer.softcap)
        (dv,) = torch.autograd.grad(o, v, layer.do_BTHD)
        expected = module.c_attn.weight.grad[2 * BASE.n_embd :]
        torch.testing.assert_close(dv.flatten(2).flatten(0, 1).T @ layer.x_BTC.flatten(0, 1), expected)


def test_nothing_is_left_on_the_model() -> None:
    config = dataclasses.replace(BASE, qk_clip_tau=100.0)
    model = make(config)
    model.train()
    before = [(set(module.__dict__), dict(module._forward_pre_hooks), module.training) for module in model.modules()]
    random = torch.get_rng_state()
    captured(model)
    assert [(set(m.__dict__), dict(m._forward_pre_hooks), m.training) for m in model.modules()] == before
    assert all(p.grad is None for p in model.parameters())
    assert all(bool((a.max_logit_H == -math.inf).all()) for a in model.attentions())
    assert torch.equal(torch.get_rng_state(), random)
