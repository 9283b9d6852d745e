"""What it takes to average GPT-2's gradients over the processes of one torchrun, by itself and in several ways.

    torchrun --standalone --nproc_per_node=2 scripts/bench_exchange.py

NCCL on CUDA, gloo on CPUs (with a small model there: ``--width``). Medians of ``--repeats`` calls, of the slowest process. GB/s are the
gradients' bytes over that time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor

from attention import AttentionConfig
from errors import OneLineParser, UserError, exit_on_user_error, invalid
from model import GPT, ModelConfig
from training import distributed

HEADS = ModelConfig().n_head
WARM_UP = 5
MIB = 2**18
"""FP32 elements of a MiB."""


def gradients_of(width: int, device: torch.device) -> list[Tensor]:
    """Tensors of the shapes of GPT-2's gradients, FP32."""
    with torch.device("meta"):
        config = ModelConfig(n_embd=width)
        plans = AttentionConfig().resolve(config.n_layer, config.n_head)
        shapes = [p.shape for p in GPT(config, plans).parameters()]
    return [torch.randn(shape, device=device) for shape in shapes]


def together(tensors: Sequence[Tensor], op: dist.ReduceOp.RedOpType) -> None:
    """All of them in one call to the backend."""
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor, op=op)


def sharded(tensors: Sequence[Tensor], rank: int, world: int) -> None:
    """Each process gets the mean of its share, then all get all: what a sharded optimiser needs. Only on NCCL."""

    def share(tensor: Tensor) -> tuple[Tensor, Tensor]:
        flat = tensor.view(-1)[: tensor.numel() // world * world]
        return flat, flat.chunk(world)[rank]

    with dist._coalescing_manager():
        for tensor in tensors:
            flat, own = share(tensor)
            dist.reduce_scatter_tensor(own, flat, op=dist.ReduceOp.AVG)
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_gather_into_tensor(*share(tensor))


def ways(grads: Sequence[Tensor], rank: int, world: int) -> dict[str, Callable[[], object]]:
    """What is timed, by name."""
    flat = torch.randn(sum(g.numel() for g in grads), device=grads[0].device)
    views = [part.view_as(g) for part, g in zip(flat.split([g.numel() for g in grads]), grads, strict=True)]
    mean = dist.ReduceOp.AVG if flat.is_cuda else dist.ReduceOp.SUM
    found: dict[str, Callable[[], object]] = {
        "one buffer, sum": lambda: dist.all_reduce(flat),
        "in place, one call, mean": lambda: together(grads, mean),
        "one call each, mean": lambda: [dist.all_reduce(g, op=mean) for g in grads],
        "buckets of 25 MiB, sum": lambda: [dist.all_reduce(part) for part in flat.split(25 * MIB)],
        "buckets of 100 MiB, sum": lambda: [dist.all_reduce(part) for part in flat.split(100 * MIB)],
        "copies into buckets": lambda: [torch.mul(g, 1 / world, out=v) for g, v in zip(grads, views, strict=True)],
        "one scalar": lambda: dist.all_reduce(flat[:1]),
    }
    if flat.is_cuda:
        found["reduce-scatter and all-gather"] = lambda: sharded(grads, rank, world)
    return found


def timed(way: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median ms of one call on the slowest process."""
    times = [_once(way, device) for _ in range(WARM_UP + repeats)][WARM_UP:]
    slowest = torch.tensor(statistics.median(times), device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def _once(way: Callable[[], object], device: torch.device) -> float:
    dist.barrier()
    if device.type != "cuda":
        began = time.perf_counter()
        way()
        return 1000 * (time.perf_counter() - began)
    torch.cuda.synchronize(device)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    way()
    last.record()
    torch.cuda.synchronize(device)
    return first.elapsed_time(last)


@exit_on_user_error
def main(arguments: Sequence[str] | None = None) -> None:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=768, help="of the model (768: GPT-2 124M)")
    parser.add_argument("--repeats", type=int, default=30, help="calls that count (30)")
    args = parser.parse_args(arguments)
    if args.width < HEADS or args.width % HEADS:
        raise invalid("--width", args.width, f"a multiple of {HEADS}")
    if args.repeats < 1:
        raise invalid("--repeats", args.repeats, "1 or more")
    place = distributed.start("auto")
    if place.world_size < 2:
        raise UserError(
            "one process has nothing to exchange: torchrun --standalone --nproc_per_node=N scripts/bench_exchange.py"
        )
    try:
        grads = gradients_of(args.width, place.device)
        size = 4 * sum(g.numel() for g in grads)
        for name, way in ways(grads, place.rank, place.world_size).items():
            took = timed(way, place.device, args.repeats)
            if place.is_main:
                print(f"{name:32} {took:9.3f} ms {size / took / 1e6:9.1f} GB/s", flush=True)
    finally:
        distributed.stop()


if __name__ == "__main__":
    main()
