"""Rounding sites inside Triton kernels: the device functions by which they round, multiply and normalize.

A format is a number, because kernels cannot read text: its explicit mantissa bits, 23 for FP32 (nothing to do), and ``FP16`` for the
one format whose exponents differ too. Values stay float32 blocks on the coarser grid, as in ``attention/rounding.py``, until a
product reads them.

Two faults of Triton's CPU interpreter (seen in 3.6.0, 3.8.0 and 3.9.0; tests/test_kernels.py pins both) are met here and in
``loads.store_rows``: its product of two BF16 blocks is wrong, and its cast to BF16 truncates. There products read FP32
copies, which is exact, and rounding is integer arithmetic.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..numerics import (
    BACKWARD,
    DELTA,
    FORWARD,
    LARGEST_SCALE,
    ROUNDINGS,
    SITES,
    Numerics,
    Site,
    folds,
)
from ..rounding import RANDOM_BITS, ROUNDS
from .block_sizes import boundaries_matter

FP_FUSION = True
"""``enable_fp_fusion`` of every launch: the compiler may make a * b + c one operation with one rounding. Values depend on it, and its
default on Triton's version."""
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
FP16 = tl.constexpr(0)
BF16 = tl.constexpr(7)
FP32 = tl.constexpr(23)
OUTPUT_ITSELF = tl.constexpr(-1)
"""The O in delta where it is the output."""
LOW_BITS = tl.constexpr(-32)
_ONE = tl.constexpr(1)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LARGEST = tl.constexpr(LARGEST_SCALE)
_DRAW = tl.constexpr(RANDOM_BITS)
_ROUNDS = tl.constexpr(ROUNDS)


def _codes(values: Iterable[str]) -> list[tl.constexpr]:
    return [tl.constexpr(code) for code, _ in enumerate(values)]


NEAREST, TOWARD_ZERO, STOCHASTIC = _codes(ROUNDINGS)
PLAIN, STABILIZED, STABILIZED_SAFE, SCALED_DOWN = _codes(SITES["row_max"].choices)
LOGSUMEXP, MAX_AND_SUM = _codes(SITES["saved_statistics"].choices)
UNROUNDED, ROUNDED = _codes(SITES["divisor"].choices)
SKIPPED, VISITED = _codes(SITES["hidden_tiles"].choices)
_, REUSED = _codes(SITES["backward_probabilities"].choices)
_, UP = _codes(SITES["row_max_rounding"].choices)
KEPT, CENTERED_KEYS, CORRECTED_ROWS = _codes(SITES["row_residual"].choices)
ROWSUM_DO_O, ROWSUM_P_DP, ROWSUM_P_DP_NORMALIZED = _codes(SITES["delta"].choices)
LOADED = tl.constexpr(len(SITES["delta"].choices))
"""delta that an earlier launch made."""
SCALED, FMA, LATER, SEPARATE_MULTIPLY = _codes(("scaled", "fused", "later", "separate_multiply"))
"""Where the scale comes in exp(S - m): see ``exponential``."""


def format_code(fmt: str) -> int:
    """The number by which kernels know a format of ``attention.numerics``."""
    named = {"fp32": FP32, "bf16": BF16, "fp16": FP16, "output": OUTPUT_ITSELF, "low16": LOW_BITS}
    return named[fmt].value if fmt in named else int(fmt[1:])


def stored_code(fmt: str, dtype: torch.dtype) -> int:
    """``format_code``, or FP32's where values of ``dtype`` lie on the format's grid already, so that a load needs no rounding."""
    code = format_code(fmt)
    exact = {torch.bfloat16: code >= BF16.value, torch.float16: code == FP16.value or code >= 10}
    return FP32.value if exact.get(dtype, False) else code


def exponent_code(n: Numerics, scale: float, softcap: float) -> int:
    """Where the scale comes in exp(S - m), for ``exponential``; L counts in log2 but where S is SCALED. ``n`` is concrete."""
    if not folds(n, scale, softcap):
        return SCALED.value
    return {"fma": FMA, "subtract_first": LATER, "separate_multiply": SEPARATE_MULTIPLY}[n.exponent].value


