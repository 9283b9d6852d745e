"""Is intervening too late? Runs of ``results/`` whose layer ``LAYER`` was given another attention on the way, beside the one that was not.

The switches are those of the run's options, ``STEP:LAYER:PRESET``.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from analysis import curves, plots
from analysis.report import LAYER, Evidence, Facts, grad_norms
from analysis.report_blocks import NONE, number, significant, table, told
from analysis.report_claims import CONTROL

BEFORE, BEHIND, LAST = 500, 1500, 500
"""Steps before and behind the switch, and at the end, that gradient norms are told of."""
VALIDATION_AT = 4500
DRAWN_FROM = 1000
LINE = 1.4


def switch_of(run: Evidence, facts: Facts) -> tuple[int, str] | None:
    """(step, preset) of the first switch of ``LAYER``; None for a run without one, or that ended before."""
    options = [str(one).split(":") for one in run.setting("alarm.switches") or ()]
    found = sorted((int(step), preset) for step, layer, preset, *_ in options if int(layer) == LAYER)
    return found[0] if found and found[0][0] <= facts.last_step else None


def _largest(run: Evidence, first: int) -> float:
    """The largest gradient norm of all steps kept of the ``BEHIND`` from ``first`` on."""
    pairs = zip(*curves.column(run.records, "grad_norm"), strict=True)
    return max(norm for step, norm in pairs if first <= step < first + BEHIND)


def logit_at(facts: Facts, step: int) -> float | None:
    """The largest logit of ``LAYER`` at the last probe until ``step``."""
    until = [at for at in facts.logit if at <= step]
    return facts.logit[max(until)] if until else None


def switches_table(runs: Sequence[Evidence]) -> str:
    """A line a switched run, by the size of the logits at the switch, and ``CONTROL`` from the last of the switches on."""
    heads = ["run", f"attention of layer {LAYER} from then on", "switched at", "largest logit there"]
    heads += [f"gradient norm, {BEFORE} steps before", f"{number(BEHIND)} after", "largest of those kept"]
    heads += [f"last {LAST} steps", "largest logit at the end", "W_Q norm at the end"]
    heads += [f"validation loss at {VALIDATION_AT:,}", "how it ended"]
    found = [(at, run, facts) for run, facts in told(runs) if (at := switch_of(run, facts)) is not None]
    lines = [(*at, run, facts) for at, run, facts in sorted(found, key=lambda one: (one[0], one[1].name))]
    if lines:
        lines += [(lines[-1][0], NONE, run, facts) for run, facts in told(runs) if run.name == CONTROL]
    rows = []
    for step, preset, run, facts in lines:
        behind, largest = grad_norms(run.records, step, step + BEHIND), _largest(run, step)
        end = min(facts.last_step, step + BEHIND) + 1 if preset == NONE else facts.last_step + 1
        rows.append(
            [
                run.name,
                preset,
                number(step) if preset != NONE else f"not; from {step:,}",
                significant(logit_at(facts, step)),
                significant(statistics.median(grad_norms(run.records, step - BEFORE, step))),
                significant(statistics.median(behind)),
                significant(largest),
                significant(statistics.median(grad_norms(run.records, end - LAST, end))),
                significant(logit_at(facts, end)),
                significant(facts.w_q[max(at for at in facts.w_q if at <= end)]),
                number(facts.validation.get(VALIDATION_AT), ".3f"),
                facts.verdict,
            ]
        )
    return table(heads, rows, left=3)


def values(runs: Sequence[Evidence]) -> dict[str, str]:
    """Single numbers by name, of switched runs: RUN.at.logit, RUN.behind and RUN.behind.largest (gradient norms), RUN.end.logit."""
    made: dict[str, str] = {}
    for run, facts in told(runs):
        if (found := switch_of(run, facts)) is not None:
            behind = grad_norms(run.records, found[0], found[0] + BEHIND)
            made |= {
                f"{run.name}.at.logit": significant(logit_at(facts, found[0])),
                f"{run.name}.behind": significant(statistics.median(behind)),
                f"{run.name}.behind.largest": significant(_largest(run, found[0])),
                f"{run.name}.end.logit": significant(logit_at(facts, facts.last_step + 1)),
            }
    return made


def branches(runs: Sequence[Evidence]) -> tuple[list[tuple[Evidence, Facts]], dict[str, dict[str, Any]]]:
    """What a picture shows of ``CONTROL`` and of the switched runs, these from their switch on, and the look of each by name.

    A colour is an attention of ``LAYER``, the dashes are those of one attention in the order of the switches.
    """
    pairs = [
        (at, preset, run, facts)
        for run, facts in told(runs)
        for at, preset in [(DRAWN_FROM, CONTROL) if run.name == CONTROL else switch_of(run, facts) or (0, "")]
        if preset
    ]
    pairs.sort(key=lambda one: (one[0], one[2].name))
    presets = list(dict.fromkeys([CONTROL, *(preset for _, preset, *_ in pairs)]))
    earlier: dict[str, int] = {}
    shown, look = [], {}
    for at, preset, run, facts in pairs:
        earlier[preset] = earlier.get(preset, -1) + 1
        style = plots.style(presets.index(preset))
        look[run.name] = style | {"linestyle": plots.DASHES[earlier[preset] % len(plots.DASHES)], "linewidth": LINE}
        late = [record for record in run.records if record["step"] >= at]
        logit = {step: value for step, value in facts.logit.items() if step >= at}
        shown.append((replace(run, records=late), replace(facts, logit=logit)))
    return shown, look
