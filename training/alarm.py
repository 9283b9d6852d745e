"""The alarm of a run: the rule of ``attention.watching.growth`` on the telemetry, which names a layer long before the loss moves.

What fails grows: the error of delta adds the same direction to W_Q and W_K of some heads, step after step, and S grows with their product.
The rule looks at the norm of that product, ||W_Q^T W_K||, and at the largest logits. It is a fold over the records of
``telemetry.jsonl``: a resumed run is warned as an uninterrupted one is, and nothing that is computed depends on it.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from attention.watching.growth import GrowthAlarm, GrowthRule, RunsAway
from errors import invalid
from training.intervention import parse_switch


@dataclass(frozen=True, kw_only=True)
class AlarmConfig:
    """What the alarm calls growth; and scheduled switches of a layer's attention."""

    switches: tuple[str, ...] = ()
    """STEP:LAYER:PRESET[:BACKEND]: all heads of that layer use that preset from training step STEP on, alarm or not."""
    rule: GrowthRule = field(default_factory=GrowthRule)
    """Thresholds."""
    warm_up: int = -1
    """Steps at the start that the rule does not look at; -1: the learning rate's warm-up."""

    def __post_init__(self) -> None:
        places = Counter((switch.step, switch.layer) for switch in map(parse_switch, self.switches))
        for text in self.switches:
            switch = parse_switch(text)
            if places[switch.step, switch.layer] > 1:
                raise invalid("alarm.switches", text, f"one switch of layer {switch.layer} at step {switch.step}")
        if self.warm_up < -1:
            raise invalid("alarm.warm_up", self.warm_up, "a number of steps, or -1 for the learning rate's warm-up")

    def open(self, warm_up: int) -> GrowthAlarm:
        """``warm_up``: steps of the learning rate's."""
        return GrowthAlarm(self.rule, warm_up if self.warm_up < 0 else self.warm_up)


def update(alarm: GrowthAlarm, record: dict[str, Any]) -> list[RunsAway]:
    """Take in a record of ``telemetry.jsonl``; the layers that the rule names."""
    logits, norms = (dict(enumerate(record[name])) for name in ("max_logit", "qk_head_norm"))
    return alarm.update(record["step"], record["lr_sum"], logits, norms)
