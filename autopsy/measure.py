"""Is a checkpoint dying of biased rounding in attention, and in which layer and head? Measured, then judged by one rule.

The chain of arXiv 2510.04212, Figure 1, link by link: repeated row maxima make several P_bar exactly 1; with V of one sign O is
rounded with a bias; delta = rowsum(dO * O) inherits it where dO has a sign of its own; the error of dW_Q is a sum of like outer
products; W_Q grows in that direction; logits grow. ``verdict`` looks at the measured error of delta alone: the other links
are conditions and consequences, and each of them also occurs in healthy models.

Legend: B batch, T positions, H heads, D head width, C width of X, L layers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attention.measures import largest_logits
from autopsy.verdict import (
    Bias,
    Finding,
    dithered_errors,
    measure_bias,
    normal_equivalent,
    summary_of,
    suspect,
    token_sizes,
    verdict,
)
from probes.accumulation import count_ones, one_signed_share
from probes.capture import LayerCapture
from probes.delta_error import delta_errors, effective_numerics, group_of, high_outputs, output_errors
from probes.low_rank import coherence, high_dw_q, predicted_dw_q_error, weighted_keys
from probes.spectral import spectral_norm


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model and data to look at. ``capture(batch, layers)`` gives the same numbers every time."""

    name: str
    n_layer: int
    n_head: int
    batches: int
    capture: Callable[[int, Sequence[int] | None], list[LayerCapture]]
    w_q: Callable[[int], Tensor]
    """W_Q of a layer [H * D, C], rows of a head together."""
    facts: dict[str, str] = field(default_factory=dict)
    """What the page says about it, by name."""


@dataclass(frozen=True, kw_only=True)
class HeadEvidence:
    """The chain of Figure 1 for one head, link by link."""

    layer: int
    head: int
    attention: str
    """Label of its spec."""
    delta: str
    """Where delta comes from: site ``delta`` of its numerics."""
    tied_rows: float
    """Share of rows with a second score within 2^-9 of the maximum."""
    rows_of_ones: float
    """Share of rows with two or more P_bar of exactly 1."""
    one_signed: float
    """Share of features of V that have one sign at nine tokens of ten."""
    output_outward: float
    """Mean of sign(O) * error(O) over the root mean square of O's error: above 0 is away from zero."""
    output_outward_z: float
    bias: Bias
    """Of delta, as captured."""
    dithered: Bias | None = None
    """Of delta under dither; measured for suspects only."""
    coherence: float
    """Mean cosine of two outer products (P K)[T]^T X[T]."""
    pull: float
    """||sum|| / sum of norms of the terms of equation 3."""
    top_share: float
    """Share of the squared norm of dW_Q's error in its top singular direction."""
    error_to_gradient: float
    """||dW_Q's error|| / ||dW_Q||."""
    w_q_norm: float
    """Spectral norm of this head's rows of W_Q."""
    max_logit: float

    @property
    def finding(self) -> Finding:
        return verdict(self.bias, self.dithered, self.error_to_gradient)

    def closeness(self) -> float:
        """|z| as captured, to order heads by; below that of any other where it is not known."""
        return -1.0 if math.isnan(self.bias.z) else abs(self.bias.z)


