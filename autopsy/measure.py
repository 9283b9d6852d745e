"""Is the gradient of a checkpoint made by attention's rounding? One number a layer, and by head what it comes from.

The number: ||error of dW_Q|| / ||dW_Q||. The error is the sum over tokens that an error of delta makes (arXiv 2510.04212, equations 2 and
3); dW_Q has delta from an FP32 O. Both sum over all tokens looked at, and over the heads of a layer: a head whose rows are all one-hot has
a dW_Q near 0, and a large error beside it alone means nothing.

Legend: B batch, T positions, H heads, D head width, C width of X, L layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attention.numerics import numerics_from_key
from attention.plan import HeadGroup, LayerPlan
from attention.presets import RECOMMENDED
from attention.reference.tiles import FORMAT_OF
from attention.watching.measure import largest_logits
from errors import UserError
from probes.capture import LayerCapture
from probes.delta_error import delta_errors, high_outputs, row_residuals, summarize
from probes.low_rank import high_dw_q, predicted_dw_q_error, weighted_keys
from probes.spectral import spectral_norm

MADE_BY_ROUNDING = 1.0
"""Least ||error of dW_Q|| / ||dW_Q|| of a layer to say yes. Error rates: docs/diagnosis.md."""
VANISHED = 1e-3
"""A change that leaves so little of the error removes it: where rows are one-hot dW_Q cancels, and FP32's rounding is as large as it."""
REMOVED = 0.1
"""A change removes the error if at most this is left of dW_Q, and of the error."""
FIXES = (RECOMMENDED, "flash_delta_from_p", "flash_fp32_o")
"""Presets that are tried, in the order in which they are recommended (docs/diagnosis.md)."""


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
    switch_on: str = "--attention.default.preset {}"
    """How its owner changes the preset."""
    facts: dict[str, str] = field(default_factory=dict)
    """What the page says about it, by name."""


@dataclass(frozen=True, kw_only=True)
class HeadEvidence:
    """One head."""

    layer: int
    head: int
    attention: str
    """Label of its spec."""
    share: float
    """||error of dW_Q of this head|| / ||dW_Q of its layer||."""
    factor: float
    """||error of dW_Q|| / ||dW_Q||, both of this head."""
    z: float
    """Mean of the error of delta over its standard error."""
    ratio: float
    """|mean| over root mean square of the error of delta: 1 if every token has the same error."""
    w_q_norm: float
    """Spectral norm of this head's rows of W_Q."""
    max_logit: float


@dataclass(frozen=True, kw_only=True)
class Findings:
    """A whole model."""

    heads: list[HeadEvidence]
    factors: list[float]
    """By layer: ||error of dW_Q|| / ||dW_Q||; NaN or infinite where something is not finite."""
    fixes: dict[str, float]
    """By preset tried: the largest factor that is left in the layers of ``made_by_rounding``."""
    errors: dict[str, float] = field(default_factory=dict)
    """By preset tried: the largest ||error of dW_Q|| with it over that without."""

    @property
    def made_by_rounding(self) -> list[int]:
        """Layers whose dW_Q is made by rounding, the worst first."""
        found = [layer for layer, factor in enumerate(self.factors) if factor >= MADE_BY_ROUNDING]
        return sorted(found, key=lambda layer: -self.factors[layer])

    @property
    def fix(self) -> str | None:
        """The first preset that removes the error."""
        limit = REMOVED * min(1.0, max(self.factors))
        return next(
            (name for name, left in self.fixes.items() if left <= limit or self.errors.get(name, 1.0) <= VANISHED), None
        )

    def worst(self, layer: int) -> list[HeadEvidence]:
        """Heads that make at least a tenth of the layer's error, the worst first."""
        heads = sorted((h for h in self.heads if h.layer == layer), key=lambda h: -h.share)
        return [h for h in heads if h.share >= REMOVED * heads[0].share]


