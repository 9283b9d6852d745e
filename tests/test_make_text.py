"""scripts/make_text.py"""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from data.text import split_documents
from scripts import make_text

LINE = "x = 'a line of a source that is long enough'\n"


def wheel(path: Path, **sources: str | bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in sources.items():
            archive.writestr(name.replace("_py", ".py"), content)
    return path


def made(tmp_path: Path, *wheels: Path) -> list[bytes]:
    make_text.main([*map(str, wheels), "--out", str(tmp_path / "text.txt")])
    with open(tmp_path / "text.txt", "rb") as stream:
        return [document for document, _ in split_documents(stream)]


def test_the_text_is_the_same_in_any_order_of_wheels(tmp_path: Path) -> None:
    wheels = [wheel(tmp_path / f"{i}.whl", **{f"{i}_py": f"# {i}\n" + LINE * 5}) for i in range(6)]
    text = made(tmp_path, *wheels)
    assert len(text) == 6
    assert made(tmp_path, *reversed(wheels)) == text


def test_equal_sources_are_one_document(tmp_path: Path) -> None:
    one = wheel(tmp_path / "1.whl", a_py=LINE * 5, b_py=LINE * 5 + "\n\n", c_py="\ufeff" + LINE * 5)
    other = wheel(tmp_path / "2.whl", d_py=(LINE * 5).rstrip())
    assert made(tmp_path, one, other) == [(LINE * 5).rstrip().encode()]


@pytest.mark.parametrize(
    "content",
    ["short", LINE * 5 + "\0", LINE * 5 + "'<|endoftext|>'", LINE.encode("latin-1") * 5 + b"\xe9"],
)
def test_what_no_document_can_be_is_left_out(tmp_path: Path, content: str | bytes) -> None:
    assert made(tmp_path, wheel(tmp_path / "1.whl", a_py=LINE * 5, b_py=content)) == [(LINE * 5).rstrip().encode()]
