"""``table_gradient`` in Triton: sums of sorted rows by blocks, then of what runs of one token have left in several blocks.

Legend: N tokens, C columns, BC >= C a power of two; ``p_`` pointers, ``b_`` blocks on chip, ``o_`` offsets, ``m_`` masks. Addresses are
int64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def runs_kernel(p_dx, p_sorted, p_order, p_table, p_partial, N, C, ROWS: tl.constexpr, BC: tl.constexpr):
    """Runs that lie inside the block go to the table; of one from before, the part here to partial 0, of one going on, to partial 1."""
    i_b = tl.program_id(0).to(tl.int64)
    o_c = tl.arange(0, BC)
    m_c = o_c < C
    first = i_b * ROWS
    token = tl.load(p_sorted + first)
    from_before = (first > 0) & (tl.load(p_sorted + first - 1, mask=first > 0, other=-1) == token)
    b_sum = tl.zeros([BC], tl.float32)
    for r in range(0, ROWS):
        at = first + r
        if at < N:
            token = tl.load(p_sorted + at)
            b_sum += tl.load(p_dx + tl.load(p_order + at) * C + o_c, mask=m_c, other=0.0)
            if tl.load(p_sorted + at + 1, mask=at + 1 < N, other=-1) != token:
                if from_before:
                    tl.store(p_partial + i_b * 2 * C + o_c, b_sum, mask=m_c)
                else:
                    tl.store(p_table + token.to(tl.int64) * C + o_c, b_sum, mask=m_c)
                b_sum = tl.zeros([BC], tl.float32)
                from_before = from_before & False
    # What is left belongs to a run that goes on; nothing where the last one ended with the block.
    tl.store(p_partial + (i_b * 2 + tl.where(from_before, 0, 1)) * C + o_c, b_sum, mask=m_c)


@triton.jit
def joints_kernel(p_sorted, p_table, p_partial, N, C, ROWS: tl.constexpr, BC: tl.constexpr):
    """The run that begins in this block and goes on in the next ones: its parts in order."""
    i_b = tl.program_id(0).to(tl.int64)
    o_c = tl.arange(0, BC)
    m_c = o_c < C
    first, behind = i_b * ROWS, (i_b + 1) * ROWS
    if behind < N:
        token = tl.load(p_sorted + behind - 1)
        begins = tl.load(p_sorted + first) != token
        if not begins:
            begins = (first == 0) | (tl.load(p_sorted + first - 1, mask=first > 0, other=-1) != token)
        if begins & (tl.load(p_sorted + behind) == token):
            b_sum = tl.load(p_partial + (i_b * 2 + 1) * C + o_c, mask=m_c, other=0.0)
            j_b = i_b + 1
            while tl.load(p_sorted + j_b * ROWS, mask=j_b * ROWS < N, other=-1) == token:
                b_sum += tl.load(p_partial + j_b * 2 * C + o_c, mask=m_c, other=0.0)
                j_b += 1
            tl.store(p_table + token.to(tl.int64) * C + o_c, b_sum, mask=m_c)


def add_rows(dx_NC: Tensor, sorted_N: Tensor, order_N: Tensor, table_VC: Tensor, rows: int) -> None:
    """Write the sum of each token's rows of ``dx_NC`` into the table; other rows of the table are left alone. All contiguous."""
    N, C = dx_NC.shape
    blocks, BC = triton.cdiv(N, rows), triton.next_power_of_2(C)
    partial = dx_NC.new_empty(blocks, 2, C)
    with torch.cuda.device_of(dx_NC):
        runs_kernel[(blocks,)](dx_NC, sorted_N, order_N, table_VC, partial, N, C, ROWS=rows, BC=BC, num_warps=4)
        joints_kernel[(blocks,)](sorted_N, table_VC, partial, N, C, ROWS=rows, BC=BC, num_warps=4)
