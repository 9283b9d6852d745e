"""SIGTERM, SIGUSR1 and SIGHUP ask a run to save and exit, SIGINT (Ctrl-C) to end without saving."""

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

EXIT_RESUME = 75
"""Exit code of a run that was preempted and has saved: EX_TEMPFAIL of sysexits.h, start it again."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
ONE_REQUEST = 5.0
"""Signals within so many seconds count as one: Slurm sends SIGTERM to every process, and torchrun sends its own to its processes again."""
SILENCE = 5.0
"""Seconds after which a process that was asked to exit, and has not, says so."""
STARTED_BY, STARTED = os.getppid(), time.time()
"""The parent process, and when, before torch is imported, which takes seconds."""


def exit_while_importing() -> None:
    """Until a ``PreemptionHandler`` is there a signal ends the process with the code that it would have later: nothing is there to lose.

    Nothing is written: an exit.json with code 75 would start a job again in which another process has failed, too.
    """
    for number, code in {**dict.fromkeys(SIGNALS, EXIT_RESUME), signal.SIGINT: 130}.items():
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda *_, code=code: os._exit(code))


class PreemptionHandler:
    """Handles the signals inside its block. In the main thread only, as Python requires.

    ``requested`` says whether the run is asked to save and exit. While ``starting``, when there is nothing to save, it exits by itself.
    A second signal, at least ``ONE_REQUEST`` seconds later, ends the process at once. Behind the block handlers are what they
    were; but where the process is ``leaving`` with it, and the run was asked to exit, further ones are ignored.

    ``on_silence`` is called with the signal, in another thread, when the block has not ended ``SILENCE`` seconds after it: Python's
    handlers wait for the main thread, which may be in a collective that another process never joins.
    """

    def __init__(self, *, starting: bool = False, leaving: bool = False) -> None:
        self.requested = False
        self.starting, self.leaving = starting, leaving
        self.on_silence: Callable[[int], None] = lambda number: None
        self._speaking = threading.Lock()
        self._left = threading.Event()
        self._since = self._interrupted = -ONE_REQUEST
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "PreemptionHandler":
        if threading.current_thread() is threading.main_thread():
            handlers = {**dict.fromkeys(SIGNALS, self._handle), signal.SIGINT: self._interrupt}
            for number, handler in handlers.items():
                if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                    self._before[number] = signal.signal(number, handler)
            read, self._written = os.pipe()
            os.set_blocking(self._written, False)
            self._wakeup = signal.set_wakeup_fd(self._written, warn_on_full_buffer=False)
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # that thread takes no signal
            threading.Thread(target=self._listen, args=(read,), daemon=True).start()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return self

    def _listen(self, read: int) -> None:
        with open(read, "rb", buffering=0) as arrived:
            while numbers := arrived.read(64):  # none once the other end is closed
                asked = [number for number in numbers if number in SIGNALS]
                if asked and not self._left.wait(SILENCE):
                    with self._speaking:
                        self.on_silence(asked[0])
                    self._left.wait()  # a signal to a pipe that nobody reads would be an error

    def speak(self) -> None:
        """From here on the main thread says how the run ends, and ``on_silence`` nothing."""
        with self._speaking:
            self.on_silence = lambda number: None

    def __exit__(self, *_: object) -> None:
        self._left.set()
        if self._before:
            signal.set_wakeup_fd(self._wakeup)
            os.close(self._written)
        for number, handler in self._before.items():
            # A process on its way out gets torchrun's signal, too. A handler of Python's would go before the process does.
            asked = self._interrupted > 0 if number == signal.SIGINT else self.requested
            signal.signal(number, signal.SIG_IGN if self.leaving and asked else handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
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
