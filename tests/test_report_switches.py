"""Runs that were switched on the way, as the documents tell them."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

from analysis import report_switches as module
from analysis.report import Evidence, facts

script = importlib.import_module("scripts.report")
STEPS = 5000


def evidence(name: str, *switches: str, jump: float = 1.0, at: int = 3000) -> Evidence:
    """Gradient norm 0.5 before ``at``, ``jump`` from there on; the largest logit of layer 1 is the probe's step."""
    records: list[dict[str, Any]] = []
    for step in range(STEPS):
        row = {"step": step, "train_loss": 3.0, "grad_norm": jump if step >= at else 0.5, "tokens_per_second": 1.0}
        row |= {"w_q_norm_1": step / 100} if step % 100 == 0 else {}
        records.append(row | ({"val_loss": 3.25} if step % 500 == 0 else {}) | {"seconds": float(step)})
    heads = [
        {"step": s, "head": h, "max_logit": s / (h + 1), "top_1": 0.5} for s in range(0, STEPS, 100) for h in (0, 1)
    ]
    settings = {"run": {"steps": STEPS, "seed": 1}, "optim": {"warmup_steps": 100}, "alarm": {"switches": switches}}
    attention = [{"backend": "flash", "numerics": {"delta": "rowsum_do_o", "delta_output": "output"}}]
    content = {"config": settings, "attention": attention, "attention_name": "flash", "batches": {"seed": 1}}
    return Evidence(name=name, config=content, records=records, heads=heads)


def switch(*switches: str, steps: int = STEPS) -> tuple[int, str] | None:
    run = evidence("x", *switches)
    run = dataclasses.replace(run, records=[row for row in run.records if row["step"] < steps])
    return module.switch_of(run, facts(run))


def test_the_first_switch_of_layer_1_is_told() -> None:
    """Also where it names a backend; of a run that came so far."""
    assert switch("4000:1:flash", "3000:2:flash", "3500:1:flash_fp32_o:flash_reference") == (3500, "flash_fp32_o")
    assert switch("3000:2:flash") is None
    assert switch() is None
    assert switch("3500:1:flash_fp32_o", steps=3000) is None


def test_a_run_is_compared_before_and_behind_its_switch() -> None:
    row = module.switches_table([evidence("x", "2950:1:flash_fp32_o", jump=0.75, at=2950)]).splitlines()[2]
    cells = "x | flash_fp32_o | 2,950 | 2,900 | 0.500 | 0.750 | 0.750 | 0.750 | 4,900 | 49.0 | 3.250 | finished at 4,999, quiet"
    assert row == f"| {cells} |"


def test_the_run_that_was_not_switched_stands_below_from_the_last_switch_on() -> None:
    """Over as many steps as the others."""
    runs = [evidence("flash", jump=9.0), evidence("b", "3000:1:flash_fp32_o"), evidence("a", "2000:1:flash_fp32_o")]
    rows = [line.split(" | ") for line in module.switches_table(runs).splitlines()[2:]]
    assert [row[0] for row in rows] == ["| a", "| b", "| flash"]
    assert rows[2][1:9] == ["-", "not; from 3,000", "3,000", "0.500", "9.00", "9.00", "9.00", "4,500"]


def test_steps_near_an_event_weigh_no_more_than_others() -> None:
    """Every tenth step counts in medians, of a log that has all of them in places; the largest is of all."""
    run = evidence("x", "3000:1:flash_fp32_o", jump=2.0)
    rows = [row | ({"grad_norm": 50.0} if row["step"] % 10 else {}) for row in run.records]
    kept = [row for row in rows if row["step"] % 10 == 0 or 3000 <= row["step"] < 4500]
    found = module.values([dataclasses.replace(run, records=kept)])
    assert (found["x.behind"], found["x.behind.largest"]) == ("2.00", "50.0")


def test_values_are_of_switched_runs() -> None:
    found = module.values([evidence("flash"), evidence("x", "3000:1:flash_fp32_o", jump=2.0)])
    assert found == {
        "x.at.logit": "3,000",
        "x.behind": "2.00",
        "x.behind.largest": "2.00",
        "x.end.logit": "4,900",
    }


def test_published_branches_have_the_losses_of_one_run_before_their_switch() -> None:
    """And gradient norms; not the estimates of W_Q's norm, which depend on when power iterations began afresh, at each checkpoint."""
    runs = [run for run in script.read_evidence(script.ROOT / script.EVIDENCE) if run.is_switched]
    assert len(runs) >= 9
    first = {row["step"]: row for row in runs[0].records}
    for run in runs:
        step, _ = module.switch_of(run, facts(run)) or (0, "")
        common = [row for row in run.records if row["step"] in first and row["step"] < min(step, 1500)]
        assert len(common) > 100
        for name in ("train_loss", "grad_norm"):
            assert all(row.get(name) == first[row["step"]].get(name) for row in common)


def test_a_branch_is_drawn_from_its_switch_on_in_the_colour_of_its_attention() -> None:
    runs = [
        evidence("flash"),
        evidence("late", "4000:1:flash_fp32_o"),
        evidence("other", "3500:1:flash_fp32_pv"),
        evidence("early", "3000:1:flash_fp32_o"),
    ]
    shown, look = module.branches(runs)
    first_steps = {run.name: (run.records[0]["step"], min(of.logit)) for run, of in shown}
    assert first_steps == {"flash": (1000, 1000), "early": (3000, 3000), "other": (3500, 3500), "late": (4000, 4000)}
    assert look["late"]["color"] == look["early"]["color"]
    assert look["late"]["linestyle"] != look["early"]["linestyle"]
    assert len({look[name]["color"] for name in ("flash", "early", "other")}) == 3


def test_a_run_of_another_variant_is_in_no_picture_of_switches() -> None:
    others = [evidence("fp32_o"), evidence("another_layer", "3000:2:flash_fp32_o")]
    shown, _ = module.branches([evidence("flash"), *others, evidence("late", "4000:1:flash_fp32_o")])
    assert [run.name for run, _ in shown] == ["flash", "late"]
