"""Figure 3: the spectral norm of W_Q, head by head. Legend: H heads, C width, D head width."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
from torch import Tensor

from figures import canvas
from figures.canvas import Drawn
from figures.courses import COLORS
from probes.spectral import spectral_norm

OUTLIER = 1.5
"""A head is an outlier from this many times the layer's median on."""


@dataclass(frozen=True, kw_only=True)
class HeadNorms:
    """Spectral norms of the heads of one layer of one model."""

    label: str
    layer: int
    norms: tuple[float, ...]

    @property
    def outliers(self) -> tuple[int, ...]:
        """Heads, from 0, whose norm is ``OUTLIER`` times the median or more."""
        middle = statistics.median(self.norms)
        return tuple(head for head, norm in enumerate(self.norms) if norm >= OUTLIER * middle)


def head_norms(w_q_CC: Tensor, n_head: int, *, layer: int, label: str) -> HeadNorms:
    """Of the D rows of each head (arXiv 2510.04212, Figure 3); exact."""
    norms_H = spectral_norm(w_q_CC.detach().unflatten(0, (n_head, -1)))
    return HeadNorms(label=label, layer=layer, norms=tuple(norms_H.tolist()))


def draw_heads(models: Sequence[HeadNorms]) -> Drawn:
    """Figure 3: bars for each head of the layer; hatched: ``OUTLIER`` times the median or more. Several models stand side by side."""
    figure = canvas.sheet(1.6 + 0.14 * len(models))
    axes = figure.subplots()
    width = 0.8 / len(models)
    bars = []
    for index, model in enumerate(models):
        places = [head + (index - (len(models) - 1) / 2) * width for head in range(len(model.norms))]
        drawn = axes.bar(places, model.norms, width=0.92 * width, color=COLORS[index % len(COLORS)])
        for head in model.outliers:
            drawn[head].set(hatch="////", edgecolor="white", linewidth=0)
        bars.append(drawn)
    axes.set_xticks(range(max(len(model.norms) for model in models)))
    canvas.dress(axes, x=f"head of layer {models[0].layer}, both from 0", y="spectral norm of $W_Q$")
    labels = [f"{model.label}: outliers {', '.join(map(str, model.outliers)) or 'none'}" for model in models]
    canvas.legend(figure, bars, labels, loc="outside upper left")
    rows = [(m.label, m.layer, head, norm, head in m.outliers) for m in models for head, norm in enumerate(m.norms)]
    return Drawn(figure, pd.DataFrame(rows, columns=["model", "layer", "head", "w_q_head_norm", "outlier"]))
