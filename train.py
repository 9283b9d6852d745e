"""Train a GPT-2: read the config, build the run, loop.

    python train.py configs/debug.py --data.record replay_batches/t --run.name a
    torchrun --standalone --nproc_per_node=4 train.py configs/gpt2_paper.py --data.replay replay_batches/t

Every field of the config is an option; ``--help`` lists them.
"""

from __future__ import annotations

import sys
import time
import traceback
from typing import Any, NoReturn

from errors import exit_on_user_error, trainer_packages

with trainer_packages():
    from tqdm import tqdm

    import config as configuration
    from config import TrainConfig
    from training import distributed, throughput
    from training.distributed import Distributed
    from training.optim import learning_rate
    from training.phases import follow_policy, probe, switch_attention, take_step, validate
    from training.run import Run, close, open_run, save
    from training.signals import EXIT_GO_ON, Leaving
    from training.step import Taken

READ_EVERY = {"cpu": 1, "cuda": 16}
"""Steps whose values are read together, by type of device: a GPU works on while nobody asks; a CPU is done when the step is."""


def train(config: TrainConfig) -> None:
    """Run ``config`` to its last step. Raises ``UserError`` for what the user can mend."""
    distributed.set_deterministic(config.precision.deterministic)
    distributed.set_tf32(config.precision.tf32)
    place = distributed.start(config.run.device)
    try:
        see_through(config, place)
        distributed.barrier()
    except BaseException as error:
        # Its frames hold the model, and DDP must be gone before the group that it talks through.
        traceback.clear_frames(error.__traceback__)
        raise
    finally:
        distributed.stop()


def see_through(config: TrainConfig, place: Distributed) -> None:
    """Build the run and train it; its files are closed whatever happens, a recording as complete only at the end."""
    run = open_run(config, place)
    try:
        announce(run)
        with Leaving() as leaving:
            loop(run, leaving)
    except BaseException:
        close(run, finished=False)
        raise
    close(run, finished=True)


def loop(run: Run, leaving: Leaving) -> None:
    """Train, measure and save, step by step; one extra pass measures and saves the end. Asked to leave, it saves and exits."""
    config, last = run.config, run.config.run.steps
    step = saved = run.start_step
    with tqdm(total=last, initial=step, unit="step", disable=not (run.place.is_main and sys.stderr.isatty())) as bar:
        while True:
            row: dict[str, Any] = {}
            switch_attention(run, step)
            if due(step, config.evaluation.every, last):
                row["val_loss"] = validate(run)
            if due(step, config.checkpoint.every, last, always_last=True) and step > saved:
                save(run, step)
                saved = step
            # Behind the checkpoint, where a resumed run comes in: it probes as the uninterrupted one does.
            if due(step, config.telemetry.every, last):
                row |= probe(run, step)
            if step == last:
                break
            row |= {"batch": run.batches.position, "lr": learning_rate(step, config.optim)}
            taken = Taken(step, row, time.perf_counter())
            run.pending.add(taken, take_step(run, step))  # the device works on it; nobody waits
            taken.row["data_digest"] = run.batches.digest()
            step += 1
            if must_know(run, step) or (leaving.asked and run.place.world_size == 1):
                report(run, bar)
                if step < last and distributed.any_rank(bool(leaving.asked)):
                    leave(run, step, step > saved)
            bar.update(step - bar.n)
    run.metrics.log(step, **row)
    run.place.say(line(step, row))


def due(step: int, every: int, last: int, *, always_last: bool = False) -> bool:
    """Whether something that happens every ``every`` steps (0: never), and at the end, happens before this step."""
    return (every > 0 and step % every == 0) or (step == last and (every > 0 or always_last))


def must_know(run: Run, step: int) -> bool:
    """Whether what the steps before this one gave is to be read: many of them wait, or what comes now depends on it."""
    config = run.config
    often = (
        READ_EVERY[run.place.device.type],
        config.evaluation.every,
        config.checkpoint.every,
        config.telemetry.every,
    )
    return any(due(step, one, config.run.steps, always_last=True) for one in often)


def report(run: Run, bar: tqdm) -> None:
    """Read and log what the steps since the last time gave, and follow the policy where it is not finite."""
    steps, tokens = run.pending.read(), run.config.data.global_batch * run.config.data.sequence_length
    rate = len(steps) * tokens / (time.perf_counter() - steps[0].began)
    for taken in steps:
        measured = {
            "tokens": (taken.row["batch"] + 1) * tokens,
            "train_loss": taken.loss,
            "grad_norm": taken.grad_norm,
            "tokens_per_second": rate,
            "mfu": throughput.mfu(rate, run.network.flops_per_token, run.place.world_size, run.peak_flops),
            "seconds": run.seconds(),
        }
        special = taken.row.keys() - {"batch", "lr", "data_digest"}
        taken.row |= measured
        if taken.finite():
            run.guard.finite()
        else:
            follow_policy(run, taken)
        if special or not taken.finite() or taken.step % run.config.run.log_every == 0:
            run.metrics.log(taken.step, **taken.row)
            if bar.disable and taken.finite():  # follow_policy() has said the rest
                run.place.say(line(taken.step, taken.row))
        if taken.row.get("nonfinite") == "stop":
            raise SystemExit(1)
    bar.set_postfix_str(f"loss {steps[-1].loss:.4f}")


def leave(run: Run, step: int, unsaved: bool) -> NoReturn:
    """Save, if that is still to be done, and exit with the code that says: start me again. Every rank must call it."""
    if unsaved:
        switch_attention(run, step)  # what the checkpoint says is done is then recorded, too
        save(run, step)
    run.place.say(f"step {step}: asked to leave; saved, and --run.resume yes goes on from here")
    raise SystemExit(EXIT_GO_ON)


def announce(run: Run) -> None:
    """Say once what runs."""
    config, place, network = run.config, run.place, run.network
    attention = config.attention.label() + run.interventions.moved()
    place.say(
        f"{run.folder}: attention {attention}, {network.raw.num_parameters() / 1e6:.1f}M parameters, "
        f"{place.world_size} process(es) on {place.device.type}, {run.batches.accumulation()} micro-step(s) of "
        f"{config.data.micro_batch} x {config.data.sequence_length} tokens each, from step {run.start_step}"
    )
    if run.peak_flops is not None or place.device.type == "cuda":
        place.say(throughput.explain(network.flops_per_token, run.peak_flops))


def line(step: int, row: dict[str, Any]) -> str:
    """One line for a terminal that is not interactive."""
    shown = ("train_loss", "val_loss", "grad_norm", "lr", "w_q_norm_max", "max_logit_max", "tokens_per_second", "mfu")
    parts = [f"{name} {row[name]:.4g}" for name in shown if row.get(name) is not None]
    return f"step {step}  " + "  ".join(parts)


@exit_on_user_error
def main() -> None:
    train(configuration.load(sys.argv[1:]))


if __name__ == "__main__":
    main()
