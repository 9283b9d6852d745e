"""data/recording.py: the file format, resuming, and the finding of damage."""

import hashlib
import json
import multiprocessing
import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import files
from data.recording import HEAD_BYTES, Recorder, Recording, RecordingHeader, checksum_of_facts
from errors import UserError


def make_header(**changes) -> RecordingHeader:
    sizes = {"data_tokens": 10_000, "sequence_length": 4, "global_batch": 3, "vocabulary_size": 256, "seed": 5}
    names = {"source_run": "läuft", "vocabulary": "bytes", "dtype": "uint8"}
    return RecordingHeader(data_sha256="ab" * 32, validation_sha256="cd" * 32, **(sizes | names | changes))


def make_rows(steps, *, seed=0):
    """Offsets [S, G] of no particular meaning."""
    return np.random.default_rng(seed).integers(0, 9_996, size=(steps, 3), dtype=np.uint64)


def write(folder: Path, steps: int, *, finish: bool = True, flush_at: int = 0, **changes: Any) -> RecordingHeader:
    header = make_header(**changes)
    recorder = Recorder.create(folder, header)
    for step, offsets in enumerate(make_rows(steps)):
        recorder.append(offsets)
        if step + 1 == flush_at:
            recorder.flush()
    if finish:
        recorder.close()
    return header


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def read_by_the_readme(folder: Path) -> np.ndarray:
    """The offsets, by a reader written from replay_batches/README.md alone; AssertionError for damage."""
    header = json.loads((folder / "header.json").read_text(encoding="utf-8"))
    promised, complete, start = header.pop("steps"), header.pop("complete"), bytes.fromhex(header.pop("chain_start"))
    pairs = ",".join(f"{json.dumps(key)}:{json.dumps(header[key])}" for key in sorted(header))
    assert hashlib.sha256(("{" + pairs + "}").encode()).digest()[:8] == start
    batch = header["global_batch"]
    raw = (folder / "offsets.npy").read_bytes()
    rows = (len(raw) - 128) // (8 * (batch + 1))
    assert rows == promised or not complete
    chain, table = start, []
    for step in range(rows):
        row = raw[128 + step * 8 * (batch + 1) :][: 8 * (batch + 1)]
        chain = hashlib.sha256(chain + row[:-8]).digest()[:8]
        assert chain == row[-8:]
        table.append(struct.unpack(f"<{batch}Q", row[:-8]))
    return np.array(table, dtype=np.uint64)


def test_a_reader_written_from_the_readme_agrees(tmp_path):
    write(tmp_path / "r", 5)
    assert np.array_equal(read_by_the_readme(tmp_path / "r"), make_rows(5))


