"""Time the attention kernels against their peers, all in one process and interleaved; a table, and the numbers as JSON.

    python scripts/bench_attention.py [--shapes 32,1024 8,4096] [--presets flash flash_stable] [--json FILE]

Each call is captured once as a CUDA graph and replayed, so that times are the device's, without Python's. A round times every
peer once; the table has medians over rounds. FLOPs: 4 B H T^2 D forward, halved where causal; 2.5 times that backward, delta
included.
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _root  # noqa: F401
import torch
from torch import Tensor

import files
from attention import AttentionConfig, AttentionSpec
from attention.dispatch import run
from errors import OneLineParser, UserError, check_place, exit_on_user_error, invalid

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def library(spec: AttentionSpec, causal: bool, n_head: int) -> Attention:
    """One of this repository's backends on [B, T, H, D]."""
    plan = AttentionConfig(default=spec).resolve(1, n_head)[0]
    seed = torch.tensor(0, device="cuda")
    return lambda q, k, v: run(q, k, v, plan, rounding_seed=seed, causal=causal)


def flex(length: int, causal: bool) -> Attention:
    """torch's FlexAttention, compiled."""
    import torch._functorch.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._functorch.config.donated_buffer = False  # backward is called many times on one graph
    compiled: Callable[..., Tensor] = torch.compile(flex_attention)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length) if causal else None

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grouped = q.shape[2] != k.shape[2]
        return compiled(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=mask, enable_gqa=grouped).transpose(1, 2)

    return call


def flash_attention_3(causal: bool) -> Attention:
    """FlashAttention-3. Raises ``ImportError`` where it is not installed."""
    from flash_attn_interface import flash_attn_func

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = flash_attn_func(q, k, v, causal=causal)
        return result[0] if isinstance(result, tuple) else result

    return call


