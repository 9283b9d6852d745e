"""The schedule, which optimizer takes which parameter, steps against torch's own, Muon with its iterations replayed, QK-clip."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import causal_scores, same
from tiny_runs import preset, tiny_model
from torch import Tensor, nn
from torch.optim import Muon

from attention.watching.measure import QUERY_CHUNK, largest_logits
from model import GPT, ModelConfig
from training.muon import GraphedMuon, captured
from training.optim import OptimConfig, build_optimizer, learning_rate
from training.qk_clip import clip_qk

MUON_NAMES = {f"transformer.h.0.{name}.weight" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}
TINY = ModelConfig(n_layer=1, n_head=1, n_embd=8, block_size=4, vocab_size=11, vocab_multiple=1, bias=True)


def make_model(config: ModelConfig = TINY) -> GPT:
    return tiny_model(preset("standard"), **vars(config))


def backward(model: nn.Module, step: int) -> None:
    tokens_BT = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(step))
    model.zero_grad()
    model(tokens_BT[:, :-1], tokens_BT[:, 1:])[1].backward()


COSINE = OptimConfig(lr=1.0, min_lr=0.1, warmup_steps=4, decay_steps=14)


def test_cosine_schedule_at_its_corners() -> None:
    rates = {0: 0.2, 3: 0.8, 4: 1.0, 9: 0.55, 14: 0.1, 15: 0.1, 10**9: 0.1}
    assert {step: learning_rate(step, COSINE) for step in rates} == pytest.approx(rates, rel=1e-15)


def test_adamw_decays_matrices_and_embeddings_only() -> None:
    model = make_model()
    optimizer = build_optimizer(model, OptimConfig(weight_decay=0.1), torch.device("cpu"))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, plain = ({names[id(parameter)] for parameter in group["params"]} for group in optimizer.param_groups)
    assert decayed == MUON_NAMES | {"transformer.wte.weight", "transformer.wpe.weight"}
    assert plain == {*names.values()} - decayed
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_muon_pair_steps_as_torchs_muon_and_adamw_alone() -> None:
    config = OptimConfig(optimizer="muon", weight_decay=0.01, muon_momentum=0.9, lr=5e-4)
    ours, theirs = make_model(), make_model()
    matrices = [p for name, p in theirs.named_parameters() if name in MUON_NAMES]
    rest = [p for name, p in theirs.named_parameters() if name not in MUON_NAMES]
    muon = Muon(matrices, lr=5e-4, weight_decay=0.01, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    decayed, plain = ([p for p in rest if (p.ndim > 1) == decays] for decays in (True, False))
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=5e-4, betas=(0.9, 0.95), weight_decay=0.01)
    optimizer = build_optimizer(ours, config, torch.device("cpu"))
    for step in range(3):
        backward(ours, step)
        backward(theirs, step)
        for part in (optimizer, muon, adamw):
            part.step()
    assert same([*ours.parameters()], [*theirs.parameters()])


SHAPES = [(24, 8), (8, 8), (32, 8), (8, 32), (5, 7)] * 2
GPT2 = [(2304, 768), (768, 768), (3072, 768), (768, 3072)]


class Replays:
    """In the place of ``captured`` on a CPU: what is recorded is computed by ``replay`` alone. Counts both."""

    def __init__(self) -> None:
        self.records, self.replays = 0, 0

    def __call__(self, work: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
        self.records += 1
        results = [x.fill_(torch.nan) for x in work()]

        def replay() -> None:
            self.replays += 1
            for result, now in zip(results, work(), strict=True):
                result.copy_(now)

        return results, replay


def matrices(shapes: Iterable[tuple[int, int]], seed: int, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device) for shape in shapes]


def stepped(optimizer_of: Any, shapes: list[Any] = SHAPES, device: str = "cpu", **more: Any) -> list[Tensor]:
    """Weights and momenta after four steps of an optimizer on given gradients."""
    parameters = [nn.Parameter(weight) for weight in matrices(shapes, 0, device)]
    settings = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"}
    optimizer = optimizer_of(parameters, **{**settings, **more})
    for step in range(4):
        for parameter, gradient in zip(parameters, matrices(shapes, 1 + step, device), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return [tensor.detach() for p in parameters for tensor in (p, optimizer.state[p]["momentum_buffer"])]


@pytest.mark.parametrize("more", [{}, {"weight_decay": 0.0}, {"nesterov": False}], ids=str)
def test_replayed_muon_has_the_bits_of_torchs(more: dict[str, Any]) -> None:
    recorder = Replays()
    assert same(stepped(GraphedMuon, record=recorder, **more), stepped(Muon, **more))
    assert (recorder.records, recorder.replays) == (1, 3)


@pytest.mark.gpu
def test_a_cuda_graph_has_the_bits_of_torchs_muon() -> None:
    record = functools.partial(captured, torch.device("cuda", 0))
    graph = stepped(GraphedMuon, GPT2 * 2, "cuda", record=record)
    assert same(graph, stepped(Muon, GPT2 * 2, "cuda"))


CLIPPED = replace(TINY, n_layer=2, n_head=4, n_embd=32, block_size=16, vocab_size=50, qk_clip_tau=1.0)


def make() -> GPT:
    """A model with biases that matter and heads whose logits differ in size."""
    model = make_model(CLIPPED)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for attn in model.attentions():
            attn.c_attn.bias.normal_(0.0, 0.5, generator=generator)
            attn.c_attn.weight[:32] *= torch.arange(10.0, 50.0, 10.0).repeat_interleave(8)[:, None]
    return model


TOKENS = torch.randint(50, (3, 16), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("T", [1, 16, QUERY_CHUNK, 2 * QUERY_CHUNK + 7])
def test_largest_logits_are_those_of_the_whole_causal_matrix(T: int) -> None:
    generator = torch.Generator().manual_seed(7)
    # Integers: every product and sum is exact, whatever the order.
    q, k = (torch.randint(-9, 10, (2, T, 3, 4), generator=generator).float() for _ in range(2))
    expected = causal_scores(q.transpose(1, 2), k.transpose(1, 2), 0.5).amax(dim=(0, 2, 3))
    assert torch.equal(largest_logits(q, k, scale=0.5), expected)
    third = q / 3
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = largest_logits(third, k, scale=0.5)
    assert torch.equal(under_autocast, largest_logits(third, k, scale=0.5))


def test_after_the_clip_the_same_batch_has_its_largest_logit_at_tau() -> None:
    # The first layer's input does not depend on any attention.
    model = make()
    model(TOKENS)
    first = model.attentions()[0].max_logit_H.clone()
    clip_qk(model)
    model(TOKENS)
    assert (first > 1.0).any()
    torch.testing.assert_close(model.attentions()[0].max_logit_H, first.clamp(max=1.0))
