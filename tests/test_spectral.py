"""probes/spectral.py: the largest singular value, also of awkward matrices."""

import numpy as np
import pytest
import torch

from probes.spectral import (
    attention_norms,
    power_iteration,
    product_power_iteration,
    spectral_norm,
    start_vector,
)


@pytest.mark.parametrize("shape", [(1, 1), (5, 5), (3, 9), (9, 3), (2, 3, 4, 6)])
def test_it_is_numpys_largest_singular_value(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = np.linalg.svd(weight.numpy(), compute_uv=False)[..., 0]
    # Both are backward stable: a small multiple of the dimension times the rounding unit.
    np.testing.assert_allclose(spectral_norm(weight).numpy(), expected, rtol=10 * max(shape) * 2**-53)


# ---- power iteration


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


# Rounding of float32: two products of at most 40 terms, and norms, an iteration.
NOISE = 100 * 2.0**-24


@pytest.mark.parametrize("gap", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("iterations", [1, 3, 10, 30])
def test_power_iteration_keeps_its_bound(gap: float, iterations: int) -> None:
    matrix, top = planted(3.0, 3.0 * gap, 2.0 * gap, 1.0 * gap)
    start = start_vector(24, torch.device("cpu"))
    cosine = (start.double() @ top).item()
    norm, _ = power_iteration(matrix, start, iterations)
    lost = 1 - (norm.item() / 3.0) ** 2
    assert -NOISE <= lost <= (1 / cosine**2 - 1) * gap ** (4 * iterations) + NOISE


def test_a_warm_start_goes_on_where_the_last_call_stopped() -> None:
    matrix = torch.randn(3, 24, 40, generator=torch.Generator().manual_seed(3))
    start = start_vector(24, torch.device("cpu"))
    straight, vectors = power_iteration(matrix, start, 12)
    _, half = power_iteration(matrix, start, 7)
    resumed, same = power_iteration(matrix, half, 5)
    assert torch.equal(resumed, straight)
    assert torch.equal(same, vectors)


def test_the_norm_of_a_product_is_svds() -> None:
    generator = torch.Generator().manual_seed(5)
    left, right = torch.randn(2, 3, 6, 30, generator=generator)
    norms, _ = product_power_iteration(left, right, start_vector(6, torch.device("cpu")), 200)
    expected = torch.linalg.svdvals(left.mT.double() @ right.double())[..., 0]
    torch.testing.assert_close(norms.double(), expected, rtol=1e-5, atol=0)


def test_norms_of_heads_are_those_of_their_rows() -> None:
    w_q, w_k = torch.randn(2, 2, 16, 16, generator=torch.Generator().manual_seed(7))
    norms, _ = attention_norms(w_q, w_k, 2)
    heads_q, heads_k = w_q.view(2, 2, 8, 16), w_k.view(2, 2, 8, 16)
    torch.testing.assert_close(norms.w_q_head, spectral_norm(heads_q), rtol=0.01, atol=0)
    torch.testing.assert_close(norms.w_k_head, spectral_norm(heads_k), rtol=0.01, atol=0)
    torch.testing.assert_close(norms.qk_head, spectral_norm(heads_q.mT @ heads_k), rtol=0.01, atol=0)


def test_only_the_layer_that_is_not_finite_is_nan_in_power_iteration() -> None:
    w_q = torch.stack([torch.eye(8), torch.eye(8)])
    w_q[1, 0, 0] = torch.inf
    assert attention_norms(w_q, w_q.clone(), 2)[0].w_q.isfinite().tolist() == [True, False]
