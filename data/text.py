"""Any text to token files: a file, an .xz file, or a folder of them, read as a stream of documents.

The rule. A line holding only ``<|endoftext|>`` ends a document, and so does the end of a file. The line end just before
either belongs to neither document: ``a\\n<|endoftext|>\\nb\\n`` is the documents ``a`` and ``b``. A byte order mark at
the start of a file is left out, and nothing else stripped. Documents of no bytes are left out. Every document gives its
tokens, then the vocabulary's separator. A ``<|endoftext|>`` that is not alone on its line is text, and so is a byte order
mark further on; a warning counts them.
Text is UTF-8 for GPT-2's vocabulary, anything for byte tokens; a file with byte 0 is no text.
"""

import io
import lzma
import math
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from tqdm import tqdm

from data.token_files import TokenHeader, TokenWriter, new_dataset
from data.tokenizers import Tokenizer, make_tokenizer
from errors import UserError, invalid, warn

SEPARATOR_LINE = b"<|endoftext|>"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
VAL_FRACTION = 0.005
PIECE_BYTES = 1 << 20
"""A longer document is encoded in pieces."""
BATCH_BYTES = 1 << 23
"""Text that is encoded at once, its pieces side by side in threads."""
PACKED_BYTES = 1 << 16

PACKED = {
    rb"\x1f\x8b\x08": ("gzip", "zcat"),
    rb"BZh[1-9](1AY&SY|\x17rE8P\x90)": ("bzip2", "bzcat"),
    rb"PK\x03\x04": ("zip", "unzip -p"),
    rb"\x28\xb5\x2f\xfd": ("zstd", "zstdcat"),
    rb"\xfd7zXZ\0": ("xz", "xzcat"),
}
"""How a compressed file begins -> by what it is compressed, and the command that prints what is in it."""


