"""What docs/throughput.md says of several GPUs is in results/throughput, or counted here."""

from __future__ import annotations

import csv
import itertools
import json
import re
import statistics
from typing import Any

import pytest
import torch
from test_docs import table
from test_throughput_doc import DOCUMENT, RESULTS, words_of
from torch._dynamo.backends.distributed import DDPOptimizer

from attention import AttentionConfig, AttentionSpec
from model import GPT, MODEL_PRESETS, ModelConfig
from training.distributed import DEFAULT_BUCKET_MB

SCALING = {
    "B": "scaling_2.json",
    "C": "scaling_2_in_place.json",
    "D": "scaling_4.json",
    "E": "scaling_4_64.json",
    "F": "scaling_4_muon.json",
    "G": "scaling_2_rounds.json",
    "H": "scaling_2_muon.json",
}


def rounds(name: str) -> list[dict[str, list[dict[str, Any]]]]:
    """Of every round of a measurement: the GPUs alone, then each variant."""
    measured = json.loads((RESULTS / SCALING[name]).read_text())["rounds"]
    return [{"alone": one["alone"]} | {variant: [run] for variant, run in one["variants"].items()} for one in measured]


def scaling(name: str) -> dict[str, list[dict[str, Any]]]:
    """Of the one round of a measurement."""
    (measured,) = rounds(name)
    return measured


def tokens_of(runs: list[dict[str, Any]]) -> float:
    """Tokens/s of all of them together."""
    return sum(run["tokens_per_second"] for run in runs)


def of_sums(name: str, variant: str) -> list[float]:
    """Of every round: tokens/s of a variant, of those of all GPUs alone."""
    return [tokens_of(one[variant]) / tokens_of(one["alone"]) for one in rounds(name)]


def of_slowests(name: str, variant: str) -> list[float]:
    """Of every round: tokens/s of a variant, of as many times those of the slowest GPU alone."""
    alone = [[run["tokens_per_second"] for run in one["alone"]] for one in rounds(name)]
    return [tokens_of(one[variant]) / (len(each) * min(each)) for one, each in zip(rounds(name), alone, strict=True)]


def rates(name: str) -> dict[str, float]:
    """Tokens/s of all alone together, and of each variant; medians over rounds."""
    if name in SCALING:
        return {
            variant: statistics.median(tokens_of(one[variant]) for one in rounds(name)) for variant in rounds(name)[0]
        }
    with (RESULTS / "scaling.csv").open(newline="") as file:
        lines = [line for line in csv.DictReader(file) if int(line["step"]) > 30]
    one, two = (
        statistics.median(float(line["tokens_per_second"]) for line in lines if line["run"] == f"scale_{gpus}")
        for gpus in (1, 2)
    )
    return {"alone": 2 * one, "overlap": two}


def step_ms(name: str, variant: str) -> list[float]:
    """Every step of a variant, or of all GPUs alone; none where they were not kept."""
    if name not in SCALING:
        return []
    return [ms for one in rounds(name) for run in one[variant] for ms in run.get("step_ms", [])]


def mean_ms(name: str, variant: str, gpus: int = 2) -> float:
    tokens = (64 if name == "E" else 32) * 1024  # of a GPU's step
    return 1000 * gpus * tokens / rates(name)[variant]


def of_slowest(name: str, variant: str) -> str:
    """Of as many times the slowest GPU alone; not for those alone, nor where one GPU alone was measured."""
    if variant == "alone" or name not in SCALING:
        return ""
    return f"{100 * statistics.median(of_slowests(name, variant)):.1f} %"


def spread_of(steps: list[float]) -> str:
    if not steps:
        return ""
    tenths = statistics.quantiles(steps, n=10, method="inclusive")
    return f"{statistics.median(steps):.1f} ({tenths[0]:.1f} - {tenths[-1]:.1f}), {max(steps):.1f}"


@pytest.mark.parametrize(("name", "gpus"), [*zip("ABCDEFGH", (2, 2, 2, 4, 4, 4, 2, 2), strict=True)])
def test_several_gpus_are_compared_with_all_of_them_alone(name: str, gpus: int) -> None:
    found = rates(name)
    expected = [
        (
            str(gpus),
            variant,
            f"{rate:,.0f}",
            f"{100 * rate / found['alone']:.1f} %".replace("100.0", "100"),
            of_slowest(name, variant),
            f"{mean_ms(name, variant, gpus):.2f}",
            spread_of(step_ms(name, variant)),
            name,
        )
        for variant, rate in found.items()
    ]
    shown = [tuple(row.values()) for row in table(DOCUMENT, "GPUs")]
    assert [row for row in shown if row[-1] == name] == expected
    assert {row[-1] for row in shown} == {"A", *SCALING}


