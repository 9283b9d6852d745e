"""Spectral norms of weight matrices: the tell-tale of the failure is the growth of one layer's W_Q.

They cost a few matrix products, which a probe of a training run can pay for; an SVD waits.

Legend: L layers, H heads, D head width, C width (n_embd); X any leading dimensions, M and N rows and columns.
"""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from attention.reference.exact import exact_float32

SQUARINGS = 8
"""2^8 = 256 power iterations: random 768 x 768 matrices, which have hardly a gap, are exact to 3e-4."""
TINY = torch.finfo(torch.float32).tiny


def dominant(matrix_XMM: Tensor) -> Tensor:
    """Unit eigenvectors [..., M] of the largest eigenvalues, by 2^SQUARINGS power iterations from a fixed vector of normal deviates.

    Each squaring doubles the iterations that a product with the matrix stands for. With theta the angle between start and eigenvector
    and e1 > e2 the two largest eigenvalues, tan(theta) falls by (e2 / e1)^256. NaN for a matrix that is not finite.
    """
    M = matrix_XMM.shape[-1]
    start_M = torch.randn(M, generator=torch.Generator().manual_seed(0)).to(matrix_XMM.device)
    for _ in range(SQUARINGS):
        matrix_XMM = matrix_XMM / matrix_XMM.abs().amax(dim=(-2, -1), keepdim=True).clamp(min=TINY)
        matrix_XMM = matrix_XMM @ matrix_XMM
    return normalize(matrix_XMM @ start_M, dim=-1)


@torch.no_grad()
def spectral_norm(weight_XMN: Tensor) -> Tensor:
    """Largest singular values [...] of float32 matrices, never above the true ones but for rounding.

    A matrix that is not finite has a norm that is not.
    """
    scale_X11 = weight_XMN.abs().amax(dim=(-2, -1), keepdim=True).clamp(min=TINY)  # no square overflows
    weight_XMN = weight_XMN / scale_X11
    y_XM = dominant(weight_XMN @ weight_XMN.mT)
    norm_X = torch.linalg.vector_norm((weight_XMN.mT @ y_XM[..., None]).squeeze(-1), dim=-1)
    return norm_X * scale_X11[..., 0, 0]


@torch.no_grad()
def product_norm(left_XDC: Tensor, right_XDC: Tensor) -> Tensor:
    """As ``spectral_norm``, [...], of M = left^T right [..., C, C] of rank D, which is never formed.

    For example the D rows of a head of W_Q and of W_K: q . k = x^T (W_Q^T W_K) x'. With G the Gram matrix of the rows of each, left^T y is
    a left singular vector of M where y is an eigenvector of G_right G_left; the norm is |M^T u| for u along it.
    """
    # No square over- or underflows. Powers of 2: the norms of ordinary weights keep their bits.
    scale_left_X11, scale_right_X11 = (_power_of_2(x_XDC) for x_XDC in (left_XDC, right_XDC))
    left_XDC, right_XDC = left_XDC / scale_left_X11, right_XDC / scale_right_X11
    gram_left_XDD, gram_right_XDD = left_XDC @ left_XDC.mT, right_XDC @ right_XDC.mT
    y_XD = dominant(gram_right_XDD @ gram_left_XDD)
    # |left^T y|^2 = y . G_left y and |M^T (left^T y)|^2 = |right^T (G_left y)|^2.
    through_XD = (gram_left_XDD @ y_XD[..., None]).squeeze(-1)
    length_X = (y_XD * through_XD).sum(dim=-1).sqrt()
    image_XC = (right_XDC.mT @ through_XD[..., None]).squeeze(-1)
    norm_X = torch.linalg.vector_norm(image_XC, dim=-1) / length_X.clamp(min=TINY)
    return norm_X * scale_left_X11[..., 0, 0] * scale_right_X11[..., 0, 0]


def _power_of_2(matrix_XMN: Tensor) -> Tensor:
    """The one above the largest entry's magnitude, [..., 1, 1]."""
    largest_X11 = matrix_XMN.abs().amax(dim=(-2, -1), keepdim=True).clamp(min=TINY)
    return largest_X11 / largest_X11.frexp().mantissa


@torch.no_grad()
def attention_norms(w_q_LCC: Tensor, w_k_LKC: Tensor, n_head: int) -> dict[str, Tensor]:
    """Spectral norms, float32: ``w_q_norm``, ``w_k_norm`` [L], and of W_Q^T W_K of each head, ``qk_head_norm`` [L, H].

    Rows h * D .. (h + 1) * D are head h. ``n_head``: H.
    """
    L, C, _ = w_q_LCC.shape
    heads_q_LHDC, heads_k_LHDC = (w.view(L, -1, C // n_head, C) for w in (w_q_LCC, w_k_LKC))
    heads_k_LHDC = heads_k_LHDC.repeat_interleave(n_head // heads_k_LHDC.shape[1], dim=1)  # of each head of queries
    with exact_float32(w_q_LCC.device):
        norms = {"w_q_norm": spectral_norm(w_q_LCC), "w_k_norm": spectral_norm(w_k_LKC)}
        return norms | {"qk_head_norm": product_norm(heads_q_LHDC, heads_k_LHDC)}
