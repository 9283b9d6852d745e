"""Muon with its Newton-Schulz iterations shared out over processes.

Gradients are equal on all processes once they are averaged, and so are weights and momentum. Each process therefore
orthogonalises some of the matrices only; the results, bfloat16 as the iteration leaves them, are gathered, and everybody applies all
of them. Every matrix is worked on as a whole by torch's own functions, one matrix at a time: the bits are those of ``torch.optim.Muon``
on one process. Matrices of one shape are not batched: a batched product may take its sums in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Muon
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from training import distributed


def cost(rows: int, columns: int) -> int:
    """Multiplications of one Newton-Schulz iteration: X X^T, its square, and the product with X."""
    short, long = sorted((rows, columns))
    return short * short * (2 * long + short)


def shares(shapes: Sequence[tuple[int, int]], processes: int) -> list[int]:
    """Which process works on which matrix: the costliest first, each to whoever has least; the same answer everywhere."""
    loads, owners = [0] * processes, [0] * len(shapes)
    for index in sorted(range(len(shapes)), key=lambda i: -cost(*shapes[i])):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += cost(*shapes[index])
    return owners


class SharedMuon(Muon):
    """``torch.optim.Muon``, to the bit, at a share of its work; with one process, it itself. State and groups are Muon's."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient; all processes must call it with equal gradients."""
        if distributed.world_size() == 1:
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters: list[Tensor] = []
            gradients: list[Tensor] = []
            momenta: list[Tensor] = []
            self._init_group(group, parameters, gradients, momenta)
            if parameters:
                updates = self._updates(group, gradients, momenta)
                lr, keep = float(group["lr"]), 1 - float(group["lr"]) * group["weight_decay"]
                if keep != 1:
                    torch._foreach_mul_(parameters, keep)
                for parameter, update in zip(parameters, updates, strict=True):
                    parameter.add_(update, alpha=-_adjust_lr(lr, group["adjust_lr_fn"], parameter.shape))
        return loss

    def _updates(self, group: dict, gradients: list[Tensor], momenta: list[Tensor]) -> list[Tensor]:
        """The orthogonal factors of all matrices, bfloat16: this process's own computed, the others' received."""
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        shapes = [(g.shape[0], g.shape[1]) for g in gradients]
        world, rank = distributed.world_size(), distributed.rank()
        owners = shares(shapes, world)
        sizes = [sum(g.numel() for g, owner in zip(gradients, owners, strict=True) if owner == r) for r in range(world)]
        own = torch.zeros(max(sizes), dtype=torch.bfloat16, device=gradients[0].device)
        start = 0
        for gradient, momentum, owner in zip(gradients, momenta, owners, strict=True):
            if owner == rank:
                direction = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
                factor = _zeropower_via_newtonschulz(
                    direction, group["ns_coefficients"], group["ns_steps"], group["eps"]
                )
                own[start : start + factor.numel()].view(factor.shape).copy_(factor)
                start += factor.numel()
        gathered, starts = distributed.gather_equal(own), [0] * world
        updates = []
        for shape, owner in zip(shapes, owners, strict=True):
            size = shape[0] * shape[1]
            updates.append(gathered[owner, starts[owner] : starts[owner] + size].view(shape))
            starts[owner] += size
        return updates
