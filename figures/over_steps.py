"""Figures over the steps of runs with telemetry: 11 (W_Q and W_K norms of every layer) and 13 (repeated maxima before the explosion)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from figures import canvas, curves
from figures.canvas import COLUMN, SMALL, Drawn
from figures.runs import DrawnRun, style

TIES = "ties_1e3"
"""Share of rows with a second score within 1e-3 of the maximum, in the telemetry."""


def _look(index: int) -> dict[str, Any]:
    return style(index) | {"linewidth": max(1.6 - 0.2 * index, 0.8)}


def _mark(axes: Any, index: int, run: DrawnRun) -> None:
    if run.exploded_at is not None:
        axes.axvline(run.exploded_at, color=_look(index)["color"], linestyle=":", linewidth=0.8, zorder=1)


def draw_norms(runs: Sequence[DrawnRun]) -> Drawn:
    """Figure 11: spectral norms over layers and training steps as heat maps, one scale for all.

    The paper's shows every weight of attention and MLP; here W_Q and W_K.
    """
    from matplotlib.colors import LogNorm

    grids = [
        (run, name, np.array(run.telemetry[column].tolist(), dtype=float).T)
        for run in runs
        for column, name in (("w_q_norm", "W_Q"), ("w_k_norm", "W_K"))
    ]
    figure = canvas.sheet(0.35 + 1.25 * len(grids))
    all_axes = figure.subplots(len(grids), 1, squeeze=False)[:, 0]
    everything = np.concatenate([grid.ravel() for *_, grid in grids])
    positive = everything[np.isfinite(everything) & (everything > 0)]
    norm = LogNorm(float(positive.min()), float(positive.max()))
    tables = []
    for axes, (run, name, grid) in zip(all_axes, grids, strict=True):
        steps = run.telemetry.index.to_numpy()
        edges = np.append(steps, 2 * steps[-1] - steps[-2] if len(steps) > 1 else steps[-1] + 1)
        rows = np.arange(len(grid) + 1) - 0.5
        image = axes.pcolormesh(edges, rows, grid, norm=norm, cmap=canvas.SIZES, rasterized=True)
        _mark(axes, 0, run)
        canvas.style_axes(axes, y="layer", title=f"${name}$, {canvas.plain(run.label)}", grid="")
        axes.set_yticks(range(0, len(grid), max(1, len(grid) // 6)))
        table = pd.DataFrame(grid.T, columns=[f"layer_{layer}" for layer in range(len(grid))])
        tables.append(pd.DataFrame({"run": run.name, "matrix": name, "step": steps}).join(table))
    all_axes[-1].set_xlabel("optimizer step", fontsize=canvas.TEXT)
    bar = figure.colorbar(image, ax=list(all_axes), pad=0.02, aspect=30, fraction=0.06)
    bar.set_label("spectral norm", fontsize=SMALL)
    bar.ax.tick_params(which="both", labelsize=SMALL, length=2, pad=1)
    return Drawn(figure, pd.concat(tables))


def draw_ties(runs: Sequence[DrawnRun]) -> Drawn:
    """Figure 13: loss (of validation where all runs have it), and how many rows fulfill the stabilizer's condition, a repeated maximum.

    The paper counts the activations of its condition in one run; here the share of the probe batch's rows within 1e-3, which has the same
    shape: mean over all heads (thick), the largest of any head (thin).
    """
    from matplotlib.lines import Line2D

    evaluated = all(len(curves.column(run.metrics, "val_loss")) > 1 for run in runs)
    column, name = ("val_loss", "validation loss") if evaluated else ("train_loss", "training loss")
    figure = canvas.sheet(0.5 + 0.14 * len(runs) + 2.7)
    upper, lower = figure.subplots(2, 1, sharex=True)
    top, tables = 0.0, []
    for index, run in enumerate(runs):
        losses = curves.column(run.metrics, column)
        grids = np.array(run.telemetry[TIES].tolist(), dtype=float).reshape(len(run.telemetry), -1)
        shares = {f"{TIES}_mean": grids.mean(axis=1), f"{TIES}_max": grids.max(axis=1)}
        ties = pd.DataFrame(shares, run.telemetry.index)
        top = max(top, 1.1 * losses.iloc[0])
        upper.plot(losses.where(np.isfinite(losses)), **_look(index))
        lower.plot(ties[f"{TIES}_mean"], **_look(index))
        lower.plot(ties[f"{TIES}_max"], **(_look(index) | {"linewidth": 0.5}))
        for axes in (upper, lower):
            _mark(axes, index, run)
        tables.append(pd.DataFrame({column: losses}).join(ties, how="outer").assign(run=run.name))
    # An explosion runs off the top instead of flattening everything.
    if np.isfinite(top):
        upper.set_ylim(top=min(top, upper.get_ylim()[1]))
    lower.set_ylim(bottom=0)
    canvas.style_axes(upper, y=f"{name}\n(nats/token)")
    canvas.style_axes(lower, x="optimizer step", y="share of rows with\na repeated maximum")
    lines = [Line2D([], [], label=canvas.wrapped(run.label, COLUMN - 0.5), **_look(i)) for i, run in enumerate(runs)]
    lines.append(Line2D([], [], label="thin: the head with most such rows", color="black", linewidth=0.5))
    figure.legend(handles=lines, loc="outside upper left", frameon=False, fontsize=SMALL, borderpad=0)
    return Drawn(figure, pd.concat(tables).reset_index(names="step"))
