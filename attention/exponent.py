"""exp(S - m) in the two forms of the site ``exponent``, for the PyTorch backends: P_bar from m, P from L, each in the form's own units.

``Subtracted`` takes S, and m and L in natural units. ``Folded`` does what most flash kernels do (``triton_numerics.exponential``): it takes
S' = Q K^T without scale, m and L in units of log2, and exp2(fma(S', c, -m)), c = scale log2(e). The fused multiply-add rounds once
at its end, but what it subtracts was rounded to FP32 before: m c is off by up to half a unit in its last place, and so is the
exponent at the row's own maximum, which should be 0.

Legend: B batch, H heads; tiles have R rows and C columns. S [B, H, R, C], m, l and L [B, H, R, 1], float32.
"""

from __future__ import annotations

import math
import struct
from typing import Protocol

import torch
from torch import Tensor

from attention.numerics import folds
from attention.stabilise import tile_row_max
from attention.tiles import Problem


def log2_scale(scale: float) -> float:
    """c = scale log2(e), which kernels take in FP32."""
    return scale / math.log(2)


class Exponent(Protocol):
    """What both directions ask of a form."""

    def scores(self, rows: slice, columns: slice) -> Tensor:
        """S of one tile in this form's unit, masked entries -inf."""

    def row_max(self, s: Tensor) -> Tensor:
        """Row normaliser of a tile (``stabilise.tile_row_max``) in the unit of m, before ``statistics``."""

    def exp(self, s: Tensor, m: Tensor) -> Tensor:
        """exp(S - m); with L in place of m it is P."""

    def rescale(self, m: Tensor, m_new: Tensor) -> Tensor:
        """alpha = exp(m - m')."""

    def logsumexp(self, m: Tensor, row_sum: Tensor) -> Tensor:
        """L = m + log l in the unit of m, before ``logsumexp``."""


class Subtracted:
    """exp(S - m), the difference first."""

    def __init__(self, problem: Problem):
        self.problem = problem

    def scores(self, rows: slice, columns: slice) -> Tensor:
        return self.problem.scores(rows, columns)

    def row_max(self, s: Tensor) -> Tensor:
        return tile_row_max(s, self.problem.sites.numerics)

    def exp(self, s: Tensor, m: Tensor) -> Tensor:
        return torch.exp(s - m)

    def rescale(self, m: Tensor, m_new: Tensor) -> Tensor:
        return torch.exp(m - m_new)

    def logsumexp(self, m: Tensor, row_sum: Tensor) -> Tensor:
        return m + torch.log(row_sum)


class Folded:
    """exp2(fma(S', c, -m)). S' c has at most 48 bits, so that FP64 holds it exactly; rounding the difference to FP64 and then to FP32
    is as good as once near the maximum."""

    def __init__(self, problem: Problem):
        self.problem = problem
        # Rounded to FP32 without a tensor: this runs under the capture of CUDA graphs too.
        (self.c,) = struct.unpack("f", struct.pack("f", log2_scale(problem.scale)))

    def scores(self, rows: slice, columns: slice) -> Tensor:
        return self.problem.products(rows, columns)

    def row_max(self, s: Tensor) -> Tensor:
        return tile_row_max(s, self.problem.sites.numerics, scale=self.problem.scale, unit=self.c)

    def exp(self, s: Tensor, m: Tensor) -> Tensor:
        return torch.exp2(s.double().mul_(self.c).sub_(m).float())

    def rescale(self, m: Tensor, m_new: Tensor) -> Tensor:
        return torch.exp2(m - m_new)

    def logsumexp(self, m: Tensor, row_sum: Tensor) -> Tensor:
        return m + torch.log2(row_sum)


def exponent_of(problem: Problem) -> Exponent:
    """The form that the numerics of a problem ask for, where it can act."""
    n = problem.sites.numerics
    folded = n.exponent == "folded" and folds(n, problem.scale, problem.softcap)
    return Folded(problem) if folded else Subtracted(problem)
