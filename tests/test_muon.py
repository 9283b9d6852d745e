"""Muon with its iterations replayed: torch's own bits. What is taken from torch's private names shows here when torch changes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Muon

from training.muon import CudaRecorder, GraphedMuon

SHAPES = [(24, 8), (8, 8), (32, 8), (8, 32), (5, 7)] * 2
GPT2 = [(2304, 768), (768, 768), (3072, 768), (768, 3072)]


class Replays:
    """In the place of ``CudaRecorder`` on a CPU: what is recorded is computed by ``replay`` alone. Counts both."""

    def __init__(self) -> None:
        self.records, self.replays = 0, 0

    def record(self, work: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
        self.records += 1
        results = [x.fill_(torch.nan) for x in work()]

        def replay() -> None:
            self.replays += 1
            for result, now in zip(results, work(), strict=True):
                result.copy_(now)

        return results, replay


def matrices(shapes: Iterable[tuple[int, int]], seed: int, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device) for shape in shapes]


def stepped(
    optimizer_of: Any, shapes: list[tuple[int, int]] = SHAPES, device: str = "cpu", **more: Any
) -> list[Tensor]:
    """Weights and momenta after four steps of an optimizer on given gradients."""
    parameters = [nn.Parameter(weight) for weight in matrices(shapes, 0, device)]
    settings = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"}
    optimizer = optimizer_of(parameters, **{**settings, **more})
    for step in range(4):
        for parameter, gradient in zip(parameters, matrices(shapes, 1 + step, device), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return [tensor.detach() for p in parameters for tensor in (p, optimizer.state[p]["momentum_buffer"])]


def assert_same_bits(found: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("more", [{}, {"weight_decay": 0.0}, {"nesterov": False}], ids=str)
def test_replayed_muon_has_the_bits_of_torchs(more: dict[str, Any]) -> None:
    recorder = Replays()
    assert_same_bits(stepped(GraphedMuon, recorder=recorder, **more), stepped(Muon, **more))
    assert (recorder.records, recorder.replays) == (1, 3)


def test_matrices_of_other_shapes_are_captured_again() -> None:
    recorder = Replays()
    parameters = [nn.Parameter(weight) for weight in matrices(SHAPES, 0)]
    theirs = [nn.Parameter(weight) for weight in matrices(SHAPES, 0)]
    ours, muon = GraphedMuon(parameters, recorder=recorder), Muon(theirs)
    for step in range(6):
        for of in (parameters, theirs):
            for parameter, gradient in zip(of, matrices(SHAPES, step), strict=True):
                parameter.grad = gradient
            if step % 2:
                of[0].grad = None
        ours.step()
        muon.step()
    assert_same_bits([p.detach() for p in parameters], [p.detach() for p in theirs])
    assert recorder.records == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_cuda_graph_has_the_bits_of_torchs_muon() -> None:
    recorder = CudaRecorder(torch.device("cuda", 0))
    graph = stepped(GraphedMuon, GPT2 * 2, "cuda", recorder=recorder)
    assert_same_bits(graph, stepped(Muon, GPT2 * 2, "cuda"))
