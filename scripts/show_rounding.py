"""Show a floating-point operation bit by bit: align, add, carry, guard, round and sticky bit, rounding, error.

    python scripts/show_rounding.py 1.0078125 1.015625                         # A + B in BF16
    python scripts/show_rounding.py 0b1.0000001 0b1.000001 0.0001 --accumulate fp32   # A + B + C, added up in FP32
    python scripts/show_rounding.py 0.1 0.2 --format fp16                      # what does not fit is rounded first
    python scripts/show_rounding.py 1e-8 --format fp16                         # one number: a conversion
    python scripts/show_rounding.py 3.5 5 0.01 --op fma --format fp8_e4m3      # also: mul

Numbers are decimal, fractions (1/3), binary (0b1.0000001p-3) or hexadecimal (0x1.8p1). All arithmetic is exact, in fractions;
nothing of the machine's own floating point enters. docs/numerics.md is the text to it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from decimal import Decimal, localcontext
from fractions import Fraction

import _root  # noqa: F401

from errors import OneLineParser, exit_on_user_error, invalid
from probes import bits
from probes.bits import FORMATS, Addition, Cut, Format, Number

DIGITS, PLACES = 20, 44
LABEL = 12


def decimal(value: Fraction, *, signed: bool = False) -> str:
    """Exact, where 20 digits suffice, else the nearest of 17 digits behind a ~."""
    with localcontext() as context:
        context.prec, context.Emin, context.Emax = 1100, -20000, 20000
        exact = Decimal(value.numerator) / Decimal(value.denominator)
        context.prec = 17
        is_short = Fraction(exact) == value and len(exact.normalize().as_tuple().digits) <= DIGITS
        context.prec = DIGITS if is_short else 17
        shown = (+exact).normalize()
    exponent = shown.adjusted() if shown else 0
    text = f"{shown:f}" if -7 <= exponent < 16 else f"{shown:e}"
    return ("" if is_short else "~") + ("+" if signed and value > 0 else "") + text


def binary(magnitude: Fraction, exponent: int, width: int, *, places: int = 0) -> str:
    """``magnitude`` / 2^exponent in binary, the integer part ``width`` wide, at least ``places`` behind the point."""
    scaled = magnitude / bits.power_of_two(exponent)
    whole, rest = divmod(scaled, 1)
    digits = ""
    while (rest or len(digits) < places) and len(digits) < PLACES:
        digit, rest = divmod(2 * rest, 1)
        digits += str(digit)
    return f"{int(whole):b}".rjust(width) + f".{digits}" + ("..." if rest else "")


def stored(value: Number, fmt: Format) -> str:
    """The three fields as the format stores them."""
    return " ".join(bits.fields(value, fmt))


def describe(fmt: Format) -> str:
    """The format in one line."""
    return (
        f"{fmt.name}: 1 sign, {fmt.exponent_bits} exponent, {fmt.mantissa_bits} mantissa bits; "
        f"unit roundoff 2^{-fmt.mantissa_bits - 1}; largest {decimal(fmt.largest)}"
    )


def operands(names: Sequence[str], values: Sequence[Number], fmt: Format) -> tuple[list[Number], list[str]]:
    """The operands in ``fmt`` and a line about each: its fields, its value, and what was typed where that does not fit.

    Raises ``UserError`` for one beyond the largest finite number.
    """
    rounded, lines = [], []
    for name, value in zip(names, values, strict=True):
        fitted = bits.cut(value, fmt).rounded()
        if fitted is None:
            raise invalid(name, decimal(value.value), f"a number of {fmt.name}, at most {decimal(fmt.largest)}")
        origin = "" if fitted == value else f"   (typed {decimal(value.value)}, rounded to {fmt.name})"
        rounded.append(fitted)
        lines.append(f"{name:<{LABEL}}{stored(fitted, fmt)}   {decimal(fitted.value)}{origin}")
    return rounded, lines


def addition(names: tuple[str, str], step: Addition) -> Iterator[str]:
    """Alignment, sum and carry."""
    fmt = step.result.fmt
    top = max(step.exponents)
    small = names[0] if step.exponents[0] < step.exponents[1] else names[1]
    width = max(len("exact sum"), *map(len, names))
    if step.shift:
        yield f"align       {small} has the smaller exponent: its significand moves {_places(step.shift)} to the right"
    else:
        yield "align       equal exponents: nothing moves"
    for name, operand in zip(names, (step.a, step.b), strict=True):
        text = binary(operand.magnitude, top, 2, places=fmt.mantissa_bits)
        yield f"  {name:<{width}} {'-' if operand.negative else '+'}{text} x 2^{top}"
    text = binary(step.total.magnitude, top, 2, places=fmt.mantissa_bits)
    yield f"  {'exact sum':<{width}} {'-' if step.total.negative else '+'}{text} x 2^{top}"
    if step.carry is None:
        yield "carry       the sum is zero"
    elif step.carry > 0:
        yield f"carry       one place: exponent {top} becomes {top + 1}, one bit more must go"
    elif step.carry < 0:
        yield f"carry       none; cancellation takes {_places(-step.carry)} in front"
    else:
        yield "carry       none"


def _places(count: int) -> str:
    return "1 place" if count == 1 else f"{count} places"


def rounding(grid: Cut) -> Iterator[str]:
    """The bits that stay, guard, round and sticky, and what each rounding makes of them."""
    nearest = grid.rounded("nearest")
    if not grid.rest and nearest is not None:
        yield f"round       it fits: {stored(nearest, grid.fmt)}   {decimal(nearest.value)}, exactly"
        return
    unit = bits.exponent_of(grid.unit)
    kept = binary(grid.kept * grid.unit, unit + grid.fmt.mantissa_bits, 1, places=grid.fmt.mantissa_bits)
    yield (
        f"keep        {kept} x 2^{unit + grid.fmt.mantissa_bits} | guard {grid.guard} round {grid.round} "
        f"sticky {grid.sticky}    unit in the last place: 2^{unit}"
    )
    way = "up, away from zero" if grid.goes_up("nearest") else "down, towards zero"
    if nearest is None:
        why = f"beyond {decimal(grid.fmt.largest)}, the largest number"
    elif grid.is_tie:
        why = f"exactly half a unit: to even, {way}"
    else:
        why = f"{'more' if grid.guard else 'less'} than half a unit: {way}"
    yield f"nearest     {why}"
    yield f"            {outcome(grid, nearest)}"
    yield f"toward zero {outcome(grid, grid.rounded('toward_zero'))}"
    if nearest is not None:
        share = _probability(grid.probability_up)
        yield f"stochastic  up with probability {share}, else down: no error on average"


def _probability(share: Fraction) -> str:
    return str(share) if share.denominator <= 2**10 else _share(share)


def _share(share: Fraction, sign: str = "-") -> str:
    """Six digits, or as many as it takes not to print one half for what is only nearly one half."""
    texts = (f"{float(share):{sign}.{digits}g}" for digits in range(6, 17))
    return next(
        (text for text in texts if abs(Fraction(text)) != Fraction(1, 2) or abs(share) == Fraction(1, 2)), "+-1/2"
    )


def outcome(grid: Cut, result: Number | None) -> str:
    """A result with its error, or that it overflows."""
    if result is None and not grid.fmt.has_infinity:
        return f"overflow: NaN, as there is no infinity; a conversion that saturates gives {decimal(grid.fmt.largest)}"
    if result is None:
        return f"overflow: {'-' if grid.exact.negative else '+'}infinity"
    shown = f"{stored(result, grid.fmt)}   {decimal(result.value)}"
    if result == grid.exact:
        return f"{shown}   exact"
    error = result.value - grid.exact.value
    return f"{shown}   error {decimal(error, signed=True)} = {_share(grid.error_in_units(result), '+')} units"


def two(a: Number, b: Number, fmt: Format, operation: str, *, brief: bool) -> Iterator[str]:
    """A + B or A * B."""
    step = bits.add(a, b, fmt)
    grid = step.result if operation == "add" else bits.multiply(a, b, fmt)
    if operation == "mul":
        yield f"product     exact: {decimal(grid.exact.value)} = {_scientific(grid.exact)}"
    elif not brief:
        yield from addition(("A", "B"), step)
    yield from rounding(grid)


def _scientific(exact: Number) -> str:
    if exact.exponent is None:
        return "0"
    return f"{'-' if exact.negative else ''}{binary(exact.magnitude, exact.exponent, 1, places=1)} x 2^{exact.exponent}"


def fused(a: Number, b: Number, c: Number, fmt: Format) -> Iterator[str]:
    """A * B + C with one rounding, and with two."""
    exact = bits.product(a, b)
    grid = bits.fused_multiply_add(a, b, c, fmt)
    yield f"product     exact: {decimal(exact.value)} = {_scientific(exact)}"
    yield f"A * B + C   exact: {decimal(grid.exact.value)} = {_scientific(grid.exact)}"
    yield from rounding(grid)
    between = bits.multiply(a, b, fmt).rounded()
    twice = None if between is None else bits.add(between, c, fmt).result.rounded()
    yield f"rounding A * B first as well: {outcome(grid, twice)}"


def steps(terms: Sequence[Number], accumulator: Format, fmt: Format) -> Iterator[str]:
    """(A + B) + C in full."""
    first = bits.add(terms[0], terms[1], accumulator)
    yield f"-- A + B, in {accumulator.name}"
    yield from addition(("A", "B"), first)
    yield from rounding(first.result)
    between = first.result.rounded()
    if between is None:
        return
    second = bits.add(between, terms[2], accumulator)
    yield f"-- (A + B) + C, in {accumulator.name}"
    yield from addition(("A + B", "C"), second)
    yield from rounding(second.result)
    last = second.result.rounded()
    if last is not None and accumulator != fmt:
        yield f"-- the sum, from {accumulator.name} to {fmt.name}"
        yield from rounding(bits.cut(last, fmt))


def orders(terms: Sequence[Number], fmt: Format) -> Iterator[str]:
    """A + B + C in every order: rounded after each addition, and accumulated in FP32. Errors are against the exact sum."""
    grid = bits.cut(bits.number(sum(term.value for term in terms)), fmt)
    yield f"-- every order; exact: {decimal(grid.exact.value)}"
    for kind, accumulator in ((f"{fmt.name} each time", fmt), ("in fp32, rounded once", FORMATS["fp32"])):
        for i, j, k in ((0, 1, 2), (0, 2, 1), (1, 2, 0)):
            result = bits.running_sum([terms[i], terms[j], terms[k]], accumulator, fmt)
            yield f"({'ABC'[i]} + {'ABC'[j]}) + {'ABC'[k]}, {kind:<22}{outcome(grid, result)}"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line, checked."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a", metavar="A")
    parser.add_argument("b", metavar="B", nargs="?", help="without it A is converted to the format")
    parser.add_argument("c", metavar="C", nargs="?")
    parser.add_argument("--format", default="bf16", help=f"of the result: {', '.join(FORMATS)} (bf16)")
    parser.add_argument("--inputs", default="", help="format of A, B and C (that of the running sum)")
    parser.add_argument("--accumulate", default="", help="format of the running sum A + B + C (that of the result)")
    parser.add_argument(
        "--brief", action="store_true", help="leave out alignment, sum and carry, and the steps of A + B + C"
    )
    parser.add_argument("--op", default="add", help="add, mul, or fma: A * B + C with one rounding (add)")
    # A space in front keeps argparse from reading -0b1 or -1e-3 as an option; parsing the number drops it.
    spaced = [f" {word}" if word[:1] == "-" and word[1:2] in "0123456789." and word[1:] else word for word in argv]
    args = parser.parse_args(spaced)
    for option in ("format", "inputs", "accumulate"):
        name = getattr(args, option)
        if name not in FORMATS and (name or option == "format"):
            raise invalid(f"--{option}", name, FORMATS)
    if args.op not in ("add", "mul", "fma"):
        raise invalid("--op", args.op, ("add", "mul", "fma"))
    count = 1 + (args.b is not None) + (args.c is not None)
    if args.op != "add" and count != {"mul": 2, "fma": 3}[args.op]:
        raise invalid("--op", args.op, "two numbers for mul, three for fma")
    if args.accumulate and (args.op != "add" or args.c is None):
        raise invalid("--accumulate", args.accumulate, "an addition of three numbers")
    return args


def report(args: argparse.Namespace) -> Iterator[str]:
    """The lines to print."""
    fmt = FORMATS[args.format]
    accumulator = FORMATS[args.accumulate] if args.accumulate else fmt
    inputs = FORMATS[args.inputs] if args.inputs else accumulator
    values = [bits.parse(text) for text in (args.a, args.b, args.c) if text is not None]
    for shown in dict.fromkeys((inputs, accumulator, fmt)):
        yield describe(shown)
    if len(values) == 1 and not args.inputs:
        yield f"A           exact: {decimal(values[0].value)} = {_scientific(values[0])}"
        yield from rounding(bits.cut(values[0], fmt))
        return
    terms, lines = operands("ABC"[: len(values)], values, inputs)
    yield from lines
    if len(terms) == 1:
        yield from rounding(bits.cut(terms[0], fmt))
    elif args.op == "fma":
        yield from fused(terms[0], terms[1], terms[2], fmt)
    elif len(terms) == 2:
        yield from two(terms[0], terms[1], fmt, args.op, brief=args.brief)
    else:
        yield from () if args.brief else steps(terms, accumulator, fmt)
        yield from orders(terms, fmt)


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    """Print the report."""
    print(*list(report(parse(sys.argv[1:] if argv is None else argv))), sep="\n")


if __name__ == "__main__":
    main()
