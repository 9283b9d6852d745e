"""Rounding to any number of mantissa bits, three ways, and the counter-based random bits of the stochastic one.

Values stay in float32 tensors: a "rounded" tensor is one whose values lie on the coarser grid. Bit patterns are those of
IEEE 754 binary32: 1 sign, 8 exponent, 23 explicit mantissa bits. Nearest means ties to even.
"""

import torch
from torch import Tensor

_MANTISSA_BITS = 23
_STORAGE = {"bf16": torch.bfloat16, "fp16": torch.float16}
# torch's own cast rounds to nearest-even, too, and is faster; 7 bits with FP32's exponents are BF16.
_CAST = {**_STORAGE, "m7": torch.bfloat16}
_BITS = {"bf16": 7, "fp16": 10}
_WORD = 0xFFFFFFFF
RANDOM_BITS = 16
ROUNDS = 7
"""Rounds of Philox in ``random_bits``."""

OUTPUT_STREAM, DELTA_STREAM, PROBABILITIES_STREAM = 0, 1, 2
ROW_SIGN_STREAM, ROW_CHOICE_STREAM, COLUMN_SIGN_STREAM = 3, 4, 5
"""Streams of random bits, independent of each other: the O passed on, the O inside delta and P_bar; and what ``delta_error`` draws."""
SITE_STREAMS = 2**16
"""Number of streams of random bits for each site with a stochastic cast: a site's begin at this times its number. A site that rounds
tiles has one."""
NUMBERS_OF_SITES = {
    "queries_and_keys": 3,
    "values": 4,
    "values_in_dp": 5,
    "probabilities": 11,
    "probabilities_in_dv": 13,
    "output_gradient": 22,
    "output_gradient_in_dv": 23,
    "delta_output": 25,
    "probability_gradients": 32,
    "score_gradients": 33,
}
"""Each site that may be in a stochastic format below BF16. Numbers stay, as runs replay by them: a new site takes a new one."""

FORMAT_OF = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def round_mantissa(x: Tensor, bits: int, rounding: str = "nearest", random_bits: Tensor | None = None) -> Tensor:
    """``x`` with ``bits`` explicit mantissa bits (7 is BF16, 10 is TF32), FP32's exponent range, subnormals included.

    Args:
        x: float32, any shape. Infinities and NaN come back as they are.
        bits: 1 to 23.
        rounding: ``nearest`` (ties to even), ``toward_zero``, or ``stochastic`` (away from zero with the probability of
            the part cut off, so that the expectation is ``x``).
        random_bits: int64 of x's shape, uniform in [0, 2^16); for ``stochastic`` only. Where more than 16 bits are cut off, the
            rest count as one half, so that probabilities are rounded to 2^-16 and lean to no side.

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
        raised = pattern + _scaled_draw(random_bits, cut).to(torch.int32)
    else:
        raise ValueError(f"rounding = {rounding!r}: expected nearest, toward_zero or stochastic")
    rounded = (raised & -(1 << cut)).view(torch.float32)
    # Infinities have an empty mantissa and pass unchanged; a NaN could carry into the sign, so it is put back.
    return torch.where(x.isnan(), x, rounded)


def _scaled_draw(random_bits: Tensor, cut: int) -> Tensor:
    if cut <= RANDOM_BITS:
        return random_bits >> (RANDOM_BITS - cut)
    return (random_bits << (cut - RANDOM_BITS)) | (1 << (cut - RANDOM_BITS - 1))


def round_to(x: Tensor, fmt: str, rounding: str = "nearest", random_bits: Tensor | None = None) -> Tensor:
    """``x`` (float32, any shape) on the grid of a format of ``attention.numerics``: ``fp32``, ``bf16``, ``fp16``, ``m1``-``m22``.

    In ``fp16``, ``rounding`` acts in its normal range: below 2^-14 it is ``nearest``, and what is too large becomes infinite.
    """
    if fmt == "fp32":
        return x
    if rounding == "nearest" and fmt in _CAST:
        return x.to(_CAST[fmt]).float()
    rounded = round_mantissa(x, mantissa_bits(fmt), rounding, random_bits)
    # FP16 has fewer exponents than FP32: its cast adds overflow and, to nearest, subnormals, and changes nothing in between.
    return rounded.to(torch.float16).float() if fmt == "fp16" else rounded


def low_bits(exact: Tensor, rounded: Tensor, fmt: str) -> Tensor:
    """What ``rounded``, the nearest value in ``fmt``, lacks of ``exact`` (float32, any shape), as int16: the difference of their
    bit patterns, or its upper 16 bits where ``fmt`` lacks more.

    Of BF16, ``with_low_bits`` then is exact, or off by one unit of FP32 where ``exact`` was half way between two numbers.
    """
    shift = _low_shift(fmt)
    difference = exact.contiguous().view(torch.int32) - rounded.contiguous().view(torch.int32)
    return ((difference + (1 << shift >> 1)) >> shift).clamp(-(2**15), 2**15 - 1).to(torch.int16)


def with_low_bits(rounded: Tensor, low_bits: Tensor, fmt: str) -> Tensor:
    """``exact`` from ``rounded`` (float32) and its ``low_bits``."""
    return (rounded.contiguous().view(torch.int32) + (low_bits.int() << _low_shift(fmt))).view(torch.float32)


def _low_shift(fmt: str) -> int:
    return max(_MANTISSA_BITS - mantissa_bits(fmt) - 16, 0)


def mantissa_bits(fmt: str) -> int:
    if fmt == "fp32":
        return _MANTISSA_BITS
    return _BITS[fmt] if fmt in _BITS else int(fmt[1:])


def storage_dtype(fmt: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype that holds values of ``fmt`` without loss: ``dtype`` (that of q) wherever it does, int16 for ``low_bits``, else
    float32."""
    if fmt == "low16":
        return torch.int16
    if dtype == torch.float32 or fmt == "fp32":
        return torch.float32
    if _STORAGE.get(fmt) == dtype:
        return dtype
    if dtype == torch.bfloat16 and fmt.startswith("m") and int(fmt[1:]) <= 7:
        return dtype
    return torch.float32


