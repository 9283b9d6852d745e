"""What a probe costs beside a training step, and whether it changes a bit of the training.

    python scripts/bench_telemetry.py --json telemetry.json
    python scripts/bench_telemetry.py --tiny                  # a small model: seconds on a CPU

GPT-2 124M, sequences of 1024, 32 a step in BF16, compiled, on random tokens. Options of the form --section.field go to the config, as
train.py takes them. Times are medians of ``--repeats``: wall time between two synchronisations, and, on CUDA, the device's own time
between two events, of the probe as a run makes it (on CUDA a replayed graph) and op by op. Told apart are a probe that starts the power
iteration afresh and the one that captures the graph. What a probe adds to a training that goes on is the median difference between
blocks of ``BLOCK_STEPS`` steps with a probe behind them and without, in turns. Bit equality: weights after some steps with a probe behind
each and with none; and what probes say with and without a graph.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import config as configuration
import files
from attention import AttentionConfig, AttentionSpec, registry
from config import TrainConfig
from errors import OneLineParser, check_place, exit_on_user_error, invalid
from model import GPT, MODEL_PRESETS, initialise
from training import distributed, record
from training.optim import build_optimizer, set_learning_rate
from training.step import train_step
from training.telemetry import build_probe, to_lists
from training.telemetry_graph import Probe

EQUAL_STEPS = 5
BLOCK_STEPS = 10


def default_config(*, tiny: bool) -> TrainConfig:
    """The short recipe's shape, or one of seconds on a CPU."""
    base = TrainConfig()
    flash_backend = "flash_reference" if tiny else "flash"
    attention = AttentionConfig(flash_backend=flash_backend, default=AttentionSpec(preset="flash"))
    model = MODEL_PRESETS["debug" if tiny else "gpt2"]
    length, batch = (64, 8) if tiny else (1024, 32)
    data = dataclasses.replace(base.data, sequence_length=length, global_batch=batch, micro_batch=batch)
    precision = dataclasses.replace(base.precision, compile=not tiny)
    return dataclasses.replace(base, model=model, attention=attention, data=data, precision=precision)


class Bench:
    """A model with its optimiser, a training step on fixed random tokens, and a probe."""

    def __init__(self, config: TrainConfig, device: torch.device):
        self.config, self.device = config, device
        plans = config.attention.resolve(config.model.n_layer, config.model.n_head)
        registry.check(plans, device=device, dtype=config.precision.torch_dtype, head_dim=config.model.head_width)
        self.raw_model = GPT(config.model, plans)
        initialise(self.raw_model, config.run.seed)
        self.raw_model.to(device)
        self.model: Any = torch.compile(self.raw_model) if config.precision.compile else self.raw_model
        self.optimizer = build_optimizer(self.raw_model, config.optim, device)
        set_learning_rate(self.optimizer, config.optim.lr)
        self.scaler = config.precision.scaler(device)
        generator = torch.Generator().manual_seed(0)
        shape = (config.data.global_batch, config.data.sequence_length + 1)
        blocks_BT = torch.randint(config.model.vocab_size, shape, generator=generator)
        self.micro_batches = [
            (block_BT[:, :-1].contiguous(), block_BT[:, 1:].contiguous())
            for block_BT in blocks_BT.split(config.data.micro_batch)
        ]
        self.measured, self.eager = (self.new_probe(graph=graph) for graph in (config.telemetry.cuda_graph, False))

    def new_probe(self, *, graph: bool) -> Probe:
        telemetry = dataclasses.replace(self.config.telemetry, cuda_graph=graph)
        tokens_BT, targets_BT = (x_BT[: telemetry.sequences] for x_BT in self.micro_batches[0])
        seed = torch.zeros((), dtype=torch.int64, device=self.device)
        return build_probe(telemetry, self.raw_model, (tokens_BT, targets_BT), self.device, self.config.precision, seed)

    def step(self) -> None:
        train_step(
            self.model,
            self.optimizer,
            self.scaler,
            self.micro_batches,
            list(range(len(self.micro_batches))),
            device=self.device,
            autocast=lambda: self.config.precision.autocast(self.device),
            grad_clip=self.config.optim.grad_clip,
            apply_nonfinite=False,
        )

    def probe(self) -> dict[str, Any]:
        """As a run makes it."""
        return to_lists(self.measured().columns)

    def eager_probe(self) -> dict[str, Any]:
        """Op by op."""
        return to_lists(self.eager().columns)

    def block(self, probes: int) -> None:
        """Some steps, and probes behind them."""
        for _ in range(BLOCK_STEPS):
            self.step()
        for _ in range(probes):
            self.probe()

    def digest(self) -> str:
        """SHA-256 of all weights."""
        digest = hashlib.sha256()
        tensors: dict[str, Tensor] = self.raw_model.state_dict()
        for name, tensor in tensors.items():
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def timed(call: Callable[[], object], device: torch.device) -> dict[str, float]:
    """One call: wall seconds from an idle device to an idle device and, on CUDA, seconds between events around it."""
    cuda = device.type == "cuda"
    if cuda:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
    began = time.perf_counter()
    call()
    if not cuda:
        return {"wall_s": time.perf_counter() - began}
    end.record()
    torch.cuda.synchronize()
    return {"wall_s": time.perf_counter() - began, "device_s": start.elapsed_time(end) / 1e3}


