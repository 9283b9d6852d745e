"""Figure 6: one row along its keys: where P_bar is 1 and what that does to the sum."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import torch

from figures import canvas
from figures.canvas import Drawn
from figures.delta import first_token
from probes.accumulation import Accumulation, count_ones
from probes.capture import LayerCapture
from probes.delta_error import feature_errors

ZOOM = 25


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
    numbers = {"key": keys, "p_bar": p_bar, "p_bar_is_1": ones, "v": v, "rounded_sum": low, "exact_sum": exact}
    whole = sums.error_S.double().cpu().numpy()
    return Drawn(figure, pd.DataFrame(numbers | {"error": error, "error_with_that_of_p_bar": whole}))


def _points(axes: Any, keys: np.ndarray, values: np.ndarray, ones: np.ndarray) -> None:
    axes.plot(keys[ones], values[ones], "o", color=canvas.ORANGE, markersize=2.2, linestyle="")
