"""Token files, and the making of data sets: from text, the standard library, OpenWebText, wheels; the command."""

import bz2
import gzip
import io
import itertools
import json
import lzma
import os
import signal
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

import data.text
import data.tokenizers
from data import openwebtext
from data.stdlib import VAL_EVERY, library_files, prepare_stdlib
from data.text import prepare_text, split_documents
from data.token_files import TokenFile, TokenWriter, new_dataset
from data.tokenizers import GPT2Tokenizer
from errors import UserError
from scripts import make_text, prepare_data

FACTS = {"dtype": "uint16", "vocabulary": "gpt2", "vocabulary_size": 50257, "source": "a test"}


def write(folder, split="train", tokens=(1, 2, 50256), **changes):
    with TokenWriter(folder, split, **{**FACTS, **changes}) as writer:
        writer.write(np.array(tokens))
    return writer


def edit_header(folder, **changes):
    path = folder / "train.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("token", [-1, 50257, 65536 + 5])
def test_token_outside_the_vocabulary_is_refused_and_leaves_nothing(tmp_path, token):
    with pytest.raises(ValueError, match="in a vocabulary of 50257"), new_dataset(tmp_path / "a") as staging:
        write(staging, tokens=[0, token])
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "train.bin").unlink(), r"train.bin: no such file"),
        (lambda folder: os.truncate(folder / "train.bin", 4), "4 bytes, its header says 6(?!.*--vocabulary)"),
        (lambda folder: os.truncate(write(folder, vocabulary="bytes")._path, 4), "--vocabulary bytes"),
        (lambda folder: edit_header(folder, format_version=2), "not a token file's header"),
        (lambda folder: edit_header(folder, vocabulary_size=50256), "token 50256 in a vocabulary of 50256"),
    ],
)
def test_what_is_damaged_is_told(tmp_path, damage, message):
    write(tmp_path)
    damage(tmp_path)
    with pytest.raises(UserError, match=message):
        TokenFile.open(tmp_path, "train", verify="sha256")


def replaced_until(at: int, folder: Path) -> int:
    """Replace the data set, in a process that is killed at its change number ``at`` of a folder; its exit code."""
    child = os.fork()
    if child == 0:
        changes = itertools.count(1)

        def kill(event: str, arguments: tuple[object, ...]) -> None:
            if event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir") and next(changes) == at:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(kill)
        with new_dataset(folder, force=True) as staging:
            write(staging, tokens=(7, 8))
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_wherever_a_replacement_is_killed_the_old_or_the_new_data_set_is_whole(tmp_path):
    for at in itertools.count(1):
        parent = tmp_path / str(at)
        write(parent / "a")
        code = replaced_until(at, parent / "a")
        where = parent / "a" if (parent / "a").exists() else parent / ".a.old"
        assert TokenFile.open(where, "train", verify="sha256").tokens.tolist() in ([1, 2, 50256], [7, 8])
        if where.name == ".a.old":
            with pytest.raises(UserError, match=r"its replacement was cut off; go on with .*\.a\.old, or"):
                TokenFile.open(parent / "a", "train")
        assert replaced_until(0, parent / "a") == 0
        assert names(parent) == ["a"]
        if code == 0:
            break
    assert at > 5


@pytest.mark.parametrize("made", [True, False], ids=["data set", "nowhere"])
def test_a_link_is_not_replaced_but_the_folder_that_it_leads_to_named(tmp_path, made):
    disk, link = tmp_path / "disk" / "b", tmp_path / "a"
    if made:
        write(disk)
    link.symlink_to(disk)
    with pytest.raises(UserError, match=rf"--out {disk.parent} --name b"), new_dataset(link, force=True):
        pytest.fail("work was done")
    assert link.is_symlink()


