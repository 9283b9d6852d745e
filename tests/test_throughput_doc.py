"""The numbers of docs/throughput.md are those of results/throughput."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
import statistics
from typing import Any

import pytest
from test_docs import ROOT, blocks, table

import config as configuration

DOCUMENT = ROOT / "docs" / "throughput.md"
RESULTS = ROOT / "results" / "throughput"

# The two rows of the bench whose difference a row of the document's tables is, by its switch or preset.
STEPS = {
    "fill_memory off, late_values": ("plain", "late"),
    "fused_clip": ("late", "clip"),
    "loss_chunk": ("clip", "loss"),
    "fused_norm": ("loss", "norm"),
    "float32_gradients": ("norm", "f32"),
    "sorted_embedding": ("f32", "all"),
    "fused_mlp": ("all", "allmlp"),
}
PRESETS = {"flash_stable_safe": "safe", "flash_fp32_o": "fp32o", "flash_delta_from_p": "deltap"}

# Pieces of the names of the kernels in a row of the table of floors.
KERNELS = {
    "attention": (" forward_kernel", "query_kernel", "key_kernel"),
    "residual sums and norms": ("norm_forward_kernel", "norm_backward_kernel", "reduce_kernel<128, 4"),
    "GELU": ("_gelu_",),
    "softmax of the head": ("softmax_rows_kernel",),
    "gradient norm, AdamW": ("FusedOptimizerTensorListMetadata", "LpNormFunctor"),
    "weights to BF16": ("triton_poi_fused__to_copy_1", "_to_copy_3", "_to_copy_4", "bfloat16_copy_kernel"),
    "embedding and its gradient": (
        "add_norm_embedding",
        "runs_kernel",
        "RadixSortOnesweep",
        "triton_poi_fused_add_div_mul",
        "triton_per_fused_sum_view",
    ),
}


def rows(size: int) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads((RESULTS / f"bench_{size}.json").read_text())["rows"]}


def difference(before: str, after: str) -> str:
    """Of the medians, and the smallest and largest of the rounds' own."""
    first, second = rows(32)[before], rows(32)[after]
    each = [a - b for a, b in zip(first["ms_all_rounds"], second["ms_all_rounds"], strict=True)]
    return f"{first['ms_per_step'] - second['ms_per_step']:.2f} ({min(each):.2f} to {max(each):.2f})"


def profile(name: str, file: str = "kernels.txt") -> list[str]:
    """The lines of one variant's profile."""
    text = (RESULTS / file).read_text()
    return next(part for part in text.split("\n\n") if part.startswith(f"{name}: ")).splitlines()


def totals(name: str) -> tuple[float, float]:
    """(the step while profiled, its kernels), ms."""
    found = re.match(r"\w+: ([\d.]+) ms a step with the profiler on, ([\d.]+) ms", profile(name)[0])
    assert found is not None
    return float(found[1]), float(found[2])


def kernels(name: str, *pieces: str) -> float:
    """Time of the kernels with one of these pieces in their line, ms."""
    first = next(i for i, line in enumerate(profile(name)) if "each us" in line) + 1
    return sum(float(line.split()[0]) for line in profile(name)[first:] if any(piece in line for piece in pieces))


def kind(name: str, which: str) -> float:
    return next(float(line.split()[0]) for line in profile(name) if line.split(maxsplit=1)[1:] == [which])


@pytest.mark.parametrize("size", [32, 64])
def test_the_table_has_every_variant_as_measured(size: int) -> None:
    measured = rows(size)
    base = measured["nanogpt"]["ms_per_step"]
    expected = [
        (
            name,
            f"{row['ms_per_step']:.2f}",
            "{:.2f} - {:.2f}".format(*row["ms_range"]),
            f"{row['tokens_per_second']:,.0f}",
            f"{base / row['ms_per_step']:.3f}",
            f"{row['mfu']:.3f}",
            f"{row['of_matmul_ceiling']:.3f}",
            f"{row['peak_gib']:.2f}",
        )
        for name, row in measured.items()
    ]
    heading = f"{size} x 1024"
    written = [tuple(cell for head, cell in row.items() if head != "what") for row in table(DOCUMENT, heading)]
    assert sorted(written) == sorted(expected)


def test_the_gain_of_each_trick_is_the_difference_of_its_rows() -> None:
    written = {row["switch"]: row["measured"] for row in table(DOCUMENT, "trick") if row["switch"] in STEPS}
    assert written == {switch: difference(*pair) for switch, pair in STEPS.items()}


