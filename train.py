"""Train a GPT-2: read the config, build the run, loop.

    python train.py configs/debug.py --data.record replay_batches/t --run.name a
    torchrun --standalone --nproc_per_node=4 train.py configs/gpt2_paper.py --data.replay replay_batches/t

Every field of the config is an option; ``--help`` lists them.

Legend: B micro-batch, T sequence.
"""

import math
import sys
import time
import traceback
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NoReturn

from training.signals import EXIT_RESUME, PreemptionHandler, exit_while_importing

if __name__ == "__main__":
    exit_while_importing()

from errors import UserError, exit_on_user_error, trainer_packages

with trainer_packages():
    import torch
    from torch import Tensor
    from tqdm import tqdm

    import config as configuration
    from attention.plan import outline
    from attention.rounding import FORMAT_OF
    from config import TrainConfig
    from training import distributed, outcome, throughput
    from training.distributed import DistContext
    from training.evaluate import evaluate
    from training.intervention import update_alarm
    from training.nonfinite import step_unless
    from training.optim import clip_gradients, learning_rate, set_learning_rate
    from training.precision import rounding_seed
    from training.qk_clip import clip_qk
    from training.run import Run, close, open_run, save
    from training.telemetry import summary_columns

READ_EVERY = {"cpu": 1, "cuda": 16}
"""Steps between two reads of metrics from the device, by type of device: a GPU then never waits for the host; a CPU has nothing to gain."""


@dataclass
class StepRecord:
    """A step that was launched. Its metrics may still be unread on the device."""

    step: int
    row: dict[str, Any]
    """Its line of metrics.jsonl so far."""
    began: float
    """``time.perf_counter`` before the step."""
    unread: Tensor
    """On the device: mean loss in nats a token, gradient norm before clipping, and 1.0 where float16's loss scale overflowed."""


def train(config: TrainConfig, *, leaving: bool = False) -> None:
    """Run ``config`` to its last step. Raises ``UserError`` for what the user can correct. ``leaving``: the process ends with it."""
    distributed.set_deterministic(config.precision.deterministic)
    distributed.set_tf32(False)
    step = None
    with PreemptionHandler(starting=True, leaving=leaving) as preemption:
        try:
            step = outcome.forget(config.run)
            dist = distributed.start(config.run.device, config.run.timeout)
            build_and_loop(config, dist, preemption)
            distributed.barrier()
        except BaseException as error:
            if preemption.starting:
                outcome.write_of_start(config.run, error, step)
            distributed.exit_where_device_is_lost()
            # Its frames hold the model, and buffers that other processes reach must be gone before the process group.
            traceback.clear_frames(error.__traceback__)
            raise
        finally:
            distributed.stop()


def build_and_loop(config: TrainConfig, dist: DistContext, preemption: PreemptionHandler) -> None:
    """Build the run and train it. Its files are closed whatever happens; a recording is marked complete only at the end of the run."""
    run = open_run(config, dist)
    try:
        preemption.starting = False
        preemption.on_silence = lambda number: outcome.write_of_silence(
            run.folder, number, run.batches.position, run.checkpoints.how_to_resume()
        )
        announce(run)
        loop(run, preemption)
    except BaseException as error:
        preemption.speak()
        close(run, error)
        how = run.checkpoints.how_to_resume()
        if isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt(f"interrupted: {how}") from None
        error.add_note(how)  # the last line of a traceback, or of an error in one line
        raise
    preemption.speak()
    close(run)


