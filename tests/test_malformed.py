"""Every file that a command reads, spoilt in every way: one line on stderr, exit code 2, no file changed, nothing waited for."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiny_runs import Place, new_place, tree

import train

LONGEST_LINE = 2000
Spoil = Callable[[Path, random.Random], object]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """What is right, to be spoilt: a run with its recording, data, a recipe."""
    with new_place(tmp_path_factory) as place:
        place.train("run", {"data.record": place.recording("run")})
        place.train("second")
        (place.folder / "recipe.py").write_text("x = 1\n")
        place.preset_file(place.config("new", {}))
        yield place


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
