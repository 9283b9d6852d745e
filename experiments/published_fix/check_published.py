"""Hold the base ``published`` against the published code of arXiv 2510.04212 itself: O, dQ, dK and dV on the same tensors.

    git clone https://github.com/ucker/why-low-precision-training-fails published
    python -m experiments.published_fix.check_published --published published/attention.py [--device cuda] [--out check.json]

The published code runs four ways, each with STABLE=0 and STABLE=1: ``compiled`` as its train.py does, under autocast with the backward
pass outside; ``eager``; ``eager, exact products``, the same with every product summed in FP64 and then rounded as before, which says how
far it is from itself under another order of sums; and ``compiled, head dim permuted``, the same question for the compiled code.
Numbers are ||a - b|| / ||b||. On a CPU, autocast keeps no list of FP32 operators: there ``compiled`` and ``eager`` have CUDA's casts
written out, and ``cpu compiled`` and ``cpu eager`` are what a CPU makes of the code.

``written out`` are the compiled code's roundings tile by tile. Two of them are no sites of ``published``: each tile's part of dQ, dK and
dV is rounded to BF16, and whether l is rounded depends on where the compiler cuts its kernels (``ROUNDED_L``).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import attention
from attention import AttentionConfig, AttentionSpec
from errors import UserError, invalid

NAMES = ("o", "dq", "dk", "dv")
SIZES = {"small": (2, 2, 1024, 64), "gpt2": (8, 12, 1024, 64)}  # batch, heads, sequence, head dim
CASES = ("plain", "large", "one_signed", "tied", "tied_large")
# Where l is rounded to BF16, in rows of the first tile and of those after: after a tile that is not the last, as O reads it, as L does.
ROUNDED_L = {
    "torch 2.6": ((1, 0), (1, 0), (1, 0)),  # read from the code it makes for CUDA
    "torch 2.13": ((0, 0), (0, 1), (1, 1)),  # found by fitting
    "always": ((1, 1), (1, 1), (1, 1)),
    "never": ((0, 0), (0, 0), (0, 0)),
}
TILE = 512
SITES: dict[str, tuple[str, ...]] = {
    "": (),
    "statistics": ("statistics=fp32",),
    "logsumexp": ("logsumexp=bf16",),
    "gradients": ("gradient_accumulator=bf16",),
    "accumulator": ("accumulator=bf16",),
    "dp": ("probability_gradients=fp32",),
    "floor": ("row_sum_floor=0.0", "hidden_tiles=skipped"),
    "skipped": ("hidden_tiles=skipped",),
    "cpu": ("accumulator=bf16", "logsumexp=bf16", "delta_sum=bf16", "gradient_accumulator=bf16"),
}
"""Candidates: single sites changed on ``published``."""


def published(path: Path, *, stable: bool, cuda_autocast: bool, exact_products: bool) -> Callable[..., Tensor]:
    """The published attention of q, k, v [B, H, T, D], from its source; ``cuda_autocast``: with the casts of CUDA's BF16 autocast.

    Raises ``UserError`` where the source is not the one known.
    """
    source = path.read_text()
    source = _replace(source, r'os\.environ\.get\("STABLE", "0"\) == "1"', str(stable), 1, path)
    if cuda_autocast:
        source = _replace(source, r"torch\.exp\(", "_exp(", 3, path)
        source = _replace(source, r"\.log\(\)", ".float().log()", 1, path)
        source = _replace(source, r"\.sum\(dim = -1", ".float().sum(dim = -1", 2, path)
    if "einops" not in sys.modules:
        try:
            import einops  # noqa: F401
        except ImportError:
            # Only its masks, of which there are none here, go through rearrange.
            sys.modules["einops"] = types.ModuleType("einops")
            sys.modules["einops"].rearrange = None  # type: ignore[attr-defined]
            print("einops is not installed: an empty stand-in, as no mask is given")
    # torch.compile looks functions up by their module's name.
    module = types.ModuleType(f"published_attention_{len(sys.modules)}")
    sys.modules[module.__name__] = module
    module.__dict__["_exp"] = lambda x: torch.exp(x.float())
    exec(compile(source, str(path), "exec"), module.__dict__)
    if exact_products:
        module.__dict__["einsum"] = _exact_einsum
    elif cuda_autocast:
        module.__dict__["einsum"] = _bf16_einsum
    function = module.__dict__["FlashAttentionFunction"]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return function.apply(q, k, v, None, True, 512, 512)

    return call


def _replace(source: str, pattern: str, by: str, count: int, path: Path) -> str:
    source, found = re.subn(pattern, by, source)
    if found != count:
        raise UserError(f"{path}: expected {count} times {pattern!r}, found {found}: another version of the code")
    return source


def _bf16_einsum(equation: str, *operands: Tensor) -> Tensor:
    return torch.einsum(equation, *(x.bfloat16() for x in operands))


def _exact_einsum(equation: str, *operands: Tensor) -> Tensor:
    return torch.einsum(equation, *(x.bfloat16().double() for x in operands)).bfloat16()


def make(case: str, size: tuple[int, ...], device: torch.device) -> tuple[Tensor, ...]:
    """q, k, v and dO [B, H, T, D] in BF16."""
    generator = torch.Generator().manual_seed(CASES.index(case))
    q, k, v, do = (torch.randn(size, generator=generator) for _ in range(4))
    if case == "large":
        q = q * 10
    elif case == "one_signed":
        v = -v.abs() - 1
    elif case.startswith("tied"):
        q = q * (10 if case == "tied_large" else 2)
        k = k[:, :, :64].repeat(1, 1, size[2] // 64, 1)  # every key comes back after 64
        v = -v.abs() - 1
    return tuple(x.to(device, torch.bfloat16) for x in (q, k, v, do))


def theirs(
    call: Callable[..., Tensor], inputs: tuple[Tensor, ...], autocast: Any, *, backward_inside: bool
) -> tuple[Tensor, ...]:
    """O, dQ, dK, dV."""
    q, k, v = (x.detach().clone().requires_grad_() for x in inputs[:3])
    with autocast():
        o = call(q, k, v)
        if backward_inside:
            return o.detach(), *torch.autograd.grad(o, (q, k, v), inputs[3])
    return o.detach(), *torch.autograd.grad(o, (q, k, v), inputs[3])


def ours(inputs: tuple[Tensor, ...], spec: AttentionSpec) -> tuple[Tensor, ...]:
    q, k, v = (x.transpose(1, 2).detach().requires_grad_() for x in inputs[:3])
    plan = AttentionConfig(flash_backend="flash_reference", default=spec).resolve(1, q.shape[2])[0]
    o = attention.run(q, k, v, plan, rounding_seed=torch.tensor(0, device=q.device))
    results = o.detach(), *torch.autograd.grad(o, (q, k, v), inputs[3].transpose(1, 2).contiguous())
    return tuple(x.transpose(1, 2) for x in results)


def written_out(
    inputs: tuple[Tensor, ...], *, stable: bool, rounded_l: tuple[tuple[int, int], ...]
) -> tuple[Tensor, ...]:
    """O, dQ, dK, dV with the roundings of the compiled code; ``rounded_l`` is a row of ``ROUNDED_L``."""
    q, k, v, do = (x.float() for x in inputs)
    scale, lowest = q.shape[-1] ** -0.5, torch.finfo(torch.bfloat16).min
    o, lse = torch.zeros_like(q), q.new_zeros((*q.shape[:3], 1))
    tiles = [slice(start, start + TILE) for start in range(0, q.shape[2], TILE)]
    position = torch.arange(q.shape[2], device=q.device)

    def scores(rows: slice, columns: slice, hidden: float) -> Tensor:
        s = _bf16(_bf16(q[:, :, rows] @ k[:, :, columns].mT) * scale)
        return s.masked_fill(position[columns] > position[rows][:, None], hidden)

    for rows in tiles:
        between, in_o, in_lse = (which[min(rows.start, 1)] for which in rounded_l)
        m = torch.full_like(lse[:, :, rows], lowest)
        row_sum, o_bar = torch.zeros_like(m), torch.zeros_like(q[:, :, rows])
        for columns in tiles:
            s = scores(rows, columns, lowest)
            r = s.amax(dim=-1, keepdim=True)
            if stable:
                tied = (s >= r - 1e-3).sum(dim=-1, keepdim=True) > 1
                r = torch.where(tied, torch.where(r > 0, 2 * r, r.clamp(min=0)), r)
            m_new = torch.maximum(m, r)
            p_bar, alpha = torch.exp(s - m_new), torch.exp(m - m_new)
            row_sum = alpha * row_sum + p_bar.sum(dim=-1, keepdim=True).clamp(min=1e-10)
            if between and columns is not tiles[-1]:
                row_sum = _bf16(row_sum)
            o_bar = alpha * o_bar + _bf16(_bf16(p_bar) @ v[:, :, columns])
            m = m_new
        o[:, :, rows] = _bf16(o_bar / (_bf16(row_sum) if in_o else row_sum))
        lse[:, :, rows] = m + torch.log(_bf16(row_sum) if in_lse else row_sum)
    delta = (do * o).sum(dim=-1, keepdim=True)
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for rows in tiles:
        for columns in tiles[: tiles.index(rows) + 1]:
            p = torch.exp(scores(rows, columns, -torch.inf) - lse[:, :, rows])
            dp = _bf16(do[:, :, rows] @ v[:, :, columns].mT)
            ds = _bf16(scale * p * (dp - delta[:, :, rows]))
            dq[:, :, rows] += _bf16(ds @ k[:, :, columns])
            dk[:, :, columns] += _bf16(ds.mT @ q[:, :, rows])
            dv[:, :, columns] += _bf16(_bf16(p).mT @ do[:, :, rows])
    return o, *(_bf16(x) for x in (dq, dk, dv))


def _bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def exact(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Softmax attention in FP64, one head at a time."""
    parts = []
    for b in range(inputs[0].shape[0]):
        q, k, v = (x[b].double().requires_grad_() for x in inputs[:3])
        s = (q @ k.mT) * q.shape[-1] ** -0.5
        mask = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)
        o = torch.softmax(s.masked_fill(mask, -torch.inf), dim=-1) @ v
        parts.append((o.detach(), *torch.autograd.grad(o, (q, k, v), inputs[3][b].double())))
    return tuple(torch.stack(x) for x in zip(*parts, strict=True))


