"""Compare runs: what was changed, where they part, which explodes, and whether they saw the same data.

    python scripts/compare_runs.py runs/failing runs/fixed [runs/...] --out compare.png

The first run is the reference. Prints a table: the step of an explosion, the first step whose loss differs, losses, the largest W_Q norm.
Draws training loss, largest attention logit, gradient norm and validation loss over steps.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import _root  # noqa: F401

import files
from errors import OneLineParser, UserError, exit_on_user_error, invalid
from figures import curves
from figures.courses import Course, draw_courses
from training.metrics import json_safe, read_metrics

FINAL_SHARE, FINAL_MOST = 20, 50
# Differences in these say which run it is or what it writes where, not how it trains; the data have a sentence of their own.
UNTOLD = ("run.name", "run.folder", "run.resume", "data.record", "data.replay", "data.verify", "checkpoint.", "wandb.")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished or running run, as its folder tells it."""

    name: str
    attention: str
    records: list[dict[str, Any]]
    facts: dict[str, Any]
    batches: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Result:
    """One row of the table. Losses in nats a token; None: nothing to tell (see the column)."""

    run: str
    attention: str
    last_step: int
    exploded_at: int | None
    leaving_since: int | None
    differs_from_first_at: int | None
    train_final: float
    train_best: float | None
    val_final: float | None
    val_best: float | None
    w_q_norm_largest: float | None
    tokens_per_second: float | None
    rollbacks: int
    changed: dict[str, list[Any]]


