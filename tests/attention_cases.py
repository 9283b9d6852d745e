"""Inputs and the fp64 oracle for attention tests. Legend: B batch, T sequence, H heads, D head dim."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import attention
from attention import AttentionConfig, AttentionSpec

CASES = ("random", "peaked", "tied", "one_signed_v", "constant")
PAIRED, COMMON = "paired", "common"
NAMES = ("o", "dq", "dk", "dv")


def in_small_tiles(*sites: str) -> tuple[str, ...]:
    """``sites`` in tiles of 16 x 16, where they name none."""
    return tuple(tile for tile in ("tile_q=16", "tile_k=16") if not " ".join(sites).count(tile[:7])) + sites


@dataclass
class Problem:
    """q, k, v and dO, each [B, T, H, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor


def make(case: str, dtype: torch.dtype, device: torch.device, shape: tuple[int, ...] = (2, 40, 3, 16)) -> Problem:
    generator = torch.Generator().manual_seed((*CASES, PAIRED, COMMON).index(case))
    q, k, v, do = (torch.randn(shape, generator=generator) for _ in range(4))
    if case == "peaked":
        q, k = q * 4, k * 4
    elif case == "tied":
        k = k[:, :4].repeat(1, shape[1] // 4 + 1, 1, 1)[:, : shape[1]]  # every key returns after four
    elif case == PAIRED:
        k = k[:, ::2].repeat_interleave(2, dim=1)[:, : shape[1]]  # ties in one tile, other maxima in the next
    elif case == COMMON:
        k = k + 2 * torch.randn(shape[-1], generator=generator)  # keys with a part in common
    elif case == "one_signed_v":
        v = -v.abs() - 1
    elif case == "constant":
        q, k, v = (torch.full(shape, 0.75) for _ in range(3))
    return Problem(*(x.to(device, dtype) for x in (q, k, v, do)))


def causal_scores(q: Tensor, k: Tensor, scale: float, softcap: float = 0.0, hidden: Tensor | None = None) -> Tensor:
    """S [..., T, S] of q [..., T, D] and k [..., S, D], in their dtype, -inf where a key is ``hidden``, or comes after the query."""
    s = q @ k.mT * scale
    s = softcap * torch.tanh(s / softcap) if softcap else s
    return s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1) if hidden is None else hidden, -math.inf)


def oracle(
    p: Problem,
    softcap: float = 0.0,
    *,
    dtype: torch.dtype = torch.float64,
    hidden: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """O, dQ, dK, dV, and the gradient of the sinks [H] if any, by standard attention in ``dtype`` from the same (rounded) inputs: matrices,
    and autograd. ``hidden``: bool [B, T, S], the keys that a query does not see; None: causal."""
    leaves = [x.to(dtype).requires_grad_() for x in (p.q, p.k, p.v, *([] if sinks is None else [sinks]))]
    o, _ = _attend(*leaves, softcap=softcap, hidden=hidden)
    return o.detach(), *torch.autograd.grad(o, leaves, p.do.to(dtype))


def magnitudes(p: Problem) -> tuple[Tensor, ...]:
    """What O, dQ, dK, dV would be if no terms cancelled: every product and sum over absolute values.

    The natural unit of rounding errors: dS = P * (dP - delta) cancels, completely so for constant inputs.
    """
    o, probabilities = _attend(*(x.double() for x in (p.q, p.k, p.v)))
    q, k, v, do, o = (x.double().transpose(1, 2).abs() for x in (p.q, p.k, p.v, p.do, o))
    ds = probabilities * (do @ v.mT + (do * o).sum(dim=-1, keepdim=True)) / math.sqrt(q.shape[-1])
    parts = (probabilities @ v, ds @ k, ds.mT @ q, probabilities.mT @ do)
    return tuple(x.transpose(1, 2) for x in parts)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, softcap: float = 0.0, hidden: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """O [B, T, H, D] and P [B, H, T, S]; both are 0 in rows that see no key."""
    q, k, v = (x.transpose(1, 2).repeat_interleave(q.shape[2] // x.shape[2], dim=1) for x in (q, k, v))
    s = causal_scores(q, k, q.shape[-1] ** -0.5, softcap, hidden if hidden is None else hidden[:, None])
    empty = (s == -math.inf).all(dim=-1, keepdim=True)
    s = s.masked_fill(empty, 0.0)
    if sinks is not None:
        s = torch.cat((s, sinks[:, None, None].expand(*s.shape[:3], 1)), dim=-1)
    p = torch.softmax(s, dim=-1)[..., : k.shape[2]].masked_fill(empty, 0.0)
    return (p @ v).transpose(1, 2), p


def run(p: Problem, spec: AttentionSpec, *, seed: int = 0, call=attention.run, **settings) -> tuple[Tensor, ...]:
    """O, dQ, dK, dV through the library."""
    plan = AttentionConfig(flash_backend="flash_reference", default=spec).resolve(1, p.q.shape[2])[0]
    q, k, v = (x.detach().clone().requires_grad_() for x in (p.q, p.k, p.v))
    o = call(q, k, v, plan, rounding_seed=torch.tensor(seed, device=q.device), **settings)
    return o.detach(), *torch.autograd.grad(o, (q, k, v), p.do.to(o.dtype))


Results = tuple[Tensor, ...]


def results(function: Any, inputs: Results, do: Tensor, **settings: Any) -> Results:
    """O of a function of torch's signature, and the gradients of its inputs."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    o = function(*leaves, **settings)
    return o.detach(), *torch.autograd.grad(o, leaves, do.to(o.dtype))


def relative_errors(found: Results, exact: Results, unit: Results | None = None) -> list[float]:
    """||found - exact|| / ||unit|| of O, dQ, dK, dV; the unit is ``exact`` itself unless given."""
    return [((a.double() - b).norm() / u.norm()).item() for a, b, u in zip(found, exact, unit or exact, strict=True)]


def same(found: Results, expected: Results) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def assert_agree(found: Results, expected: Results, exact: Results, unit: Results | None = None) -> None:
    """They are apart by a quarter of the error of ``expected`` against FP64 at the most, or by FP32 noise; see ``relative_errors``."""
    apart = relative_errors(found, tuple(x.double() for x in expected), unit or exact)
    for name, distance, own in zip(NAMES, apart, relative_errors(expected, exact, unit), strict=True):
        assert distance <= max(own / 4, 2.0**-21), f"{name}: {distance:.2e} apart, own error {own:.2e}"


def assert_as_exact(
    found: Results, baseline: Results, exact: Results, unit: Results | None = None, floor: float = 0.0, what: str = ""
) -> None:
    """The error of ``found`` against FP64 is at most twice that of ``baseline``, or than ``floor``; see ``relative_errors``."""
    limits = relative_errors(baseline, exact, unit)
    for name, error, limit in zip(NAMES, relative_errors(found, exact, unit), limits, strict=True):
        assert error <= 2 * max(limit, floor), f"{what} {name}: {error:.2e}, baseline {limit:.2e}"
