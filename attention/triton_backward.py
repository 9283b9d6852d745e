"""Backward kernels (Algorithm 2 of FlashAttention-2, arXiv 2307.08691) and their launches; sites as in ``flash_reference._backward_tile``.

No atomics: one kernel sums dK and dV of a block of columns over the rows, one sums dQ of a block of rows over the columns, so that
every element is summed by one program in one order. That costs two of seven products more than a joint kernel.

Legend: B batch, H heads, T queries, S keys, D head dim; BT rows and BS columns of a block; ``p_`` pointers, ``b_`` blocks on chip,
``o_`` offsets, ``m_`` masks.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.exponent import log2_scale
from attention.flash_blocks import Blocks
from attention.numerics import RESIDUALS, SITES, Numerics
from attention.rounding import round_to as round_tensor
from attention.triton_blocks import (
    block_scores,
    load_rows,
    load_statistics,
    place,
    rows_source,
    store_rows,
    takes_descriptor,
)
from attention.triton_numerics import (
    FP32,
    FUSED,
    LATER,
    dot,
    exponent_code,
    format_code,
    operand,
    probabilities,
    residual_unit,
    round_scores,
    round_to,
    stored_code,
)

ROWSUM_DO_O = tl.constexpr(SITES["delta"].choices.index("rowsum_do_o"))
ROWSUM_P_DP = tl.constexpr(SITES["delta"].choices.index("rowsum_p_dp"))
ROWSUM_P_DP_NORMALISED = tl.constexpr(SITES["delta"].choices.index("rowsum_p_dp_normalised"))
RECOMPUTED_O = tl.constexpr(SITES["delta"].choices.index("recomputed_o"))
LOADED = tl.constexpr(len(SITES["delta"].choices))
CENTRED_KEYS = tl.constexpr(SITES["row_residual"].choices.index("centred_keys"))
CORRECTED_ROWS = tl.constexpr(SITES["row_residual"].choices.index("corrected_rows"))


@triton.jit
def query_kernel(
    p_q, p_k, p_v, p_do, p_o, p_residual, p_saved, p_delta, p_centre, p_dq, H, T, S, stride_qb, stride_qt, stride_qh, stride_qd,
    stride_kb, stride_ks, stride_kh, stride_kd, stride_vb, stride_vs, stride_vh, stride_vd, stride_db, stride_dt,
    stride_dh, stride_dd, stride_gb, stride_gr, scale, unit, softcap, tile, INPUTS: tl.constexpr, SCORES: tl.constexpr,
    OUTPUT_GRADIENT: tl.constexpr, OUTPUT: tl.constexpr, RESIDUAL: tl.constexpr, DELTA: tl.constexpr,
    DELTA_SUM: tl.constexpr, PROBABILITIES: tl.constexpr, PROBABILITY_GRADIENTS: tl.constexpr,
    SCORE_GRADIENTS: tl.constexpr, ROW_RESIDUAL: tl.constexpr, GRADIENT_ACCUMULATOR: tl.constexpr,
    SOFTCAP: tl.constexpr, FOLD: tl.constexpr, APART: tl.constexpr, CAUSAL: tl.constexpr, TMA: tl.constexpr,
    HEADS: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """dQ of one block of rows and, for the key kernel, their delta = rowsum(dO * O).

    DELTA is one of ``DELTAS``. Those made from P take two launches: one that makes delta only, and one for dQ, with DELTA = LOADED.
    ROW_RESIDUAL is one of ``ROW_RESIDUALS``; CORRECTED_ROWS hands the corrected delta on. ``p_centre``: c of CENTRED_KEYS, [B, H, D].
    """
    FROM_P: tl.constexpr = DELTA == ROWSUM_P_DP or DELTA == ROWSUM_P_DP_NORMALISED
    ONLY_DELTA: tl.constexpr = FROM_P or DELTA == RECOMPUTED_O
    DTYPE: tl.constexpr = p_q.dtype.element_ty
    blocks = tl.cdiv(T, BT)
    i_bh, i_t = place(blocks, HEADS)
    if CAUSAL:
        i_t = blocks - 1 - i_t
    row = i_t * BT
    o_t = row + tl.arange(0, BT)
    p_row = i_bh.to(tl.int64) * T + o_t
    # [BT, D]
    b_q = load_rows(p_q, i_bh, H, row, T, stride_qb, stride_qt, stride_qh, stride_qd, BT, D, True, False)
    b_q = operand(b_q, INPUTS, DTYPE)
    b_do = load_rows(p_do, i_bh, H, row, T, stride_db, stride_dt, stride_dh, stride_dd, BT, D, True, False)
    b_do = operand(b_do, OUTPUT_GRADIENT, DTYPE)
    # [BT]
    b_m, b_log_l = load_statistics(p_saved, i_bh, o_t, T, False, APART)
    if DELTA == LOADED:
        b_delta = tl.load(p_delta + p_row, mask=o_t < T, other=0.0)
    elif DELTA == ROWSUM_DO_O:
        b_o = load_rows(p_o, i_bh, H, row, T, tl.cast(T, tl.int64) * H * D, H * D, D, 1, BT, D, True, False)
        b_o = b_o.to(tl.float32)
        if RESIDUAL:
            b_r = load_rows(p_residual, i_bh, H, row, T, tl.cast(T, tl.int64) * H * D, H * D, D, 1, BT, D, True, False)
            b_o += b_r.to(tl.float32) * residual_unit(b_o, OUTPUT, RESIDUAL, False)
        b_delta = round_to(tl.sum(b_do.to(tl.float32) * b_o, 1), DELTA_SUM)
        if ROW_RESIDUAL != CORRECTED_ROWS:
            tl.store(p_delta + p_row, b_delta, mask=o_t < T)
    else:
        b_delta = tl.zeros([BT], tl.float32)
    b_acc = tl.zeros([BT, D], tl.float32)
    b_part = tl.zeros([BT, D], tl.float32)
    b_pk = tl.zeros([BT, D], tl.float32)
    # [BT]: rowsum(P), and rowsum(dS) with dS as rounded for the product and before.
    b_row_sum = tl.zeros([BT], tl.float32)
    b_r = tl.zeros([BT], tl.float32)
    b_r_unrounded = tl.zeros([BT], tl.float32)
    last = tl.minimum(row + BT, S) if CAUSAL else S
    middle = tl.minimum(row + 1, S) // BS * BS if CAUSAL else S // BS * BS
    for MASKED in tl.static_range(2):
        for start in range(middle if MASKED else 0, last if MASKED else middle, BS):
            b_s, b_k = block_scores(
                b_q, p_k, i_bh, H, o_t, start, S, stride_kb, stride_ks, stride_kh, stride_kd, scale, softcap, INPUTS,
                SCORES, SOFTCAP, FOLD, CAUSAL, MASKED == 1, DTYPE, TMA, BT, BS, D,
            )  # fmt: skip
            b_v = load_rows(p_v, i_bh, H, start, S, stride_vb, stride_vs, stride_vh, stride_vd, BS, D, MASKED == 1, TMA)
            b_v = operand(b_v, INPUTS, DTYPE)
            b_p = probabilities(b_s, b_m[:, None], b_log_l[:, None], unit, FOLD, APART)
            if DELTA == RECOMPUTED_O:
                b_part = dot(b_p, b_v, b_part)
            else:
                b_dp = dot(b_do, tl.trans(b_v), tl.zeros([BT, BS], tl.float32))
                b_dp = round_to(b_dp, PROBABILITY_GRADIENTS)
                if ONLY_DELTA:
                    b_delta += tl.sum(b_p * b_dp, 1)
                    if DELTA == ROWSUM_P_DP_NORMALISED:
                        b_row_sum += tl.sum(b_p, 1)
                else:
                    b_ds = b_p * (b_dp - b_delta[:, None])
                    if SOFTCAP:
                        b_t = b_s / softcap
                        b_ds = tl.where(b_s > -float("inf"), b_ds * (1 - b_t * b_t), 0.0)
                    if ROW_RESIDUAL == CORRECTED_ROWS:
                        b_r_unrounded += tl.sum(b_ds, 1)
                        b_row_sum += tl.sum(b_p, 1)
                        b_pk = dot(operand(b_p, PROBABILITIES, DTYPE), b_k, b_pk)
                    b_ds = operand(b_ds, SCORE_GRADIENTS, DTYPE)
                    if ROW_RESIDUAL == CENTRED_KEYS or ROW_RESIDUAL == CORRECTED_ROWS:
                        b_r += tl.sum(b_ds.to(tl.float32), 1)
                    b_part = dot(b_ds, b_k, b_part)
                    if GRADIENT_ACCUMULATOR != FP32:
                        m_full = (start + BS) % tile == 0
                        b_sum = round_to(b_acc + scale * b_part, GRADIENT_ACCUMULATOR)
                        b_acc = tl.where(m_full, b_sum, b_acc)
                        b_part = tl.where(m_full, 0.0, b_part)
    # A row whose P is 0 throughout has sums of 0.
    b_row_sum = tl.where(b_row_sum == 0, 1.0, b_row_sum)
    if not ONLY_DELTA:
        b_dq = round_to(b_acc + scale * b_part, GRADIENT_ACCUMULATOR)
        if ROW_RESIDUAL == CENTRED_KEYS:
            b_c = tl.load(p_centre + i_bh.to(tl.int64) * D + tl.arange(0, D))
            b_dq = round_to(b_dq - scale * (b_r[:, None] * b_c[None, :]), GRADIENT_ACCUMULATOR)
        if ROW_RESIDUAL == CORRECTED_ROWS:
            b_share = tl.div_rn(b_r, b_row_sum)
            b_dq = round_to(b_dq - scale * (b_share[:, None] * b_pk), GRADIENT_ACCUMULATOR)
            b_delta = round_to(b_delta + tl.div_rn(b_r_unrounded, b_row_sum), DELTA_SUM)
            tl.store(p_delta + p_row, b_delta, mask=o_t < T)
        store_rows(p_dq, b_dq, i_bh, row, T, H, stride_gb, stride_gr, BT, D)
    else:
        if DELTA == RECOMPUTED_O:
            b_delta = tl.sum(b_do.to(tl.float32) * b_part, 1)
        elif DELTA == ROWSUM_P_DP_NORMALISED:
            b_delta = tl.div_rn(b_delta, b_row_sum)
        tl.store(p_delta + p_row, round_to(b_delta, DELTA_SUM), mask=o_t < T)


@triton.jit
def key_kernel(
    p_q, p_k, p_v, p_do, p_saved, p_delta, p_dk, p_dv, H, T, S, stride_qb, stride_qt, stride_qh, stride_qd, stride_kb,
    stride_ks, stride_kh, stride_kd, stride_vb, stride_vs, stride_vh, stride_vd, stride_db, stride_dt, stride_dh,
    stride_dd, stride_gb, stride_gr, scale, unit, softcap, tile, INPUTS: tl.constexpr, SCORES: tl.constexpr,
    PROBABILITIES: tl.constexpr, OUTPUT_GRADIENT: tl.constexpr, PROBABILITY_GRADIENTS: tl.constexpr,
    SCORE_GRADIENTS: tl.constexpr, GRADIENT_ACCUMULATOR: tl.constexpr, SOFTCAP: tl.constexpr, FOLD: tl.constexpr,
    APART: tl.constexpr, CAUSAL: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr, HEADS: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """dK and dV of one block of columns; scores are held transposed [BS, BT], so that they are left operands of both products."""
    DTYPE: tl.constexpr = p_k.dtype.element_ty
    blocks = tl.cdiv(S, BS)
    i_bh, i_s = place(blocks, HEADS)
    column = i_s * BS
    o_s = column + tl.arange(0, BS)
    # [BS, D]
    b_k = load_rows(p_k, i_bh, H, column, S, stride_kb, stride_ks, stride_kh, stride_kd, BS, D, True, False)
    b_v = load_rows(p_v, i_bh, H, column, S, stride_vb, stride_vs, stride_vh, stride_vd, BS, D, True, False)
    b_k, b_v = operand(b_k, INPUTS, DTYPE), operand(b_v, INPUTS, DTYPE)
    b_dk = tl.zeros([BS, D], tl.float32)
    b_dv = tl.zeros([BS, D], tl.float32)
    b_dk_part = tl.zeros([BS, D], tl.float32)
    b_dv_part = tl.zeros([BS, D], tl.float32)
    # Rows before ``first`` see none of these columns; from ``middle`` on, all of them.
    first = column // BT * BT if CAUSAL else 0
    middle = tl.cdiv(column + BS - 1, BT) * BT if CAUSAL else 0
    for MASKED in tl.static_range(1, -1, -1):
        for start in range(first if MASKED else middle, tl.minimum(middle, T) if MASKED else T, BT):
            o_t = start + tl.arange(0, BT)
            p_row = i_bh.to(tl.int64) * T + o_t
            # [BT, D]
            b_q = load_rows(p_q, i_bh, H, start, T, stride_qb, stride_qt, stride_qh, stride_qd, BT, D, not EVEN, TMA)
            b_q = operand(b_q, INPUTS, DTYPE)
            b_do = load_rows(p_do, i_bh, H, start, T, stride_db, stride_dt, stride_dh, stride_dd, BT, D, not EVEN, TMA)
            b_do = operand(b_do, OUTPUT_GRADIENT, DTYPE)
            # [BT]
            b_m, b_log_l = load_statistics(p_saved, i_bh, o_t, T, EVEN, APART)
            if EVEN:
                b_delta = tl.load(p_delta + p_row)
            else:
                b_delta = tl.load(p_delta + p_row, mask=o_t < T, other=0.0)
            b_s = dot(b_k, tl.trans(b_q), tl.zeros([BS, BT], tl.float32))
            m_s = o_s[:, None] <= o_t[None, :]
            b_s = round_scores(b_s, m_s, scale, softcap, SCORES, SOFTCAP, FOLD, MASKED == 1)
            b_p = probabilities(b_s, b_m[None, :], b_log_l[None, :], unit, FOLD, APART)
            b_dv_part = dot(operand(b_p, PROBABILITIES, DTYPE), b_do, b_dv_part)
            b_dp = dot(b_v, tl.trans(b_do), tl.zeros([BS, BT], tl.float32))
            b_ds = b_p * (round_to(b_dp, PROBABILITY_GRADIENTS) - b_delta[None, :])
            if SOFTCAP:
                b_t = b_s / softcap
                b_ds = tl.where(b_s > -float("inf"), b_ds * (1 - b_t * b_t), 0.0)
            b_dk_part = dot(operand(b_ds, SCORE_GRADIENTS, DTYPE), b_q, b_dk_part)
            if GRADIENT_ACCUMULATOR != FP32:
                m_full = (start + BT) % tile == 0
                b_dk = tl.where(m_full, round_to(b_dk + scale * b_dk_part, GRADIENT_ACCUMULATOR), b_dk)
                b_dv = tl.where(m_full, round_to(b_dv + b_dv_part, GRADIENT_ACCUMULATOR), b_dv)
                b_dk_part = tl.where(m_full, 0.0, b_dk_part)
                b_dv_part = tl.where(m_full, 0.0, b_dv_part)
    b_dk = round_to(b_dk + scale * b_dk_part, GRADIENT_ACCUMULATOR)
    b_dv = round_to(b_dv + b_dv_part, GRADIENT_ACCUMULATOR)
    store_rows(p_dk, b_dk, i_bh, column, S, H, stride_gb, stride_gr, BS, D)
    store_rows(p_dv, b_dv, i_bh, column, S, H, stride_gb, stride_gr, BS, D)


def empty_gradients(q: Tensor, k: Tensor) -> Tensor:
    """Room for dQ, dK and dV, [B, max(T, S), 3 H, D] in q's dtype: the layout of a fused projection, whose gradient then needs no copy."""
    B, T, H, D = q.shape
    return torch.empty((B, max(T, k.shape[1]), 3 * H, D), device=q.device, dtype=q.dtype)


