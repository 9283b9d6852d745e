"""What torch's ``scaled_dot_product_attention`` takes beside plain tensors of four dimensions, and what it gives, against torch's own."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias, causal_lower_right, causal_upper_left

from attention import scaled_dot_product_attention as ours
from attention.reference.tiles import TORCHS


def results(function: Any, inputs: tuple[Tensor, ...], **settings: Any) -> tuple[Tensor, ...]:
    """O, and the gradients of its sum weighted by its places."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    o = function(*leaves, **settings)
    return o.detach(), *torch.autograd.grad(
        (o * torch.linspace(-1, 1, o.numel(), device=o.device).view(o.shape)).sum(), leaves
    )


def assert_as_torch(inputs: tuple[Tensor, ...], **settings: Any) -> None:
    """O and gradients of plain float32 attention, and the shapes that torch gives."""
    expected = results(TORCHS, inputs, **settings)
    found = results(ours, inputs, numerics="standard", **settings)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def tensors(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


SHAPES: dict[str, tuple[tuple[tuple[int, ...], ...], dict[str, Any]]] = {
    "two dimensions": (((8, 16), (6, 16), (6, 16)), {}),
    "three": (((4, 8, 16), (4, 6, 16), (4, 6, 16)), {}),
    "five": (((2, 3, 4, 8, 16), (2, 1, 4, 6, 16), (1, 3, 4, 6, 16)), {}),
    "keys of batch 1": (((3, 4, 8, 16), (1, 4, 6, 16), (1, 4, 6, 16)), {}),
    "a query of batch 1": (((1, 4, 8, 16), (3, 4, 6, 16), (3, 4, 6, 16)), {}),
    "keys of one head": (((3, 4, 8, 16), (3, 1, 6, 16), (3, 1, 6, 16)), {}),
    "a query of one head": (((3, 1, 8, 16), (3, 4, 6, 16), (3, 4, 6, 16)), {}),
    "no queries": (((2, 4, 0, 16), (2, 4, 6, 16), (2, 4, 6, 16)), {"is_causal": True}),
    "no keys": (((2, 4, 8, 16), (2, 4, 0, 16), (2, 4, 0, 16)), {}),
}


@pytest.mark.parametrize("case", SHAPES)
def test_shapes_are_read_as_torch_reads_them(case: str) -> None:
    shapes, settings = SHAPES[case]
    assert_as_torch(tensors(*shapes), **settings)


@pytest.mark.parametrize(
    ("shapes", "mask"),
    [
        (((4, 8, 16), (4, 6, 16), (4, 6, 16)), (4, 1, 6)),
        (((2, 3, 4, 8, 16), (1, 3, 4, 6, 16), (2, 3, 4, 6, 16)), (3, 1, 8, 6)),
        (((2, 3, 4, 8, 16), (2, 3, 4, 6, 16), (2, 3, 4, 6, 16)), (2, 1, 1, 1, 6)),
    ],
)
def test_masks_of_other_dimensions_are_read_as_torch_reads_them(shapes: Any, mask: tuple[int, ...]) -> None:
    """Another number of keys for each entry, so that none can be taken for another's."""
    entries = torch.arange(math.prod(mask[:-2])).view(*mask[:-2], 1, 1)
    assert_as_torch(tensors(*shapes), attn_mask=(torch.arange(6) <= entries % 6).expand(mask))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "batch, heads, time": lambda x: x.contiguous(),
    "batch, time, heads": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "a slice of a fused projection": lambda x: x.transpose(1, 2).repeat(1, 1, 1, 3)[..., 16:32].transpose(1, 2),
    "expanded": lambda x: x[:1].expand(2, -1, -1, -1),
}


@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_output_is_laid_out_as_torchs(layout: str, how: str) -> None:
    torch.compiler.reset()
    function = torch.compile(ours, fullgraph=True, dynamic=True, backend="aot_eager") if how == "compiled" else ours
    x = LAYOUTS[layout](tensors((2, 4, 8, 16))[0])
    assert function(x, x, x).stride() == TORCHS(x, x, x).stride()


@pytest.mark.parametrize("scale", [np.float32(0.3), torch.tensor(0.3), 2])
def test_a_scale_is_what_float_makes_a_number(scale: Any) -> None:
    q, k, v = tensors(*((1, 2, 8, 16),) * 3)
    assert torch.equal(ours(q, k, v, scale=scale), ours(q, k, v, scale=float(scale)))


