"""Tables and sentences of ``analysis.normaliser_study``, from its CSV files: what the documents quote."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from analysis.normaliser_study import FP32_STATISTICS, MAGNITUDES, SHIFT_ALL, Measured, Range, told_apart

Key = tuple[str, str, str, str, str]
"""numerics, kind, magnitude, sign of r, variant."""

NEAR = ("plain", "beta 2 exact", "beta 2", "beta 2 to 2^-9", "safe", "offset 7.0002", "all beta 2", "all offset 7.0002")


def to_csv(records: Iterable[Measured] | Iterable[Range], digits: str = ".4g") -> str:
    """One line a record, None empty; ``digits`` is the format of numbers."""
    text = io.StringIO()
    writer: Any = None
    for record in records:
        row = dataclasses.asdict(record)
        if writer is None:
            writer = csv.writer(text, lineterminator="\n")
            writer.writerow(row)
        writer.writerow([format(value, digits) if isinstance(value, float) else value for value in row.values()])
    return text.getvalue()


def measured_from(text: str) -> list[Measured]:
    """Inverse of ``to_csv``, to its digits."""
    return [Measured(**_typed(Measured, row)) for row in csv.DictReader(io.StringIO(text))]


def ranges_from(text: str) -> list[Range]:
    """Inverse of ``to_csv``, to its digits."""
    return [Range(**_typed(Range, row)) for row in csv.DictReader(io.StringIO(text))]


def _typed(kind: type, row: dict[str, str]) -> dict[str, Any]:
    types = {field.name: str(field.type) for field in dataclasses.fields(kind)}

    def value(name: str, cell: str) -> Any:
        if types[name] == "str":
            return cell
        return (int(cell) if types[name] == "int" else float(cell)) if cell else None

    return {name: value(name, cell) for name, cell in row.items()}


class Evidence:
    """The records by what they are about."""

    def __init__(self, measured: Sequence[Measured], ranges: Sequence[Range]):
        self._measured = {(m.numerics, m.kind, m.magnitude, m.maximum, m.variant, m.v): m for m in measured}
        self._ranges = {(r.numerics, r.kind, r.maximum, r.variant): r for r in ranges}

    def of(self, key: Key, v: str = "+") -> Measured:
        """Raises ``KeyError`` for what was not measured."""
        return self._measured[(*key, v)]

    def range(self, numerics: str, kind: str, maximum: str, variant: str) -> Range:
        return self._ranges[numerics, kind, maximum, variant]

    def bias(self, key: Key) -> str:
        """Mean error of O for V > 0, for V < 0, and the larger of their standard errors; how many rows leave the range."""
        plus, minus = self.of(key), self.of(key, "-")
        lost = plus.nonfinite + plus.zero + plus.subnormal
        if lost == 1:
            return "no row is right"
        error = max(plus.standard_error, minus.standard_error)
        text = f"{plus.mean:+.3f} / {minus.mean:+.3f} ± {error:.3f}"
        return text + (f" ({lost:.0%} lost)" if lost else "")

    def delta(self, key: Key) -> str:
        """Mean error of delta with its standard error, its root mean square, share of positive errors, for V > 0."""
        found = self.of(key)
        if not found.n:
            return "no row is right"
        positive = "no error" if math.isnan(found.delta_positive) else f"{found.delta_positive:.0%}"
        return f"{found.delta_mean:+.2f} ± {found.delta_standard_error:.2f}, {found.delta_rms:.2f}, {positive}"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def _by_variant(
    cell: Callable[[Key], str], variants: Sequence[str], columns: Sequence[tuple[str, str, str, str]]
) -> str:
    heads = ["normaliser", *(f"{numerics}: {kind}, {magnitude}" for numerics, kind, magnitude, _ in columns)]
    return table(heads, ([variant, *(cell((*column, variant)) for column in columns)] for variant in variants))


def tables(evidence: Evidence) -> str:
    """Everything measured that is worth a look, as Markdown."""
    tie = [("paper", "tie"), (FP32_STATISTICS, "tie"), ("hardware", "tie"), ("hardware", "tie small others")]
    sizes = [(n, "tie", size) for n in ("paper", "hardware") for size in ("tiny", "hundreds", "failing")]
    sizes.append(("hardware", "tie small others", "hundreds"))
    near = [(n, kind, "usual", "+") for n in ("paper", "hardware") for kind in ("within 1e-3", "within 2^-9")]
    near += [("hardware", "within 2^-7", "usual", "+"), ("hardware", "within 1e-3", "hundreds", "+")]
    untied = [(n, "no tie", size, "+") for n in ("paper", "hardware") for size in MAGNITUDES if size != "tiny"]
    parts = {
        "Repeated maxima above zero: bias of O": _by_variant(
            evidence.bias, told_apart("+"), [(n, kind, "usual", "+") for n, kind in tie]
        ),
        "Repeated maxima below zero: bias of O": _by_variant(
            evidence.bias, told_apart("-"), [(n, kind, "usual", "-") for n, kind in tie]
        ),
        "Repeated maxima of other sizes, above zero: bias of O": _by_variant(
            evidence.bias, told_apart("+"), [(*column, "+") for column in sizes]
        ),
        "Maxima that are nearly repeated: bias of O": _by_variant(evidence.bias, NEAR, near),
        "No repeated maximum: bias of O": _by_variant(evidence.bias, ("plain", *SHIFT_ALL), untied),
        "Repeated maxima above zero: error of delta": _by_variant(
            evidence.delta, told_apart("+"), [(n, kind, "usual", "+") for n, kind in tie]
        ),
        "No repeated maximum: error of delta": _by_variant(evidence.delta, ("plain", *SHIFT_ALL), untied),
        "Range": _range_table(evidence),
    }
    return "\n".join(f"## {title}\n\n{text}" for title, text in parts.items())


def _range_table(evidence: Evidence) -> str:
    heads = ["normaliser", "numerics", "rows", "r", "subnormal from", "zero from", "not finite from", "100 to 200"]
    found = [
        evidence.range(numerics, kind, maximum, variant)
        for maximum in "+-"
        for kind in ("tie", "no tie")
        for variant in told_apart(maximum, kind)
        for numerics in ("paper", "hardware")
    ]
    leaving = [r for r in found if (r.subnormal_from, r.zero_from, r.nonfinite_from) != (None, None, None)]
    cells = [
        [r.variant, r.numerics, r.kind, "> 0" if r.maximum == "+" else "< 0"]
        + ["-" if f is None else f"{f:,g}" for f in (r.subnormal_from, r.zero_from, r.nonfinite_from)]
        + [r.at_100, r.at_100000]
        for r in leaving
    ]
    return table([*heads, "100,000 and more"], cells)
