"""Curves of the runs in ``results/``, all on one axis of steps, in the colours and dashes of ``analysis.plots``.

A variant has one look in all pictures; its runs on other seeds are thin lines of that look. Thinned logs are dense in places, so a
noisy curve is drawn as means over stretches of ``STRETCH`` steps, not over so many values.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import files
from analysis import curves, plots
from analysis.report import LAYER, Evidence, Facts
from analysis.report_claims import base, groups

STRETCH = 50
WIDTH, PANEL_HEIGHT, DPI, COLOURS = 6.4, 1.7, 150, 64
LINE, OTHER_SEED = 1.6, 0.8
TEXT = 8.0
LEGEND_EDGES = 0.6
"""Inches of a line of the legend that are no words."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One curve of every run: a column of the metrics, or ("logit") the largest logit of ``LAYER``."""

    key: str
    title: str
    is_log: bool = False
    is_noisy: bool = False


PANELS = (
    Panel(key="train_loss", title="training loss\n(nats/token)", is_noisy=True),
    Panel(key=f"w_q_norm_{LAYER}", title=f"spectral norm of $W_Q$,\nlayer {LAYER}", is_log=True),
    Panel(key="logit", title=f"largest logit,\nlayer {LAYER}", is_log=True),
    Panel(key="grad_norm", title="gradient norm\n(before clipping)", is_noisy=True, is_log=True),
    Panel(key="val_loss", title="validation loss\n(nats/token)"),
)


def stretches(steps: Sequence[int], values: Sequence[float], *, is_log: bool) -> tuple[np.ndarray, np.ndarray]:
    """(middle step, mean) of each stretch of ``STRETCH`` steps that has finite values; of logarithms where ``is_log``."""
    steps_N, values_N = np.asarray(steps, dtype=np.float64), np.asarray(values, dtype=np.float64)
    fine = np.isfinite(values_N) & ((values_N > 0) | (not is_log))
    steps_N, values_N = steps_N[fine], values_N[fine]
    if is_log:
        values_N = np.log(values_N)
    number_N = (steps_N // STRETCH).astype(int)
    numbers = np.unique(number_N)
    means = np.array([values_N[number_N == number].mean() for number in numbers])
    middles = np.array([steps_N[number_N == number].mean() for number in numbers])
    return middles, np.exp(means) if is_log else means


def series(run: Evidence, facts: Facts, panel: Panel) -> tuple[np.ndarray, np.ndarray]:
    """What a panel draws of a run, float64."""
    if panel.key == "logit":
        return np.array(list(facts.logit), dtype=np.float64), np.array(list(facts.logit.values()), dtype=np.float64)
    steps, values = curves.column(run.records, panel.key)
    if panel.is_noisy:
        return stretches(steps, values, is_log=panel.is_log)
    return np.asarray(steps, dtype=np.float64), np.asarray(values, dtype=np.float64)


def looks(runs: Sequence[tuple[Evidence, Facts]], order: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Colour, dashes and width of every run, by name; ``order``: variants that keep their look whatever runs there are."""
    variants = list(dict.fromkeys([*order, *(base(run.name) for run, _ in runs)]))
    firsts = {group.runs[0][0].name for group in groups(runs, {}) if group.runs}
    return {
        run.name: plots.style(variants.index(base(run.name)))
        | {"linewidth": LINE if run.name in firsts else OTHER_SEED}
        for run, _ in runs
    }


def looks_by_recipe(runs: Sequence[tuple[Evidence, Facts]]) -> dict[str, dict[str, Any]]:
    """As ``looks``, but one colour a recipe and one kind of dashes an attention; both in the order of the runs."""
    recipes, attentions = (
        list(dict.fromkeys(of)) for of in zip(*((r.recipe, r.attention) for r, _ in runs), strict=True)
    )
    return {
        run.name: plots.style(0)
        | {
            "color": plots.COLOURS[recipes.index(run.recipe) % len(plots.COLOURS)],
            "linestyle": plots.DASHES[attentions.index(run.attention) % len(plots.DASHES)],
            "linewidth": LINE,
        }
        for run, _ in runs
    }


def draw(
    runs: Sequence[tuple[Evidence, Facts]],
    panels: Sequence[Panel],
    path: Path,
    *,
    look: dict[str, dict[str, Any]],
    last_step: int | None = None,
) -> None:
    """Write the picture, to ``last_step`` or the last step of the longest run; ``look``: of every run, see ``looks``."""
    save(figure(runs, panels, look, last_step), path)


def save(drawn: Any, path: Path) -> None:
    """Write a matplotlib ``Figure`` as a small PNG."""
    picture = io.BytesIO()
    drawn.savefig(picture, format="png", dpi=DPI)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_bytes(path, plots.small(picture.getvalue(), COLOURS))


def figure(
    runs: Sequence[tuple[Evidence, Facts]],
    panels: Sequence[Panel],
    look: dict[str, dict[str, Any]],
    last_step: int | None = None,
) -> Any:
    """A matplotlib ``Figure``: one panel above the other, a legend of variants on top, dotted lines where runs explode."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    variants = groups(runs, {})
    # A character of the default font is about 0.53 of its size wide.
    characters = int((WIDTH - LEGEND_EDGES) * 72 / (0.53 * TEXT))
    labels = [textwrap.fill(f"{group.name}: {group.outcome}", characters) for group in variants]
    height = PANEL_HEIGHT * len(panels) + 0.35 + 0.17 * sum(1 + label.count("\n") for label in labels)
    drawn = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(drawn)
    all_axes = drawn.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, panel in zip(all_axes, panels, strict=True):
        for run, facts in runs:
            steps, values = series(run, facts, panel)
            marker = "o" if panel.key == "val_loss" else ""
            axes.plot(steps, values, marker=marker, markersize=2.5, **look[run.name])
            if facts.exploded_at is not None:
                axes.axvline(facts.exploded_at, color=look[run.name]["color"], linestyle=":", linewidth=1.0, zorder=1)
        _finish(axes, panel, runs)
    if last_step is not None:
        all_axes[-1].set_xlim(-0.02 * last_step, 1.02 * last_step)
    all_axes[-1].set_xlabel("optimiser step", fontsize=TEXT + 1)
    lines = [Line2D([], [], **look[group.runs[0][0].name]) for group in variants]
    drawn.legend(lines, labels, loc="outside upper left", frameon=False, fontsize=TEXT, handlelength=3)
    return drawn


def _finish(axes: Any, panel: Panel, runs: Sequence[tuple[Evidence, Facts]]) -> None:
    """Scales and names; a loss has the range that it has from step 500 on."""
    if panel.is_log:
        axes.set_yscale("log")
    elif panel.key.endswith("_loss"):
        late = [
            value for run, facts in runs for step, value in zip(*series(run, facts, panel), strict=True) if step >= 500
        ]
        if late:
            low, high = min(late), max(late)
            pad = 0.05 * (high - low) or 0.1
            axes.set_ylim(low - pad, high + pad)
    axes.set_ylabel(panel.title, fontsize=TEXT)
    axes.tick_params(labelsize=TEXT)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
