"""A loss or gradient that is not finite: each policy does what it says, on record, and a replay does it again to the last bit.

The data hold one odd byte where a chosen step will read it, and the loss of whatever contains it becomes NaN: so it is the data that
fails, as it is when data are to blame, and every run on the same batches meets it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import TINY, TRAIN_TOKENS, Course, Place, assert_equals_straight, column, lines, new_place, weights
from torch import Tensor

import train
from data.batches import random_offsets
from data.recording import Recording
from errors import UserError
from model import GPT
from scripts.make_recording import logged_digests, make
from training.checkpoint import Checkpoints
from training.precision import PrecisionConfig
from training.run import Run

ODD = 255
BAD_BATCH = 14
RESUME = {"run.resume": "yes"}


def place_of(batch: int) -> int:
    """A token that batch number ``batch`` reads."""
    data = TINY.data
    return int(random_offsets(data.seed, batch, TRAIN_TOKENS, data.sequence_length, data.global_batch)[0]) + 3


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    sound = GPT.loss

    def loss(self: GPT, logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        value = sound(self, logits_BTV, targets_BT)
        return value * math.nan if bool((targets_BT == ODD).any()) else value

    plant = {place_of(BAD_BATCH): ODD}
    with new_place(tmp_path_factory, plant=plant) as place, pytest.MonkeyPatch.context() as patch:
        patch.setattr(GPT, "loss", loss)
        yield place


def stopped(place: Place, name: str, fields: dict[str, Any]) -> Path:
    """A run that must end with exit code 1."""
    with pytest.raises(SystemExit) as stop:
        place.train(name, fields)
    assert stop.value.code == 1
    return place.runs / name


def events(run: Path) -> list[tuple[int, int, str]]:
    """(step, batch, what was done) of every step that was not finite."""
    return [(line["step"], line["batch"], line["nonfinite"]) for line in lines(run) if "nonfinite" in line]


# ---- stop


def test_stop_exits_with_1_and_records_up_to_the_bad_batch(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    run = stopped(place, "stop", {"data.record": place.recording("stop"), "run.log_every": 5})
    last = lines(run)[-1]
    assert events(run) == [(BAD_BATCH, BAD_BATCH, "stop")]
    assert (last["step"], last["train_loss"], last["nonfinite"]) == (BAD_BATCH, "nan", "stop")
    assert "step 14, batch 14: loss nan" in capsys.readouterr().out
    recording = Recording.open(Path(place.recording("stop")))
    assert (recording.steps, recording.complete) == (BAD_BATCH + 1, False)


def test_stopped_run_resumes_with_another_policy(place: Place) -> None:
    recording = {"data.record": place.recording("mended")}
    stopped(place, "mended", recording)
    mended = place.train("mended", {**recording, **RESUME, "nonfinite.policy": "skip"})
    skipped = place.train("skipped_at_once", {"nonfinite.policy": "skip"})
    assert lines(mended) == lines(skipped)
    assert weights(mended, 20) == weights(skipped, 20)


# ---- skip and continue


def test_skip_leaves_the_weights_alone(place: Place) -> None:
    run = place.train("skip", {"nonfinite.policy": "skip", "evaluation.every": 1})
    validation = column(run, "val_loss")
    assert events(run) == [(BAD_BATCH, BAD_BATCH, "skip")]
    assert validation[BAD_BATCH + 1] == validation[BAD_BATCH]
    assert len(set(validation)) == len(validation) - 1
    assert all(isinstance(loss, float) for loss in column(run, "train_loss")[BAD_BATCH + 1 :])


def test_continue_applies_the_update_all_the_same(place: Place) -> None:
    run = place.train("continue", {"nonfinite.policy": "continue", "evaluation.every": 1})
    assert events(run) == [(step, step, "continue") for step in range(BAD_BATCH, 20)]
    validation = column(run, "val_loss")
    assert isinstance(validation[BAD_BATCH], float)
    assert validation[BAD_BATCH + 1 :] == ["nan"] * 6
    # The probes of such weights say so; they do not fail.
    assert column(run, "w_q_norm_max")[-1] == "nan"


# ---- rollback

ROLLBACK = {"nonfinite.policy": "rollback", "nonfinite.lr_scale": 0.25, "nonfinite.lr_scale_steps": 4}


@pytest.fixture(scope="module")
def rolled_back(place: Place) -> Path:
    return place.train("rollback", {**ROLLBACK, "data.record": place.recording("rollback")})


def test_rollback_goes_back_to_the_checkpoint_and_past_the_batch(rolled_back: Path) -> None:
    courses = [(line["step"], line["batch"]) for line in lines(rolled_back) if "batch" in line]
    first = [(step, step) for step in range(BAD_BATCH + 1)]
    # From the checkpoint of step 10, with the batches that follow the bad one.
    assert courses == first + [(step, step + BAD_BATCH + 1 - 10) for step in range(10, 20)]
    assert events(rolled_back) == [(BAD_BATCH, BAD_BATCH, "rollback")]


def test_a_recording_made_afterwards_agrees_with_a_run_that_went_back(
    place: Place, rolled_back: Path, tmp_path: Path
) -> None:
    digests = logged_digests(rolled_back)
    assert make(place.config("again").data, tmp_path / "made", 25, digests) == len(digests) == 25


def test_rollback_lowers_the_learning_rate_for_so_many_steps(rolled_back: Path) -> None:
    rates = [line["lr"] for line in lines(rolled_back) if "lr" in line][BAD_BATCH + 1 :]
    assert rates == [0.25 * 1e-2] * 4 + [1e-2] * 6


def test_rollback_is_recorded_without_gap_or_repeat(place: Place, rolled_back: Path) -> None:
    recording = Recording.open(Path(place.recording("rollback")))
    assert (recording.steps, recording.complete) == (25, True)
    data = TINY.data
    for batch, offsets in enumerate(recording.offsets):
        drawn = random_offsets(data.seed, batch, TRAIN_TOKENS, data.sequence_length, data.global_batch)
        assert (offsets == drawn).all()


def test_replay_repeats_a_rollback_to_the_last_bit(place: Place, rolled_back: Path) -> None:
    replayed = place.train("rollback_replayed", {**ROLLBACK, "data.replay": place.recording("rollback")})
    assert lines(replayed) == lines(rolled_back)
    assert weights(replayed, 20) == weights(rolled_back, 20)


def test_a_replay_that_a_rollback_makes_too_short_is_saved_where_it_ends(place: Place, rolled_back: Path) -> None:
    short = Path(place.recording("short"))
    make(place.config("short").data, short, 22, {})
    fields = {**ROLLBACK, "data.replay": str(short)}
    with pytest.raises(UserError, match="ends at step 17 of this run, as 5 of its steps were passed over by rollbacks"):
        place.train("short", {**fields, "checkpoint.every": 10})
    run = place.train("short", {**fields, "checkpoint.every": 10, "run.resume": "yes", "run.steps": 17})
    assert weights(run, 17) == weights(place.train("to_17", {**ROLLBACK, "checkpoint.every": 10, "run.steps": 17}), 17)


@pytest.mark.parametrize("interrupted_at", [10, 20])
def test_resumed_run_repeats_a_rollback_to_the_last_bit(place: Place, interrupted_at: int) -> None:
    # Lowered to step 25: after the interruption at 20 as well.
    course = Course({**ROLLBACK, "nonfinite.lr_scale_steps": 15, "run.steps": 30}, f"ends at {interrupted_at}")
    assert_equals_straight(place, f"rollback_resumed_{interrupted_at}", course)


def test_rollback_without_a_checkpoint_stops(place: Place) -> None:
    run = stopped(place, "rollback_early", {**ROLLBACK, "checkpoint.every": 15})
    assert events(run) == [(BAD_BATCH, BAD_BATCH, "stop")]


def spoil(patch: pytest.MonkeyPatch, before: str, when: Callable[[Run, int], bool], value: float) -> None:
    """Weights become ``value`` before ``take_step`` or ``save`` is called so: as an update can leave them whose gradient was finite."""
    sound = getattr(train, before)

    def spoiled(run: Run, step: int) -> Any:
        if when(run, step):
            run.network.raw.transformer.ln_f.weight.data.fill_(value)
        return sound(run, step)

    patch.setattr(train, before, spoiled)


def first_save_at_20(run: Run, step: int) -> bool:
    """Not the one of a course that a rollback has begun."""
    return (step, run.batches.position) == (20, 20)


def test_rollback_gives_up_after_so_many(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, "take_step", lambda run, _: run.batches.position >= 12, math.nan)
    run = stopped(place, "rollback_always", {**ROLLBACK, "nonfinite.max_rollbacks": 2})
    assert events(run) == [(12, 12, "rollback"), (10, 13, "rollback"), (10, 14, "stop")]


def test_rollback_passes_over_a_checkpoint_with_broken_weights(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, "save", first_save_at_20, math.inf)
    run = place.train("rollback_far", {"nonfinite.policy": "rollback", "run.steps": 30, "data.seed": 5})
    assert events(run) == [(20, 20, "rollback")]
    assert [line["batch"] for line in lines(run) if line["step"] == 10] == [10, 21]
    loaded = Checkpoints(run / "checkpoints", TINY.checkpoint).load_newest()
    assert loaded is not None
    assert loaded.position == 41
    assert all(tensor.isfinite().all() for tensor in loaded.model_state.values())


def test_rollback_passes_over_a_checkpoint_whose_finite_weights_give_what_is_not(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, "save", first_save_at_20, 3e38)
    run = place.train("rollback_huge", {"nonfinite.policy": "rollback", "run.steps": 30, "data.seed": 5})
    assert events(run) == [(20, 20, "rollback"), (20, 21, "rollback")]
    assert [line["batch"] for line in lines(run) if line["step"] == 10] == [10, 22]


def test_skip_gives_up_after_so_many_in_a_row_and_keeps_what_was_sound(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, "take_step", lambda run, _: run.batches.position >= 5, math.nan)
    fields = {"nonfinite.policy": "skip", "nonfinite.max_skips": 6, "checkpoint.every": 1, "checkpoint.keep_last": 2}
    run = stopped(place, "skip_always", fields)
    assert events(run) == [(step, step, "skip") for step in range(5, 11)] + [(11, 11, "stop")]
    kept = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert kept[:2] == ["step_00000004", "step_00000005"]


def test_a_resumed_run_still_tells_of_a_rollback_over_its_checkpoint(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At step 20 it goes back to step 10 and saves a step 20 of its own; the first one's lines are of no later course than that."""
    spoil(monkeypatch, "save", first_save_at_20, math.inf)
    fields = {"nonfinite.policy": "rollback", "run.steps": 30, "data.seed": 5, "alarm.switches": ("20:1:flash_fp32_o",)}
    run = assert_equals_straight(place, "rollback_over", Course(fields, "dies at 25"))
    told = [(line["step"], line["batch"], line["cause"]) for line in lines(run, name="interventions.jsonl")]
    assert told == [(20, 20, "schedule"), (10, 21, "rollback"), (20, 31, "schedule")]


