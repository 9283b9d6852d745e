"""What the figures share: a sheet of column width, tables of the numbers drawn, and files that are the same bytes for the same numbers.

Sizes are in inches at print size: a figure is as wide as a column of two and is not shrunk, so that 7 points stay 7 points.
Colors are those of ``figures.runs`` (Okabe and Ito); heat maps use cividis for sizes and RdBu for signs, which stay apart in every
common form of color blindness.
"""

import io
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import files

COLUMN = 3.3
DPI = 300
TEXT, SMALL = 7.0, 6.0
SIZES, SIGNS = "cividis", "RdBu_r"
ORANGE, BLUE = "#D55E00", "#0072B2"


@dataclass(frozen=True)
class Drawn:
    figure: Any
    table: pd.DataFrame


def plain(text: str) -> str:
    """A user's text, of which Matplotlib would read what stands between two dollars as a formula."""
    return text.replace("$", r"\$")


def wrapped(text: str, width: float = COLUMN) -> str:
    """Lines of ``plain`` text that fit ``width`` inches; a character of the default font is about 0.55 of its size wide."""
    text = plain(text)
    return "\n".join(textwrap.fill(line, int(width * 72 / (0.55 * SMALL))) for line in text.split("\n"))


def sheet(height: float) -> Any:
    """An empty figure of column width that makes room for what is put on it."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.03, h_pad=0.03, wspace=0.03, hspace=0.03)
    return Figure(figsize=(COLUMN, height), dpi=DPI, layout=layout)


def style_axes(axes: Any, *, x: str = "", y: str = "", title: str = "", grid: str = "y") -> None:
    """Labels, text sizes, grid, and no frame above and at the right."""
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


def heat(figure: Any, axes: Any, values: np.ndarray) -> None:
    """``values`` [rows, columns] as an image with a color bar: white is 0, both signs are alike."""
    finite = np.abs(values[np.isfinite(values)])
    # The 99.5th percentile: one outlier would leave all else white.
    top = (float(np.percentile(finite, 99.5)) or float(finite.max())) if finite.size else 1.0
    image = axes.imshow(values, aspect="auto", interpolation="nearest", cmap=SIGNS, vmin=-(top or 1.0), vmax=top or 1.0)
    bar = figure.colorbar(image, ax=axes, pad=0.02, aspect=18, fraction=0.08)
    bar.ax.tick_params(labelsize=SMALL, length=2, pad=1)
    bar.formatter.set_powerlimits((-2, 3))
    bar.ax.yaxis.get_offset_text().set_fontsize(SMALL)
    bar.outline.set_linewidth(0.4)


def write(drawn: Drawn, folder: Path, name: str) -> list[Path]:
    """NAME.png and NAME.csv in ``folder``, each written aside and renamed. Raises ``OSError``."""
    paths = [folder / f"{name}.{ending}" for ending in ("png", "csv")]
    # No version in it: what was drawn again from the same numbers does not differ.
    save(drawn.figure, paths[0], dpi=DPI, metadata={"Software": None})
    files.write_text(paths[1], drawn.table.to_csv(index=False, float_format="%.6g"))
    return paths


def save(figure: Any, path: Path, **settings: Any) -> None:
    """A picture of the kind of ``path``'s ending, written aside and renamed. Raises ``OSError``."""
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix.lstrip(".").lower(), **settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_bytes(path, picture.getvalue())
