"""What ``scripts/figures.py`` draws from: run folders, checkpoints, local Hugging Face models; read when first asked for."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attention import AttentionSpec
from autopsy import subjects
from config import TrainConfig
from errors import UserError, invalid
from figures import curves
from figures.delta import choose_head
from figures.loss import RunCurves, norm_grid
from model import GPT
from probes import hf_causal
from probes.capture import LayerCapture, capture
from probes.spectral import spectral_norm
from training.metrics import read_metrics
from training.telemetry import read_telemetry
from training.weights import read_checkpoint

TEXT_TOKENS, SHORTEST = 64, 5


class MissingInputError(UserError):
    """A figure asks for an input that was not given."""


@dataclass(frozen=True)
class Opened:
    """A checkpoint's model on the device, and how its run was configured."""

    model: GPT
    config: TrainConfig
    label: str


@dataclass(frozen=True)
class Pretrained:
    """All layers of a model on one sequence, its name, and the head of ``Inputs.layer`` to look at."""

    layers: list[LayerCapture]
    label: str
    head: int


def load_run(folder: Path, *, margin: float = 0.5, patience: int = 200) -> RunCurves:
    """Metrics, telemetry where there is some, and names; ``margin`` and ``patience`` say what an explosion is.

    Raises ``UserError`` for what is no run, or has no training loss yet.
    """
    records = read_metrics(folder)
    steps, losses = curves.column(records, "train_loss")
    if not steps:
        raise UserError(f"{folder}: its metrics have no train_loss yet")
    facts: dict[str, Any] = {}
    if (folder / "config.json").is_file():
        try:
            facts = json.loads((folder / "config.json").read_bytes())
        except ValueError as error:
            raise UserError(f"{folder / 'config.json'}: not JSON ({error})") from None
    sections = facts.get("config", {})
    model, optim = sections.get("model", {}), sections.get("optim", {})
    shape = f"{model.get('n_layer', '?')} layers of width {model.get('n_embd', '?')}"
    has_telemetry = (folder / "telemetry.jsonl").is_file()
    return RunCurves(
        name=folder.resolve().name,
        attention=str(facts.get("attention_name", "?")),
        group=f"{shape}, {optim.get('optimizer', '?')}, lr {optim.get('lr', '?')}",
        exploded_at=curves.explosion_step(losses, margin, patience, steps=steps),
        records=records,
        telemetry=read_telemetry(folder) if has_telemetry else (),
    )


def open_checkpoint(folder: Path, device: torch.device) -> Opened:
    """The model of a checkpoint, or of the newest one of a run's folder. Raises ``UserError`` as ``read_checkpoint`` does."""
    loaded = read_checkpoint(folder)
    model, config, replaced = subjects.build(loaded, device)
    if replaced:
        print(f"{folder}: computed by flash_reference in place of {', '.join(replaced)}, which cannot run here")
    return Opened(model.eval(), config, f"{config.run.name} step {loaded.step:,}")