def typed(name: str) -> list[str]:
    """The settings of a row, as train.py takes them."""
    words = []
    for field, value in rows(32)[name]["settings"].items():
        section, flag = field.replace("_", "-").split(".")
        words += {"true": [f"--{section}.{flag}"], "false": [f"--{section}.no-{flag}"]}.get(
            value, [f"--{section}.{flag}", value]
        )
    return words


def test_the_commands_with_all_switches_are_what_was_measured() -> None:
    lines = [
        line.split() for block in blocks(DOCUMENT, "") for line in block.splitlines() if "--speed.loss-chunk" in line
    ]
    expected = [["python", "train.py", "configs/fast_failure.py", *typed(name)] for name in ("all", "allmlp")]
    assert [sorted(line) for line in lines] == [sorted(line) for line in expected]
    loaded = [configuration.load(line[2:]).speed for line in lines]
    assert [one.fused_mlp for one in loaded] == [False, True]
    assert loaded[0] == dataclasses.replace(loaded[1], fused_mlp=False)


def test_each_trick_is_what_its_rows_differ_in() -> None:
    for switch, (before, after) in STEPS.items():
        fields = rows(32)[before]["settings"].keys() ^ rows(32)[after]["settings"].keys()
        names = switch.replace(" off", "").split(", ")
        assert fields == {f"speed.{name}" for name in names}


def test_the_cost_of_each_preset_is_the_difference_to_all() -> None:
    base = rows(32)["all"]["ms_per_step"]
    expected = {
        preset: (difference(name, "all"), f"{100 * (rows(32)[name]['ms_per_step'] / base - 1):.1f} %")
        for preset, name in PRESETS.items()
    }
    written = {row["preset"]: (row["ms above all (rounds)"], row["of the step"]) for row in table(DOCUMENT, "preset")}
    assert written == expected


def test_the_profile_of_each_part_is_the_sum_of_its_kernels() -> None:
    written = {
        row["kernels of all"].strip("*"): row["profile, ms"].strip("*") for row in table(DOCUMENT, "kernels of all")
    }
    expected = {"matrix products": kind("all", "matrix products"), "all 565 kernels": totals("all")[1]}
    expected |= {part: kernels("all", *pieces) for part, pieces in KERNELS.items()}
    expected["all others"] = 2 * expected["all 565 kernels"] - sum(expected.values())
    assert written == {part: f"{time:.2f}" for part, time in expected.items()}


def test_the_profiled_steps_are_those_of_the_profile() -> None:
    written = {
        row["profiled"]: (
            row["kernels, ms"],
            row["step while profiled"],
            row["idle then"],
            row["step without profiler"],
        )
        for row in table(DOCUMENT, "profiled")
    }
    expected = {}
    for name in ("plain", "all", "nanogpt"):
        step, busy = totals(name)
        without = rows(32)[name]["ms_per_step"]
        expected[name] = (f"{busy:.2f}", f"{step:.2f}", f"{100 * (1 - busy / step):.0f} %", f"{without:.2f}")
    assert written == expected


def words_of() -> str:
    """The document, its lines joined."""
    return " ".join(DOCUMENT.read_text().split())


def test_five_thousand_steps_took_what_is_said() -> None:
    with (ROOT / "results/fast_failure/flash_all_switches/metrics.csv").open(newline="") as file:
        rows = {int(row["step"]): row for row in csv.DictReader(file)}
    rate = statistics.median(float(row["tokens_per_second"]) for row in rows.values() if row["tokens_per_second"])
    step = 32 * 1024 / rate
    said = (
        f"took {rows[4999]['seconds']} s on one H200",
        f"{rows[0]['seconds']} to the end of the first step",
        f"median of {1000 * step:.1f} ms",
        f"missed by {float(rows[4999]['seconds']) - 300:.0f} s",
    )
    assert [words for words in said if words not in DOCUMENT.read_text()] == []
    assert round(5000 * step, -1) == 300


def test_the_clock_beside_the_rounds() -> None:
    with (RESULTS / "clocks_64.csv").open(newline="") as file:
        busy = [row for row in csv.DictReader(file) if float(row["watt"]) > 600]
    clock, power = (statistics.median(float(row[name]) for row in busy) for name in ("sm_mhz", "watt"))
    assert f"a median of {clock:,.0f} MHz of 1,980, at a median of {power:.0f} W of 700" in DOCUMENT.read_text()


def test_no_file_names_a_folder_of_a_machine() -> None:
    texts = {path.name: path.read_text() for path in RESULTS.iterdir()}
    assert [name for name, text in texts.items() if re.search(r"(?<![\w.])/(root|tmp|home|work|opt)/", text)] == []
