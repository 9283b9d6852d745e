"""The rule that says when a layer runs away: logits of many heads are large, and a head grows faster than training can drift; or a
head's logits are large and grow faster by far.

Under AdamW or Muon a step moves a weight by about the learning rate at most, so the natural clock is c, the sum of the learning rates so
far. A drift that has always been there makes a product of two weights grow at most like c^2, in a run of any size and schedule; a drift
that sets in, or feeds itself, grows faster. Stable runs have a head or two with logits in the thousands, not half a layer of them.

Legend: L layers, H heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from .user_error import invalid

FMA_LOGIT = 2**16 * math.log(2)
"""From here on an exponent by one multiply-add is off by more than BF16 rounds away: docs/results.md, step two."""


@dataclass(frozen=True, kw_only=True)
class GrowthRule:
    """Thresholds, chosen on six of the runs of experiments/alarm/README.md, which has the error rates.

    Raises ``UserError`` for what is no such threshold. One that nothing reaches, as an infinite logit, switches off what it is for.
    """

    exponent: float = 3.0
    """A head's norm grows like this power of the clock, or faster."""
    window: float = 1.3
    """The exponent is measured from where the clock was this many times smaller."""
    logit: float = 500.0
    """Heads whose largest logit is below this do no harm yet, however fast they grow."""
    share: float = 0.5
    """At least this share of a layer's heads has logits that large, or none of them counts."""
    probes: int = 2
    """Probes in a row that must agree."""
    sudden_exponent: float = 8.0
    """A head whose largest logit grows like this power of the clock runs away by itself, at the first probe that sees it, ..."""
    sudden_logit: float = 2000.0
    """... if that logit is this large."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            expected, right = _WITHIN.get(name, ("0 or a positive number", lambda x: x >= 0))
            if isinstance(value, bool) or not isinstance(value, int | float) or not right(value):
                raise invalid(f"GrowthRule {name}", value, expected)


_WITHIN: dict[str, tuple[str, Callable[[float], bool]]] = {
    "window": ("a factor above 1", lambda x: 1 < x < math.inf),
    "probes": ("a whole number of 1 or more", lambda x: type(x) is int and x >= 1),
}


@dataclass(frozen=True)
class Probe:
    """What the rule looks at, float64 [L, H]."""

    step: int
    clock: float
    """Sum of the learning rates so far, in any unit."""
    norm_LH: Tensor
    """||W_Q^T W_K|| of each head, or what grows as it does: its largest logit."""
    logit_LH: Tensor
    """Largest logit."""


@dataclass(frozen=True)
class Growth:
    """What the rule says of the last probe."""

    leaves_LH: Tensor
    """bool"""
    exponent_LH: Tensor
    start: int
    """Probe that the exponent is measured from."""

    def heads(self, layer: int) -> tuple[int, ...]:
        """Heads of a layer that run away, the fastest first."""
        heads = self.leaves_LH[layer].nonzero().flatten().tolist()
        return tuple(sorted(heads, key=lambda head: -self.exponent_LH[layer, head].item()))

    def layers(self) -> list[int]:
        """Layers with such a head."""
        return [int(layer) for layer in self.leaves_LH.any(dim=1).nonzero().flatten()]


def growth(probes: Sequence[Probe], rule: GrowthRule) -> Growth | None:
    """The rule at the last of the probes of a run, in order; None where none of them is far enough before it."""
    leaves, exponent, start = torch.tensor(len(probes) > rule.probes), torch.tensor(0.0), None
    for end in range(max(0, len(probes) - rule.probes), len(probes)):
        start = window_start(probes, end, rule.window)
        if start is None:  # of the last probe alone the sudden part of the rule can be told
            leaves = torch.tensor(False)
            continue
        exponent = _exponent(probes[start], probes[end])
        large = large_logits(probes[end].logit_LH, rule)
        harmful = large & (large.double().mean(dim=1, keepdim=True) >= rule.share)
        leaves = leaves & (exponent >= rule.exponent) & harmful
    if start is None:
        return None
    sudden = _exponent(probes[start], probes[end], "logit_LH") >= rule.sudden_exponent
    leaves = leaves | (sudden & ~(probes[end].logit_LH < rule.sudden_logit))
    return Growth(leaves, exponent, start)


def large_logits(logit_LH: Tensor, rule: GrowthRule) -> Tensor:
    """Which heads have logits that can do harm, [L, H] bool; one that is not finite can."""
    return ~(logit_LH < rule.logit)


def window_start(probes: Sequence[Probe], end: int, window: float) -> int | None:
    """The latest probe at which the clock was ``window`` times smaller than at ``end``."""
    limit = probes[end].clock / window
    earlier = [index for index in range(end) if 0 < probes[index].clock <= limit]
    return earlier[-1] if earlier else None


def _exponent(before: Probe, after: Probe, of: str = "norm_LH") -> Tensor:
    """d ln norm / d ln clock between two probes, [L, H], or that of the logits; +inf where norm or logit is no longer finite."""
    exponent = (getattr(after, of) / getattr(before, of)).log() / math.log(after.clock / before.clock)
    return torch.where(after.norm_LH.isfinite() & after.logit_LH.isfinite(), exponent, math.inf)
