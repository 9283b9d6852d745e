"""What of the forward kernel serves emulation alone: sums rounded once a tile, tiles larger than a block, tiles that the mask hides.

Legend as in ``forward.py``.
"""

import triton
import triton.language as tl

from .codes import FP32, LARGEST, OUTPUT_ITSELF, PLAIN, ROUNDED, SCALED_ROW_MAX, STABILIZED, STABILIZED_SAFE, State
from .loads import block_scores, load_keys
from .round_blocks import dot, operand, round_to, weights
from .softmax import (
    exponential,
    least_row_sum,
    rescaling,
    row_normalizer,
    safe_maximum,
    shifted_row_max,
)


@triton.jit
def add_tile(b_acc, b_exact, b_alpha, b_product, SITES: tl.constexpr):
    """O_bar rescaled by alpha plus one tile's P_bar V [BT, D], each rounded; and the same in FP32 beside it, where delta reads that."""
    b_scaled = round_to(b_alpha[:, None] * b_acc, SITES.accumulator)
    b_acc = round_to(b_scaled + round_to(b_product, SITES.tile_product), SITES.accumulator)
    if SITES.delta_output != OUTPUT_ITSELF and (SITES.tile_product != FP32 or SITES.accumulator != FP32):
        b_exact = b_alpha[:, None] * b_exact + b_product
    return b_acc, b_exact


@triton.jit
def forward_tile(
    state,
    queries,
    keys,
    first,
    last,
    scalars,
    limits,
    seed,
    SITES: tl.constexpr,
    SHAPE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Algorithm 1 for one tile [first, last) larger than a block: first its row maximum and ties, then its product in FP32."""
    BT: tl.constexpr = SHAPE.BT
    BS: tl.constexpr = SHAPE.BS
    WIDTH_V: tl.constexpr = SHAPE.WIDTH_V
    FOLD: tl.constexpr = SITES.exponent
    b_acc, b_exact, b_m, b_l, b_d, b_f = state
    b_top = tl.full([BT], -float("inf"), tl.float32)
    for start in range(first, last, BS):
        b_s, _ = block_scores(queries, keys, start, scalars, SITES, SHAPE, True, DTYPE)
        b_top = tl.maximum(b_top, tl.max(b_s, 1))
    b_r = row_normalizer(b_top, scalars.unit, FOLD, SITES.row_max_rounding)
    b_plain = b_r
    m_tied = False
    if SITES.row_max != PLAIN:
        b_count = tl.zeros([BT], tl.int32)
        for start in range(first, last, BS):
            b_s, _ = block_scores(queries, keys, start, scalars, SITES, SHAPE, True, DTYPE)
            b_count += tl.sum((b_s >= (b_top - limits.tolerance)[:, None]).to(tl.int32), 1)
        m_tied = b_count > 1
    if SITES.row_max == STABILIZED or SITES.row_max == STABILIZED_SAFE:
        b_r = shifted_row_max(b_r, m_tied, limits, SITES.row_max, SITES.hidden_tiles)
    b_m_new = round_to(tl.maximum(b_m, b_r), SITES.statistics)
    b_base = safe_maximum(b_m_new, SHAPE.RANGES)
    b_alpha = rescaling(b_m, b_base, scalars.unit, FOLD)
    b_sum = tl.zeros([BT], tl.float32)
    b_rounded_sum = tl.zeros([BT], tl.float32)
    b_product = tl.zeros([BT, WIDTH_V], tl.float32)
    for start in range(first, last, BS):
        b_s, _ = block_scores(queries, keys, start, scalars, SITES, SHAPE, True, DTYPE)
        b_p = exponential(b_s, b_base[:, None], scalars.unit, FOLD)
        b_sum += tl.sum(b_p, 1)
        b_v = load_keys(keys.p_v, keys.strides_v, queries, start, keys.S, SHAPE.DV, SHAPE.WIDTH_V, SHAPE, True)
        b_v = operand(b_v, SITES.inputs, DTYPE)
        b_p = weights(b_p, seed, queries.i_bh, queries.o_t, start, SITES, DTYPE)
        if SITES.divisor == ROUNDED:
            b_rounded_sum += tl.sum(b_p.to(tl.float32), 1)
        b_product = dot(b_p, b_v, b_product)
    if SHAPE.FLOOR:
        b_f, b_least = least_row_sum(b_f, b_plain, m_tied, b_base, limits, scalars.unit, SITES)
        b_sum = tl.maximum(b_sum, b_least)
        b_rounded_sum = tl.maximum(b_rounded_sum, b_least)
    if SITES.divisor == ROUNDED:
        b_d = round_to(b_alpha * b_d + b_rounded_sum, SITES.statistics)
    b_l = round_to(b_alpha * b_l + b_sum, SITES.statistics)
    b_acc, b_exact = add_tile(b_acc, b_exact, b_alpha, b_product, SITES)
    return State(b_acc, b_exact, b_m_new, b_l, b_d, b_f)


@triton.jit
def hidden_tile(state, limits, unit, SITES: tl.constexpr, FLOOR: tl.constexpr):
    """Algorithm 1 for one tile that the mask hides from all rows of the block, where such tiles are visited: P_bar is 0."""
    b_acc, b_exact, b_m, b_l, b_d, b_f = state
    b_m_new = b_m
    if SITES.row_max == STABILIZED:
        b_m_new = tl.maximum(b_m, 0.0)
    if SITES.row_max == SCALED_ROW_MAX:
        b_f = tl.maximum(b_f, 0.0)
    b_alpha = rescaling(b_m, b_m_new, unit, SITES.exponent)
    b_least = tl.zeros(b_m.shape, tl.float32)
    if FLOOR:
        b_least += limits.floor
        if SITES.row_max == SCALED_ROW_MAX:
            b_least *= tl.minimum(rescaling(b_f, b_m_new, unit, SITES.exponent), LARGEST)
    b_l = round_to(b_alpha * b_l + b_least, SITES.statistics)
    b_d = round_to(b_alpha * b_d + b_least, SITES.statistics)
    b_acc = round_to(b_alpha[:, None] * b_acc, SITES.accumulator)
    b_exact = b_alpha[:, None] * b_exact
    return State(b_acc, b_exact, b_m_new, b_l, b_d, b_f)
