"""The alarm's rule and a run that says so; the verdict on a file of watch: the list in verdict.py, on made-up records."""

import json
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import Place, completed, lines, weights

from attention.watching.growth import GrowthAlarm, GrowthRule, Probe, growth
from attention.watching.verdict import TEST, answer, main, table
from errors import UserError
from training.intervention import AlarmConfig, update_alarm

BF16 = {"precision.dtype": "bfloat16"}
L, H = 6, 4
RATE, WARM_UP, EVERY = 1e-3, 500, 50


# ---- rules on made-up courses


def clock(step: int) -> float:
    """Summed rates of a linear warm-up and a constant rate."""
    return RATE * (step**2 / (2 * WARM_UP) if step < WARM_UP else step - WARM_UP / 2)


def healthy(seed: int) -> list[dict[str, Any]]:
    """Heads that drift at their own constant speeds out of a random start, norms like (a + b c)^2, with 2 % of noise, to large logits."""
    generator = np.random.default_rng(seed)
    speed = generator.uniform(1.0, 4.0, (L, H))
    records = []
    for step in range(0, 3001, EVERY):
        norm = (0.3 + speed * clock(step)) ** 2 * np.exp(0.02 * generator.standard_normal((L, H)))
        logit = {"qk_head_norm": norm.tolist(), "max_logit": (10_000 * norm).tolist()}
        records.append({"step": step, "lr_sum": clock(step), **logit})
    return records


ONSET = 2000


def with_growth(records: list[dict[str, Any]], layer: int, heads: Sequence[int]) -> list[dict[str, Any]]:
    """From step ``ONSET`` on, the product of these heads grows like the fifth power of the clock."""
    for entry in records:
        if entry["step"] > ONSET:
            factor = (entry["lr_sum"] / clock(ONSET)) ** 3
            for head in heads:
                entry["qk_head_norm"][layer][head] *= factor
                entry["max_logit"][layer][head] *= factor
    return records


def alarms(records: Iterable[dict[str, Any]], config: AlarmConfig | None = None, warm_up: int = WARM_UP) -> list[Any]:
    """All alarms of a run, in order."""
    alarm = (config or AlarmConfig()).open(warm_up)
    return [found for record in records for found in update_alarm(alarm, record)]


@pytest.mark.parametrize("seed", range(4))
def test_a_layer_that_sets_out_to_grow_is_named_with_its_heads_and_no_healthy_one(seed: int) -> None:
    layer, heads = seed % L, (seed % H, (seed + 1) % H)
    assert alarms(healthy(seed)) == []
    raised = alarms(with_growth(healthy(seed), layer, heads))
    assert [alarm.layer for alarm in raised] == [layer]
    assert set(raised[0].heads) <= set(heads)
    # A window of 1.3 is 30 % more of the clock at most, and two probes must agree.
    assert ONSET < raised[0].step <= ONSET * 1.35


@pytest.mark.parametrize(
    ("large", "small", "settings", "flagged"),
    [
        ((0, 1, 3), 400.0, {}, True),
        ((1,), 400.0, {}, False),
        ((1,), 400.0, {"share": 0.25}, True),
        ((0, 2, 3), 99.0, {"logit": 98.0}, True),
    ],
)
def test_growth_is_an_alarm_where_logits_of_half_a_layer_are_large(
    large: tuple[int, ...], small: float, settings: dict[str, float], flagged: bool
) -> None:
    """Head 1 grows; logits of heads not in ``large`` are small."""
    records = with_growth(healthy(1), 2, [1])
    for entry in records:
        entry["max_logit"][2] = [10_000.0 if head in large else small for head in range(H)]
    raised = alarms(records, AlarmConfig(rule=GrowthRule(**settings)))
    assert [(alarm.layer, alarm.heads) for alarm in raised] == [(2, (1,))] * flagged


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_probe_that_is_not_finite_is_passed_over(value: float) -> None:
    records = with_growth(healthy(1), 2, [1])
    (expected,) = alarms(records)
    broken = {**records[41], "max_logit": [[value] * H] * L}
    assert alarms([*records[:41], broken, *records[42:]]) == [expected]
    assert expected.step > 41 * EVERY


