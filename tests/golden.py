"""Golden values: losses of two recipes, and outputs and gradients of every preset on every base, as they were when recorded.

    python tests/golden.py --check              everything on this machine, bit for bit where it is like the one that recorded
    python tests/golden.py --check interpreter  one part: losses, reference or interpreter
    python tests/golden.py --write              record all again, on this machine (a change of numerics gets a commit that says so)

What is checked is what was recorded: new presets, bases and sites need no entry.
"""

import argparse
import contextlib
import hashlib
import io
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy
import torch
from threadpoolctl import threadpool_info

ROOT = Path(__file__).resolve().parent.parent
FOLDER = Path(__file__).resolve().parent / "golden"
PARTS = ("losses", "reference", "interpreter")

# Where arithmetic is another machine's, a sum may come out in another order; then numbers are compared to this, relative to the largest
# of their list: one unit in the last place of BF16 for tensors. The runs round to BF16 at each step, and what a sum's order moves grows:
# twice the most that two of ATEN_CPU_CAPABILITY=default, avx2 and the recorded AVX512 are apart in these four runs, 1.8e-5 of the loss and
# 1.2e-4 of the norm (one thread or two: 2e-7).
OTHER_MACHINE = {"train_loss": 2 * 1.8e-5, "grad_norm": 2 * 1.2e-4}
OTHER_TENSOR = 2.0**-7

LOSS_STEPS = 12
LOSSES = {
    "debug flash": ["configs/debug.py"],
    "debug standard": ["configs/debug.py", "--attention.default.preset", "standard"],
    "quickstart flash": ["configs/quickstart.py"],
    "quickstart flash_delta_from_p": ["configs/quickstart.py", "--attention.default.preset", "flash_delta_from_p"],
}
# A site by itself, besides those that presets change; one that a base or backend refuses is not recorded.
SITES = (
    "inputs=m4",
    "scores=bf16",
    "statistics=m9",
    "logsumexp=m9",
    "saved_statistics=max_and_sum",
    "probabilities=m3",
    "tile_product=m5",
    "accumulator=m5",
    "output=fp32",
    "output=m3",
    "output_rounding=toward_zero",
    "output_gradient=m3",
    "delta_output=m2",
    "delta_sum=m4",
    "delta=rowsum_p_dp,delta_error=random,delta_error_rows=as_many_as_untied",
    "delta=rowsum_p_dp,delta_error=zero_sum",
    "probability_gradients=bf16",
    "score_gradients=m3",
    "gradient_accumulator=m6",
)
TILES = ("tile_q=16", "tile_k=32")


