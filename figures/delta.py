"""Figure 5: the error of delta, token by token, summed, and by feature. Legend: B batch, T positions, H heads, D head width."""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from figures import canvas
from figures.canvas import Drawn
from probes.capture import LayerCapture
from probes.delta_error import (
    Summary,
    delta_errors,
    feature_errors,
    output_errors,
    output_gradient,
    over_groups,
    summarize,
)

FEATURES = 12


@dataclass(frozen=True, kw_only=True)
class HeadError:
    """delta_lp - delta_hp of one head over the sequences of a capture, and its parts at one token."""

    label: str
    batch: int
    token: int
    error_BT: Tensor
    do_D: Tensor
    """As attention reads it."""
    output_error_D: Tensor
    """O_lp - O_hp at the token."""
    summary: Summary
    """Of ``error_BT``; the standard error is over sequences if there are at least four, else over blocks of 32 tokens."""

    @property
    def product_D(self) -> Tensor:
        """dO (O_lp - O_hp): its sum is the error of rowsum(dO * O) at the token."""
        return self.do_D * self.output_error_D


def largest_error(layer: LayerCapture, head: int, batch: int | None = None) -> tuple[int, int]:
    """(sequence, token) of the largest positive error of rowsum(dO * O) of a head, in ``batch`` or in any sequence, as the paper picks
    its token; not in the first quarter of a sequence: rows of few keys have large errors, and little to show."""
    error_BT = feature_errors(layer)[:, head].sum(dim=-1)
    error_BT[:, : error_BT.shape[1] // 4] = -torch.inf
    if batch is not None:
        return batch, int(error_BT[batch].argmax())
    batch, token = divmod(int(error_BT.argmax()), error_BT.shape[1])
    return batch, token


def head_error(
    layer: LayerCapture, *, head: int, batch: int, token: int, label: str, loss_scale: float = 1.0
) -> HeadError:
    """What Figure 5 shows (arXiv 2510.04212), float64 on the CPU. ``loss_scale``: that of the capture, which is taken out."""
    error_BHT = delta_errors(layer).error_BHT[:, [head]].double() / loss_scale
    B, _, T = error_BHT.shape
    do_BHTD = over_groups(layer, functools.partial(output_gradient, layer))
    return HeadError(
        label=label,
        batch=batch,
        token=token,
        error_BT=error_BHT[:, 0].cpu(),
        do_D=do_BHTD[batch, head, token].double().cpu() / loss_scale,
        output_error_D=output_errors(layer)[batch, head, token].double().cpu(),
        summary=summarize(error_BHT, unit=T if B >= 4 else 32),
    )


def draw_delta(error: HeadError) -> Drawn:
    """Figure 5: (a) the error of delta summed up, (b) dO and (c) O_lp - O_hp at one token, for the features that matter most there.

    The paper sums over 100 training steps; here (a) sums over the tokens of the sequences given, with the weights of one checkpoint.
    """
    figure = canvas.sheet(3.9)
    top, *others = figure.subplots(3, 1)
    numbers = _draw_sum(top, error)
    order = error.product_D.abs().argsort(descending=True)[:FEATURES]
    agree = float((error.product_D[order] > 0).double().mean())
    names = [str(int(i)) for i in order]
    parts = (
        ("dO", error.do_D, f"dO, sequence {error.batch}, token {error.token}"),
        ("output_error", error.output_error_D, f"O(lp) - O(hp): same sign as dO in {agree:.0%} of these features"),
    )
    for axes, (name, values_D, title) in zip(others, parts, strict=True):
        values = values_D[order].numpy()
        axes.bar(range(len(values)), values, color=[canvas.ORANGE if v < 0 else canvas.BLUE for v in values], width=0.7)
        axes.axhline(0, color="0.3", linewidth=0.5)
        axes.set_xticks(range(len(names)), names)
        axes.ticklabel_format(axis="y", scilimits=(-2, 3))
        canvas.style_axes(axes, title=title)
        numbers += [(name, int(i), float(v)) for i, v in zip(order, values, strict=True)]
    others[-1].set_xlabel("feature of the head, by |dO (O(lp) - O(hp))|", fontsize=canvas.TEXT)
    return Drawn(figure, pd.DataFrame(numbers, columns=["panel", "x", "value"]))


def _draw_sum(axes: Any, error: HeadError) -> list[tuple[Any, ...]]:
    error_N = error.error_BT.flatten()
    # What errors of the same sizes with random signs would reach, one standard deviation, is the root of the sum of squares.
    total, spread = error_N.cumsum(dim=0).numpy(), error_N.square().cumsum(dim=0).sqrt().numpy()
    places = np.arange(1, len(total) + 1)
    axes.fill_between(places, -2 * spread, 2 * spread, color="0.88", linewidth=0)
    axes.plot(places, total, color=canvas.ORANGE, linewidth=1.2)
    axes.axhline(0, color="0.3", linewidth=0.5)
    axes.ticklabel_format(axis="y", scilimits=(-2, 3))
    mean, positive = error.summary.mean_H.item(), error.summary.positive_H.item()
    z = (error.summary.mean_H / error.summary.standard_error_H).item()
    told = f"mean {mean:.2g}, {z:.1f} standard errors; {positive:.0%} positive"
    title = f"{canvas.plain(error.label)}\n{told}\ngray: two deviations of random signs"
    canvas.style_axes(axes, x="tokens", y=r"sum of $\delta_{lp}-\delta_{hp}$", title=title)
    step = max(1, len(total) // 2000)
    shown = zip(places[::step], total[::step], strict=True)
    return [("sum_over_tokens", int(place), float(value)) for place, value in shown]
