"""What the tests of several kernels share: a pytest of their own in Triton's interpreter, and how far two sets of gradients lie apart.

The interpreter is chosen when a kernel is defined, for the whole process, and inductor cannot live with it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pass_in_the_interpreter(*arguments: str) -> None:
    """Run tests that need no GPU in a pytest of their own, given files and options; fail where one fails, or none is run."""
    pytest.importorskip("triton")
    if INTERPRETED:
        pytest.skip("this is the interpreter's own pytest")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not gpu", *arguments]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=Path(__file__).parent.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def poison_new_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a kernel leaves unwritten is NaN."""
    empty = torch.empty

    def poisoned(*args, **kwargs):  # type: ignore[no-untyped-def]
        x = empty(*args, **kwargs)
        return x.fill_(torch.nan) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", poisoned)


def largest_difference(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """The largest relative difference of two sets of gradients, by norm."""
    return max(((a[name] - b[name]).norm() / a[name].norm()).item() for name in a)