def apart(gradients: Tensor, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """dQ, dK and dV from the one tensor of ``empty_gradients``."""
    # Split by a list, and cut where lengths differ only: torch.compile then sees that split and joined they are the whole again.
    parts = gradients.split([q.shape[2]] * 3, dim=2)
    return [g if g.shape[1] == x.shape[1] else g[:, : x.shape[1]] for g, x in zip(parts, (q, k, v), strict=True)]


def launch_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    counts: Tensor,
    saved: Tensor,
    n: Numerics,
    blocks: tuple[Blocks, Blocks],
    scale: float,
    causal: bool,
    softcap: float,
) -> Tensor:
    """dQ, dK, dV side by side (``empty_gradients``).

    ``n`` is concrete; ``o`` and ``counts`` are ``tiles.delta_operands``; ``saved`` is L, or m and log2 l, as the forward kernel left
    them; ``blocks`` are those of dK/dV and of dQ.
    """
    (B, T, H, D), S = q.shape, k.shape[1]
    of_keys, of_queries = blocks
    fold, apart = exponent_code(n, scale, softcap), n.saved_statistics == "max_and_sum"
    if fold == LATER.value and not apart:
        # The rounding of L, which comes first, is as large and common to a row, folded or subtracted.
        fold = FUSED.value
    delta = torch.empty((B, H, T), device=q.device, dtype=torch.float32)
    centred = n.row_residual == "centred_keys"
    centre = round_tensor(k.float(), n.inputs).mean(dim=1).contiguous() if centred else delta
    gradients = empty_gradients(q, k)
    dq, dk, dv = gradients.split(H, dim=2)
    by_columns = of_queries.descriptors and takes_descriptor(k, v)
    by_rows = of_keys.descriptors and takes_descriptor(q, do)
    strides = (*q.stride(), *k.stride(), *v.stride(), *do.stride(), *gradients.stride()[:2])
    shared: dict[str, Any] = {
        "scale": scale,
        "unit": log2_scale(scale) if fold else 1.0,
        "softcap": softcap,
        "INPUTS": stored_code(n.inputs, q.dtype),
        "SCORES": format_code(n.scores),
        "OUTPUT_GRADIENT": stored_code(n.output_gradient, do.dtype),
        "PROBABILITIES": format_code(n.probabilities),
        "PROBABILITY_GRADIENTS": format_code(n.probability_gradients),
        "SCORE_GRADIENTS": format_code(n.score_gradients),
        "GRADIENT_ACCUMULATOR": format_code(n.gradient_accumulator),
        "SOFTCAP": softcap > 0,
        "FOLD": fold,
        "APART": apart,
        "CAUSAL": causal,
        "D": D,
    }

    def queries(kind: int) -> None:
        query_kernel[(B * H * triton.cdiv(T, of_queries.rows),)](
            q,
            rows_source(k, of_queries.columns, by_columns),
            rows_source(v, of_queries.columns, by_columns),
            do,
            o,
            counts,
            saved,
            delta,
            centre,
            dq,
            H,
            T,
            S,
            *strides,
            tile=n.tile_k or 2**30,
            OUTPUT=format_code(n.output),
            RESIDUAL=RESIDUALS[n.delta_output] if counts.numel() else 0,
            DELTA=kind,
            DELTA_SUM=format_code(n.delta_sum),
            ROW_RESIDUAL=SITES["row_residual"].choices.index(n.row_residual),
            TMA=by_columns,
            HEADS=of_queries.heads,
            BT=of_queries.rows,
            BS=of_queries.columns,
            num_warps=of_queries.warps,
            num_stages=of_queries.stages,
            maxnreg=of_queries.registers,
            **shared,
        )

    # The dQ kernel comes first: it has dO of its rows on chip and writes delta for the other.
    queries(SITES["delta"].choices.index(n.delta))
    if n.delta != "rowsum_do_o":
        queries(LOADED.value)
    key_kernel[(B * H * triton.cdiv(S, of_keys.columns),)](
        rows_source(q, of_keys.rows, by_rows),
        k,
        v,
        rows_source(do, of_keys.rows, by_rows),
        saved,
        delta,
        dk,
        dv,
        H,
        T,
        S,
        *strides,
        tile=n.tile_q or 2**30,
        TMA=by_rows,
        HEADS=of_keys.heads,
        BT=of_keys.rows,
        BS=of_keys.columns,
        num_warps=of_keys.warps,
        num_stages=of_keys.stages,
        maxnreg=of_keys.registers,
        EVEN=T % of_keys.rows == 0,
        **shared,
    )
    return gradients
