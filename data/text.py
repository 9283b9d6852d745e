"""Any text to token files: a file, an .xz file, or a folder of them, read as a stream of documents.

The rule. A line holding only ``<|endoftext|>`` ends a document, and so does the end of a file. The line end just before
either belongs to neither document: ``a\\n<|endoftext|>\\nb\\n`` is the documents ``a`` and ``b``. Nothing else is
stripped. Documents of no bytes are left out. Every document gives its tokens, then the vocabulary's separator.
Text is UTF-8 for GPT-2's vocabulary, anything without byte 0 for byte tokens.
"""

from __future__ import annotations

import lzma
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from tqdm import tqdm

from data.parallel import ordered_map, worker_count
from data.token_files import TokenHeader, TokenWriter, new_dataset
from data.tokenizers import Tokenizer, make_tokenizer
from errors import UserError, invalid

SEPARATOR_LINE = b"<|endoftext|>"
BATCH_BYTES = 1 << 20
BATCH_PIECES = 4096


class Piece(NamedTuple):
    """A document, or a part of a long one."""

    text: bytes
    ends_document: bool
    place: str  # file and number of the document, for error messages


class Batch(NamedTuple):
    """What a worker encodes at once."""

    split: str
    pieces: list[Piece]


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
    val_fraction: float = 0.005,
    workers: int = 0,
    force: bool = False,
) -> Prepared:
    """Write the data set ``folder`` from ``source``; held-out text from ``val``, else every (1 / val_fraction)-th document.

    ``UserError``: source missing or empty, text that the vocabulary cannot hold, a data set already there.
    """
    workers = worker_count(workers)
    train_files = text_files(source)
    val_files = text_files(val) if val else []
    shared = {path.resolve() for path in train_files} & {path.resolve() for path in val_files}
    if shared:
        raise UserError(f"{min(shared)}: both in the training and in the held-out text")
    if not val and not 0 < val_fraction < 1:
        raise invalid("val_fraction", val_fraction, "more than 0 and less than 1")
    tokenizer = make_tokenizer(vocabulary)
    documents = {"train": 0, "val": 0}
    note = f", every {1 / val_fraction:g}-th document held out" if not val else ""
    sources = {"train": source.name + note, "val": (val or source).name + note}
    with new_dataset(folder, force=force) as staging:
        with ExitStack() as stack:
            writers = {
                split: stack.enter_context(writer(staging, split, tokenizer, sources[split])) for split in sources
            }
            size = sum(path.stat().st_size for path in train_files + val_files)
            # disable=None: no bar where stderr is not a terminal.
            bar = stack.enter_context(tqdm(total=size, unit="B", unit_scale=True, desc="tokens", disable=None))
            batches = _batches(train_files, val_files, val_fraction, documents, bar.update)
            encoded = ordered_map(partial(BatchEncoder, vocabulary), batches, workers=workers)
            for split, tokens in stack.enter_context(closing(encoded)):
                writers[split].write(tokens)
            _check_both_splits(documents, val)
        headers = {split: w.header for split, w in writers.items() if w.header}
    return Prepared(headers=headers, documents=documents)


def writer(folder: Path, split: str, tokenizer: Tokenizer, source: str) -> TokenWriter:
    """A token file for what ``tokenizer`` gives."""
    return TokenWriter(
        folder,
        split,
        dtype=tokenizer.dtype,
        vocabulary=tokenizer.vocabulary,
        vocabulary_size=tokenizer.vocabulary_size,
        source=source,
    )


def _check_both_splits(documents: dict[str, int], val: Path | None) -> None:
    if documents["train"] == 0:
        raise UserError("the source holds no document for training")
    if documents["val"] == 0 and val:
        raise UserError(f"{val}: holds no document")
    if documents["val"] == 0:
        raise UserError(
            f"none of {documents['train']} documents fell to the held-out split: raise --val-fraction or name a text with --val"
        )


