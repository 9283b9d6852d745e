"""Weights that a model begins with: a checkpoint (its folder, or a run's, which means its newest), or nanoGPT's ``ckpt.pt``.

Names and layout of nanoGPT's weights are ours.
"""

from pathlib import Path

import torch
from torch import Tensor

from errors import UserError, check_finite, invalid, on_disk, reading
from model import GPT, ModelConfig
from training.checkpoint import Checkpoints, Loaded, found_in

_SIZES = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")


def is_checkpoint(path: Path) -> bool:
    """Whether it is a checkpoint's folder or a run's, rather than weights from elsewhere. Raises ``UserError`` where it cannot be read."""
    with on_disk(path, "be read"):
        return (path / "SHA256SUMS").is_file() or (path / "checkpoints").is_dir()


def read_checkpoint(path: Path) -> Loaded:
    """The checkpoint at ``path``; of a run's folder, the newest. Raises ``UserError`` for what is neither, and for a damaged one."""
    with on_disk(path, "be read"):
        return Checkpoints.load(_newest(path))


def _newest(path: Path) -> Path:
    if not path.is_dir():
        there = ", ".join(sorted(one.name for one in path.parent.glob("step_*"))[-5:])
        expected = f"one of {there}" if there else "a checkpoint such as runs/NAME/checkpoints/step_00001000"
        raise UserError(f"{path}: no such folder; expected {expected}")
    if (path / "SHA256SUMS").is_file():
        return path
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    found = {step: one for step, one in found_in(folder).items() if (one / "SHA256SUMS").is_file()}
    if not found:
        raise UserError(f"{path}: no weights; expected a checkpoint such as runs/NAME/checkpoints/step_00001000")
    return found[max(found)]


def load_weights(model: GPT, weights: dict[str, Tensor], where: object) -> None:
    """Fill the model. Raises ``UserError``, which names one tensor, for weights of another shape."""
    expected, found = (
        {name: f"{list(t.shape)}" + (t.dtype != torch.float32) * f" of {t.dtype}" for name, t in state.items()}
        for state in (model.state_dict(), weights)
    )
    misfits = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
    if misfits:
        name = misfits[0]
        has = f"has shape {found[name]}" if name in found else "is missing"
        wanted = f"expected {expected[name]}" if name in expected else "the config has no such layer"
        others = f" ({len(misfits)} tensors do not fit)" if len(misfits) > 1 else ""
        raise UserError(f"{where}: weights do not fit the config: {name} {has}, {wanted}{others}")
    model.load_state_dict(weights)


def read_nanogpt(path: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Shape and weights of a model; the weights are mapped from the file. vocab_size has nanoGPT's padding in it (50304).

    The file does not say which GELU it was trained with: ``activation`` is the exact one, as in nanoGPT today.
    Raises ``UserError`` for any other file, and for a pickle that holds more than tensors and plain values.
    """
    if not path.is_file():
        what = "a folder without a checkpoint" if path.is_dir() else "no such file"
        raise UserError(f"{path}: {what}; expected runs/NAME, runs/NAME/checkpoints/step_N, or a checkpoint of nanoGPT")
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
            tensors[name] = value.float() if value.is_floating_point() else value
    head, embedding = tensors.get("lm_head.weight"), tensors.get("transformer.wte.weight")
    tied = head is None or embedding is None or head.data_ptr() == embedding.data_ptr() or torch.equal(head, embedding)
    if head is None and embedding is not None:
        tensors["lm_head.weight"] = embedding
    sizes = {name: settings[name] for name in _SIZES}
    return ModelConfig(**sizes, vocab_multiple=1, bias=bias, tie_embeddings=tied), tensors


def load_nanogpt(model: GPT, path: Path) -> None:
    """Fill ``model`` from a checkpoint, which leaves activation and padding to it. ``model`` may have stabilizers that add no parameters.

    Raises ``UserError`` where the model's shape is another; the model is then as it was.
    """
    config = model.config
    if config.activation == "swiglu":
        raise invalid("model.activation", config.activation, ("gelu", "gelu_tanh"))
    expected, tensors = read_nanogpt(path)
    with_parameters = ("bias", "position", "norm", "tie_embeddings", "qk_norm", "gated_attention")
    for name in (*_SIZES[:-1], "n_kv_head", *with_parameters):
        if getattr(config, name) != getattr(expected, name):
            raise invalid(f"model.{name}", getattr(config, name), f"{getattr(expected, name)!r}, as in {path}")
    if config.padded_vocab_size != expected.vocab_size:
        rows = f"one that pads model.vocab_size to {expected.vocab_size}, the rows of {path}"
        raise invalid("model.vocab_multiple", config.vocab_multiple, rows)
    check_finite(tensors.items(), path)
    load_weights(model, tensors, path)
