"""A forward pass that is looked at: how its calls of attention are seen, in its own thread alone, and which modules hide theirs."""

import functools
import inspect
import re
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import _cur_sdpa_kernel_backends, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from ..attn_mask import is_causal_bias
from ..functional import scaled_dot_product_attention, spec_of
from ..huggingface import HARMLESS
from ..huggingface_models import Hook, traits_of
from ..operators import TORCHS
from ..replace import _dispatch as replaced_sdpa
from .look import Look

COMPILED = "watch: the model is compiled: expected what torch.compile(model) returned, not the module inside, and no model.compile()"
Attend = Callable[["Pass", int, Callable[..., Tensor], dict[str, Any]], Tensor]
_LOCK = threading.RLock()


class Pass(TorchFunctionMode):
    """A forward pass of a model from ``open`` to ``close``.

    Args:
        look: what the owner keeps of its calls.
        attend: given the pass, the number of a call in it, what computes it of q, k and v, and its arguments by name, with ``kernel`` as
            ``Look.keep`` takes it, and ``ours``, the label of its numerics, None where it is not ours; gives O.
    """

    def __init__(self, look: Look | None, attend: Attend):
        super().__init__()
        self.look: Any = look
        self._attend, self._inside = attend, False
        self.seen = 0
        """Calls so far."""
        self.given = 0
        """Those among them whose number the model gave."""
        self.hidden: list[str] = []
        """Modules that look like attention, ran, and made no call that was seen."""
        self._around: list[tuple[str, int]] = []
        """Modules that look like attention and are running, the innermost last; each with the calls that were seen before it."""
        self.recompiled = False
        """Whether checkpointing will run what is compiled again, in the backward pass, where it is not uncompiled any more."""
        self.over = False
        self.outer: Pass | None = None
        """That of another watch, around this one."""
        self._thread, self._of_process, self._of_thread = threading.get_ident(), ExitStack(), ExitStack()

    def open(self, model: nn.Module, *, names: bool) -> None:
        """``names``: find out which modules hide their attention. Raises ``ValueError`` where the pass is being compiled."""
        try:
            if "torch._dynamo" in sys.modules:  # else nothing is compiled; what is hides its calls
                self._of_process.enter_context(_uncompiled())
                for module in compiled_within(model):
                    self._of_process.callback(module.register_forward_pre_hook(Hook(self._compiled_entered)).remove)
            self._of_process.enter_context(_hugging_face(model))
            if names:
                for name, module in model.named_modules():
                    # A scripted one takes no hooks.
                    if name and _is_like_attention(module) and not isinstance(module, torch.jit.ScriptModule):
                        for hook in (
                            module.register_forward_pre_hook(Hook(functools.partial(self._entered, name))),
                            module.register_forward_hook(Hook(self._left), always_call=True),
                        ):
                            self._of_process.callback(hook.remove)
            self.outer = _CURRENT.get()
            self._of_thread.callback(_CURRENT.set, self.outer)
            _CURRENT.set(self)
            super().__enter__()
            self._of_thread.callback(super().__exit__, None, None, None)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Take all of it back; from another thread what is not this one's own, where nothing is looked at any more."""
        self.over = True
        if threading.get_ident() == self._thread:
            self._of_thread.close()
        self._of_process.close()

    # ---- calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.multi_head_attention_forward and not self.over:
            return self._torchs_module(func, args, kwargs)
        if func not in (TORCHS, scaled_dot_product_attention):
            return func(*args, **kwargs)
        return self.call(func, args, kwargs)

    def call(self, func: Callable[..., Tensor], args: Any, kwargs: Any) -> Tensor:
        try:
            arguments = named(*args, **kwargs)
        except TypeError:  # ``func`` says what is wrong
            return func(*args, **kwargs)
        arguments |= {"kernel": kernel_of(func, kwargs), "torchs": func is TORCHS}
        ours = func is scaled_dot_product_attention
        arguments["ours"] = spec_of(arguments["numerics"]).label() if ours else None

        def run(*qkv: Tensor) -> Tensor:
            n = len(args[:3])
            return func(*qkv[:n], *args[3:], **kwargs | dict(zip(QKV[n:], qkv[n:], strict=True)))

        return self.attend(run, arguments)

    def attend(self, run: Callable[..., Tensor], arguments: dict[str, Any]) -> Tensor:
        if self._inside or self.over:
            return run(*(arguments[name] for name in QKV))
        number, self.seen = self.seen, self.seen + 1
        self._inside = True
        try:
            return self._attend(self, number, run, arguments)
        finally:
            self._inside = False

    def _torchs_module(self, forward: Any, args: Any, kwargs: Any) -> Any:
        """Run the attention of ``nn.MultiheadAttention``, with other names in a copy of it: no mode sees the call that it makes.

        For weights it makes none.
        """

        def attend(*args: Any, **settings: Any) -> Tensor:
            function = functional.scaled_dot_product_attention
            if function is not replaced_sdpa:
                return self.call(function, args, settings)
            with self:  # it is put away meanwhile, and ours, which that calls, is what to see
                return function(*args, **settings)

        if not isinstance(forward, types.FunctionType):
            return forward(*args, **kwargs)
        names = {**forward.__globals__, "scaled_dot_product_attention": attend, "has_torch_function": lambda _: False}
        copy = types.FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
        return copy(*args, **kwargs)

    # ---- modules

    def _entered(self, name: str, *_: Any) -> None:
        if threading.get_ident() == self._thread:
            self._around.append((name, self.seen))

    def _compiled_entered(self, *_: Any) -> None:
        self.recompiled |= within_checkpoint()

    def _left(self, *_: Any) -> None:
        if threading.get_ident() == self._thread and self._around:
            name, before = self._around.pop()
            # Of nested ones that saw nothing the innermost is named.
            named = any(f"{other}.".startswith(f"{name}.") for other in self.hidden)
            if self.seen == before and not named:
                self.hidden.append(name)


