"""exp(S - m) in the three forms of the site ``exponent``, for the PyTorch backends: P_bar from m, P from L, each in the form's own units.

``SubtractFirst`` takes S, and m and L in natural units. ``Fma`` does what our kernels do by default (``softmax.exponential``): it takes
S' = Q K^T without scale, m and L in units of log2, and exp2(fma(S', c, -m)), c = scale log2(e). The fused multiply-add rounds once
at its end, but what it subtracts was rounded to FP32 before: m c is off by up to half a unit in its last place, and so is the
exponent at the row's own maximum, which should be 0. ``SeparateMultiply`` is the same with two roundings, exp2(fp32(S' c) - m), as
PyTorch's copy of FlashAttention-2 has it (``UNFUSE_FMA`` in its softmax.h): at the row's own maximum both are the same number.

What is kept of a row for the backward pass is L, or m and log l apart, or m and 1 / d (sites ``saved_statistics`` and
``backward_probabilities``); tensors hold it as [B, H, T] or
[B, H, 2, T], a tile of rows as [B, H, R, Z], Z = 1 or 2.

Legend: B batch, H heads, T sequence; tiles have R rows and C columns. S [B, H, R, C], m, l and L [B, H, R, 1], float32.
"""

import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from ..numerics import Numerics, folds
from .stabilize import tile_row_max
from .tiles import Problem, Sites


def log2_scale(scale: float) -> float:
    """c = scale log2(e), which kernels take in FP32."""
    return scale / math.log(2)


class Exponent(ABC):
    """What the forms share; each says the unit of m, what its S is and how it takes the difference."""

    _exp: Callable[[Tensor], Tensor]
    log: Callable[[Tensor], Tensor]
    """log l, in the unit of m."""
    _natural: float
    """1 in the unit of m."""

    def __init__(self, problem: Problem, scale: float, c: float):
        """``scale``: S over ``scores``; ``c``: m over the row maximum of ``scores``."""
        self.problem, self._scale, self.c = problem, scale, c

    @abstractmethod
    def scores(self, rows: slice, columns: slice) -> Tensor:
        """S of one tile in this form's unit, masked entries -inf."""

    def row_max(self, s: Tensor, n: Numerics | None = None) -> Tensor:
        """Row normalizer of a tile (``stabilize.tile_row_max``) in the unit of m, before ``statistics``; as ``n`` says, if given."""
        n = n or self.problem.sites.numerics
        return self._rounded(tile_row_max(s, n, scale=self._scale, unit=self.c))

    def _rounded(self, m: Tensor) -> Tensor:
        return self._up(m) if self.problem.sites.numerics.row_max_rounding == "up" else m

    @abstractmethod
    def _up(self, m: Tensor) -> Tensor: ...

    def sinks(self) -> tuple[Tensor, Tensor]:
        """The sinks [H, 1, 1] in the unit of m, and the m, before ``statistics``, that a row has before its first tile."""
        assert self.problem.sinks is not None
        sinks = self.problem.sinks * self._natural
        return sinks, self._rounded(sinks)

    @abstractmethod
    def _difference(self, s: Tensor, m: Tensor) -> Tensor: ...

    def exp(self, s: Tensor, m: Tensor, log_l: Tensor | None = None) -> Tensor:
        """exp(S - m); with L in place of m, or with log l, it is P."""
        difference = self._difference(s, m)
        return self._exp(difference if log_l is None else difference - log_l)

    def rescale(self, m: Tensor, m_new: Tensor) -> Tensor:
        """alpha = exp(m - m')."""
        return self._exp(m - m_new)


class SubtractFirst(Exponent):
    """exp(S - m), the difference first."""

    _exp, log = staticmethod(torch.exp), staticmethod(torch.log)
    _natural = 1.0

    def __init__(self, problem: Problem):
        super().__init__(problem, 1.0, 1.0)

    def scores(self, rows: slice, columns: slice) -> Tensor:
        return self.problem.scores(rows, columns)

    def _up(self, m: Tensor) -> Tensor:
        return (m * math.log2(math.e)).ceil() * math.log(2)

    def _difference(self, s: Tensor, m: Tensor) -> Tensor:
        return s - m


class Fma(Exponent):
    """exp2(fma(S', c, -m)). S' c has at most 48 bits, so that FP64 holds it exactly; rounding the difference to FP64 and then to FP32
    is as good as once near the maximum."""

    _exp, log = staticmethod(torch.exp2), staticmethod(torch.log2)
    _natural = math.log2(math.e)

    def __init__(self, problem: Problem):
        # Rounded to FP32 without a tensor: this runs under the capture of CUDA graphs too.
        (c,) = struct.unpack("f", struct.pack("f", log2_scale(problem.scale)))
        super().__init__(problem, problem.scale, c)

    def scores(self, rows: slice, columns: slice) -> Tensor:
        return self.problem.products(rows, columns)

    def _up(self, m: Tensor) -> Tensor:
        return m.ceil()

    def _difference(self, s: Tensor, m: Tensor) -> Tensor:
        return s.double().mul_(self.c).sub_(m).float()


class SeparateMultiply(Fma):
    """exp2(fp32(S' c) - m): m, L and alpha as ``Fma`` has them, but S' c is rounded before the subtraction, as m was."""

    def _difference(self, s: Tensor, m: Tensor) -> Tensor:
        return s * self.c - m


def exponent_of(problem: Problem) -> Exponent:
    """The form that the numerics of a problem ask for, where it can act."""
    n = problem.sites.numerics
    if n.exponent == "subtract_first" or not folds(n, problem.scale, problem.softcap):
        return SubtractFirst(problem)
    return Fma(problem) if n.exponent == "fma" else SeparateMultiply(problem)


def statistics_to_save(form: Exponent, m: Tensor, row_sum: Tensor, divisor: Tensor, sites: Sites) -> Tensor:
    """What site ``saved_statistics`` keeps of a tile of rows, [B, H, R, Z]: L, or m and log l (1 / d for ``backward_probabilities``)."""
    if sites.numerics.backward_probabilities == "forward":
        return torch.cat((m, 1 / divisor), dim=-1)
    log_l = form.log(row_sum)
    if sites.numerics.saved_statistics == "max_and_sum":
        return torch.cat((m, log_l), dim=-1)
    return sites.logsumexp(m + log_l)


def saved_rows(saved: Tensor, rows: slice) -> Tensor:
    """[B, H, R, Z] of a tile of rows, from [B, H, T] or [B, H, 2, T]."""
    return (saved.unsqueeze(2) if saved.ndim == 3 else saved)[..., rows].transpose(-1, -2)


def probabilities(form: Exponent, s: Tensor, saved_BHRZ: Tensor) -> Tensor:
    """P of a tile [B, H, R, C] as the backward pass makes it again."""
    if form.problem.sites.numerics.backward_probabilities == "unrounded":
        return form.exp(s, *saved_BHRZ.split(1, dim=-1))
    m, inverse = saved_BHRZ.split(1, dim=-1)
    return form.problem.sites.probabilities(form.exp(s, m)) * inverse


def sink_probabilities(form: Exponent, saved_BHRZ: Tensor) -> Tensor:
    """The weight of the sink in each row of a tile, [B, H, R, 1], as the backward pass makes it; it is never rounded."""
    sinks, _ = form.sinks()
    m, *second = saved_BHRZ.split(1, dim=-1)
    if form.problem.sites.numerics.backward_probabilities == "forward":
        return form.rescale(sinks, m) * second[0]
    return form.rescale(sinks - m, second[0]) if second else form.rescale(sinks, m)
