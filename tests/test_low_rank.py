"""The factors of arXiv 2510.04212, equation 3, and the measures of their coherence, on known matrices."""

from __future__ import annotations

import pytest
import torch
from layer_captures import random_layer

from probes.low_rank import coherence, cross_coherence, weighted_keys


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


@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_weighted_keys_are_those_of_fp64(softcap: float) -> None:
    """Up to L in FP32, and probabilities in FP32."""
    layer = random_layer(softcap=softcap)
    q, k = (x.double().transpose(1, 2) for x in (layer.q_BTHD, layer.k_BTHD))
    s = q @ k.mT * layer.scale
    slope = torch.ones_like(s)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
        slope = 1 - (s / softcap).square()
    p = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf).softmax(dim=-1)
    torch.testing.assert_close(weighted_keys(layer).double(), (p * slope) @ k, rtol=1e-4, atol=1e-5)
