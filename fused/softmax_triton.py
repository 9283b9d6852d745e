"""``linear_cross_entropy.softmax_rows`` as one Triton kernel: a program a row, logits read twice.

Every lane has a maximum and a sum of its own, so that the first reading needs one reduction at its end. The second reading begins at the
end of the row, which was read last and is likeliest to be in cache.

Legend: N rows, V vocabulary; ``p_`` pointers, ``b_`` blocks on chip, ``o_`` offsets, ``m_`` masks. Addresses are int64.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.triton.codes import BF16, FP_FUSION, INTERPRETED, LOG2_E, NEAREST
from attention.triton.round_blocks import round_mantissa

BLOCK, WARPS = 4096, 16


@triton.jit
def softmax_rows_kernel(p_logits, p_targets, p_loss, V, IGNORED: tl.constexpr, BLOCK: tl.constexpr):
    i_n = tl.program_id(0).to(tl.int64)
    p_row = p_logits + i_n * V
    target = tl.load(p_targets + i_n)
    # Of logits in units of log 2; the first maximum is finite, as infinities have no difference.
    b_max = tl.full([BLOCK], -1e30, tl.float32)
    b_l = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        o_v = start + tl.arange(0, BLOCK)
        b_s = LOG2_E * tl.load(p_row + o_v, mask=o_v < V, other=-1e30).to(tl.float32)
        b_new = tl.maximum(b_max, b_s)
        b_l = b_l * tl.exp2(b_max - b_new) + tl.exp2(b_s - b_new)
        b_max = b_new
    row_max = tl.max(b_max)
    lse = row_max + tl.log2(tl.sum(b_l * tl.exp2(b_max - row_max)))
    s_target = tl.load(p_row + tl.maximum(target, 0)).to(tl.float32)
    # Before any warp writes gradients where another still reads its target.
    tl.debug_barrier()
    tl.store(p_loss + i_n, tl.where(target == IGNORED, 0.0, lse / LOG2_E - s_target))
    blocks = tl.cdiv(V, BLOCK)
    for i in range(0, blocks):
        o_v = (blocks - 1 - i) * BLOCK + tl.arange(0, BLOCK)
        b_s = tl.load(p_row + o_v, mask=o_v < V, other=-1e30).to(tl.float32)
        b_ds = tl.exp2(b_s * LOG2_E - lse) - tl.where(o_v == target, 1.0, 0.0)
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
            BLOCK=min(BLOCK, triton.next_power_of_2(V)),
            num_warps=WARPS,
            enable_fp_fusion=FP_FUSION,
        )
