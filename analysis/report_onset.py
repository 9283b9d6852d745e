"""What happens when logits pass 2^16: the error of delta in rows that look at one key, and the gradient norm, from ``results/``.

Most flash kernels make P_bar by one fused multiply-add, exp2(S' c - m c), with c = scale * log2(e) and m c rounded to FP32 before. At the
row's own maximum the exponent is then not 0 but up to half a unit in the last place of m c, and P_bar not 1. From m c = 2^16 on that is
more than BF16's spacing at 1 can hide: P_bar is rounded, l sums what was not rounded, and O of a row that looks at one key differs
from that V by the same factor in all features.

Rows are those of ``report_files.by_head``, layer ``LAYER``.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from analysis import curves, report, report_layers
from analysis.one_key_rows import make_rows, measure
from analysis.plots import COLOURS
from analysis.report import Evidence, Facts, HeadRow
from analysis.report_blocks import NONE, hands_on, number, significant, table, told
from analysis.report_claims import how_it_ended
from attention import AttentionSpec

ONE_HOT = 0.99
"""Mean largest probability of a head's rows from which on they count as looking at one key."""
THRESHOLD = 2.0**16 * math.log(2)
"""The largest logit from which on P_bar at the maximum may differ from 1 by more than BF16 hides: m log2(e) = 2^16."""
EDGES = (0.0, THRESHOLD / 4, THRESHOLD / 2, THRESHOLD, 2 * THRESHOLD, 4 * THRESHOLD, math.inf)
FROM = 1000
"""Probes before this step, in the warm-up, do not count."""
SHOWN_FROM = 1e-8
"""Smaller errors are drawn there."""
BEFORE, AFTER = 500, 200
"""Steps before and behind the crossing whose gradient norms are compared."""

ROUNDED, STOCHASTIC = "P_bar rounded, all to nearest", "P_bar rounded, it or O stochastically"
UNROUNDED, SUBTRACTED, PAPER = "P_bar unrounded", "P_bar rounded, subtracted first", "`paper`"
UNTILED = "`untiled`"
UNFUSED = "P_bar rounded, product rounded first"
SUM_ROUNDED = "P_bar and its sum rounded"
TORCHS = "torch's kernel, product rounded first"
FUSED = "fused"
_EXPONENTIALS = {"folded": FUSED, "subtracted": "subtracted first", "unfused": "not fused"}
KINDS = (ROUNDED, STOCHASTIC, UNROUNDED, SUBTRACTED, PAPER, UNTILED, UNFUSED, TORCHS, SUM_ROUNDED)
"""The last four have a place in tables and pictures only where there is a run of them."""


def kind_of(run: Evidence) -> str | None:
    """How the attention of a run's layer treats P_bar; None where delta is not made of the O handed on.

    None for a layer whose heads differ, or that was switched. Of torch's kernels ``sdpa_flash`` has a kind: of no other is there a run.
    """
    if run.group is None:
        return None
    numerics = run.group.get("numerics")
    if run.group["backend"].startswith("sdpa_"):
        return TORCHS if run.group["backend"] == "sdpa_flash" else None
    if not isinstance(numerics, Mapping) or (numerics["delta"], numerics["delta_output"]) != ("rowsum_do_o", "output"):
        return None
    if numerics.get("probabilities") == "fp32":
        return UNROUNDED
    if numerics.get("scores") != "fp32":
        return PAPER if numerics.get("tile_k") else UNTILED
    if (exponential := _exponential(run)) != FUSED:
        return UNFUSED if exponential == _EXPONENTIALS["unfused"] else SUBTRACTED
    if numerics.get("divisor", "unrounded") == "rounded":
        return SUM_ROUNDED
    drawn = "stochastic" in (numerics.get("output_rounding"), numerics.get("probabilities_rounding"))
    return STOCHASTIC if drawn else ROUNDED