def within_checkpoint() -> bool:
    """Whether what runs now is kept by non-reentrant activation checkpointing."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def compiled_within(model: nn.Module) -> list[nn.Module]:
    """Modules inside that are compiled themselves; none where the compiler is off, as by TORCHDYNAMO_DISABLE."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is None or dynamo.config.disable:
        return []
    wrapper = dynamo.OptimizedModule
    compiled = (x for x in model.modules() if isinstance(x, wrapper) or x._compiled_call_impl is not None)
    return [module for module in compiled if module is not model]


_CURRENT: ContextVar[Pass | None] = ContextVar("_CURRENT", default=None)
"""The innermost pass of this thread."""


QKV = ("query", "key", "value")


def kernel_of(func: Callable[..., Any], settings: dict[str, Any]) -> Callable[..., Tensor] | None:
    """What computes a call of torch's function or ours, with the choices in force now; None for another."""
    if settings.get("sinks") is not None:
        return None
    if func is scaled_dot_product_attention:
        own = {name: settings[name] for name in ("numerics", "rounding_seed") if name in settings}
        return functools.partial(scaled_dot_product_attention, **own)
    if func is not TORCHS:
        return None
    backends = _cur_sdpa_kernel_backends(with_priority=True)

    def call(*qkv: Any, **settings: Any) -> Tensor:
        with sdpa_kernel(backends, set_priority=True):
            return TORCHS(*qkv, **settings)

    return call


_SIGNATURE = inspect.signature(scaled_dot_product_attention)


def named(*args: Any, **more: Any) -> dict[str, Any]:
    """The arguments of a call of torch's function or ours, by name."""
    bound = _SIGNATURE.bind(*args, **more)
    bound.apply_defaults()
    return bound.arguments


