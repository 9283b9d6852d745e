"""Checkpoints and validation tokens, as pictures show them."""

from __future__ import annotations

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


def spread(tokens_N: Tensor, sequences: int, length: int, where: str) -> tuple[Tensor, Tensor]:
    """Tokens and targets [B, T] of sequences spread evenly over the data."""
    if len(tokens_N) < sequences * (length + 1):
        raise invalid("--data", where, f"at least {sequences * (length + 1)} tokens, {sequences} sequences of {length}")
    starts = torch.linspace(0, len(tokens_N) - length - 1, sequences, dtype=torch.float64).long()
    rows = tokens_N[starts[:, None] + torch.arange(length + 1)]
    return rows[:, :-1], rows[:, 1:]


def read_tokens(path: Path, vocabulary_size: int) -> Tensor:
    """Validation tokens [N] int64 of a data set that this vocabulary covers."""
    data = TokenFile.open(path, "val", verify="sha256")
    if data.header.vocabulary_size > vocabulary_size:
        raise invalid("--data", str(path), f"tokens of at most the model's vocabulary, {vocabulary_size}")
    return torch.from_numpy(data.tokens.astype("int64"))
