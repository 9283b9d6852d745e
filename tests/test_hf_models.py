"""Which models of transformers may have our attention: those that call it, as they call "eager"; all others are refused by name."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attention.huggingface import register

transformers = pytest.importorskip("transformers", minversion="4.56")

OURS = "low_precision_attention"
SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES = SMALL | {"intermediate_size": 48, "max_position_embeddings": 64}
OWN: dict[str, Callable[[], Any]] = {
    "bloom": lambda: transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4),
    "falcon": lambda: transformers.FalconConfig(**SMALL),
    "mpt": lambda: transformers.MptConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=4),
    "mpnet": lambda: transformers.MPNetConfig(**SIZES),
    "rwkv, no attention in its sense": lambda: transformers.RwkvConfig(**SMALL),
}


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    assert register() == OURS


@pytest.mark.parametrize("family", OWN)
def test_a_model_with_attention_of_its_own_is_neither_made_nor_switched(family: str) -> None:
    reason = r"^low-precision attention: \w+: its .*(its own, which never calls|attention classes has no).*expected (attn.* = )?'eager'"
    with pytest.raises(ValueError, match=reason):
        transformers.AutoModel.from_config(OWN[family](), attn_implementation=OURS)
    model = transformers.AutoModel.from_config(OWN[family](), attn_implementation="eager")
    cannot = (
        "(no part|transformers cannot)" if "rwkv" in family else r"its \w+ has attention code of its own.* = 'eager' "
    )
    for asked in (OURS, {"": OURS}):
        with pytest.raises(ValueError, match=rf"^low-precision attention: {type(model).__name__}: {cannot}"):
            model.set_attn_implementation(asked)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("copied", [lambda model: model, copy.deepcopy])
@pytest.mark.parametrize("family", OWN)
def test_a_model_whose_config_is_given_our_name_by_hand_is_refused_when_called(family: str, copied: Any) -> None:
    model = copied(transformers.AutoModel.from_config(OWN[family](), attn_implementation="eager"))
    model.config._attn_implementation = OURS
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"{type(model).__name__}: its \w+ has attention code of its own"):
            model(torch.zeros(1, 4, dtype=torch.int64))


def test_a_pickle_of_a_model_that_has_not_our_attention_loads_without_this_package() -> None:
    model = transformers.AutoModel.from_config(transformers.LlamaConfig(**SIZES), attn_implementation="eager")
    whole = pickle.dumps(model)
    assert b"huggingface_models" not in whole
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    assert torch.equal(pickle.loads(whole)(tokens)[0], model(tokens)[0])


def test_a_model_with_a_good_config_changed_by_hand_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = transformers.AutoModel.from_config(transformers.LlamaConfig(**SIZES), attn_implementation="eager")
    model.config._attn_implementation, looks = OURS, []
    # Where another test has imported the installed package, too, it may be that copy which looks at models.
    looking = transformers.PreTrainedModel.post_init.__globals__
    monkeypatch.setitem(looking, "traits_of", lambda x, f=looking["traits_of"]: looks.append(x) or f(x))
    counts = [len(looks) for _ in range(3) if model(torch.zeros(1, 4, dtype=torch.int64))]
    assert 0 < counts[0] == counts[2]


class OwnAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.projection = nn.Linear(width, 3 * width)
        self.weigh = nn.Softmax(dim=-1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.projection(x).chunk(3, dim=-1)
        return self.weigh(q @ k.transpose(-1, -2) + (0 if mask is None else mask)) @ v


def weighted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(q, k, v)


class FusedAttention(OwnAttention):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return weighted(*self.projection(x).chunk(3, dim=-1))


class LinearMixer(nn.Linear):
    """A layer that is no attention, as in hybrid models."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)


def remote(part: Callable[[int], nn.Module]) -> Any:
    """A model such as a repository brings along: a Llama with a part that transformers does not know."""

    class RemoteModel(transformers.LlamaModel):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.extra = part(config.hidden_size)
            self.post_init()

    return RemoteModel


