"""Attention whose every rounding is a name. In the repository attention/README.md has the equations and the table of sites."""

import importlib
from typing import TYPE_CHECKING

from .numerics import Numerics
from .plan import AttentionConfig, AttentionRule, AttentionSpec, HeadGroup, LayerPlan, check_plans
from .presets import PRESETS, RECOMMENDED

if TYPE_CHECKING:
    from .dispatch import run
    from .functional import scaled_dot_product_attention
    from .replace import replace_sdpa
    from .watching.watch import watch

__all__ = [
    "PRESETS",
    "RECOMMENDED",
    "AttentionConfig",
    "AttentionRule",
    "AttentionSpec",
    "HeadGroup",
    "LayerPlan",
    "Numerics",
    "check_plans",
    "replace_sdpa",
    "run",
    "scaled_dot_product_attention",
    "watch",
]

# The plan is plain Python: configs are read and checked without paying for torch, or having it.
_NEED_TORCH = {
    "run": "dispatch",
    "scaled_dot_product_attention": "functional",
    "replace_sdpa": "replace",
    "watch": "watching.watch",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "huggingface"})


def __getattr__(name: str) -> object:
    if name == "huggingface":
        return importlib.import_module(".huggingface", __name__)
    if name in _NEED_TORCH:
        return getattr(importlib.import_module(f".{_NEED_TORCH[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
