"""The table of docs/kernels.md is that of results/kernels/bench.json."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_document_has_the_published_times() -> None:
    rows = json.loads((ROOT / "results/kernels/bench.json").read_text())["rows"]
    document = (ROOT / "docs/kernels.md").read_text().splitlines()
    names = {row["name"] for row in rows if "absent" not in row}
    assert names
    for name in names:
        cells = [
            f"{r['forward_ms']:.3f} / {r['backward_ms']:.3f} ms ({r['forward_tflops']:.0f} / {r['backward_tflops']:.0f})"
            for r in rows
            if r["name"] == name
        ]
        assert f"| {name} | {' | '.join(cells)} |" in document