@pytest.mark.parametrize("part", [OwnAttention, FusedAttention])
def test_code_that_transformers_does_not_have_is_refused_too(part: type[nn.Module]) -> None:
    config, reason = (
        transformers.LlamaConfig(**SIZES),
        f"RemoteModel: its {part.__name__} has attention code of its own",
    )
    with pytest.raises(ValueError, match=reason):
        remote(part)._from_config(config, attn_implementation=OURS)
    model = remote(part)._from_config(config, attn_implementation="sdpa")
    with pytest.raises(ValueError, match=reason):
        model.set_attn_implementation(OURS)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("part", [LinearMixer, lambda width: nn.MultiheadAttention(width, 4)])
def test_layers_without_attention_and_torchs_own_change_nothing(part: Any) -> None:
    remote(part)._from_config(transformers.LlamaConfig(**SIZES), attn_implementation=OURS)


def test_a_model_that_declares_no_attention_but_eager_is_refused() -> None:
    """It may use its mask for more than attention, as the router of NLLB-MoE does."""
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    config = transformers.NllbMoeConfig(vocab_size=64, num_experts=4, **sizes)
    with pytest.raises(ValueError, match=r"NllbMoe.*: it declares support of no attention but 'eager'"):
        transformers.NllbMoeModel._from_config(config, attn_implementation=OURS)


def llava(vision: Any, **settings: Any) -> Any:
    config = transformers.LlavaConfig(vision_config=vision, text_config=transformers.LlamaConfig(**SIZES))
    return transformers.LlavaForConditionalGeneration._from_config(config, **settings)


def test_a_part_that_cannot_have_it_is_named_with_what_to_use_and_that_works() -> None:
    own = transformers.VitDetConfig(**(SMALL | {"num_hidden_layers": 1}), image_size=16, patch_size=8)
    with pytest.raises(
        ValueError, match=r"VitDetModel: its VitDetAttention .* 'eager' \(within a larger model by a dict"
    ):
        llava(own, attn_implementation=OURS)
    use = {"": OURS, "text_config": OURS, "vision_config": "eager"}
    made, switched = llava(own, attn_implementation=use), llava(own, attn_implementation="eager")
    with pytest.raises(ValueError, match=r"its VitDetAttention .*('vision_config': 'eager'|'eager' \(within)"):
        switched.set_attn_implementation(OURS)
    assert switched.config.text_config._attn_implementation == "eager"
    switched.set_attn_implementation(use)
    for model in (made, switched):
        assert model.config.text_config._attn_implementation == OURS
        assert model.config.vision_config._attn_implementation == "eager"


def test_a_part_that_transformers_only_logs_it_cannot_switch_is_named() -> None:
    model = llava(transformers.RwkvConfig(**SMALL), attn_implementation="eager")
    with pytest.raises(ValueError, match=r"cannot switch its vision_config to .*'eager' there"):
        model.set_attn_implementation({"text_config": OURS, "vision_config": OURS})


def test_a_dict_that_leaves_the_language_model_as_it_is_is_refused() -> None:
    """Its "" names nothing but the outer config, which no attention reads."""
    use = {"": OURS, "vision_config": "eager"}
    with pytest.raises(ValueError, match=r"LlavaFor.*: {.*} leaves its attention .* for one of \[.*'text_config'"):
        llava(transformers.CLIPVisionConfig(**SIZES), attn_implementation=use)


@pytest.mark.parametrize("name", ["my_flash", "a/b", "paged|x", "sdpa", ""])
def test_names_that_transformers_reads_another_way_are_refused(name: Any) -> None:
    with pytest.raises(ValueError, match="expected"):
        register(name=name)


def call(q: Tensor, k: Tensor, mask: Tensor | None = None, *, causal: bool | None = True, **others: Any) -> Tensor:
    module = nn.Module()
    if causal is not None:
        module.is_causal = causal
    return transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS[OURS](module, q, k, k, mask, **others)[0]


