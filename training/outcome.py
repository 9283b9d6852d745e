"""How a run ended, for whoever started it: torchrun makes every exit code 1, so ``exit.json`` of the run's folder has it."""

import contextlib
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from errors import BusyError, UserError, first_line, warn
from files import read_json, write_json
from training import distributed, record
from training.checkpoint import found_in
from training.record import EXIT_FILE
from training.settings import RunConfig
from training.signals import EXIT_RESUME, SILENCE, STARTED


def write(folder: Path, error: BaseException | None, step: int | None, why: str = "") -> None:
    """Write ``exit.json`` of a run that ``error`` ended (None: it is done) when it had drawn ``step`` batches. The run must be locked."""
    found: dict[int, Path] = {}
    with contextlib.suppress(UserError):
        found = found_in(folder / "checkpoints")
    content = {
        "code": exit_code(error),
        "reason": why or reason(error),
        "step": step,
        "checkpoint": str(found[max(found)]) if found else None,
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    try:
        write_json(folder / EXIT_FILE, content)
    except OSError as failure:
        warn(f"{folder / EXIT_FILE} cannot be written ({failure.strerror})")


def forget(run: RunConfig) -> int | None:
    """Remove what an earlier session has left, before anything that a ``kill -9`` may end: no exit.json then says that it was killed.

    The step at which that had ended; None where it is not known.
    """
    folder, step = Path(run.folder, run.name), None
    with contextlib.suppress(UserError, OSError):
        of_a_run = (folder / EXIT_FILE).is_file() and (record.begun(folder) or record.free(folder))
        if of_a_run and run.resume != "no" and distributed.is_rank_0():
            with record.lock(folder):
                with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                    step = read_json(folder / EXIT_FILE)["step"]
                if (folder / EXIT_FILE).stat().st_mtime < STARTED:  # not what another process of this start has found
                    (folder / EXIT_FILE).unlink()
    return step


def write_of_start(run: RunConfig, error: BaseException, step: int | None) -> None:
    """As ``write``, for a start that ``error`` ended. Nothing in a folder that is not the run's, or that another process has or may take.

    With run.resume no it cannot be: a new run leaves nothing before it has begun, and another's must stay as it is. A mistake that only
    another process than rank 0 can see counts, not that rank 0 is then asked to exit. ``step``: where the last session had ended.
    """
    folder = Path(run.folder, run.name)
    mistake = isinstance(error, UserError)
    with contextlib.suppress(UserError, OSError):
        own = {"no": False, "yes": record.begun(folder), "auto": record.begun(folder) or record.free(folder)}
        if own[run.resume] and (distributed.is_rank_0() or mistake) and not isinstance(error, BusyError):
            folder.mkdir(parents=True, exist_ok=True)
            with record.lock(folder):
                if mistake or not (folder / EXIT_FILE).exists() or (folder / EXIT_FILE).stat().st_mtime < STARTED:
                    write(folder, error, step)


def write_of_silence(folder: Path, number: int, step: int, how_to_resume: str) -> None:
    """As ``write``, for a run that signal ``number`` asked to exit and that may be killed before it can. Rank 0 does it, or another in its
    place. The code is not 75 where torchrun may have asked because a process has failed: started again, it may fail again.
    """
    if not distributed.is_rank_0():
        time.sleep(SILENCE)
        if (folder / EXIT_FILE).exists() or not folder.is_dir():
            return
    failed = number == signal.SIGTERM and distributed.world_size() > 1
    why = "another process may have failed" if failed else "start it again"
    write(folder, SystemExit(1 if failed else EXIT_RESUME), step, f"asked to exit, and has not saved; {why}")
    print(f"{folder}: asked to exit, and still at step {step}; if it is killed now: {how_to_resume}", file=sys.stderr)


def exit_code(error: BaseException | None) -> int:
    """The exit code of a process that ends with ``error``, as ``errors.exit_on_user_error`` makes it."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    kinds = {UserError: 2, KeyboardInterrupt: 130, BrokenPipeError: 141}
    return 0 if error is None else next((code for kind, code in kinds.items() if isinstance(error, kind)), 1)


def reason(error: BaseException | None) -> str:
    if isinstance(error, SystemExit):
        return "asked to exit; start it again" if error.code == EXIT_RESUME else "loss or gradient not finite"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if error is None:
        return "finished"
    # A UserError is one line that names file and step; the error that it was raised from names neither.
    return f"{type(error).__name__}: {error if isinstance(error, UserError) else first_line(error)}"
