"""What docs/throughput.md says of recording and of Muon is in results/throughput/muon.json, or counted here."""

from __future__ import annotations

import json
import math
import statistics
from typing import Any

from test_docs import table
from test_newton_schulz import GPT2
from test_throughput_doc import DOCUMENT, RESULTS, profile, scaling, words_of

from training.shared_muon import cost

STUDENT = 2.571
"""0.975 quantile of Student's t with five degrees of freedom."""


def measured() -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads((RESULTS / "muon.json").read_text())["rows"]}


def differences(one: str, other: str) -> list[float]:
    """Of the rounds' own times."""
    rows = measured()
    return [a - b for a, b in zip(rows[one]["ms_all_rounds"], rows[other]["ms_all_rounds"], strict=True)]


def spread(values: list[float]) -> float:
    """How far the largest is above the smallest, percent."""
    return 100 * (max(values) / min(values) - 1)


def missing(*said: str) -> list[str]:
    return [words for words in said if words not in words_of()]


def test_the_cost_of_recording_is_the_difference_of_the_rounds() -> None:
    on, off = (measured()[name]["ms_per_step"] for name in ("all", "norec"))
    each = differences("all", "norec")
    mean, error = statistics.mean(each), statistics.stdev(each) / math.sqrt(len(each))
    low, high = mean - STUDENT * error, mean + STUDENT * error
    assert len(each) == 6
    assert not missing(
        f"6 rounds of 20 steps each, the other three GPUs of the host trained): {on:.2f} ms with and {off:.2f} without",
        f"a difference of medians of {on - off:.2f} ms",
        f"go from {min(each):.2f} to {max(each):.2f}, mean {mean:.2f}, standard error {error:.2f}.",
        f"95 % interval (t) goes from {low:.2f} to {high:.2f} ms, {100 * high / off:.2f} % of a step",
    )
    assert low < 0 < 0.005 * off < high  # not told apart from zero, nor shown to be below what was asked


def test_the_host_draws_batches_as_fast_as_is_said() -> None:
    on, off = (measured()[name]["parts_ms"]["data"]["host"] for name in ("all", "norec"))
    assert not missing(f"Part `data` takes {on:.2f} ms of the host with it and {off:.2f} without")


def test_the_parts_of_a_step_with_muon_are_as_measured() -> None:
    rows = [measured()[name] for name in ("all", "muon")]
    expected = [
        (part, *("{device:.2f} ({host:.2f})".format(**row["parts_ms"][part]) for row in rows))
        for part in rows[0]["parts_ms"]
    ]
    whole = ("{:.2f}, {:.2f} - {:.2f}".format(row["ms_per_step"], *row["ms_range"]) for row in rows)
    expected.append(("whole step, rounds", *whole))
    assert [tuple(row.values()) for row in table(DOCUMENT, "part of a step")] == expected


def test_muon_differs_from_all_by_the_switches_that_it_refuses() -> None:
    settings = {name: row["settings"] for name, row in measured().items()}
    # --set switches fused_clip on for all.
    assert settings["all"] == {"speed.late_values": "true"}
    assert settings["muon"] == {"speed.fused_clip": "false", "optim.optimizer": "muon"}


def test_the_optimiser_takes_the_part_of_the_step_that_is_said() -> None:
    row = measured()["muon"]
    each, whole = differences("muon", "all"), row["ms_per_step"]
    part = 100 * row["parts_ms"]["optimiser"]["device"] / whole
    more = whole - measured()["all"]["ms_per_step"]
    assert not missing(
        f"A step with Muon takes {more:.2f} ms more (rounds: {min(each):.2f} to {max(each):.2f})",
        f"its optimiser {part:.0f} % of the step",
    )


def test_the_iterations_are_so_many_flops() -> None:
    flops = 2 * 5 * 12 * sum(cost(*shape) for shape in GPT2)
    ceiling = json.loads((RESULTS / "muon.json").read_text())["matmul_ceiling_tflops"] * 1e12
    time = measured()["muon"]["parts_ms"]["optimiser"]["device"] / 1000
    assert not missing(
        f"are {flops / 1e12:.2f} TFLOP in BF16, {1000 * flops / ceiling:.1f} ms at the rate of the largest product",
        f"in {1000 * time:.0f} ms that is {flops / time / 1e12:.0f} TFLOP/s",
    )


def test_the_host_is_as_slow_with_every_kernel() -> None:
    """33 kernels a matrix: torch's 23 operations, two for each of the ten addmm."""
    rows, kernels = measured(), int(profile("all")[0].split()[-2])
    optimiser = rows["muon"]["parts_ms"]["optimiser"]
    host = sum(part["host"] for part in rows["all"]["parts_ms"].values())
    assert not missing(
        f"device and host take the same time, {optimiser['device']:.2f} and {optimiser['host']:.2f} ms",
        f"about {round(33 * 48, -1):,} kernels",
        f"{optimiser['host']:.0f} ms are {1000 * optimiser['host'] / (33 * 48):.0f} us a kernel",
        f"this host takes {host:.1f} ms for {kernels} kernels, {1000 * host / kernels:.0f} us each",
    )


def test_steps_with_muon_spread_as_is_said() -> None:
    rounds = {name: row["ms_all_rounds"] for name, row in measured().items()}
    alone = {name: [run["tokens_per_second"] for run in scaling(name)["alone"]] for name in "EF"}
    assert not missing(
        f"rounds with Muon differ by up to {spread(rounds['muon']):.0f} %, those of `all` by {spread(rounds['all']):.1f} %",
        f"each alone, by {spread(alone['F']):.0f} % with Muon",
        f"and by {spread(alone['E']):.1f} % with AdamW (E)",
    )
