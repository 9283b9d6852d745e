"""training/record.py: which code a run was made with, and by which sessions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from errors import UserError
from training import record

FACTS: dict[str, Any] = {"git_commit": "new", "versions": {"torch": "2"}}


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


def test_a_source_of_another_name_changes_the_digest(checkout: Path) -> None:
    before = record.source_sha256(checkout)
    (checkout / "train.py").rename(checkout / "trains.py")
    assert record.source_sha256(checkout) != before


@pytest.mark.parametrize(
    "name", ["runs/a/x.py", ".venv/x.py", "tests/x.py", "attention/notes.md", "data/tokens/a/train.bin"]
)
def test_what_is_no_source_of_the_project_leaves_the_digest(checkout: Path, name: str) -> None:
    before = record.source_sha256(checkout)
    (checkout / name).parent.mkdir(parents=True, exist_ok=True)
    (checkout / name).write_text("# other")
    assert record.source_sha256(checkout) == before


def test_a_record_that_is_none_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json: not the record of a run"):
        record.sessions(tmp_path, 10, FACTS)
