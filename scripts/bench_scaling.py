"""Weak scaling over the GPUs of one host: whole training steps of one torchrun over all of them, beside every GPU alone at the same time.

    python scripts/bench_scaling.py configs/fast_failure.py --processes 2 --json scaling.json \\
        --variants plain overlap=speed.overlap=true big=speed.overlap=true,speed.bucket_mb=100 --set speed.late_values=true

A GPU at its power limit is as fast as its card and its neighbours let it be. So the base of a round is ``alone``: one run of train.py
for each GPU, independent and all at once, with the recipe's own batch. Then each variant (``NAME=section.field=value,...``, ``plain``
changes nothing) is one torchrun over all GPUs, its global batch ``--processes`` times the recipe's. ``--set`` is for all of them.
Batches are drawn and recorded and metrics written; no evaluation, probe or checkpoint. The tokens are random unless ``data.dataset``
is set.

A run is timed from when it, and all that run beside it, are past step ``--skip`` until all have made ``--steps`` - ``--skip`` more;
then it is stopped, before it would write a checkpoint. Its tokens/s are all its tokens over all its time by the columns ``tokens`` and
``seconds`` of metrics.jsonl, not a mean of single steps' rates, which jitter where values are read late. A variant that fails is told
of, left out from then on, and makes the exit code 2. SIGINT, SIGTERM and SIGHUP end the runs first, then this program.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import config as configuration
from config import TrainConfig
from errors import OneLineParser, UserError, exit_on_user_error, invalid
from files import without_folders, write_json
from scripts.bench_train import QUIET, named_fields, options, typed_fields, write_tokens
from training.metrics import METRICS_FILE, read_metrics

ROOT = Path(__file__).resolve().parent.parent
ALONE = "alone"
LOOK_EVERY = 0.2
"""Seconds between two looks at how far the runs are."""
PATIENCE_FOR_AN_END = 60.0
"""Seconds between asking a run to end and killing it: torchrun gives its processes 30."""
LEAST_STEPS = 10_000
"""A run is given so many, or 100 times ``--steps``, and stopped long before: one that nobody stops ends some day."""
LABEL = "BENCH_SCALING_RUN"
"""Variable in the environment of a run and of all that it starts; nothing but ``Run.processes`` reads it."""
# What torchrun has to say about a process that failed comes behind what that process said.
_OF_TORCHRUN = re.compile(r"torch[./]distributed[./]elastic|\] failed \(exitcode")


@dataclass
class Run:
    """One run: a command that appends to ``folder``/metrics.jsonl, in a process group of its own."""

    name: str
    command: list[str]
    environment: dict[str, str]
    folder: Path
    log: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        # As torchrun does for several processes; a value of the user's own stays.
        environment = {"OMP_NUM_THREADS": "1", **os.environ, **self.environment, LABEL: str(self.folder)}
        with open(self.log, "wb") as stderr, open(self.log.with_suffix(".out"), "wb") as stdout:
            self.process = subprocess.Popen(
                self.command, stdout=stdout, stderr=stderr, env=environment, start_new_session=True
            )

    def lines(self) -> int:
        """Whole lines of its metrics: one a step."""
        path = self.folder / METRICS_FILE
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def last_words(self) -> str:
        """The end of its stderr, and of its stdout, where a run says why it stopped by itself."""
        errors, said = (
            [line.strip()[:200] for line in path.read_text(errors="replace").splitlines() if line.strip()]
            for path in (self.log, self.log.with_suffix(".out"))
        )
        cut = next((i for i, line in enumerate(errors) if _OF_TORCHRUN.search(line)), len(errors))
        return " | ".join([*(errors[:cut] or errors)[-4:], *said[-1:]]) or "it said nothing"

    def processes(self) -> list[int]:
        """Its process and all that came of it, in whatever group they are and whoever is their parent by now (Linux only)."""
        found, label = [], os.fsencode(f"{LABEL}={self.folder}")
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # it has just ended, or is another user's
                found += [int(path.parent.name)] if label in path.read_bytes().split(b"\0") else []
        return found

    def signal(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)


class Request:
    """A signal that asks this program to end, kept until ``obey``. Raised where it comes, it could hit between the start of a process
    and the note of its number, or while runs are ended: they would be left behind."""

    def __init__(self) -> None:
        self.number = 0

    def keep(self, number: int, _: object) -> None:
        self.number = number

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """A signal that was ignored before, as SIGHUP under nohup, stays so."""
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            for number in before:
                signal.signal(number, signal.SIG_IGN if before[number] is signal.SIG_IGN else self.keep)
            yield
        finally:
            for number in before:
                signal.signal(number, before[number])

    def obey(self) -> None:
        if self.number:
            sys.exit(128 + self.number)


def stop(runs: Sequence[Run]) -> None:
    """End all of them, whatever they do. torchrun passes the request on to its processes, which are in groups of their own, but not to
    those that it is just starting; and where it is killed, to none."""
    for run in runs:
        run.signal(signal.SIGTERM)
    deadline = time.monotonic() + PATIENCE_FOR_AN_END
    for run in runs:
        if run.process is not None:
            try:
                run.process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                run.signal(signal.SIGKILL)
                run.process.wait()
    while (left := [n for run in runs for n in run.processes()]) and time.monotonic() < deadline + PATIENCE_FOR_AN_END:
        for number in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        time.sleep(0.02)


def wait(runs: Sequence[Run], wanted: Sequence[int], deadline: float, look: Callable[[], None]) -> list[int]:
    """How many lines each has once every one has the wanted number; ``look`` is called again and again meanwhile. Raises ``UserError``
    for a run that ends or takes too long."""
    while True:
        look()
        found = [run.lines() for run in runs]
        if all(have >= want for have, want in zip(found, wanted, strict=True)):
            return found
        for run, have, want in zip(runs, found, wanted, strict=True):
            assert run.process is not None
            code = run.process.poll()
            if code is not None:
                raise UserError(f"{run.name}: ended by itself after {have} steps, exit code {code}: {run.last_words()}")
            if have < want and time.monotonic() > deadline:
                raise UserError(f"{run.name}: --run-seconds were over after {have} of {want} steps: {run.last_words()}")
        time.sleep(LOOK_EVERY)


def measured(
    runs: Sequence[Run], skip: int, steps: int, seconds: float, look: Callable[[], None] = lambda: None
) -> list[dict[str, Any]]:
    """What the runs, side by side, do in a time in which all of them train: see ``rate``. They are over when it returns or raises."""
    deadline = time.monotonic() + seconds
    try:
        for run in runs:
            run.start()
        first = wait(runs, [skip + 1] * len(runs), deadline, look)
        last = wait(runs, [have + steps - skip for have in first], deadline, look)
        return [rate(read_metrics(run.folder)[a - 1 : b]) for run, a, b in zip(runs, first, last, strict=True)]
    finally:
        stop(runs)


def rate(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Tokens over time from the end of the first line's step to the end of the last's; and each step's milliseconds."""
    tokens, seconds = (lines[-1][name] - lines[0][name] for name in ("tokens", "seconds"))
    each = [round(1000 * (b["seconds"] - a["seconds"]), 2) for a, b in itertools.pairwise(lines)]
    whole = {"steps": len(lines) - 1, "tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}
    return whole | {"step_ms": each}


def efficiency(measured_round: dict[str, Any], name: str) -> dict[str, float]:
    """A variant's tokens/s in a round over the sum of all alone in that round, and over as many times the slowest of them."""
    alone = [one["tokens_per_second"] for one in measured_round[ALONE]]
    own = measured_round["variants"][name]["tokens_per_second"]
    return {"of_sum": own / sum(alone), "of_slowest": own / (len(alone) * min(alone))}


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def summary(rounds: Sequence[dict[str, Any]], failed: dict[str, str]) -> list[dict[str, Any]]:
    """Medians and ranges over rounds: each GPU alone, their sum, each variant."""
    alone = [[one["tokens_per_second"] for one in r[ALONE]] for r in rounds]
    rows = [
        {"name": f"alone {i}", "tokens_per_second": spread(each)} for i, each in enumerate(zip(*alone, strict=True))
    ]
    rows += [{"name": "alone, sum", "tokens_per_second": spread([sum(each) for each in alone])}] if alone else []
    for name in dict.fromkeys(name for r in rounds for name in r["variants"]):
        of = [r for r in rounds if name in r["variants"]]
        row: dict[str, Any] = {"name": name, "rounds": len(of)}
        row["tokens_per_second"] = spread([r["variants"][name]["tokens_per_second"] for r in of])
        row |= {base: spread([efficiency(r, name)[base] for r in of]) for base in ("of_sum", "of_slowest")}
        rows.append(row)
    return rows + [{"name": name, "failed": why} for name, why in failed.items()]


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [f"{'':20} {'tokens/s':>11} {'range':>23} {'of alone, sum':>28} {'of N x the slowest alone':>28}"]
    for row in rows:
        if "failed" in row:
            lines.append(f"{row['name']:20} failed: {row['failed']}")
            continue
        of = row["tokens_per_second"]
        ends = f"{of['least']:,.0f} - {of['most']:,.0f}"
        cells = [f"{of['median']:11,.0f}", f"{ends:>23}"]
        for base in ("of_sum", "of_slowest"):
            if base in row:
                median, least, most = (100 * row[base][name] for name in ("median", "least", "most"))
                cells.append(f"{f'{median:.1f} % ({least:.1f}-{most:.1f})':>28}")
        lines.append(" ".join([f"{row['name']:20}", *cells]))
    return "\n".join(lines)


@dataclass
class Bench:
    """What is asked for, checked; and what the runs are made of."""

    args: argparse.Namespace
    recipe: TrainConfig
    variants: dict[str, dict[str, str]]
    folder: Path
    request: Request

    def flags(self, name: str, processes: int, fields: dict[str, str]) -> list[str]:
        """What train.py is given."""
        recipe, given = self.recipe, self.args.set
        cuda = recipe.run.device == "cuda" or (recipe.run.device == "auto" and torch.cuda.is_available())
        own = {
            "run.name": name,
            "run.folder": self.folder / "runs",
            "run.steps": max(LEAST_STEPS, 100 * self.args.steps),
            "run.log_every": 1,
            "run.device": "cuda" if cuda else "cpu",
            "wandb.mode": "disabled",
            "data.dataset": given.get("data.dataset", self.folder / "data"),
            "data.record": self.folder / "recordings" / name,
            "data.global_batch": processes * recipe.data.global_batch,
        }
        return [*self.args.recipe, *options(recipe, {**QUIET, **given, **own, **fields})]

    def alone(self, number: int) -> list[Run]:
        """One process for each GPU, which it finds as torchrun's process of that local rank would."""
        names = [f"{ALONE}-{gpu}-{number}" for gpu in range(self.args.processes)]
        return [
            self._run(name, [], {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": str(gpu)}, self.flags(name, 1, {}))
            for gpu, name in enumerate(names)
        ]

    def together(self, name: str, number: int) -> list[Run]:
        """One run of all processes."""
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.args.processes}"]
        flags = self.flags(f"{name}-{number}", self.args.processes, self.variants[name])
        return [self._run(f"{name}-{number}", launcher, {}, flags)]

    def _run(self, name: str, launcher: list[str], environment: dict[str, str], flags: list[str]) -> Run:
        command = [sys.executable, *launcher, str(ROOT / "train.py"), *flags]
        return Run(name, command, environment, self.folder / "runs" / name, self.folder / f"{name}.err")

    def check(self) -> None:
        """Raise ``UserError`` for what train.py would refuse."""
        for flags in (
            self.flags("a", 1, {}),
            *(self.flags("a", self.args.processes, f) for f in self.variants.values()),
        ):
            config = configuration.load(flags)
            if config.run.device == "cuda" and self.args.processes > torch.cuda.device_count():
                raise invalid(
                    "--processes", self.args.processes, f"at most {torch.cuda.device_count()}, the GPUs of this host"
                )

    def rounds(self) -> Iterator[tuple[list[dict[str, Any]], dict[str, str], dict[str, Any]]]:
        """(the rounds so far, variants that failed and why, the machine), after every measurement."""
        args, done, failed, machine = self.args, list[dict[str, Any]](), dict[str, str](), dict[str, Any]()
        timed = (args.skip, args.steps, args.run_seconds, self.request.obey)
        for number in range(args.rounds):
            runs = self.alone(number)
            done.append({ALONE: _told(f"round {number + 1}/{args.rounds} {ALONE}", runs, *timed), "variants": {}})
            machine = machine or machine_of([run.folder for run in runs])
            yield done, failed, machine
            for name in self.variants:
                if name in failed:
                    continue
                try:
                    title = f"round {number + 1}/{args.rounds} {name}"
                    (done[-1]["variants"][name],) = _told(title, self.together(name, number), *timed)
                except UserError as error:
                    failed[name] = without_folders(str(error))
                    print(f"{name} failed: {failed[name]}", file=sys.stderr, flush=True)
                yield done, failed, machine


def _told(title: str, runs: Sequence[Run], *timed: Any) -> list[dict[str, Any]]:
    print(f"{title}: starting", file=sys.stderr, flush=True)
    began = time.monotonic()
    results = measured(runs, *timed)
    rates = " + ".join(f"{result['tokens_per_second']:,.0f}" for result in results)
    print(f"{title}: {rates} tokens/s, after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return results


def machine_of(folders: Sequence[Path]) -> dict[str, Any]:
    """Versions, commit and devices, from the records of runs."""
    records = [json.loads((folder / "config.json").read_text()) for folder in folders]
    facts = {name: records[0][name] for name in ("versions", "git_commit")}
    return facts | {"devices": [record["device"] for record in records]}


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line. Raises ``UserError`` for numbers that cannot be."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="+", help="recipe and ablation, as train.py takes them")
    parser.add_argument("--processes", type=int, required=True, metavar="N", help="GPUs of this host, or CPU processes")
    parser.add_argument("--set", nargs="+", default=[], metavar="field=value", help="for all runs, those alone too")
    parser.add_argument("--variants", nargs="+", default=["plain"], metavar="NAME=field=value,...")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120, help="steps of a run, those skipped among them (120)")
    parser.add_argument("--skip", type=int, default=30, help="steps at the start that are not timed (30)")
    parser.add_argument(
        "--run-seconds", type=float, default=300.0, help="most that a run may take, start and all (300)"
    )
    parser.add_argument("--json", type=Path, help="file for all numbers, rewritten after every measurement")
    args = parser.parse_args(argv)
    for name, least in (("processes", 1), ("rounds", 1), ("skip", 0), ("steps", args.skip + 1), ("run_seconds", 1)):
        if getattr(args, name) < least:
            raise invalid(f"--{name.replace('_', '-')}", getattr(args, name), f"at least {least}")
    args.set = typed_fields("--set", args.set)
    return args


def write(path: Path | None, **content: Any) -> None:
    """The JSON, if it is asked for. Raises ``UserError`` where it cannot be written."""
    try:
        if path is not None:
            write_json(path, content)
    except OSError as error:
        raise UserError(f"--json {path}: cannot write it ({error.strerror})") from error


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    recipe = configuration.load([*args.recipe, *options(configuration.load(args.recipe), args.set)])
    variants = dict(named_fields(text) for text in args.variants)
    if len(variants) < len(args.variants) or ALONE in variants:
        raise invalid("--variants", " ".join(args.variants), f"each name once, and not {ALONE}")
    words = [without_folders(word) for word in (sys.argv[1:] if argv is None else argv)]
    facts = {"command": ["scripts/bench_scaling.py", *words], "processes": args.processes}
    facts |= {"steps": args.steps, "skip": args.skip}
    rows, failed = list[dict[str, Any]](), dict[str, str]()
    request = Request()
    with request.listening(), tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, recipe, variants, Path(folder), request)
        bench.check()
        write(args.json, **facts, complete=False, rounds=[], rows=[])
        write_tokens(bench.folder / "data", recipe.model.vocab_size, max(200_000, 40 * recipe.data.sequence_length))
        for rounds, failed, machine in bench.rounds():
            rows = summary(rounds, failed)
            over = all(name in rounds[-1]["variants"] or name in failed for name in variants)
            complete = len(rounds) == args.rounds and over
            write(args.json, **facts, complete=complete, machine=machine, rounds=rounds, rows=rows)
            request.obey()
    print(table(rows))
    if failed:
        raise UserError("; ".join(f"{name} failed: {why}" for name, why in failed.items()))


if __name__ == "__main__":
    main()
