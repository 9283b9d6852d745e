"""What README.md types of measurements is in the files they left; its marked parts and other numbers: tests/test_report.py."""

from __future__ import annotations

import json

from prose import prose
from test_docs import ROOT


def test_the_speed_is_that_of_the_bench() -> None:
    benched = json.loads((ROOT / "results/throughput/bench_32.json").read_text())["rows"]
    row = {one["name"]: one for one in benched}
    times = {name: row["nanogpt"]["ms_per_step"] / row[name]["ms_per_step"] for name in ("all", "plain")}
    kept = json.loads((ROOT / "results/telemetry/h200.json").read_text())["graph_bytes"] / 2**30
    said = prose(ROOT / "README.md")
    assert f"a step is {times['all']:.2f} times as fast as compiled nanoGPT's on the same GPU at 32 x 1024" in said
    assert f"({row['all']['tokens_per_second']:,.0f} tokens/s and {row['all']['peak_gib']:.1f} GiB without" in said
    assert f"whose graph keeps {kept:.1f} GiB more); without them {times['plain']:.2f} times." in said
