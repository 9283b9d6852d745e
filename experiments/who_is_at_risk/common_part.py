"""What the tokens of a checkpoint's attention have in common, layer by layer, as CSV on standard output.

    PYTHONPATH=. python experiments/who_is_at_risk/common_part.py runs/NAME/checkpoints/step_00002400 [...] [--sequences 4]

``x``, ``k``, ``q``, ``k_read``, ``v``: share |mean|^2 / mean |.|^2 over tokens of the normed input, of W_K x and W_Q x, of K as
attention reads it (turned), and of V, mean over heads. ``outer``: mean cosine of (P K)[T]^T X[T], turned back, of two tokens
(``probes.low_rank``): what an error of delta adds up along. ``outer_max``: of the head with the largest.
"""

import argparse
import csv
import sys
from pathlib import Path

import torch
from torch import Tensor

from figures.inputs import captured, open_checkpoint
from probes.capture import LayerCapture
from probes.delta_error import delta_errors
from probes.low_rank import coherence, weighted_keys


def share(x_BTXD: Tensor) -> Tensor:
    """Of the mean over tokens, [X]."""
    x_NXD = x_BTXD.double().flatten(0, 1)
    return x_NXD.mean(dim=0).square().sum(dim=-1) / x_NXD.square().sum(dim=-1).mean(dim=0)


def push(layer: LayerCapture, batches: int = 4) -> float:
    """The norm of the mean over batches of -scale sum_T error[T] (P K)[T]^T X[T], over the root mean square of dW_Q's norm."""
    q, k, v, do = (x.transpose(1, 2).double() for x in (layer.q_BTHD, layer.k_BTHD, layer.v_BTHD, layer.do_BTHD))
    s_BHTT = layer.scale * q @ k.transpose(-1, -2)
    p_BHTT = s_BHTT.masked_fill(~torch.ones_like(s_BHTT, dtype=torch.bool).tril(), -torch.inf).softmax(dim=-1)
    dp_BHTT = do @ v.transpose(-1, -2)
    ds_BHTT = p_BHTT * (dp_BHTT - (p_BHTT * dp_BHTT).sum(dim=-1, keepdim=True))
    added = -delta_errors(layer).error_BHT[..., None].double() * weighted_keys(layer).double()

    def of_w_q(rows_BHTD: Tensor) -> Tensor:
        """The sum over tokens of rows[T]^T X[T] of each batch, [batches, H, D, C]."""
        rows = layer.turned_back(layer.scale * rows_BHTD).unflatten(0, (batches, -1))
        return torch.einsum("nbhtd,nbtc->nhdc", rows.double(), layer.x_BTC.double().unflatten(0, (batches, -1)))

    dw_N = of_w_q(ds_BHTT @ k).flatten(1).norm(dim=1)
    return float(of_w_q(added).mean(dim=0).norm() / dw_N.square().mean().sqrt())


def row(layer: LayerCapture) -> dict[str, float]:
    before = {
        name: layer.turned_back(x.transpose(1, 2)).transpose(1, 2)
        for name, x in (("k", layer.k_BTHD), ("q", layer.q_BTHD))
    }
    outer_H = coherence(layer.turned_back(weighted_keys(layer)), layer.x_BTC).within_H
    shares = {"x": layer.x_BTC[:, :, None], **before, "k_read": layer.k_BTHD, "v": layer.v_BTHD}
    found = {name: float(share(x).mean()) for name, x in shares.items()}
    return found | {"outer": float(outer_H.mean()), "outer_max": float(outer_H.max()), "push": push(layer)}


def main() -> None:
    parser = argparse.ArgumentParser(description="What tokens have in common in a checkpoint's attention.")
    parser.add_argument("checkpoints", nargs="+", type=Path)
    parser.add_argument("--sequences", type=int, default=4, help="a multiple of 4")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow(["run", "step", "layer", "x", "k", "q", "k_read", "v", "outer", "outer_max", "push"])
    for path in args.checkpoints:
        opened = open_checkpoint(path, device)
        for layer in captured(opened, args.sequences, None, device)[0]:
            numbers = [f"{value:.4g}" for value in row(layer).values()]
            out.writerow([opened.config.run.name, int(path.name.removeprefix("step_")), layer.layer, *numbers])


if __name__ == "__main__":
    main()
