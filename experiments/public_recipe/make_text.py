"""One text of the Python sources in wheels: python experiments/public_recipe/make_text.py build/*.whl --out build/python.txt

Documents are files ending in .py, each once however many packages hold it, ordered by the SHA-256 of their bytes: the same text from the
same wheels everywhere. ``scripts/prepare_data.py text`` reads it.
"""

from __future__ import annotations

import argparse
import hashlib
import zipfile
from pathlib import Path

SEPARATOR = b"<|endoftext|>"
LEAST = 200
"""Bytes: shorter files are mostly empty packages."""


def documents(wheels: list[Path]) -> dict[str, bytes]:
    """Sources by their SHA-256."""
    found: dict[str, bytes] = {}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                content = archive.read(name) if name.endswith(".py") else b""
                if len(content) >= LEAST and SEPARATOR not in content and is_text(content):
                    found[hashlib.sha256(content).hexdigest()] = content
    return found


def is_text(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    try:
        found = documents(arguments.wheels)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
    except (OSError, zipfile.BadZipFile) as error:
        parser.exit(2, f"error: {error}\n")
    text = b"".join(found[key].rstrip(b"\n") + b"\n" + SEPARATOR + b"\n" for key in sorted(found))
    arguments.out.write_bytes(text)
    print(f"{arguments.out}: {len(found):,} files, {len(text):,} bytes, sha256 {hashlib.sha256(text).hexdigest()}")


if __name__ == "__main__":
    main()
