"""data/tokenizers.py"""

import os
import tempfile
from pathlib import Path

import pytest
import tiktoken

from data.tokenizers import ByteTokenizer, GPT2Tokenizer, make_tokenizer
from errors import UserError

_CACHE = Path(os.environ.get("TIKTOKEN_CACHE_DIR") or Path(tempfile.gettempdir()) / "data-gym-cache")
needs_bpe_files = pytest.mark.skipif(
    not (_CACHE / "6d1cbeee0f20b3d9449abfede4726ed8212e3aee").exists(),
    reason="no copy of GPT-2's BPE files (set TIKTOKEN_CACHE_DIR)",
)


def test_byte_tokens_are_the_bytes_of_the_text():
    assert ByteTokenizer().encode(["aé".encode()])[0].tolist() == [97, 195, 169]


@needs_bpe_files
def test_gpt2_tokens_are_openais():
    # The values of OpenAI's encoder.json and vocab.bpe for "Hello world".
    assert GPT2Tokenizer().encode([b"Hello world"])[0].tolist() == [15496, 995]


@needs_bpe_files
def test_gpt2_mark_within_text_is_plain_characters():
    assert 50256 not in GPT2Tokenizer().encode([b"a <|endoftext|> b"])[0]


def test_unreachable_bpe_files_are_one_line_that_says_what_to_set(monkeypatch):
    def no_network(name):
        raise ConnectionError("no route")

    monkeypatch.setattr(tiktoken, "get_encoding", no_network)
    with pytest.raises(UserError, match="set TIKTOKEN_CACHE_DIR") as raised:
        make_tokenizer("gpt2")
    assert "\n" not in str(raised.value)
