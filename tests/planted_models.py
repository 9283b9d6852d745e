"""Small GPTs in BF16 with the conditions of arXiv 2510.04212 planted in one head, and data to go with them.

What a planted head has: its first two keys share every row's maximum, all of V has one sign, and dO has one sign. Positions
carry it: the embedding of positions 0 and 1 points along FIRST, that of the others along OTHER, both long against the tokens', so that
keys depend on them alone while V depends on the tokens too.

Legend: B batch, T positions, C width, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attention import AttentionConfig, AttentionSpec
from autopsy.measure import Subject
from model import GPT, ModelConfig, initialize
from probes.capture import LayerCapture, capture

SHAPE = ModelConfig(n_layer=3, n_head=4, n_embd=64, block_size=16, vocab_size=64, vocab_multiple=1, bias=True)
T, D, BATCHES, SEQUENCES = 16, 16, 3, 16
FREQUENT = 5
"""The token that most targets are."""
LONG = 100.0
"""Length of the planted position embeddings."""
PAPER = AttentionSpec(numerics="rounded_forward")


def healthy(seed: int, spec: AttentionSpec = PAPER) -> GPT:
    """Random weights, of sizes that give every head scores and values of its own."""
    model = GPT(
        SHAPE, AttentionConfig(flash_backend="flash_reference", default=spec).resolve(SHAPE.n_layer, SHAPE.n_head)
    )
    initialize(model, seed)
    with torch.no_grad():
        model.transformer.wte.weight *= 50
        for attention in model.attentions():
            attention.c_attn.weight *= 20
    return model.train()


@torch.no_grad()
def plant(model: GPT, layer: int, head: int, *, seed: int) -> GPT:
    """Change the weights of one head in place; the other heads do not read the planted directions."""
    generator = torch.Generator().manual_seed(seed)
    C = SHAPE.n_embd
    rows = slice(head * D, (head + 1) * D)
    q_rows, k_rows, v_rows = (slice(part * C + head * D, part * C + (head + 1) * D) for part in range(3))
    first, other = torch.zeros(C), torch.zeros(C)
    # Unit vectors without a mean, which layer norm would take away.
    first[:2], other[2:4] = torch.tensor([1.0, -1.0]) / 2**0.5, torch.tensor([1.0, -1.0]) / 2**0.5
    model.transformer.wte.weight[:, :4] = 0
    model.transformer.wpe.weight.zero_()
    model.transformer.wpe.weight[:2] = LONG * first
    model.transformer.wpe.weight[2:] = LONG * other
    for each in model.attentions():
        each.c_attn.weight[:, :4] = 0
    attention = model.attentions()[layer]
    weight, bias = attention.c_attn.weight, attention.c_attn.bias
    weight[q_rows] = 0
    weight[k_rows] = 0
    bias[q_rows.start] = D**0.5
    # Tokens vary the size of q by a fifth, so that rows do not share the rounding errors of their P_bar.
    weight[q_rows.start, 4:] = (
        0.2 * D**0.5 / 0.6 * torch.nn.functional.normalize(torch.randn(C - 4, generator=generator), dim=0)
    )
    weight[q_rows.start, 4:] *= C**0.5 / 8
    # Layer norm makes the long part sqrt(C) long: scores are about r in 1 .. 5 for the first two keys and -10 for the others.
    weight[k_rows.start] = ((1 + 4 * torch.rand([], generator=generator)) * first - 10 * other) / C**0.5
    weight[v_rows] = torch.randn(D, C, generator=generator)
    weight[v_rows, :4] = 0
    bias[v_rows] = -3.0 if seed % 2 else 3.0
    # The gradient of the logits pulls towards the frequent token's embedding.
    towards = model.transformer.wte.weight[FREQUENT]
    attention.c_proj.weight[:, rows] = 0.02 * torch.nn.functional.normalize(towards, dim=0)[:, None]
    return model


def data(seed: int, batch: int, frequent: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * seed + batch)
    tokens = torch.randint(0, SHAPE.vocab_size, (SEQUENCES, T), generator=generator)
    targets = torch.randint(0, SHAPE.vocab_size, (SEQUENCES, T), generator=generator)
    return tokens, torch.where(torch.rand(SEQUENCES, T, generator=generator) < frequent, FREQUENT, targets)


def subject(model: GPT, seed: int) -> Subject:
    """Most of its targets are one token, so that dO has a direction."""

    def look(batch: int, layers: Sequence[int] | None) -> list[LayerCapture]:
        return capture(model, *data(seed, batch, 0.9), layers, autocast=torch.autocast("cpu", dtype=torch.bfloat16))

    return Subject(
        name="planted",
        n_layer=SHAPE.n_layer,
        n_head=SHAPE.n_head,
        batches=BATCHES,
        capture=look,
        w_q=lambda layer: model.w_q(layer).detach(),
    )
