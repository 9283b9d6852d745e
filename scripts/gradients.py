"""Whose rounding makes this gradient?

    python scripts/gradients.py runs/NAME/checkpoints/step_00003000 --data data/tokens/corpus --layer 1 --out gradients.csv \\
        --attention run flash_fp32_pv flash_delta_from_p "flash_fp32_o probabilities=fp32" standard

At a checkpoint where the gradient norm leaps, the first question is which rounding makes it. Same weights, same batches, other attention:
for each one named, in all layers or in --layer alone, the loss, the norm of the whole gradient, and dW_Q of one layer beside that of a
reference (analysis/gradients.py): attention in FP32 with delta from P in the same places, all else as trained. An attention is a preset,
and quoted with it single sites and numerics=BASE; without one the base is the run's own at every head. `run` is the run's own attention.

A line of the CSV is a batch, or the average over all batches: of the loss, and of the gradient before any norm is taken.

With --enlarge the logits of --layer are so many times larger first (W_Q and W_K each by the square root): what each attention would make of
the gradient, had they grown. Several factors are measured one after the other.

    python scripts/gradients.py --table gradients.csv ...

prints what such files say, as Markdown.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import files
from analysis.gradients import (
    OWN,
    REFERENCE,
    Comparison,
    Gradient,
    Named,
    compare,
    gradients,
    larger_logits,
    layer_of_largest_w_q,
    parse_attention,
    replaced,
    served_by,
)
from attention import LayerPlan, registry
from attention.plan import FLASH_BACKENDS
from config import TrainConfig
from errors import OneLineParser, UserError, check_place, exit_on_user_error, invalid
from model import GPT
from scripts.autopsy import (
    FP16_LOSS_SCALE,
    add_sampling,
    build,
    check_sampling,
    open_device,
    read_tokens,
    spread,
    switches_of,
)
from scripts.checkpoint_inputs import read_checkpoint
from training.checkpoint import Loaded
from training.distributed import set_deterministic, set_tf32
from training.intervention import plans_at

KEYS = ("checkpoint", "step", "layer", "replaced", "enlarged", "attention")
NUMBERS = ("loss", "gradient_norm", "dw_q_spectral", "dw_q_frobenius", "difference", "cosine", "max_logit")
COLUMNS = (*KEYS, "batch", "sequences", "tokens", *NUMBERS)
TO_THE_BIT = ("loss", "max_logit")
"""FP32: nine digits, so that the same forward pass shows as such. All else has six."""
AVERAGE = "average"
LENGTH = 1024


@dataclass(frozen=True)
class Result:
    """What one attention gives on every batch, and on average over them."""

    batches: list[tuple[Gradient, Comparison]]
    average: tuple[Gradient, Comparison]

    def column(self, name: str) -> np.ndarray:
        """One of ``NUMBERS`` on every batch."""
        return np.array([numbers(*one)[name] for one in self.batches])


def numbers(found: Gradient, compared: Comparison) -> dict[str, float]:
    """By ``NUMBERS``."""
    values = (found.loss, found.norm, compared.spectral, compared.frobenius, compared.difference, compared.cosine)
    return dict(zip(NUMBERS, (*values, found.max_logit), strict=True))


def own_plans(loaded: Loaded, config: TrainConfig, backend: str) -> tuple[LayerPlan, ...]:
    """The attention that the run has at this checkpoint, switches included."""
    base = config.attention.resolve(config.model.n_layer, config.model.n_head)
    return served_by(plans_at(base, switches_of(loaded), loaded.step), backend)


def check(plans: Sequence[LayerPlan], config: TrainConfig, device: torch.device, name: str) -> None:
    """Raise ``UserError`` for plans that this machine cannot run."""
    model, dtype = config.model, config.precision.torch_dtype
    try:
        registry.check(plans, device=device, dtype=dtype, head_dim=model.head_width, softcap=model.attention_softcap)
    except UserError as error:
        raise UserError(f"--attention {name!r}: {error} (of this script: --backend flash_reference)") from None


def measure(
    model: GPT,
    config: TrainConfig,
    chosen: Mapping[str, tuple[LayerPlan, ...]],
    batches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    layer: int,
    name: str,
) -> dict[str, Result]:
    """The gradients of every attention in ``chosen``; the first is the reference."""
    device = next(model.parameters()).device
    scale = FP16_LOSS_SCALE if config.precision.dtype == "float16" else 1.0
    found: dict[str, Result] = {}
    reference: tuple[list[Gradient], Gradient] | None = None
    total = len(chosen) * len(batches)
    with tqdm(total=total, desc=name, unit="pass", disable=not sys.stderr.isatty()) as bar:
        for attention, plans in chosen.items():
            each, average = gradients(
                model,
                plans,
                batches,
                layer,
                autocast=lambda: config.precision.autocast(device),
                loss_scale=scale,
                tick=bar.update,
            )
            reference = reference or (each, average)
            compared = [(one, compare(one, other)) for one, other in zip(each, reference[0], strict=True)]
            found[attention] = Result(compared, (average, compare(average, reference[1])))
    return found


def table(found: Mapping[str, Result]) -> list[str]:
    """Two lines an attention: medians over batches, and the average gradient."""
    width = max(len(name) for name in (*found, "attention"))
    heads = ("loss", "norm", "range of norm", "spectral", "Frobenius", "difference", "cosine", "largest logit")
    widths = (8, 10, 23, 10, 10, 10, 9, 13)
    titles = "  ".join(f"{head:>{size}}" for head, size in zip(heads, widths, strict=True))
    lines = [f"{'':<{width}}  {'':<7}  {'':>8}  {'gradient':^35}  {'dW_Q':^45}"]
    lines.append(f"{'attention':<{width}}  {'of':<7}  {titles}")
    for name, result in found.items():
        norms = result.column("gradient_norm")
        for label, value, bounds in (
            ("batches", lambda key, result=result: float(np.median(result.column(key))), _range(norms)),
            (AVERAGE, numbers(*result.average).__getitem__, ""),
        ):
            logit = value("max_logit") if label == AVERAGE else result.column("max_logit").max()
            line = (
                f"{value('loss'):>8.4f}  {value('gradient_norm'):>10.4g}  {bounds:>23}  {value('dw_q_spectral'):>10.4g}  "
                f"{value('dw_q_frobenius'):>10.4g}  {value('difference'):>10.3g}  {value('cosine'):>+9.4f}  {_logit(logit):>13}"
            )
            lines.append(f"{name if label == 'batches' else '':<{width}}  {label:<7}  {line}")
    return lines


def _logit(largest: float) -> str:
    return f"{largest:,.0f}" if largest >= 1000 else f"{largest:.3g}"


def _range(values: np.ndarray) -> str:
    return f"{values.min():.4g} to {values.max():.4g}"


def rows(found: Mapping[str, Result], facts: Sequence[object], sampling: Sequence[int]) -> list[tuple[object, ...]]:
    """Lines of the CSV: every batch by its number, then the average. ``facts`` are checkpoint, step, layer, where replaced, factor;
    ``sampling`` batches, sequences of each, tokens of each of these."""
    count, sequences, length = sampling
    lines: list[tuple[object, ...]] = []
    for name, result in found.items():
        labelled: list[tuple[object, int, tuple[Gradient, Comparison]]] = [
            (number, sequences, one) for number, one in enumerate(result.batches)
        ]
        for batch, size, one in (*labelled, (AVERAGE, count * sequences, result.average)):
            values = (f"{value:.{9 if key in TO_THE_BIT else 6}g}" for key, value in numbers(*one).items())
            lines.append((*facts, name, batch, size, length, *values))
    return lines


def _groups(path: Path) -> Iterator[tuple[tuple[str, ...], list[dict[str, str]]]]:
    """The lines of a CSV, those of one attention together."""
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            if tuple(reader.fieldnames or ()) != COLUMNS:
                raise UserError(f"--table {path}: not gradients as --out writes them (other columns)")
            found: dict[tuple[str, ...], list[dict[str, str]]] = {}
            for row in reader:
                found.setdefault(tuple(row[key] for key in KEYS), []).append(row)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--table {path}: cannot be read ({error})") from None
    yield from found.items()


def summary(paths: Sequence[Path]) -> str:
    """A Markdown table: a line a checkpoint, place and attention."""
    heading = (
        "checkpoint",
        "step",
        "replaced in",
        "logits times",
        "attention",
        "batches",
        "loss",
        "gradient norm, median (range)",
        "of the average",
        "dW_Q of layer",
        "its spectral norm, median",
        "of the average",
        "difference, median",
        "of the average",
        "cosine of the average",
        "largest logit",
    )
    left = 5
    alignment = [" --- "] * left + [" ---: "] * (len(heading) - left)
    lines = [f"| {' | '.join(heading)} |", f"|{'|'.join(alignment)}|"]
    for path in paths:
        for (checkpoint, step, layer, where, factor, attention), found in _groups(path):
            batches = [row for row in found if row["batch"] != AVERAGE]
            (average,) = (row for row in found if row["batch"] == AVERAGE)
            each = {name: np.array([float(row[name]) for row in batches]) for name in NUMBERS}
            median = {name: float(np.median(values)) for name, values in each.items()}
            cells = (
                checkpoint,
                step,
                where,
                f"{float(factor):,g}",
                f"`{attention}`",
                len(batches),
                f"{float(average['loss']):.4f}",
                f"{median['gradient_norm']:.4g} ({_range(each['gradient_norm'])})",
                f"{float(average['gradient_norm']):.4g}",
                layer,
                f"{median['dw_q_spectral']:.3g}",
                f"{float(average['dw_q_spectral']):.3g}",
                f"{median['difference']:.3g}",
                f"{float(average['difference']):.3g}",
                f"{float(average['cosine']):+.4f}",
                _logit(float(average["max_logit"])),
            )
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="*", help="checkpoints, or folders of runs (their newest)")
    parser.add_argument("--data", type=Path, help="data set (that of the run)")
    parser.add_argument("--split", choices=("val", "train"), default="val", help="its tokens (val)")
    parser.add_argument("--attention", nargs="+", default=[OWN], metavar="NAME", help=f"what to measure ({OWN})")
    parser.add_argument("--layer", type=int, help="the one layer that gets it, from 0 (all do)")
    parser.add_argument(
        "--enlarge", type=float, nargs="+", default=[1.0], metavar="FACTOR", help="times the logits of --layer (1)"
    )
    parser.add_argument("--backend", choices=FLASH_BACKENDS, default="", help="of the flash presets (the run's)")
    add_sampling(parser, batches=8)
    parser.set_defaults(length=LENGTH)
    parser.add_argument("--out", type=Path, help="CSV file")
    parser.add_argument("--table", type=Path, nargs="+", metavar="CSV", help="print what these files say, and no more")
    chosen = parser.parse_args(arguments)
    if bool(chosen.checkpoint) == bool(chosen.table):
        raise UserError("name checkpoints to measure, or --table with files to tell of")
    check_sampling(chosen)
    if any(not 0 < factor < math.inf for factor in chosen.enlarge):
        raise invalid("--enlarge", next(f for f in chosen.enlarge if not 0 < f < math.inf), "numbers above 0")
    if chosen.enlarge != [1.0] and chosen.layer is None:
        raise invalid("--enlarge", chosen.enlarge[0], "1 without --layer, whose logits it enlarges")
    return chosen


def named_of(texts: Sequence[str]) -> dict[str, Named | None]:
    """The attentions by their names. Raises ``UserError`` for one that is named twice."""
    found: dict[str, Named | None] = {}
    for text in texts:
        name = " ".join(text.split())
        if name in found:
            raise invalid("--attention", name, "each named once")
        found[name] = parse_attention(text)
    return found


def examine(path: Path, arguments: argparse.Namespace, device: torch.device) -> list[tuple[object, ...]]:
    """Measure one checkpoint, print its table; the lines of its CSV."""
    named = named_of(arguments.attention)
    loaded = read_checkpoint(path)
    model, config, _ = build(loaded, device)
    set_tf32(config.precision.tf32)
    layer = arguments.layer
    if layer is not None and not 0 <= layer < config.model.n_layer:
        raise invalid("--layer", layer, f"0 to {config.model.n_layer - 1}, counted from 0")
    if arguments.enlarge != [1.0] and config.model.qk_norm:
        raise invalid("--enlarge", arguments.enlarge[0], "1: with qk_norm logits do not grow with W_Q and W_K")
    if arguments.enlarge != [1.0] and config.model.bias:
        raise invalid("--enlarge", arguments.enlarge[0], "1: with biases logits do not grow by as much as W_Q and W_K")
    own = own_plans(loaded, config, arguments.backend)
    chosen = {"reference": replaced(own, parse_attention(REFERENCE), layer)}
    chosen |= {name: replaced(own, one, layer) for name, one in named.items()}
    for name, plans in chosen.items():
        check(plans, config, device, name)
    data = arguments.data or Path(config.data.dataset)
    tokens_N = read_tokens(data, config.model.vocab_size, arguments.split)
    length = min(arguments.length, config.data.sequence_length)
    batches = spread(tokens_N, arguments.batches, arguments.sequences, length, str(data))
    looked_at = layer_of_largest_w_q(model) if layer is None else layer
    where = "all layers" if layer is None else f"layer {layer}"
    print(
        f"{loaded.path}: step {loaded.step}, trained with {config.attention.label()}; {arguments.batches} batches of "
        f"{arguments.sequences} x {length} tokens; attention replaced in {where}; dW_Q of layer {looked_at}"
    )
    sampling = (arguments.batches, arguments.sequences, length)
    lines = []
    for factor in arguments.enlarge:
        with larger_logits(model, looked_at, factor):
            found = measure(model, config, chosen, batches, looked_at, loaded.path.name)
        if factor != 1:
            print(f"logits of layer {looked_at} times {factor:,g}:")
        print(*table(found), sep="\n", flush=True)
        lines += rows(found, (config.run.name, loaded.step, looked_at, where, f"{factor:.12g}"), sampling)
    return lines


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    if arguments.table:
        print(summary(arguments.table))
        return
    named_of(arguments.attention)  # before a checkpoint is read
    if arguments.out is not None:
        check_place(arguments.out, "--out")
    set_deterministic(True, fill_memory=False)
    device = open_device(arguments.device)
    lines = [row for path in arguments.checkpoint for row in examine(path, arguments, device)]
    if arguments.out is not None:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([COLUMNS, *lines])
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(arguments.out, text.getvalue())
        print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
