"""Imports go down only, and what is heavy or optional is imported where it is used."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Each part may import itself and what stands to its right.
ORDER = [
    "scripts",
    "figures",
    "train",
    "configs",
    "config",
    "training",
    "probes",
    "data",
    "model",
    "fused",
    "files",
    "errors",
    "attention",
]


def parts() -> list[tuple[Path, str]]:
    files = [*ROOT.glob("*.py"), *(f for name in ORDER for f in (ROOT / name).rglob("*.py"))]
    return [(f, f.relative_to(ROOT).parts[0].removesuffix(".py")) for f in sorted(files)]


@pytest.mark.parametrize(("path", "part"), parts(), ids=lambda x: x.name if isinstance(x, Path) else "")
def test_imports_go_down_only(path: Path, part: str) -> None:
    tree = ast.parse(path.read_text())
    typing_only = {
        id(n)
        for b in ast.walk(tree)
        if isinstance(b, ast.If) and "TYPE_CHECKING" in ast.dump(b.test)
        for n in ast.walk(b)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only or not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        for top in (name.split(".")[0] for name in names):
            assert top != "experiments", f"{path.name} imports experiments, which is frozen"
            if top in ORDER:
                assert ORDER.index(top) >= ORDER.index(part), f"{path.name} imports {top}, which stands above {part}"


def test_training_imports_nothing_optional() -> None:
    code = (
        "import sys, train; from scripts import compare_runs, prepare_data; "
        "heavy = {'wandb', 'datasets', 'matplotlib', 'transformers'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": "scripts"})


def test_no_two_files_have_one_name() -> None:
    folders = [*ORDER, "experiments", "tests"]
    names = [f.name for f in (*ROOT.glob("*.py"), *(f for name in folders for f in (ROOT / name).rglob("*.py")))]
    assert {name for name in names if names.count(name) > 1} <= {"__init__.py", "__main__.py"}
