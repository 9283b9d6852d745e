"""Recordings of batches: which sequences a run saw, in which order, so that another run can see exactly the same.

``replay_batches/README.md`` defines the format byte by byte. ``Recorder`` appends one row an optimizer step, ``Recording`` reads
and checks. Nothing here knows how batches are drawn or split over processes: that is ``data/batches.py``.

Shapes: G global batch (sequences an optimizer step).
"""

import contextlib
import hashlib
import json
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any, NoReturn, get_args, get_type_hints

import numpy as np

import files
from errors import UserError, check_size, on_disk

FORMAT_VERSION = 1
HEAD_BYTES = 128
CHECKSUM_BYTES = 8
HEADER, OFFSETS, RUN_ID = "header.json", "offsets.npy", "run_id"
_OWN_FILES = {HEADER, OFFSETS, RUN_ID, f"{HEADER}.tmp", f"{RUN_ID}.tmp"}


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
    # Of recordings that carried their tokens, which commit 253c621 reads.
    carries_tokens: bool = False
    validation_windows: int = 0
    validation_windows_sha256: str = ""

    def chain_start(self) -> bytes:
        """8 bytes: the checksum that stands before the first step's."""
        return checksum_of_facts(asdict(self))


def checksum_of_facts(facts: dict[str, Any]) -> bytes:
    """First 8 bytes of the SHA-256 of ``facts`` as canonical JSON: sorted keys, no spaces, non-ASCII characters escaped."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).digest()[:CHECKSUM_BYTES]


def next_checksum(previous: bytes, offsets_G: np.ndarray) -> bytes:
    """8 bytes: first bytes of SHA-256(previous || offsets as little-endian uint64)."""
    return hashlib.sha256(previous + stored(offsets_G)).digest()[:CHECKSUM_BYTES]


def stored(offsets_G: np.ndarray) -> bytes:
    return np.ascontiguousarray(offsets_G, dtype="<u8").tobytes()


def npy_head(rows: int, numbers: int) -> bytes:
    """The first 128 bytes of a NumPy file (format 1.0) of uint64 [rows, numbers], padded to one size whatever the number of rows."""
    text = f"{{'descr': '<u8', 'fortran_order': False, 'shape': {(rows, numbers)}, }}"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", HEAD_BYTES - 10) + text.ljust(HEAD_BYTES - 11).encode() + b"\n"


class Recorder:
    """Writes a recording, one row an optimizer step; build it with ``create`` or ``resume``.

    A row is written first and counted second, so that it is there whole or not at all. From the first moment to ``close`` the file of
    offsets is locked: a second run cannot begin or go on with the recording of one that is alive.
    """

    def __init__(self, folder: Path, header: RecordingHeader, steps: int, checksum: bytes, file: FileIO):
        self.folder, self.header, self.steps, self.checksum = folder, header, steps, checksum
        self._numbers = header.global_batch + 1
        self._file = file
        self._changed = False

    @classmethod
    def create(cls, folder: Path, header: RecordingHeader, run_id: str = "") -> "Recorder":
        """Start an empty recording, of the run ``run_id`` if of any; it appears under its name only when whole, in place of one that a
        killed start of this run left.

        Raises ``UserError`` when the folder holds anything else, when another process records there, or when it cannot be made.
        """
        with contextlib.ExitStack() as on_error:
            with contextlib.ExitStack() as left:
                # Before the look at what is there: whoever begins a recording has this, so none appears after the look.
                hidden = left.enter_context(files.aside(folder))
                begun = os.path.lexists(folder)
                if begun:
                    left.enter_context(_empty_recording(folder, header.source_run))
                aside = hidden / folder.name
                try:
                    aside.mkdir()
                    file = files.lock(aside / OFFSETS, "x+b", _busy(folder))
                    recorder = cls(aside, header, 0, header.chain_start(), file)
                    on_error.callback(recorder.discard)  # Ctrl-C, too
                    if run_id:
                        files.write_text(aside / RUN_ID, f"{run_id}\n")
                    recorder._sync(complete=False)
                    if begun:  # moved, as a kill half-way through a removal would leave what nobody knows
                        os.rename(folder, hidden / "begun")
                    recorder.folder = folder
                    os.rename(aside, folder)
                    files.sync_folder(folder.parent)
                except (OSError, UserError) as error:
                    raise UserError(f"{folder}: cannot record there: {getattr(error, 'strerror', error)}") from None
            on_error.pop_all()
        return recorder

    @classmethod
    def resume(cls, folder: Path, header: RecordingHeader, steps: int, run_id: str = "") -> "Recorder":
        """Go on after ``steps`` rows of a recording with the same header and ``run_id``; later rows, to be done again, are cut.

        Nothing is changed before the first ``append`` or ``close``: what is checked after this may still refuse the resume.
        Raises ``UserError`` when there are fewer rows, when they are damaged, when another run wrote them, or one is writing them.
        """
        written, _, _ = read_header(folder)
        own = asdict(header) | {"run_id": run_id}
        for name, value in (asdict(written) | {"run_id": recorded_by(folder)}).items():
            if value != own[name]:
                differ = f"its {name} is {value!r}, this run's is {own[name]!r}"
                raise UserError(f"{folder}: {differ}: another run's recording (see replay_batches/README.md)")
        files.check_writable(folder / HEADER)
        if not (folder / OFFSETS).is_file():
            raise UserError(f"{folder}: no {OFFSETS} there: damaged (see replay_batches/README.md)")
        with on_disk(folder / OFFSETS, "be written"):
            file = files.lock(folder / OFFSETS, "r+b", _busy(folder))
        with contextlib.ExitStack() as on_error:
            on_error.enter_context(file)
            found = Recording.open(folder, limit=steps)
            if found.steps < steps:
                raise UserError(f"{folder}: holds {found.steps} steps, the run resumes at step {steps}")
            on_error.pop_all()
        return cls(folder, written, steps, found.checksum, file)

    def discard(self) -> None:
        """Remove the recording, unless another is in its place: of a start that is refused after all."""
        with contextlib.suppress(UserError):
            files.check_in_place(self._file, self.folder / OFFSETS)
            _remove(self.folder)
        self._file.close()

    def append(self, offsets_G: np.ndarray) -> None:
        """Add one step: offsets [G]. Raises ``UserError`` when the disk takes no more; the rows before stay valid."""
        checksum = next_checksum(self.checksum, offsets_G)
        try:
            self._cut()
            self._put(self._start(self.steps), stored(offsets_G) + checksum)
            self._put(0, npy_head(self.steps + 1, self._numbers))
        except OSError as error:
            self._refuse(error)
        self.checksum = checksum
        self.steps += 1

    def flush(self) -> None:
        """Bring every row so far to the disk and promise it in the header."""
        self._sync(complete=False)

    def close(self, *, complete: bool = True) -> None:
        """Flush and let go of it; ``complete``: marked as finished."""
        try:
            if complete or self._changed:
                self._sync(complete=complete)
        finally:
            self._file.close()

    def _cut(self) -> None:
        if not self._changed:
            files.check_in_place(self._file, self.folder / OFFSETS)
            # Before any row goes: a kill between the cut and this would leave fewer rows than the header promises.
            _write_header(self.folder, self.header, self.steps, complete=False)
            self._put(0, npy_head(self.steps, self._numbers))
            self._file.truncate(self._start(self.steps))
            self._changed = True

    def _start(self, row: int) -> int:
        return HEAD_BYTES + row * 8 * self._numbers

    def _put(self, position: int, content: bytes) -> None:
        self._file.seek(position)
        while content:
            content = content[self._file.write(content) :]

    def _sync(self, *, complete: bool) -> None:
        try:
            self._cut()
            files.check_in_place(self._file, self.folder / OFFSETS)  # another recording may be there by now
            os.fsync(self._file.fileno())
            _write_header(self.folder, self.header, self.steps, complete=complete)
        except OSError as error:
            self._refuse(error)

    def _refuse(self, error: OSError) -> NoReturn:
        raise UserError(f"{self.folder}: cannot write step {self.steps}: {error.strerror}") from error


def _busy(folder: Path) -> str:
    return f"{folder}: another process is recording there: record under another name, or wait for its end"


@contextlib.contextmanager
def _empty_recording(folder: Path, source_run: str) -> Iterator[None]:
    """Hold what a killed start of the run ``source_run`` left at ``folder``: a recording without a step and nothing beside it.

    Raises ``UserError`` for anything else, and where a process is recording there.
    """
    taken = UserError(f"{folder} exists: record under another name, resume the run that wrote it, or remove it")
    try:
        header, promised, _ = read_header(folder)
    except UserError:
        raise taken from None
    try:
        with files.lock(folder / OFFSETS, "r+b", _busy(folder)):
            _, rows = _open_rows(folder / OFFSETS, header.global_batch + 1, None)
            foreign = {path.name for path in folder.iterdir()} - _OWN_FILES
            if promised or rows or foreign or header.source_run != source_run:
                raise taken
            yield
    except OSError:
        raise taken from None


def recorded_by(folder: Path) -> str:
    """Identity of the run that recorded there; "" if no run made the recording."""
    try:
        with files.open_file(folder / RUN_ID) as file:
            return file.read(100).decode(errors="replace").strip()
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise UserError(f"{folder / RUN_ID}: unreadable: {error.strerror}") from None


def _remove(folder: Path) -> None:
    """Remove a recording: the files that this module makes, and the folder if it holds nothing else."""
    for name in _OWN_FILES:
        (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def _write_header(folder: Path, header: RecordingHeader, steps: int, *, complete: bool) -> None:
    start = header.chain_start().hex()
    files.write_json(folder / HEADER, asdict(header) | {"chain_start": start, "steps": steps, "complete": complete})


def read_header(folder: Path) -> tuple[RecordingHeader, int, bool]:
    """(fixed facts, steps promised, finished?) of a recording's header.json.

    Raises ``UserError`` when there is none, when it is of another format version, or when it was altered.
    """
    path = folder / HEADER
    try:
        content = files.read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{folder}: no header.json there: not a recording (see replay_batches/README.md)") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: unreadable: {error}") from None
    version = content.get("format_version") if isinstance(content, dict) else None
    if version != FORMAT_VERSION:
        raise UserError(f"{path}: format_version {version!r}: this program reads version {FORMAT_VERSION}")
    fixed = get_type_hints(RecordingHeader)
    kinds = fixed | {"chain_start": str, "steps": int, "complete": bool}
    if odd := set(content) ^ set(kinds):
        raise UserError(f"{path}: altered: missing or unknown {', '.join(sorted(odd))}")
    # Before the chain: a foreign writer can chain other types correctly.
    if wrong := [name for name, kind in kinds.items() if type(content[name]) not in (get_args(kind) or (kind,))]:
        raise UserError(f"{path}: altered: {wrong[0]} is of another type")
    header = RecordingHeader(**{name: content[name] for name in fixed})
    if header.chain_start().hex() != content["chain_start"]:
        raise UserError(f"{path}: altered: its fixed fields do not give its chain_start")
    for name, least in (("steps", 0), ("data_tokens", 1), ("sequence_length", 1), ("global_batch", 1)):
        check_size(f"{path}: {name}", content[name], least)
    if header.carries_tokens:
        raise UserError(f"{path}: it carries its tokens: commit 253c621 reads such a recording")
    return header, content["steps"], content["complete"]


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A recording opened for reading, checked as a whole; build it with ``open``. checksum: of the last step."""

    folder: Path
    header: RecordingHeader
    steps: int
    complete: bool
    checksum: bytes
    file: files.InUse

    def check(self) -> None:
        """Raise ``UserError`` where the rows are not those any more that were opened. A run may go on with it meanwhile."""
        if self.file.changed():
            with contextlib.suppress(UserError):
                if _check_chain(self.folder, self.header, self.file, self.steps) == self.checksum:
                    return
            self.file.check()

    def row(self, step: int) -> np.ndarray:
        """uint64 [G]: where each sequence of a step begins in train.bin. Raises ``UserError`` where the file was cut short meanwhile."""
        return _row(self.file, self.header, step)[:-1]

    @classmethod
    def open(cls, folder: Path, limit: int | None = None) -> "Recording":
        """Open and check every byte, or (``limit``) the first so many steps. After a kill there are the steps it had finished.

        Raises ``UserError`` when there is no recording, when it is truncated, or when anything in it was altered (naming the first
        bad step).
        """
        header, promised, complete = read_header(folder)
        file, rows = _open_rows(folder / OFFSETS, header.global_batch + 1, promised if complete else None)
        if rows < promised:
            raise UserError(f"{folder}: truncated: {rows} of {promised} steps are there")
        steps = rows if limit is None else min(rows, limit)
        checksum = _check_chain(folder, header, file, steps)
        return cls(folder=folder, header=header, steps=steps, complete=complete, checksum=checksum, file=file)


