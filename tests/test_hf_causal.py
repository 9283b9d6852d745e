"""Captures of Hugging Face models: q, k, v and O against transformers' own attention, dO against its gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from attention import AttentionSpec
from errors import UserError
from probes import hf_causal
from probes.low_rank import high_dw_q

transformers = pytest.importorskip("transformers")
T = 24


def gpt2() -> Any:
    config = transformers.GPT2Config(n_layer=2, n_head=4, n_embd=32, n_positions=32, vocab_size=64)
    return transformers.GPT2LMHeadModel(config)


def llama() -> Any:
    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_size=32,
        intermediate_size=64,
        vocab_size=64,
        max_position_embeddings=32,
    )
    return transformers.LlamaForCausalLM(config)


@pytest.fixture(scope="module", params=[gpt2, llama], ids=["gpt2", "llama"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    place = tmp_path_factory.mktemp("hf") / "model"
    model = request.param()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    model.save_pretrained(place)
    return place


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 64, (2, T + 1), generator=torch.Generator().manual_seed(5))
    return tokens[:, :-1], tokens[:, 1:]


def load(folder: Path, preset: str = "flash", dtype: torch.dtype = torch.float32) -> hf_causal.CausalModel:
    return hf_causal.load(folder, AttentionSpec(preset=preset), dtype, torch.device("cpu"))


def test_the_gradient_of_w_q_follows_from_what_was_captured(folder: Path) -> None:
    """dW_Q from X, q, k, v, dO and the rotation is what autograd gives through transformers' eager attention."""
    model = load(folder)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    tokens, targets = batch()
    logits = reference(input_ids=tokens, use_cache=False).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    owner = hf_causal.CausalModel(reference, model.plans, torch.float32, torch.device("cpu"))
    for layer, module in zip(model.capture(tokens, targets), owner._attentions(), strict=True):
        gpt2_style = reference.config.model_type == "gpt2"
        expected = module.c_attn.weight.grad[:, :32].T if gpt2_style else module.q_proj.weight.grad
        torch.testing.assert_close(high_dw_q(layer).reshape(expected.shape), expected, rtol=1e-3, atol=1e-6)


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        load(folder)
    return str(caught.value)


def test_a_folder_with_no_weights(tmp_path: Path) -> None:
    gpt2().config.save_pretrained(tmp_path)
    assert "no weights" in refusal(tmp_path)


def test_weights_that_lack_a_tensor(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    llama().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.self_attn.q_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert "lack" in refusal(tmp_path)
