"""Equations 2 and 3 of arXiv 2510.04212 against two backward passes, and the measures of coherence on known matrices."""

from __future__ import annotations

import pytest
import torch
from layer_captures import random_layer

import attention
from attention import AttentionSpec
from attention.plan import HeadGroup
from probes.capture import LayerCapture
from probes.delta_error import delta_errors, high_output, over_groups
from probes.low_rank import (
    _dq,
    coherence,
    cross_coherence,
    high_dw_q,
    predicted_dw_q_error,
    weighted_keys,
)


def gradient_norm(layer: LayerCapture) -> torch.Tensor:
    """||dW_Q|| itself, with the same roundings."""
    q, k, v = (x.float().requires_grad_() for x in (layer.q_BTHD, layer.k_BTHD, layer.v_BTHD))
    o = attention.run(q, k, v, layer.plan, rounding_seed=layer.rounding_seed, softcap=layer.softcap)
    (dq,) = torch.autograd.grad(o, q, layer.do_BTHD.to(o.dtype))
    return torch.einsum("bthd,btc->hdc", dq, layer.x_BTC).norm()


def direct_error(layer: LayerCapture) -> torch.Tensor:
    """dW_Q(hp) - dW_Q(lp) of two backward passes that differ in the O inside delta alone."""

    def dq_error(group: HeadGroup) -> torch.Tensor:
        high_BTHD, low_BTHD = high_output(layer, group).transpose(1, 2), layer.heads(group)[3]
        return _dq(layer, group, high_BTHD) - _dq(layer, group, low_BTHD)

    return torch.einsum("bhtd,btc->hdc", over_groups(layer, dq_error), layer.x_BTC.float())


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("numerics", ["hardware", "rounded_forward", "microcosm"])
def test_equation_3_holds_to_fp32_noise(numerics: str, softcap: float) -> None:
    """dW_Q(hp) - dW_Q(lp) of two backward passes is scale * sum_T error[T] (P K)[T]^T X[T].

    FP32 noise is a few units of 2^-24 of the two gradients, whose difference is some hundred times smaller.
    """
    dtype = torch.float32 if numerics == "microcosm" else torch.bfloat16
    layer = random_layer(spec=AttentionSpec(numerics=numerics), softcap=softcap, dtype=dtype)
    direct = direct_error(layer)
    predicted = predicted_dw_q_error(delta_errors(layer).error_BHT, weighted_keys(layer), layer.x_BTC, layer.scale)
    assert direct.shape == (3, 16, 48)
    assert (direct - predicted).norm() < 4 * 2**-24 * gradient_norm(layer)
    assert direct.norm() > 1e-4 * gradient_norm(layer)


def outer(pk: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The outer products of a sequence, scaled to norm 1, [H, T, D * C]."""
    products = torch.einsum("htd,tc->htdc", pk[0], x[0]).flatten(2)
    return torch.nn.functional.normalize(products, dim=-1)


def test_coherence_is_that_of_the_outer_products() -> None:
    generator = torch.Generator().manual_seed(0)
    pk, x = torch.randn(1, 2, 6, 4, generator=generator), torch.randn(1, 6, 5, generator=generator)
    expected = outer(pk, x) @ outer(pk, x).mT
    off_diagonal = (expected.sum(dim=(-2, -1)) - 6) / 30
    torch.testing.assert_close(coherence(pk, x).within_H, off_diagonal)
    other_pk, other_x = torch.randn(1, 2, 3, 4, generator=generator), torch.randn(1, 3, 5, generator=generator)
    across = (outer(pk, x) @ outer(other_pk, other_x).mT).mean(dim=(-2, -1))
    torch.testing.assert_close(cross_coherence(coherence(pk, x), coherence(other_pk, other_x)), across)


def test_the_high_precision_gradient_is_that_of_fp64() -> None:
    layer = random_layer()
    q, k, v, do = (x.double().transpose(1, 2) for x in (layer.q_BTHD, layer.k_BTHD, layer.v_BTHD, layer.do_BTHD))
    q.requires_grad_()
    s = (q @ k.mT * layer.scale).masked_fill(torch.ones(40, 40, dtype=torch.bool).triu(1), -torch.inf)
    (dq,) = torch.autograd.grad(torch.softmax(s, dim=-1) @ v, q, do)
    expected = torch.einsum("bhtd,btc->hdc", dq, layer.x_BTC.double())
    torch.testing.assert_close(high_dw_q(layer).double(), expected, rtol=1e-4, atol=1e-4)
