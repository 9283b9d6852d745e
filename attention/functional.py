"""torch's ``scaled_dot_product_attention`` with the roundings chosen by name.

Legend: B batch, H query heads, G key heads, T queries, S keys, D head dim.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional
from torch.overrides import wrap_torch_function
from torch.utils.weak import WeakTensorKeyDictionary

from .backends import BACKENDS, Call, obstacle
from .mask import NO_MASK, Mask, split
from .numerics import BASES, numerics_from_key
from .plan import AttentionConfig, AttentionSpec
from .presets import PRESETS, RECOMMENDED, unaliased
from .reference.tiles import FORMAT_OF, NAMESPACE
from .triton.block_sizes import head_dim_above
from .user_error import invalid, one_line


@wrap_torch_function(lambda query, key, value, *_, **__: (query, key, value))  # a mode sees it as it sees torch's
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    numerics: str | AttentionSpec = RECOMMENDED,
    softcap: float = 0.0,
    rounding_seed: Tensor | None = None,
) -> Tensor:
    """O [B, H, T, D], with the arguments of ``torch.nn.functional.scaled_dot_product_attention``.

    Triton kernels compute it on CUDA, and PyTorch with the same roundings, slowly, on a CPU. Under autocast q, k and v are cast as
    torch's function casts them.

    Args:
        query, key, value: [B, H, T, D], [B, G, S, D], [B, G, S, D], any strides; G = H, or a divisor of H with ``enable_gqa``.
        attn_mask: bool, broadcast to [B, H, T, S] and alike for all heads, True where a query may see a key; also beside
            ``is_causal``. Or floating, 0 there and -inf (or the dtype's lowest number) elsewhere. Each query sees a range of keys less
            padding: no end of a range goes back from one query to the next, and padding is hidden from all queries of a batch entry. So
            are causal masks, windows, packing and prefixes, with padding anywhere, and with a cache (T < S). The host waits to look once
            a mask, so that CUDA graphs cannot hold it; [B, 1, 1, S], padding alone, is not looked at. It looks again after an in-place
            edit, but not one through ``.data`` or NumPy, which torch does not count: give such a mask as a new tensor.
        is_causal: query t sees keys up to t.
        scale: of Q K^T; default 1 / sqrt(D).
        numerics: name of a preset, "robust" for the recommended one, or an ``AttentionSpec`` with its sites.
        softcap: c > 0 replaces S by c tanh(S / c).
        rounding_seed: int64 tensor of shape [] on the query's device, another one at every step; for stochastic rounding only.

    Returns the dtype of the query, or float32 where the numerics leave O unrounded. Raises ``ValueError`` for what it cannot do, before
    anything runs: dropout, other masks, dtypes and devices, shapes that do not fit, empty tensors, forward-mode differentiation.
    """
    _refuse_settings(dropout_p, is_causal, scale, enable_gqa, softcap, rounding_seed)
    _refuse_tensors(query, key, value, attn_mask, enable_gqa)
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        query, key, value = (x.to(torch.get_autocast_dtype(kind)) for x in (query, key, value))
    D = operator.index(query.shape[3])  # a number to a compiler of any shapes, too
    width = head_dim_above(D) if kind == "cuda" else D
    mask = _mask(attn_mask, query.shape[0], query.shape[2], key.shape[2])
    features = mask.features() + (("grouped",) if key.shape[1] < query.shape[1] else ())
    chosen: Any = numerics
    if isinstance(numerics, AttentionSpec):  # which the compiler of torch 2.11 takes for no constant
        chosen = (numerics.preset, numerics.numerics, numerics.sites, numerics.backend)
    backend, sites, draws = _resolved(chosen, kind, FORMAT_OF[query.dtype], width, 1.0 if softcap else 0.0, features)
    if rounding_seed is None:
        refuse(draws, "rounding_seed = None: these numerics round stochastically, and need an int64 tensor")
        rounding_seed = torch.zeros((), dtype=torch.int64, device=query.device)
    if (rounding_seed.dtype, rounding_seed.ndim, rounding_seed.device) != (torch.int64, 0, query.device):
        refuse(True, f"rounding_seed = {rounding_seed}: expected int64 of shape [] on {query.device}")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if width != D:  # a pad of nothing would copy
        q, k, v = (functional.pad(x, (0, width - D)) for x in (q, k, v))
    scale = 1 / math.sqrt(D) if scale is None else scale
    o = BACKENDS[backend].run(
        q, k, v, sites, seed=rounding_seed, scale=scale, causal=is_causal, softcap=softcap, mask=mask
    )
    return o.transpose(1, 2)[..., :D]


def refuse(wrong: bool, message: str) -> None:
    if wrong:
        raise ValueError(one_line(f"low-precision attention: {message}"))


def spec_of(numerics: str | AttentionSpec) -> AttentionSpec:
    """``ValueError`` for what is neither a spec nor the name of a preset."""
    if isinstance(numerics, AttentionSpec):
        return numerics
    refuse(not isinstance(numerics, str), f"numerics = {numerics!r}: expected the name of a preset or an AttentionSpec")
    if numerics in BASES:
        spec = f'AttentionSpec(preset="flash", numerics={numerics!r})'
        refuse(True, f"numerics = {numerics!r}: expected a preset; this is a base of roundings: pass {spec}")
    if unaliased(numerics) not in PRESETS:
        raise invalid("low-precision attention: numerics", numerics, ("robust", *PRESETS))
    return AttentionSpec(preset=numerics)


def stochastic(spec: AttentionSpec) -> bool:
    """Whether a call needs a ``rounding_seed``."""
    return "stochastic" in asdict(spec.resolve()).values() and BACKENDS[spec.resolved_backend].has_sites


def _refuse_settings(
    dropout: float, causal: bool, scale: float | None, gqa: bool, softcap: float, seed: Tensor | None
) -> None:
    for name, value, least, most, expected in (
        ("dropout_p", dropout, 0.0, 0.0, "0: it has no dropout; set that of the model's attention to 0"),
        ("scale", 1.0 if scale is None else scale, -_LARGEST, _LARGEST, "a finite number"),
        ("softcap", softcap, 0.0, _LARGEST, "0 or a positive number"),
    ):
        right = isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most
        if not right:  # only then, as a compiler cannot write out what it does not know
            refuse(True, f"{name} = {value!r}: expected {expected}")
    for name, flag in (("is_causal", causal), ("enable_gqa", gqa)):
        if not isinstance(flag, bool):
            refuse(True, f"{name} = {flag!r}: expected True or False")
    if seed is not None and not isinstance(seed, Tensor):
        refuse(True, f"rounding_seed = {seed!r}: expected an int64 tensor of shape []")


_LARGEST = sys.float_info.max


def _refuse_tensors(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, gqa: bool) -> None:
    """``ValueError`` for the first tensor that cannot be served, whatever the numerics."""
    for name, x in {"query": q, "key": k, "value": v, "attn_mask": q if mask is None else mask}.items():
        refuse(not isinstance(x, Tensor), f"{name} is a {type(x).__name__}: expected a tensor")
    for name, x in (("query", q), ("key", k), ("value", v)):
        refuse(x.ndim != 4, f"{name} has shape {list(x.shape)}: expected [batch, heads, length, head dim]")
        refuse(x.layout != torch.strided or x.is_nested, f"{name} is nested or sparse: expected a strided tensor")
        refuse(0 in x.shape, f"{name} has shape {list(x.shape)}: expected no empty dimension")
        refuse(x.dtype not in FORMAT_OF, f"{name} is {x.dtype}: expected float32, bfloat16 or float16")
        refuse(x.device != q.device, f"{name} is on {x.device}: expected {q.device}, as the query")
        refuse(x.device.type not in ("cpu", "cuda"), f"{name} is on {x.device}: expected cpu or cuda")
        dual = not torch.compiler.is_compiling() and forward_ad.unpack_dual(x).tangent is not None
        refuse(dual, f"{name} has a tangent: expected reverse mode, it has no forward-mode differentiation")
    autocast = torch.is_autocast_enabled(q.device.type)
    refuse(
        not autocast and not (q.dtype == k.dtype == v.dtype), f"dtypes {q.dtype}, {k.dtype}, {v.dtype}: expected one"
    )
    refuse(k.shape != v.shape, f"key has shape {list(k.shape)}, value {list(v.shape)}: expected the same")
    fits = (q.shape[0], q.shape[3]) == (k.shape[0], k.shape[3])
    refuse(not fits, f"query has shape {list(q.shape)}, key {list(k.shape)}: expected one batch size and head dim")
    heads, groups = q.shape[1], k.shape[1]
    refuse(
        not gqa and heads != groups, f"{heads} query heads, {groups} key heads: expected as many, or enable_gqa=True"
    )
    if mask is not None:
        kind = mask.dtype == torch.bool or (mask.is_floating_point() and not mask.requires_grad)
        learned = " and learned" if mask.requires_grad else ""
        refuse(not kind, f"attn_mask is {mask.dtype}{learned}: expected bool, or 0 and -inf; it has no additive masks")
        refuse(mask.layout != torch.strided, f"attn_mask is {mask.layout}: expected a strided tensor")
        refuse(mask.device != q.device, f"attn_mask is on {mask.device}: expected {q.device}, as the query")
        shape = [q.shape[0], heads, q.shape[2], k.shape[2]]
        sizes = [1] * (4 - mask.ndim) + list(mask.shape)
        # Not `in (1, full)`: torch 2.11's compiler finds no symbolic size in it.
        fits = 2 <= mask.ndim <= 4 and all(size == 1 or size == full for size, full in zip(sizes, shape, strict=True))
        refuse(
            not fits,
            f"attn_mask has shape {list(mask.shape)}: expected what broadcasts to {shape}, 2 dimensions or more; "
            "a padding mask [batch, keys] is mask[:, None, None, :]",
        )
    refuse(heads % groups != 0, f"{heads} query heads, {groups} key heads: expected a divisor of {heads}")


def _mask(mask: Tensor | None, B: int, T: int, S: int) -> Mask:
    """A checked ``attn_mask`` as the backends take it."""
    if mask is None:
        return NO_MASK
    own, compiling = mask, torch.compiler.is_compiling()
    if mask.ndim > 2 and mask.stride(-3) == 0:
        mask = mask.narrow(-3, 0, 1)
    if mask.dtype != torch.bool or (mask.ndim > 2 and mask.shape[-3] != 1):
        mask = _visible(mask) if compiling else _known("visible", own, mask, _visible)
    while mask.ndim < 4:
        mask = mask[None]
    if mask.shape[2] == 1:
        if torch.is_grad_enabled() and not compiling and mask.is_inference():
            mask = mask.clone()  # autograd keeps nothing that was made in inference mode
        return Mask(keys=mask[:, 0, 0].expand(B, S))
    if mask.shape[3] != S:
        mask = mask.expand(-1, -1, -1, S)
    # Whether keys are hidden inside of ranges, only the host can ask, and compiled code asks no host.
    ranges, keys = _split(mask) if compiling else _known("split", own, mask, _without_idle_keys)
    return Mask(ranges=ranges.expand(B, 2, T), keys=None if keys is None else keys.expand(B, S))


def _known(what: str, own: Tensor, mask: Tensor, make: Callable[[Tensor], Any]) -> Any:
    """``make(mask)``, once for all layers that get one and the same tensor: the caller's ``own``, which alone decides ``mask``."""
    if own.is_inference():  # counts no versions
        return make(mask)
    state = own._version, mask.shape
    known = _KNOWN[what]
    if own not in known or known[own][0] != state:
        with torch.inference_mode(False):  # what is made in inference mode, autograd could not keep later
            known[own] = state, make(mask)
    return known[own][1]


_KNOWN = {"visible": WeakTensorKeyDictionary(), "split": WeakTensorKeyDictionary()}


@torch.library.custom_op(f"{NAMESPACE}::visible_of_mask", mutates_args=())
def _visible(mask: Tensor) -> Tensor:
    """The bool mask with one head that a floating one, or one with many heads, stands for."""
    capturing = mask.is_cuda and torch.cuda.is_current_stream_capturing()
    refuse(capturing, "attn_mask in a CUDA graph: expected bool of shape [batch, 1, 1, keys], or is_causal")
    visible = mask
    if mask.is_floating_point():
        visible = mask == 0
        additive = not bool((visible | (mask <= torch.finfo(mask.dtype).min)).all())
        refuse(additive, f"attn_mask is {mask.dtype}: expected bool, or 0 and -inf; it has no additive masks")
    if mask.ndim > 2:
        first = visible.narrow(-3, 0, 1)
        alike = bool((visible == first).all())
        refuse(not alike, f"attn_mask has shape {list(mask.shape)}: expected one mask for all heads")
        visible = first
    return visible.clone()


@_visible.register_fake
def _(mask: Tensor) -> Tensor:
    shape = list(mask.shape)
    shape[-3:-2] = [1] * len(shape[-3:-2])
    return torch.empty(shape, dtype=torch.bool, device=mask.device)


def _without_idle_keys(mask: Tensor) -> tuple[Tensor, Tensor | None]:
    """Ranges and padding of a mask [B, H or 1, T, S]; None where there is no padding that ranges do not tell."""
    capturing = mask.is_cuda and torch.cuda.is_current_stream_capturing()
    refuse(capturing, "attn_mask in a CUDA graph: expected one of shape [batch, 1, 1, keys], or is_causal")
    try:
        ranges, keys, has_holes = split(mask[:, 0])
    except ValueError as error:
        expected = "a range of keys for each query, neither end going back, less padding, keys hidden from all queries"
        refuse(True, f"attn_mask: {error}: expected {expected}; use torch's own function for other masks")
    return ranges, keys if has_holes else None


@torch.library.custom_op(f"{NAMESPACE}::split_of_mask", mutates_args=())
def _split(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Ranges [B, 2, T] and padding [B, S] of a mask [B, H or 1, T, S]; B may be 1."""
    ranges, keys = _without_idle_keys(mask)
    return ranges, torch.ones_like(mask[:, 0, 0]) if keys is None else keys


@_split.register_fake
def _(mask: Tensor) -> tuple[Tensor, Tensor]:
    B, _, T, S = mask.shape
    return mask.new_empty((B, 2, T), dtype=torch.int32), mask.new_empty((B, S))


@torch.compiler.assume_constant_result
def _resolved(*asked: Any) -> tuple[str, str, bool]:
    """What ``_resolve`` says, which a compiler takes for a constant."""
    if not isinstance(asked[0], tuple):
        spec_of(asked[0])
    return _resolve(*asked)


@functools.lru_cache(maxsize=256)
def _resolve(
    asked: str | tuple[Any, ...], kind: str, fmt: str, head_dim: int, softcap: float, features: tuple[str, ...]
) -> tuple[str, str, bool]:
    """Backend, key of ``Numerics``, and whether some site is stochastic. Raises ``ValueError`` where this machine cannot run it."""
    fields = dict(
        zip(("preset", "numerics", "sites", "backend"), (asked,) if isinstance(asked, str) else asked, strict=False)
    )
    spec = AttentionSpec(**fields)
    config = AttentionConfig(default=spec, flash_backend="flash" if kind == "cuda" else "flash_reference")
    group = config.resolve(1, 1)[0].groups[0]
    chosen = numerics_from_key(group.numerics)
    reason = obstacle(group.backend, Call(kind, fmt, head_dim, chosen, softcap, features))
    refuse(reason is not None, f"{spec.label()} cannot run here: {reason}")
    return group.backend, group.numerics, stochastic(spec)
