"""Checkpoints of nanoGPT (``ckpt.pt``). Names and layout of the weights are ours."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from errors import UserError, invalid, reading
from model import ModelConfig

_SIZES = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")


def read(path: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Shape and weights of a model; the weights are mapped from the file. vocab_size has nanoGPT's padding in it (50304).

    The file does not say which GELU it was trained with: ``activation`` is the exact one, as in nanoGPT today.
    Raises ``UserError`` for any other file, and for a pickle that holds more than tensors and plain values.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file; expected a checkpoint of nanoGPT")
    with reading(path):
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    weights, settings = (content.get(name) if isinstance(content, dict) else None for name in ("model", "model_args"))
    if not (isinstance(weights, dict) and isinstance(settings, dict)):
        raise UserError(f"{path}: no checkpoint of nanoGPT: expected a dictionary with model and model_args")
    if missing := [name for name in _SIZES if name not in settings]:
        raise UserError(f"{path}: model_args lacks {missing[0]}")
    bias = settings.get("bias", True)  # older ones always have biases
    if not isinstance(bias, bool):
        raise invalid(f"{path}: model_args: bias", bias, "True or False")
    tensors = {}
    for name, value in weights.items():
        if not (isinstance(name, str) and isinstance(value, Tensor)):
            raise UserError(f"{path}: model has {name!r}, which is no named tensor")
        name = name.removeprefix("_orig_mod.")  # of torch.compile
        if not name.endswith(".attn.bias"):  # a causal mask, where torch had no attention of its own
            tensors[name] = value
    head, embedding = tensors.get("lm_head.weight"), tensors.get("transformer.wte.weight")
    tied = head is None or embedding is None or head.data_ptr() == embedding.data_ptr() or torch.equal(head, embedding)
    sizes = {name: settings[name] for name in _SIZES}
    return ModelConfig(**sizes, vocab_multiple=1, bias=bias, tie_embeddings=tied), tensors
