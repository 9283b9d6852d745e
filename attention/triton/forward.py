"""Forward kernel (Algorithm 1 of FlashAttention-2, arXiv 2307.08691) and its launch; sites as in ``flash._forward_rows``.

Legend: B batch, H heads, T queries, S keys, D head dim; BT rows and BS columns of a block; ``p_`` pointers, ``b_`` blocks on chip,
``o_`` offsets, ``m_`` masks.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..mask import Mask
from ..numerics import FORWARD, Numerics
from ..reference.exponent import log2_scale
from ..reference.tiles import empty_outputs
from ..rounding import DELTA_STREAM, OUTPUT_STREAM
from .block_sizes import Blocks, walks_tiles, width
from .codes import (
    FMA,
    FP32,
    FP_FUSION,
    FROM_FORWARD,
    INTERPRETED,
    LOW_BITS,
    MAX_AND_SUM,
    NEAREST,
    OUTPUT_ITSELF,
    PLAIN,
    ROUNDED,
    S_IS_SCALED,
    SEPARATE_MULTIPLY,
    STABILIZED,
    STABILIZED_SAFE,
    STOCHASTIC,
    VISITED,
    Keys,
    Limits,
    Queries,
    Scalars,
    Shape,
    State,
    Strides,
    kernel_sites,
    stored_code,
)
from .forward_tiled import add_tile, forward_tile, hidden_tile
from .layout import check_sums
from .loads import (
    block_scores,
    load_keys,
    load_ranges,
    load_rows,
    place,
    rows_source,
    store_rows,
    takes_descriptor,
    visible,
    warpgroup_mma,
)
from .low_blocks import LOW
from .round_blocks import (
    divide_rows,
    dot,
    low_bits,
    operand,
    random_words,
    round_block,
    round_output,
    round_to,
    rounded_and_summed,
    weights,
)
from .softmax import (
    exponential,
    least_row_sum,
    log_sum_exp,
    rescaling,
    row_normalizer,
    safe_maximum,
    several_close,
    shifted_row_max,
    with_sink,
)

_OUTPUT_STREAM, _DELTA_STREAM = tl.constexpr(OUTPUT_STREAM), tl.constexpr(DELTA_STREAM)


@triton.jit
def forward_range(
    state,
    queries,
    keys,
    first,
    middle,
    last,
    scalars,
    limits,
    seed,
    SITES: tl.constexpr,
    SHAPE: tl.constexpr,
    MASKED: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Algorithm 1 over the columns [first, last), one block at a time, where a block is a tile of ``Numerics``.

    Columns may be hidden in all blocks where MASKED, and where ONE_LOOP in those from ``middle`` on.
    """
    BT: tl.constexpr = SHAPE.BT
    BS: tl.constexpr = SHAPE.BS
    WIDTH_V: tl.constexpr = SHAPE.WIDTH_V
    FOLD: tl.constexpr = SITES.exponent
    b_acc, b_exact, b_m, b_l, b_d, b_f = state
    COARSE: tl.constexpr = SITES.tile_product != FP32 or SITES.accumulator != FP32
    SHIFTS: tl.constexpr = SITES.row_max == STABILIZED or SITES.row_max == STABILIZED_SAFE
    for start in range(first, last, BS):
        b_s, _ = block_scores(queries, keys, start, scalars, SITES, SHAPE, MASKED, DTYPE)
        if SHAPE.ONE_LOOP and not SHAPE.RANGES:
            # Few blocks hide columns: a branch costs less than the start of a second loop.
            if start >= middle:
                b_s = tl.where(visible(queries.o_t, start, keys.S, SHAPE.CAUSAL, SHAPE.EVEN, BS), b_s, -float("inf"))
        b_top = tl.max(b_s, 1)
        b_r = row_normalizer(b_top, scalars.unit, FOLD, SITES.row_max_rounding)
        b_plain = b_r
        m_tied = False
        if SITES.row_max != PLAIN:
            m_tied = several_close(b_s, b_top, limits.tolerance)
        if SHIFTS and FOLD != S_IS_SCALED:
            # The exponentials need not wait for the count of ties: a factor a row makes up for the shift.
            b_m_plain = tl.maximum(b_m, b_r)
            b_r = shifted_row_max(b_r, m_tied, limits, SITES.row_max, SITES.hidden_tiles)
            b_m_new = tl.maximum(b_m, b_r)
            b_m_plain = safe_maximum(b_m_plain, SHAPE.RANGES)
            b_base = safe_maximum(b_m_new, SHAPE.RANGES)
            b_p = exponential(b_s, b_m_plain[:, None], scalars.unit, FOLD)
            b_p *= rescaling(b_m_plain, b_base, scalars.unit, FOLD)[:, None]
        else:
            if SHIFTS:
                b_r = shifted_row_max(b_r, m_tied, limits, SITES.row_max, SITES.hidden_tiles)
            b_m_new = round_to(tl.maximum(b_m, b_r), SITES.statistics)
            b_base = safe_maximum(b_m_new, SHAPE.RANGES)
            b_p = exponential(b_s, b_base[:, None], scalars.unit, FOLD)
        b_alpha = rescaling(b_m, b_base, scalars.unit, FOLD)
        if SHAPE.FLOOR:
            b_f, b_least = least_row_sum(b_f, b_plain, m_tied, b_base, limits, scalars.unit, SITES)
        if SITES.backward_probabilities != FROM_FORWARD:
            b_sum = tl.sum(b_p, 1)
            if SHAPE.FLOOR:
                b_sum = tl.maximum(b_sum, b_least)
            b_l = round_to(b_alpha * b_l + b_sum, SITES.statistics)
        b_m = b_m_new
        # [BS, WIDTH_V]
        b_v = load_keys(keys.p_v, keys.strides_v, queries, start, keys.S, SHAPE.DV, SHAPE.WIDTH_V, SHAPE, MASKED)
        b_v = operand(b_v, SITES.inputs, DTYPE)
        if SHAPE.MMA_SUMS:
            b_weights, b_sum = rounded_and_summed(b_p)
        else:
            ONCE: tl.constexpr = SITES.probabilities_rounding == NEAREST and SITES.probabilities < LOW
            if SITES.divisor == ROUNDED and ONCE:
                b_p = round_block(b_p, SITES.probabilities)
            b_weights = weights(b_p, seed, queries.i_bh, queries.o_t, start, SITES, DTYPE)
            if SITES.divisor == ROUNDED:
                if not ONCE:
                    b_p = b_weights.to(tl.float32)
                b_sum = tl.sum(b_p, 1)
        if SITES.divisor == ROUNDED:
            if SHAPE.FLOOR:
                b_sum = tl.maximum(b_sum, b_least)
            b_d = round_to(b_alpha * b_d + b_sum, SITES.statistics)
        if COARSE:
            b_product = dot(b_weights, b_v, tl.zeros([BT, WIDTH_V], tl.float32))
            b_acc, b_exact = add_tile(b_acc, b_exact, b_alpha, b_product, SITES)
        else:
            b_acc = dot(b_weights, b_v, b_acc * b_alpha[:, None])
    return State(b_acc, b_exact, b_m, b_l, b_d, b_f)


