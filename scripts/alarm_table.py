"""How early each detector warns of an explosion, and how often it cries wolf: a table over finished runs.

    python scripts/alarm_table.py runs/failing runs/fixed ... --out alarms.md --thin results/alarm
    python scripts/alarm_table.py runs other/runs --scan
    python scripts/alarm_table.py runs/new --keep alarms.md --out alarms.md --thin results/alarm --scan [--was old/runs/...]

A folder of runs stands for the runs in it; of two runs of one name the longer counts. A run exploded where its training loss stays 0.5
above its best so far for 200 steps (``--margin``, ``--patience``). Detectors: the rules of training/alarm.py, made afresh from
telemetry.jsonl; the largest logit alone; the loss alone, six standard deviations above the mean of the 200 losses before. The first alarm
counts. In a run that went to its planned end without an explosion, an alarm is a false one; of a run that was cut, or came there with
a gradient norm above 20 again and again, nobody knows: both count as cut.
``--thin`` writes a CSV a run, ``--collected`` leaves out what the probes.csv of that run has, column by column.
``--printed``: logs whose NAME.log has what run NAME printed, for what its metrics.jsonl lost.
``--scan`` adds where thresholds could lie: what parts the runs, with which margins, and the rule ``growth`` at other settings.
``--keep`` adds runs to a table whose runs' logs are gone: its rows stay as they are, and a run that is given takes the place of its row,
unless the row is of a longer one. The table must be one that the same options make. With ``--scan`` the runs are added to NAME_scan.md
beside it, too. There a run in the place of a row needs the logs that its row was made of, to take out what they had in it: ``--was``.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import files
from analysis import curves
from analysis.report import canonical, unstable_since
from analysis.report_files import read_csv, short
from errors import OneLineParser, UserError, exit_on_user_error, invalid
from scripts import alarm_rows, alarm_scan
from scripts.alarm_rows import Row
from scripts.alarm_scan import Run, scan
from scripts.report import printed_rows, with_printed
from training.alarm import Alarm, AlarmConfig, alarms, logit_alarm, loss_alarm
from training.metrics import json_safe, read_metrics
from training.telemetry import read_telemetry

DELTA_Z = 5.0
THRESHOLDS = {
    "--max-logit": 1000.0,
    "--delta-z": DELTA_Z,
    **{
        f"--{name.removeprefix('growth_')}": getattr(AlarmConfig(), name)
        for name in ("growth_exponent", "growth_window", "growth_logit", "growth_share", "growth_probes")
    },
}
"""Of the detectors, by option."""


def read_run(folder: Path, args: argparse.Namespace) -> Run:
    """One run folder. Raises ``UserError`` for a folder that lacks metrics, telemetry or its config."""
    metrics, telemetry = read_metrics(folder), read_telemetry(folder)
    log = None if args.printed is None else args.printed / f"{folder.resolve().name}.log"
    if log is not None and log.is_file():
        metrics = with_printed(metrics, printed_rows(log), str(log))
    try:
        content = json.loads((folder / "config.json").read_bytes())
        warm_up = int(content["config"]["optim"]["warmup_steps"])
        planned = int(content["config"]["run"]["steps"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{folder}/config.json: not the record of a run") from None
    if "lr_sum" not in telemetry[0]:
        raise UserError(f"{folder}: its telemetry has no lr_sum, which the rule growth needs")
    steps, losses = curves.column(metrics, "train_loss")
    if not steps:
        raise UserError(f"{folder}: its metrics have no train_loss yet")
    exploded_at = curves.explosion_step(losses, args.margin, args.patience, steps=steps)
    is_finished = steps[-1] + 1 >= planned
    return Run(
        name=canonical(folder.resolve().name),
        attention=str(content.get("attention_name", "?")),
        steps=steps,
        losses=losses,
        telemetry=telemetry,
        warm_up=warm_up,
        exploded_at=exploded_at,
        is_open=curves.open_excursion(losses, args.margin, args.patience, steps=steps) is not None,
        is_cut=exploded_at is None and not is_finished,
        is_unstable=exploded_at is None and is_finished and unstable_since(metrics) is not None,
    )


def read_runs(paths: Sequence[Path], args: argparse.Namespace) -> list[Run]:
    """The runs named and those in the folders named, one of each name."""
    found: dict[str, Run] = {}
    for path in paths:
        is_run = (path / "metrics.jsonl").is_file() or not path.is_dir()
        inside = [] if is_run else sorted(one.parent for one in path.glob("*/metrics.jsonl"))
        for folder in inside or [path]:
            run = read_run(folder, args)
            other = found.get(run.name)
            if other is None or _length(other) < _length(run):
                found[run.name] = run
            if other is not None:
                longer = found[run.name].last_step
                print(
                    f"{run.name}: more than one run of that name; the longer counts, to step {longer}", file=sys.stderr
                )
    return list(found.values())


def _length(run: Run) -> tuple[int, int]:
    """Last step with a loss, last with a probe: what was printed lengthens the first only."""
    return run.last_step, int(run.telemetry[-1]["step"])


def rules(args: argparse.Namespace) -> AlarmConfig:
    """The alarm as the command line has it."""
    return AlarmConfig(
        growth_exponent=args.exponent,
        growth_window=args.window,
        growth_logit=args.logit,
        growth_share=args.share,
        growth_probes=args.probes,
        delta_z=args.delta_z,
    )


def examine(run: Run, args: argparse.Namespace) -> Row:
    """The row of one run."""
    raised = alarms(run.telemetry, rules(args), run.warm_up)
    return Row(
        name=run.name,
        attention=run.attention,
        last_step=run.last_step,
        exploded_at=run.exploded_at,
        is_open=run.is_open,
        is_cut=run.is_cut,
        is_unstable=run.is_unstable,
        accused=_accused(raised),
        first={
            **{rule: next((a.step for a in raised if a.rule == rule), None) for rule in ("growth", "delta")},
            "max_logit": logit_alarm(run.telemetry, args.max_logit),
            "loss": loss_alarm(run.steps, run.losses, warm_up=run.warm_up),
        },
    )


def settings(args: argparse.Namespace) -> list[str]:
    """Sentences on what the table rests on; the thresholds are told where they are not those of always."""
    sentences = [curves.EXPLOSION_DEFINITION.format(margin=args.margin, patience=args.patience)]
    values = {option: getattr(args, option.removeprefix("--").replace("-", "_")) for option in THRESHOLDS}
    others = [f"{option} {value:g}" for option, value in values.items() if value != THRESHOLDS[option]]
    return sentences + ([f"Thresholds: {', '.join(others)}; the others as by default."] if others else [])


def newer(given: Sequence[Run], there: Sequence[Row], table: Path) -> list[Run]:
    """The runs given, less those of which ``table`` has a longer one. Raises ``UserError`` where a name has another attention there."""
    rows = {row.name: row for row in there}
    new = []
    for run in given:
        row = rows.get(run.name)
        if row is not None and row.attention != run.attention:
            raise UserError(f"{run.name}: its attention is {run.attention}, in {table} {row.attention}: another run")
        if row is not None and row.last_step > run.last_step:
            print(f"{run.name}: its row in {table} stays, to step {row.last_step}", file=sys.stderr)
        else:
            new.append(run)
    return new


def scanned(runs: Sequence[Run], there: Sequence[Row], args: argparse.Namespace) -> str:
    """What ``--scan`` prints of the runs and of those that the kept table has. Raises ``UserError``."""
    config = rules(args)
    new = scan(runs, config, args.lead)
    if args.keep is None:
        return new.text()
    rows = {row.name: row for row in there}
    names, before = {run.name for run in runs}, read_runs(args.was, args) if args.was else []
    for run in before:
        row = rows.get(run.name)
        # As printed: a row that ends above the margin does not say whether it was cut.
        if (
            row is None
            or run.name not in names
            or alarm_rows.markdown([examine(run, args)]) != alarm_rows.markdown([row])
        ):
            raise UserError(f"--was: {run.name} is not what a row of {args.keep} that is replaced was made of")
    if missing := sorted(names & rows.keys() - {run.name for run in before}):
        raise UserError(
            f"--scan: {', '.join(missing)}: in the place of a row of {args.keep}, whose part in its scan cannot be taken out"
            " without the run that it was made of (--was)"
        )
    old = alarm_scan.kept(scan_file(args.keep), new, {row.name: row.last_step for row in there})
    if before:
        old = old.minus(scan(before, config, args.lead))
    return new.plus(old).text()


def scan_file(table: Path) -> Path:
    """Where the scan of a table lies."""
    return table.with_name(f"{table.stem}_scan.md")


def _accused(raised: Sequence[Alarm]) -> str:
    first = next((alarm for alarm in raised if alarm.rule == "growth"), None)
    return "-" if first is None else f"layer {first.layer}, heads {','.join(map(str, first.heads))}"


def thinned(run: Run, elsewhere: Mapping[int, Mapping[str, Any]] | None = None) -> str:
    """The evidence of a run as CSV, four digits, a line a probe: the step's loss; per layer W_Q's norm, the largest of its heads' other
    columns, and the logit that half of its heads reach. Less the columns that ``elsewhere`` has at every probe, by step."""
    losses = dict(zip(run.steps, run.losses, strict=True))
    rows = []
    for record in run.telemetry:
        row = {"step": record["step"], "lr_sum": record["lr_sum"], "train_loss": losses.get(record["step"])}
        for layer, logits in enumerate(record["max_logit"]):
            row[f"w_q_norm_{layer}"] = record["w_q_norm"][layer]
            row[f"qk_head_norm_{layer}"] = max(record["qk_head_norm"][layer])
            row[f"max_logit_{layer}"] = max(logits)
            row[f"half_logit_{layer}"] = sorted(logits, reverse=True)[(len(logits) + 1) // 2 - 1]
        rows.append(row)
    columns = [name for name in rows[0] if not _has(elsewhere or {}, name, rows)]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        safe = [json_safe(row[name]) for name in columns]
        writer.writerow([short(cell) if isinstance(cell, float) else cell for cell in safe])
    return out.getvalue()


def _has(elsewhere: Mapping[int, Mapping[str, Any]], name: str, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether ``elsewhere`` has these rows' values of a column, to the digits that are kept: another run of that name has others."""
    pairs = [(row[name], elsewhere.get(row["step"], {}).get(name)) for row in rows]
    return name != "step" and all(b is not None and math.isclose(a, b, rel_tol=1e-3) for a, b in pairs)


