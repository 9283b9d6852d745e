"""Where W_Q grows, from ``results/``: which layer follows ``LAYER``, and when."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from analysis.curves import Record
from analysis.plots import COLOURS
from analysis.report import LAYER, Evidence, Facts
from analysis.report_blocks import number, significant
from analysis.report_files import W_Q

GROWN = 1.5
"""W_Q of a layer takes off when it is so many times its norm of ``WITHIN`` steps before."""
WITHIN = 200
ONE_KEY = 0.9
FROM = 2000
"""Before this step, in the warm-up and shortly behind it, W_Q of any layer may double in ``WITHIN`` steps."""


def norms(records: Sequence[Record]) -> dict[int, dict[int, float]]:
    """W_Q's spectral norm by layer and step of the probe."""
    found: dict[int, dict[int, float]] = {}
    for record in records:
        for name, value in record.items():
            if W_Q.fullmatch(name):
                found.setdefault(int(name.rpartition("_")[2]), {})[record["step"]] = value
    return found


@dataclass(frozen=True, kw_only=True)
class TakeOff:
    """The first layer behind ``LAYER`` whose W_Q takes off."""

    layer: int
    step: int
    before: float
    """Its norm ``WITHIN`` steps before ``step``."""
    after: float
    """Its norm at ``step``."""
    heads: int
    """Heads of ``LAYER`` that look at one key by then: mean largest P above ``ONE_KEY``."""


def take_off(run: Evidence) -> TakeOff | None:
    """The first one of a run; of two at the same probe the one that has grown more. None where no layer does."""
    looking = Counter(int(row["step"]) for row in run.heads if row["top_1"] > ONE_KEY)
    found = [
        TakeOff(layer=layer, step=step, before=by_step[step - WITHIN], after=norm, heads=looking[step])
        for layer, by_step in norms(run.records).items()
        if layer > LAYER
        for step, norm in by_step.items()
        if step >= FROM and step - WITHIN in by_step and norm > GROWN * by_step[step - WITHIN]
    ]
    return min(found, key=lambda one: (one.step, -one.after / one.before), default=None)


def led_by(run: Evidence, facts: Facts) -> TakeOff | None:
    """``take_off``, unless the loss had exploded by then."""
    found = take_off(run)
    return None if found is None or found.step > (facts.exploded_at or math.inf) else found


def values(runs: Sequence[tuple[Evidence, Facts]]) -> dict[str, str]:
    """Single numbers by name: RUN.next.layer, .step, .before, .after and .heads of ``led_by``; layers.led, the runs that have one."""
    found: dict[str, str] = {}
    led = {run.name: one for run, facts in runs if (one := led_by(run, facts)) is not None}
    for name, one in led.items():
        found |= {f"{name}.next.layer": str(one.layer), f"{name}.next.step": number(one.step)}
        found |= {f"{name}.next.before": significant(one.before), f"{name}.next.after": significant(one.after)}
        found[f"{name}.next.heads"] = str(one.heads)
    return found | {"layers.led": str(len(led)), "layers.others": str(len(runs) - len(led))}


def figure(runs: Sequence[tuple[Evidence, Facts]]) -> Any:
    """A matplotlib ``Figure``: W_Q's norm in every layer, a panel a run, and its explosion."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(6.4, 4.6), dpi=150, layout="constrained")
    FigureCanvasAgg(drawn)
    panels = drawn.subplots(2, math.ceil(len(runs) / 2), sharex=True, sharey=True).flat
    colours = {LAYER: COLOURS[0], LAYER + 1: COLOURS[1], LAYER + 2: COLOURS[2]}
    for axes, (run, facts) in zip(panels, runs, strict=False):
        for layer, by_step in norms(run.records).items():
            steps = [step for step in by_step if step >= FROM / 2]
            style = (
                {"color": colours[layer], "linewidth": 1.6} if layer in colours else {"color": "0.75", "linewidth": 0.8}
            )
            axes.plot(steps, [by_step[step] for step in steps], **style)
        if facts.exploded_at is not None:
            axes.axvline(facts.exploded_at, color="0.4", linestyle=":", linewidth=1.0)
        axes.set_title(run.name, fontsize=9)
        axes.set_yscale("log")
        axes.set_ylim(3, 600)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    for layer, colour in colours.items():
        drawn.axes[0].plot([], [], color=colour, linewidth=1.6, label=f"layer {layer}")
    drawn.axes[0].plot([], [], color="0.75", linewidth=0.8, label="other layers")
    drawn.axes[0].plot([], [], color="0.4", linestyle=":", linewidth=1.0, label="loss explodes")
    drawn.supxlabel("step", fontsize=9)
    drawn.supylabel(r"$\|W_Q\|_2$", fontsize=9)
    drawn.legend(loc="outside upper center", ncols=5, frameon=False, fontsize=8)
    return drawn
