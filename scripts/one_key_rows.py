"""How far is O from V in rows that look at one key, by the size of their logits and by attention?

    python scripts/one_key_rows.py                                             # what can run here
    python scripts/one_key_rows.py --attention sdpa_flash flash "flash exponent=subtracted" --json rows.json

Such a row's O is one V, exactly. Kernels that make the exponential by one fused multiply-add lose that from logits of 2^16 ln 2 on, where
P_bar is rounded to BF16 (docs/reproduction.md). For each attention and size: the root mean square error of delta relative to delta, and
the share of rows whose O is not V. Rows are made here (analysis/one_key_rows.py); their logits lie between half of the size named and
all of it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import files
from analysis import one_key_rows
from analysis.gradients import parse_attention
from analysis.one_key_rows import Found, make_rows, measure
from attention.plan import FLASH_BACKENDS, AttentionSpec
from errors import OneLineParser, UserError, check_place, exit_on_user_error, invalid
from scripts.autopsy import open_device
from training.record import environment

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
USUAL = (
    *("sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa_math", "standard", "flash", "flash_subtracted"),
    *("flash_fp32_pv", "flash_stable_safe"),
)
EXPONENTS = range(10, 22)


def attention_of(name: str) -> AttentionSpec:
    """A preset and single sites as ``analysis.gradients`` reads them, on ``hardware`` where no base is named. Raises ``UserError``."""
    named = parse_attention(name)
    if named is None:
        raise invalid("--attention", name, "a preset: there is no run here")
    return named.spec("hardware")


def study(
    names: Sequence[str], sizes: Sequence[float], dtype: torch.dtype, device: torch.device, backend: str, count: int
) -> tuple[dict[str, dict[float, Found]], dict[str, str]]:
    """What each attention makes of rows of each size; and why the others cannot run here."""
    specs = {name: attention_of(name) for name in names}
    found: dict[str, dict[float, Found]] = {}
    refused: dict[str, str] = {}
    rows = {size: make_rows(size, dtype=dtype, device=device, count=count) for size in sizes}
    for name, spec in specs.items():
        try:
            found[name] = {size: measure(made, spec, backend) for size, made in rows.items()}
        except UserError as error:
            refused[name] = str(error)
    return found, refused


def table(found: Mapping[str, Mapping[float, Found]]) -> list[str]:
    """A line a size, a column an attention."""
    lines = ["error of delta (share of rows whose O is not V)", ""]
    lines.append(f"{'logits up to':>12}  " + "  ".join(f"{name:>15}" for name in found))
    for size in next(iter(found.values()), {}):
        cells = [(f"{each[size].error:.1e} ({each[size].wrong:.2f})", name) for name, each in found.items()]
        lines.append(f"{size:>12,.0f}  " + "  ".join(f"{cell:>{max(15, len(name))}}" for cell, name in cells))
    return lines


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--attention",
        nargs="+",
        metavar="NAME",
        help=f"presets, with single sites if quoted together ({', '.join(USUAL)})",
    )
    parser.add_argument(
        "--sizes", type=float, nargs="+", default=[2.0**e for e in EXPONENTS], help="largest logits (2^10 to 2^21)"
    )
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16", help="of q, k, v (bfloat16)")
    parser.add_argument(
        "--backend", choices=FLASH_BACKENDS, default="flash", help="what computes the presets of flash (flash)"
    )
    parser.add_argument("--count", type=int, default=128, help="64 rows each (128)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(auto)")
    parser.add_argument("--json", type=Path, help="file to write")
    chosen = parser.parse_args(arguments)
    if chosen.count < 1:
        raise invalid("--count", chosen.count, "1 or more")
    if chosen.device == "cuda" and not torch.cuda.is_available():
        raise invalid("--device", "cuda", "cpu or auto: torch sees no CUDA device here")
    if chosen.json is not None:
        check_place(chosen.json, "--json")
    return chosen


@exit_on_user_error
def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    device = open_device(args.device)
    found, refused = study(args.attention or USUAL, args.sizes, DTYPES[args.dtype], device, args.backend, args.count)
    if args.attention and refused:
        raise UserError(next(iter(refused.values())))
    for name, reason in refused.items():
        print(f"left out: {name}: {reason}", file=sys.stderr)
    print(*table(found), sep="\n")
    if args.json is not None:
        write(args.json, args, device, found, refused)


def write(
    path: Path,
    args: argparse.Namespace,
    device: torch.device,
    found: Mapping[str, Mapping[float, Found]],
    refused: Mapping[str, str],
) -> None:
    """All numbers, and the machine that they are from."""
    content: dict[str, Any] = {
        **environment(device, 1),
        **{name: getattr(args, name) for name in ("dtype", "backend", "count")},
        "found": {
            name: {f"{size:.12g}": one_key_rows.as_dict(one) for size, one in each.items()}
            for name, each in found.items()
        },
        "left_out": dict(refused),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(path, content)


if __name__ == "__main__":
    main()
