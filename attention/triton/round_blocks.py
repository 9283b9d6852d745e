"""How Triton kernels round and multiply blocks: the sites of ``Numerics`` that are formats or roundings.

Values stay float32 blocks on the coarser grid, as in ``attention/rounding.py``, until a product reads them.

Two faults of Triton's CPU interpreter (seen in 3.6.0, 3.8.0 and 3.9.0; tests/test_kernels.py pins both) are met here and in
``loads.store_rows``: its product of two BF16 blocks is wrong, and its cast to BF16 truncates. There products read FP32
copies, which is exact, and rounding is integer arithmetic.
"""

import triton
import triton.language as tl

from ..rounding import PROBABILITIES_STREAM, RANDOM_BITS, ROUNDS
from .codes import BF16, FP16, FP32, INTERPRETED, NEAREST, STOCHASTIC
from .low_blocks import LOW, round_low

_ONE = tl.constexpr(1)
_DRAW = tl.constexpr(RANDOM_BITS)
_ROUNDS = tl.constexpr(ROUNDS)
_P_STREAM = tl.constexpr(PROBABILITIES_STREAM)


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
def round_to(b_x, FORMAT: tl.constexpr, BY_KEYS: tl.constexpr = False):
    """A float32 block on the grid of FORMAT, nearest-even; what shares a scale is beside each other in the last dimension or, BY_KEYS, in
    the first."""
    if FORMAT >= LOW:
        b_y = tl.trans(round_low(tl.trans(b_x), FORMAT)) if BY_KEYS else round_low(b_x, FORMAT)
    elif FORMAT == FP32:
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
def round_each(b_x, FORMAT: tl.constexpr, BY_KEYS: tl.constexpr = False):
    """``round_block`` where nothing needs pairs: each number is the upper half of one, the lower being 0."""
    if FORMAT == BF16 and not INTERPRETED:
        b_y = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $1, 0f00000000;", "=r,f", [b_x], tl.int32, is_pure=True, pack=1
        ).to(tl.float32, bitcast=True)
    else:
        b_y = round_to(b_x, FORMAT, BY_KEYS)
    return b_y


@triton.jit
def rounded_and_summed(b_p):
    """P_bar [64, 64] in BF16, and the sums of its rows as rounded [64]: by tensor cores, as products with a matrix of ones, which costs a
    tenth of what unpacking and adding does.

    Each warp has 16 whole rows, and a thread's elements of 16 columns are in the order in which ``mma.m16n8k16`` reads its left operand:
    so a warpgroup's products on sm_90 leave S, which ``layout.check_sums`` makes sure of before the first launch (``Shape.MMA_SUMS``).
    """
    b_weights, b_sums = tl.inline_asm_elementwise(
        _SUM, _SUM_OPERANDS, [b_p], (tl.bfloat16, tl.float32), is_pure=True, pack=32
    )
    return b_weights, tl.reduce(b_sums, 1, _first)  # all elements of a row are its sum


@triton.jit
def random_words(p_seed, o_row, STREAM: tl.constexpr, SHAPE: tl.constexpr):
    """Philox words for rows ``o_row`` [BT] (int64, counted over the whole output) of DV elements: [BT, WIDTH_V / 8, 2, 2] uint32."""
    o_group = (o_row[:, None] * (SHAPE.DV // 8) + tl.arange(0, SHAPE.WIDTH_V // 8)[None, :]).to(tl.uint32)
    o_zero = o_group * 0
    b_0, b_1, b_2, b_3 = tl.philox(tl.load(p_seed), o_group, o_zero, o_zero + STREAM, o_zero, _ROUNDS)
    return tl.join(tl.join(b_0, b_2), tl.join(b_1, b_3))


@triton.jit
def tile_words(seed, i_bh, o_t, start, BS: tl.constexpr):
    """Philox words for the rows o_t [BT] and columns [start, start + BS) of one head: [BT, BS / 8, 2, 2] uint32."""
    o_row = o_t[:, None].to(tl.uint32)
    o_group = (start // 8 + tl.arange(0, BS // 8))[None, :].to(tl.uint32) + o_row * 0
    o_zero = o_group * 0
    b_0, b_1, b_2, b_3 = tl.philox(seed, o_group, o_zero + o_row, o_zero + _P_STREAM, o_zero + i_bh, _ROUNDS)
    return tl.join(tl.join(b_0, b_2), tl.join(b_1, b_3))


@triton.jit
def weights(b_p, seed, i_bh, o_t, start, SITES: tl.constexpr, DTYPE: tl.constexpr):
    """P_bar of a block [BT, BS] as operand of P_bar V; drawn with the bits of ``rounding.tile_random_bits``. ``start`` divides by 8."""
    if SITES.probabilities_rounding == STOCHASTIC:
        b_words = tile_words(seed, i_bh, o_t, start, b_p.shape[1])
        b_p = round_output(b_p, SITES.probabilities, SITES.probabilities_rounding, b_words)
    return operand(b_p, SITES.probabilities, DTYPE)


@triton.jit
def round_output(b_x, FORMAT: tl.constexpr, ROUNDING: tl.constexpr, b_words):
    """A float32 block [., .] rounded three ways; stochastically with the bits of ``rounding.random_bits``, from ``random_words``."""
    if FORMAT == FP32 or ROUNDING == NEAREST:
        b_y = round_to(b_x, FORMAT)
    else:
        BITS: tl.constexpr = 10 if FORMAT == FP16 else FORMAT
        b_random = 0
        if ROUNDING == STOCHASTIC:
            b_random = tl.reshape(tl.join(b_words & 0xFFFF, b_words >> 16), b_x.shape)
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
def operand(b_x, FORMAT: tl.constexpr, DTYPE: tl.constexpr, BY_KEYS: tl.constexpr = False):
    """A block rounded to FORMAT for a product: in DTYPE (that of q) where it holds the format without loss, else in float32."""
    if INTERPRETED or FORMAT >= LOW:
        b_y = round_to(b_x.to(tl.float32), FORMAT, BY_KEYS)
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
