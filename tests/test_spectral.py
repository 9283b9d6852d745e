"""probes/spectral.py: the largest singular value, also of awkward matrices."""

import pytest
import torch

from probes.spectral import attention_norms, product_norm, top_singular


def planted(
    *singular_values: float, rows: int = 24, columns: int = 40, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """A float32 matrix with the given leading singular values (zeros follow), and its top left singular vector."""
    generator = torch.Generator().manual_seed(seed)
    count = len(singular_values)
    left = torch.linalg.qr(torch.randn(rows, count, dtype=torch.float64, generator=generator)).Q
    right = torch.linalg.qr(torch.randn(columns, count, dtype=torch.float64, generator=generator)).Q
    matrix = left @ torch.diag(torch.tensor(singular_values, dtype=torch.float64)) @ right.T
    return matrix.float(), left[:, 0]


@pytest.mark.parametrize("gap", [0.5, 0.9, 0.99])
def test_norm_and_left_vector_are_those_of_the_largest_singular_value(gap: float) -> None:
    matrix, left = planted(3.0, 3.0 * gap, 2.0 * gap, 1.0 * gap)
    norm, found = top_singular(matrix)
    assert norm.item() == pytest.approx(3.0, rel=1e-5)
    assert abs(found.double() @ left).item() == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_no_square_overflows_or_vanishes(size: float) -> None:
    matrix = planted(3.0, 1.0)[0]
    assert top_singular(size * matrix)[0].item() == pytest.approx(3.0 * size, rel=1e-5)


def test_the_norm_of_a_product_is_svds() -> None:
    generator = torch.Generator().manual_seed(5)
    left, right = torch.randn(2, 3, 6, 30, generator=generator)
    norms = product_norm(left, right)
    expected = torch.linalg.svdvals(left.mT.double() @ right.double())[..., 0]
    torch.testing.assert_close(norms.double(), expected, rtol=1e-5, atol=0)


def test_norms_are_those_of_the_matrices_and_of_the_heads_rows() -> None:
    w_q, w_k = torch.randn(2, 2, 16, 16, generator=torch.Generator().manual_seed(7))
    norms, _ = attention_norms(w_q, w_k, 2)
    heads_q, heads_k = w_q.view(2, 2, 8, 16), w_k.view(2, 2, 8, 16)
    torch.testing.assert_close(norms.w_q, torch.linalg.matrix_norm(w_q, ord=2), rtol=1e-3, atol=0)
    torch.testing.assert_close(norms.w_k, torch.linalg.matrix_norm(w_k, ord=2), rtol=1e-3, atol=0)
    torch.testing.assert_close(norms.qk_head, torch.linalg.matrix_norm(heads_q.mT @ heads_k, ord=2), rtol=1e-3, atol=0)


def test_only_the_layer_that_is_not_finite_is_nan_() -> None:
    w_q = torch.stack([torch.eye(8), torch.eye(8)])
    w_q[1, 0, 0] = torch.inf
    assert attention_norms(w_q, w_q.clone(), 2)[0].w_q.isfinite().tolist() == [True, False]