def _exponential(run: Evidence) -> str:
    """How S c - m c is formed: torch multiplies, rounds, subtracts (its copy of FlashAttention-2 sets UNFUSE_FMA)."""
    group = run.groups[0]
    numerics = group.get("numerics")
    if group["backend"].startswith("sdpa_") or not isinstance(numerics, Mapping):
        return "torch: not fused"
    # Records from before the site existed have no word for it: kernels fused wherever S was FP32.
    rounded = numerics.get("scores", "fp32") != "fp32"
    return _EXPONENTIALS["subtracted" if rounded else numerics.get("exponent", "folded")]


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Relative errors of delta of heads that look at one key, whose largest logit lies in one range."""

    heads: int
    """Heads of probes."""
    low: float
    median: float
    high: float
    """10 %, 50 % and 90 % of root mean square error over root mean square of delta."""
    mean: float
    standard_error: float
    """Of the error itself, with its sign, over delta's root mean square."""


def one_hot(runs: Sequence[Evidence], kind: str) -> list[HeadRow]:
    """Heads of probes of the runs of one kind, from ``FROM`` on, that look at one key."""
    return [
        row
        for run in runs
        if kind_of(run) == kind
        for row in run.heads
        if row["step"] >= FROM and row["top_1"] >= ONE_HOT and row["delta_rms"] > 0
    ]


def errors(rows: Sequence[HeadRow], low: float, high: float) -> Errors | None:
    """Of the heads whose largest logit is in [low, high); None where there is none."""
    chosen = [row for row in rows if low <= row["max_logit"] < high]
    if not chosen:
        return None
    ratios = np.array([row["delta_error_rms"] / row["delta_rms"] for row in chosen])
    se_N = np.array([row["delta_error_se"] / row["delta_rms"] for row in chosen])
    quantiles = [float(q) for q in np.quantile(ratios, (0.1, 0.5, 0.9))]
    return Errors(
        heads=len(chosen),
        low=quantiles[0],
        median=quantiles[1],
        high=quantiles[2],
        mean=statistics.fmean(row["delta_error_mean"] / row["delta_rms"] for row in chosen),
        standard_error=math.sqrt(float(np.square(se_N).sum())) / len(chosen),
    )


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """The first probe at which the largest logit of a run's layer is beyond 2 ``THRESHOLD``, and the gradient norm around it."""

    first: int
    """The first probe beyond ``THRESHOLD``."""
    step: int
    w_q: float
    logit: float
    before: float
    """Median gradient norm of the logged steps from ``BEFORE`` before ``THRESHOLD`` was passed until then."""
    after: float
    """Median over the ``AFTER`` steps from the crossing on."""
    largest: float
    """Of these steps."""
    late: float
    """``late_norm``: what 200 steps do not show."""


def crossing(run: Evidence, facts: Facts) -> Crossing | None:
    """None for a run whose logits stay below, or that ends there."""
    above = [step for step, logit in facts.logit.items() if logit >= 2 * THRESHOLD]
    if not above:
        return None
    step, first = min(above), min(step for step, logit in facts.logit.items() if logit >= THRESHOLD)
    before = report.grad_norms(run.records, first - BEFORE, first)
    after = report.grad_norms(run.records, step, step + AFTER)
    if not before or not after:
        return None
    pairs = zip(*curves.column(run.records, "grad_norm"), strict=True)
    return Crossing(
        first=first,
        step=step,
        w_q=facts.w_q.get(step, math.nan),
        logit=facts.logit[step],
        before=statistics.median(before),
        after=statistics.median(after),
        largest=max(norm for at, norm in pairs if step <= at < step + AFTER),
        late=late_norm(run),
    )


def late_norm(run: Evidence) -> float:
    """Median gradient norm of the last ``BEFORE`` steps, of every tenth."""
    return statistics.median(report.grad_norms(run.records, int(run.records[-1]["step"]) - BEFORE + 1))


def folded_error(largest: float, preset: str = "flash") -> float:
    """The relative error of delta in rows at one key, their maxima between half of ``largest`` and all of it: ``flash_reference``'s."""
    rows = make_rows(largest, dtype=torch.bfloat16, device=torch.device("cpu"), count=32)
    return measure(rows, AttentionSpec(preset=preset), "flash_reference").error


