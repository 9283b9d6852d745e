"""Mistakes end with one line on stderr that names field, value and choices, with exit code 2, and with every file as it was."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from tiny_runs import ROOT, Place, make_data, new_place, start_train, tree

import train
from errors import UserError, exit_on_user_error


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """With a run of ten steps, its recording, and data of other kinds."""
    with new_place(tmp_path_factory) as place:
        place.train("there", {"run.steps": 10, "data.record": place.recording("plain")})
        make_data(place.folder / "other", seed=1)
        make_data(place.folder / "large_vocabulary", vocabulary=50257)
        shutil.copytree(place.data, place.folder / "damaged")
        content = bytearray((place.folder / "damaged/train.bin").read_bytes())
        content[7] ^= 1
        (place.folder / "damaged/train.bin").write_bytes(content)
        (place.folder / "a_file").write_text("")
        place.preset_file(place.config("new"))
        yield place


# Name -> (arguments behind the preset, pattern of the line). {place} is the folder of it all.
MISTAKES: dict[str, tuple[str, str]] = {
    "cuda_absent": ("--run.device cuda", r"run\.device = 'cuda': expected cpu or auto: .* no CUDA device"),
    "data_missing": ("--data.dataset {place}/nowhere", r"nowhere: no such data set; make it with: python scripts/prep"),
    "data_damaged": ("--data.dataset {place}/damaged", r"damaged/train\.bin: SHA-256 .* damaged"),
    "vocabulary_too_large": (
        "--data.dataset {place}/large_vocabulary --data.record {place}/recordings/new",
        r"model\.vocab_size = 256: expected at least the data's 50257",
    ),
    "resume_without_a_run": ("--run.resume yes", r"run\.resume = 'yes': expected a checkpoint"),
    "record_exists": ("--data.record {place}/recordings/plain", r"recordings/plain exists: record under another name"),
    "record_in_its_own_run": (
        "--data.record {place}/runs/new/recording",
        r"data\.record = '.*': expected a folder outside",
    ),
    "replay_too_short": ("--data.replay {place}/recordings/plain", r"run\.steps = 20: expected at most 10"),
    "replay_on_other_data": (
        "--run.steps 10 --data.replay {place}/recordings/plain --data.dataset {place}/other",
        r"plain was recorded on other training tokens: SHA-256 .* set --data\.dataset",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_one_line_and_writes_nothing(
    place: Place, mistake: str, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments, pattern = MISTAKES[mistake]
    before = tree(place.folder)
    line = refused(train.main, place.folder / "new.py", *arguments.format(place=place.folder).split())
    assert re.fullmatch(rf"error: .*{pattern}.*\n", line), line
    assert tree(place.folder) == before


def test_exit_code_and_line_of_the_real_command(place: Place) -> None:
    before = tree(place.folder)
    done = start_train([str(place.folder / "new.py"), "--run.name", "there"])
    assert done.returncode == 2
    assert re.fullmatch(r"error: run\.name = 'there': .* exists; .*\n", done.stderr)
    assert done.stdout == ""
    assert tree(place.folder) == before


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


@pytest.mark.parametrize(("command", "package"), [("train.py", "tqdm"), ("scripts/compare_runs.py", "pandas")])
def test_a_command_without_a_package_of_the_trainer_is_one_line(command: str, package: str) -> None:
    code = f"import runpy, sys; sys.modules[{package!r}] = None; runpy.run_path({command!r}, run_name='__main__')"
    found = os.environ | {"PYTHONPATH": "scripts"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=found, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, f"error: this needs the package {package}: pip install '.[train]'\n")


RECIPE = str(ROOT / "configs/debug.py")
# public_suites.py is of the installed package, beside which the trainer's modules cannot be imported.
SCRIPTS = sorted(
    path.stem
    for path in (ROOT / "scripts").glob("*.py")
    if "def main(" in path.read_text() and path.stem != "public_suites"
)


def main_of(script: str) -> Callable[[], object]:
    return importlib.import_module(f"scripts.{script}").main


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_option_that_there_is_not_is_one_line(script: str, refused: Callable[..., str]) -> None:
    refused(main_of(script), "--no-such-option")


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        ("bench_attention", ["--shapes", "32"], "--shapes = '32': expected B,T"),
        ("bench_train", [RECIPE, "--variants", "plain", "x=optim.lr=1"], "'x=optim.lr=1': expected NAME, or"),
        ("bench_train", [RECIPE, "--json", "nowhere/b.json"], "nowhere/b.json: no folder nowhere"),
    ],
)
def test_what_is_malformed_is_named(script: str, arguments: list[str], words: str, refused: Callable[..., str]) -> None:
    assert words in refused(main_of(script), *arguments)