@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("sizes", [(16, 16), (8, 16)])
@pytest.mark.parametrize("content", [0.0, math.nan])
def test_a_causal_bias_means_what_torch_means_by_it_whatever_its_storage_holds(
    content: float, sizes: tuple[int, int], make: Callable[..., CausalBias], how: str, device: torch.device
) -> None:
    torch.compiler.reset()
    compiled: Any = torch.compile(ours, fullgraph=True, dynamic=True, backend="aot_eager")
    function = compiled if how == "compiled" else ours
    T, S = sizes
    inputs = tuple(x.to(device) for x in tensors((2, 3, T, 8), (2, 3, S, 8), (2, 3, S, 8)))
    bias = make(T, S)
    with torch._C.DisableTorchFunctionSubclass():
        bias.fill_(content)
    expected, found = results(TORCHS, inputs, attn_mask=bias), results(function, inputs, attn_mask=bias)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_queries_that_a_lower_right_bias_shows_no_key_are_zero() -> None:
    with pytest.warns(UserWarning, match="Lower right causal bias"):
        bias = causal_lower_right(8, 6)
    o = ours(*tensors((1, 1, 8, 16), (1, 1, 6, 16), (1, 1, 6, 16)), attn_mask=bias)
    assert (o == 0).all(dim=-1).flatten().tolist() == [True] * 2 + [False] * 6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attn_mask": causal_lower_right(8, 9)}, "CausalBias of 8 queries, 9 keys: expected 8, 8"),
        ({"attn_mask": causal_lower_right(8, 8), "is_causal": True}, "expected one of both"),
        ({"attn_mask": copy.copy(causal_upper_left(8, 8)).clone()}, "of no known variant"),
    ],
)
def test_a_causal_bias_that_does_not_fit_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ours(*tensors(*((1, 2, 8, 16),) * 3), **settings)


class Unread(Tensor):
    """A subclass whose meaning is not its storage: to read anything of it is an error."""

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("__"):
            raise AssertionError(f"{name} of a subclass was read")
        return super().__getattribute__(name)


def subclasses() -> dict[str, Tensor]:
    x = torch.zeros(2, 4, 8, 16)
    jagged = torch.nested.nested_tensor([x[0].transpose(0, 1)] * 2, layout=torch.jagged).transpose(1, 2)
    return {"unread": x.as_subclass(Unread), "jagged": jagged}


@pytest.mark.parametrize("name", ["query", "key", "value", "attn_mask"])
@pytest.mark.parametrize("kind", ["unread", "jagged"])
def test_a_subclass_is_refused_unread(kind: str, name: str) -> None:
    x = torch.zeros(2, 4, 8, 16)
    with pytest.raises(
        ValueError, match=f"{name} is a {type(subclasses()[kind]).__name__}, a subclass of Tensor"
    ) as error:
        ours(**({"query": x, "key": x, "value": x} | {name: subclasses()[kind]}))
    assert "\n" not in str(error.value)


def test_a_parameter_is_a_plain_tensor() -> None:
    q, k, v = tensors(*((1, 2, 8, 16),) * 3)
    assert torch.equal(ours(torch.nn.Parameter(q), k, v), ours(q, k, v))


@pytest.mark.parametrize("numerics", ["flash", "standard"])
def test_second_derivatives_are_refused_where_they_are_asked_for(numerics: str) -> None:
    x = tensors((1, 1, 4, 8))[0].requires_grad_()
    (gradient,) = torch.autograd.grad(ours(x, x, x, numerics=numerics).sum(), x, create_graph=True)
    with pytest.raises(ValueError, match="no second derivatives"):
        gradient.sum().backward()


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x: torch.func.grad(lambda q: f(q).sum())(x),
        lambda f, x: torch.func.vmap(f)(x[None]),
        lambda f, x: torch.func.functionalize(f)(x),
    ],
)
def test_transforms_of_torch_func_are_refused(transform: Any) -> None:
    with pytest.raises(ValueError, match="query is within"):
        transform(lambda q: ours(q, q, q), tensors((1, 1, 4, 8))[0])
