"""``python -m low_precision_attention.check KERNEL``: is this attention kernel safe to train with?"""

import argparse
import contextlib
import itertools
import os
import sys
from pathlib import Path
from typing import Any

from ..user_error import OneLineParser, UserError, command_line
from . import judge
from .classes import Shape, require_shape
from .kernels import KNOWN, TRIED, find
from .report import DTYPES, LENGTHS, Report, check_attention, csv_of, device_of, reasons, table

EXIT_CODES = {judge.SAFE: 0, judge.AT_RISK: 1, judge.WRONG: 1, judge.UNVERIFIED: 3}


def main(arguments: list[str] | None = None) -> int:
    parser = OneLineParser(
        prog="python -m low_precision_attention.check",
        formatter_class=argparse.HelpFormatter,
        description="Errors, row sums of dS, masks, determinism of an attention kernel, and a verdict for each class of inputs.",
        epilog=f"KERNEL: MODULE:FUNCTION, called as torch's scaled_dot_product_attention where it has is_causal, else as "
        f"(q, k, v, causal, scale), on [batch, heads, length, head dim]; or one of {', '.join(KNOWN)}; or a preset: {', '.join(TRIED)}. "
        "Exit codes: 0 safe, 1 at risk or wrong, 2 usage, 3 unverified. A verdict is on roundings and no proof: at risk is the pattern of "
        "kernels whose runs explode, in BF16 at GPT-2's size; safe is no pattern that we know. Not tested: dropout, soft-caps, sinks, the "
        "gradient of the log-sum-exp, packed sequences of unequal lengths.",
    )
    parser.add_argument("kernels", metavar="KERNEL", nargs="*", help="of several, the exit code is that of the worst")
    parser.add_argument("--against", metavar="KERNEL", help="one more, which has no say in the exit code")
    parser.add_argument("--device", help="cuda where there is one, else cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    for name, what in _SIZES.items():
        parser.add_argument(f"--{name}", type=int, metavar="N", action="append", help=f"{what}; may be repeated")
    more: dict[str, Any] = {"action": "append", "default": []}
    only = "only this, of those that --reasons lists; may be repeated"
    parser.add_argument("--class", dest="classes", metavar="CLASS", help=only, **more)
    parser.add_argument("--inputs", metavar="FILE.zip", help="only this, of capture(); may be repeated", **more)
    not_for = "leave this out, as the kernel is not for it (such as grouped); may be repeated"
    parser.add_argument("--without", metavar="CLASS", help=not_for, **more)
    masks = parser.add_mutually_exclusive_group()
    alone = "for a kernel of causal attention alone: all classes but full are causal"
    masks.add_argument("--causal", action="store_true", default=None, help=alone)
    not_causal = "for a kernel without a causal mask: classes have none"
    masks.add_argument("--no-causal", dest="causal", action="store_false", default=None, help=not_causal)
    parser.add_argument("--quick", action="store_true", help="the classes that tell most, at half the length")
    parser.add_argument("--json", metavar="FILE", help="write the report there, of several a list; -: only print this")
    parser.add_argument("--csv", metavar="FILE", help="write a row a kernel, shape and class there")
    parser.add_argument("--markdown", action="store_true", help="print only a table, a row a kernel")
    parser.add_argument("--reasons", action="store_true", help="only say why each class is there")
    options = parser.parse_args(arguments)
    if options.reasons:
        print("\n".join(f"{name}: {why}" for name, why in reasons().items()))
        return 0
    if not options.kernels:
        raise UserError("KERNEL: expected one or more; --help says which")
    device_of(options.device)
    # A wrong name or file shows before the first kernel has run.
    for option, file in (("--json", options.json), ("--csv", options.csv)):
        if file and (option, file) != ("--json", "-"):
            path = Path(file)
            there = path if path.exists() and not path.is_file() else path.parent
            if file == "-" or path.is_dir() or not os.access(there, os.W_OK):
                raise UserError(f"{option} {file}: expected a file in a folder that is there and can be written to")
    if options.json and options.csv and Path(options.json).resolve() == Path(options.csv).resolve():
        raise UserError(f"--csv {options.csv}: expected another file than --json has")
    names = [*options.kernels, *filter(None, [options.against])]
    reports: list[Report] = []
    # A kernel that prints would spoil the JSON.
    with contextlib.redirect_stdout(sys.stderr if options.json == "-" else sys.stdout):
        for name in names:
            find(name)
        for shape, name in itertools.product(_shapes(options), names):
            reports.append(_report(name, shape, options))
            # After each: what is done stays when a long command is cut off.
            documents = _written(reports, options)
    tested = [report for i, report in enumerate(reports) if i % len(names) < len(options.kernels)]
    if options.json == "-":
        print(documents, end="")
    else:
        texts = [] if options.markdown else [report.text() for report in tested]
        if options.markdown or len(reports) > 1:
            texts.append(table(reports))
        print("\n\n".join(texts))
    return EXIT_CODES[judge.worst(report.verdict for report in tested)]


def _written(reports: list[Report], options: argparse.Namespace) -> str:
    """Write the files that were asked for, aside and renamed; return the JSON."""
    documents = ",\n".join(report.json() for report in reports)
    documents = f"{documents}\n" if len(reports) == 1 else f"[{documents}]\n"
    for option, name, content in (("--json", options.json, documents), ("--csv", options.csv, csv_of(reports))):
        if name and (option, name) != ("--json", "-"):
            try:
                if Path(name).exists() and not Path(name).is_file():  # /dev/stdout, a pipe
                    Path(name).write_text(content)
                else:
                    aside = Path(f"{name}.{os.getpid()}.part")  # another command may write this file
                    aside.write_text(content)
                    aside.replace(name)
            except OSError as error:
                raise UserError(f"{option} {name}: cannot be written ({error.strerror})") from None
    return documents


_SIZES = {"B": "batch", "H": "query heads", "G": "key heads", "T": "length", "D": "head dim"}
_SIZES["DV"] = "head dim of v, o and dO, D unless given"


def _shapes(options: argparse.Namespace) -> list[Shape]:
    usual = LENGTHS[device_of(options.device).type] // (2 if options.quick else 1)
    if (
        options.inputs
        and not options.classes
        and (beside := [f"--{name}" for name in _SIZES if getattr(options, name)])
    ):
        raise UserError(f"{beside[0]} beside --inputs alone: expected no sizes, as a file has its own")
    given = {name: getattr(options, name) or [None] for name in _SIZES}
    shapes = []
    for sizes in itertools.product(*given.values()):
        chosen = {name: size for name, size in zip(given, sizes, strict=True) if size is not None}
        shape = Shape(**({"T": usual, "G": chosen.get("H", Shape.G)} | chosen))
        require_shape(shape)
        shapes.append(shape)
    return shapes


def _report(name: str, shape: Shape, options: argparse.Namespace) -> Report:
    if wrong := [name for name in options.inputs if not name.endswith(".zip")]:
        raise UserError(f"--inputs {wrong[0]}: expected a file that ends in .zip")
    asked = [*options.classes, *options.inputs]
    classes = asked or ("quick" if options.quick else ())
    chosen: dict[str, Any] = {"device": options.device, "dtype": options.dtype, "shape": shape, "classes": classes}
    chosen["causal"] = options.causal
    chosen["without"] = options.without
    if sys.stderr.isatty():
        chosen["progress"] = lambda case: print(f"{name}, {shape}: {case}", file=sys.stderr)
    return check_attention(name, **chosen)


if __name__ == "__main__":
    with command_line():
        sys.exit(main())