def validation_tokens(
    folder: Path, length: int, count: int, vocabulary: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """``count`` sequences spread over the validation tokens: tokens and targets [B, T]. Raises ``UserError``."""
    tokens = subjects.read_tokens(folder, vocabulary)
    ((tokens_BT, targets_BT),) = subjects.spread(tokens, 1, count, length, str(folder))
    return tokens_BT.to(device), targets_BT.to(device)


def joined(parts: Sequence[LayerCapture]) -> LayerCapture:
    """Captures of one layer, made sequence by sequence, as one: logits of all sequences at once would take gigabytes.

    dO is then the gradient of each sequence's own mean loss.
    """
    names = ("x_BTC", "q_BTHD", "k_BTHD", "v_BTHD", "o_BTHD", "do_BTHD")
    whole: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    return dataclasses.replace(parts[0], **whole)


class Inputs:
    """Everything that was given on the command line, opened once. ``figure`` is the one being drawn, for messages."""

    def __init__(self, args: argparse.Namespace):
        self._args = args
        self.figure = 0
        self.layer: int = args.layer
        self.sequence: int = args.sequence
        self.token: int | None = args.token
        self.feature: int | None = args.feature
        self.capture = cache(self._capture)

    def runs(self, needed: bool = True) -> list[RunCurves]:
        """The runs of --runs."""
        if needed and not self._args.runs:
            raise MissingInputError(f"figure {self.figure} needs --runs RUN [RUN ...]")
        return self._runs

    @cached_property
    def _runs(self) -> list[RunCurves]:
        return [load_run(folder, margin=self._args.margin, patience=self._args.patience) for folder in self._args.runs]

    def runs_with_telemetry(self) -> list[RunCurves]:
        """Those that wrote telemetry; at least one."""
        chosen = [run for run in self.runs() if run.telemetry]
        if not chosen:
            names = ", ".join(run.name for run in self.runs())
            raise MissingInputError(
                f"figure {self.figure} needs telemetry.jsonl, which {names} lacks: train with telemetry.every above 0"
            )
        return chosen

    def runs_with_norms(self) -> list[RunCurves]:
        """Those that logged spectral norms; at least one."""
        chosen = [run for run in self.runs() if norm_grid(run)[1].size]
        if not chosen:
            names = ", ".join(run.name for run in self.runs())
            raise MissingInputError(
                f"figure {self.figure} needs spectral norms, which {names} lacks: train with telemetry.every above 0"
            )
        return chosen

    @cached_property
    def device(self) -> torch.device:
        """Where models run."""
        name = self._args.device
        if name == "cuda" and not torch.cuda.is_available():
            raise invalid("--device", name, "cpu: torch sees no CUDA device")
        return torch.device(
            "cuda" if name == "auto" and torch.cuda.is_available() else "cpu" if name == "auto" else name
        )

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

    def check_has_head(self, run: RunCurves) -> None:
        """Raise ``UserError`` for a run whose telemetry has no such layer and head."""
        grid = run.telemetry[0]["delta_error_sum"]
        if self.layer >= len(grid) or self.head() >= len(grid[self.layer]):
            raise UserError(
                f"figure {self.figure}: no layer {self.layer} head {self.head()} in the run {run.name}, "
                f"which has {len(grid)} layers of {len(grid[0])} heads: leave it out, or set --layer and --head"
            )

    def _check(self, name: str, value: int, count: int) -> None:
        if value >= count:
            raise invalid(f"--{name}", value, f"0 to {count - 1}")

    def _capture(self, which: int = 0) -> LayerCapture:
        opened = self.checkpoints()[which]
        config = opened.config
        T = config.data.sequence_length
        self._check("sequence", self.sequence, self._args.sequences)
        self._check("token", self.token or 0, T)
        self._check("feature", self.feature or 0, config.model.head_width)
        return self._look(opened, T, self._args.sequences, [self.layer])[0]

    def _look(self, opened: Opened, length: int, count: int, layers: list[int] | None) -> list[LayerCapture]:
        """Captures of ``count`` sequences of the validation tokens."""
        config = opened.config
        folder = self._args.data or Path(config.data.dataset)
        tokens_BT, targets_BT = validation_tokens(folder, length, count, config.model.vocab_size, self.device)
        scale = subjects.FP16_LOSS_SCALE if config.precision.dtype == "float16" else 1.0
        parts = [
            capture(
                opened.model,
                tokens_BT[[sequence]],
                targets_BT[[sequence]],
                layers,
                autocast=config.precision.autocast(self.device),
                rounding_seed=torch.tensor(sequence, device=self.device),
                loss_scale=scale,
            )
            for sequence in range(count)
        ]
        return [joined(of_layer) for of_layer in zip(*parts, strict=True)]

    def head(self) -> int:
        """The head asked for, or that of the first checkpoint with the largest spectral norm of W_Q."""
        opened = self.checkpoints()[0]
        return self._head(opened.model.w_q(self.layer), opened.model.config.n_head)

    def _head(self, w_q_CC: Tensor, n_head: int) -> int:
        if self._args.head is not None:
            self._check("head", self._args.head, n_head)
            return int(self._args.head)
        return choose_head(spectral_norm(w_q_CC.detach().unflatten(0, (n_head, -1))).tolist())

    def place(self) -> str:
        """Checkpoint, layer and head, for titles."""
        return f"{self.checkpoints()[0].label}, layer {self.layer} head {self.head()}"

    def pretrained(self) -> Pretrained:
        """The --hf model on the text (or on tokens of --data), else the first checkpoint on the beginning of a sequence."""
        if self._args.hf is None and not self._args.checkpoint:
            raise MissingInputError(f"figure {self.figure} needs --hf FOLDER (or --checkpoint DIR)")
        return self._pretrained

    @cached_property
    def _pretrained(self) -> Pretrained:
        if self._args.hf is None:
            opened = self.checkpoints()[0]
            length = min(opened.config.data.sequence_length, TEXT_TOKENS)
            return Pretrained(self._look(opened, length, 1, None), opened.label, self.head())
        folder: Path = self._args.hf
        model = hf_causal.load(folder, AttentionSpec(), torch.bfloat16, self.device)
        self._check("layer", self.layer, model.n_layer)
        if self._args.data is None:
            tokens_BN = tokenized(folder, self._args.text)[:, : model.positions + 1].to(self.device)
            tokens_BT, targets_BT = tokens_BN[:, :-1], tokens_BN[:, 1:]
        else:
            length = min(model.positions, TEXT_TOKENS)
            tokens_BT, targets_BT = validation_tokens(self._args.data, length, 1, model.vocabulary_size, self.device)
        head = self._head(model.w_q(self.layer), model.n_head)
        return Pretrained(model.capture(tokens_BT, targets_BT), folder.resolve().name, head)


def tokenized(folder: Path, text: str) -> Tensor:
    """Tokens [1, N] of a text by the tokenizer of a local folder. Raises ``UserError`` where it has none."""
    tokens = hf_causal.open_tokenizer(folder)(text)["input_ids"]
    if len(tokens) < SHORTEST:
        raise invalid("--text", text, f"at least {SHORTEST} tokens, not {len(tokens)}")
    return torch.tensor([tokens])
