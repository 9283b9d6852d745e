"""The crash test of attention kernels: good kernels pass, sabotaged ones are found by the class made for them; captured attention."""

import contextlib
import csv
import inspect
import io
import json
import math
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import kernel_tests
import pytest
import torch
from attention_cases import relative_errors, same
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as torchs
from torch.utils.checkpoint import checkpoint

import attention
from attention.check import Case, Inputs, assert_safe, check_attention
from attention.check.__main__ import main
from attention.check.captured import capture, load
from attention.check.classes import CLASSES, Shape, make, one_hot
from attention.check.classes import captured as captured_class
from attention.check.judge import CURES, FACTOR, FEWER_BITS, HIDDEN_DELTA, added, judge
from attention.check.kernels import KNOWN, find, first_calls
from attention.check.measures import exact, plain, run
from attention.check.report import DECISIVE, MASKED, QUICK, csv_of, environment, reasons, table
from errors import UserError

device = kernel_tests.device


SMALL = Shape(B=2, H=4, G=4, T=96, D=32)
CPU = torch.device("cpu")
TILE = 32
PACKAGED = [name for name, chosen in CLASSES.items() if chosen.packaged]


def _added(a: Tensor, b: Tensor, dtype: torch.dtype, any_order: bool = False) -> Tensor:
    """a @ b, its products of tiles summed in ``dtype``."""
    total = torch.zeros((), dtype=dtype)
    tiles = range(0, a.shape[-1], TILE)
    for j in random.sample(tiles, len(tiles)) if any_order else tiles:
        total = total + (a[..., j : j + TILE].float() @ b[..., j : j + TILE, :].float()).to(dtype)
    return total


class _Tiled(torch.autograd.Function):
    """Flash attention's formulas in PyTorch; ``fault`` names what is done wrong. Good otherwise: delta is made from an FP32 O."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, fault: str) -> Tensor:
        ctx.n = q.shape[1] // k.shape[1]
        scale = q.shape[-1] ** -0.5 if fault == "scale ignored" else scale
        keys, values = (x.repeat_interleave(ctx.n, 1) for x in (k, v))
        s = q.float() @ keys.float().mT * scale
        off = {"mask off by one": 0, "mask of the partial tile off by one": s.shape[-1] // TILE * TILE}
        if causal:
            hidden = torch.ones(s.shape[-2:], dtype=torch.bool).triu(1)
            first = off.get(fault, s.shape[-1])
            hidden[first:] = hidden[first:].triu(first + 2)
            s = s.masked_fill(hidden, -math.inf)
        if fault == "last tile dropped":
            s[..., s.shape[-1] // TILE * TILE :] = -math.inf
        m = s.amax(-1, keepdim=True)
        p = (s - m).exp()
        if fault == "exponent rounded":  # P of a large maximum is more than 1
            p = (s - m * (1 - 2.0**-23)).exp()
        p_bar = p.to(q.dtype).float()
        if fault == "P rounded down":
            p_bar = (p.view(torch.int32) & -65536).view(torch.float32)
        if fault == "P in FP8":
            p_bar = p.to(torch.float8_e4m3fn).float()
        total = (p_bar if fault == "P rounded before its sum" else p).sum(-1, keepdim=True)
        o = p_bar @ values.float() / total
        if fault == "O 1 % too large":
            o = o * 1.01
        weights = p / total
        if fault == "lse in BF16":
            weights = (s - (m + total.log()).to(q.dtype).float()).exp()
        ctx.save_for_backward(q, k, v, weights, o.to(q.dtype).float() if fault == "delta from a rounded O" else o)
        ctx.scale, ctx.fault = scale, fault
        return o.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:
        q, k, v, p, o = ctx.saved_tensors
        keys, values = (x.repeat_interleave(ctx.n, 1).float() for x in (k, v))
        delta = (do.float() * o).sum(-1, keepdim=True)
        if ctx.fault == "delta 1 % too large":
            delta = delta * 1.01
        if ctx.fault == "delta of the next row":
            delta = delta.roll(1, -2)
        ds = (p * (do.float() @ values.mT - delta) * ctx.scale).to(q.dtype)
        dtypes = {"dQ added in BF16": q.dtype, "atomics in BF16": torch.bfloat16, "atomics in FP16": torch.float16}
        dq = _added(ds, keys, dtypes.get(ctx.fault, torch.float32), ctx.fault.startswith("atomics"))
        sums = q.dtype if ctx.fault == "dK and dV added in BF16" else torch.float32
        dk, dv = _added(ds.mT, q, sums), _added(p.to(q.dtype).mT, do, sums)
        if ctx.fault == "dK without scale":
            dk = dk / ctx.scale
        if ctx.fault == "dK of the last tile is 0":
            dk[..., -TILE:, :] = 0
        dk, dv = (x.unflatten(1, (-1, ctx.n)).sum(2) for x in (dk, dv))
        if ctx.fault == "dK of the next group" and dk.shape[1] > 2:
            dk = dk.roll(1, 1)
        if ctx.fault == "dO overwritten":
            do.zero_()
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), None, None, None


def tiled(fault: str = "") -> Callable[..., Tensor]:
    return lambda q, k, v, causal, scale: _Tiled.apply(q, k, v, causal, scale, fault)


@pytest.mark.parametrize("kernel", ["torch:math", "flash_consistent", tiled(), tiled("P rounded before its sum")])
def test_kernels_whose_rows_of_ds_sum_to_zero_are_safe(kernel: Any) -> None:
    assert_safe(kernel, device="cpu", shape=SMALL)


@pytest.mark.parametrize("kernel", ["flash", "torch:flash", tiled("delta from a rounded O")])
def test_delta_from_a_rounded_o_is_at_risk_and_gaussian_inputs_do_not_tell(kernel: Any) -> None:
    report = check_attention(kernel, device="cpu", shape=SMALL, classes=("gaussian", "common_part", "shared_direction"))
    assert [case.verdict for case in report.cases] == ["safe", "at risk", "at risk"]
    assert report.cases[1].reason.startswith("delta or P: ")


def loses_the_tail(q: Tensor, k: Tensor, *rest: Any) -> Tensor:
    """No gradient of the features of K that V has not, as the rotary ones of MLA."""
    n = rest[0].shape[-1]
    return tiled()(q, torch.cat((k[..., :n], k[..., n:].detach()), -1), *rest)


@pytest.mark.parametrize(
    ("kernel", "verdict"),
    [("flash_consistent", "safe"), ("flash", "at risk"), (tiled(), "safe"), (loses_the_tail, "wrong")],
)
def test_values_may_have_another_head_dim(kernel: Any, verdict: str) -> None:
    report = check_attention(kernel, device="cpu", shape=replace(SMALL, D=48, DV=32))
    assert (report.verdict, {*report.not_tried} & {*PACKAGED}) == (verdict, {*PACKAGED})


def test_captured_inputs_are_padded_to_each_head_dim() -> None:
    shape = Shape(D=96, DV=80)
    p = make("captured_late", shape, torch.bfloat16, CPU)
    assert [x.shape[-1] for x in (p.q, p.k, p.v, p.do)] == [96, 96, 80, 80]
    assert check_attention("flash_consistent", device="cpu", shape=shape, classes=PACKAGED).verdict == "safe"


def test_captured_inputs_are_not_tried_in_a_smaller_head_dim_of_values() -> None:
    report = check_attention("plain", device="cpu", shape=replace(SMALL, D=64, DV=32), classes="captured_late")
    assert report.not_tried == {"captured_late": "it has head dim 64"}


def test_a_head_dim_of_values_that_is_the_others_is_none_of_its_own() -> None:
    shape = Shape(D=64, DV=64)
    assert (shape, str(shape), replace(shape, D=32).dims) == (Shape(), str(Shape()), (32, 32))


def causal_only(query: Any, key: Any, value: Any, attn_mask: Any = None, is_causal: Any = 0, scale: Any = None):
    return torchs(query, key, value, is_causal=True, scale=scale)


def takes_v_in_fp8(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return tiled()(q, k, v + (v.to(torch.float8_e4m3fn).to(v.dtype) - v).detach(), *rest)


def adds_to_what_is_hidden(q: Any, k: Any, v: Any, attn_mask: Any = None, is_causal: Any = 0, scale: Any = None):
    """An additive mask that hides usual logits, not those of 10,000 and more."""
    visible = torch.ones(q.shape[2], q.shape[2]).tril().bool() if attn_mask is None else attn_mask
    return torchs(q, k, v, (-1e4 * ~visible).to(q.dtype), scale=scale)


def adds_the_lowest_number(q: Any, k: Any, v: Any, attn_mask: Any = None, is_causal: Any = 0, scale: Any = None):
    """As eager attention of transformers: S and its mask are of the inputs' dtype."""
    visible = torch.ones(q.shape[2], q.shape[2]).tril().bool() if attn_mask is None else attn_mask
    s = q @ k.mT * scale + ~visible * torch.finfo(q.dtype).min
    return s.softmax(-1, dtype=torch.float32).to(q.dtype) @ v


def unpads(o: float = 0, dk: float = 0) -> Callable[..., Tensor]:
    """As kernels of packed sequences do. ``o``: O of queries behind a sequence's end; ``dk``: that of keys there."""

    def call(query: Any, key: Any, value: Any, attn_mask: Any = None, is_causal: Any = 0, scale: Any = None):
        T = query.shape[2]
        lengths = attn_mask[:, 0, -1].sum(-1).tolist()
        there = torch.arange(T) < torch.tensor(lengths)[:, None, None]
        key.register_hook(lambda gradient: gradient.masked_fill(~there[..., None], dk))
        each = [
            torchs(*(x[b : b + 1, :, :n] for x in (query, key, value)), is_causal=True, scale=scale)
            for b, n in enumerate(lengths)
        ]
        return torch.cat([nn.functional.pad(x, (0, 0, 0, T - x.shape[2]), value=o) for x in each])

    return call