@pytest.mark.parametrize(("field", "value"), [("probes", 1.5), ("exponent", math.nan)])
def test_a_threshold_that_no_rule_can_have_is_refused_in_one_line(field: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"^GrowthRule {field} = {value!r}: expected .+"):
        GrowthRule(**{field: value})


@pytest.mark.parametrize(("logit", "exponent", "flagged"), [(2500, 9, True), (1900, 9, False), (2500, 7, False)])
def test_a_head_whose_logits_grow_far_too_fast_is_flagged_at_once(logit: float, exponent: float, flagged: bool) -> None:
    """One head of twelve, at the first probe, where half of the heads would be late."""
    logits = torch.full((2, 12), 50.0, dtype=torch.float64)
    logits[1, 3], logits[0, 3] = logit, logit / 1.5**exponent
    found = growth([Probe(c, logits[i], logits[i]) for c, i in ((70.0, 0), (100.0, 0), (150.0, 1))], GrowthRule())
    assert found is not None
    assert found[0].nonzero().tolist() == [[3]] * flagged


def test_a_sudden_layer_is_flagged_at_the_first_probe_with_another_far_enough_before_it() -> None:
    courses = (
        ((1.0, 10.0), (1.1, 10.0), (1.2, 20.0), (1.35, 9000.0)),
        ((100.0, 500.0), (100.1, 4000.0), (100.2, 4200.0)),
    )
    grown, late = ([Probe(clock, *torch.full((2, 1), logit).double()) for clock, logit in run] for run in courses)
    assert growth(grown[:3], GrowthRule()) is None
    # In less than a window it must grow by as much as in one: 1.3^8 = 8.2.
    assert growth(late[:2], GrowthRule()) is None
    assert growth(late, GrowthRule())
    # The other part of the rule needs its number of probes.
    for rule, flagged in ((GrowthRule(), True), (GrowthRule(sudden_logit=1e9, share=0.0), False)):
        found = growth(grown, rule)
        assert found is not None
        assert found[0].tolist() == [flagged]


@pytest.mark.parametrize("probes", [1, 2, 3])
def test_any_number_of_probes_can_agree(probes: int) -> None:
    alarm = GrowthAlarm(GrowthRule(probes=probes, sudden_logit=1e30))
    for step in range(1, 60):
        alarm.update(step, float(step), {0: [(step / 10) ** 6] * 2})
    assert list(alarm.flagged) == [0]


def test_a_head_that_begins_below_0_can_be_flagged() -> None:
    alarm = GrowthAlarm()
    for step, logit in ((10, -1.0), (20, 5e3), (30, 2e4)):
        alarm.update(step, float(step), {0: [logit]})
    assert alarm.flagged == {0: 20}


# ---- in a run


# Any growth at all, of any head: an alarm within the first probes of a tiny run.
TOUCHY = AlarmConfig(rule=GrowthRule(exponent=1e-6, window=1.01, logit=0.0, probes=1), warm_up=4)


