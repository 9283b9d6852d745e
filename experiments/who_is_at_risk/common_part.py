"""What the tokens of a checkpoint's attention have in common, layer by layer, as CSV on standard output.

    PYTHONPATH=. python experiments/who_is_at_risk/common_part.py runs/NAME/checkpoints/step_00002400 [...] [--sequences 4]

``x``, ``k``, ``q``, ``k_read``: share |mean|^2 / mean |.|^2 over tokens of the normed input, of W_K x and W_Q x, and of K as attention
reads it (turned), mean over heads. ``outer``: mean cosine of (P K)[T]^T X[T], turned back, of two tokens (``probes.low_rank``): what an
error of delta adds up along. ``outer_max``: of the head with the largest.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

import torch
from torch import Tensor

from figures.inputs import captured, open_checkpoint
from probes.capture import LayerCapture
from probes.low_rank import coherence, weighted_keys


def share(x_BTXD: Tensor) -> Tensor:
    """Of the mean over tokens, [X]."""
    x_NXD = x_BTXD.double().flatten(0, 1)
    return x_NXD.mean(dim=0).square().sum(dim=-1) / x_NXD.square().sum(dim=-1).mean(dim=0)


def row(layer: LayerCapture) -> dict[str, float]:
    """The columns of one layer."""
    before = {
        name: layer.turned_back(x.transpose(1, 2)).transpose(1, 2)
        for name, x in (("k", layer.k_BTHD), ("q", layer.q_BTHD))
    }
    outer_H = coherence(layer.turned_back(weighted_keys(layer)), layer.x_BTC).within_H
    shares = {"x": layer.x_BTC[:, :, None], **before, "k_read": layer.k_BTHD}
    found = {name: float(share(x).mean()) for name, x in shares.items()}
    return found | {"outer": float(outer_H.mean()), "outer_max": float(outer_H.max())}


def main() -> None:
    parser = argparse.ArgumentParser(description="What tokens have in common in a checkpoint's attention.")
    parser.add_argument("checkpoints", nargs="+", type=Path)
    parser.add_argument("--sequences", type=int, default=4)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow(["run", "step", "layer", "x", "k", "q", "k_read", "outer", "outer_max"])
    for path in args.checkpoints:
        opened = open_checkpoint(path, device)
        for layer in captured(opened, args.sequences, None, device)[0]:
            numbers = [f"{value:.4g}" for value in row(layer).values()]
            out.writerow([opened.config.run.name, int(path.name.removeprefix("step_")), layer.layer, *numbers])


if __name__ == "__main__":
    main()
