"""r = rowsum(dS) of every world and delta on the same random tensors, relative to dQ: python -m experiments.invariant.row_sums

Writes row_sums.csv. K's feature 0 is 1 in every key, so that dQ has scale * r there. Tensors [1, 256, 4, 32] are FP32, or BF16 where the
world's name ends so.
"""

from __future__ import annotations

import csv
from pathlib import Path

import torch

import attention
from attention import AttentionConfig, AttentionSpec
from experiments.invariant.train_runs import DELTAS, LEVELS, PRESETS, WORLDS, sites_of

SHAPE = (1, 256, 4, 32)
LARGE = 2.0e5
FMA = ("probabilities=m7", "output=m7", "score_gradients=m7")
INDEPENDENT = ("o_fp32_delta_nearest", "o_stochastic_delta_nearest", "o_nearest_delta_stochastic")
"""Presets of the microcosm whose delta reads a second O, rounded by itself."""
# Base, sites, and the level of large logits.
ALL: dict[str, tuple[str, tuple[str, ...], float]] = {
    **{world: (*setting, 2.0 ** LEVELS[world] if world in LEVELS else 0.0) for world, setting in WORLDS.items()},
    "fma_exponent": ("hardware", FMA, LARGE),
    "subtracted_exponent": ("hardware", (*FMA, "exponent=subtract_first", "saved_statistics=max_and_sum"), LARGE),
    "flash_bf16": ("hardware", (), 0.0),
    "published_bf16": ("published", (), 0.0),
    **dict.fromkeys(INDEPENDENT, ("microcosm", (), 0.0)),
}

EXCLUDED = {(world, "consistent") for world in ("l_coarse", "both", "subtracted_exponent")}
"""``flash_consistent`` forms no L, and its m is a power of 2, which the subtracted exponent is not made for."""
EXCLUDED |= {(world, "from_p_subtract_first") for world in ALL if world not in LEVELS}
EXCLUDED |= {(name, delta) for name in INDEPENDENT for delta in DELTAS if delta != "from_o"}


def tensors(world: str) -> list[torch.Tensor]:
    """q, k, v, dO; at large logits all keys of a row share a level and differ by a few units.

    Worlds that are trained have one level, the others one a row.
    """
    generator = torch.Generator().manual_seed(3)
    q, k, v, do = (torch.randn(SHAPE, generator=generator) for _ in range(4))
    k[..., 0] = 1.0
    if level := ALL[world][2]:
        spread = 1.0 if world in LEVELS else 0.5 + torch.rand(SHAPE[:3], generator=generator)
        q[..., 0] = level * SHAPE[-1] ** 0.5 * spread
    dtype = torch.bfloat16 if world.endswith("bf16") else torch.float32
    return [x.to(dtype) for x in (q, k, v, do)]


def row_sums(world: str, delta: str) -> float:
    base, sites, _ = ALL[world]
    q, k, v, do = tensors(world)
    preset = PRESETS.get(delta, f"flash_{world}" if world in INDEPENDENT else "flash")
    spec = AttentionSpec(preset=preset, numerics=base, sites=sites_of(sites, delta), backend="flash_reference")
    plan = AttentionConfig(default=spec).resolve(1, SHAPE[2])[0]
    q.requires_grad_()
    o = attention.run(q, k, v, plan, rounding_seed=torch.tensor(0))
    (dq,) = torch.autograd.grad(o, q, do.to(o.dtype))
    dq = dq.float()
    return (dq[..., 0].square().mean().sqrt() / dq[..., 1:].square().mean().sqrt()).item()


def main() -> None:
    with (Path(__file__).resolve().parent / "row_sums.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("world", *DELTAS))
        for world in ALL:
            row = [f"{row_sums(world, delta):.2e}" if (world, delta) not in EXCLUDED else "" for delta in DELTAS]
            print(world, *row)
            writer.writerow((world, *row))


if __name__ == "__main__":
    main()
