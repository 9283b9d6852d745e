"""Blocks of rows for the Triton kernels: addresses, loads, stores, and the scores of one block.

Legend: B batch, H heads, T queries, S keys, D head dim; BT rows and BS columns of a block; ``p_`` pointers, ``b_`` blocks on chip,
``o_`` offsets, ``m_`` masks. Addresses are int64.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .block_sizes import width
from .codes import BF16, INTERPRETED, MAX_AND_SUM, NEAREST, Strides, VisibleRanges
from .round_blocks import dot, operand, round_mantissa
from .softmax import round_scores


@triton.jit
def head_pointer(p_x, i_bh, H, stride_b, stride_h):
    return p_x + (i_bh // H).to(tl.int64) * stride_b + (i_bh % H).to(tl.int64) * stride_h


@triton.jit
def place(blocks, HEADS: tl.constexpr):
    """(head, block) of this program: HEADS heads side by side, their first blocks before their second ones."""
    i_group = tl.program_id(0) // (HEADS * blocks)
    i_rest = tl.program_id(0) % (HEADS * blocks)
    heads = tl.minimum(HEADS, tl.num_programs(0) // blocks - i_group * HEADS)
    return i_group * HEADS + i_rest % heads, i_rest // heads


@triton.jit
def load_rows(
    p_x,
    strides,
    i_bh,
    H,
    start,
    length,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
    TMA: tl.constexpr,
    m_r=None,
):
    """Rows [start, start + ROWS) of one head, columns from D on being 0; MASKED: rows from ``length`` on are 0, too. TMA: p_x is a
    descriptor, which sees to both. Or those rows only that ``m_r`` [ROWS] names, if given, the others being 0."""
    if TMA:
        b_x = p_x.load([i_bh // H, i_bh % H, start, 0]).reshape(ROWS, WIDTH)
    else:
        p_head = head_pointer(p_x, i_bh, H, strides.b, strides.h) + tl.cast(start, tl.int64) * strides.t
        o_r = tl.arange(0, ROWS).to(tl.int64)
        o_d = tl.arange(0, WIDTH).to(tl.int64)
        # [ROWS, WIDTH]
        p_block = p_head + (o_r[:, None] * strides.t + o_d[None, :] * strides.d)
        m_x = None
        if WIDTH != D:
            m_x = (o_d < D)[None, :]
        if m_r is None and MASKED:
            m_r = start + tl.arange(0, ROWS) < length
        if m_r is not None:
            m_x = m_r[:, None] if m_x is None else m_x & m_r[:, None]
        b_x = tl.load(p_block) if m_x is None else tl.load(p_block, mask=m_x, other=0.0)
    return b_x


@triton.jit
def load_keys(
    p_x,
    strides,
    queries,
    start,
    S,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    SHAPE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Rows [start, start + BS) of K or V, D wide, for the head of some queries: GROUP of these, side by side, share a head of keys."""
    BS: tl.constexpr = SHAPE.BS
    m_r = None
    if SHAPE.PADDED:
        m_r = load_padding(queries.ranges.p_padding, start, S, BS)
    if SHAPE.GROUP == 1:
        i_keys, heads = queries.i_bh, queries.H
    else:
        i_keys, heads = queries.i_bh // SHAPE.GROUP, queries.H // SHAPE.GROUP
    return load_rows(p_x, strides, i_keys, heads, start, S, BS, D, WIDTH, MASKED or SHAPE.RANGES, SHAPE.TMA, m_r)


@triton.jit
def load_padding(p_padding, start, S, BS: tl.constexpr):
    """The padding mask of the keys [start, start + BS) of one batch entry, [BS]."""
    o_s = start + tl.arange(0, BS)
    return tl.load(p_padding + o_s, mask=o_s < S, other=0) != 0


