"""scripts/branch_run.py: a new run from another one's checkpoint, the same bits where nothing is changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import Place, lines, optimizer, preset, tree, weights

from data.recording import Recording
from errors import UserError
from scripts import branch_run as script
from training.alarm import AlarmConfig
from training.checkpoint import Checkpoints
from training.metrics import read_lines

BEFORE, STEP, LAST = 10, 20, 30
# The alarm names both layers at step 4; a switch before the checkpoint and one of its very step.
ALARM = AlarmConfig(
    warm_up=0,
    growth_exponent=1e-3,
    growth_logit=1e-3,
    growth_probes=1,
    switches=("7:1:flash_fp32_o", "20:0:flash_delta_from_p"),
)
FIELDS: dict[str, Any] = {
    "run.steps": LAST,
    "precision.dtype": "bfloat16",
    "attention": preset("flash_stochastic_p_o"),
    "alarm": ALARM,
    "telemetry.every": 2,
    "checkpoint.keep_last": 9,
    "run.log_every": 2,
}
RESUME = {"run.resume": "yes"}


@pytest.fixture(scope="module")
def place(place: Place) -> Place:
    """With a run of 30 steps that recorded its batches, and checkpoints of 10, 20 and 30."""
    place.train("old", {**FIELDS, "data.record": place.recording("old")})
    return place


def checkpoint(place: Place, run: str, step: int = STEP) -> Path:
    return place.runs / run / f"checkpoints/step_{step:08d}"


def branch(place: Place, name: str, *arguments: str, of: Path | None = None) -> Path:
    script.main([str(of or checkpoint(place, "old")), str(place.runs / name), *arguments])
    return place.runs / name


def probes(run: Path) -> list[dict[str, Any]]:
    return [entry | {"probe_seconds": 0} for entry in read_lines(run / "telemetry.jsonl")]


def interventions(run: Path) -> list[dict[str, Any]]:
    return list(read_lines(run / "interventions.jsonl"))


def record_of(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / "config.json").read_text())
    return content


# ---- nothing changed


def assert_same_run(run: Path, old: Path) -> None:
    """The two differ in nothing that is measured: losses, probes, alarms, weights, moments."""
    assert lines(run) == lines(old)
    assert probes(run) == probes(old)
    assert interventions(run) == interventions(old)
    assert (weights(run, LAST), optimizer(run, LAST)) == (weights(old, LAST), optimizer(old, LAST))


@pytest.mark.parametrize("step", [BEFORE, STEP])
def test_a_branch_of_a_recording_run_has_the_same_bits(place: Place, step: int) -> None:
    before = tree(Path(place.recording("old")))
    run = branch(place, f"drawn_{step}", of=checkpoint(place, "old", step))
    assert_same_run(place.train(run.name, {**FIELDS, **RESUME}), place.runs / "old")
    assert tree(Path(place.recording("old"))) == before


def test_a_branch_of_a_recording_run_cannot_record_into_it(place: Place) -> None:
    before = tree(Path(place.recording("old")))
    branch(place, "thief")
    with pytest.raises(UserError, match=r"^data\.record = .*: expected none, as in the checkpoint"):
        place.train("thief", {**FIELDS, **RESUME, "data.record": place.recording("old")})
    assert tree(Path(place.recording("old"))) == before
    assert Recording.open(Path(place.recording("old"))).complete


# ---- the record


def test_the_record_says_where_it_comes_from_also_after_it_went_on(place: Place) -> None:
    branch(place, "said")
    run = place.train("said", {**FIELDS, **RESUME})
    sessions = record_of(run)["sessions"]
    assert [(one["from_step"], one.get("branched_from")) for one in sessions] == [
        (0, None),
        (STEP, {"run": "old", "step": STEP}),
        (STEP, None),
    ]


# ---- changed on its way


def switched(place: Place, name: str, **fields: Any) -> Path:
    """A run from step 10 of another one on, with a switch at that step."""
    alarm = AlarmConfig(switches=("7:1:flash_fp32_o", "10:0:flash_delta_from_p"))
    return place.train(name, {**FIELDS, "alarm": alarm, "run.steps": 20, **RESUME, **fields})


def switches(run: Path) -> list[tuple[int, int]]:
    return [(event["step"], event["layer"]) for event in interventions(run) if event["kind"] == "switch"]


def test_a_switch_at_the_checkpoint_s_step_is_told_once(place: Place) -> None:
    run = branch(place, "switched", of=checkpoint(place, "old", BEFORE))
    switched(place, "switched", **{"checkpoint.every": 0})
    shutil.rmtree(run / f"checkpoints/step_{20:08d}")  # as if it had been killed
    switched(place, "switched")
    assert switches(run) == [(7, 1), (10, 0)]


# ---- mistakes


@pytest.mark.parametrize(
    ("run", "out", "message"),
    [
        ("runs/old", "runs/old", "runs/old: exists; name a new run"),
        ("runs/old", "elsewhere/old", "OUT = 'old': expected another name"),
        ("alone/checkpoints/step_00000020", "runs/new", "alone: no metrics.jsonl in it"),
        ("behind", "runs/new", "before step 20 of {place}/behind/checkpoints/step_00000020 its last line is of step 8"),
        ("runs/old", "data/train.json/new", "train.json/new: cannot be made"),
    ],
)
def test_runs_that_cannot_be_are_one_line(
    place: Place, run: str, out: str, message: str, refused: Callable[..., str]
) -> None:
    for name in ("alone", "behind"):
        if not (place.folder / name).exists():
            shutil.copytree(checkpoint(place, "old"), place.folder / name / f"checkpoints/step_{STEP:08d}")
    text = (place.runs / "old/metrics.jsonl").read_text().splitlines(keepends=True)
    (place.folder / "behind/metrics.jsonl").write_text("".join(text[:5]))
    message = message.format(place=place.folder)
    assert_refused(place, refused, place.folder / run, place.folder / out, message)


def assert_refused(place: Place, refused: Callable[..., str], run: Path, out: Path, message: str) -> None:
    before = tree(place.folder)
    assert message in refused(script.main, run, out)
    assert tree(place.folder) == before


def test_what_cannot_be_written_leaves_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    def fails(self: Checkpoints, step: int, **_: object) -> Path:
        assert not (place.runs / "full").exists()  # it has no name before it is whole
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Checkpoints, "save", fails)
    message = "runs/full: cannot be made (No space left on device)"
    assert_refused(place, refused, checkpoint(place, "old"), place.runs / "full", message)
