"""What is measured of a kernel from outside. Legend: B batch, H query heads, T length, D head dim, DV that of v, o and dO."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .captured import Inputs, Mask
from .classes import CLASSES, one_hot
from .judge import REORDERED, REORDERED_ROW, REPEATED, ROUNDED_TWICE, SIZE_WRONG
from .kernels import Call

NAMES = ("o", "dq", "dk", "dv")
FACTORS = (1, 9, 10, 11, 12, 13, 14, 15)
"""Factors of dO. The rounding of dS differs from factor to factor; what delta and P leave in its rows does not."""
ONE_HOT_LOGITS = (1e3, 1e4, 4.6e4, 1e5, 1e6, 2.0**21)
"""At the first no exponent is off, in FP16 either, where the FMA's is from 5,678 on."""
LOST = 0.8
"""An O that is this far off, over its own size, has no more to do with the right one."""
SCALED_Q: dict[str, Callable[[float], tuple[float, ...]]] = {
    "q for exp": lambda scale: (scale,),
    "q for exp2": lambda scale: (scale / math.log(2),),
    "q for exp2, in two steps": lambda scale: (scale, 1 / math.log(2)),
}
"""Factors of q, after each of which a kernel may round it to 16 bits."""

Results = Sequence[Tensor]


class OutOfRangeError(Exception):
    """A class of inputs says nothing, or nothing in a dtype or of a kernel that is not for it."""


class WrongError(Exception):
    """A kernel gives no gradient for what it read, or writes to what others read, too; in a reason's words."""


def _attend(call: Call, p: Inputs, wanted: str = "qkv") -> Results:
    """o with its graph, and the q, k, v that it is of; those ``wanted`` need a gradient."""
    q, k, v = (
        x.detach().clone().requires_grad_(name in wanted) for name, x in zip("qkv", (p.q, p.k, p.v), strict=True)
    )
    o = call(q, k, v, p.causal, p.scale, **({} if p.mask is None else {"mask": p.mask}))
    if not isinstance(o, Tensor):
        expected = (
            "O alone, as kernels.find(kernel).call gives"
            if isinstance(o, tuple)
            else "O, or a tuple that begins with O"
        )
        raise TypeError(f"it gives a {type(o).__name__}: expected {expected}")
    if list(o.shape) != (expected := [*p.q.shape[:-1], p.v.shape[-1]]):
        raise RuntimeError(f"it gives O of shape {list(o.shape)}: expected {expected}")
    return o, q, k, v


def forward(call: Call, p: Inputs) -> Tensor:
    """o as in training: without gradients a compiled kernel is another one. Its backward pass is compiled when it first runs."""
    return _attend(call, p)[0].detach()


def run(call: Call, p: Inputs, do: Tensor | None = None) -> Results:
    """O, dQ, dK, dV in memory of their own, as a kernel may keep its buffers. The host waits, to see whether it overwrote what it got."""
    given = p.do.clone() if do is None else do
    results, operands = _run(call, p, given)
    pairs = zip(("q", "k", "v", "dO"), (*operands, given), (p.q, p.k, p.v, p.do if do is None else do), strict=True)
    if overwritten := [name for name, x, before in pairs if not bool(((x == before) | before.isnan()).all())]:
        raise WrongError(f"it overwrites {', '.join(overwritten)}")
    return tuple(x.clone() for x in results)


def _run(
    call: Call, p: Inputs, do: Tensor, wanted: str = "qkv", between: Inputs | None = None
) -> tuple[Results, Results]:
    """O, gradients of those ``wanted``; and the q, k, v that the kernel got. ``between``: of a forward pass before its backward pass."""
    o, *operands = _attend(call, p, wanted)
    if not o.requires_grad:
        raise WrongError(f"no gradient for {', '.join(wanted)}")
    if between is not None:
        forward(call, between)
    needing = [x for x in operands if x.requires_grad]
    gradients = torch.autograd.grad(o, needing, do.to(o.dtype), allow_unused=True)
    if missing := [name for name, gradient in zip(wanted, gradients, strict=True) if gradient is None]:
        raise WrongError(f"no gradient for {', '.join(missing)}")
    return (o.detach(), *gradients), tuple(x.detach() for x in operands)


