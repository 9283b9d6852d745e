"""The alarm's rule on largest logits, as ``watch()`` applies it to any model, over the runs of gpt2.csv: which of them it warns of.

    python experiments/alarm/logits.py       # prints logits.csv

Layer 1 alone: of the others probes.csv does not say how many heads have large logits. The clock is the step, less half of the warm-up.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

from attention.growth import GrowthRule, Probe, growth  # noqa: E402


def warned(folder: Path) -> int | None:
    """Step of the first warning of a run."""
    config = json.loads((folder / "config.json").read_text())
    config = config.get("config", config)
    warm_up, heads = config["optim"]["warmup_steps"], config["model"]["n_head"]
    probes: list[Probe] = []
    for row in csv.DictReader((folder / "probes.csv").open()):
        if (step := int(row["step"])) < warm_up:
            continue
        large, top = int(float(row["heads_above_500_1"] or 0)), float(row["max_logit_1"])
        # So many heads above 500; what each of them has is not known, but for the largest.
        logits = torch.tensor([[top] + [max(min(top, 500.0), 0.0)] * (large - 1) + [0.0] * (heads - max(large, 1))])
        norms = torch.tensor([[top] + [torch.nan] * (heads - 1)])
        probes.append(Probe(step, step - warm_up / 2, norms.double(), logits.double()))
        found = growth(probes, GrowthRule())
        if found is not None and found.leaves_LH[0, 0]:
            return step
    return None


def rows() -> list[list[object]]:
    """(run, exploded at, warned at) of every run of gpt2.csv."""
    made: list[list[object]] = []
    for row in csv.DictReader((HERE / "gpt2.csv").open()):
        folder = next(
            path for path in HERE.parent.glob(f"*/runs/{row['run']}") if path.parent.parent.name != "late_switches"
        )
        made.append([row["run"], row["exploded_at"], warned(folder) or ""])
    return made


if __name__ == "__main__":
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow(["run", "exploded_at", "warned_at"])
    out.writerows(rows())
