"""Files that are never half there: written aside, flushed to disk, then renamed."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries, so that a rename in it outlives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: Path, content: bytes) -> None:
    """Replace ``path`` by ``content`` in one step; on any error the old file stays and nothing is left beside it."""
    aside = path.with_name(path.name + ".tmp")
    try:
        with open(aside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_text(path: Path, content: str) -> None:
    """As ``write_bytes``, UTF-8."""
    write_bytes(path, content.encode())


def write_json(path: Path, content: Any) -> None:
    """As ``write_text``, two-space indents and a closing newline."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def sha256_file(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes, read in blocks."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def without_folders(text: str) -> str:
    """``text`` with absolute paths cut down to their last part."""
    return re.sub(r"(?<![\w.])/(?:[^/\s=,'\"]+/)+", "", text)
