"""Muon with its Newton-Schulz iterations shared out over processes, and run in one of the ways of ``newton_schulz``.

Gradients are equal on all processes once they are averaged, and so are weights and momentum. Each process therefore
orthogonalises some of the matrices only; the results, bfloat16 as the iteration leaves them, are gathered, and everybody applies all
of them. Every matrix is worked on as a whole; one by one, or replayed as a graph, by torch's own function: the bits are those of
``torch.optim.Muon`` on one process. Batched products may take their sums in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Muon
from torch.optim._muon import _adjust_lr

from training import distributed
from training.newton_schulz import Iteration, Orthogonalise, batched, each


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
    """``torch.optim.Muon`` at a share of its work; its own step with one process and matrices one by one. State and groups are Muon's."""

    def __init__(self, *args: Any, orthogonalise: Orthogonalise = each, **settings: Any):
        super().__init__(*args, **settings)
        self._orthogonalise = orthogonalise

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient; all processes must call it with equal gradients."""
        if distributed.world_size() == 1 and self._orthogonalise is each:
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
                keep = 1 - float(group["lr"]) * group["weight_decay"]
                if keep != 1:
                    torch._foreach_mul_(parameters, keep)
                self._apply(group, parameters, updates)
        return loss

    def _apply(self, group: dict[str, Any], parameters: list[Tensor], updates: list[Tensor]) -> None:
        """Add the updates, each at its shape's learning rate; batched, all of one rate at once, as float32."""
        rates = [_adjust_lr(float(group["lr"]), group["adjust_lr_fn"], p.shape) for p in parameters]
        if self._orthogonalise is not batched:
            for parameter, update, rate in zip(parameters, updates, rates, strict=True):
                parameter.add_(update, alpha=-rate)
            return
        for rate in dict.fromkeys(rates):
            chosen = [index for index, other in enumerate(rates) if other == rate]
            these, sizes = [parameters[index] for index in chosen], [parameters[index].numel() for index in chosen]
            flat = torch.empty(sum(sizes), dtype=these[0].dtype, device=these[0].device)
            wide = [part.view(p.shape) for part, p in zip(flat.split(sizes), these, strict=True)]
            torch._foreach_copy_(wide, [updates[index] for index in chosen])
            torch._foreach_add_(these, wide, alpha=-rate)

    def _updates(self, group: dict[str, Any], gradients: list[Tensor], momenta: list[Tensor]) -> list[Tensor]:
        """The orthogonal factors of all matrices, bfloat16: this process's own computed, the others' received."""
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        shapes = [(g.shape[0], g.shape[1]) for g in gradients]
        world, rank = distributed.world_size(), distributed.rank()
        owners = shares(shapes, world)
        mine = [index for index, owner in enumerate(owners) if owner == rank]
        directions = [momenta[index] for index in mine]
        if group["nesterov"] and mine:
            directions = list(torch._foreach_lerp([gradients[i] for i in mine], directions, group["momentum"]))
        iteration = Iteration(tuple(group["ns_coefficients"]), group["ns_steps"], group["eps"])
        factors = self._orthogonalise(directions, iteration)
        if world == 1:
            return factors
        sizes = [sum(g.numel() for g, owner in zip(gradients, owners, strict=True) if owner == r) for r in range(world)]
        own = torch.zeros(max(sizes), dtype=torch.bfloat16, device=gradients[0].device)
        if mine:
            parts = own[: sizes[rank]].split([factor.numel() for factor in factors])
            torch._foreach_copy_([p.view(f.shape) for p, f in zip(parts, factors, strict=True)], factors)
        gathered, starts = distributed.gather_equal(own), [0] * world
        updates = []
        for shape, owner in zip(shapes, owners, strict=True):
            size = shape[0] * shape[1]
            updates.append(gathered[owner, starts[owner] : starts[owner] + size].view(shape))
            starts[owner] += size
        return updates
