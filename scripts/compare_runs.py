"""Compare runs: how each ended, what was changed, where they part, and whether they saw the same data.

    python scripts/compare_runs.py runs/failing runs/fixed [runs/...] --out compare.png
    python scripts/compare_runs.py experiments/fast_failure/runs --layer 1 --out none --table summary.csv --at 2400 3500

A folder is a run, or a folder of runs. A run is what train.py writes (config.json, metrics.jsonl, telemetry.jsonl) or what is kept of a
published one (config.json, metrics.csv, probes.csv). The first is the reference. Prints a Markdown table with one row a run, those that
exploded first, and what the runs changed against the reference; draws training loss, largest logit, gradient norm and validation loss.
Logits are the largest of all layers, in table and picture; with --layer, those of one layer.

How a run ended:
    exploded at N        from step N on the training loss stayed 0.5 (--margin) above its best for 200 steps (--patience)
    NaN at N             the training loss of step N is not finite
    unstable since N     gradient norm above 20 at N (from step 200 to 500 before the last), and its median after N + 60 is more than
                         twice that of steps N - 1,000 to max(N - 500, N / 2); a rise in the last 500 steps alone is none
    open since N         the loss is above the margin since N, for fewer steps than that: too soon to tell
    stable to N          none of these to N, the last logged step, and the run has all its steps; too short to tell where they are fewer
                         than make an explosion
    stopped early at N   none of these, and it has not
Behind that, in the printed table and the picture, where "stable to N" is then "not failed by this rule to N":
    layer L above 10,000 from N        its first probe with a logit above that; the first two such layers by name
    logits not a number from N         the first probe with such a logit
A run that begins at the reference's step N, on the same batches, is judged with the reference's losses before N. Steps whose update was
skipped (float16 overflow, policy skip) do not count, if the run went on.
"""

import argparse
import contextlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _root  # noqa: F401

from errors import OneLineParser, UserError, check_size, exit_on_user_error, invalid, on_disk, reading, trainer_packages

with trainer_packages():
    import numpy as np
    import pandas as pd
    import torch
    from safetensors import safe_open

    import files
    from attention.backends import BACKENDS
    from attention.numerics import unread
    from figures import curves
    from figures.runs import DrawnRun, draw_runs
    from training.checkpoint import MODEL_FILE, OPTIMIZER_FILE, found_in, written_sums
    from training.intervention import parse_switch
    from training.metrics import METRICS_FILE
    from training.record import EXIT_FILE, flat

LARGE_NORM, LARGE_NORM_FROM = 20.0, 200
UNSTABLE_RATIO = 2.0
RUNAWAY_LOGIT = 10_000.0
"""As in docs/results.md. Of a short run that ran away neither loss nor gradient norm need say so."""
RUNAWAYS_TOLD = 2
NEAR = 60
"""Steps behind a large gradient norm that do not count: a published run has more rows there than elsewhere."""
LAST_STEPS, LAST_SHARE, BIN = 1000, 10, 20
"""train_loss_end is the mean of so many last steps, at most a tenth of all, each 20 of them counted once: logs are thinned unevenly."""
# Differences in these do not change how a run trains; a sentence of its own compares the data.
ENVIRONMENT = ("device", "git_commit", "kernels", "source_sha256", "versions")
SITES_TOLD, PARTED_TOLD = 12, 3
UNTOLD = ("run.name", "run.folder", "run.resume", "data.record", "data.replay", "checkpoint.", "wandb.")


