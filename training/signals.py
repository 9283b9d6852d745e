"""SIGTERM, SIGUSR1 and SIGHUP ask a run to save and exit, SIGINT (Ctrl-C) to end without saving."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Any

EXIT_RESUME = 75
"""Exit code of a run that was preempted and has saved: EX_TEMPFAIL of sysexits.h, start it again."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
ONE_REQUEST = 5.0
"""Signals within so many seconds count as one: Slurm sends SIGTERM to every process, and torchrun sends its own to its processes again."""
STARTED_BY, STARTED = os.getppid(), time.time()
"""The parent process, and when, before torch is imported, which takes seconds."""


def exit_while_importing() -> None:
    """Until a ``PreemptionHandler`` is there a signal ends the process with the code that it would have later: nothing is there to lose."""
    for number, code in {**dict.fromkeys(SIGNALS, EXIT_RESUME), signal.SIGINT: 130}.items():
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda *_, code=code: os._exit(code))


class PreemptionHandler:
    """Handles the signals inside its block. In the main thread only, as Python requires.

    ``requested`` says whether the run is asked to save and exit. While ``starting``, when there is nothing to save, it exits by itself.
    A second signal, at least ``ONE_REQUEST`` seconds later, ends the process at once.
    """

    def __init__(self, *, starting: bool = False) -> None:
        self.requested = False
        self.starting = starting
        self._since = self._interrupted = -ONE_REQUEST
        self._before: dict[signal.Signals, Any] = {}
        self._terminals: list[int] = []

    def __enter__(self) -> PreemptionHandler:
        if threading.current_thread() is threading.main_thread():
            self._terminals = [
                stream.fileno() for stream in (sys.__stdout__, sys.__stderr__) if stream and stream.isatty()
            ]
            handlers = {**dict.fromkeys(SIGNALS, self._handle), signal.SIGINT: self._interrupt}
            for number, handler in handlers.items():
                if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                    self._before[number] = signal.signal(number, handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # A process that is on its way out after Ctrl-C gets torchrun's SIGINT, too.
            leaving = number == signal.SIGINT and self._interrupted > 0
            signal.signal(number, signal.SIG_IGN if leaving else handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:  # the terminal has gone, and a line written to it would end the run before it saves
            for descriptor in self._terminals:
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
        if not self.requested:
            self.requested, self._since = True, time.monotonic()
            if self.starting:
                raise SystemExit(EXIT_RESUME)
        elif time.monotonic() - self._since >= ONE_REQUEST:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if time.monotonic() - self._interrupted >= ONE_REQUEST:
            self._interrupted = time.monotonic()
            raise KeyboardInterrupt
