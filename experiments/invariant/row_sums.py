"""r = rowsum(dS) of every world and delta on the same random tensors, relative to dQ: python experiments/invariant/row_sums.py

Writes row_sums.csv. K's feature 0 is 1 in every key, so that dQ has scale * r there. [B, T, H, D] = [1, 256, 4, 32], FP32 tensors.
"""

from __future__ import annotations

import csv
from pathlib import Path

import torch
from run import DELTAS, WORLDS

import attention
from attention import AttentionConfig, AttentionSpec

SHAPE = (1, 256, 4, 32)
LARGE = 2.0e5
FMA = ("probabilities=m7", "output=m7", "score_gradients=m7")
ALL = {
    **{world: (*setting, 5.0) for world, setting in WORLDS.items()},
    "fma_exponent": ("hardware", FMA, LARGE),
    "subtracted_exponent": ("hardware", (*FMA, "exponent=subtracted", "saved_statistics=max_and_sum"), LARGE),
}


def tensors(logit: float) -> list[torch.Tensor]:
    """q, k, v, dO; at large logits rows have two keys near their maximum, and the others far below."""
    generator = torch.Generator().manual_seed(3)
    q, k, v, do = (torch.randn(SHAPE, generator=generator) for _ in range(4))
    k[..., 0] = 1.0
    if logit == LARGE:
        # S = logit * (a level for all keys) + a spread of a few units
        q[..., 0] = logit * SHAPE[-1] ** 0.5 * (0.5 + torch.rand(SHAPE[:3], generator=generator))
    return [q, k, v, do]


def row_sums(world: str, delta: str) -> float:
    base, sites, logit = ALL[world]
    q, k, v, do = tensors(logit)
    spec = AttentionSpec(numerics=base, sites=(*sites, *DELTAS[delta]), backend="flash_reference")
    plan = AttentionConfig(default=spec).resolve(1, SHAPE[2])[0]
    q.requires_grad_()
    o = attention.run(q, k, v, plan, rounding_seed=torch.tensor(0))
    (dq,) = torch.autograd.grad(o, q, do.to(o.dtype))
    return (dq[..., 0].square().mean().sqrt() / dq[..., 1:].square().mean().sqrt()).item()


def main() -> None:
    with (Path(__file__).resolve().parent / "row_sums.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("world", *DELTAS))
        for world in ALL:
            row = [f"{row_sums(world, delta):.2e}" for delta in DELTAS]
            print(world, *row)
            writer.writerow((world, *row))


if __name__ == "__main__":
    main()
