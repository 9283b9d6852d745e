"""The row normalizer m of a tile: any m gives the same O = (P_bar V) / l in exact arithmetic; which P_bar are exactly 1 depends on it.

Shapes: r_m and the result [..., rows, 1]; S [..., rows, columns], masked scores -inf.
"""

import torch
from torch import Tensor

from ..numerics import Numerics


def tile_row_max(scores: Tensor, numerics: Numerics, *, scale: float = 1.0, unit: float = 1.0) -> Tensor:
    """Row normalizer of one tile, to be combined with the running one by ``maximum``.

    Args:
        scores: S / ``scale``.
        numerics: ``row_max`` and what belongs to it, which count as S does.
        scale: above 0.
        unit: m comes as ``unit`` times what it is of ``scores``, rounded to FP32 before anything is added.

    ``plain``: r_m = rowmax(S).
    ``stabilized``: Algorithm 3 of arXiv 2510.04212 (its line 10 prints m' where m'' is meant): where the maximum is attained
    more than once, to the tolerance, m = beta * r_m if r_m > 0 and gamma * r_m (0) if r_m < 0, so that no P_bar is exactly 1. It has
    a range limit: every exp(S - m) of the row is subnormal once the shift, (beta - 1) * r_m or -r_m, passes 87.3 in FP32 (kernels flush
    those to zero), and zero past 104: l = 0 and O = 0 / 0, or, with a ``row_sum_floor``, O = 0.
    ``stabilized_safe``: the same with the shift held to at most ``row_max_cap`` c, so that l >= exp(-c) > 0 after every tile, for
    any finite scores (by an FMA below 1.5e9): the largest running score r of a row satisfies m - r <= c, because each tile's m is at
    most its own r_m + c.
    ``scaled``: r_m. With ``hidden_tiles`` visited, a row that the mask hides from the tile has 0 by ``stabilized``.
    With m kept in BF16 (``statistics``) and S too, rounding m adds at most 1 to the shift for c = 7.
    """
    top = scores.amax(dim=-1, keepdim=True)
    row_max = unit * top
    if numerics.row_max in ("plain", "scaled"):
        return row_max
    close = scores >= top - numerics.row_max_tolerance / scale
    # A row that the mask hides from this tile has r_m = -inf; its "ties" are not scores.
    tied = (close.sum(dim=-1, keepdim=True) > 1) & (row_max > -torch.inf)
    normalizer = torch.where(tied, row_max + _shift(row_max, numerics, numerics.row_max_cap * unit / scale), row_max)
    if numerics.row_max == "stabilized" and numerics.hidden_tiles == "visited":
        # The published code masks by the lowest finite number: its "ties" count there, and are negative.
        normalizer = normalizer.masked_fill(row_max == -torch.inf, 0.0)
    return normalizer


def _shift(row_max: Tensor, numerics: Numerics, cap: float) -> Tensor:
    shift = torch.where(row_max > 0, (numerics.row_max_beta - 1) * row_max, (numerics.row_max_gamma - 1) * row_max)
    if numerics.row_max == "stabilized_safe":
        shift = shift.clamp(max=cap)
    return shift
