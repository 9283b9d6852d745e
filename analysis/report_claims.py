"""The runs of configs/reproduction.txt, what is expected of each, and what happened: n runs of a variant on other seeds are one row."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from analysis.recipe import Changes
from analysis.report import UNREST, Evidence, Facts

Expected = Literal["explodes", "quiet"]
NOT_RUN = "not run yet"
CONTROL = "flash"
"""A quiet run that was cut counts once it is past the explosion of this variant; of another recipe, of its runs of this attention."""

SEED = re.compile(r"_seed_\d+$")
PAPER: Mapping[str, Expected] = {
    **dict.fromkeys(("flash", "sdpa_flash", "paper", "untiled", "only_layer_1", "run_b", "run_c"), "explodes"),
    **dict.fromkeys(("stochastic_p", "muon", "lr_1e-3", "flash_all_switches", "flash_subtracted"), "explodes"),
    **dict.fromkeys(("flash_unfused", "rounded_sum"), "explodes"),
    **dict.fromkeys(("fp32_o", "delta_from_p", "recompute_o", "fp32_pv", "fp32_pv_o", "standard"), "quiet"),
    **dict.fromkeys(("all_but_layer_1", "outlier_heads", "stable_beta_2", "stable_beta_7", "stable_safe"), "quiet"),
    **dict.fromkeys(("run_a", "run_d", "muon_delta_from_p", "lr_1e-3_delta_from_p", "compensated_delta"), "quiet"),
    **dict.fromkeys(("run_a_fp32_pv", "run_a_subtracted", "delta_from_p_subtracted"), "quiet"),
    # No P_bar is rounded to 1, so that nothing biases O.
    **dict.fromkeys(("run_b_fp32_pv", "run_c_fp32_pv", "run_d_fp32_pv"), "quiet"),
    **dict.fromkeys(("run_b_fp32_pv_o", "run_c_fp32_pv_o", "run_c_fp32_pv_stochastic"), "quiet"),
}
"""arXiv 2510.04212, by the name of the variant: what it reports, or, of runs A to D, what follows from its explanation."""
SELF_CORRELATION: Mapping[str, Expected] = {
    **dict.fromkeys(("flash", "flash_all_switches", "sdpa_flash", "paper", "run_a"), "explodes"),
    # Still an O rounded to BF16 in delta: neither another P V nor another row maximum takes that away.
    **dict.fromkeys(
        (
            "fp32_pv",
            "run_a_fp32_pv",
            "stochastic_p",
            "flash_subtracted",
            "flash_unfused",
            "rounded_sum",
            "run_a_subtracted",
            "stable_beta_2",
            "stable_beta_7",
            "stable_safe",
        ),
        "explodes",
    ),
    **dict.fromkeys(("fp32_o", "delta_from_p", "recompute_o", "run_b", "run_c", "run_d"), "quiet"),
    **dict.fromkeys(("fp32_pv_o", "standard", "compensated_delta", "delta_from_p_subtracted"), "quiet"),
    **dict.fromkeys(("run_b_fp32_pv", "run_c_fp32_pv", "run_d_fp32_pv"), "quiet"),
    **dict.fromkeys(("run_b_fp32_pv_o", "run_c_fp32_pv_o", "run_c_fp32_pv_stochastic"), "quiet"),
}
"""The second explanation, where it says something."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """A variant and its runs, by name."""

    name: str
    options: str
    runs: Sequence[tuple[Evidence, Facts]]

    @property
    def outcome(self) -> str:
        """What happened, with the seeds where there is more than one; runs that went alike are told together."""
        if len(self.runs) < 2:
            return outcome(self.runs[0][1]) if self.runs else NOT_RUN
        seeds: dict[str, list[str]] = {}
        for run, facts in self.runs:
            seeds.setdefault(outcome(facts), []).append(str(run.seeds[0]))
        return "; ".join(f"{how} (seed{'s' * (len(of) > 1)} {', '.join(of)})" for how, of in seeds.items())

    def verdict(self, expected: Mapping[str, Expected], past: Mapping[Changes, int]) -> str:
        """Whether what happened is what was expected; ``past``: the step of the control's explosion, by recipe."""
        if self.name not in expected:
            return "-"
        if not self.runs:
            return NOT_RUN
        found = [verdict(facts, expected[self.name], past.get(run.recipe)) for run, facts in self.runs]
        if len(set(found)) == 1:
            return found[0]
        return ", ".join(f"{found.count(one)} of {len(found)} {one}" for one in dict.fromkeys(found))


def base(name: str) -> str:
    """The variant's name without the seed."""
    return SEED.sub("", name)


