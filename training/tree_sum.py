"""Gradients added in an order that the batch alone decides: the same bits on one, two or four processes.

The N = m 2^k micro-batches of a step (m odd), in the order of the batch, are cut into 2^k leaves of m. Those of a leaf are added one after
the other, leaves in pairs, pairs in pairs, and so on. Each of 2^j processes holds the leaves of one whole subtree, so that every sum is one
that a single process forms, too. Nothing overlaps with the backward pass: that gained nothing on two H100s.
"""

import torch
from torch import Tensor, nn

from data.batches import DataConfig
from errors import invalid
from training import distributed


def check_processes(config: DataConfig, processes: int) -> None:
    """Raise ``UserError`` for a number of processes that the tree cannot be cut into."""
    micro_batches, rest = divmod(config.global_batch, config.micro_batch)
    if rest:
        return  # only beside a replay, whose recording may have another global batch: ``Batches`` refuses it
    fitting = [2**j for j in range(micro_batches.bit_length()) if micro_batches % 2**j == 0]
    if processes not in fitting:
        why = f"as precision.fixed_sum_order adds {micro_batches} micro-batches a step in a tree"
        share, odd = divmod(config.global_batch, processes)
        if not odd and processes & (processes - 1) == 0:  # a power of two
            size = max(size for size in range(1, config.micro_batch + 1) if share % size == 0)
            way_out = f"; or, in a new run, --data.micro-batch {size}, which allows {processes}"
        else:
            way_out = "" if micro_batches % processes else "; or --precision.no-fixed-sum-order"
        raise invalid("number of processes", processes, f"{', '.join(map(str, fitting))}, {why}{way_out}")


class PlainSum:
    """As ``TreeSum``, in the order of time, then by one all-reduce: any number of processes, each with its own last bits."""

    def __init__(self, model: nn.Module, micro_batches: int):
        self.micro_batches = micro_batches
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._losses: list[Tensor] = []

    def add(self, loss: Tensor) -> None:
        self._losses.append(loss.detach())

    @torch.no_grad()
    def total(self) -> Tensor:
        loss, self._losses = torch.stack(self._losses).sum(), []
        distributed.add_up([*_gradients(self._parameters), loss])
        return loss


class TreeSum:
    """The gradients of ``model`` and the loss of a step, over all processes. Call ``add`` after each backward pass, then ``total``.

    ``micro_batches``: N, of all processes. Each loss is to be divided by N before its backward pass. Memory: log2 of this process's leaves
    copies of the gradients, and with several processes one more, two where GPUs do not reach each other's memory. ``timeout``: seconds to
    wait for other processes.
    """

    def __init__(self, model: nn.Module, micro_batches: int, timeout: float = 600.0):
        self.micro_batches = micro_batches
        self._leaf = micro_batches // (micro_batches & -micro_batches)
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._over_processes = distributed.PairSum(timeout)
        self._losses: list[Tensor] = []
        self._partial: list[tuple[int, list[Tensor]]] = []
        """(leaves, their sum: gradients and loss), larger ones first."""

    @torch.no_grad()
    def add(self, loss: Tensor) -> None:
        """Count in a micro-batch: its scalar ``loss``, and what its backward pass added to the gradients."""
        self._losses.append(loss.detach())
        if len(self._losses) < self._leaf:
            return
        leaves, node = 1, [*_gradients(self._parameters), torch.stack(self._losses).sum()]
        for parameter in self._parameters:
            parameter.grad = None
        while self._partial and self._partial[-1][0] == leaves:
            _, left = self._partial.pop()
            torch._foreach_add_(left, node)
            leaves, node = 2 * leaves, left
        self._partial.append((leaves, node))
        self._losses = []

    @torch.no_grad()
    def total(self) -> Tensor:
        """The sum of all losses; the gradients are then those of all processes, too."""
        ((_, node),) = self._partial
        self._partial = []
        *gradients, loss = self._over_processes(node)
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        return loss


def _gradients(parameters: list[nn.Parameter]) -> list[Tensor]:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if len(gradients) < len(parameters):
        raise RuntimeError("a parameter has no gradient")
    return gradients
