"""scripts/run_variants.py: several runs at once, one stopped behind its explosion, the others seen through."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_runs import ROOT, Place, column, lines, new_place, start_train

import config
from scripts import run_variants


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with new_place(tmp_path_factory) as place:
        yield place


def start(place: Place, *arguments: str) -> None:
    recipe = str(place.preset_file(place.config("recipe")))
    logs = ["--logs", str(place.folder / "logs"), "--every", "0.2"]
    run_variants.main([recipe, *arguments, *logs])


@pytest.mark.slow
def test_a_run_that_explodes_is_stopped_and_the_others_end(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    flags = "--optim.lr 1e4 --optim.grad-clip 0 --nonfinite.policy continue --run.steps 100000 --checkpoint.every 0"
    start(place, "--variants", "quiet", f"wild: {flags}", "--slots", "0", "1", "--after", "5", "--run.log-every", "1")
    said = capsys.readouterr().out
    assert "quiet  ended at step 19" in said
    assert "wild   exploded at step" in said
    assert "stopped at step" in said
    start_train([str(place.preset_file(place.config("alone")))])
    assert column(place.runs / "quiet", "train_loss") == column(place.runs / "alone", "train_loss")
    again = lines(place.runs / "quiet")
    start(place, "--variants", "quiet", "--resume")
    assert "quiet  was over already" in capsys.readouterr().out
    assert lines(place.runs / "quiet") == again


@pytest.mark.slow
def test_runs_stop_although_the_shell_ignores_interrupts(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_variants, "PATIENCE_FOR_AN_END", 20)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        start(place, "--variants", "endless: --run.steps 1000000 --checkpoint.every 0", "--minutes", "0.2")
    finally:
        signal.signal(signal.SIGINT, before)
    assert "endless  stopped at step" in capsys.readouterr().out


def test_a_run_that_fails_by_itself_is_told(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        start(place, "--variants", f"lost: --data.dataset {place.folder}/nowhere")
    assert stop.value.code == 1
    assert "lost: failed with exit code 2" in capsys.readouterr().out
    assert "no such data set" in (place.folder / "logs/lost.log").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--variants", "a", "a"], "each name once"),
        (["--variants", "a: --optim.lr fast"], "optim.lr"),
        (["--variants", "a: --attention.default.preset flsh"], "attention preset = 'flsh'"),
        ([], "--variants"),
    ],
)
def test_what_cannot_be_is_told_before_anything_starts(place: Place, arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as stop:
        start(place, *arguments)
    assert stop.value.code == 2
    assert not (place.runs / "a").exists()


def test_every_variant_of_the_reproduction_is_understood(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    recording = ["--data.replay", "replay_batches/fast_failure", "--run.folder", str(tmp_path)]
    arguments = ["configs/fast_failure.py", *recording, "--variants", "@configs/reproduction.txt"]
    made = run_variants.variants(*run_variants.parse(arguments))
    assert len(made) == len({variant.name for variant in made}) > 30
    assert len({str(config.load(variant.arguments).attention) for variant in made}) > 15


def test_an_existing_run_is_not_touched_without_resume(place: Place) -> None:
    folder = place.runs / "there"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(SystemExit):
        start(place, "--variants", "there")
    assert (folder / "metrics.jsonl").read_text() == ""


def test_user_errors_are_one_line(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        start(place, "--variants", "a", "a")
    assert capsys.readouterr().err.strip().count("\n") == 0