def plain(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, mask: Mask | None = None, *, rounds_s: str = ""
) -> Tensor:
    """The baseline, without tiles: softmax in FP32; P and dS in the dtype of v for their products, as any kernel has them.

    ``rounds_s``: "after" or "before" its scale S, too, is rounded to the dtype of q; eager PyTorch in 16 bits does either. Or one of
    ``SCALED_Q``: q times the scale is rounded, as kernels do that multiply q once in place of each tile of S.
    """
    for factor in SCALED_Q[rounds_s](scale) if rounds_s in SCALED_Q else ():
        q, scale = (q.float() * factor).to(q.dtype), scale / factor
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = q.float() @ k.float().mT
    if rounds_s == "before":
        s = s.to(q.dtype).float()
    s = s * scale
    if s.requires_grad:
        s.register_hook(lambda ds: ds.to(q.dtype).float())
    if rounds_s == "after":
        s = s.to(q.dtype).float()
    return (_masked(s, causal, mask).softmax(-1).to(v.dtype).float() @ v.float()).to(v.dtype)


def exact(p: Inputs) -> tuple[Results, Results, Tensor]:
    """In FP64 from the same inputs: O, dQ, dK, dV; the size each would have if nothing cancelled; rowsum(|dS|) [B, H, T].

    The size is the natural unit of rounding errors, as dS = P (dP - delta) cancels. Rows that are one-hot to the last bit have no dS but
    FP32's rounding: rowsum(|dS|) is at least 2^-15 of its size, so that 2^-24 of it is 2^-9.
    """
    q, k, v = (x.detach().double().requires_grad_() for x in (p.q, p.k, p.v))
    n = q.shape[1] // k.shape[1]
    k_H, v_H = (x.repeat_interleave(n, 1) for x in (k, v))
    weights = _masked(q @ k_H.mT * p.scale, p.causal, p.mask).softmax(-1)
    o, do = weights @ v_H, p.do.double()
    gradients = torch.autograd.grad(o, (q, k, v), do)
    weights, o, k_H, v_H = (x.detach() for x in (weights, o, k_H, v_H))
    dp, delta = do @ v_H.mT, (do * o).sum(-1, keepdim=True)
    ds = weights * (dp - delta).abs() * abs(p.scale)
    uncancelled = weights * (do.abs() @ v_H.abs().mT + (do * o).abs().sum(-1, keepdim=True)) * abs(p.scale)
    of_heads = uncancelled.mT @ q.detach().abs(), weights.mT @ do.abs()
    sizes = weights @ v_H.abs(), uncancelled @ k_H.abs(), *(x.unflatten(1, (-1, n)).sum(2) for x in of_heads)
    return (o, *gradients), sizes, torch.maximum(ds.sum(-1), 2.0**-15 * uncancelled.sum(-1))


def _masked(s: Tensor, causal: bool, mask: Mask | None) -> Tensor:
    if mask is not None:
        return s.masked_fill(~mask.visible, -math.inf)
    if not causal:
        return s
    return s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -math.inf)