class Piece(NamedTuple):
    text: bytes
    ends_document: bool
    place: str  # file and number of the document, for error messages


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What was written: the header and the number of documents of each split."""

    headers: dict[str, TokenHeader]
    documents: dict[str, int]


def prepare_text(
    source: Path,
    folder: Path,
    *,
    vocabulary: str = "gpt2",
    val: Path | None = None,
    val_fraction: float | None = None,
    force: bool = False,
) -> Prepared:
    """Write the data set ``folder`` from ``source``; held-out text from ``val``, else every (1 / val_fraction)-th document
    (``VAL_FRACTION``).

    Warns on stderr of marks that are text, of byte order marks, and of what is left out of a folder.
    ``UserError``: source missing or empty, text that the vocabulary cannot hold, a data set already there.
    """
    train_files = text_files(source)
    val_files = text_files(val) if val else []
    shared = {path.resolve() for path in train_files} & {path.resolve() for path in val_files}
    if shared:
        raise UserError(f"{min(shared)}: both in the training and in the held-out text")
    if val and val_fraction is not None:
        raise invalid("--val-fraction", val_fraction, f"none beside --val {val}, which is the held-out text")
    if val_fraction is None:
        val_fraction = VAL_FRACTION
    if not 0 < val_fraction < 1:
        raise invalid("--val-fraction", val_fraction, "more than 0 and less than 1")
    tokenizer = make_tokenizer(vocabulary)
    note = f", every {1 / val_fraction:g}-th document held out" if not val else ""
    sources = {"train": source.name + note, "val": (val or source).name + note}
    batches = _batches(source, train_files, val, val_files, val_fraction)
    return write_dataset(folder, tokenizer, sources, batches, force=force)


def write_dataset(
    folder: Path,
    tokenizer: Tokenizer,
    sources: dict[str, str],
    batches: Iterable[tuple[str, Sequence[Piece]]],
    *,
    force: bool = False,
    check: Callable[[dict[str, int]], object] = lambda tokens: None,
) -> Prepared:
    """Write a data set: ``sources`` says for each split what it was made from, ``batches`` brings pieces of a split.

    Nothing is left where ``batches`` raises, or ``check``, which is given the tokens of each split at the end.
    """
    facts = {name: getattr(tokenizer, name) for name in ("dtype", "vocabulary", "vocabulary_size")}
    documents, writers = dict.fromkeys(sources, 0), {}
    with new_dataset(folder, force=force) as staging, ExitStack() as stack:
        for split, made_from in sources.items():
            writers[split] = stack.enter_context(TokenWriter(staging, split, **facts, source=made_from))
        for split, pieces in batches:
            writers[split].write(encode(tokenizer, pieces))
            documents[split] += sum(piece.ends_document for piece in pieces)
        check({split: writer.count for split, writer in writers.items()})
    return Prepared(headers={split: writer.header for split, writer in writers.items()}, documents=documents)


def _check_both_splits(documents: dict[str, int], source: Path, val: Path | None) -> None:
    training = documents["train"]
    if training == 0:
        raise UserError(f"{source}: holds no document for training")
    if documents["val"]:
        return
    if val:
        raise UserError(f"{val}: holds no document")
    if training == 1:
        raise UserError(
            f"one document cannot be split: put lines of {SEPARATOR_LINE.decode()} between, name --val, or give a folder of files"
        )
    enough = math.ceil(1000 / training) / 1000
    few = f"none of {training} documents fell to the held-out split"
    raise UserError(f"{few}: raise --val-fraction to {enough} or more, or give a file or folder with --val")


def text_files(source: Path) -> list[Path]:
    """The file itself, or all files under a folder, sorted by path, but hidden ones and what is in linked folders, of which it warns.
    ``UserError`` when there is none.
    """
    if not source.exists():
        raise UserError(f"{source}: no such file or folder")
    if not source.is_dir():
        return [source]
    kinds = {path.relative_to(source): _kind(path, source) for path in source.rglob("*")}
    names = sorted(path for path, kind in kinds.items() if kind == "file")
    # A file counts once, by its own name before that of a link: twice, it could be in both splits.
    own_first = sorted(names, key=lambda path: (source / path).is_symlink())
    chosen: dict[Path, Path] = {}
    for path in own_first:
        chosen.setdefault((source / path).resolve(), path)
    count = Counter(kind for kind in kinds.values() if kind not in ("file", "folder"))
    count["link(s) to a file that is read already"] = len(names) - len(chosen)
    left_out = ", ".join(f"{number} {kind}" for kind, number in count.items() if number)
    if not chosen:
        raise UserError(f"{source}: a folder without files{left_out and f', left out: {left_out}'}")
    if left_out:
        warn(f"{source}: left out: {left_out}")
    return [source / path for path in sorted(chosen.values())]


def _kind(path: Path, source: Path) -> str:
    if path.is_dir() and not path.is_symlink():
        return "folder"
    if any(part.startswith(".") for part in path.relative_to(source).parts):
        return "hidden file(s)"
    if path.is_dir():
        return "linked folder(s)"
    if not path.exists():
        return "broken link(s)"
    return "file" if path.is_file() else "device(s) or pipe(s)"


def _batches(
    source: Path, train_files: list[Path], val: Path | None, val_files: list[Path], val_fraction: float
) -> Iterator[tuple[str, list[Piece]]]:
    """Batches of about ``BATCH_BYTES`` in the order of the text; at its end it warns of what is odd, and raises ``UserError`` for an
    empty split."""
    documents, sizes = {"train": 0, "val": 0}, {"train": 0, "val": 0}
    held: dict[str, list[Piece]] = {"train": [], "val": []}
    odd: dict[Path, Counter[str]] = {}
    files = ((train_files, "train" if val_files else None), (val_files, "val"))
    pieces = ((piece, forced) for paths, forced in files for piece in _pieces(paths, odd))
    # disable=None: no bar where stderr is not a terminal.
    for piece, forced_split in tqdm(pieces, unit=" documents", unit_scale=True, disable=None):
        # With a fraction f, document i is held out when the multiples of 1 / f step over it.
        number = documents["train"] + documents["val"]
        held_out = int((number + 1) * val_fraction) > int(number * val_fraction)
        split = forced_split or ("val" if held_out else "train")
        held[split].append(piece)
        sizes[split] += len(piece.text)
        documents[split] += piece.ends_document
        if sizes[split] >= BATCH_BYTES:
            yield split, held[split]
            held[split], sizes[split] = [], 0
    yield from ((split, rest) for split, rest in held.items() if rest)
    for what, count in sum(odd.values(), Counter[str]()).items():
        first, *more = [path for path, found in odd.items() if found[what]]
        where = f"{first} and {len(more)} more" if more else first
        warn(f"{where}: {count} {what}")
    _check_both_splits(documents, source, val)


def _pieces(paths: list[Path], odd: dict[Path, Counter[str]]) -> Iterator[Piece]:
    """All documents of the files. ``odd`` is given the counts of each file that has some."""
    for path in paths:
        document, found = 1, Counter[str]()
        with open(path, "rb") as raw:
            is_xz = path.suffix.lower() == ".xz"
            _check_not_packed(path, raw, is_xz)
            stream = io.BufferedReader(_XzStreams(raw), PACKED_BYTES) if is_xz else raw
            try:
                for text, ends_document in split_documents(stream, odd=found):
                    place = f"{path}: document {document}"
                    # In UTF-8 it is a character like any other: archives would pass for text.
                    if b"\0" in text:
                        what = "byte 0, so an archive, UTF-16 or other data that is no text"
                        raise UserError(f"{place}: {what}: unpack it, or convert it by iconv -f UTF-16 -t UTF-8")
                    # No piece ends inside a mark, which holds no white space.
                    if marks := text.count(SEPARATOR_LINE):
                        found[f"{SEPARATOR_LINE.decode()} not alone on a line: they end no document"] += marks
                    if marks := text.count(BYTE_ORDER_MARK):  # as of files that were joined
                        found["byte order mark(s) within the text, which stay"] += marks
                    yield Piece(text, ends_document, place)
                    document += ends_document
            except (lzma.LZMAError, EOFError) as error:
                raise UserError(f"{path}: not a whole .xz file ({error})") from error
        if found:
            odd[path] = found


def _check_not_packed(path: Path, raw: io.BufferedReader, is_xz: bool) -> None:
    start = raw.peek(16)  # a pipe cannot seek
    for magic, (name, command) in PACKED.items():
        if re.match(magic, start) and not (name == "xz" and is_xz):
            pipe = f"{command} {shlex.quote(str(path))} | python scripts/prepare_data.py text /dev/stdin --name NAME"
            raise UserError(f"{path}: compressed by {name}: unpack it, or pipe it as the source: {pipe}")


class _XzStreams(io.RawIOBase):
    """What all streams of an .xz file hold, zeros between them left out; ``LZMAError`` for anything else behind one, where
    ``lzma.open`` would end as if the file did.
    """

    def __init__(self, file: IO[bytes]):
        self._file, self._stream = file, lzma.LZMADecompressor()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = b""
        while not data:
            packed = b""
            if self._stream.eof:
                packed = self._stream.unused_data.lstrip(b"\0")
                while not packed:
                    if not (block := self._file.read(PACKED_BYTES)):
                        return 0
                    packed = block.lstrip(b"\0")
                self._stream = lzma.LZMADecompressor()
            elif self._stream.needs_input and not (packed := self._file.read(PACKED_BYTES)):
                raise EOFError("it ends within a stream")
            data = self._stream.decompress(packed, len(buffer))
        buffer[: len(data)] = data
        return len(data)


def split_documents(
    stream: IO[bytes], piece_bytes: int = PIECE_BYTES, odd: Counter[str] | None = None
) -> Iterator[tuple[bytes, bool]]:
    """``(text, ends_document)`` in order; a document longer than ``piece_bytes`` comes in pieces that encode as the whole.
    ``odd`` counts a byte order mark.
    """
    held = bytearray()
    begun = False  # a piece of the document was already given
    at_line_start = at_file_start = True
    # The limit keeps a file of one endless line from being read whole; a separator line is shorter.
    while line := stream.readline(max(piece_bytes, 64)):
        if at_file_start and line.startswith(BYTE_ORDER_MARK):
            line = line.removeprefix(BYTE_ORDER_MARK)
            if odd is not None:
                odd["file(s) with a byte order mark, which is left out"] += 1
        at_file_start = False
        if at_line_start and line.rstrip(b"\r\n") == SEPARATOR_LINE:
            if (text := _without_line_end(held)) or begun:
                yield text, True
            held.clear()
            begun = False
        else:
            held += line
            # A blank line opens no place for a cut, and the search behind many of them is long.
            if len(held) >= piece_bytes and not line.decode(errors="replace").isspace() and (cut := _last_cut(held)):
                yield bytes(held[:cut]), False
                del held[:cut]
                begun = True
        at_line_start = line.endswith(b"\n")
    if (text := _without_line_end(held)) or begun:
        yield text, True


def _without_line_end(text: bytearray) -> bytes:
    for line_end in (b"\r\n", b"\n"):
        if text.endswith(line_end):
            return bytes(text[: -len(line_end)])
    return bytes(text)


def _last_cut(text: bytearray) -> int:
    """The last place where GPT-2's tokens surely have a boundary: before a blank or line feed that follows a non-white
    character. No alternative of GPT-2's pattern runs from a non-white character into a white one, and its look-ahead acts
    on white space only, so both sides encode as they do together. 0 when the last 64 KiB hold no such place.
    """
    first = max(1, len(text) - (1 << 16))
    at = len(text)
    while (at := max(text.rfind(b"\n", first, at), text.rfind(b" ", first, at))) > 0:
        before = text[max(0, at - 4) : at].decode(errors="ignore")
        if before and not before[-1].isspace():
            return at
    return 0


def encode(tokenizer: Tokenizer, pieces: Sequence[Piece]) -> np.ndarray:
    """Tokens of the pieces, 1-D, a separator behind each document; ``UserError`` with the place of text that cannot be represented."""
    try:
        encoded = tokenizer.encode([piece.text for piece in pieces])
    except ValueError:
        for piece in pieces:
            try:
                tokenizer.encode([piece.text])
            except ValueError as error:
                raise UserError(f"{piece.place}: {error}") from None
        raise
    separator = np.array([tokenizer.separator], tokenizer.dtype)
    ends = [separator if piece.ends_document else separator[:0] for piece in pieces]
    return np.concatenate([part for pair in zip(encoded, ends, strict=True) for part in pair])
