"""Rounding to any number of mantissa bits, three ways, and the counter-based random bits of the stochastic one.

Values stay in float32 tensors: a "rounded" tensor is one whose values lie on the coarser grid. Bit patterns are those of
IEEE 754 binary32: 1 sign, 8 exponent, 23 explicit mantissa bits. Nearest means ties to even.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MANTISSA_BITS = 23
_STORAGE = {"bf16": torch.bfloat16, "fp16": torch.float16}
# torch's own cast rounds to nearest-even, too, and is faster; 7 bits with FP32's exponents are BF16.
_CAST = {**_STORAGE, "m7": torch.bfloat16}
_BITS = {"bf16": 7, "fp16": 10}
_WORD = 0xFFFFFFFF


def round_mantissa(x: Tensor, bits: int, rounding: str = "nearest", random_bits: Tensor | None = None) -> Tensor:
    """``x`` with ``bits`` explicit mantissa bits (7 is BF16, 10 is TF32), FP32's exponent range, subnormals included.

    Args:
        x: float32, any shape. Infinities and NaN come back as they are.
        bits: 1 to 23.
        rounding: ``nearest`` (ties to even), ``toward_zero``, or ``stochastic`` (away from zero with the probability of
            the part cut off, so that the expectation is ``x``).
        random_bits: int64 of x's shape, uniform in [0, 2^32); for ``stochastic`` only.

    Raises ``ValueError`` for another dtype, width or rounding.
    """
    if x.dtype != torch.float32:
        raise ValueError(f"round_mantissa takes float32, not {x.dtype}")
    if not 1 <= bits <= _MANTISSA_BITS:
        raise ValueError(f"bits = {bits}: expected 1 to {_MANTISSA_BITS}")
    cut = _MANTISSA_BITS - bits
    if cut == 0:
        return x.clone()
    pattern = x.contiguous().view(torch.int32)
    if rounding == "nearest":
        # Adding just under half a unit, plus one if the kept part is odd, carries exactly when nearest-even rounds up.
        raised = pattern + ((pattern >> cut) & 1) + ((1 << (cut - 1)) - 1)
    elif rounding == "toward_zero":
        raised = pattern
    elif rounding == "stochastic":
        if random_bits is None:
            raise ValueError("stochastic rounding needs random_bits")
        raised = pattern + (random_bits >> (32 - cut)).to(torch.int32)
    else:
        raise ValueError(f"rounding = {rounding!r}: expected nearest, toward_zero or stochastic")
    rounded = (raised & -(1 << cut)).view(torch.float32)
    # Infinities have an empty mantissa and pass unchanged; a NaN could carry into the sign, so it is put back.
    return torch.where(x.isnan(), x, rounded)


def round_to(x: Tensor, fmt: str, rounding: str = "nearest", random_bits: Tensor | None = None) -> Tensor:
    """``x`` (float32, any shape) on the grid of a format of ``attention.numerics``: ``fp32``, ``bf16``, ``fp16``, ``m1``-``m22``."""
    if fmt == "fp32":
        return x
    if rounding == "nearest" and fmt in _CAST:
        return x.to(_CAST[fmt]).float()
    bits = _BITS[fmt] if fmt in _BITS else int(fmt[1:])
    rounded = round_mantissa(x, bits, rounding, random_bits)
    # FP16 has fewer exponents than FP32: its cast adds overflow and subnormals, and changes nothing in between.
    return rounded.to(torch.float16).float() if fmt == "fp16" else rounded


def storage_dtype(fmt: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype that holds values of ``fmt`` without loss, ``dtype`` (that of q) wherever it does, else float32."""
    if dtype == torch.float32 or fmt == "fp32":
        return torch.float32
    if _STORAGE.get(fmt) == dtype:
        return dtype
    if dtype == torch.bfloat16 and fmt.startswith("m") and int(fmt[1:]) <= 7:
        return dtype
    return torch.float32


def random_words(seed: Tensor, stream: int, shape: torch.Size) -> Tensor:
    """One uniform 32-bit word per element, as int64: the first word of Philox-4x32-10 at counter (index, 0, stream, 0).

    Args:
        seed: int64 tensor of shape []; its low and high halves are the key, so the draw is a pure function of
            (seed, stream, index) on every device, and the seed can change without recompiling anything.
        stream: separates draws of one seed; 0 to 2^32 - 1.
        shape: of the result; ``index`` counts its elements in row-major order, below 2^32.

    Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011. With stream 0 it equals
    ``tl.randint(seed, index)``.
    """
    index = torch.arange(shape.numel(), dtype=torch.int64, device=seed.device)
    zero = torch.zeros((), dtype=torch.int64, device=seed.device)
    counter = (index, zero, zero + stream, zero)
    return philox_4x32(counter, (seed & _WORD, (seed >> 32) & _WORD))[0].view(shape)


def philox_4x32(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor], rounds: int = 10) -> tuple[Tensor, ...]:
    """Philox-4x32: four 32-bit words (as int64 tensors) from a counter of four and a key of two."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        high0, low0 = _multiply(c0, 0xD2511F53)
        high1, low1 = _multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def _multiply(a: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """High and low word of a 32 x 32 bit product. The factors are split so that nothing exceeds int64's 63 bits."""
    low = a * (constant & 0xFFFF)
    high = a * (constant >> 16)
    total = low + ((high & 0xFFFF) << 16)
    return (high >> 16) + (total >> 32), total & _WORD
