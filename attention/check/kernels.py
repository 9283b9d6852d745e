"""Attention kernels by name, each as one call ``(q, k, v, causal, scale, mask=None) -> o`` on [B, H, T, D]."""

import contextlib
import hashlib
import importlib
import importlib.metadata
import inspect
import math
import os
import sys
import traceback
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..functional import scaled_dot_product_attention as ours
from ..functional import stochastic
from ..mask import NO_MASK
from ..numerics import LOW_FORMATS, SITES
from ..operators import NAMESPACE, TORCHS
from ..packages import add_cutlass
from ..plan import AttentionSpec
from ..presets import ALIASES, PRESETS, unaliased
from ..reference.flash import kept_of
from ..reference.sdpa import KERNELS
from ..reference.tiles import empty_outputs
from ..rounding import FORMAT_OF
from ..user_error import UserError, invalid
from .captured import Inputs, Mask

Call = Callable[..., Tensor]
"""Called as ``(q, k, v, causal, scale)``, and with ``mask=`` where there is one; ``causal`` is then False. Where ``scale`` is None, it is
the default of a kernel that takes torch's arguments; others raise."""

FLASH = {"fa2": "flash_attn", "fa3": "flash_attn_interface", "fa4": "flash_attn.cute"}
"""Modules of FlashAttention by its names here."""
TRIED = [name for name in PRESETS if not stochastic(AttentionSpec(preset=name))]
"""Presets of this package. The others draw at random: a sequence alone draws otherwise than in a batch."""
SCALES = ("scale", "softmax_scale", "sm_scale")
"""A scale's names in a user's function."""


@dataclass(frozen=True)
class Kernel:
    """``missing``: why it cannot be called here; its cases are then unverified. ``masks``: whether it has an argument for a mask."""

    name: str
    call: Call | None
    missing: str = ""
    masks: bool = True


def find(kernel: str | Callable[..., Any]) -> Kernel:
    """The kernel of that name, or a user's function.

    A name is one of ``KNOWN``, a preset of this package, or ``module:function``, imported from the current folder, too. A function
    with a parameter ``is_causal``, or an ``nn.Module`` whose ``forward`` has it, is called as torch's ``scaled_dot_product_attention``,
    any other as ``(q, k, v, causal, scale)``, by name what it takes by name only. It gives o, or a tuple that begins with o. Raises
    ``UserError`` for what is none of these, draws at random, has ``(*args, **kw)`` alone, has ``causal`` or one of ``SCALES`` at
    another place, or binds them by ``functools.partial``.
    """
    if callable(kernel):
        name = getattr(kernel, "__qualname__", " ".join(repr(kernel).split()))
        module = getattr(kernel, "__module__", "__main__")
        return _users(name if "<" in name else f"{module}:{name}", kernel)
    if not isinstance(kernel, str):
        raise invalid("kernel", kernel, "a function, or a name")
    if kernel in PRESETS and kernel not in TRIED:
        raise UserError(f"kernel = {kernel!r}: expected none that draws at random, as no seed reaches it")
    if kernel in PRESETS or kernel in ALIASES:
        n = AttentionSpec(preset=unaliased(kernel)).resolve()
        if any(getattr(n, name) in LOW_FORMATS for name, site in SITES.items() if site.is_format):
            return Kernel(kernel, None, "formats below BF16 are not covered: O of a row with one key is a rounded V")
        return Kernel(kernel, _as_torchs(partial(ours, numerics=kernel)))
    if kernel in KNOWN:
        try:
            return Kernel(kernel, KNOWN[kernel](), masks=kernel not in ("xformers", "te"))
        except Exception as error:  # whatever a package raises that is there in part
            return Kernel(kernel, None, f"cannot be imported: {told(error)}")
    module, colon, function = kernel.partition(":")
    if module.endswith(".py") and function:
        expected = f"a module, not a file: write {Path(module).stem}:{function}, and run in its folder"
        raise invalid("kernel", kernel, expected)
    if not (colon and module and function) or module in ("torch", *FLASH):
        listed = f"MODULE:FUNCTION, or a name that python -m {__package__} --help lists"
        raise invalid("kernel", kernel, listed, choices=(*KNOWN, *TRIED))
    return _users(kernel, _imported(kernel, module, function))


