"""Tables and single numbers of the documents, as Markdown, from the evidence in ``results/``; and how they are put into a document.

In a document ``<!-- report: NAME -->`` ... ``<!-- /report -->`` holds a block, ``<!-- value: NAME -->...<!-- / -->`` a number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from analysis import recipe, report, report_claims, report_heads
from analysis.report import DEPARTURE, LAYER, Evidence, Facts
from errors import UserError

BLOCK = re.compile(r"(<!-- report: (\S+) -->\n).*?(<!-- /report -->)", flags=re.DOTALL)
VALUE = re.compile(r"(<!-- value: (\S+) -->)[^<\n]*(<!-- / -->)")

VALIDATION_AT = (3500, 5000, 10_000)
NORM_AT = (1000, 2000, 3000, 3500, 5000, 10_000)
LOGIT_AT = (1000, 3000, 3500, 5000, 10_000)
SHARP_AT = (1000, 2000, 3000, 5000, 10_000)
ERROR_AT = (1000, 2000, 3000, 5000, 10_000)
GROWTH = (1000, 3000)
NONE = "-"
SHORT = ("flash", "paper", "delta_from_p", "fp32_o")
"""The variants that the README shows, with all their seeds: failing twice, repaired twice."""

Told = Sequence[tuple[Evidence, Facts]]


def told(runs: Sequence[Evidence]) -> list[tuple[Evidence, Facts]]:
    """Runs with their facts: those that exploded first, by step, then the others by name."""
    pairs = [(run, report.facts(run)) for run in runs]
    return sorted(pairs, key=lambda pair: (pair[1].exploded_at is None, pair[1].exploded_at or 0, pair[0].name))


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: int = 2) -> str:
    """A Markdown table, its first ``left`` columns to the left; a column without any content is left out."""
    shown = [i for i in range(len(heads)) if i < left or any(row[i] != NONE for row in rows)]
    rule = ["---" if i < left else "---:" for i in range(len(heads))]
    lines = [heads, rule, *rows]
    return "".join("| " + " | ".join(line[i] for i in shown) + " |\n" for line in lines)


def number(value: float | None, form: str = ",.0f") -> str:
    """A number, or a dash where there is none."""
    return NONE if value is None else format(value, form)


def significant(value: float | None) -> str:
    """Three digits, or all before the point where these are at most five."""
    if value is None:
        return NONE
    return (
        f"{float(f'{value:.3g}'):,.0f}" if abs(value) >= 1e5 else format(value, ",.0f" if abs(value) >= 100 else "#.3g")
    )


def count_of(run: Evidence, all_runs: Told) -> int:
    """Runs of the same variant with other seeds, this one included."""
    return len({other.seeds for other, _ in all_runs if other.variant == run.variant})


def runs_table(runs: Told) -> str:
    """How each run went, one line a run; ``recipe``: where it is not the base experiment's."""
    heads = [
        "run",
        "attention",
        "seeds: weights/data",
        "recipe",
        "n",
        "how it ended",
        "exploded at",
        f"gradient norm > {DEPARTURE:g} first at",
    ]
    heads += [f"validation loss at {step:,}" for step in VALIDATION_AT]
    heads += ["training loss, last 50 steps", f"largest W_Q norm, layer {LAYER} (step)"]
    heads += [f"largest logit, layer {LAYER} (step)", "tokens/s", "minutes (to step)"]
    rows = []
    for run, facts in runs:
        rows.append(
            [
                run.name,
                run.attention,
                "/".join(map(str, run.seeds)),
                recipe.words(run.recipe) or NONE,
                str(count_of(run, runs)),
                facts.verdict,
                number(facts.exploded_at),
                number(facts.departed_at),
                *(number(facts.validation.get(step), ".3f") for step in VALIDATION_AT),
                number(facts.loss_at_end, ".3f"),
                _largest(facts.w_q),
                _largest(facts.logit),
                number(facts.tokens_per_second),
                f"{facts.minutes[1]:.1f} ({facts.minutes[0]:,})",
            ]
        )
    return table(heads, rows, left=3)


