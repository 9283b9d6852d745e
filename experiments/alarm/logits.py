"""The alarm's rule on largest logits, as ``watch()`` applies it to any model, over the runs of gpt2.csv: which of them it warns of.

    python -m experiments.alarm.logits       # prints logits.csv

``warned_at``: the whole rule, on layer 1 alone, as of the others probes.csv does not say how many heads have large logits.
``sudden_at``: the part that looks at single heads, on every layer's largest logit. The clock is the step, less half of the warm-up.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import torch

from attention.watching.growth import GrowthRule, Probe, growth

HERE = Path(__file__).resolve().parent


def first(folder: Path, whole: bool) -> tuple[int, int] | None:
    """(step, layer) of the first warning of a run, by the whole rule on layer 1, or by its sudden part on all."""
    config = json.loads((folder / "config.json").read_text())
    config = config.get("config", config)
    warm_up, heads = config["optim"]["warmup_steps"], config["model"]["n_head"]
    rule, probes = GrowthRule() if whole else GrowthRule(share=2.0), []
    for row in csv.DictReader((folder / "probes.csv").open()):
        if (step := int(row["step"])) < warm_up:
            continue
        layers = [1] if whole else range(config["model"]["n_layer"])
        top = torch.tensor([[float(row[f"max_logit_{layer}"] or "nan")] for layer in layers])
        # So many heads above 500; what each of them has is not known, but for the largest.
        large = int(float(row["heads_above_500_1"] or 0)) if whole else 1
        others = [min(top.item(), 500.0)] * (large - 1) + [0.0] * (heads - max(large, 1)) if whole else []
        logits = torch.cat([top, torch.tensor(others).clamp(min=0.0).expand(len(top), -1)], dim=1)
        norms = torch.full_like(logits, torch.nan)
        norms[:, :1] = top
        probes.append(Probe(step, step - warm_up / 2, norms.double(), logits.double()))
        found = growth(probes, rule)
        if found is not None and found.leaves_LH[:, 0].any():
            return step, list(layers)[int(found.leaves_LH[:, 0].nonzero()[0])]
    return None


def rows() -> list[list[object]]:
    """(run, exploded at, warned at, sudden at, in which layer) of every run of gpt2.csv."""
    made: list[list[object]] = []
    for row in csv.DictReader((HERE / "gpt2.csv").open()):
        folder = next(
            path for path in HERE.parent.glob(f"*/runs/{row['run']}") if path.parent.parent.name != "late_switches"
        )
        warned, sudden = first(folder, whole=True), first(folder, whole=False)
        made.append([row["run"], row["exploded_at"], warned[0] if warned else "", *(sudden or ("", ""))])
    return made


if __name__ == "__main__":
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow(["run", "exploded_at", "warned_at", "sudden_at", "sudden_layer"])
    out.writerows(rows())
