"""Spectral Alignment: the cosines and signs of known batches."""

from __future__ import annotations

import torch

from probes.alignment import sign_diversity, spectral_alignment


def weights(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


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


def test_sign_diversity() -> None:
    assert sign_diversity(torch.tensor([[0.1, -0.2, 0.3, -0.4]])).item() == 1
    assert sign_diversity(torch.tensor([[0.1, 0.2, 0.3, -0.4]])).item() == 0.5
    assert sign_diversity(-torch.rand(3, 4) - 0.1).item() == 0
    assert sign_diversity(torch.zeros(1, 2)).isnan()
