"""Muon's iterations batched and replayed: torch's own bits where they are promised, else as near to the exact factor as torch's."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from tape import TapeRecorder
from test_optim import make_model
from torch import Tensor, nn
from torch.optim import Muon
from torch.utils._python_dispatch import TorchDispatchMode

import config as configuration
from errors import UserError
from training.newton_schulz import CudaRecorder, Iteration, Orthogonalise, Replayed, batched, each
from training.optim import OptimConfig, build_optimizer
from training.shared_muon import SharedMuon

ITERATION = Iteration((3.4445, -4.7750, 2.0315), 5, 1e-7)
SHAPES = [(24, 8), (8, 8), (32, 8), (8, 32), (5, 7)] * 2
GPT2 = [(2304, 768), (768, 768), (3072, 768), (768, 3072)]


@pytest.fixture
def gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def matrices(shapes: Iterable[tuple[int, int]], seed: int, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device) for shape in shapes]


def exact(direction: Tensor) -> Tensor:
    """The same iteration in float64."""
    a, b, c = ITERATION.coefficients
    x = direction.double()
    x = x.mT if x.shape[0] > x.shape[1] else x
    x = x / x.norm()
    for _ in range(ITERATION.steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if direction.shape[0] > direction.shape[1] else x


def errors(way: Orthogonalise, directions: list[Tensor]) -> list[float]:
    """Of every factor, the relative distance to the exact one."""
    pairs = zip(way(directions, ITERATION), map(exact, directions), strict=True)
    return [((found - right).norm() / right.norm()).item() for found, right in pairs]


def stepped(optimizer_of: Any, device: str, shapes: list[tuple[int, int]], steps: int = 4) -> list[list[Tensor]]:
    """Weights and momenta after some steps of an optimiser on given gradients."""
    parameters = [nn.Parameter(weight) for weight in matrices(shapes, 0, device)]
    optimizer = optimizer_of(parameters, lr=0.02, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    for step in range(steps):
        for parameter, gradient in zip(parameters, matrices(shapes, 1 + step, device), strict=True):
            parameter.grad = gradient
        optimizer.step()
    momenta = [optimizer.state[parameter]["momentum_buffer"] for parameter in parameters]
    return [[parameter.detach() for parameter in parameters], momenta]


def muon(way: Orthogonalise) -> Any:
    return lambda parameters, **settings: SharedMuon(parameters, orthogonalise=way, **settings)


def assert_same_bits(found: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    assert all(torch.equal(a, b) for x, y in zip(found, expected, strict=True) for a, b in zip(x, y, strict=True))


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace == "aten" and not func.is_view
        return func(*args, **kwargs or {})


# ---- batched


@pytest.mark.parametrize("seed", range(3))
def test_batched_factors_are_as_near_to_the_exact_ones_as_torchs(seed: int) -> None:
    directions = matrices(SHAPES, seed)
    pairs = zip(errors(batched, directions), errors(each, directions), strict=True)
    assert [pair for pair in pairs if pair[0] > 2 * pair[1]] == []


def test_batched_factors_have_their_matrices_shapes_and_lie_like_them() -> None:
    factors = batched(matrices(SHAPES, 0), ITERATION)
    assert [(tuple(f.shape), f.dtype, f.is_contiguous()) for f in factors] == [
        (s, torch.bfloat16, True) for s in SHAPES
    ]


def test_batched_iterations_leave_what_they_are_given() -> None:
    directions = matrices(SHAPES, 0)
    batched(directions, ITERATION)
    assert all(torch.equal(a, b) for a, b in zip(directions, matrices(SHAPES, 0), strict=True))


def test_more_matrices_of_a_shape_are_no_more_operations() -> None:
    counts = []
    for layers in (1, 12):
        with Counted() as counted:
            batched(matrices([(24, 8), (8, 8)] * layers, 0), ITERATION)
        counts.append(counted.count - 2 * layers)  # without making the matrices
    assert counts[0] == counts[1]


def test_a_matrix_of_zeros_is_left_at_zero() -> None:
    assert [factor.abs().max().item() for factor in batched([torch.zeros(4, 6)], ITERATION)] == [0.0]


def operations(optimizer_of: Any) -> int:
    """Of a step, with as many matrices as GPT-2 has."""
    parameters = [nn.Parameter(weight) for weight in matrices([(24, 8), (8, 8), (32, 8), (8, 32)] * 12, 0)]
    optimizer = optimizer_of(parameters, weight_decay=0.1)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with Counted() as counted:
        optimizer.step()
    return counted.count


def test_a_batched_step_takes_a_ninth_of_the_operations_of_torchs() -> None:
    """torch.optim.Muon takes 23 operations a matrix."""
    assert operations(Muon) == 23 * 48
    assert operations(muon(batched)) < 23 * 48 / 9


def test_batched_muon_is_within_the_roundings_of_torchs() -> None:
    """A factor's BF16 is 2^-9 off; four steps of rate 0.02 * 0.2 * sqrt(32) at most."""
    (weights, momenta), (expected, same) = (stepped(way, "cpu", SHAPES) for way in (muon(batched), Muon))
    assert_same_bits([momenta], [same])
    start = matrices(SHAPES, 0)
    for now, then, first in zip(weights, expected, start, strict=True):
        assert (now - then).norm() < 0.02 * (then - first).norm()
        assert not torch.equal(now, first)


