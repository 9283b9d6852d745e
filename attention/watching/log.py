"""The file of ``watch``: a JSON record a look, of one watch at a time; and the table of a record for W&B."""

import contextlib
import itertools
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from ..user_error import invalid
from .measure import COLUMNS

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

PATIENCE = 5.0
"""Seconds."""


def read_log(log: Path) -> list[dict[str, Any]]:
    """The records in a file of ``watch``, but for a last line that was cut short. Raises ``ValueError`` for another file."""
    if not log.is_file():  # not there yet, or a stream
        return []
    try:
        content = log.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        records = [loose(json.loads(line)) for line in whole.splitlines()]
        if any(name not in record for record in records for name in ("step", "clock", "max_logit")):
            raise ValueError
        if content and not records:
            raise ValueError
    except (OSError, ValueError, TypeError):
        raise invalid("watch: log", str(log), "a new file, or one of watch that can be read") from None
    return records


def open_log(log: Path, cut: int | None, say: Callable[[str], object]) -> IO[str]:
    """The file to append to, of this watch alone, without a last line that was cut short.

    Records from step ``cut`` on are taken off it; a file beside it still has them.
    """
    try:
        file = open(log, "a", encoding="utf-8")  # noqa: SIM115
        if log.is_file():  # no stream
            _lock(file, log)
            content = log.read_bytes()
            file.truncate(content.rfind(b"\n") + 1)
        if cut is None:
            return file
        again = ("" if i == 1 else f"_{i}" for i in itertools.count(1))
        paths = (log.with_name(f"{log.name}.before_{cut}{number}") for number in again)
        before = next(path for path in paths if not path.exists())
        aside = log.with_name(f"{log.name}.tmp")
        lines = log.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if json.loads(line)["step"] < cut]
        aside.write_bytes(b"".join(kept))
        os.replace(log, before)
        os.replace(aside, log)
        file.close()
    except OSError as error:
        raise invalid("watch: log", str(log), f"a file that can be written ({error.strerror})") from None
    say(f"watch: {log}: {len(lines) - len(kept)} record(s) from step {cut} on are taken off; {before.name} has them")
    return open_log(log, None, say)


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


def table_of(record: dict[str, Any]) -> dict[str, Any]:
    import wandb

    names = [name for name in COLUMNS if name in record]
    rows = [
        [record["step"], number, head, *(record[name][layer][head] if record[name][layer] else None for name in names)]
        for layer, number in enumerate(layers_of(record))
        for head in range(len(record["max_logit"][layer]))
    ]
    return {"attention": wandb.Table(columns=["step", "layer", "head", *names], data=rows)}
