"""The gradient error that an error of delta makes: a sum of rank-1 matrices, and whether they pull in one direction.

arXiv 2510.04212, equations 2 and 3. With error[T] = (delta_lp - delta_hp)[T], everything else equal,

    dQ(hp)[T] - dQ(lp)[T]   = scale * error[T] * (P K)[T]
    dW_Q(hp) - dW_Q(lp)     = scale * sum_T error[T] * (P K)[T]^T X[T]

The sum grows in one direction if the outer products (P K)[T]^T X[T] are alike across tokens and steps *and* error[T] has a
sign of its own. With a soft-cap c each P[T, t] carries the factor 1 - (S[T, t] / c)^2 of the gradient. With QK-norm the same holds
for the gradient with respect to the normed q, and W_Q lies behind the norm: "dW_Q" below is then not W_Q's.

Legend: B batch, T positions, H heads, D head width, C width of X, N = B * T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attention.plan import HeadGroup
from attention.reference.exact import exact_float32
from attention.reference.exponent import exponent_of, probabilities, saved_rows
from attention.reference.tiles import FORMAT_OF
from probes.capture import LayerCapture
from probes.delta_error import (
    effective_numerics,
    forward_pass,
    high_output,
    over_groups,
    problem_of,
)


def weighted_keys(layer: LayerCapture) -> Tensor:
    """(P K)[T] for every token, [B, H, T, D] float32: the keys' mean under the P that the backward pass recomputes."""
    return over_groups(layer, lambda group: _weighted_keys(layer, group))


@torch.no_grad()
def _weighted_keys(layer: LayerCapture, group: HeadGroup) -> Tensor:
    numerics = effective_numerics(group)
    saved = forward_pass(layer, group, numerics)[2]
    with exact_float32(layer.q_BTHD.device):
        problem = problem_of(layer, group, numerics)
        exponent = exponent_of(problem)
        sums = []
        for rows in problem.row_tiles():
            total = torch.zeros_like(problem.k[:, :, rows])
            for columns in problem.column_tiles(rows):
                s = exponent.scores(rows, columns)
                p = problem.through_softcap(probabilities(exponent, s, saved_rows(saved, rows)), s)
                total += p @ problem.k[:, :, columns]
            sums.append(total)
        return torch.cat(sums, dim=2)


def predicted_dw_q_error(error_BHT: Tensor, pk_BHTD: Tensor, x_BTC: Tensor, scale: float) -> Tensor:
    """dW_Q(hp) - dW_Q(lp) of each head by equation 3, [H, D, C] float32 (rows as in ``c_attn.weight``)."""
    with exact_float32(x_BTC.device):
        weighted_BHTD = scale * error_BHT[..., None].float() * pk_BHTD
        return _outer_sum(weighted_BHTD, x_BTC)


def high_dw_q(layer: LayerCapture, *, high_BHTD: Tensor | None = None) -> Tensor:
    """dW_Q of each head with delta from the high-precision O, [H, D, C] float32: what an error is to be compared with.

    ``high_BHTD``: that O, where it is known (``delta_error.high_outputs``).
    """

    def dq(group: HeadGroup) -> Tensor:
        o_BHTD = high_output(layer, group) if high_BHTD is None else high_BHTD[:, list(group.heads)]
        return _dq(layer, group, o_BHTD.transpose(1, 2))

    with exact_float32(layer.x_BTC.device):
        return _outer_sum(over_groups(layer, dq), layer.x_BTC)


@torch.no_grad()
def _dq(layer: LayerCapture, group: HeadGroup, o_BTHD: Tensor) -> Tensor:
    """dQ of a group [B, H, T, D] float32, with this O inside delta = rowsum(dO * O) and dS unrounded, so that equation 3 is exact."""
    numerics = effective_numerics(group)
    saved = forward_pass(layer, group, numerics)[2]
    # FP32 tensors with the input's format at the sites: dQ comes back in the dtype of q, and is not to be rounded.
    sites = numerics.with_sites({"delta": "rowsum_do_o", "delta_output": "output", "score_gradients": "fp32"})
    key = sites.concrete(FORMAT_OF[layer.q_BTHD.dtype]).key()
    q, k, v, _, do = (x.float() for x in layer.heads(group))
    operator = torch.ops.attention.flash_reference_backward
    o_BTHD = o_BTHD.float().contiguous()
    return operator(do, q, k, v, o_BTHD, o_BTHD.new_empty(0), saved, key, layer.scale, True, layer.softcap)[
        0
    ].transpose(1, 2)


def _outer_sum(rows_BHTD: Tensor, x_BTC: Tensor) -> Tensor:
    """sum over tokens of rows[T]^T x[T], [H, D, C] float32."""
    return torch.einsum("bhtd,btc->hdc", rows_BHTD.float(), x_BTC.float())


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
        return Coherence(_outer_sum(_unit(pk_BHTD), _unit(x_BTC)) / tokens, tokens)


def cross_coherence(first: Coherence, second: Coherence) -> Tensor:
    """Mean cosine between an outer product of one capture and one of another (other tokens, or another step), [H]."""
    return (first.mean_HDC * second.mean_HDC).sum(dim=(-2, -1))


def _unit(x_XN: Tensor) -> Tensor:
    return torch.nn.functional.normalize(x_XN.float(), dim=-1)
