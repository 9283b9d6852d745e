"""The autopsy in words: a text whose first word is the answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopsy.measure import MADE_BY_ROUNDING, Findings, HeadEvidence, Subject

LARGE_LOGIT = 1000.0
"""Logits above this are named, and keep the answer from being no; they have causes other than rounding, too (a high learning rate)."""
OUTLIER_NORM = 3.0
"""A layer whose largest head of W_Q is this many times the median layer's is named."""
SHOWN = 12
"""Heads listed in a terminal."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What there is to say."""

    subject: Subject
    findings: Findings
    seconds: float
    """Wall-clock time of the measurements."""


def answer(findings: Findings, switch_on: str = Subject.switch_on) -> list[str]:
    """Is this gradient made by attention's rounding? Yes or no, where, how much, and what to switch on; a sentence a line."""
    unknown = [layer for layer, factor in enumerate(findings.factors) if not math.isfinite(factor)]
    if unknown:
        return [f"UNKNOWN: the gradient of layer {unknown[0]} is not finite: examine an earlier checkpoint."]
    top = max(range(len(findings.factors)), key=findings.factors.__getitem__)
    size = f"{findings.factors[top]:.2g} times dW_Q in layer {top}"
    if not findings.made_by_rounding:
        if max(h.max_logit for h in findings.heads) > LARGE_LOGIT:
            return [
                f"UNCLEAR: delta's rounding does not make this gradient (its error of dW_Q is {size}), but logits are large. "
                "Other roundings, and what adds up over steps, are not seen: run the control."
            ]
        return [
            f"NO: attention's rounding does not make this gradient. Its error of dW_Q is {size}, and less in the others."
        ]
    return [
        f"YES: attention's rounding makes this gradient. Its error of dW_Q is {size}.",
        *(
            f"Layer {layer}: {findings.factors[layer]:.3g} times, {_heads(findings.worst(layer))}."
            for layer in findings.made_by_rounding
        ),
        _advice(findings, switch_on),
    ]


def _heads(heads: Sequence[HeadEvidence]) -> str:
    return f"head{'s' if len(heads) > 1 else ''} {', '.join(str(h.head) for h in heads)}"


def _advice(findings: Findings, switch_on: str) -> str:
    tried = ", ".join(f"{name} {left:.2g}" for name, left in findings.fixes.items()) or "none can be tried here"
    if findings.fix is None:
        return f"No preset tried removes it (what is left, in times dW_Q: {tried})."
    return f"Switch on: {switch_on.format(findings.fix)} (what is left, in times dW_Q: {tried})."


def symptoms(findings: Findings) -> list[str]:
    """Large logits and outlying norms of W_Q: consequences in a run that dies of rounding, no evidence of it by themselves."""
    found = []
    top = max(findings.heads, key=lambda h: h.max_logit)
    if top.max_logit > LARGE_LOGIT:
        found.append(f"the largest logit is {top.max_logit:.4g}, in layer {top.layer} head {top.head}")
    largest = [max(h.w_q_norm for h in findings.heads if h.layer == layer) for layer in range(len(findings.factors))]
    median = sorted(largest)[len(largest) // 2]
    if len(largest) > 1 and median > 0 and max(largest) > OUTLIER_NORM * median:
        where = f"W_Q of layer {largest.index(max(largest))}"
        found.append(f"{where} has a head of norm {max(largest):.4g}; the median layer's largest is {median:.4g}")
    return found


def text(report: Report, *, every_head: bool = True) -> str:
    """The summary, for a file; for a terminal with the worst heads alone."""
    subject, findings = report.subject, report.findings
    rows = sorted(findings.heads, key=lambda h: -h.share)[:SHOWN]
    if every_head:
        rows = findings.heads
    lines = [*answer(findings, subject.switch_on), *(f"Symptom: {symptom}." for symptom in symptoms(findings)), ""]
    lines += [f"Autopsy of {subject.name}", *(f"  {name}: {value}" for name, value in subject.facts.items()), ""]
    lines += _table(rows)
    if len(rows) < len(findings.heads):
        lines.append(f"The other {len(findings.heads) - len(rows)} heads are in autopsy.txt (--out).")
    lines += ["", *_RULE, f"Measured in {report.seconds:.0f} s."]
    return "\n".join(lines) + "\n"


_RULE = [
    f"The rule: YES where ||error of dW_Q|| >= {MADE_BY_ROUNDING:g} ||dW_Q|| in a layer, over all its heads and tokens. It says what makes",
    "this gradient now, not what began: a run that explodes by its learning rate ends in such gradients, too (docs/diagnosis.md).",
    "of layer: the head's error over dW_Q of its layer; of head: over its own. z: mean of the error of delta over its standard error;",
    "ratio: |mean| over rms. Layers and heads count from 0. dO is held as captured.",
]


def _table(rows: Sequence[HeadEvidence]) -> list[str]:
    """One line a head."""
    lines = [
        f"{'layer':>5} {'head':>4} {'of layer':>9} {'of head':>9} {'z':>7} {'ratio':>6} {'W_Q':>8} {'logit':>9}  attention"
    ]
    for h in rows:
        lines.append(
            f"{h.layer:>5} {h.head:>4} {h.share:>9.2g} {h.factor:>9.2g} {h.z:>+7.1f} {h.ratio:>6.2f} "
            f"{h.w_q_norm:>8.3f} {h.max_logit:>9.4g}  {h.attention}"
        )
    return lines
