"""The map of recipes: where BF16's O in delta fails alone, where the controls fail with it and where neither does, from ``results/``.

A failure counts for the paper's explanation, or any other, only where a control on the same batches is quiet. Runs that were switched
on the way belong to no recipe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from analysis import recipe, report_claims
from analysis.recipe import Changes
from analysis.report import DEPARTURE, LAYER, Evidence, Facts
from analysis.report_blocks import NONE, number, significant, table, told
from analysis.report_claims import CONTROL, Group

State = Literal["fails", "fine", "fine so far", "open"]
FAILING = CONTROL
"""The attention that rounds the O of delta to BF16."""
CONTROLS = ("flash_delta_from_p", "flash_fp32_o")
"""Attentions whose delta has no such O."""
PROBED_AT = (1000, 3000, 5000)
NOT_RUN = "not run"

Pairs = Sequence[tuple[Evidence, Facts]]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A recipe and its runs."""

    changes: Changes
    """In what it differs from the base recipe."""
    runs: Mapping[str, Pairs]
    """By attention, as the runs recorded it; first runs before those of other seeds."""

    def of(self, attention: str) -> Pairs:
        """Its runs with an attention."""
        return self.runs.get(attention, ())

    def value(self, setting: str) -> str:
        """A setting in words."""
        return recipe.shown(dict(self.changes).get(setting, recipe.BASE[setting]))


def recipes(runs: Pairs) -> list[Recipe]:
    """The base recipe, then the others of the runs by optimiser, learning rate, warm-up, sequences and what else they change."""
    found: dict[Changes, dict[str, list[tuple[Evidence, Facts]]]] = {(): {}}
    for run, facts in sorted(runs, key=lambda pair: (pair[0].name != report_claims.base(pair[0].name), pair[0].name)):
        if not run.is_switched:
            found.setdefault(run.recipe, {}).setdefault(run.attention, []).append((run, facts))
    base, *others = (Recipe(changes=changes, runs=members) for changes, members in found.items())
    return [base, *sorted(others, key=lambda one: _order(one.changes))]


def _order(changes: Changes) -> tuple[object, ...]:
    settings = {**recipe.BASE, **dict(changes)}
    return (*(settings[name] for name in recipe.COLUMNS), recipe.words(changes))


def state(facts: Facts, past: int | None) -> State:
    """How a run went. It fails where it explodes, becomes unstable or has a loss that is not finite.

    It is fine where it came quietly to the base experiment's last step, planned or not; so far, where it ends behind step ``past``.
    """
    if facts.exploded_at is not None or facts.unstable_since is not None:
        return "fails"
    if not report_claims.is_quiet(facts):
        return "open"
    if facts.last_step + 1 >= recipe.STEPS:
        return "fine"
    return "fine so far" if past is not None and facts.last_step > past else "open"


def together(runs: Pairs, past: int | None) -> State:
    """Of several runs: they fail where one does, and are fine where all are; without runs nothing is said."""
    found = {state(facts, past) for _, facts in runs} or {"open"}
    order: Sequence[State] = ("fails", "open", "fine so far", "fine")
    return next(one for one in order if one in found)


def verdict(one: Recipe, past: int | None) -> str:
    """Who fails: BF16's O, the controls, both or neither, where the runs say; ``past``: the explosion of the base recipe's ``FAILING``.

    A run that is shorter than the base experiment counts as fine behind ``past``; a control, only behind its own recipe's failures too.
    """
    failing, controls = one.of(FAILING), [pair for attention in CONTROLS for pair in one.of(attention)]
    ends = [facts.unstable_since if facts.exploded_at is None else facts.exploded_at for _, facts in failing]
    behind = None if past is None else max([past, *(end for end in ends if end is not None)])
    found, control = together(failing, past), together(controls, behind)
    if "open" in (found, control):
        return "not settled"
    if control == "fails":
        return "both fail" if found == "fails" else "only the control fails"
    who = "only BF16 O fails" if found == "fails" else "both fine"
    return f"{who} so far" if "fine so far" in (found, control) else who


def cell(runs: Pairs) -> str:
    """How the runs of a recipe with one attention went, and how many there are."""
    if not runs:
        return NOT_RUN
    outcome = Group(name="", options="", runs=runs).outcome
    return f"{len(runs)} run{'s' * (len(runs) > 1)}: {outcome}"


def recipes_table(runs: Sequence[Evidence]) -> str:
    """A line a recipe, and below a line a run of ``FAILING``. Columns of other attentions than ``FAILING`` and ``CONTROLS``: those that
    a recipe other than the base one was run with."""
    pairs = told(runs)
    found = recipes(pairs)
    past = report_claims.explosions_of_controls(report_claims.groups(pairs, {})).get(())
    further = sorted({name for one in found[1:] for name in one.runs} - {FAILING, *CONTROLS})
    attentions = (FAILING, *CONTROLS, *further)
    heads = ["optimiser", "lr", "warm-up", "sequences a step", "further changes"]
    heads += [*(f"`{name}`" for name in attentions), "verdict"]
    rows = []
    for one in found:
        rest = tuple(change for change in one.changes if change[0] not in recipe.COLUMNS)
        settings = [*(one.value(name) for name in recipe.COLUMNS), recipe.words(rest) or NONE]
        rows.append([*settings, *(cell(one.of(name)) for name in attentions), verdict(one, past)])
    return table(heads, rows, left=len(heads)) + "\n" + failing_table(found)


def failing_table(found: Sequence[Recipe]) -> str:
    """The gradient norm, W_Q and logits of every run of ``FAILING``, recipe by recipe."""
    heads = ["recipe", f"run of `{FAILING}`", f"gradient norm > {DEPARTURE:g} first at"]
    heads += [f"W_Q norm, layer {LAYER}, at {step:,}" for step in PROBED_AT]
    heads += [f"largest logit, layer {LAYER}, at {step:,}" for step in PROBED_AT]
    rows = [
        [
            recipe.words(one.changes) or "base",
            run.name,
            number(facts.departed_at),
            *(significant(facts.w_q.get(step)) for step in PROBED_AT),
            *(significant(facts.logit.get(step)) for step in PROBED_AT),
        ]
        for one in found
        for run, facts in one.of(FAILING)
    ]
    return table(heads, rows)
