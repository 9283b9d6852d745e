"""What the backward kernels read of each row: delta, and L or, in one number, m and 1 / d.

Legend: B batch, H heads, T queries, D head dim; ``p_`` pointers, ``b_`` blocks on chip, ``o_`` offsets, ``m_`` masks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton.codes import FP_FUSION

ROWS = 32
FAR = tl.constexpr(2.0**20)
"""A packed statistic with which P is 0."""


@triton.jit
def pack(b_m, b_inverse):
    """w = M + 1.5 - f of m, a whole number, and 1 / d = f 2^(m - M), f in [1, 2): M is the whole number next to w, and
    P = P_bar 1 / d is 2^(S - M), rounded as P_bar was, times f.

    The addition rounds f by half a unit of w: P of the row has a factor off by up to 2^-14 for m below 2^11, 2^-8 below 2^17; above 2^22 it
    is wrong. In FP16 what is a number of full precision in P_bar may be a subnormal in 2^(S - M), and is rounded to units of 2^-24.
    """
    b_bits = b_inverse.to(tl.int32, bitcast=True)
    b_f = ((b_bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    return b_m + (127 - (b_bits >> 23)).to(tl.float32) + (1.5 - b_f)


@triton.jit
def prepare_kernel(
    p_do,
    p_o,
    p_low_bits,
    p_saved,
    p_delta,
    p_rows,
    H,
    T,
    T_PADDED,
    stride_b,
    stride_t,
    stride_h,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    CONSISTENT: tl.constexpr,
):
    blocks = tl.cdiv(T_PADDED, ROWS)
    i_bh = (tl.program_id(0) // blocks).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    o_t = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    o_d = tl.arange(0, WIDTH)
    m_t, m_padded = o_t < T, o_t < T_PADDED
    m_td = m_t[:, None] & (o_d < D)[None, :]
    b_do = tl.load(
        p_do + i_b * stride_b + o_t[:, None].to(tl.int64) * stride_t + i_h * stride_h + o_d, mask=m_td, other=0
    )
    o_td = ((i_b * T + o_t) * H + i_h)[:, None] * D + o_d
    b_o = tl.load(p_o + o_td, mask=m_td, other=0).to(tl.float32)
    if CONSISTENT:
        # A thread of the forward kernel has columns 8 u + 2 q + e for one q, and wrote its low bits side by side.
        b_low = tl.reshape(tl.load(p_low_bits + o_td, mask=m_td, other=0), [ROWS, WIDTH // 32, 4, 4, 2])
        b_low = tl.reshape(tl.permute(b_low, (0, 1, 3, 2, 4)), [ROWS, WIDTH])
        b_bits = b_o.to(tl.int32, bitcast=True) + b_low
        b_o = b_bits.to(tl.float32, bitcast=True)
        p_row = p_saved + i_bh * (2 * T) + o_t
        b_row = pack(tl.load(p_row, mask=m_t, other=0), tl.load(p_row + T, mask=m_t, other=1))
        b_row = tl.where(m_t, b_row, FAR)
    else:
        b_row = tl.load(p_saved + i_bh * T + o_t, mask=m_t, other=float("inf"))
    o_row = i_bh * T_PADDED + o_t
    tl.store(p_delta + o_row, tl.sum(b_do.to(tl.float32) * b_o, 1), mask=m_padded)
    tl.store(p_rows + o_row, b_row, mask=m_padded)


def prepare(do: Tensor, o: Tensor, low_bits: Tensor, saved: Tensor, padded: int) -> tuple[Tensor, Tensor]:
    """delta and what the kernels form P from, [B, H, ``padded``], float32.

    dO [B, T, H, D] of any strides but the last; O and its ``low_bits`` (int16, or empty; each 32 of D in the order of the forward kernel's
    threads) are dense, ``saved`` is L [B, H, T], or m and 1 / d [B, H, 2, T].
    """
    B, T, H, D = o.shape
    delta, rows = (torch.empty((B, H, padded), device=o.device, dtype=torch.float32) for _ in range(2))
    prepare_kernel[(triton.cdiv(padded, ROWS) * B * H,)](
        do,
        o,
        low_bits,
        saved,
        delta,
        rows,
        H,
        T,
        padded,
        *do.stride()[:3],
        D=D,
        WIDTH=triton.next_power_of_2(D),
        ROWS=ROWS,
        CONSISTENT=saved.ndim == 4,
        enable_fp_fusion=FP_FUSION,
    )
    return delta, rows