class LayerSums:
    """What the batches of one layer add up to."""

    def __init__(self) -> None:
        self.per_token: dict[str, list[Tensor]] = {}
        self.totals: dict[str, Tensor] = {}
        self.max_logit_H: Tensor | None = None

    def add(self, layer: LayerCapture) -> None:
        """Measure one batch; keeps [B, H, T] numbers and [H, D, C] sums, not the capture."""
        high_BHTD = high_outputs(layer)
        error_BHT = delta_errors(layer, high_BHTD=high_BHTD).error_BHT
        o_error_BHTD = output_errors(layer, high_BHTD=high_BHTD)
        outward_BHTD = o_error_BHTD * high_BHTD.sign()
        ones = count_ones(layer)
        per_token = {
            "error": error_BHT,
            "size": token_sizes(layer),
            "outward": outward_BHTD.mean(dim=-1),
            "o_squares": o_error_BHTD.square().mean(dim=-1),
            "ones": (ones.ones_BHT >= 2).float(),
            "ties": (ones.ties_BHT["2^-9"] >= 2).float(),
        }
        for name, value in per_token.items():
            self.per_token.setdefault(name, []).append(value)
        pk_BHTD, x_BTC = weighted_keys(layer), layer.x_BTC.float()
        term_norms_BHT = layer.scale * error_BHT.abs() * pk_BHTD.norm(dim=-1) * x_BTC.norm(dim=-1)[:, None]
        self._sum("dw_error", predicted_dw_q_error(error_BHT, pk_BHTD, x_BTC, layer.scale))
        self._sum("dw", high_dw_q(layer, high_BHTD=high_BHTD))
        self._sum("norms", term_norms_BHT.sum(dim=(0, 2)))
        alike = coherence(pk_BHTD, x_BTC)
        self._sum("coherence", alike.within_H)
        self._sum("one_signed", one_signed_share(layer.v_BTHD))
        logits_H = largest_logits(layer.q_BTHD, layer.k_BTHD, scale=layer.scale)
        self.max_logit_H = logits_H if self.max_logit_H is None else torch.maximum(self.max_logit_H, logits_H)

    def _sum(self, name: str, value: Tensor) -> None:
        self.totals[name] = self.totals.get(name, 0) + value

    def errors(self) -> Tensor:
        """delta_lp - delta_hp of all sequences, [B of all batches, H, T]."""
        return torch.cat(self.per_token["error"]).cpu()

    def evidence(self, layer: LayerCapture, w_q: Tensor) -> list[HeadEvidence]:
        """One ``HeadEvidence`` a head; ``layer`` is any capture of the layer, ``w_q`` [H * D, C]."""
        tokens = {name: torch.cat(values) for name, values in self.per_token.items()}
        biases = measure_bias(tokens["error"], tokens["size"])
        outward = summary_of(tokens["outward"])
        o_rms_H = tokens["o_squares"].double().mean(dim=(0, 2)).sqrt()
        batches = len(self.per_token["error"])
        norms_H = spectral_norm(w_q.float().reshape(len(biases), -1, w_q.shape[1]))
        error_HDC = self.totals["dw_error"].nan_to_num()
        size_H = self.totals["dw_error"].square().sum(dim=(1, 2)).sqrt()
        assert self.max_logit_H is not None
        columns = {
            "tied_rows": tokens["ties"].mean(dim=(0, 2)),
            "rows_of_ones": tokens["ones"].mean(dim=(0, 2)),
            "one_signed": self.totals["one_signed"] / batches,
            "output_outward": _ratio(outward.mean_H, o_rms_H),
            "coherence": self.totals["coherence"] / batches,
            "pull": _ratio(size_H, self.totals["norms"]),
            "top_share": _ratio(
                spectral_norm(error_HDC).double().square(), error_HDC.double().square().sum(dim=(1, 2))
            ),
            "error_to_gradient": _ratio(size_H, self.totals["dw"].square().sum(dim=(1, 2)).sqrt()),
            "w_q_norm": norms_H,
            "max_logit": self.max_logit_H,
        }
        rows: list[dict[str, Any]] = [
            dict(zip(columns, values, strict=True))
            for values in torch.stack([c.double() for c in columns.values()], dim=1).tolist()
        ]
        groups = {head: group for group in layer.plan.groups for head in group.heads}
        return [
            HeadEvidence(
                layer=layer.layer,
                head=head,
                attention=groups[head].spec.label(),
                delta=effective_numerics(groups[head]).delta,
                bias=biases[head],
                output_outward_z=normal_equivalent(outward_z, outward.units - 1),
                **row,
            )
            for head, (row, outward_z) in enumerate(zip(rows, outward.z_H.tolist(), strict=True))
        ]


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    return above / torch.where(below > 0, below, 1.0)


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Every head of a model, and the tokens' errors behind them."""

    heads: list[HeadEvidence]
    errors: list[Tensor]
    """By layer: delta_lp - delta_hp, [sequences, H, T]."""

    @property
    def biased(self) -> list[HeadEvidence]:
        """The heads that are accused, the most significant first."""
        return sorted((h for h in self.heads if h.finding == "biased"), key=lambda h: -abs(h.bias.z))

    @property
    def strained(self) -> list[HeadEvidence]:
        """The heads whose error is large or has a small mean, the largest part of dW_Q first."""
        return sorted((h for h in self.heads if h.finding == "strained"), key=lambda h: -h.error_to_gradient)

    def head(self, layer: int, head: int) -> HeadEvidence:
        return next(h for h in self.heads if (h.layer, h.head) == (layer, head))


def examine(subject: Subject) -> Findings:
    """Measure every layer and head on all batches, and the suspects under dither."""
    sums = [LayerSums() for _ in range(subject.n_layer)]
    last: list[LayerCapture] = []
    for batch in range(subject.batches):
        last = subject.capture(batch, None)
        for layer in last:
            sums[layer.layer].add(layer)
    heads = [one for layer in last for one in sums[layer.layer].evidence(layer, subject.w_q(layer.layer))]
    dithered = dither_suspects(subject, [(one.layer, one.head) for one in heads if suspect(one.bias)])
    heads = [dataclasses.replace(one, dithered=dithered.get((one.layer, one.head))) for one in heads]
    return Findings(heads=heads, errors=[one.errors() for one in sums])


def dither_suspects(subject: Subject, suspects: list[tuple[int, int]]) -> dict[tuple[int, int], Bias]:
    """The bias under dither of each head (layer, head) named, with its own numerics, on all batches."""
    measured: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
    layers = sorted({layer for layer, _ in suspects})
    for batch in range(subject.batches if suspects else 0):
        for layer in subject.capture(batch, layers):
            for head in [head for where, head in suspects if where == layer.layer]:
                numerics = effective_numerics(group_of(layer, head))
                measured.setdefault((layer.layer, head), []).append(dithered_errors(layer, head, numerics, batch))
    return {
        place: measure_bias(torch.cat([error for error, _ in pairs]), torch.cat([size for _, size in pairs]))[0]
        for place, pairs in measured.items()
    }
