"""GPT-2 folders of Hugging Face: config.json and model.safetensors, read from a local disk.

Their linear layers ("Conv1D") keep weights as [in, out], ours as [out, in]; all else is laid out alike, W_q, W_k, W_v and
heads inside ``c_attn`` included. The vocabulary has no padding there, so a loaded model has vocab_multiple 1.
"""

from __future__ import annotations

from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

import files
from errors import UserError, check_finite, invalid
from model import GPT, Activation, ModelConfig
from training import nanogpt

_ACTIVATIONS: dict[str, Activation] = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
_TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
_MASKS = (".attn.bias", ".attn.masked_bias")
# Settings of GPT2Config that change the function computed, with the one value this model computes.
_REQUIRED = {
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}


def read_model_config(folder: Path) -> ModelConfig:
    """The ``ModelConfig`` of a GPT-2 folder: biases, no padding, no stabilizers. ``UserError`` where it is no GPT-2."""
    path = folder / "config.json"
    try:
        settings = files.read_json(path)
    except FileNotFoundError:
        raise UserError(f"{folder}: no config.json; expected a local GPT-2 folder of Hugging Face") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    if not isinstance(settings, dict) or settings.get("model_type") != "gpt2":
        found = settings.get("model_type") if isinstance(settings, dict) else settings
        raise invalid(f"{path}: model_type", found, "gpt2; low_precision_attention.watch() examines other models")
    for name, value in _REQUIRED.items():
        if settings.get(name, value) != value:
            raise invalid(f"{path}: {name}", settings[name], repr(value))
    activation = settings.get("activation_function", "gelu_new")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise invalid(f"{path}: activation_function", activation, _ACTIVATIONS)
    sizes = {
        "n_layer": 12,
        "n_head": 12,
        "n_embd": 768,
        "n_positions": 1024,
        "vocab_size": 50257,
    }  # GPT2Config's defaults
    n_layer, n_head, n_embd, block_size, vocab_size = (
        _integer(path, name, settings.get(name, default)) for name, default in sizes.items()
    )
    if settings.get("n_inner") not in (None, 4 * n_embd):
        raise invalid(f"{path}: n_inner", settings["n_inner"], f"null or 4 * n_embd = {4 * n_embd}")
    return ModelConfig(
        n_layer=n_layer,
        n_head=n_head,
        n_embd=n_embd,
        block_size=block_size,
        vocab_size=vocab_size,
        vocab_multiple=1,
        bias=True,
        activation=_ACTIVATIONS[activation],
        tie_embeddings=bool(settings.get("tie_word_embeddings", True)),
    )


def weights_file(source: Path) -> Path:
    """The file that ``load_weights`` reads."""
    return source if source.suffix == ".pt" else source / "model.safetensors"


@torch.no_grad()
def load_weights(model: GPT, source: Path) -> None:
    """Fill ``model`` from a local GPT-2 folder, or a nanoGPT checkpoint (``.pt``), which leaves activation and padding to it.

    Checked before anything is written: every tensor is there, none is left over. ``model`` may have stabilizers that add no
    parameters. Raises ``UserError`` where its shape is not the source's.
    """
    names = ["n_layer", "n_head", "n_kv_head", "n_embd", "block_size", "bias", "position", "norm", "tie_embeddings"]
    if model.config.activation not in _ACTIVATIONS.values():
        raise invalid("model.activation", model.config.activation, set(_ACTIVATIONS.values()))
    if source.suffix == ".pt":
        expected, tensors = nanogpt.read(source)
    else:
        expected, tensors = read_model_config(source), _read_tensors(source)
        names += ["vocab_size", "activation"]
    for name in names:
        if getattr(model.config, name) != getattr(expected, name):
            raise invalid(f"model.{name}", getattr(model.config, name), f"{getattr(expected, name)!r}, as in {source}")
    if model.config.padded_vocab_size != expected.vocab_size:
        padded = f"one that pads model.vocab_size to {expected.vocab_size}, the rows of {source}"
        rows = padded if source.suffix == ".pt" else f"1: {source} has no rows for padding"
        raise invalid("model.vocab_multiple", model.config.vocab_multiple, rows)
    parameters = dict(model.named_parameters())
    if model.config.tie_embeddings:
        tensors.pop("lm_head.weight", None)  # some exporters write the tied matrix twice
    if missing := sorted(parameters.keys() - tensors.keys()):
        raise UserError(f"{source}: lacks {missing[0]} ({len(missing)} missing)")
    if unknown := sorted(tensors.keys() - parameters.keys()):
        raise UserError(f"{source}: has {unknown[0]}, which this model lacks ({len(unknown)} unknown)")
    for name, parameter in parameters.items():
        if tensors[name].shape != parameter.shape:
            shapes = f"{tuple(tensors[name].shape)}, expected {tuple(parameter.shape)}"
            turned = " (after transposing)" if source.is_dir() and name.endswith(_TRANSPOSED) else ""
            raise UserError(f"{source}: {name} has shape {shapes}{turned}")
    check_finite(tensors.items(), source)
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """Tensors by our names, in our layout; the attention masks that older files carry are dropped."""
    path = weights_file(folder)
    if not path.is_file():
        pickles = sorted(p.name for p in folder.glob("*.bin"))
        why = f"{pickles[0]} is a pickle, which could run code when read" if pickles else "no weights"
        raise UserError(f"{folder}: {why}; expected model.safetensors (save_pretrained with safe_serialization=True)")
    try:
        stored = safetensors.torch.load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    tensors = {}
    for name, value in stored.items():
        if name.endswith(_MASKS):
            continue
        if not name.startswith(("transformer.", "lm_head.")):
            name = f"transformer.{name}"
        tensors[name] = value.T if name.endswith(_TRANSPOSED) and value.dim() == 2 else value
    return tensors


def _integer(path: Path, name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise invalid(f"{path}: {name}", value, "an integer")
    return value
