"""Figures drawn from the metrics of runs: 2 and 7 (loss), 11 (W_Q norms over training), 13 (repeated maxima before the explosion).

Records are those of ``training.metrics.read_metrics`` and ``training.telemetry.read_telemetry``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from figures import canvas, courses, curves
from figures.canvas import COLUMN, SMALL, Drawn

PLACES = 200
"""Places along a noisy curve: at column width more could not be told apart."""
LOSSES = {"val_loss": "validation loss", "train_loss": "training loss"}
TIES = "ties_1e3"
"""Share of rows with a second score within 1e-3 of the maximum, in the telemetry."""
CURVE = ("column", "step", "mean", "lowest", "highest")


@dataclass(frozen=True, kw_only=True)
class RunCurves:
    """A run as these figures need it."""

    name: str
    attention: str
    group: str
    """What was trained and how; Figure 7 has a panel for each."""
    exploded_at: int | None
    """By ``curves.explosion_step``."""
    records: Sequence[curves.Record]
    telemetry: Sequence[curves.Record] = field(default=())

    def series(self, column: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of a column of the metrics, float64."""
        steps, values = curves.column(self.records, column)
        return np.asarray(steps, dtype=np.float64), np.asarray(values, dtype=np.float64)

    @property
    def label(self) -> str:
        """Name, attention and end of the run."""
        end = "" if self.exploded_at is None else f", explodes at {self.exploded_at:,}"
        return f"{self.name}: {self.attention}{end}"


def _legend(figure: Any, runs: Sequence[RunCurves]) -> None:
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], **_look(index)) for index in range(len(runs))]
    labels = [canvas.wrapped(run.label, COLUMN - 0.5) for run in runs]
    canvas.legend(figure, lines, labels, loc="outside upper left")


def _look(index: int) -> dict[str, Any]:
    return courses.style(index) | {"linewidth": max(1.6 - 0.2 * index, 0.8)}


def _mark(axes: Any, index: int, run: RunCurves) -> None:
    if run.exploded_at is not None:
        axes.axvline(run.exploded_at, color=_look(index)["color"], linestyle=":", linewidth=0.8, zorder=1)


def _loss_limits(series: Sequence[np.ndarray], runs: Sequence[RunCurves], *, log: bool = False) -> tuple[float, float]:
    """Up to a little above where the runs began: an explosion runs off the top instead of flattening everything."""
    starts = [losses[np.isfinite(losses)][:1] for run in runs for losses in (run.series("train_loss")[1],)]
    return canvas.limits(series, at_most=1.1 * float(np.concatenate(starts).max(initial=0.0)), log=log)


@dataclass(frozen=True)
class Curve:
    """A curve as it is drawn: each field [N]. Of a noisy one, each place stands for some logged values in a row."""

    steps: np.ndarray
    """The last step of each place."""
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray

    def rows(self, *names: Any) -> list[tuple[Any, ...]]:
        """Rows of a table, ``names`` in front."""
        columns = zip(self.steps, self.mean, self.low, self.high, strict=True)
        return [(*names, int(step), float(mean), float(low), float(high)) for step, mean, low, high in columns]


def curve(run: RunCurves, column: str, size: int = 1) -> Curve:
    """A column of the metrics, ``size`` logged values to a place (the last may have fewer): their mean, smallest and largest.

    A place with a value that is not finite has such a mean, which shows as a gap.
    """
    steps, values = run.series(column)
    if size == 1:
        return Curve(steps, values, values, values)
    parts = [np.arange(start, min(start + size, len(steps))) for start in range(0, len(steps), size)]
    mean, low, high = (np.asarray([of(values[part]) for part in parts]) for of in (np.mean, np.min, np.max))
    return Curve(np.asarray([steps[part[-1]] for part in parts]), mean, low, high)


def loss_column(runs: Sequence[RunCurves]) -> str:
    """``val_loss`` where some run was evaluated more than once, else ``train_loss``."""
    return "val_loss" if any(len(run.series("val_loss")[0]) > 1 for run in runs) else "train_loss"


