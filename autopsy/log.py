"""What a file of ``attention.watch`` says: attention's rounding, a kernel's NaN, or neither. The decision table of docs/diagnosis.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from attention.growth import GrowthRule, Probe, growth
from errors import UserError

SMALL_LOGIT, MADE_BY_ROUNDING = 100.0, 1.0
"""Logits below have not been seen to do harm; dQ's error in parts of dQ."""


def answer(records: Sequence[dict[str, Any]]) -> list[str]:
    """The verdict, then what it rests on; a sentence a line. Raises ``UserError`` for another file."""
    if not records or "max_logit" not in records[-1]:
        raise UserError("this file has no record of attention.watch")
    for record in records:
        made = [layer for layer, heads in enumerate(record.get("nan_made", [])) if heads and any(heads)]
        if made:
            where = f"at step {record['step']} attention's backward pass made a NaN of finite q, k, v and dO in layer {made[0]}"
            return [f"KERNEL: {where}.", "Name the backend with torch.nn.attention.sdpa_kernel."]
    last = records[-1]
    tops = [max(heads, key=_size) for heads in last["max_logit"]]
    top = max(range(len(tops)), key=lambda layer: _size(tops[layer]))
    largest = f"The largest logit of step {last['step']} is {tops[top]:.4g}, in layer {top}."
    rounded = [
        layer
        for layer, heads in enumerate(last.get("dq_error", []))
        if heads and max(heads, key=_size) >= MADE_BY_ROUNDING
    ]
    left = leaving(records)
    gone = [f"Layer {layer} left at step {step}." for layer, step in left.items()]
    if left or rounded:
        errors = (
            [f"The error of dQ's sum is at least the sum in layers {', '.join(map(str, rounded))}."] if rounded else []
        )
        control = "Run the control; or scripts/autopsy.py on a checkpoint, for yes or no."
        return ["SUSPECT: attention's rounding may make this gradient.", *gone, *errors, largest, control]
    if _size(tops[top]) < SMALL_LOGIT:
        return ["NO: attention's rounding does not make this gradient; look at the recipe and the data.", largest]
    return ["UNCLEAR: no layer left. Watch whether the logits grow.", largest]


def leaving(records: Sequence[dict[str, Any]], rule: GrowthRule | None = None) -> dict[int, int]:
    """Step at which each layer left, by the alarm's rule."""
    import torch

    left: dict[int, int] = {}
    for layer in range(len(records[-1]["max_logit"])):
        probes: list[Probe] = []
        for record in records:
            logit_1H = torch.tensor([record["max_logit"][layer]], dtype=torch.float64)
            probes.append(Probe(record["step"], record["clock"], logit_1H, logit_1H))
            found = growth(probes, rule or GrowthRule())
            if found is not None and found.layers():
                left[layer] = record["step"]
                break
    return left


def _size(value: float) -> float:
    """NaN is larger than any number."""
    return math.inf if math.isnan(value) else value
