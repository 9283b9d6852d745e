"""Ways to run Muon's Newton-Schulz iterations over many matrices: one by one, the same replayed as a CUDA graph, or batched.

One by one a matrix takes 20 operations, and for GPT-2's 48 matrices a host needs several times as long to launch them as an H200 to run
them. A graph launches the same kernels at once. Batched, all matrices of one shape go through one call: fewer, larger kernels, which may
take their sums in another order. Measured: docs/performance.md.

Suffixes: B matrices of one shape, R rows, C columns, S the shorter of the two and L the longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from errors import UserError, first_line

NewtonSchulz = Literal["each", "graph", "batched"]


class Iteration(NamedTuple):
    """What ``torch.optim.Muon`` has in a group: coefficients, steps, and the least norm that is divided by."""

    coefficients: tuple[float, float, float]
    steps: int
    eps: float


Orthogonalise = Callable[[Sequence[Tensor], Iteration], list[Tensor]]
"""The bfloat16 factors of matrices, each of its matrix's shape; they hold until the next call."""


def each(directions: Sequence[Tensor], iteration: Iteration) -> list[Tensor]:
    """One matrix after the other, by torch's own function."""
    return [_zeropower_via_newtonschulz(direction, *iteration) for direction in directions]


def batched(directions: Sequence[Tensor], iteration: Iteration) -> list[Tensor]:
    """All matrices of one shape at once, by the operations of torch's own function with a dimension more; contiguous factors."""
    a, b, c = iteration.coefficients
    factors: dict[int, Tensor] = {}
    for shape in dict.fromkeys(direction.shape for direction in directions):
        chosen = [index for index, direction in enumerate(directions) if direction.shape == shape]
        x_BRC = torch.stack([directions[index] for index in chosen]).bfloat16()
        tall = shape[0] > shape[1]
        x_BSL = x_BRC.mT if tall else x_BRC
        x_BSL.div_(torch.linalg.vector_norm(x_BSL, dim=(1, 2), keepdim=True).clamp(min=iteration.eps))
        for _ in range(iteration.steps):
            gram_BSS = x_BSL @ x_BSL.mT
            update_BSS = torch.baddbmm(gram_BSS, gram_BSS, gram_BSS, beta=b, alpha=c)
            x_BSL = torch.baddbmm(x_BSL, update_BSS, x_BSL, beta=a)
        x_BRC = x_BSL.mT.contiguous() if tall else x_BSL
        factors |= dict(zip(chosen, x_BRC, strict=True))
    return [factors[index] for index in range(len(directions))]


class Recorder(Protocol):
    """Captures what a function does to its device; like a CUDA graph, it may leave the doing to the first replay."""

    def record(self, work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """What ``work`` returned, and a function that does it once more, into the same tensors."""


class CudaRecorder:
    """Captures on the current device, after one run that lets cuBLAS set itself up."""

    def record(self, work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Capture ``work``, which runs once now; the replay runs on the current stream. Raises ``UserError`` where CUDA refuses."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads (NCCL's, the compiler's) may talk to the device meanwhile.
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                result = work()
        except RuntimeError as error:
            refused = f"the iterations could not be captured as a CUDA graph ({first_line(error)})"
            raise UserError(f"optim.newton_schulz = 'graph': {refused}; choose each or batched") from error
        return result, graph.replay


class Replayed:
    """``each``, captured at the first call for matrices of these shapes and replayed from then on, into the same factors."""

    def __init__(self, recorder: Recorder):
        self._recorder = recorder
        self._captured: dict[Any, tuple[list[Tensor], list[Tensor], Callable[[], None]]] = {}

    def __call__(self, directions: Sequence[Tensor], iteration: Iteration) -> list[Tensor]:
        if not directions:
            return []
        key = (iteration, *((direction.shape, direction.device) for direction in directions))
        if key not in self._captured:
            # The iteration's own conversion to bfloat16 leaves these as they are, and its division is done in them.
            inputs = [torch.zeros_like(direction, dtype=torch.bfloat16) for direction in directions]
            factors, replay = self._recorder.record(lambda: each(inputs, iteration))
            self._captured[key] = inputs, factors, replay
        inputs, factors, replay = self._captured[key]
        torch._foreach_copy_(inputs, list(directions))
        replay()
        return factors


def orthogonaliser(name: NewtonSchulz, device: torch.device | str) -> Orthogonalise:
    """The way called ``name``. Raises ``UserError`` for a graph on a device other than CUDA."""
    if name == "graph":
        if torch.device(device).type != "cuda":
            raise UserError("optim.newton_schulz = 'graph': it needs CUDA; choose each or batched")
        return Replayed(CudaRecorder())
    return {"each": each, "batched": batched}[name]
