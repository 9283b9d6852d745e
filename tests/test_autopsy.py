"""The autopsy's answer: planted layers and heads are named, healthy models are not, and what is switched on removes the error."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from layer_captures import random_layer
from planted_models import SHAPE, healthy, plant, subject

import attention
from attention import AttentionSpec
from autopsy.log import answer as log_answer
from autopsy.log import leaving
from autopsy.measure import FIXES, Findings, LayerSums, examine, with_preset
from autopsy.report import answer
from autopsy.subjects import fp16_scale
from errors import UserError
from probes.capture import LayerCapture

SEEDS = range(6)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_planted_layer_and_head_are_named_and_no_other(seed: int) -> None:
    """Repeated maxima, V and dO of one sign: the conditions of arXiv 2510.04212."""
    layer, head = seed % SHAPE.n_layer, seed % SHAPE.n_head
    found = examine(subject(plant(healthy(seed), layer, head, seed=seed), seed))
    assert [h.head for h in found.worst(layer)] == [head]
    others = [factor for where, factor in enumerate(found.factors) if where != layer]
    assert found.factors[layer] > 0.5 > 100 * max(others)
    assert answer(found)[0].startswith("YES" if found.factors[layer] >= 1 else "NO")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_healthy_model_is_not_flagged(seed: int) -> None:
    found = examine(subject(healthy(seed), seed))
    assert found.made_by_rounding == []
    assert answer(found)[0].startswith("NO")


@pytest.mark.parametrize("preset", FIXES)
def test_what_is_said_to_remove_the_error_does(preset: str) -> None:
    model = plant(healthy(1), 1, 2, seed=1)
    before = examine(subject(model, 1))
    assert before.fixes[preset] < 0.1
    repaired = plant(healthy(1, AttentionSpec(preset=preset, numerics="rounded_forward")), 1, 2, seed=1)
    after = examine(subject(repaired, 1))
    assert after.made_by_rounding == []
    assert after.factors[1] < 0.1


def gradient(layer: LayerCapture) -> torch.Tensor:
    """dW_Q of each head [H, D, C] by autograd through the layer's own attention."""
    q = layer.q_BTHD.clone().requires_grad_()
    o = attention.run(
        q,
        layer.k_BTHD,
        layer.v_BTHD,
        layer.plan,
        rounding_seed=layer.rounding_seed,
        scale=layer.scale,
        softcap=layer.softcap,
    )
    (dq,) = torch.autograd.grad(o, q, layer.do_BTHD)
    return torch.einsum("bthd,btc->hdc", dq.float(), layer.x_BTC)


def test_the_factor_is_what_autograd_gives_with_a_coarse_o_and_with_delta_of_p() -> None:
    spec = AttentionSpec(numerics="fp32", sites=("delta_output=m1",))
    layer = random_layer(spec=spec, dtype=torch.float32)
    sums = LayerSums()
    sums.add(layer)
    exact = gradient(with_preset(layer, "flash_delta_from_p"))
    error = gradient(layer) - exact
    assert sums.factor == pytest.approx((error.norm() / exact.norm()).item(), rel=1e-3)
    heads = sums.evidence(layer, torch.eye(48))
    for h in heads:
        assert h.factor == pytest.approx((error[h.head].norm() / exact[h.head].norm()).item(), rel=1e-3)
        assert h.share == pytest.approx((error[h.head].norm() / exact.norm()).item(), rel=1e-3)


@pytest.mark.parametrize("preset", ["flash_consistent", "flash_delta_from_p_subtract_first"])
def test_a_p_that_the_backward_pass_forms_in_its_own_way_is_no_error(preset: str) -> None:
    factors = []
    for spec in (AttentionSpec(), AttentionSpec(preset=preset)):
        sums = LayerSums()
        sums.add(random_layer(spec=spec))
        factors.append(sums.factor)
    assert factors[1] < 0.01 * factors[0]


def findings(factors: list[float], logit: float = 1.0, **fixes: float) -> Findings:
    (head, *_) = examine(subject(healthy(0), 0)).heads
    heads = [
        dataclasses.replace(head, layer=layer, share=factor, max_logit=logit) for layer, factor in enumerate(factors)
    ]
    return Findings(heads=heads, factors=factors, fixes=fixes)


@pytest.mark.parametrize(
    ("factors", "fixes", "first", "named"),
    [
        ([0.2, 0.99], {}, "NO", None),
        ([0.2, 0.99], {"logit": 2000.0}, "UNCLEAR", "run the control"),
        ([0.2, 1.0], {"a": 0.11, "b": 0.09}, "YES", "preset b "),
        ([300.0, 2.0], {"a": 0.01, "b": 0.001}, "YES", "preset a "),
        ([2.0], {"a": 0.5}, "YES", "No preset"),
        ([2.0, math.nan], {}, "UNKNOWN", None),
        ([math.inf], {}, "UNKNOWN", None),
    ],
)
def test_the_answer_comes_first(factors: list[float], fixes: dict[str, float], first: str, named: str | None) -> None:
    said = answer(findings(factors, **fixes))
    assert said[0].split(":")[0] == first
    assert named is None or named in said[-1]


def test_a_preset_that_leaves_hardly_any_error_is_named_where_dw_q_itself_is_noise() -> None:
    noise = dataclasses.replace(findings([5e4], a=2.0, b=0.9), errors={"a": 0.5, "b": 6e-5})
    assert "preset b " in answer(noise)[-1]


