"""Counts over the heads of a layer, and growth, for the documents: has delta's error a sign, how large is it, do maxima repeat.

Rows are those of ``report_files.by_head``, one a probe and head.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from analysis.report import HeadRow


@dataclass(frozen=True)
class Growth:
    """Growth of a positive quantity over a stretch of steps, by least squares on the quantity and on its logarithm."""

    per_thousand: float
    """Added in a thousand steps."""
    factor: float
    """Multiplied by in a thousand steps."""


def growth(series: Mapping[int, float], first: int, last: int) -> Growth | None:
    """Growth from step ``first`` to ``last``, both included; None where the series does not reach both."""
    if first not in series or last not in series:
        return None
    steps = np.array([step for step in series if first <= step <= last], dtype=np.float64)
    values = np.array([series[int(step)] for step in steps], dtype=np.float64)
    return Growth(
        per_thousand=1000 * float(np.polyfit(steps, values, 1)[0]),
        factor=math.exp(1000 * float(np.polyfit(steps, np.log(values), 1)[0])),
    )


@dataclass(frozen=True, kw_only=True)
class Bias:
    """Has the delta error of one layer a sign? Every head of every probe is a test; they are taken as independent."""

    tests: int
    """Heads of probes that have an error at all."""
    beyond_3: int
    """Tests with |mean| above three standard errors."""
    expected_beyond_3: float
    """As many are expected of unbiased errors: of Student's t with ``delta_units`` - 1 degrees of freedom."""
    positive: int
    sum_z: float
    """Sum of the means over its standard error."""
    relative_mean: float
    """Mean of the errors' means, each in units of delta's root mean square."""
    relative_se: float


def bias(rows: Sequence[HeadRow], *, prefix: str = "delta_error") -> Bias | None:
    """Counts over the rows of a layer's heads; None where no row has an error."""
    tests = [row for row in rows if row[f"{prefix}_mean"] != 0 and row[f"{prefix}_se"] > 0]
    if not tests:
        return None
    mean_N, se_N = (np.array([row[f"{prefix}_{name}"] for row in tests]) for name in ("mean", "se"))
    scale_N = np.array([row["delta_rms"] for row in tests])
    return Bias(
        tests=len(tests),
        beyond_3=int((np.abs(mean_N) > 3 * se_N).sum()),
        expected_beyond_3=sum(student_tail(3.0, int(row["delta_units"]) - 1) for row in tests),
        positive=int((mean_N > 0).sum()),
        sum_z=float(mean_N.sum() / math.sqrt(np.square(se_N).sum())),
        relative_mean=float((mean_N / scale_N).mean()),
        relative_se=math.sqrt(float(np.square(se_N / scale_N).sum())) / len(tests),
    )


def student_tail(t: float, freedom: int) -> float:
    """P(|T| > t) of Student's distribution, by integrating its density (Simpson's rule, error below 1e-9 here)."""
    points = np.linspace(0.0, t, 2001)
    constant = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    density = constant * (1 + points**2 / freedom) ** (-(freedom + 1) / 2)
    inside = (points[1] / 3) * float(density[0] + density[-1] + 4 * density[1::2].sum() + 2 * density[2:-1:2].sum())
    return 1 - 2 * inside


def relative_error(rows: Sequence[HeadRow], step: int) -> float | None:
    """Median over the layer's heads of the delta error's root mean square over delta's, at one probe; None where there is none."""
    ratios = [row["delta_error_rms"] / row["delta_rms"] for row in rows if row["step"] == step and row["delta_rms"] > 0]
    return statistics.median(ratios) if ratios else None


def repeated_maxima(rows: Sequence[HeadRow], first: int, last: int) -> tuple[float, float] | None:
    """Share of a layer's rows whose maximum is repeated to within 2^-9, from step ``first`` to ``last``.

    Mean over heads and probes, and the largest of one head at one probe; None where there is no probe.
    """
    shares = [row["ties_2e9"] for row in rows if first <= row["step"] <= last]
    return (statistics.fmean(shares), max(shares)) if shares else None


def sharpness(rows: Sequence[HeadRow], step: int) -> float | None:
    """Median over the layer's heads of the mean largest probability of a row, at one probe; None where there is none."""
    shares = [row["top_1"] for row in rows if row["step"] == step]
    return statistics.median(shares) if shares else None


def largest_heads(rows: Sequence[HeadRow], step: int, count: int) -> list[int]:
    """The heads with the largest spectral norm of W_Q at one probe, largest first."""
    at = [row for row in rows if row["step"] == step]
    return [int(row["head"]) for row in sorted(at, key=lambda row: -row["w_q_head_norm"])[:count]]
