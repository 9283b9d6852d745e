"""scripts/make_recording.py, and the published recording of the short recipe."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_batches import make_dataset, settings_for

from data.batches import open_batches, random_offsets
from data.recording import Recording
from errors import UserError
from scripts import make_recording

PUBLISHED = Path(__file__).resolve().parent.parent / "replay_batches" / "public"
STEPS = 12


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return make_dataset(tmp_path / "data")


def trained(dataset: Path, folder: Path) -> dict[int, str]:
    """Records as a training run does; the digests that it logs."""
    batches = open_batches(settings_for(dataset, record=str(folder)), source_run="a")
    digests = {}
    for step in range(STEPS):
        batches.next()
        digests[step] = batches.digest()
    batches.close()
    return digests


def test_it_writes_what_a_run_records(dataset: Path, tmp_path: Path) -> None:
    digests = trained(dataset, tmp_path / "run")
    assert make_recording.make(settings_for(dataset), tmp_path / "made", STEPS, digests) == STEPS
    run, made = Recording.open(tmp_path / "run"), Recording.open(tmp_path / "made")
    assert made.complete
    assert np.array_equal(made.offsets, run.offsets)


def test_other_batches_are_refused_and_nothing_stays(dataset: Path, tmp_path: Path) -> None:
    digests = trained(dataset, tmp_path / "run")
    with pytest.raises(UserError, match="step 0: data_digest"):
        make_recording.make(settings_for(dataset, seed=4), tmp_path / "made", STEPS, digests)
    assert not (tmp_path / "made").exists()


def test_the_command_line_takes_fields_of_the_recipe(dataset: Path, tmp_path: Path) -> None:
    fields = ["--data.dataset", str(dataset), "--data.sequence-length", "4", "--data.seed", "9"]
    make_recording.main(["configs/debug.py", "--steps", "3", "--out", str(tmp_path / "made"), *fields])
    made = Recording.open(tmp_path / "made")
    assert (made.steps, made.header.seed, made.header.sequence_length) == (3, 9, 4)


def test_the_published_recording_is_whole_and_small() -> None:
    recording = Recording.open(PUBLISHED)
    header = recording.header
    assert recording.complete
    assert recording.steps >= 6000
    assert (header.global_batch, header.sequence_length) == (32, 1024)
    size = sum(path.stat().st_size for path in PUBLISHED.iterdir())
    assert size <= 16 * recording.steps * header.global_batch


def test_the_published_recording_is_that_of_its_seed() -> None:
    recording = Recording.open(PUBLISHED)
    header = recording.header
    assert header.seed is not None
    for step in (0, 1, 4321, recording.steps - 1):
        drawn = random_offsets(header.seed, step, header.data_tokens, header.sequence_length, header.global_batch)
        assert np.array_equal(recording.offsets[step], drawn)
