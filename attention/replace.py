"""``replace_sdpa``: ours in the place of torch's ``scaled_dot_product_attention``, for code that cannot be edited."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .functional import refuse, scaled_dot_product_attention, spec_of, stochastic
from .plan import AttentionSpec
from .presets import RECOMMENDED
from .reference.tiles import NAMESPACE


def replace_sdpa(numerics: str | AttentionSpec = RECOMMENDED) -> AbstractContextManager[None]:
    """In a ``with`` block ours replaces torch's ``scaled_dot_product_attention``, also where modules have it by name.

    It does so in all threads; of blocks that are open at once the last one opened counts. Put the backward pass inside as well: activation
    checkpointing calls attention there again. What ours cannot do raises ``ValueError``, as in ``scaled_dot_product_attention``. What stays
    torch's: a function that an object keeps, as ``self.sdpa``, and what ``torch.jit.script`` has compiled; inside the block
    ``torch.jit.script`` of code that calls attention raises torch's ``NotSupportedError``. Warns where no call was made, as by a model with
    attention of another kind.
    """
    draws = stochastic(spec_of(numerics))
    expected = "expected none that rounds stochastically, as no seed reaches it"
    refuse(draws, f"replace_sdpa: numerics = {numerics!r}: {expected}")
    return _block(numerics)


class _Calls:
    """Of one stand-in."""

    made, traced = 0, False


_STANDING: list[Callable[..., Tensor]] = [functional.scaled_dot_product_attention]
"""torch's, and a stand-in for each open block; the last one is in place."""


@functools.cache  # one function for each, or a compiler would compile the model again in every block
def _stand_in(numerics: str | AttentionSpec) -> tuple[Callable[..., Tensor], _Calls]:
    calls = _Calls()

    @torch.compiler.assume_constant_result  # in activation checkpointing a compiler would refuse a note in what it traces
    def note(traced: bool) -> None:
        calls.made += 1
        calls.traced |= traced  # what is compiled runs without a note, in later blocks, too

    def attend(*arguments: Any, **settings: Any) -> Tensor:
        note(torch.compiler.is_compiling())
        return scaled_dot_product_attention(*arguments, **settings, numerics=numerics)

    return attend, calls


@contextlib.contextmanager
def _block(numerics: str | AttentionSpec) -> Iterator[None]:
    attend, calls = _stand_in(numerics)
    before = calls.made
    _put(_STANDING[-1], attend)
    _STANDING.append(attend)
    try:
        yield
    finally:
        there = _STANDING[-1]
        del _STANDING[len(_STANDING) - 1 - _STANDING[::-1].index(attend)]
        _put(there, _STANDING[-1])  # also where a module has been imported meanwhile
    if calls.made == before and not calls.traced:
        warnings.warn("replace_sdpa: scaled_dot_product_attention was not called", stacklevel=3)


def _put(old: object, new: object) -> None:
    own = ("torch.", f"{NAMESPACE}.")
    modules = (module for name, module in list(sys.modules.items()) if module and not f"{name}.".startswith(own))
    for names in (vars(functional), *map(vars, modules)):
        for name in [name for name, value in list(names.items()) if value is old]:
            names[name] = new
