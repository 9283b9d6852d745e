"""Spectral Alignment (Qiu, You, Tan, Wang, Yao, arXiv 2510.04202): inputs of a layer against the top singular vector of its weight.

Taken from the paper's abstract: the metric is the *distribution*, over a batch, of the alignment between a layer's inputs and the
principal singular vectors of its weight, and a collapse of the signs of that distribution ("sign diversity") comes early before
a loss explosion. Taken from later descriptions of it: the alignment is the cosine. Not established here, because the full text was
not read: whether the paper aligns the input with the input-side vector (as here) or the layer's response with the
output-side one. For the top pair the signs are almost the same thing, because (W x) . u = sigma (x . v) exactly, so the sign
diversity is equal and the cosines differ by a positive factor per token; ``response_alignment`` gives the other form.

How sign diversity is condensed to one number is a choice of this module, as is any threshold on it.

Legend: B batch, T positions, C width of the input, M width of the output; X any leading dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attention.reference.exact import exact_float32


@torch.no_grad()
def top_singular_vectors(weight_XMC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Largest singular value [...], its output-side vector u [..., M] and input-side vector v [..., C]: W v = sigma u.

    Exact, by the eigenvectors of W^T W in FP64; float32 unless the weight is float64. ``weight_XMC`` is laid out as
    ``nn.Linear.weight``. The pair (u, v) is defined up to a common sign; here v's entry of largest size is positive, so that
    the same weight gives the same sign. For a zero matrix u is zero. Raises ``ValueError`` for a weight that is not finite.
    """
    if not bool(weight_XMC.isfinite().all()):
        raise ValueError("top_singular_vectors: the weight has entries that are not finite")
    weight = weight_XMC.double()
    v_XC = torch.linalg.eigh(weight.mT @ weight).eigenvectors[..., -1]
    largest_X1 = v_XC.abs().argmax(dim=-1, keepdim=True)
    v_XC = v_XC * torch.where(v_XC.gather(-1, largest_X1) < 0, -1.0, 1.0)
    wv_XM = (weight @ v_XC[..., None])[..., 0]
    sigma_X = wv_XM.norm(dim=-1)
    u_XM = wv_XM / torch.where(sigma_X > 0, sigma_X, 1.0)[..., None]
    dtype = torch.float64 if weight_XMC.dtype == torch.float64 else torch.float32
    return sigma_X.to(dtype), u_XM.to(dtype), v_XC.to(dtype)


def spectral_alignment(x_XBTC: Tensor, v_XC: Tensor) -> Tensor:
    """cos(x[T], v) of every token with the input-side top singular vector, [..., B, T] in -1 .. 1; 0 for a zero input.

    X are any leading dimensions, layers side by side for example, or none.
    """
    x_XBTC, v_XC = (torch.nn.functional.normalize(y.float(), dim=-1) for y in (x_XBTC, v_XC))
    with exact_float32(x_XBTC.device):
        return (x_XBTC @ v_XC[..., None, :, None]).squeeze(-1)


def response_alignment(x_BTC: Tensor, weight_MC: Tensor, u_M: Tensor) -> Tensor:
    """cos(W x[T], u) of every token with the output-side top singular vector, [B, T]: the other reading of the paper."""
    return spectral_alignment(x_BTC.float() @ weight_MC.float().T, u_M)


def sign_diversity(alignment_XBT: Tensor) -> Tensor:
    """2 * (share of the rarer sign), [...]: 1 where half of the tokens align either way, 0 where all have one sign.

    Independent of the arbitrary common sign of a singular pair. Zeros have no sign; NaN where no token has one.
    """
    positive_X, negative_X = ((sign * alignment_XBT > 0).sum(dim=(-2, -1)) for sign in (1, -1))
    return 2 * torch.minimum(positive_X, negative_X) / (positive_X + negative_X)
