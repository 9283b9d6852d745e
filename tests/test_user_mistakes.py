"""Mistakes and spoilt files end with one line on stderr that names field, value and choices, with code 2, and with files as they were."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tiny_runs import ROOT, Place, make_data, new_place, start_train, tree

import train
from errors import UserError, exit_on_user_error

LONGEST_LINE = 2000
Spoil = Callable[[Path, random.Random], object]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """With a run of ten steps, its recording, a recipe, and data of other kinds."""
    with new_place(tmp_path_factory) as place:
        place.train("run", {"run.steps": 10, "data.record": place.recording("run")})
        place.train("second", {"run.steps": 10})
        (place.folder / "recipe.py").write_text("x = 1\n")
        make_data(place.folder / "other", seed=1)
        make_data(place.folder / "large_vocabulary", vocabulary=50257)
        shutil.copytree(place.data, place.folder / "damaged")
        content = bytearray((place.folder / "damaged/train.bin").read_bytes())
        content[7] ^= 1
        (place.folder / "damaged/train.bin").write_bytes(content)
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
    "record_exists": ("--data.record {place}/recordings/run", r"recordings/run exists: record under another name"),
    "record_in_its_own_run": (
        "--data.record {place}/runs/new/recording",
        r"data\.record = '.*': expected a folder outside",
    ),
    "replay_too_short": ("--data.replay {place}/recordings/run", r"run\.steps = 20: expected at most 10"),
    "replay_on_other_data": (
        "--run.steps 10 --data.replay {place}/recordings/run --data.dataset {place}/other",
        r"run was recorded on other training tokens: SHA-256 .* set --data\.dataset",
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
    done = start_train([str(place.folder / "new.py"), "--run.name", "run"])
    assert done.returncode == 2
    assert re.fullmatch(r"error: run\.name = 'run': .* exists; .*\n", done.stderr)
    assert done.stdout == ""
    assert tree(place.folder) == before


# ---- how a file is spoilt


def a_fifo(path: Path, choice: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def written(content: Callable[[bytes, random.Random], bytes]) -> Spoil:
    return lambda path, choice: path.write_bytes(content(path.read_bytes(), choice))


NO_CONTENT: dict[str, Spoil] = {
    "noise": written(lambda content, choice: choice.randbytes(choice.randrange(1, 4096))),
    "deep list": written(lambda content, choice: b"[" * 100_000 + b"]" * 100_000 + b"\n"),
    "cut short": written(lambda content, choice: content[: choice.randrange(1, len(content) - 1)]),
}
WRONG = (None, [], {}, "x" * 100_000, -1, 10**30, float("nan"), 1.5, [[1], "a"], True)


def a_wrong_field(path: Path, choice: random.Random) -> None:
    """Of the object, or of one in it: missing, or of another type. Of a checkpoint's settings, some may differ."""
    content = inner = json.loads(path.read_bytes())
    while True:
        name = choice.choice(sorted(inner))
        if not (isinstance(inner[name], dict) and inner[name] and path.name != "state.json" and choice.random() < 0.5):
            break
        inner = inner[name]
    before = inner.pop(name)
    if choice.random() < 0.8:
        inner[name] = choice.choice([wrong for wrong in WRONG if type(wrong) is not type(before)])
    path.write_text(json.dumps(content))


def a_wrong_line(path: Path, choice: random.Random) -> None:
    """A number of a record is none."""
    lines = path.read_text().splitlines()
    at = choice.randrange(len(lines) - 1)
    record = json.loads(lines[at])
    name = choice.choice([name for name in ("step", "train_loss", "w_q_norm", "max_logit") if name in record])
    record[name] = choice.choice(["text", "1,5", {"a": 1}, [[1], "a"]])
    path.write_text("\n".join([*lines[:at], json.dumps(record), *lines[at + 1 :]]) + "\n")


