"""What the figures share: a sheet of column width, tables of the numbers drawn, and files that are the same bytes for the same numbers.

Sizes are in inches at print size: a figure is as wide as a column of two and is not shrunk, so that 7 points stay 7 points.
Colors are those of ``figures.courses`` (Okabe and Ito); heat maps use cividis for sizes and RdBu for signs, which stay apart in every
common form of color blindness.
"""

from __future__ import annotations

import csv
import io
import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import files
from figures import courses

COLUMN = 3.3
DPI = 300
TEXT, SMALL = 7.0, 6.0
SIZES, SIGNS = "cividis", "RdBu_r"
ORANGE, BLUE, GREEN, PINK, GRAY = "#D55E00", "#0072B2", "#009E73", "#CC79A7", "0.6"


@dataclass(frozen=True)
class Table:
    """The numbers of a figure: rows of ``columns``, in the order in which they are drawn."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    def csv(self) -> str:
        """As CSV, floats in six digits, what is not finite as nan, inf or -inf."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([_cell(value) for value in row] for row in self.rows)
        return text.getvalue()


@dataclass(frozen=True)
class Drawn:
    """A matplotlib ``Figure`` and the numbers in it."""

    figure: Any
    table: Table


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """A ``Table`` of any rows."""
    return Table(tuple(columns), tuple(tuple(row) for row in rows))


def wrapped(text: str, width: float = COLUMN, size: float = SMALL) -> str:
    """Lines that fit ``width`` inches; a character of the default font is about 0.55 of its size wide."""
    return "\n".join(textwrap.fill(line, int(width * 72 / (0.55 * size))) for line in text.split("\n"))


def _cell(value: Any) -> Any:
    return f"{float(value):.6g}" if isinstance(value, float | np.floating) else value


def sheet(height: float) -> Any:
    """An empty figure of column width that makes room for what is put on it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.03, h_pad=0.03, wspace=0.03, hspace=0.03)
    figure = Figure(figsize=(COLUMN, height), dpi=DPI, layout=layout)
    FigureCanvasAgg(figure)
    return figure


def dress(axes: Any, *, x: str = "", y: str = "", title: str = "", grid: str = "y") -> None:
    """Names, sizes of text, and no frame that says nothing."""
    axes.set_xlabel(x, fontsize=TEXT)
    axes.set_ylabel(y, fontsize=TEXT)
    if title:
        axes.set_title(title, fontsize=SMALL, loc="left")
    axes.tick_params(which="both", labelsize=SMALL, length=2, pad=1.5)
    axes.spines[["top", "right"]].set_visible(False)
    if grid:
        axes.grid(axis=grid, color="0.9", linewidth=0.5)
        axes.set_axisbelow(True)
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_offset_text().set_fontsize(SMALL)


def legend(holder: Any, handles: Sequence[Any], labels: Sequence[str], **place: Any) -> None:
    """A legend without a frame, in small print."""
    if handles:
        holder.legend(
            handles,
            labels,
            frameon=False,
            fontsize=SMALL,
            handlelength=2.2,
            borderpad=0,
            borderaxespad=0.2,
            labelspacing=0.3,
            columnspacing=1.0,
            **place,
        )


def heat(figure: Any, axes: Any, values: np.ndarray, *, signed: bool, label: str = "", **place: Any) -> None:
    """``values`` [rows, columns] as an image with a color bar. ``signed``: white is 0, both ends are alike."""
    from matplotlib.colors import Normalize

    finite = values[np.isfinite(values)]
    if signed:
        # The 99.5th percentile: one outlier would leave all else white.
        top = float(np.percentile(np.abs(finite), 99.5)) if finite.size else 1.0
        top = top or float(np.abs(finite).max(initial=0.0)) or 1.0
        norm: Any = Normalize(-top, top)
    else:
        norm = Normalize()
    image = axes.imshow(
        values, aspect="auto", interpolation="nearest", cmap=SIGNS if signed else SIZES, norm=norm, **place
    )
    bar = figure.colorbar(image, ax=axes, pad=0.02, aspect=18, fraction=0.08)
    bar.ax.tick_params(labelsize=SMALL, length=2, pad=1)
    bar.formatter.set_powerlimits((-2, 3))
    bar.ax.yaxis.get_offset_text().set_fontsize(SMALL)
    bar.outline.set_linewidth(0.4)
    if label:
        bar.set_label(label, fontsize=SMALL)


def limits(series: Sequence[np.ndarray], *, at_most: float = math.inf, log: bool = False) -> tuple[float, float]:
    """Limits for curves: all that is finite, cut at ``at_most``."""
    values = np.concatenate([curve[np.isfinite(curve)] for curve in series])
    low, high = float(values.min()), min(float(values.max()), at_most)
    if log:
        return low / 1.05, high * 1.05
    pad = 0.05 * (high - low) or 0.1
    return low - pad, high + pad


def write(drawn: Drawn, folder: Path, name: str) -> list[Path]:
    """NAME.png, NAME.svg and NAME.csv in ``folder``, each written aside and renamed. Raises ``OSError``."""
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{ending}" for ending in ("png", "svg", "csv")]
    # No date and no random ids: what was drawn again from the same numbers does not differ.
    with matplotlib.rc_context({"svg.hashsalt": name}):
        for path, metadata in ((paths[0], {"Software": None}), (paths[1], {"Date": None, "Creator": None})):
            picture = io.BytesIO()
            drawn.figure.savefig(picture, format=path.suffix[1:], dpi=DPI, metadata=metadata)
            content = picture.getvalue()
            files.write_bytes(path, courses.small(content) if path.suffix == ".png" else content)
    files.write_text(paths[2], drawn.table.csv())
    return paths
