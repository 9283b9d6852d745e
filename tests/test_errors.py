"""errors.py: how a command line ends."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tiny_runs import ROOT

from errors import UserError, exit_on_user_error


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("x = 1"), 2, "error: x = 1\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (KeyboardInterrupt("interrupted: saved"), 130, "interrupted: saved\n"),
        (ModuleNotFoundError(name="tyro.conf"), 2, "error: this needs the package tyro: pip install '.[train]'\n"),
    ],
)
def test_an_end_is_one_line_and_a_code(
    error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    @exit_on_user_error
    def main() -> None:
        raise error

    with pytest.raises((SystemExit, KeyboardInterrupt)) as stop:
        main()
    assert isinstance(stop.value, SystemExit)
    assert stop.value.code == code
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(
    ("command", "package"),
    [("train.py", "tqdm"), ("scripts/compare_runs.py", "pandas")],
)
def test_a_command_without_a_package_of_the_trainer_is_one_line(command: str, package: str) -> None:
    code = f"import runpy, sys; sys.modules[{package!r}] = None; runpy.run_path({command!r}, run_name='__main__')"
    found = os.environ | {"PYTHONPATH": "scripts"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=found, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, f"error: this needs the package {package}: pip install '.[train]'\n")
