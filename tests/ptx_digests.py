"""Digests of the PTX that attention's kernels compile to: equal digests prove that a change moves no bit, and need no GPU.

    python tests/ptx_digests.py --check          every case against what is recorded for this version of Triton: 17 minutes on one core
    python tests/ptx_digests.py --check --quick  what tests/test_ptx_digests.py checks, in about a minute
    python tests/ptx_digests.py --write          record this version again (a change of numerics gets a commit of its own, which says so)
    python tests/ptx_digests.py --show CASE      the PTX that is digested, for a diff

A case is ``preset|base|head dim|form|dtype|target``. The head dim is ``D``, or ``D/DV``; a form is a mask, or another property of the call
(``FORMS``). Each case holds one digest a launch, in order. Not all combinations are there: ``cases`` says which.

PTX is compared without what does not count (``what_counts``).
"""

import argparse
import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
RECORD = Path(__file__).resolve().parent / "golden" / "ptx.json"
TARGETS = (80, 90, 100)
HEAD_DIMS = (16, 64, 80, 128, 256, "192/128")
CORE = ("flash", "flash_consistent", "flash_delta_from_p")


class Form(NamedTuple):
    """The properties of a call that kernels are compiled for, beside numerics, head dim and dtype."""

    length: int = 1024
    keys_per_head: int = 1
    causal: bool = True
    softcap: float = 0.0
    mask: str = ""


FORMS = {
    "causal": Form(),
    "full": Form(causal=False),
    "ragged": Form(length=1000),
    "ragged full": Form(length=1000, causal=False),
    "window": Form(mask="window"),
    "padding": Form(mask="keys", causal=False),
    "grouped": Form(keys_per_head=3),
    "softcap": Form(softcap=5.0),
}


def cases() -> Iterator[str]:
    """Every preset on the bases ``hardware`` and ``published``; the presets of ``CORE`` on the others, with every form, and with every
    head dim, in FP16 and in FP32 (there also where V is narrower) on every target."""
    from attention.numerics import BASES
    from attention.presets import PRESETS

    flash = [name for name, preset in PRESETS.items() if preset.backend == "flash"]
    every = [
        *itertools.product(flash, ("hardware", "published"), (64,), ("causal",), ("bf16",), (90,)),
        *itertools.product(CORE, BASES, (64,), ("causal",), ("bf16",), (90,)),
        *itertools.product(CORE, ("hardware",), (64,), FORMS, ("bf16",), (90,)),
        *itertools.product(CORE, ("hardware",), HEAD_DIMS, ("causal",), ("bf16",), TARGETS),
        *itertools.product(CORE, ("hardware",), (64,), ("causal",), ("fp16",), TARGETS),
        *itertools.product(CORE, ("hardware",), (64, "192/128"), ("causal",), ("fp32",), TARGETS),
    ]
    yield from dict.fromkeys("|".join(map(str, case)) for case in every)


QUICK = (
    "flash|hardware|64|ragged|bf16|90",
    "flash|hardware|64|causal|fp16|100",
    "flash|published|64|causal|bf16|90",
    "flash_consistent|hardware|64|causal|bf16|90",
    "flash|hardware|64|padding|bf16|90",
    "flash_delta_from_p|hardware|64|causal|fp16|80",
    "flash_separate_multiply|hardware|64|causal|bf16|90",
)
"""Cases of the quick check: together they reach every kernel, every loop and every target."""


class _Driver:
    """Stands in for a GPU's driver: it says what to compile for, and launches nothing."""

    def __init__(self, arch: int):
        self.arch = arch

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)


class _Recorder:
    """Stands in for a kernel: its launches compile it."""

    def __init__(self, kernel: Any, found: list[str]):
        self.kernel, self.found = kernel, found

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(**arguments: Any) -> None:
            self.found.append(self.kernel.warmup(grid=grid, **arguments).asm["ptx"])

        return launch


def _without_ptxas(*stage: Any) -> tuple[str, str] | None:
    """A hook of Triton's compiler: PTX is the last stage that is made. Called without arguments, it names itself for the cache."""
    if not stage:
        return "without ptxas", "without ptxas"
    stage[1]["cubin"] = lambda source, metadata: b"none"
    return None