def collected_probes(folder: Path | None, name: str) -> dict[int, dict[str, Any]]:
    """Rows of the probes.csv of a run that ``report.py collect`` wrote into ``folder``, by step; none where there is no such run.

    Raises ``UserError`` for a file that ``collect`` has not written so.
    """
    if folder is None or not (path := folder / name / "probes.csv").is_file():
        return {}
    try:
        with path.open(newline="") as file:
            return {row["step"]: row for row in read_csv(file)}
    except (OSError, ValueError, KeyError):
        raise UserError(f"{path}: not what scripts/report.py collect writes") from None


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders, or folders of them")
    parser.add_argument("--out", default="", help="also write the table to this file: .md or .csv")
    parser.add_argument("--thin", default="", help="folder for the evidence, one small CSV a run")
    parser.add_argument(
        "--collected", type=Path, help="folder of scripts/report.py collect: --thin leaves out what its probes.csv have"
    )
    parser.add_argument("--keep", type=Path, help="table.md of an earlier call: its rows of other runs stay")
    parser.add_argument(
        "--was",
        nargs="+",
        type=Path,
        default=[],
        help="with --keep --scan: what the rows were made of that are replaced",
    )
    parser.add_argument(
        "--margin", type=float, default=0.5, help="nats above the best loss that begin an explosion (0.5)"
    )
    parser.add_argument("--patience", type=int, default=200, help="steps above the margin that make one (200)")
    parser.add_argument(
        "--max-logit", type=float, default=THRESHOLDS["--max-logit"], help="threshold of the detector max_logit (1000)"
    )
    parser.add_argument(
        "--printed", type=Path, help="folder of NAME.log files, for the losses of steps that metrics.jsonl lacks"
    )
    parser.add_argument(
        "--scan", action="store_true", help="also where the thresholds could lie; with --out NAME.md in NAME_scan.md"
    )
    parser.add_argument("--lead", type=int, default=500, help="with --scan: steps of warning asked for (500)")
    parser.add_argument("--delta-z", type=float, default=DELTA_Z, help=f"alarm.delta_z ({DELTA_Z:g})")
    for name in ("exponent", "window", "logit", "share", "probes"):
        default = THRESHOLDS[f"--{name}"]
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"alarm.growth_{name} ({default:g})")
    args = parser.parse_args(argv)
    if args.patience < 1:
        raise invalid("--patience", args.patience, "1 or more steps")
    if not args.margin >= 0:
        raise invalid("--margin", args.margin, "0 or more nats")
    if args.printed is not None and not args.printed.is_dir():
        raise UserError(f"--printed {args.printed}: no such folder")
    if args.collected is not None and not args.collected.is_dir():
        raise UserError(f"--collected {args.collected}: no such folder")
    if args.out and Path(args.out).suffix not in (".md", ".csv"):
        raise invalid("--out", args.out, "a file name that ends in .md or .csv")
    if args.keep is not None and args.keep.suffix != ".md":
        raise invalid("--keep", str(args.keep), "a table that --out wrote, in a file whose name ends in .md")
    if args.was and (args.keep is None or not args.scan):
        raise UserError("--was: it is for --keep with --scan")
    return args


def write(path: Path, content: str) -> None:
    """Raises ``UserError`` when the disk takes it not."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(path, content)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    args = parse(argv)
    there = [] if args.keep is None else alarm_rows.kept(args.keep, settings(args))
    runs = newer(read_runs(args.runs, args), there, args.keep)
    names = {run.name for run in runs}
    rows = alarm_rows.in_order([*(examine(run, args) for run in runs), *(r for r in there if r.name not in names)])
    text = alarm_rows.document(rows, settings(args))
    also = scanned(runs, there, args) if args.scan else ""
    thin = {run.name: thinned(run, collected_probes(args.collected, run.name)) for run in runs} if args.thin else {}
    print(text, end="")
    print(f"\n{also}" if also else "", end="")
    if args.out and also:
        write(scan_file(Path(args.out)), also)
    elif args.out and args.keep is not None and scan_file(Path(args.out)).is_file() and runs:
        print(f"{scan_file(Path(args.out))}: stays, of the runs that it names", file=sys.stderr)
    if args.out:
        write(Path(args.out), alarm_rows.as_csv(rows) if Path(args.out).suffix == ".csv" else text)
    for name, content in thin.items():
        write(Path(args.thin) / f"{name}.csv", content)


if __name__ == "__main__":
    main()