def place_size(runs: Sequence[RunCurves], column: str) -> int:
    """Logged values to a place, one size for all, so that the longest run has about ``PLACES``."""
    return max(1, -(-max(len(run.series(column)[0]) for run in runs) // PLACES))


def _draw_curve(
    axes: Any, index: int, run: RunCurves, column: str, size: int, *, from_step: float = -1
) -> Curve | None:
    """Mean, with the range that the values of a place lie in; None where nothing is finite."""
    drawn = curve(run, column, size)
    kept = (drawn.steps >= from_step) & np.isfinite(drawn.mean)
    if not kept.any():
        return None
    look, dots = _look(index), {"marker": "o", "markersize": 1.8} if column == "val_loss" else {}
    if (drawn.low != drawn.high).any():
        axes.fill_between(
            drawn.steps[kept], drawn.low[kept], drawn.high[kept], color=look["color"], alpha=0.2, linewidth=0
        )
    axes.plot(drawn.steps[kept], drawn.mean[kept], **(look | dots))
    _mark(axes, index, run)
    return drawn


def draw_losses(runs: Sequence[RunCurves]) -> Drawn:
    """Figure 2: validation loss of the failing run and of the others, and their training loss below (mean and range).

    The paper's has the validation loss of the BF16 run that fails and of a stable configuration; here any runs.
    """
    columns = [c for c in ("val_loss", "train_loss") if any(np.isfinite(run.series(c)[1]).any() for run in runs)]
    figure = canvas.sheet(0.5 + 0.14 * len(runs) + 1.35 * len(columns))
    all_axes = figure.subplots(len(columns), 1, sharex=True, squeeze=False)[:, 0]
    rows: list[tuple[Any, ...]] = []
    for axes, column in zip(all_axes, columns, strict=True):
        size = place_size(runs, column)
        found = [(run, _draw_curve(axes, index, run, column, size)) for index, run in enumerate(runs)]
        axes.set_ylim(_loss_limits([drawn.mean for _, drawn in found if drawn], runs))
        canvas.dress(axes, y=f"{LOSSES[column]}\n(nats/token)")
        rows += [row for run, drawn in found if drawn for row in drawn.rows(run.name, run.attention, column)]
    all_axes[-1].set_xlabel("optimizer step", fontsize=canvas.TEXT)
    _legend(figure, runs)
    return Drawn(figure, canvas.table(("run", "attention", *CURVE), rows))


def draw_stabilized(runs: Sequence[RunCurves]) -> Drawn:
    """Figure 7: the stabilized attention against the original one, a panel for each model and optimizer, both axes logarithmic.

    The paper's panels are GPT-2 small with AdamW, the same with Muon, and GPT-2 medium with AdamW. Validation loss, or training loss
    where no run of a panel has one.
    """
    groups = list(dict.fromkeys(run.group for run in runs))
    figure = canvas.sheet(0.5 + 0.14 * len(runs) + 1.4 * len(groups))
    all_axes = figure.subplots(len(groups), 1, squeeze=False)[:, 0]
    rows: list[tuple[Any, ...]] = []
    for axes, group in zip(all_axes, groups, strict=True):
        inside = [run for run in runs if run.group == group]
        column = loss_column(inside)
        size = place_size(inside, column)
        found = [(run, _draw_curve(axes, runs.index(run), run, column, size, from_step=1)) for run in inside]
        axes.set_xscale("log")
        axes.set_yscale("log")
        shown = [drawn.mean[drawn.steps >= 1] for _, drawn in found if drawn]
        if shown:
            axes.set_ylim(_loss_limits(shown, inside, log=True))
        _plain_log_ticks(axes)
        canvas.dress(axes, x="optimizer step", y=f"{LOSSES[column]}\n(nats/token)", title=group)
        rows += [row for run, drawn in found if drawn for row in drawn.rows(group, run.name, run.attention, column)]
    _legend(figure, runs)
    return Drawn(figure, canvas.table(("panel", "run", "attention", *CURVE), rows))


def _plain_log_ticks(axes: Any) -> None:
    """A few plain numbers, where powers of ten alone would say little."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def norm_grid(run: RunCurves, matrix: str = "w_q") -> tuple[np.ndarray, np.ndarray]:
    """Steps [S] and spectral norms [L, S] of W_Q (or ``w_k``) of every layer, from the telemetry, or for W_Q from the metrics."""
    steps, lists = curves.column(run.telemetry, f"{matrix}_norm")
    if steps:
        return np.asarray(steps), np.asarray(lists, dtype=np.float64).T
    columns: list[dict[int, float]] = []
    while values := dict(zip(*curves.column(run.records, f"{matrix}_norm_{len(columns)}"), strict=True)):
        columns.append(values)
    common = sorted(set.intersection(*(set(values) for values in columns))) if columns else []
    return np.asarray(common), np.asarray([[values[step] for step in common] for values in columns], dtype=np.float64)


def draw_norms(runs: Sequence[RunCurves]) -> Drawn:
    """Figure 11: spectral norms over layers and training steps as heat maps, one scale for all.

    The paper's shows every weight of attention and MLP; here W_Q, and W_K where the telemetry has it.
    """
    grids = [
        (run, name, *norm_grid(run, matrix))
        for run in runs
        for matrix, name in (("w_q", "$W_Q$"), ("w_k", "$W_K$"))
        if norm_grid(run, matrix)[1].size
    ]
    figure = canvas.sheet(0.35 + 1.25 * len(grids))
    all_axes = figure.subplots(len(grids), 1, squeeze=False)[:, 0]
    everything = np.concatenate([grid.ravel() for *_, grid in grids])
    positive = everything[np.isfinite(everything) & (everything > 0)]
    from matplotlib.colors import LogNorm

    norm = LogNorm(float(positive.min()), float(positive.max()))
    deepest = max(len(grid) for *_, grid in grids)
    rows: list[tuple[Any, ...]] = []
    for axes, (run, name, steps, grid) in zip(all_axes, grids, strict=True):
        edges = np.append(steps, 2 * steps[-1] - steps[-2] if len(steps) > 1 else steps[-1] + 1)
        image = axes.pcolormesh(
            edges, np.arange(len(grid) + 1) - 0.5, grid, norm=norm, cmap=canvas.SIZES, rasterized=True
        )
        _mark(axes, 0, run)
        canvas.dress(axes, y="layer", title=f"{name}, {run.label}", grid="")
        axes.set_yticks(range(0, len(grid), max(1, len(grid) // 6)))
        rows += [
            (run.name, name.strip("$"), int(step), *grid[:, i], *[""] * (deepest - len(grid)))
            for i, step in enumerate(steps)
        ]
    all_axes[-1].set_xlabel("optimizer step", fontsize=canvas.TEXT)
    bar = figure.colorbar(image, ax=list(all_axes), pad=0.02, aspect=30, fraction=0.06)
    bar.set_label("spectral norm", fontsize=SMALL)
    bar.ax.tick_params(which="both", labelsize=SMALL, length=2, pad=1)
    return Drawn(figure, canvas.table(("run", "matrix", "step", *(f"layer_{layer}" for layer in range(deepest))), rows))


def tie_rates(run: RunCurves) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps, and the share of rows with a repeated maximum: mean over all layers and heads, and the largest of any head."""
    steps, lists = curves.column(run.telemetry, TIES)
    grids = np.asarray(lists, dtype=np.float64).reshape(len(steps), -1)
    return np.asarray(steps), grids.mean(axis=1), grids.max(axis=1, initial=0.0)


def draw_ties(runs: Sequence[RunCurves]) -> Drawn:
    """Figure 13: validation loss, and how many rows fulfil the stabilizer's condition (a repeated maximum), over training.

    The paper counts the activations of its condition in one run; here the share of the probe batch's rows within 1e-3, which has the same
    course: mean over all heads (thick), the largest of any head (thin).
    """
    figure = canvas.sheet(0.5 + 0.14 * len(runs) + 2.7)
    upper, lower = figure.subplots(2, 1, sharex=True)
    loss = loss_column(runs)
    seen, rows = [], []
    for index, run in enumerate(runs):
        drawn = _draw_curve(upper, index, run, loss, place_size(runs, loss))
        if drawn:
            seen.append(drawn.mean)
            rows += [(run.name, loss, step, mean) for step, mean, _, _ in drawn.rows()]
        steps, mean, largest = tie_rates(run)
        lower.plot(steps, mean, **_look(index))
        lower.plot(steps, largest, **(_look(index) | {"linewidth": 0.5}))
        _mark(lower, index, run)
        for name, series in ((f"{TIES}_mean", mean), (f"{TIES}_max", largest)):
            rows += [(run.name, name, int(s), float(v)) for s, v in zip(steps, series, strict=True)]
    if seen:
        upper.set_ylim(_loss_limits(seen, runs))
    lower.set_ylim(bottom=0)
    canvas.dress(upper, y=f"{LOSSES[loss]}\n(nats/token)")
    canvas.dress(lower, x="optimizer step", y="share of rows with\na repeated maximum")
    _legend(figure, runs)
    return Drawn(figure, canvas.table(("run", "column", "step", "value"), rows))
