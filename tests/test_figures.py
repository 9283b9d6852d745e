"""Figures: each from a tiny real run, their numbers on captures and curves with known answers, the published pictures and tables."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from test_delta_error import random_layer
from tiny_runs import Place, new_place

from attention import AttentionConfig
from attention.check.captured import load
from config import from_json
from figures import canvas, curves, delta, over_steps, runs, similarity
from figures.inputs import fp16_scale, open_checkpoint, validation_tokens
from probes.capture import LayerCapture, capture
from probes.low_rank import weighted_keys
from scripts import capture_attention, compare_runs, figures
from scripts.figures import REGISTRY
from training.intervention import parse_switch, plans_at

WRITTEN = ("png", "csv")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A run of eight steps. Pictures are coarse, which saves seconds."""
    with new_place(tmp_path_factory) as place, pytest.MonkeyPatch.context() as patch:
        patch.setattr(canvas, "DPI", 60)
        place.train("failing", {"telemetry.every": 2, "run.steps": 8})
        yield place


def checkpoint(place: Place, name: str = "failing", step: int = 8) -> Path:
    return place.runs / f"{name}/checkpoints/step_{step:08d}"


@pytest.mark.parametrize("number", REGISTRY)
def test_each_figure_is_a_png_and_a_csv_with_rows(place: Place, number: int, tmp_path: Path) -> None:
    given = ["--runs", str(place.runs / "failing"), "--checkpoint", str(checkpoint(place)), "--sequences", "4"]
    figures.main([str(number), *given, "--out", str(tmp_path)])
    assert all((tmp_path / f"figure_{number:02d}.{ending}").stat().st_size > 40 for ending in WRITTEN)
    with open(tmp_path / f"figure_{number:02d}.csv", newline="") as file:
        assert list(csv.DictReader(file))


def test_a_checkpoint_gives_a_file_of_captured_attention(place: Place, tmp_path: Path) -> None:
    """Its q, k, v and dO are those that ``probes.capture`` takes of the same weights and tokens, whose tests hold them to training."""
    capture_attention.main(
        [str(checkpoint(place)), "--layers", "1", "--heads", "1", "--length", "6", "--out", str(tmp_path)]
    )
    (file,) = tmp_path.iterdir()
    found = load(file)
    opened = open_checkpoint(checkpoint(place), torch.device("cpu"))
    config = opened.config
    tokens = validation_tokens(Path(config.data.dataset), config.data.sequence_length, 1, 256, torch.device("cpu"))
    (layer,) = capture(opened.model, *tokens, [1], autocast=config.precision.autocast(torch.device("cpu")))
    assert torch.equal(found.q, layer.q_BTHD.transpose(1, 2)[:, 1:2, :6])
    assert torch.equal(found.do, layer.do_BTHD.transpose(1, 2)[:, 1:2, :6])
    assert (found.about["step"], found.about["layer"], found.about["heads"]) == (8, 1, [1])
    assert found.about["trained"][0]["source_sha256"]


def run(telemetry: list[dict[str, Any]]) -> runs.DrawnRun:
    return runs.DrawnRun("a: flash", pd.DataFrame({"train_loss": [2.0, 1.0]}), None, curves.by_step(telemetry))


def test_the_cosine_of_two_outer_products_is_that_of_the_matrix_of_pairs() -> None:
    layer = random_layer()
    row = similarity.rank_one(layer, head=0, batch=0, token=3, source="m", label="m")
    products = torch.einsum("td,tc->tdc", weighted_keys(layer)[0, 0], layer.x_BTC[0].float()).flatten(1)
    units = torch.nn.functional.normalize(products, dim=-1)
    assert similarity.cosine(row.outer(3), row.outer(7)) == pytest.approx((units @ units.T)[3, 7].item(), abs=1e-5)


def test_a_loss_scale_does_not_show_in_the_error_of_delta() -> None:
    layer = random_layer()
    scaled = dataclasses.replace(layer, do_BTHD=layer.do_BTHD * 2.0**10)
    one, two = (
        delta.head_error(captured, head=0, batch=0, token=3, label="m", loss_scale=scale)
        for captured, scale in ((layer, 1.0), (scaled, 2.0**10))
    )
    assert torch.equal(one.error_BT, two.error_BT)
    assert torch.equal(one.do_D, two.do_D)
    assert (one.mean, one.standard_error) == (two.mean, two.standard_error) != (0.0, 0.0)


def test_rates_of_repeated_maxima_are_means_and_maxima_over_heads() -> None:
    telemetry = [{"step": 0, "ties_1e3": [[0.0, 0.5], [0.25, 0.25]]}, {"step": 9, "ties_1e3": [[1.0, 0.0], [0.0, 0.0]]}]
    rates = over_steps.tie_rates(run(telemetry))
    assert rates.index.tolist() == [0, 9]
    assert rates.to_numpy().tolist() == [[0.25, 0.5], [0.25, 1.0]]


