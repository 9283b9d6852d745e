"""Draw the figures of arXiv 2510.04212 from this project's runs and checkpoints: NAME.png and the numbers drawn, NAME.csv.

    python scripts/figures.py 11 13 --runs runs/failing runs/fixed
    python scripts/figures.py 4 5 --checkpoint runs/failing/checkpoints/step_00005000
    python scripts/figures.py all --runs runs/failing runs/fixed --checkpoint runs/failing/checkpoints/step_00005000

Layers, heads, tokens and features count from 0; the paper's layer 2 is layer 1 here, its head 8 is head 7.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import _root  # noqa: F401

from errors import OneLineParser, UserError, exit_on_user_error, invalid, trainer_packages

with trainer_packages():
    from figures import canvas, delta, over_steps, similarity
    from figures.canvas import Drawn
    from figures.inputs import Inputs, MissingInputError


def _figure_4(inputs: Inputs) -> Drawn:
    rows = []
    inputs.check_alike()
    count = len(inputs.checkpoints())
    # One checkpoint: two of its sequences. Several: the same sequence in each.
    for which, batch in [(i, 0) for i in range(count)] if count > 1 else [(0, 0), (0, inputs.sequences - 1)]:
        (layer, _), head = inputs.capture(which), inputs.head()
        token = delta.largest_error_in(layer, head, batch)
        source = inputs.checkpoints()[which].label
        label = f"{source}, sequence {batch}"
        rows.append(similarity.rank_one(layer, head=head, batch=batch, token=token, source=source, label=label))
    return similarity.draw_similarity(rows)


def _figure_5(inputs: Inputs) -> Drawn:
    (layer, loss_scale), head = inputs.capture(), inputs.head()
    batch, token = delta.largest_error(layer, head)
    error = delta.head_error(layer, head=head, batch=batch, token=token, label=inputs.place(), loss_scale=loss_scale)
    return delta.draw_delta(error)


@dataclass(frozen=True)
class Entry:
    """One figure: its content, its inputs and its function."""

    what: str
    needs: str
    draw: Callable[[Inputs], Drawn]


RUNS, CHECKPOINT = "--runs with telemetry", "--checkpoint"
REGISTRY: dict[int, Entry] = {
    4: Entry("P K, X and their outer products at two tokens", CHECKPOINT, _figure_4),
    5: Entry("error of delta: summed, and by feature", CHECKPOINT, _figure_5),
    11: Entry("spectral norms over layers and steps", RUNS, lambda inputs: over_steps.draw_norms(inputs.runs)),
    13: Entry("repeated maxima before the explosion", RUNS, lambda inputs: over_steps.draw_ties(inputs.runs)),
}


def _parser() -> argparse.ArgumentParser:
    listing = "\n".join(f"  {number:>2}  {entry.what:<52} {entry.needs}" for number, entry in REGISTRY.items())
    parser = OneLineParser(
        description=__doc__,
        epilog=f"figures, and what each needs:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("figures", nargs="+", metavar="N", help="numbers of the paper's figures, or all")
    parser.add_argument("--runs", nargs="+", type=Path, default=[], metavar="RUN", help="run folders")
    parser.add_argument(
        "--checkpoint",
        nargs="+",
        type=Path,
        default=[],
        metavar="DIR",
        help="as runs/NAME/checkpoints/step_00005000, or a run (its newest)",
    )
    parser.add_argument("--data", type=Path, help="data set to take sequences from (that of the checkpoint's run)")
    parser.add_argument("--sequences", type=int, default=8, help="sequences of the validation tokens to read (8)")
    parser.add_argument("--layer", type=int, default=1, help="which layer (1, the paper's layer 2)")
    parser.add_argument("--head", type=int, help="which head (the one whose W_Q has the largest spectral norm)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (auto)")
    parser.add_argument("--out", type=Path, default=Path("pictures"), help="folder to write to (pictures)")
    return parser


def parse(argv: Sequence[str] | None) -> tuple[list[int], bool, argparse.Namespace]:
    """Numbers, whether ``all`` was asked for, and the options, checked."""
    parser = _parser()
    args = parser.parse_args(argv)
    for name in ("layer", "head"):
        if (getattr(args, name) or 0) < 0:
            raise invalid(f"--{name}", getattr(args, name), "a number from 0")
    if args.sequences < 1:
        raise invalid("--sequences", args.sequences, "1 or more")
    if args.device not in ("auto", "cpu", "cuda"):
        raise invalid("--device", args.device, ("auto", "cpu", "cuda"))
    if "all" in args.figures:
        return list(REGISTRY), True, args
    for number in args.figures:
        if not number.isdecimal() or int(number) not in REGISTRY:
            raise invalid("figure", number, (*REGISTRY, "all"))
    return [int(number) for number in args.figures], False, args


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    """Draw the figures named; with ``all``, those that the inputs allow, and report the others."""
    numbers, is_all, args = parse(argv)
    inputs = Inputs(args)
    for number in numbers:
        inputs.figure = number
        try:
            drawn = REGISTRY[number].draw(inputs)
        except UserError as error:
            if not (is_all and isinstance(error, MissingInputError)):
                raise
            print(f"left out: {error}")
            continue
        try:
            paths = canvas.write(drawn, args.out, f"figure_{number:02d}")
        except OSError as error:
            raise UserError(f"--out {args.out}: cannot be written ({error.strerror})") from None
        print(*paths)


if __name__ == "__main__":
    main()
