"""Layer captures made by hand: q, k, v, dO and X chosen, O by ``attention.run``.

Legend: B batch, T positions, H heads, D head dim, C width.
"""

from __future__ import annotations

import torch
from torch import Tensor

import attention
from attention import AttentionConfig, AttentionRule, AttentionSpec
from probes.capture import LayerCapture


def make_layer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    x: Tensor | None = None,
    *,
    spec: AttentionSpec | None = None,
    rules: tuple[AttentionRule, ...] = (),
    dtype: torch.dtype = torch.bfloat16,
    softcap: float = 0.0,
    scale: float | None = None,
) -> LayerCapture:
    """q, k, v and dO [B, T, H, D] are cast to ``dtype``; x [B, T, C] is random if not given."""
    B, T, H, D = q.shape
    plan = AttentionConfig(flash_backend="flash_reference", default=spec or AttentionSpec(), rules=rules).resolve(1, H)[
        0
    ]
    q, k, v = (tensor.to(dtype) for tensor in (q, k, v))
    seed = torch.tensor(7)
    o = attention.run(q, k, v, plan, rounding_seed=seed, softcap=softcap, scale=scale)
    if x is None:
        x = torch.randn(B, T, H * D, generator=torch.Generator().manual_seed(1))
    return LayerCapture(
        layer=0,
        x_BTC=x,
        q_BTHD=q,
        k_BTHD=k,
        v_BTHD=v,
        o_BTHD=o,
        do_BTHD=do.to(o.dtype),
        scale=D**-0.5 if scale is None else scale,
        softcap=softcap,
        plan=plan,
        rounding_seed=seed,
    )


def random_layer(seed: int = 0, shape: tuple[int, int, int, int] = (2, 40, 3, 16), **options: object) -> LayerCapture:
    """Independent normal q, k, v and dO."""
    generator = torch.Generator().manual_seed(seed)
    return make_layer(*(torch.randn(shape, generator=generator) for _ in range(4)), **options)  # type: ignore[arg-type]


def tied_layer(
    seed: int = 0,
    shape: tuple[int, int, int, int] = (32, 16, 3, 16),
    heads: tuple[int, ...] = (1,),
    sign: float = -1.0,
    **options: object,
) -> LayerCapture:
    """As ``random_layer``, but in ``heads`` the first two keys share every row's maximum, V of those heads has one sign, and so
    has dO: the conditions of arXiv 2510.04212 for a biased O and for a biased delta.

    The tied keys are the first two of a sequence, so that its rows share the rounding error of v_0 + v_1: sequences are short and
    many. Scores are r for the tied keys and r - 10 to r - 12 for the others.
    """
    generator = torch.Generator().manual_seed(seed)
    q, k, v, do = (torch.randn(shape, generator=generator) for _ in range(4))
    B, T, _, D = shape
    for head in heads:
        q[:, :, head] = 0
        k[:, :, head] = 0
        # r takes values of many mantissas, so that rows do not share their rounding errors.
        q[:, :, head, 0] = D**0.5 * (0.5 + 4 * torch.rand(B, T, generator=generator))
        q[:, :, head, 1] = D**0.5
        k[:, :, head, 0] = 1.0
        k[:, 2:, head, 1] = -(10 + 2 * torch.rand(B, T - 2, generator=generator))
        v[:, :, head] = sign * (2 + 2 * torch.rand(B, T, D, generator=generator))
        do[:, :, head] = do[:, :, head].abs()
    return make_layer(q, k, v, do, **options)  # type: ignore[arg-type]
