"""A run that is interrupted and gone on with is to the last bit the run that never stopped; a resume that is refused changes nothing."""

import errno
import itertools
import json
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from test_checkpoint import flip_a_byte
from test_llama import LLAMA
from test_nanogpt import nanogpt
from tiny_runs import TRAIN_TOKENS, Interruption, Place, assert_equals_straight, before_each_step, left, make_data, tree

import files
from attention import AttentionConfig, AttentionRule, AttentionSpec
from errors import UserError
from training import distributed, record
from training.distributed import DistContext
from training.run import Run
from training.settings import TrainConfig

BF16 = {"precision.dtype": "bfloat16"}
RESUME, AUTO = {"run.resume": "yes"}, {"run.resume": "auto"}
SWITCHED = {"alarm.switches": ("0:1:flash_fp32_o",)}
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def place(place: Place) -> Place:
    """With other data, a copy of the data, weights to start from, and a recording of ten steps."""
    make_data(place.folder / "other", seed=1)
    make_data(place.folder / "held_out", plant={TRAIN_TOKENS + 5: 1})  # other validation data alone
    shutil.copytree(place.data, place.folder / "copy")
    torch.save(nanogpt(), place.folder / "ckpt.pt")
    place.train("short", {"run.steps": 10, "data.record": place.recording("short")})
    place.train("long", {"run.steps": 20, "data.record": place.recording("long")})
    return place


def here(place: Place, fields: dict[str, Any]) -> dict[str, Any]:
    """With {place} filled in."""
    return {k: v.replace("{place}", str(place.folder)) if isinstance(v, str) else v for k, v in fields.items()}


# ---- the same bits


MIXED = AttentionConfig(
    flash_backend="flash_reference",
    default=AttentionSpec(preset="flash_stochastic_p_o"),
    rules=(AttentionRule(layers=(1,), heads=(1,), attention=AttentionSpec(preset="flash_o_nearest_delta_stochastic")),),
)
LATER = {**BF16, "alarm.switches": ("10:1:flash_delta_from_p",)}
FREE = dict.fromkeys(("run.log_every", "evaluation.every", "telemetry.every"), 5)
FREE |= {"checkpoint.every": 4, "nonfinite.policy": "skip", "data.verify": "size"}
"""When things are written may change."""
INTERRUPTIONS = {
    "stochastic roundings": Interruption({**BF16, "attention": MIXED}, dies_at=13),
    "muon": Interruption({"optim.optimizer": "muon", "optim.weight_decay": 0.1}, dies_at=13),
    "float16 and QK-clip": Interruption({"precision.dtype": "float16", "model.qk_clip_tau": 0.2}, dies_at=13),
    "asked to leave": Interruption(dies_at=7, number=signal.SIGTERM),
    "a Llama": Interruption({**BF16, **{f"model.{name}": x for name, x in LLAMA.items()}, "model.n_kv_head": 1}, dies_at=13),
    "no positions, QK-norm": Interruption({**BF16, "model.position": "none", "model.norm": "rms", "model.qk_norm": True}, dies_at=13),
    "a replay": Interruption({"data.replay": "{place}/recordings/long"}),
    "before its first checkpoint": Interruption({**SWITCHED, "telemetry.every": 2}, dies_at=5),
    "the newest checkpoint damaged": Interruption(
        {"run.steps": 30}, ends_at=20, meanwhile=lambda run: flip_a_byte(run / "checkpoints/step_00000020/model.safetensors")
    ),
    "data moved": Interruption(rest={"data.dataset": "{place}/copy"}),
    "initial weights gone": Interruption(
        {"run.init_from": "{place}/ckpt.pt"}, meanwhile=lambda run: (run.parent.parent / "ckpt.pt").unlink()
    ),
    "into a later switch": Interruption(LATER, first={"alarm.switches": ()}),
    "switches are in the checkpoint": Interruption({**BF16, "alarm.switches": ("7:1:flash_fp32_o",)}, rest={"alarm.switches": ()}),
    "a switch at the checkpoint's step": Interruption(LATER, dies_at=14),
    "no checkpoint but the last": Interruption({"checkpoint.every": 0}, dies_at=13),
    "freer": Interruption(rest=FREE),
}  # fmt: skip


