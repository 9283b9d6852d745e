"""What a run does around a training step: switch attention, validate, probe, take the step, follow the nonfinite policy."""

from __future__ import annotations

import torch

from training import alarm
from training.evaluate import evaluate
from training.optim import learning_rate, set_learning_rate
from training.qk_clip import clip_qk
from training.run import Run
from training.step import StepValues, Taken, rounding_seed, train_step
from training.telemetry import summary_columns


def switch_attention(run: Run, step: int) -> None:
    """Make the attention what it is to be in training step ``step``."""
    changes = run.interventions.advance(step, run.batches.position)
    if changes and run.config.precision.compile:
        # Another plan is another graph, with and without gradients; past its limit dynamo would go on uncompiled.
        torch._dynamo.config.recompile_limit += 2
    run.network.raw.set_plans(run.interventions.plans)
    for sentence in changes:
        run.place.say(sentence)


def validate(run: Run) -> float:
    """Validation loss on the fixed batches, nats a token."""
    device = run.place.device
    seed = torch.tensor(rounding_seed(run.config.run.seed, 0, 0), device=device)
    return evaluate(run.network.evaluated, run.batches, device, run.config.precision.autocast(device), seed)


def probe(run: Run, step: int) -> dict[str, float | int]:
    """Telemetry of the weights as they are, by the main process (the others hold the same weights): the columns for ``metrics.jsonl``."""
    if run.telemetry is None:
        return {}
    measured = run.telemetry.probe(step, run.batches.position)
    for named in alarm.update(run.alarm, measured):
        run.place.say(f"ALARM: {named}")
    return summary_columns(measured)


def take_step(run: Run, step: int) -> StepValues:
    """Draw the next batch and train on it; QK-clip follows the update where it is on."""
    config, place, network, position = run.config, run.place, run.network, run.batches.position
    micro_batches = run.batches.next()
    order = range(place.rank, place.world_size * len(micro_batches), place.world_size)
    set_learning_rate(network.optimizer, learning_rate(step, config.optim))
    values = train_step(
        network.model,
        network.optimizer,
        network.scaler,
        micro_batches,
        [rounding_seed(config.run.seed, position, index) for index in order],
        device=place.device,
        autocast=lambda: config.precision.autocast(place.device),
        grad_clip=config.optim.grad_clip,
        withholding=run.withholding,
    )
    if config.model.qk_clip_tau:
        clip_qk(network.raw, values.withheld)
    return values


def follow_policy(run: Run, taken: Taken) -> None:
    """What the config's policy says about a step that was not finite, into its row and to the terminal."""
    action = taken.row["nonfinite"] = run.guard.decide(taken.overflow)
    what = {
        "overflow": f"float16 overflow, {run.guard.overflow_steps} so far; update skipped",
        "skip": "not finite; update skipped",
        "continue": "not finite; going on as if it were",
        "stop": f"not finite; stopped. {run.checkpoints.said()}",
    }[action]
    where = f"step {taken.step}, batch {taken.row['batch']}"
    run.place.say(f"{where}: loss {taken.loss}, gradient norm {taken.grad_norm}: {what}")
