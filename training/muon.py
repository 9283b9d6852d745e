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

Recorder = Callable[[Callable[[], list[Tensor]]], tuple[list[Tensor], Callable[[], None]]]
"""Of some work, what it gives and how to do it again."""


def captured(device: torch.device, work: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
    """Capture ``work``, which does not run yet, as a CUDA graph: what it gives, and the replay, on the current stream.

    It has run op by op before, so that kernels are compiled and loaded. Raises ``UserError`` where CUDA refuses.
    """
    graph = torch.cuda.CUDAGraph()
    # Other threads (NCCL's, the compiler's) may talk to the device meanwhile. The outer context puts the stream back after a failure.
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device)):
        try:
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(device), capture_error_mode="thread_local"):
                result = work()
        except RuntimeError as error:
            what = f"its iterations could not be captured as a CUDA graph ({first_line(error)}); choose adamw"
            raise UserError(f"optim.optimizer = 'muon': {what}") from error
    return result, graph.replay


class GraphedMuon(Muon):
    """Muon whose iterations run op by op in the first step and are captured by ``record`` in the second. State and groups are Muon's.

    One group, whose matrices all have a gradient in each step: ``training.tree_sum`` sees to it.
    """

    def __init__(self, *args: Any, record: Recorder, **settings: Any):
        super().__init__(*args, **settings)
        self._record = record
        self._has_run = False
        self._captured: tuple[list[Tensor], list[Tensor], Callable[[], None]] | None = None

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        parameters: list[Tensor] = []
        gradients: list[Tensor] = []
        momenta: list[Tensor] = []
        self._init_group(group, parameters, gradients, momenta)
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

        def factors_of(matrices: Sequence[Tensor]) -> list[Tensor]:
            iteration = tuple(group["ns_coefficients"]), group["ns_steps"], group["eps"]
            return [_zeropower_via_newtonschulz(matrix, *iteration) for matrix in matrices]

        if not self._has_run:
            self._has_run = True
            return factors_of(directions)
        if self._captured is None:
            # The iteration's own conversion to bfloat16 leaves these as they are, and its division is done in them.
            inputs = [torch.zeros_like(direction, dtype=torch.bfloat16) for direction in directions]
            self._captured = (inputs, *self._record(lambda: factors_of(inputs)))
        inputs, factors, replay = self._captured
        torch._foreach_copy_(inputs, list(directions))
        replay()
        return factors
