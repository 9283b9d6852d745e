"""A run that is interrupted and gone on with is to the last bit the run that never stopped; a resume that is refused changes nothing."""

from __future__ import annotations

import errno
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_nanogpt import nanogpt
from tiny_runs import Interruption, Place, assert_equals_straight, before_each_step, column, left, make_data, tree

import files
from attention import AttentionConfig, AttentionRule, AttentionSpec
from errors import UserError
from training import distributed, record
from training.distributed import DistContext
from training.run import Run

BF16 = {"precision.dtype": "bfloat16"}
RESUME = {"run.resume": "yes"}
SWITCHED = {"alarm.switches": ("0:1:flash_fp32_o",)}
Patch = pytest.MonkeyPatch
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def place(place: Place) -> Place:
    """With other data, a copy of the data, weights to start from, and a recording of ten steps."""
    make_data(place.folder / "other", seed=1)
    shutil.copytree(place.data, place.folder / "copy")
    torch.save(nanogpt(), place.folder / "ckpt.pt")
    place.train("short", {"run.steps": 10, "data.record": place.recording("short")})
    place.train("long", {"run.steps": 20, "data.record": place.recording("long")})
    return place


def here(place: Place, fields: dict[str, Any]) -> dict[str, Any]:
    """With {place} filled in."""
    return {k: v.replace("{place}", str(place.folder)) if isinstance(v, str) else v for k, v in fields.items()}


# ---- the same bits


def flip_the_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


MIXED = AttentionConfig(
    flash_backend="flash_reference",
    default=AttentionSpec(preset="flash_stochastic_p_o"),
    rules=(AttentionRule(layers=(1,), heads=(1,), attention=AttentionSpec(preset="flash_o_nearest_delta_stochastic")),),
)
LATER = {**BF16, "alarm.switches": ("10:1:flash_delta_from_p",)}
INTERRUPTIONS = {
    "stochastic roundings": Interruption({**BF16, "attention": MIXED}, "dies at 13"),
    "muon": Interruption({"optim.optimizer": "muon", "optim.weight_decay": 0.1}, "dies at 13"),
    "float16 and QK-clip": Interruption({"precision.dtype": "float16", "model.qk_clip_tau": 0.2}, "dies at 13"),
    "made longer": Interruption(),
    "a replay": Interruption({"data.replay": "{place}/recordings/long"}),
    "before its first checkpoint": Interruption({**SWITCHED, "telemetry.every": 2}, "dies at 5"),
    "the newest checkpoint damaged": Interruption(
        {"run.steps": 30}, "ends at 20", meanwhile=lambda run: flip_the_last_byte(run / "checkpoints/step_00000020/model.safetensors")
    ),
    "data moved": Interruption(rest={"data.dataset": "{place}/copy"}),
    "initial weights gone": Interruption(
        {"run.init_from": "{place}/ckpt.pt"}, meanwhile=lambda run: (run.parent.parent / "ckpt.pt").unlink()
    ),
    "into a later switch": Interruption(LATER, first={"alarm.switches": ()}),
    "switches are in the checkpoint": Interruption({**BF16, "alarm.switches": ("7:1:flash_fp32_o",)}, rest={"alarm.switches": ()}),
    "a switch at the checkpoint's step": Interruption(LATER, "dies at 14"),
}  # fmt: skip


@pytest.mark.parametrize("name", INTERRUPTIONS)
def test_interrupted_and_resumed_equals_straight(place: Place, name: str) -> None:
    given = INTERRUPTIONS[name]
    given = replace(given, fields=here(place, dict(given.fields)), rest=here(place, dict(given.rest)))
    assert_equals_straight(place, name.replace(" ", "_").replace(",", "").replace("'", ""), given)


FREE = {
    "run.log_every": 2,
    "evaluation.every": 5,
    "telemetry.every": 5,
    "checkpoint.every": 4,
    "nonfinite.policy": "skip",
    "data.verify": "size",
}


def test_when_things_are_written_may_change(place: Place) -> None:
    assert_equals_straight(place, "freer", Interruption(rest=FREE), logs=False)


