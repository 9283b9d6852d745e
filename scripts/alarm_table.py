"""How early each detector warns of an explosion, and how often it cries wolf: a table over finished runs.

    python scripts/alarm_table.py runs/failing runs/fixed ... --out alarms.md --thin results/alarm

A run exploded where its training loss stays 0.5 above its best so far for 200 steps (``--margin``, ``--patience``). Detectors: the rules of
training/alarm.py, made afresh from telemetry.jsonl; the largest logit alone; the loss alone, six standard deviations above the mean of
the 200 losses before. The first alarm counts. In a run that did not explode, an alarm is a false one.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import files
from analysis import curves
from errors import UserError, exit_on_user_error, invalid
from training.alarm import Alarm, AlarmConfig, alarms, logit_alarm, loss_alarm
from training.metrics import json_safe, read_metrics
from training.telemetry import read_telemetry

DELTA_Z = 5.0
DETECTORS = ("growth", "delta", "max_logit", "loss")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run: when it exploded (None: it did not), whether it ends too soon to tell, and when each detector alarmed first."""

    run: str
    attention: str
    last_step: int
    exploded_at: int | None
    is_open: bool
    accused: str
    first: dict[str, int | None]

    def warning(self, detector: str) -> int | None:
        """Steps from the first alarm to the explosion; negative when it came too late."""
        alarm = self.first[detector]
        return None if alarm is None or self.exploded_at is None else self.exploded_at - alarm


