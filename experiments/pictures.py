"""Draw the README's picture from the runs in experiments/fast_failure: ``python experiments/pictures.py``."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

EXPERIMENTS = Path(__file__).resolve().parent
RUNS = EXPERIMENTS / "fast_failure" / "runs"
# Okabe and Ito, "Color Universal Design" (2008).
ORANGE, BLUE, GREEN, PINK, BLACK, GREY = "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#000000", "#6F6F6F"
FMA_THRESHOLD = 2**16 * np.log(2)
"""Logit from which the FMA exponent is off by more than O's rounding hides: docs/results.md."""


def page(width: float, height: float, columns: int, **options: Any) -> tuple[Figure, Any]:
    """A figure with a row of panels. 9 inches of width are 800 pixels on GitHub, so that 11 points are 14 pixels."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, columns, **options)
    for axis in np.atleast_1d(axes):
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=11)
    return figure, axes


def save(figure: Figure, path: Path) -> None:
    """A PNG of 256 colours, a third of the size."""
    full = io.BytesIO()
    figure.savefig(full, format="png", dpi=180)
    image = Image.open(full).convert("RGB").quantize(256, kmeans=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, optimize=True)
    print(path, path.stat().st_size // 1024, "kB")


def metrics(folder: Path) -> pd.DataFrame:
    return pd.read_csv(folder / "metrics.csv")


def probes(folder: Path) -> pd.DataFrame:
    return pd.read_csv(folder / "probes.csv")


def smooth_loss(folder: Path, window: int = 100) -> pd.Series:
    """Mean training loss of each ``window`` steps, at their middle: logged steps lie closer around an explosion."""
    table = metrics(folder).dropna(subset=["train_loss"])
    means = table.groupby(table["step"] // window)["train_loss"].mean()
    return means.set_axis(means.index * window + window / 2)


def front() -> Figure:
    """Left the training loss, right the largest logit of layer 1, of four attentions on three seeds each."""
    figure, (left, right) = page(9, 4.2, 2)
    for name, colour in (("sdpa_flash", BLACK), ("delta_from_p", GREEN), ("fp32_o", BLUE), ("flash", ORANGE)):
        for seed in ("", "_seed_1", "_seed_2"):
            loss, rows = smooth_loss(RUNS / (name + seed)), probes(RUNS / (name + seed))
            left.plot(loss.index, loss, color=colour, linewidth=1.3)
            right.plot(rows["step"], rows["max_logit_1"], color=colour, linewidth=1.3)
    left.set(ylim=(2.7, 8), xlim=(0, 13_200))
    right.set(yscale="log", ylim=(1, 5e7), xlim=(0, 13_200))
    right.axhline(FMA_THRESHOLD, color=GREY, linewidth=0.8, linestyle=":")
    left.set_title("training loss", fontsize=12, loc="left")
    right.set_title("largest attention logit of layer 1", fontsize=12, loc="left")
    for axis in (left, right):
        axis.set_xlabel("step", fontsize=11)
        axis.set_xticks(range(0, 13_000, 4000), [f"{s:,}" for s in range(0, 13_000, 4000)])
    for axis, x, y, words, colour in (
        (left, 6400, 7.2, "flash:\n3 of 3 explode", ORANGE),
        (left, 6900, 4.1, "torch's SDPA:\n2 of 3 degrade", BLACK),
        (left, 300, 3.2, "delta from P: 3 of 3 stable", GREEN),
        (left, 300, 2.87, "FP32 O in delta: 3 of 3 stable", BLUE),
        (right, 6700, 6e6, "flash", ORANGE),
        (right, 9000, 2e6, "torch's SDPA", BLACK),
        (right, 8500, 1.2e3, "FP32 O in delta", BLUE),
        (right, 8500, 11, "delta from P", GREEN),
        (right, 200, 6e4, f"{FMA_THRESHOLD:,.0f}", GREY),
    ):
        axis.text(x, y, words, color=colour, fontsize=12)
    return figure


def main() -> None:
    save(front(), EXPERIMENTS.parent / "docs" / "pictures" / "front.png")


if __name__ == "__main__":
    main()
