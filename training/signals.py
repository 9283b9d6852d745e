"""SIGTERM and SIGUSR1 ask a run to save and leave; a second one, some seconds later, ends the process at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

EXIT_GO_ON = 75
"""Exit code of a run that has saved because it was asked to leave, as sysexits.h has it for what may be tried again."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
ONE_REQUEST = 5.0
"""Signals within so many seconds are one: Slurm sends SIGTERM to every process, and torchrun sends its own to its processes again."""


class Leaving:
    """Listens to the signals inside its block; ``asked`` names the one that came. In the main thread only, as Python has it."""

    def __init__(self) -> None:
        self.asked = ""
        self._since = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Leaving:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.asked:
            self.asked, self._since = signal.Signals(number).name, time.monotonic()
        elif time.monotonic() - self._since >= ONE_REQUEST:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
