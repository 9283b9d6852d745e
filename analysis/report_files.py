"""The files of a run in ``results/``: columns, digits and units of the CSVs, how they are written and read again.

A column ``NAME:UNIT`` holds NAME in that unit: -34.96 below ``delta_error_mean_1_0:1e-12`` is -3.496e-11, that of layer 1, head 0. What
a document shows one by one has five digits or more, as one less would be rounded twice; that of which it shows means and counts has four.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from analysis.curves import Record
from analysis.report import LAYER
from errors import UserError

METRICS = ("step", "train_loss", "grad_norm", "tokens_per_second", "val_loss", "seconds", "data_digest", "source")
HEADS = (
    *("w_q_head_norm", "max_logit", "ties_2e9", "top_1"),
    *("delta_error_mean", "delta_error_se", "delta_error_rms", "delta_rms"),
)
"""Of every head of ``LAYER``."""
OF_HEAD = re.compile(r"(\w+)_(\d+)_(\d+)")
"""A column of one head: what, layer, head."""
W_Q = re.compile(r"w_q_norm_\d+")
MAX_LOGIT = re.compile(r"max_logit_\d+")
Z = re.compile(r"z_\d+_\d+")

WORDS = ("data_digest", "source")
WHOLE = ("step", "delta_units")
FORMS = {
    **{"train_loss": ".6g", "val_loss": ".7g", "tokens_per_second": ".0f", "seconds": ".1f", "z": ".0f"},
    **dict.fromkeys(("grad_norm", "w_q_norm", "max_logit", "top_1", "delta_error_rms", "delta_rms"), ".5g"),
}
"""Digits of a column, in its unit; four significant ones where nothing is said."""
UNITS = {
    **dict.fromkeys(("delta_error_mean", "delta_error_se", "delta_error_rms"), "1e-12"),
    **{"delta_rms": "1e-6", "ties_2e9": str(2**-13), "z": "0.01"},
}
"""Of repeated maxima: one row of 8 sequences of 1,024."""


def _kind(name: str) -> str:
    """The name in ``FORMS`` and ``UNITS``: of W_Q without its layer, of what a head has without both."""
    of_head = OF_HEAD.fullmatch(name)
    return "w_q_norm" if W_Q.fullmatch(name) else of_head[1] if of_head else name


def as_csv(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as CSV text, empty where there is no value."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    units = [UNITS.get(_kind(name)) for name in columns]
    writer.writerow([f"{name}:{unit}" if unit else name for name, unit in zip(columns, units, strict=True)])
    forms = [FORMS.get(_kind(name), ".4g") for name in columns]
    shown = list(zip(columns, forms, (float(unit or 1) for unit in units), strict=True))
    writer.writerows([_cell(row.get(name), form, unit) for name, form, unit in shown] for row in rows)
    return out.getvalue()


def _cell(value: Any, form: str, unit: float) -> str:
    if value is None:
        return ""
    return short(value / unit, form) if isinstance(value, float) else str(value)


def short(value: float, form: str = ".4g") -> str:
    """A number in as few characters as ``form`` allows: no zeros at the end, 70610 for 7.061e+04, 1e-9 for 1e-09, 0 for -0."""
    text = format(value, form)
    if not math.isfinite(value):
        return text
    if float(text) == 0:
        return "0"
    mantissa, _, exponent = text.partition("e")
    if not exponent:
        return text.rstrip("0").rstrip(".") if "." in text else text
    text = f"{mantissa}e{int(exponent)}"
    return min(f"{float(text):.0f}", text, key=len) if int(exponent) > 0 else text


def read_csv(file: TextIO) -> list[dict[str, Any]]:
    """Rows of ``as_csv``: whole numbers, numbers and words again, without the empty cells."""
    reader = csv.reader(file)
    columns = [name.partition(":") for name in next(reader, [])]
    return [
        {name: _value(name, cell, float(unit or 1)) for (name, _, unit), cell in zip(columns, row, strict=True) if cell}
        for row in reader
    ]


def _value(name: str, cell: str, unit: float) -> Any:
    if name in WORDS:
        return cell
    return int(cell) if name in WHOLE else float(cell) * unit


def metrics_csv(rows: Sequence[Record]) -> str:
    """metrics.csv, without the columns that no row has. The wall time stays where there is a probe, and at its end."""
    timed = max((row["step"] for row in rows if "seconds" in row), default=None)
    keep = [
        row
        if row["step"] == timed or any(map(W_Q.fullmatch, row))
        else {n: v for n, v in row.items() if n != "seconds"}
        for row in rows
    ]
    return as_csv([name for name in METRICS if any(name in row for row in keep)], keep)


def of_layers(row: Mapping[str, Any]) -> dict[str, float]:
    """W_Q's norm and the largest logit of every layer that has one, by column."""
    return {name: value for name, value in row.items() if W_Q.fullmatch(name) or MAX_LOGIT.fullmatch(name)}