def capture(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """The call as a graph, after warm-up on a side stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Backward passes run in autograd's own thread, whose first calls may be ones that a global capture forbids.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    return graph


def prepare(
    call: Attention, shape: tuple[int, int, int, int], kv_heads: int, alive: list[Any]
) -> dict[str, torch.cuda.CUDAGraph]:
    """Graphs of forward and backward on views of a fused projection [B, T, H + 2 HK, D], as a model calls it.

    What the graphs read is appended to ``alive``: they know addresses only, and keep no tensor.
    """
    b, t, h, d = shape
    generator = torch.Generator("cuda").manual_seed(0)
    fused = torch.randn(b, t, h + 2 * kv_heads, d, device="cuda", dtype=torch.bfloat16, generator=generator)
    q, k, v = (x.requires_grad_() for x in fused.split([h, kv_heads, kv_heads], dim=2))
    do = torch.randn(b, t, h, d, device="cuda", dtype=torch.bfloat16, generator=generator)
    o = call(q, k, v)
    torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
    alive += [fused, q, k, v, o, do]
    graphs = {"forward": capture(lambda: call(q, k, v))}
    graphs["backward"] = capture(lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True))
    return graphs


def interleave(graphs: dict[str, dict[str, torch.cuda.CUDAGraph]], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of every graph, every round."""
    times: dict[str, dict[str, list[float]]] = {name: {k: [] for k in kinds} for name, kinds in graphs.items()}
    for index in range(rounds + 2):
        for name, kinds in graphs.items():
            for kind, graph in kinds.items():
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                graph.replay()
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                if index >= 2:
                    times[name][kind].append(begin.elapsed_time(end))
    return times


def measure(
    shape: tuple[int, int, int, int], kv_heads: int, specs: dict[str, AttentionSpec], causal: bool, rounds: int
) -> list[dict]:
    b, t, h, d = shape
    peers: dict[str, Callable[[], Attention]] = {
        "sdpa_flash": lambda: library(AttentionSpec(preset="sdpa_flash"), causal, h),
        "sdpa_cudnn": lambda: library(AttentionSpec(preset="sdpa_cudnn"), causal, h),
        "flex": lambda: flex(t, causal),
        "fa3": lambda: flash_attention_3(causal),
        **{name: functools.partial(library, spec, causal, h) for name, spec in specs.items()},
    }
    graphs: dict[str, dict[str, torch.cuda.CUDAGraph]] = {}
    absent: dict[str, str] = {}
    alive: list[Any] = []
    for name, build in peers.items():
        try:
            call = build()
            try:
                graphs[name] = prepare(call, shape, kv_heads, alive)
            except torch.AcceleratorError:
                # The first capture of a process failed twice with torch 2.11, SDPA first both times; the next does not.
                graphs[name] = prepare(call, shape, kv_heads, alive)
        except Exception as error:
            # A peer that this machine lacks is no reason to lose the others; the table says which and why.
            absent[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
    flops = 4 * b * h * t * t * d / (2 if causal else 1)
    rows = []
    for name, kinds in interleave(graphs, rounds).items():
        row: dict[str, Any] = {"shape": shape, "kv_heads": kv_heads, "causal": causal, "name": name}
        for kind, factor in (("forward", 1.0), ("backward", 2.5)):
            median = statistics.median(kinds[kind])
            row |= {
                f"{kind}_ms": median,
                f"{kind}_tflops": factor * flops / median / 1e9,
                f"{kind}_all_ms": kinds[kind],
            }
        rows.append(row)
    return rows + [{"shape": shape, "causal": causal, "name": name, "absent": why} for name, why in absent.items()]


def table(rows: list[dict]) -> str:
    lines = [f"{'B, T, H, D':18} {'kernel':28} {'fwd ms':>8} {'TFLOP/s':>8} {'bwd ms':>8} {'TFLOP/s':>8}"]
    for row in rows:
        shape = ", ".join(map(str, row["shape"]))
        if "absent" in row:
            lines.append(f"{shape:18} {row['name']:28} {row['absent']}")
            continue
        numbers = (f"{row[f'{k}_ms']:8.3f} {row[f'{k}_tflops']:8.0f}" for k in ("forward", "backward"))
        lines.append(f"{shape:18} {row['name']:28} {' '.join(numbers)}")
    return "\n".join(lines)


def batch_and_length(text: str) -> tuple[int, int]:
    """(B, T) of a shape as typed. Raises ``UserError`` for what is none."""
    batch, _, length = text.partition(",")
    if not (batch.isdecimal() and length.isdecimal() and int(batch) and int(length)):
        raise invalid("--shapes", text, "B,T, two whole numbers of 1 or more")
    return int(batch), int(length)


@exit_on_user_error
def main() -> None:
    parser = OneLineParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["32,1024", "8,4096", "4,8192"], metavar="B,T")
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--kv-heads", type=int, help="heads of keys and values; default: --heads")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--presets", nargs="+", default=["flash"], help="presets to run with the flash backend")
    parser.add_argument("--numerics", default="hardware")
    parser.add_argument("--sites", nargs="*", default=[], help="site=value, for all presets")
    parser.add_argument("--full", action="store_true", help="not causal")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.rounds < 1:
        raise invalid("--rounds", args.rounds, "at least 1")
    if args.json:
        check_place(args.json, "--json")
    kv_heads = args.heads if args.kv_heads is None else args.kv_heads
    if kv_heads < 1 or args.heads % kv_heads:
        raise invalid("--kv-heads", kv_heads, f"a divisor of --heads {args.heads}")
    shapes = [(*batch_and_length(text), args.heads, args.head_dim) for text in args.shapes]
    specs = {
        f"{name} (triton)": AttentionSpec(preset=name, numerics=args.numerics, sites=tuple(args.sites), backend="flash")
        for name in args.presets
    }
    for spec in specs.values():
        spec.resolve()
    if not torch.cuda.is_available():
        raise UserError("scripts/bench_attention.py needs a CUDA device")
    rows = []
    for shape in shapes:
        rows += measure(shape, kv_heads, specs, not args.full, args.rounds)
    print(table(rows))
    if args.json:
        machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
        command = [files.without_folders(word) for word in sys.argv]
        args.json.parent.mkdir(parents=True, exist_ok=True)
        files.write_json(args.json, {"command": command, "machine": machine, "rows": rows})


if __name__ == "__main__":
    main()
