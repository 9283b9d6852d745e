"""A run that was killed and goes on, or was stopped and goes on, is to the last bit the run that was never interrupted."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_runs import (
    Place,
    column,
    lines,
    make_data,
    optimizer,
    preset,
    start_train,
    train_and_kill,
    tree,
    weights,
)

import files
import train
from attention import AttentionConfig, AttentionRule, AttentionSpec
from data.recording import Recording
from errors import UserError
from model import GPT, initialize
from training import distributed, record
from training.alarm import AlarmConfig
from training.distributed import Distributed
from training.huggingface import export_gpt2
from training.run import Run

BF16 = {"precision.dtype": "bfloat16"}
RESUME = {"run.resume": "yes"}


def assert_same_run(a: Path, b: Path, step: int = 20) -> None:
    assert lines(a) == lines(b)
    assert weights(a, step) == weights(b, step)
    assert optimizer(a, step) == optimizer(b, step)


def random_states(run: Path, step: int) -> bytes:
    return (run / f"checkpoints/step_{step:08d}/rng.safetensors").read_bytes()


SETTINGS: dict[str, dict[str, Any]] = {
    "adamw_bfloat16_stochastic": {
        **BF16,
        "attention": AttentionConfig(
            flash_backend="flash_reference",
            default=AttentionSpec(preset="flash_stochastic_p_o"),
            rules=(
                AttentionRule(
                    layers=(1,), heads=(1,), attention=AttentionSpec(preset="flash_o_nearest_delta_stochastic")
                ),
            ),
        ),
    },
    "muon_float32": {"optim.optimizer": "muon", "optim.weight_decay": 0.1},
    "adamw_float16": {"precision.dtype": "float16", "model.qk_clip_tau": 0.2},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_killed_and_resumed_equals_straight(place: Place, name: str) -> None:
    # Runs of one name, for a recording's header holds it and its bytes are compared; so the folders differ.
    elsewhere = place.folder / "straight_runs"
    fields = {**SETTINGS[name], "data.record": place.recording(name)}
    place.train(name, {**fields, "run.folder": str(elsewhere), "data.record": place.recording(f"{name}_straight")})
    assert train_and_kill(place, place.config(name, fields)) == -9
    assert not (place.runs / name / "checkpoints/step_00000020").exists()
    assert Recording.open(Path(place.recording(name))).complete is False
    assert_same_run(place.train(name, {**fields, **RESUME}), elsewhere / name)
    assert tree(Path(place.recording(name))) == tree(Path(place.recording(f"{name}_straight")))


@pytest.fixture(scope="module")
def straight(place: Place) -> Path:
    return place.train("straight", {"run.steps": 30})


def test_equal_runs_save_equal_random_states(place: Place, straight: Path) -> None:
    torch.rand(7)  # whatever else this process has drawn
    again = place.train("straight_again", {"run.steps": 30})
    interrupted = place.train("straight_resumed", {"run.steps": 20})
    torch.rand(3)
    place.train("straight_resumed", {**RESUME, "run.steps": 30})
    assert random_states(again, 30) == random_states(straight, 30) == random_states(interrupted, 30)
    other = place.train("another_seed", {"run.steps": 1, "run.seed": 7})
    assert random_states(other, 1) != random_states(straight, 30)


def test_finished_run_can_be_made_longer(place: Place, straight: Path) -> None:
    longer = place.train("longer", {"run.steps": 10})
    place.train("longer", {**RESUME, "run.steps": 30})
    assert_same_run(longer, straight, 30)


def test_resuming_a_finished_run_changes_nothing(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    finished = place.train("finished")
    before = lines(finished), weights(finished, 20)
    assert "finished, at step" not in capsys.readouterr().out
    place.train("finished", RESUME)
    assert (lines(finished), weights(finished, 20)) == before
    assert "finished: finished, at step 20 of as many; --run.steps goes on from there" in capsys.readouterr().out


def test_damaged_checkpoint_falls_back_to_the_one_before(
    place: Place, straight: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = place.train("damaged")
    model = damaged / "checkpoints/step_00000020/model.safetensors"
    content = bytearray(model.read_bytes())
    content[-1] ^= 1
    model.write_bytes(bytes(content))
    capsys.readouterr()
    place.train("damaged", {**RESUME, "run.steps": 30})
    warning = capsys.readouterr().err
    assert warning.startswith("warning: ")
    assert "step_00000020 is damaged" in warning
    assert "falling back to" in warning
    assert "step_00000010" in warning
    assert_same_run(damaged, straight, 30)


def test_replay_resumes_where_it_was(place: Place, straight: Path) -> None:
    place.train("original", {"run.steps": 30, "data.record": place.recording("original")})
    fields = {"data.replay": place.recording("original")}
    place.train("replayed", {**fields, "run.steps": 10})
    resumed = place.train("replayed", {**fields, **RESUME, "run.steps": 30})
    assert_same_run(resumed, straight, 30)


def test_time_goes_on_from_the_checkpoint(place: Place) -> None:
    run = place.train("timed", {"run.steps": 10})
    before = column(run, "seconds")[-1]
    place.train("timed", RESUME)
    seconds = column(run, "seconds")
    assert seconds == sorted(seconds)
    assert seconds[10] > before


FREE = {
    "run.log_every": 2,
    "evaluation.every": 5,
    "telemetry.every": 5,
    "checkpoint.every": 4,
    "nonfinite.policy": "skip",
    "data.verify": "size",
}


def test_when_things_are_written_may_change(place: Place, straight: Path) -> None:
    place.train("freer", {"run.steps": 10})
    freer = place.train("freer", {**RESUME, **FREE, "run.steps": 30})
    assert weights(freer, 30) == weights(straight, 30)


def test_data_may_move(place: Place, straight: Path, tmp_path: Path) -> None:
    moved = place.train("moved", {"run.steps": 10})
    shutil.copytree(place.data, tmp_path / "elsewhere")
    place.train("moved", {**RESUME, "run.steps": 30, "data.dataset": str(tmp_path / "elsewhere")})
    assert weights(moved, 30) == weights(straight, 30)


def test_a_resume_needs_no_weights_to_start_from(place: Place, tmp_path: Path) -> None:
    fields = {"model.bias": True, "run.init_from": str(tmp_path / "gpt2")}
    config = place.config("first", fields)
    model = GPT(config.model, config.attention.resolve(config.model.n_layer, config.model.n_head))
    initialize(model, seed=1)
    export_gpt2(model, tmp_path / "gpt2")
    place.train("first", fields)
    place.train("second", {**fields, "run.steps": 10})
    shutil.rmtree(tmp_path / "gpt2")
    place.train("second", {**fields, **RESUME})
    assert_same_run(place.runs / "second", place.runs / "first")


def refused(place: Place, name: str, fields: dict[str, Any], message: str) -> None:
    """Resuming with ``fields`` fails with ``message``, and leaves the run so that it can go on as it was."""
    place.train(name, {"run.steps": 10})
    before = lines(place.runs / name, without=()), weights(place.runs / name, 10)
    with pytest.raises(UserError, match=message):
        place.train(name, {**RESUME, **fields})
    assert (lines(place.runs / name, without=()), weights(place.runs / name, 10)) == before


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"optim.lr": 0.5}, r"^optim\.lr = 0\.5: expected 0\.01, as in the checkpoint .*step_00000010$"),
        ({"model.n_embd": 32}, r"^model\.n_embd = 32: expected 16, as in the checkpoint"),
        ({"run.seed": 7}, r"^run\.seed = 7: expected 42, as in"),
        (
            {"attention": preset("standard")},
            r"^attention\.default\.preset = 'standard': expected 'flash', as in .*; --alarm\.switches STEP:LAYER:PRESET changes it",
        ),
        ({"run.steps": 9}, r"^run\.steps = 9: expected at least 10, where the checkpoint .* stands$"),
    ],
)
def test_another_setting_is_refused_by_name_with_both_values(
    place: Place, fields: dict[str, Any], message: str
) -> None:
    refused(place, f"refused_{next(iter(fields))}", fields, message)


def test_other_data_is_refused(place: Place, tmp_path: Path) -> None:
    other = str(make_data(tmp_path / "other", seed=1))
    refused(
        place,
        "other_data",
        {"data.dataset": other},
        rf"^data\.dataset = '{other}': expected the data that .*step_00000010",
    )


def test_a_refused_resume_leaves_a_finished_recording(place: Place, tmp_path: Path) -> None:
    fields = {"data.record": place.recording("refused")}
    run = place.train("refused_recording", {**fields, "run.steps": 15})
    before = tree(run), tree(Path(place.recording("refused")))
    with pytest.raises(UserError, match=r"^telemetry\.sequences = 9: expected at most 8, "):
        place.train("refused_recording", {**fields, **RESUME, "run.steps": 15, "telemetry.sequences": 9})
    assert (tree(run), tree(Path(place.recording("refused")))) == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "telemetry.jsonl", "interventions.jsonl"])
def test_a_damaged_line_is_found_before_anything_is_changed(place: Place, name: str) -> None:
    fields = {"alarm": AlarmConfig(switches=("0:1:flash_fp32_o",)), "data.record": place.recording(f"line_{name}")}
    run = place.train(f"line_{name}", {**fields, "run.steps": 10})
    path = run / name
    path.write_text("what is this\n" + path.read_text())
    before = tree(run), tree(Path(fields["data.record"]))
    with pytest.raises(UserError, match=rf"{name}: line 1 is not a record with a step"):
        place.train(f"line_{name}", {**fields, **RESUME})
    assert (tree(run), tree(Path(fields["data.record"]))) == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "telemetry.jsonl", "offsets.npy"])
def test_a_log_that_takes_no_line_is_found_before_anything_is_changed(
    place: Place, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"data.record": place.recording(f"immutable_{name}")}
    run = place.train(f"immutable_{name}", {**fields, "run.steps": 10})
    before = tree(run), tree(Path(fields["data.record"]))

    def refuses(path: Any, *mode: Any) -> Any:
        if Path(path).name == name and mode == ("r+b",):
            raise PermissionError(errno.EPERM, "Operation not permitted")
        return open(path, *mode)

    monkeypatch.setattr(files, "open", refuses, raising=False)
    with pytest.raises(UserError, match=rf"{name}: cannot be written \(Operation not permitted\)"):
        place.train(f"immutable_{name}", {**fields, **RESUME})
    assert (tree(run), tree(Path(fields["data.record"]))) == before


@pytest.mark.parametrize(
    ("saved", "name"), [(True, name) for name in ("config.json", *record.LOGS)] + [(False, "config.json")]
)
def test_a_full_disk_is_found_before_anything_is_changed(
    place: Place, saved: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_name = f"full_{name}_{saved}"
    fields = {"alarm": AlarmConfig(switches=("0:1:flash_fp32_o",)), "data.record": place.recording(run_name)}
    if saved:
        run = place.train(run_name, fields)
        shutil.rmtree(run / "checkpoints/step_00000020")  # there are lines to drop
    else:
        run = dead_at_5(place, run_name, fields)
    before = tree(run), tree(Path(fields["data.record"]))

    def full(path: Any, *mode: Any) -> Any:
        if Path(path).name == f"{name}.tmp":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return open(path, *mode)

    monkeypatch.setattr(files, "open", full, raising=False)
    with pytest.raises(UserError, match=rf"cannot write {run / name}\.tmp \(No space left on device\)"):
        place.train(run_name, {**fields, **RESUME})
    assert (tree(run), tree(Path(fields["data.record"]))) == before
    monkeypatch.undo()
    assert weights(place.train(run_name, {**fields, **RESUME}), 20)


def test_lines_that_are_gone_are_told(place: Place, straight: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = place.train("gap", {"run.steps": 10})
    log = run / "metrics.jsonl"
    rows = log.read_text().splitlines(keepends=True)
    log.write_text("".join(rows[:4] + rows[6:]))
    capsys.readouterr()
    place.train("gap", {**RESUME, "run.steps": 30})
    err = capsys.readouterr().err
    assert f"warning: {log}: 2 lines from before {run}/checkpoints/step_00000010 are gone" in err
    assert [line["step"] for line in lines(run)] == [step for step in range(31) if step not in (4, 5)]
    assert weights(run, 30) == weights(straight, 30)


def test_another_number_of_processes_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.train("alone", {"run.steps": 10})
    two = Distributed(rank=0, local_rank=0, world_size=2, device=distributed.start("cpu").device)
    monkeypatch.setattr(distributed, "start", lambda device: two)
    with pytest.raises(UserError, match=r"step_00000010 is of 1 processes, not 2"):
        train.train(place.config("alone", {**RESUME, "data.micro_batch": 4}))


def test_replay_that_is_too_short_to_go_on_is_refused(place: Place) -> None:
    place.train("short", {"run.steps": 10, "data.record": place.recording("short")})
    fields = {"data.replay": place.recording("short")}
    place.train("short_replay", {**fields, "run.steps": 10})
    with pytest.raises(UserError, match=r"^run\.steps = 20: expected at most 10: .*short ends there"):
        place.train("short_replay", {**fields, **RESUME})


def test_a_resume_keeps_what_the_first_part_was_made_with(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    run = place.train("parts", {"run.steps": 10})
    first = json.loads((run / "config.json").read_text())
    monkeypatch.setattr(record, "_git_commit", lambda: "0123")
    place.train("parts", RESUME)
    now = json.loads((run / "config.json").read_text())
    assert now["git_commit"] == "0123"
    assert [(part["from_step"], part["git_commit"]) for part in now["sessions"]] == [
        (0, first["git_commit"]),
        (10, "0123"),
    ]
    assert {name: first[name] for name in ("versions", "device", "source_sha256")}.items() <= now["sessions"][0].items()


# ---- a run that ended before its first checkpoint


def dead_at_5(place: Place, name: str, fields: dict[str, Any]) -> Path:
    place.train_until(5, name, fields)
    assert not (place.runs / name / "checkpoints").exists()
    return place.runs / name


def test_a_run_without_a_checkpoint_starts_again(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    switches = AlarmConfig(switches=("0:1:flash_fp32_o",))
    fields = {"alarm": switches, "telemetry.every": 2, "data.record": place.recording("again")}
    straight = {**fields, "run.folder": str(place.folder / "straight_runs"), "data.record": place.recording("at_once")}
    place.train("again", straight)
    run = dead_at_5(place, "again", fields)
    capsys.readouterr()
    place.train("again", {**fields, **RESUME})
    assert f"{run}: no checkpoint yet; starting from step 0" in capsys.readouterr().out.splitlines()
    assert_same_run(run, place.folder / "straight_runs/again")
    assert tree(Path(place.recording("again"))) == tree(Path(place.recording("at_once")))
    for name in ("telemetry.jsonl", "interventions.jsonl"):
        steps = [
            [json.loads(line)["step"] for line in (folder / name).read_text().splitlines()]
            for folder in (run, place.folder / "straight_runs/again")
        ]
        assert steps[0] == steps[1]


def test_a_run_whose_checkpoints_are_gone_is_left_alone(place: Place) -> None:
    run = place.train("bereft", {"run.steps": 10})
    shutil.rmtree(run / "checkpoints")
    before = tree(run)
    with pytest.raises(
        UserError, match=r"they are gone, while .*metrics\.jsonl goes to step 10: choose another name, or remove"
    ):
        place.train("bereft", RESUME)
    assert tree(run) == before


def test_a_finished_recording_of_an_earlier_run_of_the_name_is_left_alone(place: Place) -> None:
    fields = {"run.steps": 10, "data.record": place.recording("finished")}
    place.train("namesake", {**fields, "run.folder": str(place.folder / "earlier_runs")})
    dead_at_5(place, "namesake", {"run.steps": 10})
    before = tree(Path(place.recording("finished")))
    with pytest.raises(UserError, match=r"recordings/finished: a finished recording, and this run starts from step 0"):
        place.train("namesake", {**fields, **RESUME})
    assert tree(Path(place.recording("finished"))) == before


def test_the_recording_of_another_run_is_left_alone(place: Place) -> None:
    dead_at_5(place, "owner", {"data.record": place.recording("owned")})
    dead_at_5(place, "thief", {})
    before = tree(Path(place.recording("owned")))
    with pytest.raises(UserError, match=r"its source_run is 'owner', this run's is 'thief'"):
        place.train("thief", {**RESUME, "data.record": place.recording("owned")})
    assert tree(Path(place.recording("owned"))) == before


# ---- two processes at one run

HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "ab")
fcntl.flock(file, fcntl.LOCK_EX)
print(flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def locked_elsewhere(run: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process has the run's lock, until it is killed at the end."""
    command = [sys.executable, "-c", HOLDER, str(run / record.LOCK_FILE)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


def test_a_run_that_another_process_trains_is_left_alone(place: Place, straight: Path) -> None:
    run = place.train("busy", {"run.steps": 10, "data.record": place.recording("busy")})
    fields = {**RESUME, "run.steps": 30, "data.record": place.recording("busy")}
    with locked_elsewhere(run):
        before = tree(run), tree(Path(place.recording("busy")))
        with pytest.raises(
            UserError, match=rf"^run\.name = 'busy': another process is training {run} .*wait for its end"
        ):
            place.train("busy", fields)
        assert (tree(run), tree(Path(place.recording("busy")))) == before
    # Killed, that process has left the file and no lock.
    place.train("busy", fields)
    assert_same_run(run, straight, 30)


def test_a_run_is_locked_from_its_first_step_to_its_end(place: Place) -> None:
    original, refusals = train.take_step, []

    def meanwhile(run: Run, step: int) -> Any:
        if step in (0, 15):
            with pytest.raises(UserError, match="another process is training"):
                record.lock(run.folder)
            refusals.append(step)
        return original(run, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "take_step", meanwhile)
        place.train("held", {"run.steps": 10})
        run = place.train("held", RESUME)
    assert refusals == [0, 15]
    record.lock(run).close()


def test_a_refused_resume_leaves_no_lock(place: Place) -> None:
    run = place.train("unlocked", {"run.steps": 10})
    with pytest.raises(UserError, match=r"run\.seed") as refusal:
        place.train("unlocked", {**RESUME, "run.seed": 7})
    record.lock(run).close()
    assert refusal.value.args


def test_a_run_from_before_there_were_locks_and_batches_in_its_logs_goes_on(place: Place) -> None:
    fields = {"alarm": AlarmConfig(switches=("0:1:flash_fp32_o", "10:0:flash_fp32_o")), "telemetry.every": 4}
    straight = place.train("newer", fields)
    # Ended between two checkpoints: there are lines to drop and lines to keep.
    run = place.train("older", {**fields, "run.steps": 14})
    shutil.rmtree(run / "checkpoints/step_00000014")
    (run / record.LOCK_FILE).unlink()
    logs = ("telemetry.jsonl", "interventions.jsonl")
    for path in (run / name for name in logs):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        assert all(one.pop("batch") == one["step"] for one in records)
        path.write_text("".join(json.dumps(one) + "\n" for one in records))
    place.train("older", {**fields, **RESUME})
    assert_same_run(run, straight)
    for name in logs:
        steps = [[json.loads(line)["step"] for line in (of / name).read_text().splitlines()] for of in (run, straight)]
        assert steps[0] == steps[1]


def test_a_file_system_without_locks_is_told(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without(file: Any, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(record.fcntl, "flock", without)
    run = place.train("free_for_all", {"run.steps": 1})
    warned = (
        f"warning: {run / record.LOCK_FILE} cannot be locked (No locks available): nothing keeps a second process from"
    )
    assert warned in capsys.readouterr().err


@pytest.mark.slow
def test_all_processes_leave_a_run_that_another_one_trains(place: Place) -> None:
    fields = {"run.steps": 10, "data.micro_batch": 2}
    run = place.train("busy_for_two", fields)
    preset_file = str(place.preset_file(place.config("busy_for_two", {**fields, **RESUME})))
    with locked_elsewhere(run):
        before = tree(run)
        done = start_train([preset_file], processes=2)
        assert tree(run) == before
    assert done.returncode != 0
    assert f"error: run.name = 'busy_for_two': another process is training {run}" in done.stderr
    assert "training/run.py" not in done.stderr  # torchrun has a traceback of its own


def test_a_setting_from_after_the_checkpoint_counts_as_its_default() -> None:
    defaults = {"speed": {"old": 1, "new": 25}}
    assert list(record.differences({"speed": {"old": 3}}, {"speed": {"old": 3, "new": 25}}, defaults)) == []
    assert list(record.differences({"speed": {"old": 3}}, {"speed": {"old": 3, "new": 50}}, defaults)) == [
        ("speed.new", 25, 50)
    ]
    assert list(record.differences({}, {"speed": {"old": 1, "new": 25}}, defaults)) == []


# ---- a resume that is refused, or fails, before its first step


def failing_wandb(folder: Path) -> SimpleNamespace:
    """W&B as it fails where it cannot reach its service: behind a folder of the run, and links to it, that it has made."""

    def init(**options: Any) -> None:
        assert Path(options["dir"]) == folder
        made = folder / "wandb/run-20261122_000000-0123abcd"
        (made / "logs").mkdir(parents=True)
        (made / "logs/debug.log").write_text("no route to host\n")
        link = folder / "wandb/latest-run"
        link.unlink(missing_ok=True)
        link.symlink_to(made.name)
        (folder / "wandb/debug.log").symlink_to(f"{made.name}/logs/debug.log")
        raise ConnectionError("no route to host")

    return SimpleNamespace(init=init, Error=ConnectionError)


def links(folder: Path) -> dict[str, str]:
    return {path.name: str(path.readlink()) for path in folder.rglob("*") if path.is_symlink()}


@pytest.mark.parametrize("logged_before", [False, True])
def test_a_resume_without_wandb_leaves_the_run_as_it_was(
    place: Place, monkeypatch: pytest.MonkeyPatch, logged_before: bool
) -> None:
    name = f"unreached_{logged_before}"
    fields = {"alarm": AlarmConfig(switches=("12:1:flash_fp32_o",)), "data.record": place.recording(name)}
    run = place.train(name, fields)
    # Of a run that was killed behind step 10: metrics, telemetry and interventions have lines to drop.
    shutil.rmtree(run / "checkpoints/step_00000020")
    if logged_before:
        (run / "wandb_id.txt").write_text("0123abcd\n")
        (run / "wandb/run-20261121_000000-0123abcd").mkdir(parents=True)
        (run / "wandb/latest-run").symlink_to("run-20261121_000000-0123abcd")
    monkeypatch.setitem(sys.modules, "wandb", failing_wandb(run))
    before = tree(run), links(run), tree(Path(fields["data.record"]))
    with pytest.raises(UserError, match=r"^wandb\.mode = 'online': .*no route to host"):
        place.train(name, {**fields, **RESUME, "wandb.mode": "online"})
    assert (tree(run), links(run), tree(Path(fields["data.record"]))) == before
    straight = place.train(f"{name}_straight", {**fields, "data.record": ""})
    assert_same_run(place.train(name, {**fields, **RESUME}), straight)


def test_a_restart_without_wandb_leaves_the_run_as_it_was(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    run = dead_at_5(place, "unreached_at_5", {})
    (run / "wandb_id.txt").write_text("0123abcd\n")
    monkeypatch.setitem(sys.modules, "wandb", failing_wandb(run))
    before = tree(run)
    record_to = place.recording("unreached_at_5")
    with pytest.raises(UserError, match=r"^wandb\.mode = 'offline': expected disabled, .*no route to host"):
        place.train("unreached_at_5", {**RESUME, "wandb.mode": "offline", "data.record": record_to})
    assert tree(run) == before
    assert not Path(record_to).exists()


def test_a_lock_that_was_taken_back_meanwhile_is_not_held(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    run = place.train("raced", {"run.steps": 1})
    original, opened = fcntl.flock, []

    def late(file: Any, operation: int) -> None:
        if not opened:  # the refused one, whose file this is, removes it between open and lock
            (run / record.LOCK_FILE).unlink()
        opened.append(file)
        original(file, operation)

    monkeypatch.setattr(record.fcntl, "flock", late)
    held = record.lock(run)
    monkeypatch.undo()
    with pytest.raises(UserError, match="another process is training"):
        record.lock(run)
    held.close()
    assert len(opened) == 2
