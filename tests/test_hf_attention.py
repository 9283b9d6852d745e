"""Models of transformers with our attention against the same models with torch's, on small random ones; float64 is the truth."""

from typing import Any

import pytest
import torch
from torch import Tensor

from attention.huggingface import register

transformers = pytest.importorskip("transformers", minversion="4.56")

LENGTH = 24
WINDOW = 8
SIZES = {"vocab_size": 101, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 96, "max_position_embeddings": 64}
NO_TOKENS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
GROUPED = {"num_key_value_heads": 2}
# Multi-head latent attention: V narrower than K. Without experts, which would switch on last bits.
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "first_k_dense_replace": 2}
LATENT |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": GROUPED,
    "Mistral": GROUPED | {"sliding_window": WINDOW},
    "Qwen2": GROUPED,
    "Qwen3": GROUPED | {"head_dim": 32},
    "Gemma2": GROUPED | {"head_dim": 24, "sliding_window": WINDOW, "attn_logit_softcapping": 5.0},
    "DeepseekV3": LATENT,
    "GPT2": {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
}
EACH_FAMILY = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(scope="module")
def ours() -> str:
    """Our attention's name; and ``plain_formula`` has one."""
    transformers.AttentionInterface.register("plain_formula", plain_formula)
    transformers.AttentionMaskInterface.register("plain_formula", transformers.masking_utils.sdpa_mask)
    return register()


def plain_formula(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, *, scaling: Any = None, softcap: Any = None, **_: Any
) -> tuple[Tensor, None]:
    """Attention in the dtype of its inputs, all of it: transformers' eager attention has its softmax in float32."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    s = (scaling or q.shape[3] ** -0.5) * q @ k.transpose(-1, -2)
    s = softcap * torch.tanh(s / softcap) if softcap else s
    mask = torch.ones_like(s, dtype=torch.bool).tril() if mask is None else mask
    seen = mask if mask.dtype == torch.bool else mask == 0
    p = torch.softmax(s.masked_fill(~seen, -1e30), dim=-1) * seen
    return (p @ v).transpose(1, 2), None


def torchs(family: str) -> str:
    """torch's function has no soft-cap."""
    return "eager" if family == "Gemma2" else "sdpa"


def make(family: str, attention: str, **changes: Any) -> Any:
    """A random model, with logits that are not all alike."""
    config = getattr(transformers, f"{family}Config")(**(SIZES | NO_TOKENS | FAMILIES[family] | changes))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.1)
    return model


def batch(case: str = "full") -> dict[str, Tensor]:
    """Tokens and labels: full sequences, padded somewhere, or two packed into one."""
    tokens = torch.randint(101, (2, LENGTH), generator=torch.Generator().manual_seed(5))
    place = torch.arange(LENGTH).expand(2, LENGTH)
    if case == "packed":
        return {"input_ids": tokens, "labels": tokens, "position_ids": place % 15}
    real = {
        "full": place >= 0,
        "left": place >= torch.tensor([[0], [7]]),
        "right": place < torch.tensor([[9], [24]]),
        "middle": (place < torch.tensor([[6], [9]])) | (place > torch.tensor([[8], [9]])),
    }
    # Neither padding nor what is predicted from it.
    labels = tokens.masked_fill(~(real[case] & real[case].roll(1, dims=1)), -100)
    return {"input_ids": tokens, "labels": labels} | ({} if case == "full" else {"attention_mask": real[case].long()})


def loss_and_gradients(model: Any, inputs: dict[str, Tensor], autocast: bool = False) -> Tensor:
    inputs = {name: x.to(model.device) for name, x in inputs.items()}
    with torch.autocast(model.device.type, torch.bfloat16, enabled=autocast):
        loss = model(**inputs, use_cache=False).loss
    loss.backward()
    return torch.cat([loss.detach().flatten(), *(x.grad.flatten() for x in model.parameters())]).double()


