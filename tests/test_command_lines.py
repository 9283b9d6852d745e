"""The scripts' command lines: whatever is wrong with the arguments is one line on stderr and exit code 2, as for train.py."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
from tiny_runs import ROOT

DEBUG = str(ROOT / "configs/debug.py")
SCRIPTS = sorted(path.stem for path in (ROOT / "scripts").glob("*.py") if "def main(" in path.read_text())


def main_of(script: str) -> Callable[[], object]:
    return importlib.import_module(f"scripts.{script}").main


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_option_that_there_is_not_is_one_line(script: str, refused: Callable[..., str]) -> None:
    refused(main_of(script), "--no-such-option")


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        ("bench_attention", ["--shapes", "32"], "--shapes = '32': expected B,T"),
        ("bench_train", [DEBUG, "--variants", "plain", "x=optim.lr=1"], "'x=optim.lr=1': expected NAME, or"),
        ("bench_train", [DEBUG, "--json", "nowhere/b.json"], "nowhere/b.json: no folder nowhere"),
    ],
)
def test_what_is_malformed_is_named(script: str, arguments: list[str], words: str, refused: Callable[..., str]) -> None:
    assert words in refused(main_of(script), *arguments)
