"""Validation loss on the fixed batches that every run shares."""

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from data.batches import Batches
from errors import check_size
from training.distributed import gather

IGNORED_TARGET = -1


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """When the validation loss is measured."""

    every: int = 250
    """steps between two evaluations, the first before any training and one more at the end (0: never)"""

    def __post_init__(self) -> None:
        check_size("evaluation.every", self.every, 0)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Batches,
    device: torch.device,
    autocast_context: AbstractContextManager[object],
    rounding_seed: Tensor | None = None,
) -> float:
    """Mean loss over the fixed validation batches of all processes, nats a token.

    Every process must call this, and all get the value, the same bits for any number of processes, as sums are exact. Shares may differ in
    length, or be empty. ``model`` runs in eval mode, and every module's own mode is put back, also after an error. ``rounding_seed``, int64
    [] on ``device``, serves each batch: stochastic rounding draws alike however batches are dealt out.
    """
    sums = [torch.zeros(2, dtype=torch.float64, device=device)]
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with autocast_context:
            for tokens_BT, targets_BT in batches.validation():
                tokens_BT, targets_BT = tokens_BT.to(device), targets_BT.to(device)
                _, loss = model(tokens_BT, targets_BT, rounding_seed)
                count = (targets_BT != IGNORED_TARGET).sum().double()
                sums.append(torch.stack([loss.double() * count, count]))
    finally:
        for module, training in modes:
            module.training = training
    loss_sum, count_sum = map(math.fsum, torch.cat(gather(torch.stack(sums).cpu())).T.tolist())
    return loss_sum / count_sum
