"""One picture of several runs over the same steps: loss, largest W_Q norm, gradient norm, validation loss.

The panels stand on one axis of steps, above each other, so that the order of events can be seen: the norm parts, the loss
follows. Everything with words stands outside the axes. Sizes are in inches; shrunk to a column of 3.4 inches the text stays
legible.
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
from figures import curves

# Okabe and Ito, "Color Universal Design" (2008), without its yellow, which is too light for a line on white.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
# A second key beside colour: curves that lie on each other show through the gaps, and a grey print stays readable.
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1)), (0, (5, 1.5, 1.5, 1.5)), (0, (9, 2)))

WIDTH, RIGHT, EDGE = 4.6, 0.2, 0.1
MARKS_HEIGHT, PANEL_GAP, XLABEL_HEIGHT, LINE_GAP = 0.3, 0.16, 0.5, 0.09
DPI = 200
TEXT, SMALL = 9.0, 7.5


@dataclass(frozen=True, kw_only=True)
class Course:
    """One run to draw: ``label`` goes into the legend, ``exploded_at`` is marked."""

    label: str
    records: Sequence[curves.Record]
    exploded_at: int | None


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One column of the metrics and how it is shown."""

    key: str
    title: str
    height: float
    is_log: bool = False
    is_noisy: bool = False
    has_dots: bool = False
    stays_below_start: bool = False
    from_zero: bool = False


PANELS = (
    Panel(key="train_loss", title="training loss\n(nats/token)", height=1.9, is_noisy=True, stays_below_start=True),
    Panel(key="w_q_norm_max", title="largest spectral\nnorm of a $W_Q$", height=1.5, from_zero=True),
    Panel(key="grad_norm", title="gradient norm\n(before clipping)", height=1.2, is_noisy=True, is_log=True),
    Panel(key="val_loss", title="validation loss\n(nats/token)", height=1.2, has_dots=True, stays_below_start=True),
)


def draw_courses(courses: Sequence[Course], path: Path, *, title: str, note: str, fine_print: str) -> None:
    """``course_figure`` into ``path`` (png, pdf or svg, by its ending), written aside and renamed."""
    figure = course_figure(courses, title=title, note=note, fine_print=fine_print)
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix.lstrip(".").lower(), dpi=DPI)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_bytes(path, small(picture.getvalue()) if path.suffix.lower() == ".png" else picture.getvalue())


def small(picture: bytes, colours: int = 256) -> bytes:
    """A PNG with a table of so many colours, 256 of which take a third of the space: lines and heat maps, not photographs.

    Two rounds of k-means: without them the colours of thin lines move, as antialiased edges outnumber them.
    """
    from PIL import Image

    full, out = Image.open(io.BytesIO(picture)), io.BytesIO()
    full.convert("RGB").quantize(colours, kmeans=2).save(out, format="png", optimize=True, dpi=full.info["dpi"])
    return out.getvalue()


