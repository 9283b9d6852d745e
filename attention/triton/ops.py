"""FlashAttention-2 in Triton, with every rounding site of ``Numerics`` a compile-time switch: operators and public function.

The same algorithm, site for site, is in ``reference/flash.py``; the kernels are in ``triton/forward.py`` and ``triton/backward.py``. The
default numerics compile to code with no trace of the others. Both directions are opaque custom operators, so that a compiler that
fuses casts away never sees them, and use no atomics, so that results repeat to the bit.

Legend: B batch, H heads, T sequence, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..mask import NO_MASK, Mask
from ..numerics import numerics_from_key
from ..reference.flash import _setup_context
from ..reference.tiles import FORMAT_OF, NAMESPACE
from .backward import apart, empty_gradients, launch_backward
from .block_sizes import backward_blocks, forward_blocks
from .forward import empty_outputs, launch_forward


@torch.library.custom_op(f"{NAMESPACE}::flash_forward", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seed: Tensor,
    numerics: str,
    scale: float,
    causal: bool,
    softcap: float,
    bottom_right: bool = False,
    window: int = 0,
    keys: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(O [B, T, H, D], O for delta or an empty tensor where it is O itself, L [B, H, T] in log2 or, where S is rounded, natural; or
    m in the unit the kernel compares and log2 l [B, H, 2, T])."""
    n = numerics_from_key(numerics).concrete(FORMAT_OF[q.dtype])
    blocks = forward_blocks(n, FORMAT_OF[q.dtype], q.shape[3], q.shape[1], k.shape[1])
    with torch.cuda.device_of(q):
        return launch_forward(
            q, k, v, seed, n, blocks, scale, causal, softcap, Mask(bottom_right, window, keys, cu_seqlens)
        )


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, seed: Tensor, numerics: str, *_):  # type: ignore[no-untyped-def]
    return empty_outputs(q, numerics_from_key(numerics).concrete(FORMAT_OF[q.dtype]))


@torch.library.custom_op(f"{NAMESPACE}::flash_backward", mutates_args=())
def _backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    counts: Tensor,
    saved: Tensor,
    numerics: str,
    scale: float,
    causal: bool,
    softcap: float,
    bottom_right: bool,
    window: int,
    keys: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Tensor:
    """dQ, dK and dV in one tensor (``backward.empty_gradients``). ``o`` and ``counts`` are ``tiles.delta_operands``,
    ``saved`` is L, or m and log2 l."""
    n = numerics_from_key(numerics).concrete(FORMAT_OF[q.dtype])
    blocks = backward_blocks(n, FORMAT_OF[q.dtype], q.shape[3], q.shape[1], k.shape[1])
    with torch.cuda.device_of(q):
        mask = Mask(bottom_right, window, keys, cu_seqlens)
        return launch_backward(do, q, k, v, o, counts, saved, n, blocks, scale, causal, softcap, mask)


@_backward.register_fake
def _(do, q, k, *_):  # type: ignore[no-untyped-def]
    return empty_gradients(q, k)


def _autograd_backward(ctx, do, *_):  # type: ignore[no-untyped-def]
    q, k, v, o, counts, saved, *masks = ctx.saved_tensors
    return *apart(_backward(do, q, k, v, o, counts, saved, *ctx.settings, *masks), q, k, v), *(None,) * 9


_forward.register_autograd(_autograd_backward, setup_context=_setup_context)


def flash(
    q_BTHD: Tensor,
    k_BTHD: Tensor,
    v_BTHD: Tensor,
    numerics: str,
    *,
    seed: Tensor,
    scale: float,
    causal: bool,
    softcap: float,
    mask: Mask = NO_MASK,
) -> Tensor:
    """Attention [B, T, H, D] with the roundings of ``numerics``; see ``attention.run`` for the arguments."""
    return _forward(q_BTHD, k_BTHD, v_BTHD, seed, numerics, scale, causal, softcap, *mask)[0]
