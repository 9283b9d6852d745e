"""What the gradient error of an error of delta is a sum of, and whether it pulls in one direction.

arXiv 2510.04212, equation 3, with error[T] = (delta_lp - delta_hp)[T] and everything else equal:

    dW_Q(hp) - dW_Q(lp) = scale * sum_T error[T] * (P K)[T]^T X[T]

The sum grows in one direction if the outer products (P K)[T]^T X[T] are alike across tokens and steps *and* error[T] has a sign of its own.
With a soft-cap c each P[T, t] carries the factor 1 - (S[T, t] / c)^2 of the gradient.

Legend: B batch, T positions, H heads, D head width, C width of X.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from attention.reference.exact import exact_float32
from probes.capture import LayerCapture
from probes.delta_error import over_groups, under_p


def weighted_keys(layer: LayerCapture) -> Tensor:
    """(P K)[T] for every token, [B, H, T, D] float32: the keys' mean under the P that the backward pass recomputes."""
    return over_groups(layer, lambda group: under_p(layer, group, "k", through_softcap=True))


@dataclass(frozen=True)
class Coherence:
    """Mean over tokens of the outer products (P K)[T]^T X[T], each scaled to norm 1: to be compared across captures."""

    mean_HDC: Tensor
    tokens: int

    @property
    def within_H(self) -> Tensor:
        """Mean cosine of the outer products of two different tokens, [H]: 1 if all are alike up to a positive factor, about 0 if
        they have nothing in common."""
        squared_H = self.mean_HDC.square().sum(dim=(-2, -1))
        return (self.tokens * squared_H - 1) / max(self.tokens - 1, 1)


def coherence(pk_BHTD: Tensor, x_BTC: Tensor) -> Coherence:
    """How alike the outer products are across all tokens of a capture, without a matrix of pairs."""
    with exact_float32(x_BTC.device):
        tokens = x_BTC.shape[0] * x_BTC.shape[1]
        return Coherence(torch.einsum("bhtd,btc->hdc", _unit(pk_BHTD), _unit(x_BTC)) / tokens, tokens)


def cross_coherence(first: Coherence, second: Coherence) -> Tensor:
    """Mean cosine between an outer product of one capture and one of another (other tokens, or another step), [H]."""
    return (first.mean_HDC * second.mean_HDC).sum(dim=(-2, -1))


def _unit(x_XN: Tensor) -> Tensor:
    return torch.nn.functional.normalize(x_XN.float(), dim=-1)
