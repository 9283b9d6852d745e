"""What delta has in common with the O handed on, and how far logits of one layer grow, from ``results/``.

dO is computed through the O handed on, with its rounding error. Delta may be made of that O, or of another of the same rounded P_bar: an
error that both have is one that dO knows of. Or it may share neither rounding, and have an error of its own, or hardly any.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from analysis.plots import COLOURS
from analysis.report import LAYER, Evidence, Facts
from analysis.report_blocks import NONE, hands_on, number, significant, table, told
from analysis.report_claims import how_it_ended
from analysis.report_onset import FROM, THRESHOLD, crossing

EARLY, LATE = 2400, 5000
"""Steps whose W_Q are compared: all runs came to the first before any broke; by the second those that grow fast have broken or ended."""
GROWN = 1000.0
"""Logits beyond which they have grown: more than with delta from P at any step."""
BOTH, OUTPUT, PROBABILITIES = "rounding of P_bar and of O", "only of O", "only of P_bar"
OWN, NEITHER = "neither; an error of its own", "neither; hardly an error"
KINDS = (BOTH, OUTPUT, PROBABILITIES, OWN, NEITHER)
NAMES = {BOTH: "both", OUTPUT: "output", PROBABILITIES: "probabilities", OWN: "own", NEITHER: "neither"}


def shared(run: Evidence) -> str | None:
    """Which of ``KINDS`` a run's layer is of; None where its heads differ, or were switched."""
    if run.group is None:
        return None
    numerics = run.group.get("numerics")
    # torch's kernels round P_bar to the format of V, and make delta of the O that they return.
    is_rounded = not isinstance(numerics, Mapping) or numerics.get("probabilities") != "fp32"
    if hands_on(run):
        return BOTH if is_rounded else OUTPUT
    if isinstance(numerics, Mapping) and numerics["delta"] != "rowsum_do_o":
        return NEITHER
    if is_rounded:
        return PROBABILITIES
    return NEITHER if isinstance(numerics, Mapping) and numerics["delta_output"] == "fp32" else OWN


def chosen(runs: Sequence[Evidence]) -> dict[str, list[tuple[Evidence, Facts]]]:
    """By kind, the runs with one attention in their layer that came past ``FROM``."""
    found: dict[str, list[tuple[Evidence, Facts]]] = {kind: [] for kind in KINDS}
    for run, facts in told(runs):
        kind = shared(run)
        if kind is not None and facts.last_step >= FROM:
            found[kind].append((run, facts))
    return found


def sharing_table(runs: Sequence[Evidence]) -> str:
    """A line a kind: W_Q at two steps and the largest logit, which runs pass twice the threshold, and how far the others come."""
    heads = ["delta shares with the O handed on", "runs", "of them cut"]
    heads += [f"W_Q norm at {step:,}: median (range), runs" for step in (EARLY, LATE)]
    heads += [f"largest logit at {EARLY:,}", f"at {LATE:,}", f"beyond {2 * THRESHOLD:,.0f}", "at step"]
    heads += ["largest logit of those that stay below"]
    rows = []
    for kind, pairs in chosen(runs).items():
        crossed = [found.step for run, facts in pairs if (found := crossing(run, facts)) is not None]
        below = [max(f.logit.values()) for _, f in pairs if max(f.logit.values()) < 2 * THRESHOLD]
        w_q, logits = ([f.w_q for _, f in pairs], [f.logit for _, f in pairs])
        rows.append(
            [
                kind,
                str(len(pairs)),
                str(sum(how_it_ended(facts) == "cut" for _, facts in pairs)),
                *(_spread(w_q, step, counted=True) for step in (EARLY, LATE)),
                *(_spread(logits, step) for step in (EARLY, LATE)),
                str(len(crossed)),
                " to ".join(dict.fromkeys(number(end(crossed)) for end in (min, max))) if crossed else NONE,
                " to ".join(dict.fromkeys(significant(end(below)) for end in (min, max))) if below else NONE,
            ]
        )
    return table(heads, rows, left=1)


def _spread(series: Sequence[Mapping[int, float]], step: int, *, counted: bool = False) -> str:
    """Median and range of what these have at a step."""
    found = [one[step] for one in series if step in one]
    if not found:
        return NONE
    ends = " - ".join(dict.fromkeys(significant(end(found)) for end in (min, max)))
    return f"{significant(statistics.median(found))} ({ends})" + (f", {len(found)}" if counted else "")


def blocks(runs: Sequence[Evidence]) -> dict[str, str]:
    """The table by its name."""
    return {"sharing": sharing_table(runs)}


def values(runs: Sequence[Evidence]) -> dict[str, str]:
    """Single numbers by name. sharing.runs: all of them; sharing.NAME, with one of ``NAMES``: the runs of a kind; sharing.NAME.grown: those
    of them whose largest logit was beyond ``GROWN`` (sharing.size) from ``FROM`` on; sharing.NAME.finished: those quiet to their end."""
    kinds = chosen(runs)
    found = {"sharing.size": number(GROWN), "sharing.runs": str(sum(map(len, kinds.values())))}
    for kind, pairs in kinds.items():
        largest = [max(logit for step, logit in facts.logit.items() if step >= FROM) for _, facts in pairs]
        found[f"sharing.{NAMES[kind]}"] = str(len(pairs))
        found[f"sharing.{NAMES[kind]}.grown"] = str(sum(logit > GROWN for logit in largest))
        found[f"sharing.{NAMES[kind]}.finished"] = str(sum(how_it_ended(facts) == "finished" for _, facts in pairs))
    return found


def figure(runs: Sequence[Evidence]) -> Any:
    """A matplotlib ``Figure``: the largest logit of every run, a colour a kind, until it is first beyond twice the threshold."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(6.4, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(drawn)
    axes = drawn.subplots()
    colours = dict(zip(KINDS, (COLOURS[0], COLOURS[3], COLOURS[1], COLOURS[6], COLOURS[2]), strict=True))
    for kind, pairs in chosen(runs).items():
        colour = colours[kind]
        for run, facts in pairs:
            found = crossing(run, facts)
            end = facts.last_step if found is None else found.step
            steps = [step for step in facts.logit if FROM <= step <= end]
            axes.plot(steps, [facts.logit[step] for step in steps], color=colour, linewidth=0.9, alpha=0.8)
            if found is not None:
                axes.plot(found.step, found.logit, "o", color=colour, markersize=4)
        axes.plot([], [], color=colour, label=f"{kind}: {len(pairs)} run{'s' * (len(pairs) != 1)}")
    for size in (THRESHOLD, 2 * THRESHOLD):
        axes.axhline(size, color="0.6", linestyle=":", linewidth=1.0)
        place = ("axes fraction", "data")
        axes.annotate(number(size), (1.0, size), xycoords=place, fontsize=7, color="0.4", va="center")
    axes.set_yscale("log")
    axes.set_xlabel("step", fontsize=9)
    axes.set_ylabel(f"largest logit of layer {LAYER}", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    title = "delta shares with the O handed on"
    drawn.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=8, title=title, title_fontsize=9)
    return drawn
