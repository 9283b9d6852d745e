"""The table of scripts/alarm_table.py: made of rows, and read again for rows whose runs' logs are gone."""

from __future__ import annotations

import csv
import io
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from errors import UserError
from scripts.alarm_scan import as_made, read_text, table

DETECTORS = ("growth", "delta", "max_logit", "loss")
OPEN, CUT, UNSTABLE, QUIET = "too soon to tell", "no, cut", "no, unstable", "no"
ALARM_STEP = re.compile(r"\**(\d+)")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run, and when each detector alarmed first."""

    name: str
    attention: str
    last_step: int
    exploded_at: int | None
    is_open: bool
    is_cut: bool
    accused: str
    first: dict[str, int | None]
    is_unstable: bool = False
    """This, ``is_open`` and ``is_cut`` as in ``alarm_scan.Run``."""

    @property
    def is_stable(self) -> bool:
        return self.exploded_at is None and not (self.is_cut or self.is_open or self.is_unstable)

    def warning(self, detector: str) -> int | None:
        """Steps from the first alarm to the explosion; negative when it came too late."""
        alarm = self.first[detector]
        return None if alarm is None or self.exploded_at is None else self.exploded_at - alarm


def in_order(rows: Sequence[Row]) -> list[Row]:
    """Those that exploded first; by name."""
    return sorted(rows, key=lambda row: (row.exploded_at is None, row.name))


def document(rows: Sequence[Row], settings: Sequence[str]) -> str:
    """The Markdown file: a line a run, in the order given, a sentence a detector, and the sentences on how it was made."""
    return markdown(rows) + "\n\n" + "".join(f"- {sentence}\n" for sentence in (*totals(rows), *settings))


def markdown(rows: Sequence[Row]) -> str:
    """One line a run: alarm step and, where the run exploded, the warning in brackets."""
    head = [
        "run",
        "attention",
        "last step",
        "exploded at step",
        *(f"{name}: step (warning)" for name in DETECTORS),
        "growth names",
    ]
    lines = [head, ["---", "---", *["---:"] * (len(head) - 3), "---"]]
    for row in rows:
        cells = [_cell(row, name) for name in DETECTORS]
        lines.append([row.name, row.attention, str(row.last_step), _end(row), *cells, row.accused])
    return table(lines)


def _end(row: Row) -> str:
    if row.exploded_at is not None:
        return str(row.exploded_at)
    return UNSTABLE if row.is_unstable else OPEN if row.is_open else CUT if row.is_cut else QUIET


def _cell(row: Row, detector: str) -> str:
    alarm, warning = row.first[detector], row.warning(detector)
    if alarm is None:
        return "-"
    return f"{alarm} ({warning})" if warning is not None else f"**{alarm}** (false)" if row.is_stable else str(alarm)


def totals(rows: Sequence[Row]) -> list[str]:
    """A sentence a detector: how many explosions it warned of and how early, and its false alarms."""
    exploding = [row for row in rows if row.exploded_at is not None]
    stable = [row for row in rows if row.is_stable]
    unknown = [row for row in rows if row not in exploding and row not in stable]
    sentences = []
    for name in DETECTORS:
        warnings = [w for row in exploding if (w := row.warning(name)) is not None and w > 0]
        spread = (
            f", {min(warnings)} to {max(warnings)} steps ahead (median {statistics.median(warnings):g})"
            if warnings
            else ""
        )
        false = sum(row.first[name] is not None for row in stable)
        sentences.append(
            f"{name}: warned of {len(warnings)} of {len(exploding)} explosions{spread}; "
            f"false alarms in {false} of {len(stable)} stable runs"
            + (
                f"; alarms in {sum(row.first[name] is not None for row in unknown)} of {len(unknown)} cut or unstable."
                if unknown
                else "."
            )
        )
    return sentences


def as_csv(rows: Sequence[Row]) -> str:
    """The same numbers; empty where there is none."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["run", "attention", "last_step", "exploded_at", "too_soon_to_tell", *DETECTORS, "growth_names"])
    for row in rows:
        alarm_steps, unknown = (
            [row.first[name] for name in DETECTORS],
            int(row.exploded_at is None and not row.is_stable),
        )
        writer.writerow([row.name, row.attention, row.last_step, row.exploded_at, unknown, *alarm_steps, row.accused])
    return out.getvalue()


def kept(path: Path, settings: Sequence[str]) -> list[Row]:
    """The rows of a table that ``document`` made, in its order.

    What is made of these rows with ``settings`` must be the file to the letter: so its columns, definitions and totals are those of now.
    Raises ``UserError`` where it is not, or cannot be read.
    """
    text = read_text(path)
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    rows = [_read(path, line) for line in lines]
    as_made(path, text, document(rows, settings))
    if len({row.name for row in rows}) < len(rows):
        raise UserError(f"{path}: it has a run twice")
    return rows


def _read(path: Path, line: str) -> Row:
    cells = line.removeprefix("| ").removesuffix(" |").split(" | ")
    try:
        name, attention, last, end, *alarms, accused = cells
        exploded_at = None if end in (OPEN, CUT, UNSTABLE, QUIET) else int(end)
        found = [ALARM_STEP.match(cell) for cell in alarms]
        return Row(
            name=name,
            attention=attention,
            last_step=int(last),
            exploded_at=exploded_at,
            is_open=end == OPEN,
            is_cut=end == CUT,
            is_unstable=end == UNSTABLE,
            accused=accused,
            first={key: one and int(one[1]) for key, one in zip(DETECTORS, found, strict=True)},
        )
    except ValueError:
        raise UserError(f"{path}: not a row of this table: {line}") from None
