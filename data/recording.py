"""Recordings of batches: which sequences a run saw, in which order, so that another run can see exactly the same.

``replay_batches/README.md`` defines the format byte by byte. ``Recorder`` appends one row an optimizer step, ``Recording`` reads
and checks. Nothing here knows how batches are drawn or split over processes: that is ``data/batches.py``.

Shapes: S steps, G global batch (sequences an optimizer step), T sequence length, W validation windows.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

import files
from data.token_files import check_tokens, mistyped
from errors import UserError, check_size

FORMAT_VERSION = 1
HEAD_BYTES = 128
CHECKSUM_BYTES = 8
TOKEN_DTYPES = ("uint8", "uint16")


@dataclass(frozen=True, kw_only=True)
class RecordingHeader:
    """The facts of a recording that never change; its chain of checksums starts from them."""

    format_version: int = FORMAT_VERSION
    data_sha256: str
    data_tokens: int
    validation_sha256: str
    sequence_length: int
    global_batch: int
    seed: int | None
    source_run: str
    vocabulary: str
    vocabulary_size: int
    dtype: str
    carries_tokens: bool
    validation_windows: int = 0
    validation_windows_sha256: str = ""

    def chain_start(self) -> bytes:
        """8 bytes: the checksum that stands before the first step's."""
        return checksum_of_facts(asdict(self))


