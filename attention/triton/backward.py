"""Backward kernels (Algorithm 2 of FlashAttention-2, arXiv 2307.08691) and their launches; sites as in ``flash._backward_tile``.

No atomics: one kernel sums dK and dV of a block of columns over the rows, one sums dQ of a block of rows over the columns, so that
every element is summed by one program in one order. That costs two of seven products more than a joint kernel.

Legend: B batch, H heads, T queries, S keys, D head dim; BT rows and BS columns of a block; ``p_`` pointers, ``b_`` blocks on chip,
``o_`` offsets, ``m_`` masks.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..mask import KeyRanges, Mask
from ..numerics import BACKWARD, DELTA, Numerics
from ..operators import empty_sinks
from ..reference.dose import NOISE_COLUMNS, delta_errors, with_zero_sum_noise
from ..reference.exponent import log2_scale
from ..reference.tiles import o_for_delta
from ..rounding import FORMAT_OF
from ..rounding import round_to as round_tensor
from .block_sizes import Blocks, backward_blocks, width
from .codes import (
    ALL_ROWS,
    CENTERED_KEYS,
    CORRECTED_ROWS,
    FMA,
    FP_FUSION,
    LOADED,
    LOW_BITS,
    NO_ERROR,
    ROWSUM_DO_O,
    ROWSUM_P_DP,
    ROWSUM_P_DP_NORMALIZED,
    S_IS_SCALED,
    SUBTRACT_FIRST,
    Keys,
    Queries,
    Scalars,
    Shape,
    Strides,
    kernel_sites,
    stored_code,
)
from .loads import (
    block_scores,
    load_keys,
    load_output_rows,
    load_padding,
    load_ranges,
    load_row,
    load_rows,
    load_statistics,
    place,
    rows_source,
    store_rows,
    takes_descriptor,
)
from .low_blocks import LOW
from .round_blocks import dot, operand, round_to, with_low_bits
from .softmax import probabilities, round_scores


@triton.jit
def query_kernel(
    p_q,
    p_k,
    p_v,
    p_do,
    p_o,
    p_low_bits,
    p_saved,
    p_delta,
    p_of_sinks,
    p_top_two,
    p_center,
    p_dq,
    p_key_ranges,
    p_padding,
    H,
    T,
    S,
    strides_q,
    strides_k,
    strides_v,
    strides_do,
    stride_gb,
    stride_gr,
    scalars,
    SITES: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """dQ of one block of rows and, for the key kernel, their delta = rowsum(dO * O).

    A delta made from P takes two launches: one that makes delta only, and one for dQ, with delta LOADED. CORRECTED_ROWS passes the
    corrected delta on. ``p_center``: c of CENTERED_KEYS, [B, HK, D]; ``p_of_sinks``: the sink's weight in each row [B, H, T];
    ``p_top_two``: the two largest P of each row, [B, H, 2, T], for ``delta_error_rows``.
    """
    ONLY_DELTA: tl.constexpr = SITES.delta == ROWSUM_P_DP or SITES.delta == ROWSUM_P_DP_NORMALIZED
    CLASSES: tl.constexpr = ONLY_DELTA and SITES.delta_error != NO_ERROR and SITES.delta_error_rows != ALL_ROWS
    BT: tl.constexpr = SHAPE.BT
    BS: tl.constexpr = SHAPE.BS
    WIDTH: tl.constexpr = SHAPE.WIDTH
    DTYPE: tl.constexpr = p_q.dtype.element_ty
    blocks = tl.cdiv(T, BT)
    i_bh, i_t = place(blocks, SHAPE.HEADS)
    if SHAPE.CAUSAL or SHAPE.RANGES:
        i_t = blocks - 1 - i_t
    row = i_t * BT
    o_t = row + tl.arange(0, BT)
    p_row = i_bh.to(tl.int64) * T + o_t
    ranges, m_t = None, None
    if SHAPE.RANGES:
        ranges = load_ranges(p_key_ranges, p_padding, i_bh, H, row, T, S, BT, SHAPE.PADDED)
        m_t = (o_t < T) & (ranges.b_first < ranges.b_last)
        some_from, some_to = ranges.some_from, ranges.some_to
    # [BT, WIDTH]
    b_q = load_rows(p_q, strides_q, i_bh, H, row, T, BT, SHAPE.D, WIDTH, True, False, m_t)
    b_q = operand(b_q, SITES.inputs, DTYPE)
    b_do = load_rows(p_do, strides_do, i_bh, H, row, T, BT, SHAPE.DV, SHAPE.WIDTH_V, True, False, m_t)
    b_do = operand(b_do, SITES.output_gradient, DTYPE)
    # [BT]
    b_m, b_saved_sum = load_statistics(p_saved, i_bh, o_t, T, False, SITES.saved_statistics)
    if SITES.delta == LOADED:
        b_delta = tl.load(p_delta + p_row, mask=o_t < T, other=0.0)
    elif SITES.delta == ROWSUM_DO_O:
        b_o = load_output_rows(p_o, i_bh, H, row, T, SHAPE).to(tl.float32)
        if SITES.delta_output == LOW_BITS:
            b_o = with_low_bits(b_o, load_output_rows(p_low_bits, i_bh, H, row, T, SHAPE), SITES.output)
        b_delta = round_to(tl.sum(b_do.to(tl.float32) * b_o, 1), SITES.delta_sum)
        if SITES.row_residual != CORRECTED_ROWS:
            tl.store(p_delta + p_row, b_delta, mask=o_t < T)
    else:
        b_delta = tl.zeros([BT], tl.float32)
    b_part = tl.zeros([BT, WIDTH], tl.float32)
    b_pk = tl.zeros([BT, WIDTH], tl.float32)
    # [BT]: rowsum(P), and rowsum(dS) with dS as rounded for the product and before.
    b_row_sum = tl.zeros([BT], tl.float32)
    if p_of_sinks is not None and SITES.delta == ROWSUM_P_DP_NORMALIZED:
        b_row_sum += tl.load(p_of_sinks + p_row, mask=o_t < T, other=0.0)
    b_r = tl.zeros([BT], tl.float32)
    b_r_unrounded = tl.zeros([BT], tl.float32)
    b_first, b_second = tl.zeros([BT], tl.float32), tl.zeros([BT], tl.float32)
    last = tl.minimum(row + BT, S) if SHAPE.CAUSAL else S
    middle = tl.minimum(row + 1, S) // BS * BS if SHAPE.CAUSAL else S // BS * BS
    if SHAPE.RANGES:
        middle = some_from // BS * BS
        last = some_to
        S = last  # nobody sees what comes behind it
    queries = Queries(b_q, o_t, i_bh, H, ranges)
    keys = Keys(p_k, p_v, strides_k, strides_v, S)
    for MASKED in tl.static_range(1 if SHAPE.RANGES else 0, 2):
        for start in range(middle if MASKED else 0, last if MASKED else middle, BS):
            b_s, b_k = block_scores(queries, keys, start, scalars, SITES, SHAPE, MASKED == 1, DTYPE)
            b_v = load_keys(p_v, strides_v, queries, start, S, SHAPE.DV, SHAPE.WIDTH_V, SHAPE, MASKED == 1)
            b_v = operand(b_v, SITES.inputs, DTYPE)
            b_p = probabilities(b_s, b_m[:, None], b_saved_sum[:, None], scalars.unit, SITES)
            b_dp = dot(b_do, tl.trans(b_v), tl.zeros([BT, BS], tl.float32))
            if SITES.probability_gradients >= LOW:
                b_dp = tl.where(b_s > -float("inf"), b_dp, 0.0)  # what is hidden has no part in a scale
            b_dp = round_to(b_dp, SITES.probability_gradients)
            if ONLY_DELTA:
                b_delta += tl.sum(b_p * b_dp, 1)
                if CLASSES:
                    b_first, b_second = top_two(b_p, b_first, b_second)
                if SITES.delta == ROWSUM_P_DP_NORMALIZED:
                    b_row_sum += tl.sum(b_p, 1)
            else:
                b_ds = b_p * (b_dp - b_delta[:, None])
                if SHAPE.SOFTCAP:
                    b_t = b_s / scalars.softcap
                    b_ds = tl.where(b_s > -float("inf"), b_ds * (1 - b_t * b_t), 0.0)
                if SITES.row_residual == CORRECTED_ROWS:
                    b_r_unrounded += tl.sum(b_ds, 1)
                    b_row_sum += tl.sum(b_p, 1)
                    b_pk = dot(operand(b_p, SITES.probabilities, DTYPE), b_k, b_pk)
                b_ds = operand(b_ds, SITES.score_gradients, DTYPE)
                if SITES.row_residual == CENTERED_KEYS or SITES.row_residual == CORRECTED_ROWS:
                    b_r += tl.sum(b_ds.to(tl.float32), 1)
                b_part = dot(b_ds, b_k, b_part)
    # A row whose P is 0 throughout has sums of 0.
    b_row_sum = tl.where(b_row_sum == 0, 1.0, b_row_sum)
    if not ONLY_DELTA:
        b_dq = 0.0 + scalars.scale * b_part  # -0 becomes 0, as in published runs
        if SITES.row_residual == CENTERED_KEYS:
            o_d = tl.arange(0, WIDTH)
            p_c = p_center + (i_bh // SHAPE.GROUP).to(tl.int64) * SHAPE.D + o_d
            b_c = tl.load(p_c) if WIDTH == SHAPE.D else tl.load(p_c, mask=o_d < SHAPE.D, other=0.0)
            b_dq -= scalars.scale * (b_r[:, None] * b_c[None, :])
        if SITES.row_residual == CORRECTED_ROWS:
            b_share = tl.div_rn(b_r, b_row_sum)
            b_dq -= scalars.scale * (b_share[:, None] * b_pk)
            b_delta = round_to(b_delta + tl.div_rn(b_r_unrounded, b_row_sum), SITES.delta_sum)
            tl.store(p_delta + p_row, b_delta, mask=o_t < T)
        store_rows(p_dq, b_dq, i_bh, row, T, H, stride_gb, stride_gr, SHAPE.D)
    else:
        if SITES.delta == ROWSUM_P_DP_NORMALIZED:
            b_delta = tl.div_rn(b_delta, b_row_sum)
        tl.store(p_delta + p_row, round_to(b_delta, SITES.delta_sum), mask=o_t < T)
        if CLASSES:
            p_pair = p_top_two + i_bh.to(tl.int64) * (2 * T) + o_t
            tl.store(p_pair, b_first, mask=o_t < T)
            tl.store(p_pair + T, b_second, mask=o_t < T)


@triton.jit
def top_two(b_p, b_first, b_second):
    """The two largest of a block's rows and of what came before, [BT] each; two that are equal are both."""
    b_top = tl.max(b_p, 1)
    m_top = b_p == b_top[:, None]
    b_next = tl.max(tl.where(m_top, 0.0, b_p), 1)
    b_next = tl.where(tl.sum(m_top.to(tl.int32), 1) > 1, b_top, b_next)
    return tl.maximum(b_first, b_top), tl.maximum(tl.minimum(b_first, b_top), tl.maximum(b_second, b_next))


