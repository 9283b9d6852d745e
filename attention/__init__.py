"""Attention whose every rounding is a name in the config. README.md beside this has the equations and the table of sites."""

from .numerics import Numerics
from .plan import AttentionConfig, AttentionRule, AttentionSpec, HeadGroup, LayerPlan, check
from .presets import PRESETS

__all__ = [
    "PRESETS",
    "AttentionConfig",
    "AttentionRule",
    "AttentionSpec",
    "HeadGroup",
    "LayerPlan",
    "Numerics",
    "check",
    "run",
]


def __getattr__(name: str) -> object:
    # The plan is plain Python: configs are read and checked without paying for torch, or having it.
    if name == "run":
        from .dispatch import run

        return run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
