"""Checkpoints and validation tokens, as pictures show them."""

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

import attention
import config as configuration
from attention import LayerPlan
from config import TrainConfig
from data.token_files import TokenFile
from errors import UserError, check_finite, invalid
from model import GPT
from probes.capture import LayerCapture
from training.checkpoint import Loaded
from training.intervention import Switch, plans_at
from training.weights import load_weights

FP16_LOSS_SCALE = 2.0**16
"""GradScaler's first: dO of a mean loss underflows in FP16 without one."""


def fp16_scale(look: Callable[[float], Iterable[LayerCapture]]) -> float:
    """The largest of 2^16, 2^12, ... 1 with which every dO that ``look`` gives is finite, as a GradScaler finds one."""
    scale = FP16_LOSS_SCALE
    while scale > 1 and not all(bool(layer.do_BTHD.isfinite().all()) for layer in look(scale)):
        scale /= 16
    return scale


def build(loaded: Loaded, device: torch.device) -> tuple[GPT, TrainConfig, list[str]]:
    """The model with the attention it was last trained with, its config, and the backends that cannot run here."""
    config = configuration.from_json(TrainConfig, loaded.config_json)
    base = config.attention.resolve(config.model.n_layer, config.model.n_head)
    switches = [Switch(**entry) for entry in loaded.extra.get("switches", ())]
    plans = plans_at(base, switches, loaded.step)
    served = [serve(plan, config, device) for plan in plans]
    model = GPT(config.model, tuple(served))
    load_weights(model, loaded)
    check_finite(loaded.model_state.items(), f"checkpoint {loaded.path}")
    replaced = {g.backend for plan, now in zip(plans, served, strict=True) if plan != now for g in plan.groups}
    return model.to(device).train(), config, sorted(replaced)


def serve(plan: LayerPlan, config: TrainConfig, device: torch.device) -> LayerPlan:
    """The plan; where its backend cannot run here, with ``flash_reference`` at the same numerics. The page says so."""
    model, dtype = config.model, config.precision.torch_dtype
    try:
        attention.check_plans(
            [plan],
            device=device,
            dtype=dtype,
            head_dim=model.head_width,
            softcap=model.attention_softcap,
            features=model.features,
        )
    except UserError:
        groups = tuple(dataclasses.replace(group, backend="flash_reference") for group in plan.groups)
        return dataclasses.replace(plan, groups=groups)
    return plan


def validation_tokens(
    folder: Path, length: int, count: int, vocabulary: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Tokens and targets [B, T] of ``count`` sequences spread evenly over the validation data. Raises ``UserError``."""
    data = TokenFile.open(folder, "val", verify="sha256")
    if data.header.vocabulary_size > vocabulary:
        raise invalid("--data", str(folder), f"tokens of at most the model's vocabulary, {vocabulary}")
    if data.header.count < count * (length + 1):
        expected = f"at least {count * (length + 1)} tokens, {count} sequences of {length}"
        raise invalid("--data", str(folder), expected)
    starts = torch.linspace(0, data.header.count - length - 1, count, dtype=torch.float64).long()
    rows = torch.from_numpy(data.sequences(starts, length + 1).astype("int64")).to(device)
    return rows[:, :-1], rows[:, 1:]
