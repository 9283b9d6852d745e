"""What is kept of the calls of attention in one forward pass, until their gradients come.

Legend: B batch, H heads, T queries, S keys, D head dim.
"""

import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import unserializable_hook

from .growth import FMA_LOGIT, FMA_LOGIT_FP16
from .measure import Call, measure


def of_this_call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """q, k and v for one call of attention: q as an alias, whose gradient is dQ of this call whatever else uses q.

    Training keeps its bits, if one node gives all three gradients (watch.py). Where q is k or v, too, these get an alias each, made before
    that of q: the backward pass goes through what was made last first, and so adds their gradients in the order in which it adds them
    without.
    """
    if not (torch.is_grad_enabled() and q.requires_grad):
        return q, k, v
    return tuple(torch.ops.aten.alias(x) if x is q else x for x in (v, k, q))[::-1]


class Look:
    """A forward pass that is looked at. Hooks of its tensors hold it, as their gradients may come late, twice or never.

    Args:
        sequences: of a batch that are kept, the first ones.
        guard: runs a function; where that raises, it says so once, and the training goes on.
        done: called when the last gradient has come.
    """

    def __init__(
        self,
        step: int,
        clock: float,
        sequences: int,
        guard: Callable[[Callable[[], object]], None],
        done: Callable[["Look"], None],
    ):
        self.step, self.clock = step, clock
        self._sequences, self._guard, self._done = sequences, guard, done
        self._lock = threading.RLock()  # autograd has a thread for each GPU
        self._calls: dict[int, Call] = {}
        self._found: dict[int, dict[str, Tensor]] = {}
        self._hooks: list[Any] = []
        self.awaited: set[int] = set()
        """Layers whose gradients have not come; none once the look is over."""
        self.frozen: list[int] = []
        """Layers whose queries and keys take no gradient, though gradients are on, which reentrant checkpointing switches off."""
        self.frozen_q: list[int] = []
        """Layers whose keys take one, but not their queries, as the first one of adapters on keys alone."""
        self.fma_logit = FMA_LOGIT
        self.softcap: dict[int, float] = {}
        """Of layers that have one."""
        self.numerics: set[str | None] = set()
        """Labels of ours; None: of a call of other attention."""

    def __contains__(self, layer: int) -> bool:
        return layer in self._calls

    def number(self, wanted: int) -> int:
        """``wanted``, or the next number that is free."""
        return next(layer for layer in itertools.count(wanted) if layer not in self._calls)

    def keep(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor | None,
        *,
        mask: Tensor | None,
        causal: bool,
        scale: float | None,
        softcap: float,
        dropout: float = 0.0,
        sinks: Tensor | None = None,
        heads_at: int = -3,
        grouped: bool = False,
        foreign: bool = False,
        kernel: Callable[..., Tensor] | None = None,
    ) -> None:
        """Copy a call.

        ``heads_at``: which dimension of q, k, v and o the heads are, -3 or -2. ``grouped``: torch's ``enable_gqa``, without which the first
        of three dimensions is one of batches, of one head; two are one head. ``foreign``: as in ``Call``. ``kernel``: what made o, called
        as torch's function.
        """
        # The hooks below outlive this call. What they hold must not hold q or o: a graph that its own hooks keep is never freed.
        whole, sequences = q if o is None else o, self._sequences
        dtype, dimensions = whole.dtype, whole.ndim
        one_head = dimensions == 2 or (dimensions == 3 and not grouped)
        batch = whole.shape[: -2 if one_head else -3]  # to which torch broadcasts q, k, v and the mask

        def first(x: Tensor) -> Tensor:
            x = x.unsqueeze(-3) if one_head or x.ndim == 2 else x
            return x.expand(*batch, *x.shape[-3:]).reshape(-1, *x.shape[-3:])[:sequences]

        def few(x: Tensor) -> Tensor:
            return first(x.detach() if x.ndim == 2 else x.detach().transpose(heads_at, -3)).to(dtype, copy=True)

        if mask is not None:
            mask = first(torch.atleast_2d(mask.detach())).clone()
        again = None
        if kernel is not None and not softcap:

            def again(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
                bias = mask if mask is None or mask.dtype == torch.bool else mask.to(q.dtype)  # as autocast has it
                # torch has other kernels for other numbers of dimensions.
                given = (
                    x if x is None else x.squeeze(1) if one_head else x[(None,) * (dimensions - 4)]
                    for x in (q, k, v, bias)
                )
                o = kernel(*given, is_causal=causal, scale=scale, enable_gqa=k.shape[1] < q.shape[1])
                return o.unsqueeze(1) if one_head else o.reshape(o.shape[-4:])

        if dtype == torch.float16:
            self.fma_logit = FMA_LOGIT_FP16
        if softcap:
            self.softcap[layer] = float(softcap)
        self._calls[layer] = Call(
            q_BHTD=few(q if o is None else q.expand(*o.shape[:-1], -1)),
            k_BHSD=few(k),
            v_BHSD=few(v),
            o_BHTD=None if o is None else few(o),
            mask_BHTS=mask,
            causal=causal,
            scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
            softcap=float(softcap),
            dropout=dropout,
            sinks_H=None if sinks is None else sinks.detach().to(torch.float32, copy=True),
            foreign=foreign,
            kernel=again,
        )
        if torch.is_grad_enabled() and o is not None and not q.requires_grad:
            (self.frozen_q if k.requires_grad else self.frozen).append(layer)
        if o is None or not o.requires_grad:
            return
        self.awaited.add(layer)
        # Else its gradient is more than dQ, or its sum over what the query was broadcast to.
        differentiated = q.requires_grad and q is not k and q is not v and q.shape[:-1] == o.shape[:-1]

        @unserializable_hook
        def output_gradient(do: Tensor) -> None:
            self._guard(lambda: self._came(layer, "do_BHTD", few(do), last=not differentiated))

        @unserializable_hook
        def query_gradient(dq: Tensor) -> None:
            self._guard(lambda: self._came(layer, "dq_BHTD", few(dq), last=True))

        self._hooks.append(o.register_hook(output_gradient))
        if differentiated:
            self._hooks.append(q.register_hook(query_gradient))

    def _came(self, layer: int, name: str, gradient: Tensor, *, last: bool) -> None:
        with self._lock:
            if layer not in self.awaited:
                return
            changes: dict[str, Any] = {name: gradient}
            self._calls[layer] = replace(self._calls[layer], **changes)
            if last:
                self.awaited.remove(layer)
                self._measure(layer)
            over = not self.awaited
        if over:
            self._done(self)

    def _measure(self, layer: int) -> None:
        """A layer that fails costs the others nothing."""

        def run() -> None:
            self._found[layer] = measure(self._calls[layer])

        self._guard(run)

    def finish(self) -> dict[int, dict[str, Tensor]]:
        """The columns of ``measure`` by layer, in order; of calls whose gradient never came without it. Only the first time."""
        with self._lock:
            for layer in self._calls.keys() - self._found.keys():
                self._measure(layer)
            found = dict(sorted(self._found.items()))
            for hook in self._hooks:  # of a parameter they would stay
                hook.remove()
            for kept in (self._calls, self._found, self.awaited, self._hooks):
                kept.clear()
            return found
