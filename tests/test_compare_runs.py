"""scripts/compare_runs.py: the table, the sentence about the data, and one line for each mistake."""

import builtins
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from scripts import compare_runs
from training.metrics import Metrics

BATCHES = {"data_sha256": "aa", "recording": "night", "recording_start": "00", "sequence_length": 64}


def write_run(
    folder: Path,
    losses: Sequence[float],
    *,
    digests: str = "",
    first: int = 0,
    preset: str = "flash",
    batches: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    **columns: float,
) -> Path:
    """A run whose step s has digest ``digests[s]`` (repeated to length; "" for none)."""
    metrics = Metrics(folder)
    for i, loss in enumerate(losses):
        digest = {"data_digest": digests[min(i, len(digests) - 1)] * 16} if digests else {}
        metrics.log(first + i, train_loss=loss, **digest, **columns)
    metrics.close()
    config = {"attention": {"default": {"preset": preset}}, "run": {"name": folder.name}, **(settings or {})}
    record = {"config": config, "attention_name": f"{preset} (paper)", "batches": BATCHES | (batches or {})}
    (folder / "config.json").write_text(json.dumps(record))
    return folder


def compare(*arguments: object) -> None:
    compare_runs.main([str(argument) for argument in arguments])


def table_of(tmp_path: Path, *folders: Path) -> dict[str, dict[str, Any]]:
    compare(*folders, "--out", "none", "--patience", 3, "--table", tmp_path / "t.json")
    return {row["run"]: row for row in json.loads((tmp_path / "t.json").read_text())["runs"]}


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    failing = write_run(tmp_path / "failing", [3.0, 2.0, 2.0, 4.0, 4.0, 5.0], digests="d", w_q_norm_max=30.0)
    fixed = write_run(tmp_path / "fixed", [3.0, 2.0, 1.9, 1.8, 1.7, 1.6], digests="d", preset="flash_delta_from_p")
    return failing, fixed


