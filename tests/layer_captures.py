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
