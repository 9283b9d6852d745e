"""Checkpoints of nanoGPT (``ckpt.pt``). Names and layout of the weights are ours."""

from pathlib import Path

import torch
from torch import Tensor

from errors import UserError, check_finite, invalid, reading
from model import GPT, ModelConfig

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


@torch.no_grad()
def load_weights(model: GPT, path: Path) -> None:
    """Fill ``model`` from a checkpoint, which leaves activation and padding to it. ``model`` may have stabilizers that add no parameters.

    Checked before anything is written: every tensor is there, none is left over. Raises ``UserError`` where the model's shape is another.
    """
    config = model.config
    if config.activation == "swiglu":
        raise invalid("model.activation", config.activation, ("gelu", "gelu_tanh"))
    expected, tensors = read(path)
    for name in (
        "n_layer",
        "n_head",
        "n_kv_head",
        "n_embd",
        "block_size",
        "bias",
        "position",
        "norm",
        "tie_embeddings",
    ):
        if getattr(config, name) != getattr(expected, name):
            raise invalid(f"model.{name}", getattr(config, name), f"{getattr(expected, name)!r}, as in {path}")
    if config.padded_vocab_size != expected.vocab_size:
        rows = f"one that pads model.vocab_size to {expected.vocab_size}, the rows of {path}"
        raise invalid("model.vocab_multiple", config.vocab_multiple, rows)
    parameters = dict(model.named_parameters())
    if config.tie_embeddings:
        tensors.pop("lm_head.weight", None)
    if missing := sorted(parameters.keys() - tensors.keys()):
        raise UserError(f"{path}: lacks {missing[0]} ({len(missing)} missing)")
    if unknown := sorted(tensors.keys() - parameters.keys()):
        raise UserError(f"{path}: has {unknown[0]}, which this model lacks ({len(unknown)} unknown)")
    for name, parameter in parameters.items():
        if tensors[name].shape != parameter.shape:
            shapes = f"{tuple(tensors[name].shape)}, expected {tuple(parameter.shape)}"
            raise UserError(f"{path}: {name} has shape {shapes}")
    check_finite(tensors.items(), path)
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])
