"""analysis/report_layers.py: which layers follow layer 1."""

from __future__ import annotations

import csv
import dataclasses
from typing import Any

import pytest

from analysis import report_layers as module
from analysis.report import Evidence, facts
from analysis.report_blocks import told
from scripts import report as script

STEPS = 4000


def evidence(
    name: str = "x", exploded_at: int | None = None, delta_output: str = "output", **growth: tuple[int, float]
) -> Evidence:
    """The largest logit of layers 0, 2 and 3 is 10, and from a step on another: ``layer_2=(3000, 9e3)``. From 2,500 on two heads of
    three look at one key."""
    records: list[dict[str, Any]] = []
    for step in range(STEPS):
        loss = 3.0 if exploded_at is None or step < exploded_at else 5.0
        row: dict[str, Any] = {"step": step, "train_loss": loss, "grad_norm": 0.3, "tokens_per_second": 1.0}
        if step % 100 == 0:
            row |= {f"max_logit_{layer}": 10.0 for layer in (0, 2, 3)}
            for layer, (begin, logit) in growth.items():
                row[f"max_logit_{layer[-1]}"] = logit if step >= begin else 10.0
        records.append(row | {"seconds": float(step)})
    heads = [
        {"step": step, "head": head, "max_logit": 5.0, "top_1": 0.95 if head and step >= 2500 else 0.5}
        for step in range(0, STEPS, 100)
        for head in range(3)
    ]
    settings = {"run": {"steps": STEPS, "seed": 1}, "optim": {"warmup_steps": 100}}
    attention = [{"backend": "flash", "numerics": {"delta": "rowsum_do_o", "delta_output": delta_output}}]
    content = {"config": settings, "attention": attention, "attention_name": "x", "batches": {"seed": 1}}
    return Evidence(name=name, config=content, records=records, heads=heads)


def test_layers_follow_in_the_order_of_their_steps() -> None:
    run = evidence(layer_2=(3000, 9e3), layer_3=(2800, 6e3))
    found = module.followers(run, facts(run))
    assert found == {3: 2800, 2: 3000}
    assert module.told(found) == "3 at 2,800, 2 at 3,000"


@pytest.mark.parametrize("growth", [{}, {"layer_2": (3000, 4.9e3)}, {"layer_0": (3000, 9e3)}])
def test_smaller_logits_and_the_layers_before_do_not_count(growth: dict[str, tuple[int, float]]) -> None:
    run = evidence(**growth)
    assert module.followers(run, facts(run)) == {}


def test_what_comes_behind_the_explosion_does_not_count() -> None:
    for exploded_at, expected in ((2700, {}), (3100, {2: 3000}), (None, {2: 3000})):
        run = evidence(exploded_at=exploded_at, layer_2=(3000, 9e3))
        assert module.followers(run, facts(run)) == expected


def test_values_tell_the_runs_that_were_followed() -> None:
    runs = [evidence(layer_2=(3000, 9e3)), evidence("y"), evidence("z", delta_output="fp32", layer_3=(3000, 321.0))]
    found = module.values([(run, facts(run)) for run in runs])
    assert (found["x.next"], found["x.next.heads"]) == ("2 at 3,000", "2")
    assert found["layers.apart"] == "321"
    assert "y.next" not in found


def test_layers_of_another_attention_say_nothing_of_delta_of_another_o() -> None:
    """Layer 1 alone keeps another O: what its followers do is theirs."""
    apart = evidence(delta_output="fp32", layer_3=(3000, 321.0))
    groups = [
        {"backend": "flash", "numerics": {"delta": "rowsum_do_o", "delta_output": kept}, "heads_of_layer": {layer: [0]}}
        for kept, layer in (("output", "3"), ("fp32", "1"))
    ]
    mixed = dataclasses.replace(apart, config={**apart.config, "attention": groups})
    found = [module.values([(run, facts(run))]) for run in (apart, mixed)]
    assert [one.get("layers.apart") for one in found] == ["321", None]


def test_the_published_runs_that_the_next_layers_follow_in() -> None:
    """Those with large logits and no leap of the gradient norm, but the slowest of them and torch's kernel on seed 2, and both with the
    roundings of the paper's code, and the run whose layer 1 alone is repaired; never where delta is of another O. Of the base recipe, and
    not switched on the way."""
    evidence = script.read_evidence(script.ROOT / script.EVIDENCE)
    runs = told([run for run in evidence if run.has_base_recipe and not run.is_switched])
    followed = {run.name for run, found in runs if module.followers(run, found)}
    assert followed == {
        "flash_subtracted",
        "flash_unfused",
        "sdpa_flash",
        "run_a_fp32_pv",
        "paper",
        "untiled",
        "all_but_layer_1",
    }
    assert float(module.values(runs)["layers.apart"].replace(",", "")) < module.LARGE / 2


def test_the_logits_of_layer_1_are_those_that_the_alarm_saw() -> None:
    """results/alarm/gpt2 has them of the same probes, those of other layers from here; it has no runs that were switched, which are one
    run up to there."""
    for run, found in told(script.read_evidence(script.ROOT / script.EVIDENCE)):
        if run.is_switched:
            continue
        with (script.ROOT / f"results/alarm/gpt2/{run.name}.csv").open(newline="") as file:
            seen = {int(row["step"]): row for row in csv.DictReader(file)}
        assert found.logit.keys() == seen.keys()
        for step, logit in found.logit.items():
            assert logit == pytest.approx(float(seen[step]["max_logit_1"]), rel=1e-3)
