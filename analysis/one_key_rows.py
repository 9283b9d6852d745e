"""Rows that look at one key: O should be that V, whatever the size of the logits. How far off is it, in any attention?

Keys are multiples of the unit vectors, so that Q K^T has no rounding and every logit but one of a row is 0, too far below for FP32. What
is left is how an attention makes the exponential of the maximum, how it rounds P_bar and how it normalises; analysis/report_onset.py
says why that matters.

Legend: B batch, T positions, H heads, D head width.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attention import AttentionSpec, registry
from attention.dispatch import run
from attention.plan import AttentionConfig, LayerPlan
from errors import invalid

WIDTH = 64
LEAST = 200.0
"""Smaller logits would leave other keys a share that FP32 sees: exp(-LEAST) is 0 in it."""


@dataclass(frozen=True)
class Rows:
    """Operands [B, T, H, D] of rows that look at one key each, and what O must be."""

    q_BTHD: Tensor
    k_BTHD: Tensor
    v_BTHD: Tensor
    do_BTHD: Tensor
    o_BTHD: Tensor


@dataclass(frozen=True, kw_only=True)
class Found:
    """What an attention makes of ``Rows``."""

    wrong: float
    """Share of rows whose O differs from V in any feature."""
    error: float
    """Root mean square error of rowsum(dO * O) over the root mean square of it."""
    mean: float
    """Mean of that error over the root mean square, with its sign."""
    standard_error: float
    rows: int


def make_rows(largest: float, *, dtype: torch.dtype, device: torch.device, count: int = 128, seed: int = 0) -> Rows:
    """``count`` x 64 rows whose logits lie between half of ``largest`` and all of it; positive, V and dO normal.

    Raises ``UserError`` for logits below ``LEAST``.
    """
    if not largest / 2 >= LEAST:
        raise invalid("largest logit", largest, f"{2 * LEAST:g} or more")
    generator = torch.Generator().manual_seed(seed)
    B, H, T, D = count, 1, WIDTH, WIDTH
    key_BTH = torch.stack([torch.randint(t + 1, (B, H), generator=generator) for t in range(T)], dim=1)
    size = math.sqrt(largest * math.sqrt(D))
    k_BTHD = torch.eye(D)[None, :, None].expand(B, T, H, D) * 2.0 ** round(math.log2(size))
    # In units of the keys' length, which is a power of two and so exact in any format.
    logit_BTH = largest * (0.5 + 0.5 * torch.rand((B, T, H), generator=generator))
    q_BTHD = torch.nn.functional.one_hot(key_BTH, D) * (logit_BTH * math.sqrt(D) / k_BTHD.max())[..., None]
    v_BTHD, do_BTHD = (torch.randn((B, T, H, D), generator=generator) for _ in range(2))
    q, k, v, do = (x.to(device=device, dtype=dtype) for x in (q_BTHD, k_BTHD, v_BTHD, do_BTHD))
    seen = key_BTH.to(device)[..., None].expand(B, T, H, D)
    return Rows(q, k, v, do, v.gather(1, seen))


def measure(rows: Rows, spec: AttentionSpec, flash_backend: str = "flash") -> Found:
    """Run one attention on the rows. Raises ``UserError`` where this machine cannot."""
    (plan,) = AttentionConfig(default=spec, flash_backend=flash_backend).resolve(1, rows.q_BTHD.shape[2])
    registry.check([plan], device=rows.q_BTHD.device, dtype=rows.q_BTHD.dtype, head_dim=WIDTH)
    return summed_up(rows, _attend(rows, plan))


def _attend(rows: Rows, plan: LayerPlan) -> Tensor:
    seed = torch.zeros((), dtype=torch.int64, device=rows.q_BTHD.device)
    with torch.no_grad():
        return run(rows.q_BTHD, rows.k_BTHD, rows.v_BTHD, plan, rounding_seed=seed)


def summed_up(rows: Rows, o_BTHD: Tensor) -> Found:
    """What an O [B, T, H, D] of these rows is worth."""
    error_BTHD = o_BTHD.double() - rows.o_BTHD.double()
    error_N = (rows.do_BTHD.double() * error_BTHD).sum(dim=-1).flatten()
    delta_N = (rows.do_BTHD.double() * rows.o_BTHD.double()).sum(dim=-1).flatten()
    size = delta_N.square().mean().sqrt()
    return Found(
        wrong=(error_BTHD != 0).any(dim=-1).double().mean().item(),
        error=(error_N.square().mean().sqrt() / size).item(),
        mean=(error_N.mean() / size).item(),
        standard_error=(error_N.std() / math.sqrt(len(error_N)) / size).item(),
        rows=len(error_N),
    )


def as_dict(found: Found) -> dict[str, float]:
    """Its numbers by name."""
    return dataclasses.asdict(found)
