"""What an autopsy looks at: a checkpoint of this repository or of nanoGPT on its data, or a Hugging Face folder of a GPT-2."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import attention
import config as configuration
import files
from attention import AttentionConfig, AttentionSpec, LayerPlan
from autopsy.measure import Subject
from config import TrainConfig
from data.token_files import TokenFile
from errors import UserError, check_finite, invalid, reading
from model import GPT
from probes.capture import LayerCapture, capture
from training import gpt2_weights, nanogpt
from training.checkpoint import Loaded
from training.intervention import Switch, plans_at
from training.precision import PrecisionConfig
from training.weights import load_weights, read_checkpoint

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
    plans = plans_at(base, switches_of(loaded), loaded.step)
    served = [serve(plan, config, device) for plan in plans]
    model = GPT(config.model, tuple(served))
    load_weights(model, loaded)
    check_finite(loaded.model_state.items(), f"checkpoint {loaded.path}")
    replaced = {g.backend for plan, now in zip(plans, served, strict=True) if plan != now for g in plan.groups}
    return model.to(device).train(), config, sorted(replaced)


def switches_of(loaded: Loaded) -> list[Switch]:
    """The switches of attention that the run made up to its checkpoint."""
    made = [Switch(**entry) for entry in loaded.extra.get("switches", ())]
    return [switch for switch in made if switch.step <= loaded.step]


def serve(plan: LayerPlan, config: TrainConfig, device: torch.device) -> LayerPlan:
    """The plan; where its backend cannot run here, with ``flash_reference`` at the same numerics. The page says so."""
    model, dtype = config.model, config.precision.torch_dtype
    try:
        attention.check([plan], device=device, dtype=dtype, head_dim=model.head_width, softcap=model.attention_softcap)
    except UserError:
        groups = tuple(dataclasses.replace(group, backend="flash_reference") for group in plan.groups)
        return dataclasses.replace(plan, groups=groups)
    return plan


def spread(tokens_N: Tensor, batches: int, sequences: int, length: int, where: str) -> list[tuple[Tensor, Tensor]]:
    """Sequences spread evenly over the data, dealt out so that every batch has some of everywhere: (tokens, targets)."""
    wanted = batches * sequences
    if len(tokens_N) < wanted * (length + 1):
        raise invalid("--data", where, f"at least {wanted * (length + 1)} tokens for {wanted} sequences of {length}")
    starts = torch.linspace(0, len(tokens_N) - length - 1, wanted, dtype=torch.float64).long()
    rows = tokens_N[starts[:, None] + torch.arange(length + 1)]
    return [(rows[batch::batches, :-1], rows[batch::batches, 1:]) for batch in range(batches)]


def read_tokens(path: Path, vocabulary_size: int) -> Tensor:
    """Validation tokens [N] int64 of a data set that this vocabulary covers."""
    data = TokenFile.open(path, "val", verify="sha256")
    if data.header.vocabulary_size > vocabulary_size:
        raise invalid("--data", str(path), f"tokens of at most the model's vocabulary, {vocabulary_size}")
    return torch.from_numpy(data.tokens.astype("int64"))


def checkpoint_subject(arguments: argparse.Namespace, device: torch.device) -> Subject:
    """A checkpoint of this repository on its own validation data."""
    loaded = read_checkpoint(arguments.checkpoint)
    model, config, replaced = build(loaded, device)
    path = arguments.data or Path(config.data.dataset)
    facts = {"step": str(loaded.step), "attention": config.attention.label()}
    if switched := switches_of(loaded):
        facts["switched"] = ", ".join(switch.option() for switch in switched) + " (step:layer:preset)"
    if replaced:
        facts["computed by"] = f"flash_reference in place of {', '.join(replaced)}, which cannot run here"
    tokens = read_tokens(path, config.model.vocab_size)
    return gpt_subject(
        arguments, device, model, config.precision, path, tokens, config.data.sequence_length, str(loaded.path), facts
    )


def foreign_subject(arguments: argparse.Namespace, device: torch.device) -> Subject:
    """A GPT-2 of nanoGPT or Hugging Face, with the attention that the command line names, on a data set or on nanoGPT's own val.bin."""
    source, path, is_nanogpt = arguments.hf or arguments.checkpoint, arguments.data, arguments.hf is None
    spec = AttentionSpec(preset=arguments.attention, numerics=arguments.numerics)
    precision = PrecisionConfig(dtype=arguments.dtype)
    shape = nanogpt.read(source)[0] if is_nanogpt else gpt2_weights.read_model_config(source)
    plans = AttentionConfig(flash_backend="flash_reference", default=spec).resolve(shape.n_layer, shape.n_head)
    attention.check(plans, device=device, dtype=precision.torch_dtype, head_dim=shape.head_width)
    if path is None:
        raise UserError(f"{source} needs --data: a data set of the model's tokens, or nanoGPT's val.bin")
    model = GPT(shape, plans)
    gpt2_weights.load_weights(model, source)
    tokens = (read_bin if path.suffix == ".bin" else read_tokens)(path, shape.vocab_size)
    facts = {"attention": f"{spec.label()} (assumed: the {'file' if is_nanogpt else 'folder'} does not say)"}
    facts |= {"activation": "gelu (assumed)"} if is_nanogpt else {}
    subject = gpt_subject(
        arguments, device, model.to(device).train(), precision, path, tokens, shape.block_size, str(source), facts
    )
    package = "low_precision_attention"
    switch_on = f'{package}.scaled_dot_product_attention, numerics="{{}}"'
    return dataclasses.replace(
        subject, switch_on=switch_on if is_nanogpt else f'{package}.huggingface.register("{{}}")'
    )