@triton.jit
def load_ranges(p_key_ranges, p_padding, i_bh, H, row, T, S, BT: tl.constexpr, PADDED: tl.constexpr):
    """What the rows [row, row + BT) see, as ``VisibleRanges``."""
    p_first = p_key_ranges + (i_bh // H).to(tl.int64) * (2 * T)
    o_t = tl.minimum(row + tl.arange(0, BT), T - 1)
    bottom = tl.minimum(row + BT, T) - 1
    p_b = p_key_ranges
    if PADDED:
        p_b = p_padding + (i_bh // H).to(tl.int64) * S
    return VisibleRanges(
        tl.load(p_first + o_t),
        tl.load(p_first + T + o_t),
        tl.load(p_first + row),
        tl.load(p_first + T + bottom),
        tl.load(p_first + bottom),
        tl.load(p_first + T + row),
        p_b,
    )


@triton.jit
def load_output_rows(p_x, i_bh, H, row, T, SHAPE: tl.constexpr):
    """Rows [row, row + BT) of one head of a contiguous [B, T, H, DV]."""
    strides = Strides(tl.cast(T, tl.int64) * H * SHAPE.DV, H * SHAPE.DV, SHAPE.DV, 1)
    return load_rows(p_x, strides, i_bh, H, row, T, SHAPE.BT, SHAPE.DV, SHAPE.WIDTH_V, True, False)


@triton.jit
def store_rows(p_x, b_x, i_bh, start, length, H, stride_b, stride_r, D: tl.constexpr):
    """Rows of one head, a block of D columns or more, into [B, length, H, D], heads of one row side by side; ``stride_b``, ``stride_r``: of
    batch and row."""
    ROWS: tl.constexpr = b_x.shape[0]
    WIDTH: tl.constexpr = b_x.shape[1]
    o_r = tl.arange(0, ROWS).to(tl.int64)
    o_d = tl.arange(0, WIDTH).to(tl.int64)
    p_head = head_pointer(p_x, i_bh, H, stride_b, D)
    # [ROWS, WIDTH]
    p_block = p_head + tl.cast(start, tl.int64) * stride_r + (o_r[:, None] * stride_r + o_d[None, :])
    if INTERPRETED and p_x.dtype.element_ty == tl.bfloat16:
        b_x = round_mantissa(b_x, BF16, NEAREST, 0)
    m_x = (start + tl.arange(0, ROWS) < length)[:, None]
    if WIDTH != D:
        m_x = m_x & (o_d < D)[None, :]
    tl.store(p_block, b_x.to(p_x.dtype.element_ty), mask=m_x)


@triton.jit
def load_row(p_x, m_t, EVEN: tl.constexpr, OTHER: tl.constexpr):
    """A number a row, [BT]; OTHER for those past the end, which ``m_t`` does not name. EVEN: there are none."""
    return tl.load(p_x) if EVEN else tl.load(p_x, mask=m_t, other=OTHER)


@triton.jit
def load_statistics(p_saved, i_bh, o_t, T, EVEN: tl.constexpr, SAVED_STATISTICS: tl.constexpr):
    """What was kept of the rows o_t [BT]: m and log2 l or 1 / d, or L in the place of both."""
    APART: tl.constexpr = SAVED_STATISTICS == MAX_AND_SUM
    o_row = i_bh.to(tl.int64) * (2 * T if APART else T) + o_t
    m_t = o_t < T
    # Rows past the end get m or L = inf, hence P = 0.
    b_m = load_row(p_saved + o_row, m_t, EVEN, float("inf"))
    b_saved_sum = load_row(p_saved + T + o_row, m_t, EVEN, 0.0) if APART else b_m
    return b_m, b_saved_sum


@triton.jit
def block_scores(
    queries, keys, start, scalars, SITES: tl.constexpr, SHAPE: tl.constexpr, MASKED: tl.constexpr, DTYPE: tl.constexpr
):
    """S of one block [BT, BS], and K of its columns [BS, WIDTH]. With RANGES S is -inf wherever it should be, MASKED or not."""
    BT: tl.constexpr = SHAPE.BT
    BS: tl.constexpr = SHAPE.BS
    S, ranges = keys.S, queries.ranges
    b_k = load_keys(keys.p_k, keys.strides_k, queries, start, S, SHAPE.D, SHAPE.WIDTH, SHAPE, MASKED)
    b_k = operand(b_k, SITES.inputs, DTYPE)
    b_s = dot(queries.b_q, tl.trans(b_k), tl.zeros([BT, BS], tl.float32))
    if SHAPE.RANGES:
        b_s = round_scores(b_s, b_s, scalars, SITES, SHAPE.SOFTCAP, False)
        if SHAPE.PADDED:
            b_s = tl.where(
                in_range(ranges, start, BS) & load_padding(ranges.p_padding, start, S, BS)[None, :], b_s, -float("inf")
            )
        elif (start < ranges.all_from) | (start + BS > ranges.all_to):
            b_s = tl.where(in_range(ranges, start, BS), b_s, -float("inf"))
    else:
        m_s = visible(queries.o_t, start, S, SHAPE.CAUSAL, False, BS)
        b_s = round_scores(b_s, m_s, scalars, SITES, SHAPE.SOFTCAP, MASKED)
    return b_s, b_k


@triton.jit
def in_range(ranges, start, BS: tl.constexpr):
    """Which of the columns [start, start + BS) the rows see, [BT, BS]; padding does not count."""
    o_s = (start + tl.arange(0, BS))[None, :]
    return (o_s >= ranges.b_first[:, None]) & (o_s < ranges.b_last[:, None])


@triton.jit
def visible(o_t, start, S, CAUSAL: tl.constexpr, EVEN: tl.constexpr, BS: tl.constexpr):
    """Which of the columns [start, start + BS) the rows o_t [BT] may see, [BT or 1, BS]. EVEN: there are no columns past the end."""
    o_s = start + tl.arange(0, BS)
    if not CAUSAL:
        m_s = (o_s < S)[None, :]
    elif EVEN:
        m_s = o_s[None, :] <= o_t[:, None]
    else:
        m_s = (o_s < S)[None, :] & (o_s[None, :] <= o_t[:, None])
    return m_s


def rows_source(x: Tensor, rows: int, tma: bool) -> Tensor | TensorDescriptor:
    """What kernels read blocks of rows of ``x`` [B, T, H, D] through: a descriptor for Hopper's copy engine, or ``x`` itself."""
    view = x.transpose(1, 2)
    return TensorDescriptor(view, list(view.shape), list(view.stride()), [1, 1, rows, width(x.shape[3])]) if tma else x


def takes_descriptor(*tensors: Tensor) -> bool:
    """Whether Hopper's copy engine is there and its rules of alignment hold."""
    if capability(tensors[0].device) < (9, 0):
        return False
    strides = [s * x.element_size() for x in tensors for s in x.stride()[:3]]
    return all(s > 0 and s % 16 == 0 for s in strides) and all(
        x.stride(3) == 1 and x.data_ptr() % 16 == 0 for x in tensors
    )


def warpgroup_mma(x: Tensor) -> bool:
    """Whether products of two BF16 blocks there are those of Hopper's warpgroups."""
    return x.dtype == torch.bfloat16 and capability(x.device)[0] == 9


def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a CUDA device; (0, 0) for any other."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
