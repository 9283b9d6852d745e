"""One optimizer step: micro-batches forward and backward, gradients exchanged once, clipped, applied where they are sound.

Legend: B micro-batch, T sequence.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from training import distributed
from training.nonfinite import Withholding
from training.optim import clip_gradients


class StepValues(NamedTuple):
    """What a step gave, scalars on the device, which nothing has waited for."""

    loss: Tensor
    """Mean over the global batch, nats a token."""
    grad_norm: Tensor
    """Global 2-norm before clipping."""
    overflow: Tensor
    """1.0 where the gradient alone is not finite and float16's loss scale is to blame."""
    withheld: Tensor
    """1.0 where the update was left out."""


@dataclass
class Taken:
    """A step that was taken: ``row`` is its line of the metrics so far, ``began`` when it did (``perf_counter``).

    Loss and gradient norm are NaN, and ``overflow`` false, until they are read.
    """

    step: int
    row: dict[str, Any]
    began: float
    loss: float = math.nan
    grad_norm: float = math.nan
    overflow: bool = False

    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class Pending:
    """Steps whose values have not been read."""

    def __init__(self) -> None:
        self._steps: list[tuple[Taken, Tensor]] = []

    def add(self, taken: Taken, values: StepValues) -> None:
        """Keep a step. Nothing waits for its values."""
        self._steps.append((taken, torch.stack([values.loss, values.grad_norm, values.overflow])))

    def read(self) -> list[Taken]:
        """All steps since the last time, in order, with their values. Waits for the device, once."""
        steps, self._steps = self._steps, []
        if steps:
            for (taken, _), values in zip(steps, torch.stack([values for _, values in steps]).tolist(), strict=True):
                taken.loss, taken.grad_norm, taken.overflow = values[0], values[1], bool(values[2])
        return [taken for taken, _ in steps]


def rounding_seed(run_seed: int, position: int, micro_batch: int) -> int:
    """Seed of stochastic rounding for one global micro-batch, 63 bits: the same draws for any number of processes."""
    digest = hashlib.sha256(f"rounding:{run_seed}:{position}:{micro_batch}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def train_step(
    model: nn.Module,
    optimizer: Optimizer,
    scaler: torch.amp.GradScaler,
    micro_batches: list[tuple[Tensor, Tensor]],
    seeds: list[int],
    *,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[object]],
    grad_clip: float,
    withholding: Withholding,
) -> StepValues:
    """Train on this process's micro-batches (inputs_BT, targets_BT), int64 on the CPU; ``seeds`` has one rounding seed for each.

    DDP exchanges gradients in the last ``backward``. The update is left out where ``withholding`` says so, and float16's loss scale then
    shrinks. On CUDA the host launches all of it and waits for none of it (Muon apart, see ``step_unless``).
    """
    optimizer.zero_grad(set_to_none=True)
    total = torch.zeros((), device=device)
    for index, ((inputs_BT, targets_BT), seed) in enumerate(zip(micro_batches, seeds, strict=True)):
        # Filled, not copied: a copy from the host would wait for all that was launched before.
        seed_tensor = torch.full((), seed, dtype=torch.int64, device=device)
        # DDP decides in its forward pass whether this backward pass exchanges gradients.
        with distributed.no_sync(model, last=index == len(micro_batches) - 1):
            with autocast():
                _, loss = model(_move(inputs_BT, device), _move(targets_BT, device), seed_tensor)
                loss = loss / len(micro_batches)
            scaler.scale(loss).backward()
        total += loss.detach()
    scaler.unscale_(optimizer)
    loss_mean, norm = distributed.all_reduce_mean(total), clip_gradients(model, grad_clip)
    loss_scale = scaler.scale(torch.ones((), device=device)) if scaler.is_enabled() else None
    overflow, withheld = withholding(loss_mean, norm, loss_scale)
    step_unless(optimizer, withheld)
    scaler.update()
    return StepValues(loss_mean, norm, overflow, withheld)


def step_unless(optimizer: Optimizer, withheld: Tensor) -> None:
    """One update of ``optimizer`` unless ``withheld``, a scalar on its device, is 1.0.

    A fused AdamW looks at it on the device, as it does for a ``GradScaler``. For any other the host has to wait, as a ``GradScaler`` does.
    """
    if all(group.get("fused") for group in optimizer.param_groups):
        optimizer.found_inf = withheld  # type: ignore[attr-defined]
        optimizer.step()
    elif not withheld.item():
        optimizer.step()


def throwaway_backward(
    model: nn.Module,
    shape_BT: tuple[int, int],
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[object]],
) -> None:
    """A forward and backward pass on zeros, for ``distributed.settle``."""
    zeros_BT = torch.zeros(shape_BT, dtype=torch.int64, device=device)
    with autocast():
        _, loss = model(zeros_BT, zeros_BT, torch.zeros((), dtype=torch.int64, device=device))
    loss.backward()


def _move(tensor_BT: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return tensor_BT
    return tensor_BT.pin_memory().to(device, non_blocking=True)