def one_hot_table(runs: Sequence[Evidence]) -> str:
    """Relative error of delta in rows at one key, by the head's largest logit."""
    heads = ["largest logit of the head"]
    found = {kind: one_hot(runs, kind) for kind in KINDS}
    kinds = [kind for kind in KINDS if kind not in KINDS[-4:] or found[kind]]
    for kind in kinds:
        heads += [f"{kind}: heads", "error, median (10 - 90 %)"]
    rows = []
    for low, high in itertools.pairwise(EDGES):
        cells = [f"{low:,.0f} to {high:,.0f}" if math.isfinite(high) else f"{low:,.0f} and more"]
        for kind in kinds:
            one = errors(found[kind], low, high)
            cells += [NONE] * 2 if one is None else [number(one.heads), _spread(one)]
        rows.append(cells)
    return table(heads, rows, left=1)


def _spread(found: Errors) -> str:
    return f"{found.median:.1e} ({found.low:.0e} - {found.high:.0e})"


def _mean(found: Errors) -> str:
    return f"{1e6 * found.mean:+.2g} ± {1e6 * found.standard_error:.2g}"


def crossings(runs: Sequence[Evidence]) -> list[tuple[Evidence, Facts, Crossing]]:
    """The runs with one attention in their layer whose logits pass 2 ``THRESHOLD``, in the order of ``report_blocks.told``."""
    pairs = [(run, facts, crossing(run, facts)) for run, facts in told(runs) if run.group is not None]
    return [(run, facts, found) for run, facts, found in pairs if found is not None]


def crossing_table(runs: Sequence[Evidence]) -> str:
    """The gradient norm before and behind large logits, and where W_Q grows next, a line a run."""
    heads = ["run", "P_bar", "S c - m c", f"largest logit of layer {report.LAYER} beyond {THRESHOLD:,.0f} at"]
    heads += [f"beyond {2 * THRESHOLD:,.0f} at", "logit", "W_Q norm"]
    heads += ["gradient norm before", f"in the next {AFTER} steps", "its largest", f"last {BEFORE} steps"]
    heads += [f"later layers than {report.LAYER} with logits beyond {report_layers.LARGE:,.0f}", "loss exploded at"]
    rows = []
    for run, facts, found in crossings(runs):
        sites = run.groups[0].get("numerics")
        kind = sites["probabilities"] if isinstance(sites, Mapping) and "probabilities" in sites else NONE
        rows.append(
            [
                run.name,
                "unrounded" if kind == "fp32" else "rounded",
                _exponential(run),
                number(found.first),
                number(found.step),
                significant(found.logit),
                significant(found.w_q),
                *(significant(norm) for norm in (found.before, found.after, found.largest, found.late)),
                report_layers.told(report_layers.followers(run, facts)) or NONE,
                number(facts.exploded_at),
            ]
        )
    return table(heads, rows, left=3)


def blocks(runs: Sequence[Evidence]) -> dict[str, str]:
    """Both tables by name."""
    return {"one_hot": one_hot_table(runs), "crossings": crossing_table(runs)}