def _code(name: str, value: str) -> int:
    declared = SITES[name]
    if declared.is_format:
        return format_code(value)
    return ROUNDINGS.index(value) if value in ROUNDINGS else declared.choices.index(value)


def _sites_in(*passes: str) -> Any:
    def acts(declared: Site) -> bool:
        return "flash" in declared.backends and bool(declared.choices) and not set(passes).isdisjoint(declared.acts_in)

    return namedtuple("Sites", [name for name, declared in SITES.items() if acts(declared)])


_SITES_OF: dict[tuple[str, ...], Any] = {
    passes: _sites_in(*passes) for passes in ((FORWARD,), (DELTA, BACKWARD), (BACKWARD,))
}


@functools.lru_cache(maxsize=1024)
def kernel_sites(n: Numerics, passes: tuple[str, ...], scale: float, softcap: float, causal: bool, **known: int) -> Any:
    """The sites declared to act in these passes as a NamedTuple of numbers, one constexpr of a kernel: a kernel that reads another one does
    not compile. ``n`` is concrete; ``exponent`` is ``exponent_code``; ``known``: sites whose number the launch knows better.

    Sites that cannot act beside the others have their default, so that what differs in nothing is compiled once.
    """
    unused: dict[str, Any] = {}
    if n.delta != "rowsum_do_o":
        unused["delta_output"] = "output"
    if not (causal and boundaries_matter(n)):
        unused["hidden_tiles"] = "skipped"
    n = replace(n, **unused)
    sites = _SITES_OF[passes]
    codes = {name: _code(name, getattr(n, name)) for name in sites._fields}
    return sites(**codes | {"exponent": exponent_code(n, scale, softcap)} | known)


class Shape(NamedTuple):
    """What a launch decides besides the sites: one constexpr of a kernel."""

    BT: int
    """Rows (queries) of a block."""
    BS: int
    """Columns (keys) of a block."""
    D: int
    WIDTH: int
    """Columns that a block of rows has on chip: D, or the power of 2 above it."""
    GROUP: int
    """Heads of queries that share one head of keys."""
    HEADS: int
    """Heads that programs walk side by side."""
    TMA: bool
    """Blocks that the loop walks are loaded through descriptors."""
    CAUSAL: bool
    SOFTCAP: bool
    EVEN: bool = False
    """There are no columns (dK/dV kernel: rows) past the end of the last block."""
    ONE_LOOP: bool = False
    """One loop walks blocks on the diagonal and the others."""
    TILED: bool = False
    """A tile of ``Numerics`` is many blocks."""
    FLOOR: bool = False
    """``row_sum_floor`` is above 0."""
    MMA_SUMS: bool = False
    """``rounded_and_summed`` may be used: blocks of S are as warpgroups' products leave them, 32 elements a thread."""
    RUNS: bool = False
    """A query sees a run of keys that is read (``mask.Runs``), in place of CAUSAL."""
    HOLES: bool = False
    """Keys inside of runs may be hidden."""


class Strides(NamedTuple):
    """Of a tensor [B, T, H, D], in elements."""

    b: int
    t: int
    h: int
    d: int


class Seen(NamedTuple):
    """Which keys a block of rows sees, inside a kernel: runs [first, last)."""

    b_first: Any
    """[BT]"""
    b_last: Any
    some_from: Any
    """Some row sees keys from here on, up to ``some_to``."""
    some_to: Any
    all_from: Any
    """All rows see all keys from here on, up to ``all_to``, holes apart."""
    all_to: Any
    p_holes: Any
    """Of the batch entry, where there are HOLES."""


class Scalars(NamedTuple):
    """``unit``: scale log2(e) where the exponential takes the scale, else 1."""

    scale: float
    unit: float
    softcap: float


class Limits(NamedTuple):
    """Numbers of the row normalizer, the second and third in the unit of what they are compared with."""

    beta: float
    tolerance: float
    cap: float
    floor: float