@dataclass(frozen=True)
class Run:
    name: str
    folder: Path
    config: dict[str, Any]
    """config.json."""
    metrics: pd.DataFrame
    probes: pd.DataFrame
    """Probes by step: w_q_norm_L and max_logit_L of layers L; empty for a run without telemetry."""
    complete_log: bool = False
    """Whether the metrics are train.py's own: a published run keeps only some of its steps."""
    switched: str = ""
    """Which layers moved to another attention, and when."""

    @property
    def batches(self) -> dict[str, Any]:
        return self.config.get("batches") or {}

    def column(self, name: str) -> pd.Series:
        return curves.column(self.metrics if name in self.metrics else self.probes, name)

    def logit_columns(self) -> list[str]:
        """``max_logit_L`` of all layers L."""
        return [name for name in self.probes if re.fullmatch(r"max_logit_\d+", name)]

    def layer_of_largest_logit(self) -> str:
        """The first, where the largest is NaN if one is; "" without logits of layers."""
        names = self.logit_columns()
        logits = self.probes[names].dropna().astype(float).to_numpy()
        return names[logits.argmax() % len(names)].rpartition("_")[2] if logits.size else ""

    def of_layers(self, name: str, which: str) -> pd.Series:
        """``max_logit`` or ``w_q_norm`` of a layer, or (``max``) the largest of all layers."""
        layers = [column for column in self.probes if column.startswith(f"{name}_")]
        if which == "max" and layers:
            return self.probes[layers].dropna().astype(float).max(axis=1, skipna=False)
        return self.column(f"{name}_{which}")


