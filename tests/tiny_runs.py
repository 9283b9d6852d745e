"""Runs of a second for the end-to-end tests: a small data set, a small model, and ways to look at what a run leaves behind."""

import contextlib
import dataclasses
import hashlib
import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import config as configuration
import train
from attention import AttentionConfig, AttentionSpec
from config import RunConfig, TrainConfig
from data.batches import DataConfig
from data.recording import RUN_ID
from data.token_files import TokenWriter
from files import sha256_file
from model import GPT, ModelConfig, initialize
from training.checkpoint import CheckpointConfig
from training.distributed import DistContext
from training.evaluate import EvaluationConfig
from training.optim import OptimConfig
from training.precision import PrecisionConfig
from training.run import Run
from training.telemetry import TelemetryConfig

ROOT = Path(__file__).resolve().parent.parent
TRAIN_TOKENS, VALIDATION_TOKENS = 20_000, 2_000
TIMING = ("tokens_per_second", "mfu", "seconds", "probe_seconds")

TINY = TrainConfig(
    run=RunConfig(steps=20, device="cpu"),
    model=ModelConfig(n_layer=2, n_head=2, n_embd=16, block_size=16, vocab_size=256, vocab_multiple=1),
    attention=AttentionConfig(flash_backend="flash_reference", default=AttentionSpec(preset="flash")),
    data=DataConfig(dataset="", sequence_length=16, global_batch=8, micro_batch=4, validation_sequences=8),
    optim=OptimConfig(lr=1e-2, warmup_steps=5, schedule="constant"),
    precision=PrecisionConfig(dtype="float32"),
    evaluation=EvaluationConfig(every=10),
    checkpoint=CheckpointConfig(every=10),
    telemetry=TelemetryConfig(every=10),
)


def make_data(
    folder: Path,
    *,
    seed: int = 0,
    plant: Mapping[int, int] | None = None,
    vocabulary: int = 256,
    train: int = TRAIN_TOKENS,
    validation: int = VALIDATION_TOKENS,
) -> Path:
    """A data set of bytes: sentences of sixteen words. ``plant`` puts tokens (values) at places (keys) of train.bin."""
    generator = random.Random(seed)
    words = ["".join(generator.choices("abcdefgh", k=generator.randint(2, 5))) for _ in range(16)]
    text = " ".join(generator.choices(words, k=20_000)).encode()
    tokens = np.frombuffer(text, dtype=np.uint8)[: train + validation].copy()
    for place, token in (plant or {}).items():
        tokens[place] = token
    for split, part in (("train", tokens[:train]), ("val", tokens[train:])):
        dtype = "uint8" if vocabulary <= 256 else "uint16"
        with TokenWriter(
            folder, split, dtype=dtype, vocabulary="bytes", vocabulary_size=vocabulary, source="test"
        ) as out:
            out.write(part.astype(dtype))
    return folder


def changed(config: TrainConfig, fields: Mapping[str, Any]) -> TrainConfig:
    """``config`` with fields, named ``section.field``, replaced; a name without a dot replaces a whole section."""
    sections: dict[str, Any] = {name: value for name, value in fields.items() if "." not in name}
    dotted: dict[str, dict[str, Any]] = {}
    for name, value in fields.items():
        if "." in name:
            section, field = name.split(".")
            dotted.setdefault(section, {})[field] = value
    for section, values in dotted.items():
        sections[section] = dataclasses.replace(sections.get(section, getattr(config, section)), **values)
    return dataclasses.replace(config, **sections)


def preset(name: str, numerics: str = "hardware") -> AttentionConfig:
    return AttentionConfig(flash_backend="flash_reference", default=AttentionSpec(preset=name, numerics=numerics))


def tiny_model(attention: AttentionConfig = TINY.attention, *operators: Any, seed: int = 0, **changes: Any) -> GPT:
    """An initialized model of the sizes of ``TINY`` but for ``changes``."""
    config = dataclasses.replace(TINY.model, **changes)
    model = GPT(config, attention.resolve(config.n_layer, config.n_head), *operators)
    initialize(model, seed)
    return model


def before_each_step(patch: pytest.MonkeyPatch, action: Callable[[Run, int], object]) -> None:
    """Call ``action`` with the run and the step before each training step's batch is drawn."""
    open_run = train.open_run

    def opened(config: TrainConfig, dist: DistContext) -> Run:
        run = open_run(config, dist)
        draw = run.batches.next

        def draw_after() -> Any:
            action(run, run.batches.position)
            return draw()

        patch.setattr(run.batches, "next", draw_after)
        return run

    patch.setattr(train, "open_run", opened)