def text_files(source: Path) -> list[Path]:
    """The file itself, or all files under a folder but hidden ones, sorted by path; ``UserError`` when there is none."""
    if not source.exists():
        raise UserError(f"{source}: no such file or folder")
    if not source.is_dir():
        return [source]
    inside = [path.relative_to(source) for path in source.rglob("*") if path.is_file()]
    visible = sorted(path for path in inside if not any(part.startswith(".") for part in path.parts))
    if not visible:
        raise UserError(f"{source}: a folder without files")
    return [source / path for path in visible]


def _batches(
    train_files: list[Path],
    val_files: list[Path],
    val_fraction: float,
    documents: dict[str, int],
    advance: Callable[[int], object],
) -> Iterator[Batch]:
    """Batches of about ``BATCH_BYTES`` in the order of the text; counts ``documents`` of each split as it goes."""
    held: dict[str, list[Piece]] = {"train": [], "val": []}
    sizes = {"train": 0, "val": 0}
    for paths, forced_split in ((train_files, "train" if val_files else None), (val_files, "val")):
        for piece in _pieces(paths, advance):
            # With a fraction f, document i is held out when the multiples of 1 / f step over it.
            number = documents["train"] + documents["val"]
            held_out = int((number + 1) * val_fraction) > int(number * val_fraction)
            split = forced_split or ("val" if held_out else "train")
            held[split].append(piece)
            sizes[split] += len(piece.text)
            documents[split] += piece.ends_document
            if sizes[split] >= BATCH_BYTES or len(held[split]) >= BATCH_PIECES:
                yield Batch(split, held[split])
                held[split], sizes[split] = [], 0
    for split, pieces in held.items():
        if pieces:
            yield Batch(split, pieces)


def _pieces(paths: list[Path], advance: Callable[[int], object]) -> Iterator[Piece]:
    """All documents of the files; ``advance`` is told how many bytes of the files (packed, for .xz) were read."""
    for path in paths:
        document = 1
        with ExitStack() as stack:
            raw = stack.enter_context(open(path, "rb"))
            stream = stack.enter_context(lzma.open(raw)) if path.suffix == ".xz" else raw
            told = 0
            # A pipe has no position; nor has it a size to show progress against.
            position = raw.tell if raw.seekable() else lambda: 0
            try:
                for text, ends_document in split_documents(stream):
                    yield Piece(text, ends_document, f"{path}: document {document}")
                    document += ends_document
                    if position() > told:
                        advance(position() - told)
                        told = position()
            except (lzma.LZMAError, EOFError) as error:
                raise UserError(f"{path}: not a whole .xz file ({error})") from error


def split_documents(stream: IO[bytes], piece_bytes: int = BATCH_BYTES) -> Iterator[tuple[bytes, bool]]:
    """``(text, ends_document)`` in order; a document longer than ``piece_bytes`` comes in pieces that encode as the whole."""
    held = bytearray()
    begun = False  # a piece of the document was already given
    at_line_start = True
    # The limit keeps a file of one endless line from being read whole; a separator line is shorter.
    while line := stream.readline(max(piece_bytes, 64)):
        if at_line_start and line.rstrip(b"\r\n") == SEPARATOR_LINE:
            if (text := _without_line_end(held)) or begun:
                yield text, True
            held.clear()
            begun = False
        else:
            held += line
            if len(held) >= piece_bytes and (cut := _last_cut(held)):
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


class BatchEncoder:
    """Turns a ``Batch`` into its split's name and tokens; made once in each worker."""

    def __init__(self, vocabulary: str):
        self._tokenizer = make_tokenizer(vocabulary)

    def __call__(self, batch: Batch) -> tuple[str, np.ndarray]:
        """Tokens 1-D, of the vocabulary's dtype; ``UserError`` with the place of text that it cannot hold."""
        separator = np.array([self._tokenizer.separator], self._tokenizer.dtype)
        parts = []
        for piece in batch.pieces:
            try:
                parts.append(self._tokenizer.encode(piece.text))
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{piece.place}: not UTF-8 ({error.reason}); --vocabulary bytes takes any text"
                ) from None
            except ValueError as error:
                raise UserError(f"{piece.place}: {error}") from None
            if piece.ends_document:
                parts.append(separator)
        return batch.split, np.concatenate(parts)
