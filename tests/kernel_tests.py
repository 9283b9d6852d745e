"""What the tests of several kernels share: a pytest of their own in Triton's interpreter, and where a kernel runs.

The interpreter is chosen when a kernel is defined, for the whole process, and inductor cannot live with it.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def patch_once_a_launch() -> None:
    """Halve the time of Triton's interpreter; what it computes stays.

    It puts its functions into ``triton.language`` at each launch. They are there until the launch ends, and yet it puts them there again
    whenever one jitted function calls another, for which it looks through the whole module.
    """
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return

    seen: set[int] = set()

    def patch_where_needed(function: Any) -> Any:
        if tl.core.is_builtin(tl.load) or tl.core.is_builtin(tl.core.load):
            return patch(function)
        if (module := id(function.__globals__)) not in seen:
            # As Triton does at each call: a kernel that it refuses does not pass here.
            assert any(x is tl or x is tl.core for x in function.__globals__.values()), (
                "triton.language must be visible from within jit'd function"
            )
            seen.add(module)
        return SimpleNamespace(restore=lambda: None)

    # Not part of Triton's interface: another version may do without it.
    if patch := getattr(interpreter, "_patch_lang", None):
        interpreter._patch_lang = patch_where_needed


def pass_in_the_interpreter(*arguments: str) -> None:
    """Run tests that need no GPU in a pytest of their own, given files and options; fail where one fails, or none is run."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=Path(__file__).parent.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


# Test modules take the fixtures below by name, ``device = kernel_tests.device``.
@pytest.fixture(params=["cpu"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, poisoned_memory: None) -> torch.device:
    """Where kernels run here."""
    return torch.device(request.param)


class Runner(NamedTuple):
    """A backend of flash attention, and where it runs here."""

    backend: str
    device: torch.device


COMPILED = ["flash_reference cpu", pytest.param("flash cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=["flash cpu"] if INTERPRETED else COMPILED)
def runner(request: pytest.FixtureRequest, poisoned_memory: None) -> Runner:
    backend, name = request.param.split()
    return Runner(backend, torch.device(name))
