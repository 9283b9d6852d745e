"""``add_norm`` in Triton: a program takes some rows; in the backward pass a fixed number of programs sums the gradient of w.

Legend: N rows, C columns, P programs; BN rows and BC >= C columns of a block; ``p_`` pointers, ``b_`` blocks on chip, ``o_`` offsets,
``m_`` masks. Addresses are int64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.triton_numerics import BF16, INTERPRETED, NEAREST, round_mantissa

# Programs of the backward pass, at most: a constant, so that sums come out in one order on every device. Two resident on each of an
# H200's 132 processors, twice.
PROGRAMS = 528


@triton.jit
def _store_rounded(p_x, b_x, mask):
    if INTERPRETED and p_x.dtype.element_ty == tl.bfloat16:
        b_x = round_mantissa(b_x, BF16, NEAREST, 0)
    tl.store(p_x, b_x.to(p_x.dtype.element_ty), mask=mask)


@triton.jit
def norm_forward_kernel(
    p_x, p_y, p_weight, p_bias, p_sum, p_n, p_mean, p_inverse, N, C, eps,
    BRANCH: tl.constexpr, BIAS: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    o_n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    o_c = tl.arange(0, BC)
    m_c = o_c < C
    # [BN, BC]
    m_nc = (o_n < N)[:, None] & m_c[None, :]
    o_nc = o_n[:, None] * C + o_c[None, :]
    b_x = tl.load(p_x + o_nc, mask=m_nc, other=0.0)
    if BRANCH:
        b_x += tl.load(p_y + o_nc, mask=m_nc, other=0.0).to(tl.float32)
    tl.store(p_sum + o_nc, b_x, mask=m_nc)
    b_mean = tl.sum(b_x, 1) / C
    b_centred = tl.where(m_nc, b_x - b_mean[:, None], 0.0)
    b_inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(b_centred * b_centred, 1) / C + eps))
    tl.store(p_mean + o_n, b_mean, mask=o_n < N)
    tl.store(p_inverse + o_n, b_inverse, mask=o_n < N)
    b_normed = b_centred * b_inverse[:, None] * tl.load(p_weight + o_c, mask=m_c, other=0.0)[None, :]
    if BIAS:
        b_normed += tl.load(p_bias + o_c, mask=m_c, other=0.0)[None, :]
    _store_rounded(p_n + o_nc, b_normed, m_nc)


@triton.jit
def norm_backward_kernel(
    p_dn, p_dsum, p_sum, p_mean, p_inverse, p_weight, p_dx, p_dy, p_dweight, p_dbias, N, C, rows,
    RESIDUAL: tl.constexpr, BRANCH: tl.constexpr, BIAS: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    i_p = tl.program_id(0).to(tl.int64)
    o_c = tl.arange(0, BC)
    m_c = o_c < C
    b_w = tl.load(p_weight + o_c, mask=m_c, other=0.0)[None, :]
    b_dw = tl.zeros([BN, BC], tl.float32)
    b_db = tl.zeros([BN, BC], tl.float32)
    for start in range(0, rows, BN):
        o_r = start + tl.arange(0, BN)
        o_n = i_p * rows + o_r
        m_n = (o_r < rows) & (o_n < N)
        # [BN, BC]
        m_nc = m_n[:, None] & m_c[None, :]
        o_nc = o_n[:, None] * C + o_c[None, :]
        b_dn = tl.load(p_dn + o_nc, mask=m_nc, other=0.0).to(tl.float32)
        b_x = tl.load(p_sum + o_nc, mask=m_nc, other=0.0)
        b_mean = tl.load(p_mean + o_n, mask=m_n, other=0.0)[:, None]
        b_inverse = tl.load(p_inverse + o_n, mask=m_n, other=0.0)[:, None]
        b_normed = tl.where(m_nc, (b_x - b_mean) * b_inverse, 0.0)
        b_dnormed = b_dn * b_w
        b_first = (tl.sum(b_dnormed, 1) / C)[:, None]
        b_second = (tl.sum(b_dnormed * b_normed, 1) / C)[:, None]
        b_dx = (b_dnormed - b_first - b_normed * b_second) * b_inverse
        if RESIDUAL:
            b_dx += tl.load(p_dsum + o_nc, mask=m_nc, other=0.0)
        tl.store(p_dx + o_nc, b_dx, mask=m_nc)
        if BRANCH:
            _store_rounded(p_dy + o_nc, b_dx, m_nc)
        b_dw += b_dn * b_normed
        if BIAS:
            b_db += b_dn
    tl.store(p_dweight + i_p * C + o_c, tl.sum(b_dw, 0), mask=m_c)
    if BIAS:
        tl.store(p_dbias + i_p * C + o_c, tl.sum(b_db, 0), mask=m_c)


def _rows_of_block(columns: int) -> int:
    """Rows a block: 4,096 elements are 16 registers of float32 for each of 256 threads."""
    return max(1, 4096 // columns)


def launch_forward(
    x_NC: Tensor, y_NC: Tensor | None, weight_C: Tensor, bias_C: Tensor | None, dtype: torch.dtype, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See ``add_norm._forward``; inputs are made contiguous where they are not."""
    x_NC, y_NC = x_NC.contiguous(), None if y_NC is None else y_NC.contiguous()
    N, C = x_NC.shape
    sum_NC, n_NC = torch.empty_like(x_NC), torch.empty_like(x_NC, dtype=dtype)
    mean_N, inverse_N = (x_NC.new_empty(N) for _ in range(2))
    BC = triton.next_power_of_2(C)
    BN = _rows_of_block(BC)
    with torch.cuda.device_of(x_NC):
        norm_forward_kernel[(triton.cdiv(N, BN),)](
            x_NC,
            x_NC if y_NC is None else y_NC,
            weight_C,
            weight_C if bias_C is None else bias_C,
            sum_NC,
            n_NC,
            mean_N,
            inverse_N,
            N,
            C,
            eps,
            BRANCH=y_NC is not None,
            BIAS=bias_C is not None,
            BN=BN,
            BC=BC,
            num_warps=8,
        )
    return sum_NC, n_NC, mean_N, inverse_N


