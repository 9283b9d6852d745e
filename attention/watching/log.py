"""The file of ``watch``: a JSON record a look."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from ..user_error import invalid


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


def open_log(log: Path, start: int, say: Callable[[str], object]) -> IO[str]:
    """The file to append to, without a last line that was cut short.

    Records from step ``start`` on are taken off it; a file beside it still has them.
    """
    try:
        lines = log.read_bytes().splitlines(keepends=True) if log.is_file() else []  # no stream
        whole = [line for line in lines if line.endswith(b"\n")]
        kept = [line for line in whole if json.loads(line)["step"] < start]
        if kept != lines:
            aside = log.with_name(f"{log.name}.tmp")
            aside.write_bytes(b"".join(kept))
            if kept != whole:
                again = ("" if i == 1 else f"_{i}" for i in itertools.count(1))
                paths = (log.with_name(f"{log.name}.before_{start}{number}") for number in again)
                before = next(path for path in paths if not path.exists())
                log.replace(before)
                off = f"{len(whole) - len(kept)} record(s) from step {start} on are taken off"
                say(f"watch: {log}: {off}; {before.name} has them")
            aside.replace(log)
        return open(log, "a", encoding="utf-8")
    except OSError as error:
        raise invalid("watch: log", str(log), f"a file that can be written ({error.strerror})") from None


def strict(value: Any) -> Any:
    """JSON has no NaN: numbers that are not finite become strings."""
    if isinstance(value, dict):
        return {name: strict(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [strict(one) for one in value]
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def loose(value: Any) -> Any:
    """What ``strict`` was given."""
    if isinstance(value, dict):
        return {name: loose(one) for name, one in value.items()}
    if isinstance(value, list):
        return [loose(one) for one in value]
    return float(value) if value in ("nan", "inf", "-inf") else value


def layers_of(record: dict[str, Any]) -> list[int]:
    """The numbers of the layers that the lists of a record are of."""
    return record.get("layers") or list(range(len(record["max_logit"])))
