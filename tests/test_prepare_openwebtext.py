"""data/openwebtext.py"""

import numpy as np
import pytest
import tiktoken

import data.tokenizers
from data.openwebtext import prepare_openwebtext
from data.token_files import TokenFile

COUNT = 300
# The permutation that NumPy's generator gives for nanoGPT's seed; a held-out part of 0.0005 is one document of 300.
ORDER = np.random.default_rng(2357).permutation(COUNT).tolist()


@pytest.fixture
def source(tmp_path, monkeypatch):
    """Two parquet files of 300 numbered documents; byte-level stand-in for GPT-2's files, which need a download."""
    pytest.importorskip("datasets")
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(data.tokenizers, "_gpt2_encoding", byte_encoding)
    folder = tmp_path / "parquet"
    folder.mkdir()
    texts = [f"<{number}>\n" for number in range(COUNT)]
    for part, rows in enumerate((texts[:100], texts[100:])):
        parquet.write_table(pyarrow.table({"text": rows}), folder / f"train-{part:05}.parquet")
    return folder


def byte_encoding():
    ranks = {bytes([value]): value for value in range(256)}
    return tiktoken.Encoding("bytes", pat_str=r"[\s\S]", mergeable_ranks=ranks, special_tokens={})


def prepare(tmp_path, source, **options):
    options = {"allow_other_counts": True, "workers": 1, **options}
    return prepare_openwebtext(tmp_path / "out", source=source, cache=tmp_path / "cache", **options)


def texts_of(tmp_path, split):
    tokens = TokenFile.open(tmp_path / "out", split).tokens.astype(np.int64)
    ends = np.flatnonzero(tokens == 50256)
    assert ends[-1] == len(tokens) - 1
    return [bytes(part[part != 50256].tolist()).decode() for part in np.split(tokens, ends)[:-1]]


def test_split_and_order_are_nanogpts(tmp_path, source):
    prepare(tmp_path, source)
    assert texts_of(tmp_path, "val") == [f"<{ORDER[0]}>\n"]
    assert texts_of(tmp_path, "train") == [f"<{number}>\n" for number in ORDER[1:]]
