"""analysis/report_layers.py: which layer's W_Q takes off behind layer 1."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from analysis import report_layers as module
from analysis.report import Evidence, facts
from analysis.report_blocks import told
from scripts import report as script

STEPS = 4000


def evidence(exploded_at: int | None = None, **growth: tuple[int, float]) -> Evidence:
    """W_Q of three layers is 10, and from a step on a multiple of it: ``layer_2=(3000, 2.0)``."""
    records: list[dict[str, Any]] = []
    for step in range(STEPS):
        loss = 3.0 if exploded_at is None or step < exploded_at else 5.0
        row: dict[str, Any] = {"step": step, "train_loss": loss, "grad_norm": 0.3, "tokens_per_second": 1.0}
        if step % 100 == 0:
            row |= {f"w_q_norm_{layer}": 10.0 for layer in range(4)}
            for name, (begin, factor) in growth.items():
                row[f"w_q_norm_{name[-1]}"] = 10.0 * (factor if step >= begin else 1.0)
        records.append(row | {"seconds": float(step)})
    heads = [
        {"step": step, "head": head, "max_logit": 5.0, "top_1": 0.95 if head and step >= 2500 else 0.5}
        for step in range(0, STEPS, 100)
        for head in range(3)
    ]
    settings = {"run": {"steps": STEPS, "seed": 1}, "optim": {"warmup_steps": 100}}
    content = {"config": settings, "attention": [{"backend": "flash"}], "attention_name": "x", "batches": {"seed": 1}}
    return Evidence(name="x", config=content, records=records, heads=heads)


def test_the_first_layer_to_take_off_is_found() -> None:
    found = module.take_off(evidence(layer_2=(3000, 2.0), layer_3=(2800, 1.6)))
    assert found == module.TakeOff(layer=3, step=2800, before=10.0, after=16.0, heads=2)


def test_of_two_at_once_it_is_the_faster_one() -> None:
    found = module.take_off(evidence(layer_2=(3000, 2.0), layer_3=(3000, 1.6)))
    assert found is not None
    assert found.layer == 2


@pytest.mark.parametrize(
    "growth",
    [{}, {"layer_2": (3000, 1.4)}, {"layer_1": (3000, 9.0)}, {"layer_0": (3000, 9.0)}, {"layer_2": (1000, 9.0)}],
)
def test_slow_growth_the_layers_up_to_1_and_the_warm_up_do_not_count(growth: dict[str, tuple[int, float]]) -> None:
    assert module.take_off(evidence(**growth)) is None


def test_a_take_off_behind_the_explosion_led_to_nothing() -> None:
    for exploded_at, leads in ((2700, False), (3100, True), (None, True)):
        run = evidence(exploded_at, layer_2=(3000, 2.0))
        assert (module.led_by(run, facts(run)) is not None) == leads


def test_values_tell_the_runs_that_were_led() -> None:
    led, other = evidence(layer_2=(3000, 2.0)), dataclasses.replace(evidence(), name="y")
    found = module.values([(run, facts(run)) for run in (led, other)])
    assert {name: found[f"x.next.{name}"] for name in ("layer", "step", "before", "after", "heads")} == {
        "layer": "2", "step": "3,000", "before": "10.0", "after": "20.0", "heads": "2"
    }  # fmt: skip
    assert (found["layers.led"], found["layers.others"]) == ("1", "1")


def test_of_the_published_runs_those_that_round_and_do_not_fuse_were_led_by_a_later_layer() -> None:
    runs = told(script.read_evidence(script.ROOT / script.EVIDENCE))
    assert {run.name for run, found in runs if module.led_by(run, found)} == {"flash_subtracted", "sdpa_flash"}