def test_what_a_link_in_the_place_of_the_old_data_leads_to_stays(tmp_path):
    for name in ("a", "disk"):
        write(tmp_path / name)
    (tmp_path / ".a.old").symlink_to("disk")
    with new_dataset(tmp_path / "a", force=True) as staging:
        write(staging)
    assert names(tmp_path) == ["a", "disk"]
    TokenFile.open(tmp_path / "disk", "train", verify="sha256")


def test_force_spares_a_folder_of_other_files(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"'notes.txt', no token file"), new_dataset(tmp_path, force=True):
        pass
    assert (tmp_path / "notes.txt").read_text() == "mine"


# GPT-2's pattern as OpenAI published it; the cut of long documents must agree with it, whatever the merges are.
PATTERN = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
MERGES = [b"  ", b"\n\n", b" \n", b"\n ", b"    ", b"ab", b" a", b" ab", b"'s", b"\xe3\x80", b"\xe3\x80\x80", b"\r\n"]


def small_gpt2() -> GPT2Tokenizer:
    """GPT-2's pattern with a vocabulary of all bytes and a few merges, mostly of white space: needs no files."""
    ranks = {bytes([value]): value for value in range(256)} | {merge: 256 + i for i, merge in enumerate(MERGES)}
    encoding = tiktoken.Encoding("small", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    return GPT2Tokenizer(encoding)


def documents(content):
    """All shorter than a piece."""
    pieces = list(split_documents(io.BytesIO(content), 1 << 20))
    assert all(ends_document for _, ends_document in pieces)
    return [text for text, _ in pieces]


def prepare(tmp_path, source, **options):
    """Byte tokens of both splits, as bytes, documents apart."""
    options = {"vocabulary": "bytes", **({} if "val" in options else {"val_fraction": 0.5}), **options}
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
        (b"\xef\xbb\xbfone", [b"one"]),  # a byte order mark at the start is none of the text
        (b"\xef\xbb\xbf<|endoftext|>\none\n", [b"one"]),
        (b"one\n\xef\xbb\xbf", [b"one\n\xef\xbb\xbf"]),
    ],
)
def test_documents_end_at_lines_of_only_the_mark(content, expected):
    assert documents(content) == expected


@given(st.text(st.sampled_from("aab' \n\r\t1.é\u3000\u2003\x1c\x85"), max_size=300), st.integers(1, 40))
def test_pieces_of_a_long_document_encode_as_the_whole(text, piece_bytes):
    tokenizer = small_gpt2()
    pieces = [piece for piece, _ in split_documents(io.BytesIO(text.encode()), piece_bytes)]
    *parts, whole = tokenizer.encode([*pieces, b"".join(pieces)])
    assert np.concatenate([*parts, whole[:0]]).tolist() == whole.tolist()


@pytest.mark.timeout(20)
def test_blank_lines_beyond_a_piece_are_read_in_no_time():
    assert sum(len(text) for text, _ in split_documents(io.BytesIO(b"a" + b"\n \n" * 10_000), 5)) == 30_000


def test_folder_is_read_in_sorted_order_a_document_a_file(tmp_path):
    source = tmp_path / "texts"
    for name in ("b/2.txt", "a.txt", "b/1.txt", ".hidden", "b/.git/x", "c.txt"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name + "\n")
    assert prepare(tmp_path, source) == {"train": b"a.txt\0b/2.txt\0", "val": b"b/1.txt\0c.txt\0"}