def median(samples: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}


def bits_are_equal(config: TrainConfig, device: torch.device) -> dict[str, Any]:
    """Weights after some steps with a probe behind every step, and with none."""
    digests = []
    for probes in (True, False):
        bench = Bench(config, device)
        for _ in range(EQUAL_STEPS):
            bench.step()
            if probes:
                bench.probe()
        digests.append(bench.digest())
        del bench
    return {"steps": EQUAL_STEPS, "equal": digests[0] == digests[1], "with": digests[0], "without": digests[1]}


def probes_are_equal(bench: Bench) -> dict[str, Any]:
    """Columns in which a probe as a run makes it and one op by op differ in a bit, over some steps; both start afresh once on the way."""
    different: set[str] = set()
    for step in range(2 * EQUAL_STEPS):
        if step in (0, EQUAL_STEPS):
            bench.measured.forget()
            bench.eager.forget()
        bench.step()
        as_run, eager = bench.measured().columns, bench.eager().columns
        different |= {name for name in eager if not same_bits(as_run[name], eager[name])}
    return {"steps": 2 * EQUAL_STEPS, "equal": not different, "different": sorted(different)}


def same_bits(x: Tensor, y: Tensor) -> bool:
    """NaN equals itself here."""
    return x.dtype == y.dtype and torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


