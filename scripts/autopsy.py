"""Is the gradient of this checkpoint made by attention's rounding? Yes or no, in which layers and heads, and what to switch on.

    python scripts/autopsy.py runs/NAME/checkpoints/step_00001000 --data data/tokens/stdlib --out autopsies/NAME
    python scripts/autopsy.py watch.jsonl
    python scripts/autopsy.py ckpt.pt --data val.bin --attention sdpa_flash    # of nanoGPT
    python scripts/autopsy.py --hf FOLDER --data data/tokens/NAME              # a GPT-2 of Hugging Face

Prints a summary; with --out it is written as FOLDER/autopsy.txt with every head. The exit code is 0 whatever the verdict, 2 for what
cannot be examined.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import _root  # noqa: F401
import torch

import files
from autopsy.log import answer
from autopsy.measure import Subject, examine
from autopsy.report import Report, text
from errors import OneLineParser, UserError, exit_on_user_error, invalid
from training.metrics import read_lines

DTYPES = ("bfloat16", "float16", "float32")
ASSUMED = {"attention": "flash", "numerics": "hardware", "dtype": "bfloat16"}
"""What a Hugging Face folder and nanoGPT's checkpoint do not say, unless the command line does. A checkpoint of ours says it."""
HOST_THREADS = 4
"""Threads beside a GPU. What is left for the host are small arrays: as many threads as a server has cores wait for each other."""


def open_device(choice: str) -> torch.device:
    """The device of ``--device``; beside a GPU the host gets few threads."""
    if choice == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    torch.set_num_threads(min(HOST_THREADS, torch.get_num_threads()))
    return torch.device("cuda")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "checkpoint",
        type=Path,
        nargs="?",
        help="checkpoint, folder of a run, nanoGPT's ckpt.pt, or what watch() wrote",
    )
    parser.add_argument(
        "--hf",
        type=Path,
        help="local Hugging Face folder of a GPT-2 (others: docs/diagnosis.md)",
    )
    parser.add_argument("--data", type=Path, help="data set as prepare_data.py writes it, or nanoGPT's val.bin")
    parser.add_argument("--batches", type=int, default=4, help="forward and backward passes (default %(default)s)")
    parser.add_argument("--sequences", type=int, default=4, help="sequences of a batch (default %(default)s)")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence at most (default %(default)s)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--out", type=Path, help="folder for autopsy.txt")
    parser.add_argument(
        "--attention", help=f"with --hf or ckpt.pt: the preset assumed (default {ASSUMED['attention']})"
    )
    parser.add_argument("--numerics", help=f"with --hf or ckpt.pt: its base (default {ASSUMED['numerics']})")
    parser.add_argument("--dtype", choices=DTYPES, help=f"with --hf or ckpt.pt: autocast (default {ASSUMED['dtype']})")
    chosen = parser.parse_args(arguments)
    if (chosen.checkpoint is None) == (chosen.hf is None):
        raise UserError("name one thing to examine: a checkpoint, or --hf with a folder")
    chosen.nanogpt = chosen.hf is None and chosen.checkpoint.suffix == ".pt"
    for name, assumed in ASSUMED.items():
        value = getattr(chosen, name)
        if chosen.hf is None and not chosen.nanogpt and value is not None:
            raise UserError(f"--{name} {value}: it is for --hf and ckpt.pt; others are examined as they were trained")
        setattr(chosen, name, assumed if value is None else value)
    for name, least in (("batches", 1), ("sequences", 1), ("length", 2)):
        if getattr(chosen, name) < least:
            raise invalid(f"--{name}", getattr(chosen, name), f"at least {least}")
    if chosen.device == "cuda" and not torch.cuda.is_available():
        raise invalid("--device", "cuda", "cpu or auto: torch sees no CUDA device here")
    return chosen


def make_folder(folder: Path) -> None:
    """Raises ``UserError`` where there can be no such folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {folder}: cannot be made ({error.strerror})") from None


def open_subject(arguments: argparse.Namespace, device: torch.device) -> Subject:
    """What is examined. It takes what the trainer needs, which a file of ``watch`` does not."""
    from autopsy.subjects import checkpoint_subject, foreign_subject

    is_ours = arguments.hf is None and not arguments.nanogpt
    return (checkpoint_subject if is_ours else foreign_subject)(arguments, device)


@exit_on_user_error
def main() -> None:
    arguments = parse(sys.argv[1:])
    if arguments.checkpoint is not None and arguments.checkpoint.is_file() and not arguments.nanogpt:
        if arguments.out is not None:
            raise invalid("--out", str(arguments.out), "no folder: what a log says is printed")
        print("\n".join(answer(list(read_lines(arguments.checkpoint)))))
        return
    if arguments.checkpoint is not None and arguments.checkpoint.suffix == ".jsonl":
        raise UserError(f"{arguments.checkpoint}: no such file; expected what watch() wrote")
    device = open_device(arguments.device)
    subject = open_subject(arguments, device)
    if arguments.out is not None:  # before the work, so that none is lost
        make_folder(arguments.out)
    began = time.perf_counter()
    findings = examine(subject)
    report = Report(subject=subject, findings=findings, seconds=time.perf_counter() - began)
    print(text(report, every_head=False), end="")
    if arguments.out is not None:
        files.write_text(arguments.out / "autopsy.txt", text(report))
        print(f"wrote {arguments.out / 'autopsy.txt'}")


if __name__ == "__main__":
    main()