def plain_mask(call: dict[str, Any], device: torch.device) -> Tensor | None:
    """The mask of a call as a plain tensor. Raises ``ValueError`` for one that cannot be read.

    A floating one of our attention becomes bool: what torch's function adds, it hides, also from a row that sees no key.
    """
    mask = call["attn_mask"]
    # That of flash attention is made here, where memory that does not suffice ends no training.
    if isinstance(mask, functools.partial):
        return mask(device)
    if is_causal_bias(mask):  # its own storage is never written
        return mask._materialize(device)
    if mask is not None and type(mask) not in (Tensor, nn.Parameter):
        raise ValueError(f"attn_mask is a {type(mask).__name__}: expected a plain tensor")
    return mask == 0 if mask is not None and mask.is_floating_point() and call.get("ours") else mask


_PROJECTIONS = (
    "q_proj k_proj, query key, q_proj kv_proj, to_q to_k, to_q to_kv, q k, wq wk, q_lin k_lin, linear_q linear_k, "
    "qkv, qkv_proj, to_qkv, wqkv, c_attn, query_key_value"
)


def _is_like_attention(module: nn.Module) -> bool:
    """Whether the name of the class, or what the module projects to, is that of attention; it must have a matrix."""
    children = {name.lower() for name, _ in module.named_children()}
    if not re.search("attention|attn", type(module).__name__, re.IGNORECASE):
        return any(set(names.split()) <= children for names in _PROJECTIONS.split(", "))
    return any(parameter.ndim > 1 for parameter in module.parameters())


def may_attend(model: nn.Module) -> list[str]:
    """Modules like attention, by their code alone, too, as routers and mixers are; of scripted ones no call is seen."""
    return [name for name, x in model.named_modules() if name and (_is_like_attention(x) or traits_of(x).own)]


# ---- what torch and transformers keep once for all threads


_stances: list[Any] = []
"""One for each pass that runs uncompiled. The first has what was in force before."""


@contextmanager
def _uncompiled() -> Iterator[None]:
    """What is compiled runs uncompiled, in all threads, as torch has one stance for the process: until the last pass is over."""
    with _LOCK:
        try:
            _stances.append(torch.compiler.set_stance("force_eager"))
        except RuntimeError:  # the pass is compiled around its own hooks
            raise ValueError(COMPILED) from None
    try:
        yield
    finally:
        with _LOCK:
            stance = _stances.pop()
            if not _stances:
                stance.__exit__(None, None, None)


_replaced: dict[str, tuple[int, Callable[..., Any]]] = {}
"""For each watched attention function of transformers: how many passes look at it, and the function itself."""


@contextmanager
def _hugging_face(model: nn.Module) -> Iterator[None]:
    """Stand in for those attention functions of a Hugging Face model that are not torch's: its parts may have several."""
    functions: Any = getattr(sys.modules.get("transformers.modeling_utils"), "ALL_ATTENTION_FUNCTIONS", {})
    configs = (getattr(module, "config", None) for module in model.modules())
    names: set[Any] = {getattr(config, "_attn_implementation", None) for config in configs}
    with ExitStack() as stand_ins:
        with _LOCK:  # a pass that ends elsewhere takes its names away for a moment
            for name in names & (functions.keys() - {"sdpa"}):
                stand_ins.enter_context(_stand_in(functions, name))
        yield


@contextmanager
def _stand_in(functions: Any, name: str) -> Iterator[None]:
    """Until the last pass that looks at it is over. Other threads get the function itself."""
    with _LOCK:
        passes, function = _replaced.get(name, (0, None))
        if function is None:
            function = functions[name]
            functions[name] = _dispatching(function, name)
        _replaced[name] = passes + 1, function
    try:
        yield
    finally:
        with _LOCK:
            passes, function = _replaced.pop(name)
            if passes > 1:
                _replaced[name] = passes - 1, function
            else:
                del functions[name]
                if name not in functions or functions[name] is not function:
                    functions[name] = function


_KNOWN = {"dropout", "scaling", "is_causal", "softcap", "output_attentions", *HARMLESS}
"""What is handed to an attention function and is either read here or changes nothing; a call with more is not measured."""


