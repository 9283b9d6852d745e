"""How far each delta is from that of exact attention, on random tensors: python -m experiments.row_residual.delta_errors

Writes delta_errors.csv. Exact: rowsum(dO * O) in FP64, from the same BF16 tensors [1, 1024, 2, 64]. Root mean squares over that of the
exact delta; r is rowsum(dS) before dS is rounded.
"""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from attention import AttentionConfig, AttentionSpec
from attention.numerics import numerics_from_key
from attention.reference.flash import row_deltas, row_residuals

SHAPE = (1, 1024, 2, 64)
DELTAS = {"from O": "flash", "from P": "flash_delta_from_p", "delta*": "flash_delta_normalized"}


def exact_delta(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> Tensor:
    """[B, H, T] float64."""
    q, k, v, do = (x.double().transpose(1, 2) for x in (q, k, v, do))
    scores = q @ k.transpose(-1, -2) / math.sqrt(SHAPE[-1])
    hidden = torch.ones(SHAPE[1], SHAPE[1], dtype=torch.bool).triu(1)
    return (do * (scores.masked_fill(hidden, -math.inf).softmax(-1) @ v)).sum(-1)


def main() -> None:
    with (Path(__file__).resolve().parent / "delta_errors.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("numerics", "delta", "scale_of_q", "seed", "error_rms_over_delta_rms", "r_rms_over_delta_rms"))
        for seed in range(8):
            generator = torch.Generator().manual_seed(seed)
            normal, k, v, do = (torch.randn(SHAPE, generator=generator).bfloat16() for _ in range(4))
            for scale in (1, 4, 10):
                q = normal * scale
                exact = exact_delta(q, k, v, do)
                size = exact.square().mean().sqrt()
                for base in ("hardware", "published"):
                    for name, preset in DELTAS.items():
                        spec = AttentionSpec(preset=preset, numerics=base)
                        numerics = numerics_from_key(AttentionConfig(default=spec).resolve(1, 1)[0].groups[0].numerics)
                        settings = {"seed": torch.tensor(0), "scale": SHAPE[-1] ** -0.5}
                        error = row_deltas(q, k, v, do, numerics, **settings) - exact
                        unrounded = replace(numerics, score_gradients="fp32")
                        r = row_residuals(q, k, v, do, unrounded, **settings)[0]
                        values = ((x.double().square().mean().sqrt() / size).item() for x in (error, r))
                        writer.writerow((base, name, scale, seed, *(f"{x:.3g}" for x in values)))


if __name__ == "__main__":
    main()
