"""Operators that make a step faster and change its last bits: on where they help, off by one field."""

import importlib.util
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from errors import invalid
from fused import quack_kernels
from model import ModelConfig, Operators
from training import distributed
from training.distributed import DistContext
from training.precision import PrecisionConfig


@dataclass(frozen=True, kw_only=True)
class SpeedConfig:
    """Speed against last bits."""

    reference: bool = False
    """Plain operators only: on CUDA the last bits of the published runs, for a slower step. On a CPU there are no others."""
    quack: bool = False
    """MLP and head by quack-kernels, on Hopper: faster, other last bits. It takes pip install '.[fast]'."""

    def __post_init__(self) -> None:
        if self.reference and self.quack:
            raise invalid("speed.quack", True, "False together with speed.reference = True")


def operators(config: SpeedConfig, model: ModelConfig, precision: PrecisionConfig, device: torch.device) -> Operators:
    """``GPT``'s argument of that name. Raises ``UserError`` for a library, device or model that does not support it."""
    if config.quack:
        _check_quack(model, precision, device)
        return "quack"
    if config.reference or device.type != "cuda":
        return "torch"
    if importlib.util.find_spec("triton") is None:
        raise invalid("speed.reference", False, "True, as triton is not installed here")
    return "own"


def _check_quack(model: ModelConfig, precision: PrecisionConfig, device: torch.device) -> None:
    multiple = quack_kernels.MULTIPLE
    if not quack_kernels.installed():
        expected = "False, as quack-kernels is not installed here: pip install '.[fast]'"
    elif device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        expected = "False, as this is no Hopper GPU (H100, H200)"
    elif precision.dtype != "bfloat16":
        expected = f"False together with precision.dtype = {precision.dtype!r}: it computes in bfloat16"
    elif model.bias or model.activation != "gelu":
        expected = "False together with model.bias = True or another model.activation than gelu"
    elif model.padded_vocab_size % multiple or model.n_embd % 8:
        expected = f"False where the padded vocabulary is no multiple of {multiple} or model.n_embd of 8"
    else:
        return
    raise invalid("speed.quack", True, expected)


def wrapped(model: nn.Module, precision: PrecisionConfig, dist: DistContext) -> tuple[nn.Module, nn.Module]:
    """``model`` compiled, if asked for, and given to DDP: (the one to train, the one to evaluate, which is outside DDP)."""
    evaluated = cast(nn.Module, torch.compile(model)) if precision.compile else model
    return evaluated if precision.fixed_sum_order else distributed.wrap(evaluated, dist), evaluated
