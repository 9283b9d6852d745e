"""training/record.py: which code a run was made with."""

from __future__ import annotations

from pathlib import Path

import pytest

from training import record


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("train.py", "attention/plan.py", "data/text/words.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# {name}")
    return tmp_path


@pytest.mark.parametrize("name", ["train.py", "attention/plan.py", "data/text/words.py"])
def test_a_changed_source_changes_the_digest(checkout: Path, name: str) -> None:
    before = record.source_sha256(checkout)
    (checkout / name).write_text("# other")
    assert record.source_sha256(checkout) != before


@pytest.mark.parametrize(
    "name", ["runs/a/x.py", ".venv/x.py", "tests/x.py", "attention/notes.md", "data/tokens/a/train.bin"]
)
def test_what_is_no_source_of_the_project_leaves_the_digest(checkout: Path, name: str) -> None:
    before = record.source_sha256(checkout)
    (checkout / name).parent.mkdir(parents=True, exist_ok=True)
    (checkout / name).write_text("# other")
    assert record.source_sha256(checkout) == before
