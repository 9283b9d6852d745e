"""Attention measured head by head, in FP32 from the tensors that it reads and gives, in chunks of queries; it waits for no device.

``attention_statistics`` is what the trainer's telemetry takes of q and k. ``measure`` is what ``watch`` takes of a call, whatever kernel
ran it: the same of q and k, and from the gradients how far delta and dQ are off.

Legend: B batch, H heads, T queries, D head dim; R the queries of one chunk, S the keys they see; X rows [B, H, R].
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..reference.exact import exact_float32
from ..rounding import round_to

TIE_TOLERANCE = 1e-3
"""Tolerance of the paper's later version."""
QUERY_CHUNK = 128


@torch.no_grad()
def attention_statistics(
    q_BTHD: Tensor,
    k_BTHD: Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    scores_format: str = "fp32",
    chunk: int = QUERY_CHUNK,
) -> dict[str, Tensor]:
    """Statistics of causal attention, each [H] float32, over batch and rows; NaN where a score is.

    ``max_logit``, the largest score S = scale * q . k (after the soft-cap), ``min_row_max``, the smallest row maximum, and the means over
    rows of ``entropy``, -sum P ln P in nats, of ``top_1``, the largest probability, of ``sink``, the probability of key 0 (rows 1 and
    later), and of ``ties``, 1 for a row with another score within ``TIE_TOLERANCE`` of its maximum.

    Args:
        q_BTHD, k_BTHD: any float dtype, as the kernel's products read them (rounded to the site ``inputs``, where that is coarser).
        scale: of q . k.
        softcap: c > 0 makes the scores c tanh(S / c).
        scores_format: format of the site ``scores``: ties and row maxima are those of the rounded scores, as the kernel sees them;
            probabilities are always those of the unrounded ones.
        chunk: queries handled at once: memory is B * H * chunk * T floats, times about four.
    """
    rows: list[dict[str, Tensor]] = []
    with exact_float32(q_BTHD.device):
        for _, s_BHRS in score_rows(q_BTHD, k_BTHD, scale=scale, softcap=softcap, chunk=chunk):
            rounded_BHRS = round_to(s_BHRS, scores_format)
            max_X = rounded_BHRS.amax(dim=-1)
            # The comparison of ``attention.reference.stabilize``, in FP32.
            ties_X = ((rounded_BHRS >= (max_X - TIE_TOLERANCE)[..., None]).sum(dim=-1) > 1).float()
            of_rows, p_BHRS = _row_probabilities(s_BHRS)
            rows.append({"max": max_X, "ties": ties_X, "sink": p_BHRS[..., 0], **of_rows})
    whole = {name: torch.cat([row[name] for row in rows], dim=2) for name in rows[0]}
    max_BHT = whole.pop("max")
    whole["sink"] = whole["sink"][:, :, min(1, max_BHT.shape[2] - 1) :]  # row 0 has no other key
    extremes = {"max_logit": max_BHT.amax(dim=(0, 2)), "min_row_max": max_BHT.amin(dim=(0, 2))}
    return extremes | {name: x.mean(dim=(0, 2)) for name, x in whole.items()}


def score_rows(
    q_BTHD: Tensor,
    k_BSHD: Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    causal: bool = True,
    chunk: int = QUERY_CHUNK,
) -> Iterator[tuple[slice, Tensor]]:
    """Some queries at a time: which, and their scores S [B, H, R, S] in FP32.

    ``causal``: query t sees keys up to t; S ends with the last of them and is -inf where others do not see it.
    """
    q_BHTD, k_BHSD = q_BTHD.detach().float().transpose(1, 2), k_BSHD.detach().float().transpose(1, 2)
    for start in range(0, q_BHTD.shape[2], chunk):
        rows = slice(start, min(start + chunk, q_BHTD.shape[2]))
        seen = min(rows.stop, k_BHSD.shape[2]) if causal else k_BHSD.shape[2]
        s_BHRS = (q_BHTD[:, :, rows] @ k_BHSD[:, :, :seen].mT).mul_(scale)
        if softcap:
            s_BHRS = s_BHRS.div_(softcap).tanh_().mul_(softcap)
        if causal and seen > start:
            # Keys before ``start`` are seen by all of these queries.
            future = torch.ones(rows.stop - start, seen - start, dtype=torch.bool, device=s_BHRS.device).triu(1)
            s_BHRS[..., start:].masked_fill_(future, -math.inf)
        yield rows, s_BHRS


