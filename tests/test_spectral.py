"""analysis/spectral.py: the largest singular value, also of awkward matrices."""

import numpy as np
import pytest
import torch

from analysis.spectral import spectral_norm


@pytest.mark.parametrize("shape", [(1, 1), (5, 5), (3, 9), (9, 3), (2, 3, 4, 6)])
def test_it_is_numpys_largest_singular_value(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = np.linalg.svd(weight.numpy(), compute_uv=False)[..., 0]
    # Both are backward stable: a small multiple of the dimension times the rounding unit.
    np.testing.assert_allclose(spectral_norm(weight).numpy(), expected, rtol=10 * max(shape) * 2**-53)


def test_a_known_value() -> None:
    # Singular values of a rank-one matrix u v^T: |u| |v| = 5 * 13.
    weight = torch.outer(torch.tensor([3.0, 4.0]), torch.tensor([5.0, 12.0]))
    assert spectral_norm(weight).item() == pytest.approx(65.0, rel=2**-23)


def test_bfloat16_weights_lose_nothing() -> None:
    weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(spectral_norm(weight), spectral_norm(weight.float()))


def test_close_to_equal_singular_values_are_told_exactly() -> None:
    # Where power iteration would still be on its way.
    weight = torch.diag(torch.tensor([1.0, 1.0 + 2**-20, 0.5], dtype=torch.float64))
    assert spectral_norm(weight).item() == pytest.approx(1.0 + 2**-20, rel=2**-50)


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_squares_neither_overflow_nor_underflow(scale: float) -> None:
    assert spectral_norm(scale * torch.eye(3, dtype=torch.float64)).item() == pytest.approx(scale, rel=2**-50)


def test_zero_has_norm_zero() -> None:
    assert spectral_norm(torch.zeros(3, 4)).item() == 0.0


@pytest.mark.parametrize("entry", [torch.nan, torch.inf])
def test_only_the_matrix_that_is_not_finite_is_nan(entry: float) -> None:
    weight = torch.stack([torch.eye(3), torch.eye(3)])
    weight[0, 1, 2] = entry
    assert spectral_norm(weight).isnan().tolist() == [True, False]


def test_no_gradient_is_recorded() -> None:
    assert not spectral_norm(torch.eye(2, requires_grad=True)).requires_grad


@pytest.mark.parametrize("shape", [(3,), (0, 3), (2, 3, 0)])
def test_what_is_no_matrix_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="matrices"):
        spectral_norm(torch.zeros(shape))
