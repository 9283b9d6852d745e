"""What a file of ``watch`` says of its steps:

- KERNEL: attention's backward pass made a NaN in dQ from finite inputs.
- UNCLEAR of a run that is known as a control or the fix: its loss decides. Else:
- SUSPECT: a layer was flagged whose error of delta is not harmless, dQ is mostly error because delta is wrong, or a gradient is not
  finite and logits passed 1,000.
- NO: none of these, logits below 100, three records with the gradient of every layer, and the model hides no attention. No layer's O or sum
  of dQ is far off, logits do not reach a soft-cap, and no logit ceased to be finite behind steps that were not seen.
- UNCLEAR: all else.

    python -m low_precision_attention.watching watch.jsonl

It exits with 0 whatever the verdict, and with 2 for any other file.
"""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..backends import BACKENDS
from ..presets import PRESETS, RECOMMENDED
from ..user_error import OneLineParser, UserError
from .growth import FMA_LOGIT, LARGE_LOGIT, GrowthAlarm, GrowthRule
from .log import layers_of, named, read_log

SMALL_LOGIT, MADE_BY_ROUNDING, FEW = 100.0, 1.0, 3
"""Logits below have not been seen to do harm; dQ's error in parts of dQ; fewer records say nothing."""
WRONG = 0.3
"""Error of a layer's sum of dQ, in that sum, that rounding seldom makes in most records at small logits.

In 1,694 short runs of tiny models, Hugging Face's and plain ones, right kernels had medians over their records of up to 0.17 (mostly below
0.01), but in two: 0.44 where V was alike in all keys, so that dQ nearly cancelled, and 0.48 in FP16 whose gradients underflowed. On random
tokens, 1,024 of them, a GPT-2 of four layers had 0.6 and more in BF16, 0.0 in FP32, on real text at most 0.07.
An O of one bit, as the quickstart's, has 0.06 to 0.2. Single records reach 0.5: hence medians. Kernels with another scale, or a
causal mask that is off by one, had 0.39 and more in 16 runs.
"""
OFF = 0.008
"""``o_error`` of a layer that rounding does not make.

In 200 short runs of tiny models right kernels had at most 0.0023 in BF16, 0.0002 in FP16, 0.005 with P in E4M3, and 0.0074 where q, k and V
were rounded to it inside the kernel, too (0.021 where V was alike in all keys, but no such run had a NO without this). Random tensors with
logits up to 90 had as much. A window of 65 for one of 64 had 0.009 to 0.012, sinks or dropout that nobody told 0.02 and more; of longer
windows one key more is not seen. ``delta_error`` cannot tell: behind a norm of O right kernels have 1, as delta cancels.
"""
TEST = "test the kernel: python -m low_precision_attention.check KERNEL."
CONTROLS = "flash_delta_from_p", "flash_fp32_o"
"""More exact than ``flash`` up to the FMA threshold, ..."""
ALWAYS_CONTROLS = "flash_delta_from_p_subtract_first", "standard", "sdpa_math", RECOMMENDED
"""... and at any logit."""
WHOLE = {"dq_error": "dQ", "row_residual": "delta"}
BELOW = f"from a checkpoint with logits below {LARGE_LOGIT:,.0f}"
SHOWN = 8
"""Steps in the table."""
NEAR = 0.9
"""Share of a soft-cap from which on a logit shows little of how large its score is."""
HARMLESS = 2e-5
"""Largest harmless error of delta: FP32 attention has 1e-7, and no run with up to 1.1e-5 grew (experiments/row_residual/README.md)."""


def main(arguments: Sequence[str]) -> None:
    """The command. Raises ``UserError``."""
    parser = OneLineParser(
        prog="python -m low_precision_attention.watching",
        description="A verdict on a run, and the largest logits of its layers.",
        epilog="Exit codes: 0 whatever the verdict, 2 for a file that is not of watch.",
    )
    parser.add_argument("file", metavar="FILE", help="what watch(log=FILE) wrote")
    path = Path(parser.parse_args(arguments).file)
    if not path.is_file():
        raise UserError(f"{path}: no such file; expected one that watch(log=...) wrote")
    records = read_log(path, "a file that watch(log=...) wrote; scripts/compare_runs.py reads runs of train.py")
    print("\n".join([*answer(records), *table(records)]))


