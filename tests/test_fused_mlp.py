"""GELU inside its products, against torch's path and fp64; its Triton kernels in the interpreter and on a GPU."""

from __future__ import annotations

import sys

import pytest
import torch
from kernel_tests import INTERPRETED, largest_difference, pass_in_the_interpreter
from torch import Tensor
from torch.nn import functional

from attention import AttentionConfig
from fused.mlp import gelu_gradient, linear_gelu, mlp
from model import GPT, ModelConfig, Operators, initialise


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if INTERPRETED:
        # The kernels read and write the CPU's tensors there.
        from fused import mlp_triton

        monkeypatch.setattr(sys.modules["fused.mlp"], "_triton", lambda device: mlp_triton)
    return torch.device(request.param)


def plain(x: Tensor, up: Tensor, down: Tensor, dtype: torch.dtype) -> Tensor:
    """What ``MLP.forward`` does under autocast, in ``dtype`` throughout where that is float64."""
    with torch.autocast(
        x.device.type, dtype=torch.bfloat16 if dtype == torch.float64 else dtype, enabled=x.dtype != torch.float64
    ):
        return functional.linear(functional.gelu(functional.linear(x, up)), down)


def outcome(function, dtype: torch.dtype, exact: bool, device: torch.device, n: int, c: int) -> list[Tensor]:  # type: ignore[no-untyped-def]
    """y, dx, dW_1, dW_2 for inputs that lie on the grid of ``dtype``, so that fp64 sees the same ones."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        on_grid = (scale * torch.randn(*shape, generator=generator)).to(dtype)
        return on_grid.to(device, torch.float64 if exact else torch.float32).requires_grad_()

    x, up, down = random(n, c), random(4 * c, c, scale=2 * c**-0.5), random(c, 4 * c, scale=c**-0.5)
    dy = random(n, c).detach()
    y = function(x, up, down, torch.float64 if exact else dtype)
    y.backward(dy.to(y.dtype))
    return [t.detach() for t in (y, x.grad, up.grad, down.grad) if t is not None]


@pytest.mark.parametrize("shape", [(48, 16), (130, 72)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_errors_are_within_twice_those_of_torchs_path(
    dtype: torch.dtype, shape: tuple[int, int], device: torch.device
) -> None:
    exact = outcome(plain, dtype, True, device, *shape)
    reference, found = (outcome(function, dtype, False, device, *shape) for function in (plain, mlp))
    assert len(found) == 4
    for a, b, c in zip(found, reference, exact, strict=True):
        assert a.dtype == b.dtype
        assert (a.double() - c).norm() <= 2 * (b.double() - c).norm()


def test_the_forward_pass_rounds_where_torch_does(device: torch.device) -> None:
    """Products of small whole numbers are exact, so h must be torch's to the bit, and a within one unit of its last place."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randint(-3, 4, (64, 16), generator=generator).to(device, torch.bfloat16) for _ in range(2))
    h, a = linear_gelu(x, weight / 8)
    assert torch.equal(h, x @ (weight / 8).mT)
    expected = functional.gelu(h.float())
    assert ((a.float() - expected).abs() <= expected.abs() * 2.0**-8 + 2.0**-20).all()


def test_the_same_bits_twice(device: torch.device) -> None:
    once, again = (outcome(mlp, torch.bfloat16, False, device, 48, 16) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


@pytest.mark.skipif(INTERPRETED, reason="of the CPU's path")
def test_the_operators_are_sound() -> None:
    x, up, down = torch.randn(6, 8).bfloat16(), torch.randn(32, 8).bfloat16(), torch.randn(8, 32).bfloat16()
    for operator, arguments in ((linear_gelu, (x, up)), (gelu_gradient, (x, down, torch.randn(6, 32).bfloat16()))):
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


TINY = ModelConfig(n_layer=2, n_head=2, n_embd=16, block_size=16, vocab_size=64, vocab_multiple=8)


def gradients(fused_mlp: bool, bf16: bool, compiled: bool) -> dict[str, Tensor]:
    model = GPT(TINY, AttentionConfig(flash_backend="flash_reference").resolve(2, 2), Operators(fused_mlp=fused_mlp))
    initialise(model, 0)
    tokens = torch.randint(61, (4, 17), generator=torch.Generator().manual_seed(1))
    call = torch.compile(model) if compiled else model
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        _, loss = call(tokens[:, :-1], tokens[:, 1:].contiguous())
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.skipif(INTERPRETED, reason="of the CPU's path")
def test_the_model_agrees_with_its_plain_path() -> None:
    exact, plain_, ours = gradients(False, False, False), gradients(False, True, False), gradients(True, True, False)
    assert plain_.keys() == ours.keys()
    for name in plain_:
        assert (ours[name] - exact[name]).norm() <= 2 * (plain_[name] - exact[name]).norm() + 1e-6, name


@pytest.mark.skipif(INTERPRETED, reason="of the CPU's path")
def test_float32_takes_the_plain_path() -> None:
    plain_, ours = gradients(False, False, False), gradients(True, False, False)
    assert all(torch.equal(plain_[name], ours[name]) for name in plain_)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="inductor cannot live with the interpreter")
def test_eager_is_compiled() -> None:
    """As near as the plain model's two forms are."""
    apart = {}
    for on in (False, True):
        eager, compiled = (gradients(on, True, compiled) for compiled in (False, True))
        apart[on] = largest_difference(eager, compiled)
    assert apart[True] <= 2 * apart[False] + 1e-6


def test_the_kernels_in_tritons_interpreter() -> None:
    pass_in_the_interpreter(__file__)
