"""The tables of docs/kernels.md are those of results/kernels/bench.json and bench_presets.json."""

from __future__ import annotations

import json
import re
from typing import Any

from prose import prose
from test_docs import ROOT, table

DOCUMENT = ROOT / "docs" / "kernels.md"
SHAPES = ["32, 1024", "8, 4096", "4, 8192"]
FLASH, DELTA_FROM_P = "flash (triton)", "flash_delta_from_p (triton)"


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


def presets() -> dict[str, list[dict[str, Any]]]:
    """By kernel, its rows in order of shape."""
    rows = json.loads((ROOT / "results/kernels/bench_presets.json").read_text())["rows"]
    timed = [row for row in rows if "absent" not in row]
    found = {name: [row for row in timed if row["name"] == name] for name in dict.fromkeys(r["name"] for r in timed)}
    assert all([f"{row['shape'][0]}, {row['shape'][1]}" for row in rows] == SHAPES for rows in found.values())
    return found


def rounds(row: dict[str, Any], base: dict[str, Any], way: str) -> list[float]:
    return [a / b for a, b in zip(row[f"{way}_all_ms"], base[f"{way}_all_ms"], strict=True)]


def ratio(row: dict[str, Any], base: dict[str, Any], way: str) -> str:
    """Of the medians, and the smallest and largest of the rounds' own."""
    each = rounds(row, base, way)
    assert len(each) == 20
    return f"{row[f'{way}_ms'] / base[f'{way}_ms']:.3f} ({min(each):.3f} - {max(each):.3f})"


def test_each_preset_takes_so_many_times_as_long_as_flash_in_the_same_process() -> None:
    found = presets()
    expected = {}
    for name, rows in found.items():
        pairs = zip(rows, found[FLASH], strict=True)
        cells = [" / ".join(ratio(row, base, way) for way in ("forward", "backward")) for row, base in pairs]
        if name == FLASH:
            cells = [f"{row['forward_ms']:.3f} / {row['backward_ms']:.3f} ms" for row in rows]
        expected[name] = cells
    written = {row.pop("kernel, times flash"): list(row.values()) for row in table(DOCUMENT, "kernel, times flash")}
    assert written == expected


def test_what_subtracting_first_costs_is_its_ratio_to_flash() -> None:
    found = presets()
    pairs = list(zip(found["flash_subtracted (triton)"], found[FLASH], strict=True))
    costs = [100 * (row["forward_ms"] / base["forward_ms"] - 1) for row, base in pairs]
    assert f"costs {costs[0]:.1f}, {costs[1]:.1f} and {costs[2]:.1f} % of the forward pass" in prose(DOCUMENT)
    assert f"takes {min(costs):.1f} to {max(costs):.1f} % longer forward" in prose(DOCUMENT)
    # Only at 8, 4096 do rounds reach below 1.
    assert [min(rounds(row, base, "forward")) < 1 for row, base in pairs] == [False, True, False]
    backward = [rounds(row, base, "backward") for row, base in pairs]
    assert all(min(each) < 1 < max(each) for each in backward)


def test_what_two_statistics_cost_is_the_ratio_to_delta_from_p() -> None:
    found = presets()
    pairs = list(zip(found["flash_delta_from_p_subtracted (triton)"], found[DELTA_FROM_P], strict=True))
    first, second, third = (ratio(row, base, "backward") for row, base in pairs)
    costs = [100 * (row["backward_ms"] / base["backward_ms"] - 1) for row, base in pairs]
    assert f"takes {first}, {second} and {third} times that of `flash_delta_from_p`" in prose(DOCUMENT)
    assert f"backward {min(costs):.1f} to {max(costs):.1f} % longer" in prose(DOCUMENT)


def test_so_many_tests_of_saved_statistics_had_passed() -> None:
    log = (ROOT / "results/kernels/pytest_saved.txt").read_text().strip()
    assert re.fullmatch(r"\.+", log)
    assert f"after {len(log)} tests, all passed" in prose(DOCUMENT)


def test_the_command_is_the_one_of_the_measurement() -> None:
    command = json.loads((ROOT / "results/kernels/bench_presets.json").read_text())["command"]
    assert f"python {' '.join(command)}\n" in DOCUMENT.read_text()
