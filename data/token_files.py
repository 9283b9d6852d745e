"""Token files: ``train.bin`` and ``val.bin`` in a folder, raw little-endian tokens, each with a JSON header beside it.

A data set appears whole or not at all: it is written into a hidden folder beside its place and moved there at the end.
"""

import contextlib
import dataclasses
import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

import files
from errors import UserError, check_types, on_disk

DATASETS = Path("data/tokens")
"""Where scripts/prepare_data.py writes unless told otherwise."""
FORMAT_VERSION = 1
SPLITS = ("train", "val")
DTYPES = ("uint8", "uint16")
_FILE_NAMES = {f"{split}{suffix}" for split in SPLITS for suffix in (".bin", ".json")}


@dataclass(frozen=True, kw_only=True)
class TokenHeader:
    """What a token file holds; the content of ``NAME.json``. ``ValueError`` for values that make no sense."""

    format_version: int
    dtype: str  # NumPy's name; stored little-endian
    vocabulary: str  # "gpt2" or "bytes"
    vocabulary_size: int  # every token is below it
    count: int  # tokens
    sha256: str  # of the .bin file, hexadecimal
    source: str  # what it was made from, for people

    def __post_init__(self) -> None:
        check_types("", self)
        if self.format_version != FORMAT_VERSION:
            raise ValueError(f"format_version {self.format_version}, this program reads {FORMAT_VERSION}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is none of {', '.join(DTYPES)}")
        if not 1 <= self.vocabulary_size <= np.iinfo(self.dtype).max + 1:
            raise ValueError(f"vocabulary_size {self.vocabulary_size} does not fit {self.dtype}")
        if self.count < 1:
            raise ValueError(f"count {self.count}")
        if not re.fullmatch("[0-9a-f]{64}", self.sha256):
            raise ValueError(f"sha256 {self.sha256!r}")

    @property
    def stored_dtype(self) -> np.dtype:
        """The type of the file's bytes, little-endian on every machine."""
        return np.dtype(self.dtype).newbyteorder("<")


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    header: TokenHeader
    file: files.InUse

    @property
    def path(self) -> Path:
        return self.file.path

    @property
    def tokens(self) -> np.ndarray:
        """All of them, read-only, 1-D, ``[header.count]``."""
        return self.sequences([0], self.header.count)[0]

    def sequences(self, starts_N: Iterable[int], length: int) -> np.ndarray:
        """``length`` tokens from each of these places on, read-only [N, length]. Raises ``UserError`` for a file that was cut short."""
        width = self.header.stored_dtype.itemsize
        raw = b"".join(self.file.read(start * width, length * width) for start in map(int, starts_N))
        return np.frombuffer(raw, self.header.stored_dtype).reshape(-1, length)

    @classmethod
    def open(cls, folder: Path, split: str, *, verify: Literal["sha256", "size"] = "size") -> "TokenFile":
        """Open ``folder/split.bin``; ``verify="sha256"`` reads all of it.

        ``UserError``: folder, file or header missing, header not of this format, size or SHA-256 other than it says.
        """
        path = folder / f"{split}.bin"
        with on_disk(folder, "be read"):
            header = _read_header(folder, split)
        if not path.is_file():
            raise UserError(f"{path}: no such file; {_remedy(folder)}")
        expected = header.count * header.stored_dtype.itemsize
        with on_disk(path, "be read"):
            file = files.InUse(path)
        if file.size != expected:
            again = _remedy(folder, force=True)
            raise UserError(f"{path}: {file.size} bytes, its header says {expected}: damaged; {again}")
        if verify == "sha256":
            _verify(file, header, folder)
        return cls(header=header, file=file)


def _verify(file: files.InUse, header: TokenHeader, folder: Path) -> None:
    """Raise ``UserError`` where the bytes are not those that were written, or a token is beyond the vocabulary."""
    digest, largest = hashlib.sha256(), 0
    for block in file.blocks():
        digest.update(block)
        largest = max(largest, int(np.frombuffer(block, header.stored_dtype).max()))
    if (found := digest.hexdigest()) != header.sha256:
        differ = f"SHA-256 {found} where its header says {header.sha256}"
        raise UserError(f"{file.path}: {differ}: damaged; {_remedy(folder, force=True)}")
    if largest >= header.vocabulary_size:
        raise UserError(f"{file.path}: token {largest} in a vocabulary of {header.vocabulary_size}")


def _read_header(folder: Path, split: str) -> TokenHeader:
    if not folder.is_dir():
        if (old := _old(folder)).is_dir():
            again = _remedy(folder, force=True)
            raise UserError(f"{folder}: its replacement was cut off; go on with {old}, or {again}")
        named = DATASETS / folder.name
        meant = f"did you mean {named}?" if len(folder.parts) == 1 and named.is_dir() else ""
        raise UserError(
            f"{folder}: no such data set; {meant or f'{_remedy(folder)}, or name its place (--data.dataset)'}"
        )
    path = folder / f"{split}.json"
    if not path.is_file():
        raise UserError(f"{path}: no such header; {_remedy(folder)}")
    try:
        return TokenHeader(**files.read_json(path))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path}: not a token file's header ({error}); {_remedy(folder, force=True)}") from error


