"""Forward kernel (Algorithm 1 of FlashAttention-2, arXiv 2307.08691) and its launch; sites as in ``flash_reference._forward_rows``.

Legend: B batch, H heads, T queries, S keys, D head dim; BT rows and BS columns of a block; ``p_`` pointers, ``b_`` blocks on chip,
``o_`` offsets, ``m_`` masks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.exponent import log2_scale
from attention.flash_blocks import Blocks, boundaries_matter, walks_tiles
from attention.numerics import RESIDUALS, ROUNDINGS, SITES, Numerics
from attention.rounding import storage_dtype
from attention.tiles import DELTA_STREAM, OUTPUT_STREAM, PROBABILITIES_STREAM, kept_apart, saved_shape
from attention.triton_blocks import block_scores, load_rows, place, rows_source, store_rows, takes_descriptor, visible
from attention.triton_numerics import (
    FP32,
    FUSED,
    INTERPRETED,
    LARGEST,
    PLAIN,
    SCALED,
    SCALED_DOWN,
    STABILISED,
    STABILISED_SAFE,
    STOCHASTIC,
    UNFUSED,
    divide_rows,
    dot,
    exponent_code,
    exponential,
    format_code,
    hidden_row_max,
    least_row_sum,
    log_sum_exp,
    operand,
    random_words,
    rescaling,
    residual,
    round_output,
    round_to,
    row_normaliser,
    several_close,
    shifted_row_max,
    stored_code,
    weights,
)

_OUTPUT_STREAM, _DELTA_STREAM = tl.constexpr(OUTPUT_STREAM), tl.constexpr(DELTA_STREAM)
_PROBABILITIES_STREAM = tl.constexpr(PROBABILITIES_STREAM)


@triton.jit
def add_tile(
    b_acc, b_exact, b_alpha, b_product, TILE_PRODUCT: tl.constexpr, ACCUMULATOR: tl.constexpr, EXACT: tl.constexpr
):
    """O_bar rescaled by alpha plus one tile's P_bar V [BT, D], each rounded; EXACT: the same in FP32 beside it."""
    b_scaled = round_to(b_alpha[:, None] * b_acc, ACCUMULATOR)
    b_acc = round_to(b_scaled + round_to(b_product, TILE_PRODUCT), ACCUMULATOR)
    if EXACT:
        b_exact = b_alpha[:, None] * b_exact + b_product
    return b_acc, b_exact


