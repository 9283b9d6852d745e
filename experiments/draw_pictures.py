"""Draw the pictures of the README and of the studies from their CSVs: ``python experiments/draw_pictures.py``."""

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
FAST_FAILURE, LATE_SWITCHES = EXPERIMENTS / "fast_failure", EXPERIMENTS / "late_switches"
PAPER_FIGURES = EXPERIMENTS / "paper_figures"
RUNS = FAST_FAILURE / "runs"
# Okabe and Ito, "Color Universal Design" (2008).
ORANGE, BLUE, GREEN, PINK, BLACK, GRAY = "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#000000", "#6F6F6F"
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
    """Names beside the lines: place, words, color."""
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


def loss_and_logits(steps: int, lowest_loss: float, highest_loss: float, ticks: range) -> tuple[Figure, Any, Any]:
    """A figure of two panels: left the training loss, right the largest logit of layer 1, with the threshold of the FMA exponent."""
    figure, [[left, right]] = page(4.2, 1, 2)
    left.set(ylim=(lowest_loss, highest_loss), xlim=(0, steps))
    right.set(yscale="log", ylim=(1, 5e7), xlim=(0, steps))
    right.axhline(FMA_THRESHOLD, color=GRAY, linewidth=0.8, linestyle=":")
    left.set_title("training loss", fontsize=12, loc="left")
    right.set_title("largest attention logit of layer 1", fontsize=12, loc="left")
    for axis in (left, right):
        count_steps(axis, ticks)
    return figure, left, right


def front() -> Figure:
    """Left the training loss, right the largest logit of layer 1, of five attentions on three seeds each."""
    figure, left, right = loss_and_logits(13_200, 2.7, 8, range(0, 13_000, 4000))
    consistent = EXPERIMENTS / "consistent" / "runs"
    for runs, color in (
        (f"{RUNS}/sdpa_flash{{}}", BLACK),
        (f"{RUNS}/delta_from_p{{}}", GREEN),
        (f"{RUNS}/fp32_o{{}}", BLUE),
        (f"{consistent}/flash_consistent{{}}_long", PINK),
        (f"{RUNS}/flash{{}}", ORANGE),
    ):
        for seed in ("", "_seed_1", "_seed_2"):
            run = Path(runs.format(seed))
            loss, rows = smooth_loss(run), probes(run)
            left.plot(loss.index, loss, color=color, linewidth=1.3)
            right.plot(rows["step"], rows["max_logit_1"], color=color, linewidth=1.3)
    for axis, *label in (
        (left, 6400, 7.2, "flash:\n3 of 3 explode", ORANGE),
        (left, 6200, 4.1, "torch's SDPA (flash back-\nend): 2 of 3 unstable", BLACK),
        (left, 300, 3.4, "3 of 3 stable:", GRAY),
        (left, 300, 3.12, "flash_consistent", PINK),
        (left, 300, 2.84, "delta from P", GREEN),
        (left, 4100, 2.84, "FP32 O in delta", BLUE),
        (right, 6700, 6e6, "flash", ORANGE),
        (right, 7400, 2.2e6, "torch's SDPA (flash)", BLACK),
        (right, 8500, 1.2e3, "FP32 O in delta", BLUE),
        (right, 8500, 14, "delta from P", GREEN),
        (right, 8500, 5.5, "flash_consistent", PINK),
        (right, 200, 6e4, f"{FMA_THRESHOLD:,.0f}", GRAY),
    ):
        write(axis, label)
    return figure


def layers() -> Figure:
    """The largest logit of each layer, in six runs."""
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
            axis.plot(
                rows["step"], rows[f"max_logit_{layer}"], color=color, linewidth=1.8 if layer in (1, 2, 3) else 0.8
            )
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
    kinds = (
        (("p_unrounded", "subtracted", "unfused"), GREEN),
        (("torch",), BLACK),
        (("nearest",), ORANGE),
    )
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