def test_random_states_are_those_of_the_seed(place: Place) -> None:
    torch.rand(7)  # whatever else this process has drawn
    runs = [place.train(f"drawn_{seed}", {"run.steps": 1, "run.seed": seed}) for seed in (7, 8)]
    drawn, other = (left(run, 1)["rng.safetensors"] for run in runs)
    assert drawn != other
    torch.rand(3)
    assert left(place.train("drawn_again", {"run.steps": 1, "run.seed": 7}), 1)["rng.safetensors"] == drawn


def test_time_goes_on_from_the_checkpoint(place: Place) -> None:
    run = place.train("timed", {"run.steps": 10})
    before = column(run, "seconds")[-1]
    place.train("timed", RESUME)
    seconds = column(run, "seconds")
    assert seconds == sorted(seconds)
    assert seconds[10] > before


@pytest.mark.parametrize("name", ["metrics.jsonl", "telemetry.jsonl", "interventions.jsonl"])
def test_a_log_that_is_gone_changes_no_weight(place: Place, name: str) -> None:
    """Switches before the kill and after it."""
    fields = {"alarm.switches": ("4:1:flash_fp32_o", "15:1:flash"), "telemetry.every": 10}
    case = Interruption(fields, "dies at 13", meanwhile=lambda run: (run / name).unlink())
    assert_equals_straight(place, f"without_{name}", case, logs=False)


def test_a_resume_keeps_what_the_first_part_was_made_with(place: Place, monkeypatch: Patch) -> None:
    run = place.train("parts", {"run.steps": 10})
    first = json.loads((run / "config.json").read_text())
    monkeypatch.setattr(record, "_git_commit", lambda: "0123")
    place.train("parts", RESUME)
    sessions = json.loads((run / "config.json").read_text())["sessions"]
    assert [(part["from_step"], part["git_commit"]) for part in sessions] == [(0, first["git_commit"]), (10, "0123")]
    assert {name: first[name] for name in ("versions", "device", "source_sha256")}.items() <= sessions[0].items()


def test_a_resume_with_another_number_of_threads_or_other_products_says_so(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    run = place.train("threads", {"run.steps": 10})
    record_of_run = json.loads((run / "config.json").read_text())
    record_of_run["sessions"][0]["device"] |= {"threads": 7, "products": "of another CPU"}
    record_of_run["sessions"][0]["versions"]["torch"] = "1.0"
    (run / "config.json").write_text(json.dumps(record_of_run))
    place.train("threads", {**RESUME, "run.steps": 12})
    out = capsys.readouterr().out
    assert f"{run}: torch 1.0 -> {torch.__version__}, threads 7 -> 1, products of another CPU -> " in out


def test_a_setting_from_after_the_checkpoint_counts_as_its_default() -> None:
    defaults = {"speed": {"old": 1, "new": 25}}
    assert list(record.differences({"speed": {"old": 3}}, {"speed": {"old": 3, "new": 25}}, defaults)) == []
    assert list(record.differences({"speed": {"old": 3}}, {"speed": {"old": 3, "new": 50}}, defaults)) == [
        ("speed.new", 25, 50)
    ]


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


def with_a_bad_first_line(name: str) -> Callable[[Place, Path, Patch], object]:
    return lambda place, run, patch: (run / name).write_text("what is this\n" + (run / name).read_text())


def that_cannot_be_opened(refused: str, reason: int, *modes: str) -> Callable[[Place, Path, Patch], object]:
    def refuses(path: Any, *mode: Any, **options: Any) -> Any:
        if Path(path).name == refused and (not modes or mode == modes):
            raise OSError(reason, "not today", str(path))
        return open(path, *mode, **options)

    return lambda place, run, patch: patch.setattr(files, "open", refuses, raising=False)


def by_two_processes(place: Place, run: Path, patch: Patch) -> None:
    two = DistContext(rank=0, local_rank=0, world_size=2, device=torch.device("cpu"))
    patch.setattr(distributed, "start", lambda *_: two)


def by_a_wandb_out_of_reach(place: Place, run: Path, patch: Patch) -> None:
    """It fails behind a folder of the run, and links to it, that it has made, beside those of an earlier session."""

    def init(**options: Any) -> None:
        made = run / "wandb/run-20261122_000000-0123abcd"
        (made / "logs").mkdir(parents=True)
        (made / "logs/debug.log").write_text("no route to host\n")
        (run / "wandb/latest-run").unlink(missing_ok=True)
        (run / "wandb/latest-run").symlink_to(made.name)
        (run / "wandb/debug.log").symlink_to(f"{made.name}/logs/debug.log")
        raise ConnectionError("no route to host")

    (run / "wandb_id.txt").write_text("0123abcd\n")
    (run / "wandb/run-20261121_000000-0123abcd").mkdir(parents=True)
    (run / "wandb/latest-run").symlink_to("run-20261121_000000-0123abcd")
    patch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Error=ConnectionError))


