"""Runs of other recipes: told by their settings, counted nowhere but in their own table."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from test_report import ROOT, write_run
from test_report_claims import CUT, EXPLODED, facts

from analysis import recipe, report_blocks, report_claims, report_documents, report_plots, report_recipes
from analysis.report import Evidence, Facts
from config import load_preset, to_json
from model import MODEL_PRESETS
from scripts import report as script

LR = {"optim.lr": 1e-3}
PAST = 5281
UNSTABLE = {"unstable_since": 6000}


def settings_of(changes: Mapping[str, Any]) -> dict[str, Any]:
    """The sections of the base experiment's config.json, with changes by dotted name; a value of None is taken out."""
    made: dict[str, Any] = to_json(load_preset(str(ROOT / "configs/fast_failure.py")))
    for path, value in changes.items():
        section, name = path.split(".")
        made[section][name] = value
        if value is None:
            del made[section][name]
    return made


def evidence(name: str = "x", attention: str = "flash", seed: int = 42, **changes: Any) -> Evidence:
    """A run of the base recipe without records; ``optim_lr=1e-3`` changes optim.lr."""
    made = settings_of({path.replace("_", ".", 1): value for path, value in changes.items()})
    made["run"]["seed"] = seed
    config = {"config": made, "attention_name": attention, "attention": [{}], "batches": {"seed": 1337}}
    return Evidence(name=name, config=config, records=[])


Pair = tuple[Evidence, Facts]


def pair(changes: Mapping[str, Any], attention: str = "flash", seed: int = 42, **how: Any) -> Pair:
    own = {path.replace(".", "_", 1): value for path, value in changes.items()}
    return evidence("x", attention, seed, **own), facts(**how)


# What a recipe is.


def test_the_base_recipe_is_that_of_the_preset() -> None:
    """Every setting of model and optimiser is of the recipe, or named as one that is not."""
    made = settings_of({})
    named = {f"{section}.{name}" for section in ("model", "optim") for name in made[section]}
    named -= set(recipe.COMPUTED_OTHERWISE)
    named |= {"data.global_batch", "data.sequence_length", "precision.dtype", "precision.tf32", "run.init_from"}
    assert {name: made[name.split(".")[0]][name.split(".")[1]] for name in named} == recipe.BASE
    assert made["run"]["steps"] == recipe.STEPS


def test_published_runs_have_the_recipe_that_the_documents_count() -> None:
    """Those of before this map, by name; records of theirs lack settings of today."""
    runs = {run.name: run for run in script.read_metrics_of(ROOT / script.EVIDENCE).values()}
    base = ("flash", "flash_all_switches", "paper", "sdpa_flash", "fp32_o_seed_2", "switch_at_3300", "only_layer_1")
    assert all(runs[name].has_base_recipe for name in base)
    assert runs["flash"].setting("optim.newton_schulz") is None


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("optim.lr", 1.5e-3, "lr 1.5e-3"),
        ("optim.optimizer", "muon", "Muon"),
        ("optim.warmup_steps", 2000, "warm-up 2,000"),
        ("optim.beta2", 0.99, "optim.beta2 0.99"),
        ("data.global_batch", 64, "64 sequences"),
        ("precision.dtype", "float32", "precision.dtype float32"),
        ("model.n_layer", 24, "24 layers"),
        ("model.qk_norm", True, "QK-norm"),
        ("model.attention_softcap", 50.0, "soft-cap 50"),
        ("model.gated_attention", True, "gated attention"),
        ("model.qk_clip_tau", 100.0, "QK-clip 100"),
        ("model.bias", True, "model.bias True"),
    ],
)
def test_a_setting_of_the_recipe_makes_another(path: str, value: Any, words: str) -> None:
    run = pair({path: value})[0]
    assert not run.has_base_recipe
    assert recipe.words(run.recipe) == words
    assert run.variant != evidence().variant


@pytest.mark.parametrize(
    ("name", "words"), [("gpt2_medium", "GPT-2 medium"), ("gpt2_large", "GPT-2 large"), ("gpt2", "")]
)
def test_a_model_of_a_known_size_is_told_by_its_name(name: str, words: str) -> None:
    size = {f"model.{field}": getattr(MODEL_PRESETS[name], field) for field in ("n_layer", "n_head", "n_embd")}
    assert recipe.words(pair(size)[0].recipe) == words
    assert recipe.words(pair({**size, "optim.lr": 1e-3})[0].recipe) == ", ".join(filter(None, (words, "lr 1e-3")))


@pytest.mark.parametrize(
    "changes", [{"optim.fused": "on"}, {"speed.fused_clip": True}, {"run.steps": 500}, {"data.replay": "r"}]
)
def test_how_it_is_computed_and_how_long_makes_no_other_recipe(changes: dict[str, Any]) -> None:
    assert pair(changes)[0].has_base_recipe


