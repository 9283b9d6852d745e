"""Train several variants of a recipe on the same batches, one a GPU, and stop those that have exploded.

    python scripts/run_variants.py configs/fast_failure.py --data.replay replay_batches/fast_failure \\
        --variants failing "control: --attention.default.preset flash_fp32_o" "published: --attention.default.numerics published"

A variant is ``NAME`` or ``NAME: [ABLATION.py] FLAGS``; it trains as ``train.py RECIPE [ABLATION.py] COMMON-FLAGS FLAGS --run.name NAME``.
``@FILE`` stands for the lines of a file, less those that begin with # (configs/reproduction.txt). As many run at once as there are GPUs (of
CUDA_VISIBLE_DEVICES) or ``--slots``; a free one takes the next in order. What a run prints goes to LOGS/NAME.log. A run is stopped
``--after`` steps behind its explosion (loss above its best + 0.5 for 200 steps, or not finite). Ctrl-C stops all; the same command with
``--resume`` goes on. The exit code is 0 unless a run failed by itself.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import _root  # noqa: F401
import torch

import config as configuration
from errors import OneLineParser, UserError, check_place, exit_on_user_error, invalid
from figures import curves

ROOT = Path(__file__).resolve().parent.parent
PATIENCE_FOR_AN_END = 60.0
"""Seconds that a run has between the interrupt and the kill: to flush its recording and close its files."""


@dataclass
class Variant:
    """One run: what is asked for, and how it stands."""

    name: str
    arguments: list[str]
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    step: int = -1
    exploded: int | None = None
    alarmed_at: int | None = None
    """The step at which its alarm stopped it."""
    interrupted: float = 0.0
    """When it was asked to end; 0: not yet."""
    outcome: str = "not started"
    failed: bool = False

    def start(self, gpu: str, logs: Path) -> None:
        """Start the run. ``gpu`` is what its CUDA_VISIBLE_DEVICES is to be; "" leaves it as it is."""
        with open(logs / f"{self.name}.log", "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-u", str(ROOT / "train.py"), *self.arguments],  # a log is read while it grows
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}),
                preexec_fn=_hear_interrupts,
            )

    def look(self) -> None:
        """Read how far the run has come."""
        try:
            metrics = curves.metrics(self.folder)
        except UserError:
            return  # nothing written yet
        losses = curves.column(metrics, "train_loss")
        self.step, self.exploded = int(losses.index[-1]), curves.explosion_step(losses)
        if "alarm" in metrics and metrics["alarm"].iloc[-1] == "stop":
            self.alarmed_at = int(metrics.index[-1])

    def interrupt(self) -> None:
        """Ask the run to end, once; make it, when it does not."""
        if self.process is not None and not self.interrupted:
            self.interrupted = time.monotonic()
            self.process.send_signal(signal.SIGINT)
        elif self.process is not None and time.monotonic() - self.interrupted > PATIENCE_FOR_AN_END:
            self.process.kill()

    def end(self, code: int) -> None:
        """Note how the run ended."""
        self.look()
        self.process = None
        self.failed = code != 0 and not self.interrupted and self.alarmed_at is None and self.exploded is None
        explosion = "" if self.exploded is None else f"exploded at step {self.exploded}; "
        how = f"{'stopped' if self.interrupted else 'ended'} at step {self.step}"
        self.outcome = explosion + (
            how if self.alarmed_at is None else f"stopped by its alarm at step {self.alarmed_at}"
        )
        if self.failed:
            self.outcome = f"failed with exit code {code}; see {self.name}.log"
        print(f"{self.name}: {self.outcome}", flush=True)


def _hear_interrupts() -> None:
    """In the run's process: a shell starts what it puts in the background with interrupts ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def stop_all(queue: Sequence[Variant]) -> None:
    """Interrupt the runs that are active and wait for their ends; terminate those that take too long, or all when interrupted again."""
    active = [variant for variant in queue if variant.process is not None]
    deadline = time.monotonic() + PATIENCE_FOR_AN_END
    try:
        for variant in active:
            variant.interrupt()
        for variant in active:
            assert variant.process is not None
            variant.process.wait(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass
    finally:
        for variant in active:
            if variant.process is not None:
                variant.process.terminate()  # nothing, where it has ended


def variants(args: argparse.Namespace, common: list[str]) -> list[Variant]:
    """The runs as typed, each checked as ``train.py`` would. Raises ``UserError`` for one that cannot be."""
    made: list[Variant] = []
    for text in args.variants:
        name, _, flags = (part.strip() for part in text.partition(":"))
        try:
            words = shlex.split(flags)
        except ValueError as error:
            raise invalid("--variants", text, f"flags as a shell reads them: {error}") from None
        ablation = list(itertools.takewhile(lambda word: not word.startswith("-"), words))
        arguments = [args.recipe, *ablation, *common, *words[len(ablation) :], "--run.name", name]
        folder = Path(configuration.load(arguments).run.folder) / name
        if name in [variant.name for variant in made]:
            raise invalid("--variants", name, "each name once")
        if args.logs.resolve() == folder.resolve():
            raise invalid(
                "--variants", name, f"another name, or another --logs: what the runs print goes to {args.logs}"
            )
        if folder.exists() and not args.resume:
            raise invalid("--variants", name, f"a name without a run, or --resume: {folder} exists")
        made.append(Variant(name, [*arguments, *(["--run.resume", "auto"] if args.resume else [])], folder))
    return made


def run(queue: list[Variant], args: argparse.Namespace, gpus: list[str]) -> None:
    """See them all through, as many at once as there are ``gpus``, whose names they get."""
    waiting, active, said = list(queue), dict[str, Variant](), time.monotonic()
    while waiting or active:
        for gpu in [gpu for gpu in gpus if gpu not in active][: len(waiting)]:
            active[gpu] = waiting.pop(0)
            active[gpu].start(gpu if args.on_gpus else "", args.logs)
        for gpu, variant in list(active.items()):
            assert variant.process is not None
            if (code := variant.process.poll()) is not None:
                variant.end(code)
                del active[gpu]
                continue
            variant.look()
            if variant.exploded is not None and variant.step >= variant.exploded + args.after:
                variant.interrupt()
        if time.monotonic() - said > 60:
            said = time.monotonic()
            print("  ".join(f"{variant.name} {variant.step}" for variant in active.values()), flush=True)
        time.sleep(args.every)


class _Parser(OneLineParser):
    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        """A line of an @FILE is one variant; none where it is empty or a remark."""
        line = arg_line.strip()
        return [line] if line and not line.startswith("#") else []


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The command line, and the flags that go to every run."""
    parser = _Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, fromfile_prefix_chars="@"
    )
    parser.add_argument("recipe", help="recipe, as train.py takes it")
    parser.add_argument("--variants", nargs="+", required=True, metavar="NAME[: FLAGS]", help="or @FILE")
    parser.add_argument("--slots", type=int, default=0, help="how many run at once (0: one a GPU, or one on a CPU)")
    parser.add_argument("--after", type=int, default=1000, help="steps that a run goes on behind its explosion (1000)")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two looks at the runs (5)")
    parser.add_argument("--resume", action="store_true", help="go on with runs that exist")
    parser.add_argument("--logs", type=Path, default=Path("runs/logs"))
    try:
        args, common = parser.parse_known_args(argv)
    except UnicodeDecodeError as error:
        raise UserError(f"--variants @FILE: not a file of text ({error})") from None
    if args.slots < 0:
        raise invalid("--slots", args.slots, "0 or more")
    return args, common


def places(args: argparse.Namespace) -> list[str]:
    """The GPUs to use as CUDA_VISIBLE_DEVICES names them, or as many numbers as runs go at once on a CPU. Raises ``UserError``."""
    if not args.on_gpus:
        return [str(number) for number in range(args.slots or 1)]
    count, listed = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if args.slots > count:
        raise invalid("--slots", args.slots, f"at most {count}, the GPUs that torch sees")
    names = [name.strip() for name in listed.split(",")] if listed else [str(number) for number in range(count)]
    return names[: args.slots or count]


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    args, common = parse(argv)
    queue = variants(args, common)
    args.on_gpus = torch.cuda.is_available() and configuration.load(queue[0].arguments).run.device != "cpu"
    gpus = places(args)
    check_place(args.logs / f"{queue[0].name}.log", "--logs")
    args.logs.mkdir(parents=True, exist_ok=True)
    try:
        run(queue, args, gpus)
    finally:
        stop_all(queue)
    width = max(len(variant.name) for variant in queue)
    print(*(f"{variant.name:{width}}  {variant.outcome}" for variant in queue), sep="\n")
    if any(variant.failed for variant in queue):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
