"""scripts/convert_recording.py: the published code's index files, both ways."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_batches import make_dataset

from data.batches import DataConfig, open_batches
from errors import UserError
from scripts.convert_recording import from_published, main, to_published

TOKENS = (np.arange(1000) * 31 % 251).astype(np.uint8)
T = 4
HIGHEST = 1000 - T - 1


@pytest.fixture(scope="session")
def dataset(tmp_path_factory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data") / "small", TOKENS, TOKENS)


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


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["1,2,3,4\n1,2,3\n"], r"rank_0\.txt: not lines of offsets .*columns changed from 4 to 3 at row 2"),
        (["1,2,3,4\n", "1,2\n"], r"rank_1\.txt: 1 lines of 2 offsets, that of rank 0 1 of 4"),
        (["1,2\n1,2\n", "1,2\n"], r"rank_1\.txt: 1 lines .*: cut all ranks to the same"),
        (["1,2\n1,2"], r"its last line end is missing: cut short\?"),
        (["1,2\n1,x\n"], r"rank_0\.txt: not lines of offsets with commas between them .*'x'"),
        (["1,-2\n"], "not lines of offsets"),
        (["1,2,3\n"], r"--micro-batch = 2: expected a divisor of the 3 offsets of a line"),
        ([f"0,{HIGHEST}\n1,{HIGHEST + 1}\n"], r"step 1 \(line 2\) has offset 996, the last one .* is 995"),
        (["1,99999999999999999999\n"], "not lines of offsets .*99999999999999999999"),
        ([""], "no steps in it"),
        ([], r"generated_indices_rank_0\.txt: missing"),
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