def signed(spoil: Spoil) -> Spoil:
    """The checkpoint's sums fit what is spoilt in it."""

    def both(path: Path, choice: random.Random) -> None:
        spoil(path, choice)
        sums = path.with_name("SHA256SUMS")
        names = [line.split("  ")[1] for line in sums.read_text().splitlines()]
        digests = [hashlib.sha256(path.with_name(name).read_bytes()).hexdigest() for name in names]
        sums.write_text("".join(f"{digest}  {name}\n" for digest, name in zip(digests, names, strict=True)))

    return both


# ---- what reads which files. {at} is the folder that the spoilt copy lies in, {place} that of what is right.

NEW = "train {place}/new.py --run.name other"
RESUME = "train {place}/new.py --run.folder {at} --run.name run --run.resume yes --run.steps 40 --data.record {place}/recordings/run"
DRAW = "figures 5 --checkpoint {at}/run --out {at}/out"
READ: list[tuple[str, str, dict[str, Spoil]]] = [
    (NEW + " --data.replay {at}/run", "recordings/run/header.json", NO_CONTENT | {"FIFO": a_fifo, "a field": a_wrong_field}),
    (NEW + " --data.dataset {at}/data", "data/train.json", {"a field": a_wrong_field}),
    (RESUME, "runs/run/checkpoints/*/state.json", {"a field, signed": signed(a_wrong_field)}),
    (RESUME, "runs/run/checkpoints/*/optimizer.safetensors", {"cut short, signed": signed(NO_CONTENT["cut short"])}),
    (DRAW, "runs/run/checkpoints/*/model.safetensors", {"noise, signed": signed(NO_CONTENT["noise"])}),
    ("compare_runs {at}/run {place}/runs/second --out {at}/compare.png", "runs/run/metrics.jsonl", {"a number": a_wrong_line}),
    ("figures 11 --runs {at}/run --out {at}/out", "runs/run/telemetry.jsonl", {"FIFO": a_fifo, "a number": a_wrong_line}),
    ("train {at}/recipe.py --run.name other", "recipe.py", {"it raises": written(lambda _, choice: b"raise OSError('a\\nb')")}),
]  # fmt: skip


# ---- reading one


def call_of(
    line: str, path: str, spoil: Spoil | None, place: Place, at: Path
) -> tuple[Callable[[], object], list[str]]:
    """A command's ``main`` and its arguments, where it reads a copy of ``path`` at ``at``, spoilt."""
    source = place.folder / path.partition("/checkpoints/")[0]
    top = source if source.name in ("run", "recipe.py") else source.parent
    (shutil.copytree if top.is_dir() else shutil.copy)(top, at / top.name)
    inside = path.removeprefix(str(top.relative_to(place.folder)))
    for spoilt in sorted((at / top.name).parent.glob(f"{top.name}{inside}")) if spoil else ():
        spoil(spoilt, random.Random(path))  # alike in all checkpoints: one damaged one is passed over
    script, *arguments = line.format(at=at, place=place.folder).split()
    return train.main if script == "train" else importlib.import_module(f"scripts.{script}").main, arguments


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("line", "path", "kind"), [(line, path, kind) for line, path, kinds in READ for kind in kinds])
def test_a_spoilt_file_is_refused_in_one_line(
    place: Place, tmp_path: Path, refused: Callable[..., str], line: str, path: str, kind: str
) -> None:
    spoil = next(kinds[kind] for *of, kinds in READ if of == [line, path])
    main, arguments = call_of(line, path, spoil, place, tmp_path)

    def found() -> list[dict[str, str]]:
        """All but exit.json, which says how the start ended."""
        return [tree(folder) | {"run/exit.json": ""} for folder in (tmp_path, place.folder)]

    before = found()
    assert len(refused(main, *arguments)) <= LONGEST_LINE
    assert found() == before


@pytest.mark.slow
@pytest.mark.parametrize("line", sorted({line for line, *_ in READ[:-1]}))
def test_what_is_right_is_read(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    """Else a command that refuses everything would pass."""
    main, arguments = call_of(line, next(path for of, path, _ in READ if of == line), None, place, tmp_path)
    monkeypatch.setattr("sys.argv", ["command", *arguments])
    main()
    shutil.rmtree(place.runs / "other", ignore_errors=True)


# ---- how a command line ends


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
