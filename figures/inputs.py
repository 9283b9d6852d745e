"""The inputs of ``scripts/figures.py``: run folders and checkpoints, read at first use."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch

import files
from config import TrainConfig
from errors import UserError, invalid
from figures import curves
from figures.checkpoints import build, fp16_scale, validation_tokens
from figures.delta import choose_head
from figures.over_steps import RunCurves
from model import GPT
from probes.capture import LayerCapture, capture
from probes.spectral import top_singular
from training.weights import read_checkpoint


class MissingInputError(UserError):
    """A figure needs an input that was not given."""


@dataclass(frozen=True)
class Opened:
    """A checkpoint's model on the device, and how its run was configured."""

    model: GPT
    config: TrainConfig
    label: str


def load_run(folder: Path) -> RunCurves:
    """Metrics, telemetry where there is some, and names.

    Raises ``UserError`` for a folder that is not a run, or has no training loss yet.
    """
    metrics, path = curves.metrics(folder), folder / "config.json"
    try:
        attention = str(files.read_json(path)["attention_name"]) if path.exists() else "?"
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{path}: not the record of a run") from None
    return RunCurves(
        name=folder.resolve().name,
        attention=attention,
        exploded_at=curves.explosion_step(curves.column(metrics, "train_loss")),
        metrics=metrics,
        telemetry=curves.telemetry(folder),
    )


def open_checkpoint(folder: Path, device: torch.device) -> Opened:
    """The model of a checkpoint, or of the newest one of a run's folder. Raises ``UserError`` as ``read_checkpoint`` does."""
    loaded = read_checkpoint(folder)
    model, config, replaced = build(loaded, device)
    if replaced:
        print(f"{folder}: computed by flash_reference in place of {', '.join(replaced)}, which cannot run here")
    return Opened(model.eval(), config, f"{config.run.name} step {loaded.step:,}")


def joined(parts: Sequence[LayerCapture]) -> LayerCapture:
    """Captures of one layer, made sequence by sequence, as one: logits of all sequences at once would take gigabytes.

    dO is then the gradient of each sequence's own mean loss.
    """
    names = ("x_BTC", "q_BTHD", "k_BTHD", "v_BTHD", "o_BTHD", "do_BTHD")
    whole: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    return dataclasses.replace(parts[0], **whole)


class Inputs:
    """The inputs named on the command line, each opened once. ``figure`` is the one being drawn, for messages."""

    def __init__(self, args: argparse.Namespace):
        self._args = args
        self.figure = 0
        self.layer: int = args.layer
        self.sequences: int = args.sequences
        self.capture = cache(self._capture)

    @cached_property
    def runs(self) -> list[RunCurves]:
        """The runs of --runs that wrote telemetry; at least one."""
        if not self._args.runs:
            raise MissingInputError(f"figure {self.figure} needs --runs RUN [RUN ...]")
        found = [load_run(folder) for folder in self._args.runs]
        if not (chosen := [run for run in found if len(run.telemetry)]):
            names = ", ".join(run.name for run in found)
            raise MissingInputError(f"figure {self.figure} needs telemetry.jsonl, which {names} lacks")
        return chosen

    @cached_property
    def device(self) -> torch.device:
        """Where models run."""
        name = self._args.device
        if name == "cuda" and not torch.cuda.is_available():
            raise invalid("--device", name, "cpu: torch sees no CUDA device")
        return torch.device("cuda" if name == "auto" and torch.cuda.is_available() else name.replace("auto", "cpu"))

    def checkpoints(self) -> list[Opened]:
        """The models of --checkpoint; all have ``layer``."""
        if not self._args.checkpoint:
            raise MissingInputError(f"figure {self.figure} needs --checkpoint DIR")
        return self._checkpoints

    @cached_property
    def _checkpoints(self) -> list[Opened]:
        found = [open_checkpoint(folder, self.device) for folder in self._args.checkpoint]
        for opened in found:
            self._check("layer", self.layer, opened.model.config.n_layer)
        return found

    def check_alike(self) -> None:
        """Raise ``UserError`` where the checkpoints differ in width or heads: their outer products have no cosine."""
        shapes = [(o.model.config.n_embd, o.model.config.n_head) for o in self.checkpoints()]
        if len(set(shapes)) > 1:
            told = " and ".join(
                f"{opened.label} has width {width} and {heads} heads"
                for opened, (width, heads) in zip(self.checkpoints(), shapes, strict=True)
            )
            raise UserError(f"figure {self.figure} compares checkpoints of one shape: {told}")

    def _check(self, name: str, value: int, count: int) -> None:
        if value >= count:
            raise invalid(f"--{name}", value, f"0 to {count - 1}")

    def _capture(self, which: int = 0) -> tuple[LayerCapture, float]:
        """The layer of one checkpoint, and the loss scale that its dO has."""
        opened = self.checkpoints()[which]
        config = opened.config
        T = config.data.sequence_length
        folder = self._args.data or Path(config.data.dataset)
        count = self.sequences
        tokens_BT, targets_BT = validation_tokens(folder, T, count, config.model.vocab_size, self.device)

        def look(scale: float) -> list[LayerCapture]:
            return [
                capture(
                    opened.model,
                    tokens_BT[[sequence]],
                    targets_BT[[sequence]],
                    [self.layer],
                    autocast=config.precision.autocast(self.device),
                    rounding_seed=torch.tensor(sequence, device=self.device),
                    loss_scale=scale,
                )[0]
                for sequence in range(count)
            ]

        scale = fp16_scale(look) if config.precision.dtype == "float16" else 1.0
        return joined(look(scale)), scale

    def head(self) -> int:
        """The head asked for, or that of the first checkpoint with the largest spectral norm of W_Q."""
        opened = self.checkpoints()[0]
        n_head = opened.model.config.n_head
        if self._args.head is not None:
            self._check("head", self._args.head, n_head)
            return int(self._args.head)
        return choose_head(top_singular(opened.model.w_q(self.layer).detach().unflatten(0, (n_head, -1)))[0].tolist())

    def place(self) -> str:
        """Checkpoint, layer and head, for titles."""
        return f"{self.checkpoints()[0].label}, layer {self.layer} head {self.head()}"