def _largest(series: Mapping[int, float]) -> str:
    if not series:
        return NONE
    step = max(series, key=series.__getitem__)
    return f"{significant(series[step])} ({step:,})"


def growth_table(runs: Told) -> str:
    """W_Q's norm and the largest logit of ``LAYER`` over training, and the norm's rate of growth."""
    first, last = GROWTH
    heads = ["run", "attention", *(f"W_Q norm at {step:,}" for step in NORM_AT)]
    heads += [f"growth in 1,000 steps, {first:,} - {last:,}", "as a factor"]
    heads += [f"largest logit at {step:,}" for step in LOGIT_AT]
    rows = []
    for run, facts in runs:
        rate = report_heads.growth(facts.w_q, first, last)
        rates = [
            NONE if rate is None else f"{rate.per_thousand:+.1f}",
            NONE if rate is None else f"x {rate.factor:.2f}",
        ]
        norms = [significant(facts.w_q.get(step)) for step in NORM_AT]
        rows.append(
            [run.name, run.attention, *norms, *rates, *(significant(facts.logit.get(step)) for step in LOGIT_AT)]
        )
    return table(heads, rows)


def bias_table(runs: Told) -> str:
    """Whether the delta error has a sign, run by run."""
    heads = [
        "run",
        "delta uses",
        "sequences",
        f"tests in layer {LAYER}",
        "beyond 3 s.e.",
        "expected",
        "positive",
        "sum / s.e.",
    ]
    heads += ["mean, 1e-6 of delta", "tests in all layers", "beyond 3 s.e.", "expected"]
    rows = []
    for run, _ in runs:
        found = report_heads.bias(run.heads)
        if found is None:
            continue
        zs = run.z_scores
        expected = found.expected_beyond_3 / found.tests * len(zs)
        rows.append(
            [
                run.name,
                delta_of(run),
                sequences_of(run),
                number(found.tests),
                str(found.beyond_3),
                f"{found.expected_beyond_3:.1f}",
                f"{found.positive / found.tests:.0%}",
                f"{found.sum_z:+.1f}",
                _relative(found),
                number(len(zs)),
                str(sum(abs(z) > 3 for z in zs)),
                f"{expected:.1f}",
            ]
        )
    return table(heads, rows)


OWN = "O as handed on"


def hands_on(run: Evidence) -> bool | None:
    """Whether delta of ``LAYER`` is made of the O that is handed on; None where its heads differ, or were switched."""
    return None if run.group is None else _delta_of(run.group).startswith(OWN)


def delta_of(run: Evidence) -> str:
    """What delta of ``LAYER`` is made of when a run begins."""
    if len(run.groups) == 1:
        return _delta_of(run.groups[0])
    heads = (", ".join(map(str, group["heads_of_layer"][str(LAYER)])) for group in run.groups)
    return "; ".join(f"heads {of}: {_delta_of(group)}" for of, group in zip(heads, run.groups, strict=True))


def _delta_of(group: Mapping[str, Any]) -> str:
    numerics = group.get("numerics")
    if not isinstance(numerics, dict):
        return f"{OWN} ({group['backend']})"
    if numerics["delta"] == "rowsum_p_dp":
        return "P and dP"
    if numerics["delta"] == "recomputed_o":
        return "O computed again in FP32"
    return OWN if numerics["delta_output"] == "output" else f"O kept apart, {numerics['delta_output']}"


def sequences_of(run: Evidence) -> str:
    """Sequences of the probe batch; one where the run's record does not say."""
    return str(run.setting("telemetry.sequences") or 1)


def error_table(runs: Told) -> str:
    """Size of the delta error over training: what an FP32 O in delta removes, and what it leaves."""
    heads = ["run", "delta uses", *(f"at {step:,}" for step in ERROR_AT)]
    rows = []
    for run, _ in runs:
        errors = [report_heads.relative_error(run.heads, step) for step in ERROR_AT]
        rows.append([run.name, delta_of(run), *(number(error, ".1e") for error in errors)])
    return table(heads, rows)


