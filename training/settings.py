"""Everything that decides a run, as one value: a section for each part, declared beside the code that reads it."""

import dataclasses
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from attention.plan import AttentionConfig
from data.batches import DataConfig
from errors import check_size, check_types, invalid
from model import ModelConfig
from training.checkpoint import CheckpointConfig
from training.distributed import DeviceChoice
from training.evaluate import EvaluationConfig
from training.intervention import AlarmConfig
from training.metrics import WandbConfig
from training.nonfinite import NonFiniteConfig
from training.optim import OptimConfig
from training.precision import PrecisionConfig, SpeedConfig
from training.telemetry import TelemetryConfig

Resume = Literal["no", "yes", "auto"]
LONGEST_NAME = 240
"""A file name takes 255 bytes on the usual disks; some are left for what is added to it."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Name, length, seed and device of the run."""

    name: str = "run"
    """Folder below run.folder for everything that the run writes."""
    folder: str = "runs"
    """Where runs live."""
    steps: int = 1000
    """Optimizer steps."""
    seed: int = 42
    """Seed of the initial weights and of stochastic rounding; the order of the data has its own, data.seed."""
    device: DeviceChoice = "auto"
    """cuda, cpu, or auto: cuda where torch sees one."""
    resume: Resume = "no"
    """no: a new run; yes: resume from the newest intact checkpoint; auto: yes if the run exists, else no."""
    timeout: float = 600.0
    """Seconds that a process waits for the others: at the start, and wherever they exchange something. Then the run ends."""
    init_from: str = ""
    """Where a new run begins, in place of random weights: a checkpoint of another run (weights, optimizer, step and position in the data;
    attention may differ, and what a resume may change), or weights alone, for a new recipe: nanoGPT's ckpt.pt. Layers that the other run
    had switched (alarm.switches) keep that attention, whatever attention is given; another switch moves them."""
    log_every: int = 1
    """Steps between two lines of metrics."""

    def __post_init__(self) -> None:
        check_types("run", self)
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name) or len(self.name) > LONGEST_NAME:
            expected = f"at most {LONGEST_NAME} letters, digits, '.', '_' and '-', beginning with a letter or digit"
            raise invalid("run.name", self.name, expected)
        if not -(2**63) <= self.seed < 2**64:
            raise invalid("run.seed", self.seed, "a whole number from -2**63 to 2**64 - 1, as torch takes them")
        for name in ("steps", "log_every"):
            check_size(f"run.{name}", getattr(self, name), 1)
        if not 1 <= self.timeout <= 10**6:
            raise invalid("run.timeout", self.timeout, "1 to 1000000 seconds")


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
        check_types("", self)
        data, precision, block_size = self.data, self.precision, self.model.block_size
        if data.sequence_length > block_size:
            raise invalid("data.sequence_length", data.sequence_length, f"at most block_size = {block_size}")
        own = Path(self.run.folder, self.run.name)
        if data.record and Path(data.record).resolve().is_relative_to(own.resolve()):
            # It is made before the run's folder, which must not exist yet.
            raise invalid("data.record", data.record, f"a folder outside of the run's own, {own}")
        if precision.fixed_sum_order and precision.compile and data.validation_sequences % data.micro_batch:
            # The process that has the smaller batch would compile other graphs.
            expected = f"a multiple of micro_batch = {data.micro_batch} with compile, or --precision.no-fixed-sum-order"
            raise invalid("data.validation_sequences", data.validation_sequences, expected)
        if self.telemetry.every and self.telemetry.sequences > data.validation_sequences:
            expected = f"at most data.validation_sequences = {data.validation_sequences}"
            raise invalid("telemetry.sequences", self.telemetry.sequences, expected)
        # Layers and heads named by rules must exist; the error names the rule.
        plans = self.attention.resolve(self.model.n_layer, self.model.n_head)
        share = self.model.n_head // self.model.kv_heads

        def parts(heads: tuple[int, ...]) -> bool:
            return len(heads) != share * len({head // share for head in heads})

        for plan in plans:
            if any(parts(group.heads) for group in plan.groups):
                rules = enumerate(self.attention.rules)
                here = ((i, rule.heads) for i, rule in rules if plan.layer in (rule.layers or (plan.layer,)))
                index, heads = next((i, heads) for i, heads in here if parts(heads))
                expected = f"in layer {plan.layer} whole groups of {share} heads, which share keys (model.n_kv_head)"
                raise invalid(f"attention.rules.{index}.heads", heads, expected)


def to_json(value: Any) -> Any:
    """A config as JSON gives it back: tuples are lists, so that what was read compares equal to what would be written."""
    return json.loads(json.dumps(dataclasses.asdict(value)))
