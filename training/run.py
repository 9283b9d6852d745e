"""A run: built from its config or resumed, saved, closed. Functions over one record of its parts."""

import contextlib
import functools
import os
import secrets
import time
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

import attention
import files
from attention.check.kernels import identity
from attention.plan import LayerPlan, describe
from attention.presets import EXTERNAL
from attention.watching.growth import GrowthAlarm
from data.batches import Batches
from errors import UserError, invalid, on_disk, reading, warn
from model import GPT, initialize
from training import distributed, outcome, precision, record, throughput
from training.checkpoint import MODEL_FILE, Checkpoints, Content, Loaded, rng_state, set_rng_state
from training.distributed import DistContext
from training.intervention import Interventions, parse_switch, update_alarm
from training.metrics import Metrics, read_lines, start_wandb
from training.nonfinite import FoundInf, NonFiniteGuard
from training.optim import build_optimizer
from training.settings import TrainConfig, to_json
from training.telemetry import TELEMETRY_FILE, Telemetry
from training.tree_sum import PlainSum, TreeSum, check_processes
from training.weights import is_checkpoint, load_nanogpt, load_weights, read_checkpoint


@dataclass
class Network:
    raw: GPT
    """As it is saved and probed."""
    model: nn.Module
    """Compiled as the config says: what is trained."""
    optimizer: Optimizer
    scaler: torch.amp.GradScaler
    flops_per_token: int
    sums: TreeSum | PlainSum
    """What adds the gradients, as precision.fixed_sum_order says."""


@dataclass
class Run:
    config: TrainConfig
    dist: DistContext
    folder: Path
    batches: Batches
    network: Network
    interventions: Interventions
    guard: NonFiniteGuard
    found_inf: FoundInf
    checkpoints: Checkpoints
    metrics: Metrics
    telemetry: Telemetry | None
    """On the main process, where probes are asked for."""
    alarm: GrowthAlarm
    start_step: int
    began: float
    """``time.monotonic`` at which a run without interruptions would have begun."""
    peak_flops: float | None
    lock: FileIO | None
    """On its folder, on the main process."""
    id: str
    """Random, from its first start on: its recording has it, too."""

    def seconds(self) -> float:
        """Wall time so far, earlier sessions of a resumed run included."""
        return time.monotonic() - self.began

    def check_lock(self) -> None:
        """Raise ``UserError`` where somebody has removed or moved the folder or the lock: another run may be there by now."""
        if self.lock is not None:
            files.check_in_place(self.lock, self.folder / record.LOCK_FILE)


@dataclass(frozen=True)
class Origin:
    """Where a session begins."""

    run_id: str
    resumes: bool
    """Whether the run is there already."""
    loaded: Loaded | None
    """Its checkpoint."""
    start: Loaded | None
    """That, or another run's, which it branches from; None at step 0."""

    @property
    def step(self) -> int:
        return 0 if self.start is None else self.start.step


# ---- build and resume


def open_run(config: TrainConfig, dist: DistContext) -> Run:
    """Build the run of ``config``, or resume it. If it cannot start, what is new on disk is removed.

    Raises ``UserError`` when anything in the config is missing, foreign or impossible.
    """
    if config.precision.fixed_sum_order:
        check_processes(config.data, dist.world_size)
    folder = Path(config.run.folder) / config.run.name
    plans = config.attention.resolve(config.model.n_layer, config.model.n_head)
    check = functools.partial(check_plans, config, dist.device)
    check(plans)
    checkpoints = Checkpoints(folder / "checkpoints", config.checkpoint)
    with contextlib.ExitStack() as undo:
        if dist.is_main:
            paths = folder, Path(config.data.record or folder)
            parents = [parent for path in paths for parent in path.absolute().parents if not os.path.exists(parent)]
            undo.callback(record.remove_empty, parents)
        there, lock = record.hold(folder, config.run.resume, dist.is_main)
        undo.enter_context(lock or contextlib.nullcontext())
        resumes = there or config.run.resume == "yes"
        loaded = checkpoint_to_resume(config, dist, checkpoints) if resumes else None
        start = loaded or checkpoint_to_branch_from(config, dist)
        if resumes and loaded is None:
            began = {"from_step": start.step if start else 0, **init_sha256(config, start)}
            record.check_restart(folder, checkpoints.folder, config, began)
        run_id = record.run_id(folder, loaded) if resumes else secrets.token_hex(16)
        origin = Origin(run_id, resumes, loaded, start)
        switches = [parse_switch(text) for text in config.alarm.switches]
        interventions = Interventions(plans, switches, check, start)
        for switch in switches:
            if switch.step >= config.run.steps:
                dist.print0(
                    f"alarm.switches: {switch.option()} acts on no training step: the run ends at {config.run.steps}"
                )
        for option in interventions.idle:
            dist.print0(f"alarm.switches: {option} changes nothing: the layer has that attention already")
        batches = open_data(config, dist, origin, undo)
        if resumes and loaded is None:
            record.check_data(folder, config.data.dataset, batches.identity)
        network = build_network(config, dist, interventions.plans, start)
        if dist.is_main and not resumes:
            lock = undo.enter_context(record.make_folder(folder))
            undo.callback(record.remove_folder, folder)
        wandb_run = None
        if dist.is_main:
            wandb_run = open_folder(config, dist, checkpoints, interventions, batches, origin)
        run = Run(
            config=config,
            dist=dist,
            folder=folder,
            batches=batches,
            network=network,
            interventions=interventions,
            guard=NonFiniteGuard(config.nonfinite, start.extra["guard"] if start else {}),
            found_inf=FoundInf(config.nonfinite.policy, dist.device),
            checkpoints=checkpoints,
            metrics=Metrics(folder, wandb_run, enabled=dist.is_main),
            telemetry=None,
            alarm=config.alarm.open(config.optim.warmup_steps),
            start_step=origin.step,
            began=time.monotonic() - (start.extra["seconds"] if start else 0.0),
            peak_flops=throughput.peak_flops(dist.device),
            lock=lock,
            id=run_id,
        )
        open_telemetry(run)
        undo.pop_all()
    return run


