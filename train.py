"""Train a GPT-2: read the config, build the run, loop.

    python train.py configs/debug.py --data.record replay_batches/t --run.name a
    torchrun --standalone --nproc_per_node=4 train.py configs/gpt2_paper.py --data.replay replay_batches/t

Every field of the config is an option; ``--help`` lists them.
"""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

import config as configuration
from config import TrainConfig
from errors import exit_on_user_error
from training import distributed, throughput
from training.distributed import Distributed
from training.session import Session
from training.step import StepResult


def train(config: TrainConfig) -> None:
    """Run ``config`` to its last step. Raises ``UserError`` for what the user can mend."""
    distributed.set_deterministic(config.precision.deterministic)
    distributed.set_tf32(config.precision.tf32)
    place = distributed.start(config.run.device)
    try:
        run(config, place)
        distributed.barrier()
    finally:
        distributed.stop()


def run(config: TrainConfig, place: Distributed) -> None:
    """Build the run and see it through; its files are closed whatever happens, a recording as complete only at the end."""
    session = Session(config, configuration.to_json(config), place)
    finished = False
    try:
        loop(session)
        finished = True
    finally:
        session.close(finished=finished)


def loop(session: Session) -> None:
    """Train, measure and save, step by step; one extra pass measures and saves the end."""
    config = session.config
    announce(session)
    interactive = session.place.is_main and sys.stderr.isatty()
    bar = tqdm(total=config.run.steps, initial=session.start_step, unit="step", disable=not interactive)
    step, last_saved = session.start_step, session.start_step
    while True:
        row: dict[str, float | str | None] = {}
        if due(step, config.evaluation.every, config.run.steps):
            row["val_loss"] = session.evaluate()
        if due(step, config.telemetry.every, config.run.steps):
            row |= session.probe()
        if due(step, config.checkpoint.every, config.run.steps, always_last=True) and step > last_saved:
            session.save(step)
            last_saved = step
        if step == config.run.steps:
            session.metrics.log(step, **row)
            session.say(line(step, row))
            break
        position, began = session.batches.position, time.perf_counter()
        result = session.train_step(step)
        row |= measurements(session, step, position, result, time.perf_counter() - began)
        if not result.finite or len(row) > len(MEASURED) or step % config.run.log_every == 0:
            session.metrics.log(step, **row)
            if not interactive:
                session.say(line(step, row))
            bar.set_postfix_str(f"loss {result.loss:.4f}")
        step, last_saved = next_step(session, step, position, result, last_saved)
        bar.update(step - bar.n)
    bar.close()


def due(step: int, every: int, last: int, *, always_last: bool = False) -> bool:
    """Whether something that happens every ``every`` steps (0: never), and at the end, happens before this step."""
    return (every > 0 and step % every == 0) or (step == last and (every > 0 or always_last))


MEASURED = ("batch", "tokens", "train_loss", "grad_norm", "lr", "tokens_per_second", "mfu", "seconds", "data_digest")


def measurements(session: Session, step: int, position: int, result: StepResult, elapsed: float) -> dict:
    """The columns of a training step, named by ``MEASURED``, in its order."""
    data = session.config.data
    tokens_per_step = data.global_batch * data.sequence_length
    rate = tokens_per_step / elapsed
    values = (
        position,
        (step + 1) * tokens_per_step,
        result.loss,
        result.grad_norm,
        session.learning_rate(step),
        rate,
        throughput.mfu(rate, session.flops_per_token, session.place.world_size, session.peak),
        session.seconds(),
        session.batches.digest(),
    )
    return dict(zip(MEASURED, values, strict=True))


def next_step(session: Session, step: int, position: int, result: StepResult, last_saved: int) -> tuple[int, int]:
    """The step that follows, after the config's policy for losses and gradients that are not finite; and the last one saved."""
    if result.finite:
        return step + 1, last_saved
    where = f"step {step}, batch {position}: loss {result.loss}, gradient norm {result.grad_norm}"
    if result.overflow:
        session.guard.overflow_steps += 1
        session.say(f"float16 overflow at {where}: skipped, {session.guard.overflow_steps} so far")
        return step + 1, last_saved
    session.guard.nonfinite_steps += 1
    policy = session.config.nonfinite.policy
    session.say(f"not finite at {where}; policy: {policy}")
    if policy in ("skip", "continue"):
        return step + 1, last_saved
    if policy == "rollback" and session.guard.rollbacks < session.config.nonfinite.max_rollbacks:
        restored = session.roll_back()
        if restored is not None:
            session.say(f"rolled back to step {restored}; the data goes on after batch {position}")
            return restored, restored
        session.say("no checkpoint to roll back to")
    session.say(f"stopped at {where}; the checkpoints in {session.checkpoints.folder} are from before")
    raise SystemExit(1)


def announce(session: Session) -> None:
    """Say once what runs."""
    config, place = session.config, session.place
    session.say(
        f"{session.folder}: attention {config.attention.label()}, {session.raw_model.num_parameters() / 1e6:.1f}M parameters, "
        f"{place.world_size} process(es) on {session.device.type}, {session.batches.accumulation()} micro-step(s) of "
        f"{config.data.micro_batch} x {config.data.sequence_length} tokens each, from step {session.start_step}"
    )
    session.say(throughput.explain(session.flops_per_token, session.peak))


def line(step: int, row: dict) -> str:
    """One line for a terminal that is not interactive."""
    shown = ("train_loss", "val_loss", "grad_norm", "lr", "w_q_norm_max", "tokens_per_second", "mfu")
    parts = [f"{name} {row[name]:.4g}" for name in shown if row.get(name) is not None]
    return f"step {step}  " + "  ".join(parts)


@exit_on_user_error
def main() -> None:
    train(configuration.load(sys.argv[1:]))


if __name__ == "__main__":
    main()
