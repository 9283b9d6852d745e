"""data/parallel.py"""

import os
import signal

import pytest

from data.parallel import ordered_map
from errors import UserError


class Square:
    def __call__(self, number):
        if number < 0:
            raise UserError(f"{number} is negative")
        return number * number


class KillItself:
    def __call__(self, task):
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("workers", [1, 2])
def test_results_are_in_the_order_of_the_tasks(workers):
    assert list(ordered_map(Square, range(40), workers=workers)) == [n * n for n in range(40)]


def test_tasks_are_drawn_only_as_results_are_taken():
    drawn = []

    def tasks():
        for number in range(1000):
            drawn.append(number)
            yield number

    results = ordered_map(Square, tasks(), workers=2)
    for _ in range(10):
        next(results)
    results.close()
    assert len(drawn) <= 10 + 2 * 2


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_in_a_task_is_raised_as_it_is(workers):
    with pytest.raises(UserError, match="-1 is negative"):
        list(ordered_map(Square, [3, -1, 2], workers=workers))


def test_a_killed_worker_is_one_line():
    with pytest.raises(UserError, match="a worker process was killed"):
        list(ordered_map(KillItself, [1], workers=2))
