"""One row a run: how it ended, its losses, and how far the logits and W_Q of one layer grew.

    python scripts/summarize_runs.py runs/flash runs/fp32_o
    python scripts/summarize_runs.py experiments/fast_failure/runs --out experiments/fast_failure --at 2400 3500 5000 10000

A folder is a run, or a folder of runs. A run is what train.py writes (config.json, metrics.jsonl, telemetry.jsonl) or what is kept of a
published one (config.json, metrics.csv, probes.csv). Prints a Markdown table; with --out it writes summary.csv and summary.md there.

How a run ended:
    exploded at N        from step N on the training loss stayed 0.5 above its best for 200 steps (--patience)
    NaN at N             the training loss of step N is not finite
    unstable since N     gradient norm above 20 first at N (from step 200 on), and its median afterwards is more than twice the earlier one
    open since N         the loss is 0.5 above its best since N, for fewer steps than that
    stable to N          none of these, and the run has all its steps
    stopped early at N   none of these, and it has not
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _root  # noqa: F401
import pandas as pd

import files
from errors import OneLineParser, UserError, exit_on_user_error, invalid
from figures import curves
from training.metrics import METRICS_FILE, read_metrics
from training.telemetry import TELEMETRY_FILE, read_telemetry

MARGIN = 0.5
LARGE_NORM, LARGE_NORM_FROM = 20.0, 200
UNSTABLE_RATIO = 2.0
NEAR = 60
"""Steps behind a large gradient norm that do not count: a published run has more rows there than elsewhere."""
LAST_STEPS, LAST_SHARE = 50, 10
"""train_loss_end is the mean of so many of the last logged losses, at most a tenth of all."""


def read_table(path: Path) -> pd.DataFrame:
    """A CSV by step. Raises ``UserError`` for a file that is not one, or has no column ``step``."""
    try:
        table = pd.read_csv(path, dtype={"train_loss": str}, keep_default_na=False, na_values=[""])
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a CSV file ({str(error).splitlines()[0]})") from None
    if "step" not in table or table.empty or not pd.api.types.is_integer_dtype(table["step"]):
        raise UserError(f"{path}: expected a column step of whole numbers")
    return table.set_index("step")


def metrics_of(folder: Path) -> pd.DataFrame:
    """By step: train_loss and what else was logged. Where a run was rolled back, what it logged again counts. Raises ``UserError``.

    train_loss is text: a loss that is NaN is "nan", a step without one an empty cell.
    """
    if (folder / "metrics.csv").is_file():
        return read_table(folder / "metrics.csv")
    rows: dict[int, dict[str, Any]] = {}
    for record in read_metrics(folder):
        rows = {step: row for step, row in rows.items() if step <= record["step"]}
        text = {"train_loss": repr(record["train_loss"])} if "train_loss" in record else {}
        rows.setdefault(record["step"], {}).update(record | text)
    return pd.DataFrame(list(rows.values())).set_index("step")


def probes_of(folder: Path) -> pd.DataFrame:
    """By step: w_q_norm_L and max_logit_L of layers L; empty for a run without telemetry. Raises ``UserError``."""
    if (folder / "probes.csv").is_file():
        return read_table(folder / "probes.csv")
    if not (folder / TELEMETRY_FILE).is_file():
        return pd.DataFrame()
    rows: dict[int, dict[str, Any]] = {}
    for probe in read_telemetry(folder):
        try:
            norms = {f"w_q_norm_{layer}": float(norm) for layer, norm in enumerate(probe["w_q_norm"])}
            logits = {f"max_logit_{layer}": float(max(heads)) for layer, heads in enumerate(probe["max_logit"])}
        except (KeyError, TypeError, ValueError):
            raise UserError(f"{folder / TELEMETRY_FILE}: step {probe['step']} is not a probe") from None
        rows = {step: row for step, row in rows.items() if step < probe["step"]}
        rows[probe["step"]] = norms | logits
    return pd.DataFrame.from_dict(rows, orient="index")


def config_of(folder: Path) -> dict[str, Any]:
    """config.json of a run. Raises ``UserError`` where it is not one."""
    try:
        content: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
        content["config"]["run"]["seed"], content["config"]["run"]["steps"], content["attention_name"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{folder}/config.json: not the record of a run") from None
    return content


def column(table: pd.DataFrame, name: str) -> pd.Series:
    """A column's values by step, without empty cells."""
    return table[name].dropna().astype(float) if name in table else pd.Series(dtype=float)


