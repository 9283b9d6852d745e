"""training/gpt2_weights.py and scripts/export_huggingface.py against transformers, on small random GPT-2s."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from attention import AttentionConfig, AttentionSpec
from errors import UserError
from model import GPT, ModelConfig, initialize
from scripts.export_huggingface import load_model
from training.checkpoint import CheckpointConfig, Checkpoints
from training.gpt2_weights import export_gpt2, load_weights, read_model_config

ROOT = Path(__file__).resolve().parent.parent
STANDARD = AttentionConfig(default=AttentionSpec(preset="standard", numerics="fp32"))
TINY = ModelConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=50, activation="gelu_tanh")
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


def open_with_transformers(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    model, report = transformers.GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return model.eval()


def make(**changes: Any) -> GPT:
    config = replace(TINY, **changes)
    model = GPT(config, STANDARD.resolve(config.n_layer, config.n_head))
    initialize(model, 3)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return model.eval()


@torch.no_grad()
def assert_equal_logits(model: GPT, other: Any) -> None:
    """Ours are as near to the float64 logits as those of transformers (twice its error at most)."""
    ours, theirs = model(tokens())[0][..., :50], other(tokens()).logits
    exact = other.double()(tokens()).logits
    assert exact.std() > 0.5
    assert (ours - exact).abs().max() <= 2 * (theirs - exact).abs().max()


def write_folder(folder: Path, *, settings: dict[str, Any] | None = None, drop: str = "", add: str = "") -> Path:
    """An exported GPT-2 with settings changed, or a tensor dropped or added."""
    export_gpt2(make(bias=True), folder)
    if settings:
        changed = json.loads((folder / "config.json").read_text()) | settings
        (folder / "config.json").write_text(json.dumps(changed))
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    if drop:
        del tensors[drop]
    if add:
        tensors[add] = torch.zeros(2)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
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
    ("settings", "message"),
    [
        ({"model_type": "llama"}, "model_type = 'llama': expected gpt2"),
        ({"activation_function": "relu"}, "activation_function = 'relu': expected one of gelu, gelu_new"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon = 1e-06: expected 1e-05"),
        ({"n_inner": 100}, "n_inner = 100: expected null or 4 * n_embd = 128"),
        ({"n_layer": "two"}, "n_layer = 'two': expected an integer"),
    ],
)
def test_foreign_settings_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    folder = write_folder(tmp_path, settings=settings)
    with pytest.raises(UserError) as error:
        opened(folder)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drop": "transformer.h.1.mlp.c_fc.bias"}, "lacks transformer.h.1.mlp.c_fc.bias (1 missing)"),
        ({"add": "h.7.ln_1.bias"}, "has transformer.h.7.ln_1.bias, which this model lacks (1 unknown)"),
        ({"settings": {"n_positions": 32}}, "transformer.wpe.weight has shape (16, 32), expected (32, 32)"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = write_folder(tmp_path, **changes)
    with pytest.raises(UserError) as error:
        opened(folder)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"n_layer": 3}, "model.n_layer = 3: expected 2"),
        ({"vocab_multiple": 64}, "model.vocab_multiple = 64: expected 1"),
    ],
)
def test_weights_of_another_shape_are_refused(tmp_path: Path, changes: dict[str, Any], field: str) -> None:
    folder = write_folder(tmp_path)
    model = make(**({"bias": True, "vocab_multiple": 1} | changes))
    before = model.transformer.wte.weight.clone()
    with pytest.raises(UserError) as error:
        load_weights(model, folder)
    assert str(error.value).startswith(field)
    assert torch.equal(model.transformer.wte.weight, before)


def test_a_pickle_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin is a pickle"):
        opened(tmp_path)


@pytest.mark.parametrize(
    "changes", [{"bias": True}, {"bias": False}, {"activation": "gelu"}, {"tie_embeddings": False}], ids=str
)
def test_transformers_gives_an_export_the_same_logits(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = make(**changes)
    export_gpt2(model, tmp_path)
    assert_equal_logits(model, open_with_transformers(tmp_path))


def test_options_that_gpt2_lacks_are_not_exported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^model\.qk_norm = "):
        export_gpt2(make(qk_norm=True), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def write_checkpoint(runs: Path, model: GPT, *, step: int = 3, **changes: Any) -> Path:
    section = asdict(model.config) | changes
    parameters = list(model.parameters())
    return Checkpoints(runs, CheckpointConfig()).save(
        step,
        model_state=model.state_dict(),
        optimizer_state=torch.optim.AdamW(parameters).state_dict(),
        scaler_state={},
        rng=[torch.zeros(4, dtype=torch.uint8)],
        position=step,
        config_json={"model": section},
        extra={},
    )


def export_script(*arguments: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "export_huggingface.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_script_exports_a_checkpoint(tmp_path: Path) -> None:
    model = make()
    done = export_script(write_checkpoint(tmp_path, model), tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert_equal_logits(model, open_with_transformers(tmp_path / "out"))


def test_a_run_stands_for_its_newest_checkpoint(tmp_path: Path) -> None:
    model = make()
    for step in (3, 10):
        torch.nn.init.constant_(next(model.parameters()), float(step))
        write_checkpoint(tmp_path / "run" / "checkpoints", model, step=step)
    found = load_model(tmp_path / "run").state_dict()
    assert all(torch.equal(value, found[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"heads": 3}, r"^model = 'heads': .*expected one of"), ({"n_layer": 3}, "do not fit its config")],
)
def test_script_refuses_a_config_that_does_not_fit(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    checkpoint = write_checkpoint(tmp_path, make(), **changes)
    with pytest.raises(UserError, match=message):
        load_model(checkpoint)
