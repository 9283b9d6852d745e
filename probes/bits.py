"""Floating-point numbers bit by bit: formats, exact sums and products, alignment, carry, and the bits that decide a rounding.

Everything is a fraction or an integer, so that no rounding of the machine can enter: a step printed here is what IEEE 754
arithmetic does by definition. Every result of a finite number is exact until ``cut`` says which bits a format keeps.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from errors import UserError

Mode = Literal["nearest", "toward_zero"]


@dataclass(frozen=True)
class Format:
    """A binary format: 1 sign bit, then the exponent, then the explicit mantissa bits (the leading 1 is not stored)."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    has_infinity: bool = True
    """False for FP8 E4M3 (OCP): its top exponent is an ordinary one, whose last pattern is NaN."""

    @property
    def bias(self) -> int:
        """What is added to the exponent to store it."""
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def least_exponent(self) -> int:
        """Exponent of the smallest normal number, and of all subnormal ones."""
        return 1 - self.bias

    @property
    def largest(self) -> Fraction:
        """Largest finite number."""
        top = 2**self.exponent_bits - (2 if self.has_infinity else 1) - self.bias
        units = 2 ** (self.mantissa_bits + 1) - (1 if self.has_infinity else 2)
        return units * power_of_two(top - self.mantissa_bits)


FORMATS: dict[str, Format] = {
    fmt.name: fmt
    for fmt in (
        Format("fp32", 8, 23),
        Format("tf32", 8, 10),
        Format("bf16", 8, 7),
        Format("fp16", 5, 10),
        Format("fp8_e4m3", 4, 3, has_infinity=False),
        Format("fp8_e5m2", 5, 2),
    )
}
"""TF32 is what tensor cores keep of FP32 operands; in memory it takes 32 bits. FP8 as in the OCP specification (arXiv 2209.05433)."""


@dataclass(frozen=True)
class Number:
    """A finite number, exactly; zero has a sign, too."""

    negative: bool
    magnitude: Fraction

    @property
    def value(self) -> Fraction:
        return -self.magnitude if self.negative else self.magnitude

    @property
    def exponent(self) -> int | None:
        """e of 2^e <= |x| < 2^(e + 1); None for zero."""
        return exponent_of(self.magnitude) if self.magnitude else None


def number(value: Fraction | int, *, negative_zero: bool = False) -> Number:
    """The ``Number`` of a fraction; ``negative_zero`` is the sign if it is zero."""
    exact = Fraction(value)
    return Number(exact < 0 or (exact == 0 and negative_zero), abs(exact))


def power_of_two(exponent: int) -> Fraction:
    """2^exponent, exactly."""
    return Fraction(2**exponent) if exponent >= 0 else Fraction(1, 2**-exponent)


def exponent_of(magnitude: Fraction) -> int:
    """e of 2^e <= magnitude < 2^(e + 1), for a positive magnitude."""
    guess = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    return guess if power_of_two(guess) <= magnitude else guess - 1


# Longer ones, and exponents of five digits, are typing mistakes that would take the machine's memory to be exact about.
LONGEST = 200
_BINARY = re.compile(r"([-+]?)0b([01]*)\.?([01]*)(?:p([-+]?\d+))?", re.IGNORECASE)


def parse(text: str) -> Number:
    """A number as typed: decimal (-2.5, 1e-3), fraction (1/3), binary (0b1.0000001p-3) or hexadecimal (0x1.8p1).

    Raises ``UserError`` for anything else, infinities and NaN included.
    """
    text = text.strip()
    minus = text.startswith("-")
    binary = _BINARY.fullmatch(text)
    try:
        if len(text) > LONGEST or re.search(r"[ep][-+]?\d{5}", text.lower()):
            raise ValueError
        if binary and binary[2] + binary[3]:
            units = int(binary[2] + binary[3], 2)
            value = units * power_of_two(int(binary[4] or 0) - len(binary[3]))
            return Number(minus, value)
        if "0x" in text.lower():
            return Number(minus, abs(Fraction(float.fromhex(text))))
        return Number(minus, abs(Fraction(text)))
    except (ValueError, ZeroDivisionError, OverflowError):
        raise UserError(
            f"{text!r} is not a finite number: expected a decimal (-2.5, 1e-3), a fraction (1/3), "
            "binary (0b1.0000001p-3) or hexadecimal (0x1.8p1)"
        ) from None


