"""The autopsy in words: a text summary, and one page of HTML with the plots inside it.

Numbers are printed as measured; what a word means ("biased") is the rule in ``autopsy.verdict.verdict``.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass

from autopsy.changes import REDUCED, REMOVED, Change, HeadChanges
from autopsy.measure import Findings, HeadEvidence, Subject
from autopsy.verdict import BIAS_RATIO, BIAS_Z, DRAWS, LARGE_SHARE, MANY_SEQUENCES, NOISE, SUSPECT_Z, Bias

LARGE_LOGIT = 1000.0
"""Logits above this are named as a symptom; they have causes other than rounding, too (a learning rate that is too high)."""
OUTLIER_NORM = 3.0
"""A layer whose largest head of W_Q is this many times the median layer's is named as a symptom."""


UNREMARKABLE = ("unbiased", "no error")


@dataclass(frozen=True, kw_only=True)
class Report:
    """What there is to say."""

    subject: Subject
    findings: Findings
    changes: list[HeadChanges]
    """Of the accused heads that were looked into, the most significant first."""
    seconds: float
    """Wall-clock time of the measurements."""


def headline(findings: Findings) -> str:
    """The verdict on the whole model, one or two sentences."""
    biased, total = findings.biased, len(findings.heads)
    unknown = [h for h in findings.heads if h.finding == "unknown"]
    if biased:
        places = ", ".join(f"layer {h.layer} head {h.head}" for h in biased)
        return (
            f"BIASED: the rounding of attention gives delta a biased error in {len(biased)} of {total} heads: {places}."
        )
    if findings.strained:
        places = ", ".join(f"layer {h.layer} head {h.head}" for h in findings.strained)
        return (
            f"STRAINED: no head's delta has a rounding bias, but in {len(findings.strained)} of {total} heads its error is a "
            f"large part of dW_Q, or has a small mean: {places}."
        )
    if unknown:
        return f"UNKNOWN: {len(unknown)} of {total} heads gave no number that can be judged; no head is accused."
    return f"HEALTHY: in none of {total} heads is the error of delta biased, or large beside dW_Q."