def ties_table(runs: Told) -> str:
    """How often P_bar is 1 more than once in a row of ``LAYER``, and how much of a row goes to one key."""
    first, last = GROWTH
    heads = ["run", "attention", f"rows with a repeated maximum, {first:,} - {last:,}", "largest of a head and probe"]
    heads += [f"largest P of a row at {step:,}" for step in SHARP_AT]
    rows = []
    for run, _ in runs:
        shares = report_heads.repeated_maxima(run.heads, first, last) or (None, None)
        sharp = [number(report_heads.sharpness(run.heads, step), ".3f") for step in SHARP_AT]
        rows.append([run.name, run.attention, *(number(share, ".1%") for share in shares), *sharp])
    return table(heads, rows)


def again_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Runs that were made twice."""
    lines = [
        [row["run"], f"{int(row['common_steps']):,}", row["first_difference"] or "none", row["sha256"][:12]]
        for row in rows
    ]
    return table(["run", "steps in common", "first that differs", "SHA-256 of the losses in common"], lines, left=1)


def asked_table(runs: Told, asked: Mapping[str, str]) -> str:
    """The runs of configs/reproduction.txt: what is expected and what happened; below, those without a run."""
    heads = ["run", "options", "the paper expects", "self-correlation expects", "n", "what happened"]
    heads += ["the paper", "self-correlation"]
    found = report_claims.groups(runs, asked)
    made = table(heads, report_claims.asked_rows([group for group in found if group.runs]), left=4)
    missing = [f"`{row[0]}` ({row[2]}, {row[3]})" for row in report_claims.asked_rows(found) if row[4] == "0"]
    return (
        f"{made}\nNo files here (the paper expects, self-correlation expects): {', '.join(missing)}.\n"
        if missing
        else made
    )


def short_table(runs: Told) -> str:
    """A few columns for the README, of the runs in its picture."""
    heads = ["run", "attention", "how it ended", "validation loss at 3,500", f"W_Q norm, layer {LAYER}, at 3,500"]
    heads += [f"largest logit, layer {LAYER}, at 3,500"]
    rows = [
        [
            run.name,
            run.attention,
            facts.verdict,
            number(facts.validation.get(3500), ".3f"),
            significant(facts.w_q.get(3500)),
            significant(facts.logit.get(3500)),
        ]
        for run, facts in runs
        if report_claims.base(run.name) in SHORT
    ]
    return table(heads, rows, left=3)


def blocks(runs: Sequence[Evidence], again: Sequence[Mapping[str, str]], asked: Mapping[str, str]) -> dict[str, str]:
    """All blocks by name; ``asked`` are the variants of configs/reproduction.txt, name -> options.

    Runs of other recipes are in those of all runs only, ``runs`` and ``asked``.
    """
    ordered = told([run for run in runs if not run.is_switched])
    of_base = [(run, facts) for run, facts in ordered if run.has_base_recipe]
    makers: dict[str, Callable[[Told], str]] = {
        "growth": growth_table,
        "bias": bias_table,
        "error": error_table,
        "ties": ties_table,
        "short": short_table,
    }
    made = {"runs": runs_table(ordered)} | {name: make(of_base) for name, make in makers.items()}
    return made | {"again": again_table(again), "asked": asked_table(told(runs), asked)}


def values(runs: Sequence[Evidence], asked: Mapping[str, str] | None = None) -> dict[str, str]:
    """Single numbers by name: RUN.exploded, RUN.departed, RUN.last, RUN.w_q@STEP, RUN.logit@STEP, RUN.largest_logit, RUN.val@STEP ...;
    and those of ``report_claims.values``. What is counted over runs is of those of the base recipe."""
    of_base = [run for run in runs if run.has_base_recipe]
    ordered = told([run for run in of_base if not run.is_switched])
    found = {
        "runs": str(len(ordered)),
        "switched": str(len(of_base) - len(ordered)),
        "other_recipes": str(len(runs) - len(of_base)),
        "seeds": str(max((count_of(run, ordered) for run, _ in ordered), default=0)),
    }
    for run, facts in told(runs):
        probes, led = facts.largest_w_q_in_layer
        own: dict[str, str] = {
            "exploded": number(facts.exploded_at),
            "departed": number(facts.departed_at),
            "last": number(facts.last_step),
            "probes": str(probes),
            "led": str(led),
            "tokens/s": number(facts.tokens_per_second),
            "minutes": number(facts.minutes[1], ".1f"),
            "timed": number(facts.minutes[0]),
            "whole": number(_whole_minutes(run, facts)),
        }
        own |= {f"w_q@{step}": significant(value) for step, value in facts.w_q.items() if step % 500 == 0}
        own |= {f"logit@{step}": significant(value) for step, value in facts.logit.items() if step % 500 == 0}
        if facts.logit:
            own["largest_logit"] = significant(max(facts.logit.values()))
        own |= {f"val@{step}": number(value, ".3f") for step, value in facts.validation.items()}
        if rate := report_heads.growth(facts.w_q, *GROWTH):
            own |= {"growth": f"{rate.per_thousand:+.1f}", "factor": f"{rate.factor:.2f}"}
        for step in (s for s in facts.logit if s % 500 == 0):
            own[f"heads@{step}"] = ", ".join(map(str, report_heads.largest_heads(run.heads, step, 4)))
            own[f"error@{step}"] = number(report_heads.relative_error(run.heads, step), ".1e")
        found |= {f"{run.name}.{name}": value for name, value in own.items()}
        if bias := report_heads.bias(run.heads):
            found[f"{run.name}.bias"] = _relative(bias)
        if shares := report_heads.repeated_maxima(run.heads, *GROWTH):
            found |= {f"{run.name}.ties": f"{shares[0]:.1%}", f"{run.name}.most_ties": f"{shares[1]:.1%}"}
    found |= _largest_bias([run for run, _ in ordered])
    return found | report_claims.values(report_claims.groups(told(runs), asked or {}))


def _whole_minutes(run: Evidence, facts: Facts) -> float:
    """What all planned steps take at the run's median speed."""
    names = ("run.steps", "data.global_batch", "data.sequence_length")
    return math.prod(int(run.setting(name)) for name in names) / facts.tokens_per_second / 60


