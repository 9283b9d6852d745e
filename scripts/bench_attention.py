"""Time the attention kernels against their peers, all in one process and interleaved; tables, and the numbers as JSON.

    python scripts/bench_attention.py [--shapes 32,1024 4,4096,32,8,128] [--presets flash flash_stable] [--json FILE]

A shape is B,T,H,HK,D: HK heads of keys and values, D a head's dim; B,T alone is GPT-2's B,T,12,12,64. Each call is captured once
as a CUDA graph and replayed, so that times are the device's, without Python's. A round times every peer once. The first table has
medians over rounds, the second the ratios of a round, of which it shows the median and the 10th and 90th percentile. FLOPs:
attention is causal: 2 B H T^2 D forward, 2.5 times that backward, delta included. A peer that is not installed is named and left
out, and so is one whose results are not the first peer's.
"""

import functools
import math
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import _root  # noqa: F401
import numpy as np
import torch
from torch import Tensor

import files
from attention import AttentionConfig, AttentionSpec
from attention.backends import FLASH_BACKENDS
from attention.check.kernels import KNOWN
from attention.dispatch import run
from errors import OneLineParser, UserError, check_size, exit_on_user_error, first_line, invalid, on_disk
from training.record import environment, version
from training.throughput import clock_and_power, explain_clock_and_power

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Shape = tuple[int, int, int, int, int]
KINDS = ("forward", "backward")
# Head dims 64, 128 and 256, of 16,384 or 32,768 tokens; those of 128 also with grouped queries.
SHAPES = [
    *("32,1024", "8,4096", "4,8192"),
    *("16,1024,16,16,128", "4,4096,16,16,128", "2,8192,16,16,128"),
    *("16,1024,32,8,128", "4,4096,32,8,128", "2,8192,32,8,128"),
    *("16,1024,16,4,256", "4,4096,16,4,256", "2,8192,16,4,256"),
]


def library(spec: AttentionSpec, n_head: int) -> Attention:
    plan = AttentionConfig(default=spec).resolve(1, n_head)[0]
    seed = torch.tensor(0, device="cuda")
    return lambda q, k, v: run(q, k, v, plan, rounding_seed=seed)


def flex(length: int) -> Attention:
    """torch's FlexAttention, compiled with torchtitan's options (its ``models/common/attention.py``)."""
    import torch._functorch.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._functorch.config.donated_buffer = False  # backward is called many times on one graph
    torch._dynamo.reset()  # else a later shape is compiled for any shape, and after some it is not compiled at all
    options: dict[str, Any] = {"max_autotune": True, "coordinate_descent_tuning": True, "triton.cudagraphs": False}
    compiled: Callable[..., Tensor] = torch.compile(flex_attention, options=options)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grouped = q.shape[2] != k.shape[2]
        return compiled(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=mask, enable_gqa=grouped).transpose(1, 2)

    return call


def foreign(kernel: str, head_dim: int) -> Attention:
    """A kernel that ``attention.check`` knows, on [B, T, H, D]. Raises ``ImportError`` where it is not installed."""
    call = KNOWN[kernel]()
    scale = 1 / math.sqrt(head_dim)
    return lambda q, k, v: call(*(x.transpose(1, 2) for x in (q, k, v)), True, scale).transpose(1, 2)


def capture(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
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


def prepare(call: Attention, shape: Shape, expected: list[Tensor], alive: list[Any]) -> dict[str, torch.cuda.CUDAGraph]:
    """Graphs of forward and backward on views of a fused projection [B, T, H + 2 HK, D], as a model calls it.

    ``expected``: O, dQ, dK and dV of the first peer, filled in by it. What the graphs read is appended to ``alive``: they know
    addresses only, and keep no tensor. Raises ``ValueError`` where a result is 5 % from the first peer's.
    """
    b, t, h, hk, d = shape
    generator = torch.Generator("cuda").manual_seed(0)
    fused = torch.randn(b, t, h + 2 * hk, d, device="cuda", dtype=torch.bfloat16, generator=generator)
    q, k, v = (x.requires_grad_() for x in fused.split([h, hk, hk], dim=2))
    do = torch.randn(b, t, h, d, device="cuda", dtype=torch.bfloat16, generator=generator)
    o = call(q, k, v)
    results = [o.detach(), *torch.autograd.grad(o, (q, k, v), do, retain_graph=True)]
    expected += results if not expected else []
    for name, result, other in zip(("O", "dQ", "dK", "dV"), results, expected, strict=True):
        distance = ((result.float() - other.float()).norm() / other.float().norm()).item()
        if not distance < 0.05:
            raise ValueError(f"{name} is {distance:.2g} from the first peer's")
    alive += [fused, q, k, v, o, do]
    graphs = {"forward": capture(lambda: call(q, k, v))}
    graphs["backward"] = capture(lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True))
    return graphs


def interleave(graphs: dict[str, dict[str, torch.cuda.CUDAGraph]], rounds: int) -> dict[str, dict[str, list[float]]]:
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


def peers_of(specs: dict[str, AttentionSpec], shape: Shape) -> dict[str, Callable[[], Attention]]:
    """What makes each peer, and each preset of this repository's kernels."""
    _, t, h, _, d = shape
    return {
        "fa2 (torch)": lambda: library(AttentionSpec(preset="sdpa_flash"), h),
        "cudnn": lambda: library(AttentionSpec(preset="sdpa_cudnn"), h),
        "flex": lambda: flex(t),
        **{name: functools.partial(foreign, name, d) for name in ("fa3", "fa4", "fa4:deterministic")},
        **{name: functools.partial(library, spec, h) for name, spec in specs.items()},
    }