def symptoms(findings: Findings) -> list[str]:
    """Large logits and outlying norms of W_Q: consequences in a run that dies of rounding, no evidence of it by themselves."""
    found = []
    top = max(findings.heads, key=lambda h: h.max_logit)
    if top.max_logit > LARGE_LOGIT:
        found.append(f"the largest logit is {top.max_logit:.4g}, in layer {top.layer} head {top.head}")
    largest = [max(h.w_q_norm for h in findings.heads if h.layer == layer) for layer in _layers(findings)]
    median = sorted(largest)[len(largest) // 2]
    if len(largest) > 1 and median > 0 and max(largest) > OUTLIER_NORM * median:
        layer = largest.index(max(largest))
        found.append(
            f"W_Q of layer {layer} has a head of norm {max(largest):.4g}; the median layer's largest is {median:.4g}"
        )
    return found


def _layers(findings: Findings) -> list[int]:
    return sorted({h.layer for h in findings.heads})


def text(report: Report, *, every_head: bool = True) -> str:
    """The summary, for a file; for a terminal without the heads that there is nothing to say of."""
    subject, findings = report.subject, report.findings
    lines = [f"Autopsy of {subject.name}", *(f"  {name}: {value}" for name, value in subject.facts.items()), ""]
    lines += [headline(findings), *(f"Symptom: {symptom}." for symptom in symptoms(findings)), ""]
    for changes in report.changes:
        lines += [*_chain(findings.head(changes.layer, changes.head)), "", *_changes(changes), ""]
    if not report.changes:
        nearest = next(iter(findings.strained), max(findings.heads, key=HeadEvidence.closeness))
        lines += ["The head that comes nearest:", *_chain(nearest), ""]
    uninvestigated = len(findings.biased) - len(report.changes)
    if uninvestigated > 0:
        lines += [f"{uninvestigated} further accused heads were not looked into; --accused raises the number.", ""]
    rows = [h for h in findings.heads if every_head or h.finding not in UNREMARKABLE]
    lines += _table(rows) if rows else []
    if len(rows) < len(findings.heads):
        lines.append(
            f"{len(findings.heads) - len(rows)} heads without a finding are not listed; autopsy.txt has them (--out)."
        )
    lines += ["", *_rule(), f"Measured in {report.seconds:.0f} s."]
    return "\n".join(lines) + "\n"


def _chain(h: HeadEvidence) -> list[str]:
    """The links of Figure 1 for one head."""
    bias, dithered = h.bias, h.dithered
    lines = [
        f"Layer {h.layer} head {h.head} ({h.attention}; delta = {h.delta}): {h.finding}",
        f"  1 repeated maxima     {h.tied_rows:.1%} of rows have a second score within 2^-9 of the maximum",
        f"  2 P_bar = 1           {h.rows_of_ones:.1%} of rows have two or more",
        f"  3 V of one sign       {h.one_signed:.1%} of features",
        f"  4 O rounded outward   {h.output_outward:+.3f} of the error's rms, z {h.output_outward_z:+.1f}",
        f"  5 error of delta      {describe(bias)}",
    ]
    if dithered is not None:
        lines.append(f"    under dither        {describe(dithered)}")
    return [
        *lines,
        f"  6 (P K)^T X alike     mean cosine {h.coherence:.3f}; terms of equation 3 add up to {h.pull:.1%} of their sizes",
        f"  7 error of dW_Q       {h.top_share:.1%} in its top singular direction; its norm is {h.error_to_gradient:.3g} of dW_Q's",
        f"  8 W_Q of the head     spectral norm {h.w_q_norm:.4g}",
        f"  9 largest logit       {h.max_logit:.4g}",
    ]


def describe(bias: Bias) -> str:
    """An error of delta in one line."""
    return (
        f"mean {bias.mean:+.3e} +- {bias.standard_error:.1e} (n = {bias.units}), z {bias.z:+.1f}, "
        f"{bias.ratio:.2f} of its rms, {bias.positive:.0%} positive, {bias.relative:.1e} of |dO||O|"
    )


def _changes(changes: HeadChanges) -> list[str]:
    removing = [change.name for change in changes.presets if change.removes]
    return [
        f"  Measured again under dither; as it is: {describe(changes.before)}",
        "  One rounding site in FP32:",
        *(_change(change) for change in changes.sites),
        "  Another preset:",
        *(_change(change) for change in changes.presets),
        f"  {carrier(changes)}",
        f"  Presets that remove it: {'; '.join(removing) or 'none of those tried'}.",
    ]


def carrier(changes: HeadChanges) -> str:
    """Which rounding carries the bias, in a sentence."""
    alone = [change.name for change in changes.sites if change.removes]
    if alone:
        return f"The bias is carried by the rounding at {' or '.join(alone)}: FP32 there alone removes it."
    if changes.together is not None:
        left = f"{changes.together.left:.0%} of the mean left"
        return f"No single site carries the bias; FP32 at {changes.together.name} together removes it ({left})."
    return "No site carries the bias: FP32 at all of them leaves it."


def _change(change: Change) -> str:
    verb = "removes it" if change.removes else "reduces it" if change.reduces else "does not"
    left = f"{change.left:.0%} of the mean left"
    return f"    {change.name:<26} {verb:<11} {left:<24} z {change.bias.z:+.1f}"


def _table(rows: Sequence[HeadEvidence]) -> list[str]:
    """One line a head."""
    heads = f"{'layer':>5} {'head':>4}  {'verdict':<15} {'z':>7} {'ratio':>6} {'dither z':>8} {'ties':>6} {'P=1':>6} {'V sign':>6} "
    lines = [heads + f"{'cos':>6} {'pull':>6} {'top':>6} {'W_Q':>8} {'logit':>9}"]
    for h in rows:
        dithered = f"{h.dithered.z:+.1f}" if h.dithered else "-"
        lines.append(
            f"{h.layer:>5} {h.head:>4}  {h.finding:<15} {h.bias.z:>+7.1f} {h.bias.ratio:>6.2f} {dithered:>8} {h.tied_rows:>6.3f} "
            f"{h.rows_of_ones:>6.3f} {h.one_signed:>6.3f} {h.coherence:>6.3f} {h.pull:>6.3f} {h.top_share:>6.3f} "
            f"{h.w_q_norm:>8.3f} {h.max_logit:>9.4g}"
        )
    return lines


def _rule() -> list[str]:
    return [
        "The rule. A head is a suspect if the error of delta, as captured, has |z| >= "
        f"{SUSPECT_Z:g} and |mean| >= {BIAS_RATIO:g} of its rms.",
        f"It is biased if under dither ({DRAWS} draws a batch) the sign is the same, |z| >= {BIAS_Z:g} and |mean| >= {BIAS_RATIO:g} of "
        "its rms; otherwise it has a repeated error, which any change of the weights turns.",
        f"It is strained if it is no suspect, but the error of dW_Q has {LARGE_SHARE:g} of its norm or more, or |z| >= {BIAS_Z:g}: what "
        "the correlation of dO with O's own rounding error does.",
        f"Errors below {NOISE:g} of |dO||O| are none. z is Student's t of the mean over sequences (over blocks of tokens below "
        f"{MANY_SEQUENCES} sequences), as a normal variable.",
        f"A change removes the bias if at most {REMOVED:.0%} of the mean is left, reduces it if at most {REDUCED:.0%} is.",
        "Layers and heads count from 0. dO is held as captured: an effect of O's rounding on dO itself shows in the first measurement "
        "only.",
    ]


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #111; }
pre { font: 12.5px/1.4 ui-monospace, monospace; overflow-x: auto; background: #f6f6f6; padding: .8rem; }
img { max-width: 100%; height: auto; }
.verdict { border-left: .5rem solid #0072B2; padding: .4rem 1rem; background: #eef4fa; font-weight: 600; }
.biased { border-color: #D55E00; background: #fbeee6; }
table { border-collapse: collapse; } td, th { padding: .15rem .8rem .15rem 0; text-align: left; }
"""


def page(report: Report, pictures: Sequence[tuple[str, str, bytes]]) -> str:
    """One HTML page that needs no other file. ``pictures``: (caption, alternative text, PNG)."""
    subject, findings = report.subject, report.findings
    facts = "".join(f"<tr><th>{_esc(name)}</th><td>{_esc(value)}</td></tr>" for name, value in subject.facts.items())
    shown = "".join(
        f'<figure><img alt="{_esc(alt)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
        f"<figcaption>{_esc(caption)}</figcaption></figure>"
        for caption, alt, png in pictures
    )
    noted = "".join(f"<p>Symptom: {_esc(symptom)}.</p>" for symptom in symptoms(findings))
    kind = "verdict biased" if findings.biased else "verdict"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Autopsy of {_esc(subject.name)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>Autopsy of {_esc(subject.name)}</h1>"
        f'<p class="{kind}">{_esc(headline(findings))}</p>{noted}<table>{facts}</table>{shown}'
        f"<h2>In numbers</h2><pre>{_esc(text(report))}</pre></body></html>\n"
    )


def _esc(value: str) -> str:
    return html.escape(value, quote=True)
