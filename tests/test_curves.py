"""figures/curves.py: columns, divergence, explosion."""

import math

import pytest

from figures import curves

NAN, INF = math.nan, math.inf


def run(losses: list[float], first: int = 0) -> list[dict[str, float]]:
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
    first, second = (curves.column(curves.by_step(run(losses)), "train_loss") for losses in (a, b))
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
