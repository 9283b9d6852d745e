"""One row for each pair of runs NAME_flash_SEED and NAME_from_p_SEED of the folders named, as CSV on standard output.

    PYTHONPATH=.:scripts python experiments/who_is_at_risk/pairs.py runs [--at 2400] [--patience 200]

``flash``, ``control``: how each ended. ``logit_*``: its largest logit at the probe of ``--at``, or the last that both have (``step``);
``growth``: the largest over layers of flash's over the control's, in ``growth_layer``. ``w_q_J``: W_Q's norm of layer J over the control's.
"""

import argparse
import csv
import sys
from pathlib import Path
from typing import Any

from scripts.compare_runs import Run, load_all, summarize


def row(flash: Run, control: Run, at: int, patience: int) -> dict[str, Any]:
    """The columns of a pair."""
    step = max(set(flash.probes.index) & set(control.probes.index) & set(range(at + 1)))
    ended = [str(summarize(run, None, [], 0.5, patience)["ended"]) for run in (flash, control)]
    there = [run.probes.loc[step] for run in (flash, control)]
    logits = [values[[name for name in values.index if name.startswith("max_logit_")]] for values in there]
    growth = logits[0] / logits[1]
    found = {"arm": flash.name, "flash": ended[0], "control": ended[1], "step": step}
    found |= {"logit_flash": logits[0].max(), "logit_control": logits[1].max(), "growth": growth.max()}
    found["growth_layer"] = str(growth.idxmax()).removeprefix("max_logit_")
    w_q = {name: there[0][name] / there[1][name] for name in there[0].index if name.startswith("w_q_norm_")}
    return found | {name.replace("norm_", ""): value for name, value in w_q.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Pairs of runs that differ in delta alone.")
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--at", type=int, default=2400)
    parser.add_argument("--patience", type=int, default=200)
    args = parser.parse_args()
    runs = {run.name: run for run in load_all(args.runs)[0]}
    pairs = [(run, runs.get(name.replace("_flash_", "_from_p_"))) for name, run in runs.items() if "_flash_" in name]
    rows = [row(flash, control, args.at, args.patience) for flash, control in pairs if control is not None]
    out = csv.DictWriter(sys.stdout, rows[0], lineterminator="\n")
    out.writeheader()
    for found in rows:
        out.writerow({name: f"{value:.4g}" if isinstance(value, float) else value for name, value in found.items()})


if __name__ == "__main__":
    main()
