"""Spectral Alignment: the singular pair against SVD, and the signs of known batches."""

from __future__ import annotations

import pytest
import torch

from probes.alignment import response_alignment, sign_diversity, spectral_alignment, top_singular_vectors


def weights(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (3, 7, 7)])
def test_the_top_pair_is_that_of_the_svd(shape: tuple[int, ...]) -> None:
    weight = weights(*shape)
    sigma, u, v = top_singular_vectors(weight)
    left, values, right = torch.linalg.svd(weight.double())
    torch.testing.assert_close(sigma.double(), values[..., 0])
    torch.testing.assert_close((u.double() * left[..., :, 0]).sum(-1).abs(), torch.ones_like(values[..., 0]))
    torch.testing.assert_close((v.double() * right[..., 0, :]).sum(-1).abs(), torch.ones_like(values[..., 0]))
    torch.testing.assert_close((weight @ v[..., None])[..., 0], sigma[..., None] * u)


def test_the_sign_of_the_pair_is_a_function_of_the_weight() -> None:
    weight = weights(6, 9)
    v = top_singular_vectors(weight)[2]
    assert v[v.abs().argmax()] > 0
    assert torch.equal(v, top_singular_vectors(weight.clone())[2])


def test_a_weight_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        top_singular_vectors(torch.tensor([[1.0, float("nan")]]))


def test_alignment_is_a_cosine() -> None:
    v = weights(8)
    x = torch.stack([v, -2 * v, torch.zeros(8)])[None]
    torch.testing.assert_close(spectral_alignment(x, v), torch.tensor([[1.0, -1.0, 0.0]]))


def test_layers_side_by_side_are_as_each_alone() -> None:
    x, v = weights(3, 2, 5, 8), weights(3, 8)
    cosines = spectral_alignment(x, v)
    each = [spectral_alignment(*pair) for pair in zip(x, v, strict=True)]
    torch.testing.assert_close(cosines, torch.stack(each))
    assert sign_diversity(cosines).tolist() == [sign_diversity(one).item() for one in each]


def test_both_readings_of_the_paper_have_the_same_signs() -> None:
    """(W x) . u = sigma (x . v), exactly."""
    weight, x = weights(6, 9), weights(2, 50, 9)
    _, u, v = top_singular_vectors(weight)
    assert torch.equal(spectral_alignment(x, v).sign(), response_alignment(x, weight, u).sign())


def test_sign_diversity() -> None:
    assert sign_diversity(torch.tensor([[0.1, -0.2, 0.3, -0.4]])).item() == 1
    assert sign_diversity(torch.tensor([[0.1, 0.2, 0.3, -0.4]])).item() == 0.5
    assert sign_diversity(-torch.rand(3, 4) - 0.1).item() == 0
    assert sign_diversity(torch.zeros(1, 2)).isnan()
