"""Files that are complete or absent: written aside, flushed to disk, then renamed."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import weakref
from collections.abc import Iterator
from io import BufferedReader, FileIO
from pathlib import Path
from typing import IO, Any, cast

from errors import BusyError, UserError, on_disk, warn


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries, so that a rename in it outlives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def aside(folder: Path) -> Iterator[Path]:
    """A hidden folder beside ``folder`` for what is to become it, of this process alone. It goes at the end.

    Raises ``BusyError`` where another process has it, ``UserError`` where it cannot be made.
    """
    hidden = folder.with_name(f".{folder.name}.partial")
    busy = f"{folder}: another process is writing it; wait for its end"
    try:
        hidden.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(hidden, os.O_RDONLY)
        except FileNotFoundError:  # another process has just removed it
            raise BusyError(busy) from None
    except OSError as error:
        if isinstance(error, FileExistsError) and not os.path.lexists(hidden):  # removed between mkdir's two looks
            raise BusyError(busy) from None
        raise UserError(f"{folder}: cannot be written ({error.strerror})") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            taken = not os.path.samestat(os.fstat(descriptor), os.stat(hidden))
        except (BlockingIOError, FileNotFoundError):
            taken = True
        except OSError:  # a file system without locks
            taken = False
        if taken:
            raise BusyError(busy)
        for left in hidden.iterdir():
            if left.is_dir():
                shutil.rmtree(left)
            else:
                left.unlink()
        try:
            yield hidden
        finally:
            shutil.rmtree(hidden, ignore_errors=True)
    finally:
        os.close(descriptor)


def lock(path: Path, mode: str, busy: str) -> FileIO:
    """``path``, opened unbuffered in ``mode``, which no other process has while this one has it open; a kill releases it.

    ``mode`` is one that writes, as NFS locks no other. Raises ``BusyError(busy)`` where another process has it, or another file
    went in its place meanwhile, and ``OSError`` where it cannot be opened. A file system without locks is a warning.
    """
    file: Any = open(path, mode, buffering=0)  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
            raise FileNotFoundError
    except (BlockingIOError, PermissionError, FileNotFoundError):
        file.close()
        raise BusyError(busy) from None
    except OSError as error:
        what = "nothing keeps a second process from writing it at the same time"
        warn(f"{path} cannot be locked ({error.strerror}): {what}")
    return cast(FileIO, file)


def check_in_place(file: IO[bytes], path: Path) -> None:
    """Raise ``UserError`` where the open ``file`` is not at ``path`` any more."""
    with contextlib.suppress(OSError):
        if os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return
    what = f"somebody has removed, moved or replaced it, or {path.name} in it, while it was in use"
    raise UserError(f"{path.parent}: {what}")


def check_writable(path: Path) -> None:
    """Raise ``UserError`` for a file that cannot be rewritten, even if appending is allowed."""
    with on_disk(path, "be written"):
        open(path, "r+b").close()


def write_all(folder: Path, contents: dict[str, bytes]) -> None:
    """Replace files of ``folder``, each in one step and the first only when all are on the disk: a full disk changes none of them.

    An error leaves no temporary file.
    """
    asides = {folder / f"{name}.tmp": folder / name for name in contents}
    try:
        for aside, content in zip(asides, contents.values(), strict=True):
            with open(aside, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        for aside, path in asides.items():
            os.replace(aside, path)
    except BaseException:
        for aside in asides:
            aside.unlink(missing_ok=True)
        raise
    sync_folder(folder)


def write_bytes(path: Path, content: bytes) -> None:
    """Replace ``path`` by ``content`` in one step; on an error the old file stays and no temporary file is left."""
    write_all(path.parent, {path.name: content})


def write_text(path: Path, content: str) -> None:
    write_bytes(path, content.encode())


def json_text(content: Any) -> str:
    return json.dumps(content, indent=2) + "\n"


def write_json(path: Path, content: Any) -> None:
    write_text(path, json_text(content))


class InUse:
    """A file that a run reads all the time. Raises ``OSError`` for anything but a file.

    It is held by descriptor: another file that was put in its place changes nothing for who has opened this one. And it is not mapped
    into memory: one that was cut short would end the process with SIGBUS.
    """

    def __init__(self, path: Path):
        self.path = path
        with open_file(path) as file:
            self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)
        self._at_first = self._size_and_time()

    @property
    def size(self) -> int:
        return self._at_first[0]

    def _size_and_time(self) -> tuple[int, int]:
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns

    def read(self, start: int, size: int) -> bytes:
        """So many bytes from ``start`` on. Raises ``UserError`` where they are not there any more."""
        parts, left = [], size
        while left:  # the system gives at most 2 GiB at once
            with on_disk(self.path, "be read"):
                part = os.pread(self._descriptor, left, start + size - left)
            if not part:
                raise UserError(f"{self.path}: it was cut short while it was read")
            parts.append(part)
            left -= len(part)
        return b"".join(parts)

    def blocks(self) -> Iterator[bytes]:
        for start in range(0, self.size, 1 << 22):
            yield self.read(start, min(1 << 22, self.size - start))

    def changed(self) -> bool:
        return self._size_and_time() != self._at_first

    def check(self) -> None:
        """Raise ``UserError`` once it has ``changed``."""
        if self.changed():
            raise UserError(f"{self.path}: it was written to while the run read it")


def open_file(path: Path) -> BufferedReader:
    """Open a file for reading. Raises ``OSError`` for anything but a file: a FIFO would block forever."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a file", str(path))
    return open(path, "rb")


def parse_json(content: bytes) -> Any:
    """The value of a JSON document. Raises ``ValueError`` for other text, or too deep nesting."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("nested too deep") from None


def read_json(path: Path) -> Any:
    """``parse_json`` of a file. Raises ``OSError`` and ``ValueError``."""
    with open_file(path) as file:
        return parse_json(file.read())


def sha256_file(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes, read in blocks."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def without_folders(text: str) -> str:
    """``text`` with absolute paths cut down to their last part."""
    return re.sub(r"(?<![\w.])/(?:[^/\s=,'\"]+/)+", "", text)
