"""The batches of a run: drawn at random, recorded while training, or replayed from a recording.

One row is one optimizer step: ``global_batch`` offsets into the training tokens, in an order that knows nothing of processes. Cut
into micro-batches of ``micro_batch`` sequences, each rank has as many neighbors, in the order of ranks. So any number of processes, with
any accumulation, sees the same micro-batches.

Shapes: G global batch, B micro-batch, T sequence length, W validation windows, N any number of sequences.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from data.recording import Recorder, Recording, RecordingHeader, checksum_of_facts, next_checksum, read_header
from data.token_files import TokenFile
from errors import UserError, check_size, check_types, invalid, on_disk


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where tokens come from and how they are put into batches."""

    dataset: str = "data/tokens/stdlib"
    """Folder that scripts/prepare_data.py wrote."""
    sequence_length: int = 1024
    """Tokens a sequence."""
    global_batch: int = 32
    """Sequences an optimizer step, over all processes and micro-steps."""
    micro_batch: int = 32
    """Sequences that one process puts through the model at once."""
    seed: int = 1337
    """Seed of the random order. Beside a replay only the default or the recording's own is allowed: the order is recorded."""
    record: str = ""
    """Folder to record the batches to, e.g. replay_batches/NAME."""
    replay: str = ""
    """Folder of a recording whose batches to use again."""
    verify: Literal["sha256", "size"] = "sha256"
    """Check of the token files at the start: all bytes, or their size only."""
    validation_sequences: int = 640
    """Sequences of the fixed validation set, the same in every run whatever its batch sizes."""

    def __post_init__(self) -> None:
        check_types("data", self)
        for name in ("sequence_length", "global_batch", "micro_batch", "validation_sequences"):
            check_size(f"data.{name}", getattr(self, name), 1)
        if self.global_batch % self.micro_batch and not self.replay:  # a recording's own is told first
            raise invalid("data.global_batch", self.global_batch, f"a multiple of micro_batch = {self.micro_batch}")
        if not 0 <= self.seed < 2**63:
            raise invalid("data.seed", self.seed, "a whole number from 0 to 2**63 - 1")
        if self.record and Path(self.record).name in ("", ".."):
            raise invalid("data.record", self.record, "a folder with a name, e.g. replay_batches/NAME")
        if self.record and self.replay:
            raise invalid("data.record", self.record, f"nothing while data.replay = {self.replay!r} is set")


def random_offsets(seed: int, position: int, count: int, sequence_length: int, global_batch: int) -> np.ndarray:
    """Offsets [G], uint64, of step ``position``: a pure function of its arguments, uniform where T + 1 of ``count`` tokens fit."""
    # The counter's last word numbers the step, so that the streams of two steps never meet.
    generator = np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, 0, position]))
    return generator.integers(0, count - sequence_length, size=global_batch, dtype=np.uint64)


def _inputs_and_targets(block_BT: np.ndarray) -> tuple[Tensor, Tensor]:
    """[B, T + 1] of any integer type -> inputs and targets, int64 [B, T] each, one token apart, contiguous."""
    # Copied by NumPy, in one thread: beyond 32,768 elements torch's copy wakes all its threads, which costs far more than it gains
    # (15 to 34 ms a step were seen beside an H200).
    inputs_BT, targets_BT = (block_BT[:, columns].astype(np.int64, order="C") for columns in (np.s_[:-1], np.s_[1:]))
    return torch.from_numpy(inputs_BT), torch.from_numpy(targets_BT)


