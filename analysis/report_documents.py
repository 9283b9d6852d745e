"""All tables and numbers that the documents have of ``results/``, and which runs each is of.

Three kinds of runs are kept apart: those of the base recipe, which tables, counts and ranges are of; those of them that were switched on
the way; and those of another recipe, which have a table of their own (``report_recipes``) and the numbers of a single run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from analysis import report_blocks, report_layers, report_onset, report_recipes, report_sharing, report_switches
from analysis.report import Evidence


def made(
    runs: Sequence[Evidence], again: Sequence[Mapping[str, str]], asked: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Blocks and numbers by name; ``asked``: as for ``report_blocks.blocks``."""
    of_base = [run for run in runs if run.has_base_recipe]
    others = [run for run in runs if not run.has_base_recipe]
    unswitched = [run for run in of_base if not run.is_switched]
    blocks = report_blocks.blocks(runs, again, asked) | report_onset.blocks(unswitched)
    blocks |= report_sharing.blocks(unswitched)
    blocks |= {"switches": report_switches.switches_table(of_base), "recipes": report_recipes.recipes_table(runs)}
    values = report_blocks.values(runs, asked) | report_switches.values(runs)
    values |= report_onset.values(unswitched) | report_layers.values(report_blocks.told(unswitched))
    values |= report_sharing.values(unswitched)
    values |= report_onset.own_values(others) | report_layers.own_values(report_blocks.told(others))
    return blocks, values