@triton.jit
def round_mantissa(b_x, BITS: tl.constexpr, ROUNDING: tl.constexpr, b_random):
    """``rounding.round_mantissa`` on a block; ``b_random`` (uint32 below 2^16) is read by stochastic rounding only."""
    CUT: tl.constexpr = 23 - BITS
    b_bits = b_x.to(tl.int32, bitcast=True)
    if ROUNDING == NEAREST:
        b_bits += ((b_bits >> CUT) & 1) + ((_ONE << (CUT - 1)) - 1)
    elif ROUNDING == STOCHASTIC:
        if CUT <= _DRAW:
            b_bits += (b_random >> (_DRAW - CUT)).to(tl.int32, bitcast=True)
        else:
            b_bits += ((b_random << (CUT - _DRAW)) | (_ONE << (CUT - _DRAW - 1))).to(tl.int32, bitcast=True)
    b_rounded = (b_bits & (-(_ONE << CUT))).to(tl.float32, bitcast=True)
    return tl.where(b_x != b_x, b_x, b_rounded)


@triton.jit
def round_to(b_x, FORMAT: tl.constexpr):
    """A float32 block on the grid of FORMAT, nearest-even."""
    if FORMAT == FP32:
        b_y = b_x
    elif FORMAT == FP16:
        b_y = b_x.to(tl.float16).to(tl.float32)
    elif FORMAT == BF16 and not INTERPRETED:
        b_y = b_x.to(tl.bfloat16).to(tl.float32)
    else:
        b_y = round_mantissa(b_x, FORMAT, NEAREST, 0)
    return b_y


@triton.jit
def round_block(b_x, FORMAT: tl.constexpr):
    """``round_to`` for a block of many elements a thread: BF16 by the instruction that converts two at once. The one that converts one
    runs where exp2 does, as slowly."""
    if FORMAT == BF16 and not INTERPRETED:
        b_y = tl.inline_asm_elementwise(
            """{
            .reg .b32 both, low, high;
            cvt.rn.bf16x2.f32 both, $3, $2;
            shl.b32 low, both, 16;
            and.b32 high, both, 0xffff0000;
            mov.b32 $0, low;
            mov.b32 $1, high;
            }""",
            "=f,=f,f,f",
            [b_x],
            tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        b_y = round_to(b_x, FORMAT)
    return b_y


def _rounded_and_summed(n: int) -> tuple[str, str]:
    """Assembly and constraints of ``rounded_and_summed`` for n elements a thread."""
    pairs = n // 2
    lines = [".reg .b32 one;", ".reg .f32 top, bottom, top_too, bottom_too;", "mov.b32 one, 0x3F803F80;"]
    sums = "{top, top_too, bottom, bottom_too}"
    lines += [f"mov.f32 {x}, 0f00000000;" for x in sums.strip("{}").split(", ")]
    for i in range(pairs):
        first = pairs + n + 2 * i
        lines.append(f"cvt.rn.bf16x2.f32 ${i}, ${first + 1}, ${first};")
        if i % 4 == 3:
            block = ", ".join(f"${j}" for j in range(i - 3, i + 1))
            product = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
            lines.append(f"{product} {sums}, {{{block}}}, {{one, one}}, {sums};")
    lines += [f"mov.f32 ${pairs + i}, {'top' if i % 4 < 2 else 'bottom'};" for i in range(n)]
    return "{" + " ".join(lines) + "}", ",".join(["=&r"] * pairs + ["=&f"] * n + ["f"] * n)


_SUM, _SUM_OPERANDS = (tl.constexpr(text) for text in _rounded_and_summed(32))


@triton.jit
def _first(a, b):
    return a


@triton.jit
def round_each(b_x, FORMAT: tl.constexpr):
    """``round_block`` where nothing needs pairs: each number is the upper half of one, the lower being 0."""
    if FORMAT == BF16 and not INTERPRETED:
        b_y = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $1, 0f00000000;", "=r,f", [b_x], tl.int32, is_pure=True, pack=1
        ).to(tl.float32, bitcast=True)
    else:
        b_y = round_to(b_x, FORMAT)
    return b_y