def first_calls(preset: str, p: Inputs) -> list[Callable[[], Any]]:
    """Calls, to make at once, for which Triton compiles kernels that several classes use: the forward pass in the length of p and one less,
    the backward pass in that of p, with its dO and with one of stride 0.

    They need nothing of each other, as the backward passes read memory that nothing was written to.
    """
    spec = AttentionSpec(preset=preset)
    if spec.resolved_backend != "flash":
        return []
    from ..triton import ops  # noqa: F401  it registers the operators; Triton is not everywhere

    n, passes = spec.resolve(), getattr(torch.ops, NAMESPACE)
    q, k, v, do = (x.transpose(1, 2) for x in (p.q, p.k, p.v, p.do))
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    kept = kept_of(seed, *empty_outputs(q, v, n.concrete(FORMAT_OF[q.dtype])))
    settings = (n.key(), p.scale, p.causal, 0.0, None, *NO_MASK)
    same_dos = do[:1, :1, :1, :1].expand_as(do)

    def forward() -> None:
        # One after the other: both first check sums by the same kernel, and Triton does not load one kernel in two threads.
        for length in (None, -1):
            passes.flash_forward(*(x[:, :length] for x in (q, k, v)), seed, *settings)

    return [forward, *(partial(passes.flash_backward, x, q, k, v, *kept, *settings) for x in (do, same_dos))]


def _imported(kernel: str, module: str, function: str) -> Callable[..., Any]:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
        for part in function.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:  # whatever a user's module raises at its import
        elsewhere = isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]
        cure = "; run in its folder, or set PYTHONPATH" if elsewhere else ""
        raise UserError(f"kernel = {kernel!r}: {told(error)}{cure}") from None
    if not callable(found):
        raise UserError(f"kernel = {kernel!r}: {function} is a {type(found).__name__}, expected a function")
    return found


def _users(name: str, function: Callable[..., Any]) -> Kernel:
    try:
        parameters = dict(inspect.signature(_forward(function)).parameters)
        names = list(parameters)
    except (TypeError, ValueError):  # a builtin
        parameters, names = {}, ["is_causal", "enable_gqa", "attn_mask"]
    opaque = {x.kind for x in parameters.values()} == {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    # Operators of torch and what ``functools.wraps`` names take the arguments of what they stand for.
    if opaque and inspect.isfunction(function) and not hasattr(function, "__wrapped__"):
        expected = "expected named parameters (functools.wraps keeps them)"
        raise UserError(f"kernel = {name!r}: its parameters are *{names[0]}, **{names[1]}: {expected}")
    own = "is_causal" not in names
    by_place, by_name = ["causal", "scale"], {}
    for what, place, alike in (("causal", 3, ("causal",)), ("scale", 4, SCALES)) if own else ():
        if (parameter := next((x for x in names if x in alike), None)) is None:
            continue
        if parameters[parameter].kind is inspect.Parameter.KEYWORD_ONLY:
            by_name[parameter] = what
            by_place.remove(what)
        elif names.index(parameter) != place:
            expected = "(q, k, v, causal, scale) on [batch, heads, length, head dim], or torch's is_causal and scale"
            raise UserError(f"kernel = {name!r}: its parameters are {', '.join(names)}: expected {expected}")
    # Python lets a call overwrite what functools.partial has bound by name.
    bound = function.keywords if isinstance(function, partial) else {}
    if overwritten := [x for x in bound if x in (by_name if own else ("is_causal", "scale"))]:
        raise UserError(f"kernel = {name!r}: it binds {', '.join(overwritten)}: expected both free")

    masks, as_torchs = {"attn_mask", "is_causal"} <= set(names), _as_torchs(function, names)

    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, mask: Mask | None = None) -> Tensor:
        if mask is not None and not masks:
            raise NotImplementedError("it has no argument attn_mask")
        if scale is None and own:
            raise NotImplementedError("its scale has no default")
        if not own:
            return as_torchs(q, k, v, causal, scale, mask)
        given = {"causal": causal, "scale": scale}
        named = {parameter: given[what] for parameter, what in by_name.items()}
        return _first(function(q, k, v, *(given[what] for what in by_place), **named))

    return Kernel(name, call, masks=masks)


