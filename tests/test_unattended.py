"""One command that starts a run or goes on with it, whatever a kill has left; a run that is asked to leave saves first."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import (
    ROOT,
    Place,
    before_each_step,
    command,
    environment,
    lines,
    optimizer,
    recorded,
    start_train,
    tree,
    weights,
)

import training.run
from data.recording import Recorder, Recording
from errors import UserError
from training import record
from training.run import Run
from training.signals import EXIT_RESUME, SIGNALS

AUTO = {"run.resume": "auto"}


@pytest.fixture(scope="module")
def straight(place: Place) -> Path:
    """Never interrupted; its recording is ``straight``."""
    fields = {"run.folder": str(place.folder / "elsewhere"), "data.record": place.recording("straight")}
    place.train("run", fields)
    return place.folder / "elsewhere/run"


def assert_same_run(place: Place, run: Path, straight: Path, recording: str) -> None:
    assert lines(run) == lines(straight)
    assert (weights(run, 20), optimizer(run, 20)) == (weights(straight, 20), optimizer(straight, 20))
    assert recorded(Path(place.recording(recording))) == recorded(Path(place.recording("straight")))


def fields_of(place: Place, case: str) -> dict[str, Any]:
    """Of a run called ``run``, as its recording's header has it, in folders of the case's."""
    return {**AUTO, "run.folder": str(place.folder / case), "data.record": place.recording(case)}


# ---- auto


def test_auto_starts_a_new_run_and_leaves_a_finished_one(place: Place, straight: Path) -> None:
    fields = fields_of(place, "new")
    place.train("run", fields)
    run = place.folder / "new/run"
    assert_same_run(place, run, straight, "new")
    before = lines(run), weights(run, 20), tree(Path(fields["data.record"]))
    place.train("run", fields)
    assert (lines(run), weights(run, 20), tree(Path(fields["data.record"]))) == before


def test_a_new_run_leaves_the_recording_of_another_alone_and_takes_one_over_that_has_no_step(place: Place) -> None:
    fields = fields_of(place, "theirs")
    place.train("run", {**fields, "run.steps": 10})
    before = tree(Path(fields["data.record"]))
    for resume in ("auto", "no"):
        new = {**fields, "run.folder": str(place.folder / "ours"), "run.resume": resume}
        with pytest.raises(UserError, match=r"theirs exists: record under another name"):
            place.train("run", new)
        assert tree(Path(fields["data.record"])) == before
        # As a kill leaves it between the start of the recording and that of the run.
        begun = Path(place.recording(f"begun_{resume}"))
        header = replace(Recording.open(Path(fields["data.record"])).header, source_run=begun.name)
        Recorder.create(begun, header).close(complete=False)
        place.train(f"begun_{resume}", {"run.resume": resume, "data.record": str(begun), "run.steps": 3})
        assert Recording.open(begun).steps == 3


@pytest.mark.parametrize("resume", ["auto", "no"])
def test_a_run_starts_in_an_empty_folder_that_somebody_made_for_it(place: Place, tmp_path: Path, resume: str) -> None:
    """A mount, or a link to another disk, which cannot be removed and made again."""
    place.runs.mkdir(exist_ok=True)
    (place.runs / f"linked_{resume}").symlink_to(tmp_path)
    place.train(f"linked_{resume}", {"run.resume": resume, "run.steps": 2})
    assert (tmp_path / "config.json").is_file()


@pytest.mark.parametrize(
    ("found", "told"), [("thesis.tex", r"thesis\.tex in it"), ("wandb/x", "wandb in it"), ("", "")]
)
def test_auto_leaves_alone_what_no_run_has_made(place: Place, found: str, told: str) -> None:
    there = place.runs / f"not_a_run_{found[:5]}" / found
    there.parent.mkdir(parents=True, exist_ok=True)
    there.write_text("so far")
    name = f"not_a_run_{found[:5]}"
    with pytest.raises(
        UserError, match=rf"^run\.name = '{name}': expected a new name, or a run's: .*{told or 'a file'}"
    ):
        place.train(name, AUTO)
    assert there.read_text() == "so far"


def test_a_start_that_fails_removes_only_what_it_has_made(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(run: Run) -> None:
        (run.folder / "notes.txt").write_text("somebody's")
        raise UserError("no probe")

    monkeypatch.setattr(training.run, "open_telemetry", fails)
    with pytest.raises(UserError, match="no probe"):
        place.train("notes")
    assert [path.name for path in (place.runs / "notes").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("left", [(), (record.LOCK_FILE,)], ids=["empty", "half made"])
def test_a_start_looks_again_once_it_has_the_lock(
    place: Place, left: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one has begun and ended meanwhile."""
    folder, lock = place.runs / f"overtaken_{len(left)}", record.lock
    folder.mkdir(parents=True)
    for name in left:
        (folder / name).touch()

    def late(of: Path) -> Any:
        (of / "config.json").write_text("theirs")
        return lock(of)

    monkeypatch.setattr(record, "lock", late)
    with pytest.raises(UserError, match="exists; choose another name"):
        place.train(folder.name)
    assert (folder / "config.json").read_text() == "theirs"