def test_what_a_record_lacks_is_as_it_was() -> None:
    old = evidence(model_gated_attention=None, model_z_loss=None, optim_newton_schulz=None)
    assert old.setting("model.z_loss") is None
    assert old.has_base_recipe
    assert old.variant == evidence().variant


def test_changes_are_told_together() -> None:
    found = evidence(model_qk_norm=True, optim_lr=1e-3, optim_optimizer="muon").recipe
    assert recipe.words(found) == "Muon, lr 1e-3, QK-norm"


# The table.


def quiet(attention: str = "flash_fp32_o", changes: Mapping[str, Any] = LR, **how: Any) -> Pair:
    return pair(changes, attention, **how)


FAILS, FINE, CUT_LATE = pair(LR, **EXPLODED), pair(LR), pair(LR, **CUT)
CUT_EARLY, LEAVES = pair(LR, **CUT | {"last_step": PAST}), pair(LR, **CUT | {"unrest": 3.0})
LATE = pair(LR, exploded_at=7000, is_finished=False, last_step=8000)


@pytest.mark.parametrize(
    ("runs", "verdict"),
    [
        ([FINE, quiet()], "both fine"),
        ([FINE, quiet("flash_delta_from_p")], "both fine"),
        ([CUT_LATE, quiet()], "both fine so far"),
        ([FINE, quiet(**CUT)], "both fine so far"),
        ([FAILS, quiet()], "only BF16 O fails"),
        ([FAILS, quiet(**CUT)], "only BF16 O fails so far"),
        ([pair(LR, **UNSTABLE), quiet()], "only BF16 O fails"),
        # One seed of two, and one control of two.
        ([FAILS, FINE, quiet()], "only BF16 O fails"),
        ([FAILS, CUT_EARLY, quiet()], "only BF16 O fails"),
        ([FAILS, quiet(), quiet("flash_delta_from_p", **EXPLODED)], "both fail"),
        ([FAILS, quiet(**EXPLODED), quiet("flash_delta_from_p")], "both fail"),
        ([FAILS, quiet(**EXPLODED, is_not_finite=True)], "both fail"),
        ([FINE, quiet(**EXPLODED)], "only the control fails"),
        # A run that is missing, was cut too soon or is leaving.
        ([FAILS], "not settled"),
        ([quiet()], "not settled"),
        ([FAILS, quiet("flash_run_b")], "not settled"),
        ([CUT_EARLY, quiet()], "not settled"),
        ([LEAVES, quiet()], "not settled"),
        ([FAILS, quiet(**CUT | {"last_step": PAST})], "not settled"),
        # Planned to be shorter than the base experiment.
        ([FINE, quiet(last_step=PAST)], "not settled"),
        ([FINE, quiet(last_step=PAST + 1)], "both fine so far"),
        # Cut behind the base recipe's explosion, but before the failures of its own.
        ([LATE, quiet(**CUT)], "not settled"),
        ([pair(LR, **UNSTABLE), quiet(**CUT)], "not settled"),
        ([LATE, quiet(**CUT | {"last_step": 7001})], "only BF16 O fails so far"),
    ],
)
def test_a_verdict_is_of_failing_and_control_together(runs: list[Pair], verdict: str) -> None:
    _, one = report_recipes.recipes(runs)
    assert report_recipes.verdict(one, PAST) == verdict


def test_no_short_run_is_fine_where_the_base_recipe_has_not_exploded() -> None:
    for runs, verdict in (([CUT_LATE, quiet()], "not settled"), ([FINE, quiet()], "both fine")):
        _, one = report_recipes.recipes(runs)
        assert report_recipes.verdict(one, None) == verdict


def rows_of(runs: Sequence[Pair], monkeypatch: pytest.MonkeyPatch) -> list[list[list[str]]]:
    """Cells of both tables."""
    by_name = {id(run): found for run, found in runs}
    monkeypatch.setattr(report_recipes, "told", lambda all_runs: [(run, by_name[id(run)]) for run in all_runs])
    text = report_recipes.recipes_table([run for run, _ in runs])
    return [[line.strip("| ").split(" | ") for line in part.splitlines()] for part in text.split("\n\n")]


