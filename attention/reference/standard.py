"""Standard attention as eager PyTorch code computes it, S and P as whole matrices, with its roundings named.

O = softmax(S) V with P normalized *before* the product, and the exact softmax gradient dS = P * (dP - rowsum(P * dP)): O takes no
part in the backward pass. An opaque custom operator, so that a compiler cannot fuse its roundings away; P is recomputed for the
backward pass from the same S, which gives the same bits as keeping it.

Legend: B batch, H heads, T sequence, D head dim.
"""

from typing import Any

import torch
from torch import Tensor

from ..numerics import numerics_from_key
from ..operators import FORWARD_TENSORS, differentiable, gradients_like, operator
from ..rounding import FORMAT_OF, OUTPUT_STREAM, storage_dtype
from .exact import exact_float32
from .tiles import Problem, make_problem, round_output


def _probabilities(problem: Problem) -> tuple[Tensor, Tensor]:
    """S and P = softmax(S), unrounded, [B, H, T, S], S the number of keys."""
    rows, columns = (slice(0, x.shape[2]) for x in (problem.q, problem.k))
    s = problem.scores(rows, columns)
    if problem.sinks is not None:
        sinks = problem.sinks.expand(*s.shape[:3], 1)
        return s, torch.softmax(torch.cat((s, sinks), dim=-1), dim=-1)[..., :-1]
    p = torch.softmax(s, dim=-1)
    return s, p if problem.ranges is None else p.masked_fill((s == -torch.inf).all(dim=-1, keepdim=True), 0.0)


def _forward_pass(q: Tensor, k: Tensor, v: Tensor, seed: Tensor, *settings: Any) -> Tensor:
    with exact_float32(q.device):
        problem = make_problem(q, k, v, *settings)
        n = problem.sites.numerics
        o = problem.sites.probabilities(_probabilities(problem)[1]) @ problem.v
        return round_output(o.transpose(1, 2).contiguous(), n.output, n.output_rounding, seed, OUTPUT_STREAM, q.dtype)


def _output(q: Tensor, k: Tensor, v: Tensor, seed: Tensor, numerics: str, *_: Any) -> Tensor:
    fmt = numerics_from_key(numerics).concrete(FORMAT_OF[q.dtype]).output
    return torch.empty((*q.shape[:3], v.shape[3]), device=q.device, dtype=storage_dtype(fmt, q.dtype))


def _backward_pass(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *settings: Any) -> tuple[Tensor, ...]:
    with exact_float32(q.device):
        problem = make_problem(q, k, v, *settings)
        sites = problem.sites
        do_BHTD = sites.output_gradient(problem.visible_rows(do.transpose(1, 2).float()))
        s, p = _probabilities(problem)
        dp = problem.dp(do_BHTD, slice(None), slice(None), s)
        delta = sites.delta_sum((p * dp).sum(dim=-1, keepdim=True))
        ds = p * (dp - delta)
        dsinks = torch.zeros(0, dtype=torch.float32, device=q.device)
        if problem.sinks is not None:
            p_of_sinks = torch.exp(problem.sinks - torch.logaddexp(s.logsumexp(dim=-1, keepdim=True), problem.sinks))
            dsinks = -(p_of_sinks * delta).sum(dim=(0, 2, 3))
        ds = sites.score_gradients(problem.through_softcap(ds, s))
        dq = problem.scale * (ds @ problem.k)
        dk = problem.scale * (ds.transpose(-1, -2) @ problem.q)
        dv = sites.probabilities(p).transpose(-1, -2) @ do_BHTD
        if problem.group > 1:
            dk, dv = (x.unflatten(1, (-1, problem.group)).sum(dim=2) for x in (dk, dv))
        return *problem.gradients(dq, dk, dv, q.dtype), dsinks


_forward = operator("standard_forward", FORWARD_TENSORS, 1, _forward_pass, _output)
_backward = operator("standard_backward", "do q k v", 4, _backward_pass, gradients_like)
standard = differentiable(_forward, _backward, lambda *_: ())
