"""What a step's time goes into: a stopwatch around its parts, and the profiler's kernels as text, for ``bench_train.py``."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from model import ModelConfig

PARTS = ("data", "forward", "backward", "clip", "optimiser", "logging")
# The first kind whose piece is in a kernel's name; attention's kernels are this repository's and torch's own.
KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("norms", ("norm_forward_kernel", "norm_backward_kernel")),
    ("attention", ("forward_kernel", "query_kernel", "key_kernel", "flash", "fmha", "cudnn")),
    ("matrix products", ("nvjet", "gemm", "cutlass", "xmma", "_mm_", "splitK")),
    ("softmax of the head", ("softmax_rows_kernel",)),
    ("inductor: reductions", ("triton_red", "triton_per", "triton_mix")),
    ("inductor: elementwise", ("triton_poi", "triton_")),
    ("optimiser and clip", ("multi_tensor", "lpnorm", "fused_adam")),
    ("copies and fills", ("Memcpy", "Memset", "copy", "fill", "FillFunctor")),
)


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Stopwatch:
    """Time between marks: the device's by events where there is one, else the host's; and the host's own beside it."""

    def __init__(self) -> None:
        self.spans: dict[str, list[tuple[Any, Any]]] = {part: [] for part in PARTS}
        self.host: dict[str, float] = dict.fromkeys(PARTS, 0.0)

    def _mark(self) -> Any:
        if not torch.cuda.is_available():
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        began, start = time.perf_counter(), self._mark()
        yield
        self.spans[name].append((start, self._mark()))
        self.host[name] += time.perf_counter() - began

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return function(*args, **kwargs)

        return timed

    def milliseconds_of(self, name: str) -> list[float]:
        """Of every span of one part."""
        synchronise()
        return [1000 * (b - a) if isinstance(a, float) else a.elapsed_time(b) for a, b in self.spans[name]]

    def milliseconds(self, steps: int) -> dict[str, dict[str, float]]:
        """A step's, by part."""
        return {
            name: {"device": sum(self.milliseconds_of(name)) / steps, "host": 1000 * self.host[name] / steps}
            for name in self.spans
        }


class Timed:
    """A module whose calls are timed as one part; everything else of it is its own."""

    def __init__(self, module: Any, watch: Stopwatch, part: str):
        self._module, self._call = module, watch.wrap(part, module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def kind_of(kernel: str) -> str:
    """The kind of a kernel, by its name."""
    return next((kind for kind, pieces in KINDS if any(piece in kernel for piece in pieces)), "other")


def profile(name: str, run: Callable[[int], None], steps: int) -> str:
    """The 60 kernels that take most of the device's time, and how much of the wall time all of them fill."""
    cuda = torch.cuda.is_available()
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * cuda
    run(1)
    synchronise()
    with torch.profiler.profile(activities=activities) as recorded:
        began = time.perf_counter()
        run(steps)
        synchronise()
        wall = 1000 * (time.perf_counter() - began) / steps
    kernels: dict[str, list[float]] = {}
    for event in recorded.events():
        on_device = event.device_type == torch.autograd.DeviceType.CUDA
        if on_device == cuda and not getattr(event, "is_user_annotation", False):
            kernels.setdefault(event.name, []).append(event.time_range.elapsed_us() / 1000 / steps)
    total = sum(sum(times) for times in kernels.values())
    count = sum(len(times) for times in kernels.values()) / steps
    lines = [f"{name}: {wall:.3f} ms a step with the profiler on, {total:.3f} ms of it in {count:.0f} kernels"]
    kinds: dict[str, float] = {}
    for kernel, times in kernels.items():
        kinds[kind_of(kernel)] = kinds.get(kind_of(kernel), 0.0) + sum(times)
    lines += [f"{kinds[kind]:10.4f}  {kind}" for kind in sorted(kinds, key=lambda kind: -kinds[kind])]
    lines += [f"{'ms/step':>10} {'calls':>7} {'each us':>9}  kernel"]
    for kernel, times in sorted(kernels.items(), key=lambda item: -sum(item[1]))[:60]:
        calls = len(times) / steps
        lines.append(f"{sum(times):10.4f} {calls:7.1f} {1000 * sum(times) / calls:9.1f}  {kernel[:150]}")
    return "\n".join(lines) + "\n\n"


def matmul_rate(device: torch.device, m: int, k: int, n: int, layout: str = "nn") -> float:
    """FLOP/s of a BF16 product [m, k] [k, n], median of 20; ``layout``: t for an operand that is stored transposed."""
    a = torch.randn(*((m, k) if layout[0] == "n" else (k, m)), device=device).bfloat16()
    b = torch.randn(*((k, n) if layout[1] == "n" else (n, k)), device=device).bfloat16()
    a, b = a if layout[0] == "n" else a.mT, b if layout[1] == "n" else b.mT
    watch = Stopwatch()
    for _ in range(25):
        with watch.part("forward"):
            torch.mm(a, b)
    synchronise()
    return 2 * m * k * n / (statistics.median(watch.milliseconds_of("forward")[5:]) / 1000)


def products(device: torch.device, model: ModelConfig, tokens: int) -> str:
    """Every matrix product of a step timed by itself, forward, gradient of the input, gradient of the weight; and their sum."""
    C, V, L = model.n_embd, model.padded_vocab_size, model.n_layer
    shapes = {
        "qkv": (C, 3 * C, L),
        "attention out": (C, C, L),
        "mlp up": (C, 4 * C, L),
        "mlp down": (4 * C, C, L),
        "head": (C, V, 1),
    }
    lines, total = [f"{'product':16} {'forward':>14} {'by input':>14} {'by weight':>14}   ms a step (TFLOP/s)"], 0.0
    for name, (inputs, outputs, count) in shapes.items():
        rates = (
            matmul_rate(device, tokens, inputs, outputs, "nt"),
            matmul_rate(device, tokens, outputs, inputs, "nn"),
            matmul_rate(device, outputs, tokens, inputs, "tn"),
        )
        times = [1000 * count * 2 * tokens * inputs * outputs / rate for rate in rates]
        total += sum(times)
        lines.append(f"{name:16} " + " ".join(f"{t:7.3f} ({r / 1e12:4.0f})" for t, r in zip(times, rates, strict=True)))
    return "\n".join([*lines, f"all products: {total:.2f} ms a step"])
