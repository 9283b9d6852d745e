"""Figures 6 and 9: one row along its keys: where P_bar is 1 and what that does to the sum; which scores share the row maximum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from attention.reference.exact import exact_float32
from attention.rounding import round_to
from figures import canvas
from figures.canvas import Drawn
from figures.delta import first_token
from probes.accumulation import Accumulation, count_ones
from probes.capture import LayerCapture
from probes.delta_error import effective_numerics, feature_errors, problem_of

ZOOM = 25
FIRST_QUERY = 3


@dataclass(frozen=True, kw_only=True)
class AttentionRow:
    """P[T, :] of one query, and which keys share the row maximum of S in BF16."""

    layer: int
    head: int
    query: int
    p_S: np.ndarray
    tied_S: np.ndarray


def choose_row(layer: LayerCapture, head: int) -> tuple[int, int, int]:
    """(sequence, token, feature) with the largest dO (O_lp - O_hp) of a head, among the rows in which P_bar = 1 twice if there are any.

    Rows of the first quarter of a sequence are left out: they have few keys.
    """
    products_BTD = feature_errors(layer)[:, head].clone()
    products_BTD[:, : first_token(products_BTD.shape[1])] = -torch.inf
    repeated_BT = count_ones(layer).ones_BHT[:, head] > 1
    repeated_BT[:, : first_token(products_BTD.shape[1])] = False
    if bool(repeated_BT.any()):
        products_BTD = products_BTD.masked_fill(~repeated_BT[..., None], -torch.inf)
    place = int(products_BTD.argmax())
    _, T, D = products_BTD.shape
    return place // (T * D), place // D % T, place % D


def draw_accumulation(sums: Accumulation, *, label: str, feature: int) -> Drawn:
    """Figure 6: (a) P_bar[T, :], (b) V[:, i], (c) the error of O_bar[T, i] along the keys, (d) the same around its largest jump.

    Orange where P_bar is exactly 1. (c) is equation 5: the sum so far rounded once, minus the exact sum of the same terms, P_bar as P V
    reads it in both. (``Accumulation.error_S`` counts the rounding of P_bar as well; it is in the table.)
    """
    p_bar, v, low = (x.double().cpu().numpy() for x in (sums.p_bar_S, sums.v_S, sums.low_S))
    exact = np.cumsum(p_bar * v)
    error, ones = low - exact, sums.one_S.cpu().numpy()
    keys = np.arange(len(v))
    jump = int(np.abs(np.diff(error, prepend=0.0)).argmax())
    figure = canvas.sheet(4.1)
    top, middle, bottom, near = figure.subplots(4, 1)
    top.vlines(keys, 0, p_bar, color=canvas.GRAY, linewidth=0.6)
    _points(top, keys, p_bar, ones)
    counted = "1 key" if ones.sum() == 1 else f"{ones.sum()} keys"
    canvas.dress(top, y=r"$\bar{P}$[T, t]", title=f"{label}: {counted} with " + r"$\bar{P}$ = 1")
    middle.axhline(0, color="0.3", linewidth=0.5)
    middle.plot(keys, v, ".", color=canvas.GRAY, markersize=1.5)
    _points(middle, keys, v, ones)
    canvas.dress(middle, y="V[t, i]", title=f"i = {feature}: {(v < 0).mean():.0%} of V[:, i] negative")
    titles = ("rounded minus exact sum of the same terms, so far", f"the same around the largest jump, at t = {jump}")
    windows = (slice(None), slice(max(0, jump - ZOOM), jump + ZOOM + 1))
    for axes, window, title in zip((bottom, near), windows, titles, strict=True):
        axes.axhline(0, color="0.3", linewidth=0.5)
        axes.step(keys[window], error[window], where="post", color=canvas.BLUE, linewidth=0.8)
        _points(axes, keys[window], error[window], ones[window])
        axes.ticklabel_format(axis="y", scilimits=(-2, 3))
        canvas.dress(axes, y=r"error of $\bar{O}$[T, i]", title=title)
    for axes in (top, middle, bottom, near):
        axes.xaxis.get_major_locator().set_params(integer=True)
    near.set_xlabel("key t", fontsize=canvas.TEXT)
    columns = ("key", "p_bar", "p_bar_is_1", "v", "rounded_sum", "exact_sum", "error", "error_with_that_of_p_bar")
    whole = sums.error_S.double().cpu().numpy()
    rows = [(int(t), p_bar[t], bool(ones[t]), v[t], low[t], exact[t], error[t], whole[t]) for t in keys]
    return Drawn(figure, canvas.table(columns, rows))


def _points(axes: Any, keys: np.ndarray, values: np.ndarray, ones: np.ndarray) -> None:
    axes.plot(keys[ones], values[ones], "o", color=canvas.ORANGE, markersize=2.2, linestyle="")


@torch.no_grad()
def attention_rows(layers: Sequence[LayerCapture], *, count: int = 6) -> list[AttentionRow]:
    """The rows of the first sequence with the most probability on keys that share the row maximum, at most one a head.

    Scores are rounded to BF16 for the comparison (the paper's S). Heads without a repeated maximum come last, by their largest probability.
    """
    found: list[tuple[bool, float, AttentionRow]] = []
    for layer in layers:
        for group in layer.plan.groups:
            with exact_float32(layer.q_BTHD.device):
                problem = problem_of(layer, group, effective_numerics(group))
                T = problem.q.shape[2]
                s_HTS = problem.scores(slice(0, T), slice(0, T))[0]
            p_HTS = torch.softmax(s_HTS, dim=-1)
            coarse_HTS = round_to(s_HTS, "bf16")
            tied_HTS = coarse_HTS == coarse_HTS.amax(dim=-1, keepdim=True)
            mass_HT = (p_HTS * tied_HTS).sum(dim=-1)
            # A row of one key has nothing to share its maximum with.
            repeated_HT = tied_HTS.sum(dim=-1) > 1
            for position, head in enumerate(group.heads):
                score_T = torch.where(repeated_HT[position], mass_HT[position] + 1, p_HTS[position].amax(dim=-1))
                score_T[: min(FIRST_QUERY, T - 1)] = -1
                query = int(score_T.argmax())
                row = AttentionRow(
                    layer=layer.layer,
                    head=head,
                    query=query,
                    p_S=p_HTS[position, query, : query + 1].cpu().numpy(),
                    tied_S=tied_HTS[position, query, : query + 1].cpu().numpy(),
                )
                found.append((bool(repeated_HT[position, query]), float(score_T[query]), row))
    found.sort(key=lambda entry: entry[:2], reverse=True)
    return [row for _, _, row in found[:count]]


def draw_attention_rows(rows: Sequence[AttentionRow], *, label: str) -> Drawn:
    """Figure 9: attention probabilities of some rows of a pretrained model; several keys share the maximum, key 0 is a sink.

    The paper's is Llama-3.1-8B. Orange: keys whose score is the row maximum in BF16. Gray: the others; the first bar is key 0.
    """
    height = (len(rows) + 1) // 2
    figure = canvas.sheet(0.4 + 1.15 * height)
    grid = figure.subplots(height, 2, squeeze=False).ravel()
    for axes, row in zip(grid, rows, strict=False):
        colors = [canvas.ORANGE if tied else canvas.GRAY for tied in row.tied_S]
        axes.bar(range(len(row.p_S)), row.p_S, color=colors, width=0.8)
        canvas.dress(
            axes, title=f"layer {row.layer} head {row.head} query {row.query}\n{row.tied_S.sum()} at the row maximum"
        )
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_ylim(0, 1.05 * float(row.p_S.max()))
    for axes in grid[len(rows) :]:
        axes.set_visible(False)
    figure.supxlabel("key", fontsize=canvas.TEXT)
    figure.supylabel("attention probability", fontsize=canvas.TEXT)
    figure.suptitle(canvas.wrapped(label), fontsize=canvas.SMALL)
    numbers = [
        (row.layer, row.head, row.query, key, float(p), bool(tied))
        for row in rows
        for key, (p, tied) in enumerate(zip(row.p_S, row.tied_S, strict=True))
    ]
    return Drawn(figure, canvas.table(("layer", "head", "query", "key", "probability", "at_row_maximum"), numbers))
