"""Scheduled switches of a layer's attention during a run, and the alarm that may call for one.

The alarm is the rule of ``attention.watching.growth`` on ||W_Q^T W_K|| and the largest logits: what fails adds the same direction to W_Q
and W_K of some heads, step after step. It is a fold over ``telemetry.jsonl``, so a resumed run is warned as an uninterrupted one is.

Which plan a layer has is a pure function of the step: the config's plan, and every switch of that step or an earlier one after it. Those
made are in every checkpoint, and all in the run's config.json.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from attention.plan import LayerPlan, switched
from attention.watching.growth import Flagged, GrowthAlarm, GrowthRule
from errors import UserError, check_types, invalid
from training.checkpoint import Loaded


@dataclass(frozen=True)
class Switch:
    """All heads of ``layer`` move to ``preset`` with training step ``step`` (the first one that is computed with it)."""

    step: int
    layer: int
    preset: str
    backend: str = ""
    cause: str = "schedule"
    """In runs before commit fbfd8cf also alarm."""

    def option(self) -> str:
        return ":".join([str(self.step), str(self.layer), self.preset, *([self.backend] if self.backend else [])])


def parse_switch(text: str) -> Switch:
    """``STEP:LAYER:PRESET[:BACKEND]``. Raises ``UserError`` for anything else."""
    step, layer, preset, *backend = [*text.split(":"), "", ""]
    if not (step.isdecimal() and layer.isdecimal() and preset) or text.count(":") > 3:
        expected = "STEP:LAYER:PRESET or STEP:LAYER:PRESET:BACKEND, for example 5000:1:flash_fp32_o"
        raise invalid("alarm.switches", text, expected)
    return Switch(int(step), int(layer), preset, backend[0])


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
        check_types("alarm", self)
        if not isinstance(self.switches, tuple | list) or not all(isinstance(text, str) for text in self.switches):
            raise invalid("alarm.switches", self.switches, "a tuple of switches, for example ('5000:1:flash_fp32_o',)")
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


def update_alarm(alarm: GrowthAlarm, record: dict[str, Any]) -> list[Flagged]:
    """Take in a record of ``telemetry.jsonl``; the layers that the rule flags."""
    logits, norms = (dict(enumerate(record[name])) for name in ("max_logit", "qk_head_norm"))
    return alarm.update(record["step"], record["lr_sum"], logits, norms)


def plans_at(base: Sequence[LayerPlan], switches: Sequence[Switch], step: int) -> tuple[LayerPlan, ...]:
    """The plans that training step ``step`` is computed with.

    Raises ``UserError`` for a layer that does not exist, and for a preset that does not exist or does not suit the layer's base roundings,
    unless another switch has taken its place.
    """
    plans, misfits = list(base), dict[int, UserError]()
    for switch in sorted(switches, key=lambda switch: switch.step):
        if switch.layer >= len(plans):
            raise invalid("layer", switch.layer, f"0 to {len(plans) - 1}, counted from 0")
        if switch.step <= step:
            misfits.pop(switch.layer, None)
            try:
                plans[switch.layer] = switched(plans[switch.layer], switch.preset, switch.backend)
            except UserError as error:
                misfits[switch.layer] = error
    for misfit in misfits.values():
        raise misfit
    return tuple(plans)


def made_by(start: Loaded) -> list[Switch]:
    """The switches that a run had made at its checkpoint."""
    return [Switch(**entry) for entry in start.extra.get("switches", ())]


class Interventions:
    """The switches of one run, on the plans ``base``. ``check`` is asked about every plan to come; ``start`` is the checkpoint that the
    run goes on from.

    Raises ``UserError`` for a switch that cannot be, and for one scheduled before that step which the checkpoint does not know.
    """

    def __init__(
        self,
        base: tuple[LayerPlan, ...],
        scheduled: Sequence[Switch],
        check: Callable[[tuple[LayerPlan, ...]], None],
        start: Loaded | None,
    ):
        self.base, self._switches, step = base, made_by(start) if start else [], start.step if start else 0
        before, made = list(self._switches), set(self.options())
        self.idle: list[str] = []
        """Switches to come to an attention that the layer then has."""
        for switch in scheduled:
            if switch.option() in made:
                continue
            if switch.step < step:
                expected = f"a step from {step} on, where the run goes on, or a switch that its checkpoint has made"
                raise invalid("alarm.switches", switch.option(), expected)
            self._switches.append(switch)
        ordered = sorted(self._switches, key=lambda switch: switch.step)
        for switch in ordered:
            at = max(switch.step, step)
            until = [other for other in ordered if other.layer == switch.layer and other.step <= at]
            try:
                check(plans := plans_at(base, until, at))
            except UserError as error:
                last = until[-1]
                if start is None or last.option() not in made:
                    raise UserError(f"alarm.switches = {last.option()!r}: {error}") from error
                where, again = f"{start.path}: its switch {last.option()}", f"{step}:{last.layer}:PRESET"
                raise UserError(f"{where} (--alarm.switches {again} takes its place): {error}") from error
            if switch.step >= step and switch.option() not in made:
                with contextlib.suppress(UserError):  # it takes the place of one that does not suit the base
                    if plans == plans_at(base, until[:-1], at):
                        self.idle.append(switch.option())
        try:
            self.plans = plans_at(base, before, step)
        except UserError:  # one made that does not suit the base: another takes its place at this step
            self.plans = plans_at(base, self._switches, step)

    def moved(self) -> str:
        """Layers that have another attention than the config says, by that attention."""
        layers: dict[str, list[str]] = {}
        for plan, base in zip(self.plans, self.base, strict=True):
            if plan != base:
                layers.setdefault(_label(plan), []).append(str(plan.layer))
        return "".join(f"; layer {', '.join(names)} on {label}" for label, names in layers.items())

    def advance(self, step: int) -> list[str]:
        """Bring ``plans`` to ``step``; what changed, a sentence a layer."""
        before, self.plans = self.plans, plans_at(self.base, self._switches, step)
        changed = [(old, new) for old, new in zip(before, self.plans, strict=True) if old != new]
        return [f"step {step}: attention of layer {new.layer}: {_label(old)} -> {_label(new)}" for old, new in changed]

    def options(self) -> list[str]:
        return [switch.option() for switch in self._switches]

    def state(self, step: int) -> list[dict[str, Any]]:
        return [asdict(switch) for switch in self._switches if switch.step <= step]


def _label(plan: LayerPlan) -> str:
    if len(plan.groups) == 1:
        return plan.groups[0].spec.label()
    return "; ".join(f"heads {','.join(map(str, group.heads))} {group.spec.label()}" for group in plan.groups)
