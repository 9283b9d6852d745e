"""Other row normalisers than Algorithm 3's, measured on rows: bias and size of the errors of O and delta, and the range.

    python scripts/stabiliser_variants.py                 # about half a minute on one core; writes results/appendix_c
    python scripts/stabiliser_variants.py --tables        # the tables alone, from the CSV files that are there

What arXiv 2510.04212 argues in appendix C about its stabilised softmax: a fixed offset, shifting every row, gamma near 1 for negative
maxima, the tolerance of a tie, beta 2 or 7. No training and no GPU: rows are made here (analysis/normaliser_study.py).
Writes bias.csv, range.csv, table.md, and summary.md, which docs/reproduction.md quotes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import files
from analysis import normaliser_study, normaliser_summary, normaliser_tables
from errors import OneLineParser, UserError, check_place, exit_on_user_error, invalid

OUT = Path(__file__).resolve().parent.parent / "results" / "appendix_c"


def write_tables(out: Path) -> None:
    """table.md and summary.md from the CSV files. Raises ``UserError`` where those are missing or of another version."""
    try:
        evidence = normaliser_tables.Evidence(
            normaliser_tables.measured_from((out / "bias.csv").read_text()),
            normaliser_tables.ranges_from((out / "range.csv").read_text()),
        )
        texts = {
            "table.md": normaliser_tables.tables(evidence),
            "summary.md": normaliser_summary.summary(evidence),
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{out}: not what this script measures ({type(error).__name__}: {error})") from None
    for name, text in texts.items():
        files.write_text(out / name, text)


@exit_on_user_error
def main(arguments: Sequence[str] | None = None) -> None:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT, help="folder to write (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=5, help="draws of gaps and values (default: %(default)s)")
    parser.add_argument("--tables", action="store_true", help="measure nothing, make the tables from the CSV files")
    args = parser.parse_args(arguments)
    if args.seeds < 1:
        raise invalid("--seeds", args.seeds, "1 or more")
    if not args.tables:
        torch.set_num_threads(1)
        check_place(args.out / "bias.csv", "--out")
        args.out.mkdir(parents=True, exist_ok=True)
        files.write_text(args.out / "bias.csv", normaliser_tables.to_csv(normaliser_study.study(args.seeds)))
        files.write_text(args.out / "range.csv", normaliser_tables.to_csv(normaliser_study.ranges(), ".7g"))
    write_tables(args.out)
    print(args.out)


if __name__ == "__main__":
    main()