def test_a_run_says_each_layer_once_and_changes_no_bit(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    stable = place.train("stable", {**BF16, "telemetry.every": 3})
    assert "ALARM" not in capsys.readouterr().out
    fields = {**BF16, "alarm": TOUCHY, "telemetry.every": 3}
    place.train("warned", {**fields, "run.steps": 12})
    run = place.train("warned", {**fields, "run.resume": "yes"})
    said = [line for line in capsys.readouterr().out.splitlines() if "ALARM" in line]
    expected = alarms(lines(run, name="telemetry.jsonl"), TOUCHY, 5)
    assert expected[0].step == 9  # probes behind the warm-up are those of steps 6 and 9
    assert said == [f"ALARM: {found}" for found in expected]
    assert weights(run, 20) == weights(stable, 20)


def look(step: int, logit: float, **columns: list[float]) -> dict[str, Any]:
    """Two layers of two heads; the second has the logit and the columns."""
    columns = {"dq_error": [0.01, 0.01], **columns}
    return {"step": step, "clock": step, "max_logit": [[1.0, 1.0], [logit, logit]]} | {
        name: [[0.0, 0.0], values] for name, values in columns.items()
    }


def without_gradients(step: int, *, layer: int | None = None) -> dict[str, Any]:
    """Of no layer, or not of one."""
    found = look(step, 50.0)
    if layer is None:
        del found["dq_error"]
    else:
        found["dq_error"][layer] = None
    return found


FLAGGED = [look(step, (step / 100) ** 4) for step in range(100, 1001, 100)]
FLAGGED_HARMLESS = [
    look(one["step"], one["max_logit"][1][0], row_residual=[1e-7] * 2, delta_error=[1e-7] * 2) for one in FLAGGED
]
NO_GRADIENT = look(4, 50.0, dq_error=[math.nan] * 2, delta_error=[math.nan] * 2)


@pytest.mark.parametrize(
    ("records", "first"),
    [
        ([look(0, 50.0), look(100, 90.0), look(200, 90.0)], "NO"),
        ([look(0, 50.0), look(100, 90.0), look(200, 90.0), look(300, math.nan)], "UNCLEAR"),
        ([look(0, 50.0), look(199, 90.0), look(200, 90.0), look(201, math.nan)], "NO"),
        ([look(0, 50.0), look(100, 1e5), look(200, 50.0)], "UNCLEAR"),
        ([look(step, 50.0, dq_error=[0.01, 5.0 if step < 3 else 0.01]) for step in range(4)], "SUSPECT"),
        ([look(step, 50.0, dq_error=[0.01, 0.5 if step < 3 else 0.01]) for step in range(5)], "UNCLEAR"),
        ([look(step, 50.0, dq_error=[0.01, 0.5 if step < 2 else 0.01]) for step in range(4)], "NO"),
        ([look(0, 50.0, dq_error=[0.8, 0.8])], "SUSPECT"),
        ([*(look(step, 50.0) for step in range(3)), look(3, 50.0, dq_error=[0.8, 0.8])], "SUSPECT"),
        ([look(step, 50.0, dq_error=[0.8 if step < 2 else 0.01] * 2) for step in range(4)], "SUSPECT"),
        ([NO_GRADIENT, *(look(step, 50.0) for step in (5, 6))], "UNCLEAR"),
        ([look(0, math.nan), *(look(step, 50.0) for step in (1, 2, 3)), look(9, math.nan)], "UNCLEAR"),
        ([look(0, 50.0, dq_error=[0.01, 2.0], delta_error=[1e-7, 1e-3])], "SUSPECT"),
        ([look(0, 50.0, dq_error=[0.01, 2.0], delta_error=[1e-7, 1e-7])], "UNCLEAR"),
        ([look(step, 50.0, dq_error=[2.0] * 2, o_error=[0.1] * 2) for step in range(4)], "UNCLEAR"),
        (
            [without_gradients(step) | {"o_error": [[0.0] * 2, [0.1] * 2]} for step in range(3)],
            "UNCLEAR: O of layer 1 (0.14)",
        ),
        ([look(step, 50.0, o_error=[error] * 2) for step, error in enumerate([math.inf, math.inf, 0.001])], "NO"),
        ([look(step, 50.0, dq_error=[0.5, 0.5]) for step in range(2)], "UNCLEAR: no layer was flagged in 2 record(s)"),
        (FLAGGED, "SUSPECT"),
        ([look(0, 50.0, nan_made=[0.0, 1.0]), look(100, math.nan)], "KERNEL"),
        ([without_gradients(step) for step in range(5)], "UNCLEAR"),
        ([without_gradients(step, layer=0) for step in range(5)], "UNCLEAR"),
        ([without_gradients(step, layer=0) | {"frozen": [0]} for step in range(5)], "NO"),
        ([without_gradients(step) | {"frozen": [0, 1]} for step in range(5)], "UNCLEAR"),
        ([without_gradients(0), *(look(step, 50.0) for step in (1, 2, 3))], "NO"),
        ([look(step, 50.0) | {"hidden": 1} for step in range(5)], "UNCLEAR"),
        ([*(look(step, 50.0) for step in range(4)), NO_GRADIENT], "UNCLEAR"),
        ([NO_GRADIENT, *(look(step, 50.0) for step in range(5, 9))], "NO"),
        ([*FLAGGED, look(1100, 2e4, dq_error=[math.nan] * 2)], "SUSPECT"),
        ([look(step, 1500.0, dq_error=[math.nan] * 2) for step in range(4)], "SUSPECT"),
        ([*FLAGGED_HARMLESS, look(1100, 2e4, dq_error=[math.nan] * 2)], "SUSPECT"),
        ([*FLAGGED_HARMLESS, look(1100, 2e4, dq_error=[2.0] * 2, delta_error=[1e-3] * 2)], "SUSPECT"),
        ([look(step, 46.0 - step) | {"softcap": [0, 50]} for step in range(4)], "UNCLEAR: logits reach the cap of 50,"),
        ([look(step, 44.0 - step) | {"softcap": [0, 50]} for step in range(4)], "NO"),
        ([look(step, 50.0) | {"softcap": [20, 0]} for step in range(4)], "NO"),
        ([without_gradients(step, layer=0) | {"frozen": [0], "softcap": [1, 0]} for step in range(4)], "NO"),
    ],
)
def test_a_watched_run_is_judged_by_the_list_of_verdicts(records: list[dict[str, Any]], first: str) -> None:
    assert answer(records)[0].startswith(first)


@pytest.mark.parametrize(
    ("looks", "advice"),
    [
        ({0: 500.0}, "If the run has failed, run the control; else go on watching. If this is"),
        ({0: 500.0, 1: math.nan}, "Run the control. If this is the control, its loss decides"),
        ({0: 500.0, 100: math.nan}, "Watch each step (every=1) from an earlier checkpoint."),
        ({0: 2e3, 1: math.nan}, "Run the control, from a checkpoint with logits below 1,000. If this is the control"),
        ({0: 90.0}, "Go on watching."),
        ({0: 90.0, 1: math.nan}, "In FP16 lower the loss scale; else watch from an earlier checkpoint."),
    ],
)
def test_the_advice_is_that_of_a_run_that_has_failed_where_it_surely_has(looks: dict[int, float], advice: str) -> None:
    assert f"record(s), and 3 are needed to say more. {advice}" in answer([look(*one) for one in looks.items()])[0]


CONTROLS = "flash_delta_from_p", "flash_fp32_o (flash_reference)"
ALWAYS_CONTROLS = "flash_delta_from_p_subtract_first", "standard", "sdpa_math", "flash_consistent (flash_hopper)"


@pytest.mark.parametrize("attention", [*CONTROLS, *ALWAYS_CONTROLS])
@pytest.mark.parametrize("columns", [{}, {"dq_error": [2.0, 2.0]}, {"dq_error": [math.nan] * 2}], ids=str)
def test_the_loss_of_a_control_decides_whatever_its_records_are(
    attention: str, columns: dict[str, list[float]]
) -> None:
    what = "has the fix" if "consistent" in attention else "is a control"
    for logit in (50.0, 5e3, 5e4):
        first, *_ = answer([look(step, logit, **columns) | {"attention": attention} for step in range(3)])
        assert first.startswith(f"UNCLEAR: this run {what} ({attention}), and its loss decides: if it is stable where ")


@pytest.mark.parametrize("attention", [*CONTROLS, *ALWAYS_CONTROLS])
@pytest.mark.parametrize("logit", [4e4, 5e4])
def test_past_the_fma_threshold_a_control_whose_exponent_may_fail_says_so(attention: str, logit: float) -> None:
    first, *_ = answer([look(step, logit) | {"attention": attention} for step in range(3)])
    assert ("Past 45,426 its own exponent may make it fail" in first) == (logit == 5e4 and attention in CONTROLS)


@pytest.mark.parametrize(
    ("attention", "logit", "advice"),
    [
        (
            "flash_consistent (published)",
            500.0,
            "published). If the run has failed, run the control; else go on watching. If",
        ),
        ("flash_consistent (exponent=fma)", 5e4, "below 1,000. If this is the control, its loss decides"),
        (
            "mine:function",
            5e3,
            "Attention is mine:function. Run the control, from a checkpoint with logits below 1,000. If",
        ),
        ("flash", 5e3, "Attention is flash. Run the control, from a checkpoint with logits below 1,000."),
    ],
)
def test_other_attention_is_named_with_what_to_do(attention: str, logit: float, advice: str) -> None:
    assert advice in " ".join(answer([look(step, logit) | {"attention": attention} for step in range(3)]))


def test_a_control_is_not_judged_by_what_the_attention_before_it_did() -> None:
    """Neither by logits past the FMA threshold, nor by errors of dQ."""
    before = [look(step, 6e4, dq_error=[2.0, 2.0]) | {"attention": "flash"} for step in range(5)]
    first, *rest = answer([*before, *(look(step, 900.0) | {"attention": "flash_delta_from_p"} for step in (5, 6, 7))])
    assert first.startswith("UNCLEAR: this run is a control (flash_delta_from_p)")
    assert "45,426" not in first
    assert not any("dQ" in line for line in rest)


def test_the_loss_of_a_control_that_began_with_large_logits_decides_nothing() -> None:
    before = [look(step, 3e3, dq_error=[2.0, 2.0]) | {"attention": "flash"} for step in range(5)]
    assert answer([*before, look(5, 3e3) | {"attention": "standard"}])[0].startswith("SUSPECT: ")


def test_a_no_ends_where_logits_cease_to_be_finite() -> None:
    first, *_, last = answer([look(step, 50.0 if step < 4 else math.nan) for step in range(7)])
    assert first.startswith(
        "NO: before step 4, no sign of harmful rounding in the 2 layers seen. If the loss fails, look"
    )
    assert last == "It says nothing of steps after 3."


@pytest.mark.parametrize(("start", "looks", "told"), [(39_000, 5, True), (39_000, 1, False), (0, 5, False)])
def test_a_replay_is_told_that_its_log_cannot_show_slow_growth(start: int, looks: int, told: bool) -> None:
    said = answer([look(start + step, 2e3) for step in range(looks)])
    assert ("Slow growth is not judged: the clock (steps) grew 1.00 times here" in " ".join(said)) == told


def test_the_time_of_a_verdict_grows_like_the_length_of_its_log() -> None:
    """By the lines of Python that run, which other processes do not change."""
    lines = []
    for length in (150, 600):
        records, count = [look(step, 90.0 if step % 2 else math.nan) for step in range(length)], 0

        def traced(*_: Any) -> Any:
            nonlocal count
            count += 1
            return traced

        before = sys.gettrace()
        sys.settrace(traced)
        try:
            answer(records)
        finally:
            sys.settrace(before)
        lines.append(count)
    assert lines[1] < 4.5 * lines[0]


@pytest.mark.parametrize(
    ("name", "logit", "first", "largest", "of"),
    [
        ("frozen", 5e3, "NO: no sign of harmful rounding in the 1 layer with", "is 1, in layer 0.", "Frozen layers"),
        (
            "frozen_q",
            50.0,
            "NO: no sign of harmful rounding in the 2 layers",
            "is 50, in layer 1.",
            "Layers whose queries",
        ),
        ("frozen_q", 150.0, "UNCLEAR: ", "is 150, in layer 1.", "Layers whose queries"),
    ],
)
def test_frozen_layers_are_named_and_logits_count_where_keys_take_a_gradient(
    name: str, logit: float, first: str, largest: str, of: str
) -> None:
    records = [look(step, logit) | {name: [1]} for step in range(5)]
    for record in records:
        record["dq_error"][1] = None
    verdict, top, named, *_ = answer(records)
    assert (verdict.startswith(first), top.endswith(largest)) == (True, True)
    assert (named.startswith(of), named.endswith(": 1.")) == (True, True)


def test_the_layer_whose_kernel_is_wrong_is_named_with_its_error() -> None:
    """Also where another layer hides its attention."""
    first, test, *_ = answer([look(step, 50.0, dq_error=[0.3, 0.4]) | {"hidden": 1} for step in range(4)])
    assert first.startswith("UNCLEAR: ")
    assert all(part in first for part in ("layer 1 ", " 0.5 "))
    assert "layer 0" not in first
    assert TEST in test


def test_where_dq_is_mostly_error_at_small_logits_the_kernel_is_to_be_tested_first() -> None:
    first, *rest = answer([look(step, 50.0, dq_error=[8.0, 8.0]) for step in range(4)])
    assert first.startswith("SUSPECT: ")
    assert any(TEST in line for line in rest)


def test_a_gradient_that_is_not_finite_is_named_with_its_layer_and_step() -> None:
    verdict, where, *_ = answer([*(look(step, 50.0) for step in range(4)), NO_GRADIENT])
    assert verdict.startswith("UNCLEAR: the gradient that reaches attention")
    assert where.startswith("The gradient of layer 1 is not finite")
    assert where.endswith("at step 4.")


@pytest.mark.parametrize(("layers", "name"), [({}, 1), ({"layers": [3, 7]}, 7)])
def test_the_layer_that_was_flagged_is_named_with_its_step(layers: dict[str, list[int]], name: int) -> None:
    # Past 500 first at (step / 100)^4 with step 500; two looks must agree.
    assert answer([one | layers for one in FLAGGED])[1].startswith(f"Layer {name} was flagged at step 600")


def test_the_errors_of_the_layer_that_was_flagged_are_told() -> None:
    records = [
        look((i + 1) * 100, (i + 1.0) ** 4, dq_error=[0.0, i / 10], row_residual=[2e-7, 1e-7 * i]) for i in range(9)
    ]
    errors = "dq_error 0.6 of dQ, row_residual 6e-07 of delta, in its worst head."
    assert answer(records)[1] == f"Layer 1 was flagged at step 600; in the median of steps 600 to 900 {errors}"


@pytest.mark.parametrize(
    ("before", "after", "first"),
    [
        (1e-7, 1e-7, "UNCLEAR: layer 1 flagged, but delta's error is harmless, at most 1e-07 of it"),
        (1e-3, 1e-7, "SUSPECT"),
        (1e-7, 1e-3, "SUSPECT"),
    ],
)
@pytest.mark.parametrize("worse", ["row_residual", "delta_error"])
def test_a_layer_that_was_flagged_is_suspect_where_deltas_error_was_not_harmless(
    before: float, after: float, first: str, worse: str
) -> None:
    records = []
    for record in FLAGGED:
        error = before if record["step"] < 600 else after
        columns = {"row_residual": [1e-8] * 2, "delta_error": [1e-8] * 2} | {worse: [error] * 2}
        records.append(look(record["step"], record["max_logit"][1][0], **columns))
    assert answer(records)[0].startswith(first)


def test_a_look_that_measured_no_gradient_does_not_make_a_harmless_error_suspect() -> None:
    harmless = {"row_residual": [1e-8] * 2, "delta_error": [1e-8] * 2}
    records = [
        look(record["step"], record["max_logit"][1][0], **harmless) | {"attention": "fp32"} for record in FLAGGED
    ]
    first = look(records[0]["step"], records[0]["max_logit"][1][0])
    assert answer([first, *records[1:]])[0].startswith("UNCLEAR: layer 1 flagged, but delta's error is harmless")


@pytest.mark.parametrize(
    "spans",
    [
        (
            (range(10, 310, 10), "fp32", 1e-7),
            (range(400, 601, 100), "flash", 1e-3),
            (range(700, 1501, 100), "flash", 1e-9),
        ),
        ((range(100, 501, 100), "flash", 1e-3), (range(600, 1001, 100), "fp32", 1e-7)),
    ],
    ids=["before", "after"],
)
def test_looks_at_another_attention_do_not_hide_the_error_of_one_that_made_logits_grow(spans: Any) -> None:
    """The layer is flagged at step 600."""
    records = []
    for steps, attention, error in spans:
        columns = {"row_residual": [1e-8] * 2, "delta_error": [error] * 2}
        records += [look(step, (step / 100) ** 4, **columns) | {"attention": attention} for step in steps]
    verdict, flagged, *_ = answer(records)
    assert verdict.startswith("SUSPECT")
    assert flagged.startswith("Layer 1 was flagged at step 600")


def test_a_look_at_which_dq_is_about_0_does_not_move_its_error() -> None:
    """There O is exactly a row of V."""
    records = [*FLAGGED[:-1], look(1000, 1e4, dq_error=[2e6, 8e6], delta_error=[1e-9] * 2)]
    assert "; in the median of steps 600 to 1000 dq_error 0.01 of dQ, in its worst head." in answer(records)[1]


def test_a_layer_that_was_flagged_before_attention_changed_is_told_with_the_errors_until_then() -> None:
    records = [
        look((i + 1) * 100, (i + 1.0) ** 4, dq_error=[0.0, i / 10]) | {"attention": "flash" if i < 8 else "mine"}
        for i in range(10)
    ]
    told = "in the median of steps 600 to 800 dq_error 0.6 of dQ, in its worst head."
    assert answer(records)[1] == f"Layer 1 was flagged at step 600; {told}"


def test_a_file_of_two_runs_is_refused() -> None:
    with pytest.raises(UserError, match="step 0 follows step 100; expected a file of its own"):
        answer([look(0, 1.0), look(100, 1.0), look(0, 1.0)])


@pytest.mark.parametrize(
    "wrong",
    [
        *({"max_logit": value} for value in (None, [], [[]], [1.0, 2.0], [[None]], [["1"]])),
        *({name: "1"} for name in ("step", "clock", "hidden", "back_to_step", "max_logit", "dq_error")),
        *({"dq_error": value} for value in (1.0, [[0.1]], [[0.1], None, None], [[0.1, 0.1], ["1", 0.1]])),
        *({name: value} for name in ("layers", "frozen", "softcap") for value in (1, [0, [1]], ["0", "1"])),
        *({name: [0]} for name in ("layers", "softcap")),
        {"attention": ["flash"]},
    ],
    ids=str,
)
def test_a_log_with_another_type_or_length_is_no_file_of_watch(wrong: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(json.dumps(look(0, 50.0) | wrong) + "\n")
    with pytest.raises(UserError, match=r"expected a file that watch\(log=\.\.\.\) wrote"):
        main([str(path)])


CROSSES = [look(step, logit) for step, logit in enumerate([9.0, 200.0, 900.0, 950.0, 3e3, 8e2, 6e4, 7e4, 8e4, 9e4])]


def test_the_table_has_the_steps_at_which_each_layer_passed_a_bound_and_the_last_before_1000() -> None:
    _, _, head, *rows = table(CROSSES)
    assert head.split()[-5:] == [">100", ">1,000", ">45,426", "before", ">1,000"]
    assert [row.split()[-4:] for row in rows] == [["-", "-", "-", "9"], ["1", "4", "6", "3"], ["1", "4", "6", "3"]]


def test_the_table_has_eight_looks_of_each_layer_that_is_not_frozen_and_no_nan() -> None:
    records = [record | {"frozen": [0]} for record in CROSSES] + [look(10, math.nan)]
    _, _, head, *rows = table(records)
    assert head.split()[1:-5] == ["0", "1", "2", "3", "5", "6", "7", "9"]
    assert [row.split()[0] for row in rows] == ["1"]
    assert rows[0].split()[1:-4] == ["9", "200", "900", "950", "800", "60,000", "70,000", "90,000"]


def test_the_table_has_no_long_numbers() -> None:
    assert table([look(0, 9_876_543.0), look(1, -1.2345e34)])[-2].split()[1:3] == ["9,876,543", "-1.23e+34"]


def test_main_says_the_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "watch.jsonl"
    path.write_text('{"step": 0, "clock": 0, "max_logit": [["nan"]]}\n')
    main([str(path)])
    assert capsys.readouterr().out.startswith("UNCLEAR: no record has finite logits")
    path.write_text(f"{json.dumps(CROSSES[0])}\n")
    main([str(path)])
    assert capsys.readouterr().out.splitlines()[-4:] == table(CROSSES[:1])[-4:]


@pytest.mark.parametrize("arguments", [[], ["a", "b"], ["--flag", "a"]])
def test_other_arguments_than_a_file_are_refused(arguments: list[str]) -> None:
    with pytest.raises(UserError, match=r"\(see --help\)$"):
        main(arguments)


def test_the_command_says_a_mistake_in_one_line() -> None:
    done = completed([sys.executable, "-m", "attention.watching", __file__])
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"error: {__file__}, line 1: expected a file that watch(log=...) wrote")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("{0}\n{1}\n{0}\n", "log, line 2: expected a file"),
        ("{1}", "the log has no record yet"),
        ("{0}", "no record yet"),
    ],
)
def test_a_bad_line_is_named_and_a_last_one_that_was_cut_short_is_left_out(
    lines: str, said: str, tmp_path: Path
) -> None:
    whole = json.dumps(look(0, 50.0))
    (tmp_path / "log").write_text(lines.format(whole, whole[:40]))
    with pytest.raises(UserError, match=said):
        main([str(tmp_path / "log")])
