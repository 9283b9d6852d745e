"""Rows that Algorithm 3 with the published floor scales down, by layer, in checkpoints of a run that trains with both:

    python -m experiments.row_residual.clamp runs/NAME/checkpoints/step_00000500 [MORE ...] --data data/tokens/corpus

The scale of a row is |O| over |O without Algorithm 3 and without floor|, both by the PyTorch reference from the same q, k and v, with the
published roundings otherwise; ``--preset`` says which version of Algorithm 3. Appends one row a checkpoint and layer to clamp.csv:

    shifted        share of rows with a scale off by more than 1 %
    half, off      share with a scale below 0.5, and below 1e-3: switched off
    heads_off      heads with more than one row in a hundred off
    scale_median   of the rows below 0.5
    scale_least    of all rows
    off_in_first_tile   share of the rows of the first 512 that are off: they have no tile above the diagonal before them
    do_share       of sum |dO|^2, what lies in rows that are off
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from attention.numerics import BASES, Numerics
from attention.presets import PRESETS
from errors import OneLineParser, exit_on_user_error
from figures.checkpoints import build, read_tokens, spread
from probes.capture import LayerCapture, capture
from probes.delta_error import forward_pass
from training.weights import read_checkpoint

PUBLISHED = BASES["published"]
VERSIONS = {
    name: PUBLISHED.with_sites(PRESETS[name].of(PUBLISHED)) for name in ("flash_stable", "flash_stable_exact_ties")
}
PLAIN = PUBLISHED.with_sites({"row_sum_floor": 0.0, "hidden_tiles": "skipped"})
HALF, OFF, TILE = 0.5, 1e-3, 512


def scales(layer: LayerCapture, version: Numerics) -> Tensor:
    """|O| of a row with ``version`` over that without Algorithm 3 and floor, [B, T, H]."""
    plan = layer.plan
    group = replace(plan.groups[0], heads=tuple(range(plan.n_head)))
    stable, plain = (forward_pass(layer, group, numerics)[0].float().norm(dim=-1) for numerics in (version, PLAIN))
    return stable / plain


def of_layer(layer: LayerCapture, version: Numerics) -> dict[str, float]:
    """The columns of one layer."""
    scale_BTH = scales(layer, version)
    off_BTH = scale_BTH < OFF
    low = scale_BTH[scale_BTH < HALF]
    weight_BTH = layer.do_BTHD.float().square().sum(dim=-1)
    return {
        "shifted": ((scale_BTH - 1).abs() > 0.01).float().mean().item(),
        "half": (scale_BTH < HALF).float().mean().item(),
        "off": off_BTH.float().mean().item(),
        "heads_off": float((off_BTH.float().mean(dim=(0, 1)) > 0.01).sum().item()),
        "scale_median": low.median().item() if low.numel() else 1.0,
        "scale_least": scale_BTH.min().item(),
        "off_in_first_tile": off_BTH[:, :TILE].float().mean().item(),
        "do_share": (weight_BTH[off_BTH].sum() / weight_BTH.sum()).item(),
    }


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    parser = OneLineParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoints", type=Path, nargs="+", help="checkpoints: runs/NAME/checkpoints/step_N")
    parser.add_argument("--preset", choices=VERSIONS, default="flash_stable", help="beta 2 (default) or beta 7")
    parser.add_argument("--data", type=Path, help="data set (default: the run's)")
    parser.add_argument("--sequences", type=int, default=8, help="of validation data (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "clamp.csv")
    arguments = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for path in arguments.checkpoints:
        loaded = read_checkpoint(path)
        model, config, _ = build(loaded, device)
        data = arguments.data or Path(config.data.dataset)
        tokens = read_tokens(data, config.model.vocab_size)
        (batch,) = spread(tokens, 1, arguments.sequences, config.data.sequence_length, str(data))
        seen = capture(model, *(x.to(device) for x in batch), autocast=config.precision.autocast(device))
        place = {"checkpoint": loaded.path.parent.parent.name, "step": loaded.step}
        rows = [{**place, "layer": layer.layer, **of_layer(layer, VERSIONS[arguments.preset])} for layer in seen]
        is_new = not arguments.out.exists()
        with arguments.out.open("a", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            if is_new:
                writer.writeheader()
            writer.writerows({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)
        for row in rows:
            print(path, " ".join(f"{k}={v:.3g}" for k, v in row.items() if k != "checkpoint"))


if __name__ == "__main__":
    main()