def test_a_file_that_links_lead_to_counts_once_and_what_is_left_out_is_told(tmp_path, capsys):
    source, outside = tmp_path / "texts", tmp_path / "outside"
    for name in ("texts/b", "outside/c", "texts/.hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (source / "a").symlink_to("b")
    (source / "c").symlink_to(outside / "c")
    (source / "folder").symlink_to(outside)
    (source / "broken").symlink_to("nowhere")
    assert data.text.text_files(source) == [source / "b", source / "c"]
    told = capsys.readouterr().err
    for what in ("1 linked folder", "1 broken link", "1 hidden file", "1 link(s) to a file"):
        assert what in told


@pytest.mark.parametrize(
    ("val", "fraction", "message"),
    [
        ("val", 7, "--val-fraction = 7: expected none beside --val"),
        ("t", None, "both in the training and in the held-out text"),
        ("link", None, "both in the training and in the held-out text"),
        (None, 0.0, r"--val-fraction = 0\.0: expected more than 0 and less than 1"),
        (None, 1.0, r"--val-fraction = 1\.0: expected more than 0 and less than 1"),
    ],
)
def test_a_held_out_text_that_cannot_be_is_refused(tmp_path, val, fraction, message):
    for name in ("t", "val"):
        (tmp_path / name).write_text(name)
    (tmp_path / "link").symlink_to("t")
    with pytest.raises(UserError, match=message):
        prepare(tmp_path, tmp_path / "t", val=val and tmp_path / val, val_fraction=fraction)


A, B = lzma.compress(b"a\n<|endoftext|>\n"), lzma.compress(b"b\n")


@pytest.mark.parametrize("name", ["t.xz", "t.XZ"])
def test_streams_of_an_xz_file_and_the_zeros_between_them(tmp_path, name):
    (tmp_path / name).write_bytes(A + bytes(8) + B + bytes(4))
    assert prepare(tmp_path, tmp_path / name) == {"train": b"a\0", "val": b"b\0"}


@pytest.mark.parametrize("rest", [b"\1" + B[1:], B[:-1], bytes(8) + b"\1" * 20], ids=["magic", "cut", "no zeros"])
def test_an_xz_file_is_damaged_where_no_stream_follows_a_stream(tmp_path, rest):
    (tmp_path / "t.xz").write_bytes(A + A + rest)
    with pytest.raises(UserError, match=r"t\.xz: not a whole \.xz file"):
        prepare(tmp_path, tmp_path / "t.xz")


@pytest.mark.parametrize(
    ("compress", "name"),
    [
        (gzip.compress, "t.xz: compressed by gzip: .*zcat"),
        (bz2.compress, "t.xz: compressed by bzip2: .*bzcat"),
        (lzma.compress, "t.txt: compressed by xz: .*xzcat"),
    ],
)
def test_other_compressed_files_are_refused_by_what_they_are(tmp_path, compress, name):
    path = tmp_path / name.partition(":")[0]
    path.write_bytes(compress(b"text"))
    with pytest.raises(UserError, match=name):
        prepare(tmp_path, path)


@pytest.mark.parametrize(
    ("content", "counts"),
    [
        ("one\n<|endoftext|>\ntwo\n", {}),
        ("one<|endoftext|>\ntwo<|endoftext|>\nthree\n", {"not alone on a line": 2}),
        ("one\n<|endoftext|> \ntwo\n", {"not alone on a line": 1}),
        ("\ufeffone", {"byte order mark": 1}),
        ("one\n\ufefftwo\n\ufeffthree", {"byte order mark(s) within the text": 2}),
    ],
)
def test_marks_that_are_text_are_counted(tmp_path, capsys, content, counts):
    (tmp_path / "val").write_text("held out")
    (tmp_path / "t.txt").write_text(content, encoding="utf-8")
    prepare(tmp_path, tmp_path / "t.txt", val=tmp_path / "val")
    told = capsys.readouterr().err.splitlines()
    assert len(told) == len(counts)
    assert all(f"{count} " in line and what in line for line, (what, count) in zip(told, counts.items(), strict=True))


def test_a_warning_names_the_first_file_and_counts_the_others(tmp_path, capsys):
    (tmp_path / "texts").mkdir()
    for name, text in {"a": "a", "b": "\ufeffb", "c": "\ufeffc"}.items():
        (tmp_path / "texts" / name).write_text(text, encoding="utf-8")
    prepare(tmp_path, tmp_path / "texts")
    assert f"{tmp_path / 'texts/b'} and 1 more: 2 file(s) with a byte" in capsys.readouterr().err


def test_any_number_of_threads_writes_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(data.text, "BATCH_BYTES", 100)
    source = tmp_path / "t.txt"
    source.write_bytes(b"\n<|endoftext|>\n".join(b"%d " % number * (number % 37) for number in range(1, 200)))
    monkeypatch.setattr(data.text, "make_tokenizer", lambda vocabulary: small_gpt2())
    made = []
    for threads in (1, 2):
        monkeypatch.setattr(data.tokenizers, "thread_count", lambda threads=threads: threads)
        made.append(prepare_text(source, tmp_path / str(threads), val_fraction=0.1))
    assert made[0] == made[1]


@pytest.mark.parametrize(
    ("content", "vocabulary", "expected"),
    [
        (b"a\n<|endoftext|>\n\xff", "gpt2", r"t.txt: document 2: not UTF-8"),
        (b"a\n<|endoftext|>\nb\0", "bytes", r"t.txt: document 2: byte 0"),
        (b"a\n<|endoftext|>\nb\0", "gpt2", r"t.txt: document 2: byte 0"),
        (b"\xff\0", "gpt2", r"t.txt: document 1: byte 0"),
        (b"a" + b" " * 999_999 + b"b", "gpt2", r"t.txt: document 1: a million white"),
        (b"a\n<|endoftext|>\nb", "bytes", "none of 2 documents .* raise --val-fraction to 0.5"),
        (b"", "bytes", r"t.txt: holds no document for training"),
    ],
)
def test_unusable_text_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, content, vocabulary, expected):
    if vocabulary == "gpt2":
        monkeypatch.setattr(data.text, "make_tokenizer", lambda vocabulary: small_gpt2())
    (tmp_path / "t.txt").write_bytes(content)
    with pytest.raises(UserError, match=expected):
        prepare_text(tmp_path / "t.txt", tmp_path / "out", vocabulary=vocabulary)
    assert [path.name for path in tmp_path.iterdir()] == ["t.txt"]


