"""The backends by name: what runs, what it needs, and why it cannot run, in words. There is never a silent substitute.

No torch at import: a backend's module is imported when it is called, so that a config is read without torch and a machine without
Triton runs everything else.
"""

import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from .numerics import FEATURES, FLASH, HARDWARE, Numerics, numerics_from_key
from .presets import EXTERNAL, PRESETS
from .triton.block_sizes import head_dim_obstacle, tile_obstacle
from .user_error import UserError

FLASH_BACKENDS = (*FLASH, "flash_hopper")
"""What can compute the ``flash`` presets, or some of them."""
FLASH_HOPPER_PACKAGES = {"flash-attn-4": "4.0.0b36", "nvidia-cutlass-dsl": "4.8.1", "quack-kernels": "0.6.5"}
"""``flash_hopper`` replaces methods of theirs, and was tried with these versions alone."""


@dataclass(frozen=True)
class Call:
    """What a backend is asked for: enough to say whether it can serve it."""

    device: str
    """Type of the device: cpu, cuda."""
    dtype: str
    """Format of q: fp32, bf16, fp16."""
    head_dim: int
    numerics: Numerics
    features: tuple[str, ...] = ()
    """The members of ``numerics.FEATURES`` that the call uses."""
    value_dim: int = 0
    """Head dim of v; 0: that of q and k."""


@dataclass(frozen=True)
class Backend:
    """``run(q, k, v, numerics, *, seed, scale, causal, softcap, sinks, mask)``: q [B, T, H, D], k [B, S, HK, D], v [B, S, HK, DV],
    ``numerics`` a key (of ``external`` the kernel's name), sinks [H] or None, a ``Mask``; O [B, T, H, DV].

    ``numerics.site`` declares which sites it lacks; ``needs`` says what else it lacks, or None.
    """

    run: Callable[..., Any]
    needs: Callable[[Call], str | None] = lambda call: None
    has_sites: bool = True
    """False: it rounds as its kernel does, whatever ``Numerics`` says."""
    features: tuple[str, ...] = ()
    """The ``numerics.FEATURES`` that it has; it is asked for no others."""
    presets: tuple[str, ...] = ()
    """Where not empty, it has the sites of these presets on base ``hardware`` and no others; empty: the sites that declare it."""


# A function each: torch 2.11 compiles an import statement, but not importlib.import_module.
def _standard(*qkv: Any, **settings: Any) -> Any:
    from .reference.standard import standard

    return standard(*qkv, **settings)


def _flash(*qkv: Any, **settings: Any) -> Any:
    from .triton.ops import flash

    return flash(*qkv, **settings)


def _flash_hopper(*qkv: Any, **settings: Any) -> Any:
    from .hopper.launch import flash_hopper

    return flash_hopper(*qkv, **settings)


def _flash_reference(*qkv: Any, **settings: Any) -> Any:
    from .reference.flash import flash_reference

    return flash_reference(*qkv, **settings)


def _external(*qkv: Any, **settings: Any) -> Any:
    from .external import run

    return run(*qkv, **settings)


def _interprets() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)


def _flash_needs(call: Call) -> str | None:
    if importlib.util.find_spec("triton") is None:
        reason: str | None = "it needs triton, which is not installed"
    elif call.device != "cuda" and not _interprets():
        reason = "it needs a CUDA device (or TRITON_INTERPRET=1)"
    else:
        of_v = (call.value_dim or call.head_dim) + (8 if call.numerics.delta_error == "zero_sum" else 0)
        reason = head_dim_obstacle(call.head_dim) or head_dim_obstacle(of_v) or tile_obstacle(call.numerics)
    instead = "flash_reference runs anywhere (backend='flash_reference', in train.py --attention.flash-backend flash_reference)"
    return reason and f"{reason}; {instead}"


def _flash_hopper_needs(call: Call) -> str | None:
    if call.dtype == "fp32":
        return "it takes bfloat16 or float16 and not float32"
    if call.head_dim not in (64, 96, 128):
        return f"it takes head dims 64, 96 and 128, not {call.head_dim}"
    return _no_hopper() if call.device == "cuda" else f"{_HOPPER}, not {call.device}"