@pytest.mark.parametrize("name", INTERRUPTIONS)
def test_interrupted_and_resumed_equals_straight(place: Place, name: str) -> None:
    given = INTERRUPTIONS[name]
    given = replace(given, fields=here(place, dict(given.fields)), rest=here(place, dict(given.rest)))
    assert_equals_straight(place, re.sub(r"\W+", "_", name), given, logs=name not in ("freer", "asked to leave"))


def test_a_damaged_checkpoint_that_was_passed_over_stays_under_another_name(place: Place) -> None:
    run = place.train("passed_over")
    flip_a_byte(run / "checkpoints/step_00000020/model.safetensors")
    damaged = tree(run / "checkpoints/step_00000020")
    place.train_until(13, "passed_over", RESUME)
    assert tree(run / "checkpoints/damaged_step_00000020") == damaged
    assert json.loads((run / "exit.json").read_text())["checkpoint"].endswith("step_00000010")


def test_auto_starts_a_new_run_and_leaves_a_finished_one(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    run = place.train("fresh", AUTO)
    before = left(run)
    assert left(place.train("fresh", AUTO)) == before
    assert "finished: 20 of 20 steps; a larger --run.steps goes on\n" in capsys.readouterr().out


def test_a_branch_that_ended_where_it_began_goes_on(place: Place) -> None:
    fields = {"run.init_from": str(place.runs / "long/checkpoints/step_00000010")}
    place.train("no_step", {**fields, "run.steps": 10})
    run = place.train("no_step", {**fields, **RESUME})
    assert left(run)["model.safetensors"] == left(place.runs / "long")["model.safetensors"]


@pytest.mark.parametrize("resume", [AUTO, RESUME], ids=["auto", "yes"])
@pytest.mark.parametrize("found", ["thesis.tex", "wandb/x", "checkpoints/x", ""])
def test_a_resume_leaves_alone_what_no_run_has_made(place: Place, found: str, resume: dict[str, str]) -> None:
    name = f"not_a_run_{found[:5]}_{resume['run.resume']}"
    there = place.runs / name / found
    there.parent.mkdir(parents=True, exist_ok=True)
    there.write_text("so far")
    before = tree(place.runs)
    with pytest.raises(
        UserError, match=rf"^run\.name = '{name}': expected a new name, or a run's: .* (in it|is a file)$"
    ):
        place.train(name, resume)
    assert tree(place.runs) == before


def test_random_states_are_those_of_the_seed(place: Place) -> None:
    """That another run of the seed has them, all tests above say."""
    runs = [place.train(f"drawn_{seed}", {"run.steps": 1, "run.seed": seed}) for seed in (7, 8)]
    assert len({left(run, 1)["rng.safetensors"] for run in runs}) == 2


def without_lines_5_and_6(log: Path) -> None:
    rows = log.read_text().splitlines(keepends=True)
    log.write_text("".join(rows[:4] + rows[6:]))


def with_a_digit_changed_in_line_3(log: Path) -> None:
    rows = log.read_text().splitlines(keepends=True)
    rows[2] = rows[2].replace('"lr": 0.00', '"lr": 0.01')
    log.write_text("".join(rows))


CHANGED: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "gap": ("metrics", without_lines_5_and_6, "2 lines from before {at} are gone, the first: line 5; "),
    "digit": ("metrics", with_a_digit_changed_in_line_3, "changed since {at}: line 3; "),
    "emptied": ("telemetry", lambda log: log.write_text(""), "1 lines from before {at} are gone, the first: line 1; "),
}


