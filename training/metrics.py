"""The measurements of a run: one line of JSON a record in ``metrics.jsonl``; also Weights & Biases if the config asks for it.

The columns a training run writes (each line carries ``step`` and whichever of the others it has):

    step               optimizer steps done before this line was measured (0 = the initial weights)
    batch              index of the global batch that the step drew
    tokens             training tokens seen so far
    train_loss         mean cross-entropy of the step's global batch, nats a token
    val_loss           mean cross-entropy of the fixed validation batches, nats a token
    grad_norm          2-norm of all gradients before clipping
    lr                 learning rate of the step
    tokens_per_second  of all processes together
    mfu                fraction of the device's peak arithmetic; null where the peak is not known
    seconds            wall-clock time of the run, a resumed run's earlier sessions included
    data_digest        16 hexadecimal digits that stand for every batch drawn so far
    nonfinite          only where loss or gradient was not finite: overflow, skip or stop
    w_q_norm_0 ...     spectral norm of each layer's W_Q; w_q_norm_max is the largest, in layer w_q_norm_layer
    max_logit_max ...  the extremes of a probe's other columns (training.telemetry.summary_columns), which are in telemetry.jsonl

Strict JSON has no NaN and no infinity: they are the strings "nan", "inf" and "-inf", which ``read_lines`` turns back into floats. Finite
floats survive bit for bit.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import files
from attention.watching.log import loose, strict
from errors import UserError, invalid, on_disk, warn

METRICS_FILE = "metrics.jsonl"
WandbMode = Literal["disabled", "offline", "online"]


@dataclass(frozen=True, kw_only=True)
class WandbConfig:
    """Weights & Biases, beside the JSON lines that every run writes."""

    mode: WandbMode = "disabled"
    """offline writes a run into the run's folder, for `wandb sync` later (after kill -9 it may lack last lines, metrics.jsonl does not);
    online sends it as it goes (needs an account). WANDB_MODE in the environment is not read"""
    project: str = "low-precision-attention"
    """project the run is filed under"""

    def __post_init__(self) -> None:
        if not self.project:
            raise invalid("wandb.project", self.project, "a name")


class JsonLines:
    """A file of records that have a ``step``, one line of strict JSON each.

    Unbuffered, one write a line: a killed run loses no finished line and leaves at most one torn one.
    ``digests``: ``line_digests`` of what it has written, and of what was there before.
    """

    def __init__(self, path: Path):
        self.path = path
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  (closed by close())
        self.digests = line_digests(path.read_bytes())

    def append(self, record: dict[str, Any]) -> None:
        """Write one line. Raises ``UserError`` when the disk is full."""
        line = _line(record).encode()
        with on_disk(self.path, f"take the line of step {record['step']}"):
            written = self._file.write(line)
        if written != len(line):
            raise UserError(f"{self.path}: the disk wrote only part of the line of step {record['step']}: is it full?")
        self.digests += line_digests(line)

    def sync(self) -> None:
        """Bring every line so far to the disk. Raises ``UserError`` where the disk refuses."""
        with on_disk(self.path, "be brought to the disk"):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class Metrics:
    """Writer of one run's measurements into ``folder``; lines that are there stay.

    ``wandb_run`` is the result of ``start_wandb``, closed with this. ``enabled``: False on every process but the first, where nothing is
    read or written.
    """

    def __init__(self, folder: Path, wandb_run: Any = None, *, enabled: bool = True):
        self.file: JsonLines | None = None
        self._wandb_run = wandb_run
        if not enabled:
            return
        self.file = JsonLines(folder / METRICS_FILE)

    def log(self, step: int, **scalars: Any) -> None:
        """Append one line, of values of JSON (None: not known, as the MFU of a CPU). Raises ``UserError`` when the disk is full."""
        if self.file is None:
            return
        record = {"step": step, **scalars}
        self.file.append(record)
        if self._wandb_run is None:
            return
        try:
            self._wandb_run.log({k: v for k, v in record.items() if v is not None and not isinstance(v, str)})
        except Exception as error:  # the JSON lines are the record; a broken service must not end a training run
            warnings.warn(f"W&B stopped taking values ({error}); {METRICS_FILE} goes on", stacklevel=2)
            self._wandb_run = None

    def close(self, exit_code: int = 0) -> None:
        """Finish the file and the W&B run (marked failed when ``exit_code`` is not 0)."""
        if self.file is not None:
            self.file.close()
        if self._wandb_run is not None:
            try:
                self._wandb_run.finish(exit_code=exit_code)
            except Exception as error:
                warnings.warn(f"W&B could not finish its run ({error}); {METRICS_FILE} is whole", stacklevel=2)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """``read_lines`` of a run's metrics. Raises ``UserError``: no such folder, no such file in it, no line in it yet, or a line that is not
    a record."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such run folder")
    path = folder / METRICS_FILE
    if not path.is_file():
        raise UserError(f"{folder}: no {METRICS_FILE} in it, so it is not the folder of a run")
    lines = list(read_lines(path))
    if not lines:
        raise UserError(f"{path}: no line in it yet")
    return lines


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file that ``JsonLines`` wrote, in order, non-finite values restored, less a line torn by a kill.

    Raises ``UserError`` for a line that is not a record.
    """
    with on_disk(path, "be read"), files.open_file(path) as file:
        lines = file.read().splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            return
        try:
            record = files.parse_json(line)
            if type(record["step"]) is not int or not 0 <= record["step"] < 2**53:
                raise TypeError
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"{path}: line {number} is not a record with a step; without that line it can be read"
            ) from None
        yield loose(record)


def line_digests(content: bytes) -> list[str]:
    """8 hexadecimal digits of SHA-256 for each line. A checkpoint has those of every log: a resume can then name a changed line."""
    return [hashlib.sha256(line).hexdigest()[:8] for line in content.splitlines(keepends=True)]


def text_of(records: Iterable[dict[str, Any]]) -> str:
    return "".join(map(_line, records))


def _line(record: dict[str, Any]) -> str:
    return json.dumps(strict(record), allow_nan=False) + "\n"


def start_wandb(folder: Path, config: WandbConfig, record: dict[str, Any]) -> Any:
    """Start the W&B run of the run in ``folder``; None where none is asked for.

    ``record``: its config.json. A resumed run goes on under its ``run_id``; runs of one recording are a group.
    Raises ``UserError``: W&B is missing or cannot start.
    """
    if (mode := os.environ.get("WANDB_MODE") or config.mode) != config.mode:
        warn(f"WANDB_MODE = {mode} is not read: wandb.mode is {config.mode}")
    if config.mode == "disabled":
        return None
    try:
        import wandb
    except ImportError:
        raise invalid("wandb.mode", config.mode, "disabled, as wandb is not installed (pip install wandb)") from None
    try:
        run = wandb.init(
            project=config.project,
            dir=folder,
            id=record["run_id"],
            group=record["batches"]["recording"] or None,
            name=f"{folder.name}: {record['attention_name']}",
            config=record,
            mode=config.mode,
            # An offline run never resumes in place: each session writes a folder of its own, under one id.
            resume="allow" if config.mode == "online" else None,
        )
    except Exception as error:  # not its own only: some come from pydantic
        without = "offline or disabled" if config.mode == "online" else "disabled"
        raise invalid("wandb.mode", config.mode, f"{without}, as W&B could not start ({error})") from error
    # W&B's own x axis counts calls of log(); runs overlay only on the training step.
    run.define_metric("step", hidden=True)
    run.define_metric("*", step_metric="step")
    run.define_metric("val_loss", step_metric="step", summary="min,last")
    return run