def test_the_longest_white_space_that_tiktoken_takes_is_text():
    small_gpt2().encode([b"a" + b" " * 999_998 + b"b"])
    assert not data.tokenizers.TOO_LONG_WHITE.search(
        "a" + "\n" * 1_000_000
    )  # at the end of a text GPT-2's own pattern takes any


def test_only_the_librarys_own_sources_belong_and_none_to_both_splits(tmp_path):
    root = tmp_path / "library"
    wanted = [f"package/m{number:03}.py" for number in range(2 * VAL_EVERY)]
    unwanted = ["test/t.py", "json/tests/t.py", "site-packages/s.py", "idlelib/i.py", "lib2to3/l.py"]
    unwanted += ["_sysconfigdata__linux_.py", "config-3.11-x86_64-linux-gnu/python-config.py", "package/data.txt"]
    for name in wanted + unwanted:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"# {name}\n")
    assert [str(path) for path in library_files(root)] == wanted
    prepare_stdlib(tmp_path / "out", library=root)
    train, val = (TokenFile.open(tmp_path / "out", split).tokens.tobytes().split(b"\0") for split in ("train", "val"))
    assert len(val) == 2 + 1
    assert {*train, *val} == {b"", *(f"# {name}\n".encode() for name in wanted)}
    assert {*train} & {*val} == {b""}


