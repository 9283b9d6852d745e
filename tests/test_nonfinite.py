"""A loss or gradient that is not finite: each policy does what it says, a replay does it again, and reading values late changes no bit.

The data hold one odd byte where a chosen step will read it, and the loss of whatever contains it becomes NaN: so it is the data that
fails, as it is when data are to blame, and every run on the same batches meets it.
"""

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import TINY, TRAIN_TOKENS, Place, before_each_step, column, lines, make_data, optimizer, weights
from torch import Tensor

import train
from data.batches import random_offsets
from data.recording import Recording
from model import GPT
from training.nonfinite import FoundInf
from training.precision import PrecisionConfig
from training.run import Run

ODD = 255
BAD_BATCH = 14
RESUME = {"run.resume": "yes"}


@pytest.fixture(scope="module")
def place(place: Place) -> Iterator[Place]:
    sound = GPT.loss

    def loss(self: GPT, logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        value = sound(self, logits_BTV, targets_BT)
        return value * math.nan if bool((targets_BT == ODD).any()) else value

    data = TINY.data
    offsets = random_offsets(data.seed, BAD_BATCH, TRAIN_TOKENS, data.sequence_length, data.global_batch)
    make_data(place.data, plant={int(offsets[0]) + 3: ODD})
    with pytest.MonkeyPatch.context() as patch:
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
    run = place.train("skip", {"nonfinite.policy": "skip", "evaluation.every": 1, "model.qk_clip_tau": 0.1})
    validation = column(run, "val_loss")
    assert events(run) == [(BAD_BATCH, BAD_BATCH, "skip")]
    assert validation[BAD_BATCH + 1] == validation[BAD_BATCH]
    assert len(set(validation)) == len(validation) - 1
    assert all(isinstance(loss, float) for loss in column(run, "train_loss")[BAD_BATCH + 1 :])


def test_skip_gives_up_after_so_many_and_keeps_what_was_sound(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(run: Run, step: int) -> None:
        """As an update can leave weights whose gradient was finite."""
        if step >= 5:
            run.network.raw.transformer.ln_f.weight.data.fill_(math.nan)

    before_each_step(monkeypatch, spoil)
    fields = {"nonfinite.policy": "skip", "nonfinite.max_skips": 6, "checkpoint.every": 1, "checkpoint.keep_last": 2}
    run = stopped(place, "skip_always", fields)
    assert events(run) == [(step, step, "skip") for step in range(5, 11)] + [(11, 11, "stop")]
    kept = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert kept[:2] == ["step_00000004", "step_00000005"]


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
@pytest.mark.parametrize("policy", ["stop", "skip"])
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
    replay = {"data.seed": TINY.data.seed, "data.replay": place.recording("overflow")}  # the order is the recording's
    replayed = place.train("overflow_replayed", {**fields, **replay})
    place.train("overflow_resumed", {**fields, "run.steps": 3})
    resumed = place.train("overflow_resumed", {**fields, **RESUME})
    assert lines(recorded) == lines(replayed) == lines(resumed)
    assert weights(recorded, 20) == weights(replayed, 20) == weights(resumed, 20)


def run_of(place: Place, name: str, fields: dict[str, Any]) -> Any:
    """Its lines and what its checkpoints hold, whether it ends or is stopped."""
    with contextlib.suppress(SystemExit):
        place.train(name, fields)
    run = place.runs / name
    steps = [int(path.name.removeprefix("step_")) for path in sorted((run / "checkpoints").glob("step_*"))]
    return lines(run), [(step, weights(run, step), optimizer(run, step)) for step in steps]


SETTINGS: dict[str, dict[str, Any]] = {
    "skip": {"nonfinite.policy": "skip", "telemetry.every": 4, "data.micro_batch": 2},
    "stop": {},
    "float16": {"precision.dtype": "float16", "nonfinite.policy": "skip", "model.qk_clip_tau": 0.1},
    "muon": {"optim.optimizer": "muon", "nonfinite.policy": "skip", "model.qk_clip_tau": 0.1},
    "sparse": {"run.log_every": 5, "nonfinite.policy": "skip", "evaluation.every": 0, "telemetry.every": 0},
    "fused": {"optim.fused": "on", "nonfinite.policy": "skip"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_late_values_change_no_bit_and_no_line(place: Place, name: str) -> None:
    """Across a step that is not finite, measurements and checkpoints."""
    fields = {"checkpoint.every": 6, **SETTINGS[name]}
    at_once = run_of(place, f"{name}_at_once", fields)
    assert events(place.runs / f"{name}_at_once") == [(BAD_BATCH, BAD_BATCH, fields.get("nonfinite.policy", "stop"))]
    for every in (2, 7):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train, "READ_EVERY", {"cpu": every})
            assert run_of(place, f"{name}_late_{every}", fields) == at_once


# ---- the parts


@pytest.mark.parametrize(
    ("loss", "norm", "scale", "overflow"),
    [(2.0, torch.nan, 4.0, 1.0), (2.0, torch.inf, 0.5, 0.0), (torch.nan, torch.nan, 4.0, 0.0)],
)
def test_an_overflow_is_a_scaled_gradient_alone(loss: float, norm: float, scale: float, overflow: float) -> None:
    found = FoundInf("stop", torch.device("cpu"))(torch.tensor(loss), torch.tensor(norm), torch.tensor(scale))
    assert [x.item() for x in found] == [overflow, 1.0]


@pytest.mark.parametrize(("policy", "after"), [("stop", 1.0), ("skip", 0.0)])
def test_steps_after_a_stop_that_is_not_read_yet_change_nothing(policy: Any, after: float) -> None:
    found = FoundInf(policy, torch.device("cpu"))
    assert [found(torch.tensor(x), torch.tensor(1.0), None)[1].item() for x in (1.0, math.nan, 1.0)] == [0, 1, after]