def compile_case(case: str) -> list[str] | None:
    """The PTX of each launch of both passes, in order; None where the library refuses the case."""
    from unittest.mock import patch

    import torch
    import triton

    from attention.backends import Call, obstacle
    from attention.mask import NO_MASK, Mask
    from attention.plan import AttentionSpec
    from attention.reference.flash import kept_of
    from attention.triton import backward, forward, loads
    from attention.triton.block_sizes import backward_blocks, forward_blocks

    preset, base, head_dim, form_name, dtype, arch = case.split("|")
    D, DV = (int(head_dim.split("/")[i]) for i in (0, -1))
    form = FORMS[form_name]
    n = AttentionSpec(preset=preset, numerics=base).resolve()
    if obstacle("flash", Call("cuda", dtype, D, n, ("softcap",) * (form.softcap > 0), DV)):
        return None
    n = n.concrete(dtype)
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    T, H = form.length, 6
    q = torch.zeros(2, T, H, D, dtype=kind)
    k, v = (torch.zeros(2, T, H // form.keys_per_head, width, dtype=kind) for width in (D, DV))
    t = torch.arange(T)
    window = torch.stack(((t - 255).clamp(min=0), t + 1)).expand(2, 2, T)
    masks = {"window": Mask(ranges=window), "keys": Mask(keys=torch.ones(2, T, dtype=torch.bool))}
    settings = (1 / D**0.5, form.causal, form.softcap, None, masks.get(form.mask, NO_MASK))
    found: list[str] = []
    triton.runtime.driver.set_active(_Driver(int(arch)))
    triton.knobs.runtime.add_stages_inspection_hook = _without_ptxas
    kernels = ((forward, "forward_kernel"), (backward, "query_kernel"), (backward, "key_kernel"))
    recorders = [patch.object(module, name, _Recorder(getattr(module, name), found)) for module, name in kernels]
    capability = patch.object(loads, "capability", lambda device: divmod(int(arch), 10))
    checked = patch.object(forward, "check_sums", lambda device: None)  # it runs a kernel
    try:
        for change in (*recorders, capability, checked):
            change.start()
        seed, shape = torch.tensor(0), (n, dtype, max(D, DV), T, T)
        o, *rest = forward.launch_forward(q, k, v, seed, n, forward_blocks(*shape), *settings)
        kept = kept_of(seed, o, *rest)
        backward.launch_backward(torch.zeros_like(o), q, k, v, *kept, n, backward_blocks(*shape), *settings)
    finally:
        patch.stopall()
    return found


def what_counts(ptx: str) -> str:
    """PTX without comments, debug information, the version line, the kernel's name, and parameters that nothing reads."""
    name = re.search(r"\.entry (\w+)", ptx)
    assert name is not None
    lines = (line.split("//")[0].strip() for line in ptx.split(".section")[0].splitlines())
    unwanted = (".version", ".loc", ".file", "$L__tmp")
    kept = [line for line in lines if line and not line.startswith(unwanted)]
    parameter = re.compile(rf"{name[1]}_param_(\d+)")
    code = "\n".join(line for line in kept if not line.startswith(".param"))
    # Numbered in the order of the signature: two that change places differ.
    numbers = {old: str(new) for new, old in enumerate(sorted(set(parameter.findall(code)), key=int))}
    return parameter.sub(lambda found: f"parameter_{numbers[found[1]]}", code).replace(name[1], "kernel")


def digest(ptx: str) -> str:
    return hashlib.sha256(what_counts(ptx).encode()).hexdigest()[:10]


def record(wanted: list[str]) -> dict[str, str]:
    """Digests by case, those of one case in one text."""
    made = {case: compile_case(case) for case in tqdm(wanted, unit="case", disable=None)}
    return {case: "refused" if ptx is None else " ".join(map(digest, ptx)) for case, ptx in made.items()}


def check(quick: bool) -> tuple[list[str], str]:
    """What differs, a line a case; and what was compared, in words."""
    import triton

    recorded = json.loads(RECORD.read_text())
    known = recorded.get(triton.__version__)
    if known is None:
        refused = [f"{case}: refused" for case, made in record(list(QUICK)).items() if made == "refused"]
        unknown = f"Triton {triton.__version__} is not among the recorded {', '.join(recorded)}"
        return refused, f"{unknown}: no digest was compared; {len(QUICK) - len(refused)} cases compile"
    asked = QUICK if quick else tuple(cases())
    wanted = {case: known[case] for case in asked if case in known}
    found = record(list(wanted))
    lines = [f"{case}: {was} was recorded, {found[case]} now" for case, was in wanted.items() if was != found[case]]
    lines += [f"{case}: not recorded" for case in QUICK if case not in known]
    return lines, f"Triton {triton.__version__}: digests of {len(wanted)} of {len(asked)} cases compared"


def in_a_process(*arguments: str) -> tuple[int, str]:
    """Run this file in a Python of its own, whose kernels are compiled and not interpreted. Its exit code and what it prints."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_DISABLE_LINE_INFO": "1", "OMP_NUM_THREADS": "1"}
    # Another Triton than the installed one comes from the caller's path.
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    with tempfile.TemporaryDirectory() as cache:
        environment["TRITON_CACHE_DIR"] = cache
        command = [sys.executable, __file__, "--here", *arguments]
        done = subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    return done.returncode, done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true")
    action.add_argument("--write", action="store_true")
    action.add_argument("--show", metavar="CASE")
    parser.add_argument("--quick", action="store_true", help="of --check: a part of the cases")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.here:
        code, printed = in_a_process(*sys.argv[1:])
        print(printed, end="")
        return code
    if arguments.show:
        print("\n\n".join(map(what_counts, compile_case(arguments.show) or ["refused"])))
        return 0
    if arguments.check:
        lines, compared = check(arguments.quick)
        print("\n".join([*lines, compared]))
        return bool(lines)
    import triton

    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    recorded[triton.__version__] = record(list(cases()))
    RECORD.write_text(json.dumps(recorded, indent=0, sort_keys=True) + "\n")
    print(f"Triton {triton.__version__}: {len(recorded[triton.__version__])} cases written")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
