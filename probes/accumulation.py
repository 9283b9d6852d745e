"""How the error of O_bar builds up along the keys of one row (arXiv 2510.04212, Figure 6), and what it needs: P_bar = 1, V of one sign.

P_bar[t] = exp(S[T, t] - m[T]), rounded to the format that P V reads. Two P_bar of exactly 1 with values V in one binade
add up to a number one bit longer than the format holds; the other keys decide how it is rounded.

Legend: B batch, T positions (queries), S positions (keys), H heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attention.plan import HeadGroup
from attention.reference.exact import exact_float32
from attention.reference.exponent import exponent_of
from attention.reference.stabilize import tile_row_max
from attention.reference.tiles import Problem
from attention.rounding import round_to
from probes.capture import LayerCapture
from probes.delta_error import effective_numerics, group_of, over_groups, problem_of

TIE_TOLERANCES = {"exact": 0.0, "1e-3": 1e-3, "2^-9": 2.0**-9}
"""A score this close to its row's maximum repeats it. 2^-9 is where P_bar still rounds to 1 in BF16."""

_ROWS = 256


@dataclass(frozen=True)
class Accumulation:
    """One row's sum over its keys t = 0 .. T for one feature; each field [S] with S = T + 1."""

    p_bar_S: Tensor
    """Rounded as P V reads it."""
    v_S: Tensor
    low_S: Tensor
    """Sum over the keys so far, rounded."""
    high_S: Tensor
    """The same of the unrounded P_bar, in FP64."""
    one_S: Tensor
    """bool: P_bar is 1 after rounding."""

    @property
    def error_S(self) -> Tensor:
        """O_bar(lp) - O_bar(hp) over the keys so far (Figure 6a)."""
        return self.low_S - self.high_S


@torch.no_grad()
def accumulate(layer: LayerCapture, batch: int, head: int, token: int, feature: int) -> Accumulation:
    """The cumulative error of O_bar[token, feature] along the key axis. No tiles: m is the whole row's normalizer.

    The sum so far comes from an FP64 accumulation of P_bar as P V reads it, rounded once to the format of the layer's output: what
    would be passed on if the keys ended here. S is rounded as the layer's numerics say, and subtracted first in the exact sum alone.

    Raises:
        ValueError: an index that the capture does not have.
    """
    B, T, H, D = layer.q_BTHD.shape
    for name, index, size in (("batch", batch, B), ("head", head, H), ("token", token, T), ("feature", feature, D)):
        if not 0 <= index < size:
            raise ValueError(f"{name} {index}: the capture has 0 to {size - 1}")
    group = group_of(layer, head)
    numerics = effective_numerics(group)
    with exact_float32(layer.q_BTHD.device):
        problem = problem_of(layer, group, numerics)
        position = group.heads.index(head)
        rows, columns = slice(token, token + 1), slice(0, token + 1)
        s_S = problem.scores(rows, columns)[batch, position, 0]
        exact_S = torch.exp(s_S.double() - tile_row_max(s_S[None], problem.sites.numerics)[0].double())
        # Stochastic rounding asks for the place of a value among all heads.
        p_bar_S = _p_bar(problem, rows, columns, layer.rounding_seed)[batch, position, 0]
        v_S = problem.v[batch, position, : token + 1, feature]
    high_S = torch.cumsum(exact_S * v_S.double(), dim=0)
    sum_S = torch.cumsum((p_bar_S * v_S).double(), dim=0)
    low_S = round_to(sum_S.float(), problem.sites.numerics.output).double()
    return Accumulation(p_bar_S, v_S, low_S, high_S, p_bar_S == 1)


@dataclass(frozen=True)
class Ones:
    """How often the row maximum repeats, and how many P_bar of a row are 1 after rounding; each [B, H, T] int64."""

    ones_BHT: Tensor
    """P_bar that are exactly 1 as P V reads them, with the normalizer of the layer's numerics for the whole row."""
    ties_BHT: dict[str, Tensor]
    """Scores that repeat the row maximum within a tolerance of ``TIE_TOLERANCES``, the maximum itself counted: 1 is no tie."""


@torch.no_grad()
def count_ones(layer: LayerCapture) -> Ones:
    """Repeated maxima and unit probabilities of every row."""
    counts_BHTN = over_groups(layer, lambda group: _counts(layer, group))
    ones_BHT, *ties = counts_BHTN.unbind(dim=-1)
    return Ones(ones_BHT, dict(zip(TIE_TOLERANCES, ties, strict=True)))


def _counts(layer: LayerCapture, group: HeadGroup) -> Tensor:
    """[B, H, T, 1 + tolerances]: unit probabilities, then ties."""
    numerics = effective_numerics(group)
    with exact_float32(layer.q_BTHD.device):
        problem = problem_of(layer, group, numerics)
        T = problem.q.shape[2]
        slices = [slice(start, min(start + _ROWS, T)) for start in range(0, T, _ROWS)]
        return torch.cat([_count_rows(problem, rows, layer.rounding_seed) for rows in slices], dim=2)


def _count_rows(problem: Problem, rows: slice, seed: Tensor) -> Tensor:
    columns = slice(0, rows.stop)
    s = problem.scores(rows, columns)
    p_bar = _p_bar(problem, rows, columns, seed)
    row_max = s.amax(dim=-1, keepdim=True)
    ties = [(s >= row_max - tolerance).sum(dim=-1) for tolerance in TIE_TOLERANCES.values()]
    return torch.stack([(p_bar == 1).sum(dim=-1), *ties], dim=-1)


def _p_bar(problem: Problem, rows: slice, columns: slice, seed: Tensor) -> Tensor:
    """P_bar [B, H, R, S] as P V reads it, all keys in one tile."""
    exponent = exponent_of(problem)
    s = exponent.scores(rows, columns)
    return problem.weights(exponent.exp(s, exponent.row_max(s)), rows, columns, seed)


def negative_share(v_BTHD: Tensor) -> Tensor:
    """Share of tokens at which a feature of V is below 0, [H, D] float32: near 0 or 1 is one-signed (Figure 6c)."""
    return (v_BTHD < 0).float().mean(dim=(0, 1))


def one_signed_share(v_BTHD: Tensor, *, purity: float = 0.9) -> Tensor:
    """Share of a head's features that have one sign at ``purity`` of the tokens or more, [H] float32."""
    negative_HD = negative_share(v_BTHD)
    return (torch.maximum(negative_HD, 1 - negative_HD) >= purity).float().mean(dim=-1)
