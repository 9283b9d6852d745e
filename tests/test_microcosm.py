"""results/microcosm: the tables and numbers of seeds.md and ablations.md are those of the files beside them."""

from __future__ import annotations

import csv
import shlex
from functools import cache

import pytest
from prose import prose
from test_docs import ROOT, blocks, table

import config as configuration
from analysis import curves
from analysis.report_claims import PAPER, SELF_CORRELATION
from attention.numerics import numerics_from_key
from attention.plan import AttentionSpec
from config import TrainConfig

FOLDER = ROOT / "results/microcosm"
ABLATIONS = FOLDER / "ablations.md"
SEEDS = (42, 1, 2, 3, 4)
LARGE = 10.0
"""A W_Q norm that no quiet run reaches."""
LAYERS = (0, 1)
Probe = dict[str, float]


@cache
def probes(run: str, last: int) -> list[Probe]:
    """The lines of FOLDER/``run``.csv up to step ``last``, without the cells that are empty."""
    with (FOLDER / f"{run}.csv").open(newline="") as file:
        lines = [{name: float(cell) for name, cell in line.items() if cell} for line in csv.DictReader(file)]
    return [line for line in lines if line["step"] <= last]


@cache
def validation() -> dict[tuple[str, int], float]:
    with (FOLDER / "validation.csv").open(newline="") as file:
        return {(line["run"], int(line["step"])): float(line["val_loss"]) for line in csv.DictReader(file)}


def runs(variant: str) -> list[str]:
    """Its runs that are there, seeds in the order of the documents."""
    folder = "seeds" if variant.startswith("flash") else "ablations"
    names = [f"{folder}/{variant}_s{seed}" for seed in SEEDS]
    return [name for name in names if (FOLDER / f"{name}.csv").exists()]


def explosion(run: str, last: int) -> int | None:
    records = [{"step": int(line["step"]), "train_loss": line.get("train_loss")} for line in probes(run, last)]
    steps, losses = curves.column(records, "train_loss")
    return curves.explosion_step(losses, patience=50, steps=steps)


def large_from(run: str, last: int) -> int | None:
    """First of the probes every 50 steps that sees a W_Q norm above ``LARGE``."""
    found = (int(p["step"]) for p in probes(run, last) if max(p["w_q_norm_0"], p["w_q_norm_1"]) > LARGE)
    return next((step for step in found if step % 50 == 0), None)


def each(values: list[int | None]) -> str:
    return ", ".join("-" if value is None else str(value) for value in values)


def span(values: list[float]) -> str:
    low, high = f"{min(values):.1f}", f"{max(values):.1f}"
    return low if len(values) == 1 else f"{low} - {high}"


def norms(variant: str, last: int, layers: tuple[int, ...]) -> str:
    """Over the runs, smallest and largest of the largest W_Q norm in these layers."""
    return span([max(p[f"w_q_norm_{layer}"] for p in probes(run, last) for layer in layers) for run in runs(variant)])


def measured(variant: str, last: int) -> dict[str, str]:
    """The cells that its files make."""
    at = [explosion(run, last) for run in runs(variant)]
    return {
        "exploded": f"{len(at) - at.count(None)} of {len(at)}",
        "at step": each(at),
        "W_Q norm above 10 at": each([large_from(run, last) for run in runs(variant)]),
        f"validation loss after {last:,} steps": ", ".join(f"{validation()[run, last]:.2f}" for run in runs(variant)),
        "largest W_Q norm": norms(variant, last, LAYERS),
        **{f"largest W_Q norm, layer {layer}": norms(variant, last, (layer,)) for layer in LAYERS},
    }


def check(row: dict[str, str], variant: str, last: int) -> None:
    """Every cell of the row that files can make is what they make."""
    made = measured(variant, last)
    assert len(row.keys() & made.keys()) >= 4
    assert {name: cell for name, cell in row.items() if name in made} == {
        name: made[name] for name in row if name in made
    }


def options() -> dict[str, str]:
    """Variant -> what train.py is given for it beside steps and seeds, from the document."""
    lines = [line for line in blocks(ABLATIONS, "")[0].splitlines() if not line.startswith("#")]
    return dict(line.split(": ", maxsplit=1) for line in lines)


def load(variant: str) -> TrainConfig:
    return configuration.load(["configs/quickstart.py", *shlex.split(options()[variant])])