def first_large_norm(norms: pd.Series) -> int | None:
    """First step with a gradient norm above ``LARGE_NORM``, or one that is not a number."""
    late = norms[norms.index >= LARGE_NORM_FROM]
    large = late[~(late <= LARGE_NORM)]
    return None if large.empty else int(large.index[0])


def unstable_since(norms: pd.Series) -> int | None:
    """First large gradient norm of a run in which it stayed large: one among ordinary ones is no instability."""
    first = first_large_norm(norms)
    if first is None or norms.index[-1] - first < 500:
        return None
    after = norms[norms.index > first + NEAR]
    before = norms[(norms.index >= first - 1000) & (norms.index <= first - 500)]
    return first if len(after) and len(before) and not after.median() <= UNSTABLE_RATIO * before.median() else None


def ending(losses: pd.Series, norms: pd.Series, planned: int, patience: int) -> tuple[str, int | None]:
    """How the run ended, in the words of the module's docstring, and the step of its explosion or NaN."""
    steps, values = [int(step) for step in losses.index], [float(value) for value in losses]
    exploded = curves.explosion_step(values, MARGIN, patience, steps=steps)
    if exploded is not None:
        finite = math.isfinite(values[steps.index(exploded)])
        return f"{'exploded' if finite else 'NaN'} at {exploded:,}", exploded
    if (unstable := unstable_since(norms)) is not None:
        return f"unstable since {unstable:,}", None
    if (since := curves.open_excursion(values, MARGIN, patience, steps=steps)) is not None:
        return f"open since {since:,}", None
    return f"{'stable to' if steps[-1] + 1 >= planned else 'stopped early at'} {steps[-1]:,}", None