def random_bits(seed: Tensor, stream: int, shape: torch.Size) -> Tensor:
    """Sixteen uniform bits per element, as int64 in [0, 2^16): what cutting FP32 to BF16 needs, and what a kernel can afford.

    Element i (row-major) takes half i % 2 (0: low) of word (i % 8) // 2 of Philox-4x32 at counter (i // 8, 0, stream, 0), with 7
    rounds: the fewest that pass BigCrush, the authors' default being 10.

    Args:
        seed: int64 tensor of shape []; its low and high halves are the key, so the draw is a pure function of
            (seed, stream, i) on every device, and the seed can change without recompiling anything.
        stream: separates draws of one seed; 0 to 2^32 - 1.
        shape: of the result, below 2^35 elements.

    Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011, table 2.
    """
    index = torch.arange(-(-shape.numel() // 8), dtype=torch.int64, device=seed.device)
    zero = torch.zeros((), dtype=torch.int64, device=seed.device)
    return _halves(seed, (index, zero, zero + stream, zero))[: shape.numel()].view(shape)


def tile_random_bits(seed: Tensor, stream: int, heads: Tensor, rows: slice, columns: slice) -> Tensor:
    """Sixteen uniform bits for each element of one tile, [N, R, C] int64 in [0, 2^16), ``heads`` [N] int64 being numbers of heads;
    other tiles give an element the same.

    Element (head, row, column) takes half column % 2 (0: low) of word (column % 8) // 2 of Philox-4x32-7 at counter
    (column // 8, row, stream, head), the key being that of ``random_bits``.
    """
    first = columns.start // 8
    group = torch.arange(first, -(-columns.stop // 8), dtype=torch.int64, device=seed.device)
    row = torch.arange(rows.start, rows.stop, dtype=torch.int64, device=seed.device)
    counter = (group, row[:, None], torch.full_like(group, stream), heads[:, None, None])
    bits = _halves(seed, counter).view(len(heads), len(row), 8 * len(group))
    return bits[:, :, columns.start - 8 * first : columns.stop - 8 * first]


def _halves(seed: Tensor, counter: tuple[Tensor, ...]) -> Tensor:
    """The eight halves of each counter's four words, flat: low before high, words in order."""
    words = philox_4x32(counter, (seed & _WORD, (seed >> 32) & _WORD), ROUNDS)
    return torch.stack([half for word in words for half in (word & 0xFFFF, word >> 16)], dim=-1).flatten()


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
