"""The picture of the autopsy's page, as PNG bytes. Colors are Okabe and Ito's."""

from __future__ import annotations

import io

from autopsy.measure import MADE_BY_ROUNDING, Findings

ORANGE, BLUE = "#D55E00", "#0072B2"
DPI, TEXT, SMALL = 150, 9.0, 7.5


def pictures(findings: Findings) -> list[tuple[str, str, bytes]]:
    """(caption, alternative text, PNG) of the error of dW_Q by layer."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    layers = range(len(findings.factors))
    figure = Figure(figsize=(6.0, 2.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.bar(
        layers, findings.factors, color=[ORANGE if layer in findings.made_by_rounding else BLUE for layer in layers]
    )
    axes.axhline(MADE_BY_ROUNDING, color="black", linewidth=0.8, linestyle=":")
    axes.set_yscale("log")
    axes.set_xticks(list(layers))
    axes.set_xlabel("layer", fontsize=TEXT)
    axes.set_ylabel("error of dW_Q / dW_Q", fontsize=TEXT)
    axes.tick_params(labelsize=SMALL)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=DPI)
    caption = "The part of dW_Q that attention's rounding makes, by layer; orange: at least as large as dW_Q itself."
    return [(caption, "error of dW_Q by layer", picture.getvalue())]
