"""What a probe costs beside a training step, and whether it changes a bit of the training.

    python scripts/bench_telemetry.py --json telemetry.json
    python scripts/bench_telemetry.py --tiny                  # a small model: seconds on a CPU

GPT-2 124M, sequences of 1024, 32 a step in BF16, compiled, on random tokens. Options of the form --section.field go to the config, as
train.py takes them. Times are medians of ``--repeats``: wall time between two synchronisations, and, on CUDA, the device's own time
between two events. The probe's first call, which starts the power iteration afresh, is told apart. Bit equality: weights after some
steps with a probe behind each and with none.
"""

from __future__ import annotations

import argparse
import dataclasses
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
from analysis.spectral import SpectralState
from attention import AttentionConfig, AttentionSpec, registry
from config import TrainConfig
from errors import exit_on_user_error, invalid
from model import GPT, MODEL_PRESETS, initialise
from training import distributed, record
from training.optim import build_optimizer, set_learning_rate
from training.step import train_step
from training.telemetry import FP16_LOSS_SCALE, TOP_K, measure, to_lists

EQUAL_STEPS = 5


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
        tokens_BT, targets_BT = self.micro_batches[0]
        sequences = config.telemetry.sequences
        self.probe_batch = (tokens_BT[:sequences].to(device), targets_BT[:sequences].to(device))
        self.state: SpectralState | None = None

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
        seed = torch.zeros((), dtype=torch.int64, device=self.device)
        top_k = TOP_K if self.config.telemetry.details else ()
        scale = FP16_LOSS_SCALE if self.config.precision.dtype == "float16" else 1.0
        autocast = self.config.precision.autocast(self.device)
        measured, _, self.state = measure(self.raw_model, *self.probe_batch, seed, autocast, self.state, top_k, scale)
        return to_lists(measured)

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


def run(config: TrainConfig, repeats: int, warm_up: int) -> dict[str, Any]:
    """Everything measured, as JSON values."""
    distributed.set_deterministic(config.precision.deterministic)
    distributed.set_tf32(config.precision.tf32)
    device = distributed.start(config.run.device).device
    bench = Bench(config, device)
    for _ in range(warm_up):
        bench.step()
    bench.probe()  # kernels are loaded, and compiled where they are Triton's
    bench.state = None
    first = timed(bench.probe, device)
    steps = median([timed(bench.step, device) for _ in range(repeats)])
    probes = median([timed(bench.probe, device) for _ in range(repeats)])
    memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    del bench
    every = config.telemetry.every
    return {
        "attention": config.attention.label(),
        "sequences": config.telemetry.sequences,
        "step": steps,
        "probe": probes,
        "first_probe": first,
        "probe_over_step": probes["wall_s"] / steps["wall_s"],
        "every": every,
        "overhead_at_every": probes["wall_s"] / (every * steps["wall_s"]) if every else 0.0,
        "peak_bytes": memory,
        "bits": bits_are_equal(config, device),
        "config": configuration.to_json(config),
        **record.environment(device, 1),
    }


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and write JSON where asked to; exit code 1 where a bit differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--json", nargs="?", const="-", default="", help="write everything as JSON to this file, or print it"
    )
    parser.add_argument("--tiny", action="store_true", help="0.1M parameters, uncompiled")
    parser.add_argument("--repeats", type=int, default=20, help="calls a median is of (20)")
    parser.add_argument("--warm-up", type=int, default=5, help="steps before the first measured (5)")
    args, rest = parser.parse_known_args(argv)
    if args.repeats < 1:
        raise invalid("--repeats", args.repeats, "1 or more")
    result = run(configuration.override(default_config(tiny=args.tiny), rest), args.repeats, args.warm_up)
    print(
        f"step {1e3 * result['step']['wall_s']:.2f} ms, probe {1e3 * result['probe']['wall_s']:.2f} ms "
        f"(first {1e3 * result['first_probe']['wall_s']:.2f} ms), every {result['every']} steps: "
        f"{100 * result['overhead_at_every']:.2f} % of the step time; weights with and without probes: "
        f"{'the same bits' if result['bits']['equal'] else 'DIFFERENT'}"
    )
    if args.json == "-":
        print(json.dumps(result, indent=2))
    elif args.json:
        files.write_json(Path(args.json), result)
    if not result["bits"]["equal"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
