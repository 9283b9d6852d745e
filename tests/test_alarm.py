"""training/alarm.py: the layer and head that fail are named, healthy ones are not flagged, and the response is what the config says."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_runs import Place, column, lines, preset, start_train, weights

from config import TrainConfig
from errors import UserError
from training.alarm import Alarm, AlarmConfig, Watch
from training.checkpoint import Checkpoints
from training.metrics import read_lines
from training.telemetry import TelemetryConfig, read_telemetry

BF16 = {"precision.dtype": "bfloat16"}
L, H = 6, 4
RATE, WARM_UP, EVERY = 1e-3, 500, 50


# ---- rules on made-up courses


def clock(step: int) -> float:
    """Summed rates of a linear warm-up and a constant rate."""
    return RATE * (step**2 / (2 * WARM_UP) if step < WARM_UP else step - WARM_UP / 2)


def record(step: int, norm: np.ndarray, logit: np.ndarray, z: np.ndarray, bias: np.ndarray) -> dict[str, Any]:
    return {
        "step": step,
        "lr_sum": clock(step),
        "qk_head_norm": norm.tolist(),
        "max_logit": logit.tolist(),
        "delta_error_mean": bias.tolist(),
        "delta_error_se": (bias / z).tolist(),
        "delta_rms": np.ones((L, H)).tolist(),
    }


def healthy(seed: int, steps: int = 3000, every: int = EVERY) -> list[dict[str, Any]]:
    """Heads that drift at their own constant speeds out of a random start, norms like (a + b c)^2, with 2 % of noise, to large logits."""
    generator = np.random.default_rng(seed)
    speed = generator.uniform(1.0, 4.0, (L, H))
    records = []
    for step in range(0, steps + 1, every):
        norm = (0.3 + speed * clock(step)) ** 2 * np.exp(0.02 * generator.standard_normal((L, H)))
        z = generator.standard_normal((L, H))
        records.append(record(step, norm, 10_000 * norm, z, 1e-2 * z))
    return records


def with_growth(records: list[dict[str, Any]], layer: int, heads: Sequence[int], onset: int) -> list[dict[str, Any]]:
    """From step ``onset`` on, the product of these heads grows like the fifth power of the clock."""
    for entry in records:
        if entry["step"] > onset:
            factor = (entry["lr_sum"] / clock(onset)) ** 3
            for head in heads:
                entry["qk_head_norm"][layer][head] *= factor
                entry["max_logit"][layer][head] *= factor
    return records


def alarms(records: Iterable[dict[str, Any]], config: AlarmConfig, warm_up: int) -> list[Alarm]:
    """All alarms of a run, in order."""
    watch = Watch(config, warm_up)
    return [alarm for record in records for alarm in watch.update(record)]


@pytest.mark.parametrize("seed", range(4))
def test_a_layer_that_sets_out_to_grow_is_named_with_its_heads_and_no_healthy_one(seed: int) -> None:
    layer, heads = seed % L, (seed % H, (seed + 1) % H)
    assert alarms(healthy(seed), AlarmConfig(), WARM_UP) == []
    raised = alarms(with_growth(healthy(seed), layer, heads, onset=2000), AlarmConfig(), WARM_UP)
    assert [alarm.layer for alarm in raised] == [layer]
    assert set(raised[0].heads) <= set(heads)
    # A window of 1.3 is 30 % more of the clock at most, and two probes must agree.
    assert 2000 < raised[0].step <= 2000 * 1.35


@pytest.mark.parametrize(
    ("large", "small", "settings", "flagged"),
    [
        ((0, 1, 3), 400.0, {}, True),
        ((1, 3), 400.0, {}, True),
        ((1,), 400.0, {}, False),
        ((1,), 400.0, {"growth_share": 0.25}, True),
        ((0, 2, 3), 99.0, {}, False),
        ((0, 2, 3), 99.0, {"growth_logit": 98.0}, True),
    ],
)
def test_growth_is_an_alarm_where_logits_of_half_a_layer_are_large(
    large: tuple[int, ...], small: float, settings: dict[str, float], flagged: bool
) -> None:
    """Head 1 grows; logits of heads not in ``large`` are small."""
    records = with_growth(healthy(1), 2, [1], onset=2000)
    for entry in records:
        entry["max_logit"][2] = [10_000.0 if head in large else small for head in range(H)]
    raised = alarms(records, AlarmConfig(**settings), WARM_UP)
    assert [(alarm.layer, alarm.heads) for alarm in raised] == [(2, (1,))] * flagged


def test_the_warm_up_is_not_looked_at() -> None:
    records = with_growth(healthy(1), 2, [1], onset=150)
    first = alarms(records, AlarmConfig(warm_up=0), WARM_UP)[0].step
    assert first < WARM_UP
    # The window of an exponent lies behind the warm-up, too.
    silent = [entry for entry in records if clock(entry["step"]) < 1.3 * clock(WARM_UP)]
    assert silent[-1]["step"] > WARM_UP
    assert alarms(silent, AlarmConfig(), WARM_UP) == []


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_an_alarm_at_once(value: float) -> None:
    records = healthy(1)
    for entry in records[40:]:
        entry["qk_head_norm"][3] = [value] * H
        entry["max_logit"][3] = [value] * H
    raised = alarms(records, AlarmConfig(), WARM_UP)
    assert [(alarm.layer, alarm.step) for alarm in raised] == [(3, 40 * EVERY)]


def test_after_a_rollback_the_course_that_was_left_is_forgotten() -> None:
    failing, calm = with_growth(healthy(1), 2, [1], onset=2000), healthy(1)
    watch = Watch(AlarmConfig(), WARM_UP)
    first = [alarm for entry in failing if entry["step"] <= 2500 for alarm in watch.update(entry)]
    assert len(first) == 1
    # Back to step 2000, before the alarm: what fails again is told again, and a calm course is not flagged of the old one.
    assert [alarm for entry in calm if 2000 <= entry["step"] <= 2500 for alarm in watch.update(entry)] == []
    again = [alarm for entry in failing if 2000 <= entry["step"] <= 2500 for alarm in watch.update(entry)]
    assert [(alarm.layer, alarm.step) for alarm in again] == [(2, first[0].step)]


# ---- responses of a run


# Any growth at all, of any head: an alarm within the first probes of a tiny run.
TOUCHY = AlarmConfig(growth_exponent=1e-6, growth_window=1.01, growth_logit=0.0, growth_probes=1, warm_up=4)


def touchy(**changes: Any) -> dict[str, Any]:
    return {**BF16, "alarm": replace(TOUCHY, **changes), "telemetry": TelemetryConfig(every=3)}


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    path = run / "interventions.jsonl"
    return [entry for entry in read_lines(path) if entry["kind"] == kind] if path.exists() else []


@pytest.fixture(scope="module")
def stable(place: Place) -> Path:
    return place.train("stable", {**BF16, "alarm.growth_exponent": 0.0, "telemetry.every": 3})


def test_log_records_the_alarm_and_changes_no_bit(
    place: Place, stable: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = place.train("logged", touchy())
    assert weights(run, 20) == weights(stable, 20)
    assert events(stable, "alarm") == []
    first = events(run, "alarm")[0]
    assert first["rule"] == "growth"
    assert first["step"] == 9  # probes behind the warm-up are those of steps 6 and 9
    assert f"step 9: ALARM (growth): layer {first['layer']}" in capsys.readouterr().out
    assert next(line["step"] for line in lines(run) if line.get("alarm") == "log") == 9
    # Made afterwards from the file, the alarms are the same.
    expected = [
        alarm.record() | {"step": alarm.step, "batch": alarm.step} for alarm in alarms(read_telemetry(run), TOUCHY, 5)
    ]
    assert events(run, "alarm") == expected


def test_checkpoint_saves_at_the_alarm(place: Place, stable: Path) -> None:
    run = place.train("saved", {**touchy(response="checkpoint"), "checkpoint.every": 0, "checkpoint.keep_last": 9})
    steps = [entry["step"] for entry in events(run, "alarm")]
    assert 9 in steps
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == sorted({f"step_{step:08d}" for step in [*steps, 20]})
    assert weights(run, 20) == weights(stable, 20)


def test_the_checkpoint_of_the_first_alarm_stays(place: Place) -> None:
    fields = {**touchy(response="checkpoint"), "checkpoint.every": 3, "checkpoint.keep_last": 1}
    place.train("kept", {**fields, "run.steps": 15})
    run = place.train("kept", {**fields, "run.resume": "yes"})
    first = events(run, "alarm")[0]["step"]
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == [f"step_{first:08d}", "step_00000020"]


def test_stop_leaves_a_checkpoint_from_which_the_run_can_go_on(place: Place, stable: Path) -> None:
    with pytest.raises(SystemExit) as stopped:
        place.train("stopped", touchy(response="stop"))
    assert stopped.value.code == 1
    run = place.runs / "stopped"
    assert column(run, "step")[-1] == 9
    loaded = Checkpoints(run / "checkpoints", place.config("stopped").checkpoint).load_newest()
    assert loaded is not None
    assert loaded.step == 9
    place.train("stopped", {**touchy(), "run.resume": "yes"})
    assert weights(run, 20) == weights(stable, 20)


def test_switch_moves_the_flagged_layers_at_the_next_step_and_the_record_of_it_repeats_the_run(place: Place) -> None:
    fields = touchy(response="switch", switch_to="flash_delta_from_p")
    switched = place.train("switched", {**fields, "data.record": place.recording("alarm")})
    flagged = [(entry["step"] + 1, entry["layer"]) for entry in events(switched, "alarm")]
    made = [(entry["step"], entry["layer"]) for entry in events(switched, "switch")]
    assert flagged[0][0] == 10
    assert made == flagged
    assert all(entry["to"] == "flash_delta_from_p" for entry in events(switched, "switch"))
    options = tuple(entry["option"] for entry in events(switched, "switch"))
    replayed = place.train("replayed", {**touchy(switches=options), "data.replay": place.recording("alarm")})
    assert weights(replayed, 20) == weights(switched, 20)


@pytest.mark.parametrize("before", [{"growth_exponent": 0.0}, {"response": "log"}], ids=str)
def test_an_alarm_or_an_answer_that_a_resume_switches_on_is_given(place: Place, before: dict[str, Any]) -> None:
    name = "late" + "".join(before)
    place.train(name, {**touchy(**before), "run.steps": 12})
    run = place.train(name, {**touchy(response="switch"), "run.resume": "yes"})
    assert 12 in [entry["step"] for entry in events(run, "alarm")]
    assert events(run, "switch")[0]["step"] == 13


def test_a_layer_that_a_schedule_switched_is_answered_at_a_resume(place: Place) -> None:
    schedule = touchy(switches=("2:1:flash_subtract_first",))
    place.train("scheduled", {**schedule, "run.steps": 12})
    run = place.train("scheduled", {**schedule, "alarm.response": "switch", "run.resume": "yes"})
    answers = {entry["layer"] for entry in events(run, "switch") if entry["cause"] == "alarm"}
    assert answers == {entry["layer"] for entry in events(run, "alarm")}
    assert 1 in answers


def test_an_alarm_whose_answer_changes_nothing_is_given_once(place: Place) -> None:
    same = {**touchy(response="switch", switch_to="flash_consistent"), "attention": preset("flash_consistent")}
    place.train("nothing", {**same, "run.steps": 12})
    run = place.train("nothing", {**same, "run.resume": "yes"})
    flagged = [entry["layer"] for entry in events(run, "alarm")]
    assert len(flagged) == len(set(flagged)) > 0


def test_a_response_needs_telemetry() -> None:
    with pytest.raises(UserError, match=r"alarm\.response = 'stop': expected log while telemetry\.every = 0"):
        TrainConfig(alarm=AlarmConfig(response="stop"), telemetry=TelemetryConfig(every=0))


# ---- more than one process


@pytest.mark.slow
@pytest.mark.parametrize("response", ["switch", "stop"])
def test_all_processes_follow_an_alarm_that_one_of_them_sees(place: Place, response: str) -> None:
    fields = touchy(response=response, switch_to="flash_delta_from_p")
    done = start_train([str(place.preset_file(place.config(f"two_{response}", fields)))], processes=2)
    run = place.runs / f"two_{response}"
    assert events(run, "alarm"), done.stderr
    if response == "stop":
        assert done.returncode == 1
        assert column(run, "step")[-1] == 9
    else:
        assert done.returncode == 0, done.stderr
        assert events(run, "switch")
        assert column(run, "step")[-1] == 20
        # Had one process gone on with the old attention, weights would have parted: DDP averages gradients of one model.
        options = tuple(entry["option"] for entry in events(run, "switch"))
        replay = {**touchy(switches=options), "run.name": "two_replayed"}
        again = start_train([str(place.preset_file(place.config("two_replayed", replay)))], processes=2)
        assert again.returncode == 0, again.stderr
        assert weights(place.runs / "two_replayed", 20) == weights(run, 20)
