"""Where the alarm's thresholds could lie, on finished runs: the part of scripts/alarm_table.py that ``--scan`` prints."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from training.alarm import AlarmConfig, alarms

SCAN_LOGITS = (100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10_000.0, 20_000.0, 50_000.0)
SCAN_SHARES = (0.0, 0.25, 0.5, 0.75)


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

    @property
    def last_step(self) -> int:
        return max(self.steps[-1], self.telemetry[-1]["step"])

    @property
    def is_stable(self) -> bool:
        return self.exploded_at is None and not self.is_cut and not self.is_open


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


def scan(runs: Sequence[Run], config: AlarmConfig, lead: int) -> str:
    """Two tables: how far statistics part the runs, and the rule ``growth`` at other thresholds."""
    lines = [
        ["statistic, two probes in a row", "stable runs stay below", "cut runs stay below"],
        ["---", "---:", "---:"],
    ]
    lines[0].append(f"exploding runs pass, {lead} steps before")
    lines[1].append("---:")
    named = ["largest logit", f"logit of {config.growth_share:.0%} of a layer's heads", "W_Q norm / median layer's"]
    if all("top_1" in run.telemetry[0] for run in runs):
        named.append("median head's mean largest P")
    for name in named:
        cells = [name]
        for group, pick in ((_stable(runs), max), (_unknown(runs), max), (_exploding(runs), min)):
            ends = [
                (reached(r, name, config.growth_share, r.exploded_at and r.exploded_at - lead), r.name) for r in group
            ]
            value = pick((end for end in ends if end[0] == end[0]), default=None)
            cells.append("-" if value is None else f"{value[0]:.4g} ({value[1]})")
        lines.append(cells)
    return table(lines) + "\n\n" + table(_settings(runs, config, lead))


def _settings(runs: Sequence[Run], config: AlarmConfig, lead: int) -> list[list[str]]:
    heads = ["growth_share", "growth_logit", f"warned {lead} steps ahead", "shortest warning given"]
    lines = [[*heads, "false alarms", "alarms in cut runs"], ["---:"] * 6]
    for share in sorted({*SCAN_SHARES, config.growth_share}):
        for logit in sorted({*SCAN_LOGITS, config.growth_logit}):
            tried = dataclasses.replace(config, growth_logit=logit, growth_share=share, delta_z=0.0)
            first = {run.name: next(iter(alarms(run.telemetry, tried, run.warm_up)), None) for run in runs}
            exploding = _exploding(runs)
            warnings = [(r.exploded_at or 0) - a.step for r in exploding if (a := first[r.name]) is not None]
            in_time = sum(warning >= lead for warning in warnings)
            shortest = str(min(warnings)) if warnings else "-"
            false, open_ones = (
                f"{sum(first[r.name] is not None for r in group)} of {len(group)}"
                for group in (_stable(runs), _unknown(runs))
            )
            lines.append([f"{share:g}", f"{logit:g}", f"{in_time} of {len(exploding)}", shortest, false, open_ones])
    return lines


def _exploding(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if run.exploded_at is not None]


def _stable(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if run.is_stable]


def _unknown(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if run.exploded_at is None and not run.is_stable]


def table(lines: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