def late_switches() -> Figure:
    """The largest logit and the gradient norm of ``flash`` and of nine branches whose layer 1 was switched."""
    figure, [[left, right]] = page(4.4, 1, 2)
    colors = {"delta_from_p_subtracted": GREEN, "subtracted": BLUE, "delta_from_p": BLACK}
    folders = [RUNS / "flash", *sorted((LATE_SWITCHES / "runs").iterdir())]
    for folder in folders:
        at, color = 1000, ORANGE
        if folder.name != "flash":  # switch_at_STEP_PRESET, of which delta_from_p is left out
            _, _, step, *preset = folder.name.split("_", 3)
            at, color = int(step), colors[preset[0] if preset else "delta_from_p"]
        rows, table = probes(folder), metrics(folder).dropna(subset=["grad_norm"])
        rows = rows[rows["step"] >= at]
        norms = table.groupby(table["step"] // 50)["grad_norm"].median()
        norms = norms.set_axis(norms.index * 50 + 25).loc[at:]
        left.plot(rows["step"], rows["max_logit_1"], color=color, linewidth=1.5)
        right.plot(norms.index, norms, color=color, linewidth=1.5)
    left.set(yscale="log", xlim=(1000, 7200))
    right.set(yscale="log", xlim=(1000, 7200))
    left.set_title("largest attention logit of layer 1", fontsize=12, loc="left")
    right.set_title("gradient norm", fontsize=12, loc="left")
    left.axhline(FMA_THRESHOLD, color=GRAY, linewidth=0.8, linestyle=":")
    write(left, (4300, 9e5, "flash", ORANGE), (4870, 1.32e5, "subtract first", BLUE), (5560, 6.5e4, "both", GREEN))
    write(left, (2650, 1.7e3, "delta from P", BLACK), (5560, 2.7e5, "delta from P", BLACK))
    write(right, (4400, 5e3, "flash", ORANGE), (5560, 1.5e2, "delta from P\nat 4,000", BLACK))
    for axis in (left, right):
        count_steps(axis, range(2000, 7000, 2000))
    return figure


def heads() -> Figure:
    """Figure 3 of the paper: the spectral norm of W_Q of the heads of layer 1."""
    figure, [[left, right]] = page(3.4, 1, 2, sharey=True)
    for axis, run, step in ((left, "flash", 3000), (right, "paper", 2500)):
        table = pd.read_csv(PAPER_FIGURES / f"figure_03_{run}_step{step}.csv")
        axis.bar(table["head"], table["w_q_head_norm"], color=np.where(table["outlier"], ORANGE, "#BBBBBB"))
        axis.set_title(f"{run}, step {step:,}", fontsize=12, loc="left")
        axis.set_xticks(table["head"])
        axis.set_xlabel("head of layer 1", fontsize=11)
    left.set_ylabel("spectral norm of $W_Q$", fontsize=11)
    write(right, (1, 28, "orange: 1.5 times the\nmedian or more", ORANGE))
    return figure


def ties() -> Figure:
    """Figure 13 of the paper: how many rows have two scores within 1e-3 of their maximum."""
    figure, [[left, right]] = page(3.8, 1, 2)
    table = pd.read_csv(PAPER_FIGURES / "figure_13.csv")
    colors = {"delta_from_p": GREEN, "fp32_o": BLUE, "fp32_pv": BLACK, "flash": ORANGE, "paper": PINK}
    for axis, column, title in (
        (left, "ties_1e3_mean", "rows with a tied maximum, all heads"),
        (right, "ties_1e3_max", "the same, largest of all heads"),
    ):
        for run, color in colors.items():
            rows = table[(table["run"] == run) & (table["column"] == column)]
            axis.plot(rows["step"], 100 * rows["value"], color=color, linewidth=1.5)
        axis.set_title(title, fontsize=12, loc="left")
        axis.set(yscale="log", ylim=(0.05, 150))
        axis.yaxis.set_major_formatter("{x:g} %")
        count_steps(axis, range(0, 13_000, 4000))
    write(left, (5000, 12, "paper", PINK), (3800, 0.45, "flash", ORANGE), (6000, 0.065, "FP32 O in delta", BLUE))
    write(left, (6500, 0.27, "P V in FP32", BLACK), (6000, 0.11, "delta from P", GREEN))
    return figure


def norms() -> Figure:
    """Figure 11 of the paper: the spectral norm of W_Q, layer by layer."""
    figure, panels = page(4.6, 2, 2, sharex=True, sharey=True)
    titles = {"flash": "flash", "paper": "paper", "fp32_o": "FP32 O in delta", "delta_from_p": "delta from P"}
    for axis, (run, title) in zip(panels.flat, titles.items(), strict=True):
        table = probes(RUNS / run).set_index("step").filter(regex=r"^w_q_norm_\d+$").dropna()
        mesh = axis.pcolormesh(
            table.index, range(12), table.to_numpy().T, norm="log", vmin=1, vmax=200, cmap="cividis", shading="nearest"
        )
        axis.set_title(title, fontsize=12, loc="left")
        axis.set(xlim=(0, 13_000), yticks=range(0, 12, 2))
    for axis in panels[1]:
        count_steps(axis, range(0, 13_000, 4000))
    figure.supylabel("layer", fontsize=12)
    figure.colorbar(mesh, ax=panels, label="spectral norm of $W_Q$")
    return figure


def published_fix() -> Figure:
    """Left the largest logit of layer 1, right the validation loss: above published numerics and their fix, below what repairs delta.

    Dashed: the second order of batches. Of a seed that ran twice, the longer run.
    """
    figure, panels = page(8.4, 2, 2)
    study = EXPERIMENTS / "published_fix" / "runs"
    seeds = ("", "_seed_1", "_seed_2")
    from_p, fp32, second = "published_delta_from_p", "_fp32_statistics", "_second_order"
    above: tuple[Any, ...] = (  # name, color, runs, height of the name on the left, on the right
        ("flash", BLACK, [RUNS / "flash"], 3e5, 4.95),
        ("published", GRAY, [study / f"published{seed}" for seed in ("_long", *seeds[1:], second)], 5e4, 4.78),
        (
            "Algorithm 3, beta 2",
            ORANGE,
            [study / f"published_stable{seed}" for seed in ("_long", *seeds[1:])],
            6e3,
            4.62,
        ),
        ("its floor alone", PINK, [study / "published_scaled"], 1.1e3, None),
        (
            "Algorithm 3, beta 7",
            GREEN,
            [study / f"published_stable_exact_ties{run}" for run in ("_13000", "_seed_1", "_13000_seed_2", second)],
            33,
            4.24,
        ),
        (
            "its floor alone",
            "#56B4E9",
            [study / f"published_scaled_beta_7{run}" for run in ("", "_seed_1_long", "_seed_2_long")],
            15,
            None,
        ),
        (
            "flash_consistent",
            BLUE,
            [EXPERIMENTS / "consistent" / "runs" / f"flash_consistent{run}_long" for run in ("", second)],
            80,
            4.13,
        ),
    )
    below: tuple[Any, ...] = (
        (
            "l in FP32",
            GRAY,
            [study / f"published{fp32}{run}" for run in ("_seed_1", "_long", "_seed_2_long")],
            2.5e5,
            4.4,
        ),
        (
            "l in FP32, bounded shift",
            "#CCAA00",
            [study / f"published_stable_safe_beta_7{fp32}{run}" for run in ("_seed_2_long", "", "_seed_1_long")],
            3.2e4,
            4.32,
        ),
        (
            "FP32 O in delta",
            BLACK,
            [study / f"published_fp32_o{run}" for run in ("_long", "_seed_1_long", "_seed_2")],
            9e4,
            4.25,
        ),
        (
            "delta from P",
            PINK,
            [
                study / f"{from_p}{run}"
                for run in ("_long", "_seed_1_long", "_seed_2_long", "_seed_3", "_seed_4", second)
            ],
            4e3,
            4.85,
        ),
        (
            "delta*",
            "#56B4E9",
            [
                study / f"published_delta_normalized{run}"
                for run in ("_13000", "_seed_1_long", "_13000_seed_2", "_seed_3", "_seed_4", second)
            ],
            40,
            4.17,
        ),
        (
            "delta from P, l in FP32",
            BLUE,
            [study / f"{from_p}{fp32}{run}" for run in ("_seed_1_long", "_long", "_seed_2")],
            120,
            4.11,
        ),
    )
    last = 5500
    for (left, right), arms in zip(panels, (above, below), strict=True):
        for words, color, runs, *heights in arms:
            for folder in runs:
                logits = probes(folder).set_index("step")["max_logit_1"].loc[:last]
                losses = metrics(folder).set_index("step")["val_loss"].dropna().loc[:last]
                style = "--" if second in folder.name else "-"
                left.plot(logits.index, logits, color=color, linewidth=1.5, linestyle=style)
                right.plot(losses.index, losses, color=color, linewidth=1.5, linestyle=style, marker="o", markersize=3)
            for axis, height in zip((left, right), heights, strict=True):
                if height:
                    own = int(probes(runs[0])["step"].iloc[-1])
                    end = last if 2 * own > last else own  # a short run has its name at its own end
                    write(axis, (1.02 * end, height, words, color))
        left.set(yscale="log", ylim=(1, 1e6), xlim=(0, 1.65 * last))
        right.set(ylim=(4.05, 5.1), xlim=(950, 1.5 * last))
        left.set_title("largest attention logit of layer 1", fontsize=12, loc="left")
        right.set_title("validation loss", fontsize=12, loc="left")
        count_steps(left, range(0, last, 2000))
        count_steps(right, range(1000, last, 1500))
    return figure


def consistent() -> Figure:
    """Largest logit of layer 1 of ``flash``, delta from P and ``flash_consistent``: a line a run, dashed on the second order of batches."""
    figure, [[axis]] = page(4.6, 1, 1)
    seeds = ("", "_seed_1", "_seed_2")
    arms = {"flash": (ORANGE, seeds), "delta_from_p": (GRAY, seeds)}
    arms["flash_consistent"] = (
        BLUE,
        ("_long", "_seed_1_long", "_seed_2_long", "_seed_3", "_seed_4_again", "_second_order_long"),
    )
    study = EXPERIMENTS / "consistent" / "runs"
    lines = [
        (color, (study if arm == "flash_consistent" else RUNS) / f"{arm}{run}")
        for arm, (color, runs) in arms.items()
        for run in runs
    ]
    second = ((ORANGE, study / "flash_second_order"), (GRAY, study / "delta_from_p_second_order"))
    for color, folder in (*lines, *second):
        rows = probes(folder)
        rows = rows[rows["step"] <= 13_000]
        style = "--" if "second_order" in folder.name else "-"
        axis.plot(rows["step"], rows["max_logit_1"], color=color, linewidth=1.5, linestyle=style)
    write(axis, (6200, 2e6, "flash", ORANGE), (8500, 330, "delta from P", GRAY), (8500, 12, "flash_consistent", BLUE))
    axis.set(yscale="log", ylim=(1, 2e7), xlim=(0, 13_000))
    axis.set_title(
        "largest attention logit of layer 1, a line a seed; dashed: a second order of batches",
        fontsize=12,
        loc="left",
    )
    count_steps(axis, range(0, 13_001, 2000))
    return figure


def public_recipe() -> Figure:
    """``flash`` and ``flash_consistent`` on the same batches of the public text: training loss and largest logit of layer 1."""
    figure, left, right = loss_and_logits(3900, 0, 4, range(0, 3001, 1000))
    for run, color in (("python_flash", ORANGE), ("python_consistent", BLUE)):
        folder = EXPERIMENTS / "public_recipe" / "runs" / run
        loss, rows = smooth_loss(folder, 50), probes(folder)
        left.plot(loss.index, loss, color=color, linewidth=1.5)
        right.plot(rows["step"], rows["max_logit_1"], color=color, linewidth=1.5)
    write(left, (2600, 2.6, "flash", ORANGE), (1900, 0.25, "flash_consistent", BLUE))
    write(right, (2300, 1e6, "flash", ORANGE), (1500, 22, "flash_consistent", BLUE))
    write(right, (100, 6e4, f"{FMA_THRESHOLD:,.0f}", GRAY))
    return figure


def medium() -> Figure:
    """Gated GPT-2 medium with ``flash`` and ``flash_consistent``: largest logit of layer 1, median gradient norm of each 200 steps."""
    figure, [[left, right]] = page(4.2, 1, 2)
    for run, color in (("", ORANGE), ("_consistent", BLUE)):
        folder = EXPERIMENTS / "other_recipes" / "runs" / f"gated_gpt2_medium_lr_1e-3{run}"
        rows, table = probes(folder), metrics(folder).dropna(subset=["grad_norm"])
        norms = table.groupby(table["step"] // 200)["grad_norm"].median()
        left.plot(rows["step"], rows["max_logit_1"], color=color, linewidth=1.5)
        right.plot(norms.index * 200 + 100, norms, color=color, linewidth=1.5)
    left.set_title("largest attention logit of layer 1", fontsize=12, loc="left")
    right.set_title("gradient norm", fontsize=12, loc="left")
    left.axhline(FMA_THRESHOLD, color=GRAY, linewidth=0.8, linestyle=":")
    write(left, (100, 6e4, f"{FMA_THRESHOLD:,.0f}", GRAY), (4900, 3e5, "flash", ORANGE))
    write(left, (3300, 1.1e3, "flash_consistent", BLUE))
    write(right, (4500, 6, "flash", ORANGE), (3600, 0.26, "flash_consistent", BLUE))
    for axis, limits in ((left, (1, 2e6)), (right, (0.1, 50))):
        axis.set(yscale="log", xlim=(0, 7200), ylim=limits)
        count_steps(axis, range(0, 7000, 2000))
    return figure


def main() -> None:
    save(front(), EXPERIMENTS.parent / "docs" / "pictures" / "front.png")
    save(layers(), FAST_FAILURE / "layers.png")
    save(large_logits(), FAST_FAILURE / "large_logits.png")
    save(heads(), PAPER_FIGURES / "figure_03.png")
    save(norms(), PAPER_FIGURES / "figure_11.png", colors=256)
    save(ties(), PAPER_FIGURES / "figure_13.png")
    save(published_fix(), EXPERIMENTS / "published_fix" / "curves.png")
    save(consistent(), EXPERIMENTS / "consistent" / "curves.png")
    save(public_recipe(), EXPERIMENTS / "public_recipe" / "curves.png")
    save(medium(), EXPERIMENTS / "other_recipes" / "medium.png")
    save(late_switches(), LATE_SWITCHES / "late_switches.png")


if __name__ == "__main__":
    main()
