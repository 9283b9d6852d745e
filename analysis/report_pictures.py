"""Which runs are in which picture of ``results/``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from analysis import (
    report_blocks,
    report_claims,
    report_layers,
    report_onset,
    report_plots,
    report_sharing,
    report_switches,
)
from analysis.report import Evidence, Facts

RUNS_OF_THE_RECIPE = "curves.png"
OTHER_RECIPES, BESIDE_OTHER_RECIPES = "other_recipes.png", ("flash", "delta_from_p")
PICTURES = {
    "failing_and_fixed.png": report_blocks.SHORT,
    "two_explanations.png": (
        "flash",
        "run_a",
        "run_b",
        "run_c",
        "fp32_pv",
        "run_d",
        "run_a_fp32_pv",
        "flash_subtracted",
    ),
}
"""Variants in the README's picture, and in that of docs/reproduction.md."""
ONSET = "large_logits.png"
LAYERS = "layers.png"
SHARING = "sharing.png"
SWITCHES = "late_switches.png"
LAYERS_OF = (
    "flash",
    "flash_subtracted",
    "flash_unfused",
    "sdpa_flash",
    "sdpa_flash_seed_2",
    "run_a_fp32_pv",
    "fp32_pv",
    "all_but_layer_1",
    "fp32_o",
)
"""The largest logit of every layer of these runs."""


def draw_all(everything: Sequence[tuple[Evidence, Facts]], out: Path) -> None:
    """Write ``OTHER_RECIPES``, and of the runs of the base recipe ``RUNS_OF_THE_RECIPE``, ``PICTURES`` and four more, to ``out``.

    Runs that were switched on the way are in ``SWITCHES`` alone. Raises ``ImportError`` where matplotlib cannot be used.
    """
    all_runs = [(run, facts) for run, facts in everything if not run.is_switched]
    of_base = [(run, facts) for run, facts in everything if run.has_base_recipe]
    runs = [(run, facts) for run, facts in of_base if not run.is_switched]
    order = list(dict.fromkeys(name for members in PICTURES.values() for name in members))
    look = report_plots.looks(runs, order)
    if runs:
        report_plots.draw(runs, report_plots.PANELS, out / RUNS_OF_THE_RECIPE, look=look)
    if others := [(run, facts) for run, facts in all_runs if not run.has_base_recipe]:
        last = max(facts.last_step for _, facts in others)
        others = [pair for pair in runs if pair[0].name in BESIDE_OTHER_RECIPES] + others
        # Those of a recipe beside each other, `flash` first: of the attentions it has the solid line.
        others.sort(key=lambda pair: (not pair[0].has_base_recipe, str(pair[0].recipe), pair[0].attention))
        of_others = report_plots.looks_by_recipe(others)
        report_plots.draw(others, report_plots.PANELS[:4], out / OTHER_RECIPES, look=of_others, last_step=last)
    for name, members in PICTURES.items():
        if chosen := [(run, facts) for run, facts in runs if report_claims.base(run.name) in members]:
            report_plots.draw(chosen, report_plots.PANELS[:2], out / name, look=look)
    if any(report_onset.one_hot([run for run, _ in runs], kind) for kind in report_onset.KINDS):
        report_plots.save(report_onset.figure(runs), out / ONSET)
    if any(report_sharing.chosen([run for run, _ in runs]).values()):
        report_plots.save(report_sharing.figure([run for run, _ in runs]), out / SHARING)
    if any(run.is_switched for run, _ in of_base):
        switched, look = report_switches.branches([run for run, _ in of_base])
        report_plots.draw(switched, report_plots.PANELS[:4], out / SWITCHES, look=look)
    by_name = {run.name: (run, facts) for run, facts in runs}
    if chosen := [by_name[name] for name in LAYERS_OF if name in by_name]:
        report_plots.save(report_layers.figure(chosen), out / LAYERS)
