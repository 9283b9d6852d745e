"""Time whole training steps: variants of the config, and nanoGPT if given, in one process and interleaved; a table, and JSON.

    python scripts/bench_train.py configs/fast_failure.py --nanogpt ../nanoGPT --variants plain reference=speed.reference=true

A variant is ``NAME=section.field=value,section.field=value``; ``plain`` is the recipe as it stands; ``inductor.option=value`` is an
option of torch.compile that no config has. Each runs ``train.loop`` itself:
batches drawn and recorded, metrics written, gradients clipped; no evaluation, checkpoint or probe falls into a round. A round runs every
variant for ``--steps`` steps between two synchronisations; the table has medians over rounds, and the range. nanoGPT runs as its
bench.py does: torch.compile, fused AdamW, no clipping, ``loss.item()`` every step, one fixed batch on the device.

Nothing hangs in silence: what takes longer than ``--variant-seconds`` ends the process, the stacks of all threads on stderr, and
``--json`` has what was known by then ("complete": false). A variant that fails is told of and makes the exit code 2.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

import config as configuration
import files
import train
from config import TrainConfig
from data.token_files import TokenWriter
from errors import OneLineParser, UserError, exit_on_user_error, invalid
from model import GPT
from scripts.bench_profile import PARTS, Stopwatch, Timed, matmul_rate, products, profile, synchronise
from scripts.bench_trial import Contender, Trial, write_results
from training import distributed, optim, step, throughput
from training.distributed import Distributed
from training.metrics import Metrics
from training.run import open_run

WARM_UP = 3
QUIET = {"evaluation.every": 0, "telemetry.every": 0, "checkpoint.every": 0, "data.verify": "size"}
"""Fields of a run of which only the steps are timed."""


def allocated() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def write_tokens(folder: Path, vocabulary: int, count: int) -> None:
    """A data set of random tokens, as unequal in frequency as words are: probability 1 / (rank + 2.7)."""
    generator = np.random.default_rng(0)
    weights = 1 / (np.arange(vocabulary) + 2.7)
    for split, size in (("train", count), ("val", count // 10)):
        tokens = generator.choice(vocabulary, size=size, p=weights / weights.sum()).astype(np.uint16)
        with TokenWriter(
            folder, split, dtype="uint16", vocabulary="random", vocabulary_size=vocabulary, source="bench"
        ) as out:
            out.write(tokens)


def typed_fields(option: str, changes: Iterable[str]) -> dict[str, str]:
    """Fields typed as ``section.field=value``. Raises ``UserError`` for one without a value."""
    pairs = [change.partition("=") for change in changes]
    for field, equals, _ in pairs:
        if not equals:
            raise invalid(option, field, "section.field=value")
    return {field: value for field, _, value in pairs}


def named_fields(text: str) -> tuple[str, dict[str, str]]:
    """(name, the fields it changes) of a variant as typed."""
    name, _, changes = text.partition("=")
    return name, typed_fields("--variants", filter(None, changes.split(",")))


def variant(recipe: TrainConfig, text: str, folder: Path) -> tuple[str, TrainConfig, dict[str, Any]]:
    """(name, config, the fields it changes) of a variant as typed; it writes into ``folder``, on the data set there."""
    name, fields = named_fields(text)
    here = {"run.name": name, "run.folder": folder / "runs", "data.record": folder / "recordings" / name}
    here |= {} if recipe.data.dataset and "data.dataset" in fields else {"data.dataset": folder / "data"}
    of_config = {key: value for key, value in fields.items() if not key.startswith("inductor.")}
    return name, changed(recipe, {**QUIET, **here, **of_config}), fields


def changed(recipe: TrainConfig, fields: dict[str, Any]) -> TrainConfig:
    return configuration.override(recipe, options(recipe, fields))


def options(recipe: TrainConfig, fields: dict[str, Any]) -> list[str]:
    """The fields as the command line has them."""
    return [word for name, value in fields.items() for word in _option(recipe, name, value)]


def _option(recipe: TrainConfig, key: str, value: Any) -> list[str]:
    """One field as the command line has it; switches are flags there."""
    current: Any = recipe
    for part in key.split("."):
        current = getattr(current, part, None)
    flag, value = key.replace("_", "-"), str(value)
    if isinstance(current, bool):
        if value.lower() not in ("true", "false"):
            raise UserError(f"--variants: {key} = {value!r}: expected true or false")
        section, _, last = flag.rpartition(".")
        return [f"--{flag}" if value.lower() == "true" else f"--{section}.no-{last}"]
    return [f"--{flag}", value]


def build(recipe: TrainConfig, text: str, folder: Path) -> Contender:
    """A run of this repository, ready to train; its globals are set by ``enter`` before every round."""
    name, config, settings = variant(recipe, text, folder)

    def enter() -> None:
        distributed.set_deterministic(config.precision.deterministic, config.precision.fill_memory)
        distributed.set_tf32(config.precision.tf32)

    enter()
    place = distributed.start(config.run.device)
    before = allocated()
    of_compile = {
        key.removeprefix("inductor."): json.loads(value) for key, value in settings.items() if "inductor." in key
    }
    with mock.patch.object(torch, "compile", functools.partial(torch.compile, options=of_compile or None)):
        built = open_run(config, place)
    said = [""]

    def run(count: int) -> None:
        start = built.start_step
        built.config = dataclasses.replace(config, run=dataclasses.replace(config.run, steps=start + count))
        with contextlib.ExitStack() as patches:
            patches.enter_context(mock.patch.object(Distributed, "say", lambda place, text: said.append(text)))
            # The loop saves its end, and every round has one.
            patches.enter_context(mock.patch.object(train, "save", return_value=None))
            try:
                train.loop(built)
            except SystemExit as stop:
                # The policy for a loss that is not finite: the end of a run, but of no other variant's.
                raise RuntimeError(said[-1]) from stop
        built.start_step = start + count

    contender = Contender(name, config.data.global_batch * config.data.sequence_length, run, enter, settings, built)
    run(WARM_UP)
    synchronise()
    contender.own_bytes = allocated() - before
    return contender


def build_nanogpt(folder: Path, config: TrainConfig, batch: tuple[torch.Tensor, torch.Tensor]) -> Contender:
    """nanoGPT's model and optimiser, stepped as in its bench.py, of the recipe's shape."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", folder / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["nanogpt_model"] = importlib.util.module_from_spec(spec)
    device = batch[0].device

    def enter() -> None:
        torch.use_deterministic_algorithms(False)
        distributed.set_tf32(True)

    enter()
    before = allocated()
    torch.manual_seed(1337)
    with contextlib.redirect_stdout(sys.stderr):
        spec.loader.exec_module(module)
        shape = config.model
        model = module.GPT(
            module.GPTConfig(
                block_size=shape.block_size,
                vocab_size=shape.padded_vocab_size,
                n_layer=shape.n_layer,
                n_head=shape.n_head,
                n_embd=shape.n_embd,
                dropout=0,
                bias=False,
            )
        ).to(device)
        optimizer = model.configure_optimizers(
            weight_decay=1e-2, learning_rate=1e-4, betas=(0.9, 0.95), device_type=device.type
        )
    compiled = torch.compile(model) if config.precision.compile else model

    def run(count: int) -> None:
        for _ in range(count):
            with torch.autocast(device.type, dtype=torch.bfloat16):
                _, loss = compiled(*batch)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            loss.item()

    contender = Contender("nanogpt", batch[0].numel(), run, enter, {"from": str(folder)})
    run(WARM_UP)
    synchronise()
    contender.own_bytes = allocated() - before
    return contender


