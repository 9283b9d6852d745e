"""analysis/report_onset.py: errors of heads that look at one key, and the gradient norm around the crossing."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from analysis import report_onset as onset
from analysis.report import Evidence, facts
from analysis.report_blocks import delta_of, hands_on
from attention.numerics import HARDWARE, PAPER
from scripts import report as script

STEPS = 3000


def evidence(
    *, sites: dict[str, Any] | None = None, backend: str = "flash", crosses_at: int = 2000, jump: float = 10.0
) -> Evidence:
    """A run of two heads: head 1 looks at one key, its logit doubles its way past the threshold at ``crosses_at``."""
    numerics = dataclasses.asdict(HARDWARE) | (sites or {})
    heads = []
    for step in range(0, STEPS, 100):
        logit = onset.THRESHOLD * (0.25 if step < crosses_at - 500 else 1.5 if step < crosses_at else 3.0)
        for head, top in ((0, 0.5), (1, 0.995)):
            heads.append(
                {"step": step, "head": head, "max_logit": logit, "top_1": top, "delta_rms": 2.0}
                | {
                    "delta_error_rms": 2e-3 if step >= crosses_at else 2e-6,
                    "delta_error_mean": 4e-6,
                    "delta_error_se": 2e-6,
                }
            )
    records = [
        {"step": step, "train_loss": 3.0, "grad_norm": jump if step >= crosses_at else 0.5, "tokens_per_second": 1.0}
        | {"seconds": float(step), "w_q_norm_1": 7.0, "w_q_norm_0": 1.0}
        for step in range(STEPS)
    ]
    settings = {"run": {"steps": STEPS, "seed": 1}, "optim": {"warmup_steps": 100}}
    content = {"config": settings, "attention": [{"backend": backend, "numerics": numerics}], "attention_name": "x"}
    return Evidence(name="x", config=content | {"batches": {"seed": 1}}, records=records, heads=heads)


@pytest.mark.parametrize(
    ("sites", "backend", "kind"),
    [
        ({}, "flash", onset.ROUNDED),
        ({"output_rounding": "stochastic"}, "flash", onset.STOCHASTIC),
        ({"probabilities_rounding": "stochastic"}, "flash", onset.STOCHASTIC),
        ({"probabilities": "fp32"}, "flash", onset.UNROUNDED),
        ({"probabilities": "fp32", "output_rounding": "stochastic"}, "flash", onset.UNROUNDED),
        ({"scores": PAPER.scores}, "flash", onset.PAPER),
        ({"scores": PAPER.scores, "tile_k": 0}, "flash", onset.UNTILED),
        ({"exponent": "subtracted"}, "flash", onset.SUBTRACTED),
        ({"exponent": "subtracted", "output_rounding": "stochastic"}, "flash", onset.SUBTRACTED),
        ({"exponent": "subtracted", "probabilities": "fp32"}, "flash", onset.UNROUNDED),
        ({"exponent": "unfused"}, "flash", onset.UNFUSED),
        ({"exponent": "unfused", "output_rounding": "stochastic"}, "flash", onset.UNFUSED),
        ({"exponent": "unfused", "probabilities": "fp32"}, "flash", onset.UNROUNDED),
        ({"divisor": "rounded"}, "flash", onset.SUM_ROUNDED),
        ({"divisor": "rounded", "exponent": "unfused"}, "flash", onset.UNFUSED),
        ({"divisor": "rounded", "probabilities": "fp32"}, "flash", onset.UNROUNDED),
        ({"delta_output": "fp32"}, "flash", None),
        ({"delta": "rowsum_p_dp"}, "flash", None),
        ({}, "sdpa_flash", onset.TORCHS),
        ({}, "sdpa_cudnn", None),
    ],
)
def test_runs_are_told_apart_by_what_they_do_to_p_bar(sites: dict[str, Any], backend: str, kind: str | None) -> None:
    assert onset.kind_of(evidence(sites=sites, backend=backend)) == kind


def test_heads_at_one_key_behind_the_warm_up_count() -> None:
    rows = onset.one_hot([evidence()], onset.ROUNDED)
    assert {row["head"] for row in rows} == {1}
    assert min(row["step"] for row in rows) == onset.FROM


def test_errors_are_those_of_the_range() -> None:
    rows = onset.one_hot([evidence()], onset.ROUNDED)
    low, high = (onset.errors(rows, *edges) for edges in ((0.0, onset.THRESHOLD), (2 * onset.THRESHOLD, np.inf)))
    assert low is not None
    assert high is not None
    assert (low.heads, high.heads) == (5, 10)
    assert (low.median, high.median) == (1e-6, 1e-3)
    # Means of 2e-6 with a standard error of 1e-6 each, ten of them.
    assert high.mean == pytest.approx(2e-6)
    assert high.standard_error == pytest.approx(1e-6 / 10**0.5)
    assert onset.errors(rows, 1e9, 2e9) is None


def test_the_gradient_norm_is_compared_around_the_crossing() -> None:
    run = evidence(jump=7.0)
    found = onset.crossing(run, facts(run))
    assert found == onset.Crossing(
        first=1500, step=2000, w_q=7.0, logit=3 * onset.THRESHOLD, before=0.5, after=7.0, largest=7.0, late=7.0
    )


def test_a_run_that_rises_late_is_told() -> None:
    run = evidence(jump=0.5)
    rising = [dict(row) | ({"grad_norm": 3.0} if row["step"] >= STEPS - 400 else {}) for row in run.records]
    run = dataclasses.replace(run, records=rising)
    found = onset.crossing(run, facts(run))
    assert found is not None
    assert (found.after, found.late) == (0.5, 3.0)
    assert "| 0.500 | 0.500 | 0.500 | 3.00 |" in onset.crossing_table([run])


def test_runs_that_cross_are_counted_by_what_their_delta_is_made_of() -> None:
    """Two of three whose delta is of the O handed on, one of two others; the largest logit told is that of an other."""
    kept_apart = {"delta_output": "fp32"}
    runs = [evidence(), evidence(), evidence(crosses_at=STEPS)]
    others = [evidence(sites=kept_apart), evidence(sites=kept_apart, crosses_at=STEPS)]
    found = onset.values([*runs, *others])
    names = ("crossed", "own", "crossed.own", "others", "crossed.others")
    assert [found[f"onset.{name}"] for name in names] == ["3", "3", "2", "2", "1"]
    low, own = (max(facts(run).logit.values()) for run in (others[1], runs[0]))
    assert low < own
    assert onset.values([runs[0], others[1]])["onset.others.logit"] == onset.significant(low)
    assert "onset.others.logit" not in onset.values(runs)
    assert found["onset.others.cut"] == "0"
    settings = {**others[1].config["config"], "run": {"steps": 2 * STEPS, "seed": 1}}
    cut = dataclasses.replace(others[1], config={**others[1].config, "config": settings})
    assert onset.values([*runs, others[0], cut])["onset.others.cut"] == "1"


def test_heads_of_two_attentions_a_switch_and_a_short_run_are_not_counted() -> None:
    """The group of layer 1 is what counts, wherever it stands among a run's groups."""
    run = evidence()
    group = run.config["attention"][0]
    apart = group | {"numerics": group["numerics"] | {"delta_output": "fp32"}}
    two_layers = [apart | {"heads_of_layer": {"0": [0, 1]}}, group | {"heads_of_layer": {"1": [0, 1]}}]
    two_heads = [apart | {"heads_of_layer": {"1": [0]}}, group | {"heads_of_layer": {"0": [0, 1], "1": [1]}}]
    mixed, shared = (
        dataclasses.replace(run, config={**run.config, "attention": groups}) for groups in (two_layers, two_heads)
    )
    settings = {**run.config["config"], "alarm": {"switches": ["1500:1:flash_fp32_o"]}}
    switched = dataclasses.replace(run, config={**run.config, "config": settings})
    early = evidence(crosses_at=700)
    rows = [[row for row in table if row["step"] < onset.FROM] for table in (early.records, early.heads)]
    short = dataclasses.replace(early, records=rows[0], heads=rows[1])
    assert [onset.kind_of(one) for one in (mixed, shared, switched)] == [onset.ROUNDED, None, None]
    assert [hands_on(one) for one in (mixed, shared, switched)] == [True, None, None]
    assert delta_of(shared) == "heads 0: O kept apart, fp32; heads 1: O as handed on"
    found = onset.values([mixed, shared, switched, short])
    assert (found["onset.crossed"], found["onset.own"]) == ("1", "1")
    assert len(onset.crossings([mixed, shared, switched])) == 1


