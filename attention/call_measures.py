"""What ``watch`` measures of one call of attention, in FP32, whatever kernel ran it.

Legend: B batch, H heads, T queries, S keys, D head dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .measures import QUERY_CHUNK, entropy_of, score_rows
from .reference.exact import exact_float32
from .reference.tiles import FORMAT_OF
from .rounding import round_to

COLUMNS = {
    "max_logit": "largest score",
    "entropy": "mean entropy of a row, nats",
    "one_hot": "share of rows whose largest probability rounds to 1 in BF16",
    "delta_error": "root mean square of rowsum(dO * O) - rowsum(P * dP), O as attention returned it, over that of rowsum(P * dP)",
    "delta_bias": "mean of the same, over the same",
    "row_residual": "root mean square of r = rowsum(dS), dS as the backward pass with that O rounds it, over the same",
    "dq_error": "||sum over queries of dQ - dQ in FP32|| over the layer's ||sum of dQ in FP32||, dQ as attention's backward pass made it",
    "nan_made": "1 where dQ is not finite though q, k, v, O and dO are: a kernel's mistake, not the model's",
}
"""Lists by layer and head. Null: no gradient came (or, for those with delta, dropout makes it unknown)."""
_ONE = 1 - 2.0**-9
SCORES = 2**24
"""Scores that exist at once; there are about eight arrays of that size (0.5 GB)."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of attention, of a few sequences. Copies, so that nothing keeps the batch alive."""

    q_BHTD: Tensor
    k_BHSD: Tensor
    v_BHSD: Tensor
    o_BHTD: Tensor
    mask_BHTS: Tensor | None
    causal: bool
    scale: float
    softcap: float
    dropout: float
    do_BHTD: Tensor | None = None
    dq_BHTD: Tensor | None = None


@torch.no_grad()
def measure(call: Call) -> dict[str, Tensor]:
    """``COLUMNS`` of one call, each [H]; those from gradients only where there are gradients."""
    q, k, v, o = (x.float() for x in (call.q_BHTD, call.k_BHSD, call.v_BHSD, call.o_BHTD))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    do = None if call.do_BHTD is None or call.dropout else call.do_BHTD.float()
    rows: dict[str, list[Tensor]] = {}
    dq = torch.zeros_like(q)
    with exact_float32(q.device):
        shape: dict[str, Any] = {"scale": call.scale, "softcap": call.softcap, "causal": call.causal}
        # A GPU is faster at few large operations, and waits for the launches of many small ones.
        shape["chunk"] = max(QUERY_CHUNK, SCORES // (q.shape[0] * q.shape[1] * k.shape[2]))
        for chosen, s in score_rows(q.transpose(1, 2), k.transpose(1, 2), mask_BHTS=call.mask_BHTS, **shape):
            largest = s.amax(dim=-1)
            entropy, p = entropy_of(s)
            found = {"max": largest, "entropy": entropy, "one": (p.amax(dim=-1) > _ONE).float()}
            if do is not None:
                dp = do[:, :, chosen] @ v[:, :, : s.shape[-1]].mT
                delta, from_o = (p * dp).sum(dim=-1), (do[:, :, chosen] * o[:, :, chosen]).sum(dim=-1)
                ds = round_to(p * (dp - from_o[..., None]), FORMAT_OF.get(call.o_BHTD.dtype, "fp32"))
                found |= {"delta": delta, "error": from_o - delta, "r": ds.sum(dim=-1)}
                slope = (1 - (s / call.softcap).square()).masked_fill(s == -math.inf, 0.0) if call.softcap else 1.0
                dq[:, :, chosen] = call.scale * (p * (dp - delta[..., None]) * slope) @ k[:, :, : s.shape[-1]]
            for name, value in found.items():
                # A row that may see no key, as of padding, has no softmax.
                rows.setdefault(name, []).append(value.where(largest != -math.inf, -math.inf if name == "max" else 0.0))
    whole = {name: torch.cat(parts, dim=2) for name, parts in rows.items()}
    seen = (whole["max"] != -math.inf).sum(dim=(0, 2)).clamp(min=1)

    def mean(x: Tensor) -> Tensor:
        return x.sum(dim=(0, 2)) / seen

    columns = {
        "max_logit": whole["max"].amax(dim=(0, 2)),
        "entropy": mean(whole["entropy"]),
        "one_hot": mean(whole["one"]),
    }
    if do is not None:
        size = mean(whole["delta"].square()).sqrt()
        columns["delta_error"] = _over(mean(whole["error"].square()).sqrt(), size)
        columns["delta_bias"] = _over(mean(whole["error"]), size)
        columns["row_residual"] = _over(mean(whole["r"].square()).sqrt(), size)
    if call.dq_BHTD is not None:
        dq = dq.where((whole["max"] != -math.inf)[..., None], 0.0)
        if do is not None:
            wrong, exact = ((x).sum(dim=(0, 2)).norm(dim=-1) for x in (call.dq_BHTD.float() - dq, dq))
            # Of the layer: a head of one-hot rows has hardly a gradient, and nothing is large beside that.
            columns["dq_error"] = _over(wrong, exact.norm())
        read = torch.stack([x.isfinite().all() for x in (q, k, v, o, call.do_BHTD) if x is not None]).all()
        if do is not None:  # what its dtype cannot hold, as behind a loss scale in FP16, is no mistake of the kernel
            read &= dq.abs().amax() <= torch.finfo(call.dq_BHTD.dtype).max
        columns["nan_made"] = (read & ~call.dq_BHTD.isfinite().all(dim=-1).all(dim=-1).all(dim=0)).float()
    return columns


def _over(x: Tensor, size: Tensor) -> Tensor:
    return x / size.where(size > 0, 1.0)


def as_lists(found: list[dict[str, Tensor]]) -> dict[str, Any]:
    """Columns of every layer as lists, None where it has none; the host waits once."""
    names = [name for name in COLUMNS if any(name in columns for columns in found)]
    there = [(name, layer) for name in names for layer, columns in enumerate(found) if name in columns]
    device = found[0]["max_logit"].device
    heads = [len(found[layer][name]) for name, layer in there]
    values = torch.cat([found[layer][name].to(device) for name, layer in there]).cpu().split(heads)
    lists: dict[str, Any] = {name: [None] * len(found) for name in names}
    for (name, layer), value in zip(there, values, strict=True):
        lists[name][layer] = value.tolist()
    return lists