def values(runs: Sequence[Evidence]) -> dict[str, str]:
    """Single numbers by name: onset.below and onset.above, errors of ``ROUNDED`` below half and above twice the threshold;
    onset.unrounded above it; onset.rise (P_bar rounded and fused), .calm (unrounded) and .torch, how the gradient norm changed at the
    crossing, and onset.passage. and the same, steps from ``THRESHOLD`` to twice that; onset.emulated; and ``own_values``, which has the
    runs of other kinds. Of runs of one recipe."""
    rounded, drawn, unrounded, subtracted = (one_hot(runs, kind) for kind in KINDS[:4])
    unfused, torchs = (one_hot(runs, kind) for kind in (UNFUSED, TORCHS))
    found: dict[str, str] = {
        "onset.emulated": f"{folded_error(4 * THRESHOLD):.1e}",
        "onset.emulated_drawn": f"{folded_error(THRESHOLD, 'flash_run_a'):.1e}",
    }
    for name, rows, low, high in (
        ("below", rounded, THRESHOLD / 2, THRESHOLD),
        ("above", rounded, 2 * THRESHOLD, math.inf),
        ("all_above", [*rounded, *drawn], 2 * THRESHOLD, math.inf),
        ("drawn_below", drawn, THRESHOLD / 2, THRESHOLD),
        ("unrounded", unrounded, 2 * THRESHOLD, math.inf),
        ("subtracted_error", subtracted, 2 * THRESHOLD, math.inf),
        ("unfused_error", unfused, 2 * THRESHOLD, math.inf),
        ("torchs_error", torchs, 2 * THRESHOLD, math.inf),
    ):
        if (one := errors(rows, low, high)) is not None:
            found |= {f"onset.{name}": f"{one.median:.1e}", f"onset.{name}.heads": number(one.heads)}
            found |= {f"onset.{name}.mean": _mean(one), f"onset.{name}.z": f"{one.mean / one.standard_error:+.1f}"}
    found |= {"onset.threshold": number(THRESHOLD), "onset.twice": number(2 * THRESHOLD)}
    kinds: dict[str | None, str] = {ROUNDED: "rise", STOCHASTIC: "rise", UNROUNDED: "calm", TORCHS: "torch"}
    rises: dict[str, list[float]] = {}
    passages: dict[str, list[int]] = {}
    for run, _, cross in crossings(runs):
        if (kind := kinds.get(kind_of(run))) is not None:
            rises.setdefault(kind, []).append(cross.after / cross.before)
            passages.setdefault(kind, []).append(cross.step - cross.first)
    for name, factors in rises.items():
        ends = [f"{end(factors):.1f}" for end in (min, max)]
        found |= {f"onset.{name}": " to ".join(dict.fromkeys(ends)), f"onset.{name}.runs": str(len(factors))}
    for name, steps in passages.items():
        found[f"onset.passage.{name}"] = " to ".join(dict.fromkeys((number(min(steps)), number(max(steps)))))
    eve = {name: [f"{norm:.2f}" for norm in found_norms] for name, found_norms in _on_the_eve(runs).items()}
    found |= {f"onset.eve.{name}": " to ".join(dict.fromkeys((min(ends), max(ends)))) for name, ends in eve.items()}
    return found | own_values(runs) | _crossed(runs)


def own_values(runs: Sequence[Evidence]) -> dict[str, str]:
    """Single numbers of each run by itself: RUN.beyond and .crossed, where it passes ``THRESHOLD`` and twice that, its .rise and .passage;
    RUN.late_norm, and .largest_late_norm of its last ``SPAN`` steps."""
    found: dict[str, str] = {}
    for run, _, cross in crossings(runs):
        found |= {f"{run.name}.beyond": number(cross.first), f"{run.name}.crossed": number(cross.step)}
        found |= {f"{run.name}.rise": f"{cross.after / cross.before:.1f}"}
        found |= {f"{run.name}.passage": number(cross.step - cross.first)}
    for run in runs:
        found[f"{run.name}.late_norm"] = significant(late_norm(run))
        norms_at = [norm for _, norm in zip(*curves.column(run.records, "grad_norm"), strict=True)]
        found[f"{run.name}.largest_late_norm"] = significant(max(norms_at[-report.SPAN :]))
    return found


def _on_the_eve(runs: Sequence[Evidence]) -> dict[str, list[float]]:
    """Median gradient norms of the 100 steps before the first probe beyond ``THRESHOLD``, by kind: nearest, drawn."""
    names = {ROUNDED: "nearest", STOCHASTIC: "drawn"}
    made: dict[str, list[float]] = {}
    for run, facts in told(runs):
        above = [step for step, logit in facts.logit.items() if logit >= THRESHOLD]
        kind = kind_of(run)
        if above and kind in names:
            before = report.grad_norms(run.records, min(above) - 100, min(above))
            made.setdefault(names[kind], []).append(statistics.median(before))
    return made


