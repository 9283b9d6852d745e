"""Time whole training steps: variants of the config, and nanoGPT if given, in one process and interleaved; a table, and JSON.

    python scripts/bench_train.py configs/fast_failure.py --nanogpt ../nanoGPT --variants plain "reference: --speed.reference"

A variant is ``NAME`` or ``NAME: FLAGS``, flags as train.py takes them; flags of the command itself go to every variant. They train on
random tokens unless --data.dataset is among the flags. Each runs
``train.loop`` itself: batches drawn and recorded, metrics written, gradients clipped; no evaluation, checkpoint or probe falls into a
round. A round runs every variant for ``--steps`` steps between two synchronizations; the table has medians over rounds and their range,
also of the ratio of tokens a second to nanoGPT's in the same round.
nanoGPT runs as its bench.py does: torch.compile, fused AdamW, no clipping, ``loss.item()`` every step, one fixed batch on the device.
A variant that fails while it is built or runs is reported, and the exit code is 2; the others continue.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import _root  # noqa: F401

from errors import OneLineParser, UserError, check_size, exit_on_user_error, invalid, trainer_packages

with trainer_packages():
    import numpy as np
    import torch

    import config as configuration
    import files
    import train
    from config import TrainConfig
    from data.token_files import TokenWriter
    from model import GPT
    from training import distributed, throughput
    from training.distributed import DistContext
    from training.record import environment
    from training.run import open_run
    from training.signals import PreemptionHandler

WARM_UP = 3
STEPS_ONLY = {f"{section}.every": 0 for section in ("evaluation", "telemetry", "checkpoint")}
OWN = ("run.name", "run.folder", "data.record", *STEPS_ONLY)
"""Fields of a run of which only the steps are timed: nobody else sets them."""


@dataclass
class Variant:
    """One row of the table: ``run(n)`` trains n steps, ``enter()`` sets its globals. ``times``: seconds a step, one a round."""

    name: str
    tokens_per_step: int
    run: Callable[[int], None]
    enter: Callable[[], None]
    settings: str
    flops_per_token: int = 0
    peak: float | None = None
    """FLOP/s, where it is known."""
    own_bytes: int = 0
    peak_bytes: int = 0
    times: list[float] = field(default_factory=list)
    sensors: list[dict[str, float]] = field(default_factory=list)
    failed: str = ""

    def attempt(self, function: Callable[["Variant", Any], None], argument: Any) -> None:
        try:
            function(self, argument)
        except Exception as error:
            self.failed = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
            print(f"{self.name} failed: {self.failed}", file=sys.stderr)


def device_of(config: TrainConfig) -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() and config.run.device != "cpu" else "cpu")


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def write_tokens(folder: Path, vocabulary: int, count: int) -> None:
    """A data set of random tokens, as unequal in frequency as words are: probability 1 / (rank + 2.7)."""
    generator = np.random.default_rng(0)
    weights = 1 / (np.arange(vocabulary) + 2.7)
    facts = {"dtype": "uint16", "vocabulary": "random", "vocabulary_size": vocabulary, "source": "bench"}
    for split, size in (("train", count), ("val", count // 10)):
        with TokenWriter(folder, split, **facts) as out:
            out.write(generator.choice(vocabulary, size=size, p=weights / weights.sum()))


def as_flags(values: dict[str, Any]) -> list[str]:
    return [f"--{field}={value}" for field, value in values.items()]


def own_refused(flags: list[str]) -> list[str]:
    """The flags. Raises ``UserError`` for one of ``OWN``."""
    for flag in (word.partition("=")[0] for word in flags):
        if flag.removeprefix("--") in OWN:
            raise UserError(f"{flag}: bench_train.py sets this itself")
    return flags


def parse_variant(recipe: TrainConfig, text: str, folder: Path) -> tuple[str, TrainConfig, str]:
    """(name, config, flags) of a variant as typed; it writes into ``folder``."""
    name, _, flags = (part.strip() for part in text.partition(":"))
    if "=" in name:
        raise invalid("--variants", text, 'NAME, or "NAME: --section.field value ..."')
    here = {"run.name": name, "run.folder": folder / "runs", "data.record": folder / "recordings" / name}
    try:
        typed = own_refused(shlex.split(flags))
        return name, configuration.override(recipe, [*as_flags(STEPS_ONLY | here), *typed]), flags
    except ValueError as error:  # shlex's, too
        raise UserError(f"--variants {name}: {error}") from None


def prepare(variant: Variant, build: Callable[[], Callable[[int], None]]) -> None:
    variant.enter()
    before, began = torch.cuda.memory_allocated(), time.perf_counter()
    variant.run = build()
    variant.run(WARM_UP)
    synchronize()
    variant.own_bytes = torch.cuda.memory_allocated() - before
    print(f"{variant.name}: ready after {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)


def of_variant(recipe: TrainConfig, text: str, folder: Path) -> Variant:
    name, config, settings = parse_variant(recipe, text, folder)

    def enter() -> None:
        distributed.set_deterministic(config.precision.deterministic)
        distributed.set_tf32(False)

    def build() -> Callable[[int], None]:
        built, said = open_run(config, distributed.start(config.run.device)), [""]
        variant.flops_per_token, variant.peak = built.network.flops_per_token, built.peak_flops

        def run(count: int) -> None:
            start = built.start_step
            built.config = dataclasses.replace(config, run=dataclasses.replace(config.run, steps=start + count))
            with (
                mock.patch.object(DistContext, "print0", lambda dist, text: said.append(text)),
                mock.patch.object(train, "save", return_value=None),  # the loop saves its end, and every round has one
            ):
                try:
                    train.loop(built, PreemptionHandler())
                except SystemExit as stop:
                    # A loss that is not finite stopped this run; the other variants continue.
                    raise RuntimeError(said[-1]) from stop
            built.start_step = start + count

        return run

    tokens = config.data.global_batch * config.data.sequence_length
    variant = Variant(name, tokens, lambda count: None, enter, settings)
    variant.attempt(prepare, build)
    return variant


def of_nanogpt(folder: Path, config: TrainConfig, data: Path) -> Variant:
    """nanoGPT's model and optimizer, stepped as in its bench.py, of the recipe's shape; ready to train or failed."""
    device, B, T, shape = device_of(config), config.data.micro_batch, config.data.sequence_length, config.model

    def enter() -> None:
        torch.use_deterministic_algorithms(False)
        distributed.set_tf32(True)

    def build() -> Callable[[int], None]:
        tokens = np.fromfile(data / "train.bin", dtype=np.uint16)[-100_000:].astype(np.int64) % shape.vocab_size
        x_BT, y_BT = (torch.from_numpy(np.resize(tokens[shift:], (B, T))).to(device) for shift in (0, 1))
        spec = importlib.util.spec_from_file_location("nanogpt_model", folder / "model.py")
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules["nanogpt_model"] = importlib.util.module_from_spec(spec)
        sizes = {name: getattr(shape, name) for name in ("n_layer", "n_head", "n_embd", "block_size")}
        torch.manual_seed(1337)
        with contextlib.redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
            settings = module.GPTConfig(**sizes, vocab_size=shape.padded_vocab_size, dropout=0, bias=False)
            model = module.GPT(settings).to(device)
            of_adamw = {"weight_decay": 1e-2, "learning_rate": 1e-4, "betas": (0.9, 0.95), "device_type": device.type}
            optimizer = model.configure_optimizers(**of_adamw)
        compiled = torch.compile(model) if config.precision.compile else model

        def run(count: int) -> None:
            for _ in range(count):
                with torch.autocast(device.type, dtype=torch.bfloat16):
                    _, loss = compiled(x_BT, y_BT)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                loss.item()

        return run

    variant = Variant("nanogpt", B * T, lambda count: None, enter, folder.name)
    variant.attempt(prepare, build)
    return variant


def one_round(variant: Variant, steps: int) -> None:
    variant.enter()
    others = torch.cuda.memory_allocated() - variant.own_bytes
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    synchronize()
    began = time.perf_counter()
    variant.run(steps)
    synchronize()
    variant.times.append((time.perf_counter() - began) / steps)
    variant.sensors.append(throughput.clock_and_power())
    variant.peak_bytes = max(variant.peak_bytes, torch.cuda.max_memory_allocated() - others)


def row_of(variant: Variant, nanogpt: Variant | None) -> dict[str, Any]:
    if variant.failed:
        return {"name": variant.name, "failed": variant.failed}
    median = statistics.median(variant.times)
    rate = variant.tokens_per_step / median
    ratios = []
    if nanogpt and not nanogpt.failed:
        more = variant.tokens_per_step / nanogpt.tokens_per_step
        ratios = [more * theirs / ours for theirs, ours in zip(nanogpt.times, variant.times, strict=True)]
    return {
        "name": variant.name,
        "settings": variant.settings,
        "ms_per_step": 1000 * median,
        "ms_all_rounds": [1000 * seconds for seconds in variant.times],
        "tokens_per_second": rate,
        "of_nanogpt_all_rounds": ratios,
        "flops_per_token": variant.flops_per_token,
        "mfu": throughput.mfu(rate, variant.flops_per_token, 1, variant.peak),
        "peak_gib": variant.peak_bytes / 2**30,
        "clock_and_power_all_rounds": variant.sensors,
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'variant':28} {'ms':>8} {'range':>15} {'tokens/s':>10} {'of nanoGPT':>19} {'MFU':>6} {'GiB':>6}"]
    for row in rows:
        if "failed" in row:
            lines.append(f"{row['name']:28} failed: {row['failed']}")
            continue
        times, ratios = row["ms_all_rounds"], row["of_nanogpt_all_rounds"]
        mfu = "-" if row["mfu"] is None else f"{row['mfu']:.3f}"
        of_nanogpt = f"{statistics.median(ratios):.3f} {min(ratios):.3f}-{max(ratios):.3f}" if ratios else "-"
        of_steps = f"{row['ms_per_step']:8.2f} {min(times):7.2f}-{max(times):7.2f} {row['tokens_per_second']:10.0f}"
        lines.append(f"{row['name']:28} {of_steps} {of_nanogpt:>19} {mfu:>6} {row['peak_gib']:6.2f}")
    sensors = [reading for row in rows for reading in row.get("clock_and_power_all_rounds", ())]
    return "\n".join([*lines, throughput.explain_clock_and_power(sensors)])


def measure(args: argparse.Namespace, recipe: TrainConfig, folder: Path) -> dict[str, Any]:
    write_tokens(folder / "data", recipe.model.vocab_size, max(200_000, 40 * recipe.data.sequence_length))
    distributed.set_deterministic(True)  # cuBLAS hears of it before CUDA starts, whatever the first variant is
    torch._dynamo.config.recompile_limit = 256  # the variants share the code of one class
    variants = [of_variant(recipe, text, folder) for text in args.variants]
    nanogpt = of_nanogpt(args.nanogpt, recipe, folder / "data") if args.nanogpt else None
    peak = throughput.peak_flops(device := device_of(recipe))
    with torch.device("meta"):
        plans = recipe.attention.resolve(recipe.model.n_layer, recipe.model.n_head)
        flops = GPT(recipe.model, plans).flops_per_token(recipe.data.sequence_length)
    if nanogpt:
        nanogpt.flops_per_token, nanogpt.peak = flops, peak
        variants.append(nanogpt)
    for _ in range(args.rounds):
        for variant in variants:
            if not variant.failed:
                variant.attempt(one_round, args.steps)
    print(throughput.explain(flops, peak))
    return {
        "command": [files.without_folders(word) for word in sys.argv],
        "machine": environment(device, 1),
        "flops_per_token": flops,
        "rows": [row_of(variant, nanogpt) for variant in variants],
    }


def check(args: argparse.Namespace, flags: list[str], folder: Path) -> TrainConfig:
    """The recipe, on ``folder``'s data set unless the flags name another. Raises ``UserError`` before anything is built."""
    for name in ("rounds", "steps"):
        check_size(f"--{name}", getattr(args, name), 1)
    given = {flag.partition("=")[0].removeprefix("--") for flag in own_refused(flags)}
    tokens = {"data.dataset": folder / "data", "data.verify": "size"}
    own = as_flags({field: value for field, value in tokens.items() if field not in given})
    recipe = configuration.load([*args.recipe, *own, *flags])
    if recipe.model.vocab_size > 2**16:
        raise invalid("model.vocab_size", recipe.model.vocab_size, f"at most {2**16}: token files are uint16")
    names = [parse_variant(recipe, text, folder)[0] for text in args.variants]
    if len(set(names)) < len(names) or "nanogpt" in names:
        raise invalid("--variants", " ".join(args.variants), "each name once, and not nanogpt")
    if args.nanogpt and not (args.nanogpt / "model.py").is_file():
        raise UserError(f"--nanogpt {args.nanogpt}: no model.py in it")
    if args.json and (args.json.is_dir() or not args.json.parent.is_dir()):
        raise invalid("--json", str(args.json), "a file in a folder that there is")
    return recipe


@exit_on_user_error
def main() -> None:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("recipe", nargs="+", help="recipe and ablation, as train.py takes them")
    parser.add_argument("--variants", nargs="+", default=["plain"], metavar="NAME[: FLAGS]")
    parser.add_argument("--nanogpt", type=Path, help="folder of a nanoGPT checkout")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20, help="steps a round")
    parser.add_argument("--json", type=Path, help="file for all numbers")
    args, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        content = measure(args, check(args, flags, Path(folder)), Path(folder))
    print(table(content["rows"]))
    if args.json:
        files.write_json(args.json, content)
    if failed := [row for row in content["rows"] if "failed" in row]:
        raise UserError("; ".join(f"{row['name']} failed: {row['failed']}" for row in failed))


if __name__ == "__main__":
    main()