def by_a_recording_of_a_namesake(place: Place, run: Path, patch: Patch) -> None:
    elsewhere = {"run.folder": str(place.folder / "earlier"), "run.steps": 10}
    place.train(run.name, {**elsewhere, "data.record": place.recording(run.name)})


def by_an_unfinished_recording_of_a_namesake(place: Place, run: Path, patch: Patch) -> None:
    elsewhere = {"run.folder": str(place.folder / "earlier"), "data.record": place.recording(run.name)}
    place.train_until(5, run.name, elsewhere)


def by_a_checkpoint_of_a_namesake(place: Place, run: Path, patch: Patch) -> None:
    place.train(run.name, {**SWITCHED, "run.folder": str(place.folder / "twins"), "run.steps": 10})
    shutil.copytree(place.folder / "twins" / run.name / "checkpoints", run / "checkpoints", dirs_exist_ok=True)


def by_a_recording_of_another(place: Place, run: Path, patch: Patch) -> None:
    place.train_until(5, "owner", {"data.record": place.recording(run.name)})


UNRECORDED = {"data.record": ""}
REFUSED = {
    "another_setting": Refusal(
        r"^optim\.lr = 0\.5: expected 0\.01 \(--optim\.lr 0\.01\), as in the checkpoint .*step_00000010$", {"optim.lr": 0.5}
    ),
    "a_forgotten_recording": Refusal(r"^data\.record = '': expected '.*' \(--data\.record .*\), as in the checkpoint", {"data.record": ""}),

    "fewer_steps": Refusal(r"^run\.steps = 9: expected at least 10, where the checkpoint .* stands$", {"run.steps": 9}),
    "other_data": Refusal(
        r"^data\.dataset = '.*/other': expected the data that .*step_00000010",
        {"data.dataset": "{place}/other"},
        fields=UNRECORDED,
    ),

    "processes": Refusal(
        r"step_00000010 is of 1 processes, not 2", {"data.micro_batch": 4}, spoil=by_two_processes, mended=True
    ),
    "a_switch_in_the_past": Refusal(
        r"7:1:flash_delta_from_p.*a step from 10 on", {"alarm.switches": ("7:1:flash_delta_from_p",)}
    ),
    "a_damaged_line": Refusal(
        r"telemetry\.jsonl: line 1 is not a record with a step", spoil=with_a_bad_first_line("telemetry.jsonl")
    ),
    **{
        f"{name}_takes_no_line": Refusal(
            rf"{name}: cannot be written \(not today\)", spoil=that_cannot_be_opened(name, errno.EPERM, "r+b"), mended=True
        )
        for name in ("metrics.jsonl", "offsets.npy")
    },
    **{
        f"a_full_disk_at_{name}_from_step_{dies_at}": Refusal(
            rf"cannot write .*{name}\.tmp \(not today\)",
            dies_at=dies_at,
            spoil=that_cannot_be_opened(f"{name}.tmp", errno.ENOSPC),
            mended=True,
        )
        for dies_at, name in ((14, "metrics.jsonl"), (5, "config.json"))
    },
    "wandb": Refusal(
        r"^wandb\.mode = 'online': .*no route to host", {"wandb.mode": "online"}, spoil=by_a_wandb_out_of_reach, mended=True
    ),
    "checkpoints_gone": Refusal(
        r"they are gone, while .*metrics\.jsonl goes to step 13: choose another name, or remove",
        spoil=lambda place, run, patch: shutil.rmtree(run / "checkpoints"),
    ),
    "a_finished_recording": Refusal(
        r"a finished recording, and this run starts from step 0", {}, UNRECORDED, dies_at=5, spoil=by_a_recording_of_a_namesake
    ),
    "a_recording_of_a_namesake": Refusal(
        r"its run_id is '[0-9a-f]{32}', this run's is '[0-9a-f]{32}': another run's recording$",
        {}, UNRECORDED, dies_at=5, spoil=by_an_unfinished_recording_of_a_namesake
    ),
    "a_checkpoint_of_a_namesake": Refusal(
        r"step_00000010: its run_id is '[0-9a-f]{32}', that of .*config\.json is '[0-9a-f]{32}': not this run's checkpoint$",
        fields=UNRECORDED,
        spoil=by_a_checkpoint_of_a_namesake,
    ),
    "a_recording_of_another_run": Refusal(
        r"its source_run is 'owner', this run's is 'a_recording_of_another_run'", {}, UNRECORDED, dies_at=5, spoil=by_a_recording_of_another
    ),
}  # fmt: skip


