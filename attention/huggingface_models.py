"""Models of transformers that cannot have our attention, refused when they are made and when they are switched.

transformers takes any registered name for any model. A model with attention code of its own never calls what stands for the name, but may
get the mask that was made for it. So transformers' word is taken: a model is served if its code asks the registry of attention functions,
and if it declares more than "eager". Where a file has both kinds, as of an
encoder of images beside a decoder, the part with code of its own keeps that, or transformers raises ``KeyError``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch import nn

from .user_error import refuse

_OWN = ("PegasusXGlobalLocalAttention", "Phi4MultimodalVisionAttention", "PPFormulaNetVisionAttention")
"""Attention beside that of the registry that would give another output (tests/test_hf_walk.py)."""
# A model that declares none of them may use its mask for more than attention, in the form that "eager" has (NLLB-MoE's router).
_DECLARED = ("_supports_attention_backend", "_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn")


def guard() -> None:
    """Have transformers' models looked at from now on; again changes nothing."""
    from transformers import PreTrainedModel

    if hasattr(PreTrainedModel.post_init, "looks_at_attention"):
        return
    post_init, switch = PreTrainedModel.post_init, PreTrainedModel.set_attn_implementation

    @functools.wraps(post_init)
    def checked_post_init(model: Any, *arguments: Any, **settings: Any) -> Any:
        check(model)
        return post_init(model, *arguments, **settings)

    @functools.wraps(switch)
    def checked_switch(model: Any, asked: Any, *arguments: Any, **settings: Any) -> None:
        before = [(part.config, part.config._attn_implementation) for part in _parts(model)]
        try:
            switch(model, asked, *arguments, **settings)
            check(model, asked)
        except Exception:
            for config, name in before:
                config._attn_implementation_internal = name
            raise

    checked_post_init.looks_at_attention = True  # type: ignore[attr-defined]
    for name, checked in {"post_init": checked_post_init, "set_attn_implementation": checked_switch}.items():
        setattr(PreTrainedModel, name, checked)


def is_ours(name: object) -> bool:
    """Whether ``name`` stands for an attention of ours, which another copy of this package may have put there."""
    from transformers import AttentionInterface

    return isinstance(name, str) and hasattr(AttentionInterface._global_mapping.get(name), "rounded_as")


def check(model: Any, asked: Any = None) -> None:
    """``ValueError`` where a part of ``model`` has attention, is under one of our names, and is not served.

    ``asked``: what it has just been switched to, of which transformers only logs what it does not do.
    """
    parts = [part for part in _parts(model) if any(map(_is_attention, _own_modules(part)))]
    for part in parts:
        name = part.config._attn_implementation
        wanted = asked if isinstance(asked, str) else name
        if not is_ours(wanted):
            continue
        own = not part._can_set_attn_implementation() or any(type(m).__name__ in _OWN for m in _own_modules(part))
        declared = any(getattr(part, flag, False) for flag in _DECLARED)
        if own or not declared or name != wanted:
            why = "it supports 'eager' only, not" if not own else "its attention code is its own, and never calls"
            cure = f"'eager' (as a part of another model: {{'': {wanted!r}, 'KEY_OF_ITS_CONFIG': 'eager'}})"
            refuse(True, f"{type(part).__name__}: {why} {wanted!r}: expected attn_implementation = {cure}")
    asks = isinstance(asked, dict) and any(map(is_ours, asked.values()))
    none = asks and not any(is_ours(part.config._attn_implementation) for part in parts)
    refuse(none, f"{type(model).__name__}: no part of it has attention that can be switched by {asked}")


def _parts(model: nn.Module) -> Iterator[Any]:
    from transformers import PreTrainedModel

    return (part for part in model.modules() if isinstance(part, PreTrainedModel))


def _own_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Modules of a model, but not those of models in it."""
    from transformers import PreTrainedModel

    for child in module.children():
        if not isinstance(child, PreTrainedModel):
            yield child
            yield from _own_modules(child)


def _is_attention(module: nn.Module) -> bool:
    """By its name; torch's own, as ``nn.MultiheadAttention``, has no part in this."""
    kind = type(module)
    return "attention" in kind.__name__.lower() and not kind.__module__.startswith("torch.")
