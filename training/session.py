"""Everything a run needs, built from its config in one place, and its state as checkpoints know it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import shutil
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

import attention
from attention.plan import LayerPlan, describe
from data.batches import open_batches
from errors import UserError, invalid
from model import GPT, initialise
from training import distributed, huggingface, record, speed, throughput
from training.alarm import Alarm, Watch
from training.checkpoint import Checkpoints, Loaded, rng_state, set_rng_state
from training.distributed import Distributed
from training.evaluate import evaluate
from training.intervention import Interventions, parse_switch
from training.metrics import Metrics, Reached, import_wandb, start_wandb
from training.nonfinite import Action, NonFiniteGuard
from training.optim import build_optimizer, learning_rate, set_learning_rate
from training.qk_clip import clip_qk, forget_logits
from training.retired import upgraded
from training.step import StepResult, rounding_seed, throwaway_backward, train_step
from training.telemetry import Telemetry, probe_batch, summary_columns

if TYPE_CHECKING:
    from config import TrainConfig


class Session:
    """A run that is ready to train. Raises ``UserError`` when anything asked for is missing, foreign or impossible."""

    def __init__(self, config: TrainConfig, config_json: dict[str, Any], place: Distributed):
        self.config, self.config_json, self.place, self.device = config, config_json, place, place.device
        self.telemetry: Telemetry | None = None  # on the main process, where probes are asked for
        self.folder = Path(config.run.folder) / config.run.name
        self.plans = config.attention.resolve(config.model.n_layer, config.model.n_head)
        self._check_plans(self.plans)
        if config.wandb.mode != "disabled":
            import_wandb(config.wandb)  # its absence must show before anything is written
        self.checkpoints = Checkpoints(self.folder / "checkpoints", config.checkpoint)
        with contextlib.ExitStack() as undo:
            self._held = undo.enter_context(contextlib.ExitStack())  # the lock on the run's folder, until the end
            loaded = self._checkpoint_to_resume(undo)
            self.resumed = None if loaded is None else Reached(loaded.step, loaded.position)
            self.interventions = Interventions(
                self.plans,
                [parse_switch(text) for text in config.alarm.switches],
                self._check_plans,
                self.folder if place.is_main else None,
                resumed=self.resumed,
                known=() if loaded is None else loaded.extra.get("switches", ()),
            )
            if config.alarm.response == "switch":
                self._check_plans(tuple(config.alarm.switch(0, 0).applied(plan) for plan in self.interventions.plans))
            self._build(loaded, undo)
            undo.pop_all()
        self.started = time.monotonic()
        self._lapped = 0.0

    def _check_plans(self, plans: tuple[LayerPlan, ...]) -> None:
        model, dtype = self.config.model, self.config.precision.torch_dtype
        attention.check(
            plans, device=self.device, dtype=dtype, head_dim=model.head_width, softcap=model.attention_softcap
        )

    def _build(self, loaded: Loaded | None, undo: contextlib.ExitStack) -> None:
        """Everything that may write. What is new is taken back by ``undo``, should the run fail to start after all."""
        config, place = self.config, self.place
        resume_at = loaded.position if loaded is not None else 0 if config.run.resume else None
        new_recording = place.is_main and config.data.record and not Path(config.data.record).exists()
        self.batches = open_batches(config.data, place.rank, place.world_size, config.run.name, resume_at)
        if new_recording:
            undo.callback(shutil.rmtree, config.data.record)
        self._check_data(loaded)
        # Nothing draws from torch's own generators; checkpoints hold them, and those of equal runs are to be equal.
        torch.manual_seed(config.run.seed)
        self.raw_model = GPT(config.model, self.interventions.plans, speed.loss_chunk(config.speed, self.device))
        if loaded is None and config.run.init_from:
            huggingface.load_weights(self.raw_model, Path(config.run.init_from))
        elif loaded is None:
            initialise(self.raw_model, config.run.seed)
        self.raw_model.to(self.device)
        self.optimizer = build_optimizer(self.raw_model, config.optim, self.device)
        self.scaler = config.precision.scaler(self.device)
        self.guard = NonFiniteGuard(config.nonfinite)
        self.start_step, self.seconds_before = 0, 0.0
        if loaded is not None:
            self._restore(loaded)
            self.guard.load_state(loaded.extra["guard"])
            self.start_step, self.seconds_before = loaded.step, loaded.extra["seconds"]
        self.model, self.evaluated = speed.wrapped(self.raw_model, config.precision.compile, place)
        self._settle()
        self.flops_per_token = self.raw_model.flops_per_token(config.data.sequence_length)
        self.peak = throughput.peak_flops(self.device, config.run.peak_tflops)
        self._open_record(loaded, undo)
        self._open_telemetry(loaded)

    def _checkpoint_to_resume(self, undo: contextlib.ExitStack) -> Loaded | None:
        run = self.config.run
        if not run.resume:
            if self.folder.exists():
                raise record.taken(self.folder)
            return None
        self._held.enter_context(record.lock_everywhere(self.folder, self.place.is_main, undo))
        record.check_logs(self.folder)
        loaded = self.checkpoints.load_newest()
        if loaded is None:
            record.check_restart(self.folder, self.checkpoints.folder)
            return None
        defaults = json.loads(json.dumps(dataclasses.asdict(type(self.config)())))
        record.check_settings(upgraded(loaded.config_json, loaded.path), self.config_json, defaults, loaded.path)
        if run.steps < loaded.step:
            raise invalid("run.steps", run.steps, f"at least {loaded.step}, where the checkpoint {loaded.path} stands")
        if len(loaded.rng) != self.place.world_size:
            raise UserError(f"run.resume: {loaded.path} is of {len(loaded.rng)} processes, not {self.place.world_size}")
        return loaded

    def _check_data(self, loaded: Loaded | None) -> None:
        config, batches = self.config, self.batches
        if batches.vocabulary_size > config.model.vocab_size:
            raise invalid("model.vocab_size", config.model.vocab_size, f"at least the data's {batches.vocabulary_size}")
        if self.place.is_main and config.telemetry.every:
            probe_batch(batches, config.telemetry.sequences)
        if loaded is not None and batches.digest() != loaded.extra["data_digest"]:
            source = "replay" if config.data.replay else "dataset"
            expected = f"the data that {loaded.path} was trained on: this gives other batches"
            raise invalid(f"data.{source}", getattr(config.data, source), expected)
        # After a rollback a step's row is not the step's number.
        ahead = 0 if loaded is None else loaded.position - loaded.step
        if batches.steps_available is not None and batches.steps_available - ahead < config.run.steps:
            expected = (
                f"at most {batches.steps_available - ahead}: {config.data.replay} ends there; or record a longer one"
            )
            raise invalid("run.steps", config.run.steps, expected)

    def _settle(self) -> None:
        shape = (self.config.data.micro_batch, self.config.data.sequence_length)
        distributed.settle(self.model, lambda: throwaway_backward(self.model, shape, self.device, self._autocast))
        forget_logits(self.raw_model)

    def _autocast(self) -> AbstractContextManager[object]:
        return self.config.precision.autocast(self.device)

    def _open_record(self, loaded: Loaded | None, undo: contextlib.ExitStack) -> None:
        name = self.config.attention.label()
        made_with = record.environment(self.device, self.place.world_size)
        content = {"config": self.config_json, **made_with}
        content |= {"batches": self.batches.identity, "attention_name": name, "attention": describe(self.plans)}
        if self.place.is_main:
            if not self.config.run.resume:
                record.make_folder(self.folder)
                self._held.enter_context(record.lock(self.folder))
                undo.callback(shutil.rmtree, self.folder)
            content["sessions"] = record.sessions(self.folder, 0 if loaded is None else loaded.step, made_with)
        # What may fail to start comes before anything that is there is changed.
        wandb_run = start_wandb(
            self.folder,
            self.config.wandb,
            config_json=content,
            recording=self.batches.recording_name,
            attention_name=name,
            resumed=loaded is not None,
            enabled=self.place.is_main,
        )
        if self.place.is_main:
            if self.config.run.resume and loaded is None:
                self.say(f"{self.folder}: no checkpoint yet; starting from step 0")
                record.clear(self.folder)
            elif loaded is not None and loaded.step == self.config.run.steps:
                self.say(f"{self.folder}: finished, at step {loaded.step} of as many; --run.steps goes on from there")
            record.write_record(self.folder, content)
        self.interventions.open()
        self.metrics = Metrics(self.folder, wandb_run, resumed=self.resumed, enabled=self.place.is_main)

    def _open_telemetry(self, loaded: Loaded | None) -> None:
        config = self.config
        self.watch = Watch(config.alarm, config.optim.warmup_steps)
        if not self.place.is_main or not config.telemetry.every:
            return
        self.telemetry = Telemetry(
            config.telemetry,
            self.raw_model,
            self.batches,
            self.folder,
            device=self.device,
            precision=config.precision,
            rounding_seed=functools.partial(rounding_seed, config.run.seed, micro_batch=0),
            rate=functools.partial(learning_rate, config=config.optim),
            resumed=self.resumed,
            # A switch that is made only now makes it another probe.
            probed=loaded is not None
            and loaded.extra.get("probed", False)
            and not self.interventions.changes(loaded.step),
        )
        for earlier in self.telemetry.earlier():
            self.watch.update(earlier)

    def intervene(self, step: int) -> None:
        """Make the attention what it is to be in training step ``step``."""
        changes = self.interventions.advance(step, self.batches.position)
        if changes and self.config.precision.compile:
            # Another plan is another graph, with and without gradients; past its limit dynamo would go on uncompiled.
            torch._dynamo.config.recompile_limit += 2
        self.raw_model.set_plans(self.interventions.plans)
        for sentence in changes:
            self.say(sentence)

    def train_step(self, step: int) -> StepResult:
        """Draw the next batch and train on it; QK-clip follows the update where it is on."""
        config, position = self.config, self.batches.position
        micro_batches = self.batches.next()
        order = range(self.place.rank, self.place.world_size * len(micro_batches), self.place.world_size)
        set_learning_rate(self.optimizer, self.learning_rate(step))
        result = train_step(
            self.model,
            self.optimizer,
            self.scaler,
            micro_batches,
            [rounding_seed(config.run.seed, position, index) for index in order],
            device=self.device,
            autocast=self._autocast,
            grad_clip=config.optim.grad_clip,
            apply_nonfinite=config.nonfinite.policy == "continue",
        )
        if config.model.qk_clip_tau:
            clip_qk(self.raw_model) if result.applied else forget_logits(self.raw_model)
        return result

    def learning_rate(self, step: int) -> float:
        """The schedule's rate, lowered for a while after a rollback."""
        return learning_rate(step, self.config.optim) * self.guard.lr_factor(step)

    def evaluate(self) -> float:
        """Validation loss on the fixed batches, nats a token."""
        seed = torch.tensor(rounding_seed(self.config.run.seed, 0, 0), device=self.device)
        return evaluate(self.evaluated, self.batches, self.device, self._autocast(), seed)

    def probe(self, step: int) -> dict[str, float | str]:
        """Telemetry of the weights as they are, by the main process (the others hold the same weights); what an alarm asks for is done.

        The columns for ``metrics.jsonl``; where there was an alarm, ``alarm`` is the response, on all processes unless it is log.
        """
        columns: dict[str, float | str] = {}
        alarms: list[Alarm] = []
        if self.telemetry is not None:
            measured = self.telemetry.probe(step, self.batches.position)
            columns |= summary_columns(measured)
            alarms = self.watch.update(measured)
        for alarm in alarms:
            self.say(alarm.sentence())
            self.interventions.record(step, self.batches.position, **alarm.record())
        return columns | self._respond(step, {alarm.layer for alarm in alarms})

    def _respond(self, step: int, accused: set[int]) -> dict[str, str]:
        """Do what ``alarm.response`` says. All processes take part unless it is log."""
        response = self.config.alarm.response
        if response != "log":
            flags_L = torch.zeros(self.config.model.n_layer, device=self.device)
            flags_L[sorted(accused)] = 1.0
            accused = set(distributed.all_reduce_max(flags_L).nonzero().flatten().tolist())
        if not accused:
            return {}
        if response == "switch":
            for layer in sorted(accused):
                self.interventions.add(self.config.alarm.switch(step + 1, layer))
        elif response != "log":
            self.save(step, probed=True)
        return {"alarm": response}

    def seconds(self) -> float:
        """Wall time of the run so far, earlier sessions of a resumed run included."""
        return self.seconds_before + time.monotonic() - self.started

    def lap(self, began: float) -> float:
        """Seconds from ``began`` (a ``perf_counter``), or from the last call where that was later, until now."""
        now = time.perf_counter()
        elapsed, self._lapped = now - max(began, self._lapped), now
        return elapsed

    def save(self, step: int, *, probed: bool = False) -> None:
        """Write the checkpoint of ``step`` (rank 0), the recording flushed before it; ``probed``: behind the probe of that step."""
        if self.telemetry is not None:
            self.telemetry.forget()
        states = distributed.gather_bytes(rng_state(self.device))
        failure = None
        try:
            self.batches.flush()
            if self.place.is_main:
                self.checkpoints.save(
                    step,
                    model_state=self.raw_model.state_dict(),
                    optimizer_state=self.optimizer.state_dict(),
                    scaler_state=self.scaler.state_dict(),
                    rng=states,
                    position=self.batches.position,
                    config_json=self.config_json,
                    extra={
                        "guard": self.guard.state(),
                        "seconds": self.seconds(),
                        "data_digest": self.batches.digest(),
                        "switches": self.interventions.state(step),
                        "probed": probed,
                    },
                )
        except UserError as error:
            failure = error
        # All processes leave together: one that waits for a dead rank 0 would hang.
        if distributed.any_rank(failure is not None):
            raise failure or UserError(f"checkpoint of step {step}: rank 0 could not write it")

    def recover(self, step: int, result: StepResult) -> tuple[Action, int]:
        """Do what the policy says about a ``step`` that was not finite; what was done, and the step to go on with."""
        action = self.guard.decide(result.overflow)
        if action == "rollback":
            restored = self._roll_back()
            return ("stop", step) if restored is None else (action, restored)
        return action, (step if action == "stop" else step + 1)

    def _roll_back(self) -> int | None:
        """Restore the newest checkpoint that is intact and finite, keeping the place in the data; its step, or None."""
        try:
            loaded = self.checkpoints.load_newest()
            # Weights that an update broke are saved before the next loss shows it.
            while loaded is not None and not all(bool(t.isfinite().all()) for t in loaded.model_state.values()):
                loaded = self.checkpoints.load_newest(before=loaded.step)
        except UserError as damage:
            self.say(str(damage))
            return None
        if loaded is None:
            self.say("no checkpoint to roll back to")
            return None
        self._restore(loaded)
        self.guard.rolled_back(loaded.step)
        return loaded.step

    def _restore(self, loaded: Loaded) -> None:
        if self.telemetry is not None:
            self.telemetry.forget()
        self.raw_model.load_state_dict(loaded.model_state)
        self.optimizer.load_state_dict(loaded.optimizer_state)
        self.scaler.load_state_dict(loaded.scaler_state)
        set_rng_state(loaded.rng[self.place.rank], self.device)

    def say(self, text: str) -> None:
        """Print on the main process, above a progress bar if there is one."""
        if self.place.is_main:
            tqdm.write(text)

    def close(self, *, finished: bool) -> None:
        """Close the files; a recording counts as complete only when the run ended by itself."""
        try:
            if finished:
                self.batches.close()
            else:
                # What stopped the run is the news, not that a full disk takes no flush either: the rows so far stay valid.
                with contextlib.suppress(UserError):
                    self.batches.flush()
        finally:
            self.metrics.close(exit_code=0 if finished else 1)
            if self.telemetry is not None:
                self.telemetry.close()
            self._held.close()