def answer(records: Sequence[dict[str, Any]]) -> list[str]:
    """The verdict, then what it rests on; a sentence a line. Raises ``UserError`` for another file."""
    if not records:
        raise UserError("the log has no record yet")
    for before, after in itertools.pairwise(records):
        if after["step"] <= before["step"]:
            steps = f"step {after['step']} follows step {before['step']}"
            raise UserError(f"this file holds more than one run: {steps}; expected a file of its own for each")
        if _heads(before) != _heads(after):
            heads = f"heads by layer are {_heads(before)} at step {before['step']} and {_heads(after)} at step {after['step']}"
            raise UserError(f"{heads}: expected the same, as layers are told apart by their number")
    layers = layers_of(records[0])
    for record in records:
        made = [layer for layer, heads in zip(layers, record.get("nan_made", []), strict=False) if heads and any(heads)]
        if made:
            where = f"at step {record['step']} attention's backward pass made a NaN of finite q, k, v and dO in layer {made[0]}"
            return [f"KERNEL: {where}.", "Name the backend with torch.nn.attention.sdpa_kernel."]
    finite = _finite(records)
    notes = [f"Logits are not finite at step {r['step']}." for r in records if not _is_finite(r)][:1]
    if not finite:
        return ["UNCLEAR: no record has finite logits. Watch from an earlier checkpoint.", *notes]
    if frozen := _frozen(finite):
        names = ", ".join(map(str, frozen))
        notes.append(f"Frozen layers, whose queries and keys take no gradient: {names}.")
    if without := sorted({layer for record in finite for layer in record.get("frozen_q", [])}):
        names = ", ".join(map(str, without))
        notes.append(f"Layers whose queries take no gradient though their keys do, so that dQ says nothing: {names}.")
    tops = {layer: max(course) for layer, course in _courses(finite).items()}
    top = max(tops.values())
    span = f"steps {finite[0]['step']} to {finite[-1]['step']}"
    largest = f"The largest logit of {span} is {top:.4g}, in layer {max(tops, key=tops.__getitem__)}."
    overflowed = [record for record in finite if _overflowed(record)]
    if overflowed:
        layer = _overflowed(overflowed[-1])[-1]  # the first in the backward pass
        where = f"The gradient of layer {layer} is not finite"
        notes.insert(0, f"{where}, or too large to measure, at step {overflowed[-1]['step']}.")
    now = bool(overflowed) and (overflowed[-1] is finite[-1] or 2 * len(overflowed) >= len(finite))
    often = Counter(layer for record in finite for layer in _rounded(record))
    rounded = sorted(layer for layer, n in often.items() if 2 * n >= len(finite) or layer in _rounded(finite[-1]))
    alarm = GrowthAlarm()
    for record in finite:
        alarm.update(record["step"], record["clock"], dict(zip(layers, record["max_logit"], strict=True)))
    gone = [
        f"Layer {layer} was flagged at step {step}{_since(finite, layer, step)}."
        for layer, step in alarm.flagged.items()
    ]
    measured = [record for record in finite if _is_measured(record) and not _overflowed(record)]
    judges = top < SMALL_LOGIT and len(finite) >= FEW
    wrong = _wrong(measured, "dq_error", WRONG) if judges else {}
    # Scores and dQ are then not those of this attention, either.
    if judges and (unlike := _wrong(finite, "o_error", OFF)):
        names = named([f"{layer} ({error:.2g})" for layer, error in unlike.items()])
        other = f"UNCLEAR: O of {names} is not attention of the q, k, v and mask handed over: its error is above {OFF}"
        why = "Is it a mask, window, scale, sinks or dropout that watch was not told, or a rounding of q, k and v in the kernel?"
        return [f"{other}.", f"{why} Else {TEST}", *gone, largest, *notes]
    current = _of_last_attention(finite)
    control = control_says(current[-1].get("attention"), _top(current), _fma_logit(current))
    # The loss of one that began with large logits decides nothing.
    if control and (len(current) == len(finite) or _top(current[:1]) <= LARGE_LOGIT):
        return [f"UNCLEAR: {control}", *gone, largest, *notes]
    error = max(itertools.chain(*(_delta_errors(finite, *flag) for flag in alarm.flagged.items())), default=math.inf)
    if error <= HARMLESS and not rounded and not now:
        why = f"delta's error is harmless, at most {error:.2g} of it: its rounding does not make these logits grow. Look at the recipe."
        return [f"UNCLEAR: {named(sorted(alarm.flagged))} flagged, but {why}", *gone, largest, *notes]
    # A layer above with large logits may be what made this gradient overflow.
    if gone or rounded or (now and top >= LARGE_LOGIT):
        errors = [f"The error of dQ's sum is at least the sum in {named(rounded)}."] if rounded else []
        small = [f"Logits are small: first {TEST}"] if wrong else []
        found = [*gone, *errors, *small, largest, *notes, _control(finite[-1], top, failed=True)]
        return ["SUSPECT: attention's rounding may make this gradient.", *found]
    if now:
        what = "the gradient that reaches attention is not finite already, or dQ leaves the range of its dtype"
        cure = "Look behind it: torch.autograd.set_detect_anomaly(True) names what made a NaN. In FP16 lower the loss scale."
        return [f"UNCLEAR: {what}.", *notes, cure, largest]
    if judges and len(measured) < FEW:
        few = f"UNCLEAR: {len(measured)} of {len(finite)} records have the gradient of every layer, expected {FEW}."
        why = "Activation checkpointing needs use_reentrant=False; a frozen model, dropout, torch.no_grad(), a forward pass without a "
        why += "backward pass, a query that broadcasts over the batch and look() without o show none."
        return [few, why, largest, *notes]
    if wrong:
        off = ", ".join(f"of layer {layer} is off by {error:.2g} of its size" for layer, error in wrong.items())
        why = "Rounding makes that where all positions get nearly the same gradient, as on random tokens, or where one underflows in FP16;"
        return [f"UNCLEAR: dQ's sum over queries {off}.", f"{why} else {TEST}", largest, *notes]
    unseen = max(record.get("hidden", 0) for record in records)
    if unseen and top < SMALL_LOGIT:
        why = "nn.MultiheadAttention needs need_weights=False, attention of another kind look()."
        return [f"UNCLEAR: {unseen} attention layer(s) of this model were not seen: {why}", largest, *notes]
    ended = records[-1] is not finite[-1]
    if reached := [cap for record in finite for layer, cap in _reached(record) if layer in tops]:
        reach = f"UNCLEAR: logits reach the cap of {min(reached):g}, so their bounds say nothing."
        return [f"{reach} {_control(finite[-1], top, failed=ended)}", largest, *notes]
    if judges and not _unseen(records, finite):
        last = finite[-1]["step"]
        seen = f"the {len(tops)} layer{'s' * (len(tops) != 1)} {'with a gradient' if frozen else 'seen'}"
        no = f"no sign of harmful rounding in {seen}. If the loss fails, look at the recipe and the data."
        no = f"before step {last + 1}, {no}" if ended else no
        return [f"NO: {no}", largest, *notes, f"It says nothing of steps after {last}."]
    advice = "In FP16 lower the loss scale; else watch from an earlier checkpoint." if ended else "Go on watching."
    if top >= SMALL_LOGIT:
        advice = _control(finite[-1], top, failed=ended)
    if top < LARGE_LOGIT and _unseen(records, finite):
        advice = "Watch each step (every=1) from an earlier checkpoint."
    grown = finite[-1]["clock"] / max(finite[0]["clock"], 1e-30)
    if len(finite) > 1 and grown < GrowthRule().window:
        clock = f"the clock ({finite[-1].get('clock_is', 'steps')}) grew {grown:.2f} times here, and the alarm needs {GrowthRule().window}"
        notes.append(
            f"Slow growth is not judged: {clock}. See in the table whether logits pass 1,000 before the loss rises."
        )
    few = f", and {FEW} are needed to say more" if len(finite) < FEW else ""
    return [f"UNCLEAR: no layer was flagged in {len(finite)} record(s){few}. {advice}", largest, *notes]


