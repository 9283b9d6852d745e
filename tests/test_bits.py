"""probes/bits.py against torch's and NumPy's own arithmetic, and against the definitions."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from errors import UserError
from probes import bits
from probes.bits import FORMATS, Number

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
NEAR_ONE = st.builds(lambda m, e: math.ldexp(m, e), st.integers(-(2**24) + 1, 2**24 - 1), st.integers(-40, -16))


def exact(x: float) -> Number:
    return Number(math.copysign(1.0, x) < 0, Fraction(abs(x)))


def as_float(value: Number | None, like: float) -> float:
    """The float of a result; an overflow becomes an infinity of the sign of ``like``."""
    return math.copysign(math.inf if value is None else float(value.magnitude), like)


def same(ours: float, theirs: float) -> bool:
    """Equal, signs of zeros included. An overflow of FP8 E4M3, which has no infinity: 448 in some versions of torch, NaN in others."""
    if math.isinf(ours) and (math.isnan(theirs) or abs(theirs) == 448):
        return True
    return ours == theirs and math.copysign(1.0, ours) == math.copysign(1.0, theirs)


@pytest.mark.parametrize("name", DTYPES)
@given(x=st.one_of(FLOATS, NEAR_ONE))
def test_rounding_to_nearest_is_torchs_cast(name: str, x: float) -> None:
    theirs = torch.tensor(x, dtype=torch.float32).to(DTYPES[name]).float().item()
    assert same(as_float(bits.cut(exact(x), FORMATS[name]).rounded(), x), theirs)


@pytest.mark.parametrize("name", [name for name in DTYPES if name != "fp32"])
def test_rounding_every_tie_of_one_binade_is_torchs_cast(name: str) -> None:
    """Halfway between neighbors, where the last kept bit decides. (FP32's ties are in no narrower format.)"""
    fmt = FORMATS[name]
    unit = 2.0**-fmt.mantissa_bits
    for kept in range(2**fmt.mantissa_bits):
        x = 1 + (kept + 0.5) * unit
        theirs = torch.tensor(x, dtype=torch.float32).to(DTYPES[name]).float().item()
        assert as_float(bits.cut(exact(x), fmt).rounded(), x) == theirs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@given(a=FLOATS, b=FLOATS)
def test_a_sum_is_torchs_sum(dtype: torch.dtype, a: float, b: float) -> None:
    """torch adds 16-bit numbers in FP32 and rounds: with 24 bits against at most 11 the two roundings are one."""
    fmt = FORMATS["bf16" if dtype == torch.bfloat16 else "fp16"]
    x, y = (torch.tensor(v, dtype=torch.float32).to(dtype) for v in (a, b))
    if not (x.isfinite() and y.isfinite()):
        return
    step = bits.add(exact(x.item()), exact(y.item()), fmt)
    theirs = (x + y).item()
    assert same(as_float(step.result.rounded(), -1.0 if step.total.negative else 1.0), theirs)


@given(a=FLOATS, b=FLOATS)
def test_an_fp32_sum_is_numpys(a: float, b: float) -> None:
    with np.errstate(over="ignore"):
        theirs = float(np.float32(a) + np.float32(b))
    step = bits.add(exact(a), exact(b), FORMATS["fp32"])
    assert same(as_float(step.result.rounded(), -1.0 if step.total.negative else 1.0), theirs)


@given(a=NEAR_ONE, b=NEAR_ONE, c=NEAR_ONE)
def test_a_fused_multiply_add_rounds_once(a: float, b: float, c: float) -> None:
    grid = bits.fused_multiply_add(exact(a), exact(b), exact(c), FORMATS["bf16"])
    result = grid.rounded()
    assert result is not None
    assert abs(result.value - (Fraction(a) * Fraction(b) + Fraction(c))) <= grid.unit / 2


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32"])
@given(x=FLOATS)
def test_fields_are_the_bits_in_memory(name: str, x: float) -> None:
    stored = torch.tensor(x, dtype=torch.float32).to(DTYPES[name])
    if not stored.isfinite():
        return
    width = stored.element_size() * 8
    kind = {16: torch.int16, 32: torch.int32}[width]
    pattern = f"{stored.view(kind).item() & (2**width - 1):0{width}b}"
    assert "".join(bits.fields(exact(stored.item()), FORMATS[name])) == pattern


def test_a_running_sum_rounds_after_each_addition() -> None:
    tiny, fmt = exact(2.0**-8), FORMATS["bf16"]
    assert bits.running_sum([exact(1.0), tiny, tiny], fmt, fmt) == exact(1.0)
    assert bits.running_sum([tiny, tiny, exact(1.0)], fmt, fmt) == exact(1 + 2.0**-7)
    assert bits.running_sum([exact(1.0), tiny, tiny], FORMATS["fp32"], fmt) == exact(1 + 2.0**-7)
    assert bits.running_sum([exact(3e38), exact(3e38), exact(-3e38)], fmt, fmt) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-2.5", Fraction(-5, 2)),
        ("1e-3", Fraction(1, 1000)),
        ("1/3", Fraction(1, 3)),
        ("0b1.0000001p-3", Fraction(129, 1024)),
        ("-0b.1", Fraction(-1, 2)),
        ("0x1.8p1", Fraction(3)),
        (" -0x1p-2 ", Fraction(-1, 4)),
    ],
)
def test_numbers_are_read_exactly(text: str, value: Fraction) -> None:
    assert bits.parse(text).value == value


@pytest.mark.parametrize(
    "text", ["", "two", "nan", "inf", "-inf", "1/0", "0b", "0b2", "0x", "1e99999", "0b1p-99999", "9" * 300]
)
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="not a finite number"):
        bits.parse(text)
