"""training/metrics.py: the JSON lines survive kills, resumes and NaN; offline W&B runs hold the same numbers."""

import builtins
import json
import math
import struct
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from errors import UserError
from training.metrics import Metrics, Reached, WandbConfig, read_metrics, start_wandb


def make(folder: Path, *, mode: str = "disabled", resume_step: int | None = None, **others: Any) -> Metrics:
    wandb_run = start_wandb(
        folder,
        WandbConfig(mode=mode, **others.pop("wandb", {})),
        config_json={"optim": {"lr": 0.002}},
        recording="night",
        attention_name="flash (hardware)",
        resumed=resume_step is not None,
        enabled=others.get("enabled", True),
    )
    return Metrics(
        folder, wandb_run, **{"resumed": None if resume_step is None else Reached(resume_step, resume_step), **others}
    )


def log_steps(folder: Path, steps: range, **options: Any) -> None:
    metrics = make(folder, **options)
    for step in steps:
        metrics.log(step, train_loss=10.0 - step)
    metrics.close()


def test_values_come_back_bit_for_bit(tmp_path: Path) -> None:
    values = [0.1 + 0.2, float(np.float32(1) / 3), -0.0, 5e-324]
    metrics = make(tmp_path)
    for step, value in enumerate(values):
        metrics.log(step, train_loss=value)
    metrics.close()
    assert [struct.pack("d", line["train_loss"]) for line in read_metrics(tmp_path)] == [
        struct.pack("d", value) for value in values
    ]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_values_come_back(tmp_path: Path, value: float) -> None:
    metrics = make(tmp_path)
    metrics.log(0, grad_norm=value)
    metrics.close()
    assert repr(read_metrics(tmp_path)[0]["grad_norm"]) == repr(value)


def test_lines_are_strict_json(tmp_path: Path) -> None:
    metrics = make(tmp_path)
    metrics.log(0, train_loss=math.nan, grad_norm=math.inf)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    assert json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)["train_loss"] == "nan"


def test_tensors_and_numpy_scalars_become_numbers(tmp_path: Path) -> None:
    metrics = make(tmp_path)
    metrics.log(3, train_loss=torch.tensor(1.5), batch=np.int64(7), data_digest="00ff00ff00ff00ff")
    assert read_metrics(tmp_path) == [{"step": 3, "train_loss": 1.5, "batch": 7, "data_digest": "00ff00ff00ff00ff"}]


def test_what_is_not_known_is_null(tmp_path: Path) -> None:
    make(tmp_path).log(0, mfu=None)
    assert read_metrics(tmp_path) == [{"step": 0, "mfu": None}]


def test_what_is_no_scalar_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="list"):
        make(tmp_path).log(0, train_loss=[1.0])


def test_every_line_is_in_the_file_before_close(tmp_path: Path) -> None:
    metrics = make(tmp_path)
    metrics.log(0, train_loss=1.0)
    assert len(read_metrics(tmp_path)) == 1


def test_resume_drops_its_step_and_later(tmp_path: Path) -> None:
    log_steps(tmp_path, range(10))
    log_steps(tmp_path, range(6, 8), resume_step=6)
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(8))


def test_resume_keeps_a_course_that_a_rollback_left(tmp_path: Path) -> None:
    """A checkpoint of step 3 behind batch 5: steps 3 and 4 of batches 3 and 4 are of the course before it, batch 6 is behind it."""
    places = [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (2, 5), (3, 6), (4, 7)]
    metrics = make(tmp_path)
    for step, batch in places:
        metrics.log(step, batch=batch)
    metrics.log(5, val_loss=1.0)  # a run's end has no batch
    metrics.close()
    make(tmp_path, resumed=Reached(3, 6)).close()
    assert [(line["step"], line["batch"]) for line in read_metrics(tmp_path)] == places[:6]


def test_resume_after_a_kill_cuts_the_torn_line(tmp_path: Path) -> None:
    log_steps(tmp_path, range(3))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "train_l')
    log_steps(tmp_path, range(3, 5), resume_step=3)
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(5))


def test_reading_leaves_out_a_torn_last_line(tmp_path: Path) -> None:
    log_steps(tmp_path, range(3))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "train_l')
    assert len(read_metrics(tmp_path)) == 3


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": oops}\n{"step": 2}\n')
    with pytest.raises(UserError, match="line 2"):
        read_metrics(tmp_path)


def test_a_new_run_does_not_touch_an_old_one(tmp_path: Path) -> None:
    log_steps(tmp_path, range(3))
    with pytest.raises(UserError, match="exists"):
        make(tmp_path)
    assert len(read_metrics(tmp_path)) == 3


@pytest.mark.parametrize(("content", "what"), [(None, "no metrics.jsonl"), ("", "no line")])
def test_reading_says_what_is_missing(tmp_path: Path, content: str | None, what: str) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(UserError, match=what):
        read_metrics(tmp_path)


def test_a_full_disk_names_the_file_and_the_step(tmp_path: Path) -> None:
    metrics = make(tmp_path)
    assert metrics._file is not None
    metrics._file.close()
    metrics._file._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    with pytest.raises(UserError, match=r"metrics\.jsonl.*step 4"):
        metrics.log(4, train_loss=1.0)


