"""Which layers follow ``LAYER``, from ``results/``: whose logits grow as well, and when."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from analysis.curves import Record
from analysis.plots import COLOURS
from analysis.report import LAYER, Evidence, Facts
from analysis.report_blocks import hands_on, number, significant
from analysis.report_files import MAX_LOGIT

LARGE = 5000.0
"""A layer has followed once its largest logit is beyond this: more than twice what any has whose delta is not made of the O handed on."""
ONE_KEY = 0.9
"""Mean largest P of a head's rows from which on they count as looking at one key."""
FROM = 1000
"""First step that is drawn."""


def largest_logits(records: Sequence[Record]) -> dict[int, dict[int, float]]:
    """By layer and step of the probe, of all layers but ``LAYER``, whose heads are told one by one."""
    found: dict[int, dict[int, float]] = {}
    for record in records:
        for name, value in record.items():
            if MAX_LOGIT.fullmatch(name):
                found.setdefault(int(name.rpartition("_")[2]), {})[record["step"]] = value
    return found


def followers(run: Evidence, facts: Facts) -> dict[int, int]:
    """Layer -> first probe at which its largest logit is beyond ``LARGE``, of the layers behind ``LAYER``, until the loss explodes;
    the first of them first."""
    until = math.inf if facts.exploded_at is None else facts.exploded_at
    found = {
        layer: min(steps)
        for layer, logits in largest_logits(run.records).items()
        if layer > LAYER and (steps := [step for step, logit in logits.items() if logit > LARGE and step < until])
    }
    return dict(sorted(found.items(), key=lambda pair: pair[1]))


def told(found: dict[int, int]) -> str:
    """``followers`` in words."""
    return ", ".join(f"{layer} at {number(step)}" for layer, step in found.items())


def values(runs: Sequence[tuple[Evidence, Facts]]) -> dict[str, str]:
    """Single numbers by name: ``own_values``, and layers.apart, the largest logit behind ``LAYER``, until the loss explodes, of the runs
    whose delta is not made of the O handed on. Of runs of one recipe."""
    found = {"layers.large": number(LARGE)} | own_values(runs)
    apart = [
        logit
        for run, facts in runs
        if run.is_uniform and not hands_on(run)
        for layer, logits in largest_logits(run.records).items()
        if layer > LAYER
        for step, logit in logits.items()
        if step < (math.inf if facts.exploded_at is None else facts.exploded_at)
    ]
    return found | ({"layers.apart": significant(max(apart))} if apart else {})


def own_values(runs: Sequence[tuple[Evidence, Facts]]) -> dict[str, str]:
    """Of each run by itself: RUN.next, ``followers`` in words, and RUN.next.heads, the heads of ``LAYER`` that look at one key when the
    first of them follows."""
    found: dict[str, str] = {}
    followed = {run.name: (run, layers) for run, facts in runs if (layers := followers(run, facts))}
    for name, (run, layers) in followed.items():
        looking = Counter(int(row["step"]) for row in run.heads if row["top_1"] > ONE_KEY)
        found |= {f"{name}.next": told(layers), f"{name}.next.heads": str(looking[min(layers.values())])}
    return found


def figure(runs: Sequence[tuple[Evidence, Facts]]) -> Any:
    """A matplotlib ``Figure``: the largest logit of every layer, a panel a run, and its explosion."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = math.ceil(len(runs) / 2)
    drawn = Figure(figsize=(1.2 + 2.2 * columns, 4.8), dpi=150, layout="constrained")
    FigureCanvasAgg(drawn)
    panels = list(drawn.subplots(2, columns, sharex=True, sharey=True, squeeze=False).flat)
    for place in range(len(runs), len(panels)):
        panels[place].remove()
        panels[place - columns].tick_params(labelbottom=True)  # the lowest of its column now
    colours = {LAYER: COLOURS[0], LAYER + 1: COLOURS[1], LAYER + 2: COLOURS[2]}
    for axes, (run, facts) in zip(panels[: len(runs)], runs, strict=True):
        for layer, logits in sorted((largest_logits(run.records) | {LAYER: facts.logit}).items(), reverse=True):
            steps = [step for step in logits if step >= FROM]
            width = 1.4 if layer in colours else 0.7
            axes.plot(steps, [logits[s] for s in steps], color=colours.get(layer, "0.75"), linewidth=width)
        if facts.exploded_at is not None:
            axes.axvline(facts.exploded_at, color="0.4", linestyle=":", linewidth=1.0)
        axes.axhline(LARGE, color="0.6", linestyle="--", linewidth=0.7)
        axes.set_title(run.name, fontsize=9)
        axes.set_yscale("log")
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    first = drawn.axes[0]
    for layer, colour in colours.items():
        first.plot([], [], color=colour, linewidth=1.4, label=f"layer {layer}")
    first.plot([], [], color="0.75", linewidth=0.7, label="other layers")
    first.plot([], [], color="0.4", linestyle=":", linewidth=1.0, label="loss explodes")
    first.plot([], [], color="0.6", linestyle="--", linewidth=0.7, label=number(LARGE))
    drawn.supxlabel("step", fontsize=9)
    drawn.supylabel("largest logit", fontsize=9)
    drawn.legend(loc="outside upper center", ncols=6, frameon=False, fontsize=8)
    return drawn