def _forward(function: Callable[..., Any]) -> Callable[..., Any]:
    """What names the parameters: wrappers of a module and ``apply`` of an autograd Function take ``*args``."""
    if isinstance(function, partial):
        return partial(_forward(function.func), *function.args, **function.keywords)
    if isinstance(function, torch.nn.DataParallel | torch.nn.parallel.DistributedDataParallel):
        return _forward(function.module)
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):  # its apply
        takes_context = owner.setup_context is torch.autograd.Function.setup_context
        return partial(owner.forward, None) if takes_context else owner.forward
    module = getattr(function, "_orig_mod", function)  # of torch.compile
    if module is not function:
        return _forward(module)
    return module.forward if isinstance(module, torch.nn.Module) else module


def _as_torchs(function: Callable[..., Any], arguments: Container[str] = ("enable_gqa",)) -> Call:
    """A function with the arguments of torch's; whether it has ``enable_gqa``, ``arguments`` say."""

    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, mask: Mask | None = None) -> Tensor:
        more: dict[str, Any] = {"enable_gqa": True} if k.shape[1] < q.shape[1] and "enable_gqa" in arguments else {}
        if mask is not None:
            more["attn_mask"] = mask.given()
        if scale is not None:
            more["scale"] = scale
        return _first(function(q, k, v, is_causal=causal, **more))

    return call


def _first(found: Any) -> Tensor:
    return found[0] if isinstance(found, tuple | list) else found


def told(error: BaseException) -> str:
    """What a foreign kernel raised, its notes first, in one line that a terminal obeys nothing of."""
    try:
        message = str(error)
    except Exception as second:  # a foreign one, too
        message = f"its message raises {type(second).__name__}"
    line = ": ".join((*map(str, getattr(error, "__notes__", ())), type(error).__name__, message))
    return "".join(x if x.isprintable() else "?" for x in " ".join(line.split())[:250])


def place(error: BaseException) -> str:
    """Where a foreign kernel raised, as " (mykernels.py:41)": the innermost line that is not this package's or torch's, or ""."""
    # The last two: a decorator that torch's kernels have here, and code without a file.
    ours = str(Path(__file__).parents[1]) + os.sep, str(Path(torch.__file__).parent) + os.sep, contextlib.__file__, "<"
    frames = [x for x in traceback.extract_tb(error.__traceback__) if not x.filename.startswith(ours)]
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


def _torchs(backend: SDPBackend) -> Call:
    return _as_torchs(sdpa_kernel(backend)(TORCHS))


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Each shape is compiled; behind torch's limit of eight it would silently run another, uncompiled code."""
    compiled = torch.compile(function, dynamic=False)

    def call(*operands: Any, **settings: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=256, fail_on_recompile_limit_hit=True):
            return compiled(*operands, **settings)

    return call


def _plain() -> Call:
    """Plain attention as autograd differentiates it: S and P in the dtype of q, softmax in FP32. On a GPU compiled."""

    def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, mask: Tensor | None) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        s = (q @ k.mT).float() * scale
        if causal:
            mask = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).tril()
        if mask is not None:
            s = s.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else s + mask
        return s.softmax(-1).to(v.dtype) @ v

    compiled = _compiled(attention)

    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, mask: Mask | None = None) -> Tensor:
        return (compiled if q.is_cuda else attention)(q, k, v, causal, scale, None if mask is None else mask.given())

    return call