@pytest.mark.parametrize(("largest", "scale"), [(0.5, 2.0**16), (40.0, 2.0**8), (math.nan, 1.0)])
def test_a_loss_scale_of_fp16_is_lowered_until_every_gradient_is_finite(largest: float, scale: float) -> None:
    layer = random_layer()

    def look(at: float) -> list[LayerCapture]:
        do_BTHD = (torch.full_like(layer.do_BTHD, largest, dtype=torch.float32) * at).half()
        return [layer, dataclasses.replace(layer, do_BTHD=do_BTHD)]

    assert fp16_scale(look) == scale


NAN, INF = math.nan, math.inf


def steps_of(losses: list[float], first: int = 0) -> list[dict[str, float]]:
    return [{"step": step, "train_loss": loss} for step, loss in enumerate(losses, start=first)]


@pytest.mark.parametrize(
    ("a", "b", "step"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], None),
        ([1.0, 2.0, 3.0], [1.0, 2.0 + 2**-51, 4.0], 1),
        ([1.0, NAN], [1.0, NAN], None),
        ([1.0, NAN], [1.0, 2.0], 1),
        ([0.0], [-0.0], 0),
        ([1.0, 2.0, 3.0], [1.0, 2.0], None),
    ],
)
def test_first_divergence_is_bitwise(a: list[float], b: list[float], step: int | None) -> None:
    first, second = (curves.column(curves.by_step(steps_of(losses)), "train_loss") for losses in (a, b))
    assert curves.first_difference(first, second) == step


@pytest.mark.parametrize(
    ("losses", "step"),
    [
        ([3.0, 2.0] + [2.6] * 4, 2),
        ([3.0, 2.0] + [2.5] * 9, None),
        ([3.0, 2.0] + [2.6] * 3 + [2.4] + [2.6] * 3, None),
        ([3.0, 2.0] + [2.6] * 3 + [2.4] + [2.6] * 4, 6),
        ([3.0, 2.0, NAN, 2.0, 2.0], 2),
        ([3.0, INF], 1),
        ([3.0, 2.0, 2.0, 5.0, 7.0, NAN], 3),
        ([NAN], 0),
        ([], None),
    ],
    ids=["stays", "equal", "returns", "second time", "nan", "inf", "excursion into nan", "nan at once", "empty"],
)
def test_explosion_step(losses: list[float], step: int | None) -> None:
    assert curves.explosion_step(losses, margin=0.5, patience=4) == step


ROOT = Path(__file__).resolve().parent.parent
EXPERIMENTS = ROOT / "experiments"
GIVEN_UP = {"compensated_delta", "recompute_o", "standard"}
"""Runs of what the code does not have any more: experiments/fast_failure/README.md names the commit that has it."""
RECORDS = sorted(path for path in EXPERIMENTS.rglob("config.json") if path.parent.name not in GIVEN_UP)
SUMMARIES = sorted(str(path.parent.relative_to(EXPERIMENTS)) for path in EXPERIMENTS.rglob("summary.csv"))
PATIENCE = {"who_is_at_risk/tiny": "50"}
"""Steps above the margin that are an explosion, where they are not 200."""


def test_the_pictures_can_be_drawn() -> None:
    draw = runpy.run_path(str(EXPERIMENTS / "draw_pictures.py"), run_name="imported")
    for name in ("front", "layers", "large_logits"):
        assert draw[name]().axes


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.parent.name)
def test_the_attention_of_a_published_run_is_known(path: Path) -> None:
    """By the names of its time, those that its layers were switched to as well."""
    config = json.loads(path.read_text())["config"]
    base = from_json(AttentionConfig, config["attention"]).resolve(
        config["model"]["n_layer"], config["model"]["n_head"]
    )
    plans_at(base, [parse_switch(text) for text in config["alarm"]["switches"]], config["run"]["steps"])


@pytest.mark.parametrize("study", SUMMARIES)
def test_the_summary_of_runs_is_that_of_their_files(study: str, tmp_path: Path) -> None:
    header = (EXPERIMENTS / study / "summary.csv").read_text().splitlines()[0]
    steps = sorted(set(re.findall(r"_at_(\d+)", header)), key=int)
    folder, table = str(EXPERIMENTS / study / "runs"), str(tmp_path / "summary.csv")
    layer = ["--layer", "1"] if "max_logit_1_" in header else []  # else of all layers
    patience = PATIENCE.get(study, "200")
    compare_runs.main([folder, *layer, "--out", "none", "--table", table, "--patience", patience, "--at", *steps])
    assert (tmp_path / "summary.csv").read_text() == (EXPERIMENTS / study / "summary.csv").read_text()