class Place:
    """A folder with a data set, in which runs are made."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.runs = folder / "runs"
        self.data = make_data(folder / "data")

    def config(self, name: str, fields: Mapping[str, Any] | None = None) -> TrainConfig:
        here = {"run.name": name, "run.folder": str(self.runs), "data.dataset": str(self.data)}
        return changed(changed(TINY, here), fields or {})

    def train(self, name: str, fields: Mapping[str, Any] | None = None) -> Path:
        """Run in this process; the run's folder."""
        train.train(self.config(name, fields))
        return self.runs / name

    def train_until(self, step: int, name: str, fields: Mapping[str, Any] | None = None, *, number: int = 0) -> Path:
        """A run whose machine is gone before this step, or that gets a signal there, saves and exits."""

        def end(run: Run, at: int) -> None:
            if at == step and not number:
                raise OSError("the machine is gone")
            if at == step:
                os.kill(os.getpid(), number)

        with pytest.MonkeyPatch.context() as patch:
            before_each_step(patch, end)
            with pytest.raises(SystemExit if number else OSError, match="75" if number else "the machine is gone"):
                self.train(name, fields)
        return self.runs / name

    def recording(self, name: str) -> str:
        return str(self.folder / "recordings" / name)

    def preset_file(self, config: TrainConfig) -> Path:
        """A preset that a command line can name."""
        path = self.folder / f"{config.run.name}.py"
        content = json.dumps(configuration.to_json(config))
        path.write_text(
            "import json\n\nfrom config import TrainConfig, from_json\n\n"
            f"config = from_json(TrainConfig, json.loads({content!r}))\n"
        )
        return path


def lines(run: Path, *, without: tuple[str, ...] = TIMING, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """A run's log as written (not-finite numbers are strings, which compare), less the columns that tell time."""
    records = [json.loads(line) for line in (run / name).read_text().splitlines()]
    return [{name: value for name, value in record.items() if name not in without} for record in records]


def column(run: Path, name: str) -> list[Any]:
    return [line[name] for line in lines(run, without=()) if name in line]


def weights(run: Path, step: int) -> str:
    """SHA-256 of all weights after ``step`` steps."""
    return sha256_file(run / f"checkpoints/step_{step:08d}/model.safetensors")


def optimizer(run: Path, step: int) -> str:
    return sha256_file(run / f"checkpoints/step_{step:08d}/optimizer.safetensors")


def left(run: Path, step: int = 20) -> dict[str, Any]:
    """All that a run has measured, and what its checkpoint of ``step`` holds; nothing that tells time."""
    saved = run / f"checkpoints/step_{step:08d}"
    logs = {path.name: lines(run, name=path.name) for path in sorted(run.glob("*.jsonl"))}
    return logs | {path.name: sha256_file(path) for path in sorted(saved.glob("*.safetensors"))}


@dataclasses.dataclass(frozen=True)
class Interruption:
    """A run that is interrupted and gone on with."""

    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ends_at: int = 10
    dies_at: int = 0
    """Instead, before that step: or the signal ``number`` comes there, if it is not 0."""
    number: int = 0
    first: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Set up to the interruption alone."""
    rest: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Set from there on alone."""
    meanwhile: Callable[[Path], object] = lambda run: None


def assert_equals_straight(place: Place, name: str, interruption: Interruption, *, logs: bool = True) -> Path:
    """The interrupted run's folder. It has the logs, weights, moments, random states and recording of the run that never stopped."""
    # Of one name, which a recording's header holds, in two folders.
    elsewhere, recordings = place.folder / "straight", [place.recording(f"{name}_{which}") for which in ("a", "b")]
    straight = {**interruption.fields, "run.folder": str(elsewhere), "data.record": recordings[0]}
    fields = {**interruption.fields, "data.record": recordings[1]}
    if "data.replay" in fields:
        straight["data.record"] = fields["data.record"] = ""
    place.train(name, straight)
    first = {**fields, **interruption.first}
    if interruption.dies_at:
        place.train_until(interruption.dies_at, name, first, number=interruption.number)
    else:
        place.train(name, {**first, "run.steps": interruption.ends_at})
    run, steps = place.runs / name, interruption.fields.get("run.steps", 20)
    interruption.meanwhile(run)
    assert not (run / f"checkpoints/step_{steps:08d}").exists()
    place.train(name, {**fields, **interruption.rest, "run.resume": "yes"})
    found, expected = left(run, steps), left(elsewhere / name, steps)
    assert set(found) == set(expected)
    assert all(found[file] == expected[file] for file in found if logs or file.endswith("tensors"))
    assert recorded(Path(recordings[1])) == recorded(Path(recordings[0]))
    return run


def tree(folder: Path) -> dict[str, str]:
    """Every file and folder below, with a digest of its content."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted(folder.rglob("*"))
    }


def recorded(folder: Path) -> dict[str, str]:
    """A recording's files and their digests, less which run made it."""
    return {name: digest for name, digest in tree(folder).items() if name != RUN_ID}


def environment() -> dict[str, str]:
    """One thread, as in the tests' own process: sums come out in the same order. Packages may lie on PYTHONPATH already."""
    path = os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH"))))
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def command(script: Path, arguments: list[str], processes: int = 1) -> list[str]:
    """Plain Python for one process, torchrun for more."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else []
    return [sys.executable, *launch, str(script), *arguments]


def completed(line: list[str], **settings: Any) -> subprocess.CompletedProcess[str]:
    """What a command leaves that is started from the checkout, in ``environment()``."""
    given = {"env": environment(), "cwd": ROOT, "timeout": 120} | settings
    return subprocess.run(line, capture_output=True, text=True, **given)


def start_train(arguments: list[str], processes: int = 1) -> subprocess.CompletedProcess[str]:
    """train.py as a user starts it."""
    return completed(command(ROOT / "train.py", arguments, processes))


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A TCP port for the store of processes that meet: nobody who asks for any free port is given it before they open it.

    A bound socket is passed over when the system chooses a port; torch's store asks for this one with SO_REUSEADDR and gets it.
    """
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        yield kept.getsockname()[1]
