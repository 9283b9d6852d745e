"""The whole configuration of a run: sections beside their consumers, presets as Python files, overrides from the command line."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.machinery
import importlib.util
import io
import itertools
import json
import math
import re
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import tyro

from attention.plan import AttentionConfig
from data.batches import DataConfig
from errors import UserError, invalid
from model import ModelConfig
from training.alarm import AlarmConfig
from training.checkpoint import CheckpointConfig
from training.distributed import DeviceChoice
from training.evaluate import EvaluationConfig
from training.metrics import WandbConfig
from training.nonfinite import NonFiniteConfig
from training.optim import OptimConfig
from training.precision import PrecisionConfig
from training.retired import upgraded
from training.speed import SpeedConfig
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
        if not -(2**63) <= self.seed < 2**64:
            raise invalid("run.seed", self.seed, "a whole number from -2**63 to 2**64 - 1, as torch takes them")
        for name in ("steps", "log_every"):
            if getattr(self, name) < 1:
                raise invalid(f"run.{name}", getattr(self, name), "a whole number of 1 or more")
        if not 0 <= self.peak_tflops < math.inf:
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
    speed: SpeedConfig = field(default_factory=SpeedConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    nonfinite: NonFiniteConfig = field(default_factory=NonFiniteConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    alarm: AlarmConfig = field(default_factory=AlarmConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)

    def __post_init__(self) -> None:
        if self.data.sequence_length > self.model.block_size:
            raise invalid(
                "data.sequence_length", self.data.sequence_length, f"at most model.block_size = {self.model.block_size}"
            )
        if self.alarm.response != "log" and not self.telemetry.every:
            raise invalid(
                "alarm.response", self.alarm.response, "log while telemetry.every = 0: nothing would raise an alarm"
            )
        own = Path(self.run.folder, self.run.name)
        if self.data.record and Path(self.data.record).resolve().is_relative_to(own.resolve()):
            # Made first, it would stand where the run is to be new.
            raise invalid("data.record", self.data.record, f"a folder outside of the run's own, {own}")
        # Layers and heads named by rules must exist; the error names the rule.
        self.attention.resolve(self.model.n_layer, self.model.n_head)


def to_json(value: Any) -> Any:
    """A config as JSON gives it back: tuples are lists, so that what was read compares equal to what would be written."""
    return json.loads(json.dumps(dataclasses.asdict(value)))


def from_json(kind: Any, content: Any, where: str = "") -> Any:
    """The config that ``to_json`` wrote, of dataclass ``kind``. Raises ``UserError`` for unknown keys or values of another type."""
    if kind is TrainConfig and isinstance(content, dict) and "reference" not in (content.get("speed") or {"reference"}):
        content = upgraded(content)
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
    raise invalid(
        where, content, get_args(kind) if get_origin(kind) is Literal else f"a value of type {_type_name(kind)}"
    )


def _type_name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)


def _typed(exported: Any, where: str = "") -> Any:
    """What a Python file exports, every value of its field's type: no type checker has seen it. Lists become tuples, whole numbers floats.

    Raises ``UserError`` that names the first field of another type.
    """
    return from_json(type(exported), dataclasses.asdict(exported), where)


def load_preset(path: str) -> TrainConfig:
    """The ``config`` that a preset file exports. Raises ``UserError`` for a file that is absent or exports none."""
    config = getattr(_run_file(path), "config", None)
    if not isinstance(config, TrainConfig):
        raise invalid("config file", path, "a Python file that sets `config` to a TrainConfig")
    typed: TrainConfig = _typed(config)
    return typed


def load_attention(path: str) -> AttentionConfig:
    """The ``attention`` that an ablation file exports. Raises ``UserError`` for a file that is absent or exports none."""
    attention = getattr(_run_file(path), "attention", None)
    if not isinstance(attention, AttentionConfig):
        raise invalid("ablation file", path, "a Python file that sets `attention` to an AttentionConfig")
    typed: AttentionConfig = _typed(attention, "attention")
    return typed


class _WritesNothing(importlib.machinery.SourceFileLoader):
    """Leaves no __pycache__ beside a file of the user's."""

    def set_data(self, path: str, data: Any, *, _mode: int = 0o666) -> None:
        pass


