"""Write a recording without training: the batches that a run of a recipe draws, from its data and data.seed alone.

    python scripts/make_recording.py configs/fast_failure.py --steps 6500 --out replay_batches/mine [--data.seed 7 ...]

Batches are drawn, cut from the tokens and recorded by the trainer's own code (data/batches.py), so that a run with the same data and
seed sees the same ones and logs the same data_digest. --against RUN compares them with the digests that a run logged.
"""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import _root  # noqa: F401

from errors import OneLineParser, UserError, check_size, exit_on_user_error, invalid, reading, trainer_packages

with trainer_packages():
    import config
    from data.batches import Batches, DataConfig
    from figures import curves
    from files import read_json

SOURCE = "make_recording"
FACTS = ("sequence_length", "global_batch", "seed")


def logged_digests(folder: Path) -> dict[int, str]:
    """data_digest by batch, of a run. Raises ``UserError`` when it logged none."""
    metrics = curves.metrics(folder)
    logged = dict(metrics["data_digest"].dropna()) if "data_digest" in metrics else {}
    if not logged:
        raise UserError(f"--against {folder}: its metrics have no data_digest to compare with")
    return logged


def facts(folder: Path) -> dict[str, Any]:
    """``batches`` of a run's config.json: what its batches were drawn from. Empty where a kept run has none."""
    path = folder / "config.json"
    with reading(path):
        return (read_json(path).get("batches") if path.exists() else None) or {}


def make(data: DataConfig, out: Path, steps: int, logged: dict[int, str], run: Mapping[str, Any] | None = None) -> int:
    """Write the recording ``out``; the number of digests compared. Raises ``UserError`` at the first that differs, with what differs of the
    ``facts`` of the run that logged them; nothing is left then."""
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
                ours, theirs = batches.identity, run or {}
                odd = [name for name in FACTS if name in theirs and theirs[name] != ours[name]]
                why = "".join(f"; data.{name} = {ours[name]}, the run's {theirs[name]}" for name in odd)
                raise UserError(f"step {step}: data_digest {batches.digest()}, the run logged {logged[step]}{why}")
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
    against = (logged_digests(args.against), facts(args.against)) if args.against else ({}, None)
    compared = make(chosen.data, args.out, steps, *against)
    told = f"; {compared:,} digests of {args.against} agree" if args.against else ""
    print(f"{args.out}: {steps:,} steps of {chosen.data.global_batch} x {chosen.data.sequence_length} tokens{told}")


if __name__ == "__main__":
    main()