@dataclass(frozen=True)
class Cut:
    """An exact number laid over the grid of a format: the bits that stay, and the first ones that do not.

    |x| = (kept + rest) * unit with 0 <= rest < 1. The guard bit is the first bit of ``rest``, the round bit the second,
    the sticky bit says whether any bit behind them is set.
    """

    exact: Number
    fmt: Format
    unit: Fraction
    kept: int
    rest: Fraction

    @property
    def guard(self) -> int:
        return int(self.rest >= Fraction(1, 2))

    @property
    def round(self) -> int:
        return int(self.rest % Fraction(1, 2) >= Fraction(1, 4))

    @property
    def sticky(self) -> int:
        return int(self.rest % Fraction(1, 4) > 0)

    @property
    def is_tie(self) -> bool:
        return self.rest == Fraction(1, 2)

    @property
    def probability_up(self) -> Fraction:
        """With which stochastic rounding goes away from zero, so that its expectation is the exact number."""
        return self.rest

    def goes_up(self, mode: Mode) -> bool:
        """Whether rounding goes away from zero. ``nearest``: ties to even."""
        return mode == "nearest" and (self.rest > Fraction(1, 2) or (self.is_tie and self.kept % 2 == 1))

    def neighbor(self, up: bool) -> Number | None:
        """The number next to x towards zero, or away from it; None beyond the largest finite one."""
        magnitude = (self.kept + up) * self.unit
        return None if magnitude > self.fmt.largest else Number(self.exact.negative, magnitude)

    def rounded(self, mode: Mode = "nearest") -> Number | None:
        """x in the format; None where nearest rounding overflows. Toward zero ends at the largest finite number."""
        result = self.neighbor(self.goes_up(mode))
        if result is None and mode == "toward_zero":
            return Number(self.exact.negative, self.fmt.largest)
        return result

    def error_in_units(self, result: Number) -> Fraction:
        """(result - x) / unit: the error in units in the last place, signed as the numbers are."""
        return (result.value - self.exact.value) / self.unit


def cut(exact: Number, fmt: Format) -> Cut:
    """Lay ``exact`` over the grid of ``fmt``. Below the smallest normal number the grid is that of the subnormal ones."""
    exponent = fmt.least_exponent if exact.exponent is None else max(exact.exponent, fmt.least_exponent)
    unit = power_of_two(exponent - fmt.mantissa_bits)
    kept, rest = divmod(exact.magnitude / unit, 1)
    return Cut(exact, fmt, unit, int(kept), rest)


def fields(value: Number, fmt: Format) -> tuple[str, str, str]:
    """Sign, exponent and mantissa of a number of ``fmt`` as strings of 0 and 1.

    Raises ``ValueError`` for a number that the format does not hold.
    """
    grid = cut(value, fmt)
    if grid.rest or value.magnitude > fmt.largest:
        raise ValueError(f"{value.value} is no number of {fmt.name}")
    hidden = 2**fmt.mantissa_bits
    is_normal = grid.kept >= hidden
    stored = (exponent_of(value.magnitude) + fmt.bias) if is_normal else 0
    mantissa = grid.kept - hidden if is_normal else grid.kept
    return str(int(value.negative)), f"{stored:0{fmt.exponent_bits}b}", f"{mantissa:0{fmt.mantissa_bits}b}"


@dataclass(frozen=True)
class Addition:
    """A + B step by step. Exponents are those the significands are added under (subnormals: the least one).

    ``shift`` is by how many places the significand of the smaller exponent moves to the right; ``carry`` is how far
    the leading bit of the sum stands to the left of the larger operand's leading place: 1 after a carry, negative after
    cancellation (down to the place of the subnormal numbers), None for a sum of zero.
    """

    a: Number
    b: Number
    exponents: tuple[int, int]
    total: Number
    result: Cut

    @property
    def shift(self) -> int:
        return abs(self.exponents[0] - self.exponents[1])

    @property
    def carry(self) -> int | None:
        if self.total.exponent is None:
            return None
        return max(self.total.exponent, self.result.fmt.least_exponent) - max(self.exponents)


def add(a: Number, b: Number, fmt: Format) -> Addition:
    """The exact sum laid over ``fmt``. The sum of opposite numbers is +0, of two -0 it is -0 (IEEE 754, nearest)."""
    # A zero has no exponent of its own; it is added under the other's.
    present = [x.exponent for x in (a, b) if x.exponent is not None]
    top = max([fmt.least_exponent, *present])
    first, second = (top if x.exponent is None else max(x.exponent, fmt.least_exponent) for x in (a, b))
    total = number(a.value + b.value, negative_zero=a.negative and b.negative)
    return Addition(a, b, (first, second), total, cut(total, fmt))


def multiply(a: Number, b: Number, fmt: Format) -> Cut:
    """The exact product laid over ``fmt``."""
    return cut(product(a, b), fmt)


def product(a: Number, b: Number) -> Number:
    """a times b, exactly."""
    return Number(a.negative != b.negative, a.magnitude * b.magnitude)


def fused_multiply_add(a: Number, b: Number, c: Number, fmt: Format) -> Cut:
    """a * b + c, exactly, laid over ``fmt``: one rounding where a product and a sum would have two."""
    exact = product(a, b)
    return cut(number(exact.value + c.value, negative_zero=exact.negative and c.negative), fmt)


def running_sum(terms: list[Number], accumulator: Format, fmt: Format) -> Number | None:
    """Terms added one by one, rounded to ``accumulator`` after each addition and to ``fmt`` at the end, to nearest.

    None where it overflows on the way.
    """
    total: Number | None = cut(terms[0], accumulator).rounded()
    for term in terms[1:]:
        total = None if total is None else add(total, term, accumulator).result.rounded()
    return None if total is None else cut(total, fmt).rounded()