def test_what_a_run_did_at_its_crossing_is_told_by_name_and_by_kind() -> None:
    """A run that keeps another O for delta is none of torch's."""
    torchs, apart = evidence(backend="sdpa_flash", jump=1.0), evidence(sites={"delta_output": "fp32"}, jump=2.0)
    found = onset.values([dataclasses.replace(torchs, name="torch"), dataclasses.replace(apart, name="apart")])
    assert (found["onset.torch"], found["onset.torch.runs"], found["torch.rise"]) == ("2.0", "1", "2.0")
    assert found["apart.rise"] == "4.0"
    assert [found[f"apart.{name}"] for name in ("beyond", "crossed", "passage")] == ["1,500", "2,000", "500"]


def test_a_run_that_does_not_fuse_has_a_column_and_numbers_of_its_own() -> None:
    fused, unfused = (
        evidence(jump=7.0),
        dataclasses.replace(evidence(sites={"exponent": "unfused"}, jump=1.5), name="y"),
    )
    assert onset.UNFUSED not in onset.one_hot_table([fused])
    assert f"| {onset.UNFUSED}: heads |" in onset.one_hot_table([fused, unfused])
    assert "| y | rounded | not fused |" in onset.crossing_table([unfused])
    found = onset.values([fused, unfused])
    assert (found["onset.rise"], found["onset.rise.runs"], found["y.rise"]) == ("14.0", "1", "3.0")


