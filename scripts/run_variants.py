"""Train several variants of a recipe on the same batches, one a GPU, and stop those that have exploded.

    python scripts/run_variants.py configs/fast_failure.py --data.replay replay_batches/fast_failure \\
        --variants failing "control: --attention.default.preset flash_fp32_o" "paper: --attention.default.numerics rounded_forward"

A variant is ``NAME`` or ``NAME: [ABLATION.py] FLAGS``, with ``NAME@STEP`` for an ``--until`` of its own; it trains as
``train.py RECIPE [ABLATION.py] COMMON-FLAGS FLAGS --run.name NAME``. ``@FILE`` stands for the lines of a file, less those that begin
with # (configs/reproduction.txt). As many run at once as there are slots (GPUs, or ``--slots`` on a CPU); a free one takes the next in
order. What a run prints goes to LOGS/NAME.log. A run is stopped ``--after`` steps behind its explosion (loss above its best + 0.5 for 200
steps, or not finite), each at step ``--until`` though more are planned, and all of them when ``--minutes`` are over; the same command with
``--resume`` goes on from their checkpoints. The exit code is 0 unless a run failed by itself; Ctrl-C stops all.
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
from typing import IO

import _root  # noqa: F401
import torch

import config as configuration
from errors import OneLineParser, UserError, check_place, exit_on_user_error, invalid
from figures import curves
from training.metrics import METRICS_FILE, read_metrics

ROOT = Path(__file__).resolve().parent.parent
PATIENCE_FOR_AN_END = 60.0
"""Seconds that a run has between the interrupt and the kill: to flush its recording and close its files."""


@dataclass
class Variant:
    """One run: what is asked for, and how it stands. ``outcome`` is set once it has ended."""

    name: str
    arguments: list[str]
    folder: Path
    steps: int
    until: int = 0
    """The step at which it is stopped; 0: never."""
    process: subprocess.Popen[bytes] | None = None
    log: IO[bytes] | None = None
    written: float = 0.0
    slot: int = -1
    step: int = -1
    loss: float | None = None
    exploded: int | None = None
    interrupted: float | None = None
    finished: bool = False
    """Has seen its end: the line of the step behind the last one, which follows the last evaluation and checkpoint."""
    outcome: str = ""
    failed: bool = False

    def look(self) -> None:
        """Read how far the run has come."""
        try:
            records = read_metrics(self.folder)
        except UserError:
            return  # nothing written yet
        steps, losses = curves.column(records, "train_loss")
        self.finished = records[-1]["step"] >= self.steps
        if steps:
            self.step, self.loss = steps[-1], losses[-1]
            self.exploded = curves.explosion_step(losses, steps=steps)

    def metrics_written(self) -> float:
        """When the metrics were last written; 0 where there are none."""
        path = self.folder / METRICS_FILE
        return path.stat().st_mtime if path.exists() else 0.0

    def start(self, slot: int, gpu: str | None, logs: Path) -> None:
        """Start or resume the run. ``gpu`` is what its CUDA_VISIBLE_DEVICES is to be; None leaves it as it is."""
        resume = ["--run.resume", "yes"] if self.folder.exists() else []
        environment = os.environ | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})
        self.written = self.metrics_written()
        self.slot, self.log = slot, open(logs / f"{self.name}.log", "ab")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-u", str(ROOT / "train.py"), *self.arguments, *resume],  # a log is read while it grows
            stdout=self.log,
            stderr=subprocess.STDOUT,
            env=environment,
            preexec_fn=_hear_interrupts,
        )

    def stop(self) -> None:
        """Ask the run to end, once; make it, when it does not."""
        assert self.process is not None
        if self.interrupted is None:
            self.interrupted = time.monotonic()
            self.process.send_signal(signal.SIGINT)
        elif time.monotonic() - self.interrupted > PATIENCE_FOR_AN_END:
            self.process.kill()

    def end(self) -> None:
        """Note how the run ended."""
        assert self.process is not None
        assert self.log is not None
        self.look()
        self.log.close()
        code, self.process = self.process.returncode, None
        explosion = "" if self.exploded is None else f"exploded at step {self.exploded}; "
        if self.interrupted is not None:
            how = "killed, as it did not stop," if code == -signal.SIGKILL else "stopped"
            self.outcome = f"{explosion}{how} at step {self.step}"
        elif code == 1 and (alarm := self.alarm_step()) is not None:
            self.outcome = f"{explosion}stopped by its alarm at step {alarm}"
        elif code == 0 or self.exploded is not None:
            self.outcome = f"{explosion}ended at step {self.step}"
        else:
            self.outcome, self.failed = f"failed with exit code {code}; see {self.log.name}", True

    def alarm_step(self) -> int | None:
        """The step at which this start of the run was stopped by its alarm (``--alarm.response stop``), if it was."""
        if self.metrics_written() == self.written:
            return None  # what is there is of an earlier start
        try:
            last = read_metrics(self.folder)[-1]
        except UserError:
            return None
        return int(last["step"]) if last.get("alarm") == "stop" else None


def _hear_interrupts() -> None:
    """In the run's process: a shell starts what it puts in the background with interrupts ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def visible(slots: Sequence[int], listed: str, count: int) -> dict[int, str]:
    """CUDA_VISIBLE_DEVICES for the run in each slot: an entry of ``listed``, the variable as it is, or where that is empty a number.

    ``count`` GPUs can be used. Raises ``UserError`` for a slot without a GPU.
    """
    names = [name.strip() for name in listed.split(",")][:count] if listed else [str(number) for number in range(count)]
    for slot in slots:
        if not 0 <= slot < len(names):
            among = f" of CUDA_VISIBLE_DEVICES={listed}" if listed else ""
            raise invalid("--slots", slot, f"a number from 0 to {len(names) - 1}, a place among the GPUs{among}")
    return {slot: names[slot] for slot in slots}


