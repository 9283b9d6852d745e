"""The backends by name, and why one cannot run: a reason in words, never a silent substitute."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attention import sdpa
from attention.flash_blocks import HEAD_DIMS, tile_obstacle
from attention.flash_reference import flash_reference
from attention.numerics import Numerics, numerics_from_key
from attention.plan import BACKENDS, PRESETS, AttentionSpec, LayerPlan
from attention.standard import standard
from attention.tiles import FORMAT_OF
from errors import UserError


@dataclass(frozen=True)
class Call:
    """What a backend is asked for: enough to say whether it can."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    numerics: Numerics
    softcap: float


@dataclass(frozen=True)
class Backend:
    """``run`` has the signature of ``flash_reference.flash_reference``; ``obstacle`` says why it cannot serve a call, or None."""

    run: Callable[..., Tensor]
    obstacle: Callable[[Call], str | None]


def _contradiction(call: Call) -> str | None:
    """Why the sites cannot be meant together for q of this dtype, or None."""
    if call.softcap and call.numerics.row_residual != "kept":
        return f"row_residual = {call.numerics.row_residual!r}, expected kept with a soft-cap: behind it dS does not sum to 0"
    try:
        call.numerics.concrete(FORMAT_OF[call.dtype])
    except UserError as error:
        return str(error)
    return None


def _standard_obstacle(call: Call) -> str | None:
    n = call.numerics
    if n.delta != "rowsum_p_dp" or n.delta_output != "output":
        return "it has delta = rowsum(P * dP) only"
    if n.row_residual != "kept":
        return f"the sums of its dS are left as they are: row_residual = {n.row_residual!r}, expected kept"
    if n.row_max != "plain" or n.tile_q or n.tile_k:
        return "it has no tiles and no row normaliser of its own"
    if n.row_sum_floor or n.hidden_tiles != "skipped":
        return "it has no tiles whose row sums could have a floor"
    if n.exponent != "subtracted":
        return "it subtracts the row maximum from S first"
    if n.saved_statistics != "logsumexp":
        return f"it keeps P, not what makes it again: saved_statistics = {n.saved_statistics!r}, expected logsumexp"
    if n.probabilities_rounding != "nearest":
        return "it rounds P to nearest only"
    if n.divisor != "unrounded":
        return "it divides by l before P is rounded"
    if (n.tile_product, n.accumulator, n.statistics) != ("fp32", "fp32", "fp32"):
        return "it has no running sums to round"
    return None


def _sdpa_obstacle(name: str) -> Callable[[Call], str | None]:
    def obstacle(call: Call) -> str | None:
        if call.softcap:
            return "torch's kernels have no soft-cap"
        if name == "sdpa_math":
            return None
        if call.device.type != "cuda":
            return None if name == "sdpa_flash" else "it needs a CUDA device"
        if call.dtype == torch.float32 and name != "sdpa_efficient":
            return "it takes bfloat16 or float16 and not float32"
        if call.head_dim % 8:
            return f"it takes head dims divisible by 8, not {call.head_dim}"
        return None

    return obstacle


def _flash(q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, numerics: str, **settings: Any) -> Tensor:
    # Triton is imported where its kernels are used, so that a machine without it runs everything else.
    from attention.flash_triton import flash

    return flash(q_BTHD, k_BTHD, v_BTHD, numerics, **settings)


def _standard_triton(q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, numerics: str, **settings: Any) -> Tensor:
    from attention.standard_triton import standard_triton

    return standard_triton(q_BTHD, k_BTHD, v_BTHD, numerics, **settings)


def _flash_obstacle(call: Call) -> str | None:
    instead = "flash_reference runs anywhere (--attention.flash-backend flash_reference)"
    if reason := _triton_obstacle(call, instead) or _contradiction(call):
        return reason
    tiles = tile_obstacle(call.numerics.concrete(FORMAT_OF[call.dtype]))
    return tiles and f"{tiles}; {instead}"


def _standard_triton_obstacle(call: Call) -> str | None:
    return _standard_obstacle(call) or _triton_obstacle(call, "standard runs anywhere")


def _triton_obstacle(call: Call, instead: str) -> str | None:
    """Why no Triton kernel can serve a call, or None; ``instead``: what can."""
    if importlib.util.find_spec("triton") is None:
        return f"it needs triton, which is not installed; {instead}"
    if call.device.type != "cuda" and not _interprets():
        return f"it needs a CUDA device (or TRITON_INTERPRET=1); {instead}"
    if call.head_dim not in HEAD_DIMS:
        return f"it takes head dims {', '.join(map(str, HEAD_DIMS))}, not {call.head_dim}; {instead}"
    return None


def _interprets() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)


_REGISTRY: dict[str, Backend] = {
    "standard": Backend(standard, _standard_obstacle),
    "standard_triton": Backend(_standard_triton, _standard_triton_obstacle),
    "flash": Backend(_flash, _flash_obstacle),
    "flash_reference": Backend(flash_reference, _contradiction),
    **{name: Backend(sdpa.make(name), _sdpa_obstacle(name)) for name in sdpa.KERNELS},
}
assert set(_REGISTRY) == set(BACKENDS), "plan.BACKENDS names the backends without importing torch; keep the two equal"


def get(name: str) -> Backend:
    """The backend of that name, as checked by ``plan``."""
    return _REGISTRY[name]


def _serves(name: str, call: Call) -> bool:
    """Whether a backend could stand in on this machine, with the roundings of its own first preset."""
    # flash_reference and standard_triton have no presets of their own: they compute those of flash and standard.
    preset = next((preset for preset in PRESETS if PRESETS[preset].backend == name), name.partition("_")[0])
    own = dataclasses.replace(call, numerics=AttentionSpec(preset=preset).resolve())
    return get(name).obstacle(own) is None


def check(
    plans: Iterable[LayerPlan], *, device: torch.device | str, dtype: torch.dtype, head_dim: int, softcap: float = 0.0
) -> None:
    """Raise ``UserError`` for the first group that this machine cannot run, saying why and which backends can."""
    device = torch.device(device)
    for plan in plans:
        for group in plan.groups:
            call = Call(device, dtype, head_dim, numerics_from_key(group.numerics), softcap)
            reason = get(group.backend).obstacle(call)
            if reason:
                if _serves(group.backend, call):  # it is what is asked of it, and torch's kernels have no sites at all
                    what = "cannot do this"
                    able = [name for name in _REGISTRY if name not in sdpa.KERNELS and not get(name).obstacle(call)]
                else:
                    what = f"cannot run on {device.type} with {str(dtype).removeprefix('torch.')}"
                    able = [name for name in _REGISTRY if _serves(name, call)]
                others = f"; backends that can: {', '.join(able)}" if able else ""
                raise UserError(
                    f"attention of layer {plan.layer} = {group.spec.label()!r}: backend {group.backend} {what}: {reason}{others}"
                )
