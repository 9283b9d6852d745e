"""The embedded default data: the sources of the Python library that runs this, as byte tokens. No download.

The data depend on the Python version (and on a distributor's patches), never on where it is installed: files made at
build time, tests, what distributors split off or add, and vendored packages stay out.
"""

import platform
import sysconfig
from pathlib import Path

import numpy as np

from data.text import Piece, Prepared, encode, write_dataset
from data.token_files import TokenFile, TokenHeader
from data.tokenizers import ByteTokenizer
from errors import UserError

VAL_EVERY = 25
NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload"}
APART_IN_DEBIAN = {"idlelib", "lib2to3", "distutils", "ensurepip", "tkinter", "turtledemo", "venv"}
# Build-time files of one machine, distributors' hooks, and turtle.py, which is apart together with tkinter.
EXCLUDED_NAMES = ("_sysconfigdata", "sitecustomize", "usercustomize", "turtle.py")


def prepare_stdlib(folder: Path, *, library: Path | None = None, force: bool = False) -> Prepared:
    """Write the data set ``folder``, each file a document, unless it is there, whole and the same.

    ``library`` is the folder to read (the running Python's library when None). Every 25th file, in sorted order, is held
    out. ``UserError``: no sources found, a file with byte 0, or another data set in the place.
    """
    library = library or Path(sysconfig.get_path("stdlib"))
    paths = library_files(library)
    if len(paths) < VAL_EVERY:
        raise UserError(f"{library}: {len(paths)} Python sources found, at least {VAL_EVERY} are needed")
    pieces: dict[str, list[Piece]] = {"train": [], "val": []}
    for number, path in enumerate(paths, start=1):
        split = "train" if number % VAL_EVERY else "val"
        pieces[split].append(Piece((library / path).read_bytes(), True, str(library / path)))
    sources = {
        split: f"standard library of Python {platform.python_version()}, {len(chosen)} files"
        for split, chosen in pieces.items()
    }
    if not force and (headers := _same_data(folder, pieces)):
        return Prepared(headers=headers, documents={split: len(chosen) for split, chosen in pieces.items()})
    return write_dataset(folder, ByteTokenizer(), sources, pieces.items(), force=force)


def _same_data(folder: Path, pieces: dict[str, list[Piece]]) -> dict[str, TokenHeader] | None:
    """The headers of the data set in ``folder`` when it is whole and holds just these documents."""
    try:
        there = {split: TokenFile.open(folder, split, verify="sha256") for split in pieces}
    except UserError:
        return None
    same = (np.array_equal(there[split].tokens, encode(ByteTokenizer(), chosen)) for split, chosen in pieces.items())
    return {split: file.header for split, file in there.items()} if all(same) else None


def library_files(library: Path) -> list[Path]:
    """The sources that belong, relative to ``library``, sorted by path."""

    def belongs(path: Path) -> bool:
        folders = path.parts[:-1]
        # config-3.11-x86_64-linux-gnu and the like hold build-time files.
        apart = (NOT_LIBRARY | APART_IN_DEBIAN).intersection(folders) or any(f.startswith("config-") for f in folders)
        return not apart and not path.name.startswith(EXCLUDED_NAMES)

    return sorted(filter(belongs, (path.relative_to(library) for path in library.rglob("*.py"))))