def load(folder: Path) -> Run:
    """Raises ``UserError`` where it is not the folder of a run, or has no training loss yet."""
    metrics = curves.metrics(folder)
    try:
        content: dict[str, Any] = files.read_json(folder / "config.json")
        settings = content["config"]["run"]
        kinds = {int: [settings["seed"], settings["steps"]], str: [content["attention_name"]]}
        sessions = content.get("sessions") or []
        kinds |= {list: [sessions, content.get("attention") or [], *(x.get("logs_changed", []) for x in sessions)]}
        kinds |= {dict: [content.get("batches") or {}, *sessions]}
        if any(not isinstance(value, kind) for kind, values in kinds.items() for value in values):
            raise TypeError
        switched = _switched(content, int(metrics.index.max()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{folder}/config.json: not the record of a run") from None
    kept = folder / "probes.csv"
    probes = curves.read_csv(kept) if kept.is_file() else _by_layer(curves.telemetry(folder))
    complete = (folder / METRICS_FILE).is_file()
    return Run(folder.resolve().name, folder, content, metrics, probes, complete, switched)


def _switched(content: dict[str, Any], last: int) -> str:
    moves: dict[tuple[int, str], list[str]] = {}
    for text in content.get("switches", content["config"].get("alarm", {}).get("switches", ())):
        switch = parse_switch(text)
        if switch.step <= last:
            moves.setdefault((switch.step, switch.preset), []).append(str(switch.layer))
    return "".join(f"; layer {', '.join(layers)} from step {step:,} on {to}" for (step, to), layers in moves.items())


def _by_layer(telemetry: pd.DataFrame) -> pd.DataFrame:
    rows = [
        {"step": step}
        | {f"w_q_norm_{layer}": norm for layer, norm in enumerate(probe["w_q_norm"])}
        | {f"max_logit_{layer}": float(np.max(heads)) for layer, heads in enumerate(probe["max_logit"])}
        for step, probe in telemetry.iterrows()
    ]
    return curves.by_step(rows) if rows else pd.DataFrame()


def run_folders(paths: Sequence[Path]) -> list[Path]:
    """The runs named, and those in the folders named. Raises ``UserError`` where there is none, or two have one name."""
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            raise invalid("RUN", str(path), "the folder of a run, or a folder of runs")
        is_run = any((path / name).is_file() for name in ("metrics.csv", METRICS_FILE, "config.json"))
        inside = sorted({one.parent for name in ("metrics.csv", METRICS_FILE) for one in path.glob(f"*/{name}")})
        if not is_run and not inside:
            raise UserError(f"{path}: neither a run nor a folder of runs")
        found += [path] if is_run else inside
    found = list({path.resolve(): path for path in reversed(found)}.values())[::-1]  # as RUN FOLDER has the first twice
    names = [path.resolve().name for path in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"two runs have the name {twice[0]}: give one of them another folder name")
    return found


def load_all(paths: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """The runs, and why runs of a folder were left out. Raises ``UserError`` for a bad run that was named, or if none is left."""
    runs, left_out = [], []
    for folder in run_folders(paths):
        try:
            runs.append(load(folder))
        except UserError as error:
            if folder in paths:
                raise
            left_out.append(str(error))
    if not runs:
        raise UserError(left_out[0])
    return runs, left_out


def large_norms(norms: pd.Series) -> list[int]:
    """Steps with a gradient norm above ``LARGE_NORM``, or one that is not a number."""
    return norms.index[(norms.index >= LARGE_NORM_FROM) & ~(norms <= LARGE_NORM)].tolist()


def unstable_since(norms: pd.Series) -> int | None:
    """The first large gradient norm after which it stayed large: one among ordinary ones is no instability."""
    for step in (step for step in large_norms(norms) if step <= norms.index[-1] - 500):
        after = norms[norms.index > step + NEAR]
        before = norms[(norms.index >= step - 1000) & (norms.index <= max(step - 500, step // 2))]
        if len(after) and len(before) and not after.median() <= UNSTABLE_RATIO * before.median():
            return step
    return None


def ending(
    losses: pd.Series, norms: pd.Series, done: bool, margin: float, patience: int, before: pd.Series
) -> tuple[str, int | None]:
    """How the run ended, in the words of the module's docstring, and the step of its explosion or NaN; ``before``: losses of its steps
    before the log's first."""
    whole = pd.concat([before, losses]) if len(before) else losses
    since, is_explosion = curves.excursion(whole, margin, patience)
    if since is not None and is_explosion:
        return f"{'exploded' if math.isfinite(whole[since]) else 'NaN'} at {since:,}", since
    if (unstable := unstable_since(norms)) is not None:
        return f"unstable since {unstable:,}", None
    if since is not None:
        return f"open since {since:,}", None
    last = int(losses.index[-1])
    short = " (too short to tell)" if done and last - losses.index[0] + 1 < patience else ""
    return f"{'stable to' if done else 'stopped early at'} {last:,}{short}", None


def runs_away(run: Run) -> str:
    """What stands behind ``ended``: the layers that run away, and from which probe on, the first two by name; "" where none does."""
    found, broken = [], []
    for name in run.logit_columns():
        logits = run.column(name)
        if len(past := logits.index[logits > RUNAWAY_LOGIT]):
            found.append((int(past[0]), int(name.rpartition("_")[2])))
        broken += list(logits.index[logits.isna()][:1])
    found.sort()
    told = "".join(f"; layer {layer} above {RUNAWAY_LOGIT:,.0f} from {step:,}" for step, layer in found[:RUNAWAYS_TOLD])
    told += f" and {len(found) - RUNAWAYS_TOLD} more" if len(found) > RUNAWAYS_TOLD else ""
    return told + (f"; logits not a number from {min(broken):,}" if broken else "")


def told_end(ended: str, run: Run) -> str:
    """``ended`` and what stands behind it: the rule compares a loss with the run's own best, and so may miss a run that ran away."""
    away = runs_away(run)
    return (ended.replace("stable to", "not failed by this rule to") if away else ended) + away


def why_stopped(run: Run) -> list[str]:
    """What exit.json says of a run that did not end by itself; nothing where there is none, as of one that goes on."""
    try:
        content = files.read_json(run.folder / EXIT_FILE)
        code, reason = content["code"], content["reason"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [f"{run.name} stopped with exit code {code}: {reason}."] if code else []


def skipped_steps(run: Run, values: pd.Series) -> pd.Index:
    """Steps whose update was skipped, with one later that was not: float16 overflows, as loss scaling makes, and those of policy skip."""
    marks = run.metrics.get("nonfinite", pd.Series(dtype=object)).reindex(values.index)
    skipped = marks.isin(("overflow", "skip"))
    updates = values.index[~skipped & (marks != "stop")]
    return values.index[skipped & (values.index < (updates.max() if len(updates) else 0))]


def losses_before(run: Run, first: Run) -> pd.Series:
    """Training losses of ``first`` before ``run`` begins, if ``run`` begins later and with the same batches, as a branch of it does."""
    begins = run.column("train_loss").index[0]
    ours, theirs = (one.metrics.get("data_digest", pd.Series(dtype=object)).dropna() for one in (first, run))
    same = begins > 0 and begins in ours.index and begins in theirs.index and ours[begins] == theirs[begins]
    losses = first.column("train_loss")
    return losses[losses.index < begins] if same else losses[:0]


def summarize(
    run: Run, layer: int | None, at: Sequence[int], margin: float, patience: int, first: Run | None = None
) -> dict[str, Any]:
    """The table row of a run, ``first`` being the reference: None for what was not measured, the text "nan" for a NaN that was.

    Raises ``UserError`` for a layer that is not in its probes.
    """
    if layer is not None and len(run.probes) and f"max_logit_{layer}" not in run.probes:
        raise invalid(
            "--layer", layer, f"0 to {len(run.logit_columns()) - 1}, the layers that {run.name} has probes of"
        )
    losses, norms, validation = (run.column(name) for name in ("train_loss", "grad_norm", "val_loss"))
    norms, losses = norms.drop(skipped_steps(run, norms)), losses.drop(skipped_steps(run, losses))
    which = "max" if layer is None else str(layer)
    logits, w_q = (run.of_layers(name, which) for name in ("max_logit", "w_q_norm"))
    settings = run.config["config"]["run"]
    # A run that logs every tenth step ends between two of them; its last validation is at the end itself.
    done = max(losses.index[-1] + 1, run.metrics.index.max()) >= int(settings["steps"])
    ended, exploded = ending(losses, norms, done, margin, patience, losses_before(run, first or run))
    complete = run.complete_log and len(norms)  # a published run keeps only some of its steps
    row: dict[str, Any] = {
        "run": run.name,
        "attention": run.config["attention_name"] + run.switched,
        "seed": settings["seed"],
        "ended": ended,
        "exploded_at": exploded,
        "last_step": int(losses.index[-1]),
        "grad_norm_above_20_at": next(iter(large_norms(norms)), None),
        # Of arrays, in which the first NaN is the largest.
        "grad_norm_largest": norms.to_numpy().max() if complete else None,
        "grad_norm_largest_at": int(norms.index[norms.to_numpy().argmax()]) if complete else None,
        "train_loss_end": loss_at_the_end(losses),
        "val_loss_best": validation.min() if len(validation) else None,
        "val_loss_end": validation.iloc[-1] if len(validation) else None,
    }
    for name, values in (("val_loss", validation), (f"max_logit_{which}", logits), (f"w_q_norm_{which}", w_q)):
        row |= {f"{name}_at_{step}": values.get(step) for step in at}
    for name, values in ((f"max_logit_{which}", logits), (f"w_q_norm_{which}", w_q)):
        row[f"{name}_largest"] = values.max(skipna=False) if len(values) else None
    speeds = run.column("tokens_per_second")
    row["tokens_per_second"] = speeds.median() if len(speeds) else None
    # Every run has a train_loss_end: there NaN is no missing value.
    return {name: "nan" if value != value and name != "train_loss_end" else value for name, value in row.items()}


def loss_at_the_end(losses: pd.Series) -> float:
    """NaN where one of these losses is."""
    steps = int(losses.index[-1]) + 1
    late = losses[losses.index >= steps - min(LAST_STEPS, max(1, steps // LAST_SHARE))]
    return float(late.groupby(late.index // BIN).agg(lambda bin: bin.mean(skipna=False)).mean(skipna=False))


def table_of(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Rows of runs, those that exploded first, by step; columns that no run has are left out."""
    table = pd.DataFrame(rows).sort_values(["exploded_at", "run"], na_position="last", kind="stable")
    table = table.dropna(axis="columns", how="all")
    whole = [name for name in ("exploded_at", "grad_norm_above_20_at", "grad_norm_largest_at") if name in table]
    return table.astype(dict.fromkeys(whole, "Int64")).reset_index(drop=True)


def cell(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if pd.isna(value) and name != "train_loss_end":
        return "-"
    if "loss" in name:
        return f"{value:.3f}"
    if "logit" in name and abs(value) >= 1000:
        return f"{value:,.0f}"
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"{value:,}" if name.endswith(("step", "_at")) else str(value)


def heading(name: str) -> str:
    words = [(r"max_logit_(\d+)", r"largest logit of layer \1"), (r"w_q_norm_(\d+)", r"W_Q norm of layer \1")]
    # With run.log_every above 1 a larger one may lie between two logged steps.
    words += [("max_logit_max", "largest logit"), ("w_q_norm_max", "W_Q norm")]
    words += [("(grad_norm)_largest", r"largest logged \1")]
    words += [("(W_Q.*)_largest", r"largest \1"), ("_largest", "")]
    words += [("train_loss", "training loss"), ("val_loss", "validation loss"), ("grad_norm", "gradient norm")]
    for pattern, text in words:
        name = re.sub(pattern, text, name)
    return re.sub(r"\d{4,}", lambda step: f"{int(step[0]):,}", name.replace("_", " ").replace("W Q", "W_Q"))


def markdown(table: pd.DataFrame, runs: Sequence[Run]) -> str:
    """The table of ``runs``, the first the reference, in Markdown: without columns that ``ended`` repeats or that say nothing about the
    training, and with what has no column."""
    of_name = {run.name: run for run in runs}
    unshown = ("exploded_at", "last_step", "val_loss_end", "grad_norm_largest_at", "tokens_per_second")
    names = [name for name in table if name not in unshown]
    rows = [[heading(name) for name in names]]
    rows += [["---" if name in ("run", "attention", "ended") else "---:" for name in names]]
    for _, row in table.iterrows():
        run = of_name[row["run"]]
        rows.append([cell(name, row[name]) for name in names])
        rows[-1][names.index("ended")] = told_end(row["ended"], run)
        if run is runs[0] and len(runs) > 1:
            rows[-1][names.index("run")] += " (reference)"
        if "max_logit_max_largest" in names and (layer := run.layer_of_largest_logit()):
            rows[-1][names.index("max_logit_max_largest")] += f" in layer {layer}"
        if "grad_norm_largest" in names and pd.notna(row["grad_norm_largest_at"]):
            rows[-1][names.index("grad_norm_largest")] += f" at {row['grad_norm_largest_at']:,}"
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def settings_of(run: Run) -> dict[str, Any]:
    """What decides how a run trains, by name. Where sessions differ, all values in order."""
    told: dict[str, list[Any]] = {}
    for session in run.config.get("sessions") or [run.config]:
        for name, value in flat({key: session[key] for key in (*ENVIRONMENT, "init_sha256") if key in session}).items():
            value = value[:12] if name.endswith("_sha256") else value
            values = told.setdefault(name, [])
            if value not in values:
                values.append(value)
    where = {name: values[0] if len(values) == 1 else " then ".join(map(str, values)) for name, values in told.items()}
    found = flat(run.config["config"]) | where
    return {name: value for name, value in found.items() if not name.startswith(UNTOLD)}


def shown(run: Run, name: str, value: Any) -> str:
    """A setting; rules of attention as the table names them, behind the default, in parentheses."""
    if name != "attention.rules":
        return repr(value)
    rules = run.config["attention_name"].partition("; ")[2]
    return f"({rules})" if rules else "none"


def against(first: Run, run: Run) -> str:
    """From where a run differs from the first, and in which settings."""
    old, new = settings_of(first), settings_of(run)
    if old.get("source_sha256", "") == new.get("source_sha256"):  # another commit of the same source
        old["git_commit"] = new["git_commit"] = None
    odd = [name for name in old if name in new and old[name] != new[name]]
    pairs = [(name, shown(first, name, old[name]), shown(run, name, new[name])) for name in odd]
    changes = [f"{name}: {was} -> {now}" for name, was, now in pairs if was != now]  # rules may lack an empty field
    changes += sites_changed(first, run)
    # Kernels and weights to begin with are in the records of runs that have them.
    if alone := sum(not name.startswith(("kernels.", "init_sha256")) for name in old.keys() ^ new.keys()):
        changes.append(f"{alone} setting(s) are in one of the two records only, which are of different versions")
    settings, environment = ([c for c in changes if c.startswith(ENVIRONMENT) == told] for told in (False, True))
    told = "; ".join(settings) or "no setting differs"
    told += f"; environment: {', '.join(environment)}" if environment else ""
    parted, where = where_bits_part(first, run)
    where += where_checkpoints_part(first, run, parted)
    return f"{run.name} against {first.name}: {where}; {told}."


def sites_changed(first: Run, run: Run) -> list[str]:
    """The sites in both records that differ, by the heads with one change: what a preset's name, or that of a rule, hides."""
    old, new = (one.config.get("attention") or [] for one in (first, run))
    # A group alone has all heads, in whichever words.
    parts = [group["heads_of_layer"] for groups in (old, new) if len(groups) > 1 for group in groups]
    heads = sorted({(int(layer), head) for part in parts for layer, of_layer in part.items() for head in of_layer})
    told: dict[str, list[tuple[int, int]]] = {}
    for place in heads or [(0, 0)]:
        change = odd_sites(*(group_at(groups, *place) for groups in (old, new)))
        told.setdefault(change, []).append(place)
    everywhere = len(told) == 1
    changes = (("" if everywhere else in_words(where, heads), change) for change, where in told.items() if change)
    return [f"attention sites{where}: {change}" for where, change in changes]


def group_at(groups: Sequence[dict[str, Any]], layer: int, head: int) -> dict[str, Any]:
    """The group of this head; {} where there is none."""
    here = (group for group in groups if len(groups) == 1 or head in group["heads_of_layer"].get(str(layer), ()))
    return next(here, {})


def odd_sites(*groups: dict[str, Any]) -> str:
    """In words the sites that differ, ``SITES_TOLD`` at most; a value that nothing reads as "unread"."""
    # An external kernel or torch's rounds in its own way.
    has_sites = all(getattr(BACKENDS.get(group.get("backend", "")), "has_sites", False) for group in groups)
    was, now = (group["numerics"] if has_sites else {} for group in groups)
    shown = [values | dict.fromkeys(unread(values), "unread") for values in (was, now)]
    names = [name for name in was if name in now and was[name] != now[name]]
    odd = [f"{name} {shown[0][name]} -> {shown[1][name]}" for name in names if shown[0][name] != shown[1][name]]
    return ", ".join(odd[:SITES_TOLD]) + (f" and {len(odd) - SITES_TOLD} more" if len(odd) > SITES_TOLD else "")


def in_words(where: Sequence[tuple[int, int]], heads: Sequence[tuple[int, int]]) -> str:
    """`` in layer 0, 1 (heads 0 2)``, the heads where they are not all that the layer has."""
    told = []
    for layer in sorted({layer for layer, _ in where}):
        of_layer, whole = ([str(head) for at, head in some if at == layer] for some in (where, heads))
        told.append(f"{layer}" if of_layer == whole else f"{layer} (heads {' '.join(of_layer)})")
    return f" in layer {', '.join(told)}"


def where_bits_part(first: Run, run: Run) -> tuple[float, str]:
    """In words, the first step and ``PARTED_TOLD`` of what is not the same bits there, of all that both runs logged; before it the first
    step where training parts (infinity: none), which validation on other sequences does not."""
    common = first.column("train_loss").index.intersection(run.column("train_loss").index)
    if common.empty:
        return math.inf, "no step in common"
    names = ["train_loss", "grad_norm", "val_loss", *(name for name in first.probes if name in run.probes)]
    found = {name: curves.first_difference(first.column(name), run.column(name)) for name in names}
    parted = {name: step for name, step in found.items() if step is not None}
    if not parted:
        steps = f"{len(common)} step{'s' if len(common) > 1 else ''}, to {common.max()}"
        return math.inf, f"the same bits in every loss, gradient norm and probe that both logged ({steps})"
    step = min(parted.values())
    odd = [name for name in parted if parted[name] == step]
    more = f" and {len(odd) - PARTED_TOLD} more" if len(odd) > PARTED_TOLD else ""
    trained = min((at for name, at in parted.items() if name != "val_loss"), default=math.inf)
    return trained, f"bits differ from step {step} on, first in {', '.join(odd[:PARTED_TOLD])}{more}"


def where_checkpoints_part(first: Run, run: Run, parted: float) -> str:
    """The first tensor that differs in the first checkpoints that do, of those to step ``parted`` that both runs still have; "" where they
    have none.

    One that is damaged or cannot be read ends the comparison, which says so.
    """
    same = []
    try:
        old, new = (found_in(one.folder / "checkpoints") for one in (first, run))
        for step in sorted(step for step in old.keys() & new.keys() if step <= parted):
            try:
                what = odd_tensors(old[step], new[step])
            except UserError:
                if old[step].exists() and new[step].exists():
                    raise
                continue  # a living run has pruned it
            if what:
                return f"; checkpoints differ first at step {step}, in {what}"
            same.append(str(step))
    except UserError as error:
        return f"; checkpoints not compared: {error}"
    return f"; the same weights and moments in checkpoints of step {', '.join(same)}" if same else ""


def odd_tensors(old: Path, new: Path) -> str:
    """How many tensors of two checkpoints differ, and the first; "" where none does. Raises ``UserError`` for one that is damaged."""
    for name in (MODEL_FILE, OPTIMIZER_FILE):
        with reading(f"{name} of checkpoints {old} and {new}"), contextlib.ExitStack() as opened:
            sums = [written_sums(one)[name] for one in (old, new)]
            for one, written in zip((old, new), sums, strict=True):
                if files.sha256_file(one / name) != written:
                    raise UserError(f"checkpoint {one} is damaged (the SHA-256 of {name} differs)")
            if sums[0] == sums[1]:
                continue
            a, b = (opened.enter_context(safe_open(one / name, "pt")) for one in (old, new))
            names, both = sorted({*a.keys(), *b.keys()}), {*a.keys()} & {*b.keys()}
            odd = [one for one in names if one not in both or not same_bytes(a.get_tensor(one), b.get_tensor(one))]
            if odd:
                return f"{len(odd)} of {len(names)} tensors of {name}, first {odd[0]}"
    return ""


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and a.numpy().tobytes() == b.numpy().tobytes()


def data_sentence(runs: Sequence[Run]) -> str:
    """Whether all runs drew the same batches. A logged digest stands for the data set and all batches up to its step."""
    first, *others = runs
    untold, parted, through = [], [], []
    for run in others:
        ours, theirs = (one.metrics.get("data_digest", pd.Series(dtype=object)).dropna() for one in (first, run))
        common, step = ours.index.intersection(theirs.index), curves.first_difference(ours, theirs)
        if common.empty:
            untold.append(run.name)
        elif step is None:
            through.append(int(common.max()))
        else:
            names = ("data_sha256", "sequence_length", "global_batch", "seed", "recording")
            odd = [name for name in names if first.batches.get(name) != run.batches.get(name)]
            parted.append(f"{run.name} from step {step} on" + (f" ({', '.join(odd)} differ)" if odd else ""))
    if parted:
        return f"Data: NOT identical: other batches than {first.name}: " + "; ".join(parted) + "."
    if untold:
        recordings = {run.config["config"].get("data", {}).get("replay") for run in runs}
        same = f" All replay {recordings.pop()}." if len(recordings) == 1 and all(recordings) else ""
        return f"Data: unknown: no data_digest at a step in common with {first.name}: " + ", ".join(untold) + f".{same}"
    reach = f"through step {min(through)}" + ", where the shortest ends" * (len(set(through)) > 1)
    recordings = {run.batches.get("recording") for run in runs}
    source = f" (recording {recordings.pop()})" if len(recordings) == 1 and all(recordings) else ""
    # Without that a digest stands for the SHA-256 in the data set's header, not for the bytes.
    unread = [run.name for run in runs if flat(run.config["config"]).get("data.verify") == "size"]
    but = f"; the bytes of {', '.join(unread)} were not verified (data.verify size)" if unread else ""
    return f"Data: identical: all {len(runs)} runs saw the same batches in the same order {reach}{source}{but}."


def validation_sentence(runs: Sequence[Run]) -> list[str]:
    """A warning when validation losses were measured on different sequences; empty when they are known to compare."""
    names = ("validation_sha256", "validation_sequences", "sequence_length")
    first, *others = runs
    odd = [run.name for run in others if any(run.batches.get(name) != first.batches.get(name) for name in names)]
    return [f"Validation losses do not compare with {first.name}'s (other sequences): {', '.join(odd)}."] if odd else []


def draw(runs: Sequence[Run], rows: Sequence[dict[str, Any]], layer: int | None, path: Path) -> None:
    """The picture (``figures.runs``). Raises ``UserError`` where it cannot be written."""
    drawn = []
    for run, row in zip(runs, rows, strict=True):
        logits = run.of_layers("max_logit", "max" if layer is None else str(layer)).rename("max_logit_max")
        logits = logits.map(lambda value: "nan" if value != value else value)  # for its cross
        metrics = run.metrics.drop(columns="max_logit_max", errors="ignore").join(logits, how="outer")
        label = f"{run.name}: {row['attention']}, {told_end(row['ended'], run)}"
        drawn.append(DrawnRun(label, metrics, row["exploded_at"]))
    with on_disk(f"--out {path}", "be written"):
        draw_runs(drawn, path, "" if layer is None else f" of layer {layer}")


def write_table(path: Path, table: pd.DataFrame, runs: Sequence[Run], lines: Sequence[str]) -> None:
    """As CSV or Markdown, by the file's ending. Raises ``UserError`` where it cannot be written."""
    text = markdown(table, runs) + "\n" + "".join(f"- {line}\n" for line in lines)
    if path.suffix == ".csv":
        # Every run has a train_loss_end: there NaN is no missing value.
        told = table.astype(object).fillna({"train_loss_end": "nan"})
        # Not by float_format, which leaves the floats of a column with a "nan" as they are.
        text = told.map(lambda one: f"{one:.6g}" if isinstance(one, float) and one == one else one).to_csv(index=False)
    with on_disk(f"--table {path}", "be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(path, text)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="runs, or folders of runs; the first is the reference")
    parser.add_argument("--out", default="compare.png", help="picture: .png, .pdf, .svg, or none (compare.png)")
    parser.add_argument("--table", type=Path, help="also write the table to this file: .md or .csv")
    parser.add_argument("--layer", type=int, help="from 0: logits and W_Q of this layer alone (the largest of all)")
    at = "steps at which to show validation loss, logits and W_Q; they must have been measured"
    parser.add_argument("--at", type=int, nargs="+", default=[], help=at)
    parser.add_argument(
        "--patience",
        type=int,
        default=200,
        help="steps above the margin that make an explosion (200; the quickstart's tiny model: 50)",
    )
    parser.add_argument("--margin", type=float, default=0.5, help="nats above the best loss that begin one (0.5)")
    args = parser.parse_args(argv)
    check_size("--patience", args.patience, 1)
    if not args.margin >= 0:
        raise invalid("--margin", args.margin, "0 or more nats")
    if args.out != "none" and Path(args.out).suffix not in (".png", ".pdf", ".svg"):
        raise invalid("--out", args.out, "a file name that ends in .png, .pdf or .svg, or none")
    if args.table and args.table.suffix not in (".md", ".csv"):
        raise invalid("--table", str(args.table), "a file name that ends in .md or .csv")
    return args


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    runs, left_out = load_all(args.runs)
    rows = [summarize(run, args.layer, args.at, args.margin, args.patience, runs[0]) for run in runs]
    table = table_of(rows)
    for step in args.at:
        if not any(name.endswith(f"_at_{step}") for name in table):
            raise invalid("--at", step, "a step at which one of the runs has a validation loss or a probe")
    lines = [data_sentence(runs)] if len(runs) > 1 else []
    lines += validation_sentence(runs) + [against(runs[0], run) for run in runs[1:]]
    sessions = [(run.name, session) for run in runs for session in run.config.get("sessions") or ()]
    lines += [f"{name}: {odd}." for name, session in sessions for odd in session.get("logs_changed", ())]
    lines += [line for run in runs for line in why_stopped(run)]
    lines += [f"Left out: {reason}." for reason in left_out]
    lines.append(curves.EXPLOSION_DEFINITION.format(margin=args.margin, patience=args.patience))
    print(markdown(table, runs), *lines, sep="\n")
    if args.table:
        write_table(args.table, table, runs, lines)
        print(f"Table: {args.table}")
    if args.out != "none":
        replaced = Path(args.out).exists()
        draw(runs, rows, args.layer, Path(args.out))
        print(f"Picture: {args.out}" + (", in place of an earlier one" if replaced else ""))


if __name__ == "__main__":
    main()