def measure(shape: Shape, peers: dict[str, Callable[[], Attention]], rounds: int) -> list[dict]:
    b, t, h, _, d = shape
    graphs: dict[str, dict[str, torch.cuda.CUDAGraph]] = {}
    rows: list[dict] = []
    alive: list[Any] = []
    expected: list[Tensor] = []
    for name, build in peers.items():
        try:
            call = build()
            try:
                graphs[name] = prepare(call, shape, expected, alive)
            except torch.AcceleratorError:
                # The first capture of a process failed twice with torch 2.11, SDPA first both times; the next does not.
                graphs[name] = prepare(call, shape, expected, alive)
        except Exception as error:
            # A peer may be missing on this machine; the table says which and why.
            rows.append({"shape": shape, "name": name, "absent": f"{type(error).__name__}: {first_line(error)}"})
    flops = 2 * b * h * t * t * d
    times = interleave(graphs, rounds)
    sensors = clock_and_power()  # of all peers: a sample is longer than a call
    for name, kinds in times.items():
        row: dict[str, Any] = {"shape": shape, "name": name, **sensors}
        for kind, factor in (("forward", 1.0), ("backward", 2.5)):
            median = statistics.median(kinds[kind])
            row |= {f"{kind}_ms": median, f"{kind}_tflops": factor * flops / median / 1e9}
            row[f"{kind}_all_ms"] = kinds[kind]
        rows.append(row)
    return rows


def table(rows: list[dict]) -> str:
    lines = [f"{'B, T, H, HK, D':22} {'kernel':28} {'fwd ms':>8} {'TFLOP/s':>8} {'bwd ms':>8} {'TFLOP/s':>8}"]
    for row in rows:
        head = f"{', '.join(map(str, row['shape'])):22} {row['name']:28} "
        numbers = (f"{row[f'{k}_ms']:8.3f} {row[f'{k}_tflops']:8.0f}" for k in KINDS if "absent" not in row)
        lines.append(head + (row["absent"][:120] if "absent" in row else " ".join(numbers)))
    return "\n".join(lines)


def ratios(rows: list[dict], ours: Iterable[str]) -> str:
    """A peer's time over ours, round by round, median (10th to 90th percentile): above 1, ours is the faster."""
    lines = [f"{'B, T, H, HK, D':22} {'peer over ours':46} " + " ".join(f"{kind:>21}" for kind in (*KINDS, "both"))]
    timed = [row for row in rows if "absent" not in row]
    for our in (row for row in timed if row["name"] in ours):
        for peer in (row for row in timed if row["shape"] == our["shape"] and row["name"] not in ours):
            columns = []
            for kinds in (["forward"], ["backward"], KINDS):
                theirs, own = (sum(np.array(row[f"{kind}_all_ms"]) for kind in kinds) for row in (peer, our))
                low, median, high = np.percentile(theirs / own, (10, 50, 90))
                columns.append(f"{f'{median:.2f} ({low:.2f} to {high:.2f})':>21}")
            head = f"{', '.join(map(str, our['shape'])):22} {peer['name'] + ' / ' + our['name']:46} "
            lines.append(head + " ".join(columns))
    return "\n".join(lines)


def shape_of(text: str) -> Shape:
    """(B, T, H, HK, D) of a shape as typed. Raises ``UserError`` for any other text."""
    words = text.split(",")
    if len(words) not in (2, 5) or not all(word.isdecimal() and int(word) for word in words):
        raise invalid("--shapes", text, "B,T or B,T,H,HK,D, whole numbers of 1 or more")
    b, t, h, hk, d = [int(word) for word in words] + ([12, 12, 64] if len(words) == 2 else [])
    if h % hk:
        raise invalid("--shapes", text, f"HK = {hk} to divide H = {h}")
    return b, t, h, hk, d


@exit_on_user_error
def main() -> None:
    parser = OneLineParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="B,T[,H,HK,D]")
    parser.add_argument("--presets", nargs="+", default=["flash"], help="presets to run with each of --backends")
    parser.add_argument("--backends", nargs="+", default=["flash"], choices=FLASH_BACKENDS)
    parser.add_argument("--without", nargs="*", default=[], metavar="PEER", help="such as flex, compiled for minutes")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    check_size("--rounds", args.rounds, 1)
    if args.json and args.json.is_dir():
        raise invalid("--json", str(args.json), "a file")
    if args.json:
        with on_disk(f"--json {args.json}", "be written"):
            args.json.parent.mkdir(parents=True, exist_ok=True)
    shapes = [shape_of(text) for text in args.shapes]
    specs = {
        f"{name} ({'triton' if backend == 'flash' else backend})": AttentionSpec(preset=name, backend=backend)
        for backend in args.backends
        for name in args.presets
    }
    for spec in specs.values():
        spec.resolve()
    known = peers_of({}, shapes[0])
    for name in args.without:
        if name not in known:
            raise invalid("--without", name, ", ".join(known))
    if not torch.cuda.is_available():
        raise UserError("scripts/bench_attention.py needs a CUDA device")
    rows = []
    for shape in shapes:
        peers = {k: v for k, v in peers_of(specs, shape).items() if k not in args.without}
        rows += measure(shape, peers, args.rounds)
        made = rows[-len(peers) :]
        print(table(made), ratios(made, specs), explain_clock_and_power(made), "", sep="\n\n", flush=True)
    if args.json:
        machine = environment(torch.device("cuda"), 1)
        machine["versions"] |= {name: version(name) for name in ("flash-attn-4", "nvidia-cutlass-dsl", "flash-attn-3")}
        command = [files.without_folders(word) for word in sys.argv]
        files.write_json(args.json, {"command": command, "machine": machine, "rows": rows})


if __name__ == "__main__":
    main()
