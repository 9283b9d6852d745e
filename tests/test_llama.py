"""What a Llama changes in the model: rotary positions, RMSNorm, SwiGLU, shared keys. The oracle is Hugging Face's Llama."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_nanogpt import nanogpt
from tiny_runs import preset, tiny_model

from errors import UserError
from model import GPT, ModelConfig, Rotary
from training.optim import OptimConfig, build_optimizer
from training.weights import load_nanogpt

LLAMA: dict[str, Any] = {"position": "rotary", "norm": "rms", "activation": "swiglu", "n_kv_head": 2}
TINY = ModelConfig(n_layer=2, n_head=4, n_embd=48, block_size=32, vocab_size=64, vocab_multiple=1)
EXACT = preset("standard", "fp32")


def make(**changes: Any) -> GPT:
    """An initialized model with weights five times as large, so that logits are not all near zero."""
    model = tiny_model(EXACT, seed=1, **(vars(TINY) | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5.0 if parameter.dim() == 2 else torch.linspace(0.5, 1.5, len(parameter)))
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_logits_and_gradients_are_those_of_a_hugging_face_llama(tied: bool) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")  # rope_parameters
    ours = make(**LLAMA, tie_embeddings=tied, rotary_base=500.0)
    sizes = {"hidden_size": 48, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    rope = {"rope_type": "default", "rope_theta": 500.0}
    rest = {"rms_norm_eps": 1e-5, "rope_parameters": rope, "attn_implementation": "eager"}
    config = transformers.LlamaConfig(**sizes, **heads, **rest, tie_word_embeddings=tied)
    theirs = transformers.LlamaForCausalLM(config)
    names = {"transformer.wte": "model.embed_tokens", "transformer.ln_f": "model.norm", "lm_head": "lm_head"}
    for i in range(2):
        here, there = f"transformer.h.{i}", f"model.layers.{i}"
        names |= {f"{here}.ln_1": f"{there}.input_layernorm", f"{here}.ln_2": f"{there}.post_attention_layernorm"}
        names |= {f"{here}.attn.c_proj": f"{there}.self_attn.o_proj"}
        for ours_is, theirs_is in (("c_gate", "gate_proj"), ("c_fc", "up_proj"), ("c_proj", "down_proj")):
            names[f"{here}.mlp.{ours_is}"] = f"{there}.mlp.{theirs_is}"
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            module = name.removesuffix(".weight")
            if module.endswith("c_attn"):
                layer = theirs.model.layers[int(module.split(".")[2])].self_attn
                for part, weight in zip("qkv", parameter.split([48, 24, 24]), strict=True):
                    getattr(layer, f"{part}_proj").weight.copy_(weight)
            else:
                theirs.get_parameter(f"{names.pop(module)}.weight").copy_(parameter)
    assert set(names) <= {"lm_head"}  # nothing of theirs keeps a weight of its own
    tokens = torch.randint(64, (3, 33), generator=torch.Generator().manual_seed(5))
    logits, loss = ours(tokens[:, :-1], tokens[:, 1:])
    expected = theirs(tokens[:, :-1]).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
    loss.backward()
    torch.nn.functional.cross_entropy(expected.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    for i in range(2):
        theirs_is = theirs.model.layers[i].self_attn
        gradient = torch.cat([getattr(theirs_is, f"{part}_proj").weight.grad for part in "qkv"])
        found = ours.attentions()[i].c_attn.weight.grad
        torch.testing.assert_close(found, gradient, rtol=1e-3, atol=1e-4 * gradient.abs().max().item())


@pytest.mark.parametrize(("table", "bound"), [("fp32", 1e-6), ("bf16", None)])
@pytest.mark.parametrize("width", [2, 6, 64])
def test_scores_depend_on_the_distance_unless_the_table_is_rounded(table: str, bound: float | None, width: int) -> None:
    rotary = Rotary(ModelConfig(n_head=1, n_embd=width, block_size=256, position="rotary", rotary_table=table))
    q, k = torch.randn(2, 1, 1, 1, width, generator=torch.Generator().manual_seed(0)).expand(-1, -1, 256, -1, -1)
    scores = (rotary(q)[0, :, 0].double() @ rotary(k)[0, :, 0].double().T) / (q[0, 0].norm() * k[0, 0].norm())
    spread = max(float(scores.diagonal(-d).max() - scores.diagonal(-d).min()) for d in (0, 1, 7, 100))
    assert spread < bound if bound else 1e-4 < spread < 0.03


def test_q_and_k_are_turned_in_fp32_and_rounded_once() -> None:
    rotary = Rotary(replace(TINY, position="rotary"))
    x = torch.randn(2, 32, 4, 12, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert rotary(x).dtype == torch.bfloat16
    assert torch.equal(rotary(x), rotary(x.float()).bfloat16())
    torch.testing.assert_close(rotary(rotary(x.float()), inverse=True), x.float(), rtol=0, atol=1e-6)


def test_muon_takes_the_matrices_of_a_llama_and_weight_decay_spares_its_gains() -> None:
    model = make(**LLAMA, qk_norm=True)
    groups = build_optimizer(model, OptimConfig(optimizer="muon", weight_decay=0.1), "cpu").param_groups
    sizes = [len(group["params"]) for group in groups]
    assert sizes == [2 * 5, 1, 2 * 4 + 1]  # c_attn, c_proj, three of the MLP; tied embedding; gains
    assert [group["weight_decay"] for group in groups] == [0.1, 0.1, 0.0]
    assert all(p.ndim == 1 for p in groups[2]["params"])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "odd head": ({"position": "rotary", "n_head": 16}, "model.position = 'rotary': expected learned or none"),
    "keys": ({"n_kv_head": 3}, "model.n_kv_head = 3: expected a divisor of model.n_head = 4"),
    "QK-clip": ({"n_kv_head": 2, "qk_clip_tau": 100.0}, "model.qk_clip_tau = 100.0: expected 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_model_can_be_is_refused(name: str) -> None:
    changes, message = REFUSED[name]
    with pytest.raises(UserError, match=message):
        replace(TINY, **changes)


@pytest.mark.parametrize("field", LLAMA)
def test_weights_of_a_gpt2_are_refused_by_field(field: str, tmp_path: Path) -> None:
    torch.save(nanogpt(), tmp_path / "ckpt.pt")
    model = tiny_model(EXACT, **{field: 1 if field == "n_kv_head" else LLAMA[field]})
    with pytest.raises(UserError, match=f"model.{field} = "):
        load_nanogpt(model, tmp_path / "ckpt.pt")
