"""FlashAttention-4's kernels for Hopper, launched: each is compiled once for shapes of any size, and always deterministic.

No key ranges: with lists of the blocks that a mask leaves, the backward pass for SM90 of this FlashAttention-4 is not deterministic (it
asserts so); without such lists it could mask single keys, but would compute every hidden block, and read keys that nobody may read.

Legend: B batch, H heads, HK heads of keys, T queries, S keys, D head dim.
"""

from __future__ import annotations

import functools

import torch
from cutlass import BFloat16, Float16, Float32, Int32, cute
from flash_attn.cute import interface
from flash_attn.cute.utils import AuxData
from quack.compile_utils import make_fake_tensor
from torch import Tensor

from ..numerics import Numerics
from ..operators import empty_sinks
from ..reference.tiles import empty_outputs
from ..triton.backward import empty_gradients, split_gradients
from ..triton.loads import takes_descriptor
from ..triton.ops import backend
from ..user_error import UserError
from .cute_kernels import Backward, ConsistentBackward, ConsistentForward, Forward
from .prepare import prepare

DTYPES = {torch.bfloat16: BFloat16, torch.float16: Float16}


def _compile(kernel, *operands):
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(kernel, *operands, stream, options="--enable-tvm-ffi")


def _operands(dtype, group):
    """Stand-ins for Q, K, V, O, and the sizes B, T, S, H, HK, D, of any value."""
    b, t, s, h, d = (cute.sym_int() for _ in range(5))
    hk = cute.sym_int() if group > 1 else h
    shapes = (b, t, h, d), (b, s, hk, d), (b, s, hk, d), (b, t, h, d)
    return [make_fake_tensor(dtype, shape, divisibility=8) for shape in shapes], (b, t, s, h, hk, d)


@functools.cache
def _forward(dtype, D: int, group: int, causal: bool, consistent: bool):
    tile = interface._tile_size_fwd_sm90(D, D, causal, False)
    kernel = (ConsistentForward if consistent else Forward)(
        dtype,
        D,
        D,
        group,
        is_causal=causal,
        pack_gqa=False,  # packed heads took longer at head dim 128
        tile_m=tile.m_block_size,
        tile_n=tile.n_block_size,
        num_stages=2,
        num_threads=384,
        intra_wg_overlap=tile.intra_wg_overlap,
        mma_pv_is_rs=tile.mma_pv_is_rs,
    )
    (q, k, v, o), (b, t, _, h, _, d) = _operands(dtype, group)
    saved, aux = make_fake_tensor(Float32, (b, h, t)), AuxData()
    if consistent:
        low_bits = make_fake_tensor(dtype, (b, t, h, d), divisibility=8)
        saved, aux = None, AuxData([make_fake_tensor(Float32, (b, h, 2, t)), low_bits])
    return _compile(kernel, q, k, v, o, saved, Float32(1.0), *[None] * 9, aux, None, None)


def _backward_tile(D: int, causal: bool, consistent: bool):
    # With the wider tile of full attention at head dim 128 P of P_bar spills registers.
    return interface._tile_size_bwd_sm90(D, D, causal or consistent, False)


@functools.cache
def _backward(dtype, D: int, group: int, causal: bool, consistent: bool):
    tile = _backward_tile(D, causal, consistent)
    kernel = (ConsistentBackward if consistent else Backward)(
        dtype,
        D,
        D,
        group,
        causal,
        deterministic=True,
        tile_m=tile.m_block_size,
        tile_n=tile.n_block_size,
        Q_stage=tile.num_stages_Q,
        dO_stage=tile.num_stages_dO,
        PdS_stage=tile.num_stages_PdS,
        SdP_swapAB=tile.SdP_swapAB,
        dKV_swapAB=tile.dKV_swapAB,
        dQ_swapAB=tile.dQ_swapAB,
        AtomLayoutMSdP=tile.AtomLayoutMSdP,
        AtomLayoutNdKV=tile.AtomLayoutNdKV,
        AtomLayoutMdQ=tile.AtomLayoutMdQ,
        num_threads=(tile.num_wg + 1) * 128,
        dQ_single_wg=tile.dQ_single_wg,
    )
    (q, k, v, do), (b, _, s, h, hk, d) = _operands(dtype, group)
    padded = cute.sym_int()
    rows, delta, dq = (make_fake_tensor(Float32, (b, h, n), divisibility=4) for n in (padded, padded, cute.sym_int()))
    if group > 1:
        dk, dv = (make_fake_tensor(Float32, (b, hk, cute.sym_int()), divisibility=4) for _ in range(2))
    else:
        dk, dv = (make_fake_tensor(dtype, (b, s, hk, d), divisibility=8) for _ in range(2))
    turns = [make_fake_tensor(Int32, (b, h, cute.sym_int(), 1))]
    turns += [make_fake_tensor(Int32, (b, hk, cute.sym_int(), 2)) if group > 1 else None for _ in range(2)]
    none = [None] * 6
    return _compile(kernel, q, k, v, do, rows, delta, dq, dk, dv, Float32(1.0), *none, *turns, AuxData(), None, None)