def reserved(device: torch.device) -> int:
    """Bytes that torch holds for live tensors and for graphs; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)


def measure_probes(bench: Bench, repeats: int) -> dict[str, Any]:
    """Times of steps and probes, and the memory that the graph keeps."""
    device = bench.device
    bench.probe()  # kernels are loaded, and compiled where they are Triton's
    bench.measured.forget()
    first = timed(bench.probe, device)
    bench.probe()
    before = reserved(device)
    capture = timed(bench.probe, device)
    graph_bytes = reserved(device) - before
    for _ in range(2):
        bench.eager_probe()
        bench.step()
    return {
        "step": median([timed(bench.step, device) for _ in range(repeats)]),
        "probe": median([timed(bench.probe, device) for _ in range(repeats)]),
        "eager_probe": median([timed(bench.eager_probe, device) for _ in range(repeats)]),
        "first_probe": first,
        "capturing_probe": capture,
        "graph_bytes": graph_bytes,
    }


def added_to_training(bench: Bench, pairs: int) -> dict[str, Any]:
    """Seconds that a probe adds to the steps before it: the median over pairs of blocks, with and without in turns."""
    blocks = [functools.partial(bench.block, probes) for probes in (1, 0)]
    seconds = [[timed(block, bench.device)["wall_s"] for block in blocks] for _ in range(pairs)]
    differences = [with_probe - without for with_probe, without in seconds]
    return {"pairs": pairs, "steps": BLOCK_STEPS, "median_s": statistics.median(differences), "each_s": differences}


def run(config: TrainConfig, repeats: int, warm_up: int, pairs: int) -> dict[str, Any]:
    """Everything measured, as JSON values."""
    distributed.set_deterministic(config.precision.deterministic)
    distributed.set_tf32(config.precision.tf32)
    device = distributed.start(config.run.device).device
    bench = Bench(config, device)
    for _ in range(warm_up):
        bench.step()
    times = measure_probes(bench, repeats)
    added = added_to_training(bench, pairs)
    memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    probe_bits = probes_are_equal(bench)
    del bench
    every, step_s = config.telemetry.every, times["step"]["wall_s"]
    return {
        "attention": config.attention.label(),
        "sequences": config.telemetry.sequences,
        "cuda_graph": config.telemetry.cuda_graph and device.type == "cuda",
        **times,
        "added_to_training": added,
        "probe_over_step": times["probe"]["wall_s"] / step_s,
        "every": every,
        "overhead_at_every": times["probe"]["wall_s"] / (every * step_s) if every else 0.0,
        "eager_overhead_at_every": times["eager_probe"]["wall_s"] / (every * step_s) if every else 0.0,
        "peak_bytes": memory,
        "bits": bits_are_equal(config, device),
        "probe_bits": probe_bits,
        "config": configuration.to_json(config),
        **record.environment(device, 1),
    }


def table(result: dict[str, Any]) -> str:
    """The times, a line each, with what they are of the step time at the chosen spacing."""
    whole = result["every"] * result["step"]["wall_s"]
    rows = [("step", result["step"]["wall_s"], False)]
    names = {"probe": "probe, as a run makes it", "eager_probe": "probe, op by op", "first_probe": "probe, afresh"}
    if result["cuda_graph"]:
        names["capturing_probe"] = "probe that captures the graph"
    rows += [(text, result[name]["wall_s"], True) for name, text in names.items()]
    added = result["added_to_training"]
    rows.append((f"added by a probe, median of {added['pairs']} pairs", added["median_s"], True))
    lines = [f"{'':40}{'ms':>10}   share at every {result['every']} steps"]
    for text, seconds, shared in rows:
        share = f"{100 * seconds / whole:10.2f} %" if shared and whole else ""
        lines.append(f"{text:40}{1e3 * seconds:10.2f}{share}")
    if result["cuda_graph"]:
        lines.append(f"memory kept by the graph: {result['graph_bytes'] / 2**30:.2f} GiB")
    return "\n".join(lines)


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and write JSON where asked to; exit code 1 where a bit differs."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--json", nargs="?", const="-", default="", help="write everything as JSON to this file, or print it"
    )
    parser.add_argument("--tiny", action="store_true", help="0.1M parameters, uncompiled")
    parser.add_argument("--repeats", type=int, default=20, help="calls a median is of (20)")
    parser.add_argument("--warm-up", type=int, default=5, help="steps before the first measured (5)")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of blocks of steps with and without a probe (5)")
    args, rest = parser.parse_known_args(argv)
    if args.repeats < 1:
        raise invalid("--repeats", args.repeats, "1 or more")
    if args.pairs < 1:
        raise invalid("--pairs", args.pairs, "1 or more")
    if args.json not in ("", "-"):
        check_place(Path(args.json), "--json")
    config = configuration.override(default_config(tiny=args.tiny), rest)
    result = run(config, args.repeats, args.warm_up, args.pairs)
    print(table(result))
    equal = result["bits"]["equal"], result["probe_bits"]["equal"]
    print(f"weights with and without probes: {'the same bits' if equal[0] else 'DIFFERENT'}")
    print(f"probes with and without a graph: {'the same bits' if equal[1] else 'DIFFERENT'}")
    if args.json == "-":
        print(json.dumps(result, indent=2))
    elif args.json:
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        files.write_json(Path(args.json), result)
    if not all(equal):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