def course_figure(courses: Sequence[Course], *, title: str, note: str, fine_print: str) -> Any:
    """A matplotlib ``Figure`` of the runs; a panel appears when some run has a finite value for it.

    ``note`` and ``fine_print`` are printed under the plot.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [panel for panel in PANELS if any(np.isfinite(_series(c, panel)[1]).any() for c in courses)]
    window = smoothing_window(max(len(_series(course, PANELS[0])[0]) for course in courses))
    figure = Figure(dpi=DPI)
    FigureCanvasAgg(figure)
    words = _explain_marks(courses, panels, window) + fine_print
    all_axes = _lay_out(figure, courses, panels, title=title, under=((note, TEXT), (words, SMALL)))
    for axes, panel in zip(all_axes, panels, strict=True):
        _draw_panel(axes, panel, courses, window)
    _mark_explosions(all_axes, courses)
    _make_room(figure, all_axes)
    return figure


def smoothing_window(count: int) -> int:
    """Values to average in a curve of ``count``: a sixtieth of the width, which blurs nothing that the eye would see."""
    return min(200, max(1, count // 60))


def style(index: int) -> dict[str, Any]:
    """Colour, dashes and width of the ``index``-th run; the first 40 all differ, and a later one leaves the edges of an
    earlier one to be seen where they lie on each other."""
    width = max(2.6 - 0.5 * index, 1.1)
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": DASHES[index % len(DASHES)], "linewidth": width}


def _series(course: Course, panel: Panel) -> tuple[np.ndarray, np.ndarray]:
    steps, values = curves.column(course.records, panel.key)
    return np.asarray(steps, dtype=np.float64), np.asarray(values, dtype=np.float64)


def _explain_marks(courses: Sequence[Course], panels: Sequence[Panel], window: int) -> str:
    words = f"Thin line: as logged; thick: mean of the last {window} logged. " if window > 1 else ""
    if any(course.exploded_at is not None for course in courses):
        words += "▼ and dotted line: explosion. "
    if any(not np.isfinite(_series(course, panel)[1]).all() for course in courses for panel in panels):
        words += "× at the top: first value that is not finite. "
    return words


def _lay_out(
    figure: Any, courses: Sequence[Course], panels: Sequence[Panel], *, title: str, under: Sequence[tuple[str, float]]
) -> list[Any]:
    """Height of the figure and of everything in it: title, legend, panels, text. Returns the panels' axes, top to bottom."""
    from matplotlib.lines import Line2D

    figure.set_size_inches(WIDTH, 1)
    renderer = figure.canvas.get_renderer()
    head = figure.text(0, 0, _wrapped(title, 1.15 * TEXT), fontsize=1.15 * TEXT, weight="bold", va="top")
    lines = [Line2D([], [], **style(index)) for index in range(len(courses))]
    labels = [_wrapped(course.label, TEXT, narrower=0.45) for course in courses]
    legend = figure.legend(
        lines, labels, loc="upper left", frameon=False, fontsize=TEXT, borderpad=0, borderaxespad=0, handlelength=2.4
    )
    feet = [figure.text(0, 0, _wrapped(text, size), fontsize=size, va="top") for text, size in under if text]
    feet[-1].set_color("0.3")

    def height_of(artist: Any) -> float:
        return float(artist.get_window_extent(renderer).height) / DPI

    drawn = sum(panel.height for panel in panels) + PANEL_GAP * (len(panels) - 1)
    marks = MARKS_HEIGHT if any(course.exploded_at is not None for course in courses) else LINE_GAP
    above = EDGE + (height_of(head) + LINE_GAP if title else 0) + height_of(legend) + marks
    total = above + drawn + XLABEL_HEIGHT + sum(height_of(foot) + LINE_GAP for foot in feet) + EDGE
    heights = [height_of(foot) for foot in feet]
    top_of_legend = above - marks - height_of(legend)
    figure.set_size_inches(WIDTH, total)
    head.set_position((EDGE / WIDTH, 1 - EDGE / total))
    legend.set_bbox_to_anchor((EDGE / WIDTH, 1 - top_of_legend / total), transform=figure.transFigure)
    all_axes: list[Any] = []
    y = above
    for panel in panels:
        box = (0, 1 - (y + panel.height) / total, 1, panel.height / total)
        all_axes.append(figure.add_axes(box, sharex=all_axes[0] if all_axes else None))
        all_axes[-1].tick_params(which="both", labelsize=TEXT - 1, labelbottom=panel is panels[-1])
        y += panel.height + PANEL_GAP
    all_axes[-1].set_xlabel("optimiser step", fontsize=TEXT)
    y += XLABEL_HEIGHT - PANEL_GAP
    for foot, height in zip(feet, heights, strict=True):
        foot.set_position((EDGE / WIDTH, 1 - y / total))
        y += height + LINE_GAP
    return all_axes


