"""Mutations: small faults, each of which the tests named beside it must find. One or more for every rounding site, and for what recording,
replay, resume, policies and refusals promise. They are listed in ``mutations.diff``.

    python tests/mutations.py                 run all: ten minutes or so; writes tests/mutations.txt
    python tests/mutations.py --only delta    those whose name contains a word; the report keeps its other lines
    python tests/mutations.py --dry           say only whether each still applies

A fault is text of one product file that is replaced; the file is the one that holds the text, wherever it was moved. A mutation that
no longer applies is to be rewritten with the code, not deleted.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
LIST, REPORT = ROOT / "tests/mutations.diff", ROOT / "tests/mutations.txt"
KERNEL = "TRITON_INTERPRET=1 "


@dataclass(frozen=True)
class Mutation:
    """``old`` becomes ``new``; ``tests`` are arguments of pytest, in Triton's interpreter where ``kernel``.

    Those of test_sites.py run in both ways, as the reference is what the kernels are held to.
    """

    name: str
    old: str
    new: str
    tests: str
    kernel: bool = False


def listed(text: str) -> list[Mutation]:
    """Paragraphs of ``NAME | TESTS``, lines of the old text behind ``- `` and of the new behind ``+ ``; others are headings."""
    found = []
    for paragraph in text.split("\n\n"):
        head, *lines = paragraph.strip("\n").split("\n")
        name, bar, tests = head.partition(" | ")
        if bar:
            old, new = ("\n".join(line[2:] for line in lines if line[:2] == sign) for sign in ("- ", "+ "))
            found.append(Mutation(name, old, new, tests.removeprefix(KERNEL), tests.startswith(KERNEL)))
    return found


ALL = listed(LIST.read_text())


def product_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [Path(line) for line in listed.splitlines() if not line.startswith(("tests/", "experiments/"))]


def find(mutation: Mutation, files: list[Path]) -> list[Path]:
    """Files that hold ``old``, once for each time."""
    return [file for file in files for _ in range((ROOT / file).read_text().count(mutation.old))]


def copied(folder: Path) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        if not name.startswith("experiments/") and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def passes(folder: Path, mutation: Mutation, *, interpreted: bool) -> bool:
    """Whether the tests of a mutation pass in a copy, in a process that has torch already; one test at least must have run."""
    log = folder / "pytest.log"
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        sys.path.remove(str(ROOT / "tests"))
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ |= {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1" if interpreted else "0"}
        arguments = ["-q", "-x", "-p", "no:cacheprovider", "-m", "not gpu and not slow", *shlex.split(mutation.tests)]
        skipped = ["--deselect", "tests/test_sites.py::test_the_kernels_in_tritons_interpreter"]
        os._exit(int(pytest.main([*arguments, *skipped])))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code not in (0, 1):
        raise RuntimeError(f"pytest ended with {code}: {log.read_text()[-300:]!r}")
    return code == 0


def survives(folder: Path, mutation: Mutation) -> bool:
    ways = (True,) if mutation.kernel else (False, True) if "test_sites" in mutation.tests else (False,)
    return all(passes(folder, mutation, interpreted=way) for way in ways)


def run(chosen: list[Mutation], places: dict[str, list[Path]]) -> list[str]:
    """One line a mutation, in a copy of the repository."""
    lines = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copied(folder)
        for mutation in chosen:
            if len(places[mutation.name]) != 1:
                lines.append(f"does not apply  {mutation.name}")
                continue
            began = time.monotonic()
            path = folder / places[mutation.name][0]
            original = path.read_text()
            path.write_text(original.replace(mutation.old, mutation.new))
            try:
                outcome = "NOT CAUGHT" if survives(folder, mutation) else "caught"
            except RuntimeError as error:
                outcome = f"NOT RUN: {error}"
            path.write_text(original)
            lines.append(f"{outcome:14}  {mutation.name}  [{places[mutation.name][0]}; {mutation.tests}]")
            print(f"{lines[-1]}  {time.monotonic() - began:.0f} s", flush=True)
    return lines


def kept(names: set[str]) -> list[str]:
    """Lines of the last report about mutations that are not run now."""
    lines = REPORT.read_text().splitlines()[2:] if REPORT.exists() else []
    return [line for line in lines if line[16:].partition("  [")[0] in names]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="part of a name")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    chosen = [mutation for mutation in ALL if arguments.only in mutation.name]
    files = product_files()
    places = {mutation.name: find(mutation, files) for mutation in chosen}
    lost = [f"{name}: found {len(where)} times" for name, where in places.items() if len(where) != 1]
    print("\n".join(lost) or f"all {len(chosen)} apply")
    if arguments.dry:
        return bool(lost)
    torch.set_num_threads(1)
    sys.dont_write_bytecode = True
    with tempfile.TemporaryDirectory() as folder:
        parts = [Path(folder) / str(job) for job in range(arguments.jobs)]
        for job, part in enumerate(parts):
            if os.fork() == 0:
                part.write_text("\n".join(run(chosen[job :: arguments.jobs], places)))
                os._exit(0)
        for _ in parts:
            os.wait()
        lines = sorted(line for part in parts for line in part.read_text().splitlines())
    rows = kept({mutation.name for mutation in ALL} - set(places)) + lines
    caught = sum(row.startswith("caught") for row in rows)
    REPORT.write_text("\n".join([f"{caught} of {len(ALL)} mutations caught", "", *sorted(rows)]) + "\n")
    print(
        f"{sum(line.startswith('caught') for line in lines)} of {len(chosen)} caught now; {REPORT}: {caught} of {len(ALL)}"
    )
    return caught != len(ALL)


if __name__ == "__main__":
    raise SystemExit(main())