def _readable(*tensors: Tensor) -> list[Tensor]:
    """The tensors, copied where TMA cannot read them: other alignment than 16 bytes, or a stride of 0."""
    return [x if takes_descriptor(x) else x.clone(memory_format=torch.contiguous_format) for x in tensors]


def launch_forward(q: Tensor, k: Tensor, v: Tensor, seed: Tensor, n: Numerics, scale: float, causal: bool, *_):
    """O [B, T, H, D], its low bits or an empty tensor, and L [B, H, T] in log2 or m and 1 / d [B, H, 2, T]."""
    (T, H, D), S = q.shape[1:], k.shape[1]
    if causal and T != S:
        raise UserError(f"attention backend = 'flash_hopper': {T} queries and {S} keys: expected as many, where causal")
    if scale <= 0:
        raise UserError(f"attention backend = 'flash_hopper': scale = {scale}: expected a positive number")
    o, low_bits, saved = empty_outputs(q, v, n)
    consistent = saved.ndim == 4
    kernel = _forward(DTYPES[q.dtype], D, H // k.shape[2], causal, consistent)
    rows, aux = (None, AuxData([saved, low_bits.view(q.dtype)])) if consistent else (saved, AuxData())
    kernel(*_readable(q, k, v), o, rows, scale, *[None] * 9, aux, None, None)
    return o, low_bits, saved


def launch_backward(do, q, k, v, seed, o, low_bits, saved, n: Numerics, scale: float, causal: bool, *_):
    """dQ, dK and dV in one tensor (``empty_gradients``), from what ``launch_forward`` gave, and an empty gradient of no sinks."""
    (B, T, H, D), (_, S, HK, _) = q.shape, k.shape
    dtype, group, consistent = DTYPES[q.dtype], H // HK, saved.ndim == 4
    tile = _backward_tile(D, causal, consistent)
    blocks, key_blocks = -(-T // tile.m_block_size), -(-S // tile.n_block_size)
    do, q, k, v = _readable(do, q, k, v)
    gradients = empty_gradients(q, v)
    dq, dk, dv = split_gradients(gradients, q, k, v)
    # Whose turn it is to add: these make the order of sums, and so their bits, always the same.
    counts = [(H, blocks, 1)] + [(HK, key_blocks, 2)] * (2 if group > 1 else 0)
    sizes = [B * heads * size * ways for heads, size, ways in counts]
    flat = torch.zeros(sum(sizes), dtype=torch.int32, device=q.device).split(sizes)
    turns = [x.view(B, *count) for x, count in zip(flat, counts, strict=True)] + [None] * (3 - len(counts))
    sums = [dk, dv]
    dq_sums = torch.empty((B, H, blocks * tile.m_block_size * D), dtype=torch.float32, device=q.device)
    if group > 1:
        sums = list(torch.empty((2, B, HK, key_blocks * tile.n_block_size * D), dtype=torch.float32, device=q.device))
    # Last: the kernel may start before launches ahead of it have ended, and waits for the last of them alone.
    delta, rows = prepare(do, o, low_bits, saved, blocks * tile.m_block_size)
    kernel = _backward(dtype, D, group, causal, consistent)
    kernel(q, k, v, do, rows, delta, dq_sums, *sums, scale, *[None] * 6, *turns, AuxData(), None, None)

    def convert(sums, to, factor, rows, threads, atoms, swapped):
        shape = 90, dtype, D, rows, threads, atoms, swapped
        interface._bwd_postprocess_convert(sums, to, factor, None, None, *shape, fake_mode=False)

    threads = 128 * (1 if tile.dQ_single_wg else tile.num_wg)
    convert(dq_sums, dq, scale, tile.m_block_size, threads, tile.AtomLayoutMdQ, tile.dQ_swapAB)
    if group > 1:
        of_keys = tile.n_block_size, 128 * tile.num_wg, tile.AtomLayoutNdKV, tile.dKV_swapAB
        convert(sums[0], dk, scale, *of_keys)
        convert(sums[1], dv, 1.0, *of_keys)
    return gradients, empty_sinks(q, None)


flash_hopper = backend("flash_hopper", launch_forward, launch_backward)