@_disable_current_modes()  # as in ``Watch._guard``
def _is_unknown(mask: Tensor | None, settings: dict[str, Any]) -> bool:
    """Whether something says which keys a query sees, or how it weighs them, that is not read here."""
    if {key for key, value in settings.items() if value is not None} - _KNOWN:
        return True
    positions = settings.get("position_ids")  # flash kernels read packed sequences off them
    return mask is None and isinstance(positions, Tensor) and bool((positions.diff(dim=-1) < 0).any())


@_disable_current_modes()
def _swapped(o: Tensor) -> Tensor:
    return o.transpose(1, 2)


def _seen_by_flash(
    kept_BS: Tensor | None, T: int, S: int, keys: int, causal: bool, window: int | None, device: torch.device
) -> Tensor:
    """The mask of flash kernels, which get at most which tokens are no padding. The last query stands at the last of ``keys``.

    The same tokens are padding as queries, and give zeros.
    """
    shown = torch.ones(T, S, dtype=torch.bool, device=device)
    if causal:
        shown = shown.tril(keys - T)
    if window:
        shown = shown.triu(keys - T + 1 - window).tril(keys - T - 1 + window)
    if kept_BS is None:
        return shown
    kept = kept_BS.bool()
    as_keys, as_queries = functional.pad(kept, (0, S - keys)), functional.pad(kept, (T - keys, 0))
    return shown & as_keys[:, None, None] & as_queries[:, None, :, None]


def _dispatching(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    flash = "flash" in name.lower() or hasattr(function, "rounded_as")

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *more: Any, **named_too: Any
    ) -> Any:
        q, k, v, mask = query, key, value, attention_mask  # some models give them by these names
        looking = _CURRENT.get()
        if looking is None or more or not isinstance(mask, Tensor | None) or _is_unknown(mask, named_too):
            return function(module, q, k, v, mask, *more, **named_too)
        weights: list[Any] = []

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            o, *rest = function(module, q, k, v, mask, **named_too)
            weights.extend(rest)
            return _swapped(o)

        shown: Any = mask
        causal, window = named_too.get("is_causal"), named_too.get("sliding_window")
        if causal is None:
            causal = getattr(module, "is_causal", True)
        T, S = q.shape[2], k.shape[2]
        keys = mask.shape[1] if mask is not None and mask.ndim == 2 else S  # of a static cache those that are filled
        if not flash and mask is None:  # as transformers' own "sdpa" has it: the first query stands at the first key
            causal, keys = causal and T > 1, T
            window = window if causal else None
        window = window if window and window < S else None
        if (isinstance(mask, Tensor) and mask.ndim == 2) or (mask is None and (window or (causal and keys != T))):
            shown = functools.partial(_seen_by_flash, mask, T, S, keys, causal, window)
        dropout, scale = named_too.get("dropout", 0.0), named_too.get("scaling")
        call = named(q, k, v, shown, dropout, bool(causal and shown is None), scale, True)
        if mask is None or mask.ndim == 4:

            def kernel(q: Tensor, k: Tensor, v: Tensor, shown: Tensor | None, scale: float, **_: Any) -> Tensor:
                shown = None if mask is None else shown
                return function(module, q, k, v, shown, **(named_too | {"scaling": scale, "dropout": 0.0}))[
                    0
                ].transpose(1, 2)

            call["kernel"] = kernel
        call["ours"] = getattr(function, "rounded_as", None)
        call["softcap"] = named_too.get("softcap") or 0.0

        def seen_by(looking: Pass | None, *qkv: Tensor) -> Tensor:
            if looking is None:
                return run(*qkv)
            inner = functools.partial(seen_by, looking.outer)
            return looking.attend(inner, call | dict(zip(QKV, qkv, strict=True)))

        return _swapped(seen_by(looking, q, k, v)), *(weights or [None])

    return attend
