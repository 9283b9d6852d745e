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


def spread_of_sums(run: Path, last: int) -> float:
    """Mean over heads of (sum of z over probes)^2 / probes, 1 where probes are independent; z as probes.csv has it."""
    by_head: dict[str, list[float]] = defaultdict(list)
    with (run / "probes.csv").open(newline="") as file:
        for row in read_csv(file):
            for name, z in row.items():
                if name.startswith("z_") and row["step"] <= last and math.isfinite(z):
                    by_head[name].append(z)
    sums = [sum(found) ** 2 / len(found) for found in by_head.values() if len(found) > 20]
    return sum(sums) / len(sums) if sums else math.nan


def test_probes_that_round_the_o_of_delta_stochastically_all_drew_the_same() -> None:
    found = {path.parent.name: spread_of_sums(path.parent, 5000) for path in FOLDER.glob("*/probes.csv")}
    runs = ["run_a_seed_1", "run_a", "run_a_seed_2", "run_d", "run_d_fp32_pv", "run_a_fp32_pv"]
    others = [value for name, value in found.items() if name not in runs and value == value]
    told = ", ".join(f"`{name}`" for name in runs[:-1])
    values = ", ".join(f"{found[name]:.2f}" for name in runs[:-1])
    said = (
        f"In {told} and `{runs[-1]}` it is {values} and {found[runs[-1]]:.2f}, in all other runs {min(others):.2f} to "
    )
    said += f"{max(others):.2f}."
    assert said in prose(FOLDER / "README.md")
    ends = (math.sqrt(min(found[name] for name in runs)), math.sqrt(max(found[name] for name in runs)))
    assert f"have standard errors {ends[0]:.1f} to {ends[1]:.1f} times those of" in prose(FOLDER / "README.md")
