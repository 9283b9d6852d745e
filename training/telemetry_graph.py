"""The probe of a run as a CUDA graph: one launch in place of more than a thousand, and the same kernels, so the same bits.

``Probe`` says which measurement runs op by op and which is replayed, and carries the vectors of the power iterations from one to the next.
``cuda_graph.CudaRecorder`` is what captures; a test on the CPU puts a recorder of its own in its place.

What a probe needs besides the weights stays reserved for the graph, beside the memory of the training. Counting live tensors (not what
torch's allocator rounds up, nor cuBLAS's workspace), GPT-2 124M in sequences of 1024 needs 2.3 GiB for one
sequence and 8.6 GiB for eight.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from model import GPT
from probes.spectral import SpectralState
from training.cuda_graph import Recorder


class Measurement(NamedTuple):
    """What one probe measures, as tensors on the model's device."""

    columns: dict[str, Tensor]
    units: int
    """n of the standard errors."""
    state: SpectralState
    """Where the next power iteration starts."""


@dataclass(frozen=True)
class _Graph:
    identity: Hashable
    measurement: Measurement
    replay: Callable[[], None]


class Probe:
    """Measures a model again and again; with a recorder, from the third time on by replay.

    A measurement runs op by op where it starts the power iteration afresh (the first, and the first after ``forget``), and the first
    time that it goes on from known vectors with the model as it is (kernels are compiled and loaded, indices made). The next one
    is captured and replayed, and so are all that follow, until ``identity`` changes. ``forget`` keeps the graph.

    Args:
        measure: one measurement from a state; None starts afresh. A fixed sequence of operations on tensors that stay where they are,
            without a wait for the device.
        identity: what that sequence depends on besides whether there is a state (``model_identity``).
        recorder: None runs everything op by op.
    """

    def __init__(
        self,
        measure: Callable[[SpectralState | None], Measurement],
        identity: Callable[[], Hashable],
        recorder: Recorder | None,
    ):
        self._measure, self._identity, self._recorder = measure, identity, recorder
        self._state: SpectralState | None = None
        self._warmed: Hashable = None
        self._graph: _Graph | None = None

    def __call__(self) -> Measurement:
        """Measure. The tensors hold until the next call."""
        identity = self._identity()
        if self._recorder is None or self._state is None or self._warmed != identity:
            if self._state is not None:
                self._warmed = identity
            measurement = self._measure(self._state)
            self._state = measurement.state
            return measurement
        if self._graph is None or self._graph.identity != identity:
            self._graph = self._captured(self._recorder, identity, self._state)
        held = self._graph.measurement.state
        if self._state is not held:
            _copy(self._state, held)
            self._state = held
        self._graph.replay()
        return self._graph.measurement

    def forget(self) -> None:
        """Start the next power iteration afresh."""
        self._state = None

    def _captured(self, recorder: Recorder, identity: Hashable, state: SpectralState) -> _Graph:
        # Tensors of the graph's own: it reads its state where it leaves the next one.
        held = SpectralState(*(vectors.clone() for vectors in state))

        def work() -> Measurement:
            measurement = self._measure(held)
            _copy(measurement.state, held)
            return measurement._replace(state=held)

        return _Graph(identity, *recorder.record(work))


def _copy(source: SpectralState, target: SpectralState) -> None:
    for old, new in zip(target, source, strict=True):
        old.copy_(new)


def model_identity(model: GPT) -> Hashable:
    """What a captured pass over the model depends on besides the values of its weights: plans, mode, and where the weights lie."""
    plans = tuple(attention.plan for attention in model.attentions())
    return plans, model.training, tuple(parameter.data_ptr() for parameter in model.parameters())