class LayerSums:
    """What the batches of one layer add up to."""

    def __init__(self) -> None:
        self._error = self._dw = torch.zeros(())
        self._tokens: list[Tensor] = []
        self._logits: list[Tensor] = []

    def add(self, layer: LayerCapture) -> None:
        """Measure one batch; keeps [B, H, T] numbers and [H, D, C] sums, not the capture."""
        high_BHTD = high_outputs(layer)
        pk_BHTD, x_BTC = weighted_keys(layer), layer.x_BTC.float()
        error_BHT = reaching_dq(layer, high_BHTD)
        self._error = self._error + predicted_dw_q_error(error_BHT, pk_BHTD, x_BTC, layer.scale)
        self._dw = self._dw + high_dw_q(layer, high_BHTD=high_BHTD)
        self._tokens.append(error_BHT)
        self._logits.append(largest_logits(layer.q_BTHD, layer.k_BTHD, scale=layer.scale))

    @property
    def error(self) -> float:
        return self._error.double().norm().item()

    @property
    def factor(self) -> float:
        return (self._error.double().norm() / self._dw.double().norm()).item()

    def evidence(self, layer: LayerCapture, w_q: Tensor) -> list[HeadEvidence]:
        """One ``HeadEvidence`` a head; ``layer`` is any capture of the layer, ``w_q`` [H * D, C]."""
        error_H, dw_H = (x.double().flatten(1).norm(dim=1) for x in (self._error, self._dw))
        summary = summarize(torch.cat(self._tokens))
        table = {
            "share": error_H / dw_H.norm(),
            "factor": error_H / dw_H,
            "z": summary.z_H,
            "ratio": (summary.mean_H.abs() / summary.rms_H).nan_to_num(),
            "w_q_norm": spectral_norm(w_q.float().reshape(len(error_H), -1, w_q.shape[1])),
            "max_logit": torch.stack(self._logits).amax(dim=0),
        }
        labels = {head: group.spec.label() for group in layer.plan.groups for head in group.heads}
        return [
            HeadEvidence(
                layer=layer.layer, head=head, attention=labels[head], **{k: v[head].item() for k, v in table.items()}
            )
            for head in range(len(error_H))
        ]


def reaching_dq(layer: LayerCapture, high_BHTD: Tensor) -> Tensor:
    """The error of delta that stays in dQ, [B, H, T]: delta's error, or -rowsum(dS) of presets that take that sum out."""
    if all(numerics_from_key(group.numerics).row_residual == "kept" for group in layer.plan.groups):
        return delta_errors(layer, high_BHTD=high_BHTD).error_BHT
    return -row_residuals(layer)[0]


def examine(subject: Subject) -> Findings:
    """Measure every layer and head on all batches, and the layers made by rounding once more with each of ``FIXES``."""
    sums = [LayerSums() for _ in range(subject.n_layer)]
    last: list[LayerCapture] = []
    for batch in range(subject.batches):
        last = subject.capture(batch, None)
        for layer in last:
            sums[layer.layer].add(layer)
    heads = [one for layer in last for one in sums[layer.layer].evidence(layer, subject.w_q(layer.layer))]
    found = Findings(heads=heads, factors=[one.factor for one in sums], fixes={})
    tried = try_fixes(subject, found.made_by_rounding)
    fixes = {name: max(one.factor for one in by_layer.values()) for name, by_layer in tried.items()}
    errors = {
        name: max(one.error / sums[layer].error for layer, one in by_layer.items()) for name, by_layer in tried.items()
    }
    return dataclasses.replace(found, fixes=fixes, errors=errors)


def try_fixes(subject: Subject, layers: list[int]) -> dict[str, dict[int, LayerSums]]:
    """By preset and layer: what these layers add up to with it. q, k, v and dO stay as captured."""
    sums = {name: {layer: LayerSums() for layer in layers} for name in FIXES}
    for batch in range(subject.batches if layers else 0):
        for layer in subject.capture(batch, layers):
            for name in list(sums):
                try:
                    sums[name][layer.layer].add(with_preset(layer, name))
                except UserError:  # a single site of this spec, or the dtype, contradicts the preset
                    del sums[name]
    return sums if layers else {}


@torch.no_grad()
def with_preset(layer: LayerCapture, preset: str) -> LayerCapture:
    """The same q, k, v and dO with a preset on each head's own base and sites, O computed again by ``flash_reference``."""
    o_BTHD, groups = layer.o_BTHD.clone(), []
    for group in layer.plan.groups:
        spec = dataclasses.replace(group.spec, preset=preset, backend="")
        numerics = spec.resolve()
        numerics.concrete(FORMAT_OF[layer.q_BTHD.dtype])
        q, k, v, _, _ = layer.heads(group)
        operator = torch.ops.attention.flash_reference_forward
        o = operator(q, k, v, layer.rounding_seed, numerics.key(), layer.scale, True, layer.softcap)[0]
        o_BTHD[:, :, list(group.heads)] = o.to(o_BTHD.dtype)
        groups.append(HeadGroup(group.heads, spec, "flash_reference", numerics.key()))
    return dataclasses.replace(layer, o_BTHD=o_BTHD, plan=LayerPlan(layer.plan.layer, layer.plan.n_head, tuple(groups)))