def one_round(contender: Contender, steps: int) -> None:
    contender.enter()
    others = allocated() - contender.own_bytes
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    synchronise()
    began = time.perf_counter()
    contender.run(steps)
    synchronise()
    contender.times.append((time.perf_counter() - began) / steps)
    if torch.cuda.is_available():
        contender.peak_bytes = max(contender.peak_bytes, torch.cuda.max_memory_allocated() - others)


def time_parts(contender: Contender, steps: int) -> None:
    """Milliseconds of a step by part, in a pass of its own: the marks are put around the parts from outside."""
    built = contender.built
    if built is None:
        return
    watch = Stopwatch()
    contender.enter()
    with contextlib.ExitStack() as patches:
        patch = lambda *a: patches.enter_context(mock.patch.object(*a))  # noqa: E731
        patch(built.batches, "next", watch.wrap("data", built.batches.next))
        patch(built.network, "model", Timed(built.network.model, watch, "forward"))
        patch(torch.Tensor, "backward", watch.wrap("backward", torch.Tensor.backward))
        patch(step, "clip_gradients", watch.wrap("clip", optim.clip_gradients))
        patch(built.network.optimizer, "step", watch.wrap("optimiser", built.network.optimizer.step))
        patch(Metrics, "log", watch.wrap("logging", Metrics.log))
        contender.run(steps)
    contender.parts = watch.milliseconds(steps)