def test_a_recipe_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    muon = {"optim.optimizer": "muon", "model.gated_attention": True}
    made = [
        pair(muon, w_q={1000: 3.0, 3000: 4.0}, logit={1000: 50.0}, departed_at=2345),
        quiet("sdpa_flash", muon),
        quiet("flash_run_a", {}),
        pair({}, seed=1, **EXPLODED),
        *(quiet("flash_delta_from_p", {}, seed=seed) for seed in (1, 2)),
        quiet(),
    ]
    names = ("muon", "muon_sdpa", "run_a", "flash", "delta_from_p", "delta_from_p_seed_2", "lr_1e-3_fp32_o")
    made = [(dataclasses.replace(run, name=name), how) for name, (run, how) in zip(names, made, strict=True)]
    table, failing = rows_of(made, monkeypatch)
    assert table[0][:5] == ["optimiser", "lr", "warm-up", "sequences a step", "further changes"]
    # Attentions that the base recipe alone was run with have no column.
    assert table[0][5:] == ["`flash`", "`flash_delta_from_p`", "`flash_fp32_o`", "`sdpa_flash`", "verdict"]
    end, none = "quiet to its end, 13,000 steps", "not run"
    base = ["1 run: exploded at 5,000", f"2 runs: {end} (seeds 1, 2)", none, none, "only BF16 O fails"]
    assert table[2:] == [
        ["AdamW", "2e-3", "1,000", "32", "-", *base],
        ["AdamW", "1e-3", "1,000", "32", "-", none, none, f"1 run: {end}", none, "not settled"],
        ["Muon", "2e-3", "1,000", "32", "gated attention", f"1 run: {end}", none, none, f"1 run: {end}", "not settled"],
    ]
    assert failing[2:] == [
        ["base", "flash", *"----"],
        ["Muon, gated attention", "muon", "2,345", "3.00", "4.00", "50.0"],
    ]


def test_runs_that_were_switched_belong_to_no_recipe() -> None:
    switched = evidence("y", optim_lr=1e-3, alarm_switches=["3000:1:flash_fp32_o"])
    assert [one.changes for one in report_recipes.recipes([(switched, facts())])] == [()]


# What is counted.


def altered(run: Evidence, number: int) -> Evidence:
    """A published run as one of another recipe, larger in all that ranges and extremes are taken of."""
    content: dict[str, Any] = copy.deepcopy(dict(run.config))
    content["config"]["optim"]["lr"] = 1e-3
    content["config"]["run"]["seed"] = 1000 + number
    factors = {"max_logit": 9.0, "delta_error_mean": 1e4, "delta_error_rms": 7.0}
    heads = [{name: value * factors.get(name, 1.0) for name, value in row.items()} for row in run.heads]
    records = [
        {name: value * 9.0 if name.startswith("max_logit_") else value for name, value in row.items()}
        | ({"grad_norm": row["grad_norm"] * (1 + row["step"] ** 2 / 1e6)} if "grad_norm" in row else {})
        for row in run.records
    ]
    return dataclasses.replace(run, name=f"lr_{number}", config=content, records=records, heads=heads)


@pytest.fixture(scope="module")
def published() -> list[Evidence]:
    return [run for run in script.read_evidence(ROOT / script.EVIDENCE) if run.has_base_recipe]


COPIED = (
    "flash",
    "run_a",
    "fp32_pv",
    "sdpa_flash",
    "fp32_o",
    "delta_from_p",
    "run_b",
    "switch_at_3300",
    "stable_beta_2",
)
Made = tuple[dict[str, str], dict[str, str]]


@pytest.fixture(scope="module")
def beside(published: list[Evidence]) -> tuple[Made, Made]:
    """Blocks and numbers of the published runs, and of them with runs of another recipe beside."""
    asked = report_claims.parse_asked((ROOT / script.ASKED).read_text())
    chosen = [altered(run, number) for number, run in enumerate(published) if run.name in COPIED]
    assert len(chosen) == len(COPIED)
    return report_documents.made(published, [], asked), report_documents.made([*published, *chosen], [], asked)


def test_no_number_of_the_documents_is_of_another_recipe(beside: tuple[Made, Made]) -> None:
    (_, before), (_, after) = beside
    assert {name: (value, after[name]) for name, value in before.items() if after[name] != value} == {
        "other_recipes": ("0", str(len(COPIED)))
    }


def test_runs_of_another_recipe_are_in_the_tables_of_all_runs_and_in_their_own(beside: tuple[Made, Made]) -> None:
    (before, _), (after, _) = beside
    assert {name for name, text in before.items() if after[name] != text} == {"runs", "asked", "recipes"}


def test_a_run_of_another_recipe_has_the_numbers_of_one_run(
    beside: tuple[Made, Made], published: list[Evidence]
) -> None:
    _, (_, values) = beside
    number = next(i for i, run in enumerate(published) if run.name == "flash")
    names = ("exploded", "w_q@3000", "outcome", "crossed", "late_norm")
    assert all(values[f"lr_{number}.{name}"] for name in names)


