"""A new run that goes on from a checkpoint of another one: what would have become of that, had something been changed there?

    python scripts/branch_run.py runs/flash/checkpoints/step_00003000 runs/late
    python train.py RECIPE --run.name late --run.resume yes --run.steps 4500 --alarm.switches 3000:1:flash_subtract_first

The new run has the checkpoint (of a run's folder, the newest) and what was logged before its step, as a resume of the old run would
keep it: metrics, telemetry and interventions. Left alone it goes on to the same bits, on a CPU with as many threads. RECIPE and options
are the old run's, or those that a resume may change; --alarm.switches moves a layer to a preset. ``sessions`` of config.json says where
the new run comes from.

A branch of a run that replays goes on replaying. A branch of a run that records (``data.record``) does neither: batches are a function of
data.seed and the step, so it draws the same ones, also beyond the end of the recording, and the old run's recording stays its own. Such a
branch is resumed without --data.record, which would be refused. On Weights & Biases it is a run of its own, from that step on.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _root  # noqa: F401

from errors import OneLineParser, UserError, exit_on_user_error, invalid, trainer_packages

with trainer_packages():
    import config as configuration
    from config import RunConfig, TrainConfig
    from files import sync_folder
    from training import record
    from training.checkpoint import CheckpointConfig, Checkpoints, Loaded
    from training.metrics import METRICS_FILE, read_metrics
    from training.weights import read_checkpoint


def run_of(loaded: Loaded) -> Path:
    """The folder of the run that wrote the checkpoint. Raises ``UserError`` where its log does not reach the checkpoint."""
    folder = loaded.path.resolve().parent.parent
    every = loaded.config_json["run"]["log_every"]
    last = max((row["step"] for row in read_metrics(folder) if row["step"] < loaded.step), default=-1)
    if last < loaded.step - every:
        path = folder / METRICS_FILE
        raise UserError(f"{path}: before step {loaded.step} of {loaded.path} its last line is of step {last}")
    return folder


def settings_of(loaded: Loaded, out: Path) -> dict[str, Any]:
    """The new run's configuration as JSON. Raises ``UserError`` for a name that a run cannot have."""
    old = loaded.config_json
    changes: dict[str, dict[str, Any]] = {"run": {"name": out.name, "folder": str(out.parent)}}
    if old["data"]["record"]:
        changes["data"] = {"record": ""}
    settings = old | {section: old[section] | fields for section, fields in changes.items()}
    configuration.from_json(TrainConfig, settings)
    return settings


def write(out: Path, loaded: Loaded, folder: Path) -> None:
    """Make the run ``out`` of the checkpoint; it appears under its name only when whole.

    ``folder``: of the run that wrote the checkpoint. Raises ``UserError``.
    """
    settings = settings_of(loaded, out)
    came_from = {"run": loaded.config_json["run"]["name"], "step": loaded.step}
    content = record.branched(folder, loaded.step, settings, came_from)
    if loaded.config_json["data"]["record"]:
        content["batches"] |= {"recording": "", "recording_start": ""}
    aside = out.with_name(f".{out.name}.tmp")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        record.write_record(aside, content, record.logs_before(folder, loaded))
        Checkpoints(aside / "checkpoints", CheckpointConfig()).save(
            loaded.step,
            model_state=loaded.model_state,
            optimizer_state=loaded.optimizer_state,
            scaler_state=loaded.scaler_state,
            rng=loaded.rng,
            position=loaded.position,
            config_json=settings,
            extra=loaded.extra,
        )
        sync_folder(aside)
        os.rename(aside, out)
        sync_folder(out.parent)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        if isinstance(error, OSError):
            raise UserError(f"{out}: cannot be made ({error.strerror or error})") from error
        raise


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked as far as it can be without the checkpoint."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="checkpoint, or folder of a run (its newest one)")
    parser.add_argument("out", type=Path, help="folder of the new run, which must not exist; its name is the run's")
    args = parser.parse_args(arguments)
    if os.path.lexists(args.out):
        raise UserError(f"{args.out}: exists; name a new run")
    return args


@exit_on_user_error
def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    loaded = read_checkpoint(args.run)
    folder, old = run_of(loaded), loaded.config_json["run"]["name"]
    if args.out.name == old:
        raise invalid("OUT", args.out.name, "another name than that of the run it comes from: reports tell runs by it")
    write(args.out, loaded, folder)
    place = "" if args.out.parent == Path(RunConfig().folder) else f" --run.folder {shlex.quote(str(args.out.parent))}"
    without = " but without --data.record" if loaded.config_json["data"]["record"] else ""
    print(f"wrote {args.out}: step {loaded.step} of {old}")
    print(
        f"it goes on with: python train.py RECIPE --run.name {args.out.name}{place} --run.resume yes --run.steps N, "
        f"N above {loaded.step}, RECIPE and other options as for {old}{without}"
    )
    print(f"another attention of a layer from here on: --alarm.switches {loaded.step}:LAYER:PRESET")


if __name__ == "__main__":
    main()