@triton.jit
def forward_range(
    b_acc, b_exact, b_m, b_l, b_d, b_f, b_q, p_k, p_v, i_bh, H, o_t, first, middle, last, S, stride_kb, stride_ks, stride_kh,
    stride_kd, stride_vb, stride_vs, stride_vh, stride_vd, scale, unit, softcap, beta, tolerance, cap, floor, seed,
    INPUTS: tl.constexpr, SCORES: tl.constexpr, STATISTICS: tl.constexpr, PROBABILITIES: tl.constexpr,
    PROBABILITIES_ROUNDING: tl.constexpr, ROUNDED_SUM: tl.constexpr, TF32X3: tl.constexpr, TILE_PRODUCT: tl.constexpr,
    ACCUMULATOR: tl.constexpr, EXACT: tl.constexpr, ROW_MAX: tl.constexpr, FLOOR: tl.constexpr, VISITED: tl.constexpr,
    SOFTCAP: tl.constexpr, FOLD: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, ONE_LOOP: tl.constexpr,
    EVEN: tl.constexpr, DTYPE: tl.constexpr, TMA: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Algorithm 1 over the columns [first, last), one block at a time, where a block is a tile of ``Numerics``.

    Columns may be hidden in all blocks where MASKED, and where ONE_LOOP in those from ``middle`` on.
    """
    SHIFTS: tl.constexpr = ROW_MAX == STABILISED or ROW_MAX == STABILISED_SAFE
    for start in range(first, last, BS):
        b_s, _ = block_scores(
            b_q, p_k, i_bh, H, o_t, start, S, stride_kb, stride_ks, stride_kh, stride_kd, scale, softcap, INPUTS,
            SCORES, SOFTCAP, FOLD, CAUSAL, MASKED, DTYPE, TMA, BT, BS, D,
        )  # fmt: skip
        if ONE_LOOP:
            # Few blocks hide columns: a branch costs less than the start of a second loop.
            if start >= middle:
                b_s = tl.where(visible(o_t, start, S, CAUSAL, EVEN, BS), b_s, -float("inf"))
        b_top = tl.max(b_s, 1)
        b_r = row_normaliser(b_top, unit, FOLD)
        b_plain = b_r
        m_tied = False
        if ROW_MAX != PLAIN:
            m_tied = several_close(b_s, b_top, tolerance)
        if SHIFTS and FOLD != SCALED:
            # The exponentials need not wait for the count of ties: a factor a row makes up for the shift.
            b_m_plain = tl.maximum(b_m, b_r)
            b_r = hidden_row_max(shifted_row_max(b_r, m_tied, beta, cap, ROW_MAX), ROW_MAX, VISITED)
            b_m_new = tl.maximum(b_m, b_r)
            b_p = exponential(b_s, b_m_plain[:, None], unit, FOLD) * rescaling(b_m_plain, b_m_new, unit, FOLD)[:, None]
        else:
            if SHIFTS:
                b_r = hidden_row_max(shifted_row_max(b_r, m_tied, beta, cap, ROW_MAX), ROW_MAX, VISITED)
            b_m_new = round_to(tl.maximum(b_m, b_r), STATISTICS)
            b_p = exponential(b_s, b_m_new[:, None], unit, FOLD)
        b_alpha = rescaling(b_m, b_m_new, unit, FOLD)
        b_sum = tl.sum(b_p, 1)
        if FLOOR:
            b_f, b_least = least_row_sum(
                b_f, b_plain, m_tied, b_m_new, floor, beta, cap, unit, ROW_MAX, STATISTICS, VISITED, FOLD
            )
            b_sum = tl.maximum(b_sum, b_least)
        b_l = round_to(b_alpha * b_l + b_sum, STATISTICS)
        b_m = b_m_new
        # [BS, D]
        b_v = load_rows(p_v, i_bh, H, start, S, stride_vb, stride_vs, stride_vh, stride_vd, BS, D, MASKED, TMA)
        b_v = operand(b_v, INPUTS, DTYPE)
        b_p = weights(
            b_p, seed, i_bh, o_t, start, PROBABILITIES, PROBABILITIES_ROUNDING, _PROBABILITIES_STREAM, DTYPE, BT, BS
        )
        if ROUNDED_SUM:
            b_sum = tl.sum(b_p.to(tl.float32), 1)
            if FLOOR:
                b_sum = tl.maximum(b_sum, b_least)
            b_d = round_to(b_alpha * b_d + b_sum, STATISTICS)
        if TILE_PRODUCT == FP32 and ACCUMULATOR == FP32:
            b_acc = dot(b_p, b_v, b_acc * b_alpha[:, None], TF32X3)
        else:
            b_product = dot(b_p, b_v, tl.zeros([BT, D], tl.float32), TF32X3)
            b_acc, b_exact = add_tile(b_acc, b_exact, b_alpha, b_product, TILE_PRODUCT, ACCUMULATOR, EXACT)
    return b_acc, b_exact, b_m, b_l, b_d, b_f


@triton.jit
def forward_tile(
    b_acc, b_exact, b_m, b_l, b_d, b_f, b_q, p_k, p_v, i_bh, H, o_t, first, last, S, stride_kb, stride_ks, stride_kh,
    stride_kd, stride_vb, stride_vs, stride_vh, stride_vd, scale, unit, softcap, beta, tolerance, cap, floor, seed,
    INPUTS: tl.constexpr, SCORES: tl.constexpr, STATISTICS: tl.constexpr, PROBABILITIES: tl.constexpr, PROBABILITIES_ROUNDING: tl.constexpr,
    ROUNDED_SUM: tl.constexpr, TF32X3: tl.constexpr, TILE_PRODUCT: tl.constexpr, ACCUMULATOR: tl.constexpr, EXACT: tl.constexpr,
    ROW_MAX: tl.constexpr, FLOOR: tl.constexpr, VISITED: tl.constexpr, SOFTCAP: tl.constexpr, FOLD: tl.constexpr,
    CAUSAL: tl.constexpr, DTYPE: tl.constexpr, TMA: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Algorithm 1 for one tile [first, last) larger than a block: first its row maximum and ties, then its product in FP32."""
    b_top = tl.full([BT], -float("inf"), tl.float32)
    for start in range(first, last, BS):
        b_s, _ = block_scores(
            b_q, p_k, i_bh, H, o_t, start, S, stride_kb, stride_ks, stride_kh, stride_kd, scale, softcap, INPUTS,
            SCORES, SOFTCAP, FOLD, CAUSAL, True, DTYPE, TMA, BT, BS, D,
        )  # fmt: skip
        b_top = tl.maximum(b_top, tl.max(b_s, 1))
    b_r = row_normaliser(b_top, unit, FOLD)
    b_plain = b_r
    m_tied = False
    if ROW_MAX != PLAIN:
        b_count = tl.zeros([BT], tl.int32)
        for start in range(first, last, BS):
            b_s, _ = block_scores(
                b_q, p_k, i_bh, H, o_t, start, S, stride_kb, stride_ks, stride_kh, stride_kd, scale, softcap, INPUTS,
                SCORES, SOFTCAP, FOLD, CAUSAL, True, DTYPE, TMA, BT, BS, D,
            )  # fmt: skip
            b_count += tl.sum((b_s >= (b_top - tolerance)[:, None]).to(tl.int32), 1)
        m_tied = b_count > 1
    if ROW_MAX == STABILISED or ROW_MAX == STABILISED_SAFE:
        b_r = hidden_row_max(shifted_row_max(b_r, m_tied, beta, cap, ROW_MAX), ROW_MAX, VISITED)
    b_m_new = round_to(tl.maximum(b_m, b_r), STATISTICS)
    b_alpha = rescaling(b_m, b_m_new, unit, FOLD)
    b_sum = tl.zeros([BT], tl.float32)
    b_rounded_sum = tl.zeros([BT], tl.float32)
    b_product = tl.zeros([BT, D], tl.float32)
    for start in range(first, last, BS):
        b_s, _ = block_scores(
            b_q, p_k, i_bh, H, o_t, start, S, stride_kb, stride_ks, stride_kh, stride_kd, scale, softcap, INPUTS,
            SCORES, SOFTCAP, FOLD, CAUSAL, True, DTYPE, TMA, BT, BS, D,
        )  # fmt: skip
        b_p = exponential(b_s, b_m_new[:, None], unit, FOLD)
        b_sum += tl.sum(b_p, 1)
        b_v = load_rows(p_v, i_bh, H, start, S, stride_vb, stride_vs, stride_vh, stride_vd, BS, D, True, TMA)
        b_v = operand(b_v, INPUTS, DTYPE)
        b_p = weights(
            b_p, seed, i_bh, o_t, start, PROBABILITIES, PROBABILITIES_ROUNDING, _PROBABILITIES_STREAM, DTYPE, BT, BS
        )
        if ROUNDED_SUM:
            b_rounded_sum += tl.sum(b_p.to(tl.float32), 1)
        b_product = dot(b_p, b_v, b_product, TF32X3)
    if FLOOR:
        b_f, b_least = least_row_sum(
            b_f, b_plain, m_tied, b_m_new, floor, beta, cap, unit, ROW_MAX, STATISTICS, VISITED, FOLD
        )
        b_sum = tl.maximum(b_sum, b_least)
        b_rounded_sum = tl.maximum(b_rounded_sum, b_least)
    if ROUNDED_SUM:
        b_d = round_to(b_alpha * b_d + b_rounded_sum, STATISTICS)
    b_l = round_to(b_alpha * b_l + b_sum, STATISTICS)
    b_acc, b_exact = add_tile(b_acc, b_exact, b_alpha, b_product, TILE_PRODUCT, ACCUMULATOR, EXACT)
    return b_acc, b_exact, b_m_new, b_l, b_d, b_f


@triton.jit
def hidden_tile(
    b_acc, b_exact, b_m, b_l, b_d, b_f, floor, unit, STATISTICS: tl.constexpr, ACCUMULATOR: tl.constexpr,
    ROW_MAX: tl.constexpr, FLOOR: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """Algorithm 1 for one tile that the mask hides from all rows of the block, where such tiles are visited: P_bar is 0."""
    b_m_new = b_m
    if ROW_MAX == STABILISED:
        b_m_new = tl.maximum(b_m, 0.0)
    if ROW_MAX == SCALED_DOWN:
        b_f = tl.maximum(b_f, 0.0)
    b_alpha = rescaling(b_m, b_m_new, unit, FOLD)
    b_least = tl.zeros(b_m.shape, tl.float32)
    if FLOOR:
        b_least += floor
        if ROW_MAX == SCALED_DOWN:
            b_least *= tl.minimum(rescaling(b_f, b_m_new, unit, FOLD), LARGEST)
    b_l = round_to(b_alpha * b_l + b_least, STATISTICS)
    b_d = round_to(b_alpha * b_d + b_least, STATISTICS)
    b_acc = round_to(b_alpha[:, None] * b_acc, ACCUMULATOR)
    b_exact = b_alpha[:, None] * b_exact
    return b_acc, b_exact, b_m_new, b_l, b_d, b_f


@triton.jit
def forward_kernel(
    p_q, p_k, p_v, p_o, p_delta_o, p_saved, p_seed, H, T, S, stride_qb, stride_qt, stride_qh, stride_qd, stride_kb,
    stride_ks, stride_kh, stride_kd, stride_vb, stride_vs, stride_vh, stride_vd, scale, unit, softcap, beta, tolerance,
    cap, floor, tile, INPUTS: tl.constexpr, SCORES: tl.constexpr, STATISTICS: tl.constexpr, LOGSUMEXP: tl.constexpr,
    APART: tl.constexpr, PROBABILITIES: tl.constexpr, PROBABILITIES_ROUNDING: tl.constexpr, ROUNDED_SUM: tl.constexpr,
    TF32X3: tl.constexpr, TILE_PRODUCT: tl.constexpr, ACCUMULATOR: tl.constexpr, OUTPUT: tl.constexpr,
    OUTPUT_ROUNDING: tl.constexpr,
    DELTA_OUTPUT: tl.constexpr, DELTA_ROUNDING: tl.constexpr, KEEP: tl.constexpr, RESIDUAL: tl.constexpr,
    ROW_MAX: tl.constexpr, FLOOR: tl.constexpr, VISITED: tl.constexpr, SOFTCAP: tl.constexpr, FOLD: tl.constexpr,
    CAUSAL: tl.constexpr, TILED: tl.constexpr, ONE_LOOP: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr,
    HEADS: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """O, the O for delta where it is KEEPt apart, and L, or APART m and log2 l, of one block of rows.

    TILED: a tile of ``Numerics`` is many blocks.
    """
    DTYPE: tl.constexpr = p_q.dtype.element_ty
    COARSE: tl.constexpr = TILE_PRODUCT != FP32 or ACCUMULATOR != FP32
    blocks = tl.cdiv(T, BT)
    i_bh, i_t = place(blocks, HEADS)
    if CAUSAL:
        i_t = blocks - 1 - i_t  # the rows with most columns first, so that the last programs to run are short
    row = i_t * BT
    o_t = row + tl.arange(0, BT)
    # [BT, D]
    b_q = load_rows(p_q, i_bh, H, row, T, stride_qb, stride_qt, stride_qh, stride_qd, BT, D, True, False)
    b_q = operand(b_q, INPUTS, DTYPE)
    # Rows of the whole output in order; the random bits of stochastic rounding belong to them.
    o_row = ((i_bh // H).to(tl.int64) * T + o_t) * H + i_bh % H
    b_words = 0
    if OUTPUT_ROUNDING == STOCHASTIC:
        # Drawn while the first blocks are on their way; the volatile move keeps the compiler from drawing them later.
        b_words = random_words(p_seed, o_row, _OUTPUT_STREAM, D)
        if not INTERPRETED:
            b_words = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [b_words], tl.uint32, is_pure=False, pack=1)
    seed = 0
    if PROBABILITIES_ROUNDING == STOCHASTIC:
        seed = tl.load(p_seed)
    b_acc = tl.zeros([BT, D], tl.float32)
    b_exact = tl.zeros([BT, D], tl.float32)
    b_m = tl.full([BT], -float("inf"), tl.float32)
    b_l = tl.zeros([BT], tl.float32)
    b_d = tl.zeros([BT], tl.float32)
    b_f = tl.full([BT], -float("inf"), tl.float32)
    last = tl.minimum(row + BT, S) if CAUSAL else S
    if TILED:
        for first in range(0, last, tile):
            b_acc, b_exact, b_m, b_l, b_d, b_f = forward_tile(
                b_acc, b_exact, b_m, b_l, b_d, b_f, b_q, p_k, p_v, i_bh, H, o_t, first, tl.minimum(first + tile, last), S,
                stride_kb, stride_ks, stride_kh, stride_kd, stride_vb, stride_vs, stride_vh, stride_vd, scale, unit,
                softcap, beta, tolerance, cap, floor, seed, INPUTS, SCORES, STATISTICS, PROBABILITIES,
                PROBABILITIES_ROUNDING, ROUNDED_SUM, TF32X3, TILE_PRODUCT, ACCUMULATOR, COARSE and KEEP, ROW_MAX, FLOOR,
                VISITED, SOFTCAP, FOLD, CAUSAL, DTYPE, TMA, BT, BS, D,
            )  # fmt: skip
    else:
        middle = tl.minimum(row + 1, S) // BS * BS if CAUSAL else S // BS * BS
        for MASKED in tl.static_range(0, 1 if ONE_LOOP else 2):
            b_acc, b_exact, b_m, b_l, b_d, b_f = forward_range(
                b_acc, b_exact, b_m, b_l, b_d, b_f, b_q, p_k, p_v, i_bh, H, o_t, middle if MASKED else 0, middle,
                last if MASKED or ONE_LOOP else middle, S, stride_kb, stride_ks, stride_kh, stride_kd, stride_vb,
                stride_vs, stride_vh, stride_vd, scale, unit, softcap, beta, tolerance, cap, floor, seed, INPUTS, SCORES,
                STATISTICS, PROBABILITIES, PROBABILITIES_ROUNDING, ROUNDED_SUM, TF32X3, TILE_PRODUCT, ACCUMULATOR,
                COARSE and KEEP, ROW_MAX, FLOOR, VISITED, SOFTCAP, FOLD, CAUSAL, MASKED == 1, ONE_LOOP, EVEN, DTYPE, TMA, BT, BS, D,
            )  # fmt: skip
    if VISITED:
        for _ in range(tl.cdiv(last, tile), tl.cdiv(S, tile)):
            b_acc, b_exact, b_m, b_l, b_d, b_f = hidden_tile(
                b_acc, b_exact, b_m, b_l, b_d, b_f, floor, unit, STATISTICS, ACCUMULATOR, ROW_MAX, FLOOR, FOLD
            )
    if APART:
        p_row = p_saved + i_bh.to(tl.int64) * (2 * T) + o_t
        tl.store(p_row, b_m, mask=o_t < T)
        tl.store(p_row + T, tl.log2(b_l), mask=o_t < T)
    else:
        b_lse = round_to(log_sum_exp(b_m, b_l, unit, FOLD), LOGSUMEXP)
        tl.store(p_saved + i_bh.to(tl.int64) * T + o_t, b_lse, mask=o_t < T)
    if not ROUNDED_SUM:
        b_d = b_l
    b_o = divide_rows(b_acc, b_d)
    b_rounded = round_output(b_o, OUTPUT, OUTPUT_ROUNDING, b_words, BT, D)
    store_rows(p_o, b_rounded, i_bh, row, T, H, tl.cast(T, tl.int64) * H * D, H * D, BT, D)
    if KEEP:
        if COARSE:
            b_o = divide_rows(b_exact, b_d)
        if RESIDUAL:
            b_delta_o = residual(b_o, b_rounded, OUTPUT, RESIDUAL)
        else:
            if DELTA_ROUNDING == STOCHASTIC:
                b_words = random_words(p_seed, o_row, _DELTA_STREAM, D)
            b_delta_o = round_output(b_o, DELTA_OUTPUT, DELTA_ROUNDING, b_words, BT, D)
        store_rows(p_delta_o, b_delta_o, i_bh, row, T, H, tl.cast(T, tl.int64) * H * D, H * D, BT, D)


def empty_outputs(q: Tensor, n: Numerics) -> tuple[Tensor, Tensor, Tensor]:
    """O and the O for delta [B, T, H, D] (the latter empty where it is O itself), and L [B, H, T] or m and log2 l [B, H, 2, T],
    float32, all unwritten."""
    o = torch.empty(q.shape, device=q.device, dtype=storage_dtype(n.output, q.dtype))
    keep = kept_apart(n)
    delta_dtype = storage_dtype(n.delta_output, q.dtype) if keep else q.dtype
    delta_o = torch.empty(q.shape if keep else 0, device=q.device, dtype=delta_dtype)
    return o, delta_o, torch.empty(saved_shape(q, n), device=q.device, dtype=torch.float32)


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
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the forward kernel. ``n`` is concrete; see ``empty_outputs`` for what comes back."""
    (B, T, H, D), S = q.shape, k.shape[1]
    o, delta_o, saved = empty_outputs(q, n)
    residual_bits = RESIDUALS.get(n.delta_output, 0)
    fold = exponent_code(n, scale, softcap)
    unit = log2_scale(scale) if fold else 1.0
    # S is so many times what the kernel compares; m counts as that does, or FUSED and UNFUSED in log2.
    times = scale if fold else 1.0
    tma = blocks.descriptors and takes_descriptor(k, v)
    forward_kernel[(B * H * triton.cdiv(T, blocks.rows),)](
        q,
        rows_source(k, blocks.columns, tma),
        rows_source(v, blocks.columns, tma),
        o,
        delta_o,
        saved,
        seed,
        H,
        T,
        S,
        *q.stride(),
        *k.stride(),
        *v.stride(),
        scale=scale,
        unit=unit,
        softcap=softcap,
        beta=n.row_max_beta,
        tolerance=n.row_max_tolerance / times,
        cap=n.row_max_cap / times * (unit if fold in (FUSED.value, UNFUSED.value) else 1.0),
        floor=n.row_sum_floor,
        tile=n.tile_k or triton.cdiv(S, blocks.columns) * blocks.columns,
        INPUTS=stored_code(n.inputs, q.dtype),
        SCORES=format_code(n.scores),
        STATISTICS=format_code(n.statistics),
        LOGSUMEXP=format_code(n.logsumexp),
        APART=n.saved_statistics == "max_and_sum",
        PROBABILITIES=format_code(n.probabilities),
        PROBABILITIES_ROUNDING=ROUNDINGS.index(n.probabilities_rounding),
        ROUNDED_SUM=n.divisor == "rounded",
        TF32X3=n.products == "tf32x3" and n.probabilities == "fp32",
        TILE_PRODUCT=format_code(n.tile_product),
        ACCUMULATOR=format_code(n.accumulator),
        OUTPUT=format_code(n.output),
        OUTPUT_ROUNDING=ROUNDINGS.index(n.output_rounding),
        DELTA_OUTPUT=format_code(n.delta_output) if delta_o.numel() and not residual_bits else FP32.value,
        DELTA_ROUNDING=ROUNDINGS.index(n.delta_rounding),
        KEEP=delta_o.numel() > 0,
        RESIDUAL=residual_bits,
        ROW_MAX=SITES["row_max"].choices.index(n.row_max),
        FLOOR=n.row_sum_floor > 0,
        VISITED=causal and n.hidden_tiles == "visited" and boundaries_matter(n),
        SOFTCAP=softcap > 0,
        FOLD=fold,
        CAUSAL=causal,
        TILED=walks_tiles(n, blocks),
        ONE_LOOP=blocks.one_loop and (tma or S % blocks.columns == 0),
        EVEN=S % blocks.columns == 0,
        TMA=tma,
        HEADS=blocks.heads,
        BT=blocks.rows,
        BS=blocks.columns,
        D=D,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
        maxnreg=blocks.registers,
    )
    return o, delta_o, saved