def profiled(contender: Contender) -> str:
    contender.enter()
    return profile(contender.name, contender.run, 5)


def row_of(contender: Contender, flops_per_token: int, ceiling: float, peak: float | None) -> dict[str, Any]:
    median = statistics.median(contender.times)
    rate = contender.tokens_per_step / median
    return {
        "name": contender.name,
        "settings": contender.settings,
        "build_seconds": contender.build_seconds,
        "ms_per_step": 1000 * median,
        "ms_range": [1000 * min(contender.times), 1000 * max(contender.times)],
        "ms_all_rounds": [1000 * t for t in contender.times],
        "tokens_per_second": rate,
        "mfu": throughput.mfu(rate, flops_per_token, 1, peak),
        "of_matmul_ceiling": rate * flops_per_token / ceiling,
        "peak_gib": contender.peak_bytes / 2**30,
        "parts_ms": contender.parts,
    }


def table(rows: list[dict[str, Any]]) -> str:
    base = next(
        (row["tokens_per_second"] for row in rows if row["name"] == "nanogpt" and "failed" not in row), math.nan
    )
    lines = [f"{'variant':28} {'ms':>8} {'range':>15} {'tokens/s':>10} {'nano=1':>7} {'MFU':>6} {'ceil':>6} {'GiB':>6}"]
    for row in rows:
        if "failed" in row:
            lines.append(f"{row['name']:28} failed: {row['failed']}")
            continue
        low, high = row["ms_range"]
        mfu = "-" if row["mfu"] is None else f"{row['mfu']:.3f}"
        lines.append(
            f"{row['name']:28} {row['ms_per_step']:8.2f} {low:7.2f}-{high:7.2f} {row['tokens_per_second']:10.0f} "
            f"{row['tokens_per_second'] / base:7.3f} {mfu:>6} {row['of_matmul_ceiling']:6.3f} {row['peak_gib']:6.2f}"
        )
    heading = f"{'parts, device ms (host ms)':28} " + " ".join(f"{part:>15}" for part in PARTS)
    with_parts = [row for row in rows if row.get("parts_ms")]
    for row in with_parts:
        cells = (f"{row['parts_ms'][part]['device']:7.2f} ({row['parts_ms'][part]['host']:5.2f})" for part in PARTS)
        lines += [heading] * (row is with_parts[0]) + [f"{row['name']:28} " + " ".join(f"{c:>15}" for c in cells)]
    return "\n".join(lines)