def read_bin(path: Path, vocabulary_size: int) -> Tensor:
    """Tokens [N] int64 of a file of bare uint16, as nanoGPT keeps them."""
    with reading(path), files.open_file(path) as file:
        tokens_N = torch.from_numpy(np.frombuffer(file.read(), "<u2").astype("int64"))
    if (tokens_N >= vocabulary_size).any():
        raise invalid("--data", str(path), f"tokens below {vocabulary_size}, the model's vocabulary")
    return tokens_N


def gpt_subject(
    arguments: argparse.Namespace,
    device: torch.device,
    model: GPT,
    precision: PrecisionConfig,
    path: Path,
    tokens_N: Tensor,
    longest: int,
    name: str,
    facts: dict[str, str],
) -> Subject:
    """A model of ours on the tokens of ``path``, in sequences of at most ``longest``."""
    length = min(arguments.length, longest)
    batches = spread(tokens_N, arguments.batches, arguments.sequences, length, str(path))

    def scaled(batch: int, layers: Sequence[int] | None, scale: float) -> list[LayerCapture]:
        tokens_BT, targets_BT = (x.to(device) for x in batches[batch])
        context = precision.autocast(device)
        return capture(model, tokens_BT, targets_BT, layers, autocast=context, loss_scale=scale)

    @functools.cache
    def loss_scale() -> float:  # one for all batches, whose errors are added up
        if precision.dtype != "float16":
            return 1.0
        return fp16_scale(lambda scale: (one for batch in range(len(batches)) for one in scaled(batch, None, scale)))

    def look(batch: int, layers: Sequence[int] | None) -> list[LayerCapture]:
        return scaled(batch, layers, loss_scale())

    return Subject(
        name=name,
        n_layer=model.config.n_layer,
        n_head=model.config.n_head,
        batches=arguments.batches,
        capture=look,
        w_q=lambda layer: model.w_q(layer).detach(),
        facts={
            **facts,
            "dtype": precision.dtype,
            "data": f"{path}, {arguments.batches * arguments.sequences} sequences of {length} tokens",
            "device": device.type,
        },
    )