def gets_its_mask(change: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(query: Any, key: Any, value: Any, attn_mask: Any = None, is_causal: Any = 0, scale: Any = None):
        return torchs(query, key, value, change(attn_mask, key), is_causal=is_causal, scale=scale)

    return call


@gets_its_mask
def reads_float32_as_16_bits(mask: Tensor, key: Tensor) -> Tensor:
    """As cuDNN did."""
    return mask.view(key.dtype)[..., : key.shape[2]] if mask.dtype == torch.float32 else mask


@gets_its_mask
def refuses_float32(mask: Tensor, key: Tensor) -> Tensor:
    """As torch's memory-efficient kernel does."""
    if mask.dtype == torch.float32:
        raise RuntimeError("invalid dtype for bias")
    return mask


@gets_its_mask
def doubles_dk_beside_bf16(mask: Tensor, key: Tensor) -> Tensor:
    key.register_hook(lambda dk: dk * (1 + (mask.dtype == torch.bfloat16)))
    return mask


@gets_its_mask
def ignores_key_lengths(mask: Tensor, key: Tensor) -> Tensor:
    """It takes from the mask only whether that is causal."""
    return torch.ones_like(mask) if mask.triu(1).any() else torch.ones_like(mask).tril()


@gets_its_mask
def blind_tail(mask: Tensor, key: Tensor) -> Tensor:
    mask = mask.clone()
    mask[:, :, key.shape[2] // TILE * TILE :] = True
    return mask


def leaks_where_half_a_tile_or_more_is_left(q: Tensor, *rest: Any) -> Tensor:
    return tiled("mask of the partial tile off by one" if q.shape[2] % TILE >= TILE // 2 else "")(q, *rest)


def with_keys_of_zeros(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    return plain(q, *(nn.functional.pad(x, (0, 0, 0, -x.shape[2] % TILE)) for x in (k, v)), causal, scale)


def in_threes_by_turns(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    """Right for up to two query heads to a key head."""
    n = q.shape[1] // k.shape[1]
    return plain(q, *(x.repeat(1, n, 1, 1) if n > 2 else x for x in (k, v)), causal, scale)


class _KeepsItsO(torch.autograd.Function):
    memory: ClassVar[dict[torch.Size, Tensor]] = {}

    @staticmethod
    def forward(ctx: Any, o: Tensor) -> Tensor:
        return _KeepsItsO.memory.setdefault(o.shape, torch.empty_like(o)).copy_(o).detach()

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Tensor:
        return do


def rounds_s(gradient: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """``gradient``: what its backward pass makes of the logits' gradient."""

    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        s = (q @ k.mT).float() * scale
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
        s.register_hook(gradient)
        return s.softmax(-1).to(v.dtype) @ v

    return call


def with_exp2(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    """As fast kernels do: logits times log2(e) are rounded once more."""
    s = q.float() @ k.float().mT * (scale / math.log(2))
    s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    p = (s - s.amax(-1, keepdim=True)).exp2()
    return ((p / p.sum(-1, keepdim=True)).to(v.dtype).float() @ v.float()).to(v.dtype)


def cuts_o(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    """O is rounded towards zero; its gradients are right."""
    o = plain(q, k, v.float(), causal, scale)
    return (o + ((o.detach().view(torch.int32) & -65536).view(torch.float32) - o.detach())).to(q.dtype)


def hides_with(low: float) -> Callable[..., Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        return (q.float() @ k.float().mT * scale).masked_fill(~visible, low).softmax(-1).to(v.dtype) @ v

    return call


def in_flash_attentions_layout(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    return plain(*(x.transpose(1, 2) for x in (q, k, v)), causal, scale).transpose(1, 2)


def in_flash_attentions_layout_contiguous(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return in_flash_attentions_layout(q.view(-1).view(q.shape), k, v, *rest)


def no_keys(o: float, factor: float) -> Callable[..., Tensor]:
    """``o`` in rows without keys; dK is multiplied by ``factor``."""

    def call(query: Any, key: Any, value: Any, attn_mask: Any = None, is_causal: Any = 0, scale: Any = None):
        assert query.shape[2] == SMALL.T  # a kernel may not be for odd lengths
        dead = ~attn_mask.any(-1, keepdim=True)
        if factor != 1:
            key.register_hook(lambda dk: dk * factor)
        return torchs(query, key, value, attn_mask | dead, scale=scale).masked_fill(dead, o)

    return call


class _Spoiled(torch.autograd.Function):
    """Plain attention; ``spoil`` makes others of ctx, dO and its gradients."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, spoil: Any) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.rest, ctx.spoil = (causal, scale), spoil
        return plain(q, k, v, *ctx.rest)

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:
        operands = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            o = plain(*operands, *ctx.rest)
        return *ctx.spoil(ctx, do, *torch.autograd.grad(o, operands, do)), None, None, None


def spoiled(spoil: Callable[..., Any]) -> Callable[..., Tensor]:
    return lambda q, k, v, causal, scale: _Spoiled.apply(q, k, v, causal, scale, spoil)


def doubles_dq_where(found: Callable[[Tensor], Any]) -> Callable[..., Tensor]:
    return spoiled(lambda _, do, dq, *g: (dq * (2 if found(do) else 1), *g))


def keeps_its_last_call(q: Tensor, *rest: Any) -> Tensor:
    """Statistics of a shape in one buffer."""
    LAST[q.shape] = call = object()
    return _Spoiled.apply(q, *rest, lambda _, do, *g: [x * (1 + (LAST[q.shape] is not call)) for x in g])


LAST: dict[torch.Size, object] = {}


def scales_by_1(
    query: Any, key: Any, value: Any, attn_mask: Any = None, is_causal: Any = 0, scale: Any = 1.0
) -> Tensor:
    return plain(query, key, value, is_causal, scale)


def takes_strides_of_q_for_do(q: Tensor, *rest: Any) -> Tensor:
    def spoil(_: Any, do: Tensor, dq: Tensor, *g: Tensor) -> tuple[Tensor, ...]:
        read = do.as_strided(do.shape, q.stride()) if do.stride(3) else do
        return (dq * (1 + (read != do).any()), *g)

    return _Spoiled.apply(q, *rest, spoil)


PLANNED: dict[Any, tuple[int, ...]] = {}


def plans_for_the_first_do(q: Tensor, *rest: Any) -> Tensor:
    """As torch 2.11 does with cuDNN: the plan that is kept of a call is for its strides of dO, which its key leaves out."""
    key = q.shape, q.stride(), *(x.stride() for x in rest[:2])

    def spoil(_: Any, do: Tensor, *g: Tensor) -> list[Tensor]:
        do = do if do.stride(3) == 1 else do.contiguous()
        return [x * (1 + (PLANNED.setdefault(key, do.stride()) != do.stride())) for x in g]

    return _Spoiled.apply(q, *rest, spoil)


def fills_half_a_tile(q: Any, k: Any, v: Any, attn_mask: Any = None, is_causal: Any = 0, scale: Any = None):
    """As cuDNN did: with a mask, keys behind the end of a tile of 128 that is half full have a logit of 0, and exp(-lse) overflows."""
    if attn_mask is not None and q.shape[2] % 128 == 64:
        lse = (q @ k.mT * scale).masked_fill(~attn_mask, -math.inf).logsumexp(-1, keepdim=True)
        q.register_hook(lambda dq: dq + 0 * (-lse.float()).exp().to(dq.dtype))
    return torchs(q, k, v, attn_mask, is_causal=is_causal, scale=scale)


def only_whole(ctx: Any, _: Tensor, *gradients: Tensor) -> tuple[Tensor, ...]:
    if not all(ctx.needs_input_grad[:3]):
        raise ValueError("not for all")
    return gradients


BUFFERS: dict[Any, Tensor] = {}


@spoiled
def gradients_in_one_buffer(ctx: Any, _: Tensor, *gradients: Tensor) -> list[Tensor]:
    """Wrong where only some need a gradient, and right again in the same memory in the next call."""
    some = not all(ctx.needs_input_grad[:3])
    kept = [BUFFERS.setdefault((i, x.shape), torch.empty_like(x)) for i, x in enumerate(gradients)]
    return [buffer.copy_(x * (1 + some)).detach() for buffer, x in zip(kept, gradients, strict=True)]


def nan_where_dv_is_0(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    v = v * 1
    if v.requires_grad:
        v.register_hook(lambda dv: dv.masked_fill(dv == 0, math.nan))
    return plain(q, k, v, *rest)


def for_exp2(multiply: Callable[[Tensor, float], Tensor]) -> Callable[..., Tensor]:
    return lambda q, k, v, causal, scale: plain(multiply(q, scale / math.log(2)), k, v, causal, math.log(2))


@spoiled
def races_in_one_row(_: Any, __: Tensor, dq: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
    dq[0, 0, -1] *= 1 + 0.03 * (next(CALLS) % 2)
    return dq, *rest


Q_ROUNDED = "as where q times its scale is rounded"
CALLS = iter(range(1000))
R = ("repeatability", "wrong")
LAST_ROW, KEY_0 = torch.tensor([SMALL.T + 12]), torch.tensor([0])
# A kernel, the class that finds it, its verdict, and a word of the reason.
SABOTAGED: list[tuple[Any, str, str, str]] = [
    (in_flash_attentions_layout, "gaussian", "wrong", "layout: O is right for"),
    (in_flash_attentions_layout_contiguous, "gaussian", "wrong", "layout: O is right for"),
    (tiled("delta of the next row"), "gaussian", "wrong", ""),
    (spoiled(lambda _, __, dq, dk, dv: (1.02 * dq, dk, dv)), "gaussian", "wrong", "dq has 7 x plain's"),
    (spoiled(lambda _, __, dq, dk, dv: (dq, dk.index_copy(2, KEY_0, dk[:, :, :1] / 2), dv)), "gaussian", "wrong", "dk"),
    (
        spoiled(lambda _, __, dq, *g: (dq / math.log(2), *g)),
        "gaussian",
        "wrong",
        "dq is off by 44.2 % of its size (1.44",
    ),
    (cuts_o, "values_of_one_sign", "at risk", "rounded to one side"),
    (tiled("dQ added in BF16"), "cancelling_tiles", "at risk", ""),
    (tiled("dK and dV added in BF16"), "cancelling_queries", "at risk", "errors: dk has "),
    (tiled("last tile dropped"), "last_key", "wrong", "it has too little weight"),
    (lambda q, *rest: plain(q / 2, *rest), "last_key", "wrong", "it has too little weight"),
    (tiled("mask off by one"), "mask_edges", "wrong", "O of query 0 is not V of key 0"),
    (nan_where_dv_is_0, "mask_edges", "wrong", "mask: "),
    (adds_to_what_is_hidden, "mask_edges", "wrong", "mask: "),
    (adds_to_what_is_hidden, "padding", "wrong", "mask: "),
    (refuses_float32, "float_mask", "unverified", "an additive mask in float32: RuntimeError: invalid dtype for bias"),
    (doubles_dk_beside_bf16, "float_mask", "wrong", "float mask: an additive mask in bfloat16 gives another dk"),
    (tiled(), "float_mask", "unverified", "it has no argument attn_mask"),
    (tiled("mask of the partial tile off by one"), "odd_length", "wrong", "O or dV reads what is masked"),
    (spoiled(lambda _, __, dq, dk, dv: (dq, dk, dv.flip(2))), "odd_length", "wrong", "not 0; errors: dv is off by 1"),
    (leaks_where_half_a_tile_or_more_is_left, "low", "wrong", "O or dV reads what is masked"),
    (with_keys_of_zeros, "full", "wrong", ""),
    (blind_tail, "padding", "wrong", "mask: "),
    (unpads(), "padding", "safe", ""),
    (unpads(), "low_masked", "safe", ""),
    (unpads(o=1e3), "padding", "safe", ""),
    (unpads(o=math.nan), "padding", "wrong", "not finite: o"),
    (unpads(dk=1e-9), "padding", "wrong", "mask: dK or dV of keys that are masked is not 0"),
    (blind_tail, "window", "wrong", "mask: "),
    (no_keys(math.nan, 1), "no_keys", "at risk", "NaN in rows without keys: in O"),
    (no_keys(math.nan, math.nan), "no_keys", "at risk", "NaN in rows without keys: in O and, "),
    (no_keys(0, math.nan), "no_keys", "wrong", "rows without keys: "),
    (no_keys(0, 1), "no_keys", "safe", ""),
    (tiled("dK of the last tile is 0"), "full", "wrong", ""),
    (tiled("dK without scale"), "common_part", "wrong", "dk"),
    (tiled("dK of the next group"), "grouped", "wrong", "dk"),
    (in_threes_by_turns, "grouped", "wrong", ""),
    (
        spoiled(lambda _, __, dq, dk, dv: (dq, dk.index_fill(2, LAST_ROW, 0), dv)),
        "odd_length",
        "wrong",
        "a row of dk is off by 50.7 % of",
    ),
    (hides_with(-1e4), "low", "wrong", "mask: "),
    (hides_with(-1e9), "low", "safe", ""),
    (fills_half_a_tile, "low_masked", "wrong", "not finite: dq"),
    (tiled("exponent rounded"), "one_hot", "at risk", "exponent: "),
    (lambda *call: plain(*call) * (1 - 2.0**-7), "one_hot", "at risk", "one-hot: O is off from V by 7."),
    (tiled("P rounded down"), "common_part", "at risk", "rounded to one side"),
    (tiled("O 1 % too large"), "common_part", "at risk", "error; scale error: O is 1.01 x the exact one"),
    (tiled("lse in BF16"), "peaked_100", "wrong", ""),
    (tiled("P in FP8"), "gaussian", "wrong", "errors: o has "),
    (takes_v_in_fp8, "gaussian", "wrong", "errors: "),
    (tiled("scale ignored"), "scale", "wrong", ""),
    (scales_by_1, "peaked_100", "wrong", "scale: without the argument O is off by"),
    (causal_only, "padding", "safe", ""),  # it hides from a query that is read what is behind the end, too
    (causal_only, "window", "wrong", ""),
    (spoiled(lambda _, do, *g: [x * (2 - do.is_contiguous()) for x in g]), *R, "other strides"),
    (
        spoiled(lambda _, do, dq, *g: (dq, *(x * (1 if do.stride(3) else math.nan) for x in g))),
        *R,
        "a dO in other strides: ",
    ),
    (lambda q, k, v, *rest: plain(q, k, v.as_strided(v.shape, k.stride()), *rest), *R, "other strides: it has"),
    (lambda q, k, *rest: plain(q, k.as_strided(k.shape, q.stride()), *rest), *R, "other strides: it has"),
    (takes_strides_of_q_for_do, *R, "other strides: it has"),
    (lambda q, *rest: plain(q * (1 + (q.storage_offset() > 0)), *rest), *R, "other strides: it has"),
    (lambda q, k, *rest: plain(q, k.as_strided(k.shape, k.contiguous().stride()), *rest), *R, "other strides: it has"),
    (lambda q, *rest: plain(q.view(-1).view(q.shape), *rest), R[0], "unverified", "other strides: RuntimeError: view"),
    (spoiled(only_whole), R[0], "unverified", "where only some need a gradient: ValueError: not for all"),
    (gradients_in_one_buffer, *R, "where only some need a gradient: "),
    (spoiled(lambda ctx, _, dq, *g: (dq * ctx.needs_input_grad[1], *g)), *R, "where only some need a gradient: "),
    (doubles_dq_where(lambda do: do.stride(3) and not do.stride(2)), *R, "a dO in other strides: "),
    (doubles_dq_where(lambda do: do.stride(3) and not do.stride(0)), *R, "a dO in other strides: "),
    (plans_for_the_first_do, *R, "a dO in other strides: "),
    (keeps_its_last_call, *R, "with another forward pass before its backward pass: "),
    (lambda *call: plain(*call) * (1 + 2.0**-7 * (next(CALLS) % 2)), "repeatability", "at risk", "not deterministic: "),
    (lambda *call: _KeepsItsO.apply(plain(*call)), *R, "the next call overwrites O: "),
    (races_in_one_row, R[0], "at risk", "not deterministic: calls differ by"),
    (lambda *call: plain(*call) * (1 + next(CALLS) % 2), *R, "called again: it has other results, by "),
    (lambda q, *rest: plain(q, *rest) + 0 * q.sum(), "not_a_number", "at risk", ""),
    (spoiled(lambda _, __, *g: [x.nan_to_num(0, 0, 0) for x in g]), "not_a_number", "at risk", "NaN: that of a query"),
    (tiled("dO overwritten"), "gaussian", "wrong", "it overwrites dO"),
    (lambda q, *rest: (plain(q, *rest), q.data.zero_())[0], "not_a_number", "wrong", "it overwrites q"),
    ("standard", "peaked_1000", "at risk", "scores: "),
    (lambda *call: plain(*call) * math.nan, "low", "wrong", "not finite: o"),
    (rounds_s(lambda g: g), "peaked_1000", "at risk", "scores: "),
    (for_exp2(lambda q, factor: q * factor), "peaked_1000", "at risk", Q_ROUNDED),
    (for_exp2(lambda q, factor: q * (factor * math.log(2)) / math.log(2)), "scale", "at risk", Q_ROUNDED),
    (rounds_s(lambda g: -g), "peaked_1000", "wrong", "dk"),
    (lambda *call: plain(*call) * (1 - 2.0**-6), "peaked_1000", "at risk", "x the exact one); scale error: O is 0.98"),
]


@pytest.mark.parametrize(("kernel", "name", "verdict", "reason"), SABOTAGED)
def test_a_sabotaged_kernel_is_found(kernel: Any, name: str, verdict: str, reason: str) -> None:
    """In classes and shapes where good ones are safe: see above."""
    (case,) = check_attention(kernel, device="cpu", shape=SMALL, classes=(name,)).cases
    assert case.verdict == verdict, case
    assert reason in case.reason
    assert ("rounded to one side" in case.reason) == (reason == "rounded to one side")


def test_an_o_in_fp16_that_is_further_off_than_its_rounding_has_a_factor() -> None:
    report = check_attention(
        lambda *call: plain(*call) * 1.005, device="cpu", dtype="fp16", shape=SMALL, classes="common_part"
    )
    assert "; scale error: O is 1.005 x" in report.cases[0].reason


def test_a_factor_of_o_is_no_key_that_is_seen_or_lost() -> None:
    classes = ("mask_edges", "last_key")
    assert check_attention(lambda *call: 1.05 * plain(*call), device="cpu", shape=SMALL, classes=classes).found == {}


OVER_QUERIES = ["gaussian", "cancelling_queries"]


@pytest.mark.parametrize(
    ("kernel", "classes", "told"),
    [
        (tiled("dQ added in BF16"), ["gaussian", "cancelling_tiles"], ["the kernel probably adds dq in"]),
        (tiled("dK and dV added in BF16"), OVER_QUERIES, ["the kernel probably adds dk and dv in"]),
        (
            tiled("dK and dV added in BF16"),
            OVER_QUERIES[1:],
            ["run the class gaussian, too: it tells whether the kernel"],
        ),
        (tiled("dQ added in BF16"), ["captured_growing"], ["run --class cancelling_tiles --class gaussian: they"]),
        (tiled("dK of the last tile is 0"), OVER_QUERIES, []),
        (tiled("P in FP8"), ["gaussian", "cancelling_tiles"], ["if P or an operand has 8 bits these are"]),
        (cuts_o, ["values_of_one_sign"], []),
    ],
)
def test_errors_are_told_with_the_sum_in_16_bits_that_makes_them(
    kernel: Any, classes: list[str], told: list[str]
) -> None:
    text = check_attention(kernel, device="cpu", shape=replace(SMALL, T=256, D=64), classes=classes).text()
    advice = re.findall(r"^  errors: (.*)", text, re.MULTILINE)
    assert len(advice) == len(told)
    assert all(line.startswith(start) for line, start in zip(advice, told, strict=True)), advice


@pytest.mark.parametrize(
    ("kernel", "found", "told"),
    [
        (tiled("P in FP8"), ["errors", "delta or P"], True),
        (tiled("dK without scale"), ["errors"], False),
        (spoiled(lambda _, __, dq, dk, dv: (dq.roll(1, -1), dk, dv)), ["errors"], False),
        # All but the last 64 rows of dK lose 4 %: O is right, and 8 bits would show in it.
        (
            spoiled(lambda _, __, dq, dk, dv: (dq, torch.cat([0.96 * dk[:, :, :-64], dk[:, :, -64:]], 2), dv)),
            ["errors"],
            False,
        ),
    ],
)
def test_a_wrong_kernel_is_told_its_delta_and_fewer_bits_where_they_are_seen(
    kernel: Any, found: list[str], told: bool
) -> None:
    """The third one's last column of dQ has no rows of dS."""
    report = check_attention(kernel, device="cpu", shape=SMALL, classes="gaussian")
    assert (report.verdict, [*report.found], FEWER_BITS in report.text()) == ("wrong", found, told)


EXACT = {f"{what}_{x}": 0.0 for what in ("error", "ratio", "size", "worst", "eager") for x in ("o", "dq", "dk", "dv")}


@pytest.mark.parametrize(
    ("name", "ratios", "of_gaussian", "of_full", "told"),
    [
        ("cancelling_queries", {"ratio_dk": 30.0}, {"ratio_dk": 3.9}, {}, "dk"),
        ("cancelling_queries", {"ratio_dk": 30.0}, {"ratio_dk": 18.0}, {}, ""),  # as of a query that is lost
        ("cancelling_queries", {"ratio_dk": 30.0}, {"ratio_dk": 3.9}, {"worst_dk": 0.1}, ""),
        ("cancelling_tiles", {"ratio_o": 13.0}, {"ratio_o": 1.3}, {}, "o"),
        ("cancelling_tiles", {"ratio_o": 13.0, "ratio_dq": 5.0}, {"ratio_o": 1.3}, {}, "o"),  # delta is of that O
        ("cancelling_tiles", {"ratio_o": 13.0, "ratio_dq": 9.0}, {"ratio_o": 8.4}, {}, ""),  # as of P in FP8
    ],
)
def test_a_rounding_that_grows_where_sums_cancel_is_a_sum_in_16_bits(
    name: str, ratios: dict[str, float], of_gaussian: dict[str, float], of_full: dict[str, float], told: str
) -> None:
    advice = added({name: EXACT | ratios, "full": EXACT | of_full}, EXACT | of_gaussian)
    assert [line.split()[4] for line in advice] == ([told] if told else [])


@pytest.mark.parametrize("of_gaussian", [{}, {"ratio_o": 1.0}])  # it is wrong without measures; its dK is not finite
def test_a_gaussian_class_without_that_ratio_tells_of_no_sum(of_gaussian: dict[str, float]) -> None:
    assert added({"cancelling_queries": EXACT | {"ratio_dk": 30.0}}, of_gaussian) == []


@pytest.mark.parametrize(
    ("kernel", "classes", "cures"),
    [
        ("flash", ["common_part", "captured_late"], [CURES["delta or P: "]]),
        ("flash_centered_keys", ["common_part", "signs"], [HIDDEN_DELTA]),
        ("flash", ["common_part", "signs"], [CURES["delta or P: "]]),
        (tiled("lse in BF16"), ["peaked_1000", "signs"], []),
        (cuts_o, ["values_of_one_sign"], ["O: round P and O to nearest, ties to even"]),
        (lambda *call: plain(*call) * 1.005, ["values_of_one_sign", "one_hot"], [CURES["scale error: "]]),
        (lambda *call: plain(*call) * 1.01, ["common_part", "signs"], [CURES["scale error: "]]),
        ("plain", ["scale"], ["scores: keep S in FP32 up to the softmax"]),
        (lambda q, *kv: plain(q * kv[3], *kv[:3], 1.0), ["scale"], ["scores: multiply S by the scale, not q"]),
    ],
)
def test_advice_is_on_what_was_seen_alone(kernel: Any, classes: list[str], cures: list[str]) -> None:
    text = check_attention(kernel, device="cpu", shape=replace(SMALL, D=64), classes=classes).text()
    assert re.findall(r"^  ((?:delta or P|dS|scores|O): .*)", text, re.MULTILINE) == cures


def without_a_maximum(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    p = (q.float() @ k.float().mT * scale).exp().tril()
    return ((p / p.sum(-1, keepdim=True)).to(v.dtype).float() @ v.float()).to(v.dtype)


@pytest.mark.parametrize(
    ("kernel", "name", "told"),
    [
        (tiled("scale ignored"), "scale", "scale: the argument is probably ignored"),
        (
            spoiled(lambda _, __, dq, *g: (dq * 1.01, *g)),
            "peaked_1000",
            FACTOR,
        ),
        (without_a_maximum, "peaked_1000", "exp: subtract the row maximum before it"),
    ],
)
def test_a_cause_that_one_class_shows_is_advised_on(kernel: Any, name: str, told: str) -> None:
    report = check_attention(kernel, device="cpu", shape=SMALL, classes=("common_part", name))
    assert told in report.mend


@pytest.mark.parametrize(
    ("peaked", "reason", "untold"),
    [
        ("", "not finite: o", "exp: "),  # a NaN of tied maxima: exp is finite at larger logits
        ("errors: o has 8.0 x plain's (0.995 x the exact one)", "", ""),
        ("errors: o has 8.0 x plain's (0.995 x the exact one); rounded to one side: ", "", FACTOR),
    ],
)
def test_no_advice_is_given_on_a_cause_that_another_class_rules_out(peaked: str, reason: str, untold: str) -> None:
    report = check_attention("plain", device="cpu", shape=SMALL, classes="gaussian")
    cases = [
        replace(
            report.cases[0],
            name=name,
            reason=why,
            verdict="wrong" if why else "safe",
            measures=EXACT | {"largest_logit": logit},
        )
        for name, why, logit in (("peaked_1000", peaked, 1000.0), ("ties", reason, 200.0))
    ]
    advice = "; ".join(replace(report, cases=cases).mend)
    assert untold not in advice if untold else FACTOR in advice


def test_a_coarse_dq_beside_coarse_gradients_of_gaussian_inputs_needs_no_other_class() -> None:
    errors = {"cancelling_queries": EXACT | {"ratio_dq": 5.0}}
    assert added(errors, EXACT, is_open=True)
    assert not added(errors, EXACT | {"ratio_dk": 5.0}, is_open=True)


def test_a_scale_error_is_found_beside_the_errors_that_it_makes() -> None:
    report = check_attention(lambda *call: 1.01 * plain(*call), device="cpu", shape=SMALL, classes="common_part")
    assert list(report.found) == ["errors", "scale error"]


def test_where_no_advice_is_known_it_says_so() -> None:
    report = check_attention(
        lambda q, *kv: plain(q, *kv) + 0 * q.sum(), device="cpu", shape=SMALL, classes="not_a_number"
    )
    assert "\nmend:\n  no advice is known: train with flash_consistent, or " in report.text()
    assert json.loads(report.json())["mend"][0].startswith("no advice is known: ")


@pytest.mark.parametrize(
    "repaired", ["flash_delta_normalized", "flash_delta_from_p_subtract_first", "flash_consistent"]
)
def test_each_repair_of_delta_or_p_that_is_advised_is_safe(repaired: str) -> None:
    """delta from P normalized with L; from P with m and l apart; from O of the P that the backward pass has."""
    assert_safe(repaired, device="cpu", shape=replace(SMALL, D=64), classes=(*DECISIVE, "captured_late"))


@pytest.mark.parametrize("T", [32, 100, 256])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_kernel_that_reads_a_float32_mask_as_16_bits_is_wrong(dtype: str, T: int) -> None:
    shape = replace(SMALL, T=T)
    report = check_attention(reads_float32_as_16_bits, device="cpu", dtype=dtype, shape=shape, classes="float_mask")
    assert report.cases[0].reason == "float mask: an additive mask in float32 gives another O"


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("kernel", ["flash", "flash_consistent", "standard", "plain", "torch:flash", "torch:math"])
def test_an_additive_mask_is_that_of_its_booleans(kernel: str, dtype: str) -> None:
    assert_safe(kernel, device="cpu", dtype=dtype, shape=SMALL, classes="float_mask")


@pytest.mark.parametrize(
    ("name", "seen", "verdict", "reason"),
    [
        *((name, {"ratio_dk": 7.0}, "wrong", "errors: dk has 7 x plain's") for name in ("padding", "window", "full")),
        ("full", {"ratio_dk": 5.0}, "at risk", "errors: dk has 5.0 x plain's"),
        ("peaked_100", {"ratio_dk": 60.0}, "at risk", "errors: dk has 60.0 x plain's"),
        ("low", {"ratio_o": 4.0, "eager_o": 1.0, "from_eager_o": 0.4}, "at risk", "scores: O is off by 0.0e+00"),
        ("low", {"ratio_o": 4.0, "eager_o": 1.0, "from_eager_o": 0.9}, "at risk", "errors: o has 4.0 x plain's"),
        (
            "values_of_one_sign",
            {"bias_o": -1.2, "bias_o_se": 0.1},
            "at risk",
            "errors: rounded to one side: O is off by",
        ),
        ("values_of_one_sign", {"bias_o": -1.2, "bias_o_se": 0.2}, "safe", ""),
        (
            "peaked_100",
            {"ratio_o": 4.0, "bias_o": -2.6, "bias_o_se": 0.1},
            "at risk",
            "errors: o has 4.0 x plain's; rounded to one side: O is off by",
        ),
        ("equal_keys", {"bias_o": -1.2, "bias_o_se": 0.1}, "safe", ""),
        ("gaussian", {"rows": 1e-2, "ratio_dq": 0.9}, "at risk", "delta or P: rows of dS sum to 1.0e-02 of their size"),
        ("gaussian", {"size_dk": 1.0, "error_dk": 12.0}, "wrong", "errors: dk is off by 12 x its size"),
        ("signs", {"signed": math.nan}, "wrong", "not finite: rows of dS"),
    ],
)
def test_what_is_seen_of_one_class_is_judged(name: str, seen: dict[str, float], verdict: str, reason: str) -> None:
    found = {**EXACT, "from_eager_o": 0.0, "rows": 0.0, "bias_o": 0.0, "bias_o_se": 0.0, **seen}
    judged = judge(name, found)
    assert (judged[0], judged[1].startswith(reason)) == (verdict, True), judged
    assert "dQ has" not in judged[1]


@pytest.mark.parametrize(
    ("kernel", "of"), [(lambda q, k, *rest: plain(q, k.detach(), *rest), "k"), (torch.no_grad()(plain), "q, k, v")]
)
def test_a_kernel_that_gives_no_gradient_is_wrong(kernel: Any, of: str) -> None:
    report = check_attention(kernel, device="cpu", shape=SMALL, classes=("gaussian", "mask_edges"))
    assert report.found == {f"no gradient for {of}": ["gaussian", "mask_edges"]}
    assert report.verdict == "wrong"
    assert f"no gradient for {of}" in report.text()


def test_causal_and_scale_are_given_where_the_kernel_takes_them() -> None:
    def named(q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool) -> Tensor:
        return plain(q, k, v, causal, softmax_scale)

    def mixed(q: Tensor, k: Tensor, v: Tensor, causal: bool, *, scale: float) -> Tensor:
        return plain(q, k, v, causal, scale)

    def flash_attentions(q: Tensor, k: Tensor, v: Tensor, dropout_p: Any = 0, softmax_scale: Any = 0, causal: Any = 0):
        return plain(q, k, v, causal, softmax_scale)

    def others(q: Tensor, k: Tensor, v: Tensor, causal: bool, factor: float, x_scale: Any = 1, *, q_descale: Any = 1):
        return plain(q, k, v, causal, factor * x_scale * q_descale)

    for kernel in (named, mixed, others):
        assert_safe(kernel, device="cpu", shape=SMALL, classes=("gaussian", "scale"))
    for kernel, message in (
        (
            lambda *args, **kw: torchs(*args, **kw),
            r"its parameters are \*args, \*\*kw: expected named parameters \(func",
        ),
        (flash_attentions, r"parameters are q, k, v, dropout_p, softmax_scale, causal: expected \(q, k, v, ca"),
        (partial(mixed, scale=9.0), "it binds scale: expected both free"),
        (partial(mixed, causal=False), "it binds causal: expected both free"),
        (partial(torchs, is_causal=True), "it binds is_causal: expected both free"),
    ):
        with pytest.raises(UserError, match=message):
            check_attention(kernel, device="cpu", shape=SMALL)


@pytest.mark.parametrize(
    "wrap", [partial(torch.compile, backend="eager"), nn.DataParallel, lambda module: partial(module, attn_mask=None)]
)
def test_a_wrapped_module_is_called_as_the_module(wrap: Any) -> None:
    (module := nn.Module()).forward = takes_no_mask
    assert_safe(wrap(module), device="cpu", shape=SMALL, classes=("gaussian", "scale"))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, partial(torch.autocast, "cpu", torch.bfloat16)])
def test_the_mode_that_the_caller_is_in_is_no_fault_of_the_kernel(mode: Any) -> None:
    with mode():
        assert_safe(plain, device="cpu", shape=SMALL, classes="gaussian")


def test_a_kernel_that_takes_its_row_sums_out_of_dq_cannot_hide_its_delta() -> None:
    cases = check_attention("flash_centered_keys", device="cpu", shape=SMALL, classes=("common_part", "signs")).cases
    assert [case.verdict for case in cases] == ["safe", "at risk"]
    assert_safe("flash_corrected_rows", device="cpu", shape=SMALL, classes="signs")


def test_a_kernel_without_an_argument_for_masks_is_told_so_and_can_be_safe() -> None:
    report = check_attention(tiled(), device="cpu", shape=SMALL)
    assert (report.verdict, [*report.not_tried]) == (
        "safe",
        ["padding", "window", *PACKAGED, "low_masked", "float_mask", "no_keys"],
    )
    assert check_attention(tiled(), device="cpu", shape=SMALL, classes="window").verdict == "unverified"


@pytest.mark.parametrize("fault", ["delta from a rounded O", ""])
def test_a_kernel_without_a_causal_mask_is_told_how_to_be_tried(fault: str) -> None:
    def encoders(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        if causal:
            raise NotImplementedError("a causal mask")
        return tiled(fault)(q, k, v, causal, scale)

    with pytest.raises(AssertionError, match="\nif the kernel has no causal mask: --no-causal\n"):
        assert_safe(encoders, unverified=True, device="cpu", shape=SMALL)
    report = check_attention(encoders, device="cpu", shape=SMALL, causal=False)
    assert (report.verdict, f"{SMALL}, not causal, " in report.text()) == ("at risk" if fault else "safe", True)
    left = [name for name, why in report.not_tried.items() if why == "it is of a causal mask"]
    assert left == [*PACKAGED, "mask_edges"]
    assert [case.name for case in report.cases if case.verdict == "at risk"][:2] == ["common_part", "shared_direction"][
        : 2 * bool(fault)
    ]


def takes_causal_alone(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    if not causal:
        raise NotImplementedError("causal only")
    return plain(q, k, v, causal, scale)


@pytest.mark.parametrize("classes", [(), "quick"])
def test_a_kernel_of_causal_attention_alone_is_told_how_to_be_tried(classes: tuple[str, ...]) -> None:
    options: dict[str, Any] = {"device": "cpu", "shape": SMALL, "classes": classes}
    report = check_attention(takes_causal_alone, **options)
    told = re.findall("^if the kernel is .*", report.text(), re.MULTILINE)
    assert (report.verdict, told) == ("unverified", ["if the kernel is for causal attention alone: --causal"])
    report = check_attention(takes_causal_alone, causal=True, **options)
    assert (report.verdict, report.not_tried.get("full")) == ("safe", None if classes else "it is not causal")


@pytest.mark.parametrize("classes", [(), "quick"])
def test_a_kernel_that_refuses_masks_and_groups_is_safe_in_a_full_run_as_in_a_quick_one(classes: Any) -> None:
    def call(query: Any, key: Any, value: Any, attn_mask: Any = None, is_causal: Any = 0, scale: Any = None) -> Tensor:
        if attn_mask is not None:
            raise NotImplementedError("a mask")
        return heads_alike(query, key, value, is_causal, scale)

    report = check_attention(call, device="cpu", shape=SMALL, classes=classes)
    refused = {name for name, why in report.not_tried.items() if why.startswith("it is not for this: ")}
    assert (report.verdict, refused) == ("safe", {"grouped", *MASKED} & {*(QUICK if classes else reasons())})


def adds_in_bf16_and_is_causal(*call: Any) -> Tensor:
    assert call[3], "causal only"
    return tiled("dK and dV added in BF16")(*call)


def test_sums_over_queries_in_16_bits_show_in_causal_attention_alone() -> None:
    """At the length that a CPU tries."""
    shape = Shape(B=1, H=2, G=2, T=256)
    options: dict[str, Any] = {"device": "cpu", "shape": shape, "causal": True, "classes": "cancelling_queries"}
    report = check_attention(f"{__name__}:adds_in_bf16_and_is_causal", **options)
    assert re.match(r"errors: dk has .* x plain's, dv has ", report.cases[0].reason)
    assert re.search(r"\np = .*, causal=True\)  # q", report.text())
    with pytest.raises(UserError, match=r"^classes = 'full': expected another"):
        check_attention("plain", **options | {"classes": ("gaussian", "full")})


def test_a_test_of_a_causal_kernel_has_to_say_so() -> None:
    """Its classes that are not causal would all be unverified, and sums over queries untried."""
    options: dict[str, Any] = {"device": "cpu", "shape": SMALL, "classes": ("common_part", "cancelling_queries")}
    with pytest.raises(AssertionError, match="\nif the kernel is for causal attention alone: --causal\n"):
        assert_safe(takes_causal_alone, unverified=True, **options)
    assert_safe(takes_causal_alone, unverified=True, causal=True, **options)


def test_a_kernel_that_ignores_what_is_not_causal_is_told_how_to_be_tried() -> None:
    report = check_attention(
        lambda q, k, v, _, scale: plain(q, k, v, True, scale), device="cpu", shape=SMALL, classes=("gaussian", "full")
    )
    assert "\nif the kernel is for causal attention alone: --causal\n" in report.text()


@pytest.mark.parametrize("causal", [None, True])
def test_a_kernel_without_a_backward_pass_is_not_made_safe_by_leaving_classes_out(causal: bool | None) -> None:
    def refuses(*_: Any) -> Any:
        raise NotImplementedError("backward")

    options: dict[str, Any] = {"device": "cpu", "shape": SMALL, "causal": causal}
    report = check_attention(spoiled(refuses), **options)
    assert re.findall("^if the kernel .*", report.text(), re.MULTILINE) == []
    with pytest.raises(AssertionError, match=r"^verdict: unverified: none of common_part, .* was judged; left out: "):
        assert_safe(spoiled(refuses), without=report.found["NotImplementedError"], **options)


def test_what_is_tried_without_a_causal_mask_is_not_told_to_be() -> None:
    def of_small_queries(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        if q.float().std() > 0.5:
            raise ValueError("large queries")
        return plain(q, k, v, causal, scale)

    classes = ("cancelling_tiles", "common_part", "shared_direction", "peaked_1000")
    report = check_attention(of_small_queries, device="cpu", shape=SMALL, causal=False, classes=classes)
    assert len(report.found) == 1
    assert "has no causal mask" not in report.text()


@pytest.mark.parametrize(("kernel", "verdict"), [(ignores_key_lengths, "wrong"), ("torch:math", "safe")])
def test_without_a_causal_mask_padding_is_that_of_keys(kernel: Any, verdict: str) -> None:
    classes = ("padding", "low_masked")
    cases = check_attention(kernel, device="cpu", shape=SMALL, causal=False, classes=classes).cases
    assert [case.verdict for case in cases] == [verdict] * 2


@pytest.mark.parametrize("kernel", ["flash", "flash_consistent"])
def test_captured_inputs_are_a_class(kernel: str, tmp_path: Path) -> None:
    """The feature of the file that does nothing to the logits, here because q is 0 there, makes way; and dO is of a usual size."""
    p = make("common_part", Shape(T=128), torch.bfloat16, CPU)
    file = str(tmp_path / "my x.zip")
    Inputs(p.q.roll(5, -1), p.k.roll(5, -1), p.v, p.do * 2.0**-20, p.scale).save(file)
    got = make(file, SMALL, torch.bfloat16, CPU)
    assert (got.q[..., -1].unique().item(), got.k[..., -1].unique().item()) == (0, 1)
    assert torch.equal((got.do / got.do.abs().amax()).float(), (p.do / p.do.abs().amax()).float())
    report = check_attention(kernel, device="cpu", classes=file)
    assert report.verdict == ("at risk" if kernel == "flash" else "safe")
    assert report.cases[0].shape == Shape(T=128)
    assert f", bf16, {Shape(T=128)}, " in report.text()
    assert (f"check.{Shape(T=128)!r}, torch.bfloat16" in report.text()) == (kernel == "flash")
    assert (f"\nagain: --inputs '{file}'\n" in report.text()) == (kernel == "flash")


def test_a_mask_that_leaks_is_named_in_captured_inputs(tmp_path: Path) -> None:
    make("gaussian", replace(SMALL, T=100), torch.bfloat16, CPU).save(file := tmp_path / "x.zip")
    kernel = tiled("mask of the partial tile off by one")
    assert [*check_attention(kernel, device="cpu", classes=str(file)).found] == ["mask", "errors"]


def test_captured_inputs_are_told_with_their_own_head_dim(tmp_path: Path) -> None:
    p, file = make("common_part", Shape(T=64, D=16), torch.bfloat16, CPU), str(tmp_path / "x.zip")
    p.save(file)
    report = check_attention("flash", device="cpu", classes=file)
    assert csv_of([report]).splitlines()[1].startswith("flash,16,")
    assert "| B 2 H 4 G 4 T 64 D 16 |" in table([report])


@pytest.mark.parametrize(("name", "value", "why"), [("do", 0.0, "0"), ("v", math.inf, "not finite")])
def test_captured_inputs_that_say_nothing_are_refused(name: str, value: float, why: str, tmp_path: Path) -> None:
    p, file = make("gaussian", SMALL, torch.bfloat16, CPU), str(tmp_path / "x.zip")
    replace(p, **{name: torch.full_like(p.q, value)}).save(file)
    with pytest.raises(UserError, match=f"{file}: {name} is {why}: expected finite numbers that are not all 0"):
        check_attention("torch:math", device="cpu", classes=file)


@pytest.mark.parametrize(("name", "told"), [("gaussian", True), ("peaked_1000", False)])
def test_a_safe_verdict_of_captured_inputs_with_small_logits_is_told_to_say_nothing(
    name: str, told: bool, tmp_path: Path
) -> None:
    make(name, SMALL, torch.bfloat16, CPU).save(file := tmp_path / "x.zip")
    text = check_attention("torch:math", device="cpu", classes=str(file)).text()
    assert (f"\n{file}: largest logit 4" in text, "safe says nothing here" in text) == (told, told)


@pytest.mark.parametrize(("causal", "why"), [(True, "it is not causal"), (False, "it is of a causal mask")])
def test_a_file_of_the_other_mask_is_not_tried(causal: bool, why: str, tmp_path: Path) -> None:
    make("gaussian", SMALL, torch.bfloat16, CPU, causal=not causal).save(file := tmp_path / "x.zip")
    assert check_attention("plain", device="cpu", classes=str(file), causal=causal).not_tried == {str(file): why}


def test_a_capture_of_one_position_has_no_gradient_of_q_to_judge(tmp_path: Path) -> None:
    make("gaussian", SMALL, torch.bfloat16, CPU).part(length=1).save(file := tmp_path / "x.zip")
    report = check_attention("torch:math", device="cpu", classes=str(file))
    assert (report.verdict, report.not_tried) == ("unverified", {str(file): "dq is 0 in exact arithmetic"})


@pytest.mark.parametrize(("kernel", "verdict"), [("flash", "at risk"), ("flash_consistent", "safe")])
def test_layers_of_a_run_that_explodes_are_packaged_and_tell(kernel: str, verdict: str) -> None:
    report = check_attention(kernel, device="cpu", classes=PACKAGED)
    assert {case.name: case.verdict for case in report.cases} == {
        "captured_early": "safe",
        "captured_growing": verdict,
        "captured_late": verdict,
        "captured_healthy": "safe",
    }
    assert {captured_class(name).about["config"]["attention"]["default"]["preset"] for name in PACKAGED} == {"flash"}
    assert check_attention(kernel, device="cpu", shape=SMALL, classes=PACKAGED).verdict == "unverified"


def test_captured_inputs_are_the_same_attention_in_a_larger_head_dim() -> None:
    reports = [check_attention("flash", device="cpu", shape=Shape(D=D), classes="captured_late") for D in (64, 96)]
    rows = [report.cases[0].measures["rows"] for report in reports]
    assert (reports[1].verdict, rows[1]) == ("at risk", pytest.approx(rows[0], rel=0.01))


@pytest.mark.parametrize(
    ("kernel", "dtype", "found"),
    [("torch:flash", "fp16", ["delta or P"]), (with_exp2, "fp16", []), (with_exp2, "fp32", [])],
)
def test_layers_that_were_captured_in_bf16_tell_in_other_dtypes(kernel: Any, dtype: str, found: list[str]) -> None:
    """Plain attention's own products are exact there."""
    report = check_attention(kernel, device="cpu", dtype=dtype, classes="captured_late")
    assert (report.verdict, [*report.found]) == ("at risk" if found else "safe", found)


@pytest.mark.parametrize(
    ("H", "G", "used"), [(4, 4, (9, 3)), (8, 4, (6, 3)), (2, 2, (9, 3)), (4, 1, (4, 1)), (1, 1, (3, 1))]
)
def test_groups_are_those_that_are_asked_for(H: int, G: int, used: tuple[int, int]) -> None:
    shape = CLASSES["grouped"].shape(replace(SMALL, H=H, G=G))
    assert used == (shape.H, shape.G)


def test_one_key_head_can_be_asked_for() -> None:
    assert check_attention("torch:math", device="cpu", shape=replace(SMALL, B=1, G=1)).verdict == "safe"


def test_one_sequence_is_padded() -> None:
    report = check_attention(unpads(o=math.nan), device="cpu", shape=replace(SMALL, B=1), classes="padding")
    assert report.cases[0].reason == "not finite: o"


@pytest.mark.parametrize("length", [63, 100, 256, 1024])
def test_keys_with_ties_return_in_any_length(length: int) -> None:
    p, period = make("ties", replace(SMALL, T=length), torch.bfloat16, CPU), length // 32
    assert p.k.shape[2] == length
    assert torch.equal(p.k[:, :, period:], p.k[:, :, :-period])


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.device("meta")], ids=str)
def test_the_defaults_of_torch_change_no_input(default: Any) -> None:
    """A kernel's module may have set it."""

    def drawn() -> list[Tensor]:
        inputs = [make(name, SMALL, torch.float32, CPU) for name in CLASSES]
        return [x for p in (*inputs, one_hot(10.0, inputs[0])) for x in (p.q, p.k, p.v, p.do)]

    expected = drawn()
    (torch.set_default_device if isinstance(default, torch.device) else torch.set_default_dtype)(default)
    try:
        assert same(drawn(), expected)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def test_the_column_of_ones_measures_row_sums_of_ds() -> None:
    """In exact arithmetic they are 0, and with dO * O off by a known part they are known."""
    p = make("gaussian", SMALL, torch.float32, CPU)
    column = run(tiled("delta 1 % too large"), p)[1][..., -1]
    expected = -0.01 * (p.do.double() * exact(p)[0][0]).sum(-1) * p.scale
    assert torch.allclose(column.double(), expected, rtol=1e-3, atol=1e-6)


def test_an_error_over_what_is_about_0_is_left_out() -> None:
    measures = check_attention("torch:math", device="cpu", shape=SMALL, classes="equal_keys").cases[0].measures
    assert ("error_dq" in measures, "error_dk" in measures) == (False, True)


def test_sizes_of_a_negative_scale_are_those_of_a_positive_one_with_q_negated() -> None:
    p = make("gaussian", SMALL, torch.float64, CPU)
    (_, sizes, rows), (_, expected, expected_rows) = exact(replace(p, scale=-p.scale)), exact(replace(p, q=-p.q))
    assert same((*sizes, rows), (*expected, expected_rows))


def test_dq_of_the_baseline_is_that_of_torch_but_for_rounding() -> None:
    p = make("grouped", CLASSES["grouped"].shape(SMALL), torch.float64, CPU)
    assert max(relative_errors(run(plain, p), exact(p)[0])) < 1e-5


def test_what_is_missing_or_raises_is_unverified_and_never_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention-4 leaves a module ``flash_attn`` where FlashAttention-2 is not."""

    def broken(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        raise NotImplementedError("no such shape")

    def leaves(*call: Any) -> Tensor:
        sys.exit("\x1b[31mred\0")

    def nothing(*call: Any) -> None: ...

    class UnreadableError(Exception):
        def __str__(self) -> str:
            raise ValueError

    def unreadable(*call: Any) -> Tensor:
        raise UnreadableError

    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    reasons = (
        "NotImplementedError: no such shape",
        "SystemExit: ?[31mred?",
        "raises ValueError",
        "it gives a NoneType: expected O",
        "te",
        "has no attribute",
    )
    for kernel, reason in zip((broken, leaves, unreadable, nothing, "te", "fa2"), reasons, strict=True):
        (case,) = check_attention(kernel, device="cpu", shape=SMALL, classes="gaussian").cases
        assert (case.verdict, reason in case.reason) == ("unverified", True), case
    with pytest.raises(AssertionError, match="no such shape"):
        assert_safe(broken, unverified=True, device="cpu", shape=SMALL, classes="gaussian")


def heads_alike(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    if k.shape != q.shape:
        raise NotImplementedError("no grouped heads")
    return plain(q, k, v, causal, scale)


RAISES = heads_alike.__code__.co_firstlineno + 2


def crashes_with_groups(q: Tensor, k: Tensor, *rest: Any) -> Tensor:
    if k.shape != q.shape:
        raise RuntimeError("an illegal memory access")
    return plain(q, k, *rest)


@pytest.mark.parametrize(("kernel", "verdict"), [(in_threes_by_turns, "wrong"), (crashes_with_groups, "unverified")])
def test_a_class_that_a_kernel_may_raise_in_is_judged_where_it_runs_and_a_crash_is_no_refusal(
    kernel: Any, verdict: str
) -> None:
    report = check_attention(kernel, device="cpu", shape=SMALL, classes="quick")
    assert [case.verdict for case in report.cases if case.name == "grouped"] == [verdict]


@pytest.mark.parametrize(("kernel", "verdict"), [("plain", "safe"), ("xformers", "unverified")])
def test_what_is_left_out_is_not_run_and_is_named_wherever_a_verdict_is(kernel: str, verdict: str) -> None:
    called: list[str] = []
    options: dict[str, Any] = {"device": "cpu", "shape": SMALL, "classes": ("gaussian", "grouped")}
    report = check_attention(kernel, without="grouped", progress=called.append, **options)
    assert called == ["gaussian"]
    rows = csv.DictReader(io.StringIO(csv_of([report])))
    assert [(row["class"], row["verdict"]) for row in rows] == [("gaussian", verdict), ("grouped", "left out")]
    assert [" left out: grouped" in text for text in (table([report]).splitlines()[-1], report.text())] == [True] * 2


def test_help_names_the_options_of_a_test() -> None:
    passed_on = {**inspect.signature(assert_safe).parameters}
    del passed_on["unverified"]
    missing = {*inspect.signature(check_attention).parameters.items()} ^ {*passed_on.items()}
    assert {name for name, _ in missing} == {"progress"}


def test_flex_is_compiled_for_every_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    uncompiled: list[int] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        if not torch.compiler.is_compiling():
            uncompiled.append(q.shape[2])
        return q + k + v

    monkeypatch.setattr("torch.nn.attention.flex_attention.flex_attention", attend)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    call = KNOWN["torch:flex"]()
    for length in range(2, 12):
        call(*torch.ones(3, 1, 1, length, 8), False, 1.0)
    assert not uncompiled


@pytest.mark.parametrize(
    ("shape", "classes", "forms"), [(Shape(T=512, D=8), QUICK, 10), (Shape(T=64), (), 15)], ids=["quick", "full"]
)
def test_a_compiled_kernel_is_compiled_few_times(shape: Shape, classes: Any, forms: int) -> None:
    """Each form of its operands is seconds on a GPU, where 512 is the length of --quick, and that of captured inputs."""
    met: set[Any] = set()

    def kernel(q: Any, k: Any, v: Any, attn_mask: Any = None, is_causal: Any = 0, scale: Any = None):
        strides = (q.stride(), None if attn_mask is None else attn_mask.stride())
        needs = q.requires_grad, k.requires_grad, torch.is_grad_enabled()
        met.add((q.shape, k.shape, *strides, is_causal, scale, *needs))
        return torchs(q, k, v, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=True)

    check_attention(kernel, device="cpu", shape=shape, classes=classes)
    assert len(met) == forms, met


def test_calls_that_compile_a_presets_kernels_ahead_run(device: torch.device) -> None:
    """Where they fail, nobody sees it: all would be compiled one after another, as before."""
    p = make("gaussian", replace(SMALL, B=1), torch.bfloat16, device)
    calls = first_calls("robust", p)
    for call in calls:
        call()
    assert len(calls) == 3


KERNEL = """
from torch.nn.functional import scaled_dot_product_attention as torchs
def bare(q, k, v, causal, scale):
    return torchs(q, k, v, is_causal=causal, scale=scale), "statistics"
"""
COMMAND = ("--device", "cpu", "--T", "64", "--D", "32", "--class", "mask_edges")


def test_the_command_takes_a_kernel_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(KERNEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["mine:bare", "--json", "report.json", *COMMAND]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["schema"], report["verdict"], len(report["cases"])) == (8, "safe", 1)
    assert f"verdict: safe (1 of {len(reasons())} classes tried)" in capsys.readouterr().out


def test_a_kernel_that_prints_leaves_json_on_stdout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "talks.py").write_text(
        f"{KERNEL}print('imported')\ndef f(*call):\n    print('called')\n    return bare(*call)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["talks:f", "--json", "-", *COMMAND]) == 0
    told = capsys.readouterr()
    assert (json.loads(told.out)["verdict"], told.err.splitlines()[:2]) == ("safe", ["imported", "called"])


def test_two_commands_write_one_file_aside_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other, here one that was cut off, keeps its own."""
    (tmp_path / "x.csv.part").write_text("of another")
    monkeypatch.chdir(tmp_path)
    assert main(["torch:math", "--csv", "x.csv", *COMMAND]) == 0
    assert (tmp_path / "x.csv.part").read_text() == "of another"


def rows_in(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


RISKY = ("--device", "cpu", "--T", "64", "--class", "common_part")


def test_exit_codes() -> None:
    kernels = (["torch:math"], ["flash"], ["xformers"], ["torch:math", "flash"], ["torch:math", "--against", "flash"])
    assert [main([*names, *RISKY]) for names in kernels] == [0, 1, 3, 1, 0]


@pytest.mark.parametrize(("options", "code"), [((), 3), (("--without", "grouped"), 0)])
def test_a_kernel_without_grouped_heads_can_exit_with_0(
    options: tuple[str, ...], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report says how."""
    classes = ("--class", "mask_edges", "--class", "grouped")
    assert main([f"{__name__}:heads_alike", "--device", "cpu", "--T", "64", *classes, *options]) == code
    told = capsys.readouterr().out
    assert f"{'; left out: grouped' * (code == 0)} (1 of {len(reasons())} classes tried)" in told
    reason = f"NotImplementedError: no grouped heads (test_check.py:{RAISES}) (k and v have 3 heads, q 9)"
    row = f"\nunverified:\n  grouped (H 9 G 3): {reason}\n"
    assert (row in told) == ("--without grouped\n" in told) == (code == 3)


good = tiled()


def restless(*call: Any) -> Tensor:
    """Another rounding of one element a head, as atomic sums in FP32 leave of some."""
    o = plain(*call)
    one = torch.zeros_like(o[0, 0])
    one[9, 0] = 1
    return o * (1 + 2.0**-7 * (next(CALLS) % 2) * one)


def test_a_kernel_that_is_not_deterministic_exits_with_0_and_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--device", "cpu", "--T", "64", "--class", "repeatability", "--csv", str(tmp_path / "x.csv"))
    assert main([f"{__name__}:restless", *options]) == 0
    told = capsys.readouterr().out
    assert f"verdict: safe (1 of {len(reasons())} classes tried)\n" in told
    assert told.endswith("\nsafe: repeatability\nnote: not deterministic: a run cannot be replayed\n")
    (row,) = rows_in(tmp_path / "x.csv")
    assert [row[name] for name in ("verdict", "deterministic", "reason")] == [
        "safe",
        "0",
        "not deterministic: a run cannot be replayed",
    ]


@pytest.mark.parametrize("rounded", [False, True])
def test_an_o_that_is_not_rounded_is_noted_once(rounded: bool) -> None:
    def kernel(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        o = plain(q.float(), k.float(), v.float(), causal, scale)
        return o.bfloat16().float() if rounded else o

    text = check_attention(kernel, device="cpu", shape=SMALL, classes=("gaussian", "common_part")).text()
    noted = [] if rounded else ["note: O is float32, delta reads it unrounded"]
    assert re.findall("^note: .*", text, re.MULTILINE) == noted


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("sums", ["FP32", "FP16", "BF16"])
def test_calls_that_differ_by_more_than_atomic_sums_in_fp32_are_at_risk(sums: str, dtype: str) -> None:
    """FP16 sums leave less than the rounding of a result in BF16."""
    kernel = tiled(f"atomics in {sums}")
    (case,) = check_attention(kernel, device="cpu", dtype=dtype, shape=Shape(T=128), classes="repeatability").cases
    is_safe = sums == "FP32" or (sums, dtype) == ("FP16", "bf16")
    expected = ("safe", "a run cannot") if is_safe else ("at risk", "calls differ by")
    assert (case.verdict, case.reason.startswith(f"not deterministic: {expected[1]}")) == (expected[0], True), case


def takes_no_mask(q: Any, k: Any, v: Any, attn_mask: Any = None, is_causal: Any = 0, scale: Any = None) -> Tensor:
    if attn_mask is not None:
        raise NotImplementedError("a mask")
    return plain(q, k, v, is_causal, scale)


@pytest.mark.parametrize(
    ("kernel", "options", "code"),
    [
        ("good", (), 0),
        ("takes_no_mask", (), 0),
        ("heads_alike", (), 0),
        ("heads_alike", ("--class", "grouped"), 3),
    ],
)
def test_quick_is_safe_for_a_kernel_without_masks_or_groups(kernel: str, options: tuple[str, ...], code: int) -> None:
    quick = (f"{__name__}:{kernel}", "--device", "cpu", "--quick", "--T", "96", "--D", "32")
    assert main([*quick, *options]) == code


@pytest.mark.parametrize(
    ("fault", "name", "verdict"),
    [
        ("mask of the partial tile off by one", "odd_length", "wrong"),
        ("dK and dV added in BF16", "cancelling_queries", "at risk"),
    ],
)
def test_quick_finds_leaks_within_a_tile_and_gradients_of_keys_that_are_added_in_16_bits(
    fault: str, name: str, verdict: str
) -> None:
    report = check_attention(tiled(fault), device="cpu", shape=SMALL, classes="quick")
    assert [case.verdict for case in report.cases if case.name == name] == [verdict]


def test_a_quick_run_says_what_a_full_one_has_beside() -> None:
    text = check_attention(tiled(), device="cpu", shape=SMALL, classes="quick").text()
    others = [name for name in reasons() if name not in QUICK]
    assert ", ".join(["\nnote: not tried with --quick: a longer T", *others]) + "\n" in text


def interrupted(*call: Any) -> Tensor:
    raise KeyboardInterrupt


def rows_of(path: Path, *arguments: str) -> list[tuple[str, ...]]:
    with contextlib.suppress(KeyboardInterrupt):
        main([*arguments, *RISKY, "--csv", str(path)])
    return [(row["kernel"], row["head_dim"], row["verdict"]) for row in rows_in(path)]


def test_one_command_makes_a_table_of_kernels_and_head_dims_and_keeps_what_it_has_when_it_is_cut_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two = [(name, dim, x) for dim in ("32", "64") for name, x in (("torch:math", "safe"), ("flash", "at risk"))]
    assert rows_of(tmp_path / "two.csv", "torch:math", "flash", "--D", "32", "--D", "64", "--markdown") == two
    assert capsys.readouterr().out.count("| at risk: delta or P |") == 2
    assert rows_of(tmp_path / "cut.csv", "torch:math", f"{__name__}:interrupted", "--D", "64") == [two[2]]


@pytest.mark.parametrize(
    ("arguments", "cells", "columns"),
    [
        (
            ("torch:math", "--T", "96"),
            [("`torch:math`", f"B 2 H 4 G 4 T {T} D 64") for T in (96, 64)],
            [{"batch": "2", "heads": "4", "key_heads": "4", "length": T, "causal": ""} for T in ("96", "64")],
        ),
        (
            ("flash", "--D", "48", "--DV", "32"),
            [("`flash`", "B 2 H 4 G 4 T 64 D 48 DV 32")],
            [{"head_dim": "48", "value_dim": "32"}],
        ),
        (("torch:math", "--causal"), [("`torch:math`, causal alone", "B 2 H 4 G 4 T 64 D 64")], [{"causal": "1"}]),
        (("torch:math", "--no-causal"), [("`torch:math`, not causal", "B 2 H 4 G 4 T 64 D 64")], [{"causal": "0"}]),
    ],
)
def test_the_table_and_the_csv_tell_shapes_and_modes_apart(
    arguments: tuple[str, ...], cells: Any, columns: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([*arguments, *RISKY, "--markdown", "--csv", str(tmp_path / "x.csv")])
    assert re.findall(r"^\| (`.*?) \| (.*?) \|", capsys.readouterr().out, re.MULTILINE) == cells
    assert [{name: row[name] for name in columns[0]} for row in rows_in(tmp_path / "x.csv")] == columns


def test_a_kernel_that_no_class_can_be_tried_on_has_a_row_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plain", "--class", "captured_late", "--D", "32", "--device", "cpu", "--markdown"]) == 3
    assert "| `plain` | B 2 H 4 G 4 T 256 D 32 | unverified |" in capsys.readouterr().out


def test_the_table_says_why_a_kernel_is_unverified() -> None:
    def raises(*call: Any) -> Tensor:
        raise ValueError("heads: expected 8 | 16")

    report = check_attention(raises, device="cpu", shape=SMALL, classes="gaussian")
    assert "| unverified: ValueError: heads: expected 8 \\| 16 (test_check.py:" in table([report])


def test_the_failing_class_can_be_made_again_from_the_text_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["flash", *RISKY, "--class", "odd_length"]) == 1
    text = capsys.readouterr().out
    options = re.search(r"^again: (.*)$", text, re.MULTILINE)
    assert options
    assert main(["flash", "--device", "cpu", "--T", "64", *options[1].split()]) == 1
    inputs = re.search(r"^import torch, .*\np = .*", text, re.MULTILINE)
    told = re.search(r"  common_part: delta or P: rows of dS sum to (\S+) of", text)
    assert inputs
    assert told
    exec(inputs[0], names := {})
    p = names["p"]
    q, k, v = (x.requires_grad_() for x in (p.q, p.k, p.v))
    attention.scaled_dot_product_attention(q, k, v, is_causal=p.causal, scale=p.scale, numerics="flash").backward(p.do)
    rows = (q.grad[..., -1].double().square().mean() / exact(p)[2].square().mean()).sqrt().item()
    assert rows == pytest.approx(float(told[1]), rel=0.05)  # one pass; the report has the mean of eight


def test_what_is_wrong_is_told_before_what_is_at_risk_and_what_to_mend_and_what_was_not_tried() -> None:
    flash = check_attention("flash", device="cpu", shape=SMALL, classes=("common_part", "gaussian", "odd_length"))
    *others, odd = flash.cases
    wrong = replace(odd, verdict="wrong", reason="mask: O or dV reads what is masked")
    not_tried = {"padding": "it has no argument attn_mask", "window": "it has no argument attn_mask"}
    first, _, *lines = replace(flash, cases=(*others, wrong), not_tried=not_tried).text().splitlines()
    assert first == f"verdict: wrong: mask; at risk: delta or P (3 of {len(reasons())} classes tried)"
    starts = ("wrong:", "  odd_length (T 109): mask: O ", "at risk:", "  common_part: delta or P: rows of dS ", "mend:")
    starts += (
        "  what is wrong first",
        "  delta or P: ",
        "safe, rows of dS ",
        "not tried:",
        "  padding, window: it has no ",
    )
    assert all(
        line.startswith(start)
        for line, start in zip(lines, (*starts, "again: ", "import torch, ", "p = "), strict=True)
    ), lines


def test_inputs_of_ones_own_are_not_counted_among_the_classes(tmp_path: Path) -> None:
    make("peaked_1000", SMALL, torch.bfloat16, CPU).save(file := tmp_path / "x.zip")
    assert check_attention("torch:math", device="cpu", classes=str(file)).text().startswith("verdict: safe (1 file)\n")


def test_a_layout_that_is_mixed_up_is_told_before_what_follows_from_it() -> None:
    classes = ("gaussian", "common_part", "mask_edges")
    text = check_attention(in_flash_attentions_layout, device="cpu", shape=SMALL, classes=classes).text()
    assert text.startswith("verdict: wrong: layout, errors, mask (3 of ")
    assert "\nwrong:\n  gaussian: layout: O is right for [batch, length, heads, head dim]" in text
    assert "\nmend:\n  the layout first, then run again: all else may follow from it\n" in text
    assert 'check.make("gaussian", ' in text


@pytest.mark.parametrize(
    ("kernel", "name", "options", "told"),
    [
        (tiled("mask off by one"), "odd_length", {}, "  # q, k, v, do (T 109), scale, causal"),
        (blind_tail, "window", {}, "  # q, k, v, do (T 109), scale, causal, mask.visible"),
        # It does not take causal.
        (no_keys(0, math.nan), "no_keys", {"causal": False}, f'.{SMALL!r}, torch.bfloat16, "cpu")  # q'),
    ],
)
def test_how_to_see_it_again_names_what_is_not_usual(
    kernel: Any, name: str, options: dict[str, Any], told: str
) -> None:
    settings = {"device": "cpu", "shape": SMALL, "classes": name} | options
    assert told in check_attention(kernel, **settings).text()


def moves_its_o(*call: Any) -> tuple[Tensor, None]:
    """As kernels that give statistics, too."""
    return plain(*call) * (1 - 2.0**-7), None


def test_the_measure_that_failed_can_be_called_again_from_the_text_alone() -> None:
    report = check_attention(f"{__name__}:moves_its_o", device="cpu", shape=SMALL, classes="one_hot")
    *_, how, inputs, measure = report.text().splitlines()
    exec(f"{how}\n{inputs}\nfound = {measure}", names := {})
    assert names["found"] == report.cases[0].measures


def test_a_function_of_a_script_keeps_its_module() -> None:
    def flash(q: Tensor, k: Tensor, *rest: Any) -> Tensor:
        return plain(q, k.detach(), *rest)

    flash.__module__, flash.__qualname__ = "__main__", "flash"
    report = check_attention(flash, device="cpu", shape=SMALL, classes="gaussian")
    assert (report.kernel, report.verdict) == ("__main__:flash", "wrong")


def test_what_fp16_cannot_hold_is_not_tried_and_json_has_no_infinity() -> None:
    report = check_attention("torch:math", device="cpu", dtype="fp16", shape=SMALL)
    assert (report.verdict, [*report.not_tried]) == ("safe", ["tiny", "huge", *PACKAGED])
    seen = [report.not_tried[name] for name in ("tiny", "huge")]
    assert ["not finite" in text for text in seen] == [False, True], seen
    case = Case("huge", SMALL, "wrong", "", {"error_dq": math.inf})
    assert "Infinity" not in replace(report, cases=(case,)).json()


@pytest.mark.parametrize(
    ("kernel", "name", "D", "verdict"),
    [
        (adds_the_lowest_number, "mask_edges", 64, "safe"),
        (adds_the_lowest_number, "padding", 32, "safe"),
        ("plain", "padding", 32, "safe"),
        ("plain", "low", 64, "at risk: scores"),
        ("plain", "low_masked", 64, "at risk: scores"),
    ],
)
def test_in_fp16_right_eager_attention_does_not_overflow(kernel: Any, name: str, D: int, verdict: str) -> None:
    report = check_attention(kernel, device="cpu", dtype="fp16", shape=replace(SMALL, D=D), classes=name)
    assert ": ".join([report.verdict, *report.found]) == verdict


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["flahs"],
            "kernel = 'flahs': did you mean flash? expected MODULE:FUNCTION, or a name that "
            "python -m attention.check --help lists",
        ),
        (["flash_stochastic_o"], "kernel = 'flash_stochastic_o': expected none that draws at random, as no seed "),
        (["torch:falsh"], "kernel = 'torch:falsh': did you mean torch:flash?"),
        (
            ["no_such_module:f"],
            "ModuleNotFoundError: No module named 'no_such_module'; run in its folder, or set PYTHONPATH",
        ),
        (["leaves_early:f"], "kernel = 'leaves_early:f': SystemExit: 0"),
        (["flash", "--D", "4"], "shape = Shape(B=2, H=4, G=4, T=256, D=4, DV=None): expected "),
        (["flash", "--T", "abc"], "argument --T: invalid int value: 'abc' (see --help)"),
        (["flash", "--class", "nope"], "class = 'nope': expected one of gaussian, "),
        (
            ["flash", "--without", "common_parts"],
            "without = 'common_parts': did you mean common_part? expected one of ",
        ),
        (["./mine.py:f"], "kernel = './mine.py:f': expected a module, not a file: write mine:f, and run in its folder"),
        (["flahs", "--csv", "/no/x.csv"], "--csv /no/x.csv: expected a file in a folder that is there"),
        (["flahs", "--json", "/tmp"], "--json /tmp: expected a file in a folder that is there"),
        (["flahs", "--csv", "-"], "--csv -: expected a file in a folder that is there"),
        (["flash", "--json", "x", "--csv", "./x"], "--csv ./x: expected another file than --json has"),
        (["flash", "--inputs", "layer.npz"], "--inputs layer.npz: expected a file that ends in .zip"),
        (
            ["flash", "--inputs", "x.zip", "--T", "64"],
            "--T beside --inputs alone: expected no sizes, as a file has its",
        ),
        ([], "KERNEL: expected one or more"),
        ([f"{__name__}:interrupted", "--against", "flahs"], "kernel = 'flahs': did you mean flash?"),
        (["flash", "--inputs", "none.zip"], "none.zip: no file of captured attention (No such file or directory)"),
        (["flash", "--inputs", "x" * 300 + ".zip"], ".zip: no file of captured attention (File name too long)"),
    ],
)
def test_a_wrong_name_is_one_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leaves_early.py").write_text("def f(): ...\nimport sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=re.escape(message)):
        main([*arguments, "--device", "cpu"])


@pytest.mark.parametrize(
    ("kernel", "shape", "message"),
    [
        (5, SMALL, "kernel = 5: expected a function, or a name"),
        (None, SMALL, "kernel = None: expected a function, or a name"),
        ("plain", (2, 4, 4, 64, 64), "shape = (2, 4, 4, 64, 64): expected a Shape of B 1 or more, "),
        ("plain", replace(SMALL, D=1), "shape = Shape(B=2, H=4, G=4, T=96, D=1, DV=None): expected a Shape of "),
        ("plain", replace(SMALL, DV=4), "shape = Shape(B=2, H=4, G=4, T=96, D=32, DV=4): expected a Shape of "),
    ],
)
def test_a_wrong_argument_is_one_line(kernel: Any, shape: Any, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        check_attention(kernel, device="cpu", shape=shape)


class Model(nn.Module):
    """Two layers of attention with grouped keys; it keeps what each read, with its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(32, 64) for _ in range(2))
        self.seen: list[tuple[Tensor, ...]] = []

    def forward(self, x_BTC: Tensor, **settings: Any) -> Tensor:
        for projection in self.projections:
            q, k, v = projection(x_BTC).bfloat16().unflatten(-1, (8, 8)).transpose(1, 2).split((4, 2, 2), 1)
            o = torchs(q, k, v, **({"enable_gqa": True, "scale": 0.5, "is_causal": True} | settings))
            o.retain_grad()
            self.seen.append((q, k, v, o))
            x_BTC = o.transpose(1, 2).flatten(2).float()
        return x_BTC


def test_what_attention_read_and_its_gradient_are_captured_and_a_file_gives_back_a_part(tmp_path: Path) -> None:
    model = Model()
    with capture(model, [1], {"step": 7}) as calls:
        model(torch.randn(2, 24, 32)).square().sum().backward()
    call, (q, k, v, o) = calls[1], model.seen[1]
    assert same((call.q, call.k, call.v, call.do), (q, k, v, o.grad))
    assert (call.scale, call.causal, call.about) == (0.5, True, {"step": 7, "layer": 1})
    part = call.part(heads=(2, 0), sequences=1, length=10)
    for name in "ab":
        part.save(tmp_path / f"{name}.zip")
    back = load(tmp_path / "a.zip")
    expected = (q[:1, [2, 0], :10], k[:1, [1, 0], :10], v[:1, [1, 0], :10], o.grad[:1, [2, 0], :10])
    assert same((back.q, back.k, back.v, back.do), expected)
    assert back.about == {"step": 7, "layer": 1, "heads": [2, 0], "sequences": 1, "length": 10}
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()


@pytest.mark.parametrize(
    ("parts", "shape"),
    [
        ((slice(1), slice(2), slice(2)), (2, 4, 24, 8)),
        ((slice(2), slice(2), slice(1)), (2, 4, 24, 8)),
        ((..., ..., (slice(None), slice(1))), (2, 4, 24, 8)),
        ((..., (slice(None), slice(1)), (slice(None), slice(1))), (2, 1, 24, 8)),
        (((slice(None), slice(1)), ..., ...), (2, 4, 24, 8)),
        ((..., (0, 0), (0, 0)), (2, 1, 24, 8)),
    ],
)
def test_what_torch_broadcasts_is_captured_as_attention_reads_it(parts: Any, shape: Any, tmp_path: Path) -> None:
    class Broadcast(nn.Module):
        def forward(self, *qkv: Tensor) -> Tensor:
            return torchs(*(x[part] for x, part in zip(qkv, parts, strict=True)), is_causal=True)

    operands = torch.randn(3, 2, 4, 24, 8, requires_grad=True)
    with capture(model := Broadcast(), [0]) as calls:
        o = model(*operands)
        o.sum().backward()
    calls[0].save(tmp_path / "x.zip")
    back = load(tmp_path / "x.zip")
    assert (back.q.shape, back.k.shape) == (o.shape, shape)
    assert torch.allclose(plain(back.q, back.k, back.v, back.causal, back.scale), o, atol=1e-5)


def test_a_kernel_of_even_lengths_is_tried_at_them_in_classes_of_an_odd_one() -> None:
    def even(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        if q.shape[2] % 32:
            raise ValueError("a length that 32 does not divide")
        return plain(q, k, v, causal, scale)

    names = ("gaussian", "full", "odd_length", "low", "one_hot", "last_key")
    report = check_attention(even, device="cpu", shape=SMALL, classes=names)
    assert (report.verdict, re.findall("--without .*", report.text())) == ("unverified", ["--without odd_length"])
    report = check_attention(even, device="cpu", shape=SMALL, classes=names, without="odd_length")
    assert (report.verdict, list(report.not_tried)) == ("safe", ["odd_length"])


@pytest.mark.parametrize("dtypes", [[torch.float64] * 4, [torch.float32, torch.bfloat16] * 2, [torch.int8] * 4])
def test_a_file_has_one_dtype_that_can_be_read_again(dtypes: list[torch.dtype], tmp_path: Path) -> None:
    tensors = [torch.arange(8.0).view(1, 2, 2, 2).to(dtype) for dtype in dtypes]
    refused = pytest.raises(UserError, match=r"dtype of q, k, v, do = .*: expected one for all four, of bfloat16, ")
    with contextlib.nullcontext() if dtypes[0] == torch.float64 else refused:
        Inputs(*tensors, 1.0).save(tmp_path / "x.zip")
        back = load(tmp_path / "x.zip")
        assert same((back.q, back.k, back.v, back.do), tensors)


def test_a_damaged_file_is_read_or_refused() -> None:
    x = torch.arange(128.0).view(1, 2, 8, 8)
    Inputs(x, x, x, x, 1.0).save(file := io.BytesIO())
    for place in range(len(good := file.getvalue())):
        with contextlib.suppress(UserError):
            back = load(io.BytesIO(good[:place] + b"\xff" + good[place + 1 :]))
            assert same((back.q, back.k, back.v, back.do), [x] * 4), place
            assert (back.scale, back.causal) == (1.0, True)
    Inputs(x, x[:, :0], x[:, :0], x, 1.0).save(file)
    with pytest.raises(UserError, match="no file of captured attention"):
        load(file)


@pytest.mark.parametrize(
    "wrong", [{"heads": (4,)}, {"length": 0}, {"sequences": 0}, {"sequences": -1}, {"sequences": 3}]
)
def test_a_part_that_is_not_there_is_refused(wrong: dict[str, Any]) -> None:
    inputs = Inputs(*(torch.zeros(2, 4, 8, 8),) * 4, 1.0, about={"heads": 2})
    assert inputs.part(heads=(1,)).about["heads"] == [1]
    with pytest.raises(UserError, match=f"^{next(iter(wrong))} = .*: expected .* to "):
        inputs.part(**wrong)


def test_what_is_not_plain_attention_or_did_not_happen_is_refused() -> None:
    model, x = Model(), torch.randn(1, 24, 32)
    mask = torch.ones(24, 24, dtype=torch.bool).tril()
    with capture(model, [0]) as calls:
        model(x, is_causal=False, attn_mask=mask).sum().backward()
    assert calls[0].causal
    with pytest.raises(ValueError, match="no mask but the causal one"), capture(model, [0]):
        model(x, is_causal=False, attn_mask=mask.tril(-1) | torch.eye(24, dtype=torch.bool).roll(1, 1))
    with pytest.raises(ValueError, match="one of the 2 calls"), capture(model, [2]):
        model(x).sum().backward()
    with pytest.raises(ValueError, match="expected the backward pass"), capture(model, [1]):
        model(x)


def test_a_model_that_calls_a_kernel_of_its_own_is_told_which_calls_are_captured() -> None:
    (model := nn.Module()).forward = lambda x: plain(x, x, x, True, 1.0)
    with (
        pytest.raises(ValueError, match=r"no call .* was seen.* put F\.scaled_dot_product_attention"),
        capture(model, [0]),
    ):
        model(torch.randn(1, 2, 8, 8, requires_grad=True)).sum().backward()


def test_reentrant_checkpointing_is_named_as_what_capture_cannot_see() -> None:
    (model := nn.Module()).forward = lambda x: checkpoint(lambda x: torchs(x, x, x), x, use_reentrant=True)
    with pytest.raises(ValueError, match="needs use_reentrant=False"), capture(model, [0]):
        model(torch.randn(1, 2, 8, 16, requires_grad=True)).sum().backward()


@pytest.mark.parametrize(
    ("bias", "hidden", "fits"), [(0.0, None, True), (0.0, -1e9, True), (0.0, -1e4, False), (-1.0, None, False)]
)
def test_a_mask_of_numbers_is_causal_only_where_it_adds_none(bias: float, hidden: float | None, fits: bool) -> None:
    distance = torch.arange(24)[:, None] - torch.arange(24)
    mask = (bias * distance).masked_fill(distance < 0, hidden or torch.finfo(torch.bfloat16).min).bfloat16()
    refused = pytest.raises(ValueError, match="no mask but the causal one")
    with contextlib.nullcontext() if fits else refused, capture(model := Model(), [0]) as calls:
        model(torch.randn(1, 24, 32), is_causal=False, attn_mask=mask, scale=0.0).sum().backward()
    assert not fits or (calls[0].causal, calls[0].scale) == (True, 0.0)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x: torchs(x, x, x, dropout_p=0.1), "expected as many keys as queries"),
        (lambda x: torchs(x[:, :, :4], x, x), "expected as many keys as queries"),
        (lambda x: torchs(x[0], x[0], x[0]), "expected as many keys as queries"),
        (lambda x: attention.scaled_dot_product_attention(x, x, x, softcap=2.0), "expected as many keys as queries"),
        (lambda x: attention.scaled_dot_product_attention(x, x, x, sinks=torch.zeros(2)), "expected as many keys as q"),
        (lambda x: torchs(x, x, x[..., :4]), "head dim of v = 4: expected 8, that of q"),
    ],
)
def test_what_a_file_cannot_say_is_not_captured(call: Callable[[Tensor], Tensor], said: str) -> None:
    (model := nn.Module()).forward = call
    with pytest.raises(ValueError, match=f"layer 0: {said}"), capture(model, [0]):
        model(torch.randn(1, 2, 8, 8, requires_grad=True))


def test_a_call_that_cannot_be_captured_ends_no_training_and_costs_the_other_layers_nothing() -> None:
    (model := nn.Module()).forward = lambda x: torchs(*(torchs(x, x, x, is_causal=True),) * 3, dropout_p=0.1)
    with (
        pytest.warns(UserWarning, match="layer 1: expected .* no dropout.*it is left out"),
        capture(model, [0, 1]) as calls,
    ):
        model(torch.randn(1, 2, 8, 8, requires_grad=True)).sum().backward()
    assert list(calls) == [0]


def test_flash_attention_4_is_found_in_a_folder_of_the_path(tmp_path: Path) -> None:
    """As ``pip install --target`` leaves it: Python does not read there the ``.pth`` file by which cutlass is found."""
    for name, text in {
        "nvidia_cutlass_dsl-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: nvidia-cutlass-dsl\nVersion: 1.0\n",
        "cutlass.pth": "beside\n",
        "beside/cutlass.py": "",
        "flash_attn/cute.py": "import cutlass\n\ndef flash_attn_func(): ...\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    code = "from attention.check.kernels import find; print(find('fa4').missing or 'found')"
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path.cwd()}"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "found", done.stdout + done.stderr


def test_a_report_of_a_checkout_does_not_name_the_package_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attention.check.report.versions", lambda *_: ["low-precision-attention 0.1"])
    assert environment(torch.device("cpu"))["check"] == "check of a checkout"


def test_an_operator_of_torch_is_called_by_place_whatever_its_signature_hides() -> None:
    @torch.library.custom_op("test_check::attention", mutates_args=())
    def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        return plain(q, k, v, causal, scale)

    q = torch.randn(1, 1, 8, 8)
    assert torch.equal(find(attention).call(q, q, q, True, 0.3), plain(q, q, q, True, 0.3))


def test_apply_of_an_autograd_function_is_called_by_the_parameters_of_its_forward_pass() -> None:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
            return _Tiled.forward(ctx, q, k, v, causal, scale, "")

        @staticmethod
        def backward(ctx: Any, do: Tensor) -> Any:
            return _Tiled.backward(ctx, do)[:5]

    classes = ["gaussian", "common_part", "mask_edges"]
    assert check_attention(Function.apply, device="cpu", shape=SMALL, classes=classes).verdict == "safe"