def test_split_and_order_of_openwebtext_are_nanogpts(tmp_path, monkeypatch):
    """Two parquet files of 300 numbered documents; byte-level stand-in for GPT-2's files, which need a download."""
    monkeypatch.setattr(pytest.importorskip("datasets").config, "HF_DATASETS_CACHE", tmp_path / "cache")
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    ranks = {bytes([value]): value for value in range(256)}
    encoding = tiktoken.Encoding("bytes", pat_str=r"[\s\S]", mergeable_ranks=ranks, special_tokens={})
    monkeypatch.setattr(data.tokenizers, "_gpt2_encoding", lambda: encoding)
    source, texts = tmp_path / "parquet", [f"<{number}>\n" for number in range(300)]
    source.mkdir()
    for part, rows in enumerate((texts[:100], texts[100:])):
        parquet.write_table(pyarrow.table({"text": rows}), source / f"train-{part:05}.parquet")
    # The permutation that NumPy's generator gives for nanoGPT's seed; a held-out part of 0.0005 is one document of 300.
    order = np.random.default_rng(2357).permutation(300)
    splits = {"train": order[1:], "val": order[:1]}
    expected = {s: [token for n in numbers for token in (*texts[n].encode(), 50256)] for s, numbers in splits.items()}
    monkeypatch.setattr(openwebtext, "EXPECTED_DOCUMENTS", {"train": 299, "val": 1})
    with pytest.raises(UserError, match=r"^OpenWebText: 1,985 train, 5 val tokens, expected 9,035,582,198 train"):
        openwebtext.prepare_openwebtext(tmp_path / "out", source=source)
    monkeypatch.setattr(openwebtext, "EXPECTED_TOKENS", {split: len(tokens) for split, tokens in expected.items()})
    openwebtext.prepare_openwebtext(tmp_path / "out", source=source)
    for split, tokens in expected.items():
        assert TokenFile.open(tmp_path / "out", split).tokens.tolist() == tokens


LINE = "x = 'a line of a source that is long enough'\n"


def wheel(path: Path, **sources: str | bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in sources.items():
            archive.writestr(name.replace("_py", ".py"), content)
    return path


def made(tmp_path: Path, *wheels: Path) -> list[bytes]:
    make_text.main([*map(str, wheels), "--out", str(tmp_path / "text.txt")])
    return documents((tmp_path / "text.txt").read_bytes())


def test_the_text_has_each_source_once_in_any_order_of_wheels(tmp_path: Path) -> None:
    sources = {f"{i}_py": f"# {i}\n" + LINE * 5 for i in range(6)}
    wheels = [wheel(tmp_path / f"{name}.whl", **{name: text}) for name, text in sources.items()]
    again = {name: f"\ufeff{text}\n\n" for name, text in sources.items()}
    no_documents = {"a_py": "short", "b_py": LINE * 5 + "\0", "c_py": LINE * 5 + "'<|endoftext|>'"}
    latin = LINE.encode("latin-1") * 5 + b"\xe9"
    wheels.append(wheel(tmp_path / "more.whl", **again, **no_documents, d_py=latin, e=LINE * 5))
    text = made(tmp_path, *wheels)
    assert sorted(text) == sorted(source.rstrip().encode() for source in sources.values())
    assert made(tmp_path, *reversed(wheels)) == text


def test_a_bad_wheel_is_named_whatever_zipfile_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = wheel(tmp_path / "a.whl", a_py=LINE * 9)
    monkeypatch.setattr(zipfile.ZipFile, "read", Mock(side_effect=NotImplementedError("that compression method")))
    with pytest.raises(UserError, match=r"wheel .*a\.whl: cannot be read"):
        make_text.documents([path])


def test_a_wheel_is_not_overwritten_by_its_text(tmp_path: Path, refused: Callable[..., str]) -> None:
    path = wheel(tmp_path / "a.whl", a_py=LINE * 9)
    before = path.read_bytes()
    assert "--out" in refused(make_text.main, path, "--out", path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("source", "name"),
    [("v1.2.txt", "v1.2"), ("v1.3.txt.xz", "v1.3"), ("v1.4.XZ", "v1"), ("a", "a"), ("folder.v2/", "folder.v2")],
)
def test_a_data_set_has_the_name_of_its_source(tmp_path: Path, source: str, name: str) -> None:
    if source.endswith("/"):
        (tmp_path / source).mkdir()
    assert prepare_data.own_name(tmp_path / source) == name


def test_a_source_that_gives_no_name_asks_for_one(tmp_path: Path, refused: Callable[..., str]) -> None:
    line = refused(prepare_data.main, "text", tmp_path / "my text.txt", "--out", tmp_path)
    assert "give one with --name" in line
