"""Verdicts of the crash test on kernels whose training is known, on a CPU, in a quarter of an hour: calibration.csv.

    PYTHONPATH=. python experiments/kernels/calibrate.py experiments/kernels/calibration.csv

Training: runs of the base recipe in six studies, all layers alike; those of one kernel are one row, whatever its name there.
"""

import csv
import re
import sys
from collections import defaultdict

import torch

from attention import AttentionSpec, scaled_dot_product_attention
from attention.check import check_attention, judge
from errors import UserError

STUDIES = ("fast_failure", "published_fix", "consistent", "bias_or_self_correlation", "matched_pairs", "public_recipe")
FAILED = ("exploded", "unstable", "open", "NaN")


def spec_of(label: str) -> AttentionSpec:
    preset, settings = re.fullmatch(r"([\w ]+?)(?: \((.*)\))?", label).groups()
    parts = settings.split(", ") if settings else []
    base = [part for part in parts if "=" not in part]
    sites = tuple(part for part in parts if "=" in part)
    return AttentionSpec(preset=preset, sites=sites, **({"numerics": base[0]} if base else {}))


def kernel(spec: AttentionSpec):
    seed = torch.tensor(7) if "stochastic" in spec.label() else None

    def call(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
        more = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        return scaled_dot_product_attention(query, key, value, attn_mask, **more, numerics=spec, rounding_seed=seed)

    return call


def runs_by_kernel():
    runs = defaultdict(list)
    specs = {}
    for study in STUDIES:
        with open(f"experiments/{study}/summary.csv") as file:
            for row in csv.DictReader(file):
                label = row["attention"].replace(" (standard_triton)", "")
                try:
                    spec = spec_of(label)
                    which = str(spec.resolve()), spec.preset in ("sdpa_flash", "standard")
                except (UserError, AttributeError) as error:  # layers of two kinds; a preset that is gone
                    print(f"left out: {row['run']}: {error}"[:90])
                    continue
                specs.setdefault(which, spec)
                runs[which].append(row)
    return [(specs[which], rows) for which, rows in runs.items()]


def main(path: str) -> None:
    with open(path, "w", newline="") as file:
        write = csv.writer(file)
        write.writerow(
            [
                "attention",
                "runs",
                "failed",
                "longest_not_failed",
                "logit_above_1000",
                "rows",
                "class",
                "verdict_of_rows",
                "verdict",
                "sites",
            ]
        )
        for spec, rows in runs_by_kernel():
            went_on = [row for row in rows if row["ended"].split()[0] not in FAILED]
            longest = max((int(row["last_step"]) for row in went_on), default=0)
            at = [[float(row[name] or 0) for name in row if name.startswith("max_logit_1_at_2")] for row in rows]
            grew = sum(max(logits, default=0) > 1000 for logits in at)
            report = check_attention("torch:flash" if spec.preset == "sdpa_flash" else kernel(spec), device="cpu")
            cases = [case for case in report.cases if "rows" in case.measures]
            worst = max(cases, key=lambda case: case.measures["rows"])
            by_rows = [case.verdict for case in cases if case.reason.startswith("delta or P")]
            bad = [case for case in report.cases if case.verdict in (judge.AT_RISK, judge.WRONG)]
            sites = sorted({re.sub(r"[\d.e+-]+ of its size", "far off", re.split("[:,]", c.reason)[0]) for c in bad})
            failed = len(rows) - len(went_on)
            row = [spec.label(), len(rows), failed, longest, grew, f"{worst.measures['rows']:.1e}", worst.name]
            verdict = judge.worst([case.verdict for case in bad] or [judge.SAFE])
            write.writerow([*row, judge.worst(by_rows or [judge.SAFE]), verdict, "; ".join(sites)])
            file.flush()


if __name__ == "__main__":
    main(sys.argv[1])