@pytest.mark.parametrize("case", CHANGED)
def test_a_changed_log_is_told_and_changes_no_weight(
    place: Place, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Switches before the kill and after it."""
    name, change, told = CHANGED[case]
    fields = {"alarm.switches": ("4:1:flash_fp32_o", "15:1:flash"), "telemetry.every": 10}
    given = Interruption(fields, dies_at=13, meanwhile=lambda run: change(run / f"{name}.jsonl"))
    run = assert_equals_straight(place, case, given, logs=False)
    (said,) = (x for x in capsys.readouterr().err.splitlines() if "the weights do not depend on it" in x)
    at = run / "checkpoints/step_00000010"
    assert said.startswith(f"warning: {run / name}.jsonl: {told.format(at=at)}")
    # The checkpoints from there on know the log only as it is now.
    session = json.loads((run / "config.json").read_text())["sessions"][-1]
    assert [f"{told}; " for told in session["logs_changed"]] == [f"{name}.jsonl: {told.format(at=at)}"]


def test_a_lost_record_is_told_and_on_record(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    run = place.train("lost", {"run.steps": 10})
    (run / "config.json").unlink()
    place.train("lost", RESUME)
    said = f"gone, and with it what it said of the sessions before {run}/checkpoints/step_00000010"
    assert capsys.readouterr().err.count(f"warning: {run}/config.json: {said}; ") == 1
    (session,) = json.loads((run / "config.json").read_text())["sessions"]
    assert session["logs_changed"] == [f"config.json: {said}"]


def test_a_resume_says_what_it_was_given_otherwise(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where that may differ: a forgotten option can end a run early, or delete its checkpoints."""
    place.train("forgotten", {"run.steps": 10, "checkpoint.keep_last": 9})
    place.train("forgotten", {"run.steps": 12, "run.resume": "yes"})
    said = "not as in its last session: run.steps 10 -> 12, checkpoint.keep_last 9 -> 2\n"
    assert capsys.readouterr().out.count(said) == 1


def test_a_replay_says_that_its_sums_have_another_order(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    recording = place.recording("any_order")
    place.train("any_order", {"run.steps": 2, "precision.fixed_sum_order": False, "data.record": recording})
    for fixed in (True, False):
        fields = {"run.steps": 2, "precision.fixed_sum_order": fixed, "data.replay": recording}
        place.train(f"replays_{fixed}", fields)
        said = f"{recording}: recorded with precision.fixed_sum_order False, this run has True: "
        assert (said in capsys.readouterr().out) == fixed


def test_a_setting_that_is_no_more_is_told_as_a_difference() -> None:
    assert ("model.gone", 1, None) in record.differences({"model": {"gone": 1}}, TrainConfig())


def test_a_resume_keeps_what_the_first_part_was_made_with(place: Place, monkeypatch: Patch) -> None:
    run = place.train("parts", {"run.steps": 10})
    first = json.loads((run / "config.json").read_text())
    monkeypatch.setattr(record, "_git_commit", lambda: "0123")
    place.train("parts", RESUME)
    sessions = json.loads((run / "config.json").read_text())["sessions"]
    assert [(part["from_step"], part["git_commit"]) for part in sessions] == [(0, first["git_commit"]), (10, "0123")]
    assert {name: first[name] for name in ("versions", "device", "source_sha256")}.items() <= sessions[0].items()


# ---- refused


@dataclass(frozen=True)
class Refusal:
    """A run with a recording ends or dies; something is spoilt; going on with ``rest`` says ``message``, and all is as it was."""

    message: str
    rest: dict[str, Any] = field(default_factory=dict)
    first: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    """Set before and behind."""
    dies_at: int = 14  # lines are to be dropped: the checkpoint is that of step 10
    spoil: Callable[[Place, Path, Patch], object] = lambda place, run, patch: None
    mended: bool = False
    """Without the patches the run goes on to its end."""


def that_cannot_be_opened(refused: str, reason: int, *modes: str) -> Callable[[Place, Path, Patch], object]:
    def refuses(path: Any, *mode: Any, **options: Any) -> Any:
        if Path(path).name == refused and (not modes or mode == modes):
            raise OSError(reason, "not today", str(path))
        return open(path, *mode, **options)

    return lambda place, run, patch: patch.setattr(files, "open", refuses, raising=False)


def by_two_processes(place: Place, run: Path, patch: Patch) -> None:
    two = DistContext(rank=0, world_size=2, device=torch.device("cpu"))
    patch.setattr(distributed, "start", lambda *_: two)


def by_a_checkpoint_of_a_namesake(place: Place, run: Path, patch: Patch) -> None:
    place.train(run.name, {**SWITCHED, "run.folder": str(place.folder / "twins"), "run.steps": 10})
    shutil.copytree(place.folder / "twins" / run.name / "checkpoints", run / "checkpoints", dirs_exist_ok=True)


def by_a_source_that_went_on(place: Place, run: Path, patch: Patch) -> None:
    place.train("short", {"run.steps": 12, "data.record": place.recording("short"), **RESUME})


def by_a_later_session(place: Place, run: Path, patch: Patch) -> None:
    fields = {**SWITCHED, **RESUME, "data.record": place.recording(run.name), "checkpoint.every": 1000}
    place.train_until(15, run.name, fields)
    shutil.rmtree(run / "checkpoints")


def by_a_disk_that_is_full_once(place: Place, run: Path, patch: Patch) -> None:
    full = OSError(errno.ENOSPC, "full")
    patch.setattr(files.os, "fsync", Mock(side_effect=itertools.chain([full], itertools.repeat(None))))


def by_a_recording_of_another(place: Place, run: Path, patch: Patch) -> None:
    shutil.rmtree(place.recording(run.name))
    place.train_until(5, "owner", {"data.record": place.recording(run.name)})


def by_a_record_without_sessions(place: Place, run: Path, patch: Patch) -> None:
    content = files.read_json(run / "config.json")
    files.write_json(run / "config.json", content | {"sessions": []})


UNRECORDED, ANY_ORDER = {"data.record": ""}, {"precision.fixed_sum_order": False}
BRANCH = {**UNRECORDED, "run.init_from": "{place}/runs/short", "alarm.switches": ()}
REFUSED = {
    "another_setting": Refusal(
        r"^optim\.lr = 0\.5: expected 0\.01 \(--optim\.lr 0\.01\), as in the checkpoint .*step_00000010$", {"optim.lr": 0.5}
    ),
    "another_setting_before_a_checkpoint": Refusal(
        r"^optim\.lr = 0\.5: expected 0\.01 \(--optim\.lr 0\.01\), as in .*config\.json$", {"optim.lr": 0.5}, dies_at=5
    ),
    "a_branch_whose_source_went_on": Refusal(
        r"^run\.init_from = '.*/short': expected the weights of step 10 .* of step 12: choose another name, or remove",
        fields=BRANCH,
        spoil=by_a_source_that_went_on,
    ),
    "two_settings": Refusal(
        r"^data.seed = 5: expected .*; 1 more differ: optim\.lr$", {"optim.lr": 0.5, "data.seed": 5}
    ),
    "fewer_steps": Refusal(r"^run\.steps = 5: expected at least 10, where the checkpoint .*step_00000010", {"run.steps": 5}),
    "no_record": Refusal(
        r"config\.json: not the record of a run$", spoil=lambda place, run, patch: (run / "config.json").write_text("{}")
    ),
    "no_session": Refusal(r"config\.json: sessions = \[\]: expected one or more", dies_at=5, spoil=by_a_record_without_sessions),
    "a_full_disk": Refusal(r"^run\.folder: cannot write .*\(full\)$", spoil=by_a_disk_that_is_full_once, mended=True),
    "a_forgotten_recording": Refusal(r"^data\.record = '': expected '.*' \(--data\.record .*\), as in the checkpoint", {"data.record": ""}),
    "other_data": Refusal(
        r"^data\.dataset = '.*/other': expected the data that .*step_00000010", {"data.dataset": "{place}/other"}, fields=UNRECORDED
    ),
    "other_data_before_a_checkpoint": Refusal(
        r"^data\.dataset = '.*/other': expected the data that .*/runs/other_data_before_a_checkpoint began with",
        {"data.dataset": "{place}/other"},
        fields=UNRECORDED,
        dies_at=5,
    ),
    "other_validation_data": Refusal(
        r"held_out': expected the validation data of .*step_00000010", {"data.dataset": "{place}/held_out"}, fields=UNRECORDED
    ),
    "processes": Refusal(
        r"step_00000010 is of 1 processes, not 2", {"data.micro_batch": 4}, fields=ANY_ORDER, spoil=by_two_processes, mended=True
    ),
    "a_switch_in_the_past": Refusal(
        r"7:1:flash_delta_from_p.*a step from 10 on", {"alarm.switches": ("7:1:flash_delta_from_p",)}
    ),
    **{
        f"{name}_takes_no_line": Refusal(
            rf"{name}: cannot be written \(not today\)", spoil=that_cannot_be_opened(name, errno.EPERM, "r+b"), mended=True
        )
        for name in ("metrics.jsonl", "offsets.npy")
    },
    "checkpoints_gone": Refusal(
        r"they are gone, while .*metrics\.jsonl goes to step 13: choose another name, or remove",
        spoil=lambda place, run, patch: shutil.rmtree(run / "checkpoints"),
    ),
    "checkpoints_gone_and_rarer_since": Refusal(
        r"they are gone, while .*metrics\.jsonl goes to step 14: choose another name, or remove", spoil=by_a_later_session
    ),
    "a_checkpoint_of_a_namesake": Refusal(
        r"step_00000010: its run_id is '[0-9a-f]{32}', that of .*config\.json is '[0-9a-f]{32}': not this run's checkpoint$",
        fields=UNRECORDED,
        spoil=by_a_checkpoint_of_a_namesake,
    ),
    "a_recording_of_another_run": Refusal(
        r"its source_run is 'owner', this run's is 'a_recording_of_another_run'", dies_at=5, spoil=by_a_recording_of_another
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def switched(place: Place) -> Path:
    return place.train("switched", SWITCHED)


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_resume_changes_nothing(place: Place, switched: Path, name: str, monkeypatch: Patch) -> None:
    given = REFUSED[name]
    fields = {**SWITCHED, "data.record": place.recording(name), **here(place, given.fields)}
    run = place.train_until(given.dies_at, name, {**fields, **given.first})
    given.spoil(place, run, monkeypatch)
    (run / "exit.json").unlink()
    before = tree(run), tree(place.folder / "recordings")
    with pytest.raises(UserError, match=given.message):
        place.train(name, {**fields, **here(place, given.rest), **RESUME})
    said = json.loads((run / "exit.json").read_text())
    assert (said["code"], said["step"]) == (2, None)
    (run / "exit.json").unlink()
    assert (tree(run), tree(place.folder / "recordings")) == before
    monkeypatch.undo()
    record.lock(run).close()
    if given.mended:
        assert left(place.train(name, {**fields, **RESUME})) == left(switched)


def test_a_disk_that_takes_no_record_is_told_and_nothing_is_left(place: Place, monkeypatch: Patch) -> None:
    before = tree(place.folder)
    monkeypatch.setattr(record, "write_all", Mock(side_effect=OSError(errno.ENOSPC, "No space left")))
    with pytest.raises(UserError, match=r"^run\.folder: cannot write .*No space left"):
        place.train("full", {"run.folder": str(place.folder / "new/runs"), "data.record": str(place.folder / "new/r")})
    assert tree(place.folder) == before


# ---- two processes at one run


def test_a_run_whose_folder_is_replaced_ends_and_writes_nothing_there(place: Place, monkeypatch: Patch) -> None:
    def replace_folder(run: Run, step: int) -> None:
        if step == 13:
            run.folder.rename(place.folder / "elsewhere")
            run.folder.mkdir()

    before_each_step(monkeypatch, replace_folder)
    with pytest.raises(UserError, match="replaced: somebody has removed, moved or replaced it"):
        place.train("replaced")
    assert list((place.runs / "replaced").iterdir()) == []


def test_a_run_is_locked_to_its_end_and_a_second_process_leaves_it_alone(place: Place, monkeypatch: Patch) -> None:
    refusals, fields = [], {"data.record": place.recording("held")}

    def meanwhile(run: Run, step: int) -> None:
        if step in (0, 15):
            before = tree(run.folder), tree(Path(place.recording("held")))
            with pytest.raises(UserError, match=r"^run\.name = 'held': another process is training"):
                place.train("held", {**fields, **RESUME})
            assert (tree(run.folder), tree(Path(place.recording("held")))) == before
            refusals.append(step)

    before_each_step(monkeypatch, meanwhile)
    place.train("held", {**fields, "run.steps": 10})
    run = place.train("held", {**fields, **RESUME})
    assert refusals == [0, 15]
    record.lock(run).close()
