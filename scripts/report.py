"""Evidence for the documents: thin the logs of runs into results/, then make the tables and plots from them.

    python scripts/report.py collect runs [runs/flash ...] [--printed LOGS] [--again OTHER/flash] [--out results/fast_failure]
    python scripts/report.py tables [--check]
    python scripts/report.py plots

``collect`` writes one folder a run: config.json, metrics.csv (thinned, at most 200 kB), heads.csv (layer 1, head by head) and probes.csv.
``--printed`` takes NAME.log files with what the runs printed, for steps that their metrics.jsonl no longer has. ``--again`` takes
second makings of runs collected in the same call and notes in again.csv whether they gave the same losses. A folder of runs stands for the
runs in it. A run replaces the one of its name that is there, unless that one is longer; one on other data than the runs there is
refused. All are checked before any is written. ``tables`` refreshes the marked parts of README.md,
docs/reproduction.md and docs/diagnosis.md. To add a run: collect it, then tables, then plots.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import json
import math
import re
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import files
from analysis import (
    curves,
    report,
    report_blocks,
    report_claims,
    report_documents,
    report_pictures,
)
from analysis.report import Evidence, canonical
from analysis.report_files import (
    as_csv,
    as_json,
    by_head,
    check_metrics,
    check_probes,
    head_rows,
    metrics_csv,
    of_layers,
    probe_rows,
    probes_csv,
    read_csv,
    z_scores,
)
from errors import OneLineParser, UserError, exit_on_user_error
from training.metrics import METRICS_FILE, read_metrics
from training.telemetry import TELEMETRY_FILE, read_telemetry

ROOT = Path(__file__).resolve().parent.parent
EVIDENCE = Path("results/fast_failure")
WRITTEN = {"alarm": Path("results/alarm"), "appendix_c": Path("results/appendix_c")}
"""What scripts/alarm_table.py and scripts/stabiliser_variants.py wrote: NAME.md is block PREFIX_NAME of the documents."""
DOCUMENTS = (Path("README.md"), Path("docs/reproduction.md"), Path("docs/diagnosis.md"))
ASKED = Path("configs/reproduction.txt")

MOST_BYTES = 200_000
EVERY = (10, 20, 50, 100)
DIGEST_EVERY = 500
AGAIN = ("run", "common_steps", "last_common_step", "first_difference", "sha256")
PRINTED = re.compile(r"^step (\d+)((?:  \w+ \S+)+)$")
PRINTED_COLUMNS = ("train_loss", "grad_norm", "val_loss", "tokens_per_second")


def printed_rows(path: Path) -> list[dict[str, Any]]:
    """Rows that a run printed, to four digits. Raises ``UserError`` for a file that cannot be read."""
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        raise UserError(f"{path}: unreadable ({error.strerror})") from None
    rows = []
    for line in text.splitlines():
        if found := PRINTED.match(line):
            named = dict(pair.split(" ") for pair in found[2].strip().split("  "))
            row = {name: float(named[name]) for name in PRINTED_COLUMNS if name in named}
            rows.append({"step": int(found[1]), **row, "source": "printed"})
    return rows


def with_printed(records: list[dict[str, Any]], printed: Sequence[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """Records, and behind their last step the printed ones. Raises ``UserError`` where the two are of different runs."""
    losses = {row["step"]: row["train_loss"] for row in printed if "train_loss" in row}
    for step, loss in zip(*curves.column(records, "train_loss"), strict=True):
        if step in losses and not math.isclose(losses[step], loss, rel_tol=1e-3):
            raise UserError(
                f"{where}: step {step} has the loss {losses[step]}, the run's metrics have {loss}: another run"
            )
    return records + [row for row in printed if row["step"] > records[-1]["step"]]


def thin(run: Evidence) -> tuple[str, list[dict[str, Any]]]:
    """metrics.csv, and its rows as read back, kept as densely as ``MOST_BYTES`` allows.

    Raises ``UserError`` when it cannot be so small, or when the thinned rows tell another story than all of them.
    """
    last = run.records[-1]["step"]
    for every in EVERY:
        keep = report.kept_steps(run.records, every)
        rows = [dict(record) for record in run.records if record["step"] in keep]
        for row in rows:
            if row["step"] % DIGEST_EVERY and row["step"] != last:
                row.pop("data_digest", None)
            if row["step"] % report.SPACING:
                # They do not count in the median speed (``report.SPACING``).
                row.pop("tokens_per_second", None)
        text = metrics_csv(rows)
        if len(text) <= MOST_BYTES:
            break
    else:
        raise UserError(f"{run.name}: its thinned metrics take {len(text):,} bytes, more than {MOST_BYTES:,}")
    read_back = read_csv(io.StringIO(text))
    if _story(read_back) != _story(run.records):
        raise UserError(f"{run.name}: its thinned metrics say {_story(read_back)}, all of them {_story(run.records)}")
    return text, read_back


def _story(records: Sequence[curves.Record]) -> tuple[int | None, ...]:
    """(explosion, open excursion, departure, last step)."""
    steps, losses = curves.column(records, "train_loss")
    excursion = curves.open_excursion(losses, report.MARGIN, report.PATIENCE, steps=steps)
    exploded = curves.explosion_step(losses, report.MARGIN, report.PATIENCE, steps=steps)
    return exploded, excursion, report.departure_step(records), steps[-1]


def load_config(folder: Path) -> dict[str, Any]:
    """config.json of a run; of the folder of its runs only the name, as a path says something of one machine. Raises ``UserError``."""
    try:
        content: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
        content["config"]["run"]["name"], content["attention_name"], content["batches"]["seed"]
        content["config"]["run"]["folder"] = Path(content["config"]["run"].get("folder", "runs")).name
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{folder}/config.json: not the record of a run") from None
    return content


@dataclass(frozen=True, kw_only=True)
class Collected:
    """A run as it is to be written: thinned, with the text of each file."""

    run: Evidence
    config: dict[str, Any]
    texts: dict[str, str]
    said: str


def collect_run(folder: Path, printed: Path | None, out: Path, there: Mapping[str, Evidence]) -> Collected | None:
    """What to write of one run below ``out``, which will hold the runs ``there``; None where that of its name stays.

    Raises ``UserError``.
    """
    name = folder.resolve().name
    target = out / canonical(name)
    records = report.by_step(read_metrics(folder))
    check_metrics(records, f"{folder}/{METRICS_FILE}")
    if not curves.column(records, "train_loss")[0]:
        raise UserError(f"{folder}: its metrics have no train_loss yet")
    if printed is not None and (printed / f"{name}.log").is_file():
        records = with_printed(records, printed_rows(printed / f"{name}.log"), str(printed / f"{name}.log"))
    # A checkout's commit is told where the folder is published: runs on lent machines have none, or one of a copy.
    config = load_config(folder) | {"git_commit": None}
    if "sessions" in config:
        config["sessions"] = [session | {"git_commit": None} for session in config["sessions"]]
    run = Evidence(name=target.name, config=config, records=records)
    if there:
        report.check_same(run, folder, list(there.values()))
    if (longer := kept_run(run, target, there.get(target.name))) is not None:
        print(f"{target}: kept; it goes to step {longer:,}, {folder} to {measured_to(records):,}")
        return None
    text, thinned = thin(run)
    probes = report.by_step(read_telemetry(folder))
    check_probes(probes, f"{folder}/{TELEMETRY_FILE}")
    heads, others = probes_csv(head_rows(probes)), probes_csv(probe_rows(records, probes))
    return Collected(
        run=Evidence(name=target.name, config=config, records=thinned),
        config=config,
        texts={"metrics.csv": text, "heads.csv": heads, "probes.csv": others},
        said=f"{target}: {len(text):,} bytes of metrics, {len(probes)} probes",
    )


def measured_to(records: Sequence[curves.Record]) -> int:
    """The last step that metrics.jsonl had: printed lines are not as exact."""
    return max(row["step"] for row in records if row.get("source") != "printed")


def kept_run(run: Evidence, target: Path, there: Evidence | None) -> int | None:
    """The last measured step of the run that is ``there``, at ``target``, if it goes further than this one and stays; else None.

    Raises ``UserError`` where that run is of another variant or of other seeds.
    """
    if there is None:
        return None
    if (there.variant, there.seeds) != (run.variant, run.seeds):
        raise UserError(f"{target}: another run of that name is there: {there.attention}, seeds {there.seeds}")
    lengths = [(measured_to(one.records), one.records[-1]["step"]) for one in (there, run)]
    return lengths[0][0] if lengths[0] > lengths[1] else None


def run_folders(paths: Sequence[Path]) -> list[Path]:
    """The run folders named, and those in the folders named. Raises ``UserError`` for a folder that has none."""
    found: list[Path] = []
    for path in paths:
        inside = sorted(one.parent for one in path.glob("*/metrics.jsonl"))
        found += [path] if (path / "metrics.jsonl").is_file() or not inside else inside
    return found


def compare_again(first: Path, second: Path) -> dict[str, Any]:
    """The row of again.csv for a run made twice: training losses and gradient norms of the steps that both logged."""
    one, two = (report.by_step(read_metrics(folder)) for folder in (first, second))
    common = curves.common_steps(one, two)
    if not common:
        raise UserError(f"{first} and {second} have no step in common")
    parted = [curves.first_divergence(one, two, key) for key in ("train_loss", "grad_norm")]
    losses = dict(zip(*curves.column(one, "train_loss"), strict=True))
    digest = hashlib.sha256(b"".join(struct.pack("<d", losses[step]) for step in common)).hexdigest()
    first_difference = min((step for step in parted if step is not None), default=None)
    cells = (canonical(first.resolve().name), len(common), common[-1], first_difference, digest)
    return dict(zip(AGAIN, cells, strict=True))


def collect(args: argparse.Namespace) -> None:
    """The command ``collect``."""
    folders = run_folders(args.runs)
    there, new = read_metrics_of(args.out), dict[str, Collected]()
    for folder in folders:
        if (made := collect_run(folder, args.printed, args.out, there)) is not None:
            there[made.run.name], new[made.run.name] = made.run, made
    firsts = {canonical(folder.resolve().name): folder for folder in folders}
    known = {row["run"]: row for row in read_again(args.out)}
    for folder in args.again:
        name = canonical(folder.resolve().name)
        if name not in firsts:
            raise UserError(f"--again {folder}: no run of that name is collected in this call")
        known[name] = compare_again(firsts[name], folder)
    for name, made in new.items():
        (args.out / name).mkdir(parents=True, exist_ok=True)
        files.write_text(args.out / name / "config.json", as_json(made.config))
        for file, text in made.texts.items():
            files.write_text(args.out / name / file, text)
        print(made.said)
    if known:
        files.write_text(args.out / "again.csv", as_csv(AGAIN, [known[name] for name in sorted(known)]))


def read_again(out: Path) -> list[dict[str, str]]:
    """Rows of again.csv, where there is one."""
    path = out / "again.csv"
    if not path.is_file():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def read_metrics_of(out: Path) -> dict[str, Evidence]:
    """The runs below a folder that ``collect`` wrote, by name, less what their probes say. Raises ``UserError``."""
    found = {}
    for path in sorted(out.glob("*/metrics.csv")):
        with open(path, newline="") as file:
            records = read_csv(file)
        found[path.parent.name] = Evidence(name=path.parent.name, config=load_config(path.parent), records=records)
    return found


def read_evidence(out: Path) -> list[Evidence]:
    """All runs below a folder that ``collect`` wrote. Raises ``UserError`` when there is none."""
    found = []
    for name, run in read_metrics_of(out).items():
        with (
            open(out / name / "heads.csv", newline="") as head_file,
            open(out / name / "probes.csv", newline="") as file,
        ):
            heads, probes = by_head(read_csv(head_file)), read_csv(file)
        at = {row["step"]: row for row in probes}
        found.append(
            replace(
                run,
                records=[{**row, **of_layers(at.get(row["step"], {}))} for row in run.records],
                heads=[row | {"delta_units": at[row["step"]]["delta_units"]} for row in heads],
                z_scores=z_scores(probes, heads),
            )
        )
    if not found:
        raise UserError(f"{out}: no run in it: python scripts/report.py collect RUN ... --out {out}")
    return found


def documents(out: Path, root: Path) -> dict[Path, tuple[str, str]]:
    """(text as it is, text as it should be) of each document."""
    runs, again = read_evidence(out), read_again(out)
    asked = report_claims.parse_asked((root / ASKED).read_text())
    blocks, values = report_documents.made(runs, again, asked)
    for prefix, folder in WRITTEN.items():
        blocks |= {f"{prefix}_{p.stem}": p.read_text() for p in (root / folder).glob("*.md") if p.stem != "README"}
    found = {}
    for path in DOCUMENTS:
        text = (root / path).read_text()
        found[path] = (text, report_blocks.refreshed(text, blocks, values, str(path)))
    return found


def tables(args: argparse.Namespace) -> None:
    """The command ``tables``."""
    for path, (old, new) in documents(args.out, ROOT).items():
        if args.check and old != new:
            raise UserError(f"{path}: differs from {args.out}: python scripts/report.py tables")
        if old != new:
            files.write_text(ROOT / path, new)
        print(f"{path}: {'as the evidence has it' if old == new else 'refreshed'}")


def plots(args: argparse.Namespace) -> None:
    """The command ``plots``."""
    try:
        report_pictures.draw_all(report_blocks.told(read_evidence(args.out)), args.out)
    except ImportError as error:
        raise UserError(f"plots: matplotlib cannot be used here ({error})") from None


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=OneLineParser)
    gather = commands.add_parser("collect", help="run folders -> results")
    gather.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders, or folders of them")
    gather.add_argument("--printed", type=Path, help="folder of NAME.log files, for steps that metrics.jsonl lacks")
    gather.add_argument("--again", nargs="+", type=Path, default=[], metavar="RUN", help="second makings of these runs")
    gather.set_defaults(do=collect)
    refresh = commands.add_parser("tables", help="results -> README.md and docs")
    refresh.add_argument("--check", action="store_true", help="change nothing; fail where a document differs")
    refresh.set_defaults(do=tables)
    draw = commands.add_parser("plots", help="results -> plots")
    draw.set_defaults(do=plots)
    for command in (gather, refresh, draw):
        command.add_argument("--out", type=Path, default=EVIDENCE, help=f"folder of the evidence ({EVIDENCE})")
    return parser.parse_args(argv)


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    """Run one of the three commands."""
    args = parse(argv)
    try:
        args.do(args)
    except OSError as error:
        raise UserError(f"{error.filename or args.out}: {error.strerror}") from None


if __name__ == "__main__":
    main()
