"""The softmax of Triton kernels: exp(S - m) in the forms of site ``exponent``, m in those of ``row_max``, and S itself."""

import triton
import triton.language as tl

from .codes import (
    FMA,
    FROM_FORWARD,
    INTERPRETED,
    LARGEST,
    LN_2,
    LOG2_E,
    MAX_AND_SUM,
    S_IS_SCALED,
    SCALED_ROW_MAX,
    SEPARATE_MULTIPLY,
    SKIPPED,
    STABILIZED,
    STABILIZED_SAFE,
    SUBTRACT_FIRST,
    UP,
    VISITED,
)
from .round_blocks import round_each, round_to


@triton.jit
def round_scores(b_s, m_s, scalars, SITES: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr):
    """S from Q K^T: scaled, soft-capped, rounded, masked. But for S_IS_SCALED the scale is left to the exponential."""
    if SITES.exponent == S_IS_SCALED:
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
    return rounded_up(b_r, FOLD) if ROUNDING == UP else b_r


@triton.jit
def rounded_up(b_m, FOLD: tl.constexpr):
    """m up to a whole number of log2."""
    return tl.ceil(b_m * LOG2_E) * LN_2 if FOLD == S_IS_SCALED else tl.ceil(b_m)


@triton.jit
def exponential(b_s, b_m, unit, FOLD: tl.constexpr):
    """exp(S - m) of a block [., .] and m that broadcasts to it (site ``exponent``).

    S_IS_SCALED: S and m in natural units. Else the block is S' = Q K^T without its scale, and unit = scale log2(e): FMA is
    exp2(fma(S', unit, -m)), SEPARATE_MULTIPLY exp2(fp32(S' unit) - m), m in log2; SUBTRACT_FIRST exp2((S' - m) unit), m in units of S'.
    """
    if FOLD == FMA or FOLD == SEPARATE_MULTIPLY:
        b_p = tl.exp2(log2_difference(b_s, b_m, unit, FOLD))
    elif FOLD == SUBTRACT_FIRST:
        b_p = tl.exp2((b_s - b_m) * unit)
    else:
        b_p = tl.exp2((b_s - b_m) * LOG2_E)
    return b_p


@triton.jit
def probabilities(b_s, b_m, b_saved_sum, unit, SITES: tl.constexpr, BY_KEYS: tl.constexpr = False):
    """P of a block [., .]: exp(S - L) with L in place of m, or exp(S - m) / l (``saved_statistics``), S - m as in ``exponential``;
    or P_bar as rounded over d (``backward_probabilities``). b_saved_sum is then log2 l, or 1 / d."""
    FOLD: tl.constexpr = SITES.exponent
    if SITES.backward_probabilities == FROM_FORWARD:
        b_p = round_each(exponential(b_s, b_m, unit, FOLD), SITES.probabilities, BY_KEYS) * b_saved_sum
    elif SITES.saved_statistics != MAX_AND_SUM:
        b_p = exponential(b_s, b_m, unit, FOLD)
    elif FOLD == FMA or FOLD == SEPARATE_MULTIPLY:
        b_p = tl.exp2(log2_difference(b_s, b_m, unit, FOLD) - b_saved_sum)
    else:
        b_unit = tl.full(b_s.shape, unit if FOLD == SUBTRACT_FIRST else LOG2_E, tl.float32)
        b_p = tl.exp2(tl.fma(b_s - b_m, b_unit, -tl.broadcast_to(b_saved_sum, b_s.shape)))
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
def safe_maximum(b_m, RANGES: tl.constexpr):
    """m, or 0 in rows that have seen no key: there S and m are -inf, and S - m would be NaN."""
    if RANGES:
        b_m = tl.where(b_m == -float("inf"), 0.0, b_m)
    return b_m


@triton.jit
def with_sink(p_sinks, i_h, scalars, BT: tl.constexpr, SITES: tl.constexpr):
    """m and l [BT] that rows have before their first tile, where a head has a sink: one more logit, whose value is 0."""
    b_sink = tl.full([BT], tl.load(p_sinks + i_h), tl.float32)
    if SITES.exponent == FMA or SITES.exponent == SEPARATE_MULTIPLY:
        b_sink = rounded_product(b_sink, LOG2_E)
    elif SITES.exponent == SUBTRACT_FIRST:
        b_sink = tl.div_rn(b_sink, tl.full([BT], scalars.scale, tl.float32))
    b_m = b_sink
    if SITES.row_max_rounding == UP:
        b_m = rounded_up(b_m, SITES.exponent)
    b_m = round_to(b_m, SITES.statistics)
    b_l = round_to(rescaling(b_sink, b_m, scalars.unit, SITES.exponent), SITES.statistics)
    return b_m, b_l


@triton.jit
def log_sum_exp(b_m, b_l, unit, FOLD: tl.constexpr):
    """L = m + log l, in log2 but where S is S_IS_SCALED."""
    if FOLD == S_IS_SCALED:
        b_lse = b_m + tl.log(b_l)
    elif FOLD == SUBTRACT_FIRST:
        b_lse = tl.fma(b_m, tl.full(b_m.shape, unit, tl.float32), tl.log2(b_l))
    else:
        b_lse = b_m + tl.log2(b_l)
    return b_lse


@triton.jit
def several_close(b_s, b_top, tolerance):
    """Whether more than one score of a row [BT, BS] is within ``tolerance`` of the row's maximum b_top [BT]."""
    return tl.sum((b_s >= (b_top - tolerance)[:, None]).to(tl.float32), 1) > 1.5


@triton.jit
def shifted_row_max(b_r, m_tied, limits, ROW_MAX: tl.constexpr, HIDDEN_TILES: tl.constexpr):
    """``stabilize.tile_row_max`` from the row maximum r and whether it is tied; any unit of S, if ``limits.cap`` is in it too."""
    b_shift = tl.where(b_r > 0, (limits.beta - 1) * b_r, -b_r)
    if ROW_MAX == STABILIZED_SAFE:
        b_shift = tl.minimum(b_shift, limits.cap)
    b_r = tl.where(m_tied & (b_r > -float("inf")), b_r + b_shift, b_r)
    if HIDDEN_TILES == VISITED and ROW_MAX == STABILIZED:
        b_r = tl.where(b_r == -float("inf"), 0.0, b_r)
    return b_r


@triton.jit
def least_row_sum(b_f, b_r, m_tied, b_m, limits, unit, SITES: tl.constexpr):
    """``flash._RowSumFloor.of_tile`` [BT] from the plain row maximum r, whether it is tied, and the new m; and the running m
    that STABILIZED would have, b_f, which counts where rows are SCALED_ROW_MAX."""
    b_least = tl.full(b_r.shape, limits.floor, tl.float32)
    if SITES.row_max == SCALED_ROW_MAX:
        b_shifted = shifted_row_max(b_r, m_tied, limits, STABILIZED, SITES.hidden_tiles)
        b_f = round_to(tl.maximum(b_f, b_shifted), SITES.statistics)
        b_least *= tl.minimum(rescaling(b_f, b_m, unit, SITES.exponent), LARGEST)
    if SITES.hidden_tiles == SKIPPED:
        b_least = tl.where(b_r > -float("inf"), b_least, 0.0)
    return b_f, b_least
