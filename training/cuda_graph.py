"""Work of many small kernels as a CUDA graph: one launch in place of hundreds, and the same kernels, so the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

from errors import UserError, first_line

Result = TypeVar("Result")


class Recorder(Protocol):
    """Captures what a function does to its device; like a CUDA graph, it leaves the doing to the first replay."""

    def record(self, work: Callable[[], Result]) -> tuple[Result, Callable[[], None]]:
        """What ``work`` returned, and a function that does it once more, into the same tensors."""


class CudaRecorder:
    """Captures as CUDA graphs, one after the other: a new one takes the memory of the one before, which must not be replayed again.

    What is captured has run op by op before, so that kernels are compiled and loaded.
    ``subject`` and ``remedy`` complete the error where CUDA refuses: "SUBJECT could not be captured ...; REMEDY".
    """

    def __init__(self, device: torch.device, subject: str, remedy: str):
        self._device, self._subject, self._remedy = device, subject, remedy
        self._stream = torch.cuda.Stream(device)
        self._last: torch.cuda.CUDAGraph | None = None

    def record(self, work: Callable[[], Result]) -> tuple[Result, Callable[[], None]]:
        """Capture ``work``, which does not run yet; the replay runs on the current stream.

        Raises ``UserError`` where CUDA refuses: an operation that waits for the device or copies from the host, or too little memory.
        """
        graph = torch.cuda.CUDAGraph()
        # The last graph is kept until here: cuBLAS's workspace for the stream lies in its pool of memory.
        pool = None if self._last is None else self._last.pool()
        # Other threads (NCCL's, the compiler's) may talk to the device meanwhile. The outer context puts the stream back after a failure.
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.current_stream(self._device)):
            try:
                with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                    result = work()
            except RuntimeError as error:
                raise UserError(
                    f"{self._subject} could not be captured as a CUDA graph ({first_line(error)}); {self._remedy}"
                ) from error
        self._last = graph
        return result, graph.replay
