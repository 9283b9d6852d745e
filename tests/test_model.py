"""model.py: shapes, initialization, loss, stabilizers, and what it hands to attention."""

from typing import Any

import pytest
import torch
from tiny_runs import preset, tiny_model
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from attention import LayerPlan, dispatch
from model import GPT

STABILIZERS: dict[str, Any] = {
    "qk_norm": True,
    "attention_softcap": 5.0,
    "gated_attention": True,
    "qk_clip_tau": 1.0,  # which QK-norm has no use for
}
OTHERS = {name: value for name, value in STABILIZERS.items() if name != "qk_norm"}


def make(*, seed: int = 1, scale: float = 1.0, **changes: Any) -> GPT:
    """An initialized model; ``scale`` multiplies every weight of two dimensions, so that logits are not all near zero."""
    model = tiny_model(preset("standard", "fp32"), seed=seed, n_embd=32, vocab_size=50, vocab_multiple=64, **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(scale)
    return model


TOKENS = torch.randint(50, (3, 17), generator=torch.Generator().manual_seed(5))
BATCH = TOKENS[:, :-1], TOKENS[:, 1:]


class Spy:
    """Stands in for ``attention.dispatch.run``: keeps q and k of all calls, answers by torch's own attention."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, Tensor]] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: LayerPlan, **rest: Any) -> Tensor:
        self.calls.append((q, k))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    spy = Spy()
    monkeypatch.setattr(dispatch, "run", spy)
    return spy


def same_weights(a: GPT, b: GPT) -> bool:
    others = dict(b.named_parameters())
    shared = [name for name, _ in a.named_parameters() if name in others]
    return len(shared) >= 14 and all(torch.equal(a.get_parameter(n), b.get_parameter(n)) for n in shared)


def test_initialization_is_a_function_of_the_seed() -> None:
    a, b = make(seed=3), make(seed=4)
    torch.manual_seed(99)
    assert same_weights(a, make(seed=3))
    assert not torch.equal(a.w_q(0), b.w_q(0))


@pytest.mark.parametrize("name", STABILIZERS)
def test_initialization_does_not_depend_on_stabilizers(name: str) -> None:
    assert same_weights(make(), make(**{name: STABILIZERS[name]}))


def test_tied_matrix_is_one_parameter_with_both_gradients() -> None:
    tied, untied = make(), make(tie_embeddings=False)
    with torch.no_grad():
        untied.lm_head.weight.copy_(untied.transformer.wte.weight)
    for model in (tied, untied):
        model(*BATCH)[1].backward()
    both = untied.transformer.wte.weight.grad + untied.lm_head.weight.grad
    assert tied.lm_head.weight is tied.transformer.wte.weight
    assert tied.num_parameters() == untied.num_parameters() - 64 * 32
    torch.testing.assert_close(tied.transformer.wte.weight.grad, both)


def test_flops_per_token_are_those_of_the_matrix_products_and_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    def products(q: Tensor, k: Tensor, v: Tensor, plan: LayerPlan, **rest: Any) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return ((q @ k.mT) @ v).transpose(1, 2)

    monkeypatch.setattr(dispatch, "run", products)
    model = make(tie_embeddings=False)
    with FlopCounterMode(display=False) as counter:
        model(*BATCH)[1].backward()
    norms = sum(p.numel() for p in model.parameters() if p.dim() == 1)  # the estimate counts them, the counter does not
    assert model.flops_per_token(16) == counter.get_total_flops() / BATCH[0].numel() + 6 * norms


LLAMA = {"position": "rotary", "norm": "rms", "activation": "swiglu"}


@pytest.mark.parametrize("changes", [{}, {"qk_norm": True}, OTHERS, LLAMA], ids=["plain", "qk_norm", "others", "Llama"])
def test_compiled_without_graph_breaks_equals_eager(spy: Spy, changes: dict[str, Any]) -> None:
    eager, traced = make(scale=5.0, **changes), make(scale=5.0, **changes)
    torch._dynamo.reset()
    compiled = torch.compile(traced, backend="aot_eager", fullgraph=True)
    for model in (eager, compiled):
        model(*BATCH)[1].backward()
    assert torch.equal(eager(*BATCH)[1], compiled(*BATCH)[1])
    pairs = zip(eager.parameters(), traced.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)
    assert torch.equal(eager.attentions()[0].max_logit_H, traced.attentions()[0].max_logit_H)


def test_qk_norm_gives_attention_layer_normed_heads(spy: Spy) -> None:
    model = make(scale=5.0, qk_norm=True)
    attn = model.attentions()[0]
    attn.q_norm.eps = attn.k_norm.eps = 0.0
    torch.nn.init.constant_(attn.q_norm.weight, 3.0)
    model(BATCH[0])
    for heads, gain in zip(spy.calls[0], (3.0, 1.0), strict=True):
        torch.testing.assert_close(heads.mean(dim=-1), torch.zeros(3, 16, 2))
        torch.testing.assert_close(heads.std(dim=-1, correction=0), torch.full((3, 16, 2), gain))


def test_gate_is_the_sigmoid_of_the_attention_input() -> None:
    gated = make(scale=20.0, gated_attention=True).attentions()[0]
    x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(3))
    inputs: list[Tensor] = []
    gated.c_proj.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    gated(x, torch.tensor(0))
    gate, gated.gate = gated.gate, None
    gated(x, torch.tensor(0))
    assert torch.equal(inputs[0], inputs[1] * torch.sigmoid(x @ gate.weight.T))