@pytest.mark.parametrize("row", table(FOLDER / "seeds.md", "preset"), ids=lambda row: row["preset"])
def test_the_table_of_seeds_is_that_of_its_files(row: dict[str, str]) -> None:
    assert len(runs(row["preset"])) == len(SEEDS)
    check(row, row["preset"], 1000)


@pytest.mark.parametrize("row", table(ABLATIONS, "variant"), ids=lambda row: row["variant"])
def test_the_table_of_ablations_is_that_of_its_files(row: dict[str, str]) -> None:
    check(row, row["variant"], 1000)


def test_the_longer_runs_are_as_their_files_say() -> None:
    (row,) = table(ABLATIONS, "run to step 2,000")
    check(row, row["run to step 2,000"], 2000)


def test_every_file_is_in_a_row_and_has_its_options() -> None:
    variants = [row["variant"] for row in table(ABLATIONS, "variant")]
    ours = {path.stem.rsplit("_s", maxsplit=1)[0] for path in (FOLDER / "ablations").iterdir()}
    assert ours == {name for name in variants if not name.startswith("flash")} == set(options())
    files = {f"{folder}/{path.stem}" for folder in ("seeds", "ablations") for path in (FOLDER / folder).iterdir()}
    assert {run for run, step in validation() if step == 1000} == files


def test_what_is_expected_is_what_the_report_expects() -> None:
    rows = table(ABLATIONS, "variant")
    for column, expected in (("the paper expects", PAPER), ("self-correlation expects", SELF_CORRELATION)):
        names = [row["variant"].removeprefix("flash_") for row in rows]
        assert [row[column] for row in rows] == [expected.get(name, "-") for name in names]


def test_what_differs_is_what_a_preset_changes() -> None:
    rows = {row["variant"]: row["what differs from flash"] for row in table(ABLATIONS, "variant")}
    base = AttentionSpec(preset="flash", numerics="microcosm").resolve()
    presets = [
        (name, text.split()) for name, text in options().items() if text.startswith("--attention.default.preset")
    ]
    assert len(presets) >= 5
    for name, (_, preset) in presets:
        assert rows[name] == ", ".join(AttentionSpec(preset=preset, numerics="microcosm").resolve().differences(base))


def test_o_is_rounded_to_one_bit_in_every_layer_of_every_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for variant in options():
        config = load(variant)
        plans = config.attention.resolve(config.model.n_layer, config.model.n_head)
        sites = [numerics_from_key(group.numerics) for plan in plans for group in plan.groups]
        assert {(n.output, n.output_rounding) for n in sites} == {("m1", "nearest")}, variant


def test_a_run_without_tiles_is_the_failing_one() -> None:
    untiled = AttentionSpec(preset="flash_untiled", numerics="microcosm").resolve()
    assert untiled == AttentionSpec(preset="flash", numerics="microcosm").resolve()


def test_what_is_said_of_the_switches_is_in_the_files() -> None:
    grew, before = [], []
    for step in (350, 450, 550):
        for run in runs(f"switch_at_{step}"):
            norm = {int(p["step"]): max(p["w_q_norm_0"], p["w_q_norm_1"]) for p in probes(run, 1000)}
            before.append((step, norm[step]))
            grew.append((step, norm[1000] / norm[step]))
    text = prose(ABLATIONS)
    for step in (350, 450, 550):
        held, factors = ([value for at, value in found if at == step] for found in (before, grew))
        assert (
            f"at {step} it was {span(held)}, and by 1,000 {min(factors):.2f} to {max(factors):.2f} times that" in text
        )


def above_control(variant: str) -> list[float]:
    """Validation loss after 1,000 steps less that of ``flash_delta_from_p``, to the digits of the table."""
    at = {run.rsplit("_s", maxsplit=1)[1]: round(validation()[run, 1000], 2) for run in runs("flash_delta_from_p")}
    return [round(validation()[run, 1000], 2) - at[run.rsplit("_s", maxsplit=1)[1]] for run in runs(variant)]