def _remedy(folder: Path, force: bool = False) -> str:
    name = folder.name
    kind = name if name in ("stdlib", "openwebtext") else f"text FILE --name {name}"
    command = f"python scripts/prepare_data.py {kind}"
    if kind != name and "bytes" in (_vocabulary(folder), _vocabulary(_old(folder))):
        command += " --vocabulary bytes"
    if folder.parent != DATASETS:
        command += f" --out {folder.parent}"
    return f"make it with: {command}{' --force' if force else ''}"


def _vocabulary(folder: Path) -> str | None:
    """What the headers of a damaged data set say, as far as one can be read."""
    for split in SPLITS:
        with contextlib.suppress(OSError, ValueError, AttributeError, KeyError, TypeError):
            return str(files.read_json(folder / f"{split}.json")["vocabulary"])
    return None


class TokenWriter:
    """Streams tokens to ``folder/split.bin``; a context manager, for a folder of ``new_dataset``.

    ``facts``: dtype, vocabulary, vocabulary_size and source of its ``TokenHeader``. Leaving it normally writes the header beside the file
    (``header`` then says what was written); without one nothing reads the file.
    """

    def __init__(self, folder: Path, split: str, **facts: Any):
        self.count = 0
        # Made here for its checks; the true count and digest come at the end.
        self.header = TokenHeader(format_version=FORMAT_VERSION, **facts, count=1, sha256="0" * 64)
        self._path, self._hash = folder / f"{split}.bin", hashlib.sha256()
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open(self._path, "wb")  # noqa: SIM115  (closed by __exit__)

    def __enter__(self) -> "TokenWriter":
        return self

    def write(self, tokens: np.ndarray) -> None:
        """Append integer tokens, 1-D, at least one; ``ValueError`` for one outside the vocabulary."""
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.header.vocabulary_size:
            raise ValueError(f"tokens {low} to {high} in a vocabulary of {self.header.vocabulary_size}")
        raw = tokens.astype(self.header.stored_dtype).tobytes()
        self._file.write(raw)
        self._hash.update(raw)
        self.count += tokens.size

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            # Closing flushes, which fails once more on a full disk; what is thrown away needs no flush.
            with contextlib.suppress(OSError):
                self._file.close()
            return
        with self._file:
            if self.count == 0:
                raise UserError(f"{self._path}: no tokens to write, the source has no text for this split")
            self._file.flush()
            os.fsync(self._file.fileno())
        self.header = dataclasses.replace(self.header, count=self.count, sha256=self._hash.hexdigest())
        files.write_json(self._path.with_suffix(".json"), dataclasses.asdict(self.header))


@contextlib.contextmanager
def new_dataset(folder: Path, *, force: bool = False) -> Iterator[Path]:
    """A hidden folder to write a data set into; it becomes ``folder`` when the block ends, and goes when it raises.

    A run killed half-way leaves the hidden folder, which nothing reads and the next run clears. One that is replaced lies beside it for
    a moment, as ``.NAME.old``; a kill then leaves it there, and the next run begins by putting it back. ``UserError``: ``folder`` holds
    something and ``force`` is off, or holds files that are not a data set's; or another process is making it.
    """
    with files.aside(folder) as hidden:
        old = _old(folder)
        if old.exists() and not os.path.lexists(folder):
            os.rename(old, folder)
        _check_replaceable(folder, force)
        whole = hidden / folder.name
        whole.mkdir()
        yield whole
        _check_replaceable(folder, force)  # another process may have made it meanwhile
        if old.exists():  # the kill came behind both renames
            _remove(old)
        if folder.exists():
            os.rename(folder, old)
        os.rename(whole, folder)
        files.sync_folder(folder.parent)
        if old.exists():
            _remove(old)


def _old(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def _remove(folder: Path) -> None:
    if folder.is_symlink():  # what it leads to is somebody's
        folder.unlink()
        return
    for name in _FILE_NAMES:
        (folder / name).unlink(missing_ok=True)
    folder.rmdir()


def _check_replaceable(folder: Path, force: bool) -> None:
    if folder.is_symlink():  # what is made beside it cannot be moved to where it leads, perhaps another disk
        target = folder.resolve()
        raise UserError(
            f"{folder}: a link: name the folder that it leads to: --out {target.parent} --name {target.name}"
        )
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UserError(f"{folder}: exists and is not a folder; --name picks another place")
    found = {entry.name for entry in folder.iterdir()}
    if foreign := sorted(found - _FILE_NAMES):
        raise UserError(f"{folder}: holds {foreign[0]!r}, no token file: not replaced; --name picks another place")
    if found and not force:
        raise UserError(f"{folder}: exists; --force replaces it, --name picks another place")
