"""scripts/convert_recording.py: the published code's index files, both ways."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batches import DataConfig, open_batches
from data.recording import Recording
from data.token_files import TokenWriter
from errors import UserError
from scripts.convert_recording import from_published, main, to_published

ROOT = Path(__file__).resolve().parent.parent
TOKENS = (np.arange(1000) * 31 % 251).astype(np.uint8)
T = 4
HIGHEST = 1000 - T - 1


@pytest.fixture(scope="session")
def dataset(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "small"
    for split in ("train", "val"):
        with TokenWriter(
            folder, split, dtype="uint8", vocabulary="bytes", vocabulary_size=256, source="test"
        ) as writer:
            writer.write(TOKENS)
    return folder


def write_published(folder: Path, texts: list[str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for rank, text in enumerate(texts):
        (folder / f"generated_indices_rank_{rank}.txt").write_text(text)
    return folder


def read_published(folder: Path) -> list[str]:
    paths = sorted(folder.iterdir(), key=lambda path: int(path.stem.rpartition("_")[2]))
    return [path.read_text() for path in paths]


# Two processes, two micro-batches of two sequences each, two steps.
TEXTS = ["1,2,3,4\n11,12,13,14\n", "5,6,7,8\n15,16,17,18\n"]


def test_the_processes_micro_batches_take_turns(dataset, tmp_path):
    from_published(write_published(tmp_path / "p", TEXTS), tmp_path / "r", dataset, T, 2)
    found = Recording.open(tmp_path / "r")
    assert found.offsets.tolist() == [[1, 2, 5, 6, 3, 4, 7, 8], [11, 12, 15, 16, 13, 14, 17, 18]]


def test_each_process_replays_its_own_lines(dataset, tmp_path):
    from_published(write_published(tmp_path / "p", TEXTS), tmp_path / "r", dataset, T, 2)
    config = DataConfig(
        dataset=str(dataset), sequence_length=T, global_batch=8, micro_batch=2, replay=str(tmp_path / "r")
    )
    for rank, text in enumerate(TEXTS):
        batches = open_batches(config, rank, 2)
        for line in text.splitlines():
            rows = [row for inputs, _ in batches.next() for row in inputs.tolist()]
            assert rows == [TOKENS[o : o + T].tolist() for o in map(int, line.split(","))]


def test_the_recording_is_finished_and_has_the_data_sets_digest(dataset, tmp_path):
    from_published(write_published(tmp_path / "p", TEXTS), tmp_path / "r", dataset, T, 2)
    found = Recording.open(tmp_path / "r")
    assert (found.complete, found.header.data_tokens, found.header.seed) == (True, 1000, None)


@settings(deadline=None, max_examples=40)
@given(
    data=st.data(),
    ranks=st.integers(1, 12),
    accumulation=st.integers(1, 3),
    micro=st.integers(1, 3),
    steps=st.integers(1, 3),
)
def test_published_files_come_back_byte_for_byte(dataset, data, ranks, accumulation, micro, steps):
    width = accumulation * micro
    line = st.lists(st.integers(0, HIGHEST), min_size=width, max_size=width).map(
        lambda row: ",".join(map(str, row)) + "\n"
    )
    texts = data.draw(
        st.lists(st.lists(line, min_size=steps, max_size=steps).map("".join), min_size=ranks, max_size=ranks)
    )
    with tempfile.TemporaryDirectory() as name:
        parent = Path(name)
        assert from_published(write_published(parent / "p", texts), parent / "r", dataset, T, micro) == steps
        assert to_published(parent / "r", parent / "q", ranks, micro) == steps
        assert read_published(parent / "q") == texts


@pytest.mark.parametrize(("ranks", "micro"), [(1, 8), (2, 2), (4, 1), (8, 1)])
def test_a_recording_comes_back_offset_for_offset(dataset, tmp_path, ranks, micro):
    config = DataConfig(
        dataset=str(dataset), sequence_length=T, global_batch=8, micro_batch=8, record=str(tmp_path / "r")
    )
    batches = open_batches(config)
    for _ in range(5):
        batches.next()
    batches.close()
    to_published(tmp_path / "r", tmp_path / "p", ranks, micro)
    from_published(tmp_path / "p", tmp_path / "s", dataset, T, micro)
    assert np.array_equal(Recording.open(tmp_path / "s").offsets, Recording.open(tmp_path / "r").offsets)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["1,2,3,4\n1,2,3\n"], r"rank_0\.txt: line 2 has 3 offsets, earlier lines have 4"),
        (["1,2,3,4\n", "1,2\n"], r"rank_1\.txt: line 1 has 2 offsets, earlier lines have 4"),
        (["1,2\n1,2\n", "1,2\n"], r"rank_1\.txt ends at line 1, .*rank_0\.txt goes on: cut all ranks to the same"),
        (["1,2\n1,2"], r"line 2 is not offsets .*its line end is missing: cut short\?"),
        (["1,2\n1,x\n"], r"rank_0\.txt: line 2 is not offsets with commas between them: '1,x"),
        (["1,-2\n"], "line 1 is not offsets"),
        (["1,2\n\n"], "line 2 is not offsets"),
        (["1,2,3\n"], r"--micro-batch = 2: expected a divisor of the 3 offsets of a line"),
        ([f"0,{HIGHEST}\n1,{HIGHEST + 1}\n"], r"step 1 \(line 2\) has offset 996, the last one .* is 995"),
        (["1,99999999999999999999\n"], "step 0 .* has offset 99999999999999999999"),
        ([""], "no steps in it"),
        ([], r"no generated_indices_rank_0\.txt there"),
    ],
)
def test_files_that_make_no_recording_are_refused_with_the_place(dataset, tmp_path, texts, message):
    with pytest.raises(UserError, match=message):
        from_published(write_published(tmp_path / "p", texts), tmp_path / "r", dataset, T, 2)


def test_a_missing_rank_is_named(dataset, tmp_path):
    folder = write_published(tmp_path / "p", [TEXTS[0], TEXTS[1], TEXTS[1]])
    (folder / "generated_indices_rank_1.txt").unlink()
    with pytest.raises(UserError, match=r"rank_1\.txt: missing"):
        from_published(folder, tmp_path / "r", dataset, T, 2)


def test_an_existing_recording_is_not_overwritten(dataset, tmp_path):
    folder = write_published(tmp_path / "p", TEXTS)
    (tmp_path / "r").mkdir()
    with pytest.raises(UserError, match="exists"):
        from_published(folder, tmp_path / "r", dataset, T, 2)


def test_existing_index_files_are_not_overwritten(dataset, tmp_path):
    folder = write_published(tmp_path / "p", TEXTS)
    from_published(folder, tmp_path / "r", dataset, T, 2)
    with pytest.raises(UserError, match="has generated_indices_rank files"):
        to_published(tmp_path / "r", folder, 1, 2)


def test_the_command_line_goes_both_ways(dataset, tmp_path):
    folder, name = str(write_published(tmp_path / "p", TEXTS)), str(tmp_path / "r")
    main(["from-published", folder, name, "--dataset", str(dataset), "--sequence-length", str(T), "--micro-batch", "2"])
    main(["to-published", name, str(tmp_path / "q"), "--ranks", "2", "--micro-batch", "2"])
    assert read_published(tmp_path / "q") == TEXTS


def test_a_mistake_on_the_command_line_is_one_line_and_exit_code_two(tmp_path):
    command = [
        sys.executable,
        ROOT / "scripts" / "convert_recording.py",
        "to-published",
        "nothing",
        "x",
        "--ranks",
        "1",
    ]
    result = subprocess.run([*command, "--micro-batch", "1"], capture_output=True, text=True, cwd=tmp_path)
    assert (result.returncode, result.stderr.count("\n"), result.stderr[:15]) == (2, 1, "error: nothing:")
