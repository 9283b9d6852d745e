"""What results/fast_failure/README.md says of how its runs were made is what their records say."""

from __future__ import annotations

import json
import re

from test_docs import ROOT, table

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
