"""A rule over the telemetry that warns of an explosion long before the loss moves, and names layer, heads and evidence.

What fails grows: the error of delta adds the same direction to W_Q and W_K of some heads, step after step, and S grows with their product.
The rule ``growth`` is that of ``attention.growth``, on ||W_Q^T W_K||.

Everything is a fold over the records of ``telemetry.jsonl``: a resumed run, a table made afterwards and the run itself see the same alarms.

Legend: L layers, H heads.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch

from attention.backends import BACKENDS
from attention.growth import Growth, GrowthRule, Probe, growth, large_logits
from attention.presets import PRESETS, RECOMMENDED, today
from errors import invalid
from training.intervention import Switch, parse_switch

Response = Literal["log", "checkpoint", "stop", "switch"]


@dataclass(frozen=True, kw_only=True)
class AlarmConfig:
    """What raises an alarm and what it does; and scheduled switches of a layer's attention."""

    response: Response = "log"
    """log; checkpoint (the first alarm's stays); stop (after a checkpoint); switch the layer to alarm.switch_to with the next step."""
    switch_to: str = RECOMMENDED
    """PRESET or PRESET:BACKEND that response switch moves a layer to; the layer's base roundings stay."""
    switches: tuple[str, ...] = ()
    """STEP:LAYER:PRESET[:BACKEND]: all heads of that layer use that preset from training step STEP on, alarm or not."""
    growth_exponent: float = 3.0
    """A head's ||W_Q^T W_K|| grows like this power of the summed learning rate, or faster; 0 switches the alarm off."""
    growth_window: float = 1.3
    """The exponent is measured from where the summed learning rate was this many times smaller."""
    growth_logit: float = 500.0
    """Heads whose largest logit is below this do no harm yet, however fast they grow."""
    growth_share: float = 0.5
    """At least this share of a layer's heads has logits that large, or none of them is flagged, unless one passes 2,000 like the eighth
    power of the summed learning rate."""
    growth_probes: int = 2
    """Probes in a row that must agree."""
    warm_up: int = -1
    """Steps at the start that the rule does not look at; -1: the learning rate's warm-up."""

    def __post_init__(self) -> None:
        if self.response not in get_args(Response):
            raise invalid("alarm.response", self.response, get_args(Response))
        places = Counter((switch.step, switch.layer) for switch in map(parse_switch, self.switches))
        for text in self.switches:
            switch = parse_switch(text)
            if places[switch.step, switch.layer] > 1:
                raise invalid("alarm.switches", text, f"one switch of layer {switch.layer} at step {switch.step}")
        self.switch(0, 0)
        for name in ("growth_exponent", "growth_logit"):
            if not 0 <= getattr(self, name) < math.inf:
                raise invalid(f"alarm.{name}", getattr(self, name), "0 or a positive number")
        if not 1 < self.growth_window < math.inf:
            raise invalid("alarm.growth_window", self.growth_window, "a factor above 1")
        if not 0 <= self.growth_share <= 1:
            raise invalid("alarm.growth_share", self.growth_share, "a share of a layer's heads, 0 to 1")
        if self.growth_probes < 1:
            raise invalid("alarm.growth_probes", self.growth_probes, "a whole number of 1 or more")
        if self.warm_up < -1:
            raise invalid("alarm.warm_up", self.warm_up, "a number of steps, or -1 for the learning rate's warm-up")

    @property
    def growth(self) -> GrowthRule:
        return GrowthRule(
            exponent=self.growth_exponent,
            window=self.growth_window,
            logit=self.growth_logit,
            share=self.growth_share,
            probes=self.growth_probes,
        )

    def switch(self, step: int, layer: int) -> Switch:
        """What response ``switch`` does to a layer. Raises ``UserError`` where ``switch_to`` is no PRESET[:BACKEND] of these names."""
        preset, _, backend = self.switch_to.partition(":")
        preset = today(preset)
        if preset not in PRESETS or backend not in ("", *BACKENDS):
            expected = f"PRESET or PRESET:BACKEND, PRESET of {', '.join(PRESETS)}, BACKEND of {', '.join(BACKENDS)}"
            raise invalid("alarm.switch_to", self.switch_to, expected if backend else tuple(PRESETS))
        return Switch(step, layer, preset, backend, cause="alarm")


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """One layer that the rule flags, at the probe of ``step``."""

    step: int
    rule: str
    layer: int
    heads: tuple[int, ...]
    """The worst first."""
    evidence: dict[str, Any]
    """Of the worst head."""

    def sentence(self) -> str:
        """For the terminal."""
        heads = ", ".join(map(str, self.heads))
        facts = ", ".join(f"{name} {_short(value)}" for name, value in self.evidence.items())
        return f"step {self.step}: ALARM ({self.rule}): layer {self.layer}, head(s) {heads}: {facts}"

    def record(self) -> dict[str, Any]:
        """As a line of ``interventions.jsonl``, without its step."""
        return {
            "kind": "alarm",
            "rule": self.rule,
            "layer": self.layer,
            "heads": list(self.heads),
            "evidence": self.evidence,
        }


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class _Probe(Probe):
    """What the rule remembers of a record; arrays [L, H]."""

    bias: np.ndarray
    """Mean error of delta over delta's root mean square."""