def _crossed(runs: Sequence[Evidence]) -> dict[str, str]:
    """Of the runs with one attention in their layer that came past ``FROM``, onset.crossed: how many pass 2 ``THRESHOLD``.

    onset.own: those whose delta is made of the O handed on, onset.others: those whose delta is of something else; onset.crossed.own and
    onset.crossed.others: how many of them pass it. onset.others.cut: how many of the others were cut; onset.others.logit: the largest
    logit of those of them that do not pass it.
    """
    chosen = [(run, facts) for run, facts in told(runs) if run.group is not None and facts.last_step >= FROM]
    made: dict[str, str] = {}
    for name, is_own in (("own", True), ("others", False)):
        found = [facts for run, facts in chosen if bool(hands_on(run)) == is_own]
        largest = [max(facts.logit.values()) for facts in found]
        below = [logit for logit in largest if logit < 2 * THRESHOLD]
        made |= {f"onset.{name}": str(len(found)), f"onset.crossed.{name}": str(len(largest) - len(below))}
        if found and not is_own:
            made["onset.others.cut"] = str(sum(how_it_ended(facts) == "cut" for facts in found))
        if below and not is_own:
            made["onset.others.logit"] = significant(max(below))
    made["onset.crossed"] = str(sum(int(made[f"onset.crossed.{name}"]) for name in ("own", "others")))
    return made


def figure(runs: Sequence[tuple[Evidence, Facts]]) -> Any:
    """A matplotlib ``Figure``: the relative error of delta against the largest logit, one point a head and probe, and the gradient norm."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(6.4, 6.1), dpi=150, layout="constrained")
    FigureCanvasAgg(drawn)
    top, bottom = drawn.subplots(2, 1, sharex=True)
    kinds = [(ROUNDED, COLOURS[0]), (STOCHASTIC, COLOURS[4]), (UNROUNDED, COLOURS[1]), (SUBTRACTED, COLOURS[2])]
    for kind, colour in ((UNFUSED, COLOURS[3]), (TORCHS, COLOURS[7]), (SUM_ROUNDED, COLOURS[5])):
        if any(kind_of(run) == kind for run, _ in runs):
            kinds.append((kind, colour))
    for kind, colour in kinds:
        rows = one_hot([run for run, _ in runs], kind)
        logits = [row["max_logit"] for row in rows]
        ratios = [max(row["delta_error_rms"] / row["delta_rms"], SHOWN_FROM) for row in rows]
        label = f"{kind}: {len(rows):,} heads of probes"
        # The most points by far: behind the others.
        behind = 1.5 if kind == TORCHS else 2.0
        top.plot(logits, ratios, ".", markersize=3, color=colour, alpha=0.6, label=label, zorder=behind)
        points = [point for run, facts in runs if kind_of(run) == kind for point in norms(run, facts)]
        bottom.plot(*zip(*points, strict=True), ".", markersize=3, color=colour, alpha=0.6, zorder=behind)
    sizes = np.geomspace(1e3, 1e7, 61)
    for preset, dashes in (("flash", "-"), ("flash_run_a", "--")):
        emulated = [max(folded_error(float(size), preset), SHOWN_FROM) for size in sizes]
        label = f"emulated, exponent by one multiply-add: {preset}"
        top.plot(sizes, emulated, color="0.2", linestyle=dashes, linewidth=1.2, label=label)
    top.set_ylabel("error of delta, relative\n(rows at one key; 0 drawn at $10^{-8}$)", fontsize=8)
    bottom.set_ylabel("gradient norm, median of\n100 steps from the probe on", fontsize=8)
    bottom.set_xlabel(f"largest logit (top: of the head; bottom: of layer {report.LAYER})", fontsize=9)
    for axes in (top, bottom):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.axvline(THRESHOLD, color="0.5", linestyle=":", linewidth=1.0)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    top.set_xlim(1e2, 1e8)
    bottom.text(THRESHOLD, 1e6, r"$2^{16} \ln 2$ ", fontsize=8, color="0.4", ha="right")
    drawn.legend(loc="outside upper left", frameon=False, fontsize=8)
    return drawn


def norms(run: Evidence, facts: Facts) -> list[tuple[float, float]]:
    """(largest logit, median gradient norm of the next 100 steps) at every probe from ``FROM`` on."""
    found = []
    for step, logit in facts.logit.items():
        after = report.grad_norms(run.records, step, step + 100)
        if step >= FROM and after and logit > 0:
            found.append((logit, statistics.median(after)))
    return found
