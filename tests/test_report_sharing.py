"""analysis/report_sharing.py: what delta has in common with the O handed on."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from prose import prose
from test_report_onset import STEPS, evidence

from analysis import report_sharing as module
from analysis.report import Evidence
from analysis.report_onset import crossing
from scripts import report as script


@pytest.mark.parametrize(
    ("sites", "backend", "kind"),
    [
        ({}, "flash", module.BOTH),
        ({}, "sdpa_flash", module.BOTH),
        ({"output_rounding": "stochastic"}, "flash", module.BOTH),
        ({"probabilities_rounding": "stochastic"}, "flash", module.BOTH),
        ({"probabilities": "fp32"}, "flash", module.OUTPUT),
        ({"delta_output": "fp32"}, "flash", module.PROBABILITIES),
        ({"delta_output": "residual8"}, "flash", module.PROBABILITIES),
        ({"delta_output": "input", "output": "fp32"}, "flash", module.PROBABILITIES),
        ({"delta_output": "input", "output_rounding": "stochastic", "probabilities": "fp32"}, "flash", module.OWN),
        ({"delta_output": "fp32", "probabilities": "fp32"}, "flash", module.NEITHER),
        ({"delta": "recomputed_o"}, "flash", module.NEITHER),
        ({"delta": "rowsum_p_dp"}, "flash", module.NEITHER),
    ],
)
def test_runs_are_told_apart_by_what_their_delta_shares(sites: dict[str, Any], backend: str, kind: str) -> None:
    assert module.shared(evidence(sites=sites, backend=backend)) == kind


def test_a_run_of_two_attentions_is_of_no_kind() -> None:
    run = evidence()
    group = run.config["attention"][0]
    groups = [group | {"heads_of_layer": {"1": [head]}} for head in (0, 1)]
    two = dataclasses.replace(run, config={**run.config, "attention": groups})
    assert module.shared(two) is None
    assert not any(module.chosen([two]).values())


def named(run: Evidence, name: str, scale: float = 1.0) -> Evidence:
    """Under another name, all its logits times ``scale``."""
    heads = [dict(row) | {"max_logit": scale * row["max_logit"]} for row in run.heads]
    return dataclasses.replace(run, name=name, heads=heads)


def test_a_line_a_kind() -> None:
    small = named(evidence(sites={"delta": "rowsum_p_dp"}, crosses_at=STEPS), "small", 1e-3)
    runs = [evidence(), named(evidence(crosses_at=STEPS), "slow"), evidence(sites={"delta_output": "fp32"}), small]
    lines = module.sharing_table(runs).splitlines()[2:]
    both, output, probabilities, own, neither = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
    # No run came to the later step: its columns are left out.
    assert both == [module.BOTH, "2", "0", "7.00 (7.00), 2", "73,817 (11,357 - 136,000)", "1", "2,000", "68,139"]
    assert output[1:] == ["0", "0", "-", "-", "0", "-", "-"]
    assert probabilities[5:] == ["1", "2,000", "-"]
    assert own[1:] == output[1:]
    assert neither[4:] == ["11.4 (11.4)", "0", "-", "68.1"]
    found = module.values(runs)
    assert [found[f"sharing.{name}.grown"] for name in module.NAMES.values()] == list("20100")


def test_the_published_runs() -> None:
    """What docs/reproduction.md says of them: with hardly an error none has grown, with an error all but three."""
    evidence_there = script.read_evidence(script.ROOT / script.EVIDENCE)
    found = module.chosen([run for run in evidence_there if run.has_base_recipe and not run.is_switched])
    assert {run.name for run, _ in found[module.NEITHER]} >= {"delta_from_p", "recompute_o", "fp32_pv_o", "standard"}
    assert {run.name for run, _ in found[module.PROBABILITIES]} >= {"fp32_o", "compensated_delta", "run_b", "run_c"}
    own = {"run_b_fp32_pv", "run_c_fp32_pv", "run_c_fp32_pv_stochastic", "run_d_fp32_pv"}
    assert {run.name for run, _ in found[module.OWN]} == own
    assert {run.name for run, _ in found[module.OUTPUT]} == {"fp32_pv", "run_a_fp32_pv"}
    small = {
        run.name
        for pairs in found.values()
        for run, facts in pairs
        if max(logit for step, logit in facts.logit.items() if step >= module.FROM) <= module.GROWN
    }
    assert small == {run.name for run, _ in found[module.NEITHER]} | {
        "compensated_delta",
        "fp32_o_seed_2",
        "run_d_fp32_pv",
    }
    wrong = sum(len(pairs) for group, pairs in found.items() if group != module.NEITHER)
    assert f"in all but three of the {wrong} runs compared whose delta has an error" in prose(script.ROOT / "README.md")
    steps = [c.step for pairs in found.values() for run, facts in pairs if (c := crossing(run, facts)) is not None]
    assert min(steps) > module.EARLY
    there = [(run, facts) for run, facts in found[module.BOTH] if module.LATE in facts.logit]
    broken = [run for run, facts in there if (c := crossing(run, facts)) is not None and c.step <= module.LATE]
    exploded = [run for run, facts in there if facts.exploded_at is not None and facts.exploded_at <= module.LATE]
    assert (len(there), len(broken), len(exploded)) == (14, 8, 5)
    assert len(found[module.BOTH]) == 18
    said = "Of the eighteen runs of the first line fourteen came to 5,000; eight of these had been beyond that size by then, and "
    said += "five had exploded. The other four had ended."
    assert said in prose(script.ROOT / "docs/reproduction.md")


def test_a_run_is_drawn_until_it_is_beyond_twice_the_threshold() -> None:
    """Steps of its line, and a dot where it crosses; whatever comes behind is not drawn."""
    runs = [evidence(crosses_at=2000), named(evidence(crosses_at=STEPS), "slow")]
    (axes,) = module.figure(runs).axes
    drawn = [list(line.get_xdata()) for line in axes.get_lines()]
    ends = {steps[-1] for steps in drawn if len(steps) > 5 and steps[0] == module.FROM}
    assert ends == {2000, STEPS - 100}
    assert [2000] in drawn
