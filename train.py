"""Train a GPT-2: read the config, build the run, loop.

    python train.py configs/debug.py --data.record replay_batches/t --run.name a
    torchrun --standalone --nproc_per_node=4 train.py configs/gpt2_paper.py --data.replay replay_batches/t

Every field of the config is an option; ``--help`` lists them.
"""

from __future__ import annotations

import sys
import time
import traceback

from tqdm import tqdm

import config as configuration
from config import TrainConfig
from errors import exit_on_user_error
from training import distributed, throughput
from training.distributed import Distributed
from training.session import Session
from training.step import Launched, StepResult


def train(config: TrainConfig) -> None:
    """Run ``config`` to its last step. Raises ``UserError`` for what the user can mend."""
    distributed.set_deterministic(config.precision.deterministic, config.precision.fill_memory)
    distributed.set_tf32(config.precision.tf32)
    place = distributed.start(config.run.device)
    try:
        run(config, place)
        distributed.barrier()
    except BaseException as error:
        # Its frames hold the model, and DDP must be gone before the group that it talks through.
        traceback.clear_frames(error.__traceback__)
        raise
    finally:
        distributed.stop()


def run(config: TrainConfig, place: Distributed) -> None:
    """Build the run and see it through; its files are closed whatever happens, a recording as complete only at the end."""
    session = Session(config, configuration.to_json(config), place)
    try:
        loop(session)
    except BaseException:
        session.close(finished=False)
        raise
    session.close(finished=True)


def loop(session: Session) -> None:
    """Train, measure and save, step by step; one extra pass measures and saves the end."""
    config = session.config
    announce(session)
    interactive = session.place.is_main and sys.stderr.isatty()
    step, last_saved = session.start_step, session.start_step
    with tqdm(total=config.run.steps, initial=step, unit="step", disable=not interactive) as bar:
        while True:
            row: dict[str, float | str | None] = {}
            session.intervene(step)
            if due(step, config.evaluation.every, config.run.steps):
                row["val_loss"] = session.evaluate()
            if due(step, config.checkpoint.every, config.run.steps, always_last=True) and step > last_saved:
                session.save(step)
                last_saved = step
            # Behind the checkpoint, where a resumed run comes in: it probes as the uninterrupted one does.
            if due(step, config.telemetry.every, config.run.steps):
                row |= session.probe(step)
            if step == config.run.steps or row.get("alarm") == "stop":
                session.metrics.log(step, **row)
                session.say(line(step, row))
                break
            position, began = session.batches.position, time.perf_counter()
            done = Launched(step, position, row, session.train_step(step), session.batches.digest(), began)
            step = finish(session, done, bar)
            last_saved = min(last_saved, step)
            bar.update(step - bar.n)
    if row.get("alarm") == "stop":
        session.say(
            f"step {step}: stopped by the alarm; --run.resume --alarm.response log goes on from the checkpoint of this step"
        )
        raise SystemExit(1)


def finish(session: Session, launched: Launched, bar: tqdm) -> int:
    """Read a step's values, log it, follow the policy where it is not finite; the step to go on with."""
    step, position, row, result = launched.step, launched.position, launched.row, launched.result
    row |= measurements(session, launched, result)
    following = step + 1 if result.finite else recover(session, step, position, result, row)
    if len(row) > len(MEASURED) or step % session.config.run.log_every == 0:
        session.metrics.log(step, **row)
        if bar.disable and result.finite:  # recover() has said the rest
            session.say(line(step, row))
        bar.set_postfix_str(f"loss {result.loss:.4f}")
    if row.get("nonfinite") == "stop":
        raise SystemExit(1)
    return following


def due(step: int, every: int, last: int, *, always_last: bool = False) -> bool:
    """Whether something that happens every ``every`` steps (0: never), and at the end, happens before this step."""
    return (every > 0 and step % every == 0) or (step == last and (every > 0 or always_last))


MEASURED = ("batch", "tokens", "train_loss", "grad_norm", "lr", "tokens_per_second", "mfu", "seconds", "data_digest")


def measurements(session: Session, launched: Launched, result: StepResult) -> dict:
    """The columns of a training step, named by ``MEASURED``, in its order."""
    data = session.config.data
    tokens_per_step = data.global_batch * data.sequence_length
    rate = tokens_per_step / session.lap(launched.began)
    values = (
        launched.position,
        (launched.position + 1) * tokens_per_step,  # a rollback takes steps back, not tokens
        result.loss,
        result.grad_norm,
        session.learning_rate(launched.step),
        rate,
        throughput.mfu(rate, session.flops_per_token, session.place.world_size, session.peak),
        session.seconds(),
        launched.data_digest,
    )
    return dict(zip(MEASURED, values, strict=True))


def recover(session: Session, step: int, position: int, result: StepResult, row: dict) -> int:
    """Follow the config's policy for a loss or gradient that is not finite: note it in ``row``, say it; the step to go on with."""
    action, following = session.recover(step, result)
    row["nonfinite"] = action
    what = {
        "overflow": f"float16 overflow, {session.guard.overflow_steps} so far; update skipped",
        "skip": "not finite; update skipped",
        "continue": "not finite; going on as if it were",
        "rollback": f"not finite; back to step {following}, the data goes on behind this batch",
        "stop": f"not finite; stopped. {session.checkpoints.said()}",
    }[action]
    session.say(f"step {step}, batch {position}: loss {result.loss}, gradient norm {result.grad_norm}: {what}")
    return following


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
    shown = ("train_loss", "val_loss", "grad_norm", "lr", "w_q_norm_max", "max_logit_max", "tokens_per_second", "mfu")
    parts = [f"{name} {row[name]:.4g}" for name in shown if row.get(name) is not None]
    return f"step {step}  " + "  ".join(parts)


@exit_on_user_error
def main() -> None:
    train(configuration.load(sys.argv[1:]))


if __name__ == "__main__":
    main()
