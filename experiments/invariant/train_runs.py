"""Runs of the table in README.md, one after the other, one row of runs.csv each: python -m experiments.invariant.train_runs SEED [SEED ...]

From the repository's root, after ``python scripts/prepare_data.py stdlib``. A run whose folder is there is not made again; without a seed
only runs.csv is written, from the folders.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
STEPS = 1000
WORLDS = {
    "l_coarse": ("fp32", ("logsumexp=m4",)),
    "both": ("microcosm", ("logsumexp=m4",)),
    "o_coarse": ("microcosm", ()),
    "large_logits": ("fp32", ("exponent=fma",)),
    "larger_logits": ("fp32", ("exponent=fma",)),
}
LEVELS = {"large_logits": 21, "larger_logits": 23}
"""The power of 2 that is added to every logit."""
DELTAS = {
    "from_o": (),
    "from_p": ("delta=rowsum_p_dp",),
    "normalised": ("delta=rowsum_p_dp_normalized",),
    "corrected_rows": ("row_residual=corrected_rows",),
    "centered_keys": ("row_residual=centered_keys",),
    "consistent": (),
    "from_p_subtract_first": (),
}
"""Sites; the last two are presets, which form no L that could be coarse."""
PRESETS = {"consistent": "flash_consistent", "from_p_subtract_first": "flash_delta_from_p_subtract_first"}
EVERYWHERE = ("from_o", "from_p", "normalised", "corrected_rows")
CELLS = [
    *itertools.product(("l_coarse", "both", "o_coarse"), EVERYWHERE),
    *itertools.product(("o_coarse",), ("centered_keys", "consistent")),
    *itertools.product(LEVELS, ("from_o", "from_p", "normalised", "consistent", "from_p_subtract_first")),
]
COLUMNS = (
    "world",
    "delta",
    "seed",
    "exploded_at",
    "stopped_at",
    "w_q_above_10_at",
    "largest_w_q_norm",
    "largest_logit",
    "val_loss",
)


def main() -> None:
    for seed in map(int, sys.argv[1:]):
        for world, delta in CELLS:
            if not metrics(world, delta, seed).exists():
                train(world, delta, seed)
    write_table()
    print_summary()


def metrics(world: str, delta: str, seed: int) -> Path:
    return Path("runs", f"invariant_{world}_{delta}_s{seed}", "metrics.jsonl")


def write_table() -> None:
    """runs.csv, a row of every run in the folder ``runs`` that came to its end."""
    with (FOLDER / "runs.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for (world, delta), seed in itertools.product(CELLS, range(100)):
            path = metrics(world, delta, seed)
            if path.exists() and (row := endpoints([json.loads(line) for line in path.read_text().splitlines()])):
                writer.writerow({"world": world, "delta": delta, "seed": seed, **row})


def print_summary() -> None:
    """The table of README.md."""
    with (FOLDER / "runs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    print("| world | delta | n | exploded | at step | W_Q norm above 10 | largest logit | validation loss |")
    print("| --- | --- | ---: | ---: | --- | ---: | ---: | ---: |")
    for world, delta in CELLS:
        cell = [row for row in rows if (row["world"], row["delta"]) == (world, delta)]
        at = [row["exploded_at"] for row in cell if row["exploded_at"]]
        left = sum(bool(row["w_q_above_10_at"]) for row in cell)
        spans = (span([float(row[name]) for row in cell if row[name]]) for name in ("largest_logit", "val_loss"))
        print(f"| `{world}` | {delta} | {len(cell)} | {len(at)} | {', '.join(at)} | {left} |", " | ".join(spans), "|")


def span(values: list[float]) -> str:
    return " - ".join(f"{x:g}" for x in sorted({min(values), max(values)})) if values else ""


def sites_of(world_sites: tuple[str, ...], delta: str) -> tuple[str, ...]:
    """Sites of a cell. They go over those of a preset, so a world's exponent would undo the preset that subtracts first."""
    return (*(() if delta == "from_p_subtract_first" else world_sites), *DELTAS[delta])


def train(world: str, delta: str, seed: int) -> None:
    base, coarse = WORLDS[world]
    name = metrics(world, delta, seed).parent.name
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
    if delta in PRESETS:
        options["--attention.default.preset"] = PRESETS[delta]
    trainer = ("train.py",)
    if world in LEVELS:
        trainer = ("-m", "experiments.invariant.train_at_large_logits", str(LEVELS[world]))
    command = [sys.executable, *trainer, "configs/quickstart.py", *(str(x) for pair in options.items() for x in pair)]
    if sites := sites_of(coarse, delta):
        command += ["--attention.default.sites", *sites]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        command, env=environment, stdout=subprocess.DEVNULL, check=False
    )  # a NaN loss ends a run with an error


def endpoints(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Of every line that a run logged; empty where it is not at its end. A gradient that is not finite stops a run."""
    norms = [(line["step"], line["w_q_norm_max"]) for line in lines if "w_q_norm_max" in line]
    stopped = next((line["step"] for line in lines if "nonfinite" in line), "")
    losses = [(line["step"], line["train_loss"]) for line in lines if "train_loss" in line]
    last = next((line["val_loss"] for line in lines if line["step"] == STEPS and "val_loss" in line), None)
    if stopped == "" and last is None:
        return {}
    return {
        "exploded_at": explosion(losses, ended=stopped != ""),
        "stopped_at": stopped,
        "w_q_above_10_at": next((step for step, norm in norms if not norm <= 10), ""),
        "largest_w_q_norm": f"{max(norm for _, norm in norms):.4g}",
        "largest_logit": f"{max(line['max_logit_max'] for line in lines if 'max_logit_max' in line):.4g}",
        "val_loss": "" if last is None else f"{last:.4f}",
    }


def explosion(losses: list[tuple[int, float]], *, ended: bool, margin: float = 0.5, patience: int = 50) -> int | str:
    """First step of ``patience`` whose loss (nats) stays above the best before by ``margin``; "" if there is none.

    ``ended``: a gradient that is not finite ended the run, and with it an excursion that was not so long yet.
    """
    best, start = math.inf, None
    for step, loss in losses:
        if loss <= best + margin:
            best, start = min(best, loss), None
            continue
        start = step if start is None else start
        if step - start >= patience:
            return start
    return start if ended and start is not None else ""


if __name__ == "__main__":
    main()
