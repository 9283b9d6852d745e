"""A run that goes on from a checkpoint with larger logits: what would training do, had they grown?

    python scripts/enlarge_logits.py runs/small runs/large --layer 1 --factor 30000
    python train.py RECIPE --run.name large --run.resume --run.steps 701 --alarm.switches 402:1:flash_subtracted:flash_reference

Copies the newest checkpoint of a run into the folder of a new one, with W_Q and W_K of one layer times the square root of --factor; all
else as it is, the optimiser's moments too. The new run is given the old one's settings but for run.name, and may switch the attention of
a layer on its way (docs/diagnosis.md).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import config as configuration
from analysis.gradients import larger_logits
from config import TrainConfig
from errors import OneLineParser, UserError, exit_on_user_error, invalid
from scripts.autopsy import build, read_checkpoint
from training.checkpoint import CheckpointConfig, Checkpoints, Loaded


def enlarged(loaded: Loaded, layer: int, factor: float) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint by name, with larger logits in one layer.

    Raises ``UserError`` for a layer that it lacks, and for a model whose logits do not go with W_Q and W_K.
    """
    shape = configuration.from_json(TrainConfig, loaded.config_json).model
    if not 0 <= layer < shape.n_layer:
        raise invalid("--layer", layer, f"0 to {shape.n_layer - 1}, counted from 0")
    if shape.qk_norm or shape.bias:
        raise invalid("--factor", factor, "1: with qk_norm or biases logits do not grow with W_Q and W_K")
    model, _, _ = build(loaded, torch.device("cpu"))
    with larger_logits(model, layer, factor):
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


@exit_on_user_error
def main(arguments: Sequence[str] | None = None) -> None:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run, or a checkpoint")
    parser.add_argument("out", type=Path, help="folder of the new run, which must not exist")
    parser.add_argument("--layer", type=int, required=True, help="from 0")
    parser.add_argument("--factor", type=float, required=True, help="times the logits")
    args = parser.parse_args(arguments)
    if not 0 < args.factor < math.inf:
        raise invalid("--factor", args.factor, "a number above 0")
    if args.out.exists():
        raise UserError(f"{args.out}: exists; name a new run")
    loaded = read_checkpoint(args.run)
    weights = enlarged(loaded, args.layer, args.factor)
    settings = {**loaded.config_json, "run": {**loaded.config_json["run"], "name": args.out.name}}
    path = Checkpoints(args.out / "checkpoints", CheckpointConfig()).save(
        loaded.step,
        model_state=weights,
        optimizer_state=loaded.optimizer_state,
        scaler_state=loaded.scaler_state,
        rng=loaded.rng,
        position=loaded.position,
        config_json=settings,
        extra=loaded.extra,
    )
    print(f"wrote {path}: logits of layer {args.layer} times {args.factor:,g}")


if __name__ == "__main__":
    main()
