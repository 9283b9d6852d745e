"""Recordings from and to the index files of the paper's published code.

    python scripts/convert_recording.py from-published FOLDER replay_batches/NAME --dataset D --sequence-length T --micro-batch B
    python scripts/convert_recording.py to-published replay_batches/NAME FOLDER --ranks R --micro-batch B

The published code writes one ``generated_indices_rank_{r}.txt`` a process, with one line an optimizer step: the offsets of that
process's sequences, its micro-batches one after the other. Its m-th micro-batch is the recording's micro-batch m * R + r.

Shapes: R processes, M micro-batches of a process in one step, B micro-batch, G = R * M * B global batch.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import _root  # noqa: F401
import numpy as np

from data.recording import Recorder, Recording, RecordingHeader
from data.token_files import TokenFile
from errors import OneLineParser, UserError, exit_on_user_error, invalid
from files import sync_folder

# As the published code writes them; a stray blank or zero would not come back from a round trip.
LINE = re.compile(r"(0|[1-9][0-9]{0,19})(,(0|[1-9][0-9]{0,19}))*\n")


def _rank_file(folder: Path, rank: int) -> Path:
    return folder / f"generated_indices_rank_{rank}.txt"


def _find_rank_files(folder: Path) -> list[Path]:
    """The files of ranks 0 to R - 1, in order."""
    pattern = re.compile(r"generated_indices_rank_(\d+)\.txt")
    found = [match for path in sorted(folder.glob("*")) if (match := pattern.fullmatch(path.name))]
    if not found:
        raise UserError(f"{folder}: no generated_indices_rank_0.txt there")
    paths = [_rank_file(folder, rank) for rank in range(max(int(match[1]) for match in found) + 1)]
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path}: missing, though a file of a higher rank is there: all ranks' files are needed")
    return paths


def _read_lines(path: Path) -> Iterator[list[int]]:
    """The offsets of each line; ``UserError`` names the first line that is not a list of them."""
    with open(path, encoding="ascii", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if not LINE.fullmatch(line):
                cut = "" if line.endswith("\n") else " (its line end is missing: cut short?)"
                raise UserError(f"{path}: line {number} is not offsets with commas between them{cut}: {line[:40]!r}")
            yield [int(offset) for offset in line.split(",")]


def _read_steps(paths: list[Path], micro_batch: int) -> Iterator[np.ndarray]:
    """The global rows [G] that the ranks' lines make; all lines must be of one length."""
    width = 0
    for number, lines in enumerate(itertools.zip_longest(*map(_read_lines, paths)), start=1):
        for path, line in zip(paths, lines, strict=True):
            if line is None:
                other = next(p for p, there in zip(paths, lines, strict=True) if there is not None)
                raise UserError(
                    f"{path} ends at line {number - 1}, {other} goes on: cut all ranks to the same number of lines"
                )
            width = width or len(line)
            if len(line) != width:
                raise UserError(f"{path}: line {number} has {len(line)} offsets, earlier lines have {width}")
        if width % micro_batch:
            raise invalid("--micro-batch", micro_batch, f"a divisor of the {width} offsets of a line of {paths[0]}")
        offsets_RMB = np.array(lines, dtype=object).reshape(len(paths), -1, micro_batch)
        yield offsets_RMB.transpose(1, 0, 2).ravel()


def from_published(folder: Path, name: Path, dataset: Path, sequence_length: int, micro_batch: int) -> int:
    """Write the recording ``name`` from the index files in ``folder``; the number of steps.

    Raises ``UserError`` when files are missing or ragged, when offsets lie beyond the data, or when ``name`` exists.
    """
    paths = _find_rank_files(folder)
    if os.path.lexists(name):
        raise UserError(f"{name} exists: choose another name or remove it")
    train = TokenFile.open(dataset, "train", verify="sha256")
    validation = TokenFile.open(dataset, "val")
    rows = _read_steps(paths, micro_batch)
    first = next(rows, None)
    if first is None:
        raise UserError(f"{paths[0]}: no steps in it")
    header = RecordingHeader(
        data_sha256=train.header.sha256,
        data_tokens=train.header.count,
        validation_sha256=validation.header.sha256,
        sequence_length=sequence_length,
        global_batch=len(first),
        seed=None,
        source_run=f"published code: {folder.resolve().name}",
        vocabulary=train.header.vocabulary,
        vocabulary_size=train.header.vocabulary_size,
        dtype=train.header.dtype,
        carries_tokens=False,
    )
    highest = train.header.count - sequence_length - 1
    # Under its name only when whole: half of it would replay, too.
    aside = name.with_name(f".{name.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        recorder = Recorder.create(aside, header)
        for step, offsets_G in enumerate(itertools.chain([first], rows)):
            if max(offsets_G) > highest:
                raise UserError(
                    f"{folder}: step {step} (line {step + 1}) has offset {max(offsets_G)}, the last one where {sequence_length} + 1 "
                    f"of the {train.header.count} tokens of {dataset} fit is {highest}: another data set or sequence length?"
                )
            recorder.append(offsets_G.astype(np.uint64))
        recorder.close()
        os.replace(aside, name)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    sync_folder(name.parent)
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
    paths = [_rank_file(folder, rank) for rank in range(ranks)]
    asides = [path.with_name(path.name + ".tmp") for path in paths]
    try:
        with contextlib.ExitStack() as stack:
            outputs = [stack.enter_context(open(aside, "w", encoding="ascii", newline="\n")) for aside in asides]
            for offsets_G in recording.offsets:
                offsets_MRB = offsets_G.reshape(-1, ranks, micro_batch)
                for rank, output in enumerate(outputs):
                    output.write(",".join(map(str, offsets_MRB[:, rank].ravel().tolist())) + "\n")
            for output in outputs:
                output.flush()
                os.fsync(output.fileno())
        for aside, path in zip(asides, paths, strict=True):
            os.replace(aside, path)
    finally:
        for aside in asides:
            aside.unlink(missing_ok=True)
    sync_folder(folder)
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
