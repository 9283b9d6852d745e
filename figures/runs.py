"""One picture of several runs over the same steps: training loss, largest logit, gradient norm, validation loss.

Four panels, two by two, wider than tall, below a legend that wraps long labels. Nine inches are 800 pixels of a page.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from figures import canvas, curves

# Okabe and Ito, "Color Universal Design" (2008), without its yellow, which is too light for a line on white.
COLORS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
# A second key beside color: curves that lie on each other show through the gaps, and a gray print stays readable.
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1)), (0, (5, 1.5, 1.5, 1.5)), (0, (9, 2)))

WIDTH, PANEL_HEIGHT, LINE_HEIGHT = 9.0, 2.6, 0.24
DPI = 150
TEXT = 11.0


@dataclass(frozen=True)
class DrawnRun:
    """One run to draw: ``label`` goes into the legend, ``exploded_at`` is marked.

    ``metrics`` and ``telemetry`` as ``curves`` gives them; ``draw_runs`` draws the logits in the column ``max_logit_max`` of the former.
    """

    label: str
    metrics: pd.DataFrame
    exploded_at: int | None
    telemetry: pd.DataFrame = field(default_factory=pd.DataFrame)
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class Panel:
    key: str
    title: str
    is_log: bool = False
    is_noisy: bool = False
    has_dots: bool = False
    stays_below_start: bool = False


PANELS = (
    Panel(key="train_loss", title="training loss", is_noisy=True, stays_below_start=True),
    Panel(key="max_logit_max", title="largest attention logit", is_log=True),
    Panel(key="grad_norm", title="gradient norm, before clipping", is_noisy=True, is_log=True),
    Panel(key="val_loss", title="validation loss", has_dots=True, stays_below_start=True),
)


def draw_runs(runs: Sequence[DrawnRun], path: Path, of_layer: str = "") -> None:
    """A picture of the runs in ``path`` (png, pdf or svg, by its ending), written aside and renamed. Raises ``OSError``.

    A panel appears when some run has a value that it can show, that of the loss where none does. Thin lines are as logged, thick ones the
    mean of the last few; a dotted line is an explosion, a cross the first value that is not finite. ``of_layer``: added to the title of
    the logits, as in " of layer 1".
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    panels = [
        panel
        for panel in PANELS
        if any(_shown(panel, curves.column(run.metrics, panel.key)).notna().any() for run in runs)
    ] or list(PANELS[:1])
    # Values to average: a sixtieth of the width, which blurs nothing that the eye would see.
    window = min(200, max(1, max(len(curves.column(run.metrics, PANELS[0].key)) for run in runs) // 60))
    rows = -(-len(panels) // 2)
    figure = Figure((WIDTH, rows * PANEL_HEIGHT + 0.4), DPI, layout="constrained")
    lines = [Line2D([], [], label=canvas.plain(run.label), **style(index)) for index, run in enumerate(runs)]
    legend = figure.legend(handles=lines, loc="outside upper left", frameon=False, fontsize=TEXT, handlelength=3)
    figure.set_figheight(figure.get_figheight() + LINE_HEIGHT * sum(map(_wrap, legend.get_texts())))
    all_axes = list(figure.subplots(rows, min(2, len(panels)), sharex=True, squeeze=False).flat)
    for unused in all_axes[len(panels) :]:
        unused.remove()
    all_axes = all_axes[: len(panels)]
    for axes, panel in zip(all_axes, panels, strict=True):
        _draw_panel(axes, panel, runs, window)
        axes.set_title(panel.title + (of_layer if panel.key == "max_logit_max" else ""), fontsize=TEXT, loc="left")
        axes.tick_params(which="both", labelsize=TEXT - 1, labelbottom=True)
    for axes in all_axes[-2:]:
        axes.set_xlabel("step", fontsize=TEXT)
    first = min(run.metrics.index.min() for run in runs)
    last = max(run.metrics.index.max() for run in runs)
    span = max(last - first, 1)
    all_axes[0].set_xlim(first - 0.01 * span, last + 0.01 * span)
    for index, run in enumerate(runs):
        if run.exploded_at is not None:
            for axes in all_axes:
                axes.axvline(run.exploded_at, color=style(index)["color"], linestyle=":", linewidth=1.1, zorder=1)
    canvas.save(figure, path, dpi=DPI)


def _wrap(text: Any) -> int:
    """Wraps a label of the legend to the picture's width, by measure, as characters differ; how many lines it has."""
    label = text.get_text()
    room, columns = (WIDTH - 5.6 * TEXT / 72) * DPI, len(label)  # beside it 3 for the line, 2.6 for padding
    while (width := text.get_window_extent().width) > room:
        columns = int(columns * room / width)
        text.set_text(textwrap.fill(label, columns))
    return 1 + text.get_text().count("\n")


def style(index: int) -> dict[str, Any]:
    """Color, dashes and width of the ``index``-th run; the first 40 all differ, and a later one leaves the edges of an
    earlier one to be seen where they lie on each other."""
    width = max(2.6 - 0.5 * index, 1.1)
    return {"color": COLORS[index % len(COLORS)], "linestyle": DASHES[index % len(DASHES)], "linewidth": width}


def _draw_panel(axes: Any, panel: Panel, runs: Sequence[DrawnRun], window: int) -> None:
    seen = []
    for index, run in enumerate(runs):
        values = curves.column(run.metrics, panel.key)
        axes_style, finite, shown = style(index), np.isfinite(values), _shown(panel, values)
        if panel.is_noisy and window > 1:
            axes.plot(shown, color=axes_style["color"], linewidth=0.5, alpha=0.3)
            # On a logarithmic axis the mean of the logarithms; one spike would otherwise show for a whole window.
            forth, back = (np.log, np.exp) if panel.is_log else (pd.Series, pd.Series)
            mean = back(forth(shown).rolling(window, min_periods=1).mean())
            axes.plot(mean.where(shown.notna()), **axes_style)
        else:
            axes.plot(shown, marker="o" if panel.has_dots else "", markersize=3, **axes_style)
        if not finite.all():
            at = {"transform": axes.get_xaxis_transform(), "clip_on": False, "zorder": 5}
            first = values.index[~finite][0]
            axes.plot(first, 0.95, marker="X", color=axes_style["color"], markeredgecolor="white", markersize=8, **at)
        seen.append(shown.dropna().to_numpy())
    if any(map(len, seen)):
        _scale(axes, panel, [values for values in seen if len(values)])
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)


def _shown(panel: Panel, values: pd.Series) -> pd.Series:
    """The values that have a place on the panel's axis, NaN for the others."""
    return values.where(np.isfinite(values) & (values > 0) if panel.is_log else np.isfinite(values))


def _scale(axes: Any, panel: Panel, seen: Sequence[np.ndarray]) -> None:
    """Limits that an explosion cannot stretch until nothing else is to be seen; what is beyond them runs off the top."""
    from matplotlib.ticker import LogLocator, NullFormatter

    values = np.concatenate(seen)
    low, high = float(values.min()), float(values.max())
    if panel.is_log:
        axes.set_yscale("log")
        high = min(high, 1e4 * float(np.median(values)))
        axes.set_ylim(low / 1.2, high * 1.2)
        if high < 100 * low:
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        return
    if panel.stays_below_start:
        high = min(high, 1.1 * max(float(shown[0]) for shown in seen))
    pad = 0.05 * (high - low) or 0.1
    axes.set_ylim(low - pad, high + pad)