def _relative(found: report_heads.Bias) -> str:
    return f"{1e6 * found.relative_mean:+.2g} ± {1e6 * found.relative_se:.2g}"


def _largest_bias(runs: Sequence[Evidence]) -> dict[str, str]:
    """Of the run whose mean delta error is furthest from 0 in its standard errors: its name and numbers, as largest_bias.*."""
    biases = [(run.name, found) for run in runs if (found := report_heads.bias(run.heads)) is not None]
    if not biases:
        return {}
    name, found = max(biases, key=lambda pair: abs(pair[1].relative_mean / pair[1].relative_se))
    z = f"{found.relative_mean / found.relative_se:+.1f}"
    return {"largest_bias.mean": _relative(found), "largest_bias.z": z, "largest_bias.run": name}


def refreshed(text: str, blocks: Mapping[str, str], values: Mapping[str, str], where: str) -> str:
    """A document with its blocks and numbers made anew. Raises ``UserError`` for a name that is not known."""

    def known(kind: str, names: Mapping[str, str], name: str) -> str:
        if name not in names or names[name] == NONE:
            raise UserError(f"{where}: {kind} {name!r}: the evidence has none of that name")
        return names[name]

    def block(match: re.Match[str]) -> str:
        return match[1] + known("report", blocks, match[2]) + match[3]

    def value(match: re.Match[str]) -> str:
        return match[1] + known("value", values, match[2]) + match[3]

    return VALUE.sub(value, BLOCK.sub(block, text))


def outside(text: str) -> str:
    """What of a document no script makes: its text without blocks and numbers."""
    return VALUE.sub("", BLOCK.sub("", text))