# ---- float16


@pytest.fixture
def high_loss_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """So high that the first gradients overflow float16, until it has been halved often enough."""
    monkeypatch.setattr(
        PrecisionConfig,
        "scaler",
        lambda self, device: torch.amp.GradScaler(device.type, init_scale=2.0**24, enabled=self.dtype == "float16"),
    )


FLOAT16 = {"precision.dtype": "float16", "data.seed": 5}


@pytest.mark.usefixtures("high_loss_scale")
@pytest.mark.parametrize("policy", ["stop", "skip", "continue", "rollback"])
def test_float16_overflow_is_skipped_and_counted_whatever_the_policy(place: Place, policy: str) -> None:
    run = place.train(f"overflow_{policy}", {**FLOAT16, "nonfinite.policy": policy, "evaluation.every": 1})
    overflows = [step for step, _, action in events(run) if action == "overflow"]
    assert overflows == list(range(len(overflows)))
    assert 0 < len(overflows) < 15
    validation = column(run, "val_loss")
    assert len(set(validation[: len(overflows) + 1])) == 1
    assert validation[-1] < validation[0]
    state = json.loads((run / "checkpoints/step_00000020/state.json").read_text())
    assert state["extra"]["guard"]["overflow_steps"] == len(overflows)
    assert state["scaler"]["scale"] == 2.0 ** (24 - len(overflows))


@pytest.mark.usefixtures("high_loss_scale")
def test_float16_overflow_repeats_in_a_replay_and_after_a_resume(place: Place) -> None:
    fields = {**FLOAT16, "checkpoint.every": 3}
    recorded = place.train("overflow_recorded", {**fields, "data.record": place.recording("overflow")})
    replayed = place.train("overflow_replayed", {**fields, "data.replay": place.recording("overflow")})
    place.train("overflow_resumed", {**fields, "run.steps": 3})
    resumed = place.train("overflow_resumed", {**fields, **RESUME})
    assert lines(recorded) == lines(replayed) == lines(resumed)
    assert weights(recorded, 20) == weights(replayed, 20) == weights(resumed, 20)
