"""One optimiser step: micro-batches forward and backward, gradients exchanged once, clipped, applied if they are sound.

Legend: B micro-batch, T sequence.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from training import distributed
from training.optim import clip_gradients


@dataclass(frozen=True)
class StepResult:
    """``loss`` is the mean over the global batch, ``grad_norm`` the global norm before clipping, ``applied`` whether weights moved.

    ``overflow``: the gradient alone is not finite, and float16's loss scale is to blame.
    """

    loss: float
    grad_norm: float
    finite: bool
    overflow: bool
    applied: bool


@dataclass(frozen=True)
class Launched:
    """A step that the device works on, and what is known of it: its place in the data, when it began (``perf_counter``); ``row``
    are the measurements before it.
    """

    step: int
    position: int
    row: dict[str, float | str | None]
    result: StepResult
    data_digest: str
    began: float


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
    apply_nonfinite: bool,
) -> StepResult:
    """Train on this process's micro-batches (inputs_BT, targets_BT), int64 on the CPU; ``seeds`` has one rounding seed for each.

    DDP exchanges gradients in the last ``backward``. The update is left out when loss or gradient is not finite, unless
    ``apply_nonfinite``; float16's loss scale then shrinks.
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
    mean_loss, grad_norm = distributed.all_reduce_mean(total).item(), clip_gradients(model, grad_clip).item()
    finite = math.isfinite(mean_loss) and math.isfinite(grad_norm)
    # A gradient that is not finite though the scale adds nothing to it is no overflow: halving would go on for ever.
    overflow = not finite and math.isfinite(mean_loss) and scaler.is_enabled() and scaler.get_scale() >= 1.0
    if finite or apply_nonfinite:
        scaler.step(optimizer)
    scaler.update()
    applied = finite or (apply_nonfinite and not scaler.is_enabled())
    return StepResult(mean_loss, grad_norm, finite, overflow, applied)


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