def stop_all(queue: Sequence[Variant]) -> None:
    """Interrupt the runs that are active and wait for their ends; terminate those that take too long, or all when interrupted again."""
    processes = [variant.process for variant in queue if variant.process is not None]
    deadline = time.monotonic() + PATIENCE_FOR_AN_END
    for process in processes:
        process.send_signal(signal.SIGINT)
    try:
        for process in processes:
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in processes:
            process.terminate()  # nothing, where it has ended


def variants(args: argparse.Namespace, common: list[str]) -> list[Variant]:
    """The runs as typed, each checked as ``train.py`` would. Raises ``UserError`` for one that cannot be."""
    made: list[Variant] = []
    for text in args.variants:
        called, _, flags = (part.strip() for part in text.partition(":"))
        name, own, until = called.partition("@")
        if own and not (until.isdecimal() and int(until) > 0):
            raise invalid("--variants", called, "NAME or NAME@STEP, STEP a whole number from 1 on")
        try:
            words = shlex.split(flags)
        except ValueError as error:
            raise invalid("--variants", text, f"flags as a shell reads them: {error}") from None
        ablation = list(itertools.takewhile(lambda word: not word.startswith("-"), words))
        arguments = [args.recipe, *ablation, *common, *words[len(ablation) :], "--run.name", name]
        config = configuration.load(arguments)
        folder = Path(config.run.folder) / name
        if name in [variant.name for variant in made]:
            raise invalid("--variants", name, "each name once")
        if args.logs.resolve() == folder.resolve():
            raise invalid(
                "--variants", name, f"another name, or another --logs: what the runs print goes to {args.logs}"
            )
        if folder.exists() and not args.resume:
            raise invalid("--variants", name, f"a name without a run, or --resume: {folder} exists")
        made.append(Variant(name, arguments, folder, config.run.steps, int(until) if own else args.until))
    return made


def run(queue: list[Variant], args: argparse.Namespace, gpus: dict[int, str]) -> None:
    """See them all through. ``gpus``: for each slot the GPU that its run sees; empty on a CPU."""
    began, said = time.monotonic(), 0.0
    waiting, active = list(queue), list[Variant]()
    for variant in queue if args.resume else []:
        variant.look()
        if variant.exploded is not None or variant.finished or 0 < variant.until <= variant.step:
            variant.outcome = "was over already"
            waiting.remove(variant)
    while waiting or active:
        over = args.minutes > 0 and time.monotonic() - began > 60 * args.minutes
        free = [slot for slot in args.slots if slot not in [variant.slot for variant in active]]
        while waiting and free and not over:
            active.append(waiting.pop(0))
            slot = free.pop(0)
            active[-1].start(slot, gpus.get(slot), args.logs)
        for variant in list(active):
            variant.look()
            assert variant.process is not None
            spent = variant.exploded is not None and variant.step >= variant.exploded + args.after
            spent |= 0 < variant.until <= variant.step
            if variant.process.poll() is not None:
                variant.end()
                active.remove(variant)
                print(f"{variant.name}: {variant.outcome}", flush=True)
            elif spent or over:
                variant.stop()
        if over:
            for variant in waiting:
                variant.outcome = "not started"
            waiting = []
        if time.monotonic() - said > 60:
            said = time.monotonic()
            print(f"{said - began:5.0f} s  " + "  ".join(f"{v.name} {v.step}" for v in active), flush=True)
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
    parser.add_argument("--variants", nargs="+", required=True, metavar="NAME[@STEP][: FLAGS]", help="or @FILE")
    parser.add_argument(
        "--slots", type=int, nargs="+", help="which of the visible GPUs to use, from 0 (all), or CPU slots (0)"
    )
    parser.add_argument("--after", type=int, default=1000, help="steps that a run goes on behind its explosion (1000)")
    parser.add_argument("--until", type=int, default=0, metavar="STEP", help="stop a run once it is there; 0 never")
    parser.add_argument("--minutes", type=float, default=0.0, help="stop everything after so long; 0 never")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two looks at the runs (5)")
    parser.add_argument("--resume", action="store_true", help="go on with runs that exist and are not over")
    parser.add_argument("--logs", type=Path, default=Path("runs/logs"))
    try:
        return parser.parse_known_args(argv)
    except UnicodeDecodeError as error:
        raise UserError(f"--variants @FILE: not a file of text ({error})") from None


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    args, common = parse(argv)
    queue = variants(args, common)
    gpu = torch.cuda.is_available() and configuration.load(queue[0].arguments).run.device != "cpu"
    args.slots = args.slots or (list(range(torch.cuda.device_count())) if gpu else [0])
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    gpus = visible(args.slots, listed, torch.cuda.device_count()) if gpu else {}
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