def examine(folder: Path, args: argparse.Namespace) -> Row:
    """The row of one run folder. Raises ``UserError`` for a folder that lacks metrics, telemetry or its config."""
    metrics, telemetry = read_metrics(folder), read_telemetry(folder)
    try:
        content = json.loads((folder / "config.json").read_bytes())
        warm_up = int(content["config"]["optim"]["warmup_steps"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{folder}/config.json: not the record of a run") from None
    if "lr_sum" not in telemetry[0]:
        raise UserError(f"{folder}: its telemetry has no lr_sum, which the rule growth needs")
    steps, losses = curves.column(metrics, "train_loss")
    config = AlarmConfig(
        growth_exponent=args.exponent,
        growth_window=args.window,
        growth_logit=args.logit,
        growth_probes=args.probes,
        delta_z=args.delta_z,
    )
    raised = alarms(telemetry, config, warm_up)
    excursion = curves.open_excursion(losses, args.margin, args.patience, steps=steps)
    return Row(
        run=folder.resolve().name,
        attention=str(content.get("attention_name", "?")),
        last_step=max(steps[-1], telemetry[-1]["step"]),
        exploded_at=curves.explosion_step(losses, args.margin, args.patience, steps=steps),
        is_open=excursion is not None,
        accused=_accused(raised),
        first={
            **{rule: next((a.step for a in raised if a.rule == rule), None) for rule in ("growth", "delta")},
            "max_logit": logit_alarm(telemetry, args.max_logit),
            "loss": loss_alarm(steps, losses, warm_up=warm_up),
        },
    )


def _accused(raised: Sequence[Alarm]) -> str:
    first = next((alarm for alarm in raised if alarm.rule == "growth"), None)
    return "-" if first is None else f"layer {first.layer}, heads {','.join(map(str, first.heads))}"


def markdown(rows: Sequence[Row]) -> str:
    """One line a run: alarm step and, where the run exploded, the warning in brackets."""
    head = [
        "run",
        "attention",
        "last step",
        "exploded at step",
        *(f"{name}: step (warning)" for name in DETECTORS),
        "growth names",
    ]
    lines = [head, ["---", "---", *["---:"] * (len(head) - 3), "---"]]
    for row in rows:
        exploded = "too soon to tell" if row.is_open else "no" if row.exploded_at is None else str(row.exploded_at)
        cells = [_cell(row, name) for name in DETECTORS]
        lines.append([row.run, row.attention, str(row.last_step), exploded, *cells, row.accused])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(row: Row, detector: str) -> str:
    alarm, warning = row.first[detector], row.warning(detector)
    if alarm is None:
        return "-"
    return f"{alarm} ({warning})" if warning is not None else str(alarm) if row.is_open else f"**{alarm}** (false)"


def totals(rows: Sequence[Row]) -> list[str]:
    """A sentence a detector: how many explosions it warned of and how early, and its false alarms."""
    exploding = [row for row in rows if row.exploded_at is not None]
    stable = [row for row in rows if row.exploded_at is None and not row.is_open]
    sentences = []
    for name in DETECTORS:
        warnings = [w for row in exploding if (w := row.warning(name)) is not None and w > 0]
        spread = (
            f", {min(warnings)} to {max(warnings)} steps ahead (median {statistics.median(warnings):g})"
            if warnings
            else ""
        )
        false = sum(row.first[name] is not None for row in stable)
        sentences.append(
            f"{name}: warned of {len(warnings)} of {len(exploding)} explosions{spread}; "
            f"false alarms in {false} of {len(stable)} stable runs."
        )
    return sentences


def as_csv(rows: Sequence[Row]) -> str:
    """The same numbers; empty where there is none."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["run", "attention", "last_step", "exploded_at", "too_soon_to_tell", *DETECTORS, "growth_names"])
    for row in rows:
        alarm_steps = [row.first[name] for name in DETECTORS]
        writer.writerow(
            [row.run, row.attention, row.last_step, row.exploded_at, int(row.is_open), *alarm_steps, row.accused]
        )
    return out.getvalue()


def thinned(folder: Path) -> str:
    """The evidence of a run as CSV, a line a probe: the step's loss; per layer W_Q's norm, and the largest of its heads' other columns."""
    telemetry = read_telemetry(folder)
    losses = dict(zip(*curves.column(read_metrics(folder), "train_loss"), strict=True))
    layers = range(len(telemetry[0]["w_q_norm"]))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = ("w_q_norm", "qk_head_norm", "max_logit")
    writer.writerow(["step", "lr_sum", "train_loss", *(f"{name}_{layer}" for layer in layers for name in names)])
    for record in telemetry:
        cells: list[Any] = [record["step"], record["lr_sum"], losses.get(record["step"])]
        for layer in layers:
            cells += [record["w_q_norm"][layer], max(record["qk_head_norm"][layer]), max(record["max_logit"][layer])]
        writer.writerow(
            [f"{json_safe(cell):.5g}" if isinstance(json_safe(cell), float) else json_safe(cell) for cell in cells]
        )
    return out.getvalue()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see --help)")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    rules = AlarmConfig()
    parser = _Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    parser.add_argument("--out", default="", help="also write the table to this file: .md or .csv")
    parser.add_argument("--thin", default="", help="folder for the evidence, one small CSV a run")
    parser.add_argument(
        "--margin", type=float, default=0.5, help="nats above the best loss that begin an explosion (0.5)"
    )
    parser.add_argument("--patience", type=int, default=200, help="steps above the margin that make one (200)")
    parser.add_argument("--max-logit", type=float, default=1000.0, help="threshold of the detector max_logit (1000)")
    parser.add_argument("--delta-z", type=float, default=DELTA_Z, help=f"alarm.delta_z ({DELTA_Z:g})")
    for name, field in (
        ("exponent", "growth_exponent"),
        ("window", "growth_window"),
        ("logit", "growth_logit"),
        ("probes", "growth_probes"),
    ):
        default = getattr(rules, field)
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"alarm.{field} ({default:g})")
    args = parser.parse_args(argv)
    if args.patience < 1:
        raise invalid("--patience", args.patience, "1 or more steps")
    if not args.margin >= 0:
        raise invalid("--margin", args.margin, "0 or more nats")
    if args.out and Path(args.out).suffix not in (".md", ".csv"):
        raise invalid("--out", args.out, "a file name that ends in .md or .csv")
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
    rows = [examine(folder, args) for folder in args.runs]
    rows.sort(key=lambda row: (row.exploded_at is None, row.run))
    lines = [*totals(rows), curves.EXPLOSION_DEFINITION.format(margin=args.margin, patience=args.patience)]
    text = markdown(rows) + "\n\n" + "".join(f"- {sentence}\n" for sentence in lines)
    print(text, end="")
    if args.out:
        write(Path(args.out), as_csv(rows) if Path(args.out).suffix == ".csv" else text)
    if args.thin:
        for folder in args.runs:
            write(Path(args.thin) / f"{folder.resolve().name}.csv", thinned(folder))


if __name__ == "__main__":
    main()
