"""A chosen error of delta: site ``delta_error``. Both flash backends call it between delta and dS, so that they draw the same.

Legend: B batch, H heads of queries, HK of keys, T queries, S keys, D head dim of V.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..numerics import Numerics
from ..rounding import COLUMN_SIGN_STREAM, ROW_CHOICE_STREAM, ROW_SIGN_STREAM, random_bits
from .tiles import delta_of_output

NEAR_ONE = 1 - 2.0**-9
"""A probability from here to 1 rounds to 1 in BF16."""
NOISE_COLUMNS = 8
"""That ``with_zero_sum_noise`` adds to the head dim: the kernels take multiples of 8."""


def delta_errors(
    delta_BHT: Tensor, do_BTHD: Tensor, o_BTHD: Tensor, top_two: Tensor | None, seed: Tensor, n: Numerics
) -> Tensor:
    """e of the site ``delta_error`` (numerics.py), [B, H, T] float32.

    Args:
        do_BTHD, o_BTHD: float32, rounded as the backward pass reads them.
        top_two: the two largest P of each row, [B, H, 2, T]; None where ``delta_error_rows`` is all.
        n: concrete; ``delta_error`` is not none.
    """
    size, kind = n.delta_error_size, n.delta_error
    if kind == "scale":
        error = size * delta_BHT
    elif kind == "rounding":
        error = size * (delta_of_output(do_BTHD, o_BTHD, n).transpose(1, 2) - delta_BHT)
    else:
        error = size * delta_BHT.square().mean(dim=-1, keepdim=True).sqrt().expand_as(delta_BHT)
        if kind != "constant":
            error = error * _signs(seed, ROW_SIGN_STREAM, delta_BHT.shape)
    return error if top_two is None else error.masked_fill(~_chosen(top_two, seed, n.delta_error_rows), 0.0)


def _chosen(top_two: Tensor, seed: Tensor, rows: str) -> Tensor:
    """Which rows ``delta_error_rows`` names, [B, H, T] bool."""
    first, second = top_two.unbind(2)
    if rows == "one_hot":
        return first >= NEAR_ONE
    wanted = (second >= NEAR_ONE * first) & (second > 0)
    if rows.endswith("untied"):
        wanted = ~wanted
    if rows.startswith("as_many"):
        order = random_bits(seed, ROW_CHOICE_STREAM, wanted.shape).argsort(dim=-1, stable=True)
        return order.argsort(dim=-1) < wanted.sum(dim=-1, keepdim=True)
    return wanted


def with_zero_sum_noise(do_BTHD: Tensor, v_BSHD: Tensor, error_BHT: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
    """dO and V with columns more, so that dO V^T is dP + e_i sign_j. A delta from that dP keeps the rows of dS at a sum of 0."""
    B, S, HK, _ = v_BSHD.shape
    signs = _signs(seed, COLUMN_SIGN_STREAM, torch.Size((B, S, HK)))
    columns = (error_BHT.transpose(1, 2), signs)
    widened = [
        torch.cat((x, torch.nn.functional.pad(column[..., None], (0, NOISE_COLUMNS - 1)).to(x.dtype)), dim=-1)
        for x, column in zip((do_BTHD, v_BSHD), columns, strict=True)
    ]
    return widened[0], widened[1]


def _signs(seed: Tensor, stream: int, shape: torch.Size) -> Tensor:
    return (2 * (random_bits(seed, stream, shape) & 1) - 1).float()
