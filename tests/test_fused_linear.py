"""A weight's gradient in float32: nearer to fp64 than autocast's, everything else to the bit as it was."""

from __future__ import annotations

import pytest
import torch
from kernel_tests import largest_difference
from torch import Tensor, nn

from attention import AttentionConfig
from fused.linear import Linear, float32_product
from model import GPT, ModelConfig, Operators, initialise

TINY = ModelConfig(n_layer=2, n_head=2, n_embd=16, block_size=16, vocab_size=64, vocab_multiple=8)


def outcome(layer: nn.Linear, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    """y, dx, dW and perhaps db, under autocast of ``dtype``."""
    generator = torch.Generator().manual_seed(0)
    layer = layer.to(device)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    x = torch.randn(4, 50, 24, generator=generator).to(device).requires_grad_()
    dy = torch.randn(4, 50, 40, generator=generator).to(device, dtype)
    with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
        y = layer(x)
    y.backward(dy)
    return y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())


def pair(bias: bool) -> tuple[nn.Linear, Linear]:
    ours = Linear(24, 40, bias=bias)
    ours.float32_gradient = True
    return nn.Linear(24, 40, bias=bias), ours


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradient_of_the_weight_is_not_rounded(dtype: torch.dtype, device: torch.device) -> None:
    plain, ours = (outcome(layer, device, dtype) for layer in pair(bias=False))
    generator = torch.Generator().manual_seed(0)
    torch.randn(40, 24, generator=generator)
    x, dy = (torch.randn(4, 50, n, generator=generator).to(dtype).double().to(device) for n in (24, 40))
    exact = dy.flatten(0, 1).mT @ x.flatten(0, 1)
    errors = [(found[2].double() - exact).norm() for found in (plain, ours)]
    assert ours[2].dtype == torch.float32
    # 24 significant bits against 8 or 11.
    assert errors[1] < 0.05 * errors[0]


def test_all_else_has_autocasts_bits() -> None:
    plain, ours = (outcome(layer, torch.device("cpu")) for layer in pair(bias=False))
    assert torch.equal(plain[0], ours[0])
    assert torch.equal(plain[1], ours[1])


def test_with_a_bias_errors_are_within_twice_autocasts() -> None:
    plain, ours = (outcome(layer, torch.device("cpu")) for layer in pair(bias=True))
    exact = outcome(nn.Linear(24, 40), torch.device("cpu"), torch.float32)
    for a, b, c in zip(ours, plain, exact, strict=True):
        assert (a.float() - c).norm() <= 2 * (b.float() - c).norm()


def test_without_autocast_it_is_torchs_layer() -> None:
    plain, ours = (outcome(layer, torch.device("cpu"), torch.float32) for layer in pair(bias=True))
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


def test_the_operator_is_sound() -> None:
    arguments = (torch.randn(6, 4).bfloat16(), torch.randn(6, 3).bfloat16())
    torch.library.opcheck(float32_product, arguments, test_utils=("test_schema", "test_faketensor"))


def gradients(float32_gradients: bool, compiled: bool) -> dict[str, Tensor]:
    model = GPT(
        TINY,
        AttentionConfig(flash_backend="flash_reference").resolve(2, 2),
        Operators(float32_gradients=float32_gradients),
    )
    initialise(model, 0)
    tokens = torch.randint(61, (4, 17), generator=torch.Generator().manual_seed(1))
    call = torch.compile(model) if compiled else model
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, loss = call(tokens[:, :-1], tokens[:, 1:].contiguous())
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_in_the_model_only_the_blocks_matrices_change() -> None:
    plain, ours = gradients(False, False), gradients(True, False)
    changed = {name for name in plain if not torch.equal(plain[name], ours[name])}
    assert changed == {name for name in plain if ".attn." in name or ".mlp." in name}


@pytest.mark.slow
def test_eager_is_compiled() -> None:
    """As near as the plain model's two forms are."""
    apart = {}
    for on in (False, True):
        eager, compiled = gradients(on, False), gradients(on, True)
        apart[on] = largest_difference(eager, compiled)
    assert apart[True] <= 2 * apart[False] + 1e-6
