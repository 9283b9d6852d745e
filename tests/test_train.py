"""Whole runs in one process: loss that falls, and the record that a run leaves."""

import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_runs import Place, before_each_step, column, tree

import train
from errors import UserError
from training.run import Run

# ---- optimization


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_loss_falls(place: Place, optimizer: str) -> None:
    run = place.train(f"falls_{optimizer}", {"run.steps": 60, "optim.optimizer": optimizer})
    losses, validation = column(run, "train_loss"), column(run, "val_loss")
    # Sixteen words, equally likely: ln 16 nats for at least three bytes each, and the first bytes of a sequence are a guess.
    assert losses[0] > 0.95 * math.log(256)
    assert max(losses[-10:]) < 0.5 * losses[0]
    assert validation[-1] < 0.5 * validation[0]


# ---- what a run prints and leaves


def test_a_line_names_the_layer_of_the_largest_logit() -> None:
    """The alarm may name another."""
    assert train.line(3, {"val_loss": 2.0, "max_logit_max": 740.5, "max_logit_layer": 1, "lr": 0.5}) == (
        "step 3  val_loss 2  lr 0.5  max_logit_max 740.5 in layer 1"
    )


def test_a_run_writes_into_its_folder_only(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = tree(place.data)
    run = place.train("contained", {"run.steps": 2})
    assert tree(tmp_path) == {}
    assert tree(place.data) == before
    logs = {"metrics.jsonl", "telemetry.jsonl"}
    assert {path.name for path in run.iterdir()} == {"config.json", *logs, "checkpoints", "lock", "exit.json"}


def overwrite_the_last_byte(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\0")


def cut_short(path: Path) -> None:
    os.truncate(path, 200)


@pytest.mark.parametrize("name", ["train.bin", "val.bin", "offsets.npy"])
@pytest.mark.parametrize(
    ("change", "told"),
    [(overwrite_the_last_byte, "was written to while the run read it"), (cut_short, "was cut short while it was read")],
)
def test_data_that_change_under_a_run_end_it_with_the_last_good_checkpoint_named(
    place: Place, name: str, change: Callable[[Path], None], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = f"{name}_{change.__name__}"
    data = shutil.copytree(place.data, place.folder / f"data_{case}")
    fields = {"data.dataset": str(data), "run.steps": 30}
    place.train(f"source_{case}", {**fields, "data.record": place.recording(case)})
    path = next(folder / name for folder in (data, Path(place.recording(case))) if (folder / name).exists())

    def at_13(run: Run, step: int) -> None:
        if step == 13:
            change(path)

    before_each_step(monkeypatch, at_13)
    with pytest.raises(UserError, match=rf"{name}: it {told}\nthe newest checkpoint is .*step_00000010;"):
        place.train(f"changed_{case}", {**fields, "data.replay": place.recording(case)})
    assert not (place.runs / f"changed_{case}/checkpoints/step_00000020").exists()