def test_several_gpus_make_so_many_times_the_tokens_of_one() -> None:
    def times(gpus: int, names: str) -> list[str]:
        found = [(rates(name), variant) for name in names for variant in rates(name) if variant != "alone"]
        return sorted({f"{gpus * rate[variant] / rate['alone']:.2f}" for rate, variant in found})

    (least, *_, most), (four,), (larger,) = times(2, "ABCG"), times(4, "D"), times(4, "E")
    said = f"Two GPUs made {least} to {most} times the tokens of one, four {four} times and, at 64 x 1024, {larger};"
    assert said in words_of()


def test_what_was_reached_of_what_was_asked_is_said_of_both_bases() -> None:
    (g1, g2), (d,), (e,) = (of_sums(name, "in_place") for name in "GDE")
    said = f"{100 * g1:.1f} and {100 * g2:.1f} % of two GPUs in G, {100 * d:.1f} % of four GPUs at 32 x 1024,"
    assert f"{said} {100 * e:.1f} % at 64 x 1024." in words_of()
    (g1, g2), (d,), (e,) = (of_slowests(name, "in_place") for name in "GDE")
    assert (
        f"they are {100 * g1:.1f} and {100 * g2:.1f} %, {100 * d:.1f} % and {100 * e:.1f} %: two rounds, one and one."
        in words_of()
    )


def test_no_round_with_adamw_reached_what_was_asked() -> None:
    every = [max(of_sums(name, variant)) for name in "BCDEG" for variant in rates(name) if variant != "alone"]
    assert max(*every, rates("A")["overlap"] / rates("A")["alone"]) < 0.97


def test_the_steps_timed_are_as_many_as_is_said() -> None:
    for name in SCALING:
        counts = sorted({run["steps"] for one in rounds(name) for runs in one.values() for run in runs})
        said = {1: f"[{counts[0]}]", 2: f"[{counts[0]} or {counts[-1]}]"}
        assert (
            f"{said.get(len(counts), f'[{counts[0]} to {counts[-1]}]')}(../results/throughput/{SCALING[name]})"
            in words_of()
        )


def switches(name: str) -> set[str]:
    words = json.loads((RESULTS / SCALING[name]).read_text())["command"]
    chosen = itertools.takewhile(lambda word: not word.startswith("--"), words[words.index("--set") + 1 :])
    return {word for word in chosen if not word.startswith("data.")}


def test_adamw_and_muon_have_the_switches_that_are_said() -> None:
    assert switches("G") == switches("E")
    assert switches("F") == switches("E") - {"speed.late_values=true", "speed.fused_clip=true"} | {
        "optim.optimizer=muon"
    }
    assert switches("H") == switches("F") | {"optim.newton_schulz=graph"}


def test_two_gpus_had_two_speeds() -> None:
    steps = sorted(mean_ms(name, variant) for name in "BC" for variant in rates(name) if variant != "alone")
    gaps = [b - a for a, b in itertools.pairwise(steps)]
    cut = gaps.index(max(gaps)) + 1
    fast, slow = steps[:cut], steps[cut:]
    said = f"took {fast[0]:.1f} to {fast[-1]:.1f} ms or {slow[0]:.1f} to {slow[-1]:.1f}, about"
    assert said in words_of()
    assert f"about {statistics.mean(slow) - statistics.mean(fast):.0f} ms more" in words_of()


def late(runs: list[list[float]]) -> int:
    """Steps more than 4 ms above the median of their run: half of what parts the two speeds."""
    return sum(ms > statistics.median(run) + 4 for run in runs for ms in run)


def test_no_round_with_single_steps_is_a_slow_one() -> None:
    """Slow would be 8 ms above the fast speed, here that of B's round in DDP; half of that is the line."""
    two = [run["step_ms"] for one in rounds("G") for run in one["in_place"]]
    four = [step_ms("D", variant) for variant in ("in_place", "plain")]
    said = (
        f"of the {sum(map(len, two))} steps of `in_place` in G {late(two)} are more than 4 ms above their round's median,"
        f" the longest takes {max(map(max, two)):.1f} ms;"
        f" of the {sum(map(len, four))} steps of D's two variants none, the longest takes {max(map(max, four)):.1f}."
    )
    assert said in words_of()
    assert late(four) == 0
    assert max(statistics.median(run) for run in (*two, *four)) < mean_ms("B", "plain") + 4


