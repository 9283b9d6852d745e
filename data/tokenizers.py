"""Text to tokens: GPT-2's byte-pair encoding (through tiktoken) and plain bytes.

Both end a document with one separator token, so that a stream of documents can be cut into sequences anywhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from errors import UserError, invalid

if TYPE_CHECKING:
    import tiktoken


class Tokenizer(ABC):
    """One vocabulary: how text becomes tokens, and in which type they are stored."""

    vocabulary: ClassVar[str]
    vocabulary_size: ClassVar[int]
    dtype: ClassVar[str]
    separator: ClassVar[int]

    @abstractmethod
    def encode(self, text: bytes) -> np.ndarray:
        """Tokens of UTF-8 text, 1-D, of ``dtype``, without a separator; ``ValueError`` for text it cannot represent."""


class ByteTokenizer(Tokenizer):
    """A token is a byte's value; byte 0, which text does not hold, separates documents."""

    vocabulary = "bytes"
    vocabulary_size = 256
    dtype = "uint8"
    separator = 0

    def encode(self, text: bytes) -> np.ndarray:
        if b"\0" in text:
            raise ValueError("byte 0 in the text, which byte tokens keep for the end of a document")
        return np.frombuffer(text, np.uint8)


class GPT2Tokenizer(Tokenizer):
    """GPT-2's vocabulary; 50256 (``<|endoftext|>``) ends a document. Such a mark *within* a text is plain characters.

    Raises ``UserError`` where tiktoken has no copy of GPT-2's two files and cannot download them.
    """

    vocabulary = "gpt2"
    vocabulary_size = 50257
    dtype = "uint16"
    separator = 50256

    def __init__(self, encoding: tiktoken.Encoding | None = None):
        self._encoding = encoding or _gpt2_encoding()

    def encode(self, text: bytes) -> np.ndarray:
        return np.array(self._encoding.encode_ordinary(text.decode()), np.uint16)


def _gpt2_encoding() -> tiktoken.Encoding:
    import tiktoken

    try:
        return tiktoken.get_encoding("gpt2")
    # What comes out of a download that fails depends on tiktoken's version and on its HTTP library.
    except Exception as error:
        raise UserError(
            f"tiktoken cannot get GPT-2's BPE files ({type(error).__name__}): set TIKTOKEN_CACHE_DIR to the absolute path of "
            "a folder with tiktoken's copy of them, or allow downloads, or use --vocabulary bytes where there is that choice"
        ) from error


TOKENIZERS: dict[str, type[Tokenizer]] = {cls.vocabulary: cls for cls in (GPT2Tokenizer, ByteTokenizer)}


def make_tokenizer(vocabulary: str) -> Tokenizer:
    """The tokenizer called ``vocabulary``; ``UserError`` for an unknown name or GPT-2 files that cannot be had."""
    if vocabulary not in TOKENIZERS:
        raise invalid("vocabulary", vocabulary, TOKENIZERS)
    return TOKENIZERS[vocabulary]()