def loop(run: Run, preemption: PreemptionHandler) -> None:
    """Train, measure and save, step by step. One extra pass measures and saves the final state. A preempted run saves and exits."""
    config, dist, network, last = run.config, run.dist, run.network, run.config.run.steps
    model, optimizer, scaler, device, sums = network.model, network.optimizer, network.scaler, dist.device, network.sums
    step = saved = run.start_step
    records: list[StepRecord] = []
    with tqdm(total=last, initial=step, unit="step", disable=not (dist.is_main and sys.stderr.isatty())) as bar:
        while True:
            row: dict[str, Any] = {}
            switch_attention(run, step)
            if due(step, config.evaluation.every, last):
                row["val_loss"] = validate(run)
            if due(step, config.checkpoint.every, last, always_last=True) and step > saved:
                save(run, step)
                saved = step
            # After the checkpoint, where a resumed run starts: it then probes as the uninterrupted one does.
            if due(step, config.telemetry.every, last):
                row |= probe(run, step)
            if step == last:
                break

            began = time.perf_counter()
            row |= {"batch": run.batches.position, "lr": learning_rate(step, config.optim)}
            micro_batches = run.batches.next()
            row["data_digest"] = run.batches.digest()
            set_learning_rate(optimizer, row["lr"])

            # Forward and backward. Nothing below waits for the device.
            optimizer.zero_grad(set_to_none=True)
            for index, (inputs_BT, targets_BT) in enumerate(micro_batches):
                seed = rounding_seed(config.run.seed, step, run.batches.number(index))
                seed_tensor = torch.full((), seed, dtype=torch.int64, device=device)  # a copy from the host would wait
                with config.precision.autocast(device):
                    loss = model(to_device(inputs_BT, device), to_device(targets_BT, device), seed_tensor)[1]
                    loss = loss / sums.micro_batches
                scaler.scale(loss).backward()
                sums.add(loss)
            loss = sums.total()  # over processes, too; so are the gradients

            # Clip.
            scaler.unscale_(optimizer)
            grad_norm = clip_gradients(model, config.optim.grad_clip)

            # Step, unless loss or gradient is not finite: the device decides that itself, as with a GradScaler.
            loss_scale = scaler.scale(torch.ones((), device=device)) if scaler.is_enabled() else None
            overflow, found_inf = run.found_inf(loss, grad_norm, loss_scale)
            step_unless(found_inf, optimizer)
            scaler.update()
            if config.model.qk_clip_tau:
                clip_qk(network.raw, found_inf)
            step += 1

            # Log. On a GPU the metrics of several steps are read together.
            records.append(StepRecord(step - 1, row, began, torch.stack([loss, grad_norm, overflow])))
            if must_read(run, step) or (preemption.requested and dist.world_size == 1):
                log(run, records, bar)
                records = []
                if step < last and distributed.any_rank(preemption.requested):
                    save_and_exit(run, step, already_saved=step == saved)
            bar.update(step - bar.n)
    run.metrics.log(step, **row)
    dist.print0(line(step, row))
    if skipped := run.guard.skips_in_a_row:
        dist.print0(f"warning: the last {skipped} update(s) were skipped: the weights may be broken")


def due(step: int, every: int, last: int, *, always_last: bool = False) -> bool:
    """Whether something due every ``every`` steps (0: never), and at the end, is due before this step."""
    return (every > 0 and step % every == 0) or (step == last and (every > 0 or always_last))


def must_read(run: Run, step: int) -> bool:
    """Whether to read the metrics of the steps before this one: enough of them are unread, or what comes now depends on them."""
    config, device = run.config, run.dist.device
    intervals = (READ_EVERY[device.type], config.evaluation.every, config.checkpoint.every, config.telemetry.every)
    return any(due(step, every, config.run.steps, always_last=True) for every in intervals)


def to_device(tokens_BT: Tensor, device: torch.device) -> Tensor:
    """Tokens on the device; the host does not wait for the copy."""
    return tokens_BT.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tokens_BT


def log(run: Run, records: list[StepRecord], bar: tqdm) -> None:
    """Read the metrics of these steps, which waits for the device, and log them. Follow the policy where they are not finite."""
    values = torch.stack([record.unread for record in records]).tolist()
    tokens = run.config.data.global_batch * run.config.data.sequence_length
    rate = len(records) * tokens / (time.perf_counter() - records[0].began)
    for record, (loss, grad_norm, overflow) in zip(records, values, strict=True):
        step, row, finite = record.step, record.row, math.isfinite(loss) and math.isfinite(grad_norm)
        special = row.keys() - {"batch", "lr", "data_digest"}
        row |= {
            "tokens": (step + 1) * tokens,
            "train_loss": loss,
            "grad_norm": grad_norm,
            "tokens_per_second": rate,
            "mfu": throughput.mfu(rate, run.network.flops_per_token, run.dist.world_size, run.peak_flops),
            "seconds": run.seconds(),
        }
        if finite:
            run.guard.finite()
        else:
            follow_policy(run, step, row, overflow=bool(overflow))
        if special or not finite or step % run.config.run.log_every == 0:
            run.metrics.log(step, **row)
            if bar.disable and finite:  # otherwise follow_policy() has printed it
                run.dist.print0(line(step, row))
        if row.get("nonfinite") == "stop":
            raise SystemExit(1)
    bar.set_postfix_str(f"loss {values[-1][0]:.4f}")


