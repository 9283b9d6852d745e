"""Standard attention in Triton without its matrices: P normalized before the product, rounded where ``reference/standard.py`` rounds it.

The forward kernel walks the keys twice: once for m and l of a row, once for O = probabilities(P) V with P = exp(S - m) / l. The backward
pass is that of ``backward``, with m and log l kept apart and delta = rowsum(P * dP). Sums associate otherwise than in
``reference/standard.py``; every rounding site is the same.

Legend: B batch, H heads, T queries, S keys, D head dim; BT rows and BS columns of a block; ``p_`` pointers, ``b_`` blocks on chip,
``o_`` offsets, ``m_`` masks.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..mask import Mask
from ..numerics import FORWARD, Numerics, lacked_by, numerics_from_key
from ..operators import FORWARD_TENSORS, differentiable, operator
from ..reference.exponent import log2_scale
from ..reference.tiles import FORMAT_OF, OUTPUT_STREAM
from ..rounding import storage_dtype
from .arithmetic import (
    FP32,
    FP_FUSION,
    SCALED,
    STOCHASTIC,
    Scalars,
    Shape,
    Strides,
    dot,
    exponential,
    kernel_sites,
    operand,
    probabilities,
    random_words,
    rescaling,
    round_output,
    stored_code,
    subtrahend,
)
from .block_sizes import Blocks, two_pass_blocks, width
from .loads import block_scores, load_keys, load_rows, load_seen, place, rows_source, store_rows, takes_descriptor
from .ops import gradients

_OUTPUT_STREAM = tl.constexpr(OUTPUT_STREAM)


@triton.jit
def standard_kernel(
    p_q,
    p_k,
    p_v,
    p_o,
    p_saved,
    p_seed,
    p_runs,
    p_holes,
    H,
    T,
    S,
    strides_q,
    strides_k,
    strides_v,
    scalars,
    SITES: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """O, m and log2 l of one block of rows."""
    BT: tl.constexpr = SHAPE.BT
    BS: tl.constexpr = SHAPE.BS
    WIDTH: tl.constexpr = SHAPE.WIDTH
    FOLD: tl.constexpr = SITES.exponent
    DTYPE: tl.constexpr = p_q.dtype.element_ty
    blocks = tl.cdiv(T, BT)
    i_bh, i_t = place(blocks, SHAPE.HEADS)
    if SHAPE.CAUSAL or SHAPE.RUNS:
        i_t = blocks - 1 - i_t
    row = i_t * BT
    o_t = row + tl.arange(0, BT)
    seen, m_t = None, None
    if SHAPE.RUNS:
        seen = load_seen(p_runs, p_holes, i_bh, H, row, T, S, BT, SHAPE.HOLES)
        m_t = (o_t < T) & (seen.b_first < seen.b_last)
        some_from, some_to = seen.some_from, seen.some_to
    # [BT, WIDTH]
    b_q = load_rows(p_q, strides_q, i_bh, H, row, T, BT, SHAPE, True, False, m_t)
    b_q = operand(b_q, SITES.inputs, DTYPE)
    b_m = tl.full([BT], -float("inf"), tl.float32)
    b_l = tl.zeros([BT], tl.float32)
    last = tl.minimum(row + BT, S) if SHAPE.CAUSAL else S
    middle = tl.minimum(row + 1, S) // BS * BS if SHAPE.CAUSAL else S // BS * BS
    if SHAPE.RUNS:
        middle = some_from // BS * BS
        last = some_to
        S = last  # nobody sees what comes behind it
    for MASKED in tl.static_range(1 if SHAPE.RUNS else 0, 2):
        for start in range(middle if MASKED else 0, last if MASKED else middle, BS):
            b_s, _ = block_scores(
                b_q, p_k, strides_k, i_bh, H, o_t, seen, start, S, scalars, SITES, SHAPE, MASKED == 1, DTYPE
            )
            b_m_new = tl.maximum(b_m, tl.max(b_s, 1))
            b_base = subtrahend(b_m_new, SHAPE.RUNS)
            b_sum = tl.sum(exponential(b_s, b_base[:, None], scalars.unit, FOLD), 1)
            b_l = rescaling(b_m, b_base, scalars.unit, FOLD) * b_l + b_sum
            b_m = b_m_new
    if SHAPE.RUNS:
        m_none = b_m == -float("inf")  # rows that saw no key: with such an m P is 0
        b_l = tl.where(m_none, 1.0, b_l)
        b_m = tl.where(m_none, float("inf"), b_m)
    b_log_l = tl.log2(b_l)
    p_row = p_saved + i_bh.to(tl.int64) * (2 * T) + o_t
    tl.store(p_row, b_m, mask=o_t < T)
    tl.store(p_row + T, b_log_l, mask=o_t < T)
    b_acc = tl.zeros([BT, WIDTH], tl.float32)
    for MASKED in tl.static_range(1 if SHAPE.RUNS else 0, 2):
        for start in range(middle if MASKED else 0, last if MASKED else middle, BS):
            b_s, _ = block_scores(
                b_q, p_k, strides_k, i_bh, H, o_t, seen, start, S, scalars, SITES, SHAPE, MASKED == 1, DTYPE
            )
            # [BS, WIDTH]
            b_v = load_keys(p_v, strides_v, i_bh, H, start, S, seen, SHAPE, MASKED == 1)
            b_p = probabilities(b_s, b_m[:, None], b_log_l[:, None], scalars.unit, FOLD, True, False, FP32)
            b_acc = dot(operand(b_p, SITES.probabilities, DTYPE), operand(b_v, SITES.inputs, DTYPE), b_acc)
    b_words = 0
    if SITES.output_rounding == STOCHASTIC:
        # Rows of the whole output in order; the random bits belong to them.
        o_row = ((i_bh // H).to(tl.int64) * T + o_t) * H + i_bh % H
        b_words = random_words(p_seed, o_row, _OUTPUT_STREAM, SHAPE)
    b_o = round_output(b_acc, SITES.output, SITES.output_rounding, b_words, BT, WIDTH)
    store_rows(p_o, b_o, i_bh, row, T, H, tl.cast(T, tl.int64) * H * SHAPE.D, H * SHAPE.D, BT, SHAPE)


def empty_outputs(q: Tensor, n: Numerics) -> tuple[Tensor, Tensor]:
    """O [B, T, H, D], and m and log2 l [B, H, 2, T] float32, unwritten. ``n`` is concrete."""
    B, T, H, _ = q.shape
    o = torch.empty(q.shape, device=q.device, dtype=storage_dtype(n.output, q.dtype))
    return o, torch.empty((B, H, 2, T), device=q.device, dtype=torch.float32)


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seed: Tensor,
    n: Numerics,
    blocks: Blocks,
    scale: float,
    causal: bool,
    softcap: float,
    mask: Mask,
) -> tuple[Tensor, Tensor]:
    """Run the forward kernel. ``n`` is concrete; see ``empty_outputs`` for what comes back."""
    (B, T, H, D), S = q.shape, k.shape[1]
    o, saved = empty_outputs(q, n)
    sites = kernel_sites(n, (FORWARD,), scale, softcap, causal, inputs=stored_code(n.inputs, q.dtype))
    runs = mask.runs(B, T, S, causal, q.device)
    tma = blocks.descriptors and takes_descriptor(k, v) and not mask.hides()
    standard_kernel[(B * H * triton.cdiv(T, blocks.rows),)](
        p_q=q,
        p_k=rows_source(k, blocks.columns, tma),
        p_v=rows_source(v, blocks.columns, tma),
        p_o=o,
        p_saved=saved,
        p_seed=seed,
        p_runs=runs and runs.keys_of_queries,
        p_holes=runs and runs.holes,
        H=H,
        T=T,
        S=S,
        strides_q=Strides(*q.stride()),
        strides_k=Strides(*k.stride()),
        strides_v=Strides(*v.stride()),
        scalars=Scalars(scale, log2_scale(scale) if sites.exponent != SCALED.value else 1.0, softcap),
        SITES=sites,
        SHAPE=Shape(
            BT=blocks.rows,
            BS=blocks.columns,
            D=D,
            WIDTH=width(D),
            GROUP=H // k.shape[2],
            HEADS=blocks.heads,
            TMA=tma,
            CAUSAL=causal and runs is None,
            SOFTCAP=softcap > 0,
            RUNS=runs is not None,
            HOLES=runs is not None and runs.holes is not None,
        ),
        num_warps=blocks.warps,
        num_stages=blocks.stages,
        enable_fp_fusion=FP_FUSION,
        maxnreg=blocks.registers,
    )
    return o, saved


def _kernels_key(numerics: str) -> str:
    """The numerics as the kernels are to read them: m and log l are kept, and sites that standard attention has not round nothing."""
    sites = {**lacked_by("standard_triton"), "saved_statistics": "max_and_sum"}
    return numerics_from_key(numerics).with_sites(sites).key()


def _forward_pass(
    q: Tensor, k: Tensor, v: Tensor, seed: Tensor, numerics: str, *settings: Any
) -> tuple[Tensor, Tensor]:
    """(O [B, T, H, D], m in the unit the kernel compares and log2 l [B, H, 2, T])."""
    n = numerics_from_key(_kernels_key(numerics)).concrete(FORMAT_OF[q.dtype])
    blocks = two_pass_blocks(n, FORMAT_OF[q.dtype], q.shape[3], q.shape[1], k.shape[1])
    with torch.cuda.device_of(q):
        return launch(q, k, v, seed, n, blocks, *settings)


def _outputs(q: Tensor, k: Tensor, v: Tensor, seed: Tensor, numerics: str, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_outputs(q, numerics_from_key(numerics).concrete(FORMAT_OF[q.dtype]))


def _gradients(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, saved: Tensor, numerics: str, *settings: Any
) -> list[Tensor]:
    nothing = do[:0]  # delta is of P and dP: there is no O to read
    return gradients(do, q, k, v, nothing, nothing, saved, _kernels_key(numerics), *settings)


_forward = operator("standard_triton_forward", FORWARD_TENSORS, 2, _forward_pass, _outputs)
standard_triton = differentiable(_forward, _gradients, lambda o, saved: (saved,))