def _since(finite: Sequence[dict[str, Any]], layer: int, step: int) -> str:
    """The errors of a layer from that step on, each of its worst head in the median: whether its gradient suffers. Up to a step where
    attention, whose errors these are, changed."""
    later = [record for record in finite if record["step"] >= step]
    same = list(itertools.takewhile(lambda record: record.get("attention") == later[0].get("attention"), later))
    errors = {name: _median(same, layer, name) for name in WHOLE}
    told = [f"{name} {error:.2g} of {WHOLE[name]}" for name, error in errors.items() if error < math.inf]
    span = f"in the median of steps {step} to {same[-1]['step']}"
    return f"; {span} {', '.join(told)}, in its worst head" if told else ""


def _median(records: Sequence[dict[str, Any]], layer: int, name: str) -> float:
    """Of a layer's error in its worst head; inf where that was not measured."""
    at = layers_of(records[0]).index(layer)
    heads = [record[name][at] for record in records if name in record]
    return statistics.median_low([max(of) for of in heads if of and all(map(math.isfinite, of))] or [math.inf])


def _delta_errors(finite: Sequence[dict[str, Any]], layer: int, step: int) -> list[float]:
    """Of delta, by both columns, up to the step at which a layer was flagged and from it on: later its rows may be one-hot, and O exact.
    Each attention that the run had is judged by itself: many looks at one do not hide the errors of another. inf: that at the flag was
    not measured."""
    told: dict[str | None, list[float]] = {}
    for label in {record.get("attention") for record in finite}:
        of_it = [record for record in finite if record.get("attention") == label]
        halves = [r for r in of_it if r["step"] <= step], [r for r in of_it if r["step"] >= step]
        errors = [_median(half, layer, name) for half in halves if half for name in ("row_residual", "delta_error")]
        told[label] = [error for error in errors if error < math.inf]
    flagged = next(record.get("attention") for record in finite if record["step"] == step)
    return list(itertools.chain(*told.values())) if told[flagged] else [math.inf]


