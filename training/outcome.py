"""How a run ended, for whoever started it: torchrun makes every exit code 1, so ``exit.json`` of the run's folder has it."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from errors import UserError, first_line
from files import write_json
from training import record
from training.checkpoint import found_in
from training.record import EXIT_FILE
from training.signals import EXIT_RESUME


def write(folder: Path, error: BaseException | None, step: int) -> None:
    """Write ``exit.json`` of a run that ``error`` ended (None: it is done) when it had drawn ``step`` batches. The run must be locked."""
    found = found_in(folder / "checkpoints")
    content = {
        "code": exit_code(error),
        "reason": reason(error),
        "step": step,
        "checkpoint": str(found[max(found)]) if found else None,
    }
    try:
        write_json(folder / EXIT_FILE, content)
    except OSError as failure:
        print(f"warning: {folder / EXIT_FILE} cannot be written ({failure.strerror})", file=sys.stderr)


def write_of_start(folder: Path, error: BaseException) -> None:
    """As ``write``, for a start that was asked to exit. Where another process has the run, nothing is written."""
    with contextlib.suppress(UserError, OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with record.lock(folder):
            write(folder, error, 0)


def exit_code(error: BaseException | None) -> int:
    """The exit code of a process that ends with ``error``, as ``errors.exit_on_user_error`` makes it."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    kinds = {UserError: 2, KeyboardInterrupt: 130, BrokenPipeError: 141}
    return 0 if error is None else next((code for kind, code in kinds.items() if isinstance(error, kind)), 1)


def reason(error: BaseException | None) -> str:
    """What ended a run, in one line."""
    if isinstance(error, SystemExit):
        return "asked to exit; start it again" if error.code == EXIT_RESUME else "loss or gradient not finite"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return "finished" if error is None else f"{type(error).__name__}: {first_line(error)}"