class Batches:
    """The batches of process ``rank`` of ``world_size``; rank 0 writes a recording.

    Attributes: ``position``, number of the next step's row, which is what a checkpoint stores; ``steps_available``, rows of the
    replayed recording (None: endless); ``recording_name``, "" when neither recorded nor replayed; ``identity``, JSON facts
    that are equal for two runs that record and replay the same.

    ``resume_at``: position stored in the checkpoint that the run goes on from; the recording is cut to that many steps at the next one.
    ``run_id``: a recording of another run is not gone on with.
    Raises ``UserError`` for data or recordings that are absent, foreign, damaged, too short or already there, and for batches that
    cannot be split over the processes.
    """

    def __init__(
        self,
        config: DataConfig,
        rank: int = 0,
        world_size: int = 1,
        source_run: str = "",
        resume_at: int | None = None,
        run_id: str = "",
    ):
        recording = _open_recording(config) if config.replay else None
        if config.global_batch % (config.micro_batch * world_size):
            share = f"micro_batch x processes = {config.micro_batch} x {world_size} = {config.micro_batch * world_size}"
            raise invalid("data.global_batch", config.global_batch, f"a multiple of {share}")
        # The processes of one host share the files: one of them reads all bytes.
        self._train, self._validation = _open_dataset(config, config.verify if rank == 0 else "size")
        self.position = resume_at or 0
        if recording is not None:
            self.header = recording.header
            if self.position > recording.steps:
                raise _ended(config.replay, recording.steps)
        else:
            self.header = _new_header(config, self._train, self._validation, source_run)
        folder = config.record or config.replay
        self._files: tuple[Any, ...] = (self._train.file, self._validation.file, *([recording] if recording else []))
        self.vocabulary_size = self.header.vocabulary_size
        self.recording_name = Path(folder).resolve().name if folder else ""
        self.steps_available = None if recording is None else recording.steps
        self._config, self._rank, self._world_size = config, rank, world_size
        shape = self.header.data_tokens, config.sequence_length, config.global_batch
        self._offsets_at: Callable[[int], np.ndarray] = (
            recording.row if recording else lambda position: random_offsets(config.seed, position, *shape)
        )
        facts = {name: getattr(self.header, name) for name in ("data_sha256", "sequence_length", "global_batch")}
        self._digest = checksum_of_facts(facts)
        for earlier in range(self.position):
            self._digest = next_checksum(self._digest, self._offsets_at(earlier))
        self._recorder = None
        if config.record and rank == 0:  # last: where anything after it fails, nobody could discard the recording
            self._recorder = _open_recorder(Path(folder), self.header, resume_at, run_id)

    @property
    def identity(self) -> dict[str, Any]:
        """Facts of the data as JSON values. ``recording_start`` is the digest that the recording's chain starts from."""
        names = ("data_sha256", "data_tokens", "validation_sha256", "sequence_length", "global_batch", "seed")
        return {
            **{name: getattr(self.header, name) for name in (*names, "vocabulary")},
            "validation_sequences": self._config.validation_sequences,
            "recording": self.recording_name,
            "recording_start": self.header.chain_start().hex() if self.recording_name else "",
        }

    def accumulation(self) -> int:
        return self._config.global_batch // (self._config.micro_batch * self._world_size)

    def number(self, micro_step: int) -> int:
        """Which of the step's micro-batches, in the order of the batch, this process has at its ``micro_step``."""
        return self._rank * self.accumulation() + micro_step

    def next(self) -> list[tuple[Tensor, Tensor]]:
        """This rank's micro-batches of the next step: (inputs [B, T], targets [B, T]) int64 on the CPU; recorded by rank 0.

        Raises ``UserError`` when the replayed recording has no more steps, or when a full disk ends the recording.
        """
        step = self.position
        if self.steps_available is not None and self.position >= self.steps_available:
            raise _ended(self._config.replay, step)
        offsets_G = self._offsets_at(step)
        size = self._config.micro_batch
        first = [self.number(micro_step) * size for micro_step in range(self.accumulation())]
        length = self._config.sequence_length + 1
        batches = [_inputs_and_targets(self._train.sequences(offsets_G[at : at + size], length)) for at in first]
        if self._recorder is not None:
            self._recorder.append(offsets_G)
        self._digest = next_checksum(self._digest, offsets_G)
        self.position += 1
        return batches

    def validation(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's share of the fixed validation set, in micro-batches as ``next`` gives them; the set's last may be smaller.

        Micro-batch i belongs to rank i % world_size: ranks may have unequal shares.
        """
        size, windows = self._config.micro_batch, self._config.validation_sequences
        for first in range(self._rank * size, windows, self._world_size * size):
            yield self.validation_windows(first, min(first + size, windows))

    def validation_windows(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Sequences ``first`` to ``last`` - 1 of the validation set, for any rank."""
        T, windows = self._config.sequence_length, self._config.validation_sequences
        # Spread evenly from the first to the last place where T + 1 tokens fit.
        furthest = self._validation.header.count - T - 1
        starts_W = np.arange(first, last, dtype=np.int64) * furthest // max(windows - 1, 1)
        return _inputs_and_targets(self._validation.sequences(starts_W, T + 1))

    def digest(self) -> str:
        """16 hexadecimal digits of everything drawn so far: equal for two runs at one position just when their data was equal.

        A chain like the recording's, but started from the data's facts alone and over the offsets alone, so that a run that recorded,
        one that replays it, and one with the same seed that did neither, agree.
        """
        return self._digest.hex()

    def check_files(self) -> None:
        """Raise ``UserError`` if tokens or recording were written to since they were opened: later batches are then other ones."""
        for file in self._files:
            file.check()

    def flush(self) -> None:
        """Bring the recording to the disk. Call it before a checkpoint, which must not be ahead of the recording."""
        if self._recorder is not None:
            self._recorder.flush()

    def close(self, *, complete: bool = True) -> None:
        if self._recorder is not None:
            self._recorder.close(complete=complete)

    def discard(self) -> None:
        if self._recorder is not None:
            self._recorder.discard()


def _ended(folder: str, steps: int) -> UserError:
    return UserError(f"{folder} ends at step {steps}: set --run.steps {steps} or record a longer one")


def _check_same_data(config: DataConfig, header: RecordingHeader, train: TokenFile, validation: TokenFile) -> None:
    pairs = {"training": (header.data_sha256, train), "validation": (header.validation_sha256, validation)}
    for name, (recorded, file) in pairs.items():
        if file.header.sha256 != recorded:
            way_out = "set --data.dataset to the folder with the former; or record again with scripts/make_recording.py"
            raise UserError(
                f"{config.replay} was recorded on other {name} tokens: SHA-256 {recorded[:16]}..., "
                f"those of data.dataset = {config.dataset} have {file.header.sha256[:16]}...: {way_out}"
            )


def _open_dataset(config: DataConfig, verify: Literal["sha256", "size"]) -> tuple[TokenFile, TokenFile]:
    if not config.dataset:
        raise invalid("data.dataset", config.dataset, "the folder of a data set")
    folder = Path(config.dataset)
    train, validation = (TokenFile.open(folder, split, verify=verify) for split in ("train", "val"))
    of_train, of_val = train.header.vocabulary, validation.header.vocabulary
    if of_train != of_val:
        raise UserError(f"{folder}: train.bin has {of_train} tokens, val.bin {of_val}: prepare both again")
    for file in (train, validation):
        count, needed = file.header.count, config.sequence_length + 1
        if count < needed:
            few = f"{count} tokens are less than one sequence of data.sequence_length + 1 = {needed}"
            raise UserError(f"{file.path}: {few}: set --data.sequence-length below {count} or use more data")
    return train, validation


def _open_recording(config: DataConfig) -> Recording:
    """Raises ``UserError`` for other settings than the recording was made with: they are refused, not bent."""
    folder = Path(config.replay)
    with on_disk("data.replay", f"read {folder}"):
        there = (folder / "header.json").is_file()
    if not there:
        expected = "the folder of a recording, with a header.json, e.g. replay_batches/NAME"
        raise invalid("data.replay", config.replay, expected)
    recording = Recording.open(folder)
    # First: with other tokens no setting helps. Their bytes are verified later, which may take minutes.
    any_length = dataclasses.replace(config, sequence_length=1)
    _check_same_data(config, recording.header, *_open_dataset(any_length, "size"))
    names = ("sequence_length", "global_batch")
    if odd := {name: to for name in names if (to := getattr(recording.header, name)) != getattr(config, name)}:
        recorded = ", ".join(
            f"data.{name} = {to}, where this run has {getattr(config, name)}" for name, to in odd.items()
        )
        options = " ".join(f"--data.{name.replace('_', '-')} {to}" for name, to in odd.items())
        raise UserError(f"{config.replay} was recorded with {recorded}: set {options}")
    if config.seed not in (DataConfig.seed, recording.header.seed):
        own = f"{recording.header.seed}, its own, or {DataConfig.seed}, the default"
        raise invalid("data.seed", config.seed, f"{own}, with data.replay = {config.replay}, which has its order")
    return recording


def _new_header(config: DataConfig, train: TokenFile, validation: TokenFile, source_run: str) -> RecordingHeader:
    return RecordingHeader(
        data_sha256=train.header.sha256,
        data_tokens=train.header.count,
        validation_sha256=validation.header.sha256,
        sequence_length=config.sequence_length,
        global_batch=config.global_batch,
        seed=config.seed,
        source_run=source_run,
        **{name: getattr(train.header, name) for name in ("vocabulary", "vocabulary_size", "dtype")},
    )


def _open_recorder(folder: Path, header: RecordingHeader, resume_at: int | None, run_id: str) -> Recorder:
    if resume_at is None or (resume_at == 0 and not os.path.exists(folder)):
        return Recorder.create(folder, header, run_id)
    if resume_at == 0 and read_header(folder)[2]:
        raise UserError(f"{folder}: a finished recording, and this run starts from step 0: record under another name")
    return Recorder.resume(folder, header, resume_at, run_id)