def test_the_exchange_at_two_gpus_is_above_the_mean_of_the_two_alone() -> None:
    above = []
    for one in rounds("G"):
        alone = statistics.mean(statistics.median(run["step_ms"]) for run in one["alone"])
        above.append(statistics.median(one["in_place"][0]["step_ms"]) - alone)
    said = (
        f"takes {above[0]:.2f} and {above[1]:.2f} ms more than the mean of the two alone, medians of the steps:"
        f" about the {exchanges()['in place, one call, mean']:.2f} ms of the exchange by itself"
    )
    assert said in words_of()


def test_the_exchange_at_four_gpus_is_above_the_mean_of_the_four_alone() -> None:
    alone = [statistics.median(run["step_ms"]) for run in scaling("D")["alone"]]
    base = statistics.mean(alone)
    in_place, plain = (statistics.median(step_ms("D", variant)) - base for variant in ("in_place", "plain"))
    said = f"costs {in_place:.2f} ms a step in place and {plain:.2f} in `plain`: medians of the steps against {base:.2f} ms,"
    assert said in words_of()
    counted = 1.5 * exchanges()["in place, one call, mean"]
    late = max(alone) - base
    assert f"{counted:.2f} ms at the rate of two in place" in words_of()
    assert f"would allow {100 * base / (base + counted):.1f} %" in words_of()
    assert f"is {late:.2f} ms above that mean. Together that is {counted + late:.2f} ms" in words_of()


def test_the_exchange_at_64_sequences_a_gpu_is_above_the_mean_of_the_four_alone() -> None:
    alone = [statistics.median(run["step_ms"]) for run in scaling("E")["alone"]]
    base = statistics.mean(alone)
    counted, late = 1.5 * exchanges()["in place, one call, mean"], max(alone) - base
    above = statistics.median(step_ms("E", "in_place")) - base
    assert (
        f"At 64 x 1024 (E) it is {above:.2f} ms above a mean of {base:.2f}, with the same {counted:.2f}" in words_of()
    )
    assert f"a slowest card {late:.2f} above the mean, in sum {counted + late:.2f}." in words_of()


def test_muon_on_four_gpus_has_the_tokens_and_steps_that_are_said() -> None:
    gain = 100 * rates("F")["in_place"] / rates("F")["alone"]
    together, apart = (mean_ms("F", variant, 4) for variant in ("in_place", "alone"))
    assert f"make {gain:.0f} % of the tokens of the four alone, one round" in words_of()
    assert f"a step of {together:.1f} ms in place of {apart:.1f}." in words_of()


def test_muon_on_two_gpus_has_the_tokens_and_steps_that_are_said() -> None:
    graph, batched = (100 * of_sums("H", variant)[0] for variant in ("graph", "batched"))
    together, apart, slow = (mean_ms("H", variant) for variant in ("graph", "alone", "batched"))
    tenth, *_ = statistics.quantiles(step_ms("H", "batched"), n=10, method="inclusive")
    said = (
        f"With `graph` (H) two make {graph:.1f} %, a step of {together:.1f} ms in place of {apart:.1f}:",
        f"`batched` makes {batched:.1f} %, and that is not a few steps: half of them take"
        f" {statistics.median(step_ms('H', 'batched')):.1f} ms or more, nine of ten at least {tenth:.1f}.",
        f"the {slow - together:.0f} ms may be the slow one of the two speeds",
    )
    assert [words for words in said if words not in words_of()] == []


def test_the_measurement_of_four_gpus_is_incomplete() -> None:
    content = json.loads((RESULTS / "scaling_4.json").read_text())
    asked = [text.split("=")[0] for text in content["command"][content["command"].index("--variants") + 1 :]]
    assert (content["complete"], asked) == (False, ["in_place", "plain", "graphs", "muon"])
    assert list(scaling("D")) == ["alone", *asked[:2]]


def test_the_gain_of_each_way_to_exchange_is_the_difference_of_its_rows() -> None:
    overlap = mean_ms("B", "plain") - mean_ms("B", "overlap")
    larger = mean_ms("B", "overlap") - mean_ms("B", "b100")
    two, four = (mean_ms(name, "plain", gpus) - mean_ms(name, "in_place", gpus) for name, gpus in (("C", 2), ("D", 4)))
    measured = {row["switch"]: row["measured"] for row in table(DOCUMENT, "trick")}
    assert measured["overlap"].startswith(f"{overlap:.2f} at 2 GPUs, one round")
    assert measured["bucket_mb 100, with overlap"] == f"{larger:.2f} at 2 GPUs, the same round"
    assert (
        measured["exchange in_place, without overlap"] == f"{two:.2f} at 2 GPUs, one round; {four:.2f} at 4, one round"
    )