def _open_rows(path: Path, numbers: int, exactly: int | None) -> tuple[files.InUse, int]:
    """A file of offsets and its number of rows: ``exactly`` so many and not a byte more, or (None) as many as are there whole."""
    with on_disk(path, "be read"):
        file = files.InUse(path)
    size = file.size
    if size < HEAD_BYTES:
        raise UserError(f"{path}: truncated: {size} bytes")
    head = file.read(0, HEAD_BYTES)
    counted = re.search(rb"'shape': \((\d+),", head)
    rows, width = int(counted[1]) if counted else 0, 8 * numbers
    if head != npy_head(rows, numbers):
        raise UserError(f"{path}: altered: its first {HEAD_BYTES} bytes do not fit header.json")
    if exactly is None:
        rows = min(rows, (size - HEAD_BYTES) // width)
    elif size < HEAD_BYTES + exactly * width:
        raise UserError(f"{path}: truncated: {(size - HEAD_BYTES) // width} of {exactly} rows are there")
    elif rows != exactly or size != HEAD_BYTES + exactly * width:
        raise UserError(f"{path}: altered: {rows} rows in {size} bytes, header.json promises {exactly} rows")
    return file, rows


def _row(file: files.InUse, header: RecordingHeader, step: int) -> np.ndarray:
    """uint64 [G + 1]: offsets and checksum."""
    width = 8 * (header.global_batch + 1)
    return np.frombuffer(file.read(HEAD_BYTES + step * width, width), dtype="<u8")


def _check_chain(folder: Path, header: RecordingHeader, file: files.InUse, steps: int) -> bytes:
    """The last checksum, after comparing all of them and the range of all offsets."""
    checksum, last_start = header.chain_start(), header.data_tokens - header.sequence_length - 1
    for step in range(steps):
        row = _row(file, header, step)
        checksum = next_checksum(checksum, row[:-1])
        if checksum != row[-1:].tobytes():
            raise UserError(f"{folder}: altered: step {step} does not match its checksum; those before it do")
        if (row[:-1] > last_start).any():  # a foreign writer can chain correctly all the same
            raise UserError(f"{folder}: step {step} points beyond the {header.data_tokens} tokens of the data")
    return checksum
