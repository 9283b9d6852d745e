"""Write a recording without training: the batches that a run of a recipe draws, from its data and data.seed alone.

    python scripts/make_recording.py configs/fast_failure.py --steps 6500 --out replay_batches/mine [--data.seed 7 ...]

Batches are drawn, cut from the tokens and recorded by the trainer's own code (data/batches.py), so that a run with the same data and
seed sees the same ones and logs the same data_digest. --against RUN compares them with the digests that a run logged.
"""

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import _root  # noqa: F401

from errors import OneLineParser, UserError, check_size, exit_on_user_error, invalid, trainer_packages

with trainer_packages():
    import config
    from data.batches import Batches, DataConfig
    from figures import curves

SOURCE = "make_recording"


def logged_digests(folder: Path) -> dict[int, str]:
    """data_digest by batch, of a run. Raises ``UserError`` when it logged none."""
    metrics = curves.metrics(folder)
    logged = dict(metrics["data_digest"].dropna()) if "data_digest" in metrics else {}
    if not logged:
        raise UserError(f"--against {folder}: its metrics have no data_digest to compare with")
    return logged


def make(data: DataConfig, out: Path, steps: int, logged: dict[int, str]) -> int:
    """Write the recording ``out``; the number of digests compared. Raises ``UserError`` at the first that differs; nothing is left then."""
    if logged and min(logged) >= steps:  # agreement of nothing with nothing
        least = f"more than {min(logged)}, the first step whose data_digest the run of --against logged"
        raise invalid("--steps", steps, least)
    compared = 0
    batches = Batches(dataclasses.replace(data, record=str(out)), source_run=SOURCE)
    with contextlib.ExitStack() as undo:
        undo.callback(batches.discard)
        for step in range(steps):
            batches.next()
            if logged.get(step, batches.digest()) != batches.digest():
                raise UserError(f"step {step}: data_digest {batches.digest()}, the run logged {logged[step]}")
            compared += step in logged
        batches.close()
        undo.pop_all()
    return compared


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    parser = OneLineParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("recipe", help="configs/RECIPE.py; fields of it follow as --section.field value")
    parser.add_argument("--steps", type=int, help="steps to record (the recipe's run.steps)")
    parser.add_argument("--out", type=Path, required=True, help="folder to write, e.g. replay_batches/NAME")
    parser.add_argument("--against", type=Path, help="run folder whose data_digest column must agree")
    args, fields = parser.parse_known_args(argv)
    chosen = config.load([args.recipe, *fields, "--data.record", str(args.out)])
    steps = chosen.run.steps if args.steps is None else args.steps
    check_size("--steps", steps, 1)
    compared = make(chosen.data, args.out, steps, logged_digests(args.against) if args.against else {})
    told = f"; {compared:,} digests of {args.against} agree" if args.against else ""
    print(f"{args.out}: {steps:,} steps of {chosen.data.global_batch} x {chosen.data.sequence_length} tokens{told}")


if __name__ == "__main__":
    main()
