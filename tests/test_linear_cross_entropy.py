"""Fused operators: the head's loss without its logits, GELU, the look-up's gradient, against autograd's own path and fp64."""

import kernel_tests
import pytest
import torch
from attention_cases import Results, same
from tiny_runs import preset, tiny_model
from torch import Tensor
from torch.nn import functional

from fused.embedding import lookup
from fused.gelu import gelu
from fused.linear_cross_entropy import linear_cross_entropy, softmax_rows
from model import Operators

HALF = [torch.bfloat16, torch.float16]


def problem(device: torch.device, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(x [N, C] float32, W [V, C] float32, targets [N] with some ignored); logits of a size where softmax is neither flat nor one-hot."""
    generator = torch.Generator().manual_seed(seed)
    x_NC = torch.randn(64, 32, generator=generator)
    weight_VC = 0.4 * torch.randn(300, 32, generator=generator)
    targets_N = torch.randint(300, (64,), generator=generator)
    targets_N[::7] = -1
    return x_NC.to(device), weight_VC.to(device), targets_N.to(device)


def reference(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """What ``GPT.forward`` and ``GPT.loss`` do, in the dtype of x; the softmax in float32 at least."""
    logits = functional.linear(x, weight.to(x.dtype))
    logits = logits.float() if logits.dtype in HALF else logits
    return functional.cross_entropy(logits, targets, ignore_index=-1)


def differentiate(function, x: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, **chunk: int) -> Results:
    """Loss, dx and dW; x is rounded to ``dtype`` on the way in, as autocast does it."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    loss = function(x.to(dtype), weight, targets, **chunk)
    return loss.detach(), *torch.autograd.grad(3 * loss, (x, weight))


def errors(found: Results, x: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype) -> list[float]:
    """Root mean square distance from fp64, of what the rounded x and W give."""
    rounded = (x.to(dtype).double(), weight.to(dtype).double())
    exact = differentiate(reference, *rounded, targets, torch.float64)
    return [(a.double() - b).square().mean().sqrt().item() for a, b in zip(found, exact, strict=True)]


@pytest.mark.parametrize("chunk", [64, 16, 48])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_errors_are_within_twice_those_of_autograds_path(dtype: torch.dtype, chunk: int, device: torch.device) -> None:
    squares = torch.zeros(3, 2)
    for seed in range(6):  # a loss is one number: alone it may be right by accident
        tensors = problem(device, seed=seed)
        found = differentiate(linear_cross_entropy, *tensors, dtype, chunk=chunk)
        plain = differentiate(reference, *tensors, dtype)
        pairs = zip(*(errors(result, *tensors, dtype) for result in (found, plain)), strict=True)
        squares += torch.tensor(list(pairs)).square()
    # Half a float32 rounding of a loss near 6 is granted, which in float32 is all the error there is.
    floors = [found[0].item() * 2.0**-24, 0.0, 0.0]
    for (own, other), floor in zip((squares / 6).sqrt().tolist(), floors, strict=True):
        assert own <= 2 * other + floor


# ---- in the model


def loss_and_gradients(operators: Operators) -> list[Tensor]:
    tokens = torch.randint(61, (4, 17), generator=torch.Generator().manual_seed(1))
    model = tiny_model(preset("flash"), operators, n_layer=1, vocab_size=61, vocab_multiple=8)
    _, loss = model(tokens[:, :-1], tokens[:, 1:].contiguous())
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def test_the_model_in_float32_agrees_with_its_plain_path() -> None:
    for plain, fast in zip(*map(loss_and_gradients, ("torch", "own")), strict=True):
        # Sums of 64 tokens and of 16 columns, in another order.
        assert (plain - fast).norm() <= 64 * 2.0**-24 * plain.norm()


# ---- the kernel


kernel_device = kernel_tests.device


@pytest.mark.parametrize("v", [300, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel_agrees_with_torch(dtype: torch.dtype, v: int, kernel_device: torch.device) -> None:
    from fused.softmax_triton import softmax_rows_triton

    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(9, v, generator=generator)).to(dtype).to(kernel_device)
    targets = torch.randint(v, (9,), generator=generator).to(kernel_device)
    targets[4] = -1
    leaves = logits.double().requires_grad_()
    exact_loss = functional.cross_entropy(leaves, targets, ignore_index=-1, reduction="none")
    (exact,) = torch.autograd.grad(exact_loss.sum(), leaves)
    results = []
    for function in (softmax_rows, softmax_rows_triton):
        rows, loss = logits.clone(), torch.full((9,), torch.nan, device=kernel_device)
        function(rows, targets, loss)
        results.append((loss.double(), rows.double()))
    (torch_loss, by_torch), (kernel_loss, by_kernel) = results
    assert (by_kernel - exact).norm() <= 2 * (by_torch - exact).norm()
    assert (kernel_loss - exact_loss).norm() <= 2 * (torch_loss - exact_loss).norm() + exact_loss.norm() * 2.0**-24


def value_and_slope(function, h: Tensor) -> tuple[Tensor, Tensor]:
    h = h.detach().requires_grad_()
    a = function(h)
    (slope,) = torch.autograd.grad(a, h, torch.ones_like(a))
    return a.detach().double(), slope.double()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gelu_and_its_slope_are_as_near_to_fp64_as_torchs(dtype: torch.dtype, device: torch.device) -> None:
    h = (3 * torch.randn(50_000, generator=torch.Generator().manual_seed(0))).to(dtype).to(device)
    calls = (functional.gelu, h.double()), (functional.gelu, h), (gelu, h)
    for true, theirs, found in zip(*(value_and_slope(*call) for call in calls), strict=True):
        assert (found - true).abs().max() <= 1.5 * (theirs - true).abs().max()
        assert (found - true).square().mean() <= 1.1 * (theirs - true).square().mean()


def test_gelu_of_zero_infinity_and_nan(device: torch.device) -> None:
    h = torch.tensor([0.0, -0.0, 1e4, -1e4, torch.nan], dtype=torch.bfloat16, device=device)
    assert torch.equal(gelu(h)[:4], torch.tensor([0.0, 0.0, 1e4, 0.0], dtype=torch.bfloat16, device=device))
    assert gelu(h)[4].isnan()


def test_the_look_up_and_its_gradient_are_torchs(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(37, 8, generator=generator).to(device)
    half_are_0 = torch.rand(4, 50, generator=generator) < 0.5
    tokens = (torch.randint(37, (4, 50), generator=generator) * half_are_0).to(device)
    results = []
    for function in (lookup, functional.embedding):
        weight = table.clone().requires_grad_()
        found = function(tokens, weight)
        results.append((found.detach(), *torch.autograd.grad(found.square().sum(), weight)))
    assert same(*results)
