"""The numbers of docs/throughput.md are those of results/throughput."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
import re
import statistics
from typing import Any

import pytest
import torch
from test_docs import ROOT, blocks, table
from torch._dynamo.backends.distributed import DDPOptimizer

import config as configuration
from attention import AttentionConfig, AttentionSpec
from model import GPT, MODEL_PRESETS, ModelConfig
from training.distributed import DEFAULT_BUCKET_MB

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


def profile(name: str) -> list[str]:
    """The lines of one variant's profile."""
    text = (RESULTS / "kernels.txt").read_text()
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


SCALING = {
    "B": "scaling_2.json",
    "C": "scaling_2_in_place.json",
    "D": "scaling_4.json",
    "E": "scaling_4_64.json",
    "F": "scaling_4_muon.json",
}


def scaling(name: str) -> dict[str, list[dict[str, Any]]]:
    """Of the one round of a measurement: the GPUs alone, then each variant."""
    (measured,) = json.loads((RESULTS / SCALING[name]).read_text())["rounds"]
    return {"alone": measured["alone"]} | {variant: [found] for variant, found in measured["variants"].items()}


def rates(name: str) -> dict[str, float]:
    """Tokens/s of all alone together, and of each variant."""
    if name in SCALING:
        return {variant: sum(run["tokens_per_second"] for run in runs) for variant, runs in scaling(name).items()}
    with (RESULTS / "scaling.csv").open(newline="") as file:
        lines = [line for line in csv.DictReader(file) if int(line["step"]) > 30]
    one, two = (
        statistics.median(float(line["tokens_per_second"]) for line in lines if line["run"] == f"scale_{gpus}")
        for gpus in (1, 2)
    )
    return {"alone": 2 * one, "overlap": two}


def step_ms(name: str, variant: str) -> list[float]:
    """Every step of a variant, or of all GPUs alone; none where they were not kept."""
    return [] if name not in SCALING else [ms for run in scaling(name)[variant] for ms in run.get("step_ms", [])]


def mean_ms(name: str, variant: str, gpus: int = 2) -> float:
    tokens = (64 if name == "E" else 32) * 1024  # of a GPU's step
    return 1000 * gpus * tokens / rates(name)[variant]


def of_slowest(name: str, variant: str) -> str:
    """Of as many times the slowest GPU alone; not for those alone, nor where one GPU alone was measured."""
    if variant == "alone" or name not in SCALING:
        return ""
    alone = [run["tokens_per_second"] for run in scaling(name)["alone"]]
    return f"{100 * rates(name)[variant] / (len(alone) * min(alone)):.1f} %"


def spread_of(steps: list[float]) -> str:
    if not steps:
        return ""
    tenths = statistics.quantiles(steps, n=10, method="inclusive")
    return f"{statistics.median(steps):.1f} ({tenths[0]:.1f} - {tenths[-1]:.1f}), {max(steps):.1f}"


@pytest.mark.parametrize(("name", "gpus"), [("A", 2), ("B", 2), ("C", 2), ("D", 4), ("E", 4), ("F", 4)])
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


def words_of() -> str:
    """The document, its lines joined."""
    return " ".join(DOCUMENT.read_text().split())


def test_several_gpus_make_so_many_times_the_tokens_of_one() -> None:
    def times(gpus: int, names: str) -> list[str]:
        found = [(rates(name), variant) for name in names for variant in rates(name) if variant != "alone"]
        return sorted({f"{gpus * rate[variant] / rate['alone']:.2f}" for rate, variant in found})

    (least, *_, most), (four,), (larger,) = times(2, "ABC"), times(4, "D"), times(4, "E")
    said = f"Two GPUs made {least} to {most} times the tokens of one, four {four} times and, at 64 x 1024, {larger};"
    assert said in words_of()


def test_what_was_reached_of_what_was_asked_is_said_of_both_bases() -> None:
    reached = {name: (rates(name)["in_place"] / rates(name)["alone"], of_slowest(name, "in_place")) for name in "DE"}
    (d, of_d), (e, of_e) = reached.values()
    assert f"{100 * d:.1f} % of four GPUs at 32 x 1024, {100 * e:.1f} % at 64 x 1024" in words_of()
    assert f"they are {of_d} and {of_e}: one round each" in words_of()
    # "Of the sum of those alone no round has reached it": F is another optimiser's.
    assert (
        max(rate / rates(name)["alone"] for name in "ABCDE" for v, rate in rates(name).items() if v != "alone") < 0.97
    )


def test_the_steps_timed_are_as_many_as_is_said() -> None:
    for name in SCALING:
        counts = sorted({run["steps"] for runs in scaling(name).values() for run in runs})
        said = {1: f"[{counts[0]}]", 2: f"[{counts[0]} or {counts[-1]}]"}
        assert (
            f"{said.get(len(counts), f'[{counts[0]} to {counts[-1]}]')}(../results/throughput/{SCALING[name]})"
            in words_of()
        )


def test_two_gpus_had_two_speeds() -> None:
    steps = sorted(mean_ms(name, variant) for name in "BC" for variant in rates(name) if variant != "alone")
    gaps = [b - a for a, b in itertools.pairwise(steps)]
    cut = gaps.index(max(gaps)) + 1
    fast, slow = steps[:cut], steps[cut:]
    said = f"takes {fast[0]:.1f} to {fast[-1]:.1f} ms or {slow[0]:.1f} to {slow[-1]:.1f}, about"
    assert said in words_of()
    assert f"about {statistics.mean(slow) - statistics.mean(fast):.0f} ms more" in words_of()


def test_no_step_of_four_gpus_is_a_slow_one() -> None:
    """Slow would be 8 ms above the median; half of that is the line."""
    variants = [step_ms("D", variant) for variant in ("in_place", "plain")]
    steps = [ms for each in variants for ms in each]
    said = re.search(
        r"none of the (\d+) steps of its two variants is a slow one, the longest takes ([\d.]+) ms", words_of()
    )
    assert said is not None
    assert said.groups() == (str(len(steps)), f"{max(steps):.1f}")
    assert max(steps) < min(statistics.median(each) for each in variants) + 4


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
    alone = [statistics.median(run["step_ms"]) for run in scaling("F")["alone"]]
    gain = 100 * rates("F")["in_place"] / rates("F")["alone"]
    together, apart = (mean_ms("F", variant, 4) for variant in ("in_place", "alone"))
    assert f"make {gain:.0f} % of the tokens of the four alone, one round" in words_of()
    assert f"a step of {together:.1f} ms in place of {apart:.1f};" in words_of()
    assert f"longest and shortest medians alone, {max(alone):.1f} and {min(alone):.1f} ms" in words_of()


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


def test_the_clock_beside_the_rounds() -> None:
    with (RESULTS / "clocks_64.csv").open(newline="") as file:
        busy = [row for row in csv.DictReader(file) if float(row["watt"]) > 600]
    clock, power = (statistics.median(float(row[name]) for row in busy) for name in ("sm_mhz", "watt"))
    assert f"a median of {clock:,.0f} MHz of 1,980, at a median of {power:.0f} W of 700" in DOCUMENT.read_text()


def test_no_file_names_a_folder_of_a_machine() -> None:
    texts = {path.name: path.read_text() for path in RESULTS.iterdir()}
    assert [name for name, text in texts.items() if re.search(r"(?<![\w.])/(root|tmp|home|work|opt)/", text)] == []