def follow_policy(run: Run, step: int, row: dict[str, Any], *, overflow: bool) -> None:
    """Write into the row what the policy does about a step that was not finite, and print it."""
    action = row["nonfinite"] = run.guard.decide(overflow)
    what = {
        "overflow": f"float16 overflow, {run.guard.overflow_steps} so far; update skipped",
        "skip": "not finite; update skipped",
        "stop": f"not finite; stopped: {run.checkpoints.how_to_resume()}; the same steps may fail again: --alarm.switches, "
        "or a new run from an older checkpoint (--run.init-from), changes attention",
    }[action]
    where = f"step {step}, batch {row['batch']}"
    run.dist.print0(f"{where}: loss {row['train_loss']}, gradient norm {row['grad_norm']}: {what}")


def switch_attention(run: Run, step: int) -> None:
    changes = run.interventions.advance(step)
    if changes and run.config.precision.compile:
        # Each plan is a graph, with and without gradients; past its limit dynamo would go on uncompiled.
        torch._dynamo.config.recompile_limit += 2
    run.network.raw.set_plans(run.interventions.plans)
    for sentence in changes:
        run.dist.print0(sentence)


def validate(run: Run) -> float:
    """Validation loss on the fixed batches, nats a token."""
    device = run.dist.device
    seed = torch.tensor(rounding_seed(run.config.run.seed, 0, 0), device=device)
    with generators_put_back(device):
        return evaluate(run.network.model, run.batches, device, run.config.precision.autocast(device), seed)


def probe(run: Run, step: int) -> dict[str, float | int]:
    """Measure the weights as they are, on the main process (the others hold the same weights): the columns for ``metrics.jsonl``."""
    if run.telemetry is None:
        return {}
    with generators_put_back(run.dist.device):
        measured = run.telemetry.probe(step, run.batches.position)
    for named in update_alarm(run.alarm, measured):
        run.dist.print0(f"ALARM: {named}")
    return summary_columns(measured)


def generators_put_back(device: torch.device) -> AbstractContextManager[None]:
    """Around what only measures: an external kernel may draw from torch's generators, and training goes on as if it had not."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def save_and_exit(run: Run, step: int, *, already_saved: bool) -> NoReturn:
    """Save, and exit with the code that says: start me again. Every rank must call it."""
    if not already_saved:
        save(run, step)
    run.dist.print0(f"step {step}: asked to leave; saved, and --run.resume yes goes on from here")
    raise SystemExit(EXIT_RESUME)


def announce(run: Run) -> None:
    config, dist, network = run.config, run.dist, run.network
    attention = config.attention.label() + run.interventions.moved()
    dist.print0(
        f"{run.folder}: attention {attention}, {network.raw.num_parameters() / 1e6:.1f}M parameters, "
        f"{dist.world_size} process(es) on {dist.device.type}, {run.batches.accumulation()} micro-step(s) of "
        f"{config.data.micro_batch} x {config.data.sequence_length} tokens each, from step {run.start_step}"
    )
    plans = outline(run.interventions.plans, FORMAT_OF[config.precision.torch_dtype])
    dist.print0("\n".join(["sites that are not as in base fp32:", *plans]))
    if run.peak_flops is not None or dist.device.type == "cuda":
        dist.print0(throughput.explain(network.flops_per_token, run.peak_flops))


def line(step: int, row: dict[str, Any]) -> str:
    shown = ("train_loss", "val_loss", "grad_norm", "lr", "w_q_norm_max", "max_logit_max", "tokens_per_second", "mfu")
    layers = {name: row.get(f"{name.removesuffix('_max')}_layer") for name in shown}
    where = {name: "" if layer is None else f" in layer {layer}" for name, layer in layers.items()}
    parts = [f"{name} {row[name]:.4g}{where[name]}" for name in shown if row.get(name) is not None]
    return f"step {step}  " + "  ".join(parts)


@exit_on_user_error
def main() -> None:
    try:
        train(configuration.load(sys.argv[1:]), leaving=True)
    except UserError:
        distributed.stop_launcher()
        raise


if __name__ == "__main__":
    main()
