"""OpenWebText as nanoGPT prepares it: the same split, the same order, so the same token files.

The text is the parquet set ``Skylion007/openwebtext`` (about 8 million documents); nanoGPT's ``data/openwebtext``
gives the split (0.0005 held out, seed 2357, shuffled), the separator after each document and the counts checked here.
"""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from data.text import Piece, Prepared, write_dataset
from data.tokenizers import make_tokenizer, thread_count
from errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

HUB_NAME = "Skylion007/openwebtext"
EXPECTED_DOCUMENTS = {"train": 8_009_762, "val": 4_007}
EXPECTED_TOKENS = {"train": 9_035_582_198, "val": 4_434_897}
DOCUMENTS_AT_ONCE = 4096


def prepare_openwebtext(folder: Path, *, source: Path | None = None, force: bool = False) -> Prepared:
    """Write the data set ``folder`` from the hub's parquet files, or from those in the folder ``source``.

    ``UserError``: ``datasets`` missing, text that cannot be had or opened, counts other than nanoGPT's, a data set already there.
    """
    tokenizer = make_tokenizer("gpt2")

    def batches() -> Iterator[tuple[str, list[Piece]]]:
        splits = split_as_nanogpt(load(source))
        documents = {name: len(rows) for name, rows in splits.items()}
        check_counts("documents", EXPECTED_DOCUMENTS, documents)
        total = sum(documents.values())
        with tqdm(total=total, unit=" texts", unit_scale=True, desc="tokens", disable=None) as bar:
            for name, rows in splits.items():
                for first in range(0, len(rows), DOCUMENTS_AT_ONCE):
                    texts = rows[first : first + DOCUMENTS_AT_ONCE]["text"]
                    places = (f"{name} document {number}" for number in range(first, first + len(texts)))
                    yield name, [Piece(text.encode(), True, place) for text, place in zip(texts, places, strict=True)]
                    bar.update(len(texts))

    sources = dict.fromkeys(("train", "val"), f"{source.name if source else HUB_NAME}, nanoGPT's split")
    check = functools.partial(check_counts, "tokens", EXPECTED_TOKENS)
    return write_dataset(folder, tokenizer, sources, batches(), force=force, check=check)


def load(source: Path | None) -> "Dataset":
    """All documents in their published order, a column ``text``; ``UserError`` when they cannot be had."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise UserError("openwebtext needs the package datasets: pip install datasets") from None
    where: dict[str, Any] = {"path": HUB_NAME, "num_proc": thread_count()}
    if source:
        parquet = sorted(str(path) for path in source.rglob("*.parquet"))
        if not parquet:
            raise UserError(f"{source}: no folder with .parquet files")
        where = {"path": "parquet", "data_files": {"train": parquet}, "num_proc": min(thread_count(), len(parquet))}
    try:
        rows = load_dataset(**where, split="train")
    # Network, hub and file format each bring their own exceptions, and the set changes with the version.
    except Exception as error:
        hint = "" if source else "; --source FOLDER reads parquet files that are already here"
        raise UserError(f"cannot load {source or HUB_NAME}: {type(error).__name__}: {error}{hint}") from error
    if "text" not in rows.column_names:
        raise UserError(f"{source or HUB_NAME}: no column 'text', only {', '.join(rows.column_names)}")
    return rows


def split_as_nanogpt(rows: "Dataset") -> "dict[str, Dataset]":
    """nanoGPT's split of the documents, in its order; ``UserError`` for fewer than two documents."""
    if len(rows) < 2:
        raise UserError(f"{len(rows)} documents: too few to split")
    split = rows.train_test_split(test_size=0.0005, seed=2357, shuffle=True)
    return {"train": split["train"], "val": split["test"]}


def check_counts(what: str, expected: dict[str, int], found: dict[Any, int]) -> None:
    """``UserError`` unless ``found`` is as ``expected``."""
    if found != expected:
        one, other = (", ".join(f"{counts[name]:,} {name}" for name in expected) for counts in (found, expected))
        raise UserError(f"OpenWebText: {one} {what}, expected {other}")
