"""FlashAttention-2 in Triton, with every rounding site of ``Numerics`` a compile-time switch: operators and public function.

The same algorithm, site for site, is in ``reference/flash.py``; the kernels are in ``triton/forward.py`` and ``triton/backward.py``. The
default numerics compile to code with no trace of the others. Both directions are custom operators, and use no atomics, so that results
repeat to the bit.

Legend: B batch, H heads, T sequence, D head dim.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..numerics import Numerics, numerics_from_key
from ..operators import BACKWARD_TENSORS, FORWARD_TENSORS, differentiable, gradients_like, operator
from ..reference.flash import kept_of
from ..reference.tiles import outputs_like
from ..rounding import FORMAT_OF
from .backward import empty_gradients, launch_backward, split_gradients
from .block_sizes import backward_blocks, forward_blocks
from .forward import launch_forward
from .low_blocks import emulated, operands, rounded_output_gradient, stored_outputs


def _gradients(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
    return empty_gradients(q, v), gradients_like(do, q, k, v, *more)[3]


def backend(name: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Tensor]:
    """The backend of two launches, both with a concrete ``Numerics`` and scale, causal, softcap, sinks and mask as their last arguments.

    ``forward(q, k, v, seed, ...)`` gives what ``empty_outputs`` has room for: O [B, T, H, D], O for delta or an empty tensor where it is
    O itself, and L [B, H, T] in log2 or, where S is rounded, natural; or m in the unit the kernel compares and log2 l or 1 / d
    [B, H, 2, T]. ``backward(do, q, k, v, seed, o, low_bits, saved, ...)``, with ``tiles.delta_operands``, gives dQ, dK and dV in one tensor
    (``empty_gradients``), and the gradient of the sinks.
    """

    def on_device(launch: Callable[..., Any], names: str) -> Callable[..., Any]:
        of_q = names.split().index("q")  # dO may have another dtype

        def compute(*arguments: Any) -> Any:
            *tensors, numerics, scale, causal, softcap, sinks, mask = arguments
            q = tensors[of_q]
            with torch.cuda.device_of(q):
                n = numerics_from_key(numerics).concrete(FORMAT_OF[q.dtype])
                return launch(*tensors, n, scale, causal, softcap, sinks, mask)

        return compute

    forward_operator = operator(
        f"{name}_forward", FORWARD_TENSORS, 3, on_device(forward, FORWARD_TENSORS), outputs_like
    )
    backward_operator = operator(
        f"{name}_backward", BACKWARD_TENSORS, 2, on_device(backward, BACKWARD_TENSORS), _gradients
    )

    def gradients(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *kept_and_settings: Any) -> list[Tensor]:
        found, dsinks = backward_operator(do, q, k, v, *kept_and_settings)
        return [*split_gradients(found, q, k, v), dsinks]

    return differentiable(forward_operator, gradients, kept_of)


def _forward(q: Tensor, k: Tensor, v: Tensor, seed: Tensor, n: Numerics, *settings: Any) -> tuple[Tensor, ...]:
    dtype, problem = q.dtype, None
    if emulated(n):
        problem, q, k, v, _, n = operands(q, k, v, seed, n, *settings)
    blocks = forward_blocks(n, FORMAT_OF[q.dtype], max(q.shape[3], v.shape[3]), q.shape[1], k.shape[1])
    o, of_delta, saved = launch_forward(q, k, v, seed, n, blocks, *settings)
    if problem is not None:
        o, of_delta = stored_outputs(problem, o, of_delta, dtype)
    return o, of_delta, saved


def _backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seed: Tensor,
    o: Tensor,
    low_bits: Tensor,
    saved: Tensor,
    n: Numerics,
    *settings: Any,
) -> tuple[Tensor, Tensor]:
    dtype = q.dtype
    if emulated(n):
        problem, q, k, _, v, n = operands(q, k, v, seed, n, *settings)
        do = rounded_output_gradient(problem, do)
    blocks = backward_blocks(n, FORMAT_OF[q.dtype], max(q.shape[3], v.shape[3]), q.shape[1], k.shape[1])
    gradients, dsinks = launch_backward(do, q, k, v, seed, o, low_bits, saved, n, blocks, *settings)
    return gradients.to(dtype), dsinks


flash = backend("flash", _forward, _backward)