@pytest.mark.parametrize("kind", ["run", "recording"])
def test_a_run_whose_folder_was_moved_away_writes_nothing_into_what_is_there_now(
    place: Place, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody took it for dead, and began another of this name."""
    fields = {"data.record": place.recording(f"moved_{kind}")}
    there = {"run": place.runs / "moved_run", "recording": Path(fields["data.record"])}[kind]

    def replaced(run: Run, step: int) -> None:
        if step == 13:
            shutil.copytree(there, there.with_name(f"{there.name}_copy"))
            there.rename(there.with_name(f"{there.name}_before"))
            there.with_name(f"{there.name}_copy").rename(there)
            before.update(tree(there))

    before: dict[str, str] = {}
    before_each_step(monkeypatch, replaced)
    with pytest.raises(UserError, match=rf"^{there}: somebody has removed, moved or replaced it"):
        place.train(f"moved_{kind}", fields)
    assert tree(there) == before


def test_what_a_killed_save_had_still_to_delete_goes_with_the_next_start(place: Place) -> None:
    run = place.train("pruned")
    (run / "checkpoints/.step_00000005.tmp").mkdir()
    place.train("pruned", {**AUTO, "checkpoint.keep_last": 1})
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_00000020"]


# ---- asked to leave


@pytest.mark.parametrize(("step", "message"), [(7, "no checkpoint yet; "), (13, "checkpoints/step_00000010; ")])
def test_ctrl_c_names_the_checkpoint(place: Place, step: int, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(run: Run, at: int) -> None:
        if at == step:
            raise KeyboardInterrupt

    before_each_step(monkeypatch, interrupt)
    with pytest.raises(KeyboardInterrupt, match=message) as stop:
        place.train(f"interrupted_at_{step}", AUTO)
    assert "--run.resume yes" in str(stop.value)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_run_that_is_asked_to_leave_saves_and_goes_on_to_the_same_bits(
    place: Place, straight: Path, number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = {**fields_of(place, number.name), "telemetry.every": 0}

    def asked(run: Run, step: int) -> None:
        if step == 7:
            os.kill(os.getpid(), number)

    with pytest.MonkeyPatch.context() as patch:
        before_each_step(patch, asked)
        with pytest.raises(SystemExit) as left:
            place.train("run", fields)
    assert left.value.code == EXIT_RESUME == 75
    run = place.folder / number.name / "run"
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_00000008"]
    assert lines(run)[-1]["step"] == 7
    assert "step 8: asked to leave; saved" in capsys.readouterr().out
    place.train("run", fields)
    assert weights(run, 20) == weights(straight, 20)
    assert [line["train_loss"] for line in lines(run)[:-1]] == [line["train_loss"] for line in lines(straight)[:-1]]
    assert recorded(Path(fields["data.record"])) == recorded(Path(place.recording("straight")))


def test_a_switch_of_the_step_that_it_leaves_before_is_recorded(place: Place) -> None:
    fields = {**AUTO, "alarm.switches": ("8:1:flash_fp32_o",)}

    def asked(run: Run, step: int) -> None:
        if step == 7:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        before_each_step(patch, asked)
        with pytest.raises(SystemExit):
            place.train("left_before_a_switch", fields)
    run = place.train("left_before_a_switch", fields)
    assert [line["step"] for line in lines(run, name="interventions.jsonl")] == [8]


TWICE = """
import os, signal
from training import signals
with signals.PreemptionHandler() as preemption:
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    print(preemption.requested, flush=True)
    signals.ONE_REQUEST = 0.0
    os.kill(os.getpid(), signal.SIGTERM)
    print("never")
"""


def test_a_second_signal_ends_at_once_if_it_is_not_the_first_one_handed_on() -> None:
    done = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True, cwd=ROOT, env=environment())
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "True\n")


DIES = """
import os, signal
import train

open_run = train.open_run

def dies(config, dist):
    run = open_run(config, dist)
    draw = run.batches.next
    def draw_or_die():
        if run.batches.position == 13 and str(dist.rank) == os.environ["TORCHELASTIC_RESTART_COUNT"]:
            os.kill(os.getpid(), signal.SIGKILL)
        return draw()
    run.batches.next = draw_or_die
    return run

train.open_run = dies
train.main()
"""


@pytest.mark.slow
def test_torchrun_restarts_a_run_that_goes_on(place: Place, tmp_path: Path) -> None:
    """First rank 0 dies, then rank 1."""
    straight, restarted = (place.config(name, {"data.micro_batch": 2, **AUTO}) for name in ("straight_2", "restarted"))
    assert start_train([str(place.preset_file(straight))], processes=2).returncode == 0
    (tmp_path / "dies.py").write_text(DIES)
    launch = command(tmp_path / "dies.py", [str(place.preset_file(restarted))], 2)
    launch.insert(launch.index("--standalone"), "--max-restarts=2")
    done = subprocess.run(launch, capture_output=True, text=True, env=environment(), timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("from step 10") == 2
    assert lines(place.runs / "restarted") == lines(place.runs / "straight_2")
    assert weights(place.runs / "restarted", 20) == weights(place.runs / "straight_2", 20)
