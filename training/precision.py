"""Precision of matrix products outside attention, determinism, the operators that a model gets, and the seed of stochastic rounding."""

import hashlib
import importlib.util
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

import torch

from errors import invalid
from model import Operators

Dtype = Literal["bfloat16", "float16", "float32"]


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Weights and optimizer state are always float32; autocast chooses what matrix products read."""

    dtype: Dtype = "bfloat16"
    """Autocast dtype; float16 adds loss scaling, float32 switches autocast off."""
    compile: bool = False
    """torch.compile; attention stays opaque to it."""
    deterministic: bool = True
    """torch's deterministic kernels: the same run twice gives the same bits."""
    fixed_sum_order: bool = True
    """Add gradients in an order that the batch alone decides: the same bits on 1, 2, 4 ... processes, and a resume on another number of
    them. Off: by an all-reduce, on any number that divides the batch."""

    @property
    def torch_dtype(self) -> torch.dtype:
        return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[self.dtype]

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """For forward passes only: ``backward`` runs outside, in the dtypes that forward chose."""
        return torch.autocast(device.type, dtype=self.torch_dtype, enabled=self.dtype != "float32")

    def scaler(self, device: torch.device) -> torch.amp.GradScaler:
        """Loss scaling for float16 (Micikevicius et al. 2018, arXiv 1710.03740), otherwise one that does nothing."""
        return torch.amp.GradScaler(device.type, enabled=self.dtype == "float16")


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


def rounding_seed(run_seed: int, step: int, micro_batch: int) -> int:
    """Seed of stochastic rounding for one global micro-batch of a step, 63 bits: the same draws for any number of processes."""
    digest = hashlib.sha256(f"rounding:{run_seed}:{step}:{micro_batch}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