@EACH_FAMILY
@pytest.mark.parametrize(
    ("case", "autocast"), [("full", True), *((case, False) for case in ("full", "left", "middle", "right", "packed"))]
)
def test_loss_and_gradients(family: str, case: str, autocast: bool, ours: str, device: torch.device) -> None:
    """1.5 times the error of torch's attention at most."""
    inputs = batch(case)
    exact = loss_and_gradients(make(family, "plain_formula").double().to(device), inputs)
    models = (make(family, name).to(device) for name in (ours, torchs(family)))
    error, allowed = ((loss_and_gradients(model, inputs, autocast) - exact).norm() for model in models)
    assert error <= 1.5 * allowed
    assert allowed < 0.05 * exact.norm()


@EACH_FAMILY
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_with_a_cache(family: str, cache: str, ours: str, device: torch.device) -> None:
    """Two prompts, one padded on the left; more tokens than the window holds."""
    if cache == "static" and family == "GPT2":
        pytest.skip("GPT-2 has no static cache")
    if cache == "static" and family == "DeepseekV3" and int(transformers.__version__.partition(".")[0]) < 5:
        pytest.skip("transformers 4 takes V to be as wide as K there")
    if cache == "static" and device.type == "cuda" and family != "Llama":
        pytest.skip("transformers compiles it there, which one family shows")
    inputs = {name: x[:, :12].to(device) for name, x in batch("left").items() if name != "labels"}
    settings = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0, "output_logits": True}
    settings |= {"cache_implementation": cache if cache == "static" else None, "return_dict_in_generate": True}
    models = (make(family, name).to(device).eval() for name in (ours, torchs(family)))
    found, expected = (model.generate(**inputs, **settings) for model in models)
    assert torch.equal(found.sequences, expected.sequences)
    for a, b in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@EACH_FAMILY
def test_a_second_turn_on_a_kept_cache_with_padding_before_it(family: str, ours: str, device: torch.device) -> None:
    tokens = batch()["input_ids"][:, :12].to(device)
    real = torch.ones_like(tokens)
    real[0, 6:8] = 0
    place = real.cumsum(1).sub(1).clamp(min=0)
    logits = []
    for name in (ours, torchs(family)):
        model = make(family, name).to(device).eval()
        with torch.no_grad():
            cache = model(tokens[:, :6], attention_mask=real[:, :6], use_cache=True).past_key_values
            second = {"attention_mask": real, "position_ids": place[:, 6:], "past_key_values": cache}
            logits.append(model(tokens[:, 6:], **second).logits[real[:, 6:].bool()])
    torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("how", "case"), [("compiled", "full"), ("compiled", "left"), ("checkpointed", "left")])
def test_compiled_in_one_graph_or_checkpointed_it_gives_the_same_bits(how: str, case: str, ours: str) -> None:
    plain, changed = (make("Llama", ours).train() for _ in range(2))
    if how == "compiled":
        changed.compile(backend="aot_eager", fullgraph=True)
    else:
        changed.gradient_checkpointing_enable({"use_reentrant": False})
    assert torch.equal(loss_and_gradients(changed, batch(case)), loss_and_gradients(plain, batch(case)))


def test_a_transformers_too_old_is_refused_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.__version__", "4.55.4")
    with pytest.raises(
        ValueError, match=r"^low-precision attention: transformers = 4\.55\.4: expected 4\.56 or newer$"
    ):
        register()


def test_a_name_keeps_its_numerics(ours: str) -> None:
    """Models that have the name would change without a word."""
    assert register(name=ours) == ours
    with pytest.raises(ValueError, match="expected another one for flash, as it stands for flash_consistent"):
        register("flash", ours)


@pytest.mark.parametrize(("numerics", "message"), [("nope", "numerics = 'nope'"), ("flash_stochastic_o", "no seed")])
def test_numerics_that_no_call_could_have_are_refused_at_once(numerics: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        register(numerics, "another")
