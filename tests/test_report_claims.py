"""analysis/report_claims.py: seeds of a variant are one row, and a verdict says no more than the runs do."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from analysis import report_claims
from analysis.report import Evidence, Facts
from analysis.report_blocks import asked_table
from analysis.report_claims import NOT_RUN, PAPER, SELF_CORRELATION, base, groups, outcome, parse_asked, verdict

ROOT = Path(__file__).resolve().parent.parent
ASKED = {
    "flash": "",
    "fp32_o": "--preset flash_fp32_o",
    "fp32_o_seed_1": "--preset flash_fp32_o --seed 1",
    "run_a": "--a",
}


def facts(**changes: Any) -> Facts:
    given: dict[str, Any] = {
        **{"last_step": 12_999, "exploded_at": None, "above_since": None, "departed_at": None, "is_finished": True},
        "unstable_since": None,
        **{"unrest": 1.0, "loss_at_end": 3.0, "validation": {}, "w_q": {}, "logit": {}, "largest_w_q_in_layer": (0, 0)},
        **{"tokens_per_second": 1.0, "minutes": (0, 0.0), "printed_from": None},
    }
    return Facts(**(given | changes))


def run(name: str, seed: int = 42, **changes: Any) -> tuple[Evidence, Facts]:
    config = {"config": {"run": {"seed": seed}}, "batches": {"seed": 1337}}
    return Evidence(name=name, config=config, records=[]), facts(**changes)


EXPLODED = {"exploded_at": 5000, "is_finished": False, "last_step": 6000, "unrest": 9.0}
CUT = {"is_finished": False, "last_step": 5999}


@pytest.mark.parametrize(
    ("changes", "explodes", "quiet", "words"),
    [
        ({}, "does not", "agrees", "quiet to its end, 13,000 steps"),
        (EXPLODED, "agrees", "does not", "exploded at 5,000"),
        (CUT, "not settled", "agrees so far", "quiet when cut at 5,999"),
        (CUT | {"last_step": 5000}, "not settled", "not settled", "quiet when cut at 5,000"),
        (CUT | {"unrest": 3.0}, "not settled", "not settled", "leaving when cut at 5,999"),
        ({"unrest": 3.0}, "not settled", "not settled", "leaving at its end at 12,999"),
        (CUT | {"unrest": math.nan}, "not settled", "agrees so far", "quiet when cut at 5,999"),
        (
            CUT | {"unstable_since": 4000},
            "not settled",
            "does not",
            "unstable since 4,000, not exploded when cut at 5,999",
        ),
        (EXPLODED | {"is_not_finite": True}, "not settled", "does not", "not finite at 5,000"),
        (CUT | {"above_since": 5900}, "not settled", "not settled", "above the margin since 5,900 when cut at 5,999"),
    ],
)
def test_a_verdict_is_of_what_happened(changes: dict[str, Any], explodes: str, quiet: str, words: str) -> None:
    found = facts(**changes)
    assert (verdict(found, "explodes", 5000), verdict(found, "quiet", 5000)) == (explodes, quiet)
    assert outcome(found) == words


def test_a_run_that_was_cut_settles_nothing_where_the_failing_one_has_not_exploded() -> None:
    assert verdict(facts(**CUT), "quiet", None) == "not settled"


def test_seeds_of_a_variant_are_one_row() -> None:
    runs = [run("fp32_o_seed_1", 1, **EXPLODED), run("fp32_o"), run("flash", **EXPLODED), run("mine")]
    rows = {row[0]: row[1:] for row in report_claims.asked_rows(groups(runs, ASKED))}
    assert list(rows) == ["flash", "fp32_o", "run_a", "mine"]
    options = "`--preset flash_fp32_o`"
    what = "quiet to its end, 13,000 steps (seed 42); exploded at 5,000 (seed 1)"
    either = "1 of 2 agrees, 1 of 2 does not"
    assert rows["fp32_o"] == [options, "quiet", "quiet", "2", what, either, either]
    assert rows["run_a"] == ["`--a`", "quiet", "explodes", "0", NOT_RUN, NOT_RUN, NOT_RUN]
    assert rows["mine"] == ["-", "-", "-", "1", "quiet to its end, 13,000 steps", "-", "-"]


def test_numbers_of_all_runs() -> None:
    lost, uneasy = run("paper", **EXPLODED, is_not_finite=True), run("sdpa_flash", unstable_since=4000)
    switched = run("switch_at_3300")
    switched[0].config["config"]["alarm"] = {"switches": ["3300:1:flash_fp32_o"]}
    runs = [run("flash", **EXPLODED), run("fp32_o"), run("run_a", **CUT), lost, uneasy, switched]
    made = report_claims.values(groups(runs, ASKED))
    assert [made[name] for name in ("exploded", "not_finite", "finished", "unsettled", "cut")] == ["1"] * 5
    assert made["switch_at_3300.n"] == "1"
    assert (made["run_a.n"], made["run_a.outcome"], made["run_a.verdict"]) == (
        "1",
        "quiet when cut at 5,999",
        "agrees so far",
    )


def test_every_expectation_is_of_a_run_that_is_asked_for() -> None:
    asked = parse_asked((ROOT / "configs/reproduction.txt").read_text())
    assert {base(name) for name in asked} >= PAPER.keys() | SELF_CORRELATION.keys()
    assert asked["only_layer_1"] == "configs/ablations/only_layer_2_fast_failure.py"
    assert asked["flash"] == ""


def test_runs_that_are_not_made_stand_below_the_table_with_what_is_expected_of_them() -> None:
    lines = asked_table([], {"flash": "", "paper": "--attention.default.numerics paper"}).splitlines()
    assert len(lines) == 4
    assert lines[3].endswith("`flash` (explodes, explodes), `paper` (explodes, explodes).")