def check_metrics(records: Sequence[Record], where: str) -> None:
    """Raise ``UserError`` for a word where ``metrics_csv`` and ``of_layers`` take a number."""
    for row in records:
        for name, value in row.items():
            taken = (name in METRICS and name not in WORDS) or W_Q.fullmatch(name)
            if taken and not isinstance(value, (int, float, type(None))):
                raise UserError(f"{where}: {name} of step {row['step']} is no number")


def check_probes(probes: Sequence[Mapping[str, Any]], where: str) -> None:
    """Raise ``UserError`` for a probe without what ``head_rows`` and ``probe_rows`` take from it: it is damaged, or of another program."""
    for probe in probes:
        step, units, rows = probe["step"], probe.get("delta_units"), probe.get("max_logit")
        if not isinstance(units, int):
            raise UserError(f"{where}: delta_units of step {step} is no whole number")
        shape = [len(row) if isinstance(row, list) else 0 for row in rows] if isinstance(rows, list) else []
        for name in HEADS:
            if not (len(shape) > LAYER and all(shape) and _has_numbers(probe.get(name), shape)):
                told = "has not a number for each head of each layer" if len(shape) > LAYER else f"lacks layer {LAYER}"
                raise UserError(f"{where}: {name} of step {step} {told}")


def _has_numbers(rows: Any, shape: Sequence[int]) -> bool:
    """Whether ``rows`` are lists of so many numbers."""
    if not isinstance(rows, list) or [len(row) if isinstance(row, list) else 0 for row in rows] != shape:
        return False
    return all(isinstance(value, (int, float)) for row in rows for value in row)


def head_rows(probes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row a probe: ``HEADS`` of every head of ``LAYER``."""
    return [
        {"step": probe["step"]}
        | {f"{name}_{LAYER}_{head}": value for name in HEADS for head, value in enumerate(probe[name][LAYER])}
        for probe in probes
    ]


def by_head(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of ``head_rows`` as one a probe and head."""
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for row in rows:
        for name, value in row.items():
            if of_head := OF_HEAD.fullmatch(name):
                step, head = row["step"], int(of_head[3])
                found.setdefault((step, head), {"step": step, "head": head})[of_head[1]] = value
    return list(found.values())


def probe_rows(records: Sequence[Record], probes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row a probe: units of a standard error of delta; W_Q's norm of every layer, as the metrics have it; the largest logit of all
    layers but ``LAYER``, and z of their heads, for which it has those of its heads in ``head_rows``."""
    norms = {record["step"]: of_layers(record) for record in records}
    rows = []
    for probe in probes:
        row = {"step": probe["step"], "delta_units": probe["delta_units"], **norms.get(probe["step"], {})}
        row |= {f"max_logit_{i}": max(heads) for i, heads in enumerate(probe["max_logit"]) if i != LAYER}
        for layer, pairs in enumerate(zip(probe["delta_error_mean"], probe["delta_error_se"], strict=True)):
            if layer != LAYER:
                row |= {f"z_{layer}_{head}": z_score(*pair) for head, pair in enumerate(zip(*pairs, strict=True))}
        rows.append(row)
    return rows


def z_score(mean: float, standard_error: float) -> float | None:
    """Mean over standard error of a head's delta error; None where there is no error."""
    z = float(mean / standard_error) if mean != 0 and standard_error > 0 else math.nan
    return None if math.isnan(z) else z


def probes_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """probes.csv, of ``probe_rows``, or heads.csv, of ``head_rows``."""
    return as_csv(list(dict.fromkeys(name for row in rows for name in row)), rows)


def z_scores(probes: Sequence[Mapping[str, Any]], heads: Sequence[Mapping[str, Any]]) -> list[float]:
    """Of all layers, heads and probes that have an error, from rows of probes.csv and those of ``by_head``."""
    own = (z_score(row["delta_error_mean"], row["delta_error_se"]) for row in heads)
    return [z for row in probes for name, z in row.items() if Z.fullmatch(name)] + [z for z in own if z is not None]


def as_json(content: Any) -> str:
    """config.json: a line for every list or object that has no other in it."""
    return _lines(content, "\n") + "\n"


def _lines(value: Any, newline: str) -> str:
    inside = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    if not any(item and isinstance(item, (dict, list)) for item in inside):
        return json.dumps(value)
    deeper = newline + " "
    texts = [_lines(item, deeper) for item in inside]
    if isinstance(value, dict):
        texts = [f"{json.dumps(name)}: {text}" for name, text in zip(value, texts, strict=True)]
    first, last = "{}" if isinstance(value, dict) else "[]"
    return first + deeper + f",{deeper}".join(texts) + newline + last
