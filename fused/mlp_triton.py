"""The products of ``fused.mlp`` with GELU, or its slope, applied to a block of the result before it leaves the chip.

Two programs share a processor, so that one's GELU runs beside the other's products. Operands come through Hopper's copy engine.

Legend: M x K times K x N; BM, BN, BK their blocks; ``d_`` tensor descriptors, ``b_`` blocks on chip.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attention.triton_numerics import BF16, INTERPRETED, LOG2_E, NEAREST, round_mantissa

# 128 registers and 98 KB a program let two of them share a processor of an H200.
BM, BN, BK, WARPS, STAGES, REGISTERS, GROUP = 128, 128, 64, 8, 3, 128, 8


@triton.jit
def _round(b_x, DTYPE: tl.constexpr):
    if INTERPRETED and DTYPE == tl.bfloat16:
        b_x = round_mantissa(b_x, BF16, NEAREST, 0)
    return b_x.to(DTYPE)


@triton.jit
def _normal(b_h):
    """The normal distribution's cdf at h and exp(-h^2 / 2): Abramowitz & Stegun 7.1.26, off by at most 7.5e-8, a float32 rounding.

    A tenth of the work of a library's erf, because the exponential serves both.
    """
    b_e = tl.exp2(b_h * b_h * (-0.5 * LOG2_E))
    b_t = 1 / (1 + 0.3275911 * 0.7071067811865476 * tl.abs(b_h))
    b_p = 1.421413741 + b_t * (-1.453152027 + b_t * 1.061405429)
    b_q = 0.5 * b_e * b_t * (0.254829592 + b_t * (-0.284496736 + b_t * b_p))
    return tl.where(b_h < 0, b_q, 1 - b_q), b_e


@triton.jit
def gelu_product_kernel(
    d_a, d_b, d_h, d_out, M, N, K, SLOPE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """SLOPE: out = (a b) gelu'(h), b [K, N]; else h = a b^T, out = gelu(h), b [N, K]."""
    DTYPE: tl.constexpr = d_out.dtype
    # Programs that run together share rows of a and of b.
    blocks_m, blocks_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    first = tl.program_id(0) // (GROUP * blocks_n) * GROUP
    size = tl.minimum(blocks_m - first, GROUP)
    within = tl.program_id(0) % (GROUP * blocks_n)
    row, column = (first + within % size) * BM, within // size * BN
    b_acc = tl.zeros([BM, BN], tl.float32)
    for k in range(0, K, BK):
        # [BM, BK], [BK, BN]
        b_a = d_a.load([row, k])
        b_b = d_b.load([k, column]) if SLOPE else tl.trans(d_b.load([column, k]))
        if INTERPRETED:
            b_a, b_b = b_a.to(tl.float32), b_b.to(tl.float32)
        b_acc = tl.dot(b_a, b_b, b_acc)
    b_x = _round(b_acc, DTYPE)
    if SLOPE:
        b_h = d_h.load([row, column]).to(tl.float32)
        b_cdf, b_e = _normal(b_h)
        d_out.store([row, column], _round(b_x.to(tl.float32) * (b_cdf + 0.3989422804014327 * b_h * b_e), DTYPE))
    else:
        d_h.store([row, column], b_x)
        b_h = b_x.to(tl.float32)
        b_cdf, _ = _normal(b_h)
        d_out.store([row, column], _round(b_h * b_cdf, DTYPE))


def _launch(a: Tensor, b: Tensor, h: Tensor, out: Tensor, slope: bool) -> None:
    (M, K), N = a.shape, out.shape[1]
    blocks = ((BM, BK), (BK, BN) if slope else (BN, BK), (BM, BN), (BM, BN))
    descriptors = [
        TensorDescriptor(x, list(x.shape), list(x.stride()), list(block))
        for x, block in zip((a, b, h, out), blocks, strict=True)
    ]
    grid = (triton.cdiv(M, BM) * triton.cdiv(N, BN),)
    with torch.cuda.device_of(a):
        gelu_product_kernel[grid](
            *descriptors,
            M,
            N,
            K,
            SLOPE=slope,
            BM=BM,
            BN=BN,
            BK=BK,
            GROUP=GROUP,
            num_warps=WARPS,
            num_stages=STAGES,
            maxnreg=REGISTERS,
        )


def launch_linear_gelu(x_NC: Tensor, weight_FC: Tensor) -> tuple[Tensor, Tensor]:
    """See ``mlp.linear_gelu``; contiguous, widths divisible by 8."""
    h_NF = x_NC.new_empty(x_NC.shape[0], weight_FC.shape[0])
    a_NF = torch.empty_like(h_NF)
    _launch(x_NC, weight_FC, h_NF, a_NF, slope=False)
    return h_NF, a_NF


def launch_gelu_gradient(dy_NC: Tensor, weight_CF: Tensor, h_NF: Tensor) -> Tensor:
    """See ``mlp.gelu_gradient``; contiguous, widths divisible by 8."""
    dh_NF = torch.empty_like(h_NF)
    _launch(dy_NC, weight_CF, h_NF, dh_NF, slope=True)
    return dh_NF
