"""What makes a step faster and changes its last bits: on where it gains, and turned off by one field."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from errors import invalid
from training import distributed
from training.distributed import Distributed


@dataclass(frozen=True, kw_only=True)
class SpeedConfig:
    """Speed against last bits."""

    reference: bool = False
    """Plain operators only: on CUDA the last bits of the published runs, for a slower step. On a CPU there are no others."""


def fast(config: SpeedConfig, device: torch.device) -> bool:
    """``GPT``'s argument of that name. Raises ``UserError`` where Triton is needed and not installed."""
    if config.reference or device.type != "cuda":
        return False
    if importlib.util.find_spec("triton") is None:
        raise invalid("speed.reference", False, "True, as triton is not installed here")
    return True


def wrapped(model: nn.Module, compiled: bool, place: Distributed) -> tuple[nn.Module, nn.Module]:
    """``model`` compiled, if asked for, and given to DDP: (the one to train, the one to evaluate, which is outside DDP)."""
    evaluated = cast(nn.Module, torch.compile(model)) if compiled else model
    return distributed.wrap(evaluated, place), evaluated