def summarize(folder: Path, layer: int, at: Sequence[int], patience: int) -> dict[str, Any]:
    """The row of a run. Raises ``UserError`` for a folder that is not a run's, or a layer that its probes lack."""
    config, metrics, probes = config_of(folder), metrics_of(folder), probes_of(folder)
    losses, norms, validation = (column(metrics, name) for name in ("train_loss", "grad_norm", "val_loss"))
    if losses.empty:
        raise UserError(f"{folder}: its metrics have no train_loss yet")
    if len(probes) and f"max_logit_{layer}" not in probes:
        raise invalid("--layer", layer, f"a layer of the probes in {folder}")
    ended, exploded = ending(losses, norms, int(config["config"]["run"]["steps"]), patience)
    logits, w_q = column(probes, f"max_logit_{layer}"), column(probes, f"w_q_norm_{layer}")
    row: dict[str, Any] = {
        "run": folder.resolve().name,
        "attention": config["attention_name"],
        "seed": config["config"]["run"]["seed"],
        "ended": ended,
        "exploded_at": exploded,
        "last_step": int(losses.index[-1]),
        "grad_norm_above_20_at": first_large_norm(norms),
        "train_loss_end": curves.final(list(losses), max(1, min(LAST_STEPS, len(losses) // LAST_SHARE))),
        "val_loss_best": validation.min() if len(validation) else None,
        "val_loss_end": validation.iloc[-1] if len(validation) else None,
    }
    for name, values in (("val_loss", validation), (f"max_logit_{layer}", logits), (f"w_q_norm_{layer}", w_q)):
        row |= {f"{name}_at_{step}": values.get(step) for step in at}
    for name, values in ((f"max_logit_{layer}", logits), (f"w_q_norm_{layer}", w_q)):
        row[f"{name}_largest"] = values.max() if len(values) else None
    speeds = column(metrics, "tokens_per_second")
    return row | {"tokens_per_second": speeds.median() if len(speeds) else None}


def run_folders(paths: Sequence[Path]) -> list[Path]:
    """The runs named, and those in the folders named. Raises ``UserError`` where there is none, or two have one name."""
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            raise UserError(f"{path}: no such run folder")
        is_run = any((path / name).is_file() for name in ("metrics.csv", METRICS_FILE, "config.json"))
        inside = sorted({one.parent for name in ("metrics.csv", METRICS_FILE) for one in path.glob(f"*/{name}")})
        if not is_run and not inside:
            raise UserError(f"{path}: neither a run nor a folder of runs")
        found += [path] if is_run else inside
    names = [path.resolve().name for path in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"two runs have the name {twice[0]}: give one of them another folder name")
    return found


def table_of(folders: Sequence[Path], layer: int, at: Sequence[int], patience: int) -> pd.DataFrame:
    """A row a run, those that exploded first, by step; columns that no run has are left out. Raises ``UserError``."""
    table = pd.DataFrame([summarize(folder, layer, at, patience) for folder in folders])
    table = table.sort_values(["exploded_at", "run"], na_position="last", kind="stable").dropna(
        axis="columns", how="all"
    )
    whole = [name for name in ("exploded_at", "grad_norm_above_20_at") if name in table]
    return table.astype(dict.fromkeys(whole, "Int64")).reset_index(drop=True)


def cell(name: str, value: Any) -> str:
    """A cell of the Markdown table."""
    if not isinstance(value, str) and pd.isna(value) and name != "train_loss_end":
        return "-"
    if "loss" in name:
        return f"{value:.3f}"
    if name == "tokens_per_second" or ("logit" in name and abs(value) >= 1000):
        return f"{value:,.0f}"
    return (
        f"{value:.3g}" if isinstance(value, float) else f"{value:,}" if name.endswith(("step", "_at")) else str(value)
    )


def heading(name: str) -> str:
    """A column's name in words."""
    words = [(r"max_logit_(\d+)", r"largest logit of layer \1"), (r"w_q_norm_(\d+)", r"W_Q norm of layer \1")]
    words += [("(W_Q.*)_largest", r"largest \1"), ("_largest", "")]
    words += [("train_loss", "training loss"), ("val_loss", "validation loss"), ("grad_norm", "gradient norm")]
    for pattern, text in words:
        name = re.sub(pattern, text, name)
    return re.sub(r"\d{4,}", lambda step: f"{int(step[0]):,}", name.replace("_", " ").replace("W Q", "W_Q"))


def markdown(table: pd.DataFrame) -> str:
    """The table in Markdown, without what ``ended`` says already."""
    names = [name for name in table if name not in ("exploded_at", "last_step", "val_loss_end")]
    text = [name in ("run", "attention", "ended") for name in names]
    lines = [
        "| " + " | ".join(heading(name) for name in names) + " |",
        "| " + " | ".join("---" if is_text else "---:" for is_text in text) + " |",
    ]
    lines += ["| " + " | ".join(cell(name, row[name]) for name in names) + " |" for _, row in table.iterrows()]
    return "\n".join(lines) + "\n"


@exit_on_user_error
def main(arguments: Sequence[str] | None = None) -> None:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders, or folders of runs")
    parser.add_argument("--out", type=Path, help="folder for summary.csv and summary.md; without it nothing is written")
    parser.add_argument("--layer", type=int, default=1, help="from 0: the layer whose logits and W_Q are told (1)")
    parser.add_argument("--at", type=int, nargs="+", default=[], help="steps at which losses, logits and W_Q are told")
    parser.add_argument(
        "--patience", type=int, default=200, help="steps above the best loss that are an explosion (200)"
    )
    args = parser.parse_args(arguments)
    if args.patience < 1:
        raise invalid("--patience", args.patience, "1 or more steps")
    table = table_of(run_folders(args.runs), args.layer, args.at, args.patience)
    text = markdown(table)
    if args.out is not None:
        try:
            args.out.mkdir(parents=True, exist_ok=True)
            files.write_text(args.out / "summary.csv", table.to_csv(index=False, float_format="%.6g"))
            files.write_text(args.out / "summary.md", text)
        except OSError as error:
            raise UserError(f"--out {args.out}: cannot be written ({error.strerror or error})") from None
    print(text, end="")


if __name__ == "__main__":
    main()