def test_distances_from_the_control_are_those_of_the_files() -> None:
    text = prose(ABLATIONS)
    layer_0, norm = above_control("all_but_layer_1"), above_control("qk_norm")
    assert f"a loss {min(layer_0):.2f} to {max(layer_0):.2f} above the control's" in text
    assert f"on all, by {min(norm):.2f} to {max(norm):.2f}" in text
    first, second, third = (above_control(f"switch_at_{step}") for step in (350, 450, 550))
    assert f"at most {max(first):.2f} above the control's loss" in text
    assert f"at 450 and 550 at most {max(second):.2f} and {max(third):.2f} above it" in text
    assert all(early < late for early, late in zip(second, third, strict=True))
    clipped, capped = above_control("qk_clip"), above_control("softcap")
    assert f"its loss is {min(clipped):.2f} to {max(clipped):.2f} above the control's" in text
    assert f"The loss is {min(capped):.2f} to {max(capped):.2f} above the control's" in text
    apart = [a - b for a, b in zip(above_control("qk_norm"), above_control("qk_norm_delta_from_p"), strict=True)]
    assert sum(difference > 0.005 for difference in apart) == 3
    assert f"above on three seeds of five (by up to {max(apart):.2f})" in text


def test_distances_in_steps_are_those_of_the_files() -> None:
    text = prose(ABLATIONS)
    flash, pv = ([large_from(run, 1000) or 0 for run in runs(variant)] for variant in ("flash", "fp32_pv"))
    later = [b - a for a, b in zip(flash, pv, strict=True)]
    assert f"W_Q leaves {min(later)} to {max(later)} steps later than in" in text
    assert f"Switched at 350, {min(flash) - 350} to {max(flash) - 350} steps before" in text
    pairs = [
        (explosion(run.replace("ablations/gated", "seeds/flash"), 1000), explosion(run, 1000)) for run in runs("gated")
    ]
    earlier = [flash - gated for flash, gated in pairs if flash is not None and gated is not None]
    assert f"it does so {min(earlier)} to {max(earlier)} steps earlier" in text
    muon = runs("muon")
    adamw = [run.replace("ablations/muon", "seeds/flash") for run in muon]
    steps = [each([explosion(run, 1000) for run in names]) for names in (muon, adamw)]
    assert f"({steps[0]} against {steps[1]})" in text


def largest_logit(variant: str) -> float:
    return max(probe[f"max_logit_{layer}"] for run in runs(variant) for probe in probes(run, 1000) for layer in LAYERS)


def test_what_is_said_of_the_models_own_stabilisers_is_in_the_files() -> None:
    text = prose(ABLATIONS)
    assert (
        f"largest logit is {largest_logit('qk_norm'):.0f} against {largest_logit('qk_norm_delta_from_p'):.1f}" in text
    )
    assert max(largest_logit(f"gated_{control}") for control in ("delta_from_p", "fp32_o")) < 54
    assert f"and comes to {norms('softcap', 1000, LAYERS)}, in both layers above 10" in text
    assert all(float(norms("softcap", 1000, (layer,)).split(" ")[0]) > LARGE for layer in LAYERS)
    assert float(norms("softcap_delta_from_p", 1000, LAYERS).rsplit(" ", maxsplit=1)[1]) < 5.2
    pairs = zip(runs("softcap"), runs("flash"), strict=True)
    assert all((large_from(capped, 1000) or 0) > (large_from(plain, 1000) or 0) for capped, plain in pairs)
    safe, plain = ([explosion(run, 1000) for run in runs(variant)] for variant in ("stable_safe", "flash"))
    assert sum(a is not None and (b is None or a < b) for a, b in zip(safe, plain, strict=True)) == 3


def test_what_is_said_of_single_layers_is_in_the_files() -> None:
    text = prose(ABLATIONS)
    norm = norms("fp32_pv", 2000, (1,)).rsplit(" ", maxsplit=1)[1]
    assert f"here W_Q of layer 1 is at most {norm} by step 2,000" in text
    passed = [any(probe["w_q_norm_1"] > LARGE for probe in probes(run, 1000)) for run in runs("flash_run_a")]
    assert f"W_Q of layer 1 passes 10 on {sum(passed)} of {len(passed)} seeds" in text
    logit = max(probe["max_logit_0"] for run in runs("all_but_layer_1") for probe in probes(run, 1000))
    assert (
        f"W_Q norms of {norms('all_but_layer_1', 1000, (0,))}, more than in `flash`, logits up to {round(logit, -3):,.0f}"
        in text
    )


def test_the_controls_stay_below_the_norm_that_is_said() -> None:
    controls = ("flash_fp32_o", "flash_delta_from_p", "fp32_pv_o", "recompute_o", "standard")
    largest = max(
        max(p["w_q_norm_0"], p["w_q_norm_1"]) for name in controls for run in runs(name) for p in probes(run, 1000)
    )
    assert largest < 6 < LARGE
    assert "In the quiet controls W_Q stays below 6" in prose(ABLATIONS)
