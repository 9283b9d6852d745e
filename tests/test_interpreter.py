"""Small files with tests of kernels, once more in Triton's interpreter: in one process, as each start takes seconds."""

from __future__ import annotations

from pathlib import Path

import pytest
from kernel_tests import pass_in_the_interpreter

SMALL = (
    "exponent",
    "row_residual",
    "row_sum_floor",
    "linear_cross_entropy::test_the_kernel_agrees_with_torch",
    "hopper::test_one_number_holds_m_and_the_divisor_and_delta_reads_all_of_o",
)
HERE = Path(__file__).parent


@pytest.mark.timeout(600)
def test_kernels_of_small_files() -> None:
    files = (name.partition("::") for name in SMALL)
    pass_in_the_interpreter(*(f"{HERE}/test_{file}.py{colons}{test}" for file, colons, test in files))
