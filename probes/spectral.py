"""Spectral norms of weight matrices: the tell-tale of the failure is the growth of one layer's W_Q.

``spectral_norm`` is exact and costs an eigensolver. ``power_iteration`` and ``product_power_iteration`` start from the vectors of an
earlier call and cost a few matrix-vector products: what a probe of a training run can pay for.

Legend: L layers, H heads, D head width, C width (n_embd); X any leading dimensions, M and N rows and columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from attention.reference.exact import exact_float32

FRESH_ITERATIONS, WARM_ITERATIONS = 100, 10
"""Power iterations from a vector that knows nothing, and from that of a probe some steps ago (see ``power_iteration`` for the errors)."""


@torch.no_grad()
def spectral_norm(weight_XMN: Tensor) -> Tensor:
    """Largest singular value of each matrix, exact (no power iteration).

    The largest singular value is the root of the largest eigenvalue of the Gram matrix of the shorter side. In double that
    costs no accuracy at this end of the spectrum (relative error of the order of 1e-15) and takes about half the time of
    an SVD (768 x 768 on one core: 0.17 s). Each matrix is scaled by its largest entry first, so that no square overflows
    or underflows.

    Args:
        weight_XMN: real matrices [..., M, N] of any floating dtype, M and N at least 1.

    Returns:
        [...], float64 for float64 input, else float32. NaN for a matrix with an entry that is not finite: a diverged run
        must still be able to say so (LAPACK would raise).

    Raises:
        ValueError: fewer than two dimensions, or an empty matrix.
    """
    if weight_XMN.ndim < 2 or 0 in weight_XMN.shape[-2:]:
        raise ValueError(f"spectral_norm needs matrices [..., M, N], got shape {tuple(weight_XMN.shape)}")
    matrices_XMN = weight_XMN.double()
    finite_X = matrices_XMN.isfinite().all(dim=-1).all(dim=-1)
    matrices_XMN = torch.where(finite_X[..., None, None], matrices_XMN, 0.0)
    largest_X = matrices_XMN.abs().amax(dim=(-2, -1))
    scale_X = torch.where(largest_X > 0, largest_X, 1.0)
    matrices_XMN = matrices_XMN / scale_X[..., None, None]
    if matrices_XMN.shape[-2] > matrices_XMN.shape[-1]:
        matrices_XMN = matrices_XMN.mT
    eigenvalues_XM = torch.linalg.eigvalsh(matrices_XMN @ matrices_XMN.mT)
    norm_X = scale_X * eigenvalues_XM[..., -1].clamp(min=0).sqrt()
    norm_X = torch.where(finite_X, norm_X, torch.nan)
    return norm_X if weight_XMN.dtype == torch.float64 else norm_X.float()


def start_vector(length: int, device: torch.device) -> Tensor:
    """A fixed unit vector of normal deviates, [length] float32: the same on every device, and no global generator moves."""
    drawn_N = torch.randn(length, generator=torch.Generator("cpu").manual_seed(0))
    return normalize(drawn_N, dim=0).to(device)


@torch.no_grad()
def power_iteration(weight_XMN: Tensor, start_XM: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """Estimate of each matrix's largest singular value by power iteration on W W^T.

    The estimate |W^T y| of a unit y is never above the norm (but for FP32's rounding) and never falls from one iteration to the
    next. With theta the angle between ``start_XM`` and the top left singular vector, and s1 > s2 the two largest singular values,

        1 - (estimate / s1)^2 <= tan^2(theta) * (s2 / s1)^(4 * iterations)       (Golub & Van Loan, Matrix Computations, 8.2.1)

    so that a matrix whose norm stands out, as that of a failing layer does, is exact to FP32 noise in a few iterations. Without any gap
    the mean over random starts of 1 - (estimate / s1)^2 is at most 0.871 ln(M) / (iterations - 1) (Kuczynski & Wozniakowski, SIAM J. Matrix
    Anal. Appl. 13, 1992, theorem 3.1).

    Args:
        weight_XMN: float32 matrices [..., M, N].
        start_XM: [..., M], or what broadcasts to it: ``start_vector(M)`` on first use, later the vectors of the last call. Not 0.
        iterations: products with W W^T; at least 1.

    Returns:
        (norms [...], unit vectors [..., M] to go on from). A matrix that is not finite gives NaN, and a vector not to go on from.
    """
    y_XM = start_XM.expand(weight_XMN.shape[:-1])
    for _ in range(iterations):
        z_XN = (weight_XMN.mT @ y_XM[..., None]).squeeze(-1)
        # Normalized twice an iteration: no square overflows before the norm itself has passed 1e19.
        y_XM = (weight_XMN @ normalize(z_XN, dim=-1)[..., None]).squeeze(-1)
        y_XM = normalize(y_XM, dim=-1)
    norm_X = torch.linalg.vector_norm((weight_XMN.mT @ y_XM[..., None]).squeeze(-1), dim=-1)
    return norm_X, y_XM


@torch.no_grad()
def product_power_iteration(
    left_XDC: Tensor, right_XDC: Tensor, start_XD: Tensor, iterations: int
) -> tuple[Tensor, Tensor]:
    """As ``power_iteration``, for M = left^T right [..., C, C] of rank D, which is never formed.

    Iterates y -> G_left G_right y [..., D] with G_left = left left^T and G_right = right right^T: the vector left^T y goes through M M^T
    meanwhile. The estimate is |M^T u| for the unit vector u along left^T y.

    Args:
        left_XDC, right_XDC: float32, for example the D rows of a head of W_Q and of W_K: q . k = x^T (W_Q^T W_K) x'.
        start_XD: [..., D] or what broadcasts to it; not 0.
        iterations: at least 1.

    Returns:
        (norms [...], vectors [..., D] to go on from).
    """
    gram_left_XDD, gram_right_XDD = left_XDC @ left_XDC.mT, right_XDC @ right_XDC.mT
    y_XD = start_XD.expand(left_XDC.shape[:-1])
    for _ in range(iterations):
        through_XD = normalize((gram_left_XDD @ y_XD[..., None]).squeeze(-1), dim=-1)
        y_XD = normalize((gram_right_XDD @ through_XD[..., None]).squeeze(-1), dim=-1)
    # |left^T y|^2 = y . G_left y and |M^T (left^T y)|^2 = |right^T (G_left y)|^2.
    through_XD = (gram_left_XDD @ y_XD[..., None]).squeeze(-1)
    length_X = (y_XD * through_XD).sum(dim=-1).sqrt()
    image_XC = (right_XDC.mT @ through_XD[..., None]).squeeze(-1)
    return torch.linalg.vector_norm(image_XC, dim=-1) / length_X.clamp(min=torch.finfo(torch.float32).tiny), y_XD


class SpectralState(NamedTuple):
    """Vectors to go on from: W_Q and W_K whole [2, L, C], their heads [2, L, H, D], W_Q^T W_K of each head [L, H, D]."""

    whole: Tensor
    heads: Tensor
    products: Tensor


class SpectralNorms(NamedTuple):
    """Spectral norms, float32: of W_Q and W_K [L], of each head's rows [L, H], and of W_Q^T W_K of each head [L, H]."""

    w_q: Tensor
    w_k: Tensor
    w_q_head: Tensor
    w_k_head: Tensor
    qk_head: Tensor


@torch.no_grad()
def attention_norms(
    w_q_LCC: Tensor, w_k_LCC: Tensor, n_head: int, state: SpectralState | None = None
) -> tuple[SpectralNorms, SpectralState]:
    """All spectral norms of the query and key weights: a pure function of the weights and of the last call's state.

    Args:
        w_q_LCC, w_k_LCC: float32 [L, C, C]; rows h * D .. (h + 1) * D are head h.
        n_head: H.
        state: of the last call; None starts afresh, with ``FRESH_ITERATIONS`` in place of ``WARM_ITERATIONS``.
    """
    L, C, _ = w_q_LCC.shape
    D = C // n_head
    whole_2LCC = torch.stack([w_q_LCC, w_k_LCC])
    heads_2LHDC = whole_2LCC.view(2, L, n_head, D, C)
    iterations = FRESH_ITERATIONS if state is None else WARM_ITERATIONS
    if state is None:
        long_C, short_D = start_vector(C, w_q_LCC.device), start_vector(D, w_q_LCC.device)
        state = SpectralState(long_C, short_D, short_D)
    with exact_float32(w_q_LCC.device):
        whole_2L, next_whole = power_iteration(whole_2LCC, state.whole, iterations)
        heads_2LH, next_heads = power_iteration(heads_2LHDC, state.heads, iterations)
        qk_LH, next_products = product_power_iteration(heads_2LHDC[0], heads_2LHDC[1], state.products, iterations)
    norms = SpectralNorms(whole_2L[0], whole_2L[1], heads_2LH[0], heads_2LH[1], qk_LH)
    return norms, SpectralState(next_whole, next_heads, next_products)