def check_plans(config: TrainConfig, device: torch.device, plans: tuple[LayerPlan, ...]) -> None:
    """Raise ``UserError`` for an attention that this machine cannot compute."""
    dtype, head_dim, softcap = config.precision.torch_dtype, config.model.head_width, config.model.attention_softcap
    settings: dict[str, Any] = {"head_dim": head_dim, "softcap": softcap, "features": config.model.features}
    attention.check_plans(plans, device=device, dtype=dtype, **settings, length=config.data.sequence_length)


def checkpoint_to_resume(config: TrainConfig, dist: DistContext, checkpoints: Checkpoints) -> Loaded | None:
    """The checkpoint to resume from; None if there is none."""
    record.check_logs(checkpoints.folder.parent)
    loaded = checkpoints.load_newest()
    if loaded is not None:
        check_start(config, dist, loaded, branch=False)
    return loaded


def checkpoint_to_branch_from(config: TrainConfig, dist: DistContext) -> Loaded | None:
    """The checkpoint that ``run.init_from`` names: its weights, optimizer, step and position in the data; None where it names none."""
    path = Path(config.run.init_from)
    if not config.run.init_from or not is_checkpoint(path):
        return None
    loaded = read_checkpoint(path)
    check_start(config, dist, loaded, branch=True)
    if config.data.record:
        expected = f"none with run.init_from = {str(path)!r}: it would lack the {loaded.step} steps before"
        raise invalid("data.record", config.data.record, expected)
    return loaded


def init_sha256(config: TrainConfig, start: Loaded | None) -> dict[str, str]:
    """That of the weights that run.init_from names, for a session's facts; nothing where it names none."""
    if not config.run.init_from:
        return {}
    source = Path(config.run.init_from) if start is None else start.path / MODEL_FILE
    with on_disk("run.init_from", f"read {source}"):
        return {"init_sha256": files.sha256_file(source)}


def check_start(config: TrainConfig, dist: DistContext, loaded: Loaded, *, branch: bool) -> None:
    """Raise ``UserError`` where ``config`` does not fit the checkpoint at which the run begins."""
    where = f"the checkpoint {loaded.path}"
    record.check_settings(where, loaded.config_json, config, branch=branch)
    if config.run.steps < loaded.step:
        expected = f"at least {loaded.step}, where the checkpoint {loaded.path} stands"
        raise invalid("run.steps", config.run.steps, expected)
    if len(loaded.rng) != dist.world_size and not (config.precision.fixed_sum_order and len(loaded.rng) == 1):
        field = "init_from" if branch else "resume"
        raise UserError(f"run.{field}: {loaded.path} is of {len(loaded.rng)} processes, not {dist.world_size}")


