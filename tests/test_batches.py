"""data/batches.py: drawing, splitting over processes, recording, replaying; scripts/make_recording.py and the published recording."""

import errno
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_runs import make_data

from data.batches import Batches, DataConfig, random_offsets
from data.recording import Recorder, Recording
from data.token_files import TokenFile
from errors import UserError
from scripts import make_recording

T = 4
assert_equal = functools.partial(torch.testing.assert_close, rtol=0, atol=0)


@pytest.fixture(scope="session")
def dataset(tmp_path_factory) -> Path:
    return make_data(tmp_path_factory.mktemp("data") / "small", train=1000, validation=203)


def settings_for(dataset: Path | str, **changes) -> DataConfig:
    usual = {"dataset": str(dataset), "sequence_length": T, "global_batch": 8, "micro_batch": 4, "seed": 3}
    return DataConfig(**(usual | {"validation_sequences": 10} | changes))


def take(batches: Batches, steps: int) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    return [batches.next() for _ in range(steps)]


def record(dataset: Path, folder: Path, steps: int, **changes) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    batches = Batches(settings_for(dataset, record=str(folder), **changes), source_run="a")
    drawn = take(batches, steps)
    batches.close()
    return drawn


def test_the_first_validation_sequences_are_those_of_any_process(dataset):
    chosen = settings_for(dataset, micro_batch=1, global_batch=2)
    one, second = Batches(chosen), Batches(chosen, rank=1, world_size=2)
    assert torch.equal(one.validation_windows(0, 3)[0], second.validation_windows(0, 3)[0])
    assert torch.equal(one.validation_windows(0, 3)[0], torch.cat([tokens for tokens, _ in one.validation()])[:3])


def test_the_random_order_is_pinned():
    assert random_offsets(1337, 5, 1000, 4, 6).tolist() == [459, 345, 834, 897, 434, 332]


def test_inputs_are_the_tokens_at_the_offsets_and_targets_one_token_ahead(dataset):
    inputs, targets = (torch.cat(parts) for parts in zip(*Batches(settings_for(dataset)).next(), strict=True))
    tokens, offsets = TokenFile.open(dataset, "train").tokens, random_offsets(3, 0, 1000, T, 8).astype(int)
    assert inputs.tolist() == [tokens[o : o + T].tolist() for o in offsets]
    assert targets.tolist() == [tokens[o + 1 : o + T + 1].tolist() for o in offsets]


@settings(deadline=None, max_examples=40)
@given(*(st.integers(1, most) for most in (4, 4, 3)), st.integers(0, 2**63 - 1))
def test_any_split_sees_the_same_micro_batches(dataset, micro, world, accumulation, seed):
    sizes = {"global_batch": micro * world * accumulation, "micro_batch": micro, "seed": seed}
    with tempfile.TemporaryDirectory() as parent:
        single = record(dataset, Path(parent) / "r", 3, **sizes)
        replay = settings_for(dataset, replay=f"{parent}/r", **sizes)
        for config in (settings_for(dataset, **sizes), replay):
            ranks = [Batches(config, rank=rank, world_size=world) for rank in range(world)]
            for step in range(3):
                split = [batches.next() for batches in ranks]
                assert [len(share) for share in split] == [accumulation] * world
                assert_equal([batch for share in split for batch in share], single[step])
                numbers = [batches.number(m) for batches in ranks for m in range(accumulation)]
                assert numbers == list(range(world * accumulation))


def test_a_replay_has_its_own_order_and_refuses_another_seed(dataset, tmp_path):
    recorded = record(dataset, tmp_path / "r", 4, seed=5)
    for seed in (5, DataConfig.seed):  # the recording's own, and the default, which nobody typed
        assert_equal(take(Batches(settings_for(dataset, replay=str(tmp_path / "r"), seed=seed)), 4), recorded)
    with pytest.raises(UserError, match=rf"^data\.seed = 99: expected 5, its own, or {DataConfig.seed}, the default, "):
        Batches(settings_for(dataset, replay=str(tmp_path / "r"), seed=99))


def test_only_rank_zero_records(dataset, tmp_path):
    take(Batches(settings_for(dataset, record=str(tmp_path / "r")), rank=1, world_size=2), 2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_length": 5}, r"data\.sequence_length = 4, where this run has 5: set --data\.sequence-length 4$"),
        (
            {"sequence_length": 5, "global_batch": 16},
            r"_length = 4, where this run has 5, data\.global_batch = 8, where this run has 16: set .* 4 --data\.global-batch 8$",
        ),
    ],
)
def test_a_replay_of_other_sizes_is_refused_with_all_values(dataset, tmp_path, changes, message):
    record(dataset, tmp_path / "r", 2)
    with pytest.raises(UserError, match=message):
        Batches(settings_for(dataset, replay=str(tmp_path / "r"), **changes))


