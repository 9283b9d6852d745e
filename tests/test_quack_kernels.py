"""``speed.quack``: what refuses it, its backward pass with torch in place of its products, and on a Hopper GPU its kernels against fp64."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator

import pytest
import torch
from kernel_tests import INTERPRETED
from torch import Tensor
from torch.nn import functional

from errors import UserError
from fused import quack_kernels
from fused.gelu import gelu
from model import ModelConfig
from training import speed
from training.precision import PrecisionConfig
from training.speed import SpeedConfig

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BF16 = torch.bfloat16


def refusal(
    monkeypatch: pytest.MonkeyPatch, device=CUDA, capability=(9, 0), installed=True, dtype="bfloat16", **model
) -> str:
    monkeypatch.setattr(quack_kernels, "installed", lambda: installed)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with pytest.raises(UserError) as refused:
        speed.operators(SpeedConfig(quack=True), ModelConfig(**model), PrecisionConfig(dtype=dtype), device)
    return str(refused.value)


@pytest.mark.parametrize(
    ("circumstance", "said"),
    [
        ({"installed": False}, "not installed"),
        ({"device": CPU}, "no Hopper GPU"),
        ({"dtype": "float16"}, "precision.dtype = 'float16'"),
        ({"bias": True}, "model.bias"),
        ({"vocab_multiple": 1}, "multiple of 128"),
    ],
)
def test_what_it_cannot_do_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, circumstance, said: str
) -> None:
    message = refusal(monkeypatch, **circumstance)
    assert message.startswith("speed.quack = True")
    assert said in message


# ---- the MLP

Weights = tuple[Tensor, Tensor, Tensor]


def problem(device: torch.device, n: int = 64, c: int = 32, f: int = 128) -> Weights:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, n // 2, c), (f, c), (c, f))
    return tuple((torch.randn(s, generator=generator) * s[-1] ** -0.5).to(device) for s in shapes)


def differentiate(function, tensors: Weights, autocast: bool) -> list[Tensor]:
    """Output and gradients of all three, for a gradient dy that differs from element to element."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    with torch.autocast(leaves[0].device.type, dtype=BF16, enabled=autocast):
        y = function(*leaves)
    dy = torch.linspace(-1, 1, y.numel(), dtype=torch.float64, device=y.device).sin().view(y.shape)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


