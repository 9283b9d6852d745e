"""Operators that make a step faster and change its last bits: on where they help, off by one field."""

import importlib.util
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from errors import invalid
from model import Operators
from training import distributed
from training.distributed import DistContext
from training.precision import PrecisionConfig


@dataclass(frozen=True, kw_only=True)
class SpeedConfig:
    """Speed against last bits."""

    reference: bool = False
    """Plain operators only: on CUDA the last bits of the published runs, for a slower step. On a CPU there are no others."""


def operators(config: SpeedConfig, device: torch.device) -> Operators:
    """``GPT``'s argument of that name. Raises ``UserError`` where Triton is missing."""
    if config.reference or device.type != "cuda":
        return "torch"
    if importlib.util.find_spec("triton") is None:
        raise invalid("speed.reference", False, "True, as triton is not installed here")
    return "own"


def wrapped(model: nn.Module, precision: PrecisionConfig, dist: DistContext) -> tuple[nn.Module, nn.Module]:
    """``model`` compiled, if asked for, and given to DDP: (the one to train, the one to evaluate, which is outside DDP)."""
    evaluated = cast(nn.Module, torch.compile(model)) if precision.compile else model
    return evaluated if precision.fixed_sum_order else distributed.wrap(evaluated, dist), evaluated
