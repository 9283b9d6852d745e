"""Runs as tables by step, and where one explodes."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from errors import UserError
from training.metrics import read_lines, read_metrics
from training.telemetry import TELEMETRY_FILE

EXPLOSION_DEFINITION = (
    "Explosion: the first step from which the training loss stays more than {margin:g} above its best so far"
    " for {patience} steps, or is not finite."
)

NUMBERS = ("train_loss", "val_loss", "grad_norm", "tokens_per_second", "max_logit_max")


def by_step(records: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Records as a table, those of one step as one row.

    A missing value is an empty cell, NaN the text "nan": ``column`` tells them apart.
    """
    rows: dict[int, dict[str, Any]] = {}
    for record in records:
        told = {name: "nan" if value != value else value for name, value in record.items()}
        rows.setdefault(record["step"], {}).update(told)
    return pd.DataFrame(list(rows.values())).set_index("step")


def read_csv(path: Path) -> pd.DataFrame:
    """The CSV of a published run. Raises ``UserError`` for another file, or one without a column ``step``."""
    try:
        table = pd.read_csv(path, dtype={"train_loss": str}, keep_default_na=False, na_values=[""])
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a CSV file ({str(error).splitlines()[0]})") from None
    if "step" not in table or table.empty or not pd.api.types.is_integer_dtype(table["step"]):
        raise UserError(f"{path}: expected a column step of whole numbers")
    return table.set_index("step")


def metrics(folder: Path) -> pd.DataFrame:
    """What the run in ``folder`` logged. Raises ``UserError`` for a folder that is no run, or has no training loss yet."""
    kept = folder / "metrics.csv"
    table = read_csv(kept) if kept.is_file() else by_step(read_metrics(folder))
    _check_numbers(table, [name for name in NUMBERS if name in table], folder)
    if column(table, "train_loss").empty:
        raise UserError(f"{folder}: its metrics have no train_loss yet")
    return table


def _check_numbers(table: pd.DataFrame, names: Iterable[str], folder: Path) -> None:
    """Raise ``UserError`` for a column that has something else than numbers, or lists of them that are unlike."""
    for name in names:
        try:
            np.array(table[name].tolist(), dtype=float)
        except (ValueError, TypeError, OverflowError, KeyError):
            raise UserError(f"{folder}: its {name} is not numbers at every step") from None


def telemetry(folder: Path) -> pd.DataFrame:
    """The probes of a run, lists by layer or by layer and head in the cells; empty without telemetry. Raises ``UserError``."""
    path = folder / TELEMETRY_FILE
    probes = list(read_lines(path)) if path.exists() else []
    if not probes:  # it died before its first one
        return pd.DataFrame()
    table = by_step(probes)
    _check_numbers(table, ("w_q_norm", "max_logit", *({"w_k_norm", "ties_1e3"} & set(table))), folder)
    return table


def column(table: pd.DataFrame, name: str) -> pd.Series:
    """A column's values by step, float64, without empty cells; empty where there is no such column."""
    return table[name].dropna().astype(float) if name in table else pd.Series(dtype=float)


def first_difference(a: pd.Series, b: pd.Series) -> int | None:
    """First common step whose values are not the same bits; None when all are. NaN is the same as NaN; 0.0 and -0.0 differ."""
    common = a.index.intersection(b.index)
    first, second = (one[common].map(lambda x: x.hex() if isinstance(x, float) else x) for one in (a, b))
    different = common[first.to_numpy() != second.to_numpy()]
    return int(different.min()) if len(different) else None


def excursion(losses: pd.Series, margin: float = 0.5, patience: int = 200) -> tuple[int | None, bool]:
    """First step from which the loss stays above its best so far + ``margin`` for ``patience`` consecutive steps, and True; or else the
    first step of the excursion that the run's end cuts short, or None, and False.

    ``losses`` are nats a token by step, where not every step need be there. One that is not finite counts as exploded at once; when it ends
    an excursion above the margin, the step is the excursion's first.
    """
    lowest, start = math.inf, None
    for step, loss in losses.items():
        if math.isfinite(loss) and loss <= lowest + margin:
            lowest, start = min(lowest, loss), None
            continue
        start = int(step) if start is None else start
        if not math.isfinite(loss) or step - start + 1 >= patience:
            return start, True
    return start, False
