"""What ``flash`` and ``flash_consistent`` change in FlashAttention-4's kernels for SM90 (flash-attn-4, CuTe DSL), by subclass.

Forward: m counts in log2, L or (m, 1 / d) is saved; for ``flash_consistent`` m is whole, d sums P_bar as rounded, and 16 bits of O go
beside O. Backward: ``flash_consistent`` makes P of P_bar as rounded, from one number a row, w = M + 1.5 - f (``prepare.pack``).

What differs from our Triton kernels: c = scale log2(e) is a product in FP32, and what ``pack`` says.

Where a method of theirs names what has to differ, it is traced with another meaning of the name (``_with``).
"""

from __future__ import annotations

import operator
import types
from dataclasses import dataclass

import cutlass
from cutlass import BFloat16, Float16, Float32, Int16, Int32, cute
from cutlass._mlir_helpers.arith import bitcast
from cutlass.cutlass_dsl import T
from flash_attn.cute import barrier, utils
from flash_attn.cute.flash_bwd_sm90 import FlashAttentionBackwardSm90
from flash_attn.cute.flash_fwd import FlashAttentionForwardBase
from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90
from flash_attn.cute.softmax import Softmax
from flash_attn.cute.utils import AuxData
from quack import copy_utils, layout_utils

_WHOLE = 1.5 * 2.0**23
"""Added and subtracted, it rounds a number below 2^22 to a whole one."""


def _rounded(x, dtype):
    """x, a Float32, to the nearest value of ``dtype``. The packed conversion is quick, the one of a single number is not."""
    if dtype is BFloat16:  # the upper half of FP32
        return Float32(bitcast(utils.cvt_f16x2_f32(0.0, x, dtype).ir_value(), T.f32()))
    return Float16(bitcast(utils.cvt_f16x2_f32(x, 0.0, dtype).to(Int16).ir_value(), T.f16())).to(Float32)


def _namespace(module, **names):
    return types.SimpleNamespace(**{**vars(module), **names})


def _with(method, **names):
    """The method of theirs as its source says, but for these names of its module."""
    function = method.__wrapped__
    names = {**function.__globals__, **names}
    copy = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__, copy.__qualname__ = function.__kwdefaults__, function.__qualname__
    copy.__annotations__, copy.__module__ = function.__annotations__, function.__module__
    return cute.jit(copy)


def _bits(x):
    return Int32(bitcast(x.ir_value(), T.i32()))


@dataclass
class _Softmax(Softmax):
    """Rows of ``flash``: m = fp32(c max S'), exp2(fma(S', c, -m)), L = m + log2 l."""

    dtype = None  # to which P_bar is rounded before it is summed
    n_saved = 1  # numbers a row

    @classmethod
    def create(cls, scale_log2, num_rows, arch=80, softmax_scale=None):
        row_max = cute.make_rmem_tensor(num_rows, Float32)
        row_sum = cute.make_rmem_tensor(cls.n_saved * num_rows, Float32)
        return cls(scale_log2, num_rows, row_max, row_sum, arch, softmax_scale)

    def rounded_up(self, m):
        return m

    @cute.jit
    def online_softmax(
        self, acc_S: cute.Tensor, is_first: cutlass.Constexpr = False, check_inf: cutlass.Constexpr = True
    ):
        """P_bar in place of S', and the factors of O_bar."""
        s_mn = layout_utils.reshape_acc_to_mn(acc_S)
        alpha = cute.make_fragment_like(self.row_max, Float32)
        for r in cutlass.range(cute.size(self.row_max), unroll_full=True):
            s = s_mn[r, None].load()
            top = cute.arch.warp_reduction_max(utils.fmax_reduce(s, None, arch=self.arch), threads_in_group=4)
            m = self.rounded_up(top * self.scale_log2)
            if cutlass.const_expr(not is_first):
                m = utils.fmax(m, self.row_max[r])
            base = 0.0 if m == -Float32.inf else m
            p = cute.math.exp2(s * self.scale_log2 - base, fastmath=True)
            s_mn[r, None].store(p)
            if cutlass.const_expr(self.dtype is not None):
                for c in cutlass.range_constexpr(cute.size(s_mn, mode=[1])):
                    s_mn[r, c] = _rounded(s_mn[r, c], self.dtype)
                p = s_mn[r, None].load()
            if cutlass.const_expr(is_first):
                alpha[r] = 1.0
                self.row_sum[r] = utils.fadd_reduce(p, None, arch=self.arch)
            else:
                alpha[r] = cute.math.exp2(self.row_max[r] - base, fastmath=True)
                self.row_sum[r] = utils.fadd_reduce(p, self.row_sum[r] * alpha[r], arch=self.arch)
            self.row_max[r] = m
        return alpha

    @cute.jit
    def finalize(self, final_scale: Float32 = 1.0, sink_val=None):
        """1 / l of each row; leaves L in ``row_sum``."""
        inverse = cute.make_fragment_like(self.row_max, Float32)
        for r in cutlass.range(cute.size(self.row_max), unroll_full=True):
            total = utils.warp_reduce(self.row_sum[r], operator.add, width=4)
            inverse[r] = 1.0 / total
            self.row_sum[r] = self.row_max[r] + cute.math.log2(total, fastmath=True)
        return inverse


