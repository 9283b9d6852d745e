"""scripts/summarize_runs.py: the row of a run as train.py leaves it, and of one that is kept as CSV."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from tiny_runs import Place, lines, new_place

from scripts import summarize_runs
from training.telemetry import read_telemetry


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with new_place(tmp_path_factory) as place:
        place.train("one")
        yield place


def published(folder: Path, losses: list[str], norms: list[float] | None = None, planned: int = 0) -> Path:
    """A run of 10 steps a row, as experiments/ keeps it."""
    folder.mkdir(parents=True)
    norms = norms or [1.0] * len(losses)
    rows = [f"{10 * i},{loss},{norm}" for i, (loss, norm) in enumerate(zip(losses, norms, strict=True))]
    (folder / "metrics.csv").write_text("step,train_loss,grad_norm\n" + "\n".join(rows) + "\n")
    (folder / "probes.csv").write_text("step,w_q_norm_1,max_logit_1\n0,1.5,2.0\n100,3.5,700\n200,3.0,50\n")
    run = {"seed": 3, "steps": planned or 10 * len(losses) - 9}
    (folder / "config.json").write_text(json.dumps({"config": {"run": run}, "attention_name": "flash"}))
    return folder


def test_a_run_of_train_py_has_its_row(place: Place) -> None:
    row = summarize_runs.summarize(place.runs / "one", 1, [10], 200)
    logged, probes = lines(place.runs / "one"), read_telemetry(place.runs / "one")
    losses = [line["train_loss"] for line in logged if "train_loss" in line]
    validation = {line["step"]: line["val_loss"] for line in logged if "val_loss" in line}
    assert (row["ended"], row["last_step"], row["attention"]) == ("stable to 19", 19, "flash")
    assert row["train_loss_end"] == pytest.approx(sum(losses[-2:]) / 2)
    assert (row["val_loss_at_10"], row["val_loss_best"]) == (validation[10], min(validation.values()))
    assert row["max_logit_1_largest"] == max(max(probe["max_logit"][1]) for probe in probes)
    assert row["w_q_norm_1_at_10"] == next(probe["w_q_norm"][1] for probe in probes if probe["step"] == 10)


@pytest.mark.parametrize(
    ("losses", "norms", "planned", "ended"),
    [
        (["3"] * 100, [1.0] * 100, 0, "stable to 990"),
        (["3"] * 100, [1.0] * 100, 2000, "stopped early at 990"),
        (["3"] * 50 + ["3.6"] * 50, [1.0] * 100, 0, "exploded at 500"),
        (["3"] * 50 + ["3.4"] * 50, [1.0] * 100, 0, "stable to 990"),
        (["3"] * 50 + ["3.6"] * 10 + ["3"] * 40, [1.0] * 100, 0, "stable to 990"),
        (["3"] * 95 + ["3.6"] * 5, [1.0] * 100, 0, "open since 950"),
        (["3"] * 99 + ["nan"], [1.0] * 100, 0, "NaN at 990"),
        (["3"] * 200, [1.0] * 120 + [30.0] * 80, 0, "unstable since 1,200"),
        (["3"] * 200, [1.0] * 120 + [30.0] + [1.0] * 79, 0, "stable to 1,990"),
    ],
)
def test_how_a_run_ended(tmp_path: Path, losses: list[str], norms: list[float], planned: int, ended: str) -> None:
    run = published(tmp_path / "run", losses, norms, planned)
    assert summarize_runs.summarize(run, 1, [], 200)["ended"] == ended


def test_a_step_without_a_loss_is_not_nan(tmp_path: Path) -> None:
    run = published(tmp_path / "run", ["3", "", "3"])
    row = summarize_runs.summarize(run, 1, [100], 200)
    assert (row["ended"], row["max_logit_1_at_100"], row["w_q_norm_1_largest"]) == ("stable to 20", 700, 3.5)


def test_a_run_that_went_back_counts_what_it_logged_again(place: Place) -> None:
    folder = place.runs / "back"
    folder.mkdir()
    (folder / "config.json").write_bytes((place.runs / "one/config.json").read_bytes())
    rows = [{"step": step, "train_loss": loss} for step, loss in ((0, 5.0), (1, 9.0), (2, 9.0), (1, 4.0))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    row = summarize_runs.summarize(folder, 1, [], 200)
    assert (row["last_step"], row["train_loss_end"]) == (1, 4.0)


def test_what_is_written_has_a_row_a_run_and_explosions_first(place: Place, tmp_path: Path) -> None:
    published(tmp_path / "runs/late", ["3"] * 50 + ["9"] * 50)
    published(tmp_path / "runs/early", ["3"] * 30 + ["9"] * 50)
    published(tmp_path / "runs/calm", ["3"] * 50)
    summarize_runs.main([str(tmp_path / "runs"), str(place.runs / "one"), "--out", str(tmp_path / "out")])
    table = pd.read_csv(tmp_path / "out/summary.csv")
    assert table["run"].tolist() == ["early", "late", "calm", "one"]
    assert table["exploded_at"].tolist()[:2] == [300, 500]
    rows = [line.split(" | ") for line in (tmp_path / "out/summary.md").read_text().splitlines()]
    assert [row[0].strip("| ") for row in rows[2:]] == table["run"].tolist()
    assert {len(row) for row in rows} == {len(rows[0])}


def complaint(arguments: list[Path | str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        summarize_runs.main([str(argument) for argument in arguments])
    message = capsys.readouterr().err
    assert (stop.value.code, message.count("\n")) == (2, 1)
    return message


def test_what_cannot_be_is_one_line(place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = place.runs / "one"
    broken = published(tmp_path / "broken", ["3"])
    (broken / "metrics.csv").write_text("loss\n3\n")
    assert "no such run folder" in complaint([tmp_path / "nowhere"], capsys)
    assert "neither a run nor a folder of runs" in complaint([place.data], capsys)
    assert "two runs have the name one" in complaint([one, one], capsys)
    assert "--layer = 2: expected a layer of the probes" in complaint([one, "--layer", "2"], capsys)
    assert "expected a column step of whole numbers" in complaint([broken], capsys)
    (broken / "config.json").write_text("[]")
    assert "config.json: not the record of a run" in complaint([broken], capsys)
    assert "cannot be written" in complaint([one, "--out", one / "config.json"], capsys)
