"""data/stdlib.py"""

import pytest

from data.stdlib import VAL_EVERY, library_files, prepare_stdlib
from data.token_files import TokenFile


@pytest.fixture
def library(tmp_path):
    """A library of 2 * VAL_EVERY files and some that do not belong."""
    root = tmp_path / "library"
    wanted = [f"package/m{number:03}.py" for number in range(2 * VAL_EVERY)]
    unwanted = ["test/t.py", "json/tests/t.py", "site-packages/s.py", "idlelib/i.py", "lib2to3/l.py"]
    unwanted += ["_sysconfigdata__linux_.py", "config-3.11-x86_64-linux-gnu/python-config.py", "package/data.txt"]
    for name in wanted + unwanted:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"# {name}\n")
    return root


def test_only_the_librarys_own_sources_belong(library):
    assert [str(path) for path in library_files(library)] == [f"package/m{n:03}.py" for n in range(2 * VAL_EVERY)]


def test_no_file_is_in_both_splits(tmp_path, library):
    prepare_stdlib(tmp_path / "out", library=library)
    split_documents = [
        set(TokenFile.open(tmp_path / "out", split).tokens.tobytes().split(b"\0")[:-1]) for split in ("train", "val")
    ]
    assert [len(found) for found in split_documents] == [2 * VAL_EVERY - 2, 2]
    assert not split_documents[0] & split_documents[1]
