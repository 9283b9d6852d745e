"""Which of two things makes the error of delta: a bias of O's rounding, or O's correlation with the gradient that comes back through it?

    python scripts/two_readings.py runs/NAME/checkpoints/step_00003000 --data data/tokens/corpus --out readings.csv

For every layer, both parts of e . dO (analysis/two_readings.py), in millionths of delta's root mean square, with the standard error
over sequences: under the roundings that the run was trained with, with O rounded stochastically, and with O itself not rounded, which
leaves what an FP32 O in delta leaves: the rounding of P_bar above all. The first part is the paper's reading, the second
self-correlation. Below each its drift: the same weighted token by token with what the error does to the largest singular value of the
head's W_Q, positive where that grows. The CSV has every head too.

    python scripts/two_readings.py --table readings.csv ...

prints what such files say over all their checkpoints, as Markdown.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import files
from analysis.two_readings import ROUNDINGS, Change, Mean, Reading, mean_of, readings
from attention.plan import LayerPlan
from config import TrainConfig
from errors import OneLineParser, UserError, check_place, exit_on_user_error, invalid
from model import GPT
from scripts.autopsy import add_sampling, build, check_sampling, open_device, read_tokens, spread
from scripts.checkpoint_inputs import read_checkpoint

BOTH = ("first", "second")
PARTS = (*BOTH, *(f"{part} drift" for part in BOTH))


def columns_of(parts: Sequence[str]) -> tuple[str, ...]:
    """Of the CSV: a line a head and rounding, with mean and standard error of every part."""
    numbers = (column for part in parts for column in (part, f"{part} s.e."))
    return ("checkpoint", "step", "layer", "head", "rounding", "sequences", *numbers)


def measure(
    model: GPT,
    config: TrainConfig,
    batches: Sequence[tuple[Tensor, Tensor]],
    layers: Sequence[int],
    name: str,
    roundings: Mapping[str, Change] = ROUNDINGS,
) -> dict[int, dict[str, list[Reading]]]:
    """The readings of every layer, rounding and batch, on the CPU."""
    plans: list[LayerPlan] = [attention.plan for attention in model.attentions()]
    device = next(model.parameters()).device
    found: dict[int, dict[str, list[Reading]]] = {layer: {name: [] for name in roundings} for layer in layers}
    work = [(layer, batch) for layer in layers for batch in range(len(batches))]
    for layer, batch in tqdm(work, desc=name, unit="pass", disable=not sys.stderr.isatty()):
        tokens_BT, targets_BT = (x.to(device) for x in batches[batch])
        seed = torch.tensor(batch, dtype=torch.int64, device=device)
        dtype = config.precision.torch_dtype
        made = readings(model, plans[layer], tokens_BT, targets_BT, dtype, seed=seed, roundings=roundings)
        for rounding, reading in made.items():
            found[layer][rounding].append(Reading(*(getattr(reading, f.name).cpu() for f in fields(Reading))))
    return found


def parts(found: Sequence[Reading], head: int | None = None) -> dict[str, Mean]:
    """Means of both parts over all batches, and of their drifts."""
    deltas, pulls = ([getattr(reading, name) for reading in found] for name in ("delta_BHT", "pull_BHT"))
    both = {name: [getattr(reading, f"{name}_BHT") for reading in found] for name in BOTH}
    return {name: mean_of(part, deltas, head) for name, part in both.items()} | {
        f"{name} drift": mean_of(part, deltas, head, pulls_BHT=pulls) for name, part in both.items()
    }


def cell(mean: Mean) -> str:
    return f"{1e6 * mean.mean:+10.3g} ± {1e6 * mean.standard_error:<8.2g} {mean.z:+6.1f}"


def table(found: dict[int, dict[str, list[Reading]]]) -> list[str]:
    """A line a layer and rounding."""
    lines = [f"{'layer':>5}  {'O rounded':<11} {'e . dO(O): bias':^30} {'e . (dO(O + e) - dO(O)): self':^30}"]
    lines.append(f"{'':>5}  {'':<11} {'mean ± s.e., 1e-6':^22} {'z':>6}  {'mean ± s.e., 1e-6':^22} {'z':>6}")
    for layer, roundings in found.items():
        for rounding, batches in roundings.items():
            found_parts = parts(batches)
            for label, drift in ((rounding, ""), ("   drift", " drift")):
                cells = "  ".join(cell(found_parts[name + drift]) for name in BOTH)
                lines.append(f"{layer:>5}  {label:<11} {cells}")
    return lines


def rows(found: dict[int, dict[str, list[Reading]]], name: str, step: int, n_head: int) -> list[tuple[object, ...]]:
    """Lines of the CSV: head -1 is all heads together."""
    lines: list[tuple[object, ...]] = []
    for layer, roundings in found.items():
        for rounding, batches in roundings.items():
            for head in (None, *range(n_head)):
                means = parts(batches, head)
                numbers = [f"{x:.6g}" for part in PARTS for x in (means[part].mean, means[part].standard_error)]
                sequences = means[PARTS[0]].sequences
                lines.append((name, step, layer, -1 if head is None else head, rounding, sequences, *numbers))
    return lines


def _short(value: float) -> str:
    return f"{value:+,.0f}" if abs(value) >= 100 else f"{value:+.3g}"


def _z(mean: float, standard_error: float) -> float:
    return 0.0 if mean == 0 else mean / standard_error


def read(path: Path) -> tuple[Sequence[str], list[dict[str, str]]]:
    """Columns of a CSV, and its lines for all heads together. Raises ``OSError``."""
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        return reader.fieldnames or (), [row for row in reader if row.get("head") == "-1"]


def summary(paths: Sequence[Path]) -> str:
    """A Markdown table: a line a file, rounding and layer, with the ranges over all checkpoints in it (all heads together)."""
    heading = (
        "readings",
        "O rounded",
        "layer",
        "checkpoints",
        "bias, 1e-6 of delta",
        "z",
        "self-correlation, 1e-6 of delta",
        "z",
    )
    lines = [f"| {' | '.join(heading)} |", f"| --- | --- | ---: | ---: |{' ---: |' * 4}"]
    for path in paths:
        try:
            columns, found = read(path)
        except OSError as error:
            raise UserError(f"--table {path}: cannot be read ({error})") from None
        if not set(columns_of(BOTH)) <= set(columns):
            raise UserError(f"--table {path}: not readings as --out writes them (other columns)")
        drifts = (" drift",) if set(columns_of(PARTS)) <= set(columns) else ()
        for rounding, layer in sorted({(row["rounding"], int(row["layer"])) for row in found}):
            for kind in ("", *drifts):
                cells = [path.stem, rounding + (", drift" if kind else ""), str(layer)]
                chosen = [row for row in found if (row["rounding"], int(row["layer"])) == (rounding, layer)]
                for part in BOTH:
                    pairs = [(float(row[part + kind]), float(row[f"{part}{kind} s.e."])) for row in chosen]
                    means = [1e6 * mean for mean, _ in pairs]
                    z = [_z(*pair) for pair in pairs]
                    cells += [str(len(chosen))] * (part == "first")
                    cells += [f"{_short(min(means))} to {_short(max(means))}", f"{min(z):+.1f} to {max(z):+.1f}"]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="*", help="checkpoints, or folders of runs (their newest)")
    parser.add_argument("--data", type=Path, help="data set (that of the run)")
    parser.add_argument("--split", choices=("val", "train"), default="val", help="its tokens (val)")
    parser.add_argument("--layers", type=int, nargs="+", help="which, from 0 (all)")
    parser.add_argument("--roundings", nargs="+", choices=list(ROUNDINGS), default=list(ROUNDINGS), help="which (all)")
    add_sampling(parser, batches=8)
    parser.add_argument("--out", type=Path, help="CSV file")
    parser.add_argument("--table", type=Path, nargs="+", metavar="CSV", help="print what these files say, and no more")
    chosen = parser.parse_args(arguments)
    if bool(chosen.checkpoint) == bool(chosen.table):
        raise UserError("name checkpoints to measure, or --table with files to tell of")
    check_sampling(chosen)
    return chosen


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    if arguments.table:
        print(summary(arguments.table))
        return
    if arguments.out is not None:
        check_place(arguments.out, "--out")
    device = open_device(arguments.device)
    lines: list[tuple[object, ...]] = []
    for path in arguments.checkpoint:
        loaded = read_checkpoint(path)
        model, config, _ = build(loaded, device)
        layers = arguments.layers or list(range(config.model.n_layer))
        if outside := [layer for layer in layers if not 0 <= layer < config.model.n_layer]:
            raise invalid("--layers", outside[0], f"0 to {config.model.n_layer - 1}, counted from 0")
        data = arguments.data or Path(config.data.dataset)
        tokens_N = read_tokens(data, config.model.vocab_size, arguments.split)
        length = min(arguments.length, config.data.sequence_length)
        batches = spread(tokens_N, arguments.batches, arguments.sequences, length, str(data))
        chosen = {name: ROUNDINGS[name] for name in arguments.roundings}
        found = measure(model, config, batches, layers, loaded.path.name, chosen)
        count = arguments.batches * arguments.sequences
        print(f"{loaded.path}: step {loaded.step}, {config.attention.label()}, {count} sequences of {length} tokens")
        print(*table(found), sep="\n", flush=True)
        lines += rows(found, config.run.name, loaded.step, config.model.n_head)
    if arguments.out is not None:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([columns_of(PARTS), *lines])
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(arguments.out, text.getvalue())
        print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
