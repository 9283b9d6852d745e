"""Everything a run needs, built from its config in one place, and its state as checkpoints know it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from attention import registry
from data.batches import open_batches
from errors import UserError, invalid
from model import GPT, initialise
from training import distributed, huggingface, record, throughput
from training.checkpoint import Checkpoints, Loaded, rng_state, set_rng_state
from training.distributed import Distributed
from training.evaluate import evaluate
from training.metrics import Metrics, import_wandb
from training.nonfinite import NonFiniteGuard
from training.optim import build_optimizer, learning_rate, set_learning_rate
from training.qk_clip import clip_qk, forget_logits
from training.step import StepResult, rounding_seed, throwaway_backward, train_step
from training.telemetry import probe

if TYPE_CHECKING:
    from config import TrainConfig

# A resumed run may differ from its checkpoint in these: they change when things are written, not what is computed.
_FREE_ON_RESUME = (
    "run.resume",
    "run.steps",
    "run.device",
    "run.peak_tflops",
    "run.folder",
    "checkpoint",
    "wandb",
    "data.verify",
)


class Session:
    """A run that is ready to train. Raises ``UserError`` when anything asked for is missing, foreign or impossible."""

    def __init__(self, config: TrainConfig, config_json: dict[str, Any], place: Distributed):
        self.config, self.config_json, self.place, self.device = config, config_json, place, place.device
        self.folder = Path(config.run.folder) / config.run.name
        plans = config.attention.resolve(config.model.n_layer, config.model.n_head)
        registry.check(
            plans,
            device=self.device,
            dtype=config.precision.torch_dtype,
            head_dim=config.model.head_width,
            softcap=config.model.attention_softcap,
        )
        if config.wandb.mode != "disabled":
            import_wandb(config.wandb)  # its absence must show before anything is written
        self.checkpoints = Checkpoints(self.folder / "checkpoints", config.checkpoint)
        loaded = self._checkpoint_to_resume()
        self.batches = open_batches(
            config.data, place.rank, place.world_size, config.run.name, None if loaded is None else loaded.position
        )
        self._check_data()
        self.raw_model = GPT(config.model, plans)
        self._fill_weights()
        self.raw_model.to(self.device)
        self.optimizer = build_optimizer(self.raw_model, config.optim, self.device)
        self.scaler = config.precision.scaler(self.device)
        self.guard = NonFiniteGuard(config.nonfinite)
        self.start_step, self.seconds_before = 0, 0.0
        if loaded is not None:
            self._restore(loaded)
            self.start_step, self.seconds_before = loaded.step, loaded.extra["seconds"]
        self.model = distributed.wrap(
            torch.compile(self.raw_model) if config.precision.compile else self.raw_model,  # type: ignore[arg-type]
            place,
        )
        self._settle()
        self.started = time.monotonic()
        self.flops_per_token = self.raw_model.flops_per_token(config.data.sequence_length)
        self.peak = throughput.peak_flops(self.device, config.run.peak_tflops)
        self._open_record(None if loaded is None else loaded.step)

    def _checkpoint_to_resume(self) -> Loaded | None:
        run = self.config.run
        if not run.resume:
            if self.folder.exists():
                raise UserError(
                    f"run.name = {run.name!r}: {self.folder} exists; choose another name, or --run.resume to go on"
                )
            return None
        loaded = self.checkpoints.load_newest()
        if loaded is None:
            raise invalid(
                "run.resume", True, f"a checkpoint in {self.checkpoints.folder}, and there is none: start it anew"
            )
        for name, saved, now in _differences(loaded.config_json, self.config_json):
            if not name.startswith(_FREE_ON_RESUME):
                raise invalid(name, now, f"{saved!r}, as in the checkpoint {loaded.path}")
        if len(loaded.rng) != self.place.world_size:
            raise UserError(f"run.resume: {loaded.path} is of {len(loaded.rng)} processes, not {self.place.world_size}")
        return loaded

    def _check_data(self) -> None:
        if self.batches.vocabulary_size > self.config.model.vocab_size:
            raise invalid(
                "model.vocab_size", self.config.model.vocab_size, f"at least the data's {self.batches.vocabulary_size}"
            )
        available = self.batches.steps_available
        if available is not None and available < self.config.run.steps:
            name = self.config.data.replay
            raise invalid(
                "run.steps", self.config.run.steps, f"at most {available}: {name} ends there; or record a longer one"
            )

    def _fill_weights(self) -> None:
        if self.config.run.init_from:
            huggingface.load_weights(self.raw_model, Path(self.config.run.init_from))
        else:
            initialise(self.raw_model, self.config.run.seed)

    def _settle(self) -> None:
        shape = (self.config.data.micro_batch, self.config.data.sequence_length)
        distributed.settle(self.model, lambda: throwaway_backward(self.model, shape, self.device, self._autocast))
        forget_logits(self.raw_model)

    def _autocast(self) -> AbstractContextManager[object]:
        return self.config.precision.autocast(self.device)

    def _open_record(self, resume_step: int | None) -> None:
        name = self.config.attention.label()
        content = {"config": self.config_json, **record.environment(self.device, self.place.world_size)}
        content |= {"batches": self.batches.identity, "attention_name": name}
        if self.place.is_main:
            record.write_record(self.folder, content)
        self.metrics = Metrics(
            self.folder,
            self.config.wandb,
            config_json=content,
            recording=self.batches.recording_name,
            attention_name=name,
            resume_step=resume_step,
            enabled=self.place.is_main,
        )

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
        return evaluate(self.model, self.batches, self.device, self._autocast(), seed)

    def probe(self) -> dict[str, float]:
        """Telemetry of the weights as they are; the main process only, the others hold the same weights."""
        return probe(self.raw_model) if self.place.is_main else {}

    def seconds(self) -> float:
        """Wall time of the run so far, earlier sessions of a resumed run included."""
        return self.seconds_before + time.monotonic() - self.started

    def save(self, step: int) -> None:
        """Write the checkpoint of ``step`` (rank 0), the recording flushed before it."""
        states = distributed.gather_bytes(rng_state(self.device))
        self.batches.flush()
        failure = None
        if self.place.is_main:
            try:
                self.checkpoints.save(
                    step,
                    model_state=self.raw_model.state_dict(),
                    optimizer_state=self.optimizer.state_dict(),
                    scaler_state=self.scaler.state_dict(),
                    rng=states,
                    position=self.batches.position,
                    config_json=self.config_json,
                    extra={"guard": self.guard.state(), "seconds": self.seconds()},
                )
            except UserError as error:
                failure = error
        # All processes leave together: one that waits for a dead rank 0 would hang.
        if distributed.any_rank(failure is not None):
            raise failure or UserError("checkpoint: rank 0 could not write it")

    def roll_back(self) -> int | None:
        """Restore the newest intact checkpoint, keeping the place in the data; its step, or None when there is none."""
        loaded = self.checkpoints.load_newest()
        if loaded is None:
            return None
        rollbacks, nonfinite = self.guard.rollbacks, self.guard.nonfinite_steps
        self._restore(loaded)
        self.guard.rollbacks, self.guard.nonfinite_steps = rollbacks, nonfinite
        self.guard.rolled_back(loaded.step)
        return loaded.step

    def _restore(self, loaded: Loaded) -> None:
        self.raw_model.load_state_dict(_on(self.device, loaded.model_state))
        self.optimizer.load_state_dict(loaded.optimizer_state)
        self.scaler.load_state_dict(loaded.scaler_state)
        set_rng_state(loaded.rng[self.place.rank], self.device)
        self.guard.load_state(loaded.extra["guard"])

    def say(self, text: str) -> None:
        """Print on the main process, above a progress bar if there is one."""
        if self.place.is_main:
            tqdm.write(text)

    def close(self, *, finished: bool) -> None:
        """Close the files; a recording counts as complete only when the run ended by itself."""
        if finished:
            self.batches.close()
        else:
            self.batches.flush()
        self.metrics.close(exit_code=0 if finished else 1)


def _on(device: torch.device, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in state.items()}


def _differences(saved: Any, now: Any, where: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Leaves at which two JSON configs differ: (dotted name, saved, now)."""
    if isinstance(saved, dict) and isinstance(now, dict):
        for name in now.keys() | saved.keys():
            yield from _differences(saved.get(name), now.get(name), f"{where}.{name}".strip("."))
    elif saved != now and not (isinstance(saved, list) and list(saved) == list(now or ())):
        yield where, saved, now
