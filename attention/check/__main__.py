"""``python -m low_precision_attention.check KERNEL``: is this attention kernel safe to train with?"""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields

from ..presets import PRESETS
from ..user_error import UserError
from . import judge
from .classes import CLASSES, Shape
from .kernels import KNOWN
from .report import DTYPES, Report, check_attention, reasons

EXIT_CODES = {judge.SAFE: 0, judge.AT_RISK: 1, judge.WRONG: 1, judge.UNVERIFIED: 3}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m low_precision_attention.check",
        description="Errors, row sums of dS, masks, determinism of an attention kernel, and a verdict for each class of inputs.",
        epilog=f"KERNEL: MODULE:FUNCTION, called as torch's scaled_dot_product_attention where it has is_causal, else as "
        f"(q, k, v, causal, scale), on [batch, heads, length, head dim]; or one of {', '.join(KNOWN)}; or a preset: {', '.join(PRESETS)}. "
        "Exit codes: 0 safe, 1 at risk or wrong, 2 usage, 3 unverified.",
    )
    parser.add_argument("kernel", metavar="KERNEL")
    parser.add_argument("--against", metavar="KERNEL", help="a second kernel, side by side")
    parser.add_argument("--device", help="cuda where there is one, else cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    for field in fields(Shape):
        parser.add_argument(f"--{field.name}", type=int, metavar="N", help=_SIZES[field.name])
    parser.add_argument(
        "--class", dest="classes", action="append", default=[], choices=reasons(), help="only this; may be repeated"
    )
    parser.add_argument(
        "--inputs",
        action="append",
        default=[],
        metavar="FILE.zip",
        help="only this file that capture() wrote, or captured: those of a failing run that are packaged; may be repeated",
    )
    parser.add_argument("--quick", action="store_true", help="the classes that tell most, at half the length")
    parser.add_argument("--json", metavar="FILE", help="write the report there, - for the standard output")
    parser.add_argument("--markdown", action="store_true", help="print a table for a page")
    parser.add_argument("--reasons", action="store_true", help="say why each class is there")
    options = parser.parse_args(arguments)
    if options.reasons:
        print("\n".join(f"{name}: {why}" for name, why in reasons().items()))
    reports = [_report(name, options) for name in (options.kernel, options.against) if name]
    if options.json:
        text = (
            "[" + ",\n".join(report.json() for report in reports) + "]\n"
            if options.against
            else reports[0].json() + "\n"
        )
        if options.json == "-":
            print(text, end="")
        else:
            try:
                with open(options.json, "w") as file:
                    file.write(text)
            except OSError as error:
                raise UserError(f"--json {options.json}: cannot be written ({error.strerror})") from None
    if options.json != "-":
        print("\n\n".join(report.markdown() if options.markdown else report.text() for report in reports))
    return EXIT_CODES[reports[0].verdict]


_SIZES = {"B": "batch", "H": "query heads", "G": "key heads", "T": "length", "D": "head dim"}
QUICK = (
    "gaussian",
    "common_part",
    "shared_direction",
    "peaked_1000",
    "one_hot",
    "mask_edges",
    "last_key",
    "repeatability",
)


def _report(name: str, options: argparse.Namespace) -> Report:
    sizes = {
        field.name: getattr(options, field.name) for field in fields(Shape) if getattr(options, field.name) is not None
    }
    import torch

    cuda = options.device == "cuda" or (options.device is None and torch.cuda.is_available())
    usual = (1024 if cuda else 256) // (2 if options.quick else 1)
    shape = Shape(**({"T": usual} | sizes | ({} if "G" in sizes else {"G": sizes.get("H", Shape.G)})))
    if shape.B < 1 or shape.G < 2 or shape.H % shape.G or shape.D < 8 or shape.T < 32:
        raise UserError(f"{shape}: expected B at least 1, G at least 2, H a multiple of G, D at least 8, T at least 32")
    packaged = [name for name, c in CLASSES.items() if c.file]
    inputs = [name for given in options.inputs for name in (packaged if given == "captured" else [given])]
    if wrong := [name for name in inputs if name not in packaged and not name.endswith(".zip")]:
        raise UserError(f"--inputs {wrong[0]}: expected captured, or a file that ends in .zip")
    classes = [*options.classes, *inputs] or (QUICK if options.quick else ())
    shown = sys.stderr.isatty()
    return check_attention(
        name,
        device=options.device,
        dtype=options.dtype,
        shape=shape,
        classes=classes,
        progress=lambda case: print(f"{name}: {case}", file=sys.stderr) if shown else None,
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