def open_data(config: TrainConfig, dist: DistContext, origin: Origin, undo: contextlib.ExitStack) -> Batches:
    """The batches, from where the run goes on. Raises ``UserError`` for data that the run cannot have, or was not trained on."""
    start = origin.start
    # At 0 this run's own recording starts again. A new run has no recording and must not touch one of another run.
    resume_at = start.position if start is not None else 0 if origin.resumes else None
    new_recording = dist.is_main and config.data.record and not os.path.exists(config.data.record)
    batches = Batches(config.data, dist.rank, dist.world_size, config.run.name, resume_at, origin.run_id)
    undo.callback(batches.discard if new_recording else functools.partial(batches.close, complete=False))
    # Only rank 0 verifies the data, and hosts may have copies of their own. The digest knows the position, too.
    if len(set(distributed.gather(batches.digest()))) > 1:
        expected = f"the same data and checkpoint for every process: rank {dist.rank} has {batches.digest()} at step {batches.position}"
        raise invalid("data.dataset", config.data.dataset, expected)
    if batches.vocabulary_size > config.model.vocab_size:
        least = batches.vocabulary_size
        expected = (
            f"at least the data's {least} (--model.vocab-size {least}); text prepared with --vocabulary bytes has 256"
        )
        raise invalid("model.vocab_size", config.model.vocab_size, expected)
    if start is not None and batches.digest() != start.extra["data_digest"]:
        source = "replay" if config.data.replay else "dataset"
        expected = f"the data that {start.path} was trained on: this gives other batches"
        raise invalid(f"data.{source}", getattr(config.data, source), expected)
    held_out = batches.identity["validation_sha256"]
    if start is not None and start.extra.get("validation_sha256", held_out) != held_out:
        if origin.resumes:
            expected = f"the validation data of {start.path}: losses of two sets would stand in one log"
            raise invalid("data.dataset", config.data.dataset, expected)
        dist.print0(
            f"{config.data.dataset}: other validation data than of {start.path}: validation losses do not compare"
        )
    if batches.steps_available is not None and batches.steps_available < config.run.steps:
        if start is not None and batches.steps_available <= start.step:
            longer = f"a recording that goes beyond step {start.step}, at which the run begins: it ends at {batches.steps_available}"
            raise invalid("data.replay", config.data.replay, longer)
        expected = f"at most {batches.steps_available}: {config.data.replay} ends there; or record a longer one"
        raise invalid("run.steps", config.run.steps, expected)
    return batches


def build_network(
    config: TrainConfig, dist: DistContext, plans: tuple[LayerPlan, ...], start: Loaded | None
) -> Network:
    """The model with its weights, from the checkpoint, a folder or drawn, and its optimizer."""
    device = dist.device
    # Only an external kernel may draw from torch's own generators, but checkpoints hold them: those of equal runs must be equal.
    torch.manual_seed(config.run.seed)
    raw = GPT(config.model, plans, precision.operators(config.speed, device))
    if start is None and config.run.init_from:
        load_nanogpt(raw, Path(config.run.init_from))
    elif start is None:
        initialize(raw, config.run.seed)
    raw.to(device)
    optimizer, scaler = build_optimizer(raw, config.optim, device), config.precision.scaler(device)
    if start is not None:
        restore(raw, optimizer, scaler, start, dist)
    model = cast(nn.Module, torch.compile(raw)) if config.precision.compile else raw
    micro_batches = config.data.global_batch // config.data.micro_batch
    fixed = config.precision.fixed_sum_order
    sums = TreeSum(raw, micro_batches, config.run.timeout) if fixed else PlainSum(raw, micro_batches)
    return Network(raw, model, optimizer, scaler, raw.flops_per_token(config.data.sequence_length), sums)


def open_folder(
    config: TrainConfig,
    dist: DistContext,
    checkpoints: Checkpoints,
    interventions: Interventions,
    batches: Batches,
    origin: Origin,
) -> Any:
    """Rank 0: write the run's config.json into its folder; the W&B run where one is asked for, else None."""
    folder, loaded, plans = checkpoints.folder.parent, origin.loaded, interventions.base
    made_with = record.environment(dist.device, dist.world_size)
    groups = [group for plan in plans for group in plan.groups]
    if kernels := sorted({group.numerics for group in groups if group.backend == EXTERNAL}):
        made_with["kernels"] = {name: identity(name) for name in kernels}
    if loaded is None:
        made_with |= init_sha256(config, origin.start)
    content = {"run_id": origin.run_id, "config": to_json(config), **made_with, "batches": batches.identity}
    content |= {"attention_name": config.attention.label(), "attention": describe(plans)}
    content |= {"switches": interventions.options(), "sessions": record.sessions(folder, origin.step, made_with)}
    if loaded is not None:
        changes = record.settings_changed(folder, config), record.what_changed(content["sessions"])
        for changed in filter(None, changes):
            dist.print0(f"{folder}: {changed}")
    if config.data.replay:
        before = record.sum_order_of(Path(config.data.replay), folder.parent / batches.header.source_run)
        if before not in (None, value := config.precision.fixed_sum_order):
            what = f"recorded with {record.SUM_ORDER} {before}, this run has {value}: losses may differ"
            dist.print0(f"{config.data.replay}: {what}")
    logs, odd = ({}, []) if loaded is None else record.logs_before(folder, loaded)
    if odd:  # the next checkpoint knows only the changed lines
        content["sessions"][-1]["logs_changed"] = odd
    # W&B may fail to start, so it comes before any existing file is changed.
    wandb_run = start_wandb(folder, config.wandb, content)
    record.write_record(folder, content, logs)
    checkpoints.clear()
    if loaded is not None:
        checkpoints.set_aside(loaded.step)
        # A kill may have come before the save deleted old checkpoints.
        if not loaded.extra["guard"].get("skips_in_a_row"):
            checkpoints.prune()
    if origin.resumes and loaded is None:
        dist.print0(f"{folder}: no checkpoint yet; starting from step {origin.step}")
    elif loaded is not None and loaded.step == config.run.steps:
        dist.print0(f"{folder}: finished: {loaded.step} of {config.run.steps} steps; a larger --run.steps goes on")
    return wandb_run


