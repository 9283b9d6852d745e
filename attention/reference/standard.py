"""Standard attention as eager PyTorch code computes it, S and P as whole matrices, with its roundings named.

O = softmax(S) V with P normalized *before* the product, and the exact softmax gradient dS = P * (dP - rowsum(P * dP)): O takes no
part in the backward pass. An opaque custom operator, so that a compiler cannot fuse its roundings away; P is recomputed for the
backward pass from the same S, which gives the same bits as keeping it.

Legend: B batch, H heads, T sequence, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..mask import NO_MASK, Mask
from ..numerics import numerics_from_key
from ..rounding import storage_dtype
from .exact import exact_float32
from .tiles import FORMAT_OF, NAMESPACE, OUTPUT_STREAM, Problem, make_problem, round_output


def _probabilities(problem: Problem) -> tuple[Tensor, Tensor]:
    """S and P = softmax(S), unrounded, [B, H, T, S], S the number of keys."""
    rows, columns = (slice(0, x.shape[2]) for x in (problem.q, problem.k))
    s = problem.scores(rows, columns)
    p = torch.softmax(s, dim=-1)
    return s, p if problem.runs is None else p.masked_fill(problem.runs.empty()[:, None, :, None], 0.0)


@torch.library.custom_op(f"{NAMESPACE}::standard_forward", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seed: Tensor,
    numerics: str,
    scale: float,
    causal: bool,
    softcap: float,
    bottom_right: bool = False,
    window: int = 0,
    keys: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    mask = Mask(bottom_right, window, keys, cu_seqlens)
    with exact_float32(q.device):
        problem = make_problem(q, k, v, numerics, scale, causal, softcap, mask)
        n = problem.sites.numerics
        o = problem.sites.probabilities(_probabilities(problem)[1]) @ problem.v
        return round_output(o.transpose(1, 2).contiguous(), n.output, n.output_rounding, seed, OUTPUT_STREAM, q.dtype)


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, seed: Tensor, numerics: str, *_: object) -> Tensor:
    fmt = numerics_from_key(numerics).concrete(FORMAT_OF[q.dtype]).output
    return torch.empty(q.shape, device=q.device, dtype=storage_dtype(fmt, q.dtype))


@torch.library.custom_op(f"{NAMESPACE}::standard_backward", mutates_args=())
def _backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    numerics: str,
    scale: float,
    causal: bool,
    softcap: float,
    bottom_right: bool,
    window: int,
    keys: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    mask = Mask(bottom_right, window, keys, cu_seqlens)
    with exact_float32(q.device):
        problem = make_problem(q, k, v, numerics, scale, causal, softcap, mask)
        sites = problem.sites
        do_BHTD = problem.seen_rows(sites.output_gradient(do.transpose(1, 2).float()))
        s, p = _probabilities(problem)
        dp = sites.probability_gradients(do_BHTD @ problem.v.transpose(-1, -2))
        ds = p * (dp - sites.delta_sum((p * dp).sum(dim=-1, keepdim=True)))
        ds = sites.score_gradients(problem.through_softcap(ds, s))
        dq = scale * (ds @ problem.k)
        dk = scale * (ds.transpose(-1, -2) @ problem.q)
        dv = sites.probabilities(p).transpose(-1, -2) @ do_BHTD
        if problem.group > 1:
            dk, dv = (x.unflatten(1, (-1, problem.group)).sum(dim=2) for x in (dk, dv))
        return problem.gradients(dq, dk, dv, q.dtype)


@_backward.register_fake
def _(do, q, k, v, *_):  # type: ignore[no-untyped-def]
    return tuple(torch.empty(x.shape, device=x.device, dtype=x.dtype) for x in (q, k, v))


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, _, *ctx.settings, keys, cu_seqlens = inputs
    ctx.save_for_backward(q, k, v, keys, cu_seqlens)


def _autograd_backward(ctx, do):  # type: ignore[no-untyped-def]
    q, k, v, *masks = ctx.saved_tensors
    return *_backward(do, q, k, v, *ctx.settings, *masks), *(None,) * 9


_forward.register_autograd(_autograd_backward, setup_context=_setup_context)


def standard(
    q_BTHD: Tensor,
    k_BTHD: Tensor,
    v_BTHD: Tensor,
    numerics: str,
    *,
    seed: Tensor,
    scale: float,
    causal: bool,
    softcap: float,
    mask: Mask = NO_MASK,
) -> Tensor:
    """Attention [B, T, H, D] with the roundings of key ``numerics``; see ``attention.run`` for the arguments."""
    return _forward(q_BTHD, k_BTHD, v_BTHD, seed, numerics, scale, causal, softcap, *mask)
