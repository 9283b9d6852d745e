"""figures: the numbers behind each figure, on captures made by hand and on curves with known answers."""

from __future__ import annotations

import math

import pytest
import torch
from layer_captures import random_layer, tied_layer

from attention import AttentionSpec
from figures import delta, head_norms, keys, loss, similarity
from probes.accumulation import Accumulation, accumulate
from probes.capture import LayerCapture
from probes.delta_error import delta_errors
from probes.low_rank import weighted_keys

PAPER = AttentionSpec(numerics="rounded_forward")


def run(
    name: str = "a", *, exploded_at: int | None = None, telemetry: tuple[dict, ...] = (), **columns: list
) -> loss.RunCurves:
    length = max(len(values) for values in columns.values())
    records = [
        {"step": s} | {k: v[s] for k, v in columns.items() if s < len(v) and v[s] is not None} for s in range(length)
    ]
    return loss.RunCurves(
        name=name, attention="flash", group="g", exploded_at=exploded_at, records=records, telemetry=telemetry
    )


def test_head_norms_are_those_of_the_heads_rows() -> None:
    w_q = torch.randn(12, 12, generator=torch.Generator().manual_seed(0))
    w_q[4:8] *= 5
    norms = head_norms.head_norms(w_q, 3, layer=1, label="m")
    exact = [torch.linalg.matrix_norm(rows.double(), 2).item() for rows in w_q.split(4)]
    assert norms.norms == pytest.approx(exact, rel=1e-6)
    assert norms.outliers == (1,)


def test_the_chosen_head_has_the_largest_norm_and_nan_is_not_it() -> None:
    assert delta.choose_head([1.0, 3.0, math.nan, 2.0]) == 1


def test_the_running_sum_is_that_of_the_errors_of_delta() -> None:
    layer = random_layer()
    error = delta.head_error(layer, head=1, batch=0, token=5, label="")
    total, spread = delta.running_sum(error.error_BT)
    errors = delta_errors(layer).error_BHT[:, 1].double().flatten()
    assert total[-1] == pytest.approx(errors.sum().item())
    assert spread[-1] == pytest.approx(errors.square().sum().sqrt().item())
    assert len(total) == errors.numel()


def test_features_of_one_token_add_up_to_its_error() -> None:
    layer = random_layer()
    error = delta.head_error(layer, head=2, batch=1, token=9, label="")
    assert error.product_D.sum().item() == pytest.approx(error.error_BT[1, 9].item(), rel=1e-3, abs=1e-6)


def test_a_planted_head_has_a_biased_sum_and_its_neighbors_have_not() -> None:
    """V of one sign below zero and dO above: the error of delta is negative, by many standard errors."""
    layer = tied_layer(spec=PAPER)
    planted, healthy = (delta.head_error(layer, head=head, batch=0, token=4, label="") for head in (1, 0))
    assert planted.mean / planted.standard_error < -8
    assert abs(healthy.mean / healthy.standard_error) < 4


def test_the_row_chosen_for_figure_6_has_two_unit_probabilities() -> None:
    layer = tied_layer(spec=PAPER, sign=1.0)
    batch, token, feature = keys.choose_row(layer, 1)
    sums = keys_of(layer, batch, token, feature)
    assert sums.one_S.sum() == 2


def keys_of(layer: LayerCapture, batch: int, token: int, feature: int) -> Accumulation:
    """Of head 1, the planted one."""
    return accumulate(layer, batch, 1, token, feature)


def test_figure_6_tells_every_key() -> None:
    layer = tied_layer(spec=PAPER, sign=1.0)
    batch, token, feature = keys.choose_row(layer, 1)
    sums = keys_of(layer, batch, token, feature)
    table = keys.draw_accumulation(sums, label="", feature=feature).table
    assert [row[0] for row in table.rows] == list(range(token + 1))
    assert [row[2] for row in table.rows] == sums.one_S.tolist()
    terms_S = sums.p_bar_S.double() * sums.v_S.double()
    assert [row[6] for row in table.rows] == pytest.approx((sums.low_S - terms_S.cumsum(0)).tolist(), abs=1e-12)


def test_rows_with_a_repeated_maximum_are_found_and_come_first() -> None:
    layer = tied_layer(spec=PAPER)
    rows = keys.attention_rows([layer])
    assert len(rows) == 3
    assert rows[0].head == 1
    assert rows[0].tied_S.tolist() == [True, True] + [False] * (rows[0].query - 1)
    assert rows[0].p_S.sum() == pytest.approx(1.0, abs=1e-5)


