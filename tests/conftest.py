"""Fixtures that several test modules share."""

import importlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from kernel_tests import INTERPRETED, patch_once_a_launch

if TYPE_CHECKING:
    from tiny_runs import Place

if torch.cuda.is_available():
    # cuBLAS reads it when CUDA starts, which tests of kernels do in this process before those that train.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
# Small tensors run faster without a pool, and sums come out in one order on every machine; in the processes that tests start, too.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
# Under nohup it is ignored, here and in the processes that tests start; a run then ignores it, too.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if INTERPRETED:
    patch_once_a_launch()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In Triton's interpreter, tests of kernels alone, but for those of a GPU's sizes. In a worker of pytest-xdist, files with slow tests
    come first: each is one worker's, and the last ones should be short."""
    if INTERPRETED:
        kernels = [item for item in items if "poisoned_memory" in item.fixturenames]  # type: ignore[attr-defined]
        items[:] = [item for item in kernels if not item.get_closest_marker("gpu")]
    if hasattr(config, "workerinput"):
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in slow)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a kernel leaves unwritten is NaN."""
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        x = empty(*args, **kwargs)
        return x.fill_(torch.nan) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Call a command's ``main`` with arguments: it leaves with exit code 2 and one line on stderr, which comes back."""

    def call(main: Callable[[], object], *arguments: object) -> str:
        monkeypatch.setattr("sys.argv", ["command", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        message = capsys.readouterr().err
        assert (stop.value.code, message.count("\n"), message[:7]) == (2, 1, "error: "), message
        return message

    return call


@pytest.fixture
def low_precision_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """attention/ under the name that it is installed by, whatever version of it may be installed."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "low_precision_attention").symlink_to(Path(__file__).resolve().parent.parent / "attention")
    monkeypatch.syspath_prepend(tmp_path / "site")
    return importlib.import_module("low_precision_attention")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Place"]:
    """Where a module makes its runs. They set torch's deterministic mode; afterwards it is as it was."""
    from tiny_runs import Place

    deterministic, cudnn = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
        yield Place(tmp_path_factory.mktemp("place"))
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.deterministic = cudnn