def load_run(folder: Path) -> Run:
    """Read ``metrics.jsonl`` and, where there is one, ``config.json``.

    Raises:
        UserError: no such folder, no metrics, no training loss in them, or a config that is not JSON or not a run's.
    """
    records = read_metrics(folder)
    if not curves.column(records, "train_loss")[0]:
        raise UserError(f"{folder}: its metrics have no train_loss yet")
    path, config = folder / "config.json", {}
    if path.is_file():
        try:
            config = json.loads(path.read_bytes())
        except ValueError as error:
            raise UserError(f"{path}: not JSON ({error})") from None
        if not isinstance(config, dict) or not isinstance(config.get("config", {}), dict):
            raise UserError(f"{path}: not the record of a run")
    facts = _flatten(config.get("config", {}))
    for key in ("device", "git_commit", "versions"):
        facts.update(_flatten({key: config[key]} if key in config else {}))
    return Run(
        name=folder.resolve().name,
        attention=str(config.get("attention_name", "?")),
        records=records,
        facts={key: value for key, value in facts.items() if not key.startswith(UNTOLD)},
        batches=config.get("batches") or {},
    )


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves.update(_flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return leaves


def summarize(run: Run, reference: Run, *, margin: float, patience: int) -> Result:
    """The row of ``run``.

    Raises:
        UserError: it has no step in common with the reference.
    """
    if not curves.common_steps(run.records, reference.records):
        raise UserError(f"{run.name} and {reference.name} have no step in common, so there is nothing to compare")
    steps, losses = curves.column(run.records, "train_loss")
    val_steps, val_losses = curves.column(run.records, "val_loss")
    norms = [value for value in curves.column(run.records, "w_q_norm_max")[1] if math.isfinite(value)]
    speeds = curves.column(run.records, "tokens_per_second")[1]
    train_best, val_best = curves.best(steps, losses), curves.best(val_steps, val_losses)
    keys = dict.fromkeys([*reference.facts, *run.facts])
    return Result(
        run=run.name,
        attention=run.attention,
        last_step=steps[-1],
        exploded_at=curves.explosion_step(losses, margin, patience, steps=steps),
        leaving_since=curves.open_excursion(losses, margin, patience, steps=steps),
        differs_from_first_at=curves.first_divergence(reference.records, run.records),
        train_final=curves.final(losses, max(1, min(len(losses) // FINAL_SHARE, FINAL_MOST))),
        train_best=train_best and train_best[1],
        val_final=val_losses[-1] if val_losses else None,
        val_best=val_best and val_best[1],
        w_q_norm_largest=max(norms, default=None),
        tokens_per_second=statistics.median(speeds) if speeds else None,
        rollbacks=curves.rollbacks(run.records),
        changed={
            key: [reference.facts.get(key), run.facts.get(key)]
            for key in keys
            if reference.facts.get(key) != run.facts.get(key)
        },
    )


def data_sentence(runs: Sequence[Run]) -> str:
    """Whether all runs drew the same batches. A logged digest stands for the data set and all batches up to its step."""
    first, others = runs[0], runs[1:]
    untold, parted, through = [], [], []
    for run in others:
        steps = curves.common_steps(first.records, run.records, "data_digest")
        step = curves.first_divergence(first.records, run.records, "data_digest")
        if not steps:
            untold.append(run.name)
        elif step is None:
            through.append(steps[-1])
        else:
            parted.append(f"{run.name} from step {step} on{_data_difference(first.batches, run.batches)}")
    if parted:
        return f"Data: NOT identical: other batches than {first.name}: " + "; ".join(parted) + "."
    if untold:
        return f"Data: unknown: no data_digest at a step in common with {first.name}: " + ", ".join(untold) + "."
    reach = f"through step {through[0]}"
    if len(set(through)) > 1:
        reach = f"to the last step that each shares with {first.name} ({', '.join(map(str, sorted(set(through))))})"
    recordings = {(run.batches.get("recording"), run.batches.get("recording_start")) for run in runs}
    name = first.batches.get("recording") if len(recordings) == 1 else None
    source = f" (recording {name})" if name else ""
    return f"Data: identical: all {len(runs)} runs saw the same batches in the same order {reach}{source}."


def _data_difference(first: dict[str, Any], other: dict[str, Any]) -> str:
    names = ("data_sha256", "sequence_length", "global_batch", "seed", "recording")
    different = [name for name in names if first.get(name) != other.get(name)]
    return f" ({', '.join(different)} differ)" if different else ""


def validation_sentence(runs: Sequence[Run]) -> str | None:
    """A warning when validation losses were measured on different sequences; None when they are known to compare."""
    names = ("validation_sha256", "validation_sequences", "sequence_length")
    odd = [run.name for run in runs[1:] if any(run.batches.get(n) != runs[0].batches.get(n) for n in names)]
    return (
        f"Validation losses do not compare with {runs[0].name}'s (other sequences): {', '.join(odd)}." if odd else None
    )


HEADERS = (
    ("run", ""),
    ("attention", ""),
    ("last", "step"),
    ("exploded", "at step"),
    ("differs", "from 1st"),
    ("train loss", "final"),
    ("train", "best"),
    ("val loss", "final"),
    ("val", "best"),
    ("largest", "W_Q norm"),
    ("tokens", "per s"),
)


def cells(result: Result, *, is_first: bool) -> list[str]:
    """One row of the table as text, one cell for each of ``HEADERS``."""
    differs = result.differs_from_first_at
    return [
        result.run,
        result.attention,
        str(result.last_step),
        "no" if result.exploded_at is None else str(result.exploded_at),
        "-" if is_first else "never" if differs is None else f"step {differs}",
        *(_number(x, ".4f") for x in (result.train_final, result.train_best, result.val_final, result.val_best)),
        _number(result.w_q_norm_largest, ".4g"),
        _number(result.tokens_per_second, ",.0f"),
    ]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def plain_table(rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns under two lines of headings; text to the left, numbers to the right."""
    heads = [list(line) for line in zip(*HEADERS, strict=True)]
    widths = [max(len(line[i]) for line in [*heads, *rows]) for i in range(len(HEADERS))]
    lines = [*heads, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """The same cells as a Markdown table."""
    heads = [" ".join(part for part in head if part) for head in HEADERS]
    rule = ["---" if i < 2 else "---:" for i in range(len(HEADERS))]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in [heads, rule, *rows]
    )


def remarks(results: Sequence[Result], *, margin: float, patience: int) -> list[str]:
    """What a reader of the table must know, a line each: what was changed, odd runs, definitions."""
    lines = []
    for result in results[1:]:
        changes = "; ".join(f"{key}: {old!r} -> {new!r}" for key, (old, new) in result.changed.items())
        lines.append(f"{result.run} against {results[0].run}: {changes or 'no setting differs'}.")
    for result in results:
        if result.leaving_since is not None:
            lines.append(
                f"{result.run} is above the margin since step {result.leaving_since} and ends at {result.last_step}: too soon to tell."
            )
        if result.rollbacks:
            lines.append(
                f"{result.run} went back to an earlier step {result.rollbacks} times; only its final course counts."
            )
    lines.append(curves.EXPLOSION_DEFINITION.format(margin=margin, patience=patience))
    lines.append(
        f"Final training loss: mean of the last 1/{FINAL_SHARE} logged, at most {FINAL_MOST}; "
        "differs from 1st: first step whose training loss is not the same bits."
    )
    return lines


def write_table(path: Path, results: Sequence[Result], rows: Sequence[Sequence[str]], lines: Sequence[str]) -> None:
    """Results as Markdown or JSON, by the file's ending; not-finite numbers as in ``metrics.jsonl``.

    Raises:
        UserError: the file cannot be written.
    """
    if path.suffix == ".json":
        runs = [{key: json_safe(value) for key, value in asdict(result).items()} for result in results]
        text = json.dumps({"runs": runs, "remarks": list(lines)}, indent=2) + "\n"
    else:
        text = markdown_table(rows) + "\n\n" + "".join(f"- {line}\n" for line in lines)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(path, text)
    except OSError as error:
        raise UserError(f"--table {path}: cannot be written ({error.strerror})") from None


def draw(runs: Sequence[Run], results: Sequence[Result], path: Path) -> None:
    """The picture: see ``figures.courses``.

    Raises:
        UserError: matplotlib is not installed, or the picture cannot be written.
    """
    drawn = []
    for run, result in zip(runs, results, strict=True):
        end = f"no explosion by {result.last_step}"
        if result.exploded_at is not None:
            end = f"explodes at {result.exploded_at}"
        elif result.leaving_since is not None:
            end = f"leaves at {result.leaving_since}, then ends"
        drawn.append(
            Course(label=f"{run.name}: {run.attention}, {end}", records=run.records, exploded_at=result.exploded_at)
        )
    try:
        draw_courses(drawn, path)
    except ImportError as error:
        raise invalid("--out", str(path), f"none, as matplotlib cannot be used here ({error})") from None
    except OSError as error:
        raise UserError(f"--out {path}: cannot be written ({error.strerror})") from None


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "runs", nargs="+", type=Path, help="run folders; the first is what the others are compared with"
    )
    parser.add_argument(
        "--out", default="compare.png", help="picture to write: .png, .pdf, .svg, or none (compare.png)"
    )
    parser.add_argument("--table", default="", help="also write the table to this file: .md or .json")
    parser.add_argument("--patience", type=int, default=200, help="steps above the margin that make an explosion (200)")
    parser.add_argument("--margin", type=float, default=0.5, help="nats above the best loss that begin one (0.5)")
    args = parser.parse_args(argv)
    if args.patience < 1:
        raise invalid("--patience", args.patience, "1 or more steps")
    if not args.margin >= 0:
        raise invalid("--margin", args.margin, "0 or more nats")
    if args.out != "none" and Path(args.out).suffix not in (".png", ".pdf", ".svg"):
        raise invalid("--out", args.out, "a file name that ends in .png, .pdf or .svg, or none")
    if args.table and Path(args.table).suffix not in (".md", ".json"):
        raise invalid("--table", args.table, "a file name that ends in .md or .json")
    return args


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    """Print the comparison, then draw it."""
    args = parse(argv)
    runs = [load_run(folder) for folder in args.runs]
    results = [summarize(run, runs[0], margin=args.margin, patience=args.patience) for run in runs]
    rows = [cells(result, is_first=index == 0) for index, result in enumerate(results)]
    lines = [data_sentence(runs)] if len(runs) > 1 else []
    lines += [line for line in (validation_sentence(runs),) if line]
    lines += remarks(results, margin=args.margin, patience=args.patience)
    print(plain_table(rows), "", *lines, sep="\n")
    if args.table:
        write_table(Path(args.table), results, rows, lines)
        print(f"Table: {args.table}")
    if args.out != "none":
        draw(runs, results, Path(args.out))
        print(f"Picture: {args.out}")


if __name__ == "__main__":
    main()