@dataclass
class _ConsistentSoftmax(_Softmax):
    """Rows of ``flash_consistent``: m is a whole number, d sums P_bar as rounded."""

    n_saved = 2

    def rounded_up(self, m):
        return cute.math.ceil(m)

    @cute.jit
    def finalize(self, final_scale: Float32 = 1.0, sink_val=None):
        """1 / d of each row; leaves m, then 1 / d in ``row_sum``."""
        inverse = cute.make_fragment_like(self.row_max, Float32)
        for r in cutlass.range(cute.size(self.row_max), unroll_full=True):
            inverse[r] = 1.0 / utils.warp_reduce(self.row_sum[r], operator.add, width=4)
            self.row_sum[r] = self.row_max[r]
            self.row_sum[self.num_rows + r] = inverse[r]
        return inverse

    @cute.jit
    def rescale_O(self, acc_O: cute.Tensor, row_scale: cute.Tensor):
        """As theirs, but nothing where all rows of the warp keep their m: a whole number seldom moves."""
        moved = cutlass.Boolean(False)
        for r in cutlass.range_constexpr(cute.size(row_scale)):
            moved = moved | (row_scale[r] != 1.0)
        if cute.arch.vote_any_sync(moved):
            o_mn = layout_utils.reshape_acc_to_mn(acc_O)
            for r in cutlass.range_constexpr(cute.size(row_scale)):
                o_mn[r, None].store(o_mn[r, None].load() * row_scale[r])


class _BFloat16Softmax(_ConsistentSoftmax):
    dtype = BFloat16


class _Float16Softmax(_ConsistentSoftmax):
    dtype = Float16


class Forward(FlashAttentionForwardSm90):
    """``flash``: mLSE [B, H, T] is L in log2."""

    mma = _with(FlashAttentionForwardSm90.mma, Softmax=_Softmax)


