"""Draw the pictures of the README and of docs/results.md from the CSVs of studies: ``python experiments/draw_pictures.py``."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

EXPERIMENTS = Path(__file__).resolve().parent
FAST_FAILURE = EXPERIMENTS / "fast_failure"
RUNS = FAST_FAILURE / "runs"
# Okabe and Ito, "Color Universal Design" (2008).
ORANGE, BLUE, GREEN, BLACK, GRAY = "#D55E00", "#0072B2", "#009E73", "#000000", "#6F6F6F"
FMA_THRESHOLD = 2**16 * np.log(2)
"""Logit from which the FMA exponent is off by more than O's rounding hides: docs/results.md."""


def page(height: float, rows: int, columns: int, **options: Any) -> tuple[Figure, Any]:
    """A figure with panels, [rows, columns]. Its 9 inches are 800 pixels of a page, and 12 points are 15 pixels."""
    figure = Figure(figsize=(9, height), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False, **options)
    for axis in panels.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=11)
    return figure, panels


def count_steps(axis: Any, places: range) -> None:
    axis.set_xticks(places, [f"{step:,}" for step in places])
    axis.set_xlabel("step", fontsize=11)


def write(axis: Any, *labels: tuple[float, float, str, str]) -> None:
    for x, y, words, color in labels:
        axis.text(x, y, words, color=color, fontsize=12)


def save(figure: Figure, path: Path, colors: int = 64) -> None:
    """A PNG of few colors, a quarter of the size; a heat map needs more than lines do."""
    full = io.BytesIO()
    figure.savefig(full, format="png", dpi=180)
    image = Image.open(full).convert("RGB").quantize(colors, kmeans=2)
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


def loss_and_logits(colors: dict[str, str], logits: str) -> tuple[Figure, Any, Any]:
    """Left the training loss, right the column ``logits`` of the probes, of runs on one wheel's text whose names begin so."""
    figure, [[left, right]] = page(4.2, 1, 2)
    left.set(ylim=(0, 8.5), xlim=(0, 6300))
    right.set(yscale="log", ylim=(1, 1e7), xlim=(0, 6300))
    right.axhline(FMA_THRESHOLD, color=GRAY, linewidth=0.8, linestyle=":")
    title = "largest attention logit" + (" of layer 1" if logits == "max_logit_1" else "")
    for axis, words in ((left, "training loss"), (right, title)):
        axis.set_title(words, fontsize=12, loc="left")
        count_steps(axis, range(0, 6001, 2000))
    for name, color in colors.items():
        for run in sorted((EXPERIMENTS / "one_wheel" / "runs").glob(f"{name}_*")):
            loss, rows = smooth_loss(run, 40), probes(run)
            left.plot(loss.index, loss, color=color, linewidth=1.3)
            right.plot(rows["step"], rows[logits], color=color, linewidth=1.3)
    write(right, (100, 6e4, f"{FMA_THRESHOLD:,.0f}", GRAY))
    return figure, left, right


def front() -> Figure:
    figure, left, right = loss_and_logits({"flash": ORANGE, "consistent": BLUE}, "max_logit_max")
    write(left, (1500, 4.6, "flash: rises\nin 5 of 6", ORANGE), (1500, 1.4, "flash_consistent:\nstable", BLUE))
    write(right, (900, 4e5, "flash", ORANGE), (2600, 90, "flash_consistent", BLUE))
    return figure


def torchs_kernels() -> Figure:
    colors = {"torch_flash": ORANGE, "torch_flex": GREEN, "plain": BLUE}
    figure, left, right = loss_and_logits(colors, "max_logit_1")
    write(
        left,
        (3000, 6.2, "FlashAttention-2,\nin torch's SDPA", ORANGE),
        (900, 3.2, "FlexAttention", GREEN),
        (800, 1.7, "plain attention", BLUE),
    )
    write(
        right,
        (4150, 2e5, "FlashAttention-2", ORANGE),
        (100, 3e5, "FlexAttention", GREEN),
        (3600, 20, "plain attention", BLUE),
    )
    return figure


