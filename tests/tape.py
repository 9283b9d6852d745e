"""A CUDA graph's rules on a CPU: operations are noted once, with the tensors they read and wrote, and done again from the notes alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

ILLEGAL = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::lift_fresh", "aten::is_nonzero"}
"""Waits for the device, and tensors made of host data (a list as an index is one): errors while a CUDA graph is captured."""


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


class Tape(TorchDispatchMode):
    """Notes what is done inside the block; ``replay`` does it again, into the same tensors.

    Where a graph would not have run yet, the tape takes back what it did: tensors from outside are as before, its own hold NaN.
    """

    def __init__(self) -> None:
        super().__init__()
        self._notes: list[tuple[Any, Any, Any, list[tuple[int, Tensor]]]] = []
        self._own: dict[int, Tensor] = {}
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name
        if name in ILLEGAL:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        read = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        if func._schema.is_mutable:
            for x in read:
                if _storage(x) not in self._own:
                    self._before.setdefault(_storage(x), (x.detach(), x.detach().clone()))
        result = func(*args, **kwargs)
        known = {_storage(x) for x in read}
        written = []
        for place, x in enumerate(tree_flatten(result)[0]):
            if isinstance(x, Tensor) and _storage(x) not in known:
                self._own[_storage(x)] = x.detach()
                written.append((place, x.detach()))
        held = tree_map_only(Tensor, lambda x: x.detach(), (args, kwargs))
        self._notes.append((func, *held, written))
        return result

    @torch.no_grad()
    def take_back(self) -> None:
        for now, before in self._before.values():
            now.copy_(before)
        for x in self._own.values():
            x.fill_(torch.nan if x.is_floating_point() else 0)

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, written in self._notes:
            results = tree_flatten(func(*args, **kwargs))[0]
            for place, x in written:
                x.copy_(results[place])


class TapeRecorder:
    """In the place of ``CudaRecorder``; counts what it was asked for."""

    def __init__(self) -> None:
        self.records, self.replays = 0, 0

    def record(self, work: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
        self.records += 1
        with Tape() as tape:
            result = work()
        tape.take_back()

        def replay() -> None:
            self.replays += 1
            tape.replay()

        return result, replay
