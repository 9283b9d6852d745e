"""Captured attention is what the model computed with, a file gives it back to the bit, and what is none of it is one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from attention.check.captured import Captured, capture, load


class Model(nn.Module):
    """Two layers of attention with grouped keys; it keeps what each read, with its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(32, 64) for _ in range(2))
        self.seen: list[tuple[Tensor, ...]] = []

    def forward(self, x_BTC: Tensor, **settings: Any) -> Tensor:
        for projection in self.projections:
            q, k, v = projection(x_BTC).bfloat16().unflatten(-1, (8, 8)).transpose(1, 2).split((4, 2, 2), 1)
            o = scaled_dot_product_attention(q, k, v, enable_gqa=True, scale=0.5, **({"is_causal": True} | settings))
            o.retain_grad()
            self.seen.append((q, k, v, o))
            x_BTC = o.transpose(1, 2).flatten(2).float()
        return x_BTC


def captured() -> tuple[Captured, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model = Model()
    with capture(model, [1], {"step": 7}) as calls:
        model(torch.randn(2, 24, 32)).square().sum().backward()
    return calls[1], model.seen[1]


def bits(call: Captured) -> list[Tensor]:
    return [call.q, call.k, call.v, call.do]


def test_what_is_captured_is_what_attention_read_and_its_gradient() -> None:
    call, (q, k, v, o) = captured()
    assert all(torch.equal(x, y) for x, y in zip(bits(call), (q, k, v, o.grad), strict=True))
    assert (call.scale, call.causal, call.about) == (0.5, True, {"step": 7, "layer": 1})


def test_a_file_gives_back_a_part_to_the_bit(tmp_path: Path) -> None:
    call, (q, k, v, o) = captured()
    part = call.part(heads=(3, 0), sequences=1, length=10)
    part.save(tmp_path / "a.zip")
    back = load(tmp_path / "a.zip")
    expected = (q[:1, [3, 0], :10], k[:1, [1, 0], :10], v[:1, [1, 0], :10], o.grad[:1, [3, 0], :10])
    assert all(torch.equal(x, y) for x, y in zip(bits(back), expected, strict=True))
    assert back.about == {"step": 7, "layer": 1, "heads": [3, 0], "sequences": 1, "length": 10}
    part.save(tmp_path / "b.zip")
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()


def test_what_is_not_plain_attention_or_did_not_happen_is_refused() -> None:
    model, x = Model(), torch.randn(1, 24, 32)
    mask = torch.ones(24, 24, dtype=torch.bool).tril()
    with capture(model, [0]) as calls:
        model(x, is_causal=False, attn_mask=mask).sum().backward()
    assert calls[0].causal
    with pytest.raises(ValueError, match="no mask but the causal one"), capture(model, [0]):
        model(x, is_causal=False, attn_mask=mask.tril(-1) | torch.eye(24, dtype=torch.bool).roll(1, 1))
    with pytest.raises(ValueError, match="one of the 2 calls"), capture(model, [2]):
        model(x).sum().backward()
    with pytest.raises(ValueError, match="expected the backward pass"), capture(model, [1]):
        model(x)
