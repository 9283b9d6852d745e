"""The file of ``watch``: a JSON record a look, of one watch at a time; and the table of a record for W&B."""

import contextlib
import json
import math
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from ..user_error import UserError, invalid
from .measure import COLUMNS

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

BEGINS = re.compile(rb'{"step": \d+, "clock": ')
"""As a record does: a line that was cut short is deleted, which may not be another file's."""
PATIENCE = 5.0
"""Seconds."""
BACK_TO = "back_to_step"
"""In a record: its run went on from this step, and the lines before of steps from there on are of the run that it left."""


def read_log(log: Path, expected: str = "a new file for watch(log=), or one of its own") -> list[dict[str, Any]]:
    """The records in a file of ``watch``, but for a last line that was cut short, and what a run went back behind (``BACK_TO``).

    Raises ``UserError`` for another file, with the first line that is no record, and what was ``expected``.
    """
    if not log.is_file():  # not there yet, or a stream
        return []
    records: list[dict[str, Any]] = []
    try:
        *lines, last = log.read_bytes().split(b"\n")
        for line in lines:
            record = loose(json.loads(line))
            if not _is_record(record):
                raise ValueError
            records.append(record)
        if last and not records and not BEGINS.match(last):
            raise ValueError
    except OSError as error:
        raise UserError(f"{log}: expected {expected} ({error.strerror})") from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise UserError(f"{log}, line {len(records) + 1}: expected {expected}") from None
    kept: list[dict[str, Any]] = []
    for record in records:
        if (back_to := record.pop(BACK_TO, None)) is not None:
            kept = [earlier for earlier in kept if earlier["step"] < back_to]
        kept.append(record)
    return kept


def _is_record(record: Any) -> bool:
    """Whether types and lengths are those that ``watch`` writes; of some others it raises what Python raises."""
    heads = [len(logits) for logits in record["max_logit"]]
    columns = [record[name] for name in COLUMNS if name in record]
    fits = [
        len(values) == n for column in columns for values, n in zip(column, heads, strict=True) if values is not None
    ]
    optional = "hidden", "fma_logit", BACK_TO
    numbers = [record["step"], record["clock"], *(record.get(name, 0) for name in optional)]
    caps = record.get("softcap", [0.0] * len(heads))
    numbers += [*layers_of(record), *caps, *record.get("frozen", []), *record.get("frozen_q", [])]
    numbers += [x for column in columns for values in column for x in values or []]
    right = all(isinstance(x, int | float) for x in numbers) and isinstance(record.get("attention", ""), str)
    return right and bool(heads) and all(heads) and all(fits) and len(layers_of(record)) == len(caps) == len(heads)


def open_log(log: Path) -> IO[str]:
    """The file to append to, of this watch alone, without a last line that was cut short."""
    try:
        file = open(log, "a", encoding="utf-8")  # noqa: SIM115
        if log.is_file():  # no stream
            _lock(file, log)
            file.truncate(log.read_bytes().rfind(b"\n") + 1)
    except OSError as error:
        raise invalid("watch: log", str(log), f"a file that can be written ({error.strerror})") from None
    return file


def _lock(file: IO[str], log: Path) -> None:
    """Until ``close_log``, or until this process and those that it forked have ended: of a killed one a moment may be left."""
    deadline = time.monotonic() + PATIENCE
    while fcntl is not None:
        try:
            return fcntl.flock(file, fcntl.LOCK_NB | fcntl.LOCK_EX)
        except BlockingIOError:
            if time.monotonic() > deadline:
                file.close()
                raise invalid("watch: log", str(log), "a file that no other watch writes: close() that one") from None
            time.sleep(0.1)
        except OSError:  # a file system without locks
            return


def close_log(file: IO[str]) -> None:
    """Let others write it, also where workers of a data loader have inherited it."""
    if fcntl is not None and not file.closed:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)
    file.close()


def strict(value: Any) -> Any:
    """JSON has no NaN: numbers that are not finite become strings."""
    if isinstance(value, dict):
        return {name: strict(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [strict(one) for one in value]
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def loose(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: loose(one) for name, one in value.items()}
    if isinstance(value, list):
        return [loose(one) for one in value]
    return float(value) if value in ("nan", "inf", "-inf") else value


def layers_of(record: dict[str, Any]) -> list[int]:
    """The numbers of the layers that the lists of a record are of."""
    return record.get("layers") or list(range(len(record["max_logit"])))


def named(layers: Sequence[object]) -> str:
    """ "layer 1", "layers 1, 2": of what stands for each."""
    return f"layer{'s' * (len(layers) != 1)} {', '.join(map(str, layers))}"


def table_of(record: dict[str, Any]) -> dict[str, Any]:
    import wandb

    names = [name for name in COLUMNS if name in record]
    rows = [
        [record["step"], number, head, *(record[name][layer][head] if record[name][layer] else None for name in names)]
        for layer, number in enumerate(layers_of(record))
        for head in range(len(record["max_logit"][layer]))
    ]
    return {"attention": wandb.Table(columns=["step", "layer", "head", *names], data=rows)}