@triton.jit
def key_kernel(
    p_q,
    p_k,
    p_v,
    p_do,
    p_saved,
    p_delta,
    p_dk,
    p_dv,
    p_key_ranges,
    p_query_ranges,
    p_padding,
    H,
    T,
    S,
    strides_q,
    strides_k,
    strides_v,
    strides_do,
    stride_gb,
    stride_gr,
    scalars,
    SITES: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """dK and dV of one block of columns, summed over the heads that share it; scores are held transposed [BS, BT], so that they are left
    operands of both products."""
    BT: tl.constexpr = SHAPE.BT
    BS: tl.constexpr = SHAPE.BS
    WIDTH: tl.constexpr = SHAPE.WIDTH
    WIDTH_V: tl.constexpr = SHAPE.WIDTH_V
    DTYPE: tl.constexpr = p_k.dtype.element_ty
    BELOW_BF16: tl.constexpr = (
        SITES.probabilities >= LOW or SITES.probabilities_in_dv >= LOW or SITES.score_gradients >= LOW
    )
    blocks = tl.cdiv(S, BS)
    i_group, i_s = place(blocks, SHAPE.HEADS)
    column = i_s * BS
    o_s = column + tl.arange(0, BS)
    heads = H if SHAPE.GROUP == 1 else H // SHAPE.GROUP
    # [BS, WIDTH]
    b_k = load_rows(p_k, strides_k, i_group, heads, column, S, BS, SHAPE.D, WIDTH, True, False)
    b_v = load_rows(p_v, strides_v, i_group, heads, column, S, BS, SHAPE.DV, WIDTH_V, True, False)
    b_k, b_v = operand(b_k, SITES.inputs, DTYPE), operand(b_v, SITES.inputs, DTYPE)
    b_dk_part = tl.zeros([BS, WIDTH], tl.float32)
    b_dv_part = tl.zeros([BS, WIDTH_V], tl.float32)
    if SHAPE.RANGES:
        p_from = p_query_ranges + (i_group // heads).to(tl.int64) * (2 * S)
        m_k = tl.load(p_from + o_s, mask=o_s < S, other=0) < tl.load(p_from + S + o_s, mask=o_s < S, other=0)
        if SHAPE.PADDED:
            m_k = m_k & load_padding(p_padding + (i_group // heads).to(tl.int64) * S, column, S, BS)
        # What nobody sees may be anything: 0 times NaN is NaN.
        b_k, b_v = tl.where(m_k[:, None], b_k, 0.0), tl.where(m_k[:, None], b_v, 0.0)
    # Rows before ``first`` see none of these columns; from ``middle`` on, all of them.
    first = column // BT * BT if SHAPE.CAUSAL else 0
    middle = tl.cdiv(column + BS - 1, BT) * BT if SHAPE.CAUSAL else 0
    if SHAPE.RANGES:
        edge = tl.minimum(column + BS, S) - 1
        first = tl.load(p_from + column) // BT * BT
        middle = tl.load(p_from + S + edge)
        # Rows that see all of these columns.
        all_from, all_to = tl.load(p_from + edge), tl.load(p_from + S + column)
    # Heads that share these keys follow one another, each summed over its rows, in every program in the same order.
    for i_head in range(SHAPE.GROUP):
        i_bh = i_group * SHAPE.GROUP + i_head
        for MASKED in tl.static_range(1, 0 if SHAPE.RANGES else -1, -1):
            for start in range(first if MASKED else middle, tl.minimum(middle, T) if MASKED else T, BT):
                o_t = start + tl.arange(0, BT)
                p_row = i_bh.to(tl.int64) * T + o_t
                m_t = None
                if SHAPE.RANGES:
                    p_first = p_key_ranges + (i_bh // H).to(tl.int64) * (2 * T) + o_t
                    b_first = tl.load(p_first, mask=o_t < T, other=0)
                    b_last = tl.load(p_first + T, mask=o_t < T, other=0)
                    m_t = b_first < b_last
                # [BT, WIDTH]
                b_q = load_rows(p_q, strides_q, i_bh, H, start, T, BT, SHAPE.D, WIDTH, not SHAPE.EVEN, SHAPE.TMA, m_t)
                b_q = operand(b_q, SITES.inputs, DTYPE)
                b_do = load_rows(
                    p_do, strides_do, i_bh, H, start, T, BT, SHAPE.DV, WIDTH_V, not SHAPE.EVEN, SHAPE.TMA, m_t
                )
                b_do = operand(b_do, SITES.output_gradient, DTYPE)
                # [BT]
                b_m, b_saved_sum = load_statistics(p_saved, i_bh, o_t, T, SHAPE.EVEN, SITES.saved_statistics)
                b_delta = load_row(p_delta + p_row, o_t < T, SHAPE.EVEN, 0.0)
                b_s = dot(b_k, tl.trans(b_q), tl.zeros([BS, BT], tl.float32))
                if SHAPE.RANGES:
                    b_s = round_scores(b_s, b_s, scalars, SITES, SHAPE.SOFTCAP, False)
                    m_s = (o_s[:, None] >= b_first[None, :]) & (o_s[:, None] < b_last[None, :])
                    if SHAPE.PADDED:
                        b_s = tl.where(m_s & m_k[:, None], b_s, -float("inf"))
                    elif (start < all_from) | (start + BT > all_to):
                        b_s = tl.where(m_s, b_s, -float("inf"))
                else:
                    m_s = o_s[:, None] <= o_t[None, :]
                    b_s = round_scores(b_s, m_s, scalars, SITES, SHAPE.SOFTCAP, MASKED == 1)
                if BELOW_BF16:
                    # Columns past the last key have a score of 0, a P of any size, and no part in a scale.
                    b_s = tl.where((o_s < S)[:, None], b_s, -float("inf"))
                b_p = probabilities(b_s, b_m[None, :], b_saved_sum[None, :], scalars.unit, SITES, True)
                b_dv_part = dot(operand(b_p, SITES.probabilities_in_dv, DTYPE, True), b_do, b_dv_part)
                b_dp = dot(b_v, tl.trans(b_do), tl.zeros([BS, BT], tl.float32))
                if SITES.probability_gradients >= LOW:
                    b_dp = tl.where(b_s > -float("inf"), b_dp, 0.0)
                b_ds = b_p * (round_to(b_dp, SITES.probability_gradients, True) - b_delta[None, :])
                if SHAPE.SOFTCAP:
                    b_t = b_s / scalars.softcap
                    b_ds = tl.where(b_s > -float("inf"), b_ds * (1 - b_t * b_t), 0.0)
                b_dk_part = dot(operand(b_ds, SITES.score_gradients, DTYPE, True), b_q, b_dk_part)
    # -0 becomes 0, as in published runs.
    b_dk = 0.0 + scalars.scale * b_dk_part
    b_dv = 0.0 + b_dv_part
    store_rows(p_dk, b_dk, i_group, column, S, heads, stride_gb, stride_gr, SHAPE.D)
    store_rows(p_dv, b_dv, i_group, column, S, heads, stride_gb, stride_gr, SHAPE.DV)


def empty_gradients(q: Tensor, v: Tensor) -> Tensor:
    """Room for dQ, dK and dV, [B, max(T, S), H + 2 HK, D] in q's dtype, HK the heads of keys: the layout of a fused projection, whose
    gradient then needs no copy. Where V has another head dim DV, [B, max(T, S), (H + HK) D + HK DV]."""
    B, T, H, D = q.shape
    _, S, HK, DV = v.shape
    heads = (H + 2 * HK, D) if D == DV else ((H + HK) * D + HK * DV,)
    return torch.empty((B, max(T, S), *heads), device=q.device, dtype=q.dtype)


def split_gradients(gradients: Tensor, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """dQ, dK and dV from the one tensor of ``empty_gradients``, each cut to its length."""
    # Split by a list, and cut where lengths differ only: torch.compile then sees that split and joined they are the whole again.
    return [
        g if g.shape[1] == x.shape[1] else g[:, : x.shape[1]]
        for g, x in zip(_split(gradients, q, k, v), (q, k, v), strict=True)
    ]


def _split(gradients: Tensor, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    tensors = (q, k, v)
    if gradients.ndim == 4:
        return list(gradients.split([x.shape[2] for x in tensors], dim=2))
    parts = gradients.split([x.shape[2] * x.shape[3] for x in tensors], dim=2)
    return [g.unflatten(2, x.shape[2:]) for g, x in zip(parts, tensors, strict=True)]


def mean_key(k: Tensor, n: Numerics, ranges: KeyRanges | None) -> Tensor:
    """The mean of the keys that some query sees, [B, HK, D] float32."""
    rounded = round_tensor(k.float(), n.inputs)
    if ranges is None:
        return rounded.mean(dim=1).contiguous()
    hidden = ranges.hidden_keys()[:, :, None, None]
    return rounded.masked_fill(hidden, 0.0).sum(dim=1) / (~hidden).sum(dim=1).clamp(min=1)


def launch_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seed: Tensor,
    o: Tensor,
    low_bits: Tensor,
    saved: Tensor,
    n: Numerics,
    blocks: tuple[Blocks, Blocks],
    scale: float,
    causal: bool,
    softcap: float,
    sinks: Tensor | None,
    mask: Mask,
) -> tuple[Tensor, Tensor]:
    """dQ, dK, dV side by side (``empty_gradients``), and the gradient of the sinks.

    ``n`` is concrete; ``o`` and ``low_bits`` are ``tiles.delta_operands``; ``saved`` is L, or m and log2 l or 1 / d, as the forward
    kernel left them; ``blocks`` are those of dK/dV and of dQ.
    """
    (B, T, H, D), (_, S, HK, _) = q.shape, k.shape
    of_keys, of_queries = blocks
    delta = torch.empty((B, H, T), device=q.device, dtype=torch.float32)
    classes = n.delta_error != "none" and n.delta_error_rows != "all"
    largest_p = torch.empty((B, H, 2, T), device=q.device, dtype=torch.float32) if classes else None
    ranges = mask.key_ranges(B, T, S, causal, q.device)
    center = mean_key(k, n, ranges) if n.row_residual == "centered_keys" else delta
    gradients = empty_gradients(q, v)
    dq, dk, dv = _split(gradients, q, k, v)
    by_columns = of_queries.descriptors and takes_descriptor(k, v) and ranges is None
    by_rows = of_keys.descriptors and takes_descriptor(q, do) and ranges is None
    known = {
        "inputs": stored_code(n.inputs, q.dtype),
        "output_gradient": stored_code(n.output_gradient, do.dtype),
    }
    sites = kernel_sites(n, (BACKWARD,), scale, softcap, causal, **known)
    if sites.exponent == SUBTRACT_FIRST.value and n.saved_statistics == "logsumexp":
        # P is made from L here, whose rounding is as large as the error of the FMA exponent and common to a row, too.
        known["exponent"] = FMA.value
        sites = sites._replace(**known)
    scalars = Scalars(scale, log2_scale(scale) if sites.exponent != S_IS_SCALED.value else 1.0, softcap)
    of_sinks = None
    if sinks is not None:
        of_sinks = sink_probabilities(sinks.float()[:, None], saved, n, scalars, sites.exponent)
    query_sites = kernel_sites(n, (DELTA, BACKWARD), scale, softcap, causal, **known)

    def shape(blocks: Blocks, tma: bool, even: bool = False) -> Shape:
        return Shape(
            BT=blocks.rows,
            BS=blocks.columns,
            D=D,
            WIDTH=width(D),
            DV=v.shape[3],
            WIDTH_V=width(v.shape[3]),
            GROUP=H // HK,
            HEADS=blocks.heads,
            TMA=tma,
            CAUSAL=causal and ranges is None,
            SOFTCAP=softcap > 0,
            EVEN=even,
            RANGES=ranges is not None,
            PADDED=ranges is not None and ranges.padding is not None,
        )

    shared = {
        "p_saved": saved,
        "p_delta": delta,
        "p_key_ranges": ranges and ranges.keys_of_queries,
        "p_padding": ranges and ranges.padding,
        "H": H,
        "T": T,
        "S": S,
        "strides_q": Strides(*q.stride()),
        "strides_k": Strides(*k.stride()),
        "strides_v": Strides(*v.stride()),
        "strides_do": Strides(*do.stride()),
        "stride_gb": gradients.stride(0),
        "stride_gr": gradients.stride(1),
        "scalars": scalars,
        "enable_fp_fusion": FP_FUSION,
    }

    def queries(delta_code: int) -> None:
        query_kernel[(B * H * triton.cdiv(T, of_queries.rows),)](
            p_q=q,
            p_k=rows_source(k, of_queries.columns, by_columns),
            p_v=rows_source(v, of_queries.columns, by_columns),
            p_do=do,
            p_o=o,
            p_low_bits=low_bits,
            p_of_sinks=of_sinks,
            p_top_two=largest_p,
            p_center=center,
            p_dq=dq,
            **shared,
            SITES=query_sites._replace(delta=delta_code),
            SHAPE=shape(of_queries, by_columns),
            num_warps=of_queries.warps,
            num_stages=of_queries.stages,
            maxnreg=of_queries.registers,
        )

    # The dQ kernel comes first: it has dO of its rows on chip and writes delta for the other.
    queries(query_sites.delta)
    if n.delta_error != "none":
        do_read = round_tensor(do.float(), n.output_gradient)
        if ranges is not None:
            do_read = do_read.masked_fill(ranges.empty()[:, :, None, None], 0.0)
        error = delta_errors(delta, do_read, o_for_delta(o, low_bits, n), largest_p, seed, n)
        if n.delta_error == "zero_sum":
            exact = n.with_sites({"delta_error": "none", "delta_error_rows": "all"})
            more = v.shape[3] + NOISE_COLUMNS
            wide = backward_blocks(exact, FORMAT_OF[q.dtype], max(D, more), T, S)
            noisy_do, noisy_v = with_zero_sum_noise(do, v, error, seed)
            settings = scale, causal, softcap, sinks, mask
            found, dsinks = launch_backward(noisy_do, q, k, noisy_v, seed, o, low_bits, saved, exact, wide, *settings)
            for to, x in zip(split_gradients(gradients, q, k, v), split_gradients(found, q, k, noisy_v), strict=True):
                to.copy_(x[..., : to.shape[3]])
            return gradients, dsinks
        delta += error
    if n.delta != "rowsum_do_o":
        queries(LOADED.value)
    key_kernel[(B * HK * triton.cdiv(S, of_keys.columns),)](
        p_q=rows_source(q, of_keys.rows, by_rows),
        p_k=k,
        p_v=v,
        p_do=rows_source(do, of_keys.rows, by_rows),
        p_dk=dk,
        p_dv=dv,
        p_query_ranges=ranges and ranges.queries_of_keys,
        **shared,
        SITES=sites,
        SHAPE=shape(of_keys, by_rows, even=T % of_keys.rows == 0),
        num_warps=of_keys.warps,
        num_stages=of_keys.stages,
        maxnreg=of_keys.registers,
    )
    return gradients, empty_sinks(q, None) if of_sinks is None else -(of_sinks * delta).sum(dim=(0, 2))


def sink_probabilities(sinks_H1: Tensor, saved: Tensor, n: Numerics, scalars: Scalars, exponent: int) -> Tensor:
    """The weight of the sink in each row, [B, H, T], from what the forward kernel saved: L, or m and log2 l or 1 / d."""
    in_log2 = sinks_H1 * math.log2(math.e)
    if n.saved_statistics == "logsumexp":
        return torch.exp(sinks_H1 - saved) if exponent == S_IS_SCALED.value else torch.exp2(in_log2 - saved)
    m, second = saved.unbind(2)
    if exponent == S_IS_SCALED.value:
        difference = (sinks_H1 - m) * math.log2(math.e)
    elif exponent == SUBTRACT_FIRST.value:
        difference = (sinks_H1 / scalars.scale - m) * scalars.unit
    else:
        difference = in_log2 - m
    if n.backward_probabilities == "forward":
        return torch.exp2(difference) * second
    return torch.exp2(difference - second)
