"""training/metrics.py: the JSON lines survive kills, resumes and NaN; offline W&B runs hold the same numbers."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from errors import UserError
from training.metrics import Metrics, WandbConfig, read_metrics, start_wandb


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
    return Metrics(folder, wandb_run, **others)


def log_steps(folder: Path, steps: range, **options: Any) -> None:
    metrics = make(folder, **options)
    for step in steps:
        metrics.log(step, train_loss=10.0 - step)
    metrics.close()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_values_come_back(tmp_path: Path, value: float) -> None:
    metrics = make(tmp_path)
    metrics.log(0, grad_norm=value)
    metrics.close()
    assert repr(read_metrics(tmp_path)[0]["grad_norm"]) == repr(value)


def test_tensors_and_numpy_scalars_become_numbers(tmp_path: Path) -> None:
    metrics = make(tmp_path)
    metrics.log(3, train_loss=torch.tensor(1.5), batch=np.int64(7), data_digest="00ff00ff00ff00ff")
    assert read_metrics(tmp_path) == [{"step": 3, "train_loss": 1.5, "batch": 7, "data_digest": "00ff00ff00ff00ff"}]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": oops}\n{"step": 2}\n')
    with pytest.raises(UserError, match="line 2"):
        read_metrics(tmp_path)


def test_a_broken_wandb_does_not_end_the_run(tmp_path: Path) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("gone")

    metrics = make(tmp_path)
    metrics._wandb_run = broken = SimpleNamespace(log=fail, finish=fail)
    with pytest.warns(UserWarning, match="gone"):
        metrics.log(0, train_loss=1.0)
    metrics.log(1, train_loss=1.0)
    assert len(read_metrics(tmp_path)) == 2
    metrics._wandb_run = broken
    with pytest.warns(UserWarning, match="gone"):
        metrics.close()


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """What an offline W&B is given: the options of each run that is started, and the rows of all."""
    wandb, seen = pytest.importorskip("wandb"), {"options": [], "rows": []}
    init = wandb.init

    def watched(**options: Any) -> Any:
        run = init(**options)
        log = run.log
        monkeypatch.setattr(run, "log", lambda row: (seen["rows"].append(row), log(row)))
        seen["options"].append(options)
        return run

    monkeypatch.setattr(wandb, "init", watched)
    return seen


def test_wandb_has_numbers_by_step_and_a_resumed_run_keeps_its_id(tmp_path: Path, given: dict[str, list[Any]]) -> None:
    metrics = make(tmp_path / "run", mode="offline")
    metrics.log(0, val_loss=10.25)
    metrics.log(0, train_loss=9.0, data_digest="0123456789abcdef")
    metrics.close()
    log_steps(tmp_path / "run", range(1, 2), mode="offline", resume_step=1)
    assert given["rows"] == [
        {"step": 0, "val_loss": 10.25},
        {"step": 0, "train_loss": 9.0},
        {"step": 1, "train_loss": 9.0},
    ]
    first, second = given["options"]
    assert first["id"] == second["id"]
    # Runs of one recording are a group; names tell seeds of one attention apart.
    expected = {"group": "night", "name": "run: flash (hardware)", "project": "low-precision-attention"}
    assert expected.items() <= first.items()
    assert list(tmp_path.glob("run/wandb/offline-run-*/run-*.wandb"))