@pytest.mark.parametrize(("largest", "scale"), [(0.5, 2.0**16), (40.0, 2.0**8), (math.nan, 1.0)])
def test_a_loss_scale_of_fp16_is_lowered_until_every_gradient_is_finite(largest: float, scale: float) -> None:
    layer = random_layer()

    def look(at: float) -> list[LayerCapture]:
        do_BTHD = (torch.full_like(layer.do_BTHD, largest, dtype=torch.float32) * at).half()
        return [layer, dataclasses.replace(layer, do_BTHD=do_BTHD)]

    assert fp16_scale(look) == scale


def record(step: int, logit: float, **columns: list[float]) -> dict[str, Any]:
    columns = {"dq_error": [0.0, 0.0]} | columns
    return {"step": step, "clock": step, "max_logit": [[1.0, 1.0], [logit, logit]]} | {
        name: [[0.0, 0.0], values] for name, values in columns.items()
    }


def without_gradients(step: int, *, layer: int | None = None) -> dict[str, Any]:
    """Of no layer, or not of one."""
    found = record(step, 50.0)
    if layer is None:
        del found["dq_error"]
    else:
        found["dq_error"][layer] = None
    return found


@pytest.mark.parametrize(
    ("records", "first"),
    [
        ([record(0, 50.0), record(100, 90.0), record(200, 90.0)], "NO"),
        ([record(0, 50.0), record(100, 90.0)], "UNCLEAR"),
        ([record(0, 50.0), record(100, 90.0), record(200, 90.0), record(300, math.nan)], "UNCLEAR"),
        ([record(0, 50.0), record(199, 90.0), record(200, 90.0), record(201, math.nan)], "NO"),
        ([record(0, 50.0), record(100, 1e5), record(200, 50.0)], "UNCLEAR"),
        ([record(step, 50.0, dq_error=[0.1, 5.0 if step < 3 else 0.1]) for step in range(4)], "SUSPECT"),
        ([record(0, 50.0), record(100, 300.0)], "UNCLEAR"),
        ([record(0, 50.0, dq_error=[0.1, 2.0])], "SUSPECT"),
        ([record(0, 50.0, dq_error=[0.8, 0.8])], "SUSPECT"),
        ([record(0, 50.0, dq_error=[0.6, 0.6])], "UNCLEAR"),
        ([record(0, 50.0, dq_error=[0.1, 2.0], delta_error=[1e-7, 1e-3])], "SUSPECT"),
        ([record(0, 50.0, dq_error=[0.1, 2.0], delta_error=[1e-7, 1e-7])], "UNCLEAR"),
        ([record(step, (step / 100) ** 4) for step in range(100, 1001, 100)], "SUSPECT"),
        ([record(step, 900.0) for step in range(100, 1001, 100)], "UNCLEAR"),
        ([record(0, 50.0, nan_made=[0.0, 1.0]), record(100, math.nan)], "KERNEL"),
        ([record(0, math.nan)], "UNCLEAR"),
        ([without_gradients(step) for step in range(5)], "UNCLEAR"),
        ([without_gradients(step, layer=0) for step in range(5)], "UNCLEAR"),
        ([without_gradients(0), *(record(step, 50.0) for step in (1, 2))], "UNCLEAR"),
        ([without_gradients(0), *(record(step, 50.0) for step in (1, 2, 3))], "NO"),
    ],
)
def test_a_watched_run_is_judged_by_the_table_of_the_diagnosis(records: list[dict[str, Any]], first: str) -> None:
    assert log_answer(records)[0].split(":")[0] == first


@pytest.mark.parametrize(
    ("logit", "advice"),
    [
        (400.0, "Go on watching."),
        (5_900.0, "Run the control."),
        (50_000.0, "Past 45,426: go back to a checkpoint from before, and switch there."),
    ],
)
def test_a_run_that_is_unclear_at_large_logits_is_sent_to_the_control(logit: float, advice: str) -> None:
    assert log_answer([record(step, logit) for step in range(100, 1001, 100)])[0].endswith(advice)


def test_the_layer_that_left_is_named_with_its_step() -> None:
    # Past 500 first at (step / 100)^4 with step 500; two looks must agree.
    assert leaving([record(step, (step / 100) ** 4) for step in range(100, 1001, 100)]) == {1: 600}


@pytest.mark.parametrize(("last", "judged"), [(3_800, False), (4_000, True)])
def test_a_log_too_short_to_tell_of_growth_says_so(last: int, judged: bool) -> None:
    sentence = log_answer([record(step, 900.0) for step in range(3_000, last, 100)])[0]
    assert ("1.3 are needed" in sentence) != judged


def test_a_log_without_a_record_is_told_from_another_file() -> None:
    with pytest.raises(UserError, match="no record yet"):
        log_answer([])


def test_a_dead_run_is_not_told_to_go_on() -> None:
    dead = [record(0, 50.0), record(1, 300.0), record(2, math.nan)]
    assert "Go on" in log_answer(dead[:2])[0]
    assert "earlier checkpoint" in log_answer(dead)[0]


def test_why_gradients_are_lacking_is_said() -> None:
    assert "use_reentrant=False" in " ".join(log_answer([without_gradients(step) for step in range(5)]))


def test_layers_that_come_and_go_are_refused() -> None:
    fewer = record(100, 1.0)
    fewer["max_logit"].pop()
    with pytest.raises(UserError, match=r"\[2, 2\] at step 0 and \[2\] at step 100"):
        log_answer([record(0, 1.0), fewer])


def test_a_file_of_two_runs_is_refused() -> None:
    with pytest.raises(UserError, match="step 0 follows step 100; expected a file of its own"):
        log_answer([record(0, 1.0), record(100, 1.0), record(0, 1.0)])
