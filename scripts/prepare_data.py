"""Makes a data set: ``python scripts/prepare_data.py openwebtext|text|stdlib``; each prints its options with --help."""

import argparse
import re
import signal
import time
from pathlib import Path
from typing import NoReturn

import _root  # noqa: F401

from errors import OneLineParser, UserError, exit_on_user_error, invalid, trainer_packages

with trainer_packages():
    from data.openwebtext import prepare_openwebtext
    from data.stdlib import prepare_stdlib
    from data.text import Prepared, prepare_text


def parser() -> argparse.ArgumentParser:
    top = OneLineParser(description="Make a data set of tokens for training.")
    kinds = top.add_subparsers(dest="kind", required=True, metavar="openwebtext|text|stdlib")
    common = OneLineParser(add_help=False)
    common.add_argument("--name", help="name (default: openwebtext, stdlib, or the source's name)")
    common.add_argument("--out", type=Path, default=Path("data/tokens"), help="of data sets (default: %(default)s)")
    common.add_argument("--force", action="store_true", help="replace a data set of that name")

    text = kinds.add_parser("text", parents=[common], help="any text: a file, an .xz file or a folder of them")
    text.description = "Documents end at a line holding only <|endoftext|> and at the end of a file."
    text.add_argument("source", type=Path, help="file, .xz file or folder")
    text.add_argument("--val", type=Path, default=None, help="held-out text, of the same kinds")
    held_out = "without --val: every 1/X-th document is held out (default: 0.005)"
    text.add_argument("--val-fraction", type=float, metavar="X", help=held_out)
    text.add_argument("--vocabulary", choices=("gpt2", "bytes"), default="gpt2", help="default: %(default)s")

    web = kinds.add_parser("openwebtext", parents=[common], help="OpenWebText, nanoGPT's split (54 GB on disk)")
    web.add_argument("--source", type=Path, default=None, help="folder of parquet files, instead of a download")

    kinds.add_parser("stdlib", parents=[common], help="Python's own library as bytes: the default, no download")
    return top


def prepare(arguments: argparse.Namespace, folder: Path) -> Prepared:
    if arguments.kind == "text":
        options = {key: getattr(arguments, key) for key in ("vocabulary", "val", "val_fraction", "force")}
        return prepare_text(arguments.source, folder, **options)
    if arguments.kind == "openwebtext":
        return prepare_openwebtext(folder, source=arguments.source, force=arguments.force)
    return prepare_stdlib(folder, force=arguments.force)


def own_name(source: Path) -> str:
    """Of a folder all of its name; of a file without its last suffix, and .xz behind that."""
    source = source.resolve()
    if source.is_dir():
        return source.name
    packed = source.suffix.lower() == ".xz"
    return Path(source.stem).stem if packed else source.stem


def _interrupted(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    arguments = parser().parse_args(argv)
    name = arguments.name
    if name is None:
        name = own_name(arguments.source) if arguments.kind == "text" else arguments.kind
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
        allowed = "letters, digits, '.', '_' and '-'"
        if arguments.name is None:
            raise UserError(f"{arguments.source}: {name!r} cannot name a data set: give one with --name: {allowed}")
        raise invalid("--name", name, allowed)
    folder = arguments.out / name
    # As an exception, so that unfinished files are removed.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupted)
    started = time.monotonic()
    try:
        prepared = prepare(arguments, folder)
    except OSError as error:
        raise UserError(f"{folder}: {error}") from error
    seconds = time.monotonic() - started
    print(f"{folder}: ready after {seconds:.1f} s")
    for split, header in prepared.headers.items():
        tokens = f"{header.count:,} tokens ({header.vocabulary}, {header.dtype})"
        print(f"  {split:5} {tokens} of {prepared.documents[split]:,} documents, sha256 {header.sha256[:16]}")


if __name__ == "__main__":
    main()
