"""What docs/throughput.md says of recording and of Muon is in results/throughput, or counted here."""

from __future__ import annotations

import json
import math
import statistics
from typing import Any

from test_docs import blocks, table
from test_newton_schulz import GPT2, muon, operations
from test_scaling_doc import rounds
from test_throughput_doc import DOCUMENT, RESULTS, profile, words_of
from torch.optim import Muon

from training.newton_schulz import batched
from training.shared_muon import cost

STUDENT = 2.571
"""0.975 quantile of Student's t with five degrees of freedom."""
WAYS = ("each", "graph", "batched")


def content(file: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / file).read_text())
    return found


def measured(file: str = "muon.json") -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in content(file)["rows"]}


def ways() -> list[dict[str, Any]]:
    """The rows of ``WAYS``."""
    rows = measured("newton_schulz.json")
    return [rows[name] for name in WAYS]


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[float]:
    """Of the rounds' own times."""
    return [a - b for a, b in zip(one["ms_all_rounds"], other["ms_all_rounds"], strict=True)]


def spread(values: list[float]) -> float:
    """How far the largest is above the smallest, percent."""
    return 100 * (max(values) / min(values) - 1)


def optimiser(row: dict[str, Any], where: str = "device") -> float:
    return float(row["parts_ms"]["optimiser"][where])


def of_kernels(name: str) -> tuple[float, int]:
    """(ms, number) of the kernels of a step of a way."""
    words = profile(name, "newton_schulz.txt")[0].split()
    return float(words[-7]), int(words[-2])


def by_kernel(name: str, file: str = "newton_schulz.txt") -> list[tuple[float, int, str]]:
    """(ms, calls, name) of the kernels in a profile."""
    lines = profile(name, file)
    first = next(i for i, line in enumerate(lines) if "each us" in line) + 1
    cells = (line.split(maxsplit=3) for line in lines[first:])
    return [(float(ms), int(float(calls)), kernel) for ms, calls, _, kernel in cells]


def of_muon(name: str) -> list[tuple[float, int, str]]:
    """Kernels of Muon's step: those that a step with AdamW has not, called at every matrix or few of them at once; the clip that is not
    fused (lists of one tensor) and what is called once or twice belong to other parts."""
    adamw = {kernel for *_, kernel in by_kernel("all", "kernels.txt")}
    own = [row for row in by_kernel(name) if row[2] not in adamw]
    return [row for row in own if row[1] > 2 and "TensorListMetadata<1>" not in row[2]]


def missing(*said: str) -> list[str]:
    return [words for words in said if words not in words_of()]


def test_the_cost_of_recording_is_the_difference_of_the_rounds() -> None:
    rows = measured()
    on, off = (rows[name]["ms_per_step"] for name in ("all", "norec"))
    each = differences(rows["all"], rows["norec"])
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


def test_the_first_measurement_of_muon_is_as_said() -> None:
    muon, adamw = (measured()[name] for name in ("muon", "all"))
    assert not missing(
        f"had a step of {muon['ms_per_step']:.2f} ms where AdamW's took {adamw['ms_per_step']:.2f},"
        f" {optimiser(muon):.2f} ms of it in the optimiser"
    )


def test_the_iterations_are_so_many_flops() -> None:
    flops, ceiling = 2 * 5 * 12 * sum(cost(*shape) for shape in GPT2), content("muon.json")["matmul_ceiling_tflops"]
    assert not missing(
        f"of {flops / 1e12:.2f} TFLOP in BF16, {flops / ceiling / 1e9:.1f} ms at the rate of the largest"
    )


def test_muon_takes_so_many_operations() -> None:
    whole = operations(Muon)
    assert not missing(
        f"one matrix after the other in {whole // 48} operations each, {whole:,} a step for GPT-2's {12 * len(GPT2)} (",
        f"all matrices of a shape at once, {operations(muon(batched))} operations a step.",
    )


def test_muons_ways_are_as_measured() -> None:
    rows = ways()
    expected = [
        (part, *("{device:.2f} ({host:.2f})".format(**row["parts_ms"][part]) for row in rows))
        for part in rows[0]["parts_ms"]
    ]
    whole = ("{:.2f}, {:.2f} - {:.2f}".format(row["ms_per_step"], *row["ms_range"]) for row in rows)
    expected.append(("whole step, rounds", *whole))
    expected.append(("kernels, ms (number)", *("{:.2f} ({:,})".format(*of_kernels(name)) for name in WAYS)))
    shares = (f"{100 * optimiser(row) / row['ms_per_step']:.1f} %" for row in rows)
    expected.append(("the optimiser's share", *shares))
    expected.append(("peak memory, GiB", *(f"{row['peak_gib']:.2f}" for row in rows)))
    assert not missing(f"Medians of {len(rows[0]['ms_all_rounds'])} rounds of 20 steps;")
    shown = table(DOCUMENT, "part of a step")
    assert list(shown[0])[1:] == list(WAYS)
    assert [tuple(row.values()) for row in shown] == expected


def test_the_command_that_is_shown_is_the_one_that_measured() -> None:
    shown = [line.split() for block in blocks(DOCUMENT, "") for line in block.splitlines() if "newton_schulz" in line]
    assert shown == [["python", *content("newton_schulz.json")["command"]]]


