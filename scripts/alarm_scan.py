"""Where the alarm's thresholds could lie, on finished runs: the part of scripts/alarm_table.py that ``--scan`` prints."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from errors import UserError
from training.alarm import AlarmConfig, alarms

SCAN_LOGITS = (100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10_000.0, 20_000.0, 50_000.0)
SCAN_SHARES = (0.0, 0.25, 0.5, 0.75)
PICKS: tuple[Callable[..., Any], ...] = (max, max, min)
"""Which value of the runs that are stable, unknown, exploding is the one furthest out."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run folder, read."""

    name: str
    attention: str
    steps: list[int]
    losses: list[float]
    telemetry: list[dict[str, Any]]
    warm_up: int
    exploded_at: int | None
    is_open: bool
    """It ends above the margin, too soon to tell."""
    is_cut: bool
    """It did not come to its planned end, and had not exploded."""
    is_unstable: bool = False
    """It came to its planned end with a gradient norm above 20 again and again (``report.unstable_since``), and had not exploded."""

    @property
    def last_step(self) -> int:
        return max(self.steps[-1], self.telemetry[-1]["step"])

    @property
    def is_stable(self) -> bool:
        return self.exploded_at is None and not (self.is_cut or self.is_open or self.is_unstable)


@dataclass(frozen=True, kw_only=True)
class Scan:
    """What ``--scan`` prints, in parts that add up: nothing else is needed of runs whose logs are gone."""

    lead: int
    runs: dict[str, int]
    """Last step by name."""
    sizes: tuple[int, ...]
    """How many runs are stable, unknown, exploding."""
    ends: dict[str, list[tuple[float, str] | None]]
    """By statistic: of the same three groups the value furthest out, to four digits, and its run."""
    settings: dict[tuple[str, str], tuple[int, int | None, int, int]]
    """By share and logit: warned in time, the shortest warning, false alarms, alarms in cut runs."""

    def plus(self, other: Scan) -> Scan:
        """The scan of the runs of both, which have none in common and the same settings."""
        ends = {
            name: [
                pick([end for end in pair if end is not None], default=None)
                for pick, *pair in zip(PICKS, self.ends[name], other.ends[name], strict=True)
            ]
            for name in self.ends
            if name in other.ends
        }
        settings = {}
        for key, (in_time, shortest, false, open_ones) in self.settings.items():
            also = other.settings[key]
            warnings = [warning for warning in (shortest, also[1]) if warning is not None]
            settings[key] = (in_time + also[0], min(warnings, default=None), false + also[2], open_ones + also[3])
        sizes = tuple(a + b for a, b in zip(self.sizes, other.sizes, strict=True))
        return Scan(lead=self.lead, runs=self.runs | other.runs, sizes=sizes, ends=ends, settings=settings)

    def minus(self, other: Scan) -> Scan:
        """The scan less that of some of its runs. Raises ``UserError`` where a value of it is of one of them, the next not known."""
        of_them = {end[1] for ends in self.ends.values() for end in ends if end is not None} & other.runs.keys()
        settings = {}
        for key, (in_time, shortest, false, open_ones) in self.settings.items():
            less = other.settings[key]
            if less[1] is not None and less[1] == shortest:
                of_them |= other.runs.keys()
            settings[key] = (in_time - less[0], shortest, false - less[2], open_ones - less[3])
        if of_them:
            raise UserError(
                f"{', '.join(sorted(of_them))}: a value of the scan is theirs, and the next one is not known"
            )
        sizes = tuple(a - b for a, b in zip(self.sizes, other.sizes, strict=True))
        runs = {name: step for name, step in self.runs.items() if name not in other.runs}
        return dataclasses.replace(self, runs=runs, sizes=sizes, settings=settings)

    def text(self) -> str:
        """Two tables, and of which runs."""
        stable, unknown, exploding = self.sizes
        head = ["statistic, two probes in a row", "stable runs stay below", "cut runs stay below"]
        above = [[*head, f"exploding runs pass, {self.lead} steps before"], ["---", *["---:"] * 3]]
        for name, ends in self.ends.items():
            above.append([name, *("-" if end is None else f"{end[0]:.4g} ({end[1]})" for end in ends)])
        head = ["growth_share", "growth_logit", f"warned {self.lead} steps ahead", "shortest warning given"]
        below = [[*head, "false alarms", "alarms in cut runs"], ["---:"] * 6]
        for (share, logit), (in_time, shortest, false, open_ones) in self.settings.items():
            warned = [f"{in_time} of {exploding}", "-" if shortest is None else str(shortest)]
            below.append([share, logit, *warned, f"{false} of {stable}", f"{open_ones} of {unknown}"])
        of = ", ".join(f"{name} to {step}" for name, step in sorted(self.runs.items()))
        return f"{table(above)}\n\n{table(below)}\n\nOf these runs, to their last steps: {of}\n"


def reached(run: Run, statistic: str, share: float, before: int | None) -> float:
    """The largest value that a statistic of some layer kept for two probes behind the warm-up, up to step ``before``; NaN for no probe."""
    probes = [r for r in run.telemetry if r["step"] >= run.warm_up and (before is None or r["step"] <= before)]
    values = np.array([_by_layer(record, statistic, share) for record in probes])
    return float(np.minimum(values[1:], values[:-1]).max()) if len(values) > 1 else float("nan")