@torch.no_grad()
def largest_logits(q_BTHD: Tensor, k_BTHD: Tensor, *, scale: float) -> Tensor:
    """Largest scale q . k of each head over the batch and the causal half, [H] float32, whatever autocast is on.

    With TF32 on it is of TF32 products: a compiled model calls this, where ``exact_float32`` cannot be traced.
    No absolute value: a large negative logit does no harm beside larger ones of its row.
    """
    with torch.autocast(q_BTHD.device.type, enabled=False):
        tops = [s_BHRS.amax(dim=(0, 2, 3)) for _, s_BHRS in score_rows(q_BTHD, k_BTHD, scale=scale)]
    return torch.stack(tops).amax(dim=0)


def _masked(s_BHRS: Tensor, mask_BHTS: Tensor | None, rows: slice) -> Tensor:
    """``mask_BHTS``: True, or a number to add, where a query may see a key; broadcast."""
    if mask_BHTS is None:
        return s_BHRS
    mask = mask_BHTS[..., rows if mask_BHTS.shape[-2] > 1 else slice(None), : s_BHRS.shape[-1]]
    return s_BHRS.masked_fill_(~mask, -math.inf) if mask.dtype == torch.bool else s_BHRS + mask.float()


def _row_probabilities(s_BHRS: Tensor, sinks_H: Tensor | None = None) -> tuple[dict[str, Tensor], Tensor]:
    """Entropy of each row, a sink included, its largest probability of a key, and P = softmax(S) of the keys."""
    keys = s_BHRS.shape[-1]
    if sinks_H is not None:
        s_BHRS = torch.cat((s_BHRS, sinks_H[:, None, None].expand(*s_BHRS.shape[:3], 1)), dim=-1)
    log_p_BHRS = torch.log_softmax(s_BHRS, dim=-1)
    p_BHRS = log_p_BHRS.exp()
    # A masked key has ln P = -inf, and 0 * -inf is NaN; the floor lies far below the smallest P that is not 0.
    entropy_X = -(p_BHRS * log_p_BHRS.clamp_(min=-1e4)).sum(dim=-1)
    p_BHRS = p_BHRS[..., :keys]
    return {"entropy": entropy_X, "top_1": p_BHRS.amax(dim=-1)}, p_BHRS


