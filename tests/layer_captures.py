"""Layer captures made by hand: q, k, v, dO and X chosen, O by ``attention.run``.

Legend: B batch, T positions, H heads, D head dim, C width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import attention
from attention import AttentionConfig, AttentionSpec
from probes.capture import LayerCapture


def make_layer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    *,
    spec: AttentionSpec | None = None,
    dtype: torch.dtype = torch.bfloat16,
    softcap: float = 0.0,
) -> LayerCapture:
    """q, k, v and dO [B, T, H, D] are cast to ``dtype``; X [B, T, C] is random."""
    B, T, H, D = q.shape
    (plan,) = AttentionConfig(flash_backend="flash_reference", default=spec or AttentionSpec()).resolve(1, H)
    q, k, v = (tensor.to(dtype) for tensor in (q, k, v))
    seed = torch.tensor(7)
    o = attention.run(q, k, v, plan, rounding_seed=seed, softcap=softcap)
    return LayerCapture(
        layer=0,
        x_BTC=torch.randn(B, T, H * D, generator=torch.Generator().manual_seed(1)),
        q_BTHD=q,
        k_BTHD=k,
        v_BTHD=v,
        o_BTHD=o,
        do_BTHD=do.to(o.dtype),
        scale=D**-0.5,
        softcap=softcap,
        plan=plan,
        rounding_seed=seed,
    )


def random_layer(**options: Any) -> LayerCapture:
    """Independent normal q, k, v and dO [2, 40, 3, 16]."""
    generator = torch.Generator().manual_seed(0)
    return make_layer(*(torch.randn(2, 40, 3, 16, generator=generator) for _ in range(4)), **options)


def tied_layer(*, sign: float, spec: AttentionSpec) -> LayerCapture:
    """As ``random_layer``, but in head 1 the first two keys share every row's maximum, V has one sign, and so has dO: the conditions of
    arXiv 2510.04212 for a biased O and for a biased delta.

    The tied keys are the first two of a sequence, so that its rows share the rounding error of v_0 + v_1: sequences are short and
    many. Scores are r for the tied keys and r - 10 to r - 12 for the others.
    """
    generator = torch.Generator().manual_seed(0)
    B, T, H, D = 32, 16, 3, 16
    q, k, v, do = (torch.randn(B, T, H, D, generator=generator) for _ in range(4))
    q[:, :, 1] = 0
    k[:, :, 1] = 0
    # r takes values of many mantissas, so that rows do not share their rounding errors.
    q[:, :, 1, 0] = D**0.5 * (0.5 + 4 * torch.rand(B, T, generator=generator))
    q[:, :, 1, 1] = D**0.5
    k[:, :, 1, 0] = 1.0
    k[:, 2:, 1, 1] = -(10 + 2 * torch.rand(B, T - 2, generator=generator))
    v[:, :, 1] = sign * (2 + 2 * torch.rand(B, T, D, generator=generator))
    do[:, :, 1] = do[:, :, 1].abs()
    return make_layer(q, k, v, do, spec=spec)
