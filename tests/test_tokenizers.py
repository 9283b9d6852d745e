"""data/tokenizers.py"""

import pytest
import tiktoken

from data.tokenizers import make_tokenizer
from errors import UserError


def test_unreachable_bpe_files_are_one_line_that_says_what_to_set(monkeypatch):
    def no_network(name):
        raise ConnectionError("no route")

    monkeypatch.setattr(tiktoken, "get_encoding", no_network)
    with pytest.raises(UserError, match="set TIKTOKEN_CACHE_DIR") as raised:
        make_tokenizer("gpt2")
    assert "\n" not in str(raised.value)