def _make_room(figure: Any, all_axes: Sequence[Any]) -> None:
    """Width of the axes: at the left of each its name and its numbers, all names and all axes in line."""
    renderer = figure.canvas.get_renderer()
    names, numbers = [], []
    for axes in all_axes:
        axes.get_tightbbox(renderer)
        names.append(axes.yaxis.label.get_window_extent(renderer).width / DPI)
        numbers += [label.get_window_extent(renderer).width / DPI for label in axes.get_yticklabels(which="both")]
    left = EDGE + max(names) + max(numbers) + 2 * LINE_GAP
    for axes in all_axes:
        _, bottom, _, height = axes.get_position().bounds
        axes.set_position((left / WIDTH, bottom, (WIDTH - left - RIGHT) / WIDTH, height))
        axes.yaxis.set_label_coords((EDGE - left) / (WIDTH - left - RIGHT), 0.5)


def _wrapped(text: str, size: float, narrower: float = 0.0) -> str:
    """Lines that fit the figure; a character of the default font is about 0.53 of its size wide."""
    return textwrap.fill(text, width=int((WIDTH - 2 * EDGE - narrower) * 72 / (0.53 * size)))


def _draw_panel(axes: Any, panel: Panel, courses: Sequence[Course], window: int) -> None:
    seen = []
    for index, course in enumerate(courses):
        steps, values = _series(course, panel)
        if not len(steps):
            continue
        look, shown = style(index), np.where(np.isfinite(values), values, np.nan)
        if panel.is_log:
            shown = np.where(shown > 0, shown, np.nan)
        if panel.is_noisy and window > 1:
            axes.plot(steps, shown, color=look["color"], linewidth=0.5, alpha=0.3)
            # On a logarithmic axis the mean of the logarithms; one spike would otherwise show for a whole window.
            forth, back = (np.log, np.exp) if panel.is_log else (np.asarray, np.asarray)
            axes.plot(steps, back(curves.trailing_mean(forth(shown), window)), **look)
        else:
            axes.plot(steps, shown, marker="o" if panel.has_dots else "", markersize=3, **look)
        bad = np.flatnonzero(~np.isfinite(values))
        if len(bad):
            at = {"transform": axes.get_xaxis_transform(), "clip_on": False, "zorder": 5}
            axes.plot(steps[bad[0]], 0.95, marker="X", color=look["color"], markeredgecolor="white", markersize=8, **at)
        seen.append(shown[np.isfinite(shown)])
    _scale(axes, panel, [values for values in seen if len(values)])
    axes.set_ylabel(panel.title, fontsize=TEXT, va="top")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)


def _scale(axes: Any, panel: Panel, seen: Sequence[np.ndarray]) -> None:
    """Limits that an explosion cannot stretch until nothing else is to be seen; what is beyond them runs off the top."""
    from matplotlib.ticker import LogLocator, NullFormatter

    values = np.concatenate(seen)
    low, high = float(values.min()), float(values.max())
    if panel.is_log or (panel.from_zero and high > 50 * low > 0):
        axes.set_yscale("log")
        high = min(high, 1e4 * float(np.median(values)))
        axes.set_ylim(low / 1.2, high * 1.2)
        if high < 100 * low:
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        return
    if panel.stays_below_start:
        high = min(high, 1.1 * max(float(course[0]) for course in seen))
    pad = 0.05 * (high - low) or 0.1
    axes.set_ylim(0 if panel.from_zero and low >= 0 else low - pad, high + pad)


def _mark_explosions(all_axes: Sequence[Any], courses: Sequence[Course]) -> None:
    every_step = [record["step"] for course in courses for record in course.records]
    first, last = min(every_step), max(every_step)
    span = max(last - first, 1)
    all_axes[0].set_xlim(first - 0.01 * span, last + 0.01 * span)
    told: list[int] = []
    for index, course in enumerate(courses):
        step = course.exploded_at
        if step is None:
            continue
        colour = style(index)["color"]
        for axes in all_axes:
            axes.axvline(step, color=colour, linestyle=":", linewidth=1.1, zorder=1)
        top = {"transform": all_axes[0].get_xaxis_transform(), "clip_on": False}
        all_axes[0].plot(step, 1.03, marker="v", color=colour, markersize=6, **top)
        # Where two numbers would overlap the second is left to the legend.
        if all(abs(step - other) > 0.08 * span for other in told):
            all_axes[0].text(step, 1.07, str(step), color=colour, fontsize=TEXT - 1, ha="center", va="bottom", **top)
            told.append(step)
