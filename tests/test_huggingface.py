"""training/gpt2_weights.py against transformers, on small random GPT-2s."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from attention import AttentionConfig, AttentionSpec
from errors import UserError
from model import GPT
from training.gpt2_weights import load_weights, read_model_config

STANDARD = AttentionConfig(default=AttentionSpec(preset="standard", numerics="fp32"))
SETTINGS = {
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 32,
    "n_positions": 16,
    "vocab_size": 50,
    "bos_token_id": None,
    "eos_token_id": None,
}


def tokens() -> Tensor:
    return torch.randint(50, (3, 16), generator=torch.Generator().manual_seed(5))


def transformers_model(**changes: Any) -> Any:
    """A random GPT-2 of transformers, with biases and gains that matter."""
    transformers = pytest.importorskip("transformers")
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**(SETTINGS | changes)))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return model.eval()


def opened(folder: Path) -> GPT:
    """A GPT with the shape and weights of a local GPT-2 folder."""
    config = read_model_config(folder)
    model = GPT(config, STANDARD.resolve(config.n_layer, config.n_head))
    load_weights(model, folder)
    return model


@torch.no_grad()
def assert_equal_logits(model: GPT, other: Any) -> None:
    """Ours are as near to the float64 logits as those of transformers (twice its error at most)."""
    ours, theirs = model(tokens())[0][..., :50], other(tokens()).logits
    exact = other.double()(tokens()).logits
    assert exact.std() > 0.5
    assert (ours - exact).abs().max() <= 2 * (theirs - exact).abs().max()


def write_folder(folder: Path, *, settings: dict[str, Any] | None = None, drop: str = "", add: str = "") -> Path:
    """A GPT-2 of transformers with settings changed, or a tensor dropped or added."""
    transformers_model().save_pretrained(folder)
    if settings:
        changed = json.loads((folder / "config.json").read_text()) | settings
        (folder / "config.json").write_text(json.dumps(changed))
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    if drop:
        del tensors[drop]
    if add:
        tensors[add] = torch.zeros(2)
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("changes", [{}, {"activation_function": "gelu"}, {"tie_word_embeddings": False}], ids=str)
def test_loaded_gpt2_has_the_logits_of_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    other = transformers_model(**changes)
    other.save_pretrained(tmp_path)
    assert_equal_logits(opened(tmp_path), other)


def test_names_without_prefix_and_old_mask_buffers_load(tmp_path: Path) -> None:
    # The files of the published "gpt2" repository look like this.
    other = transformers_model()
    other.transformer.save_pretrained(tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert "h.0.attn.c_attn.weight" in tensors
    tensors |= {"h.0.attn.bias": torch.ones(1, 1, 16, 16), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    assert_equal_logits(opened(tmp_path), other)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"settings": {"model_type": "llama"}}, "model_type = 'llama': expected gpt2"),
        ({"settings": {"layer_norm_epsilon": 1e-6}}, "layer_norm_epsilon = 1e-06: expected 1e-05"),
        ({"drop": "transformer.h.1.mlp.c_fc.bias"}, "lacks transformer.h.1.mlp.c_fc.bias (1 missing)"),
        ({"add": "h.7.ln_1.bias"}, "has transformer.h.7.ln_1.bias, which this model lacks (1 unknown)"),
    ],
)
def test_foreign_settings_and_tensors_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = write_folder(tmp_path, **changes)
    with pytest.raises(UserError) as error:
        opened(folder)
    assert message in str(error.value)


def test_a_pickle_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin is a pickle"):
        opened(tmp_path)
