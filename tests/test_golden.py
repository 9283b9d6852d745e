"""Golden values hold: see golden.py, which names the first case that differs."""

import os
import subprocess
import sys

import golden
import pytest


@pytest.mark.parametrize("part", golden.PARTS)
def test_values_are_those_recorded(part: str) -> None:
    assert golden.in_a_process(part, "--check", quick=True) == 0


@pytest.mark.slow
@pytest.mark.parametrize("part", ["losses", "interpreter"])
def test_all_values_are_those_recorded(part: str) -> None:
    assert golden.in_a_process(part, "--check") == 0


def test_what_changes_products_changes_the_fingerprint() -> None:
    """BLAS of NumPy and vectors of torch: equal CPU names do not give equal last bits."""

    def fingerprint(**variables: str) -> str:
        command = [sys.executable, "-c", "import runpy; print(runpy.run_path('tests/golden.py')['machine']())"]
        return subprocess.check_output(command, cwd=golden.ROOT, env={**os.environ, **variables}, text=True)

    blas, plain = {"OPENBLAS_CORETYPE": "Haswell"}, {"ATEN_CPU_CAPABILITY": "default"}
    one = fingerprint(**blas, **plain)
    assert fingerprint(**plain, OPENBLAS_CORETYPE="Nehalem") != one
    assert fingerprint(**blas, ATEN_CPU_CAPABILITY="avx2") != one
