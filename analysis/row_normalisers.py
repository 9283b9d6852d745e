"""Other normalisers of softmax rows than Algorithm 3's, and what each does to O and delta: arXiv 2510.04212, appendix C, on rows made here.

A row has scores S and values V; in exact arithmetic O = softmax(S) V whatever the normaliser m. Here m, P_bar = exp(S - m), l, P_bar V
and O are rounded as ``Numerics`` says, in one tile, and O is held against softmax(S) V in FP64 with the same rounded S and V: what S
itself lost does not count. The definitions of the variants are ours, after the names that the appendix's arguments have.

Legend: N rows, K keys, D head dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attention.exact import exact_float32
from attention.numerics import Numerics
from attention.rounding import round_to
from attention.tiles import multiply

LEAST_NORMAL = 2.0**-126
"""Of FP32 and BF16: GPU kernels flush what is below."""
_MANTISSA = 7


@dataclass(frozen=True, kw_only=True)
class Normaliser:
    """m of a row with maximum r: ``positive`` r + ``offset`` if r > 0, ``negative`` r + ``offset`` else; at most r + ``cap``.

    Only in rows where the maximum is repeated to ``tolerance``; m = r in the others. In all rows where ``tolerance`` is None.
    Algorithm 3 has positive = beta, negative = 0 (m = 0), offset = 0. The defaults are the plain m = r.
    """

    positive: float = 1.0
    negative: float = 1.0
    offset: float = 0.0
    tolerance: float | None = 1e-3
    cap: float = math.inf

    def __call__(self, scores_NK: Tensor) -> Tensor:
        """m [N, 1], not yet rounded."""
        row_max = scores_NK.amax(dim=-1, keepdim=True)
        factor = torch.where(row_max > 0, self.positive - 1, self.negative - 1)
        shifted = row_max + (factor * row_max + self.offset).clamp(max=self.cap)
        if self.tolerance is None:
            return shifted
        close_NK = scores_NK >= row_max - self.tolerance
        return torch.where(close_NK.sum(dim=-1, keepdim=True) > 1, shifted, row_max)


@dataclass(frozen=True)
class Outcome:
    """O as handed on [N, D] float32, which rows left the range (each [N] bool, one of the three at most), and how many P_bar are 1."""

    o_ND: Tensor
    nonfinite_N: Tensor
    """O has an infinity or NaN."""
    zero_N: Tensor
    """O is 0 in every feature, silently."""
    subnormal_N: Tensor
    """O is neither, but every P_bar is below the least normal number: a kernel on a GPU makes zeros of them."""
    ones_N: Tensor
    """int64: P_bar that are exactly 1 as P_bar V reads them."""

    @property
    def inside_N(self) -> Tensor:
        return ~(self.nonfinite_N | self.zero_N | self.subnormal_N)


def attend(scores_NK: Tensor, v_NKD: Tensor, numerics: Numerics, normaliser: Normaliser) -> Outcome:
    """O of rows whose rounded scores and values are given (float32, no zero rows in V), all keys in one tile.

    The forward pass of ``flash_reference`` with ``exponent=subtracted`` and another row maximum; ``numerics`` is concrete.
    """
    with exact_float32(scores_NK.device):
        m = round_to(normaliser(scores_NK), numerics.statistics)
        p_bar_NK = torch.exp(scores_NK - m)
        row_sum = round_to(p_bar_NK.sum(dim=-1, keepdim=True), numerics.statistics)
        weights_NK = round_to(p_bar_NK, numerics.probabilities)
        product_ND = multiply(weights_NK[:, None], v_NKD, numerics.products)[:, 0]
        o_bar_ND = round_to(round_to(product_ND, numerics.tile_product), numerics.accumulator)
        o_ND = round_to(o_bar_ND / row_sum, numerics.output)
    nonfinite_N = ~o_ND.isfinite().all(dim=-1)
    zero_N = (o_ND == 0).all(dim=-1)
    subnormal_N = (p_bar_NK.amax(dim=-1) < LEAST_NORMAL) & ~nonfinite_N & ~zero_N
    return Outcome(o_ND, nonfinite_N, zero_N, subnormal_N, (weights_NK == 1).sum(dim=-1))


def exact(scores_NK: Tensor, v_NKD: Tensor) -> Tensor:
    """O [N, D] in FP64."""
    return (torch.softmax(scores_NK.double(), dim=-1)[:, None] @ v_NKD.double())[:, 0]


def errors_in_units(o_ND: Tensor, exact_ND: Tensor) -> Tensor:
    """O - exact, float64, in units of the last place that BF16 has at the exact value."""
    unit_ND = torch.ldexp(torch.ones_like(exact_ND), torch.frexp(exact_ND).exponent - 1 - _MANTISSA)
    return (o_ND.double() - exact_ND) / unit_ND


@dataclass(frozen=True)
class Mean:
    """Of errors: is there a bias? Rows with one row maximum share the rounding of exp(r - m), so they are one draw together."""

    mean: float
    standard_error: float
    """From the spread of the means of rows with one row maximum; NaN for fewer than two."""
    n: int
    """Row maxima with a row left to count."""


def mean_by_maximum(error_N: Tensor, inside_N: Tensor, maxima: int) -> Mean:
    """Mean over rows inside the range; row i has maximum number i % ``maxima``."""
    weight = inside_N.reshape(-1, maxima).double()
    total = torch.where(inside_N, error_N.double(), 0.0).reshape(-1, maxima).sum(dim=0)
    count = weight.sum(dim=0)
    means = (total / count)[count > 0]
    n = len(means)
    if not n:
        return Mean(math.nan, math.nan, 0)
    spread = means.std().item() / n**0.5 if n > 1 else math.nan
    return Mean(means.mean().item(), spread, n)