@triton.jit
def forward_kernel(
    p_q,
    p_k,
    p_v,
    p_o,
    p_delta_o,
    p_saved,
    p_seed,
    p_sinks,
    p_key_ranges,
    p_padding,
    H,
    T,
    S,
    strides_q,
    strides_k,
    strides_v,
    scalars,
    limits,
    tile,
    SITES: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """O, the O for delta where it is not O itself, and L, or m and log2 l or 1 / d, of one block of rows."""
    DTYPE: tl.constexpr = p_q.dtype.element_ty
    BT: tl.constexpr = SHAPE.BT
    BS: tl.constexpr = SHAPE.BS
    DV: tl.constexpr = SHAPE.DV
    WIDTH_V: tl.constexpr = SHAPE.WIDTH_V
    blocks = tl.cdiv(T, BT)
    i_bh, i_t = place(blocks, SHAPE.HEADS)
    if SHAPE.CAUSAL or SHAPE.RANGES:
        i_t = blocks - 1 - i_t  # the rows with most columns first, so that the last programs to run are short
    row = i_t * BT
    o_t = row + tl.arange(0, BT)
    ranges, m_t = None, None
    if SHAPE.RANGES:
        ranges = load_ranges(p_key_ranges, p_padding, i_bh, H, row, T, S, BT, SHAPE.PADDED)
        m_t = (o_t < T) & (ranges.b_first < ranges.b_last)
        some_from, some_to = ranges.some_from, ranges.some_to
    # [BT, WIDTH]
    b_q = load_rows(p_q, strides_q, i_bh, H, row, T, BT, SHAPE.D, SHAPE.WIDTH, True, False, m_t)
    b_q = operand(b_q, SITES.inputs, DTYPE)
    # Rows of the whole output in order; the random bits of stochastic rounding belong to them.
    o_row = ((i_bh // H).to(tl.int64) * T + o_t) * H + i_bh % H
    b_words = 0
    if SITES.output_rounding == STOCHASTIC:
        # Drawn while the first blocks are on their way; the volatile move keeps the compiler from drawing them later.
        b_words = random_words(p_seed, o_row, _OUTPUT_STREAM, SHAPE)
        if not INTERPRETED:
            b_words = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [b_words], tl.uint32, is_pure=False, pack=1)
    seed = 0
    if SITES.probabilities_rounding == STOCHASTIC:
        seed = tl.load(p_seed)
    b_acc = tl.zeros([BT, WIDTH_V], tl.float32)
    b_exact = tl.zeros([BT, WIDTH_V], tl.float32)
    b_m = tl.full([BT], -float("inf"), tl.float32)
    b_l = tl.zeros([BT], tl.float32)
    b_d = tl.zeros([BT], tl.float32)
    b_f = tl.full([BT], -float("inf"), tl.float32)
    if p_sinks is not None:
        b_m, b_l = with_sink(p_sinks, i_bh % H, scalars, BT, SITES)
        b_d = b_l
    state = State(b_acc, b_exact, b_m, b_l, b_d, b_f)
    last = tl.minimum(row + BT, S) if SHAPE.CAUSAL else S
    begin = 0
    if SHAPE.RANGES:
        begin = some_from // (tile if SHAPE.TILED else BS) * (tile if SHAPE.TILED else BS)
        last = some_to
        S = last  # nobody sees what comes behind it
    queries = Queries(b_q, o_t, i_bh, H, ranges)
    keys = Keys(p_k, p_v, strides_k, strides_v, S)
    if SHAPE.TILED:
        for first in range(begin, last, tile):
            end = tl.minimum(first + tile, last)
            state = forward_tile(state, queries, keys, first, end, scalars, limits, seed, SITES, SHAPE, DTYPE)
    else:
        middle = tl.minimum(row + 1, S) // BS * BS if SHAPE.CAUSAL else S // BS * BS
        for MASKED in tl.static_range(0, 1 if SHAPE.ONE_LOOP else 2):
            state = forward_range(
                state,
                queries,
                keys,
                middle if MASKED else begin,
                middle,
                last if MASKED or SHAPE.ONE_LOOP else middle,
                scalars,
                limits,
                seed,
                SITES,
                SHAPE,
                MASKED == 1,
                DTYPE,
            )
    if SITES.hidden_tiles == VISITED:
        for _ in range(tl.cdiv(last, tile), tl.cdiv(S, tile)):
            state = hidden_tile(state, limits, scalars.unit, SITES, SHAPE.FLOOR)
    b_acc, b_exact, b_m, b_l, b_d, b_f = state
    if SHAPE.RANGES:
        m_none = b_m == -float("inf")  # rows that saw no key: O is 0, and P is with such an m
        b_l = tl.where(m_none, 1.0, b_l)
        b_d = tl.where(m_none, 1.0, b_d)
        b_m = tl.where(m_none, float("inf"), b_m)
    if SITES.saved_statistics == MAX_AND_SUM:
        p_row = p_saved + i_bh.to(tl.int64) * (2 * T) + o_t
        tl.store(p_row, b_m, mask=o_t < T)
        b_second = tl.div_rn(1.0, b_d) if SITES.backward_probabilities == FROM_FORWARD else tl.log2(b_l)
        tl.store(p_row + T, b_second, mask=o_t < T)
    else:
        b_lse = round_to(log_sum_exp(b_m, b_l, scalars.unit, SITES.exponent), SITES.logsumexp)
        tl.store(p_saved + i_bh.to(tl.int64) * T + o_t, b_lse, mask=o_t < T)
    if SITES.divisor != ROUNDED:
        b_d = b_l
    b_o = divide_rows(b_acc, b_d)
    if SITES.delta_output == LOW_BITS:
        b_rounded = round_block(b_o, SITES.output)
    else:
        b_rounded = round_output(b_o, SITES.output, SITES.output_rounding, b_words)
    store_rows(p_o, b_rounded, i_bh, row, T, H, tl.cast(T, tl.int64) * H * DV, H * DV, DV)
    if SITES.delta_output != OUTPUT_ITSELF:
        if SITES.tile_product != FP32 or SITES.accumulator != FP32:
            b_o = divide_rows(b_exact, b_d)
        if SITES.delta_output == LOW_BITS:
            b_delta_o = low_bits(b_o, b_rounded, SITES.output)
        else:
            if SITES.delta_rounding == STOCHASTIC:
                b_words = random_words(p_seed, o_row, _DELTA_STREAM, SHAPE)
            b_delta_o = round_output(b_o, SITES.delta_output, SITES.delta_rounding, b_words)
        store_rows(p_delta_o, b_delta_o, i_bh, row, T, H, tl.cast(T, tl.int64) * H * DV, H * DV, DV)


def launch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seed: Tensor,
    n: Numerics,
    blocks: Blocks,
    scale: float,
    causal: bool,
    softcap: float,
    sinks: Tensor | None,
    mask: Mask,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the forward kernel. ``n`` is concrete; see ``empty_outputs`` for what comes back."""
    (B, T, H, D), S = q.shape, k.shape[1]
    o, delta_o, saved = empty_outputs(q, v, n)
    sites = kernel_sites(n, (FORWARD,), scale, softcap, causal, inputs=stored_code(n.inputs, q.dtype))
    in_exponent = sites.exponent != S_IS_SCALED.value  # the scale: the kernel compares S'
    unit = log2_scale(scale) if in_exponent else 1.0
    # The cap and the tolerance are in units of S: divided by this they are in those of what the kernel compares.
    times = scale if in_exponent else 1.0
    ranges = mask.key_ranges(B, T, S, causal, q.device)
    tma = blocks.descriptors and takes_descriptor(k, v) and ranges is None
    # Presets that keep l sum it beside d, in an order that published runs fix.
    only_d = n.backward_probabilities == "forward" and n.probabilities == "bf16"
    mma_sums = only_d and (blocks.rows, blocks.columns, blocks.warps) == (64, 64, 4) and warpgroup_mma(q)
    if mma_sums:
        check_sums(q.device)
    forward_kernel[(B * H * triton.cdiv(T, blocks.rows),)](
        p_q=q,
        p_k=rows_source(k, blocks.columns, tma),
        p_v=rows_source(v, blocks.columns, tma),
        p_o=o,
        p_delta_o=delta_o,
        p_saved=saved,
        p_seed=seed,
        p_sinks=None if sinks is None else sinks.float().contiguous(),
        p_key_ranges=ranges and ranges.keys_of_queries,
        p_padding=ranges and ranges.padding,
        H=H,
        T=T,
        S=S,
        strides_q=Strides(*q.stride()),
        strides_k=Strides(*k.stride()),
        strides_v=Strides(*v.stride()),
        scalars=Scalars(scale, unit, softcap),
        limits=Limits(
            beta=n.row_max_beta,
            tolerance=n.row_max_tolerance / times,
            cap=n.row_max_cap / times * (unit if sites.exponent in (FMA.value, SEPARATE_MULTIPLY.value) else 1.0),
            floor=n.row_sum_floor,
        ),
        tile=n.tile_k or triton.cdiv(S, blocks.columns) * blocks.columns,
        SITES=sites,
        SHAPE=Shape(
            BT=blocks.rows,
            BS=blocks.columns,
            D=D,
            WIDTH=width(D),
            DV=v.shape[3],
            WIDTH_V=width(v.shape[3]),
            GROUP=H // k.shape[2],
            HEADS=blocks.heads,
            TMA=tma,
            CAUSAL=causal and ranges is None,
            SOFTCAP=softcap > 0,
            EVEN=S % blocks.columns == 0,
            ONE_LOOP=ranges is not None or (blocks.one_loop and (tma or S % blocks.columns == 0)),
            TILED=walks_tiles(n, blocks),
            FLOOR=n.row_sum_floor > 0,
            MMA_SUMS=mma_sums,
            RANGES=ranges is not None,
            PADDED=ranges is not None and ranges.padding is not None,
        ),
        num_warps=blocks.warps,
        num_stages=blocks.stages,
        enable_fp_fusion=FP_FUSION,
        # Key ranges need more registers: 128 spill nothing and leave as many programs an SM.
        maxnreg=128 if ranges is not None and blocks.registers == 112 else blocks.registers,
    )
    return o, delta_o, saved
