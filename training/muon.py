"""``torch.optim.Muon`` for a GPU: its Newton-Schulz iterations replayed as a CUDA graph.

torch's own works on one matrix after the other. The 48 matrices of GPT-2 124M take 1,104 small kernels a step, and an H200 waits for the
host to launch them: 112 ms a step, and 66 ms with the iterations replayed. Kernels and bits are the same.

Of torch's private names this takes ``_zeropower_via_newtonschulz``, ``_adjust_lr`` and ``Muon._init_group``; ``tests/test_optim.py``
compares every bit with ``torch.optim.Muon``.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Muon
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from errors import UserError, first_line


class CudaRecorder:
    """Captures as CUDA graphs, one after the other: a new one takes the memory of the one before, which must not be replayed again.

    What is captured has run op by op before, so that kernels are compiled and loaded.
    """

    def __init__(self, device: torch.device):
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._last: torch.cuda.CUDAGraph | None = None

    def record(self, work: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
        """Capture ``work``, which does not run yet; the replay runs on the current stream. Raises ``UserError`` where CUDA refuses."""
        graph = torch.cuda.CUDAGraph()
        # The last graph is kept until here: cuBLAS's workspace for the stream lies in its pool of memory.
        pool = None if self._last is None else self._last.pool()
        # Other threads (NCCL's, the compiler's) may talk to the device meanwhile. The outer context puts the stream back after a failure.
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.current_stream(self._device)):
            try:
                with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                    result = work()
            except RuntimeError as error:
                what = f"its iterations could not be captured as a CUDA graph ({first_line(error)}); choose adamw"
                raise UserError(f"optim.optimizer = 'muon': {what}") from error
        self._last = graph
        return result, graph.replay


class GraphedMuon(Muon):
    """Muon whose iterations run op by op in the first step and are captured by ``recorder`` in the second. State and groups are Muon's."""

    def __init__(self, *args: Any, recorder: CudaRecorder, **settings: Any):
        super().__init__(*args, **settings)
        self._recorder = recorder
        self._captured: dict[Any, tuple[list[Tensor], list[Tensor], Callable[[], None]] | None] = {}

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters: list[Tensor] = []
            gradients: list[Tensor] = []
            momenta: list[Tensor] = []
            self._init_group(group, parameters, gradients, momenta)
            if not parameters:
                continue
            torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
            nesterov = group["nesterov"]
            directions = torch._foreach_lerp(gradients, momenta, group["momentum"]) if nesterov else tuple(momenta)
            factors = self._orthogonalized(directions, group)
            torch._foreach_mul_(parameters, 1 - float(group["lr"]) * group["weight_decay"])
            for parameter, factor in zip(parameters, factors, strict=True):
                rate = _adjust_lr(float(group["lr"]), group["adjust_lr_fn"], parameter.shape)
                parameter.add_(factor, alpha=-rate)

    def _orthogonalized(self, directions: Sequence[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """The bfloat16 factors of matrices, each of its matrix's shape; they hold until the next call."""
        iteration = (tuple(group["ns_coefficients"]), group["ns_steps"], group["eps"])

        def factors_of(matrices: Sequence[Tensor]) -> list[Tensor]:
            return [_zeropower_via_newtonschulz(matrix, *iteration) for matrix in matrices]

        key = (iteration, *((direction.shape, direction.device) for direction in directions))
        if key not in self._captured:
            self._captured[key] = None
            return factors_of(directions)
        captured = self._captured[key]
        if captured is None:
            # The iteration's own conversion to bfloat16 leaves these as they are, and its division is done in them.
            inputs = [torch.zeros_like(direction, dtype=torch.bfloat16) for direction in directions]
            captured = self._captured[key] = (inputs, *self._recorder.record(lambda: factors_of(inputs)))
        inputs, factors, replay = captured
        torch._foreach_copy_(inputs, list(directions))
        replay()
        return factors