def test_the_cosine_of_two_outer_products_is_that_of_the_matrix_of_pairs() -> None:
    layer = random_layer()
    row = similarity.rank_one(layer, head=0, batch=0, token=3, source="m", label="m")
    products = torch.einsum("td,tc->tdc", weighted_keys(layer)[0, 0], layer.x_BTC[0].float()).flatten(1)
    units = torch.nn.functional.normalize(products, dim=-1)
    assert similarity.cosine(row.outer(3), row.outer(7)) == pytest.approx((units @ units.T)[3, 7].item(), abs=1e-5)


def test_the_table_of_losses_is_what_was_logged() -> None:
    table = loss.draw_losses([run(val_loss=[3.0, None, 2.0], train_loss=[3.5, 3.0, 2.5])]).table
    first, second, *others = [row[:5] for row in table.rows]
    assert (first, second) == (("a", "flash", "val_loss", 0, 3.0), ("a", "flash", "val_loss", 2, 2.0))
    assert [row[4] for row in others] == [3.5, 3.0, 2.5]


def test_a_long_curve_is_told_by_means_and_ranges_of_its_parts() -> None:
    drawn = loss.curve(run(train_loss=[1.0, 2.0, 3.0, 4.0, 5.0, math.inf]), "train_loss", size=2)
    assert drawn.steps.tolist() == [1, 3, 5]
    assert drawn.mean.tolist() == [1.5, 3.5, math.inf]
    assert (drawn.low.tolist(), drawn.high.tolist()) == ([1.0, 3.0, 5.0], [2.0, 4.0, math.inf])


def test_a_panel_for_each_group_of_figure_7() -> None:
    first, second = (run(n, val_loss=[5.0, 4.0, x], train_loss=[5.0, 4.0, x]) for n, x in (("a", 3.0), ("b", 3.5)))
    other = loss.RunCurves(**(first.__dict__ | {"name": "c", "group": "muon"}))
    drawn = loss.draw_stabilized([first, second, other])
    assert [axes.get_title(loc="left") for axes in drawn.figure.axes] == ["g", "muon"]


def test_an_explosion_runs_off_the_top_of_the_loss() -> None:
    drawn = loss.draw_losses([run(exploded_at=2, train_loss=[5.0, 3.0, 800.0, math.inf])])
    assert drawn.figure.axes[0].get_ylim()[1] < 6
    assert [row[4] for row in drawn.table.rows] == [5.0, 3.0, 800.0, math.inf]


def test_norms_of_all_layers_come_from_the_metrics() -> None:
    steps, grid = loss.norm_grid(run(w_q_norm_0=[1.0, None, 2.0], w_q_norm_1=[3.0, 9.0, 4.0], train_loss=[1.0] * 3))
    assert steps.tolist() == [0, 2]
    assert grid.tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_norms_come_from_the_telemetry_where_there_is_some() -> None:
    telemetry = (
        {"step": 0, "w_q_norm": [1.0, 2.0], "w_k_norm": [3.0, 4.0]},
        {"step": 5, "w_q_norm": [5.0, 6.0], "w_k_norm": [7.0, 8.0]},
    )
    one = run(train_loss=[1.0], telemetry=telemetry)
    assert loss.norm_grid(one)[1].tolist() == [[1.0, 5.0], [2.0, 6.0]]
    assert loss.norm_grid(one, "w_k")[1].tolist() == [[3.0, 7.0], [4.0, 8.0]]


def test_rates_of_repeated_maxima_are_means_and_maxima_over_heads() -> None:
    telemetry = ({"step": 0, "ties_1e3": [[0.0, 0.5], [0.25, 0.25]]}, {"step": 9, "ties_1e3": [[1.0, 0.0], [0.0, 0.0]]})
    steps, mean, largest = loss.tie_rates(run(train_loss=[1.0], telemetry=telemetry))
    assert (steps.tolist(), mean.tolist(), largest.tolist()) == ([0, 9], [0.25, 0.25], [0.5, 1.0])


def test_the_sum_over_probes_leaves_out_what_is_not_finite() -> None:
    records = [{"step": 0, "delta_error_sum": [[1.0]]}, {"step": 5, "delta_error_sum": [[math.nan]]}]
    steps, sums = delta.steps_of(records, 0, 0)
    assert (steps.tolist(), sums.tolist()) == ([0, 5], [1.0, 0.0])