def accuracy(call: Call, p: Inputs, name: str) -> dict[str, float]:
    """Errors of the class of inputs of that name, and what rows of dS sum to.

    - ``largest_logit``: in size, of those that a query sees
    - ``error_X``: ||X - exact|| / ||exact||, unless the latter is 0 but for FP64's rounding; ``ratio_X``: that over the baseline's, see
      ``plain``, which in FP16 and FP32 counts as FP32's rounding of the largest logit at least; ``size_X``: over X's norm without
      cancellation; ``worst_X``: that of the worst row
    - ``factor_X``: f of the best fit X = f exact; ``unfit_X``: ||X - f exact|| / ||exact||; ``factor_over``: |f - 1| of O over what
      rounding to one side explains in this dtype
    - ``default_scale_off``: of "peaked_100", whose scale is 1 / sqrt(D): how far O is from that of a call without a scale, relative
    - ``unrounded_o``: bits of a number of O where q has fewer, else 0
    - ``layout_off``: where O has nothing to do with the right one, its error if all tensors are [B, T, H, D]
    - ``eager_X``: the error that X has where S is rounded to the dtype of q, before or after its scale, or q times the scale is,
      whichever has its O nearest; ``eager_scales_q``: 1 where it is the last, or 0; ``from_eager_o``: how far O is from that O, over
      ||exact||
    - ``rows``: root mean square of rowsum(dS) over that of rowsum(|dS|), averaged over ``FACTORS``, in which the rounding of dS drops out;
      ``rows_mean``, ``rows_mean_se``: its mean with sign, as errors of one sign do most harm, and the standard error
    - ``bias_o``, ``bias_o_se``: mean of (O - exact) sign(exact) in units of 2^-9 |exact|, each cut at 4, and its standard error, as if
      elements were independent

    O of queries behind a sequence's end counts only where it is not finite; their dQ must be 0, see ``leaks``.

    Raises ``OutOfRangeError`` where plain attention's own numbers are not finite or a row of them is off, or the exact ones have no size.
    """
    base, (expected, sizes, row_size) = _read(p, run(plain, p)), exact(p)
    expected, sizes = _read(p, expected), _read(p, sizes)
    for x, b, e, size in zip(NAMES, base, expected, sizes, strict=True):
        if not e.any():
            raise OutOfRangeError(f"{x} is 0 in exact arithmetic")
        if not (worst := _worst_row(b, e, size)) <= SIZE_WRONG:
            seen = f"has a row that is off by {worst:.1e} of its size" if math.isfinite(worst) else "is not finite"
            raise OutOfRangeError(f"in {str(p.q.dtype).removeprefix('torch.')} {x} of plain attention {seen}")
    found = _read(p, run(call, p))
    # Products of 16-bit numbers are often exact in plain attention: it is held to no less than FP32's rounding of the largest logit, as
    # kernels that use exp2 have. In BF16 the rounding of P is larger.
    measures = {"largest_logit": _largest_logit(p)}
    has_more = not torch.equal(found[0], found[0].to(p.q.dtype).to(found[0].dtype))
    measures["unrounded_o"] = 8.0 * found[0].element_size() * has_more
    least = 2.0**-24 * (1 if p.q.dtype == torch.bfloat16 else max(1.0, measures["largest_logit"]))
    for x, a, b, e, size in zip(NAMES, found, base, expected, sizes, strict=True):
        if not bool(a.isfinite().all()):
            measures[f"error_{x}"] = math.inf
            continue
        error, own = ((y.double() - e).norm().item() for y in (a, b))
        if e.norm() > 2.0**-40 * size.norm():
            measures[f"error_{x}"] = error / e.norm().item()
            factor = _factor(a, e)
            measures[f"factor_{x}"] = factor.item()
            measures[f"unfit_{x}"] = ((a.double() - factor * e).norm() / e.norm()).item()
        measures[f"ratio_{x}"] = error / max(own, least * size.norm().item())
        measures[f"size_{x}"] = error / size.norm().item()
        measures[f"worst_{x}"] = _worst_row(a, e, size)
    if "factor_o" in measures:
        explained = ROUNDED_TWICE[str(p.q.dtype).removeprefix("torch.")]
        measures["factor_over"] = abs(measures["factor_o"] - 1) / explained
    if measures.get("error_o", 0) > LOST and p.mask is None and p.q.shape == p.k.shape:
        q, k, v = (x.transpose(1, 2).contiguous() for x in (p.q, p.k, p.v))
        with contextlib.suppress(Exception):  # a foreign kernel's
            measures["layout_off"] = off(expected[:1], [forward(call, replace(p, q=q, k=k, v=v)).transpose(1, 2)])
    if name == "peaked_100":  # not in --quick: a compiled kernel is another one then
        with contextlib.suppress(Exception):  # in a model it raises, too
            default = forward(lambda q, k, v, causal, _: call(q, k, v, causal, None), p)
            measures["default_scale_off"] = off(found[:1], [default])
    ways = ("after", "before", *(SCALED_Q if p.scale else ()))
    eagers = [_read(p, run(functools.partial(plain, rounds_s=where), p)) for where in ways]
    distances = [((found[0].double() - eager[0].double()).norm() / expected[0].norm()).item() for eager in eagers]
    nearest = min(range(len(ways)), key=distances.__getitem__)
    eager = eagers[nearest]
    measures |= {"from_eager_o": distances[nearest], "eager_scales_q": float(ways[nearest] in SCALED_Q)}
    for x, y, e in zip(NAMES, eager, expected, strict=True):
        if f"error_{x}" in measures:
            measures[f"eager_{x}"] = ((y.double() - e).norm() / e.norm()).item()
    # Here and not in mask_edges, as --quick would have to compile this length's backward pass.
    if p.mask is not None or name in ("odd_length", "low") or (name not in CLASSES and p.causal):  # the last: of a file
        measures |= leaks(call, p)
    sums = _last_column(call, p, found[1]) / row_size.square().mean().sqrt()
    measures["rows"] = sums.square().mean().sqrt().item()
    measures |= {"rows_mean": sums.mean().item(), "rows_mean_se": (sums.std() / sums.numel() ** 0.5).item()}
    unit = 2.0**-9 * expected[0].abs().clamp(min=1e-300)
    bias = ((found[0].double() - expected[0]) * expected[0].sign() / unit).clamp(-4, 4)
    return measures | {"bias_o": bias.mean().item(), "bias_o_se": (bias.std() / bias.numel() ** 0.5).item()}


