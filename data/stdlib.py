"""The embedded default data: the sources of the Python library that runs this, as byte tokens. No download.

The data depend on the Python version (and on a distributor's patches), never on where it is installed: files made at
build time, tests, what distributors split off or add, and vendored packages stay out.
"""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from pathlib import Path

import numpy as np

from data.text import Piece, Prepared, encode, writer
from data.token_files import TokenFile, TokenHeader, new_dataset
from data.tokenizers import ByteTokenizer
from errors import UserError

VAL_EVERY = 25
NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload"}
APART_IN_DEBIAN = {"idlelib", "lib2to3", "distutils", "ensurepip", "tkinter", "turtledemo", "venv"}
EXCLUDED_FOLDERS = NOT_LIBRARY | APART_IN_DEBIAN
# Build-time files of one machine, distributors' hooks, and turtle.py, which is apart together with tkinter.
EXCLUDED_NAMES = ("_sysconfigdata", "sitecustomize", "usercustomize", "turtle.py")


def prepare_stdlib(folder: Path, *, library: Path | None = None, force: bool = False) -> tuple[Prepared, bool]:
    """Write the data set ``folder``; True when it was already there, whole and the same.

    ``library`` is the folder to read (the running Python's library when None). Every 25th file, in sorted order, is held
    out. ``UserError``: no sources found, or another data set in the place.
    """
    library = library or Path(sysconfig.get_path("stdlib"))
    paths = library_files(library)
    names = {"train": [p for i, p in enumerate(paths) if not is_held_out(i)]}
    names["val"] = [p for i, p in enumerate(paths) if is_held_out(i)]
    if not names["val"]:
        raise UserError(f"{library}: {len(paths)} Python sources found, at least {VAL_EVERY} are needed")
    tokens = {split: encode_files(library, chosen) for split, chosen in names.items()}
    documents = {split: len(chosen) for split, chosen in names.items()}
    present = None if force else _same_data(folder, tokens)
    if present:
        return Prepared(headers=present, documents=documents), True
    headers = {}
    with new_dataset(folder, force=force) as staging:
        for split, values in tokens.items():
            source = f"standard library of Python {platform.python_version()}, {documents[split]} files"
            with writer(staging, split, ByteTokenizer(), source) as token_writer:
                token_writer.write(values)
            if token_writer.header:
                headers[split] = token_writer.header
    return Prepared(headers=headers, documents=documents), False


def library_files(library: Path) -> list[Path]:
    """The sources that belong, relative to ``library``, sorted by path."""
    relative = (path.relative_to(library) for path in library.rglob("*.py"))
    return sorted(path for path in relative if _belongs(path))


def _belongs(path: Path) -> bool:
    folders = path.parts[:-1]
    # config-3.11-x86_64-linux-gnu and the like hold build-time files.
    if EXCLUDED_FOLDERS.intersection(folders) or any(name.startswith("config-") for name in folders):
        return False
    return not path.name.startswith(EXCLUDED_NAMES)


def is_held_out(index: int) -> bool:
    """Whether file ``index`` of the sorted list goes to val."""
    return index % VAL_EVERY == VAL_EVERY - 1


def encode_files(library: Path, paths: list[Path]) -> np.ndarray:
    """Byte tokens of the files, uint8, 1-D: each file whole, then a separator; ``UserError`` for a file with byte 0."""
    pieces = [Piece((library / path).read_bytes(), True, str(library / path)) for path in paths]
    return encode(ByteTokenizer(), pieces, 1)


def _same_data(folder: Path, tokens: dict[str, np.ndarray]) -> dict[str, TokenHeader] | None:
    """The headers of the data set in ``folder`` when it is whole and holds just these byte tokens."""
    headers = {}
    for split, values in tokens.items():
        try:
            header = TokenFile.open(folder, split, verify="sha256").header
        except UserError:
            return None
        if (
            header.vocabulary != ByteTokenizer.vocabulary
            or header.sha256 != hashlib.sha256(values.tobytes()).hexdigest()
        ):
            return None
        headers[split] = header
    return headers
