"""Any attention kernel as a backend, by its name: what ``check.kernels.find`` finds. Its roundings are its own, unknown here.

Legend: B batch, H heads, T sequence, D head dim.
"""

import functools
import math
import threading
import warnings
from typing import Any

import torch
from torch import Tensor

from .check.kernels import Call, find
from .check.measures import plain
from .presets import PRESETS, unaliased
from .user_error import UserError, invalid, one_line

FAR = 0.5
"""Largest error of O over its size. An O of one mantissa bit has 0.1; another scale, mask or layout gives about 1."""


@functools.cache
def loaded(name: str) -> Call:
    """Raises ``UserError`` for a name that is not a kernel, or cannot be imported."""
    if unaliased(name) in PRESETS:
        raise invalid("attention kernel", name, f"a kernel, not a preset: preset = {name!r}")
    kernel = find(name)
    if kernel.call is None:
        raise UserError(f"attention kernel = {name!r}: {kernel.missing}")
    return kernel.call


_RUNNING = threading.local()
"""Kernels whose forward pass runs in this thread."""


# It may be an extension, Triton, or PyTorch whose roundings a compiler would move: the compiler leaves it alone.
@torch.compiler.disable
def run(q: Tensor, k: Tensor, v: Tensor, kernel: str, *, scale: float, causal: bool, **_: Any) -> Tensor:
    """O [B, T, H, D] of the kernel of that name; other settings are given, too, and ignored.

    Raises ``UserError`` for what is no such tensor, for a ``TypeError``, as of a kernel that takes other arguments, and for a kernel that
    calls itself by torch's function, which it replaces; its values only ``check`` looks at, before the trainer starts.
    """
    call, running = loaded(kernel), vars(_RUNNING)
    if kernel in running:
        expected = "expected replace_sdpa(None) around its own forward and backward pass"
        raise UserError(f"attention kernel = {kernel!r}: it calls torch's function, which it replaces here: {expected}")
    running[kernel] = True
    try:
        with torch.autocast(q.device.type, enabled=False):  # its backward pass runs outside, too
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            o = call(q, k, v, causal, scale)
    except TypeError as error:  # not others: they may be of the device, or end a recomputation of checkpointing
        raise UserError(f"attention kernel = {kernel!r}: it raises TypeError: {error}") from error
    finally:
        del running[kernel]
    if (reason := _misfit(o, q)) is not None:
        raise UserError(f"attention kernel = {kernel!r}: {reason}")
    return o.transpose(1, 2)


def _misfit(o: Any, q: Tensor) -> str | None:
    """Why that cannot be O for q, both [B, H, T, D], or None."""
    if isinstance(o, Tensor) and (o.shape, o.device) == (q.shape, q.device) and o.dtype in (q.dtype, torch.float32):
        return None
    given = f"{o.dtype} of shape {list(o.shape)} on {o.device}" if isinstance(o, Tensor) else f"a {type(o).__name__}"
    return f"it gives {given}: expected {q.dtype} of shape {list(q.shape)} on {q.device}, as q"


def check(
    kernel: str, device: torch.device, dtype: torch.dtype, head_dim: int, length: int, *, grouped: bool = False
) -> None:
    """Raise ``UserError`` for a kernel that cannot serve: it is called as a layer calls it, with two heads and a backward pass.

    O is held against plain attention, to ``FAR`` only: a kernel of another layout, mask or scale is refused, a coarse one is not.
    """
    if (reason := _obstacle(loaded(kernel), device, dtype, head_dim, length, grouped)) is not None:
        where = f"{str(dtype).removeprefix('torch.')}, head dim {head_dim} and length {length} on {device}"
        raise UserError(f"attention kernel = {kernel!r} cannot serve {where}: {reason}")


@functools.cache
def _obstacle(
    call: Call, device: torch.device, dtype: torch.dtype, head_dim: int, length: int, grouped: bool
) -> str | None:
    H, G = 2, 1 if grouped else 2
    draw = torch.Generator().manual_seed(0)
    fused = torch.randn(1, length, H + 2 * G, head_dim, generator=draw).to(device, dtype).requires_grad_()
    q, k, v = (x.transpose(1, 2) for x in fused.split((H, G, G), dim=2))  # in strides, as of a fused projection
    scale = 1 / math.sqrt(head_dim)
    reasons: list[warnings.WarningMessage] = []
    try:
        # torch's SDPA warns why it does not take a kernel, then raises without a reason.
        with (
            warnings.catch_warnings(record=True) as reasons,
            torch.enable_grad(),
            torch.autocast(device.type, enabled=False),
        ):
            warnings.simplefilter("always")
            o = call(q, k, v, True, scale)
            if (reason := _misfit(o, q)) is not None:
                return reason
            (gradient,) = torch.autograd.grad(o, fused, torch.randn(o.shape, generator=draw).to(o))
        finite = bool(gradient.isfinite().all())  # a GPU raises here at the latest
    except (Exception, SystemExit) as error:  # whatever a kernel raises
        why = dict.fromkeys(one_line(str(warning.message)).partition(" (Triggered")[0] for warning in reasons)
        return " ".join([f"it raises {type(error).__name__}: {one_line(str(error))[:300]}", *why])[:600]
    for warning in reasons:
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    first = slice(min(length, 1024))  # they see no other keys
    q, k, v, o = (x.detach()[:, :, first].float() for x in (q, k, v, o))
    expected = plain(q, k, v, True, scale)
    off = ((o - expected).norm() / expected.norm()).item()
    if not off < FAR:
        return f"O is off by {off:.2g} of its size: expected causal attention with that scale, for [B, H, T, D] in any strides"
    return None if finite else "its gradients are not finite"