def test_a_recording_may_grow_while_it_is_replayed(dataset, tmp_path):
    """That it may not change, test_train.py has."""
    record(dataset, tmp_path / "r", 2)
    batches = Batches(settings_for(dataset, replay=str(tmp_path / "r")))
    longer = Batches(settings_for(dataset, record=str(tmp_path / "r")), source_run="a", resume_at=2)
    take(longer, 3)
    longer.close()
    batches.check_files()


def digests(batches: Batches, steps: int) -> list[str]:
    found = [batches.digest()]
    for _ in range(steps):
        batches.next()
        found.append(batches.digest())
    batches.close(complete=False)
    return found


def test_recorded_replayed_and_unrecorded_runs_of_the_same_data_have_one_digest(dataset, tmp_path):
    recorded = digests(Batches(settings_for(dataset, record=str(tmp_path / "r")), source_run="a"), 3)
    replayed = digests(Batches(settings_for(dataset, replay=str(tmp_path / "r"), micro_batch=2), 1, 2), 3)
    assert recorded == replayed == digests(Batches(settings_for(dataset), source_run="b"), 3)


@pytest.mark.parametrize("changes", [{"seed": 4}, {"sequence_length": 5}, {"global_batch": 4}])
def test_other_data_has_another_digest(dataset, changes):
    first, second = (digests(Batches(settings_for(dataset, **x)), 9) for x in ({}, changes))
    assert len({*first, *second[1:]}) == 10 + 9  # each step has its own


PUBLISHED = Path(__file__).resolve().parent.parent / "replay_batches" / "ansible"


def test_a_recording_made_without_a_run_is_that_of_the_run(dataset: Path, tmp_path: Path) -> None:
    batches = Batches(settings_for(dataset, record=str(tmp_path / "run")), source_run="a")
    logged = dict(enumerate(digests(batches, 12)[1:]))
    with pytest.raises(UserError, match=r"step 0: data_digest .*; data\.seed = 4, the run's 3$"):
        make_recording.make(settings_for(dataset, seed=4), tmp_path / "made", 12, logged, batches.identity)
    assert not (tmp_path / "made").exists()
    assert make_recording.make(settings_for(dataset), tmp_path / "made", 12, logged) == 12
    run, made = Recording.open(tmp_path / "run"), Recording.open(tmp_path / "made")
    assert made.complete
    assert np.array_equal(*([recording.row(step) for step in range(12)] for recording in (made, run)))


def test_a_full_disk_is_told_without_a_promise_of_rows(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(Recorder, "_put", Mock(side_effect=[*[None] * 6, full]))
    with pytest.raises(UserError, match=r"made: cannot write step \d: No space left on device$"):
        make_recording.make(settings_for(dataset), tmp_path / "made", 12, {})


def test_a_comparison_of_nothing_is_refused(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--steps = 3: expected more than 5"):
        make_recording.make(settings_for(dataset), tmp_path / "made", 3, {5: "a", 6: "b"})
    assert not (tmp_path / "made").exists()


def test_a_run_that_logged_no_digest_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "train_loss": 1.5, "data_digest": null}\n')
    with pytest.raises(UserError, match="no data_digest"):
        make_recording.logged_digests(tmp_path)


def test_the_command_line_takes_fields_of_the_recipe(dataset: Path, tmp_path: Path) -> None:
    fields = ["--data.dataset", str(dataset), "--data.sequence-length", "4", "--data.seed", "9"]
    make_recording.main(["configs/debug.py", "--steps", "3", "--out", str(tmp_path / "made"), *fields])
    made = Recording.open(tmp_path / "made")
    assert (made.steps, made.header.seed, made.header.sequence_length) == (3, 9, 4)


def test_a_recording_of_no_steps_is_refused(tmp_path: Path, refused: Callable[..., str]) -> None:
    arguments = "configs/debug.py", "--steps", 0, "--out", tmp_path / "none"
    assert "--steps = 0: expected a whole number of 1 or more" in refused(make_recording.main, *arguments)


def test_the_published_recording_is_whole_and_that_of_its_seed() -> None:
    recording = Recording.open(PUBLISHED)
    header = recording.header
    assert recording.complete
    assert recording.steps >= 6000
    assert (header.global_batch, header.sequence_length) == (32, 1024)
    assert header.seed is not None
    for step in (0, 1, 4321, recording.steps - 1):
        drawn = random_offsets(header.seed, step, header.data_tokens, header.sequence_length, header.global_batch)
        assert np.array_equal(recording.row(step), drawn)