def _probe(record: dict[str, Any]) -> _Probe:
    norm, logit, mean, rms = (
        torch.tensor(record[name], dtype=torch.float64)
        for name in ("qk_head_norm", "max_logit", "delta_error_mean", "delta_rms")
    )
    bias = torch.where(rms > 0, mean / rms, 0.0).numpy()
    return _Probe(record["step"], record["lr_sum"], norm, logit, bias)


class Watch:
    """The rule over the probes of one run, in order. ``warm_up`` steps of the learning rate are used where the config says -1."""

    def __init__(self, config: AlarmConfig, warm_up: int):
        self._config = config
        self._from_step = warm_up if config.warm_up < 0 else config.warm_up
        self._probes: list[_Probe] = []
        self._raised: dict[int, int] = {}

    def update(self, record: dict[str, Any]) -> list[Alarm]:
        """Take in one record of ``telemetry.jsonl``; the alarms it raises. A layer is flagged once.

        After a rollback (a step that is not later than the last) what came after the step is forgotten.
        """
        probe = _probe(record)
        self._probes = [earlier for earlier in self._probes if earlier.step < probe.step]
        self._raised = {layer: step for layer, step in self._raised.items() if step < probe.step}
        if probe.step >= self._from_step:
            self._probes.append(probe)
        new = [alarm for alarm in self._growth() if alarm.layer not in self._raised]
        self._raised |= {alarm.layer: alarm.step for alarm in new}
        return new

    def keep_raised(self, layers: set[int]) -> None:
        """Of the layers flagged so far only these stay so."""
        self._raised = {layer: step for layer, step in self._raised.items() if layer in layers}

    def _growth(self) -> list[Alarm]:
        found = growth(self._probes, self._config.growth) if self._config.growth_exponent else None
        return [] if found is None else [self._flag_growth(layer, found) for layer in found.layers()]

    def _flag_growth(self, layer: int, found: Growth) -> Alarm:
        probe, before = self._probes[-1], self._probes[found.start]
        heads, exponent = found.heads(layer), found.exponent_LH
        head = heads[0]
        others = np.delete(exponent.numpy(), layer, axis=0)
        errors = np.array([p.bias[layer, head] for p in self._probes[found.start + 1 :]])
        evidence = {
            "exponent": exponent[layer, head].item(),
            "median_exponent_elsewhere": float(np.median(others)) if others.size else None,
            "qk_norm": probe.norm_LH[layer, head].item(),
            "qk_norm_before": before.norm_LH[layer, head].item(),
            "since_step": before.step,
            "max_logit": probe.logit_LH[layer, head].item(),
            "heads_with_large_logits": int(large_logits(probe.logit_LH, self._config.growth)[layer].sum()),
            "delta_bias": float(errors.mean()),
            "delta_bias_se": float(errors.std(ddof=1) / math.sqrt(len(errors))) if len(errors) > 1 else None,
            "delta_probes": len(errors),
        }
        return Alarm(step=probe.step, rule="growth", layer=layer, heads=heads, evidence=evidence)