def _flex() -> Call:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = _compiled(flex_attention)

    @lru_cache(maxsize=32)
    def causal_mask(T: int, S: int, device: torch.device) -> Any:
        return create_block_mask(lambda b, h, i, j: i >= j, None, None, T, S, device=device)

    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, mask: Mask | None = None) -> Tensor:
        blocks = causal_mask(q.shape[2], k.shape[2], q.device) if causal else None
        if mask is not None:
            if mask.dtype != torch.bool:
                raise NotImplementedError("it takes no additive mask")
            B, _, T, S = mask.visible.shape
            visible = mask.visible
            blocks = create_block_mask(lambda b, h, i, j: visible[b, 0, i, j], B, None, T, S, device=q.device)
        return _first(compiled(q, k, v, block_mask=blocks, scale=scale, enable_gqa=k.shape[1] < q.shape[1]))

    return call


def _flash_attn(module: str, **settings: Any) -> Call:
    """Tri Dao's packages: [B, T, H, D]."""
    if module == "flash_attn.cute":
        add_cutlass()
    function = importlib.import_module(module).flash_attn_func

    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, mask: Mask | None = None) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if mask is None:
            return _first(function(q, k, v, softmax_scale=scale, causal=causal, **settings)).transpose(1, 2)
        if not mask.window:
            raise NotImplementedError(
                "not a window: not tried here, as these packages take packed sequences for padding"
            )
        near = {"causal": True, "window_size": (mask.window - 1, 0)}
        return _first(function(q, k, v, softmax_scale=scale, **near, **settings)).transpose(1, 2)

    return call


def _xformers() -> Call:
    ops = importlib.import_module("xformers.ops")

    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        if k.shape[1] < q.shape[1]:
            raise NotImplementedError("grouped queries: not tried here")
        bias = ops.LowerTriangularMask() if causal else None
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return ops.memory_efficient_attention(q, k, v, attn_bias=bias, scale=scale).transpose(1, 2)

    return call


def _te() -> Call:
    DotProductAttention = importlib.import_module("transformer_engine.pytorch").DotProductAttention

    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        B, H, T, D = q.shape
        if v.shape[3] != D:
            raise NotImplementedError("values of another head dim: not tried here")
        mask = "causal" if causal else "no_mask"
        settings = {"attention_dropout": 0.0, "qkv_format": "bshd", "attn_mask_type": mask, "softmax_scale": scale}
        module = DotProductAttention(H, D, num_gqa_groups=k.shape[1], **settings)
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        return module(q, k, v).view(B, T, H, D).transpose(1, 2)

    return call


KNOWN: dict[str, Callable[[], Call]] = {
    **{name.replace("sdpa_", "torch:"): partial(_torchs, backend) for name, backend in KERNELS.items()},
    "torch:flex": _flex,
    "plain": _plain,
    **{
        f"{name}:deterministic" if settings else name: partial(_flash_attn, module, **settings)
        for name, module in FLASH.items()
        for settings in ({}, {"deterministic": True})
    },
    "xformers": _xformers,
    "te": _te,
}
"""Public kernels. What is not installed is unverified."""


@cache
def _packages_of_modules() -> Mapping[str, list[str]]:
    """It reads which files each installed package has: a tenth of a second."""
    return importlib.metadata.packages_distributions()


def versions(*modules: str) -> list[str]:
    """The packages that have these modules at their top, as "triton 3.6.0"."""
    found = {package for module in modules for package in _packages_of_modules().get(module, [])}
    return [f"{package} {importlib.metadata.version(package)}" for package in sorted(found)]


def identity(kernel: str) -> str:
    """Which code a kernel is: the packages that it comes in beside this one; of a user's also the start of its file's SHA-256."""
    preset = kernel in PRESETS or kernel in ALIASES
    name = __package__.partition(".")[0] if preset else kernel.partition(":")[0]
    module = {**FLASH, "te": "transformer_engine"}.get(name, name)
    told = versions("triton" if preset else module.partition(".")[0])
    file = None if kernel in KNOWN or preset else getattr(sys.modules.get(module), "__file__", None)
    if file and Path(file).is_file():  # a script from a pipe has none
        told.append(f"sha256 {hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]}")
    return ", ".join(told)