def errors(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> list[float]:
    return [((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in zip(found, expected, strict=True)]


def small_rows(found: Tensor, reference: Tensor) -> int:
    """Rows of O below 1e-3 of what they are in FP64."""
    return int((found.double().norm(dim=-1) < 1e-3 * reference.norm(dim=-1)).sum())


class Published:
    """The published code run in all ways on one size and one STABLE."""

    def __init__(self, path: Path, device: torch.device, *, stable: bool, compiled: bool):
        cuda = device.type == "cuda"
        autocast = (lambda: torch.autocast(device.type, torch.bfloat16)) if cuda else nullcontext
        on_cpu = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731

        def load(*, casts: bool, exact_products: bool = False) -> Callable[..., Tensor]:
            return published(path, stable=stable, cuda_autocast=casts, exact_products=exact_products)

        written_out = not cuda
        self.ways: dict[str, Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]] = {}
        if compiled:
            model = torch.compile(load(casts=written_out), dynamic=False)
            self.ways["compiled"] = lambda x: theirs(model, x, autocast, backward_inside=False)
            self.ways["compiled, head dim permuted"] = lambda x: _permuted(
                x, lambda y: theirs(model, y, autocast, backward_inside=False)
            )
        # Eager, under CUDA's autocast, its backward pass raises outside it: P is FP32 there, dO BF16.
        plain, exactly = load(casts=written_out), load(casts=True, exact_products=True)
        self.ways["eager"] = lambda x: theirs(plain, x, autocast, backward_inside=True)
        self.ways["eager, exact products"] = lambda x: theirs(exactly, x, nullcontext, backward_inside=True)
        if not cuda:
            bare = load(casts=False)
            self.ways["cpu eager"] = lambda x: theirs(bare, x, on_cpu, backward_inside=False)
            if compiled:
                built = torch.compile(bare, dynamic=False)
                self.ways["cpu compiled"] = lambda x: theirs(built, x, on_cpu, backward_inside=False)


def _permuted(
    inputs: tuple[Tensor, ...], run: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """The same problem with the features of the head in another order."""
    order = torch.randperm(inputs[0].shape[-1], generator=torch.Generator().manual_seed(0)).to(inputs[0].device)
    back = order.argsort()
    return tuple(x[..., back] for x in run(tuple(x[..., order].contiguous() for x in inputs)))


def candidates(device: torch.device, *, stable: bool, every: bool) -> Iterator[tuple[str, AttentionSpec]]:
    preset = "flash_stable" if stable else "flash"
    backend = "flash" if device.type == "cuda" else "flash_reference"
    yield "paper", AttentionSpec(preset=preset, numerics="paper", backend=backend)
    for name, sites in SITES.items():
        if every or not name:
            label = " ".join(("published", *sites))
            yield label, AttentionSpec(preset=preset, numerics="published", sites=sites, backend=backend)
    if backend == "flash" and every:
        yield "published (reference)", AttentionSpec(preset=preset, numerics="published", backend="flash_reference")


def compare(ways: Published, inputs: tuple[Tensor, ...], *, stable: bool, every: bool) -> list[dict[str, Any]]:
    """One row a run of theirs or ours: its distance from each of theirs, and from FP64."""
    found = {f"theirs, {name}": way(inputs) for name, way in ways.ways.items()}
    targets = {
        name.removeprefix("theirs, "): value
        for name, value in found.items()
        if not name.endswith(("permuted", "products"))
    }
    reference = exact(inputs)
    for name, rounded_l in ROUNDED_L.items():
        found[f"written out, l as {name}"] = written_out(inputs, stable=stable, rounded_l=rounded_l)
    for name, spec in candidates(inputs[0].device, stable=stable, every=every):
        found[name] = ours(inputs, spec)
    return [
        {
            "name": name,
            **{f"from {target}": errors(value, expected) for target, expected in targets.items()},
            "from fp64": errors(value, reference),
            "rows below 1e-3": small_rows(value[0], reference[0]),
        }
        for name, value in found.items()
    ]


def show(title: str, rows: list[dict[str, Any]]) -> None:
    columns = [name for name in rows[0] if name.startswith("from ")]
    print(f"\n{title}\n{'':44}" + "".join(f"{name:>36}" for name in columns) + "  small rows")
    print(f"{'':44}" + "".join("".join(f"{name:>9}" for name in NAMES) for _ in columns))
    for row in rows:
        numbers = "".join("".join(f"{x:9.1e}" for x in row[name]) for name in columns)
        print(f"{row['name'][:44]:44}{numbers}{row['rows below 1e-3']:12d}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--published", type=Path, required=True, help="attention.py of the published code")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sizes", nargs="+", default=["small"], choices=SIZES)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--eager", action="store_true", help="do not compile the published code")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no other case after so long")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not options.published.is_file():
        raise invalid("--published", options.published, "attention.py of the published code")
    device, started = torch.device(options.device), time.perf_counter()
    torch.backends.cuda.matmul.allow_tf32 = False
    records = []
    for size in options.sizes:
        for stable in (False, True):
            ways = Published(options.published, device, stable=stable, compiled=not options.eager)
            for case in options.cases:
                if time.perf_counter() - started > options.seconds:
                    print(f"{size} STABLE={int(stable)} {case}: no time left")
                    continue
                inputs = make(case, SIZES[size], device)
                rows = compare(ways, inputs, stable=stable, every=size == "small")
                title = f"{size} {'x'.join(map(str, SIZES[size]))}, STABLE={int(stable)}, {case}"
                show(f"{title} ({time.perf_counter() - started:.0f} s)", rows)
                records.append({"size": size, "stable": stable, "case": case, "rows": rows})
    if options.out:
        about = {"device": str(device), "torch": torch.__version__}
        if device.type == "cuda":
            about["gpu"] = torch.cuda.get_device_name(device)
        options.out.write_text(json.dumps({**about, "results": records}, indent=1))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
