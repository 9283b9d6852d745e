"""Rounding to any mantissa width, and the random bits of stochastic rounding."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention.rounding import (
    low_bits,
    mantissa_bits,
    philox_4x32,
    random_bits,
    round_mantissa,
    round_to,
    storage_dtype,
    tile_random_bits,
    with_low_bits,
)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32)


def test_seven_bits_nearest_is_torchs_bfloat16_on_all_patterns() -> None:
    """All exponents, subnormals, infinities and NaN among them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-(2**31), 2**31, (200_000,), generator=generator).to(torch.int32).view(torch.float32)
    expected = x.to(torch.bfloat16).float()
    ours = round_mantissa(x, 7)
    assert torch.equal(ours.isnan(), expected.isnan())
    assert torch.equal(bits(ours)[~x.isnan()], bits(expected)[~x.isnan()])


def test_the_fp16_format_overflows_and_underflows_as_torch_does() -> None:
    x = torch.tensor([65519.0, 65520.0, 1e-7, 3e-8, -7e4])
    for rounding in ("nearest", "toward_zero"):
        rounded = round_to(x, "fp16", rounding)
        assert torch.equal(rounded, rounded.to(torch.float16).float())
    assert torch.equal(round_to(x, "fp16"), x.to(torch.float16).float())


@given(st.floats(width=32, allow_nan=False), st.integers(1, 23))
def test_nearest_is_a_nearest_grid_point_and_ties_go_to_even(value: float, width: int) -> None:
    x = torch.tensor([value], dtype=torch.float32)
    down = round_mantissa(x, width, "toward_zero")
    step = 1 << (23 - width)
    up = (bits(down) + step).view(torch.float32)
    rounded = round_mantissa(x, width)
    assert bits(rounded).item() in (bits(down).item(), bits(up).item())
    below, above = (x - down).double().abs(), (up.double() - x.double()).abs()
    if not math.isfinite(value) or value == down.item():
        assert torch.equal(rounded, x)
    elif torch.isfinite(up):
        if below != above:
            assert rounded.item() == (down if below < above else up).item()
        else:
            assert (bits(rounded).item() >> (23 - width)) & 1 == 0


def test_nan_and_infinity_survive_every_rounding() -> None:
    x = torch.tensor([0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1], dtype=torch.int64).to(torch.int32).view(torch.float32)
    infinities = torch.tensor([math.inf, -math.inf])
    words = torch.full((4,), 0xFFFF)
    for rounding in ("nearest", "toward_zero", "stochastic"):
        assert round_mantissa(x, 3, rounding, words).isnan().all()
        assert torch.equal(round_mantissa(infinities, 3, rounding, words[:2]), infinities)


WHOLE = (torch.arange(3), slice(0, 21), slice(0, 40))


def test_random_bits_of_a_tile_are_philox_words_at_head_row_and_column() -> None:
    drawn = tile_random_bits(torch.tensor(2**40 + 9), 2, *WHOLE)
    key = (torch.tensor(9), torch.tensor(2**8))
    for head, row, column in ((0, 0, 0), (2, 20, 39), (1, 7, 12), (2, 0, 13), (0, 20, 31)):
        words = philox_4x32(tuple(torch.tensor(c) for c in (column // 8, row, 2, head)), key, 7)
        expected = (int(words[column % 8 // 2]) >> (16 * (column % 2))) & 0xFFFF
        assert drawn[head, row, column] == expected


@pytest.mark.parametrize("bits_kept", [1, 4, 7, 10])
def test_stochastic_rounding_is_unbiased_at_every_width(bits_kept: int) -> None:
    """Also where the sixteen random bits are fewer than the bits cut off (1 and 4 kept)."""
    n = 200_000
    x = 1 + torch.rand(n, generator=torch.Generator().manual_seed(bits_kept))
    rounded = round_mantissa(x, bits_kept, "stochastic", random_bits(torch.tensor(1), 0, x.shape))
    error = (rounded.double() - x.double()) * 2**bits_kept
    assert error.abs().max() < 1
    assert error.mean().abs() < 4 * error.std() / n**0.5
    words = random_bits(torch.tensor(2), 0, x.shape)
    assert torch.equal(round_mantissa(rounded, bits_kept, "stochastic", words), rounded)


def test_philox_gives_the_published_words() -> None:
    """Known answers of Random123 (Salmon et al. 2011), philox4x32 with 10 rounds and, for zeros, with 7."""
    ones, pi = 0xFFFFFFFF, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)
    known = {
        (0, 0, 0, 0, 0, 0): (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        (ones,) * 6: (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        pi: (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    }
    for words, expected in known.items():
        tensors = [torch.tensor(w) for w in words]
        result = philox_4x32(tuple(tensors[:4]), (tensors[4], tensors[5]))
        assert tuple(int(word) for word in result) == expected
    zeros = (torch.tensor(0),) * 4
    seven = philox_4x32(zeros, zeros[:2], 7)
    assert tuple(int(word) for word in seven) == (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)


@pytest.mark.parametrize(
    ("fmt", "dtype", "expected"),
    [
        ("bf16", torch.bfloat16, torch.bfloat16),
        ("fp32", torch.bfloat16, torch.float32),
        ("m1", torch.bfloat16, torch.bfloat16),
        ("m8", torch.bfloat16, torch.float32),
        ("m7", torch.float16, torch.float32),
        ("fp16", torch.float16, torch.float16),
        ("bf16", torch.float32, torch.float32),
    ],
)
def test_storage_holds_every_value_of_the_format(fmt: str, dtype: torch.dtype, expected: torch.dtype) -> None:
    assert storage_dtype(fmt, dtype) == expected
    values = round_to(torch.randn(1000, generator=torch.Generator().manual_seed(5)), fmt)
    assert torch.equal(values.to(expected).float(), values)


@pytest.mark.parametrize(("fmt", "left"), [("bf16", 2.0**-23), ("m10", 2.0**-23), ("m4", 2.0**-20)])
def test_low_bits_restore_what_rounding_took(fmt: str, left: float) -> None:
    """To a unit of FP32, or to half of eight where a format lacks 19 bits and 16 are kept."""
    n = 50_000
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, generator=generator) * torch.exp2(torch.randint(-12, 12, (n,), generator=generator).float())
    rounded = round_to(x, fmt)
    counts = low_bits(x, rounded, fmt)
    assert counts.dtype == torch.int16
    assert ((with_low_bits(rounded, counts, fmt).double() - x.double()).abs() / x.abs()).max() <= left
    assert ((rounded.double() - x.double()).abs() / x.abs()).max() > 2.0 ** (-mantissa_bits(fmt) - 1.2)