def layers() -> Figure:
    figure, panels = page(5.4, 2, 3, sharex=True, sharey=True)
    titles = {
        "flash": "flash",
        "flash_subtracted": "flash, subtract first",
        "sdpa_flash": "torch's SDPA",
        "fp32_o": "FP32 O in delta",
        "delta_from_p": "delta from P",
        "all_but_layer_1": "delta from P in layer 1 only",
    }
    for axis, (run, title) in zip(panels.flat, titles.items(), strict=True):
        rows = probes(RUNS / run)
        rows = rows[rows["step"] >= 1000]
        for layer in (0, *range(4, 12), 1, 2, 3):
            color = {1: ORANGE, 2: BLUE, 3: GREEN}.get(layer, "#BBBBBB")
            axis.plot(rows["step"], rows[f"max_logit_{layer}"], color=color, linewidth=1.8 if 1 <= layer <= 3 else 0.8)
        axis.set_title(title, fontsize=12, loc="left")
        axis.set(yscale="log", ylim=(1, 1e8), xlim=(1000, 13_200))
    for axis in panels[1]:
        count_steps(axis, range(4000, 13_000, 4000))
    figure.supylabel("largest attention logit", fontsize=12)
    names = (("layer 1", 5e5, ORANGE), ("layer 2", 130, BLUE), ("layer 3", 25, GREEN), ("other layers", 4, GRAY))
    write(panels[0, 0], *((5800, y, words, color) for words, y, color in names))
    return figure


def bins(x: pd.Series, y: pd.Series, least: int = 8) -> pd.DataFrame:
    """Quartiles of y in each factor of 2 of x that has at least so many points."""
    groups = y.groupby(np.floor(np.log2(x)))
    table = groups.quantile([0.25, 0.5, 0.75]).unstack()[groups.size() >= least]
    return table.set_axis(2.0 ** (table.index + 0.5))


def large_logits() -> Figure:
    """The error of delta in one-hot rows and the gradient norm against the largest logit: median and quartiles."""
    figure, [[left, right]] = page(4.2, 1, 2)
    heads = pd.read_csv(FAST_FAILURE / "one_hot_heads.csv.gz")
    kinds = ((("p_unrounded", "subtracted", "unfused"), GREEN), (("torch",), BLACK), (("nearest",), ORANGE))
    for names, color in kinds:
        chosen = heads[heads["kind"].isin(names)]
        courses = pd.concat(gradient_norms(RUNS / run) for run in chosen["run"].unique())
        for axis, x, y in (
            (left, chosen["max_logit"], chosen["delta_error"].clip(lower=1e-7)),
            (right, courses["max_logit_1"], courses["grad_norm"]),
        ):
            table = bins(x, y)
            axis.plot(table.index, table[0.5], color=color, linewidth=1.8)
            axis.fill_between(table.index, table[0.25], table[0.75], color=color, alpha=0.18, linewidth=0)
    for axis in (left, right):
        axis.set(xscale="log", yscale="log", xlim=(1e3, 2e7))
        axis.set_xlabel("largest logit", fontsize=11)
        axis.axvline(FMA_THRESHOLD, color=GRAY, linewidth=0.8, linestyle=":")
    left.set_ylim(7e-8, 6e-3)
    left.set_title("relative error of delta in one-hot rows", fontsize=12, loc="left")
    right.set_title("gradient norm", fontsize=12, loc="left")
    write(left, (1.5e5, 2.5e-3, "FMA exponent", ORANGE), (1.2e6, 1.4e-5, "torch's\nSDPA", BLACK))
    write(left, (1.2e3, 3.5e-4, "other exponents,\nP not rounded", GREEN), (5.5e4, 9e-8, f"{FMA_THRESHOLD:,.0f}", GRAY))
    write(right, (1.3e5, 300, "FMA\nexponent", ORANGE), (1.2e6, 1.0, "torch's\nSDPA", BLACK), (2e3, 0.45, "all", GRAY))
    return figure


def gradient_norms(folder: Path) -> pd.DataFrame:
    """A row a probe: the largest logit of layer 1, and the median gradient norm of the 100 steps from there on."""
    table = metrics(folder).dropna(subset=["grad_norm"])
    medians = table.groupby(table["step"] // 100 * 100)["grad_norm"].median()
    return probes(folder).set_index("step")[["max_logit_1"]].join(medians, how="inner").loc[1000:]


def main() -> None:
    save(front(), EXPERIMENTS.parent / "docs" / "pictures" / "front.png")
    save(torchs_kernels(), EXPERIMENTS.parent / "docs" / "pictures" / "torchs_kernels.png")
    save(layers(), FAST_FAILURE / "layers.png")
    save(large_logits(), FAST_FAILURE / "large_logits.png")


if __name__ == "__main__":
    main()