def test_the_table_of_runs_says_what_differs(published: list[Evidence]) -> None:
    runs = [run for run in published if run.name in ("flash", "fp32_o")]
    for chosen, cells in ((runs, []), ([*runs, altered(runs[0], 7)], ["-", "lr 1e-3", "-"])):
        heads, _, *rows = [
            line.split(" | ") for line in report_blocks.runs_table(report_blocks.told(chosen)).splitlines()
        ]
        assert [row[heads.index("recipe")] for row in rows if "recipe" in heads] == cells


# Verdicts on claims.


def test_a_cut_run_is_held_against_the_failing_one_of_its_recipe() -> None:
    asked = {"flash": "", "fp32_o": "", "lr_1e-3": "", "lr_1e-3_delta_from_p": ""}
    control = dataclasses.replace(quiet("flash_delta_from_p", **CUT)[0], name="lr_1e-3_delta_from_p"), facts(**CUT)
    made = [(evidence("flash"), facts(**EXPLODED)), (evidence("fp32_o", "flash_fp32_o"), facts(**CUT)), control]
    for how, verdict in (
        (None, "not settled"),
        ({}, "not settled"),
        (EXPLODED, "agrees so far"),
        (EXPLODED | {"exploded_at": 6000}, "not settled"),
    ):
        own = [] if how is None else [(evidence("lr_1e-3", optim_lr=1e-3), facts(**how))]
        found = report_claims.values(report_claims.groups([*made, *own], asked))
        assert (found["lr_1e-3_delta_from_p.verdict"], found["fp32_o.verdict"]) == (verdict, "agrees so far")


def test_a_seed_of_another_recipe_is_no_seed_of_the_variant() -> None:
    runs = [(evidence("flash"), facts()), (evidence("flash_seed_1", seed=1, optim_lr=1e-3), facts(**EXPLODED))]
    runs.append((evidence("flash_seed_2", seed=2), facts()))
    found = {group.name: [run.name for run, _ in group.runs] for group in report_claims.groups(runs, {"flash": ""})}
    assert found == {"flash": ["flash", "flash_seed_2"], "flash_seed_1": ["flash_seed_1"]}


# From run folders to pictures.


def with_settings(folder: Path, changes: Mapping[str, Any]) -> Path:
    """A run of ``write_run`` with the settings of the base experiment and changes, but for the shape of its model."""
    content = json.loads((folder / "config.json").read_text())
    shape, steps = content["config"]["model"], content["config"]["run"]
    content["config"] = settings_of(changes)
    content["config"]["model"] |= {name: shape[name] for name in shape if name != "qk_norm"}
    content["config"]["run"] |= steps
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def test_a_recipe_has_a_colour_and_an_attention_its_dashes(tmp_path: Path) -> None:
    runs = {name: write_run(tmp_path / "runs" / name) for name in ("flash", "fixed", "muon", "muon_fixed")}
    for name, run in runs.items():
        with_settings(run, {"optim.optimizer": "muon"} if name.startswith("muon") else {})
        content = json.loads((run / "config.json").read_text())
        content["attention_name"] = "flash_delta_from_p" if name.endswith("fixed") else "flash"
        (run / "config.json").write_text(json.dumps(content))
    script.main(["collect", str(tmp_path / "runs"), "--out", str(tmp_path / "out")])
    look = report_plots.looks_by_recipe(report_blocks.told(script.read_evidence(tmp_path / "out")))
    colours, dashes = ({name: one[key] for name, one in look.items()} for key in ("color", "linestyle"))
    assert colours["flash"] == colours["fixed"] != colours["muon"] == colours["muon_fixed"]
    assert dashes["flash"] == dashes["muon"] != dashes["fixed"] == dashes["muon_fixed"]


def test_runs_of_other_recipes_are_collected_and_drawn_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other pictures are of the base recipe, also where a run of another has a name of its variants."""
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 8, "block_size": 8, "vocab_size": 256}
    monkeypatch.setattr(recipe, "BASE", recipe.BASE | {f"model.{name}": size for name, size in shape.items()})
    runs = tmp_path / "runs"
    with_settings(write_run(runs / "flash", explodes_at=1000), {})
    with_settings(write_run(runs / "flash_seed_7", seed=7), LR)
    with_settings(write_run(runs / "muon"), {"optim.optimizer": "muon"})
    with_settings(write_run(runs / "gated"), {"model.gated_attention": True})
    script.main(["collect", str(runs), "--out", str(tmp_path / "out")])
    drawn: dict[str, list[str]] = {}
    monkeypatch.setattr(
        report_plots, "draw", lambda runs, _, path, **__: drawn.update({path.name: [run.name for run, _ in runs]})
    )
    script.main(["plots", "--out", str(tmp_path / "out")])
    of_base = {name: ["flash"] for name in ("curves.png", "failing_and_fixed.png", "two_explanations.png")}
    assert drawn == of_base | {"other_recipes.png": ["flash", "gated", "flash_seed_7", "muon"]}
