"""The inputs of ``scripts/figures.py``: runs and checkpoints."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import files
from config import TrainConfig
from errors import UserError, invalid
from figures import curves
from figures.checkpoints import build, fp16_scale, validation_tokens
from figures.delta import choose_head
from figures.runs import DrawnRun
from model import GPT
from probes.capture import LayerCapture, capture
from probes.spectral import top_singular
from training.weights import read_checkpoint


@dataclass(frozen=True)
class Opened:
    """A checkpoint's model on the device, and how its run was configured."""

    model: GPT
    config: TrainConfig
    label: str


def load_run(folder: Path) -> DrawnRun:
    """Metrics, telemetry and names. Raises ``UserError`` for a folder that is not a run, or has no training loss or no probe yet."""
    metrics, telemetry, path = curves.metrics(folder), curves.telemetry(folder), folder / "config.json"
    if not len(telemetry):
        raise UserError(f"{folder}: it has no telemetry.jsonl, which this figure draws")
    try:
        attention = str(files.read_json(path)["attention_name"]) if path.exists() else "?"
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{path}: not the record of a run") from None
    exploded, name = curves.explosion_step(curves.column(metrics, "train_loss")), folder.resolve().name
    end = "" if exploded is None else f", explodes at {exploded:,}"
    return DrawnRun(f"{name}: {attention}{end}", metrics, exploded, telemetry, name)


def open_checkpoint(folder: Path, device: torch.device) -> Opened:
    """The model of a checkpoint, or of the newest one of a run's folder. Raises ``UserError`` as ``read_checkpoint`` does."""
    loaded = read_checkpoint(folder)
    model, config, replaced = build(loaded, device)
    if replaced:
        print(f"{folder}: computed by flash_reference in place of {', '.join(replaced)}, which cannot run here")
    return Opened(model.eval(), config, f"{config.run.name} step {loaded.step:,}")


def captured(
    opened: Opened, sequences: int, data: Path | None, device: torch.device, layer: int | None = None
) -> tuple[list[LayerCapture], float]:
    """Layers of a checkpoint (None: all) over validation sequences, and the loss scale that their dO has.

    ``data``: a data set; None is that of the run. The sequences go through the model one by one, as logits of all at once would take
    gigabytes: dO is the gradient of each sequence's own mean loss. Raises ``UserError``.
    """
    config = opened.config
    if layer is not None and not 0 <= layer < config.model.n_layer:
        raise invalid("--layer", layer, f"0 to {config.model.n_layer - 1}")
    folder, length = data or Path(config.data.dataset), config.data.sequence_length
    batch = validation_tokens(folder, length, sequences, config.model.vocab_size, device)

    def look(scale: float) -> list[LayerCapture]:
        settings: dict[str, Any] = {"autocast": config.precision.autocast(device), "loss_scale": scale}
        parts = [
            capture(
                opened.model,
                tokens_T[None],
                targets_T[None],
                None if layer is None else [layer],
                rounding_seed=torch.tensor(number, device=device),
                **settings,
            )
            for number, (tokens_T, targets_T) in enumerate(zip(*batch, strict=True))
        ]
        return [joined(of_layer) for of_layer in zip(*parts, strict=True)]

    scale = fp16_scale(look) if config.precision.dtype == "float16" else 1.0
    return look(scale), scale


def joined(parts: Sequence[LayerCapture]) -> LayerCapture:
    """Captures of one layer, made sequence by sequence, as one."""
    names = ("x_BTC", "q_BTHD", "k_BTHD", "v_BTHD", "o_BTHD", "do_BTHD")
    whole: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    return dataclasses.replace(parts[0], **whole)


def head_of(opened: Opened, layer: int, head: int | None) -> int:
    """The head asked for, or that with the largest spectral norm of W_Q. Raises ``UserError``."""
    n_head = opened.config.model.n_head
    if head is None:
        return choose_head(top_singular(opened.model.w_q(layer).detach().unflatten(0, (n_head, -1)))[0].tolist())
    if not 0 <= head < n_head:
        raise invalid("--head", head, f"0 to {n_head - 1}")
    return head
