"""Recordings from and to the index files of the paper's published code.

    python scripts/convert_recording.py from-published FOLDER replay_batches/NAME --dataset D --sequence-length T --micro-batch B
    python scripts/convert_recording.py to-published replay_batches/NAME FOLDER --ranks R --micro-batch B

The published code writes one ``generated_indices_rank_{r}.txt`` a process, with one line an optimizer step: the offsets of that
process's sequences, its micro-batches one after the other. Its m-th micro-batch is the recording's micro-batch m * R + r.

Shapes: R processes, M micro-batches of a process in one step, B micro-batch, G = R * M * B global batch.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import _root  # noqa: F401
import numpy as np

from data.recording import Recorder, Recording, RecordingHeader, whole_recording
from data.token_files import TokenFile
from errors import OneLineParser, UserError, exit_on_user_error, invalid
from files import write_bytes


def _rank_file(folder: Path, rank: int) -> Path:
    return folder / f"generated_indices_rank_{rank}.txt"


def _read_rank(path: Path) -> np.ndarray:
    """Offsets of a process [S, M B], uint64. Raises ``UserError`` for a file that is absent, empty, ragged or cut short."""
    if not path.is_file():
        raise UserError(f"{path}: missing: all ranks' files are needed, from generated_indices_rank_0.txt on")
    content = path.read_bytes()
    if not content.endswith(b"\n"):
        raise UserError(f"{path}: no steps in it, or its last line end is missing: cut short?")
    try:
        return np.loadtxt(content.decode("ascii").splitlines(), np.uint64, comments=None, delimiter=",", ndmin=2)
    except ValueError as error:
        raise UserError(f"{path}: not lines of offsets with commas between them ({error})") from None


def _read_steps(folder: Path, micro_batch: int) -> np.ndarray:
    """The global rows [S, G] that the ranks' lines make. Raises ``UserError`` where they are not of one shape."""
    count = max(len(list(folder.glob("generated_indices_rank_*.txt"))), 1)
    ranks = [_read_rank(_rank_file(folder, rank)) for rank in range(count)]
    steps, width = ranks[0].shape
    for rank, offsets in enumerate(ranks):
        if offsets.shape != (steps, width):
            lines = f"{len(offsets)} lines of {offsets.shape[1]} offsets, that of rank 0 {steps} of {width}"
            raise UserError(f"{_rank_file(folder, rank)}: {lines}: cut all ranks to the same number of lines")
    if width % micro_batch:
        raise invalid("--micro-batch", micro_batch, f"a divisor of the {width} offsets of a line")
    offsets_RSMB = np.stack(ranks).reshape(count, steps, -1, micro_batch)
    return offsets_RSMB.transpose(1, 2, 0, 3).reshape(steps, -1)


def from_published(folder: Path, name: Path, dataset: Path, sequence_length: int, micro_batch: int) -> int:
    """Write the recording ``name`` from the index files in ``folder``; the number of steps.

    Raises ``UserError`` when files are missing or ragged, when offsets lie beyond the data, or when ``name`` exists.
    """
    offsets_SG = _read_steps(folder, micro_batch)
    train = TokenFile.open(dataset, "train", verify="sha256")
    validation = TokenFile.open(dataset, "val")
    header = RecordingHeader(
        data_sha256=train.header.sha256,
        data_tokens=train.header.count,
        validation_sha256=validation.header.sha256,
        sequence_length=sequence_length,
        global_batch=offsets_SG.shape[1],
        seed=None,
        source_run=f"published code: {folder.resolve().name}",
        vocabulary=train.header.vocabulary,
        vocabulary_size=train.header.vocabulary_size,
        dtype=train.header.dtype,
        carries_tokens=False,
    )
    highest = train.header.count - sequence_length - 1
    beyond = np.argwhere(offsets_SG > max(highest, 0))
    if len(beyond) or highest < 0:
        step = beyond[0, 0] if len(beyond) else 0
        raise UserError(
            f"{folder}: step {step} (line {step + 1}) has offset {offsets_SG[step].max()}, the last one where {sequence_length} + 1 "
            f"of the {train.header.count} tokens of {dataset} fit is {highest}: another data set or sequence length?"
        )
    with whole_recording(name) as aside:
        recorder = Recorder.create(aside, header)
        for offsets_G in offsets_SG:
            recorder.append(offsets_G)
        recorder.close()
    return recorder.steps


def to_published(name: Path, folder: Path, ranks: int, micro_batch: int) -> int:
    """Write the index files of ``ranks`` processes into ``folder`` from the recording ``name``; the number of steps.

    Raises ``UserError`` when the batch cannot be split so, or when ``folder`` has such files.
    """
    recording = Recording.open(name)
    batch = recording.header.global_batch
    if batch % (ranks * micro_batch):
        raise UserError(
            f"{name}: its global batch of {batch} is no multiple of --ranks x --micro-batch = {ranks} x {micro_batch}"
        )
    if any(folder.glob("generated_indices_rank_*")):
        raise UserError(f"{folder}: has generated_indices_rank files: choose another folder or remove them")
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        offsets_SM = recording.offsets.reshape(recording.steps, -1, ranks, micro_batch)[:, :, rank]
        text = io.BytesIO()
        np.savetxt(text, offsets_SM.reshape(recording.steps, -1), fmt="%d", delimiter=",")
        write_bytes(_rank_file(folder, rank), text.getvalue())
    return recording.steps


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of 1 or more")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description="Recordings from and to the index files of the paper's published code.")
    commands = parser.add_subparsers(dest="command", required=True)
    read = commands.add_parser("from-published", help="index files -> recording")
    read.add_argument("folder", type=Path, metavar="FOLDER", help="has generated_indices_rank_0.txt and so on")
    read.add_argument("name", type=Path, metavar="NAME", help="recording to write, e.g. replay_batches/NAME")
    read.add_argument("--dataset", type=Path, required=True, help="folder of the data set that the offsets point into")
    read.add_argument(
        "--sequence-length", type=_positive, required=True, help="tokens a sequence (published code: 1024)"
    )
    write = commands.add_parser("to-published", help="recording -> index files")
    write.add_argument("name", type=Path, metavar="NAME", help="recording to read, e.g. replay_batches/NAME")
    write.add_argument("folder", type=Path, metavar="FOLDER", help="gets generated_indices_rank_0.txt and so on")
    write.add_argument("--ranks", type=_positive, required=True, help="processes that will read them")
    for command in (read, write):
        command.add_argument("--micro-batch", type=_positive, required=True, help="sequences a process takes at once")
    return parser


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    args = _parser().parse_args(argv)
    try:
        if args.command == "from-published":
            steps = from_published(args.folder, args.name, args.dataset, args.sequence_length, args.micro_batch)
            print(f"{args.name}: {steps} steps from {args.folder}")
        else:
            steps = to_published(args.name, args.folder, args.ranks, args.micro_batch)
            print(f"{args.folder}: {steps} steps for {args.ranks} ranks from {args.name}")
    except OSError as error:
        raise UserError(f"{error.filename or args.name}: {error.strerror}") from None


if __name__ == "__main__":
    main()