def measure(args: argparse.Namespace, folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    recipe = changed(configuration.load(args.recipe), typed_fields("--set", args.set))
    write_tokens(folder / "data", recipe.model.vocab_size, max(200_000, 40 * recipe.data.sequence_length))
    texts = {text.partition("=")[0]: text for text in args.variants}
    trial = Trial(args.variant_seconds, args.json)
    distributed.set_deterministic(True)  # cuBLAS hears of it before CUDA starts, whatever the first variant is
    torch._dynamo.config.recompile_limit = 256  # the variants share the code of one class
    started = time.perf_counter()
    for name, text in texts.items():
        if time.perf_counter() - started > args.build_seconds:
            trial.failed[name] = "not built: --build-seconds were over"
            continue
        trial.build(name, build, recipe, text, folder)
    device = torch.device("cuda" if torch.cuda.is_available() and recipe.run.device != "cpu" else "cpu")
    if args.nanogpt:
        tokens = np.fromfile(folder / "data" / "train.bin", dtype=np.uint16)[-100_000:].astype(np.int64)
        B, T = recipe.data.micro_batch, recipe.data.sequence_length
        x_BT, y_BT = (
            torch.from_numpy(np.resize(tokens[shift:], (B, T)) % recipe.model.vocab_size).to(device) for shift in (0, 1)
        )
        trial.build("nanogpt", build_nanogpt, args.nanogpt, recipe, (x_BT, y_BT))
    for _ in range(args.rounds):
        trial.note()
        for contender in trial.sound():
            trial.attempt(contender.name, one_round, contender, args.steps)
    trial.note()
    sound = trial.sound()
    for contender in sound:
        trial.attempt(f"{contender.name} by part", time_parts, contender, args.steps)
    if args.profile:
        chosen = [c for c in sound if not args.profile_variants or c.name in args.profile_variants]
        tables = (trial.attempt(f"{c.name} profile", profiled, c) for c in chosen)
        files.write_text(args.profile, "".join(filter(None, tables)))
    size = 8192 if device.type == "cuda" else 256
    ceiling, peak = matmul_rate(device, size, size, size), throughput.peak_flops(device, recipe.run.peak_tflops)
    plans = recipe.attention.resolve(recipe.model.n_layer, recipe.model.n_head)
    with torch.device("meta"):
        flops = GPT(recipe.model, plans).flops_per_token(recipe.data.sequence_length)
    print(throughput.explain(flops, peak))
    print(f"matmul ceiling measured here: {ceiling / 1e12:.1f} TFLOP/s (BF16, {size} cubed)")
    if args.matmuls:
        for library in ("cublas", "cublaslt") if device.type == "cuda" else ("",):
            if library:
                torch.backends.cuda.preferred_blas_library(library)
            print(library, products(device, recipe.model, recipe.data.micro_batch * recipe.data.sequence_length))
    rows = [row_of(c, flops, ceiling, peak) for c in sound]
    rows += trial.failures()
    return rows, {"matmul_ceiling_tflops": ceiling / 1e12, "flops_per_token": flops, "peak_flops": peak}


def check(args: argparse.Namespace) -> None:
    """Raise ``UserError`` for what cannot be, before anything is built. What only a machine can refuse fails by itself, later."""
    for name in ("rounds", "steps"):
        if getattr(args, name) < 1:
            raise invalid(f"--{name}", getattr(args, name), "at least 1")
    recipe = changed(configuration.load(args.recipe), typed_fields("--set", args.set))
    names = [variant(recipe, text, Path("bench"))[0] for text in args.variants]
    if len(set(names)) < len(names) or "nanogpt" in names:
        raise invalid("--variants", " ".join(args.variants), "each name once, and not nanogpt")
    if unknown := sorted(set(args.profile_variants or ()) - {*names, "nanogpt"}):
        raise invalid("--profile-variants", unknown[0], [*names, "nanogpt"])
    if args.nanogpt and not (args.nanogpt / "model.py").is_file():
        raise UserError(f"--nanogpt {args.nanogpt}: no model.py in it")
    for path in filter(None, (args.json, args.profile)):
        if not path.parent.is_dir():
            raise UserError(f"{path}: no folder {path.parent}")


@exit_on_user_error
def main() -> None:
    parser = OneLineParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", nargs="+", help="recipe and ablation, as train.py takes them")
    parser.add_argument("--set", nargs="+", default=[], metavar="field=value", help="of the recipe, for all variants")
    parser.add_argument("--variants", nargs="+", default=["plain"], metavar="NAME=field=value,...")
    parser.add_argument("--nanogpt", type=Path, help="folder of a nanoGPT checkout")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20, help="steps a round")
    parser.add_argument("--profile", type=Path, help="file for the tables of kernels")
    parser.add_argument("--profile-variants", nargs="+", help="only these")
    parser.add_argument("--matmuls", action="store_true", help="time every matrix product of the step by itself")
    parser.add_argument("--build-seconds", type=float, default=math.inf, help="build no further variant after so long")
    watch = (
        "end the process, with all stacks on stderr, when a variant's building, or a round of it, takes longer (120)"
    )
    parser.add_argument("--variant-seconds", type=float, default=120.0, metavar="N", help=watch)
    parser.add_argument("--json", type=Path, help="file for all numbers; rewritten as they come, complete at the end")
    args = parser.parse_args()
    check(args)
    with tempfile.TemporaryDirectory() as folder:
        rows, facts = measure(args, Path(folder))
    print(table(rows))
    write_results(args.json, rows, complete=True, **facts)
    if failed := [row for row in rows if "failed" in row]:
        raise UserError("; ".join(f"{row['name']} failed: {row['failed']}" for row in failed))


if __name__ == "__main__":
    main()
