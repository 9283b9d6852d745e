"""The inputs of ``scripts/figures.py``: runs and checkpoints."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import config as configuration
import files
from attention import LayerPlan
from attention.presets import EXTERNAL
from config import TrainConfig
from data.token_files import TokenFile
from errors import UserError, check_finite, invalid
from figures import curves
from figures.runs import DrawnRun
from model import GPT
from probes.capture import LayerCapture, capture
from probes.spectral import spectral_norm
from training.checkpoint import Loaded
from training.intervention import made_by, plans_at
from training.run import check_plans
from training.telemetry import FP16_LOSS_SCALE
from training.weights import load_weights, read_checkpoint


@dataclass(frozen=True)
class Opened:
    model: GPT
    config: TrainConfig
    loaded: Loaded
    replaced: bool
    """Whether a backend cannot run here."""

    @property
    def label(self) -> str:
        return f"{self.config.run.name} step {self.loaded.step:,}"


def load_run(folder: Path) -> DrawnRun:
    """Metrics, telemetry and names. Raises ``UserError`` for a folder that is not a run, or has no training loss or no probe yet."""
    metrics, telemetry, path = curves.metrics(folder), curves.telemetry(folder), folder / "config.json"
    if not len(telemetry):
        raise UserError(f"{folder}: it has no telemetry.jsonl, which this figure draws")
    try:
        label = str(files.read_json(path)["attention_name"]) if path.exists() else "?"
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{path}: not the record of a run") from None
    name, (start, is_explosion) = folder.resolve().name, curves.excursion(curves.column(metrics, "train_loss"))
    end = f", explodes at {start:,}" if is_explosion else ""
    return DrawnRun(f"{name}: {label}{end}", metrics, start if is_explosion else None, telemetry, name)


def open_checkpoint(folder: Path, device: torch.device) -> Opened:
    """The model of a checkpoint, or of the newest one of a run's folder, with the attention that it was last trained with.

    Raises ``UserError`` as ``read_checkpoint`` and ``serve`` do.
    """
    loaded = read_checkpoint(folder)
    config = configuration.from_json(TrainConfig, loaded.config_json)
    base = config.attention.resolve(config.model.n_layer, config.model.n_head)
    plans = plans_at(base, made_by(loaded), loaded.step)
    served = tuple(serve(plan, config, device) for plan in plans)
    model = GPT(config.model, served)
    load_weights(model, loaded.model_state, f"checkpoint {loaded.path}")
    check_finite(loaded.model_state.items(), f"checkpoint {loaded.path}")
    replaced = {g.backend for plan, now in zip(plans, served, strict=True) if plan != now for g in plan.groups}
    if replaced:
        print(f"{folder}: computed by flash_reference in place of {', '.join(sorted(replaced))}, which cannot run here")
    return Opened(model.to(device).eval(), config, loaded, bool(replaced))


def serve(plan: LayerPlan, config: TrainConfig, device: torch.device) -> LayerPlan:
    """The plan; where its backend cannot run here, with ``flash_reference`` at the same numerics. Raises ``UserError`` for an external
    kernel that cannot: nobody else knows its numerics."""
    try:
        check_plans(config, device, (plan,))
    except UserError:
        if any(group.backend == EXTERNAL for group in plan.groups):
            raise
        groups = tuple(dataclasses.replace(group, backend="flash_reference") for group in plan.groups)
        return dataclasses.replace(plan, groups=groups)
    return plan


def captured(
    opened: Opened, sequences: int, data: Path | None, layers: Sequence[int]
) -> tuple[list[LayerCapture], float]:
    """Layers of a checkpoint over validation sequences, and the loss scale that their dO has.

    ``data``: a data set; None is that of the run. The sequences go through the model one by one, as logits of all at once would take
    gigabytes: dO is the gradient of each sequence's own mean loss. Each rounds at random with a seed of its own, of which the capture
    keeps the first: what a probe draws again is the run's in the first sequence alone. Raises ``UserError``.
    """
    config = opened.config
    if wrong := set(layers) - set(range(config.model.n_layer)):
        raise invalid("layer", min(wrong), f"0 to {config.model.n_layer - 1}")
    folder, length = data or Path(config.data.dataset), config.data.sequence_length
    device = next(opened.model.parameters()).device
    batch = validation_tokens(folder, length, sequences, config.model.vocab_size, device)

    scale = FP16_LOSS_SCALE if config.precision.dtype == "float16" else 1.0
    settings: dict[str, Any] = {"autocast": config.precision.autocast(device), "loss_scale": scale}
    parts = [
        capture(opened.model, tokens_T[None], targets_T[None], layers, rounding_seed=seed, **settings)
        for tokens_T, targets_T, seed in zip(*batch, torch.arange(sequences, device=device), strict=True)
    ]
    whole = []
    for of_layer in zip(*parts, strict=True):
        names = ("x_BTC", "q_BTHD", "k_BTHD", "v_BTHD", "o_BTHD", "do_BTHD")
        joined: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in of_layer]) for name in names}
        whole.append(dataclasses.replace(of_layer[0], **joined))
    return whole, scale


def head_of(w_q_CC: Tensor, n_head: int, head: int | None) -> int:
    """The head asked for, or that with the largest spectral norm of W_Q (float32). Raises ``UserError``."""
    if head is None:
        norms_H = spectral_norm(w_q_CC.detach().unflatten(0, (n_head, -1)))
        return int(norms_H.nan_to_num(-1).argmax())
    if not 0 <= head < n_head:
        raise invalid("--head", head, f"0 to {n_head - 1}")
    return head


def validation_tokens(
    folder: Path, length: int, count: int, vocabulary: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Tokens and targets [B, T] of ``count`` sequences spread evenly over the validation data. Raises ``UserError``."""
    data = TokenFile.open(folder, "val", verify="sha256")
    if data.header.vocabulary_size > vocabulary:
        raise invalid("--data", str(folder), f"tokens of at most the model's vocabulary, {vocabulary}")
    if data.header.count < (least := count * (length + 1)):
        raise invalid("--data", str(folder), f"at least {least} tokens, {count} sequences of {length}")
    starts = torch.linspace(0, data.header.count - length - 1, count, dtype=torch.float64).long()
    rows = torch.from_numpy(data.sequences(starts, length + 1).astype("int64")).to(device)
    return rows[:, :-1], rows[:, 1:]
