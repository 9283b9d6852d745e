"""The pictures of the autopsy's page, as PNG bytes. Colors are Okabe and Ito's; what color says, a mark says too."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from autopsy.changes import Change, HeadChanges
from autopsy.measure import Findings, HeadEvidence

ORANGE, BLUE = "#D55E00", "#0072B2"
DPI, TEXT, SMALL = 200, 9.0, 7.5
GRAY = "#999999"
_Z_SHOWN = 10.0
"""Colors saturate there."""


def pictures(findings: Findings, changes: list[HeadChanges]) -> list[tuple[str, str, bytes]]:
    """(caption, alternative text, PNG) of every plot that the findings allow."""
    worst = findings.biased or findings.strained or sorted(findings.heads, key=lambda h: -h.closeness())
    made = [
        (
            "Mean error of delta over its standard error, for each head; squares: biased, dots: a repeated error.",
            "map of layers and heads",
            heads_map(findings),
        ),
        (
            f"Error of delta summed over the tokens (Figure 5a of arXiv 2510.04212), layer {worst[0].layer}; each head in units of "
            "its own rms: noise grows as the root of the number of tokens, a bias as the number.",
            "cumulative error of delta by head",
            cumulative_errors(findings, worst[0]),
        ),
    ]
    for one in changes:
        caption = (
            f"Layer {one.layer} head {one.head}: mean error of delta left after a change, relative to what it is, with its standard "
            "error; blue: the bias is gone."
        )
        made.append((caption, "mean error of delta left by change", changes_bars(one)))
    return made


def heads_map(findings: Findings) -> bytes:
    """z of the error of delta by layer and head."""
    layers = 1 + max(h.layer for h in findings.heads)
    heads = 1 + max(h.head for h in findings.heads)
    z = np.full((layers, heads), np.nan)
    for h in findings.heads:
        z[h.layer, h.head] = (h.dithered or h.bias).z if h.finding != "no error" else 0.0
    figure, axes = _figure(min(7.5, 1.8 + 0.42 * heads), min(9.0, 1.3 + 0.3 * layers))
    image = axes.imshow(z, cmap="PuOr_r", vmin=-_Z_SHOWN, vmax=_Z_SHOWN, aspect="auto")
    for finding, mark in (("biased", "s"), ("repeated error", ".")):
        places = [(h.head, h.layer) for h in findings.heads if h.finding == finding]
        if places:
            axes.scatter(*zip(*places, strict=True), marker=mark, s=30, facecolors="none", edgecolors="black")
    axes.set_xlabel("head", fontsize=TEXT)
    axes.set_ylabel("layer", fontsize=TEXT)
    _whole_ticks(axes, heads, layers)
    bar = figure.colorbar(image, ax=axes)
    bar.set_label("z of the mean error", fontsize=TEXT)
    bar.ax.tick_params(labelsize=SMALL)
    return _png(figure)


def cumulative_errors(findings: Findings, chosen: HeadEvidence) -> bytes:
    """Running sum of the error of delta over all tokens in units of its rms, the chosen head against the others of its layer."""
    errors_HN = findings.errors[chosen.layer].double().transpose(0, 1).flatten(1)
    rms_H1 = errors_HN.square().mean(dim=1, keepdim=True).sqrt()
    sums_HN = (errors_HN.cumsum(dim=1) / rms_H1.where(rms_H1 > 0, 1.0)).numpy()
    figure, axes = _figure(6.0, 2.8)
    axes.axhline(0, color="black", linewidth=0.5)
    for head, line_N in enumerate(sums_HN):
        if head != chosen.head:
            axes.plot(line_N, color=GRAY, linewidth=0.6)
    axes.plot(sums_HN[chosen.head], color=ORANGE, linewidth=1.6)
    axes.plot([], [], color=ORANGE, linewidth=1.6, label=f"head {chosen.head}")
    axes.plot([], [], color=GRAY, linewidth=0.6, label="other heads")
    axes.legend(fontsize=SMALL, frameon=False)
    axes.set_xlabel("tokens", fontsize=TEXT)
    axes.set_ylabel("sum of delta_lp - delta_hp,\nover its rms", fontsize=TEXT)
    return _png(figure)


def changes_bars(changes: HeadChanges) -> bytes:
    """What is left of the mean error after each change of a site or preset."""
    sites = [*changes.sites, *([] if changes.together is None else [changes.together])]
    rows: list[Change] = [*sites, *changes.presets]
    figure, axes = _figure(6.6, 0.8 + 0.2 * len(rows))
    scale = changes.before.mean or 1.0
    for place, change in enumerate(rows):
        left, error = change.bias.mean / scale, change.bias.standard_error / abs(scale)
        color = BLUE if change.removes else ORANGE
        axes.barh(place, left, xerr=error, color=color, height=0.65, error_kw={"linewidth": 0.8})
    axes.set_yticks(range(len(rows)), [change.name for change in rows], fontsize=SMALL)
    axes.invert_yaxis()
    axes.axvline(0, color="black", linewidth=0.5)
    axes.axvline(1, color="black", linewidth=0.5, linestyle=":")
    if sites and changes.presets:
        axes.axhline(len(sites) - 0.5, color=GRAY, linewidth=0.8)
    axes.set_xlabel("mean error of delta, relative to the head as it is", fontsize=TEXT)
    return _png(figure)


def _whole_ticks(axes: Any, heads: int, layers: int) -> None:
    axes.set_xticks(range(0, heads, max(1, heads // 12)))
    axes.set_yticks(range(0, layers, max(1, layers // 12)))


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.tick_params(labelsize=SMALL)
    return figure, axes


def _png(figure: Any) -> bytes:
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=DPI * 0.75)
    return picture.getvalue()
