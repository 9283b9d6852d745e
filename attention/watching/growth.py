"""The rule by which the alarm flags a layer: logits of many heads are large, and a head grows faster than training can drift; or a
head's logits are large and grow faster by far.

Under AdamW or Muon a step moves a weight by about the learning rate at most, so the natural clock is c, the sum of the learning rates so
far. A drift that has always been there makes a product of two weights grow at most like c^2, in a run of any size and schedule; a drift
that sets in, or feeds itself, grows faster. Stable runs have a head or two with logits in the thousands, not half a layer of them.

Legend: H heads.
"""

import bisect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..user_error import invalid

STEPS, RATE = "steps", "summed learning rate"
"""What a clock is."""
LARGE_LOGIT = 1000.0
"""From here on a control is due."""
FMA_LOGIT = 2**16 * math.log(2)
"""Above this logit an exponent by one multiply-add is off by more than BF16 rounds away (docs/private_text.md, step two), ..."""
FMA_LOGIT_FP16 = FMA_LOGIT / 8
"""... and above this one by more than FP16 does, whose mantissa has three bits more."""


@dataclass(frozen=True, kw_only=True)
class GrowthRule:
    """Thresholds; experiments/alarm/README.md has the runs that chose them, and the error rates.

    Raises ``UserError`` for a value that is not a threshold. A threshold that nothing reaches, such as an infinite logit, switches its
    part of the rule off.
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
    """A head whose largest logit grows like this power of the clock is flagged by itself, at the first probe that sees it, ..."""
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
    """What the rule looks at of a layer, float64 [H]."""

    clock: float
    """Sum of the learning rates so far, in any unit."""
    norm_H: Tensor
    """||W_Q^T W_K|| of each head, or what grows as it does: its largest logit."""
    logit_H: Tensor
    """Largest logit."""


def growth(probes: Sequence[Probe], rule: GrowthRule) -> tuple[Tensor, Tensor] | None:
    """The rule at the last of a layer's probes: which heads it flags, [H] bool, and the power of the clock that each grows like, [H].

    None where no probe is far enough before it to tell.
    """
    flagged, start = torch.tensor(True), None
    for end in range(max(0, len(probes) - rule.probes), len(probes)):
        start = window_start(probes, end, rule.window)
        if start is None:  # of the last probe alone the sudden part of the rule can be told
            flagged = torch.tensor(False)
            continue
        exponent = _exponent(probes[start], probes[end])
        large = probes[end].logit_H >= rule.logit
        flagged = flagged & (exponent >= rule.exponent) & large & (large.double().mean() >= rule.share)
    last = probes[-1]
    begun = next((probe for probe in itertools.islice(probes, len(probes) - 1) if probe.clock > 0), None)
    if begun is None:
        return None
    # Before a whole window has passed, as in a log that begins late, logits must have grown as much as in one.
    first = begun if start is None else probes[start]
    factor = max(last.clock / first.clock, rule.window) ** rule.sudden_exponent
    sudden = last.logit_H / first.logit_H.clamp(min=0) >= factor
    flagged = flagged | (sudden & (last.logit_H >= rule.sudden_logit))
    return (flagged, _exponent(first, last)) if start is not None or flagged.any() else None


def window_start(probes: Sequence[Probe], end: int, window: float) -> int | None:
    """The latest probe at which the clock, which never goes back, was ``window`` times smaller than at ``end``."""
    index = bisect.bisect_right(probes, probes[end].clock / window, hi=end, key=lambda probe: probe.clock) - 1
    return index if index >= 0 and probes[index].clock > 0 else None


def _exponent(before: Probe, after: Probe) -> Tensor:
    """d ln norm / d ln clock between two probes, [H]; +inf where the norm is no longer finite, or was 0 or less."""
    exponent = (after.norm_H / before.norm_H.clamp(min=0)).log() / math.log(after.clock / before.clock)
    return torch.where(after.norm_H.isfinite(), exponent, math.inf)


class Flagged(NamedTuple):
    """A layer that is flagged, at the probe of ``step``; ``told``: the same in words."""

    step: int
    layer: int
    heads: tuple[int, ...]
    """The fastest first."""
    told: str

    def __str__(self) -> str:
        return self.told


class GrowthAlarm:
    """The rule over the probes of one run, in order; it flags a layer once. ``warm_up``: steps at the start that it does not look at;
    ``clock_is``: what the clock is, in words."""

    def __init__(self, rule: GrowthRule | None = None, warm_up: int = 0, clock_is: str = RATE):
        self.rule, self.warm_up, self.clock_is = rule or GrowthRule(), warm_up, clock_is
        self.flagged: dict[int, int] = {}
        """Step at which a layer was flagged."""
        self._probes: dict[int, list[Probe]] = {}

    @property
    def has_begun(self) -> bool:
        return bool(self._probes)

    def update(
        self,
        step: int,
        clock: float,
        logits: Mapping[int, Sequence[float]],
        norms: Mapping[int, Sequence[float]] | None = None,
    ) -> list[Flagged]:
        """Take in a probe; the layers that it flags.

        Args:
            clock: sum of the learning rates of the steps so far, in any unit, or what ``clock_is`` says.
            logits: largest logit of each head, by layer. A probe with one that is not finite is passed over.
            norms: ||W_Q^T W_K|| of each head, where that is known; without it the logits stand for it.
        """
        if step < self.warm_up or not all(math.isfinite(logit) for logit_H in logits.values() for logit in logit_H):
            return []
        named = []
        for layer, heads_logits in logits.items():
            logit_H = torch.tensor(heads_logits, dtype=torch.float64)
            norm_H = logit_H if norms is None else torch.tensor(norms[layer], dtype=torch.float64)
            probes = self._probes.setdefault(layer, [])
            if probes and probes[-1].logit_H.shape != logit_H.shape:  # another layer has this number now
                probes.clear()
            probes.append(Probe(clock, norm_H, logit_H))
            found = growth(probes, self.rule)
            # No later probe measures from before this one's window.
            past = window_start(probes, max(0, len(probes) - self.rule.probes), self.rule.window) or 0
            del probes[:past]
            if found is None or not found[0].any() or layer in self.flagged:
                continue
            self.flagged[layer] = step
            flagged_H, exponent_H = found
            heads = sorted(flagged_H.nonzero().flatten().tolist(), key=lambda head: -exponent_H[head].item())
            exponent, large = exponent_H[heads[0]].item(), int((logit_H >= self.rule.logit).sum())
            told = (
                f"step {step}: attention layer {layer} is flagged: largest logit {heads_logits[heads[0]]:.4g} in head {heads[0]}, "
                f"growing like the {self.clock_is} to the power {exponent:.1f}; {large} of {len(heads_logits)} heads above "
                f"{self.rule.logit:g}"
            )
            named.append(Flagged(step, layer, tuple(heads), told))
        return named