@triton.jit
def rounded_and_summed(b_p):
    """P_bar [64, 64] in BF16, and the sums of its rows as rounded [64]: by tensor cores, as products with a matrix of ones, which costs a
    tenth of what unpacking and adding does.

    Each warp has 16 whole rows, and a thread's elements of 16 columns are in the order in which ``mma.m16n8k16`` reads its left operand:
    so a warpgroup's products on sm_90 leave S (Triton 3.6), which nothing here can check (``Shape.MMA_SUMS``); tests on a GPU do.
    """
    b_weights, b_sums = tl.inline_asm_elementwise(
        _SUM, _SUM_OPERANDS, [b_p], (tl.bfloat16, tl.float32), is_pure=True, pack=32
    )
    return b_weights, tl.reduce(b_sums, 1, _first)  # all elements of a row are its sum


@triton.jit
def random_words(p_seed, o_row, STREAM: tl.constexpr, SHAPE: tl.constexpr):
    """Philox words for rows ``o_row`` [BT] (int64, counted over the whole output) of D elements: [BT, WIDTH / 8, 2, 2] uint32."""
    o_group = (o_row[:, None] * (SHAPE.D // 8) + tl.arange(0, SHAPE.WIDTH // 8)[None, :]).to(tl.uint32)
    o_zero = o_group * 0
    b_0, b_1, b_2, b_3 = tl.philox(tl.load(p_seed), o_group, o_zero, o_zero + STREAM, o_zero, _ROUNDS)
    return tl.join(tl.join(b_0, b_2), tl.join(b_1, b_3))


@triton.jit
def tile_words(seed, i_bh, o_t, start, STREAM: tl.constexpr, BS: tl.constexpr):
    """Philox words for the rows o_t [BT] and columns [start, start + BS) of one head: [BT, BS / 8, 2, 2] uint32."""
    o_row = o_t[:, None].to(tl.uint32)
    o_group = (start // 8 + tl.arange(0, BS // 8))[None, :].to(tl.uint32) + o_row * 0
    o_zero = o_group * 0
    b_0, b_1, b_2, b_3 = tl.philox(seed, o_group, o_zero + o_row, o_zero + STREAM, o_zero + i_bh, _ROUNDS)
    return tl.join(tl.join(b_0, b_2), tl.join(b_1, b_3))


@triton.jit
def weights(
    b_p,
    seed,
    i_bh,
    o_t,
    start,
    SITES: tl.constexpr,
    STREAM: tl.constexpr,
    DTYPE: tl.constexpr,
    BT: tl.constexpr,
    BS: tl.constexpr,
):
    """P_bar of a block [BT, BS] as operand of P_bar V; drawn with the bits of ``rounding.tile_random_bits``. ``start`` divides by 8."""
    if SITES.probabilities_rounding == STOCHASTIC:
        b_words = tile_words(seed, i_bh, o_t, start, STREAM, BS)
        b_p = round_output(b_p, SITES.probabilities, SITES.probabilities_rounding, b_words, BT, BS)
    return operand(b_p, SITES.probabilities, DTYPE)


@triton.jit
def round_output(b_x, FORMAT: tl.constexpr, ROUNDING: tl.constexpr, b_words, BT: tl.constexpr, D: tl.constexpr):
    """A float32 block [BT, D] rounded three ways; stochastically with the bits of ``rounding.random_bits``, from ``random_words``."""
    if FORMAT == FP32 or ROUNDING == NEAREST:
        b_y = round_to(b_x, FORMAT)
    else:
        BITS: tl.constexpr = 10 if FORMAT == FP16 else FORMAT
        b_random = 0
        if ROUNDING == STOCHASTIC:
            b_random = tl.reshape(tl.join(b_words & 0xFFFF, b_words >> 16), [BT, D])
        b_y = round_mantissa(b_x, BITS, ROUNDING, b_random)
        if FORMAT == FP16:
            b_y = b_y.to(tl.float16).to(tl.float32)
    return b_y


@triton.jit
def low_bits(b_exact, b_rounded, FORMAT: tl.constexpr):
    """``rounding.low_bits`` on a block, int32."""
    SHIFT: tl.constexpr = -9 if FORMAT == FP16 else 7 - FORMAT
    b_difference = b_exact.to(tl.int32, bitcast=True) - b_rounded.to(tl.int32, bitcast=True)
    if SHIFT > 0:
        b_difference = (b_difference + (_ONE << (SHIFT - 1))) >> SHIFT
    if FORMAT == FP16:
        b_difference = tl.maximum(b_difference, -32768)  # its subnormal numbers lack more
    return tl.minimum(b_difference, 32767)


@triton.jit
def with_low_bits(b_rounded, b_counts, FORMAT: tl.constexpr):
    """``rounding.with_low_bits`` on a block."""
    SHIFT: tl.constexpr = -9 if FORMAT == FP16 else 7 - FORMAT
    b_difference = b_counts.to(tl.int32)
    if SHIFT > 0:
        b_difference = b_difference << SHIFT
    return (b_rounded.to(tl.int32, bitcast=True) + b_difference).to(tl.float32, bitcast=True)


@triton.jit
def operand(b_x, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """A block rounded to FORMAT for a product: in DTYPE (that of q) where it holds the format without loss, else in float32."""
    if INTERPRETED:
        b_y = round_to(b_x.to(tl.float32), FORMAT)
    elif b_x.dtype == DTYPE and FORMAT == FP32:
        b_y = b_x
    elif DTYPE == tl.bfloat16 and FORMAT == BF16:
        b_y = b_x.to(tl.bfloat16)
    elif DTYPE == tl.bfloat16 and FORMAT < BF16 and FORMAT != FP16:
        b_y = round_to(b_x.to(tl.float32), FORMAT).to(tl.bfloat16)
    elif DTYPE == tl.float16 and FORMAT == FP16:
        b_y = b_x.to(tl.float16)
    else:
        b_y = round_to(b_x.to(tl.float32), FORMAT)
    return b_y


@triton.jit
def dot(b_a, b_b, b_acc):
    """b_acc + b_a b_b with FP32 products, never TF32.

    FP32 times BF16 is three products of BF16 blocks: 24 significant bits are 8 + 8 + 8, so no product loses a bit.
    """
    if INTERPRETED:
        b_acc = tl.dot(b_a.to(tl.float32), b_b.to(tl.float32), b_acc, input_precision="ieee")
    elif b_a.dtype == b_b.dtype:
        b_acc = tl.dot(b_a, b_b, b_acc, input_precision="ieee")
    elif b_a.dtype == tl.float32 and b_b.dtype == tl.bfloat16:
        b_high, b_middle, b_low = three_parts(b_a)
        b_acc = tl.dot(b_high, b_b, tl.dot(b_middle, b_b, tl.dot(b_low, b_b, b_acc)))
    elif b_a.dtype == tl.bfloat16 and b_b.dtype == tl.float32:
        b_high, b_middle, b_low = three_parts(b_b)
        b_acc = tl.dot(b_a, b_high, tl.dot(b_a, b_middle, tl.dot(b_a, b_low, b_acc)))
    else:
        b_acc = tl.dot(b_a.to(tl.float32), b_b.to(tl.float32), b_acc, input_precision="ieee")
    return b_acc


@triton.jit
def divide_rows(b_x, b_l):
    """b_x [BT, D] / b_l [BT], correctly rounded (Markstein): one true division a row, then three fused operations an element."""
    b_inverse = tl.div_rn(1.0, b_l)[:, None]
    b_y = b_x * b_inverse
    return tl.fma(
        tl.fma(-b_y, tl.broadcast_to(b_l[:, None], b_y.shape), b_x), tl.broadcast_to(b_inverse, b_y.shape), b_y
    )


@triton.jit
def three_parts(b_x):
    """BF16 blocks whose sum is the float32 block, exactly where no part is subnormal."""
    b_high = b_x.to(tl.bfloat16)
    b_rest = b_x - b_high.to(tl.float32)
    b_middle = b_rest.to(tl.bfloat16)
    return b_high, b_middle, (b_rest - b_middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def round_scores(b_s, m_s, scalars, SITES: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr):
    """S from Q K^T: scaled, soft-capped, rounded, masked. But for SCALED the scale is left to the exponential."""
    if SITES.exponent == SCALED:
        b_s = scalars.scale * b_s
        if SOFTCAP:
            b_t = tl.exp2(tl.abs(b_s / scalars.softcap) * (-2 * LOG2_E))
            b_t = scalars.softcap * ((1 - b_t) / (1 + b_t))
            b_s = tl.where(b_s < 0, -b_t, b_t)
        b_s = round_to(b_s, SITES.scores)
    if MASKED:
        b_s = tl.where(m_s, b_s, -float("inf"))
    return b_s


@triton.jit
def fused_difference(b_s, b_m, unit):
    """S unit - m of a block [., .] and m that broadcasts to it, rounded once."""
    # Named, as compilers fuse or not as they are told. The interpreter's tl.fma rounds twice; in FP64 the product is exact.
    b_unit = tl.full(b_s.shape, unit, tl.float32)
    if INTERPRETED:
        b_x = (b_s.to(tl.float64) * b_unit.to(tl.float64) - b_m.to(tl.float64)).to(tl.float32)
    else:
        # Times -1 is a negation, which costs nothing; Triton's minus is 0 - m.
        b_x = tl.fma(b_unit, b_s, tl.broadcast_to(b_m * -1.0, b_s.shape))
    return b_x


@triton.jit
def rounded_product(b_s, unit):
    """S unit of any block, rounded to FP32 whatever is done with it."""
    b_unit = tl.full(b_s.shape, unit, tl.float32)
    if INTERPRETED:
        b_x = b_s * b_unit
    else:
        # A product without .rn may become part of a multiply-add, in LLVM or in ptxas; one with it may not.
        b_x = tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [b_s, b_unit], tl.float32, is_pure=True, pack=1
        )
    return b_x


@triton.jit
def log2_difference(b_s, b_m, unit, FOLD: tl.constexpr):
    """S unit - m of a block [., .] and m that broadcasts to it, in log2: SEPARATE_MULTIPLY rounded twice, FMA once."""
    if FOLD == SEPARATE_MULTIPLY:
        b_x = rounded_product(b_s, unit) - b_m
    else:
        b_x = fused_difference(b_s, b_m, unit)
    return b_x


@triton.jit
def row_normalizer(b_top, unit, FOLD: tl.constexpr, ROUNDING: tl.constexpr):
    """The row maximum [BT] of S as m counts: FMA and SEPARATE_MULTIPLY times unit, rounded; else as it is. UP: to a
    whole number of log2."""
    if FOLD == SEPARATE_MULTIPLY:
        b_r = rounded_product(b_top, unit)
    elif FOLD == FMA:
        b_r = b_top * unit
    else:
        b_r = b_top
    if ROUNDING == UP and FOLD == SCALED:
        b_r = tl.ceil(b_r * LOG2_E) * LN_2
    elif ROUNDING == UP:
        b_r = tl.ceil(b_r)
    return b_r


@triton.jit
def exponential(b_s, b_m, unit, FOLD: tl.constexpr):
    """exp(S - m) of a block [., .] and m that broadcasts to it (site ``exponent``). S lacks its scale but where it is SCALED;
    unit = scale log2(e) makes up for it: FMA with the subtraction of m, SEPARATE_MULTIPLY before it, m counting in log2; LATER, m counting
    as S does."""
    if FOLD == FMA or FOLD == SEPARATE_MULTIPLY:
        b_p = tl.exp2(log2_difference(b_s, b_m, unit, FOLD))
    elif FOLD == LATER:
        b_p = tl.exp2((b_s - b_m) * unit)
    else:
        b_p = tl.exp2((b_s - b_m) * LOG2_E)
    return b_p


@triton.jit
def probabilities(
    b_s, b_m, b_log_l, unit, FOLD: tl.constexpr, APART: tl.constexpr, REUSE: tl.constexpr, FORMAT: tl.constexpr
):
    """P of a block [., .]: exp(S - L) with L in place of m, or APART exp(S - m) / l from log2 l, S - m as in ``exponential``; or, to
    REUSE P_bar, exp(S - m) in FORMAT over d, with 1 / d in place of log2 l (``backward_probabilities``)."""
    if REUSE:
        b_p = round_each(exponential(b_s, b_m, unit, FOLD), FORMAT) * b_log_l
    elif not APART:
        b_p = exponential(b_s, b_m, unit, FOLD)
    elif FOLD == FMA or FOLD == SEPARATE_MULTIPLY:
        b_p = tl.exp2(log2_difference(b_s, b_m, unit, FOLD) - b_log_l)
    else:
        b_unit = tl.full(b_s.shape, unit if FOLD == LATER else LOG2_E, tl.float32)
        b_p = tl.exp2(tl.fma(b_s - b_m, b_unit, -tl.broadcast_to(b_log_l, b_s.shape)))
    return b_p


@triton.jit
def rescaling(b_m, b_m_new, unit, FOLD: tl.constexpr):
    """exp(m - m') of two row normalizers."""
    if FOLD == FMA or FOLD == SEPARATE_MULTIPLY:
        b_alpha = tl.exp2(b_m - b_m_new)
    else:
        b_alpha = exponential(b_m, b_m_new, unit, FOLD)
    return b_alpha


@triton.jit
def subtrahend(b_m, RUNS: tl.constexpr):
    """m as it is subtracted: 0 in rows that have seen no key, whose S is -inf as their m is."""
    if RUNS:
        b_m = tl.where(b_m == -float("inf"), 0.0, b_m)
    return b_m


@triton.jit
def log_sum_exp(b_m, b_l, unit, FOLD: tl.constexpr):
    """L = m + log l, in log2 but where S is SCALED."""
    if FOLD == SCALED:
        b_lse = b_m + tl.log(b_l)
    elif FOLD == LATER:
        b_lse = tl.fma(b_m, tl.full(b_m.shape, unit, tl.float32), tl.log2(b_l))
    else:
        b_lse = b_m + tl.log2(b_l)
    return b_lse


@triton.jit
def several_close(b_s, b_top, tolerance):
    """Whether more than one score of a row [BT, BS] is within ``tolerance`` of the row's maximum b_top [BT]."""
    return tl.sum((b_s >= (b_top - tolerance)[:, None]).to(tl.float32), 1) > 1.5


@triton.jit
def shifted_row_max(b_r, m_tied, limits, ROW_MAX: tl.constexpr):
    """``stabilize.tile_row_max`` from the row maximum r and whether it is tied; any unit of S, if ``limits.cap`` is in it too."""
    b_shift = tl.where(b_r > 0, (limits.beta - 1) * b_r, -b_r)
    if ROW_MAX == STABILIZED_SAFE:
        b_shift = tl.minimum(b_shift, limits.cap)
    return tl.where(m_tied & (b_r > -float("inf")), b_r + b_shift, b_r)


@triton.jit
def hidden_row_max(b_r, ROW_MAX: tl.constexpr, HIDDEN_TILES: tl.constexpr):
    """The row normalizer [BT] of a tile, 0 where the row sees none of it, VISITED and STABILIZED (``stabilize.tile_row_max``)."""
    if HIDDEN_TILES == VISITED and ROW_MAX == STABILIZED:
        b_r = tl.where(b_r == -float("inf"), 0.0, b_r)
    return b_r


@triton.jit
def least_row_sum(b_f, b_r, m_tied, b_m, limits, unit, SITES: tl.constexpr):
    """``flash._RowSumFloor.of_tile`` [BT] from the plain row maximum r, whether it is tied, and the new m; and the running m
    that STABILIZED would have, b_f, which counts where rows are SCALED_DOWN."""
    b_least = tl.full(b_r.shape, limits.floor, tl.float32)
    if SITES.row_max == SCALED_DOWN:
        b_shifted = shifted_row_max(b_r, m_tied, limits, STABILIZED)
        b_shifted = hidden_row_max(b_shifted, STABILIZED, SITES.hidden_tiles)
        b_f = round_to(tl.maximum(b_f, b_shifted), SITES.statistics)
        b_least *= tl.minimum(rescaling(b_f, b_m, unit, SITES.exponent), LARGEST)
    if SITES.hidden_tiles == SKIPPED:
        b_least = tl.where(b_r > -float("inf"), b_least, 0.0)
    return b_f, b_least