def open_telemetry(run: Run) -> None:
    """Make the probes, on the main process, and show the alarm what they have measured before: it says nothing twice."""
    config = run.config
    if not run.dist.is_main or not config.telemetry.every:
        return
    run.telemetry = Telemetry(config, run.network.raw, run.batches, run.folder, run.dist.device)
    try:
        for earlier in read_lines(run.telemetry.file.path):
            update_alarm(run.alarm, earlier)
    except (KeyError, TypeError, ValueError, AttributeError) as error:  # somebody has edited it
        what = f"a line is no probe ({type(error).__name__}: {error}); the alarm does not know those from there on"
        warn(f"{run.folder / TELEMETRY_FILE}: {what}")


# ---- checkpoints


def save(run: Run, step: int) -> None:
    """Write the checkpoint of ``step`` (rank 0), recording and logs flushed before it."""
    states = distributed.gather(rng_state(run.dist.device))
    if run.config.precision.fixed_sum_order and all(torch.equal(state, states[0]) for state in states):
        del states[1:]  # any number of processes can go on from it
    with distributed.all_or_none(f"checkpoint of step {step}: rank 0 could not write it"):
        run.check_lock()
        run.batches.check_files()
        run.batches.flush()
        logs = [log.file for log in (run.metrics, run.telemetry) if log is not None and log.file is not None]
        for log in logs:
            log.sync()
        if run.dist.is_main:
            content = Content(
                step=step,
                model_state=run.network.raw.state_dict(),
                optimizer_state=run.network.optimizer.state_dict(),
                scaler_state=run.network.scaler.state_dict(),
                rng=states,
                position=run.batches.position,
                config_json=to_json(run.config),
                extra={
                    "run_id": run.id,
                    "guard": run.guard.state(),
                    "seconds": run.seconds(),
                    "data_digest": run.batches.digest(),
                    "validation_sha256": run.batches.identity["validation_sha256"],
                    "switches": run.interventions.state(step),
                    "logs": record.log_digests(run.folder, {log.path.name: log.digests for log in logs}),
                },
            )
            # While every step is skipped, the weights may be broken: keep the checkpoints from before.
            run.checkpoints.save(content, prune=not run.guard.skips_in_a_row)


def restore(model: GPT, optimizer: Optimizer, scaler: torch.amp.GradScaler, loaded: Loaded, dist: DistContext) -> None:
    """Put what the checkpoint holds into the model, its optimizer, the loss scale and the generators."""
    load_weights(model, loaded.model_state, f"checkpoint {loaded.path}")
    with reading(f"checkpoint {loaded.path}"):
        optimizer.load_state_dict(loaded.optimizer_state)
        scaler.load_state_dict(loaded.scaler_state)
        set_rng_state(loaded.rng[dist.rank if len(loaded.rng) > 1 else 0], dist.device)


def close(run: Run, error: BaseException | None = None) -> None:
    """Close the files and say how the run ended; a recording counts as complete only where no ``error`` ended the run."""
    try:
        if error is None:
            run.batches.close()
        else:
            # Report what stopped the run, not that a full disk refuses the flush, too: the rows so far stay valid.
            with contextlib.suppress(UserError):
                run.batches.close(complete=False)
    except BaseException as failure:
        error = failure
        raise
    finally:
        run.metrics.close(exit_code=0 if error is None else 1)
        if run.telemetry is not None:
            run.telemetry.file.close()
        if run.dist.is_main:
            with contextlib.suppress(UserError):
                run.check_lock()
                skipped = 0 if error else run.guard.skips_in_a_row
                why = f"finished; the last {skipped} update(s) were skipped" if skipped else ""
                outcome.write(run.folder, error, run.batches.position, why)
        if run.lock is not None:
            run.lock.close()