X = torch.randn(1, 1, 4, 8)
CALLS: list[tuple[dict[str, Any], str]] = [
    *(({name: X}, f"^low-precision attention: Module: it has no {name}") for name in ("indices", "sinks", "any")),
    ({"dropout": 0.1}, r"^low-precision attention: Module: dropout = 0\.1: expected 0, .*attention_dropout=0"),
    (
        {"cu_seq_lens_q": X},
        "it has no cu_seq_lens_q, .*; expected position_ids alone.* if the model makes its mask of them .*BioGPT",
    ),
    ({"sliding_window": 3}, "sliding_window = 3 of 4 keys"),
    ({"mask": torch.ones(4, 4, dtype=torch.bool).tril()}, r"attention mask of shape \[4, 4\]"),
    # transformers' "sdpa" takes it for causal, "eager" for full attention.
    ({"causal": None}, "no attention mask and no is_causal"),
    ({"k": X[:, :, :3]}, "4 causal queries, 3 keys"),
]


@pytest.mark.parametrize(("change", "message"), CALLS)
def test_a_call_that_may_mean_another_attention_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(**({"q": X, "k": X} | change))


@pytest.mark.parametrize("others", [{"indices": None}, {"sinks": None}, {"any": None}, {"sliding_window": 4}], ids=str)
def test_a_keyword_that_changes_nothing_is_taken(others: dict[str, Any]) -> None:
    assert torch.equal(call(X, X, **others), call(X, X))


def test_the_setting_that_makes_attention_dropout_is_named() -> None:
    """Of ViT, whose key is another one, and which has a second dropout that is not of attention."""
    sizes = {"image_size": 16, "patch_size": 8, "attention_probs_dropout_prob": 0.25, "hidden_dropout_prob": 0.25}
    model = transformers.ViTModel._from_config(transformers.ViTConfig(**SMALL, **sizes), attn_implementation=OURS)
    with pytest.raises(ValueError, match="load the model with attention_probs_dropout_prob=0; changing the config"):
        model.train()(torch.zeros(1, 3, 16, 16))


def test_fewer_causal_queries_than_keys_without_a_mask_are_the_last_ones() -> None:
    q, k = torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    torch.testing.assert_close(call(q[:, :, 6:], k), call(q, k)[:, 6:])
    torch.testing.assert_close(call(q[:, :, 8:], k, causal=None), call(q, k)[:, 8:])


def test_attention_sinks_are_what_eager_makes_of_them() -> None:
    """Loss and gradients of gpt-oss, those of the sinks among them; with one expert, as another one would switch on last bits."""
    experts = {"num_local_experts": 1, "num_experts_per_tok": 1, "num_key_value_heads": 2, "head_dim": 8}
    tokens = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    gradients = []
    for name in ("eager", OURS):
        config = transformers.GptOssConfig(**(SIZES | experts | {"sliding_window": 5}))
        torch.manual_seed(5)
        model = transformers.GptOssForCausalLM._from_config(config, attn_implementation=name).eval()
        for parameter in (p for p in model.parameters() if p.ndim > 1):
            torch.nn.init.normal_(parameter, std=0.2)  # logits that are not all alike
        for layer in model.model.layers:
            layer.self_attn.sinks.data.copy_(torch.linspace(-1, 2, 4))
        model(tokens, labels=tokens).loss.backward()
        gradients.append({name: x.grad for name, x in model.named_parameters() if x.grad is not None})
    assert any(name.endswith("sinks") for name in gradients[0])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-3, atol=1e-5)


NO_DROPOUT = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
ATTENTIONS = {
    "Llama": lambda: transformers.LlamaConfig(**SIZES),
    "GPT2": lambda: transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, **NO_DROPOUT),
}


@pytest.mark.parametrize("family", ATTENTIONS)
def test_output_attentions_is_refused_also_where_the_model_hides_it(family: str) -> None:
    """transformers' "sdpa" gives an empty tuple."""
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    make = transformers.AutoModelForCausalLM.from_config
    made, switched = (make(ATTENTIONS[family](), attn_implementation=name) for name in (OURS, "eager"))
    switched.set_attn_implementation(OURS)
    for model in (made, switched):
        with pytest.raises(ValueError, match=f"{family}.*: output_attentions: expected False"):
            model(tokens, output_attentions=True)
    switched.set_attn_implementation("eager")
    assert len(switched(tokens, output_attentions=True).attentions) == 2