def checksum_of_facts(facts: dict[str, Any]) -> bytes:
    """First 8 bytes of the SHA-256 of ``facts`` as canonical JSON: sorted keys, no spaces, non-ASCII characters escaped."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).digest()[:CHECKSUM_BYTES]


def next_checksum(previous: bytes, offsets_G: np.ndarray, tokens_GT: np.ndarray | None = None) -> bytes:
    """8 bytes: first bytes of SHA-256(previous || offsets as little-endian uint64 [|| the step's tokens])."""
    digest = hashlib.sha256(previous)
    digest.update(np.ascontiguousarray(offsets_G, dtype="<u8").data)
    if tokens_GT is not None:
        digest.update(np.ascontiguousarray(tokens_GT).data)
    return digest.digest()[:CHECKSUM_BYTES]


def npy_head(dtype: str, shape: tuple[int, ...]) -> bytes:
    """The first 128 bytes of a NumPy file (format 1.0), padded to one size whatever the number of rows."""
    text = f"{{'descr': '{np.dtype(dtype).newbyteorder('<').str}', 'fortran_order': False, 'shape': {shape}, }}"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", HEAD_BYTES - 10) + text.ljust(HEAD_BYTES - 11).encode() + b"\n"


def row_bytes(dtype: str, row_shape: tuple[int, ...]) -> int:
    return np.dtype(dtype).itemsize * math.prod(row_shape)


class RowFile:
    """A NumPy file that grows by rows. The row is written first and counted second, so that it is there whole or not at all."""

    def __init__(self, path: Path, dtype: str, row_shape: tuple[int, ...], rows: int):
        """Open ``path`` (made when absent) for writing after ``rows`` rows; what lies beyond them is cut."""
        self.dtype, self.row_shape = dtype, row_shape
        self._file = open(path, "r+b" if path.exists() else "x+b", buffering=0)  # noqa: SIM115
        self._put(0, npy_head(dtype, (rows, *row_shape)))
        self._file.truncate(self._start(rows))

    @property
    def closed(self) -> bool:
        return self._file.closed

    def _start(self, row: int) -> int:
        return HEAD_BYTES + row * row_bytes(self.dtype, self.row_shape)

    def _put(self, position: int, content: bytes) -> None:
        self._file.seek(position)
        while content:
            content = content[self._file.write(content) :]

    def put_last(self, row: int, content: bytes) -> None:
        """Write row number ``row``, which becomes the last one."""
        self._put(self._start(row), content)
        self._put(0, npy_head(self.dtype, (row + 1, *self.row_shape)))

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _token_shape(header: RecordingHeader) -> tuple[int, int]:
    return header.global_batch, header.sequence_length + 1


class Recorder:
    """Writes a recording, one row an optimizer step; build it with ``create`` or ``resume``."""

    def __init__(self, folder: Path, header: RecordingHeader, steps: int, checksum: bytes):
        self.folder, self.header, self.steps, self.checksum = folder, header, steps, checksum
        self._tokens: RowFile | None = None
        self._offsets: RowFile | None = None

    def _open(self) -> RowFile:
        """The file of offsets, opened with that of the tokens at the first use; rows behind ``steps`` are cut then."""
        if self._offsets is None:
            # Before any row goes: a kill between the cut and this would leave fewer rows than the header promises.
            _write_header(self.folder, self.header, self.steps, complete=False)
            if self.header.carries_tokens:
                shape = _token_shape(self.header)
                self._tokens = RowFile(self.folder / "tokens.npy", self.header.dtype, shape, self.steps)
            self._offsets = RowFile(self.folder / "offsets.npy", "<u8", (self.header.global_batch + 1,), self.steps)
        return self._offsets

    @classmethod
    def create(cls, folder: Path, header: RecordingHeader, validation_WT: np.ndarray | None = None) -> Recorder:
        """Start an empty recording; it appears under its name only when whole.

        ``validation_WT``: tokens [W, T + 1], given exactly when the header says that tokens are carried.
        Raises ``UserError`` when the folder exists or cannot be made.
        """
        if os.path.lexists(folder):
            raise UserError(f"{folder} exists: record under another name, resume the run that wrote it, or remove it")
        aside = folder.with_name(f".{folder.name}.tmp")
        try:
            if aside.exists():
                shutil.rmtree(aside)
            aside.mkdir(parents=True)
            if validation_WT is not None:
                content = np.ascontiguousarray(validation_WT, dtype=header.dtype)
                files.write_bytes(aside / "validation.npy", npy_head(header.dtype, content.shape) + content.tobytes())
            cls(aside, header, 0, header.chain_start())._finish(complete=False)
            os.replace(aside, folder)
            files.sync_folder(folder.parent)
        except (OSError, UserError) as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise UserError(f"{folder}: cannot record there: {getattr(error, 'strerror', error)}") from None
        return cls(folder, header, 0, header.chain_start())

    @classmethod
    def resume(cls, folder: Path, header: RecordingHeader, steps: int) -> Recorder:
        """Go on after ``steps`` rows of a recording with the same header; later rows, of steps that are to be done again, are cut.

        Nothing is changed before the first ``append`` or ``close``: what is checked after this may still refuse the resume.
        Raises ``UserError`` when there are fewer rows, when they are damaged, or when another run wrote them.
        """
        stored, _, _ = read_header(folder)
        for name, value in asdict(stored).items():
            if value != getattr(header, name):
                raise UserError(
                    f"{folder}: its {name} is {value!r}, this run's is {getattr(header, name)!r}: not this run's recording"
                )
        found = Recording.open(folder, limit=steps)
        if found.steps < steps:
            raise UserError(
                f"{folder}: holds {found.steps} steps, the run resumes at step {steps}: resume from an earlier checkpoint"
            )
        for name in ("header.json", "offsets.npy", *(["tokens.npy"] if header.carries_tokens else [])):
            files.check_writable(folder / name)
        return cls(folder, stored, steps, found.checksum)

    def append(self, offsets_G: np.ndarray, tokens_GT: np.ndarray | None = None) -> None:
        """Add one step: offsets [G], and tokens [G, T + 1] exactly when the recording carries tokens.

        Raises ``UserError`` when the disk takes no more; the rows before stay valid.
        """
        if offsets_G.shape != (self.header.global_batch,):
            raise ValueError(f"offsets of shape {offsets_G.shape}, expected ({self.header.global_batch},)")
        if (tokens_GT is not None) != self.header.carries_tokens:
            raise ValueError("tokens must be given exactly when the header says that they are carried")
        try:
            offsets = self._open()
            if self._tokens is not None and tokens_GT is not None:
                tokens_GT = np.ascontiguousarray(tokens_GT, dtype=self.header.dtype).reshape(_token_shape(self.header))
                # Tokens first: a step counts when its offsets do, and by then its tokens are there.
                self._tokens.put_last(self.steps, tokens_GT.tobytes())
            checksum = next_checksum(self.checksum, offsets_G, tokens_GT)
            offsets.put_last(self.steps, np.ascontiguousarray(offsets_G, dtype="<u8").tobytes() + checksum)
        except OSError as error:
            self._refuse(error)
        self.checksum = checksum
        self.steps += 1

    def flush(self) -> None:
        """Bring every row so far to the disk and promise it in the header; nothing where none has been added."""
        if self._offsets is not None:
            self._sync(complete=False)

    def close(self) -> None:
        """Flush and mark the recording as finished. Closing twice is harmless."""
        if self._offsets is None or not self._offsets.closed:
            self._finish(complete=True)

    def _finish(self, *, complete: bool) -> None:
        self._sync(complete=complete)
        for file in (self._tokens, self._offsets):
            if file is not None:
                file.close()

    def _sync(self, *, complete: bool) -> None:
        try:
            offsets = self._open()
            if self._tokens is not None:
                self._tokens.sync()
            offsets.sync()
            _write_header(self.folder, self.header, self.steps, complete=complete)
        except OSError as error:
            self._refuse(error)

    def _refuse(self, error: OSError) -> NoReturn:
        raise UserError(
            f"{self.folder}: cannot write step {self.steps}: {error.strerror}; the steps before it stay valid"
        ) from error


@contextlib.contextmanager
def whole_recording(name: Path) -> Iterator[Path]:
    """A folder to record into that becomes ``name`` when the block ends, and goes when it raises: half a recording would replay, too.

    Raises ``UserError`` where ``name`` exists.
    """
    if os.path.lexists(name):
        raise UserError(f"{name} exists: choose another name or remove it")
    aside = name.with_name(f".{name.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        yield aside
        os.replace(aside, name)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    files.sync_folder(name.parent)


def _write_header(folder: Path, header: RecordingHeader, steps: int, *, complete: bool) -> None:
    start = header.chain_start().hex()
    files.write_json(
        folder / "header.json", asdict(header) | {"chain_start": start, "steps": steps, "complete": complete}
    )


def read_header(folder: Path) -> tuple[RecordingHeader, int, bool]:
    """(fixed facts, steps promised, finished?) of a recording's header.json.

    Raises ``UserError`` when there is none, when it is of another format version, or when it was altered.
    """
    path = folder / "header.json"
    try:
        content = files.read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{folder}: no header.json there: not a recording (see replay_batches/README.md)") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: unreadable: {error}") from None
    version = content.get("format_version") if isinstance(content, dict) else None
    if version != FORMAT_VERSION:
        raise UserError(f"{path}: format_version {version!r}: this program reads version {FORMAT_VERSION}")
    names = {field.name for field in fields(RecordingHeader)}
    if set(content) != names | {"chain_start", "steps", "complete"}:
        odd = sorted(set(content) ^ (names | {"chain_start", "steps", "complete"}))
        raise UserError(f"{path}: altered: missing or unknown {', '.join(odd)}")
    header = RecordingHeader(**{name: content[name] for name in names})
    if header.chain_start().hex() != content["chain_start"]:
        raise UserError(f"{path}: altered: its fixed fields do not give its chain_start")
    if name := mistyped(header):
        raise UserError(f"{path}: {name} = {content[name]!r}: of another type")
    _check_values(path, content)
    return header, content["steps"], content["complete"]


def _check_values(path: Path, content: dict[str, Any]) -> None:
    """A foreign writer can get the digest right and a value wrong."""
    least = {"data_tokens": 1, "sequence_length": 1, "global_batch": 1, "vocabulary_size": 1}
    for name, minimum in (least | {"steps": 0, "validation_windows": 0}).items():
        check_size(f"{path}: header.{name}", content[name], minimum)
    if type(content["complete"]) is not bool:
        raise UserError(f"{path}: complete = {content['complete']!r}: expected true or false")
    if content["dtype"] not in TOKEN_DTYPES:
        raise UserError(f"{path}: dtype = {content['dtype']!r}: expected one of {', '.join(TOKEN_DTYPES)}")


def _open_rows(path: Path, dtype: str, row_shape: tuple[int, ...], exactly: int | None) -> np.ndarray:
    """Read-only rows of a ``RowFile``: ``exactly`` so many and not a byte more, or (None) as many as are there whole."""
    try:
        with files.open_file(path) as file:
            head = file.read(HEAD_BYTES)
        size = path.stat().st_size
    except OSError as error:
        raise UserError(f"{path}: unreadable: {error.strerror}") from None
    counted = re.search(rb"'shape': \((\d+),", head)
    rows = int(counted[1]) if counted else 0
    width = row_bytes(dtype, row_shape)
    if len(head) < HEAD_BYTES:
        raise UserError(f"{path}: truncated: {size} bytes")
    if head != npy_head(dtype, (rows, *row_shape)):
        raise UserError(f"{path}: altered: its first {HEAD_BYTES} bytes do not fit header.json")
    if exactly is None:
        rows = min(rows, (size - HEAD_BYTES) // width)
    elif size < HEAD_BYTES + exactly * width:
        raise UserError(f"{path}: truncated: {(size - HEAD_BYTES) // width} of {exactly} rows are there")
    elif rows != exactly or size != HEAD_BYTES + exactly * width:
        raise UserError(f"{path}: altered: {rows} rows in {size} bytes, header.json promises {exactly} rows")
    if rows == 0:
        return np.empty((0, *row_shape), dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r", offset=HEAD_BYTES, shape=(rows, *row_shape))


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A recording opened for reading, checked as a whole; build it with ``open``.

    offsets: uint64 [S, G], first token of each sequence in train.bin. tokens: data dtype [S, G, T + 1], and validation:
    data dtype [W, T + 1], or None when not carried. checksum: of the last step.
    """

    folder: Path
    header: RecordingHeader
    steps: int
    complete: bool
    offsets: np.ndarray
    tokens: np.ndarray | None
    validation: np.ndarray | None
    checksum: bytes

    @classmethod
    def open(cls, folder: Path, limit: int | None = None) -> Recording:
        """Open and check every byte, or (``limit``) the first so many steps. After a kill there are the steps it had finished.

        Raises ``UserError`` when there is no recording, when it is truncated, or when anything in it was altered (naming the first
        bad step).
        """
        header, promised, complete = read_header(folder)
        exactly = promised if complete else None
        table = _open_rows(folder / "offsets.npy", "<u8", (header.global_batch + 1,), exactly)
        tokens = validation = None
        steps = len(table)
        if header.carries_tokens:
            tokens = _open_rows(folder / "tokens.npy", header.dtype, _token_shape(header), exactly)
            steps = min(steps, len(tokens))
            shape = (header.sequence_length + 1,)
            validation = _open_rows(folder / "validation.npy", header.dtype, shape, header.validation_windows)
            for kind, stored in (("tokens", tokens), ("validation", validation)):
                check_tokens(stored, header.vocabulary_size, folder / f"{kind}.npy")
            if hashlib.sha256(np.ascontiguousarray(validation).data).hexdigest() != header.validation_windows_sha256:
                raise UserError(f"{folder / 'validation.npy'}: altered: it does not match validation_windows_sha256")
        if steps < promised:
            raise UserError(f"{folder}: truncated: {steps} of {promised} steps are there")
        steps = steps if limit is None else min(steps, limit)
        table, tokens = table[:steps], None if tokens is None else tokens[:steps]
        checksum = _check_chain(folder, header, table, tokens)
        return cls(
            folder=folder,
            header=header,
            steps=steps,
            complete=complete,
            offsets=table[:, :-1],
            tokens=tokens,
            validation=validation,
            checksum=checksum,
        )


def _check_chain(folder: Path, header: RecordingHeader, table: np.ndarray, tokens: np.ndarray | None) -> bytes:
    """The last checksum, after comparing all of them and the range of all offsets."""
    checksum = header.chain_start()
    for step in range(len(table)):
        stored = table[step, -1:].tobytes()
        checksum = next_checksum(checksum, table[step, :-1], None if tokens is None else tokens[step])
        if checksum != stored:
            raise UserError(
                f"{folder}: altered: step {step} does not match its checksum; the {step} steps before it are good"
            )
    # A foreign writer can chain correctly and still point beyond the data.
    too_far = np.flatnonzero((table[:, :-1] > header.data_tokens - header.sequence_length - 1).any(axis=1))
    if len(too_far):
        raise UserError(f"{folder}: step {too_far[0]} points beyond the {header.data_tokens} tokens of the data")
    return checksum
