"""figures: the numbers behind each figure, on captures made by hand and on curves with known answers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from layer_captures import random_layer

from figures import curves, delta, over_steps, runs, similarity
from figures.checkpoints import fp16_scale
from probes.capture import LayerCapture
from probes.low_rank import weighted_keys


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


@pytest.mark.parametrize(("losses", "step"), [([2.0, 3.0, 3.0], 1), ([2.0, 3.0, 2.0], None), ([2.0] + [3.0] * 4, None)])
def test_open_excursion(losses: list[float], step: int | None) -> None:
    assert curves.open_excursion(losses, patience=4) == step


FALLS = np.linspace(5, 2, 120)


@pytest.mark.parametrize(
    "columns",
    [{"train_loss": FALLS, "max_logit_max": -FALLS}, {"train_loss": np.full(120, np.nan)}],
    ids=["no positive value for a logarithmic panel", "no finite loss"],
)
def test_a_panel_is_drawn_where_there_is_something_to_draw_and_the_loss_always(columns: dict[str, Any]) -> None:
    drawn = runs.run_figure([runs.DrawnRun("a: flash", pd.DataFrame(columns).astype(object), None)])
    assert [axes.get_title(loc="left") for axes in drawn.axes] == ["training loss"]
