"""results/microcosm/coarse_p.md: its tables are what coarse_p.csv and own_error.csv make, its commands the attentions that it names."""

from __future__ import annotations

import csv
import shlex

import pytest
from prose import prose
from test_docs import ROOT, blocks, table

import config as configuration
from analysis import curves, report
from attention.numerics import numerics_from_key

FOLDER = ROOT / "results/microcosm"
DOCUMENT = FOLDER / "coarse_p.md"
SEEDS = (42, 1, 2, 3, 4)
LARGE = 100.0
"""A logit that is far above those of the controls."""
LAST = 6000
Line = dict[str, float]


def runs(variant: str) -> list[list[Line]]:
    """Its lines, seed by seed."""
    with (FOLDER / "coarse_p.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.pop("run") == variant]
    lines = [{name: float(cell) for name, cell in row.items() if cell} for row in rows]
    return [[line for line in lines if line["seed"] == seed] for seed in SEEDS]


def largest(line: Line, name: str) -> float:
    return max(line[f"{name}_{layer}"] for layer in (0, 1))


def probes(run: list[Line]) -> list[Line]:
    return [line for line in run if "w_q_norm_0" in line]


def explosion(run: list[Line]) -> int | None:
    losses = [(int(line["step"]), line["train_loss"]) for line in run if "train_loss" in line]
    steps, values = zip(*losses, strict=True)
    return curves.explosion_step(values, patience=report.PATIENCE, steps=steps)


def most(variant: str) -> list[float]:
    """The largest logit of each run."""
    return [max(largest(p, "max_logit") for p in probes(run)) for run in runs(variant)]


def first_large(run: list[Line]) -> int:
    """The first probe beyond ``LARGE``; behind the end where there is none."""
    return next((int(p["step"]) for p in probes(run) if largest(p, "max_logit") > LARGE), LAST + 1)


def last_losses(variant: str) -> list[float]:
    return [next(line["val_loss"] for line in run if line["step"] == LAST) for run in runs(variant)]


def measured(variant: str) -> dict[str, str]:
    """The cells that the file makes."""
    ends = [next(line for line in run if line["step"] == LAST) for run in runs(variant)]
    large = [first_large(run) for run in runs(variant)]
    exploded = [explosion(run) for run in runs(variant)]
    return {
        "exploded": f"{len(exploded) - exploded.count(None)} of {len(exploded)}",
        "logit above 100 at": ", ".join("-" if step > LAST else str(step) for step in large),
        "largest logit": ", ".join(f"{logit:.0f}" for logit in most(variant)),
        "W_Q norm at 6,000": ", ".join(f"{largest(end, 'w_q_norm'):.1f}" for end in ends),
        "validation loss after 6,000 steps": ", ".join(f"{loss:.2f}" for loss in last_losses(variant)),
    }


def options() -> dict[str, str]:
    """Variant -> what train.py is given for it beside steps and seeds, from the document."""
    return dict(line.split(": ", maxsplit=1) for line in blocks(DOCUMENT, "")[0].splitlines())


@pytest.mark.parametrize("row", table(DOCUMENT, "variant"), ids=lambda row: row["variant"])
def test_the_table_is_that_of_its_file(row: dict[str, str]) -> None:
    made = measured(row["variant"].strip("`"))
    assert {name: row[name] for name in made} == made


def test_every_run_of_the_file_is_in_the_table_and_went_to_its_end() -> None:
    with (FOLDER / "coarse_p.csv").open(newline="") as file:
        names = {row["run"] for row in csv.DictReader(file)}
    assert names == {row["variant"].strip("`") for row in table(DOCUMENT, "variant")} == set(options())
    assert all(run[-1]["step"] == LAST for name in names for run in runs(name))


def test_the_pairs_differ_in_delta_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    numerics = {}
    for name, flags in options().items():
        config = configuration.load(["configs/quickstart.py", *shlex.split(flags)])
        plans = config.attention.resolve(config.model.n_layer, config.model.n_head)
        (numerics[name],) = {numerics_from_key(group.numerics) for plan in plans for group in plan.groups}
    for name in ("coarse_p", "coarse_p_stochastic"):
        own, control = numerics[name], numerics[f"{name}_delta_from_p"]
        assert (own.probabilities, own.output, own.delta) == ("m1", "fp32", "rowsum_do_o")
        assert control.differences(own) == ("delta=rowsum_p_dp",)
    drawn = numerics["coarse_p_stochastic"].differences(numerics["coarse_p"])
    assert drawn == ("probabilities_rounding=stochastic",)
    for name, output, rounding in (("b", "m1", "nearest"), ("c", "fp32", "nearest"), ("d", "m1", "stochastic")):
        apart = numerics[f"run_{name}_fp32_pv"]
        assert (apart.probabilities, apart.output) == ("fp32", output)
        assert (apart.delta_output, apart.delta_rounding) == ("m1", rounding)


def test_what_it_says_is_in_the_file() -> None:
    text = prose(DOCUMENT)
    grown = [large for name in ("coarse_p", "coarse_p_stochastic") for large in most(name)]
    low, high = min(grown), max(grown)
    assert f"on ten runs of ten, to {low:.0f} - {high:.0f}" in text
    controls = [name for name in options() if name.endswith("delta_from_p")]
    assert max(large for name in controls for large in most(name)) < 40
    for name in ("coarse_p", "coarse_p_stochastic"):
        pairs = zip(last_losses(name), last_losses(f"{name}_delta_from_p"), strict=True)
        assert min(own - control for own, control in pairs) > 0.12
    firsts = [[first_large(run) for run in runs(name)] for name in ("coarse_p", "coarse_p_stochastic")]
    assert all(drawn < nearest for nearest, drawn in zip(*firsts, strict=True))
    apart = {
        (name, seed): large for name in "bcd" for seed, large in zip(SEEDS, most(f"run_{name}_fp32_pv"), strict=True)
    }
    assert {run for run, large in apart.items() if large > LARGE} == {("b", 4)}
    assert f"The one here, B on seed 4, comes to {apart['b', 4]:.0f}, in one head of layer 0" in text


def largest_on_more_seeds() -> dict[str, dict[str, dict[int, float]]]:
    """own_error.csv: variant -> seed -> largest logit by step."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    with (FOLDER / "own_error.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            logit = max(float(row[f"max_logit_{layer}"]) for layer in (0, 1))
            found.setdefault(row["run"], {}).setdefault(row["seed"], {})[int(row["step"])] = logit
    return found


def test_the_table_of_more_seeds_is_that_of_its_file() -> None:
    found = largest_on_more_seeds()
    rows = {row["run"].split(":")[0]: row for row in table(DOCUMENT, "run")}
    assert list(rows) == list(found)
    for variant, row in rows.items():
        runs_there = found[variant]
        assert all(list(logits) == list(range(0, 3001, 100)) for logits in runs_there.values())
        seeds = [str(seed) for seed in range(5, 20)] if row["seeds"] == "5 to 19" else row["seeds"].split(", ")
        assert list(runs_there) == seeds
        grown = {seed: logits for seed, logits in runs_there.items() if max(logits.values()) > LARGE}
        firsts = [next(step for step, logit in logits.items() if logit > LARGE) for logits in grown.values()]
        made = [list(grown), firsts, [f"{max(logits.values()):.0f}" for logits in grown.values()]]
        cells = [", ".join(map(str, cell)) or "-" for cell in made]
        cells.append(f"{max(max(logits.values()) for seed, logits in runs_there.items() if seed not in grown):.0f}")
        assert list(row.values())[2:] == cells


def test_what_it_says_of_more_seeds_is_in_the_file() -> None:
    found = largest_on_more_seeds()
    grown = {(name, seed) for name, of in found.items() for seed, logits in of.items() if max(logits.values()) > LARGE}
    assert grown == {("run_b_fp32_pv", "6"), ("run_b_fp32_pv", "17"), ("run_d_fp32_pv", "6")}
    assert max(found["run_c_fp32_pv"], key=lambda seed: max(found["run_c_fp32_pv"][seed].values())) == "6"
    b = found["run_b_fp32_pv"]
    assert b["17"][3000] < 30
    assert b["6"][3000] == max(b["6"].values())
    assert "three runs of B in twenty, one of D, none of C" in prose(DOCUMENT)
    assert "such an error makes logits grow in four of sixty runs" in prose(ROOT / "docs/reproduction.md")