@pytest.mark.parametrize(("finish", "promised"), [(True, 4), (False, 2)])
def test_cut_at_any_byte_it_keeps_its_whole_rows_or_is_refused_below_its_promise(tmp_path, finish, promised):
    write(tmp_path / "r", 4, finish=finish, flush_at=2)
    path = tmp_path / "r" / "offsets.npy"
    raw = path.read_bytes()
    for size in range(len(raw) + 1):
        path.write_bytes(raw[:size])
        if size < HEAD_BYTES + promised * 32:
            with pytest.raises(UserError, match="truncated"):
                Recording.open(tmp_path / "r")
        else:
            found = Recording.open(tmp_path / "r")
            rows = make_rows(4)[: (size - HEAD_BYTES) // 32]
            assert found.steps == len(rows)
            assert all(map(np.array_equal, map(found.row, range(found.steps)), rows))


@pytest.mark.parametrize("finish", [True, False])
def test_a_changed_byte_anywhere_is_found_and_one_of_a_step_names_it(tmp_path, finish):
    write(tmp_path / "r", 3, finish=finish, flush_at=3)
    found = contents(tmp_path / "r")
    for name, raw in found.items() if finish else [("offsets.npy", found["offsets.npy"])]:
        for place in range(len(raw)):
            changed = bytearray(raw)
            changed[place] ^= 1
            (tmp_path / "r" / name).write_bytes(changed)
            step = (place - HEAD_BYTES) // 32 if name.endswith("npy") and place >= HEAD_BYTES else None
            with pytest.raises(UserError, match=None if step is None else f"altered: step {step} does not match"):
                Recording.open(tmp_path / "r")
        (tmp_path / "r" / name).write_bytes(raw)
    assert Recording.open(tmp_path / "r").steps == 3


def test_a_foreign_recording_that_points_beyond_the_data_is_refused(tmp_path):
    recorder = Recorder.create(tmp_path / "r", make_header(global_batch=1, data_tokens=100))
    for offset in (95, 96):
        recorder.append(np.array([offset], dtype=np.uint64))
    recorder.close()
    with pytest.raises(UserError, match="step 1 points beyond the 100 tokens"):
        Recording.open(tmp_path / "r")


WRONG = {
    **dict.fromkeys(("vocabulary_size", "data_tokens", "sequence_length", "validation_sha256", "dtype"), None),
    **{"global_batch": "3", "data_sha256": 5, "vocabulary": 3, "seed": [1], "carries_tokens": 0, "steps": 2.0, "complete": "no"},
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_foreign_header_with_a_value_of_another_type_is_refused(tmp_path, name):
    Recorder.create(tmp_path / "r", make_header()).close(complete=False)
    path = tmp_path / "r/header.json"
    content = json.loads(path.read_text()) | {name: WRONG[name]}
    facts = {key: value for key, value in content.items() if key not in ("chain_start", "steps", "complete")}
    path.write_text(json.dumps(content | {"chain_start": checksum_of_facts(facts).hex()}))
    with pytest.raises(UserError, match=f"header.json: altered: {name} is of another type"):
        Recording.open(tmp_path / "r")


def test_a_foreign_header_with_batches_of_nothing_is_refused(tmp_path):
    Recorder.create(tmp_path / "r", make_header(global_batch=-1)).close(complete=False)
    with pytest.raises(UserError, match="global_batch = -1: expected a whole number of 1 or more"):
        Recording.open(tmp_path / "r")


@pytest.mark.parametrize(
    ("changes", "steps", "message"),
    [({}, 4, "holds 3 steps, the run resumes at step 4"), ({"seed": 6}, 1, "its seed is 5, this run's is 6")],
)
def test_resuming_what_does_not_fit_is_refused(tmp_path, changes, steps, message):
    header = write(tmp_path / "r", 3)
    with pytest.raises(UserError, match=message):
        Recorder.resume(tmp_path / "r", replace(header, **changes), steps)


def test_nobody_begins_or_goes_on_with_the_recording_of_a_run_that_is_alive(tmp_path):
    alive = Recorder.create(tmp_path / "r", make_header())
    for begin in (Recorder.create, lambda *args: Recorder.resume(*args, 0)):
        with pytest.raises(UserError, match="another process is recording there"):
            begin(tmp_path / "r", make_header())
    alive.append(make_rows(1)[0])
    alive.close()
    assert Recording.open(tmp_path / "r").complete


def test_what_a_killed_start_left_is_begun_again_by_its_own_run_alone(tmp_path):
    Recorder.create(tmp_path / "r", make_header()).close(complete=False)
    with pytest.raises(UserError, match="exists: record under another name"):
        Recorder.create(tmp_path / "r", make_header(source_run="another"))
    write(tmp_path / "r", 1)
    assert Recording.open(tmp_path / "r").steps == 1


def test_an_interrupt_as_it_appears_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(folder: Path) -> None:
        if (tmp_path / "r").exists():
            raise KeyboardInterrupt

    monkeypatch.setattr(files, "sync_folder", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Recorder.create(tmp_path / "r", make_header())
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_not_the_recorders_is_never_removed(tmp_path):
    Recorder.create(tmp_path / "r", make_header()).close(complete=False)
    (tmp_path / "r" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="exists"):
        Recorder.create(tmp_path / "r", make_header())
    Recorder.resume(tmp_path / "r", make_header(), 0).discard()
    assert contents(tmp_path / "r") == {"notes.txt": b"mine"}


@pytest.mark.parametrize("resumed", [False, True])
def test_a_recording_that_is_moved_away_is_told_before_it_is_written_to(tmp_path: Path, resumed: bool) -> None:
    recorder, rows = Recorder.create(tmp_path / "r", make_header()), make_rows(2)
    recorder.append(rows[0])
    if resumed:
        recorder.close(complete=False)
        recorder = Recorder.resume(tmp_path / "r", make_header(), 1)
    os.rename(tmp_path / "r", tmp_path / "moved")
    before = contents(tmp_path / "moved")
    with pytest.raises(UserError, match="removed, moved or replaced"):
        recorder.append(rows[1]) if resumed else recorder.flush()
    assert contents(tmp_path / "moved") == before


def test_a_folder_without_offsets_is_not_taken_for_a_killed_start(tmp_path: Path) -> None:
    Recorder.create(tmp_path / "r", make_header()).close(complete=False)
    (tmp_path / "r/offsets.npy").unlink()
    with pytest.raises(UserError, match="exists: record under another name"):
        Recorder.create(tmp_path / "r", make_header())


def begin_at_once(folder: Path, name: str) -> None:
    """In one of several processes; exit code 0 for the one that has it."""
    try:
        write(folder, 20, source_run=name)
    except UserError:
        raise SystemExit(1) from None


def test_of_several_that_begin_at_once_one_records(tmp_path):
    context = multiprocessing.get_context("fork")
    for attempt in range(5):
        folder = tmp_path / str(attempt)
        processes = [context.Process(target=begin_at_once, args=(folder, str(i))) for i in range(4)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        winners = [str(i) for i, process in enumerate(processes) if process.exitcode == 0]
        found = Recording.open(folder)
        assert (winners, found.steps) == ([found.header.source_run], 20)


def test_a_kill_after_the_first_new_row_of_a_resume_leaves_a_valid_recording(tmp_path: Path) -> None:
    header = write(tmp_path / "r", 6)
    recorder = Recorder.resume(tmp_path / "r", header, 3)
    recorder.append(make_rows(1, seed=1)[0])  # another row than the fourth was
    recorder._file.close()  # neither flushed nor marked
    assert Recording.open(tmp_path / "r").steps in (3, 4)