# ---- replayed


def test_replayed_muon_has_the_bits_of_torchs() -> None:
    assert_same_bits(stepped(muon(Replayed(TapeRecorder())), "cpu", SHAPES), stepped(Muon, "cpu", SHAPES))


def test_matrices_of_the_same_shapes_are_captured_once() -> None:
    recorder = TapeRecorder()
    replayed = Replayed(recorder)
    for seed in range(3):
        found, expected = replayed(matrices(SHAPES, seed), ITERATION), each(matrices(SHAPES, seed), ITERATION)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert (recorder.records, recorder.replays) == (1, 3)


def test_matrices_of_other_shapes_are_captured_anew() -> None:
    recorder = TapeRecorder()
    replayed = Replayed(recorder)
    for shapes in (SHAPES, SHAPES[1:], SHAPES):
        found, expected = replayed(matrices(shapes, 0), ITERATION), each(matrices(shapes, 0), ITERATION)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert recorder.records == 2


def test_nothing_to_orthogonalise_captures_nothing() -> None:
    recorder = TapeRecorder()
    assert Replayed(recorder)([], ITERATION) == []
    assert recorder.records == 0


# ---- the setting


def test_a_graph_needs_cuda() -> None:
    with pytest.raises(UserError, match=r"optim\.newton_schulz = 'graph'"):
        build_optimizer(make_model(), OptimConfig(optimizer="muon", newton_schulz="graph"), "cpu")


def test_the_recipe_with_muon_is_of_a_graph_and_refused_without_cuda() -> None:
    recipe = configuration.load([str(configuration.PRESETS / "gpt2_muon.py")])
    with pytest.raises(UserError, match=r"^optim\.newton_schulz = 'graph': it needs CUDA; choose each or batched$"):
        build_optimizer(make_model(), recipe.optim, "cpu")


@pytest.mark.parametrize(
    "fields", [{"newton_schulz": "batched"}, {"optimizer": "muon", "newton_schulz": "svd"}], ids=str
)
def test_what_no_optimiser_does_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"optim\.newton_schulz = "):
        OptimConfig(**fields)


def test_the_setting_reaches_the_optimiser() -> None:
    counts = {}
    for name in ("each", "batched"):
        model = copy.deepcopy(make_model())
        optimizer = build_optimizer(model, OptimConfig(optimizer="muon", newton_schulz=name), "cpu")  # type: ignore[arg-type]
        counts[name] = optimizer.muon._orthogonalise  # type: ignore[attr-defined]
    assert counts == {"each": each, "batched": batched}


class FakeGraph(contextlib.AbstractContextManager[None]):
    """In the place of torch.cuda.graph: its end fails as well, behind an operation that no graph can hold."""

    def __init__(self, graph: object, capture_error_mode: str):
        assert capture_error_mode == "thread_local"

    def __exit__(self, *error: object) -> None:
        raise RuntimeError("operation failed due to a previous error during capture\nCUDA kernel errors might be")


def test_a_capture_that_fails_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Stream", "current_stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", FakeGraph)
    calls: list[int] = []

    def work() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("operation not permitted when stream is capturing\nfor debugging consider")

    with pytest.raises(UserError) as refused:
        CudaRecorder().record(work)
    assert str(refused.value) == (
        "optim.newton_schulz = 'graph': the iterations could not be captured as a CUDA graph "
        "(operation not permitted when stream is capturing); choose each or batched"
    )


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
def test_a_cuda_graph_has_the_bits_of_torchs_muon() -> None:
    graph = stepped(muon(Replayed(CudaRecorder())), "cuda", GPT2 * 2)
    assert_same_bits(graph, stepped(Muon, "cuda", GPT2 * 2))


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
def test_batched_factors_on_a_gpu_are_as_near_to_the_exact_ones_as_torchs() -> None:
    directions = matrices(GPT2 * 2, 0, "cuda")
    pairs = zip(errors(batched, directions), errors(each, directions), strict=True)
    assert [pair for pair in pairs if pair[0] > 1.1 * pair[1]] == []


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
def test_batched_muon_gives_the_same_bits_twice() -> None:
    assert_same_bits(*(stepped(muon(batched), "cuda", GPT2 * 2) for _ in range(2)))


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
def test_float32_updates_added_at_once_have_the_bits_of_those_added_one_by_one() -> None:
    weights, updates = matrices(GPT2, 0, "cuda"), [m.bfloat16() for m in matrices(GPT2, 1, "cuda")]
    expected = [weight.add(update, alpha=-0.0123) for weight, update in zip(weights, updates, strict=True)]
    torch._foreach_add_(weights, [update.float() for update in updates], alpha=-0.0123)
    assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))
