"""Custom operators of the backends: opaque, so that a compiler that fuses casts away never sees what is in them.

All have the same arguments behind their tensors: ``SETTINGS``, the last three of which are the fields of ``Mask``.

Legend: B batch, H heads, T sequence, D head dim.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef
from torch.nn import functional

from .mask import NO_MASK, Mask

NAMESPACE = __name__.partition(".")[0]
"""Namespace of the custom operators: the name this package is imported by. One process may hold it twice, as the trainer's
``attention`` and as the installed ``low_precision_attention``."""
TORCHS = functional.scaled_dot_product_attention
"""torch's own, whatever ``replace_sdpa`` puts in its place: nothing can call that before this module is imported."""
# No defaults: torch leaves them out of the graphs by which it finds code that it has compiled before, by another schema.
SETTINGS = (
    "str numerics, float scale, bool causal, float softcap, Tensor? sinks, Tensor? keys, Tensor? ranges, Tensor? padded"
)
FORWARD_TENSORS = "q k v seed"
BACKWARD_TENSORS = "do q k v seed o low_bits saved"
"""Tensors of the passes of flash attention; ``o`` and ``low_bits`` are ``tiles.delta_operands``."""


def operator(
    name: str, tensors: str, outputs: int, compute: Callable[..., Any], fake: Callable[..., Any]
) -> CustomOpDef:
    """An operator on tensors of these names: ``compute(*tensors, numerics, scale, causal, softcap, sinks, mask)``.

    ``fake`` takes the same, but for the mask in single fields, and gives ``outputs`` tensors of the same shapes, unwritten.
    """
    names = tensors.split()
    before_mask = len(names) + 5

    def call(*given: Any) -> Any:
        return compute(*given[:before_mask], Mask(*given[before_mask:]))

    returns = "Tensor" if outputs == 1 else f"({', '.join(['Tensor'] * outputs)})"
    schema = f"({', '.join(f'Tensor {x}' for x in names)}, {SETTINGS}) -> {returns}"
    made = torch.library.custom_op(f"{NAMESPACE}::{name}", call, mutates_args=(), schema=schema)
    made.register_fake(fake)
    if names[0] == "do":
        made.register_autograd(_refuse_second)
    return made


def _refuse_second(*_: Any) -> Any:
    torchs = "torch's function there (inside replace_sdpa, a block of replace_sdpa(None))"
    instead = f"use {torchs}, within torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
    raise ValueError(f"low-precision attention: it has no second derivatives, as of a gradient penalty; {instead}")


def differentiable(
    forward: CustomOpDef, backward: Callable[..., Any], keep: Callable[..., tuple[Tensor, ...]]
) -> Callable[..., Tensor]:
    """The backend of an operator on ``FORWARD_TENSORS``, whose first output is O; gradients pass through no other.

    ``keep(seed, *outputs)`` is what ``backward(do, q, k, v, *kept, *settings)`` needs beside the inputs for dQ, dK, dV and the gradient of
    the sinks, which is empty where there are none.
    """

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        q, k, v, seed, *ctx.settings, sinks, keys, ranges, padded = inputs
        outputs = (output,) if isinstance(output, Tensor) else output
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.set_materialize_grads(False)  # else the backward pass gets zeros for each of these
        ctx.save_for_backward(q, k, v, *keep(seed, *outputs), sinks, keys, ranges, padded)

    def pass_back(ctx: Any, do: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        *tensors, sinks, keys, ranges, padded = ctx.saved_tensors
        dq, dk, dv, dsinks = backward(do, *tensors, *ctx.settings, sinks, keys, ranges, padded)
        return dq, dk, dv, *(None,) * 5, None if sinks is None else dsinks, *(None,) * 3

    forward.register_autograd(pass_back, setup_context=setup_context)

    def run(
        q_BTHD: Tensor,
        k_BTHD: Tensor,
        v_BTHD: Tensor,
        numerics: str,
        *,
        seed: Tensor,
        scale: float,
        causal: bool,
        softcap: float,
        sinks: Tensor | None = None,
        mask: Mask = NO_MASK,
    ) -> Tensor:
        """Attention [B, T, H, D] with the roundings of key ``numerics``; see ``attention.run`` for the arguments."""
        found = forward(q_BTHD, k_BTHD, v_BTHD, seed, numerics, scale, causal, softcap, sinks, *mask)
        return found if isinstance(found, Tensor) else found[0]

    return run


def empty_sinks(q: Tensor, sinks: Tensor | None) -> Tensor:
    """Room for the gradient of the sinks [H] float32; empty where there are none."""
    return torch.empty(0 if sinks is None else sinks.shape, device=q.device, dtype=torch.float32)


def gradients_like(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *more: Any) -> tuple[Tensor, ...]:
    """dQ, dK, dV and the gradient of the sinks, unwritten; ``more`` ends with the sinks and the mask."""
    sinks = more[-len(NO_MASK) - 1]
    return *(torch.empty(x.shape, device=x.device, dtype=x.dtype) for x in (q, k, v)), empty_sinks(q, sinks)
