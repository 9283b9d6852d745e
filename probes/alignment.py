"""Spectral Alignment (Qiu, You, Tan, Wang, Yao, arXiv 2510.04202): inputs of a layer against the top singular vector of its weight.

Taken from the paper's abstract: the metric is the *distribution*, over a batch, of the alignment between a layer's inputs and the
principal singular vectors of its weight, and a collapse of the signs of that distribution ("sign diversity") comes early before
a loss explosion. Taken from later descriptions of it: the alignment is the cosine. Not established here, because the full text was
not read: whether the paper aligns the input with the input-side vector (as here) or the layer's response with the
output-side one. For the top pair the signs are the same, because (W x) . u = sigma (x . v) exactly: the sign diversity is equal and the
cosines differ by a positive factor per token.

How sign diversity is condensed to one number is a choice of this module, as is any threshold on it.

Legend: B batch, T positions, C width of the input; X any leading dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attention.reference.exact import exact_float32


def spectral_alignment(x_XBTC: Tensor, v_XC: Tensor) -> Tensor:
    """cos(x[T], v) of every token with the input-side top singular vector, [..., B, T] in -1 .. 1; 0 for a zero input.

    X are any leading dimensions, layers side by side for example, or none.
    """
    x_XBTC, v_XC = (torch.nn.functional.normalize(y.float(), dim=-1) for y in (x_XBTC, v_XC))
    with exact_float32(x_XBTC.device):
        return (x_XBTC @ v_XC[..., None, :, None]).squeeze(-1)


def sign_diversity(alignment_XBT: Tensor) -> Tensor:
    """2 * (share of the rarer sign), [...]: 1 where half of the tokens align either way, 0 where all have one sign.

    Independent of the arbitrary common sign of a singular pair. Zeros have no sign; NaN where no token has one.
    """
    positive_X, negative_X = ((sign * alignment_XBT > 0).sum(dim=(-2, -1)) for sign in (1, -1))
    return 2 * torch.minimum(positive_X, negative_X) / (positive_X + negative_X)
