"""data/text.py"""

import io

import numpy as np
import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

import data.text
from data.text import prepare_text, split_documents
from data.token_files import TokenFile
from data.tokenizers import GPT2Tokenizer
from errors import UserError

# GPT-2's pattern as OpenAI published it; the cut of long documents must agree with it, whatever the merges are.
PATTERN = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
MERGES = [b"  ", b"\n\n", b" \n", b"\n ", b"    ", b"ab", b" a", b" ab", b"'s", b"\xe3\x80", b"\xe3\x80\x80", b"\r\n"]


def small_gpt2() -> GPT2Tokenizer:
    """GPT-2's pattern with a vocabulary of all bytes and a few merges, mostly of white space: needs no files."""
    ranks = {bytes([value]): value for value in range(256)} | {merge: 256 + i for i, merge in enumerate(MERGES)}
    encoding = tiktoken.Encoding("small", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    return GPT2Tokenizer(encoding)


def documents(content, piece_bytes=1 << 20):
    """Whole documents, with the pieces of each joined."""
    found, parts = [], []
    for text, ends_document in split_documents(io.BytesIO(content), piece_bytes):
        parts.append(text)
        if ends_document:
            found.append(b"".join(parts))
            parts = []
    assert parts == []
    return found


def prepare(tmp_path, source, **options):
    """Byte tokens of both splits, as bytes, documents apart."""
    options = {"vocabulary": "bytes", "workers": 1, "val_fraction": 0.5, **options}
    prepare_text(source, tmp_path / "out", **options)
    return {split: TokenFile.open(tmp_path / "out", split).tokens.tobytes() for split in ("train", "val")}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"a\n<|endoftext|>\nb\n", [b"a", b"b"]),
        (b"a\n<|endoftext|>\nb\n<|endoftext|>\n", [b"a", b"b"]),
        (b"a\r\n<|endoftext|>\r\nb\r\n", [b"a", b"b"]),
        (b"a\n\n<|endoftext|>\n\n b", [b"a\n", b"\n b"]),
        (b"<|endoftext|>\n<|endoftext|>\na", [b"a"]),
        (b"a <|endoftext|>\n<|endoftext|> b", [b"a <|endoftext|>\n<|endoftext|> b"]),
        (b"a\n<|endoftext|> \nb", [b"a\n<|endoftext|> \nb"]),
        (b"", []),
    ],
)
def test_documents_end_at_lines_of_only_the_mark(content, expected):
    assert documents(content) == expected


@given(
    st.text(st.sampled_from("aab' \n\r\t1.é\u3000\u2003\x1c\x85"), max_size=300),
    st.integers(1, 40),
)
def test_pieces_of_a_long_document_encode_as_the_whole(text, piece_bytes):
    tokenizer = small_gpt2()
    pieces = [piece for piece, _ in split_documents(io.BytesIO(text.encode()), piece_bytes)]
    *parts, whole = tokenizer.encode([*pieces, b"".join(pieces)])
    assert np.concatenate([*parts, whole[:0]]).tolist() == whole.tolist()


def test_folder_is_read_in_sorted_order_a_document_a_file(tmp_path):
    source = tmp_path / "texts"
    for name in ("b/2.txt", "a.txt", "b/1.txt", ".hidden", "b/.git/x", "c.txt"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name + "\n")
    assert prepare(tmp_path, source) == {"train": b"a.txt\0b/2.txt\0", "val": b"b/1.txt\0c.txt\0"}


@pytest.mark.parametrize(
    ("content", "counts"),
    [
        ("one\n<|endoftext|>\ntwo\n", {}),
        ("one<|endoftext|>\ntwo<|endoftext|>\nthree\n", {"not alone on a line": 2}),
        ("one\n<|endoftext|> \ntwo\n", {"not alone on a line": 1}),
        ("\ufeffone", {"byte order mark": 1}),
    ],
)
def test_marks_that_are_text_are_counted(tmp_path, capsys, content, counts):
    (tmp_path / "val").write_text("held out")
    (tmp_path / "t.txt").write_text(content, encoding="utf-8")
    prepare(tmp_path, tmp_path / "t.txt", val=tmp_path / "val")
    told = capsys.readouterr().err.splitlines()
    assert len(told) == len(counts)
    assert all(f"{count} " in line and what in line for line, (what, count) in zip(told, counts.items(), strict=True))


@pytest.mark.parametrize("content", [b"\xef\xbb\xbfone", b"\xef\xbb\xbf<|endoftext|>\none\n"])
def test_a_byte_order_mark_is_left_out_at_the_start_of_a_file_only(content):
    assert documents(content) == [b"one"]
    assert documents(b"one\n" + content[:3]) == [b"one\n\xef\xbb\xbf"]


def test_any_number_of_workers_writes_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(data.text, "BATCH_BYTES", 100)
    source = tmp_path / "t.txt"
    source.write_bytes(b"\n<|endoftext|>\n".join(b"%d " % number * (number % 37) for number in range(1, 200)))
    monkeypatch.setattr(data.text, "make_tokenizer", lambda vocabulary: small_gpt2())
    one = prepare_text(source, tmp_path / "one", val_fraction=0.1, workers=1)
    two = prepare_text(source, tmp_path / "two", val_fraction=0.1, workers=2)
    assert one == two


@pytest.mark.parametrize(
    ("content", "vocabulary", "expected"),
    [
        (b"a\n<|endoftext|>\n\xff", "gpt2", r"t.txt: document 2: not UTF-8"),
        (b"a\n<|endoftext|>\nb\0", "bytes", r"t.txt: document 2: byte 0"),
        (b"a\n<|endoftext|>\nb", "bytes", "none of 2 documents fell to the held-out split"),
    ],
)
def test_unusable_text_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, content, vocabulary, expected):
    if vocabulary == "gpt2":
        monkeypatch.setattr(data.text, "make_tokenizer", lambda vocabulary: small_gpt2())
    (tmp_path / "t.txt").write_bytes(content)
    with pytest.raises(UserError, match=expected):
        prepare_text(tmp_path / "t.txt", tmp_path / "out", vocabulary=vocabulary, workers=1)
    assert [path.name for path in tmp_path.iterdir()] == ["t.txt"]