def control_says(attention: str | None, logit: float, fma_logit: float) -> str | None:
    """What a run says whose ``attention`` is known as a control or the fix; None of another. ``logit``: its largest."""
    preset = _preset(attention)
    if preset not in CONTROLS + ALWAYS_CONTROLS:
        return None
    what, stable = "is a control", "rounding is probably involved"
    if preset == RECOMMENDED:
        what, stable = "has the fix", "keep it"
    decides = f"this run {what} ({attention}), and its loss decides"
    said = f"{decides}: if it is stable where your run failed, {stable}; if it fails, too, look at the recipe."
    if preset in CONTROLS and logit > fma_logit:
        said += f" Past {fma_logit:,.0f} its own exponent may make it fail: {ALWAYS_CONTROLS[0]}, {BELOW}, is a control at any logit."
    return said


def _preset(attention: str | None) -> str | None:
    """A backend computes what its preset says; with another base, sites or kernel it may be a control or not: None."""
    preset, _, inside = (attention or "").removesuffix(")").partition(" (")
    return preset if preset in PRESETS and inside in ("", *BACKENDS) else None


def _of_last_attention(records: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """The last records, all of one attention: a run may have switched to a control, and what it was does not count for that."""
    last = records[-1].get("attention")
    return records[max((i for i, r in enumerate(records, 1) if r.get("attention") != last), default=0) :]


def _control(last: dict[str, Any], top: float, *, failed: bool) -> str:
    """What to do where attention's rounding may be the cause, by the attention of the last record. ``failed``: the run surely has."""
    own, run = last.get("attention"), "Run the control."
    if top >= LARGE_LOGIT:  # just before a failure the layer grows already
        run = f"Run the control, {BELOW}."
    elif not failed:
        run = "If the run has failed, run the control; else go on watching."
    run = f"Attention is {own}. {run}" if own else run
    decides = "If this is the control, its loss decides; if that rises, look at the recipe."
    return run if _preset(own) else f"{run} {decides}"


def table(records: Sequence[dict[str, Any]]) -> list[str]:
    """Of each layer, and of all if there are several, the largest logit at a few looks, the first step past each bound, and the last step
    before one past 1,000.

    Looks whose logits are not finite and frozen layers are left out. Of the records of one run, as ``answer`` takes them.
    """
    finite = _finite(records)
    if not finite:
        return []
    steps = [record["step"] for record in finite]
    looks = sorted({look * (len(steps) - 1) // (SHOWN - 1) for look in range(SHOWN)})
    bounds = SMALL_LOGIT, LARGE_LOGIT, _fma_logit(finite)
    courses: dict[Any, tuple[float, ...]] = {**_courses(finite)}
    if len(courses) > 1:
        courses["all"] = tuple(map(max, zip(*courses.values(), strict=True)))
    rows = [["layer", *(str(steps[look]) for look in looks), *(f">{bound:,.0f}" for bound in bounds), "before >1,000"]]
    for layer, tops in courses.items():
        past = {bound: next((i for i, top in enumerate(tops) if top > bound), len(tops)) for bound in bounds}
        told = [[*steps, "-"][i] for i in past.values()] + [["-", *steps][past[LARGE_LOGIT]]]
        rows.append([str(layer), *(_shown(tops[look]) for look in looks), *map(str, told)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    title = "Largest logit at some steps; the first step past each bound; the last step before one past 1,000:"
    return ["", title, *("  ".join(map(str.rjust, row, widths)) for row in rows)]


def _shown(logit: float) -> str:
    return f"{logit:.3g}" if abs(logit) >= 1e7 else f"{logit:,.0f}" if abs(logit) >= LARGE_LOGIT else f"{logit:.5g}"


def _finite(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return list(filter(_is_finite, records))


def _is_finite(record: dict[str, Any]) -> bool:
    return all(map(math.isfinite, _tops(record)))


def _fma_logit(finite: Sequence[dict[str, Any]]) -> float:
    return min(record.get("fma_logit", FMA_LOGIT) for record in finite)


def _frozen(finite: Sequence[dict[str, Any]]) -> list[int]:
    return [layer for layer in layers_of(finite[0]) if all(layer in record.get("frozen", []) for record in finite)]


def _courses(finite: Sequence[dict[str, Any]]) -> dict[int, tuple[float, ...]]:
    """Largest logits of each layer that is not frozen, or of all if all are, a number a record."""
    courses = dict(zip(layers_of(finite[0]), zip(*map(_tops, finite), strict=True), strict=True))
    frozen = _frozen(finite)
    return {layer: tops for layer, tops in courses.items() if layer not in frozen} or courses


def _top(finite: Sequence[dict[str, Any]]) -> float:
    return max(map(max, _courses(finite).values()))


def _unseen(records: Sequence[dict[str, Any]], finite: Sequence[dict[str, Any]]) -> bool:
    """Whether logits ceased to be finite between two looks with other steps between them: they can grow from 100 in a few hundred."""
    later = [record["step"] for record in records if not _is_finite(record) and record["step"] > finite[-1]["step"]]
    return bool(later) and min(later) > finite[-1]["step"] + 1


def _wrong(records: Sequence[dict[str, Any]], name: str, least: float) -> dict[int, float]:
    """Layers whose ``name`` is ``least`` or more, over all heads, in more than half of the records; and the median of it."""
    errors: dict[int, list[float]] = {}
    for layer, heads in itertools.chain.from_iterable(
        zip(layers_of(r), r.get(name, []), strict=False) for r in records
    ):
        if heads and all(map(math.isfinite, heads)):
            errors.setdefault(layer, []).append(math.hypot(*heads))
    medians = {layer: statistics.median_low(of) for layer, of in errors.items()}
    return {layer: error for layer, error in medians.items() if error >= least}


def _tops(record: dict[str, Any]) -> list[float]:
    return [math.nan if any(map(math.isnan, heads)) else max(heads) for heads in record["max_logit"]]


def _reached(record: dict[str, Any]) -> list[tuple[int, float]]:
    """Layers whose logits reach their soft-cap, and it, where that is too small to show large ones."""
    caps = zip(layers_of(record), _tops(record), record.get("softcap", []), strict=False)
    return [(layer, cap) for layer, top, cap in caps if 0 < cap < LARGE_LOGIT and top >= NEAR * cap]


def _heads(record: dict[str, Any]) -> dict[int, int]:
    return dict(zip(layers_of(record), map(len, record["max_logit"]), strict=True))


def _columns(record: dict[str, Any]) -> list[tuple[int, list[float] | None, list[float] | None]]:
    """Of each layer its number, the error of dQ and that of delta; None where no gradient came."""
    layers = layers_of(record)
    errors, deltas = (record.get(name, [None] * len(layers)) for name in ("dq_error", "delta_error"))
    return list(zip(layers, errors, deltas, strict=True))


def _is_measured(record: dict[str, Any]) -> bool:
    """Whether some layer has a gradient, and each that is not frozen."""
    there = [bool(heads) for _, heads, _ in _columns(record)]
    frozen = record.get("frozen", []) + record.get("frozen_q", [])
    return any(there) and all(one or layer in frozen for one, layer in zip(there, layers_of(record), strict=True))


def _overflowed(record: dict[str, Any]) -> list[int]:
    """Layers with a gradient that is not finite, which says nothing of rounding."""
    return [layer for layer, heads, _ in _columns(record) if heads and not all(map(math.isfinite, heads))]


def _rounded(record: dict[str, Any]) -> list[int]:
    """Layers whose dQ has an error as large as itself, over all heads.

    Where all rows are one-hot, dQ cancels to nothing and FP32's rounding is as large, also where O is exactly a row of V in BF16. So delta
    must have an error, too.
    """
    return [
        layer
        for layer, heads, delta in _columns(record)
        if heads
        and MADE_BY_ROUNDING <= math.hypot(*heads) < math.inf
        and (delta is None or not all(error < HARMLESS for error in delta))
    ]
