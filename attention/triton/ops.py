"""FlashAttention-2 in Triton, with every rounding site of ``Numerics`` a compile-time switch: operators and public function.

The same algorithm, site for site, is in ``reference/flash.py``; the kernels are in ``triton/forward.py`` and ``triton/backward.py``. The
default numerics compile to code with no trace of the others. Both directions are custom operators, and use no atomics, so that results
repeat to the bit.

Legend: B batch, H heads, T sequence, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..numerics import numerics_from_key
from ..operators import BACKWARD_TENSORS, FORWARD_TENSORS, differentiable, gradients_like, operator
from ..reference.flash import kept_of
from ..reference.tiles import FORMAT_OF
from .backward import empty_gradients, launch_backward, split_gradients
from .block_sizes import backward_blocks, forward_blocks
from .forward import empty_outputs, launch_forward


def _forward_pass(
    q: Tensor, k: Tensor, v: Tensor, seed: Tensor, numerics: str, *settings: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """(O [B, T, H, D], O for delta or an empty tensor where it is O itself, L [B, H, T] in log2 or, where S is rounded, natural; or
    m in the unit the kernel compares and log2 l [B, H, 2, T])."""
    n = numerics_from_key(numerics).concrete(FORMAT_OF[q.dtype])
    blocks = forward_blocks(n, FORMAT_OF[q.dtype], max(q.shape[3], v.shape[3]), q.shape[1], k.shape[1])
    with torch.cuda.device_of(q):
        return launch_forward(q, k, v, seed, n, blocks, *settings)


def _outputs(q: Tensor, k: Tensor, v: Tensor, seed: Tensor, numerics: str, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return empty_outputs(q, v, numerics_from_key(numerics).concrete(FORMAT_OF[q.dtype]))


def _backward_pass(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seed: Tensor,
    o: Tensor,
    counts: Tensor,
    saved: Tensor,
    numerics: str,
    *settings: Any,
) -> tuple[Tensor, Tensor]:
    """dQ, dK and dV in one tensor (``backward.empty_gradients``), and the gradient of the sinks. ``o`` and ``counts`` are
    ``tiles.delta_operands``, ``saved`` is L, or m and log2 l."""
    n = numerics_from_key(numerics).concrete(FORMAT_OF[q.dtype])
    blocks = backward_blocks(n, FORMAT_OF[q.dtype], max(q.shape[3], v.shape[3]), q.shape[1], k.shape[1])
    with torch.cuda.device_of(q):
        return launch_backward(do, q, k, v, seed, o, counts, saved, n, blocks, *settings)


def _gradients(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
    return empty_gradients(q, k, v), gradients_like(do, q, k, v, *more)[3]


_forward = operator("flash_forward", FORWARD_TENSORS, 3, _forward_pass, _outputs)
_backward = operator("flash_backward", BACKWARD_TENSORS, 2, _backward_pass, _gradients)


def gradients(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *kept_and_settings: Any) -> list[Tensor]:
    """dQ, dK, dV and the gradient of the sinks, of the kernels."""
    found, dsinks = _backward(do, q, k, v, *kept_and_settings)
    return [*split_gradients(found, q, k, v), dsinks]


flash = differentiable(_forward, gradients, kept_of)
