"""SIGTERM and SIGUSR1 ask a run to save and exit; a second signal, some seconds later, ends the process at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

EXIT_RESUME = 75
"""Exit code of a run that was preempted and has saved: EX_TEMPFAIL of sysexits.h, start it again."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
ONE_REQUEST = 5.0
"""Signals within so many seconds count as one: Slurm sends SIGTERM to every process, and torchrun sends its own to its processes again."""


class PreemptionHandler:
    """Handles the signals inside its block; ``requested`` says whether one came. In the main thread only, as Python requires."""

    def __init__(self) -> None:
        self.requested = False
        self._since = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> PreemptionHandler:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.requested:
            self.requested, self._since = True, time.monotonic()
        elif time.monotonic() - self._since >= ONE_REQUEST:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
