"""What results/fast_failure/README.md says of how its runs were made is what their records say."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from pathlib import Path

from prose import prose
from test_docs import ROOT, table

from analysis.report_files import read_csv

FOLDER = ROOT / "results/fast_failure"


def makers() -> list[tuple[list[str], str]]:
    """(runs, digest of the code) of every line of the table of commits; the digest is "-" where the records have none."""
    remark = r"\([^)]*\)"
    rows = table(FOLDER / "README.md", "runs")
    return [(re.sub(remark, "", row["runs"]).replace(" ", "").split(","), row["source_sha256"]) for row in rows]


def test_every_run_is_in_one_line_of_the_table_of_commits() -> None:
    named = [name for names, _ in makers() for name in names]
    assert sorted(named) == sorted(path.parent.name for path in FOLDER.glob("*/config.json"))


def test_the_runs_of_a_line_were_made_by_one_state_of_the_code() -> None:
    for names, digest in makers():
        records = [json.loads((FOLDER / name / "config.json").read_text()) for name in names]
        assert {(record.get("source_sha256") or "-")[:8] for record in records} == {digest}


def spread_of_sums(by_head: dict[str, list[float]]) -> float:
    """Mean over heads of (sum of z over probes)^2 / probes, 1 where probes are independent."""
    sums = [sum(found) ** 2 / len(found) for found in by_head.values() if len(found) > 20]
    return sum(sums) / len(sums) if sums else math.nan


def of_other_layers(run: Path, last: int) -> float:
    by_head: dict[str, list[float]] = defaultdict(list)
    with (run / "probes.csv").open(newline="") as file:
        for row in read_csv(file):
            for name, z in row.items():
                if name.startswith("z_") and row["step"] <= last and math.isfinite(z):
                    by_head[name].append(z)
    return spread_of_sums(by_head)


def of_layer_1(run: Path, last: int) -> float:
    by_head: dict[str, list[float]] = defaultdict(list)
    with (run / "heads.csv").open(newline="") as file:
        for row in read_csv(file):
            for name, mean in row.items():
                error = row.get(name.replace("_mean_", "_se_"), math.nan)
                if name.startswith("delta_error_mean_") and row["step"] <= last and math.isfinite(mean) and error > 0:
                    by_head[name].append(mean / error)
    return spread_of_sums(by_head)


def test_probes_that_round_the_o_of_delta_stochastically_all_drew_the_same() -> None:
    runs = ["run_a_seed_1", "run_a", "run_a_seed_2", "run_d", "run_d_fp32_pv", "run_a_fp32_pv"]
    said = prose(FOLDER / "README.md")
    listed = ", ".join(f"`{name}`" for name in runs[:-1]) + f" and `{runs[-1]}`"
    for measured, opening in ((of_other_layers, f"in {listed} it is"), (of_layer_1, "in the same order:")):
        found = {path.parent.name: measured(path.parent, 5000) for path in FOLDER.glob("*/probes.csv")}
        others = [value for name, value in found.items() if name not in runs and value == value]
        *most, last = [f"{found[name]:.2f}" for name in runs]
        values = f"{opening} {', '.join(most)} and {last}, in all other runs {min(others):.2f} to {max(others):.2f}."
        assert values in said
    # The table of docs/reproduction.md is of layer 1: the last round of the loop.
    low, high = (math.sqrt(pick(found[name] for name in runs)) for pick in (min, max))
    long = math.sqrt(of_layer_1(FOLDER / "run_d", 13_000))
    assert f"{low:.1f} to {high:.1f} times to 5,000; over all of `run_d`, the longest, {long:.1f} times" in said