def test_the_table_tells_when_each_run_exploded(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    rows = table_of(tmp_path, *pair)
    assert (rows["failing"]["exploded_at"], rows["fixed"]["exploded_at"]) == (3, None)


def test_the_table_tells_where_runs_part(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    assert table_of(tmp_path, *pair)["fixed"]["differs_from_first_at"] == 2


def test_the_table_tells_what_was_changed(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    changed = table_of(tmp_path, *pair)["fixed"]["changed"]
    assert changed == {"attention.default.preset": ["flash", "flash_delta_from_p"]}


def test_the_table_holds_losses_norm_and_speed(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "a")
    for step, (norm, speed) in enumerate([(2.0, 10.0), (math.nan, 30.0), (7.0, 20.0)]):
        metrics.log(step, val_loss=4.0 - step)
        metrics.log(step, train_loss=3.0 - step, w_q_norm_max=norm, tokens_per_second=speed)
    metrics.log(3, val_loss=2.5)
    metrics.close()
    row = table_of(tmp_path, tmp_path / "a")["a"]
    names = ("train_final", "train_best", "val_final", "val_best", "w_q_norm_largest", "tokens_per_second")
    assert [row[name] for name in names] == [1.0, 1.0, 2.5, 2.0, 7.0, 20.0]


def test_a_run_that_ends_in_nan_is_written_as_strict_json(tmp_path: Path) -> None:
    row = table_of(tmp_path, write_run(tmp_path / "a", [2.0, math.nan]))["a"]
    assert (row["train_final"], row["train_best"], row["exploded_at"]) == ("nan", 2.0, 1)


def test_the_markdown_table_has_a_row_a_run(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    compare(*pair, "--out", "none", "--patience", 3, "--table", tmp_path / "t.md")
    rows = [line.split(" | ") for line in (tmp_path / "t.md").read_text().splitlines() if line.startswith("| f")]
    assert [(row[0], row[3], row[4]) for row in rows] == [("| failing", "3", "-"), ("| fixed", "no", "step 2")]


@pytest.mark.parametrize(
    ("digests", "sentence"),
    [
        (
            "abcd",
            "Data: identical: all 2 runs saw the same batches in the same order through step 5 (recording night).",
        ),
        ("abxy", "Data: NOT identical: other batches than a: b from step 2 on."),
        ("", "Data: unknown: no data_digest at a step in common with a: b."),
    ],
)
def test_one_sentence_about_the_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], digests: str, sentence: str
) -> None:
    a = write_run(tmp_path / "a", [2.0] * 6, digests="abcd")
    b = write_run(tmp_path / "b", [2.0] * 6, digests=digests)
    compare(a, b, "--out", "none")
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("Data:")] == [sentence]


def test_other_data_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write_run(tmp_path / "a", [2.0] * 3, digests="a")
    b = write_run(tmp_path / "b", [2.0] * 3, digests="b", batches={"data_sha256": "bb", "recording": ""})
    compare(a, b, "--out", "none")
    assert "b from step 0 on (data_sha256, recording differ)." in capsys.readouterr().out


def test_one_run_that_differs_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [write_run(tmp_path / name, [2.0] * 3, digests=d) for name, d in (("a", "a"), ("b", "a"), ("c", "ab"))]
    compare(*folders, "--out", "none")
    assert "Data: NOT identical: other batches than a: c from step 1 on." in capsys.readouterr().out


def test_identical_runs_never_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare(*(write_run(tmp_path / name, [2.0, math.nan]) for name in "ab"), "--out", "none")
    assert " never " in capsys.readouterr().out


def test_other_validation_sequences_are_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write_run(tmp_path / "a", [2.0], batches={"validation_sequences": 8})
    b = write_run(tmp_path / "b", [2.0], batches={"validation_sequences": 16})
    compare(a, b, "--out", "none")
    assert "Validation losses do not compare with a's" in capsys.readouterr().out


def test_a_run_cut_short_above_the_margin_is_not_called_stable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compare(write_run(tmp_path / "a", [2.0, 2.0, 3.0, 3.0]), "--out", "none")
    assert "a is above the margin since step 2 and ends at 3: too soon to tell." in capsys.readouterr().out


def test_the_picture_is_drawn(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    compare(*pair, "--out", tmp_path / "c.png")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_without_config_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write_run(tmp_path / "a", [2.0])
    (a / "config.json").unlink()
    compare(a, "--out", "none")
    assert "\na    ?  " in capsys.readouterr().out


def mistake(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What is printed for a mistake; it must be one line and exit code 2."""
    with pytest.raises(SystemExit) as leaving:
        compare(*arguments)
    assert leaving.value.code == 2
    captured = capsys.readouterr().err
    assert captured.startswith("error: ")
    assert captured.count("\n") == 1
    return captured


def test_an_unknown_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no such run folder" in mistake(capsys, tmp_path / "nothing")


def test_a_folder_without_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "not the folder of a run" in mistake(capsys, tmp_path)


def test_a_run_without_training_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "val_loss": 3.0}\n')
    assert "no train_loss" in mistake(capsys, tmp_path)


def test_runs_without_a_common_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write_run(tmp_path / "a", [2.0] * 3), write_run(tmp_path / "b", [2.0] * 3, first=10)
    assert "b and a have no step in common" in mistake(capsys, a, b)


def test_a_config_that_is_not_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write_run(tmp_path / "a", [2.0])
    (a / "config.json").write_text("{")
    assert "config.json: not JSON" in mistake(capsys, a)


@pytest.mark.parametrize(
    "option", [("--patience", 0), ("--margin", -1), ("--out", "c.gif"), ("--table", "t.xls"), ("--color", "red")]
)
def test_a_bad_option_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], option: tuple[str, object]) -> None:
    assert option[0] in mistake(capsys, write_run(tmp_path / "a", [2.0]), *option)


@pytest.mark.parametrize("option", [("--out", "c.png"), ("--table", "t.md")])
def test_a_place_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: tuple[str, str]
) -> None:
    a = write_run(tmp_path / "a", [2.0])
    path = a / "metrics.jsonl" / option[1]
    arguments = [option[0], path] if option[0] == "--out" else [option[0], path, "--out", "none"]
    assert f"{option[0]} {path}: cannot be written" in mistake(capsys, a, *arguments)


def test_without_matplotlib_the_table_is_still_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    true_import = builtins.__import__

    def without_matplotlib(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return true_import(name, *args, **kwargs)

    a = write_run(tmp_path / "a", [2.0])
    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    with pytest.raises(SystemExit):
        compare(a, "--out", tmp_path / "c.png")
    captured = capsys.readouterr()
    assert "a    flash (paper)" in captured.out
    assert "matplotlib cannot be used here" in captured.err