def plain(x: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    return functional.linear(functional.gelu(functional.linear(x, w_in)), w_out)


def own(x: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    return functional.linear(gelu(functional.linear(x, w_in)), w_out)


def distances(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)]


def exactly(tensors: Weights) -> list[Tensor]:
    """fp64, of the operands as autocast rounds them."""
    return differentiate(plain, tuple(t.to(BF16).double() for t in tensors), autocast=False)


@pytest.fixture
def products_by_torch() -> Iterator[None]:
    """On a CPU the two products with an epilogue are what their docstrings say."""

    def linear_gelu(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        h = x.float() @ weight.float().mT
        return h.to(x.dtype), functional.gelu(h).to(x.dtype)

    def times_gelu_slope(dy: Tensor, weight: Tensor, h: Tensor) -> Tensor:
        z = h.float()
        slope = torch.special.ndtr(z) + z * torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
        return (dy.float() @ weight.float() * slope).to(h.dtype)

    kernels = {quack_kernels._linear_gelu: linear_gelu, quack_kernels._times_gelu_slope: times_gelu_slope}
    with torch.library._scoped_library("fused", "FRAGMENT") as library:
        for operator, kernel in kernels.items():
            library.impl(operator._name.removeprefix("fused::"), kernel, "CPU")
        yield


@pytest.mark.usefixtures("products_by_torch")
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_its_backward_pass_is_that_of_the_mlp(compiled: bool) -> None:
    if compiled and INTERPRETED:
        pytest.skip("inductor cannot live with the interpreter")
    tensors = problem(CPU)
    function = torch.compile(quack_kernels.mlp, fullgraph=True, backend="aot_eager") if compiled else quack_kernels.mlp
    found = distances(differentiate(function, tensors, autocast=True), exactly(tensors))
    usual = distances(differentiate(plain, tensors, autocast=True), exactly(tensors))
    assert all(a <= 1.5 * b for a, b in zip(found, usual, strict=True))


HOPPER = pytest.mark.skipif(
    importlib.util.find_spec("quack") is None
    or not torch.cuda.is_available()
    or torch.cuda.get_device_capability() != (9, 0),
    reason="needs quack-kernels and a Hopper GPU",
)


HOPPER_SIZES = [pytest.param("cuda", n, marks=[pytest.mark.gpu, HOPPER]) for n in (4096, 1000)]


@pytest.mark.parametrize(("place", "n"), HOPPER_SIZES)
def test_the_mlps_kernels_are_as_near_to_fp64_as_ours_and_deterministic(place: str, n: int) -> None:
    tensors = problem(torch.device(place), n, 256, 1024)
    found = differentiate(quack_kernels.mlp, tensors, autocast=True)
    again = differentiate(quack_kernels.mlp, tensors, autocast=True)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    pairs = zip(
        distances(found, exactly(tensors)), distances(differentiate(own, tensors, True), exactly(tensors)), strict=True
    )
    assert all(a <= 1.5 * b for a, b in pairs)


# ---- the head


def cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(x, weight), targets, ignore_index=-1)


def head_problem(device: torch.device, n: int) -> Weights:
    """x [n, 256] bfloat16, W [1920, 256] float32 of bfloat16 values, targets [n]; probabilities are small, so that p - 1 is nearly -1."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 256, generator=generator).to(BF16)
    weight = (0.1 * torch.randn(1920, 256, generator=generator)).to(BF16).float()
    targets = torch.randint(1920, (n,), generator=generator)
    targets[::7] = -1
    return x.to(device), weight.to(device), targets.to(device)


def head_gradients(function, x: Tensor, weight: Tensor, targets: Tensor) -> list[Tensor]:
    """Loss, dx and dW of 3 times the loss."""
    leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
    loss = function(*leaves, targets)
    return [loss.detach(), *torch.autograd.grad(3 * loss, leaves)]


def as_quack_rounds(x: Tensor, weight: Tensor, targets: Tensor, tile: int = 192) -> list[Tensor]:
    """The same in fp64 with the three roundings of ``scaled_exp_linear_cross_entropy_fwd``: E = exp(s - k log 2) of a tile of logits,
    k whole; the scale v of a row; v x. dx is rounded at its end, and once more by the factor of the loss."""
    s = x.double() @ weight.double().mT
    rows, target, counted = torch.arange(len(s), device=s.device), targets.clamp(min=0), targets != -1
    lse = torch.logsumexp(s, dim=-1)
    tiles = s.view(len(s), -1, tile)
    k = torch.ceil(tiles.amax(dim=-1) / math.log(2))
    e = torch.exp(tiles - k[..., None] * math.log(2)).flatten(1)
    s_target = s[rows, target]
    e[rows, target] = (torch.exp(s_target - lse) - 1) * torch.exp(lse - k[rows, target // tile] * math.log(2))
    k_row = k.amax(dim=-1)
    v = torch.where(counted, torch.exp(k_row * math.log(2) - lse), 0.0)
    scaled = e.to(BF16).double() * torch.exp2(k - k_row[:, None]).repeat_interleave(tile, dim=1)
    factor = 3 / counted.sum()
    dx = (v[:, None] * (scaled @ weight.double())).to(BF16)
    dweight = scaled.mT @ (v.to(BF16).double()[:, None] * x.double()).to(BF16).double()
    return [
        torch.where(counted, lse - s_target, 0.0).sum() / counted.sum(),
        (factor * dx.float()).to(BF16),
        factor * dweight,
    ]


@pytest.mark.parametrize(("place", "n"), [("cpu", 300), *HOPPER_SIZES])
def test_the_heads_kernels_have_the_roundings_that_they_name_and_are_deterministic(place: str, n: int) -> None:
    """On a CPU, where there is no quack, that these roundings are an error near 2^-9 of each gradient and no mistake."""
    x, weight, targets = head_problem(torch.device(place), n)
    exact = head_gradients(cross_entropy, x.double(), weight.double(), targets)
    named = distances(as_quack_rounds(x, weight, targets), exact)
    assert named[0] < 1e-12
    assert all(0.2 * 2.0**-8 < distance < 2.0**-8 for distance in named[1:])
    if place == "cuda":
        found, again = (head_gradients(quack_kernels.linear_cross_entropy, x, weight, targets) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
        assert distances(found, exact)[0] < 1e-6
        assert all(a <= 1.1 * b for a, b in zip(distances(found, exact)[1:], named[1:], strict=True))
