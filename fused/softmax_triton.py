"""``linear_cross_entropy.softmax_rows`` as one Triton kernel: a program a row, logits read once from memory and once from cache.

Legend: N rows, V vocabulary; ``p_`` pointers, ``b_`` blocks on chip, ``o_`` offsets, ``m_`` masks. Addresses are int64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.triton.arithmetic import BF16, INTERPRETED, LOG2_E, NEAREST, round_mantissa


@triton.jit
def softmax_rows_kernel(
    p_logits, p_targets, p_loss, V, IGNORED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    i_n = tl.program_id(0).to(tl.int64)
    p_row = p_logits + i_n * V
    target = tl.load(p_targets + i_n)
    row_max = -float("inf")
    b_l = tl.zeros([BLOCK], tl.float32)
    b_target = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        o_v = start + tl.arange(0, BLOCK)
        b_s = tl.load(p_row + o_v, mask=o_v < V, other=-float("inf")).to(tl.float32)
        new_max = tl.maximum(row_max, tl.max(b_s))
        b_l = b_l * tl.exp2((row_max - new_max) * LOG2_E) + tl.exp2((b_s - new_max) * LOG2_E)
        # Picked out here: a load by itself could meet the gradient that another warp has written there already.
        b_target += tl.where(o_v == target, b_s, 0.0)
        row_max = new_max
    lse = row_max + tl.log(tl.sum(b_l))
    loss = lse - tl.sum(b_target)
    tl.store(p_loss + i_n, tl.where(target == IGNORED, 0.0, loss))
    for start in range(0, V, BLOCK):
        o_v = start + tl.arange(0, BLOCK)
        b_s = tl.load(p_row + o_v, mask=o_v < V, other=-float("inf")).to(tl.float32)
        b_ds = tl.exp2((b_s - lse) * LOG2_E) - tl.where(o_v == target, 1.0, 0.0)
        b_ds = tl.where(target == IGNORED, 0.0, b_ds)
        if INTERPRETED and p_logits.dtype.element_ty == tl.bfloat16:
            b_ds = round_mantissa(b_ds, BF16, NEAREST, 0)
        tl.store(p_row + o_v, b_ds.to(p_logits.dtype.element_ty), mask=o_v < V)


def softmax_rows_triton(logits_NV: Tensor, targets_N: Tensor, loss_N: Tensor) -> None:
    """See ``softmax_rows``; all three contiguous."""
    N, V = logits_NV.shape
    with torch.cuda.device_of(logits_NV):
        softmax_rows_kernel[(N,)](
            logits_NV,
            targets_N,
            loss_N,
            V,
            IGNORED=-1,
            BLOCK=min(4096, triton.next_power_of_2(V)),
            num_warps=8,
        )
