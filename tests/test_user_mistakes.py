"""Mistakes and spoilt files end with one line on stderr that names field, value and choices, with code 2, and with files as they were."""

import errno
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from test_checkpoint import flip_a_byte
from tiny_runs import ROOT, TRAIN_TOKENS, Place, completed, make_data, tree

import train
from errors import exit_on_user_error
from files import sha256_file

LONGEST_LINE = 2000


@pytest.fixture(scope="module")
def place(place: Place) -> Place:
    """With a run of ten steps, its recording, a recipe, and data of other kinds."""
    place.train("run", {"run.steps": 10, "data.record": place.recording("run")})
    place.train("second", {"run.steps": 10})
    (place.folder / "recipe.py").write_text("x = 1\n")
    make_data(place.folder / "other", seed=1)
    make_data(place.folder / "held_out", plant={TRAIN_TOKENS + 5: 1})  # other validation data alone
    make_data(place.folder / "large_vocabulary", vocabulary=50257)
    shutil.copytree(place.data, place.folder / "damaged")
    flip_a_byte(place.folder / "damaged/train.bin")
    place.preset_file(place.config("new"))
    return place


# Name -> (arguments behind the preset, pattern of the line). {place} is the folder of it all.
MISTAKES: dict[str, tuple[str, str]] = {
    "cuda_absent": ("--run.device cuda", r"run\.device = 'cuda': expected cpu or auto: .* no CUDA device"),
    "data_missing": ("--data.dataset {place}/nowhere", r"nowhere: no such data set; make it with: python scripts/prep"),
    "data_damaged": ("--data.dataset {place}/damaged", r"damaged/train\.bin: SHA-256 .* damaged"),
    "vocabulary_too_large": (
        "--data.dataset {place}/large_vocabulary --data.record {place}/new/deep/r",
        r"model\.vocab_size = 256: expected .* 50257",
    ),
    "run_exists": ("--run.name run", r"run\.name = 'run': .* exists; "),
    "resume_without_a_run": ("--run.resume yes", r"run\.resume = 'yes': expected a checkpoint"),
    "record_exists": ("--data.record {place}/recordings/run", r"recordings/run exists: record under another name"),
    "record_without_a_name": ("--data.record .", r"data\.record = '\.': expected a folder with a name"),
    "record_in_a_parent": ("--data.record new/..", r"data\.record = 'new/\.\.': expected a folder with a name"),
    "record_at_the_root": ("--data.record /", r"data\.record = '/': expected a folder with a name"),
    "record_in_its_own_run": ("--data.record {place}/runs/new/r", r"data\.record = '.*': expected a folder outside"),
    "replay_too_short": ("--data.replay {place}/recordings/run", r"run\.steps = 20: expected at most 10"),
    "replay_on_other_validation_data": (
        "--run.steps 10 --data.replay {place}/recordings/run --data.dataset {place}/held_out",
        r"run was recorded on other validation tokens: SHA-256 .* set --data\.dataset",
    ),
    "replay_on_other_data": (
        "--data.sequence-length 8 --data.replay {place}/recordings/run --data.dataset {place}/other",
        r"run was recorded on other training tokens: SHA-256 .* set --data\.dataset",
    ),
    "replay_of_another_global_batch": (
        "--run.steps 10 --data.global-batch 2 --data.replay {place}/recordings/run",
        r"run was recorded with data\.global_batch = \d+, where this run has 2: set --data\.global-batch \d+",
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


TO_RESUME = "--run.name run --run.resume"
STEP = "runs/run/checkpoints/step_00000010"
SHUT = [
    ("--data.dataset {place}/other", "other"),
    ("--data.replay {place}/recordings/run", "recordings/run"),
    ("--data.record {place}/recordings/new", "recordings"),
    *(("--run.init-from {place}/runs/run", folder) for folder in ("runs/run", "runs/run/checkpoints", STEP)),
    *((f"{TO_RESUME} {resume}", "runs/run") for resume in ("no", "yes", "auto")),
    *((f"{TO_RESUME} yes", folder) for folder in ("runs", "runs/run/checkpoints", STEP)),
]


@pytest.mark.parametrize(("arguments", "shut"), SHUT)
def test_a_folder_that_this_user_may_not_enter_is_one_line(
    place: Place, arguments: str, shut: str, refused: Callable[..., str]
) -> None:
    before, shut_folder = tree(place.folder), place.folder / shut

    def may_not(look: Callable[..., Any]) -> Callable[..., Any]:
        def looks(path: Path, *how: Any, **options: Any) -> Any:
            if shut_folder in (path.parents if look is not Path.iterdir else [path, *path.parents]):
                raise PermissionError(errno.EACCES, "not yours", str(path))
            return look(path, *how, **options)

        return looks

    with pytest.MonkeyPatch.context() as patch:  # root may enter every folder
        for look in (Path.exists, Path.is_file, Path.is_dir, Path.iterdir, Path.mkdir):
            patch.setattr(Path, look.__name__, may_not(look))
        line = refused(train.main, place.folder / "new.py", *arguments.format(place=place.folder).split())
    assert "not yours" in line
    assert shut.partition("/")[0] in line
    after = tree(place.folder)
    assert {path for path in after if before.get(path) != after[path]} <= {"runs/run/exit.json"}


# ---- spoilt files

HEADER, STEPS = "recordings/run/header.json", "runs/run/checkpoints/*"
REPLAY = "train new.py --data.replay recordings/run"
RESUME = "train new.py --run.name run --run.resume yes --run.steps 40 --data.record recordings/run"
NO_NUMBERS = b'{"step": 3, "train_loss": "1,5", "w_q_norm": [[1], "a"], "max_logit": "text"}\n' * 9
Spoil = Callable[[Path], object]


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def having(content: bytes) -> Spoil:
    return lambda path: path.write_bytes(content)


def field(name: str, value: object) -> Spoil:
    return lambda path: path.write_text(json.dumps(json.loads(path.read_bytes()) | {name: value}))


READ: dict[str, tuple[str, str, Spoil, str]] = {
    "nested too deep": (REPLAY, HEADER, having(b"[" * 100_000 + b"]" * 100_000), "nested too deep"),
    "a FIFO": (REPLAY, HEADER, fifo, "expected the folder of a recording"),
    "a FIFO for offsets": (REPLAY, "recordings/run/offsets.npy", fifo, "not a file"),
    "data's field": ("train new.py", "data/train.json", field("vocabulary_size", "x" * 100_000), "expected a value of type int"),
    "a checkpoint's field": (RESUME, f"{STEPS}/state.json", field("position", None), "position of state.json is of type NoneType"),
    "a checkpoint's extra": (RESUME, f"{STEPS}/state.json", field("extra", {}), "extra of state.json has no guard"),
    "a checkpoint's tensors": (RESUME, f"{STEPS}/rng.safetensors", having(b"12345"), "header too small"),
    "metrics": ("compare_runs runs/run runs/second --out c.png", "runs/run/metrics.jsonl", having(NO_NUMBERS), "train_loss is not numbers"),
    "telemetry": ("figures 11 --runs runs/run --out out", "runs/run/telemetry.jsonl", having(NO_NUMBERS), "w_q_norm is not numbers"),
    "a run's config": ("capture_attention runs/run --layers 1 --out out", "runs/run/config.json", having(b"{}"), "config.json: cannot"),
    "a recipe that raises": ("train recipe.py", "recipe.py", having(b"raise OSError('a\\nb')"), "it raises OSError: a b"),
}  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", READ)
def test_a_spoilt_file_is_refused_in_one_line(
    place: Place, tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    line, spoilt, spoil, said = READ[name]
    script, *arguments = line.split()
    here = shutil.copytree(place.folder, tmp_path / "here")
    for path in (here / "new.py", *here.glob("runs/run/checkpoints/*/state.json")):
        path.write_text(path.read_text().replace(str(place.folder), str(here)))
    for path in here.glob(spoilt):  # alike in all checkpoints: one damaged one is passed over
        spoil(path)
    for sums in here.glob(f"{STEPS}/SHA256SUMS"):  # they fit what was changed
        names = [line.split("  ")[1] for line in sums.read_text().splitlines()]
        sums.write_text("".join(f"{sha256_file(sums.with_name(name))}  {name}\n" for name in names))
    monkeypatch.chdir(here)
    main = train.main if script == "train" else main_of(script)

    before = tree(here)
    message = refused(main, *arguments)
    assert said in message
    assert len(message) <= LONGEST_LINE
    # All but exit.json, which says how the start ended.
    assert {path for path, content in tree(here).items() if before.get(path) != content} <= {"runs/run/exit.json"}


# ---- how a command line ends


def test_an_interrupt_is_one_line_and_130(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="130"):
        exit_on_user_error(Mock(side_effect=KeyboardInterrupt("interrupted: saved")))()
    assert capsys.readouterr().err == "interrupted: saved\n"


@pytest.mark.parametrize(("command", "package"), [("train.py", "tqdm"), ("scripts/compare_runs.py", "pandas")])
def test_a_command_without_a_package_of_the_trainer_is_one_line(command: str, package: str) -> None:
    code = f"import runpy, sys; sys.modules[{package!r}] = None; runpy.run_path({command!r}, run_name='__main__')"
    done = completed([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": "scripts"})
    assert (done.returncode, done.stderr) == (2, f"error: this needs the package {package}: pip install '.[train]'\n")


def test_a_reader_that_leaves_is_no_error() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "attention.check", "--reasons"]
    done = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, cwd=ROOT)
    os.close(writes)
    assert (done.returncode, done.stderr) == (141, b"")


PRINTS = "-c \"from attention.user_error import command_line\nwith command_line():\n    print('said')\""
FULL, CLOSED = (">/dev/full", "No space left on device"), (">&-", "it is closed")


# One case is a real command, as its imports must not need a stdout; they take seconds.
@pytest.mark.parametrize(
    ("program", "output", "why", "unbuffered"),
    [
        (PRINTS, *FULL, ""),
        (PRINTS, *FULL, "1"),
        (PRINTS, *CLOSED, ""),
        ("-m attention.check --reasons", *CLOSED, "1"),
    ],
)
def test_a_stdout_that_takes_nothing_is_one_line(program: str, output: str, why: str, unbuffered: str) -> None:
    command = f"{sys.executable} {program} {output}"
    done = completed(["sh", "-c", command], env=os.environ | {"PYTHONUNBUFFERED": unbuffered})
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith(f"error: standard output: {why}")


def test_a_run_without_a_stderr_ends_as_any_other(place: Place) -> None:
    recipe = place.preset_file(place.config("without_stderr", {"run.steps": 1}))
    done = completed(["sh", "-c", f"{sys.executable} train.py {recipe} 2>&-"])
    assert (done.returncode, json.loads((place.runs / "without_stderr/exit.json").read_text())["code"]) == (0, 0)


def test_a_run_whose_reader_leaves_says_so_and_goes_on(place: Place) -> None:
    recipe = place.preset_file(place.config("without_reader", {"run.steps": 2}))
    done = completed(["bash", "-c", f"set -o pipefail; {sys.executable} train.py {recipe} | true"])
    said = "warning: standard output takes no more lines (Broken pipe); the run goes on\n"
    assert (done.returncode, done.stderr) == (0, said)
    assert (place.runs / "without_reader/checkpoints/step_00000002").is_dir()


def test_a_resume_whose_reader_leaves_goes_on_without_its_warning(place: Place) -> None:
    run = place.train("warned", {"run.steps": 1})
    (run / "config.json").unlink()  # it warns of that
    recipe = place.preset_file(place.config("warned", {"run.steps": 2, "run.resume": "yes"}))
    command = f"set -o pipefail; {sys.executable} train.py {recipe} 2>&1 | true"
    assert completed(["bash", "-c", command]).returncode == 0
    assert (run / "checkpoints/step_00000002").is_dir()


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
    ("arguments", "message"),
    [
        (["bench_train", "new.py", "--variants", "x: --model.bias 'a"], "--variants x: No closing quotation"),
        (["bench_train", "new.py", "--json", "data"], "--json = 'data': expected a file"),
        (["bench_attention", "--json", "new.py/x/b.json"], "--json new.py/x/b.json: cannot be written"),
        (["bench_attention", "--json", "data"], "--json = 'data': expected a file"),
        (["make_text", "new.py", "--out", "data"], "--out = 'data': expected a file"),
        (["figures", "4", "--checkpoint", "runs/run", "--out", "new.py"], "--out = 'new.py': expected a folder"),
        (["figures", "11", "--runs", "runs/run", "--out", "f11.png"], "--out = 'f11.png': expected a folder"),
        (["figures", "4", "--checkpoint", "runs/run", "--layer", "99"], "layer = 99: expected 0 to 1"),
        (["capture_attention", "runs/run", "--layers", "0", "7"], "layer = 7: expected 0 to 1"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_a_wrong_value_is_one_line(
    place: Place, arguments: list[str], message: str, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place.folder)
    assert refused(main_of(arguments[0]), *arguments[1:]).startswith(f"error: {message}")


@pytest.mark.usefixtures("low_precision_attention")
def test_a_checkout_that_there_is_not_is_one_line(monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]) -> None:
    assert "/nonexistent" in refused(main_of("public_suites"), "transformers", "/nonexistent")