COLUMNS = {
    "max_logit": "largest score, after a soft-cap",
    "entropy": "mean entropy of a row, nats",
    "one_hot": "share of rows whose largest probability rounds to 1 in BF16",
    "delta_error": "root mean square of rowsum(dO * O) - rowsum(P * dP), O as attention returned it, over that of rowsum(P * dP)",
    "delta_bias": "mean of the same, over the same",
    "o_error": "||O - P V|| over the layer's ||P (1 + |S|) n||, n the norms of V's rows: rounding's part of O is in proportion to that",
    "row_residual": "root mean square of rowsum(dS) as the kernel leaves it, over the same; measured with its calls (check.measures)",
    "dq_error": "||sum over queries of dQ - dQ in FP32|| over the layer's ||sum of dQ in FP32||, dQ as attention's backward pass made it",
    "nan_made": "1 where dQ is not finite though q, k, v, O and dO are: a kernel's mistake, not the model's",
}
"""Lists by layer and head. Null: no gradient came (or, for those with delta, dropout makes it unknown); and ``row_residual`` of what is no
call of torch's ``scaled_dot_product_attention``, ours or a Hugging Face model's, or has a soft-cap, sinks or a mask of another form; and
``o_error`` of what is torch's or ours, whose O is that of the call, in ours with the roundings that were chosen. It leaves out rows whose
O is 0 in all heads, and those whose dO is known to be 0.

``delta_*`` are of that formula, whatever the kernel does: of one with another delta, as torch's math formula or ``flash_delta_from_p``,
``row_residual`` is about 0. It is of q and k without one feature, and without the rounding of dS. A sink counts in the softmax and in
``entropy``; ``max_logit`` and ``one_hot`` are of the keys.
"""
_ONE = 1 - 2.0**-9
HIDDEN = 1e4
"""Scores below minus this are those that a floating mask hides, at the latest with FP16's lowest number."""
SCORES = 2**24
"""Scores that exist at once; there are about eight arrays of that size (0.5 GB)."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of attention, of a few sequences. Copies, so that nothing keeps the batch alive."""

    q_BHTD: Tensor
    k_BHSD: Tensor
    v_BHSD: Tensor
    o_BHTD: Tensor | None
    """None where it is not known: then there are no gradients either."""
    mask_BHTS: Tensor | None
    causal: bool
    scale: float
    softcap: float
    dropout: float
    sinks_H: Tensor | None = None
    """FP32: one more logit of each row, without a value."""
    foreign: bool = False
    """Whether O was made by another function than torch's and ours, so that it may be of other tensors."""
    kernel: Callable[..., Tensor] | None = None
    """What made O, called as ``check.kernels.Call`` with the mask of this call; None where that is not known."""
    do_BHTD: Tensor | None = None
    dq_BHTD: Tensor | None = None