class ConsistentForward(FlashAttentionForwardSm90):
    """``flash_consistent``: mLSE is None; ``aux_data`` has m and 1 / d [B, H, 2, T], and the low bits of O [B, T, H, D], in O's dtype."""

    _mma = _with(FlashAttentionForwardSm90.mma, Softmax=_BFloat16Softmax)
    _mma_float16 = _with(FlashAttentionForwardSm90.mma, Softmax=_Float16Softmax)

    def mma(self, *arguments):
        *arguments, aux_data, _ = arguments
        self.saved, self.low_bits = aux_data.tensors
        mma = self._mma if self.dtype is BFloat16 else self._mma_float16
        mma(*arguments, AuxData(), None)

    @cute.jit
    def epilogue(
        self,
        acc_O: cute.Tensor,
        rows: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        sO: cute.Tensor,
        seqlen,
        tiled_copy: cute.TiledCopy,
        tma_atom_O,
        tiled_mma: cute.TiledMma,
        tidx: Int32,
        m_block: Int32,
        head: Int32,
        batch: Int32,
    ):
        at = tiled_mma.get_slice(tidx).partition_C(cute.make_identity_tensor((self.tile_m, self.tile_hdimv)))
        at_mn, o_mn = layout_utils.reshape_acc_to_mn(at), layout_utils.reshape_acc_to_mn(acc_O)
        lane = at_mn[0, 0][1] // 2  # it has columns 8 u + 2 lane + e
        n_rows, saved, low_bits = cute.size(o_mn, mode=[0]), self.saved, self.low_bits
        for r in cutlass.range_constexpr(n_rows):
            token = m_block * self.tile_m + at_mn[r, 0][0]
            if token < seqlen.seqlen_q:
                if lane == 0:
                    for which in cutlass.range_constexpr(2):
                        saved[batch, head, which, token] = rows[which * n_rows + r]
                # What O lacks as a difference of bit patterns; what a thread has of 32 columns side by side.
                own_bits = low_bits[batch, token, head, None]
                for part in cutlass.range_constexpr(self.tile_hdimv // 32):
                    low = cute.make_rmem_tensor(8, Int16)
                    for i in cutlass.range_constexpr(8):
                        o = o_mn[r, 8 * part + i]
                        difference = _bits(o) - _bits(_rounded(o, self.dtype))
                        low[i] = cutlass.min(difference, Int32(2**15 - 1)).to(Int16)
                    target = cute.local_tile(own_bits, (8,), (4 * part + lane,))
                    cute.autovec_copy(cute.recast_tensor(low, self.dtype), target)
        FlashAttentionForwardBase.epilogue(
            self, acc_O, rows, mO, None, sO, seqlen, tiled_copy, tma_atom_O, tiled_mma, tidx, m_block, head, batch
        )


class _Scale:
    """c of exp2(S' c - w), where w is ``prepare``'s packed statistic of a row."""

    def __init__(self, c, product=None):
        self.c, self.product = c, product

    def __rmul__(self, s):
        return _Scale(self.c, s * self.c)

    def __sub__(self, packed):
        m = (packed + _WHOLE) - _WHOLE
        return _Exponent(self.product - m, 1.5 - (packed - m))


@dataclass
class _Exponent:
    difference: Float32
    factor: Float32


def _reused(dtype):
    """``cute`` whose exp2 makes P of P_bar as rounded to ``dtype``."""

    def exp2(x, fastmath):
        return _rounded(cute.math.exp2(x.difference, fastmath=fastmath), dtype) * x.factor

    return _namespace(cute, math=_namespace(cute.math, exp2=exp2))


@cute.jit
def _store_or_add(turn: Int32, source: cute.Pointer, target: cute.Pointer, size: cutlass.Constexpr):
    if turn == 0:
        copy_utils.cpasync_bulk_s2g(source, target, size)
    else:
        copy_utils.cpasync_reduce_bulk_add_f32(source, target, size)


def _first_stores(method):
    """The method, where the first in the fixed order of sums writes what the others add to: no zeros are needed."""
    turn = []

    def wait_eq(flag, thread, offset, value):
        turn[:] = [value]
        barrier.wait_eq(flag, thread, offset, value)

    def add(source, target, size):
        _store_or_add(turn[0], source, target, size)

    names = {"barrier": _namespace(barrier, wait_eq=wait_eq)}
    return _with(method, **names, copy_utils=_namespace(copy_utils, cpasync_reduce_bulk_add_f32=add))


class Backward(FlashAttentionBackwardSm90):
    """``flash``: mLSE is L in log2; sums of dQ, and of dK and dV of grouped queries, need not be zero."""

    dQaccum_store = _first_stores(FlashAttentionBackwardSm90.dQaccum_store)
    epilogue_dKV = _first_stores(FlashAttentionBackwardSm90.epilogue_dKV)


class ConsistentBackward(Backward):
    """``flash_consistent``: mLSE is ``prepare``'s packed statistic, mdPsum is delta from O and its low bits."""

    _one_block = _with(FlashAttentionBackwardSm90.mma_one_m_block, cute=_reused(BFloat16))
    _one_block_float16 = _with(FlashAttentionBackwardSm90.mma_one_m_block, cute=_reused(Float16))

    def mma_one_m_block(self, *arguments, softmax_scale_log2, **more):
        one_block = self._one_block if self.dtype is BFloat16 else self._one_block_float16
        return one_block(*arguments, softmax_scale_log2=_Scale(softmax_scale_log2), **more)