def written_exchanges() -> dict[str, tuple[str, str]]:
    """ms and GB/s of each way in exchange.txt, by the names of the script as it is now."""
    text = (RESULTS / "exchange.txt").read_text()
    earlier = {"coalesced, mean": "in place, one call, mean"}
    earlier["reduce-scatter and all-gather, coalesced"] = "reduce-scatter and all-gather"
    found = {name.strip(): (ms, rate) for name, ms, rate in re.findall(r"(.+?) +([\d.]+) ms +([\d.]+) GB/s", text)}
    return {earlier.get(name, name): cells for name, cells in found.items()}


def exchanges() -> dict[str, float]:
    return {name: float(ms) for name, (ms, _) in written_exchanges().items()}


def test_the_exchange_by_itself_is_as_measured() -> None:
    shown = [tuple(row.values()) for row in table(DOCUMENT, "GPT-2's gradients over two GPUs")]
    assert shown == [(name, *written_exchanges()[name]) for name, *_ in shown]
    assert len(shown) == 7


def test_what_the_exchange_by_itself_allows_is_counted_from_it() -> None:
    step, in_place, one = mean_ms("C", "alone"), exchanges()["in place, one call, mean"], exchanges()["one buffer, sum"]
    sharded = exchanges()["reduce-scatter and all-gather"] - in_place
    ddp = exchanges()["buckets of 25 MiB, sum"] + exchanges()["copies into buckets"]
    lost = mean_ms("B", "plain") - mean_ms("B", "alone")
    allowed = f"{100 * step / (step + in_place):.1f} %"
    said = (
        f"are {ddp:.2f} ms of the {lost:.2f} that `plain` lost in B; in place it is {in_place:.2f}.",
        f"that nothing hides allows {allowed}**: a step of {step:.1f} ms and {in_place:.2f} more are {allowed};",
        f"in one buffer, {one:.2f} ms, it would be {100 * step / (step + one):.1f}.",
        f"take {sharded:.2f} ms longer",
    )
    assert [words for words in said if words not in words_of()] == []


def test_the_buckets_are_those_that_ddp_lays_out() -> None:
    """In the order of the backward pass, the token table last; at the default the first bucket is full with 1 MiB."""
    shape = MODEL_PRESETS["gpt2"]
    with torch.device("meta"):
        model = GPT(shape, AttentionConfig().resolve(shape.n_layer, shape.n_head))
    table_first = list(model.parameters())
    assert table_first[0] is model.lm_head.weight
    ready = [*table_first[:0:-1], table_first[0]]
    expected = []
    for size in (25, 50, 100, 200):
        limits = [2**20 * limit for limit in ([1] * (size == DEFAULT_BUCKET_MB) + [size])]
        layout, _ = torch.distributed._compute_bucket_assignment_by_size(ready, limits, [False] * len(ready))
        last = sum(4 * ready[index].numel() for index in layout[-1])
        expected.append((str(size), str(len(layout)), f"{last / 2**20:.0f}"))
    assert [tuple(row.values())[:3] for row in table(DOCUMENT, "bucket_mb")] == expected


def pieces(model: GPT, bucket: int, first_bucket: int) -> int:
    """How many graphs torch.compile makes of the model inside a DDP with buckets of so many bytes."""
    graphs = []

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    tokens_BT = torch.zeros(2, 16, dtype=torch.int64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.compile(model, backend=DDPOptimizer(bucket, keep, first_bucket).compile_fn)(
            tokens_BT, tokens_BT, torch.tensor(0)
        )
    return len(graphs)


def test_the_pieces_are_those_that_torch_compile_cuts() -> None:
    """A model of GPT-2's proportions, and buckets in proportion to its layers of 27 MiB."""
    shape = ModelConfig(n_layer=12, n_head=1, n_embd=64, block_size=16, vocab_size=4192, vocab_multiple=1)
    attention = AttentionConfig(flash_backend="flash_reference", default=AttentionSpec(preset="flash"))
    model = GPT(shape, attention.resolve(shape.n_layer, shape.n_head))
    mebibyte = 12 * shape.n_embd**2 * 4 / 27
    found = [(str(size), str(pieces(model, int(size * mebibyte), int(mebibyte)))) for size in (25, 50, 100, 200)]
    assert [(row["bucket_mb"], row["pieces of the graph"]) for row in table(DOCUMENT, "bucket_mb")] == found
