"""Killed before any change of a file, or cut off from power there, a run ends with the same bits: the same command, given again.

Each kill is of a fork of this process, which has imported everything and trained once.
"""

import builtins
import functools
import io
import os
import random
import shutil
import signal
import stat
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import Place, lines, tree

import train
from config import TrainConfig
from training.intervention import AlarmConfig

CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate")
RUN = {
    "run.resume": "auto",
    "run.steps": 6,
    "checkpoint.every": 2,
    "checkpoint.keep_last": 1,
    "evaluation.every": 3,
    "telemetry.every": 3,
    "alarm": AlarmConfig(switches=("3:1:flash_fp32_o",)),
}


class Doom:
    """Ends this process (SIGKILL) before its ``at``-th change of a file below ``folder``; a write counts twice, the second time half done.

    ``power``: what was not flushed by then is lost, too; renamed and removed files stay so.
    """

    def __init__(self, folder: Path, at: int, *, power: bool):
        self.folder, self.at, self.power, self.done = folder, at, power, 0
        self.flushed: dict[int, bytes] = {}
        for path in self._files():
            self._note(os.open(path, os.O_RDONLY))
        sys.addaudithook(self._hook)
        os.fsync = self._fsync
        builtins.open = functools.partial(self._open, open)

    def _files(self) -> list[Path]:
        return [path for path in self.folder.rglob("*") if path.is_file()]

    def point(self) -> None:
        self.done += 1
        if self.done == self.at:
            if self.power:
                self.at = 0
                for path in self._files():
                    path.write_bytes(self.flushed.get(path.stat().st_ino, b""))
            os.kill(os.getpid(), signal.SIGKILL)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if writes and isinstance(path, str) and path.startswith(str(self.folder)):
                self.point()
        elif event in CHANGES:
            self.point()

    def _note(self, descriptor: int) -> None:
        """What the file holds is on the disk. Its descriptor stays open: no other file is given its inode."""
        self.flushed[os.fstat(descriptor).st_ino] = Path(f"/proc/self/fd/{descriptor}").read_bytes()

    def _fsync(self, descriptor: int) -> None:
        self.point()
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            self._note(os.dup(descriptor))

    def _open(self, real: Callable[..., Any], path: Any, mode: str = "r", buffering: int = -1, **rest: Any) -> Any:
        return Torn(self, path, mode) if buffering == 0 else real(path, mode, buffering, **rest)


class Torn(io.FileIO):
    def __init__(self, doom: Doom, path: Any, mode: str):
        super().__init__(path, mode)
        self._doom = doom

    def write(self, content: Any) -> int:
        self._doom.point()
        half = len(content) // 2
        super().write(content[:half])
        self._doom.point()
        return half + super().write(content[half:])

    def truncate(self, size: int | None = None) -> int:
        self._doom.point()
        return super().truncate(size)


class Case:
    """A run, its recording and what it says, in a folder of their own."""

    def __init__(self, place: Place, name: str):
        self.folder = place.folder / name
        self.folder.mkdir()
        here = {"run.folder": str(self.folder / "runs"), "data.record": str(self.folder / "recording")}
        self.config: TrainConfig = place.config("run", {**RUN, **here})
        self.log = place.folder / f"{name}.log"
        self.changes = 0

    def start(self, at: int = 0, *, power: bool = False) -> int:
        """Give the command, to a process that dies at its change number ``at``; its exit code, negative if killed."""
        child = os.fork()
        if child == 0:
            self._child(at, power)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def _child(self, at: int, power: bool) -> None:
        code = 1
        try:
            log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            doom = Doom(self.folder, at, power=power)
            train.train(self.config)
            Path(f"{self.log}.changes").write_text(str(doom.done))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def left(self) -> dict[str, Any]:
        """All that a run leaves, less times and what the record says of its sessions."""
        run = self.folder / "runs/run"
        names = ("metrics.jsonl", "telemetry.jsonl")
        files = {name: digest for name, digest in tree(self.folder).items() if name.endswith((".safetensors", ".npy"))}
        return {
            "names": list(tree(self.folder)),
            "files": files,
            "header": (self.folder / "recording/header.json").read_text(),
            "logs": [lines(run, name=name) for name in names],
        }


@pytest.fixture(scope="module")
def straight(place: Place) -> tuple[dict[str, Any], int]:
    """What a run leaves that was never interrupted, and how often it changes a file."""
    # Once in this process, so that its children find everything imported.
    train.train(Case(place, "warm").config)
    case = Case(place, "straight")
    assert case.start() == 0, case.log.read_text()
    return case.left(), int(Path(f"{case.log}.changes").read_text())


def check(place: Place, kills: tuple[int, ...], *, power: bool, expected: dict[str, Any]) -> None:
    """Killed at each of the points in turn, a run that is then left alone leaves what is expected."""
    case = Case(place, f"{'power_' if power else 'kill_'}{'_'.join(map(str, kills))}")
    assert [case.start(at, power=power) for at in kills] == [-9] * len(kills), case.log.read_text()
    assert case.start() == 0, case.log.read_text()
    assert case.left() == expected, kills
    shutil.rmtree(case.folder)


@pytest.mark.parametrize("power", [False, True], ids=["killed", "power_cut"])
def test_killed_at_some_changes_it_recovers(place: Place, straight: tuple[dict[str, Any], int], power: bool) -> None:
    """At every fourth change of the start, others with a power cut, and some of the rest."""
    expected, changes = straight
    for at in [*range(1 + power, 40, 4), *range(40, changes + 1, changes // 8)]:
        check(place, (at,), power=power, expected=expected)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("power", [False, True], ids=["killed", "power_cut"])
def test_killed_anywhere_it_recovers(place: Place, straight: tuple[dict[str, Any], int], power: bool) -> None:
    """At every change; every second time again in what follows."""
    expected, changes = straight
    generator = random.Random(1)
    for at in range(1, changes + 1):
        again = (generator.randint(1, 20),) if at % 2 else ()
        check(place, (at, *again), power=power, expected=expected)