def machine() -> dict[str, str]:
    """What decides the last bits of sums: two machines that agree here are held to equality.

    NumPy's BLAS chooses its kernels apart from torch's vectors (by ``OPENBLAS_CORETYPE``, too), and oneDNN and MKL choose theirs by
    variables that nothing reports. So the names stand beside a digest of products, which all of these change.
    """
    model = [line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    blas = {f"{x['internal_api']} {x['version']} {x.get('architecture', '')}".strip() for x in threadpool_info()}
    return {
        "cpu": model[0] if model else platform.processor(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "triton": metadata.version("triton") if find_spec("triton") else "",
        "blas": ", ".join(sorted(blas)),
        "products": _products(),
    }


def _products() -> str:
    """Digest of products and sums, in the shapes and types of the cases below."""
    found = hashlib.sha256()
    generator = torch.Generator().manual_seed(3)
    for m, k, n in ((48, 16, 48), (32, 48, 16), (256, 128, 384)):
        a, b = (torch.randn(shape, generator=generator) for shape in ((m, k), (k, n)))
        found.update(numpy.matmul(a.numpy(), b.numpy()).tobytes())
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            found.update(digest(a.to(dtype) @ b.to(dtype)).encode())
        found.update(digest(torch.stack([a.sum(1), a.exp().sum(1), a.softmax(1)[:, 0]])).encode())
    return found.hexdigest()[:16]


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def record_losses(wanted: list[str] | None) -> dict[str, Any]:
    """Loss and gradient norm of each step, all digits, from the metrics of runs as a user starts them."""
    from tiny_runs import make_data

    import config
    import train

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_data(Path(folder) / "data", train=40_000, validation=20_000)
        fixed = f"--run.folder {folder} --run.name golden --run.steps {LOSS_STEPS} --run.log-every 1 --run.device cpu"
        fixed += f" --data.dataset {folder}/data --evaluation.every 0 --checkpoint.every 0"
        for name in wanted or LOSSES:
            with contextlib.redirect_stdout(io.StringIO()):
                train.train(config.load([*LOSSES[name], *fixed.split()]))
            rows = [row for row in map(json.loads, _lines(f"{folder}/golden/metrics.jsonl")) if "train_loss" in row]
            shutil.rmtree(f"{folder}/golden")
            found[name] = {key: [row[key] for row in rows] for key in ("train_loss", "grad_norm")}
    return found


def cases(part: str) -> Iterator[str]:
    """Keys of what is recorded today: ``preset|base|sites|dtype|variant``."""
    from attention.numerics import BASES
    from attention.presets import PRESETS

    flash = [name for name, preset in PRESETS.items() if preset.backend == "flash"]
    if part == "reference":
        for preset, base, dtype in itertools.product(PRESETS, BASES, ("bf16", "fp32")):
            yield f"{preset}|{base}||{dtype}|"
        for preset, base in itertools.product(flash, BASES):
            yield f"{preset}|{base}|{','.join(TILES)}|bf16|"
        for site, base in itertools.product(SITES, BASES):
            yield f"flash|{base}|{','.join((site, *TILES))}|bf16|"
        for base, variant in itertools.product(BASES, ("softcap", "not causal")):
            yield f"flash|{base}||bf16|{variant}"
        yield from (f"{preset}|{base}||fp16|" for preset in ("standard", "flash") for base in BASES)
    else:
        for preset, base in itertools.product(flash, BASES):
            yield f"{preset}|{base}||bf16|"
        for site in SITES:
            yield f"flash|hardware|{','.join((site, *TILES))}|bf16|"
        yield from ("flash|hardware||fp32|", "flash|rounded_forward||fp16|", "flash|hardware||bf16|softcap")


def compute(part: str, key: str) -> dict[str, Any] | None:
    """Digest and a few numbers of O, dQ, dK and dV of one case; None where the library refuses it."""
    import attention
    from attention import AttentionConfig, AttentionSpec
    from errors import UserError

    preset, base, sites, dtype_name, variant = key.split("|")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype_name]
    q, k, v, do = problem(dtype)
    try:
        spec = AttentionSpec(preset=preset, numerics=base, sites=tuple(filter(None, sites.split(","))))
        config = AttentionConfig(flash_backend="flash" if part == "interpreter" else "flash_reference", default=spec)
        plan = config.resolve(2, q.shape[2])[1]
        softcap = 5.0 if variant == "softcap" else 0.0
        attention.check_plans((plan,), device="cpu", dtype=dtype, head_dim=q.shape[3], softcap=softcap)
    except UserError:
        return None
    seed = torch.tensor(11)
    o = attention.run(q, k, v, plan, rounding_seed=seed, softcap=softcap, causal=variant != "not causal")
    gradients = torch.autograd.grad(o, (q, k, v), do.to(o.dtype))
    return {
        name: {"sha256": digest(x), "norm": x.double().norm().item(), "some": some(x)}
        for name, x in zip(("o", "dq", "dk", "dv"), (o.detach(), *gradients), strict=True)
    }


def problem(dtype: Any) -> tuple[Any, ...]:
    """q, k, v and dO [1, 48, 2, 16]: scores of several sizes, keys that tie, values of one sign, so that every site has something to do."""
    generator = torch.Generator().manual_seed(7)
    q, k, v, do = (torch.randn(1, 48, 2, 16, generator=generator) for _ in range(4))
    q, k = q * torch.linspace(0.25, 3, 48)[None, :, None, None], k * 1.5
    k[:, 24:36] = k[:, 12:24]  # ties in all rows behind
    v[..., :8] = -v[..., :8].abs() - 1
    return (*(x.to(dtype).requires_grad_() for x in (q, k, v)), do.to(dtype))


def digest(x: Any) -> str:
    return hashlib.sha256(x.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def some(x: Any) -> list[float]:
    """Two elements, of an early and a late row."""
    return [x[0, t, t % 2, t % 16].item() for t in (10, 40)]


def record(part: str, wanted: list[str] | None = None) -> dict[str, Any]:
    """Values of a part by key: of the keys that are given, or of all there are today."""
    if part == "losses":
        return record_losses(wanted)
    if part == "interpreter":
        from kernel_tests import patch_once_a_launch

        patch_once_a_launch()
    found = {key: compute(part, key) for key in (wanted or cases(part))}
    return found if wanted else {key: value for key, value in found.items() if value is not None}


def differences(wanted: dict[str, Any], found: dict[str, Any], exactly: bool) -> list[str]:
    """One line a value that differs: in any bit if ``exactly``, else by more than another machine's arithmetic may."""
    lines = []
    for key, expected in wanted.items():
        value = found[key] or dict.fromkeys(expected, "refused")
        for name, old in expected.items():
            if old != value[name] and (exactly or not _near(old, value[name], OTHER_MACHINE.get(name, OTHER_TENSOR))):
                lines.append(f"{key}: {name} was {old}, is {value[name]}")
                break
    return lines


def _near(old: Any, new: Any, tolerance: float) -> bool:
    if new == "refused":
        return False
    old, new = ([x["norm"], *x["some"]] if isinstance(x, dict) else x for x in (old, new))
    scale = max((abs(x) for x in old if isinstance(x, float) and x == x), default=0.0)
    for a, b in itertools.zip_longest(old, new):
        same = a == b or (a is not None and b is not None and (a != a and b != b))
        if not same and not (isinstance(a, float) and isinstance(b, float) and abs(a - b) <= tolerance * scale):
            return False
    return True


def check(part: str) -> tuple[list[str], bool]:
    """What differs from the recorded values, and whether every bit was compared (the machine is like the one that recorded)."""
    content = json.loads((FOLDER / f"{part}.json").read_text())
    exactly = content["machine"] == machine()
    wanted = content["values"]
    return differences(wanted, record(part, list(wanted)), exactly), exactly


def in_a_process(part: str, action: str) -> int:
    """Run one part in a Python of its own: Triton's interpreter is chosen when the kernels are defined."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment["TRITON_INTERPRET"] = "1" if part == "interpreter" else "0"
    command = [sys.executable, __file__, action, part, "--here"]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", nargs="?", const="all", choices=("all", *PARTS))
    action.add_argument("--write", nargs="?", const="all", choices=("all", *PARTS))
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    action_name, chosen = ("--check", arguments.check) if arguments.check else ("--write", arguments.write)
    if not arguments.here:
        parts = PARTS if chosen == "all" else (chosen,)
        return max([in_a_process(part, action_name) for part in parts])
    if action_name == "--write":
        values = record(chosen)
        head = json.dumps({"machine": machine()}, indent=1)[:-2]
        body = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in values.items())
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / f"{chosen}.json").write_text(f'{head},\n "values": {{\n{body}\n }}\n}}\n')
        print(f"{chosen}: {len(values)} cases written")
        return 0
    lines, exactly = check(chosen)
    how = "bit for bit" if exactly else "to rounding: this machine is not like the one that recorded"
    print("\n".join(lines[:20] + ["..."] * (len(lines) > 20)) or f"{chosen}: equal ({how})")
    return bool(lines)


if __name__ == "__main__":
    raise SystemExit(main())