def _read(p: Inputs, results: Results) -> Results:
    """O and dQ become 0 in queries that nobody reads, unless they are not finite there, which spreads; dK and dV stay."""
    if p.mask is None:
        return results
    o, dq, *of_keys = results
    return *(x.masked_fill(p.mask.unread() & x.isfinite(), 0) for x in (o, dq)), *of_keys


def _largest_logit(p: Inputs) -> float:
    s = p.q.float() @ p.k.repeat_interleave(p.q.shape[1] // p.k.shape[1], 1).float().mT * p.scale
    s = _masked(s, p.causal, p.mask)
    return s.masked_fill(s == -math.inf, 0).abs().amax().item()


def _worst_row(x: Tensor, expected: Tensor, size: Tensor) -> float:
    """The largest error of a row over its own size, which is at least a thousandth of the usual one."""
    rows = size.norm(dim=-1)
    return ((x.double() - expected).norm(dim=-1) / rows.clamp(min=1e-3 * rows.square().mean().sqrt())).amax().item()


def _last_column(call: Call, p: Inputs, dq: Tensor) -> Tensor:
    """The last column of dQ [B, H, T, D], averaged over ``FACTORS``, in FP64: the rounding of dS drops out."""
    columns = [dq[..., -1].double(), *(_run(call, p, p.do * c)[0][1][..., -1].double() / c for c in FACTORS[1:])]
    return torch.stack(columns).mean(0)


def signed_sums(call: Call, p: Inputs) -> dict[str, float]:
    """``signed``: as ``rows`` of ``accuracy``, of the error of sum_j dS_ij s_j, where the last feature of K is s_j = 1 or -1 by chance."""
    k = p.k.clone()
    k[..., -1] = torch.randint(2, k.shape[:-1], generator=torch.Generator().manual_seed(98), device="cpu").to(k) * 2 - 1
    p = replace(p, k=k)
    expected, _, row_size = exact(p)
    error = _last_column(call, p, run(call, p)[1]) - expected[1][..., -1]
    return {"signed": (error.norm() / row_size.norm()).item()}


def _factor(a: Tensor, e: Tensor) -> Tensor:
    """f of the best fit a = f e."""
    return (a.double() * e).sum() / e.square().sum()


def rows_from_outside(call: Call, p: Inputs) -> Tensor:
    """r = rowsum(dS), [B, H, T] float32, of any kernel on any operands, less what the rounding of dS leaves in it.

    The feature that S has least of becomes 1 in K and 0 in Q, and dQ is scale * r there: S is what the other features make. One call
    for each of ``FACTORS``; the host waits for nothing.
    """
    least = (p.q.float().square().mean((0, 1, 2)) * p.k.float().square().mean((0, 1, 2))).argmin()[None]
    q, k = (x.index_copy(-1, least, x[..., -1:]) for x in (p.q, p.k))
    q[..., -1], k[..., -1] = 0, 1
    # FP16 cannot hold multiples of a large dO, as behind a loss scale. A power of two changes no digit, and r is linear in dO.
    is_large = (p.do.abs().amax() > 16) & (p.do.dtype == torch.float16)
    unit = torch.where(is_large, 2.0**-4, 1.0)
    p = replace(p, q=q, k=k, do=p.do * unit.to(p.do.dtype))
    return (_last_column(call, p, _run(call, p, p.do.clone())[0][1]) / p.scale / unit).float()


def one_hot_limit(call: Call, p: Inputs) -> dict[str, float]:
    """``limit``: the largest logit of ``ONE_HOT_LOGITS`` up to which one-hot rows have O = V to the bit (FP32: to BF16's last), or 0.
    ``off``: how far O is from V at the next, relative.
    """
    compared = torch.bfloat16 if p.q.dtype == torch.float32 else p.q.dtype
    limit, error = 0.0, 0.0
    for logit in ONE_HOT_LOGITS:
        p = one_hot(logit, p)
        v = p.v.repeat_interleave(p.q.shape[1] // p.k.shape[1], 1)
        o, v = (x[:, :, 1 - p.q.shape[3] :] for x in (forward(call, p), v))
        if not torch.equal(o.to(compared), v.to(compared)):
            error = off((v,), (o,))
            break
        limit = logit
    return {"limit": limit, "off": error}


def mask_edges(call: Call, p: Inputs) -> dict[str, float]:
    """``leaks`` of a causal mask, and ``first_row``: O of query 0, which sees key 0 alone, less V of key 0, over the largest V; V times
    a factor, if O has one, which is not the mask's.

    The first half of the queries have large logits with keys of the second half, which they must not see; no visible logit is large. In
    BF16 and FP32 hidden logits are 2e5, and an additive mask of -1e4 does not hide them. In FP16 they are 6e4 before their scale, as right
    eager kernels round them to FP16 there, which ends at 65,504: from head dim 36 on a mask of -1e4 hides them.
    """
    p = replace(p, q=p.q.clone(), k=p.k.clone())
    # Amid a tile: kernels skip hidden tiles.
    middle, large = p.q.shape[2] // 2 + 1, math.sqrt(6e4 if p.q.dtype == torch.float16 else 2e5 / p.scale)
    p.q[..., 0], p.k[..., 0] = 0, 0
    p.q[:, :, :middle, 0], p.k[:, :, middle:, 0] = large, large
    o = run(call, p)[0].to(p.q.dtype)
    v = p.v[:, :, 0].repeat_interleave(p.q.shape[1] // p.k.shape[1], 1).double()
    v = _factor(o[:, :, 0], v) * v
    return {"first_row": ((o[:, :, 0] - v).abs().amax() / v.abs().amax()).item(), **leaks(call, p)}


def float_mask(call: Call, p: Inputs) -> dict[str, float]:
    """``float32_off_X``, ``bfloat16_off_X``: how far X of a causal mask of 0 and -inf in float32, and in the dtype of q, is from that of
    the same mask as booleans. In the worst row, over the latter's own error, which counts as 2^-7 of its size at least, that of right
    kernels in BF16: a kernel may round otherwise for such a mask.
    """
    mask = Mask(p.visible().repeat(len(p.q), 1, 1, 1))
    p = replace(p, causal=False, mask=mask)
    booleans, (expected, sizes, _) = run(call, p), exact(p)
    measured = {}
    for given in (torch.float32, p.q.dtype):
        name = str(given).removeprefix("torch.")
        with _saying(f"an additive mask in {name}"):
            found = run(call, replace(p, mask=mask._replace(dtype=given)))
        for x, a, b, e, size in zip(NAMES, found, booleans, expected, sizes, strict=True):
            measured[f"{name}_off_{x}"] = _worst_row(a, b, size) / max(2.0**-7, _worst_row(b, e, size))
    return measured


def leaks(call: Call, p: Inputs) -> dict[str, float]:
    """What passes a mask's edges; 0 to the bit for a right kernel.

    Where half of the rows have a dO, either half, ``hidden``: largest dK, dV of keys that none of these rows sees; ``idle``: largest dQ of
    the other rows. Where each feature of V is 0 in the keys that a row of its own sees, and of dO in the rows that see a key of its own,
    ``seen``: largest O, dV that no number but these 0 may reach.
    """
    T = p.q.shape[2]
    hidden, idle = 0.0, 0.0
    for rows in (slice(T // 2 + 1), slice(T // 2 + 1, T)):
        do = torch.zeros_like(p.do)
        do[:, :, rows] = p.do[:, :, rows]
        _, dq, dk, dv = run(call, p, do)
        seen = p.visible()[:, 0, rows].any(1)[:, None, :, None]
        hidden = max(hidden, *(_largest(x.masked_fill(seen, 0)) for x in (dk, dv)))
        dq[:, :, rows] = 0
        idle = max(idle, _largest(dq))
    (B, G, _, DV), n = p.v.shape, p.q.shape[1] // p.v.shape[1]
    visible = p.visible().to(p.v.dtype).expand(B, 1, T, T)
    # Of more rows than features the last, as a partial tile is there.
    own = T - 1 - torch.arange(B * G * DV, device=visible.device).view(B, G, DV) % T
    sequence = torch.arange(B, device=visible.device)[:, None, None]
    v, do = (
        x * (1 - edge[sequence, 0, own].mT).repeat_interleave(m, 1)
        for x, edge, m in ((p.v, visible, 1), (p.do, visible.mT, n))
    )
    o, _, _, dv = _read(p, run(call, replace(p, v=v, do=do)))
    reach_o = visible.float() @ v.abs().float().repeat_interleave(n, 1)
    reach_dv = (visible.mT.float() @ do.abs().float()).unflatten(1, (-1, n)).sum(2)
    passed = max(_largest(x.masked_fill(reach > 0, 0)) for x, reach in ((o, reach_o), (dv, reach_dv)))
    return {"seen": passed, "hidden": hidden, "idle": idle}


def _largest(x: Tensor) -> float:
    """Infinite where a NaN is, which Python's ``max`` would lose."""
    return x.double().abs().nan_to_num(math.inf).amax().item()


def last_key(call: Call, p: Inputs) -> dict[str, float]:
    """``missed``: error of the last row's O but for a factor, relative, where the last key has nearly all of its weight: a dropped tile
    or key shows.
    """
    k = p.k.clone()
    k[:, :, -1, :-1] = 3 * p.q[:, :: p.q.shape[1] // k.shape[1], -1, :-1]
    p = replace(p, k=k)
    o = forward(call, p)[:, :, -1].double()
    e = exact(p)[0][0][:, :, -1]
    e = _factor(o, e) * e
    return {"missed": ((o - e).norm() / e.norm()).item()}


def no_keys(call: Call, p: Inputs) -> dict[str, float]:
    """Every second sequence is padded on the left: its first rows see no key, and nobody reads them, as their dO is 0.

    ``dead``: 1 where their O is not finite, or 0; ``o_off``, ``gradients_off``: largest relative error of O elsewhere, and of dQ, dK, dV.
    """
    B, _, T, _ = p.q.shape
    starts = torch.tensor([T // 3 + 1, 0] * B, device=p.q.device)[:B, None, None, None]
    visible = p.visible() & (torch.arange(T, device=p.q.device) >= starts)
    dead = ~visible.any(-1, keepdim=True)
    p = replace(p, do=p.do.masked_fill(dead, 0), causal=False, mask=Mask(visible))
    o, *gradients = run(call, p)
    o_expected, *expected = exact(replace(p, mask=Mask(visible | dead)))[0]
    o_dead, o_seen, o_expected = o.masked_fill(~dead, 0), o.masked_fill(dead, 0), o_expected.masked_fill(dead, 0)
    return {
        "dead": float(not o_dead.isfinite().all()),
        "o_off": off((o_expected,), (o_seen,)),
        "gradients_off": off(expected, gradients),
    }


def not_a_number(call: Call, p: Inputs) -> dict[str, float]:
    """``spread``: numbers that are not finite where they must be, when in the first sequence a query of head 0 is NaN and one of the last
    head infinite. ``arrives``: 1 where the NaN shows in O and in a gradient, by which a loss scaler finds it, or 0.

    They may reach O and dQ of their own rows, and dK and dV of their own heads.
    """
    q, t = p.q.clone(), p.q.shape[2] // 3
    q[0, -1, t, 0] = math.inf
    q[0, 0, t, 0] = math.nan
    o, dq, dk, dv = run(call, replace(p, q=q))
    free = torch.ones(q.shape[:3], dtype=torch.bool, device=q.device)
    free[0, 0, t] = free[0, -1, t] = False
    heads = torch.ones(p.k.shape[:2], dtype=torch.bool, device=q.device)
    heads[0, 0] = heads[0, -1] = False
    elsewhere = (o[free], dq[free], dk[heads], dv[heads])
    arrives = bool(o[0, 0, t].isnan().any()) and any(bool(x[0, 0].isnan().any()) for x in (dq, dk, dv))
    return {"spread": float(sum(int((~x.isfinite()).sum()) for x in elsewhere)), "arrives": float(arrives)}


def repeatability(call: Call, p: Inputs) -> dict[str, float]:
    """``deterministic``: 1 where five calls have the same bits, with other work on the device between and beside them, or 0.

    ``again_off``, ``alone_off``, ``strides_off``, ``do_strides_off``: the largest relative difference of O, dQ, dK, dV then; the last
    where only dO has other strides than in the call before: [B, T, H, D] in memory, or strides of 0, as of ``o.sum()``, ``o.mean(2)`` and
    ``o.mean(0)``.
    ``again_row``: that of the worst row; ``again_over``: the larger of these two over what an order of sums in FP32 explains in this dtype.
    ``kept_off``, ``between_off``: of O, and of dQ, dK, dV, where another forward pass comes before the backward pass, as that of the next
    layer; ``some_off``: of gradients where q alone or k and v alone need a gradient.
    """
    B, G, dtype, device = *p.k.shape[:2], p.q.dtype, p.q.device
    first = run(call, p)
    again = []
    for _ in range(4):
        _other_work(device)
        again.append(run(call, p))
    # Two key heads of a sequence, as captured inputs have: at T 512 and D 64, --quick's on a GPU, one compiled kernel serves both.
    part = lambda x: x[:1, : 2 * x.shape[1] // G].clone(memory_format=torch.contiguous_format)  # noqa: E731
    with _saying("alone"):
        alone = run(call, replace(p, q=part(p.q), k=part(p.k), v=part(p.v), do=part(p.do)))
    in_batch = tuple(part(x) for x in first)
    # Of k and dO there is memory behind, so that a kernel that takes the strides of q for theirs reads numbers.
    with _saying("strides"):
        turned = run(functools.partial(_packed, call), p, _turned(p.do.repeat(4, 1, 1, 1))[:B])
    another = replace(p, q=p.q.flip(2), k=p.k.flip(2), v=p.v.flip(2))
    # Cloned at once, as a kernel may keep its buffers.
    with _saying("between"):
        backwards = [x.clone() for x in _run(call, p, p.do.clone(), between=another)[0]]
    with _saying("some"):
        some = [x.clone() for wanted in ("q", "kv") for x in _run(call, p, p.do.clone(), wanted)[0][1:]]
    alike = (x.expand_as(p.do) for x in (torch.ones((), dtype=dtype, device=device), p.do[:, :, :1], p.do[:1]))
    with _saying("do_strides"):
        do_strides = max(off(run(call, p, do.contiguous()), run(call, p, do)) for do in (_turned(p.do), *alike))
    again_off = max(off(first, other) for other in again)
    again_row = max(_worst_row(y, x.double(), x.double()) for other in again for x, y in zip(first, other, strict=True))
    return {
        "deterministic": float(all(same(first, other) for other in again)),
        "again_off": again_off,
        "again_row": again_row,
        "again_over": max(again_off / REORDERED[str(dtype).removeprefix("torch.")], again_row / REORDERED_ROW),
        "alone_off": off(in_batch, alone),
        "strides_off": off(first, turned),
        "kept_off": off(first[:1], backwards[:1]),
        "between_off": off(first[1:], backwards[1:]),
        "some_off": off(first[1:], some),
        "do_strides_off": do_strides,
    }


@contextlib.contextmanager
def _saying(where: str) -> Iterator[None]:
    """In which of several calls of a class a kernel raises, see ``told``."""
    try:
        yield
    except (Exception, SystemExit) as error:  # whatever a foreign kernel raises
        error.add_note(REPEATED.get(where, where))
        raise


def _packed(call: Call, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    """q and v as slices of one tensor, as a fused projection makes them: with an offset. k as one of a wider tensor: in other strides."""
    heads, D, DV = (k.shape[1], q.shape[1], v.shape[1]), k.shape[-1], v.shape[-1]
    wide = [torch.nn.functional.pad(x, (0, max(D, DV) - x.shape[-1]), value=1.0) for x in (k, q, v)]
    _, q, v = _turned(torch.cat(wide, 1)).split(heads, 1)
    return call(q[..., :D], k.repeat(2, 1, 1, 2)[: len(k), ..., :D], v[..., :DV], *rest)


def _turned(x: Tensor) -> Tensor:
    """As [B, T, H, D] in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _other_work(device: torch.device) -> None:
    """Matrix products, on a GPU in a stream of their own, so that the kernel runs beside them and its blocks in another order."""
    side = torch.cuda.Stream(device) if device.type == "cuda" else None
    with torch.cuda.stream(side):
        noise = torch.ones(1024, 1024, device=device)
        for _ in range(32 if side else 1):
            noise = noise @ noise / 1024


def off(a: Results, b: Results) -> float:
    """The largest relative difference; infinite where a NaN is."""
    pairs = ((x.double(), y.double()) for x, y in zip(a, b, strict=True))
    return max(((x - y).norm() / x.norm().clamp(min=1e-300)).nan_to_num(math.inf).item() for x, y in pairs)


def same(a: Results, b: Results) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class Own(NamedTuple):
    """``inputs``: the class that ``measure`` is given, and changes."""

    reason: str
    inputs: str
    measure: Callable[[Call, Inputs], dict[str, float]]


OWN = {
    "signs": Own(
        "a kernel that takes rowsum(dS) times the mean key out of dQ has rows of 0: other sums show its delta (experiments/invariant)",
        "peaked_1000", signed_sums,
    ),
    # In that length a compiled kernel is compiled already; for less than 128 queries FlexAttention has another kernel.
    "one_hot": Own(
        "one key has all the weight: O = V; the FMA exponent loses this past 2^16 ln 2 (attention/README.md)", "odd_length", one_hot_limit
    ),
    "mask_edges": Own("nothing passes the causal mask, forward or backward: hidden keys have large logits", "gaussian", mask_edges),
    "float_mask": Own(
        "a mask of 0 and -inf, in float32 and in q's dtype, is that of booleans: cuDNN read float32 as 16 bits (pytorch 191612)",
        "gaussian", float_mask,
    ),
    "last_key": Own("the last key of a length that no tile divides counts", "odd_length", last_key),
    "no_keys": Own("padding on the left: its rows see no key, which must not reach the other rows, nor any gradient", "gaussian", no_keys),
    "not_a_number": Own("a NaN or an infinite query stays in its own row, head and sequence, and shows", "gaussian", not_a_number),
    "repeatability": Own(
        "five calls, two key heads alone, other strides, fewer gradients: the same bits? (FlashAttention adds dQ by atomics)",
        "common_part", repeatability,
    ),
}  # fmt: skip
"""Classes that are compared with themselves or with zero."""
