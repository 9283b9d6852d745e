"""The whole configuration of a run: sections beside their consumers, presets as Python files, overrides from the command line."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import tyro

from attention.plan import AttentionConfig
from data.batches import DataConfig
from errors import UserError, invalid
from model import ModelConfig
from training.checkpoint import CheckpointConfig
from training.distributed import DeviceChoice
from training.evaluate import EvaluationConfig
from training.metrics import WandbConfig
from training.nonfinite import NonFiniteConfig
from training.optim import OptimConfig
from training.precision import PrecisionConfig
from training.telemetry import TelemetryConfig

PRESETS = Path(__file__).parent / "configs"


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What the run is called, how long it is, and where it runs."""

    name: str = "run"
    """Folder below run.folder that takes everything the run writes."""
    folder: str = "runs"
    """Where runs live."""
    steps: int = 1000
    """Optimiser steps."""
    seed: int = 42
    """Of the initial weights and of stochastic rounding; the order of the data has its own, data.seed."""
    device: DeviceChoice = "auto"
    """cuda, cpu, or auto: cuda where torch sees one."""
    resume: bool = False
    """Go on from the newest intact checkpoint of this run."""
    init_from: str = ""
    """Local Hugging Face folder of a GPT-2 to start from, in place of random weights."""
    log_every: int = 1
    """Steps between two lines of metrics."""
    peak_tflops: float = 0.0
    """Peak of one device in TFLOP/s, for the MFU; 0 takes the datasheet's for known GPUs."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise invalid("run.name", self.name, "letters, digits, '.', '_' and '-', beginning with a letter or digit")
        for name in ("steps", "log_every"):
            if getattr(self, name) < 1:
                raise invalid(f"run.{name}", getattr(self, name), "a whole number of 1 or more")
        if self.peak_tflops < 0:
            raise invalid("run.peak_tflops", self.peak_tflops, "0 or a positive number of TFLOP/s")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that decides a run."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    nonfinite: NonFiniteConfig = field(default_factory=NonFiniteConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)

    def __post_init__(self) -> None:
        if self.data.sequence_length > self.model.block_size:
            raise invalid(
                "data.sequence_length", self.data.sequence_length, f"at most model.block_size = {self.model.block_size}"
            )
        # Layers and heads named by rules must exist; the error names the rule.
        self.attention.resolve(self.model.n_layer, self.model.n_head)


def to_json(value: Any) -> Any:
    """A config as plain JSON values."""
    return dataclasses.asdict(value)


def from_json(kind: Any, content: Any, where: str = "") -> Any:
    """The config that ``to_json`` wrote, of dataclass ``kind``. Raises ``UserError`` for unknown keys or values of another type."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        if not isinstance(content, dict) or (unknown := sorted(content.keys() - hints.keys())):
            raise invalid(where or "config", content if not isinstance(content, dict) else unknown[0], hints)
        return kind(
            **{name: from_json(hints[name], value, f"{where}.{name}".strip(".")) for name, value in content.items()}
        )
    if get_origin(kind) is tuple and isinstance(content, list | tuple):
        return tuple(from_json(get_args(kind)[0], item, f"{where}.{i}") for i, item in enumerate(content))
    if get_origin(kind) is Literal and content in get_args(kind):
        return content
    if kind is float and isinstance(content, int) and not isinstance(content, bool):
        return float(content)
    if isinstance(kind, type) and type(content) is kind:
        return content
    raise invalid(where, content, get_args(kind) if get_origin(kind) is Literal else f"a value of type {kind}")


def load_preset(path: str) -> TrainConfig:
    """The ``config`` that a preset file exports. Raises ``UserError`` for a file that is absent or exports none."""
    file = Path(path)
    if not file.is_file():
        raise invalid(
            "config file", path, sorted(f"configs/{p.name}" for p in PRESETS.glob("*.py") if p.name[0] != "_")
        )
    spec = importlib.util.spec_from_file_location(f"preset_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise invalid("config file", path, "a Python file, ending in .py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = getattr(module, "config", None)
    if not isinstance(config, TrainConfig):
        raise invalid("config file", path, "a Python file that sets `config` to a TrainConfig")
    return config


def load(arguments: list[str]) -> TrainConfig:
    """``configs/X.py --section.field value ...`` as a config. Raises ``UserError``, one line, for whatever is wrong with it."""
    if arguments and not arguments[0].startswith("-"):
        return override(load_preset(arguments[0]), arguments[1:])
    if "-h" in arguments or "--help" in arguments:
        return override(TrainConfig(), arguments)
    raise UserError("usage: python train.py configs/X.py [--section.field value ...]; --help lists the fields")


def override(config: TrainConfig, arguments: list[str]) -> TrainConfig:
    """``config`` with fields replaced as typed on the command line."""
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(TrainConfig, default=config, args=arguments, prog="train.py configs/X.py")
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UserError(_one_line(complaint.getvalue())) from None


def _one_line(box: str) -> str:
    """tyro's framed message without the frame and without the help that follows the first rule inside it."""
    lines = [line.strip("│ \n") for line in box.splitlines() if not line.startswith(("╭", "╰"))]
    message: list[str] = []
    for line in lines:
        if line and not line.strip("─"):
            break
        message.append(line)
    return f"{' '.join(message)}; --help lists the fields"
