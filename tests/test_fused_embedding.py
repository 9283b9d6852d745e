"""Look-up with a gradient summed in a fixed order, against torch's and fp64; its Triton kernels in the interpreter and on a GPU."""

from __future__ import annotations

import sys

import pytest
import torch
from kernel_tests import INTERPRETED, largest_difference, pass_in_the_interpreter
from torch import Tensor
from torch.nn import functional

from attention import AttentionConfig
from fused.embedding import ROWS, lookup, table_gradient
from model import GPT, ModelConfig, Operators, initialise


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if INTERPRETED:
        # The kernels read and write the CPU's tensors there.
        from fused import embedding_triton

        monkeypatch.setattr(sys.modules["fused.embedding"], "_triton", lambda device: embedding_triton)
    return torch.device(request.param)


def random(n: int) -> list[int]:
    return torch.randint(11, (n,), generator=torch.Generator().manual_seed(n)).tolist()


# Lengths and runs that end before, at and behind the ends of blocks, and that fill several of them.
TEXTS = {
    "one": [3],
    "all different": list(range(40)),
    "one token": [7] * (3 * ROWS + 5),
    "a block": [2] * ROWS,
    "two runs of a block": [2] * ROWS + [5] * ROWS,
    "a run over an end": [1] * (ROWS - 3) + [2] * 7 + [3] * 4,
    "long runs": [4] * (2 * ROWS + 1) + [9] * (4 * ROWS) + [0] * (ROWS - 1),
    "random": random(300),
    "random, whole blocks": random(4 * ROWS),
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_errors_are_within_twice_those_of_torch(text: list[int], device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(text), generator=generator)
    tokens = torch.tensor(text)[order].to(device)
    dx = torch.randn(len(text), 24, generator=generator).to(device)
    found = table_gradient(dx, tokens, 41)
    exact = torch.zeros(41, 24, dtype=torch.float64, device=device).index_add_(0, tokens, dx.double())
    by_torch = torch.zeros(41, 24, device=device).index_add_(0, tokens, dx)
    assert (found - exact).norm() <= 2 * (by_torch - exact).norm() + 2.0**-24 * exact.norm()
    absent = torch.ones(41, dtype=torch.bool, device=device)
    absent[tokens] = False
    assert not found[absent].any()


def test_the_same_bits_twice(device: torch.device) -> None:
    tokens = torch.tensor(TEXTS["long runs"]).to(device)
    dx = torch.randn(len(tokens), 24, generator=torch.Generator().manual_seed(0)).to(device)
    assert torch.equal(table_gradient(dx, tokens, 12), table_gradient(dx, tokens, 12))


def test_looks_up_as_torch_does(device: torch.device) -> None:
    table = torch.randn(11, 8, device=device)
    tokens = torch.tensor(random(12), device=device).view(3, 4)
    assert torch.equal(lookup(tokens, table), functional.embedding(tokens, table))


@pytest.mark.skipif(INTERPRETED, reason="of the CPU's path")
def test_the_operator_is_sound() -> None:
    arguments = (torch.randn(6, 4), torch.tensor([1, 0, 1, 3, 3, 3]), 5)
    torch.library.opcheck(table_gradient, arguments, test_utils=("test_schema", "test_faketensor"))


TINY = ModelConfig(n_layer=1, n_head=2, n_embd=16, block_size=16, vocab_size=64, vocab_multiple=8)


def gradients(sorted_embedding: bool, compiled: bool) -> dict[str, Tensor]:
    model = GPT(
        TINY,
        AttentionConfig(flash_backend="flash_reference").resolve(1, 2),
        Operators(sorted_embedding=sorted_embedding),
    )
    initialise(model, 0)
    tokens = torch.randint(61, (4, 17), generator=torch.Generator().manual_seed(1))
    _, loss = (torch.compile(model) if compiled else model)(tokens[:, :-1], tokens[:, 1:].contiguous())
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.skipif(INTERPRETED, reason="of the CPU's path")
def test_the_model_agrees_with_its_plain_path() -> None:
    plain, ours = gradients(False, False), gradients(True, False)
    for name in plain:
        if name == "transformer.wte.weight":
            assert (ours[name] - plain[name]).norm() <= 64 * 2.0**-24 * plain[name].norm()
        else:
            assert torch.equal(ours[name], plain[name]), name


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="inductor cannot live with the interpreter")
def test_eager_is_compiled() -> None:
    """As near as the plain model's two forms are."""
    apart = {}
    for on in (False, True):
        eager, compiled = gradients(on, False), gradients(on, True)
        apart[on] = largest_difference(eager, compiled)
    assert apart[True] <= 2 * apart[False] + 1e-6


def test_the_kernels_in_tritons_interpreter() -> None:
    pass_in_the_interpreter(__file__)
