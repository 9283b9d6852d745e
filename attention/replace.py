"""What stands in for torch's ``scaled_dot_product_attention``, for each thread by itself: ``replace_sdpa``.

While any block of any thread is open, one function, ``_dispatch``, is in the place of torch's. It calls what the innermost open block of
its own thread says; in a thread without one, torch's.
"""

import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .functional import scaled_dot_product_attention, spec_of, stochastic
from .operators import NAMESPACE, TORCHS
from .plan import AttentionSpec
from .presets import RECOMMENDED
from .user_error import refuse


def replace_sdpa(numerics: str | AttentionSpec | None = RECOMMENDED) -> AbstractContextManager[None]:
    """In a ``with`` block ours replaces torch's ``scaled_dot_product_attention``, also where modules have it by name.

    The block is the thread's own: other threads, those of ``nn.DataParallel`` too, keep torch's function or have a block of their own.
    Blocks may be nested, and the result may be entered again. Put the backward pass inside as well: activation checkpointing calls
    attention there again (around code that is compiled, in one thread at a time; a block inside such code breaks the graph). What ours
    cannot do is a ``ValueError``, as in ``scaled_dot_product_attention``. What stays torch's: a function that an object keeps, as
    ``self.sdpa``, and what ``torch.jit.script`` has compiled; inside the block ``torch.jit.script`` of code that calls attention raises
    torch's ``NotSupportedError``. Warns where no call was made, as by a model with attention of another kind.

    ``numerics=None``, inside another block: torch's function, as for a gradient penalty, forward and backward. Outside of one it warns.
    """
    if numerics is None:
        return _Replacement(None, "")
    spec = spec_of(numerics)
    refuse(
        stochastic(spec),
        f"replace_sdpa: numerics = {numerics!r}: expected none that draws at random, as no seed reaches it",
    )
    return _Replacement(numerics, spec.label())


class _Replacement(ContextDecorator):
    def __init__(self, numerics: str | AttentionSpec | None, name: str):
        self.name = name
        if numerics is not None:
            _NUMERICS[name] = numerics

    @torch.compiler.disable  # traced in part, one would stay open
    def __enter__(self) -> None:
        if not self.name and not (_THREAD.stack or _of_caller()):  # as from a setting that is missing
            warnings.warn(
                "replace_sdpa: numerics = None changes nothing outside of a block: expected a preset", stacklevel=3
            )
        _count(_OPEN.append, self.name)
        _keep((*_THREAD.stack, _Block(self)))

    @torch.compiler.disable
    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        stack = _THREAD.stack
        block = next((block for block in reversed(stack) if block.owner is self), None)
        if block is None:
            raise ValueError("replace_sdpa: not opened in this thread: expected it to be closed where it was opened")
        _keep(tuple(other for other in stack if other is not block))
        _count(_OPEN.remove, self.name)
        # What an earlier block's trace has compiled runs without this module.
        if self.name and not block.called and error is None and self.name not in _TRACED:
            warnings.warn("replace_sdpa: scaled_dot_product_attention was not called", stacklevel=3)


class _Block:
    def __init__(self, owner: _Replacement):
        self.owner, self.called = owner, False


class _Thread(threading.local):
    """State of a thread. A compiler guards what it reads here."""

    def __init__(self) -> None:
        self.stack: tuple[_Block, ...] = ()
        self.name = ""
        """Key of the innermost block in ``_NUMERICS``; empty where torch's function stands."""
        self.is_foreign = isinstance(threading.current_thread(), threading._DummyThread)
        """Not made by Python, as those in which autograd runs the backward pass on a GPU."""


_THREAD, _LOCK = _Thread(), threading.Lock()
_NUMERICS: dict[str, str | AttentionSpec] = {}
_TRACED: set[str] = set()
_OPEN: list[str] = []
"""Names of all open blocks of all threads."""
_OPEN_NAMES, _TORCHS = "", TORCHS
_KEY = f"{NAMESPACE}.replace"


def _dispatch(*arguments: Any, **settings: Any) -> Tensor:
    name = _THREAD.name
    if not name and _THREAD.is_foreign:
        name = _name_of_caller(_OPEN_NAMES)
    if not name:
        return _TORCHS(*arguments, **settings)
    _note(name if torch.compiler.is_compiling() else "")
    return scaled_dot_product_attention(*arguments, **settings, numerics=_NUMERICS[name])


def _of_caller() -> tuple[_Block, ...]:
    """The blocks of the thread that called ``backward``, where this is a thread of autograd's."""
    return torch._C._get_obj_in_tls(_KEY) if torch._C._is_key_in_tls(_KEY) else ()


@torch.compiler.assume_constant_result
def _name_of_caller(open_names: str) -> str:
    """A compiler retraces this where ``open_names`` differ."""
    stack = _of_caller()
    return stack[-1].owner.name if stack else ""


@torch.compiler.assume_constant_result  # in activation checkpointing a compiler would refuse a note in what it traces
def _note(traced: str) -> None:
    if traced:
        _TRACED.add(traced)
    for block in _THREAD.stack or _of_caller():
        block.called = True


def _keep(stack: tuple[_Block, ...]) -> None:
    _THREAD.stack, _THREAD.name = stack, stack[-1].owner.name if stack else ""
    # Autograd hands torch's own thread-local objects on to the threads of a backward pass, and no others.
    if stack or not hasattr(torch._C, "_remove_obj_from_tls"):  # torch < 2.13
        torch._C._stash_obj_in_tls(_KEY, stack)
    else:
        torch._C._remove_obj_from_tls(_KEY)


def _count(change: Callable[[str], None], name: str) -> None:
    """``change`` is ``_OPEN.append`` or ``_OPEN.remove``. While any block is open, ours stands in the place of torch's."""
    global _OPEN_NAMES, _TORCHS
    with _LOCK:
        if not _OPEN:
            _TORCHS = functional.scaled_dot_product_attention
            _put(_TORCHS, _dispatch)
        change(name)
        _OPEN_NAMES = " ".join(sorted(set(_OPEN)))
        if not _OPEN:
            _put(_dispatch, _TORCHS)  # also where a module has been imported meanwhile


def _put(old: object, new: object) -> None:
    own = ("torch.", f"{NAMESPACE}.")
    modules = (module for name, module in list(sys.modules.items()) if module and not f"{name}.".startswith(own))
    for names in (vars(functional), *map(vars, modules)):
        for name in [name for name, value in list(names.items()) if value is old]:
            names[name] = new
