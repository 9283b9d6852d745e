"""Draw the pictures of runs on one wheel's text from their CSVs: ``python experiments/draw_pictures.py``."""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from PIL import Image

EXPERIMENTS = Path(__file__).resolve().parent
# Okabe and Ito, "Color Universal Design" (2008).
ORANGE, BLUE, GREEN, PURPLE, SKY, GRAY = "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#6F6F6F"
Labels = Sequence[tuple[float, float, str, str]]
"""Where they begin, words, color."""
FMA_THRESHOLD = 2**16 * np.log(2)
"""Logit from which the FMA exponent is off by more than O's rounding hides: attention/README.md, the FMA exponent."""


def save(figure: Figure, path: Path) -> None:
    """A PNG of few colors, a quarter of the size."""
    full = io.BytesIO()
    figure.savefig(full, format="png", dpi=180)
    image = Image.open(full).convert("RGB").quantize(64, kmeans=2)
    image.save(path, optimize=True)
    print(path, path.stat().st_size // 1024, "kB")


def smooth_loss(folder: Path) -> pd.Series:
    """Mean training loss of each 40 steps, at their middle: logged steps lie closer around an explosion."""
    table = pd.read_csv(folder / "metrics.csv").dropna(subset=["train_loss"])
    means = table.groupby(table["step"] // 40)["train_loss"].mean()
    return means.set_axis(means.index * 40 + 20)


def loss_and_logits(
    colors: dict[str, str],
    logits: str,
    of_loss: Labels,
    of_logits: Labels = (),
    runs: str = "one_wheel/runs",
    end: int = 6000,
    ticks: int = 3,
    threshold: bool = True,
) -> Figure:
    """Left the training loss, right the column ``logits`` of the probes, of ``runs`` whose names begin so. 9 inches: 800 pixels."""
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.set(ylim=(0, 8.5), xlim=(0, 1.05 * end))
    right.set(yscale="log", ylim=(1, 1e7), xlim=(0, 1.05 * end))
    title = "largest attention logit" + (" of layer 1" if logits == "max_logit_1" else "")
    for axis, words in ((left, "training loss"), (right, title)):
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=11)
        axis.set_title(words, fontsize=12, loc="left")
        axis.set_xticks(steps := range(0, end + 1, end // ticks), [f"{step:,}" for step in steps])
        axis.set_xlabel("step", fontsize=11)
    for name, color in colors.items():
        for run in sorted((EXPERIMENTS / runs).glob(f"{name}*")):
            loss, rows = smooth_loss(run), pd.read_csv(run / "probes.csv")
            left.plot(loss.index, loss, color=color, linewidth=1.3)
            right.plot(rows["step"], rows[logits], color=color, linewidth=1.3)
    if threshold:
        right.axhline(FMA_THRESHOLD, color=GRAY, linewidth=0.8, linestyle=":")
        of_logits = ((0.016 * end, 6e4, f"FMA threshold\n{FMA_THRESHOLD:,.0f}", GRAY), *of_logits)
    for axis, labels in ((left, of_loss), (right, of_logits)):
        for x, y, words, color in labels:
            axis.text(x, y, words, color=color, fontsize=12)
    return figure


def front() -> Figure:
    colors = {"swiglu_flash_half_rate": ORANGE, "swiglu_consistent_half_rate": BLUE}
    of_loss = (1000, 3.4, "flash: fails\nin 5 of 6", ORANGE), (1500, 0.1, "flash_consistent: stable", BLUE)
    of_logits = (1500, 1.2e6, "flash", ORANGE), (2500, 20, "flash_consistent", BLUE)
    return loss_and_logits(colors, "max_logit_max", of_loss, of_logits, "who_is_at_risk/gpt2/runs")


def larger_text() -> Figure:
    colors = {"swiglu_flash_larger": ORANGE, "swiglu_from_p_larger": GREEN, "swiglu_consistent_larger": BLUE}
    of_loss = (900, 5.0, "flash: fails\nin 3 of 4", ORANGE), (900, 0.25, "flash_consistent, delta from P: stable", BLUE)
    of_logits = (1300, 1.2e6, "flash", ORANGE), (2500, 25, "flash_consistent", BLUE), (2500, 9, "delta from P", GREEN)
    return loss_and_logits(colors, "max_logit_1", of_loss, of_logits, "who_is_at_risk/gpt2/runs")


def larger_batch() -> Figure:
    colors = {"swiglu_flash_four": ORANGE, "swiglu_consistent_four": BLUE}
    of_loss = (9000, 0.9, "flash", ORANGE), (1700, 1.4, "flash_consistent,\ncut off", BLUE)
    of_logits = (9000, 200, "flash", ORANGE), (1500, 9, "flash_consistent", BLUE)
    return loss_and_logits(colors, "max_logit_1", of_loss, of_logits, "who_is_at_risk/gpt2/runs", 16000, 4)


def swiglu() -> Figure:
    colors = {"swiglu_flash_2": ORANGE, "swiglu_consistent_2": BLUE}
    of_loss = (900, 6.6, "flash: fails\nin 5 of 6", ORANGE), (700, 0.17, "flash_consistent: stable", BLUE)
    of_logits = (500, 1.2e6, "flash", ORANGE), (1500, 120, "flash_consistent", BLUE)
    return loss_and_logits(colors, "max_logit_max", of_loss, of_logits, "who_is_at_risk/gpt2/runs", end=3000)


def gpt2() -> Figure:
    failing, stable = "flash: rises in 5 of 6,\nfails in 3", "flash_consistent:\nstable"
    of_loss = (1500, 4.6, failing, ORANGE), (1500, 1.4, stable, BLUE)
    of_logits = (900, 4e5, "flash", ORANGE), (2600, 90, "flash_consistent", BLUE)
    return loss_and_logits({"flash": ORANGE, "consistent": BLUE}, "max_logit_max", of_loss, of_logits)


def public_kernels() -> Figure:
    colors = {"torch_flex": GREEN, "torch_flash": ORANGE, "fa4": PURPLE, "torch_cudnn": SKY}
    colors |= {"plain": BLUE, "from_p_4": BLUE}
    names = ("FlexAttention", "FlashAttention-2, in torch's SDPA", "FlashAttention-4", "cuDNN", "controls")
    of_loss = [(900, 7.9 - 0.6 * i, name, list(colors.values())[i]) for i, name in enumerate(names)]
    return loss_and_logits(colors, "max_logit_1", of_loss, threshold=False)  # of our kernels


def other_blocks() -> Figure:
    arms = {"none": PURPLE, "grouped": GREEN}
    fixed = {"consistent": BLUE, "from_p": GRAY}
    colors = {f"{arm}_flash": color for arm, color in arms.items()}
    colors |= {f"{arm}_{name}": color for arm in arms for name, color in fixed.items()}
    words = ("flash, no positions", "flash, grouped queries", "flash_consistent, both", "delta from P, both")
    colored = zip(words, [*arms.values(), *fixed.values()], strict=True)
    of_loss = [(2500, 7.9 - 0.6 * i, word, color) for i, (word, color) in enumerate(colored)]
    return loss_and_logits(colors, "max_logit_max", of_loss, runs="who_is_at_risk/gpt2/runs")


def fp8() -> Figure:
    arms = (
        ("all in FP8: explodes", ORANGE, "fp8_layer_1"),
        ("P alone: explodes", PURPLE, "p_fp8_layer_1"),
        ("P alone, delta*, to 1,500", GREEN, "p_fp8_delta_star"),
        ("all but P, to 1,500", SKY, "all_but_p_fp8"),
        ("all, one P and one O", BLUE, "fp8_consistent_layer_1"),
    )
    colors = {runs: color for _, color, runs in arms}
    of_loss = [(1150, 7.9 - 0.55 * i, words, color) for i, (words, color, _) in enumerate(arms)]
    return loss_and_logits(colors, "max_logit_1", of_loss, runs="below_bf16/gpt2/runs", end=2400)


def main() -> None:
    for draw in (front, larger_text, larger_batch, swiglu, gpt2, public_kernels, other_blocks, fp8):
        save(draw(), EXPERIMENTS.parent / "docs" / "pictures" / f"{draw.__name__}.png")


if __name__ == "__main__":
    main()