def groups(runs: Sequence[tuple[Evidence, Facts]], asked: Mapping[str, str]) -> list[Group]:
    """The variants asked for (name -> options), in that order, then those that nobody asked for.

    A run whose recipe is not that of the others of its name is a variant of its own.
    """
    found: dict[str, list[tuple[Evidence, Facts]]] = {base(name): [] for name in asked}
    for run, facts in sorted(runs, key=lambda pair: (pair[0].name != base(pair[0].name), pair[0].name)):
        members = found.setdefault(base(run.name), [])
        if members and members[0][0].recipe != run.recipe:
            members = found.setdefault(run.name, [])
        members.append((run, facts))
    return [Group(name=name, options=asked.get(name, ""), runs=members) for name, members in found.items()]


def parse_asked(text: str) -> dict[str, str]:
    """Name -> options of the lines of configs/reproduction.txt."""
    lines = [line.partition(":") for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return {name.strip(): options.strip() for name, _, options in lines}


def outcome(facts: Facts) -> str:
    """How one run went, in a few words."""
    end = "at its end" if facts.is_finished else "when cut"
    if facts.is_not_finite:
        return f"not finite at {facts.exploded_at:,}"
    if facts.exploded_at is not None:
        return f"exploded at {facts.exploded_at:,}"
    if facts.unstable_since is not None:
        return f"unstable since {facts.unstable_since:,}, not exploded {end} at {facts.last_step:,}"
    if facts.above_since is not None:
        return f"above the margin since {facts.above_since:,} {end} at {facts.last_step:,}"
    if facts.unrest > UNREST:
        return f"leaving {end} at {facts.last_step:,}"
    return (
        f"quiet to its end, {facts.last_step + 1:,} steps"
        if facts.is_finished
        else f"quiet when cut at {facts.last_step:,}"
    )


def is_quiet(facts: Facts) -> bool:
    """Neither exploded nor on the way."""
    uneasy = facts.above_since is not None or facts.unstable_since is not None or facts.unrest > UNREST
    return facts.exploded_at is None and not uneasy


def how_it_ended(facts: Facts) -> str:
    """In one word."""
    if facts.is_not_finite:
        return "not_finite"
    if facts.exploded_at is not None:
        return "exploded"
    if not facts.is_finished:
        return "cut"
    return "finished" if is_quiet(facts) else "unsettled"


def verdict(facts: Facts, expected: Expected, past: int | None) -> str:
    """Of one run. A run that was cut says nothing, but for one that stayed quiet beyond step ``past``."""
    if facts.exploded_at is not None:
        # To leave the range is a failure, but not the one that is expected.
        return "does not" if expected == "quiet" else "not settled" if facts.is_not_finite else "agrees"
    if facts.unstable_since is not None and expected == "quiet":
        return "does not"
    if facts.is_finished and is_quiet(facts):
        return "agrees" if expected == "quiet" else "does not"
    if expected == "quiet" and is_quiet(facts) and past is not None and facts.last_step > past:
        return "agrees so far"
    return "not settled"


def is_control(run: Evidence) -> bool:
    """Whether other runs of the same recipe are held against this one."""
    if run.has_base_recipe:
        return base(run.name) == CONTROL
    return run.attention == CONTROL and not run.is_switched


def explosions_of_controls(found: Sequence[Group]) -> dict[Changes, int]:
    """The last explosion of the controls of each recipe, but for recipes of which not all of them exploded."""
    steps: dict[Changes, list[int | None]] = {}
    for run, facts in (pair for group in found for pair in group.runs if is_control(pair[0])):
        steps.setdefault(run.recipe, []).append(facts.exploded_at)
    known = {recipe: [step for step in of if step is not None] for recipe, of in steps.items()}
    return {recipe: max(of) for recipe, of in known.items() if len(of) == len(steps[recipe])}


def asked_rows(found: Sequence[Group]) -> list[list[str]]:
    """Cells of the table: name, options, two expectations, n, what happened, two verdicts."""
    past = explosions_of_controls(found)
    rows = []
    for group in found:
        expectations = [expected.get(group.name, "-") for expected in (PAPER, SELF_CORRELATION)]
        verdicts = [group.verdict(expected, past) for expected in (PAPER, SELF_CORRELATION)]
        options = f"`{group.options}`" if group.options else "-"
        rows.append([group.name, options, *expectations, str(len(group.runs)), group.outcome, *verdicts])
    return rows


def values(found: Sequence[Group]) -> dict[str, str]:
    """NAME.n, NAME.outcome and NAME.verdict of every variant. How many runs exploded, finished (quietly), ended unsettled (not exploded,
    nor quiet), were cut, or had a loss that is not_finite: of those of the base recipe that were not switched."""
    past = explosions_of_controls(found)
    pairs = [pair for group in found for pair in group.runs]
    ends = [how_it_ended(facts) for run, facts in pairs if run.has_base_recipe and not run.is_switched]
    made = {end: str(ends.count(end)) for end in ("exploded", "not_finite", "finished", "unsettled", "cut")}
    for group in found:
        made[f"{group.name}.n"] = str(len(group.runs))
        made[f"{group.name}.outcome"] = group.outcome
        made[f"{group.name}.verdict"] = group.verdict(PAPER, past)
    return made