def _run_file(path: str) -> types.ModuleType:
    file = Path(path)
    if not file.is_file():
        known = sorted(f"configs/{p.relative_to(PRESETS)}" for p in PRESETS.rglob("*.py") if "__" not in str(p))
        raise invalid("config file", path, known)
    name = f"preset_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file, loader=_WritesNothing(name, str(file)))
    if file.suffix != ".py" or spec is None or spec.loader is None:
        raise invalid("config file", path, "a Python file, ending in .py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except UserError:
        raise
    except Exception as error:  # whatever a user's Python file may raise
        raise UserError(f"config file = {path!r}: it raises {type(error).__name__}: {error}") from error
    return module


def load(arguments: list[str]) -> TrainConfig:
    """``configs/RECIPE.py [configs/ablations/A.py] --section.field value ...`` as a config.

    A second file replaces the attention of the first, so that an ablation fits every recipe that has its layers and heads.
    Raises ``UserError``, one line, for whatever is wrong.
    """
    files = list(itertools.takewhile(lambda argument: not argument.startswith("-"), arguments))
    rest = arguments[len(files) :]
    if not files and {"-h", "--help"} & set(rest):
        return override(TrainConfig(), rest)
    if len(files) not in (1, 2):
        usage = "python train.py configs/RECIPE.py [configs/ablations/A.py] [--section.field value ...]"
        raise UserError(f"usage: {usage}; --help lists the fields")
    config = load_preset(files[0])
    if len(files) == 2:
        # What computes flash attention belongs to the recipe: an ablation changes roundings, on whatever machine.
        attention = dataclasses.replace(load_attention(files[1]), flash_backend=config.attention.flash_backend)
        config = dataclasses.replace(config, attention=attention)
    return override(config, rest)


def override(config: TrainConfig, arguments: list[str]) -> TrainConfig:
    """``config`` with fields replaced as typed on the command line."""
    if not arguments:
        return config
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(TrainConfig, default=config, args=arguments, prog="train.py configs/X.py")
    except SystemExit as stop:
        if not stop.code:
            raise
        raise _unknown(config, arguments) or UserError(_one_line(complaint.getvalue())) from None


def _unknown(config: TrainConfig, arguments: list[str]) -> UserError | None:
    """The error for the first option that names no field or gives a switch a value, with what there is; None without such a one."""
    for option, next_argument in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        if not option.startswith("--"):
            continue
        name, _, value = option[2:].replace("-", "_").partition("=")
        section: Any = config
        parts = name.split(".")
        for depth, part in enumerate(parts):
            members = dict(enumerate(section)) if isinstance(section, tuple) else getattr(section, "__dict__", {})
            known = {str(key): member for key, member in members.items()}
            # Switches have a negated form, which stands on the field and not on its section: --precision.no-compile.
            field_name = part.removeprefix("no_") if depth == len(parts) - 1 else part
            if field_name not in known:
                return invalid(name, value or next_argument, known or f"nothing below {'.'.join(parts[:depth])}")
            section = known[field_name]
        given = value or ("" if next_argument.startswith("-") else next_argument)
        if isinstance(section, bool) and given:
            *head, last = parts
            on, off = (".".join([*head, word + last.removeprefix("no_")]).replace("_", "-") for word in ("", "no_"))
            return invalid(name, given, f"--{on} or --{off}, which take no value")
    return None


def _one_line(box: str) -> str:
    """tyro's framed message without the frame and without the help that follows the first rule inside it."""
    lines = [line.strip("│ \n") for line in box.splitlines() if not line.startswith(("╭", "╰"))]
    message: list[str] = []
    for line in lines:
        if line and not line.strip("─"):
            break
        message.append(line)
    return f"{' '.join(message)}; --help lists the fields"