@pytest.mark.parametrize(("field", "value"), [("mode", "sometimes"), ("project", "")])
def test_bad_settings_name_the_field(field: str, value: str) -> None:
    with pytest.raises(UserError, match=f"wandb.{field}"):
        WandbConfig(**{field: value})


def test_missing_wandb_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true_import = builtins.__import__

    def without_wandb(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "wandb":
            raise ImportError(name)
        return true_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_wandb)
    with pytest.raises(UserError, match=r"wandb\.mode.*not installed"):
        make(tmp_path / "run", mode="offline")
    assert not (tmp_path / "run").exists()


def test_a_broken_wandb_does_not_end_the_run(tmp_path: Path) -> None:
    def fail(record: dict[str, Any]) -> None:
        raise ConnectionError("gone")

    metrics = make(tmp_path)
    metrics._wandb_run = SimpleNamespace(log=fail)
    with pytest.warns(UserWarning, match="gone"):
        metrics.log(0, train_loss=1.0)
    metrics.log(1, train_loss=1.0)
    assert len(read_metrics(tmp_path)) == 2


def wandb_name(folder: Path, monkeypatch: pytest.MonkeyPatch, **wandb: Any) -> str:
    """What W&B is asked to call the run of a folder."""
    asked: list[str] = []

    def init(**options: Any) -> Any:
        asked.append(options["name"])
        return SimpleNamespace(define_metric=lambda *args, **kwargs: None, finish=lambda exit_code: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Error=ConnectionError))
    make(folder, mode="offline", wandb=wandb).close()
    return asked[0]


def test_wandb_tells_seeds_of_one_attention_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [wandb_name(tmp_path / run, monkeypatch) for run in ("flash", "flash_seed_1")]
    assert names == ["flash: flash (hardware)", "flash_seed_1: flash (hardware)"]


def wandb_records(folder: Path) -> list[Any]:
    """All records of the newest offline run under ``folder``; W&B's own process may still be writing them when ``finish`` is back."""
    deadline = time.monotonic() + 60
    while True:
        records = written_records(folder)
        if any(record.WhichOneof("record_type") == "exit" for record in records):
            return records
        assert time.monotonic() < deadline, "no exit record"
        time.sleep(0.2)


def written_records(folder: Path) -> list[Any]:
    """What is in the file of the newest offline run so far.

    A .wandb file is a LevelDB log (7 bytes of file header; blocks of 32 KiB; records cut into pieces, each with CRC, length
    and a type: whole, first, middle, last) of protocol buffers.
    """
    from wandb.proto import wandb_internal_pb2

    path = max(folder.glob("wandb/offline-run-*/run-*.wandb"), key=lambda p: p.stat().st_mtime_ns)
    data, position, pending, records = path.read_bytes(), 7, b"", []
    assert data[:4] == b":W&B"
    while position + 7 <= len(data):
        left_in_block = 32768 - position % 32768
        if left_in_block < 7:
            position += left_in_block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        if position + 7 + length > len(data):
            break  # not written to its end yet
        pending += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            records.append(wandb_internal_pb2.Record.FromString(pending))
            pending = b""
    return records


def history(folder: Path) -> list[dict[str, float]]:
    rows = []
    for record in wandb_records(folder):
        if record.WhichOneof("record_type") == "history":
            items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            rows.append({key: value for key, value in items.items() if not key.startswith("_")})
    return rows


@pytest.fixture(scope="module")
def offline_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("offline") / "run"
    metrics = make(folder, mode="offline", wandb={"tags": ("seed 1",)})
    metrics.log(0, val_loss=10.25)
    for step in range(3):
        metrics.log(step, train_loss=9.0 - step, data_digest="0123456789abcdef")
    metrics.log(3, val_loss=7.5, train_loss=math.inf)
    metrics.close()
    return folder


def test_wandb_holds_the_numbers_on_the_step_axis(offline_run: Path) -> None:
    assert history(offline_run) == [
        {"step": 0, "val_loss": 10.25},
        {"step": 0, "train_loss": 9.0},
        {"step": 1, "train_loss": 8.0},
        {"step": 2, "train_loss": 7.0},
        {"step": 3, "val_loss": 7.5, "train_loss": math.inf},
    ]


def test_wandb_group_is_the_recording_and_name_the_run_with_its_attention(offline_run: Path) -> None:
    run = next(r.run for r in wandb_records(offline_run) if r.WhichOneof("record_type") == "run")
    assert (run.run_group, run.display_name, run.project, list(run.tags)) == (
        "night",
        "run: flash (hardware)",
        "low-precision-attention",
        ["seed 1"],
    )


def test_a_resumed_wandb_run_keeps_its_id(tmp_path: Path) -> None:
    ids = []
    for resume_step, steps in ((None, range(2)), (2, range(2, 4))):
        time.sleep(1.1)  # wandb names a run's folder by the second it started in
        log_steps(tmp_path, steps, mode="offline", resume_step=resume_step)
        ids.append(next(r.run.run_id for r in wandb_records(tmp_path) if r.WhichOneof("record_type") == "run"))
    assert ids[0] == ids[1]