def links(folder: Path) -> dict[str, str]:
    return {path.name: str(path.readlink()) for path in folder.rglob("*") if path.is_symlink()}


@pytest.fixture(scope="module")
def switched(place: Place) -> Path:
    return place.train("switched", SWITCHED)


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_resume_changes_nothing(place: Place, switched: Path, name: str, monkeypatch: Patch) -> None:
    given = REFUSED[name]
    fields = {**SWITCHED, "data.record": place.recording(name), **here(place, given.fields)}
    first = {**fields, **here(place, given.first)}
    run = (
        place.train_until(given.dies_at, name, first)
        if given.dies_at
        else place.train(name, {"run.steps": 10, **first})
    )
    given.spoil(place, run, monkeypatch)
    (run / "exit.json").unlink()
    before = tree(run), links(run), tree(place.folder / "recordings")
    with pytest.raises(UserError, match=given.message):
        place.train(name, {**fields, **here(place, given.rest), **RESUME})
    said = json.loads((run / "exit.json").read_text())
    assert (said["code"], said["step"]) == (2, None)
    (run / "exit.json").unlink()
    assert (tree(run), links(run), tree(place.folder / "recordings")) == before
    monkeypatch.undo()
    record.lock(run).close()
    if given.mended:
        assert left(place.train(name, {**fields, **RESUME})) == left(switched)


# ---- two processes at one run


def test_a_run_that_another_process_trains_is_left_alone(place: Place) -> None:
    run = place.train("busy", {"run.steps": 10, "data.record": place.recording("busy")})
    fields = {**RESUME, "data.record": place.recording("busy")}
    before = tree(run), tree(Path(place.recording("busy")))
    with record.lock(run), pytest.raises(UserError, match=r"^run\.name = 'busy': another process is training .*"):
        place.train("busy", fields)
    assert (tree(run), tree(Path(place.recording("busy")))) == before


def test_a_run_is_locked_from_its_first_step_to_its_end(place: Place, monkeypatch: Patch) -> None:
    refusals = []

    def meanwhile(run: Run, step: int) -> None:
        if step in (0, 15):
            with pytest.raises(UserError, match="another process is training"):
                record.lock(run.folder)
            refusals.append(step)

    before_each_step(monkeypatch, meanwhile)
    place.train("held", {"run.steps": 10})
    run = place.train("held", RESUME)
    assert refusals == [0, 15]
    record.lock(run).close()


def test_a_lock_that_was_taken_back_meanwhile_is_not_held(place: Place, monkeypatch: Patch) -> None:
    run = place.train("raced", {"run.steps": 1})
    original, opened = files.fcntl.flock, []

    def late(file: Any, operation: int) -> None:
        if not opened:  # a start that removes what a kill has left, between open and lock
            (run / record.LOCK_FILE).unlink()
        opened.append(file)
        original(file, operation)

    monkeypatch.setattr(files.fcntl, "flock", late)
    with pytest.raises(UserError, match="another process is training"):
        record.lock(run)
    monkeypatch.undo()
    record.lock(run).close()