@torch.no_grad()
def measure(call: Call) -> dict[str, Tensor]:
    """``COLUMNS`` of one call, each [H]; those from gradients only where there are gradients."""
    q, k, v = (x.float() for x in (call.q_BHTD, call.k_BHSD, call.v_BHSD))
    o = q if call.o_BHTD is None else call.o_BHTD.float()
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    do = None if call.do_BHTD is None or call.dropout else call.do_BHTD.float()
    rows: dict[str, list[Tensor]] = {}
    dq = torch.zeros_like(q)
    with exact_float32(q.device):
        shape: dict[str, Any] = {"scale": call.scale, "softcap": call.softcap, "causal": call.causal}
        # A GPU is faster at few large operations, and waits for the launches of many small ones.
        shape["chunk"] = max(QUERY_CHUNK, SCORES // (q.shape[0] * q.shape[1] * k.shape[2]))
        for chosen, s in score_rows(q.transpose(1, 2), k.transpose(1, 2), **shape):
            # A mask or bias is behind the soft-cap. What causal attention hides has P = 0, and 0 * inf is NaN.
            slope = (1 - (s / call.softcap).square()).masked_fill(s == -math.inf, 0.0) if call.softcap else 1.0
            s = _masked(s, call.mask_BHTS, chosen)
            largest, (of_rows, p) = s.amax(dim=-1), _row_probabilities(s, call.sinks_H)
            found = {"max": largest, "entropy": of_rows["entropy"], "one": (of_rows["top_1"] > _ONE).float()}
            if call.foreign and call.o_BHTD is not None and not call.dropout:
                # At padded queries kernels for packed sequences leave zeros in all heads; a row without dO is read by nobody.
                out = (largest < -HIDDEN) | ~o[:, :, chosen].any(dim=-1).any(dim=1, keepdim=True)
                out = out if do is None else out | ~do[:, :, chosen].any(dim=-1)
                off = (o[:, :, chosen] - p @ v[:, :, : s.shape[-1]]).norm(dim=-1)
                # In the memory of the scores, which nothing reads after this.
                sizes = s.abs_().clamp_(max=HIDDEN).add_(1).mul_(p) @ v[:, :, : s.shape[-1]].norm(dim=-1, keepdim=True)
                found |= {"off": off.masked_fill(out, 0.0), "sizes": sizes[..., 0].masked_fill(out, 0.0)}
            if do is not None:
                dp = do[:, :, chosen] @ v[:, :, : s.shape[-1]].mT
                delta, from_o = (p * dp).sum(dim=-1), (do[:, :, chosen] * o[:, :, chosen]).sum(dim=-1)
                ds = p * (dp - delta[..., None]) * slope
                found |= {"delta": delta, "error": from_o - delta, "ds": ds.abs().amax(dim=-1)}
                dq[:, :, chosen] = call.scale * ds @ k[:, :, : s.shape[-1]]
            for name, value in found.items():
                # A row that may see no key, as of padding, has no softmax.
                rows.setdefault(name, []).append(value.where(largest != -math.inf, -math.inf if name == "max" else 0.0))
    whole = {name: torch.cat(parts, dim=2) for name, parts in rows.items()}
    seen = (whole["max"] != -math.inf).sum(dim=(0, 2)).clamp(min=1)

    def mean(x: Tensor) -> Tensor:
        return x.sum(dim=(0, 2)) / seen

    columns = {"max_logit": whole["max"].amax(dim=(0, 2)), "entropy": mean(whole["entropy"])}
    columns["one_hot"] = mean(whole["one"])
    if "off" in whole:
        columns["o_error"] = _over(whole["off"].square().sum(dim=(0, 2)).sqrt(), whole["sizes"].norm())
    if do is not None:
        size = mean(whole["delta"].square()).sqrt()
        columns["delta_error"] = _over(mean(whole["error"].square()).sqrt(), size)
        columns["delta_bias"] = _over(mean(whole["error"]), size)
        if (r := _row_sums(call)) is not None:
            columns["row_residual"] = _over(mean(r.where(whole["max"] != -math.inf, 0.0).square()).sqrt(), size)
    if call.dq_BHTD is not None:
        dq = dq.where((whole["max"] != -math.inf)[..., None], 0.0)
        if do is not None:
            wrong, exact = (x.sum(dim=(0, 2)).norm(dim=-1) for x in (call.dq_BHTD.float() - dq, dq))
            # Of the layer: a head of one-hot rows has hardly a gradient, and nothing is large beside that.
            columns["dq_error"] = _over(wrong, exact.norm())
        read = torch.stack([x.isfinite().all() for x in (q, k, v, o, call.do_BHTD) if x is not None]).all()
        if do is not None:  # what its dtype cannot hold, as behind a loss scale in FP16, is no mistake of the kernel
            # Kernels round dS before its scale, or after.
            ds_H, dq_H = max(1.0, abs(call.scale)) * whole["ds"].amax(dim=(0, 2)), dq.abs().amax(dim=(0, 2, 3))
            read = read & (torch.maximum(dq_H, ds_H) <= torch.finfo(call.dq_BHTD.dtype).max)
        columns["nan_made"] = (read & ~call.dq_BHTD.isfinite().all(dim=-1).all(dim=-1).all(dim=0)).float()
    return columns


def _row_sums(call: Call) -> Tensor | None:
    """rowsum(dS) [B, H, T] as the kernel leaves it; None where that is not known."""
    if call.kernel is None or call.do_BHTD is None:
        return None
    from ..check.captured import Inputs  # its package captures inputs by what is here
    from ..check.measures import rows_from_outside

    inputs = Inputs(call.q_BHTD, call.k_BHSD, call.v_BHSD, call.do_BHTD, call.scale, call.causal)
    try:
        with torch.enable_grad(), torch.autocast(call.q_BHTD.device.type, enabled=False):
            return rows_from_outside(call.kernel, inputs)
    # Foreign attention may take no call of a few sequences, or have no backward pass, and raises what it likes.
    except Exception:
        return None


def _over(x: Tensor, size: Tensor) -> Tensor:
    return x / size.where(size > 0, 1.0)


def as_lists(found: list[dict[str, Tensor]]) -> dict[str, Any]:
    """Columns of every layer as lists, None where it has none."""
    names = [name for name in COLUMNS if any(name in columns for columns in found)]
    return {name: [columns[name].tolist() if name in columns else None for columns in found] for name in names}
