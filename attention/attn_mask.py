"""torch's ``attn_mask`` as a ``Mask``: bool or floating, for each query and key, or torch's ``CausalBias``.

Legend: B batch, H query heads, T queries, S keys.
"""

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.weak import WeakTensorKeyDictionary

from .mask import Mask, split
from .operators import NAMESPACE
from .user_error import refuse


def is_causal_bias(mask: object) -> bool:
    """Whether a mask is torch's ``CausalBias``, a tensor whose storage is never written: only its attributes may be read.

    By name, as importing its class takes seconds.
    """
    kind = type(mask)
    return kind.__name__ == "CausalBias" and kind.__module__ == "torch.nn.attention.bias"


def is_bottom_right(bias: Any, T: int, S: int) -> bool:
    """Whether a ``CausalBias`` is ``causal_lower_right``, and not ``causal_upper_left``. ``ValueError`` if its sizes are not T and S."""
    # The class is a prototype; and what torch makes of one, as by .to(), has no variant.
    variant: Any = getattr(bias, "variant", None)
    name = "" if variant is None else variant.name
    made = "causal_upper_left or causal_lower_right as made"
    refuse(name not in ("UPPER_LEFT", "LOWER_RIGHT"), f"attn_mask is a CausalBias of no known variant: expected {made}")
    sizes = bias.seq_len_q, bias.seq_len_kv
    if sizes != (T, S):  # only then, as a compiler cannot write out what it does not know
        refuse(True, f"attn_mask is a CausalBias of {sizes[0]} queries, {sizes[1]} keys: expected {T}, {S}")
    return bool(name == "LOWER_RIGHT")


def last_queries(B: int, T: int, S: int, device: torch.device) -> Mask:
    """T causal queries that are the last of S: query t sees keys up to t + S - T."""
    last = torch.arange(S - T + 1, S + 1, device=device).clamp(min=0)
    return Mask(ranges=torch.stack((torch.zeros_like(last), last)).expand(B, 2, T))


def mask_of(
    mask: Tensor, own: Tensor, batches: tuple[torch.Size, torch.Size, torch.Size], B: int, T: int, S: int
) -> Mask:
    """A checked ``attn_mask`` [B or 1, H or 1, T or 1, S or 1] as the backends take it; ``own``: the caller's, of which it is a view or,
    in batches of several dimensions, an expanded copy: ``batches`` says which."""
    compiling = torch.compiler.is_compiling()
    if mask.stride(1) == 0:
        mask = mask.narrow(1, 0, 1)
    if mask.dtype == torch.bool and mask.shape[1] == 1 and mask.shape[2] == 1:
        if torch.is_grad_enabled() and not compiling and mask.is_inference():
            mask = mask.clone()  # autograd keeps nothing that was made in inference mode
        return Mask(keys=mask[:, 0, 0].expand(B, S))
    if mask.shape[3] != S:
        mask = mask.expand(-1, -1, -1, S)
    traced = (
        compiling or torch.jit.is_tracing() or get_proxy_mode() is not None
    )  # a graph must not hold what is known of this mask
    ranges, keys, padded = _split(mask) if traced else _known_split(own, mask, batches)
    return Mask(ranges=ranges.expand(B, 2, T), keys=keys.expand(B, S), padded=padded)


def _known_split(
    own: Tensor, mask: Tensor, batches: tuple[torch.Size, torch.Size, torch.Size]
) -> tuple[Tensor, Tensor, Tensor]:
    """``_split(mask)``, once for all layers that get the same tensor ``own``, the caller's, which with ``batches`` decides ``mask``."""
    if own.is_inference():  # counts no versions
        return _split(mask)
    state = own._version, mask.shape, batches
    if own not in _KNOWN or _KNOWN[own][0] != state:
        with torch.inference_mode(False):  # what is made in inference mode, autograd could not keep later
            found = _split(mask)
        if type(found[0]) is not Tensor:  # a fake mode's, of a mask that is real
            return found
        _KNOWN[own] = state, found
    known: tuple[Tensor, Tensor, Tensor] = _KNOWN[own][1]
    return known


_KNOWN = WeakTensorKeyDictionary()


@torch.library.custom_op(f"{NAMESPACE}::split_of_mask", mutates_args=())
def _split(mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ranges [B, 2, T], padding [B, S] and ``Mask.padded`` of a mask [B, H, T, S], bool or floating; B, H and T may be 1."""
    capturing = mask.is_cuda and torch.cuda.is_current_stream_capturing()
    refuse(capturing, "attn_mask in a CUDA graph: expected bool of shape [batch, 1, 1, keys], or is_causal")
    visible = mask
    if mask.is_floating_point():
        visible = mask == 0
        additive = not bool((visible | (mask <= torch.finfo(mask.dtype).min)).all())
        expected = "expected bool, or only 0 and -inf (or the dtype's minimum), as it has no additive masks"
        refuse(additive, f"attn_mask is {mask.dtype}: {expected}; in place of 0 and -1e9 give attn_mask = mask == 0")
    alike = mask.shape[1] == 1 or bool((visible == visible.narrow(1, 0, 1)).all())
    refuse(not alike, f"attn_mask has shape {list(mask.shape)}: expected one mask for all heads")
    try:
        ranges, keys, padded = split(visible[:, 0])
    except ValueError as error:
        expected = "a range of keys for each query, neither end going back, less padding, keys hidden from all queries"
        refuse(True, f"attn_mask: {error}: expected {expected}; use torch's own function for other masks")
    return ranges, keys, torch.tensor(padded)


@_split.register_fake
def _(mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    B, _, T, S = mask.shape
    found = mask.new_empty((B, 2, T), dtype=torch.int32), mask.new_empty((B, S), dtype=torch.bool)
    return *found, torch.empty((), dtype=torch.bool, device="cpu")
