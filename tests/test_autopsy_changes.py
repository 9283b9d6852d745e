"""Which rounding carries a planted bias and what removes it, against what tests/test_bias.py establishes."""

from __future__ import annotations

import pytest
from layer_captures import tied_layer
from planted_models import healthy, plant, subject

from attention import AttentionSpec
from autopsy.changes import (
    Change,
    HeadChanges,
    head_changes,
    smallest_set,
    try_changes,
)
from autopsy.verdict import Bias, head_with

PAPER = AttentionSpec(numerics="rounded_forward")


@pytest.fixture(scope="module")
def planted() -> HeadChanges:
    layer = tied_layer(spec=PAPER)
    return head_changes(0, 1, [head_with(layer, 1, PAPER.resolve())], PAPER)


def names(changes: list[Change]) -> set[str]:
    return {change.name for change in changes if change.removes}


def test_repairs_of_the_backward_pass_remove_the_bias(planted: HeadChanges) -> None:
    assert {"flash_delta_from_p", "flash_recompute_o", "flash_fp32_o", "flash_fp32_pv_o"} <= names(planted.presets)


def test_rounding_o_stochastically_in_delta_removes_it(planted: HeadChanges) -> None:
    assert {"flash_stochastic_o", "flash_o_nearest_delta_stochastic"} <= names(planted.presets)


def test_what_keeps_the_rounding_keeps_the_bias(planted: HeadChanges) -> None:
    left = {change.name: change.left for change in planted.presets}
    assert left["flash_untiled"] == pytest.approx(1)
    assert not {"flash_untiled", "flash_o_stochastic_delta_nearest", "flash_o_fp32_delta_nearest"} & names(
        planted.presets
    )


def test_the_sites_that_carry_it_are_those_of_o(planted: HeadChanges) -> None:
    """O_bar is rounded at two sites and O at a third: none alone removes the bias, the three together do."""
    assert [change.name for change in planted.sites] == [
        "scores",
        "statistics",
        "probabilities",
        "tile_product",
        "accumulator",
        "output",
    ]
    assert names(planted.sites) == set()
    assert planted.together is not None
    assert planted.together.name == "tile_product, accumulator, output"


def test_a_head_whose_p_bar_is_drawn_has_its_changes_measured() -> None:
    """P_bar in FP32 has nothing left to draw, which no change may trip over."""
    spec = AttentionSpec(preset="flash_stochastic_p", numerics="rounded_forward")
    layer = tied_layer(spec=spec, shape=(2, 8, 2, 16))
    found = head_changes(0, 1, [head_with(layer, 1, spec.resolve())], spec)
    assert "probabilities" in [change.name for change in found.sites]
    assert {"flash", "flash_fp32_pv"} <= {change.name for change in found.presets}


def change(name: str, left: float) -> Change:
    nothing = Bias(mean=0.0, standard_error=0.0, rms=0.0, positive=0.5, relative=0.0, units=8)
    return Change(name=name, bias=nothing, left=left)


def test_the_smallest_set_has_no_site_to_spare() -> None:
    needed = {"output", "accumulator"}
    found = smallest_set(
        ["scores", "output", "accumulator"],
        lambda sites: change(", ".join(sites), 0.0 if needed <= set(sites) else 1.0),
    )
    assert found is not None
    assert found.name == "output, accumulator"


def test_a_model_is_looked_into_head_by_head() -> None:
    model = plant(healthy(3), 1, 3, seed=3)
    (found,) = try_changes(subject(model, 3), [(1, 3)])
    assert (found.layer, found.head) == (1, 3)
    assert found.before.ratio > 0.3
    assert "flash_recompute_o" in names(found.presets)
