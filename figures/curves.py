"""Reading training curves: where two runs part, and where one explodes.

Records are the dictionaries of ``training.metrics.read_metrics``: each has ``step`` and any of the other columns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Record = Mapping[str, Any]
EXPLOSION_DEFINITION = (
    "Explosion: the first step from which the training loss stays more than {margin:g} above its best so far"
    " for {patience} steps, or is not finite."
)


def column(records: Sequence[Record], key: str) -> tuple[list[int], list[Any]]:
    """Steps and values of one column, steps strictly increasing.

    Where the run went back to an earlier step (it was rolled back), what it had logged from there on is replaced; of two
    values for one step the later counts.
    """
    steps: list[int] = []
    values: list[Any] = []
    for record in records:
        value = record.get(key)
        while steps and (steps[-1] > record["step"] or (steps[-1] == record["step"] and value is not None)):
            steps.pop()
            values.pop()
        if value is not None:
            steps.append(record["step"])
            values.append(value)
    return steps, values


def rollbacks(records: Sequence[Record]) -> int:
    """How often the run went back to an earlier step."""
    return sum(later["step"] < earlier["step"] for earlier, later in itertools.pairwise(records))


def common_steps(a: Sequence[Record], b: Sequence[Record], key: str = "train_loss") -> list[int]:
    """Steps for which both runs have a value, increasing."""
    return sorted(set(column(a, key)[0]) & set(column(b, key)[0]))


def first_divergence(a: Sequence[Record], b: Sequence[Record], key: str = "train_loss") -> int | None:
    """First common step whose values are not the same bits; None when all are (or there is no common step).

    NaN is the same as NaN; 0.0 and -0.0 differ.
    """
    values_a, values_b = (dict(zip(*column(records, key), strict=True)) for records in (a, b))
    for step in common_steps(a, b, key):
        if not _same(values_a[step], values_b[step]):
            return step
    return None


def _same(x: Any, y: Any) -> bool:
    if isinstance(x, float) and isinstance(y, float):
        return (math.isnan(x) and math.isnan(y)) or (x == y and math.copysign(1.0, x) == math.copysign(1.0, y))
    return bool(x == y)


def explosion_step(
    losses: Sequence[float], margin: float = 0.5, patience: int = 200, *, steps: Sequence[int] | None = None
) -> int | None:
    """First step from which the loss stays above its best so far + ``margin`` for ``patience`` consecutive steps.

    A loss that is not finite counts as exploded at once; when it ends an excursion above the margin, the step is the
    excursion's first. An excursion that ends, or that the run's end cuts short, before ``patience`` steps is none
    (``open_excursion`` finds the latter).

    Args:
        losses: nats a token, in order.
        margin: nats above the best loss before the excursion.
        patience: length in steps, the first included.
        steps: the step of each loss, increasing, where not every step was logged; None: 0, 1, 2, ...

    Raises:
        ValueError: margin < 0, patience < 1 or lengths differ.
    """
    if margin < 0 or patience < 1:
        raise ValueError(f"margin {margin} must not be negative and patience {patience} must be 1 or more")
    start, called = _last_excursion(losses, margin, patience, steps)
    return start if called else None


def open_excursion(
    losses: Sequence[float], margin: float = 0.5, patience: int = 200, *, steps: Sequence[int] | None = None
) -> int | None:
    """First step of an excursion that the run's end cut short, too short for ``explosion_step`` to call; else None.

    Arguments and errors as there.
    """
    start, called = _last_excursion(losses, margin, patience, steps)
    return None if called else start


def _last_excursion(
    losses: Sequence[float], margin: float, patience: int, steps: Sequence[int] | None
) -> tuple[int | None, bool]:
    """First step of the excursion that is an explosion, or else of the one the losses end in; and whether it is one."""
    if margin < 0 or patience < 1:
        raise ValueError(f"margin {margin} must not be negative and patience {patience} must be 1 or more")
    lowest, start = math.inf, None
    for step, loss in zip(range(len(losses)) if steps is None else steps, losses, strict=True):
        if math.isfinite(loss) and loss <= lowest + margin:
            lowest, start = min(lowest, loss), None
            continue
        start = step if start is None else start
        if not math.isfinite(loss) or step - start + 1 >= patience:
            return start, True
    return start, False


def best(steps: Sequence[int], values: Sequence[float]) -> tuple[int, float] | None:
    """Step and value of the smallest finite value (the first, if it occurs twice); None when there is no finite value."""
    finite = [(value, step) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
    if not finite:
        return None
    value, step = min(finite)
    return step, value


def final(values: Sequence[float], last: int = 50) -> float:
    """Mean of the last ``last`` values (of all, when there are fewer); not finite when one of them is not.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("final() of no values")
    tail = values[-last:]
    return sum(tail) / len(tail)


def trailing_mean(values: Sequence[float] | np.ndarray, window: int) -> np.ndarray:
    """Mean of each value and up to ``window - 1`` before it: nothing shows in it before it happens.

    Where the value is not finite the mean is NaN, and averaging starts afresh behind it. float64, as long as ``values``.

    Raises:
        ValueError: window < 1.
    """
    if window < 1:
        raise ValueError(f"window {window} must be 1 or more")
    numbers = np.asarray(values, dtype=np.float64)
    means = np.full(len(numbers), np.nan)
    edges = np.flatnonzero(~np.isfinite(numbers))
    for begin, end in zip([0, *(edges + 1)], [*edges, len(numbers)], strict=True):
        if begin < end:
            # Summed directly: differences of a running sum would carry one huge value's rounding into all that follow.
            sums = np.convolve(numbers[begin:end], np.ones(min(window, end - begin)))[: end - begin]
            means[begin:end] = sums / np.minimum(np.arange(1, end - begin + 1), window)
    return means