_HOPPER = "it needs a CUDA device of compute capability 9.0 (Hopper)"


@functools.cache
def _no_hopper() -> str | None:
    import torch

    found = ".".join(map(str, torch.cuda.get_device_capability())) if torch.cuda.is_available() else "none"
    if found != "9.0":
        return f"{_HOPPER}, not {found}"
    for package, expected in FLASH_HOPPER_PACKAGES.items():
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found = "none"
        if found != expected:
            return f"it needs {package} {expected}, not {found}: pip install 'low-precision-attention[fast]'"
    return None


def _sdpa(name: str) -> Backend:
    def run(*qkv: Any, **settings: Any) -> Any:
        from .reference import sdpa

        return sdpa.run(name, *qkv, **settings)

    def needs(call: Call) -> str | None:
        if name == "sdpa_math":
            return None
        if call.device != "cuda":
            return None if name == "sdpa_flash" else "it needs a CUDA device"
        if call.dtype == "fp32" and name != "sdpa_efficient":
            return "it takes bfloat16 or float16 and not float32"
        if call.head_dim % 8:
            return f"it takes head dims divisible by 8, not {call.head_dim}"
        return None

    return Backend(run, needs, has_sites=False, features=() if name == "sdpa_efficient" else ("grouped",))


# By name: a new feature is no backend's until it has it.
_FEATURES = ("softcap", "grouped", "keys", "ranges", "value_dim", "sinks")

BACKENDS: dict[str, Backend] = {
    "standard": Backend(_standard, features=_FEATURES),
    **{name: _sdpa(name) for name in ("sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa_math")},
    "flash": Backend(_flash, _flash_needs, features=_FEATURES),
    "flash_reference": Backend(_flash_reference, features=_FEATURES),
    "flash_hopper": Backend(
        _flash_hopper, _flash_hopper_needs, features=("grouped",), presets=("flash", "flash_consistent")
    ),
    EXTERNAL: Backend(_external, has_sites=False, features=("grouped",)),
}


def numerics_of(backend: str, key: str) -> Numerics:
    """The roundings that ``HeadGroup.numerics`` names; of an external kernel, which has its own, a value that nothing reads."""
    return HARDWARE if backend == EXTERNAL else numerics_from_key(key)


def _other_site(name: str, numerics: Numerics) -> str | None:
    """The first site whose value differs from the nearest preset's of the backend, in words; None where one fits in all."""
    served = [HARDWARE.with_sites(PRESETS[preset].of(HARDWARE)) for preset in BACKENDS[name].presets]
    served += [value.concrete(fmt) for value in served for fmt in ("fp32", "bf16", "fp16")]
    nearest = min(served, key=lambda value: len(numerics.differences(value)))
    # No site of these presets depends on where a tile ends.
    differ = [site for site in numerics.differences(nearest) if not site.startswith(("tile_q=", "tile_k="))]
    if not differ:
        return None
    site, _, value = differ[0].partition("=")
    return f"it does not have this site: {site} = {value!r}, expected {getattr(nearest, site)}"


def lacking(name: str, features: Iterable[str]) -> str | None:
    """The first of these features that a backend does not have, in words, or None."""
    absent = [feature for feature in features if feature not in BACKENDS[name].features]
    return f"it has no {FEATURES[absent[0]]}" if absent else None


def obstacle(name: str, call: Call) -> str | None:
    """Why a backend cannot serve a call, or None: it lacks a feature, a site excludes it, or the backend needs something else."""
    backend, numerics = BACKENDS[name], call.numerics
    if backend.has_sites:
        try:
            numerics = numerics.concrete(call.dtype)
        except UserError as error:  # sites that exclude each other for q of this dtype
            return str(error)
    reason = lacking(name, call.features)
    if reason is None and backend.has_sites:
        reason = _other_site(name, numerics) if backend.presets else numerics.refused_by(name, call.features)
    return reason or backend.needs(replace(call, numerics=numerics))
