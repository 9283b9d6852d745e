"""Runs of the table in README.md, one after the other, one row of runs.csv each: python experiments/invariant/run.py SEED [SEED ...]

From the repository's root, after ``python scripts/prepare_data.py stdlib``. A cell that has a row already is left out.
"""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
STEPS = 1000
WORLDS = {
    "l_coarse": ("fp32", ("logsumexp=m4",)),
    "both": ("microcosm", ("logsumexp=m4",)),
    "o_coarse": ("microcosm", ()),
}
PUBLISHED = {("o_coarse", "from_o"), ("o_coarse", "from_p")}
"""Five seeds of these are in the study of the microcosm, and are not run again."""
DELTAS = {
    "from_o": (),
    "from_p": ("delta=rowsum_p_dp",),
    "normalised": ("delta=rowsum_p_dp_normalised",),
    "corrected_rows": ("row_residual=corrected_rows",),
}
COLUMNS = ("world", "delta", "seed", "exploded_at", "w_q_above_10_at", "largest_w_q_norm", "largest_logit", "val_loss")


def main() -> None:
    table = FOLDER / "runs.csv"
    done = set()
    if table.exists():
        with table.open(newline="") as file:
            done = {(row["world"], row["delta"], int(row["seed"])) for row in csv.DictReader(file)}
    else:
        table.write_text(",".join(COLUMNS) + "\n")
    for seed in map(int, sys.argv[1:]):
        for world in WORLDS:
            for delta in DELTAS:
                if (world, delta) not in PUBLISHED and (world, delta, seed) not in done:
                    row = endpoints(train(world, delta, seed))
                    with table.open("a", newline="") as file:
                        csv.DictWriter(file, COLUMNS, lineterminator="\n").writerow(
                            {"world": world, "delta": delta, "seed": seed, **row}
                        )


def train(world: str, delta: str, seed: int) -> list[dict[str, float]]:
    """Every line that the run logged."""
    base, coarse = WORLDS[world]
    name = f"invariant_{world}_{delta}_s{seed}"
    options = {
        "--run.name": name,
        "--run.steps": STEPS,
        "--run.log-every": 5,
        "--run.seed": seed,
        "--data.seed": seed,
        "--evaluation.every": STEPS,
        "--telemetry.every": 50,
        "--attention.default.numerics": base,
    }
    command = [sys.executable, "train.py", "configs/quickstart.py", *(str(x) for pair in options.items() for x in pair)]
    if sites := (*coarse, *DELTAS[delta]):
        command += ["--attention.default.sites", *sites]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        command, env=environment, stdout=subprocess.DEVNULL, check=False
    )  # a NaN loss ends a run with an error
    return [json.loads(line) for line in Path("runs", name, "metrics.jsonl").read_text().splitlines()]


def endpoints(lines: list[dict[str, float]]) -> dict[str, float | str]:
    norms = [(line["step"], line["w_q_norm_max"]) for line in lines if "w_q_norm_max" in line]
    return {
        "exploded_at": explosion([(line["step"], line["train_loss"]) for line in lines if "train_loss" in line]),
        "w_q_above_10_at": next((step for step, norm in norms if not norm <= 10), ""),
        "largest_w_q_norm": f"{max(norm for _, norm in norms):.4g}",
        "largest_logit": f"{max(line['max_logit_max'] for line in lines if 'max_logit_max' in line):.4g}",
        "val_loss": next(
            (f"{line['val_loss']:.4f}" for line in reversed(lines) if line["step"] == STEPS and "val_loss" in line), ""
        ),
    }


def explosion(losses: list[tuple[float, float]], margin: float = 0.5, patience: int = 50) -> float | str:
    """First step of ``patience`` whose loss (nats) stays above the best before by ``margin``, or is not finite; "" if there is none."""
    best, start = math.inf, None
    for step, loss in losses:
        if loss is not None and math.isfinite(loss) and loss <= best + margin:
            best, start = min(best, loss), None
            continue
        start = step if start is None else start
        if loss is None or not math.isfinite(loss) or step - start >= patience:
            return start
    return ""


if __name__ == "__main__":
    main()
