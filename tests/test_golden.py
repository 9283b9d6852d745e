"""Golden values hold: see golden.py, which names the first case that differs."""

import golden
import pytest


@pytest.mark.parametrize("part", golden.PARTS)
def test_values_are_those_recorded(part: str) -> None:
    assert golden.in_a_process(part, "--check") == 0