def test_a_run_of_small_logits_crosses_nothing() -> None:
    run = evidence(crosses_at=STEPS)
    assert onset.crossing(run, facts(run)) is None


def test_the_fold_makes_no_error_below_the_threshold() -> None:
    assert [onset.folded_error(size * onset.THRESHOLD) for size in (0.01, 0.25, 0.5, 0.99)] == [0.0] * 4


def test_the_fold_makes_an_error_of_bf16s_last_place_above_it() -> None:
    """Uniform in half a unit at 1, of either side of 1: between 2^-9 and 2^-8 over the square root of three."""
    for size in (8, 16, 64):
        assert 2.0**-9 / 3**0.5 < onset.folded_error(size * onset.THRESHOLD) < 2.0**-8 / 3**0.5


def test_stochastic_rounding_does_not_hide_what_nearest_hides() -> None:
    errors = [onset.folded_error(size * onset.THRESHOLD, "flash_run_a") for size in (0.03, 0.25, 0.9)]
    assert errors == sorted(errors)
    assert 2e-4 < errors[0] < errors[-1] < 2.5e-3


@pytest.mark.parametrize("preset", ["flash_subtracted", "flash_unfused", "flash_fp32_pv"])
def test_without_the_fold_or_the_rounding_there_is_none(preset: str) -> None:
    assert onset.folded_error(64 * onset.THRESHOLD, preset) == 0.0


def published() -> list[Evidence]:
    """Runs of the base recipe."""
    return [run for run in script.read_evidence(script.ROOT / script.EVIDENCE) if run.has_base_recipe]


def test_published_runs_part_where_the_emulation_does() -> None:
    """Of the published heads that look at one key: the error beyond the threshold is the emulated one, and not there without rounding."""
    runs = published()
    rounded, unrounded = (onset.one_hot(runs, kind) for kind in (onset.ROUNDED, onset.UNROUNDED))
    above = onset.errors(rounded, 4 * onset.THRESHOLD, np.inf)
    below = onset.errors(rounded, onset.THRESHOLD / 2, onset.THRESHOLD)
    without = onset.errors(unrounded, 2 * onset.THRESHOLD, np.inf)
    assert above is not None
    assert below is not None
    assert without is not None
    assert above.median == pytest.approx(onset.folded_error(8 * onset.THRESHOLD), rel=0.25)
    assert max(below.median, without.median) < above.median / 50


@pytest.mark.parametrize(("low", "high"), list(itertools.pairwise(onset.EDGES[1:-1])))
def test_published_runs_with_a_stochastic_rounding_have_its_error_at_every_size(low: float, high: float) -> None:
    found = onset.errors(onset.one_hot(published(), onset.STOCHASTIC), low, high)
    assert found is not None
    # A head's rows have maxima of any size up to its largest logit, those of the emulation from half of it on.
    assert 0.5 < found.median / onset.folded_error(high, "flash_run_a") < 1.1
