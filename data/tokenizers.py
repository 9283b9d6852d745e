"""Text to tokens: GPT-2's byte-pair encoding (through tiktoken) and plain bytes.

Both end a document with one separator token, so that a stream of documents can be cut into sequences anywhere.
"""

import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from errors import UserError, invalid

if TYPE_CHECKING:
    import tiktoken


_WHITE = r"[^\S\x1c-\x1f]"
TOO_LONG_WHITE = re.compile(rf"(?<!{_WHITE}){_WHITE}{{999999,}}+(?!\Z)")
"""tiktoken's search goes back a character at a time over white space before text, and gives up at a million."""


class ByteTokenizer:
    """A token is a byte's value; byte 0, which text does not hold, separates documents. Tokens are stored as ``dtype``."""

    vocabulary: ClassVar[str] = "bytes"
    vocabulary_size: ClassVar[int] = 256
    dtype: ClassVar[str] = "uint8"
    separator: ClassVar[int] = 0

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Tokens of each UTF-8 text, 1-D, of ``dtype``, without a separator; ``ValueError`` for text it cannot represent."""
        if any(b"\0" in text for text in texts):
            raise ValueError("byte 0 in the text, which byte tokens keep for the end of a document")
        return [np.frombuffer(text, np.uint8) for text in texts]


class GPT2Tokenizer:
    """GPT-2's vocabulary; 50256 (``<|endoftext|>``) ends a document. Such a mark *within* a text is plain characters.

    Raises ``UserError`` where tiktoken has no copy of GPT-2's two files and cannot download them.
    """

    vocabulary: ClassVar[str] = "gpt2"
    vocabulary_size: ClassVar[int] = 50257
    dtype: ClassVar[str] = "uint16"
    separator: ClassVar[int] = 50256

    def __init__(self, encoding: "tiktoken.Encoding | None" = None):
        self._encoding = encoding or _gpt2_encoding()

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        try:
            decoded = [text.decode() for text in texts]
        except UnicodeDecodeError as error:
            raise ValueError(f"not UTF-8 ({error.reason}); --vocabulary bytes takes any text") from None
        # Looked for here: tiktoken's panic is told by Rust, many lines on stderr that nothing can hold back.
        if any(TOO_LONG_WHITE.search(text) for text in decoded if len(text) >= 999_999):
            raise ValueError(
                "a million white characters in a row, more than tiktoken takes; shorten them, or --vocabulary bytes"
            )
        encoded = self._encoding.encode_ordinary_batch(decoded, num_threads=thread_count())
        return [np.array(tokens, np.uint16) for tokens in encoded]


def _gpt2_encoding() -> "tiktoken.Encoding":
    import tiktoken

    try:
        return tiktoken.get_encoding("gpt2")
    # What comes out of a download that fails depends on tiktoken's version and on its HTTP library.
    except Exception as error:
        raise UserError(
            f"tiktoken cannot get GPT-2's BPE files ({type(error).__name__}): set TIKTOKEN_CACHE_DIR to the absolute path of "
            "a folder with tiktoken's copy of them, or allow downloads, or use --vocabulary bytes where there is that choice"
        ) from error


Tokenizer = GPT2Tokenizer | ByteTokenizer
TOKENIZERS: dict[str, type[Tokenizer]] = {"gpt2": GPT2Tokenizer, "bytes": ByteTokenizer}


def make_tokenizer(vocabulary: str) -> Tokenizer:
    """The tokenizer called ``vocabulary``; ``UserError`` for an unknown name or GPT-2 files that cannot be had."""
    if vocabulary not in TOKENIZERS:
        raise invalid("vocabulary", vocabulary, TOKENIZERS)
    return TOKENIZERS[vocabulary]()


def thread_count() -> int:
    """One for each CPU that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
