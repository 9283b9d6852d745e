"""A map over worker processes that keeps the order and holds only a few tasks in memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from errors import UserError, invalid

Task = TypeVar("Task")
Result = TypeVar("Result")

_function: Callable[[Any], Any]


def worker_count(asked: int) -> int:
    """``asked`` processes, or for 0 one for each CPU this process may use; ``UserError`` below 0."""
    if asked < 0:
        raise invalid("workers", asked, "0 (one for each CPU) or more")
    if asked:
        return asked
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ordered_map(
    make: Callable[[], Callable[[Task], Result]], tasks: Iterable[Task], *, workers: int
) -> Generator[Result, None, None]:
    """``make()(task)`` for every task, in the order of the tasks; ``make`` runs once in each process.

    At most two tasks a worker wait or lie finished, so memory is bounded however long ``tasks`` is. One worker means
    this process. What a task raises is raised here; ``UserError`` when a worker is killed.
    """
    if workers == 1:
        yield from map(make(), tasks)
        return
    # "spawn" because forking a process that runs threads (the pool's own, the progress bar's) can deadlock.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(make,))
    waiting: deque[Future[Result]] = deque()
    try:
        for task in tasks:
            waiting.append(pool.submit(_run, task))
            if len(waiting) >= 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise UserError("a worker process was killed (out of memory?): try fewer --workers") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(make: Callable[[], Callable[[Any], Any]]) -> None:
    global _function
    # Ctrl-C reaches the whole process group; the parent alone deals with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    _function = make()


def _die_with_parent() -> None:
    """Without this, workers of a parent that was killed wait for tasks for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run(task: Any) -> Any:
    return _function(task)