def launch_backward(
    dn_NC: Tensor, dsum_NC: Tensor | None, sum_NC: Tensor, mean_N: Tensor, inverse_N: Tensor, weight_C: Tensor, bias: bool,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """See ``add_norm._backward``; inputs are made contiguous where they are not."""
    dn_NC, dsum_NC = dn_NC.contiguous(), None if dsum_NC is None else dsum_NC.contiguous()
    N, C = sum_NC.shape
    dx_NC = torch.empty_like(sum_NC)
    dy_NC = sum_NC.new_empty(0) if dtype is None else torch.empty_like(sum_NC, dtype=dtype)
    BC = triton.next_power_of_2(C)
    BN = _rows_of_block(BC)
    rows = BN * triton.cdiv(N, PROGRAMS * BN)
    programs = triton.cdiv(N, rows)
    dweight_PC, dbias_PC = sum_NC.new_empty(programs, C), sum_NC.new_empty(programs if bias else 0, C)
    with torch.cuda.device_of(sum_NC):
        norm_backward_kernel[(programs,)](
            dn_NC,
            sum_NC if dsum_NC is None else dsum_NC,
            sum_NC,
            mean_N,
            inverse_N,
            weight_C,
            dx_NC,
            dy_NC,
            dweight_PC,
            dbias_PC,
            N,
            C,
            rows,
            RESIDUAL=dsum_NC is not None,
            BRANCH=dtype is not None,
            BIAS=bias,
            BN=BN,
            BC=BC,
            num_warps=8,
        )
    return dx_NC, dy_NC, dweight_PC.sum(0), dbias_PC.sum(0) if bias else sum_NC.new_empty(0)
