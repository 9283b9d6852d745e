"""torch's ``scaled_dot_product_attention`` with the roundings chosen by name.

Legend: B batch, H query heads, G key heads, T queries, S keys, D head dim.
"""

import contextlib
import functools
import math
import operator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.overrides import wrap_torch_function

from .attn_mask import is_bottom_right, is_causal_bias, last_queries, mask_of
from .backends import BACKENDS, Call, numerics_of, obstacle
from .mask import NO_MASK, seen_by_causal
from .numerics import BASES
from .plan import AttentionConfig, AttentionSpec
from .presets import PRESETS, RECOMMENDED, unaliased
from .rounding import FORMAT_OF
from .triton.block_sizes import head_dim_above
from .user_error import invalid, refuse


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
    sinks: Tensor | None = None,
    rounding_seed: Tensor | None = None,
) -> Tensor:
    """O [B, H, T, DV], with the arguments of ``torch.nn.functional.scaled_dot_product_attention``.

    Triton kernels compute it on CUDA, and PyTorch with the same roundings, slowly, on a CPU. Under autocast q, k and v are cast as
    torch's function casts them.

    Args:
        query, key, value: [B, H, T, D], [B, G, S, D], [B, G, S, DV], any strides; G = H, or a divisor of H with ``enable_gqa``. As torch
            does, it takes two or more dimensions, expands batches and heads of 1, and gives zeros where there are no keys; D is 1 or more.
        attn_mask: bool, broadcast to [B, H, T, S] and alike for all heads, True where a query may see a key; also beside
            ``is_causal``. Or floating, 0 there and -inf (or the dtype's lowest number) elsewhere. Each query sees a range of keys less
            padding: no end of a range goes back from one query to the next, and padding is hidden from all queries of a batch entry. So
            are causal masks, windows, packing and prefixes, with padding anywhere, and with a cache (T < S). The host waits once to
            look at a mask, so CUDA graphs cannot hold it; it does not look at [B, 1, 1, S], padding alone. It looks again after an
            in-place edit, but not one through ``.data`` or NumPy, which torch does not count: give such a mask as a new tensor.
            Or ``causal_upper_left(T, S)`` or ``causal_lower_right(T, S)`` of ``torch.nn.attention.bias``.
        is_causal: query t sees keys up to t. Keys behind the last query may be anything.
        scale: of Q K^T; default 1 / sqrt(D). A number, or what ``float`` takes, except text and tensors on a GPU (the host would
            wait); in compiled code Python's numbers.
        numerics: name of a preset, "robust" for the recommended one, or an ``AttentionSpec`` with its sites.
        softcap: c > 0 replaces S by c tanh(S / c).
        sinks: floating [H], one more logit of every query of a head, whose value is 0 (gpt-oss's ``s_aux``); differentiable; -inf is none.
            Rows of dS then sum to zero over the keys and the sink together, also by ``flash_consistent``; over the keys alone they sum to
            minus the sink's term, -P_sink delta.
        rounding_seed: int64 tensor of shape [] on the query's device, a new one at every step; only for what draws at random.

    Returns the dtype of the query, or float32 where the numerics leave O unrounded; laid out as the query. A query that sees no key has
    O = 0. Raises ``ValueError`` for what it cannot do, before anything runs: dropout, other masks, tensor subclasses, dtypes and devices,
    shapes that do not fit, forward-mode differentiation, ``torch.func`` transforms; and in their backward pass for second derivatives.
    Within ``torch.compile`` the last two are torch's own errors, with ``fullgraph=True`` all are; ``torch.jit.script`` cannot read this.
    """
    _number("dropout_p", dropout_p, 0.0, 0.0, "0: it has no dropout; set that of the model's attention to 0")
    refuse_flag("is_causal", is_causal)
    refuse_flag("enable_gqa", enable_gqa)
    scale, softcap = checked_numbers(scale, softcap)
    _refuse_kinds(query, key, value, attn_mask, sinks)
    causal, bottom_right, own = is_causal, False, attn_mask
    if attn_mask is not None and is_causal_bias(attn_mask):
        refuse(is_causal, "attn_mask is a CausalBias and is_causal = True: expected one of both")
        bottom_right = is_bottom_right(attn_mask, query.shape[-2], key.shape[-2]) and query.shape[-2] != key.shape[-2]
        causal = not bottom_right
        attn_mask = None
    if torch.is_autocast_enabled(query.device.type):
        query, key, value = (x.to(torch.get_autocast_dtype(query.device.type)) for x in (query, key, value))
    most = max(query.ndim, key.ndim, value.ndim)
    lead = query.shape[:-3], key.shape[:-3], value.shape[:-3]
    query, key, value, attn_mask = _four_dimensional(query, key, value, attn_mask, enable_gqa, most)
    kind = query.device.type
    B, H, T, _ = query.shape
    S = key.shape[2]
    D = operator.index(query.shape[3])  # a number to a compiler of any shapes, too
    DV = operator.index(value.shape[3])
    width, value_width = (head_dim_above(x) if kind == "cuda" else x for x in (D, DV))
    empty = 0 in (B, H, T, S, DV)
    mask = NO_MASK
    if attn_mask is not None and own is not None and not empty:
        mask = mask_of(attn_mask, own, lead, B, T, S)
    if bottom_right and not empty:
        mask = last_queries(B, T, S, query.device)
    features = mask.features() + (("grouped",) if key.shape[1] < H else ()) + (("value_dim",) if DV != D else ())
    if sinks is not None:
        shape = list(sinks.shape)
        refuse(not sinks.is_floating_point(), f"sinks are {sinks.dtype}: expected float")
        refuse(shape != [H], f"sinks have shape {shape}: expected [{H}], a number for each query head")
        features += ("sinks",)
        sinks = sinks.float()  # -inf has no difference to itself; the exponential of -1e30 is 0, too, and NaN stays
        sinks = sinks.masked_fill(sinks < -1e30, -1e30)
    chosen: Any = numerics
    if isinstance(numerics, AttentionSpec):  # torch 2.11's compiler does not take it for a constant
        chosen = (numerics.preset, numerics.numerics, numerics.sites, numerics.backend, numerics.kernel)
    elif not isinstance(numerics, str):  # before a tuple of the user's passes for that one
        spec_of(numerics)
    features += ("softcap",) if softcap else ()
    asked = chosen, kind, FORMAT_OF[query.dtype], width, value_width, features
    backend, sites, draws, unrounded = _resolved(*asked)
    if rounding_seed is None:
        refuse(draws, "rounding_seed = None: these numerics draw at random, and need an int64 tensor")
        rounding_seed = torch.zeros((), dtype=torch.int64, device=query.device)
    seed = rounding_seed
    if not isinstance(seed, Tensor) or (seed.dtype, seed.ndim, seed.device) != (torch.int64, 0, query.device):
        refuse(True, f"rounding_seed = {seed!r}: expected an int64 tensor of shape [] on {query.device}")
    if empty:  # zeros, and gradients of zeros
        k, v = (x if x.shape[1] == H else x.repeat_interleave(H // x.shape[1], dim=1) for x in (key, value))
        o = query @ k.mT @ v
        if sinks is not None:
            o = o + (0 * sinks.sum()).to(o.dtype)
        o = o.float() if unrounded else o
    else:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        if causal and not mask.features():  # others hide these keys themselves
            k, v = seen_by_causal(k, v, T)
        if width != D:  # a pad of nothing would copy
            q, k = (functional.pad(x, (0, width - D)) for x in (q, k))
        if value_width != DV:
            v = functional.pad(v, (0, value_width - DV))
        scale = 1 / math.sqrt(D) if scale is None else scale
        o = BACKENDS[backend].run(
            q, k, v, sites, seed=seed, scale=scale, causal=causal, softcap=softcap, sinks=sinks, mask=mask
        )
        o = _laid_out_as(query, o[..., :DV])
    if most == 4:
        return o
    if most > 4:
        return o.unflatten(0, torch.broadcast_shapes(*lead))
    o = o[0] if enable_gqa else o[:, 0]
    return o if most == 3 else o[0]


def _laid_out_as(query: Tensor, o_BTHD: Tensor) -> Tensor:
    """O [B, H, T, D], dense, its dimensions in memory in the order of the query's; as torch's, so that code may ``view`` either."""
    order = [0, 1, 2]
    for i, j in ((0, 1), (1, 2), (0, 1)):  # sizes may be unknown to a compiler, which sorts none
        if 0 < query.stride(order[i]) < query.stride(order[j]):
            order[i], order[j] = order[j], order[i]
    back = [order.index(i) for i in range(3)]
    return o_BTHD.transpose(1, 2).permute(*order, 3).contiguous().permute(*back, 3)


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
    return spec.resolve().draws and BACKENDS[spec.resolved_backend].has_sites


def refuse_flag(name: str, flag: object) -> None:
    if not isinstance(flag, bool):
        refuse(True, f"{name} = {flag!r}: expected True or False")


def checked_numbers(scale: float | None, softcap: float) -> tuple[float | None, float]:
    """Both as numbers of Python's."""
    softcap = _number("softcap", softcap, 0.0, _LARGEST, _SOFTCAPS)
    if softcap:
        _number("softcap", softcap, _SMALLEST, _LARGEST, _SOFTCAPS)
    if scale is not None:
        scale = _number("scale", scale, -_LARGEST, _LARGEST, "a finite number, as FP32 has it")
    return scale, softcap


_SMALLEST, _LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
_SOFTCAPS = f"0 or a positive number, as FP32 has it ({_SMALLEST:.1e} to {_LARGEST:.1e})"


def _number(name: str, value: Any, least: float, most: float, expected: str) -> float:
    number = value
    if isinstance(value, Tensor):
        _refuse_transforms(name, value)
        learned = value.requires_grad
        refuse(
            learned,
            f"{name} is a learned tensor: expected a number; multiply the query by it, and its gradient is kept",
        )
        asks = torch.compiler.is_compiling() or value.device.type != "cpu"
        refuse(
            asks,
            f"{name} is a tensor on {value.device}: expected a number; float({name}) waits for a device, and breaks a graph",
        )
    if not isinstance(value, (int, float)) and hasattr(type(value), "__float__"):
        with contextlib.suppress(TypeError, ValueError, RuntimeError):  # of many elements
            number = float(value)
    right = isinstance(number, (int, float)) and not isinstance(number, bool) and least <= number <= most
    if not right:  # only then, as a compiler cannot write out what it does not know
        refuse(True, f"{name} = {value!r}: expected {expected}")
    return number


def refuse_tangent(name: str, x: Tensor) -> None:
    """``ValueError`` for a tangent, which would be lost without a word."""
    if forward_ad._current_level >= 0:
        # A compiler sees no tangents. At the error it leaves this call uncompiled, or raises, where it may not break the graph.
        dual = torch.compiler.is_compiling() or forward_ad.unpack_dual(x).tangent is not None
        refuse(dual, f"{name} has a tangent: expected reverse mode, it has no forward-mode differentiation")


def _refuse_transforms(name: str, x: Tensor) -> None:
    """``ValueError`` for a tangent, and within ``torch.func``."""
    refuse_tangent(name, x)
    if not torch.compiler.is_compiling():
        transformed = torch._C._functorch.is_functorch_wrapped_tensor(x)
        refuse(
            transformed,
            f"{name} is within torch.func or vmap: expected loss.backward() or torch.autograd.grad, without either",
        )


def _refuse_kinds(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None) -> None:
    """``ValueError`` for the first tensor of a kind that cannot be served, whatever its shape, and before anything of it is read."""
    tensors = {"query": q, "key": k, "value": v} | ({} if mask is None or is_causal_bias(mask) else {"attn_mask": mask})
    tensors |= {} if sinks is None else {"sinks": sinks}
    for name, x in tensors.items():
        kind = type(x)
        refuse(not isinstance(x, Tensor), f"{name} is a {kind.__name__}: expected a tensor")
        if kind is not Tensor and kind is not nn.Parameter and not _traces(kind):
            plain = _PLAIN.get(kind.__name__, "x.as_subclass(torch.Tensor), if its values are those to read")
            refuse(True, f"{name} is a {kind.__name__}, a subclass of Tensor: expected a plain tensor: {plain}")
        nested = x.is_nested or x.layout != torch.strided
        refuse(nested, f"{name} is nested or sparse: expected a strided tensor; pad, and hide the padding by attn_mask")
        _refuse_transforms(name, x)
        if name in ("query", "key", "value"):
            refuse(x.ndim < 2, f"{name} has shape {list(x.shape)}: expected [batch, heads, length, head dim]")
            refuse(x.dtype not in FORMAT_OF, f"{name} is {x.dtype}: expected float32, bfloat16 or float16")
        refuse(x.device != q.device, f"{name} is on {x.device}: expected {q.device}, as the query")
        refuse(x.device.type not in ("cpu", "cuda"), f"{name} is on {x.device}: expected cpu or cuda")
    one = torch.is_autocast_enabled(q.device.type) or q.dtype == k.dtype == v.dtype
    refuse(not one, f"dtypes {q.dtype}, {k.dtype}, {v.dtype}: expected one")


_PLAIN = {
    "DTensor": "x.to_local(), with the heads or batch entries of this rank",
    "NestedTensor": "x.to_padded_tensor(0.0), with the padding hidden by attn_mask",
    "MaskedTensor": "x.get_data(), with an attn_mask",
    "AsyncCollectiveTensor": "x.wait()",
}


def _traces(kind: type) -> bool:
    """Whether a subclass stands for a plain tensor while torch traces."""
    return kind.__name__ in ("FakeTensor", "FunctionalTensor") and kind.__module__.startswith("torch._subclasses.")


def _four_dimensional(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, gqa: bool, most: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Query, key and value as [B, heads, length, D], with one B, and ``attn_mask`` as a view of four dimensions.

    Batches come before heads. The first of three dimensions is one of batches, where heads are not told apart by ``enable_gqa``.
    ``ValueError`` for shapes that do not fit.
    """
    shapes = f"query has shape {list(q.shape)}, key {list(k.shape)}, value {list(v.shape)}"
    given = list(mask.shape) if mask is not None else []
    if mask is not None:
        kind = mask.dtype == torch.bool or (mask.is_floating_point() and not mask.requires_grad)
        learned = " and learned" if mask.requires_grad else ""
        expected = "expected bool, or 0 and -inf; it has no additive masks"
        cure = "" if mask.is_floating_point() else "; in place of 1 and 0 give mask.bool()"
        refuse(not kind, f"attn_mask is {mask.dtype}{learned}: {expected}{cure}")
        if not 2 <= mask.ndim <= max(most, 2):
            _refuse_mask(given, "as many dimensions as the query, or fewer, but two")

    def four(x: Tensor) -> Tensor:
        x = x if x.ndim >= most else x[(None,) * (most - x.ndim)]
        if most > 4:
            if lead is None:
                return x.flatten(0, most - 4)
            alone = all(size == 1 for size in x.shape[:-3])
            if x is mask and not all(size in (1, full) for size, full in zip(x.shape[:-3], lead, strict=True)):
                _refuse_mask(given, f"batches that broadcast to {list(lead)}")
            return (x if alone else x.expand(*lead, *x.shape[-3:])).flatten(0, most - 4)
        return x if most == 4 else x[None, None] if most == 2 else x[None] if gqa else x[:, None]

    lead: Any = None
    if most > 4:
        try:
            lead = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
        except RuntimeError:
            refuse(True, f"{shapes}: expected batches that broadcast")
    q, k, v = four(q), four(k), four(v)
    B = _common((q.shape[0], k.shape[0], v.shape[0]), shapes, "one batch size, or 1")
    G = _common((k.shape[1], v.shape[1]), shapes, "key and value of the same heads")
    H = q.shape[1] if gqa else _common((q.shape[1], G), shapes, "as many heads of query and key, or enable_gqa=True")
    refuse(G == 0 and H != 0, f"{shapes}: expected heads of keys")
    refuse(G != 0 and H % G != 0, f"{H} query heads, {G} key heads: expected a divisor of {H}")
    refuse(k.shape[2] != v.shape[2], f"key has shape {list(k.shape)}, value {list(v.shape)}: expected the same length")
    refuse(q.shape[3] != k.shape[3] or q.shape[3] == 0, f"{shapes}: expected one head dim, at least 1")
    q, k, v = (
        x if x.shape[0] == B and x.shape[1] == heads else x.expand(B, heads, *x.shape[2:])
        for x, heads in ((q, H), (k, G), (v, G))
    )
    if mask is None:
        return q, k, v, None
    mask = four(mask)
    shape = [B, H, q.shape[2], k.shape[2]]
    # Not `in (1, full)`: torch 2.11's compiler finds no symbolic size in it.
    if not all(size == 1 or size == full for size, full in zip(mask.shape, shape, strict=True)):
        _refuse_mask(given, f"what broadcasts to {shape}")
    return q, k, v, mask


def _refuse_mask(shape: list[int], expected: str) -> None:
    padding = "a padding mask [batch, keys] is mask[:, None, None, :]"
    refuse(True, f"attn_mask has shape {shape}: expected {expected}; {padding}")


def _common(sizes: tuple[int, ...], shapes: str, expected: str) -> int:
    """The one size among those other than 1."""
    common = 1
    for size in sizes:
        refuse(common != 1 and size != 1 and size != common, f"{shapes}: expected {expected}")
        common = common if size == 1 else size
    return common


def constant_result(function: Any) -> Any:
    """What ``torch.compiler.assume_constant_result`` makes of it, without importing the compiler, which takes 2 s."""
    function._dynamo_marked_constant = True
    return function


@constant_result
def _resolved(*asked: Any) -> tuple[str, str, bool, bool]:
    """What ``_resolve`` says, which a compiler takes for a constant."""
    return _resolve(*asked)


@functools.lru_cache(maxsize=256)
def _resolve(
    asked: str | tuple[Any, ...], kind: str, fmt: str, head_dim: int, value_dim: int, features: tuple[str, ...]
) -> tuple[str, str, bool, bool]:
    """Backend, key of ``Numerics``, whether some site draws, and whether O is left unrounded.

    Raises ``ValueError`` where this machine cannot run it.
    """
    if isinstance(asked, str):
        spec = spec_of(asked)
    else:
        spec = AttentionSpec(**dict(zip(("preset", "numerics", "sites", "backend", "kernel"), asked, strict=True)))
    config = AttentionConfig(default=spec, flash_backend="flash" if kind == "cuda" else "flash_reference")
    group = config.resolve(1, 1)[0].groups[0]
    chosen = numerics_of(group.backend, group.numerics)
    reason = obstacle(group.backend, Call(kind, fmt, head_dim, chosen, features, value_dim))
    refuse(reason is not None, f"{spec.label()} cannot run here: {reason}")
    unrounded = BACKENDS[group.backend].has_sites and chosen.concrete(fmt).output == "fp32"
    return group.backend, group.numerics, stochastic(spec), unrounded