def test_muons_ways_have_the_switches_of_all_but_two() -> None:
    command, fields = content("newton_schulz.json")["command"], content("muon.json")["command"]
    chosen, before = (set(words[words.index("--set") + 1 : words.index("--variants")]) for words in (command, fields))
    assert chosen == before - {"speed.fused_clip=true"} | {"optim.optimizer=muon"}
    assert measured()["all"]["settings"] == {"speed.late_values": "true"}


def test_the_gain_of_each_way_is_the_difference_to_each() -> None:
    each, *others = ways()
    expected = {}
    for row in others:
        gain, own = each["ms_per_step"] - row["ms_per_step"], differences(each, row)
        expected[f"optim.newton_schulz {row['name']}"] = f"{gain:.2f} ({min(own):.2f} to {max(own):.2f})"
    written = {row["switch"]: row["measured"] for row in table(DOCUMENT, "trick") if "newton" in row["switch"]}
    assert written == expected


def test_the_gpu_waits_for_the_host_as_is_said() -> None:
    each, graph, _ = ways()
    (of_each, _), (of_graph, _) = of_kernels("each"), of_kernels("graph")
    idle = [row["ms_per_step"] - busy for row, busy in ((each, of_each), (graph, of_graph))]
    assert not missing(
        f"as long with `each` as with `graph`, {of_each:.1f} and {of_graph:.1f} ms;",
        f"its step is {idle[0]:.1f} ms longer than they, that of `graph` {idle[1]:.1f}.",
        f"{optimiser(each, 'host'):.2f} ms for the optimiser's launches, or {optimiser(graph, 'host'):.2f}.",
    )


def test_the_iterations_products_are_the_same_kernels() -> None:
    products = [[row for row in of_muon(name) if row[2].startswith("nvjet")] for name in ("each", "graph")]
    calls = [{kernel: number for _, number, kernel in rows} for rows in products]
    times = [sum(ms for ms, *_ in rows) for rows in products]
    assert calls[0] == calls[1]
    assert sum(calls[0].values()) == 48 * 5 * 3  # three products an iteration
    assert not missing(f"the same kernels, {48 * 5 * 3} a step, {times[0]:.2f} and {times[1]:.2f} ms.")


def test_steps_with_muon_spread_as_is_said() -> None:
    each, graph, _ = (spread(row["ms_all_rounds"]) for row in ways())
    four, two = (spread([run["tokens_per_second"] for run in rounds(name)[0]["alone"]]) for name in "FH")
    assert not missing(
        f"rounds of `each` differ by {each:.0f} %, those of `graph` by {graph:.1f} %;",
        f"four GPUs alone with `each` by {four:.0f} % (F",
        f"two with `graph` by {two:.1f} % (H)",
    )


def test_the_predictions_are_compared_with_what_was_measured() -> None:
    each, graph, batched = ways()
    gains = [each["ms_per_step"] - row["ms_per_step"] for row in (graph, batched)]
    own = differences(batched, graph)
    assert 40 < gains[0] < 52
    assert gains[1] < 50
    assert not missing(
        f"saves {gains[0]:.2f} ms; predicted were 40 to 52. It keeps {graph['peak_gib'] - each['peak_gib']:.2f} GiB",
        f"saves {gains[1]:.2f} ms, less than predicted (50 to 56)",
        f"took {optimiser(measured()['muon']) - optimiser(each):.1f} ms less than in the first measurement,"
        f" and {optimiser(batched, 'host'):.2f} ms of the host for {optimiser(batched):.2f} of the device",
        f"With Muon a step took {each['ms_per_step']:.0f} ms,",
        f"to the same bits, it takes {graph['ms_per_step']:.0f}.",
        f"On one GPU the two are {batched['ms_per_step'] - graph['ms_per_step']:.1f} ms apart",
        f"Its optimiser is {optimiser(graph) - optimiser(batched):.2f} ms shorter than that of `graph`,",
        f"the four rounds' own differences go from {min(own):.2f} to {max(own):.2f}.",
    )
    predicted = {row["switch"]: row["predicted gain, ms"] for row in table(DOCUMENT, "trick")}
    assert predicted["optim.newton_schulz graph"].startswith("40 - 52 ")
    assert predicted["optim.newton_schulz batched"].startswith("50 - 56 ")


def test_the_estimate_for_eight_gpus_is_counted_from_the_profile() -> None:
    rows = of_muon("graph")
    updates = [row for row in rows if "CUDAFunctor_add<float>" in row[2]]
    # Of the operations on two lists of tensors the momentum's moves 12 bytes an element, the copies' to BF16 six.
    momentum, copies = sorted((row for row in rows if "TensorListMetadata<2>" in row[2]), reverse=True)
    (adamw,) = (ms for ms, _, kernel in by_kernel("graph") if "FusedOptimizerTensorListMetadata" in kernel)
    assert sum(calls for _, calls, _ in updates) == 48
    assert 1.5 < momentum[0] / copies[0] < 2.5
    alone = sum(ms for ms, *_ in updates) + momentum[0]
    shared, everyone = sum(ms for ms, *_ in rows) - alone, alone + adamw
    least, graph = everyone + shared / 8, ways()[1]
    share = 100 * least / (graph["ms_per_step"] - optimiser(graph) + least)
    assert share > 3
    assert not missing(
        f"is {everyone:.2f} ms; an eighth of the other {shared:.2f} is {shared / 8:.2f}. Together {least:.2f} ms, {share:.1f} % of the step"
    )