def _by_layer(record: dict[str, Any], statistic: str, share: float) -> np.ndarray:
    """[L]; what is not finite counts as infinite."""
    if statistic == "W_Q norm / median layer's":
        value_L = np.asarray(record["w_q_norm"], dtype=np.float64)
        value_L = value_L / np.median(value_L)
    elif statistic == "median head's mean largest P":
        value_L = np.median(np.asarray(record["top_1"], dtype=np.float64), axis=1)
    else:
        logit_LH = np.sort(np.asarray(record["max_logit"], dtype=np.float64), axis=1)
        heads = logit_LH.shape[1]
        needed = 1 if statistic == "largest logit" else max(int(np.ceil(share * heads)), 1)
        value_L = logit_LH[:, heads - needed]
    return np.where(np.isfinite(value_L), value_L, np.inf)


def scan(runs: Sequence[Run], config: AlarmConfig, lead: int) -> Scan:
    """How far statistics part the runs, and the rule ``growth`` at other thresholds."""
    named = ["largest logit", f"logit of {config.growth_share:.0%} of a layer's heads", "W_Q norm / median layer's"]
    if all("top_1" in run.telemetry[0] for run in runs):
        named.append("median head's mean largest P")
    groups = (_stable(runs), _unknown(runs), _exploding(runs))
    ends = {}
    for name in named:
        found: list[tuple[float, str] | None] = []
        for group, pick in zip(groups, PICKS, strict=True):
            values = (
                (reached(r, name, config.growth_share, r.exploded_at and r.exploded_at - lead), r.name) for r in group
            )
            # As printed: what is picked of two scans together is what one of all their runs would pick.
            shown = [(float(f"{value:.4g}"), run) for value, run in values if value == value]
            found.append(pick(shown, default=None))
        ends[name] = found
    return Scan(
        lead=lead,
        runs={run.name: run.last_step for run in runs},
        sizes=tuple(map(len, groups)),
        ends=ends,
        settings=_settings(runs, config, lead),
    )


def _settings(
    runs: Sequence[Run], config: AlarmConfig, lead: int
) -> dict[tuple[str, str], tuple[int, int | None, int, int]]:
    found = {}
    for share in sorted({*SCAN_SHARES, config.growth_share}):
        for logit in sorted({*SCAN_LOGITS, config.growth_logit}):
            tried = dataclasses.replace(config, growth_logit=logit, growth_share=share, delta_z=0.0)
            first = {run.name: next(iter(alarms(run.telemetry, tried, run.warm_up)), None) for run in runs}
            warnings = [(r.exploded_at or 0) - a.step for r in _exploding(runs) if (a := first[r.name]) is not None]
            in_time = sum(warning >= lead for warning in warnings)
            false, open_ones = (
                sum(first[r.name] is not None for r in group) for group in (_stable(runs), _unknown(runs))
            )
            found[f"{share:g}", f"{logit:g}"] = (in_time, min(warnings, default=None), false, open_ones)
    return found


def kept(path: Path, of: Scan, runs: Mapping[str, int]) -> Scan:
    """The scan that was printed to ``path``, to be added to ``of``; ``runs``: of which runs it must be, with their last steps.

    Raises ``UserError`` for a file that ``Scan.text`` did not make, or that is of other runs, settings or lead.
    """
    text = read_text(path)
    try:
        found = _read(text, of.lead)
    except (ValueError, LookupError):
        raise UserError(f"{path}: not what --scan prints") from None
    as_made(path, text, found.text())
    if found.runs != runs:
        other = sorted({name for name, _ in found.runs.items() ^ runs.items()})
        raise UserError(f"{path}: it is not of the runs of the table to be kept: see {', '.join(other)}")
    if found.settings.keys() != of.settings.keys() or list(found.ends)[:3] != list(of.ends)[:3]:
        raise UserError(f"{path}: it was made at other thresholds (--share, --logit)")
    return found


def _read(text: str, lead: int) -> Scan:
    """Raises ``ValueError`` or ``LookupError`` where ``text`` is of another form."""
    above, below, of = text.split("\n\n")
    ends = {}
    for name, *cells in _cells(above):
        pairs = (None if cell == "-" else cell.removesuffix(")").split(" (") for cell in cells)
        ends[name] = [None if pair is None else (float(pair[0]), pair[1]) for pair in pairs]
    settings = {}
    sizes: tuple[int, ...] = ()
    for share, logit, warned, shortest, false, open_ones in _cells(below):
        counts, of_all = zip(*(map(int, cell.split(" of ")) for cell in (warned, false, open_ones)), strict=True)
        settings[share, logit] = (counts[0], None if shortest == "-" else int(shortest), counts[1], counts[2])
        sizes = (of_all[1], of_all[2], of_all[0])
    runs = {name: int(step) for name, step in (one.split(" to ") for one in of.strip().partition(": ")[2].split(", "))}
    return Scan(lead=lead, runs=runs, sizes=sizes, ends=ends, settings=settings)


def _cells(text: str) -> list[list[str]]:
    return [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in text.splitlines()[2:]]


def _exploding(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if run.exploded_at is not None]


def _stable(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if run.is_stable]


def _unknown(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if run.exploded_at is None and not run.is_stable]


def table(lines: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def read_text(path: Path) -> str:
    """A file that was written earlier. Raises ``UserError`` when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: unreadable ({getattr(error, 'strerror', None) or 'not UTF-8'})") from None


def as_made(path: Path, text: str, made: str) -> None:
    """Raises ``UserError``, with the first line that differs, where the file at ``path`` is not what is made of its own numbers."""
    for number, (has, should) in enumerate(zip_longest(text.splitlines(), made.splitlines(), fillvalue=""), 1):
        if has != should:
            raise UserError(
                f"{path}: line {number} is {has!r}, and {should!r} by this command line and the file's other lines"
            )
