"""attention/watching/: what it measures of any model and says; it changes nothing, and no failure of its own ends a training."""

import contextlib
import copy
import functools
import gc
import json
import math
import pickle
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from attention_cases import causal_scores, same
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import attention
from attention import replace_sdpa, watch
from attention.check import capture
from attention.watching import passes
from attention.watching.log import read_log
from attention.watching.measure import COLUMNS, Call, measure
from attention.watching.verdict import answer, table

B, T, H, D, C = 3, 24, 4, 16, 64
pytestmark = pytest.mark.filterwarnings("error")


def state_of_the_process() -> tuple[Any, ...]:
    import torch._dynamo.eval_frame

    modes = torch.overrides._get_current_function_mode_stack()
    return torch._dynamo.eval_frame._stance, modes, functional.scaled_dot_product_attention, dict(passes._replaced)


@pytest.fixture(autouse=True)
def nothing_stays_behind() -> Iterator[None]:
    before = state_of_the_process()
    yield
    assert state_of_the_process() == before


class Block(nn.Module):
    """Two heads share a key."""

    seen: tuple[Tensor, ...] = ()

    def __init__(self, number: int = 0, *, keeps: bool = False) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.qkv, self.out, self.number, self.keeps = nn.Linear(C, 2 * C), nn.Linear(C, C), number, keeps

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(B, T, 2 * H, D).transpose(1, 2).split((H, H // 2, H // 2), dim=1)
        o = self.attend(q, k, v)
        self.seen = (q, k, v, o) if self.keeps else ()
        return x + self.out(o.transpose(1, 2).reshape(B, T, C))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Model(nn.Module):
    """Its blocks keep what they read if ``keeps``; ``meddle`` acts on it in the middle of its forward pass."""

    def __init__(self, *, keeps: bool = False, meddle: Callable[[], object] | None = None) -> None:
        super().__init__()
        self.blocks, self.meddle = nn.ModuleList([Block(number, keeps=keeps) for number in range(2)]), meddle
        self.checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
            if self.meddle:
                self.meddle()
        return x.square().mean()


def data(step: int = 0) -> Tensor:
    return torch.randn(B, T, C, generator=torch.Generator().manual_seed(step))


def drawn() -> tuple[Tensor, Tensor]:
    """Two of q's shape."""
    q, k = (torch.randn(B, H, T, D, generator=torch.Generator().manual_seed(seed)) for seed in range(2))
    return q, k


def train(model: nn.Module, steps: int = 1, optimizer: torch.optim.Optimizer | None = None) -> None:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(data(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def verdict(path: Path) -> list[str]:
    return answer(read_log(path))


def test_columns_are_those_of_a_plain_fp64_computation(device: torch.device) -> None:
    model = Model(keeps=True).to(device)
    with watch(model, sequences=B) as seen, torch.autocast(device.type, torch.bfloat16):
        loss = model(data().to(device))
        block = model.blocks[1]
        q, k, v, o = block.seen
        do, dq = torch.autograd.grad(loss, (o, q), retain_graph=True)
        loss.backward()
    q, k, v, o, do, dq = (x.detach().to(torch.bfloat16).double().cpu() for x in (q, k, v, o, do, dq))
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    s = causal_scores(q, k, D**-0.5)
    p, dp = s.softmax(dim=-1), do @ v.mT
    delta, low = (p * dp).sum(-1), (do * o).sum(-1)
    size = delta.square().mean(dim=(0, 2)).sqrt()
    exact = ((p * (dp - delta[..., None])) @ k / D**0.5).sum(dim=(0, 2))
    expected = {
        "max_logit": s.amax(dim=(0, 2, 3)),
        "entropy": -(p * p.clamp(min=1e-300).log()).sum(-1).mean(dim=(0, 2)),
        "one_hot": (p.amax(-1) > 1 - 2**-9).double().mean(dim=(0, 2)),
        "delta_error": (low - delta).square().mean(dim=(0, 2)).sqrt() / size,
        "delta_bias": (low - delta).mean(dim=(0, 2)) / size,
        "dq_error": (dq.sum(dim=(0, 2)) - exact).norm(dim=-1) / exact.norm(),
        "nan_made": torch.zeros(H).double(),
    }
    assert set(expected) | {"row_residual", "o_error"} == set(COLUMNS)
    for name, value in expected.items():
        torch.testing.assert_close(torch.tensor(seen.record[name][1]).double(), value, rtol=2e-3, atol=1e-6, msg=name)


class Attends(nn.Module):
    """torch's function of q, k and another V of k, or of ``v``; with sinks or a soft-cap this package's."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor | None = None, **more: Any) -> Tensor:
        function = (attention if {"sinks", "softcap"} & set(more) else functional).scaled_dot_product_attention
        return function(q, k, k * 1.0 if v is None else v, **more)


def record_of(*qkv: Tensor, sequences: int = 1, **how: Any) -> dict[str, Any]:
    """What is found of one call of ``Attends`` and its backward pass."""
    with watch(model := Attends(), sequences=sequences) as seen:
        model(*qkv, **how).square().sum().backward()
    return seen.record


@pytest.mark.parametrize("masked", [False, True])
def test_row_residuals_are_those_of_the_kernel_in_use(masked: bool) -> None:
    """torch's math formula forms delta from P: its rows sum to 0 though O is in BF16. Only the forward pass has a pinned kernel."""
    mask = torch.zeros(T, T).masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -math.inf).bfloat16()
    mask[0] = -math.inf  # as of padding
    how: dict[str, Any] = {"attn_mask": mask} if masked else {"is_causal": True}
    draw = torch.Generator().manual_seed(1)
    q, k = (torch.randn(B, H, T, D, generator=draw).bfloat16().requires_grad_() for _ in range(2))
    found, error = {}, 0.0
    for name in ("flash", "math"):
        with watch(model := Attends()) as seen:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION if name == "flash" else SDPBackend.MATH):
                loss = model(q, k, **how)[:, :, 1:].square().sum()
            loss.backward()
        error, found[name] = (math.hypot(*seen.record[column][0]) for column in ("delta_error", "row_residual"))
    assert 0.5 * error < found["flash"] < 2 * error
    assert found["math"] < 1e-2 * error


def test_row_residuals_of_fp16_are_those_without_a_loss_scale() -> None:
    looks, (q, k) = [], drawn()
    for scale in (1.0, 2.0**11):
        with watch(model := Attends()) as seen:
            (model(q.half().requires_grad_(), k.half(), is_causal=True).float().square().sum() * scale).backward()
        looks.append(torch.tensor(seen.record["row_residual"]))
    torch.testing.assert_close(*looks, rtol=0.05, atol=0)


def test_values_of_another_head_dim_have_row_residuals() -> None:
    q, k = drawn()
    found = record_of(q.requires_grad_(), k, k[..., :8], is_causal=True)
    assert all(0 < residual < 1e-6 for residual in found["row_residual"][0])


def test_a_sink_is_one_more_key_without_a_value() -> None:
    sinks = torch.tensor([-9.0, 0.0, 2.0, 9.0])
    q, k = drawn()
    found = record_of(q.requires_grad_(), k, sequences=B, is_causal=True, sinks=sinks)
    s = torch.cat((causal_scores(q.double(), k.double(), D**-0.5), sinks[:, None, None].expand(B, H, T, 1)), dim=-1)
    entropy = torch.special.entr(s.softmax(dim=-1)).sum(-1).mean(dim=(0, 2)).float()
    torch.testing.assert_close(torch.tensor(found["entropy"][0]), entropy.detach())
    assert all(0 < error < 1e-5 for name in ("delta_error", "dq_error") for error in found[name][0])


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_the_minimum_hides_a_key_from_our_attention_as_false_does(softcap: float) -> None:
    """Six rows see no key: torch's function would give these the mean of V."""
    visible, looks = torch.ones(T, T, dtype=torch.bool).tril().logical_and(torch.arange(T) > 5), []
    q, k = drawn()
    for mask in (visible, torch.zeros(T, T).masked_fill(~visible, torch.finfo().min)):
        with watch(model := Attends()) as seen:
            (model(q.requires_grad_(), k, attn_mask=mask, softcap=softcap) - 1).square().sum().backward()
        looks.append(torch.tensor([seen.record[name] for name in COLUMNS if name in seen.record]))
    torch.testing.assert_close(*looks)


def handed_over(q: Tensor, k: Tensor, weights: Callable[[Tensor], Tensor], **told: Any) -> dict[str, Any]:
    """What is found of attention with V = K that hands itself over, and its backward pass."""

    class Hands(nn.Module):
        def forward(self) -> Tensor:
            o = weights(q @ k.mT * D**-0.5) @ k
            seen.look(q, k, k, o, **told)
            return o.square().sum()

    with watch(model := Hands(), every=1) as seen:
        model().backward()
    return seen.record


def test_a_bias_is_added_behind_the_soft_cap() -> None:
    bias, (q, k) = torch.arange(T) * torch.tensor(-0.5), drawn()
    found = handed_over(q.requires_grad_(), k, lambda s: (s.tanh() + bias).softmax(-1), softcap=1.0, mask=bias)
    assert all(0 < error < 1e-5 for error in found["dq_error"][0])


@pytest.mark.parametrize(("caps", "held"), [((0.0, 0.0), None), ((2.0, 0.0), [2.0, 0.0]), ((3.0, 2.0), [3.0, 2.0])])
def test_a_record_holds_the_soft_cap_of_each_layer_that_its_logits_are_after(caps: Any, held: Any) -> None:
    q, k = drawn()
    with watch(model := Model(), every=1) as seen:
        model.forward = lambda _: [seen.look(q, k, k, softcap=cap) for cap in caps]  # type: ignore[assignment]
        model(data())
    assert seen.record.get("softcap") == held


def test_a_mask_of_an_fp64_model_is_added_in_fp32() -> None:
    mask = torch.zeros(T, T).double().masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -math.inf)
    q = torch.randn(B, H, T, D, dtype=torch.float64, requires_grad=True)
    assert all(0 < error < 1e-5 for error in record_of(q, q * 1.0, attn_mask=mask)["dq_error"][0])


def test_a_bias_is_rounded_where_autocast_rounds_it() -> None:
    q, k, bias = torch.randn(3, B, H, T, T, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16):
        looks = [record_of(q.requires_grad_(), k, attn_mask=x) for x in (bias + 9, (bias + 9).bfloat16().float())]
    assert looks[0] == looks[1]


def test_a_mask_that_transformers_hands_over_is_not_rounded_under_autocast() -> None:
    q, k = torch.randn(2, B, H, T, D, generator=torch.Generator().manual_seed(1))
    mask = torch.zeros(1, 1, T, T).masked_fill(torch.arange(T)[:, None] > 5, torch.finfo().min)  # rows of padding

    def added(_: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **more: Any) -> tuple[Tensor]:
        return (((q @ k.mT * more["scaling"] + mask).softmax(-1) @ v).transpose(1, 2),)

    pytest.importorskip("transformers").AttentionInterface.register("own", added)
    with torch.autocast("cpu", torch.bfloat16), watch(model := Asks()) as seen:
        model(q.bfloat16().requires_grad_(), k.bfloat16(), mask).sum().backward()
    assert all(0 < error < 0.05 for error in seen.record["dq_error"][0])


@pytest.mark.parametrize("bias", [causal_upper_left(T, T), causal_lower_right(T, T)], ids=["upper left", "lower right"])
def test_torchs_causal_bias_is_a_causal_mask(bias: Tensor) -> None:
    """A tensor whose own storage is never written."""
    q = torch.randn(B, H, T, D, requires_grad=True)
    looks = (record_of(q, q * 1.0, **mask) for mask in ({"attn_mask": bias}, {"is_causal": True}))
    values = (torch.tensor([look[name] for name in COLUMNS if name in look]) for look in looks)
    torch.testing.assert_close(*values, rtol=1e-3, atol=1e-6)


class Uses(nn.Module):
    """Two calls with one query, which stands for the keys or values, too, where ``kind`` has its letter, and other uses of it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.q = nn.Parameter(torch.randn(B, H, T, D, generator=torch.Generator().manual_seed(0)).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        q = self.q * 1.0 if "leaf" not in self.kind else self.q
        before = q.square().sum()
        k, v = (q if letter in self.kind else x for letter in "kv")
        o = sum(functional.scaled_dot_product_attention(q, k, v).square().sum() for _ in range(2))
        return o + before + q.sin().sum()


@pytest.mark.parametrize("kind", ["q", "qk", "qv", "qkv", "leaf q", "leaf qkv"])
def test_a_query_of_several_uses_has_the_error_and_the_gradient_of_each(kind: str) -> None:
    """The gradient that training gets keeps its bits."""
    x, model = torch.randn(B, H, T, D, generator=torch.Generator().manual_seed(1)).bfloat16(), Uses(kind)
    model(x).backward()
    bits, model.q.grad = model.q.grad, None
    with watch(model, every=1) as seen:
        model(x).backward()
    assert all(0 < error < 0.02 for heads in seen.record["dq_error"] for error in heads)
    assert same([bits], [model.q.grad])
    assert not model.q._backward_hooks


@pytest.mark.parametrize("sequences", [1, B])
def test_a_query_that_broadcasts_over_the_batch_has_no_error_of_dq(sequences: int) -> None:
    """Its gradient is a sum over the batch."""
    q, k = torch.randn(1, H, T, D, requires_grad=True), torch.randn(B, H, T, D)
    found = record_of(q, k, sequences=sequences)
    assert "dq_error" not in found
    assert all(0 < error < 1e-5 for error in found["delta_error"][0])


@pytest.mark.parametrize("sequences", [1, 5])
def test_a_mask_of_five_dimensions_hides_what_it_hides_in_four(sequences: int) -> None:
    q, k = torch.randn(3, 2, H, T, D, requires_grad=True), torch.randn(3, 2, H, T, D)
    mask, looks = torch.arange(T) < torch.tensor([T, 5, 2])[:, None, None, None, None], []
    for how in ({"attn_mask": mask}, {"attn_mask": mask.expand(3, 2, 1, 1, T).flatten(0, 1)}):
        four = how["attn_mask"].ndim == 4
        found = record_of(*((x.flatten(0, 1) if four else x) for x in (q, k)), sequences=sequences, **how)
        looks.append(torch.tensor([found[name] for name in ("max_logit", "entropy", "one_hot")]))
    torch.testing.assert_close(*looks)


@pytest.mark.parametrize("masked", [False, True])
def test_a_call_of_three_dimensions_is_one_head_of_so_many_sequences(masked: bool) -> None:
    q, k = torch.randn(B, T, D).bfloat16().requires_grad_(), torch.randn(B, T, D).bfloat16()
    mask, looks = torch.arange(T) < torch.tensor([T, 5, 2])[:, None, None], []
    for heads in ((), (1,)):
        how = {"attn_mask": mask.view(B, *heads, 1, T)} if masked else {"is_causal": True}
        with sdpa_kernel(SDPBackend.MATH):
            found = record_of(*(x.view(B, *heads, T, D) for x in (q, k)), sequences=2, **how)
        looks.append(torch.tensor([found[name] for name in COLUMNS if name in found]))
    torch.testing.assert_close(*looks)
    assert looks[0].shape == (len(COLUMNS) - 1, 1, 1)  # o_error


@pytest.mark.parametrize("shape", [(B, T, D), (T, D)])
def test_the_rows_of_a_call_of_fewer_dimensions_are_those_of_its_kernel(shape: tuple[int, ...]) -> None:
    """torch's math formula, whose rows sum to 0, where four dimensions have flash attention."""
    q, k = torch.randn(shape).bfloat16().requires_grad_(), torch.randn(shape).bfloat16()
    found = record_of(q, k, is_causal=True)
    assert found["row_residual"][0][0] < 1e-2 * found["delta_error"][0][0]
    assert 0 < found["dq_error"][0][0] < 0.02


def test_hooks_of_a_query_that_was_handed_over_go_with_the_look() -> None:
    q, k = drawn()
    assert "dq_error" in handed_over(q.requires_grad_(), k, lambda s: s.softmax(-1))
    assert not q._backward_hooks


@pytest.mark.parametrize(
    ("every", "accumulated", "steps"), [(2, 0, [8, 10]), (2, 1, [8, 10]), (1, 0, [7, 8, 9, 10]), (1, 3, [7, 8, 9, 10])]
)
def test_every_nth_step_is_looked_at_once(every: int, accumulated: int, steps: list[int], tmp_path: Path) -> None:
    """A step of an optimizer may be of several forward passes; without one each pass is a step, also without a backward pass."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if accumulated else None
    with watch(model, every=every, optimizer=optimizer, log=tmp_path / "log", start=7):
        for _ in range(4):
            losses = [model(data()) for _ in range(max(accumulated, 1))]
            if optimizer is not None:
                sum(losses).backward()
                optimizer.step()
        model.eval()
        model(data())
    looks = records(tmp_path / "log")
    assert [look["step"] for look in looks] == steps
    assert [look["clock"] for look in looks] == pytest.approx([step * (0.1 if accumulated else 1.0) for step in steps])


@pytest.mark.parametrize("checkpointed", [False, True])
def test_layers_that_take_no_gradient_are_frozen_but_not_those_whose_checkpoint_hides_it(checkpointed: bool) -> None:
    model, x = Model(), data().requires_grad_(checkpointed)
    model.blocks[0].requires_grad_(checkpointed)
    with watch(model, every=1) as seen:
        (checkpoint(model, x, use_reentrant=True) if checkpointed else model(x)).backward()
    assert seen.record.get("frozen") == (None if checkpointed else [0])


def test_a_query_without_a_gradient_whose_key_has_one_is_told_from_a_frozen_layer() -> None:
    """As in the first layer with adapters on keys alone."""
    found = record_of(torch.randn(B, H, T, D), torch.randn(B, H, T, D, requires_grad=True), is_causal=True)
    assert (found["frozen_q"], "frozen" in found) == ([0], False)


@pytest.mark.parametrize("kind", ["foreach", "fused"])
@pytest.mark.parametrize(
    ("loop", "given", "told"),
    [("FBFBSZ", False, 1), ("FFBSZ", False, 1), ("FBFBSZ", True, 0), ("FBSZ", False, 0), ("FZBS", False, 0)],
)
def test_passes_between_which_no_weight_changes_are_told_that_they_count_as_steps(
    loop: str, given: bool, told: int, kind: str
) -> None:
    """``loop``: forward passes, backward passes, steps and zeroing of gradients in their order."""
    losses: list[Tensor] = []
    said: list[str] = []
    optimizer = torch.optim.AdamW((model := Model()).parameters(), **{kind: True})
    does: dict[str, Callable[[], object]] = {
        "F": lambda: losses.append(model(data())),
        "B": lambda: losses.pop().backward(),
        "S": optimizer.step,
        "Z": lambda: optimizer.zero_grad(set_to_none=False),
    }
    with watch(model, optimizer=optimizer if given else None, say=said.append):
        for act in 2 * loop:
            does[act]()
    assert sum("no weight is seen to change" in line for line in said) == told


def test_a_step_of_another_models_optimizer_is_no_step_of_the_watched_one() -> None:
    said, other = [], torch.optim.SGD([torch.ones(1, requires_grad=True)])
    with watch(model := Model(), say=said.append):
        for _ in range(2):
            model(data()).backward()
            other.step()
    assert any("no weight is seen to change" in line for line in said)


def test_another_number_of_calls_is_one_warning() -> None:
    """As where layers are skipped at random: another layer has that number then."""
    model = Model()

    def steps() -> None:
        with watch(model, every=1):
            for skipped in (False, False, True, False, True):
                model.blocks[0].attend = (lambda q, k, v: q) if skipped else functools.partial(Block.attend, None)
                model(data()).backward()

    with pytest.warns(UserWarning, match=r"^watch: calls of attention = 1 at step 2, 2 at step 1: expected") as found:
        steps()
    assert len(found) == 1


def test_layers_that_give_their_numbers_may_be_left_out() -> None:
    with watch(model := nn.Sequential(Own(3), Own(7)), every=1) as seen:
        for called in (model, nn.Identity()):
            model[1].watcher = seen if called is model else None
            model[0].watcher = seen
            model(data()).square().mean().backward()
    assert seen.record["layers"] == [3]


@pytest.mark.parametrize(
    ("passes", "factor", "settings", "said"),
    [
        (1, 1.0, {"every": 5, "start": 1}, "watch: no step was looked at (every = 5)"),
        (1, math.nan, {}, "watch: no look had finite logits"),
        (0, 1.0, {}, "watch: no forward pass with gradients in training mode"),
        (2, 1.0, {"optimizer": torch.optim.SGD([torch.ones(1)])}, "watch: the optimizer made no step in 2 forward"),
    ],
)
def test_a_watch_that_saw_nothing_says_why(passes: int, factor: float, settings: dict[str, Any], said: str) -> None:
    model, lines = Model(), []
    with warnings.catch_warnings(record=True, action="always") as warned, watch(model, say=lines.append, **settings):
        for _ in range(passes):
            model(data() * factor).backward()
    assert any(line.startswith(said) for line in [*lines, *(str(one.message) for one in warned)])


def test_a_warning_names_the_line_of_the_loop() -> None:
    with pytest.warns(UserWarning, match="^watch: no forward pass") as warned, watch(Model()):
        pass
    assert warned[0].filename == __file__


@pytest.mark.parametrize("trained", [False, True])
def test_a_model_that_may_be_trained_in_eval_mode_is_warned_of_at_its_third_pass(trained: bool) -> None:
    with warnings.catch_warnings(record=True, action="always") as warned, watch(model := Model(), every=1):
        if trained:
            model(data())
        with torch.no_grad():
            model.eval()(data())
        for passes in range(1, 5):
            model(data()).backward()
            assert any("if they train the model" in str(one.message) for one in warned) == (passes > 2 and not trained)


def test_an_optimizer_that_makes_no_step_is_warned_of_while_the_run_can_be_mended() -> None:
    """After as many passes as hardly a step takes."""
    model, optimizer = nn.Linear(1, 1), torch.optim.SGD([torch.ones(1)])
    with watch(model, every=2, start=1, optimizer=optimizer):
        for _ in range(1000):
            model(torch.ones(1))
        with pytest.warns(UserWarning, match="made no step in 1000 forward passes: expected .*, unless one step takes"):
            model(torch.ones(1))


class Around(torch.optim.Optimizer):
    """As Accelerate's: an instance of torch's class that has none of its hooks."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


@pytest.mark.parametrize(
    "groups", [lambda free, frozen: [{"params": free}], lambda free, frozen: [{"params": frozen}, {"params": free}]]
)
@pytest.mark.parametrize("around", [lambda optimizer: optimizer, lambda optimizer: Around(Around(optimizer))])
def test_an_optimizers_steps_and_its_largest_rate_make_the_clock(around: Any, groups: Any) -> None:
    """The rate is loaded after ``watch``, as by a Trainer when it starts, and stands for that of the steps before."""
    model = Model()
    free, frozen = (block.parameters() for block in model.blocks)
    optimizer = around(torch.optim.SGD(groups(free, frozen), lr=0.0))
    with watch(model, every=1, optimizer=optimizer, start=3) as seen:
        optimizer.param_groups[-1]["lr"] = 0.1
        train(model, 3, optimizer)
    assert (seen.record["step"], seen.record["clock"]) == (5, pytest.approx(0.5))


@pytest.mark.parametrize("wrapped", [False, True])
def test_steps_that_a_scaler_skips_are_counted(wrapped: bool) -> None:
    """In FP16 a run that has died makes no other. A watch that closes before the other ends nothing."""
    model, scalers_step = Model(), torch.amp.GradScaler.step
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer, scaler = Around(inner) if wrapped else inner, torch.amp.GradScaler("cpu")
    with watch(model, every=1, optimizer=optimizer) as seen:
        inside = watch(model, optimizer=inner)
        for step in range(4):
            scaler.scale(model(data(step)) * (math.inf if step else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            if step == 1:
                inside.close()
    assert (seen.record["step"], seen.record["clock"]) == (3, pytest.approx(0.3))
    assert torch.amp.GradScaler.step is scalers_step


def test_who_has_wrapped_the_scalers_step_since_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = torch.optim.SGD((model := Model()).parameters(), lr=0.1)
    monkeypatch.setattr(torch.amp.GradScaler, "step", torch.amp.GradScaler.step)  # undone at the end
    with watch(model, optimizer=optimizer):
        theirs = functools.wraps(ours := torch.amp.GradScaler.step)(lambda *of: ours(*of))
        torch.amp.GradScaler.step = theirs  # type: ignore[method-assign]
        train(model, 1, optimizer)
    assert torch.amp.GradScaler.step is theirs


def test_a_watch_that_nobody_closes_is_freed_with_its_model() -> None:
    """As when a notebook's cell is run again."""
    optimizer = torch.optim.SGD((model := Model()).parameters(), lr=0.1)
    seen = watch(model, optimizer=optimizer)
    train(model, 1, optimizer)
    kept = weakref.ref(seen), weakref.ref(model)
    del seen, model, optimizer
    gc.collect()
    assert [one() for one in kept] == [None, None]


def test_a_rate_of_zero_stands_for_no_steps_before() -> None:
    optimizer = torch.optim.SGD((model := Model()).parameters(), lr=0.0)
    with watch(model, optimizer=optimizer, start=3), pytest.raises(ValueError, match=r"^watch: learning rate = 0\.0: "):
        train(model, 1, optimizer)


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (Around(None), "'Around': expected one of torch"),
        (torch.optim.SGD([{"params": [torch.ones(1)], "lr": None}]), "'SGD': expected one whose groups all have a "),
    ],
)
def test_an_optimizer_without_countable_steps_or_a_learning_rate_is_refused(optimizer: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"^watch: optimizer = {said}"):
        watch(Model(), optimizer=optimizer)


@pytest.mark.parametrize("every", [1, 100])
@pytest.mark.parametrize("order", [(), (0, 0), (1, 0)])
def test_any_order_of_passes_is_watched(order: tuple[int, ...], every: int, tmp_path: Path) -> None:
    """One backward pass of two forward passes; two of one; two in another order."""
    with watch(model := Model(), every=every, log=tmp_path / "log"):
        losses = [model(data(step)) for step in range(max(order, default=1) + 1)]
        for loss in [losses[step] for step in order] or [sum(losses)]:
            loss.backward(retain_graph=True)
    assert len(records(tmp_path / "log")[-1]["dq_error"]) == 2


def test_a_look_keeps_no_graph() -> None:
    """A hook that holds a tensor of its own graph makes a circle through C++, which no collector finds."""
    model, seen = Model(keeps=True), []
    with watch(model, every=1):
        for _ in range(2):
            train(model)
            for block in model.blocks:
                seen += [weakref.ref(tensor) for tensor in block.seen]
                block.seen = ()
        gc.collect()
        assert not any(tensor() is not None for tensor in seen)


class TorchsLayer(nn.Module):
    """Attention by torch's own module. Its weights hide the call."""

    def __init__(self, weights: bool) -> None:
        super().__init__()
        self.attention, self.weights = nn.MultiheadAttention(C, H, batch_first=True), weights

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=self.weights)[0]


def test_torchs_module_has_row_residuals_inside_replace_sdpa() -> None:
    with replace_sdpa("flash"), watch(model := TorchsLayer(weights=False)) as seen:
        model(data()).square().mean().backward()
    assert all(0 < residual < 0.01 for residual in seen.record["row_residual"][0])


def test_torchs_module_is_seen_where_other_code_stands_for_torchs_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "scaled_dot_product_attention", lambda q, k, v, *_: (q @ k.mT).softmax(-1) @ v)
    with watch(model := TorchsLayer(weights=False)) as seen:
        model(data()).square().mean().backward()
    assert len(seen.record["dq_error"]) == 1


KINDS = ("plain", "blocks checkpointed", "checkpoints compiled", "compiled", "checkpointed", "checkpointed by hooks")


def test_activation_checkpointing_and_compilation_hide_nothing(device: torch.device, tmp_path: Path) -> None:
    """Where the whole model is called again in the backward pass, it is one step all the same."""
    looks, x = [], data().to(device).requires_grad_()
    for kind in KINDS:
        model = Model().to(device)
        model.checkpointed = kind == "blocks checkpointed"
        if kind == "checkpoints compiled":
            model.blocks = nn.ModuleList(map(checkpoint_wrapper, model.blocks))
            for block in model.blocks:
                block.compile(backend="aot_eager")
        called: Any = model
        if kind == "compiled":
            with warnings.catch_warnings(action="ignore"):  # said by the first compilation of a process on a GPU
                called = torch.compile(model, backend="eager" if device.type == "cpu" else "inductor")
                called(x).backward()
            model.zero_grad()
        with watch(called, every=1, log=tmp_path / kind):
            if kind.startswith("checkpointed"):
                checkpoint(model, x, use_reentrant=kind == "checkpointed").backward()
            else:
                called(x).backward()
        looks += records(tmp_path / kind)
    assert len(looks) == len(KINDS)
    assert all(look == looks[0] for look in looks)
    assert len(looks[0]["dq_error"]) == 2


@pytest.mark.parametrize("start", [0, 1])
def test_compiled_blocks_within_checkpointing_are_refused_in_the_first_pass(start: int) -> None:
    model: Any = Model()
    model.checkpointed = True
    if start:
        model.blocks[1].compile(backend="eager")
    else:
        model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    with watch(model, start=start), pytest.raises(ValueError, match=r"^watch: compiled blocks within activation"):
        model(data())


def llama(implementation: str, layers: int = 2) -> nn.Module:
    """A model of Hugging Face with two key heads. Implementation "mine": torch's function, under a name that was registered."""
    transformers = pytest.importorskip("transformers")
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    transformers.AttentionInterface.register("mine", lambda *args, **more: sdpa_attention_forward(*args, **more))
    shape = {"num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    config = transformers.LlamaConfig(**shape, intermediate_size=64, vocab_size=50)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).train()


TOKENS = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("implementation", "written", "foreign"),
    [("sdpa", None, False), ("mine", None, True), ("local", None, True), ("ours", "flash", False)],
)
def test_hugging_face_models_with_grouped_queries(
    implementation: str, written: str | None, foreign: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log names what register() made; only O of a function that is neither torch's nor ours may be wrong."""
    library = pytest.importorskip("transformers.modeling_utils")
    functions = library.ALL_ATTENTION_FUNCTIONS
    monkeypatch.setitem(functions, "local", lambda *args, **more: functions["sdpa"](*args, **more))
    attention.huggingface.register("flash", "ours")
    torch.manual_seed(0)
    model = llama(implementation)
    before = dict(functions)
    with watch(model) as seen:
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    assert dict(functions) == before
    assert [len(heads) for heads in seen.record["max_logit"]] == [4, 4]
    for column in ("dq_error", "row_residual"):
        assert all(0 < error < 1e-3 for heads in seen.record[column] for error in heads)
    assert (seen.record.get("attention"), "o_error" in seen.record) == (written, foreign)


@pytest.mark.parametrize(
    ("last", "hidden", "written"),
    [(Block, None, "flash_consistent"), (lambda: Own(1), None, None), (lambda: TorchsLayer(weights=True), 1, None)],
)
def test_the_log_names_the_attention_of_replace_sdpa_where_that_has_all_calls(
    last: Callable[[], nn.Module], hidden: int | None, written: str | None
) -> None:
    model = nn.Sequential(Block(), last())
    with replace_sdpa("robust"), watch(model) as seen:
        model[1].watcher = seen
        model(data()).sum().backward()
    assert (seen.record.get("hidden"), seen.record.get("attention")) == (hidden, written)


class Asks(nn.Module):
    """Calls by names what transformers has registered, as its models of images do."""

    is_causal = True

    def __init__(self, name: str = "own") -> None:
        super().__init__()
        self.config = Mock(_attn_implementation=name)

    def forward(self, q: Tensor, k: Tensor, mask: Tensor | None, **more: Any) -> Tensor:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        function = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        return function(self, query=q, key=k, value=k, attention_mask=mask, scaling=0.5, **more)[0]


CAUSAL = torch.ones(1, 1, T, T, dtype=torch.bool).tril()
KEPT = torch.arange(T) < torch.tensor([T, 5, 9])[:, None]
UNPADDED = KEPT[:, None, None] & KEPT[:, None, :, None]


@pytest.mark.parametrize(
    ("name", "mask", "more", "shown"),
    [
        ("own_flash", None, {}, CAUSAL),
        ("own_flash", None, {"is_causal": False, "other": None}, None),
        ("own_flash", None, {"sliding_window": 4}, CAUSAL.triu(-3)),
        ("own_flash", None, {"is_causal": False, "sliding_window": 4}, CAUSAL.triu(-3) | CAUSAL.triu(-3).mT),
        ("own_flash", None, {"is_causal": None}, CAUSAL[..., 9:, :]),
        ("own_flash", KEPT.long(), {"is_causal": False}, UNPADDED),
        ("own_flash", KEPT.long(), {}, CAUSAL & UNPADDED),
        ("own_flash", KEPT, {"sliding_window": 4}, CAUSAL.triu(-3) & UNPADDED),
        ("own_flash", KEPT.flip(1), {}, (CAUSAL & UNPADDED.flip(2, 3))[..., 9:, :]),
        ("own", None, {}, CAUSAL[..., :9, :]),
        ("own", None, {"sliding_window": 4}, CAUSAL.triu(-3)[..., :9, :]),
        ("own", None, {"sliding_window": 4}, torch.ones(1, T, dtype=torch.bool)),
        ("own_flash", CAUSAL, {"sliding_window": 4, "position_ids": torch.tensor([[1, 0]])}, CAUSAL),
    ],
)
def test_the_mask_that_transformers_hands_over_is_read(
    name: str, mask: Tensor | None, more: Any, shown: Tensor | None
) -> None:
    """Of flash kernels the last query, of as many as ``shown`` has, stands at the last key; else the first at the first."""
    transformers = pytest.importorskip("transformers")
    transformers.AttentionInterface.register(name, lambda _, q, k, *rest, **more: ((q @ k.mT @ k).transpose(1, 2),))
    q, k = drawn()
    q = q if shown is None else q[:, :, -shown.shape[-2] :]
    with watch(model := Asks(name), sequences=B) as seen:
        model(q.requires_grad_(), k, mask, **more).sum().backward()
    looks = (seen.record, record_of(q, k, sequences=B, scale=0.5, attn_mask=shown))
    torch.testing.assert_close(*(torch.tensor([look[name] for name in ("max_logit", "entropy")]) for look in looks))
    assert name not in transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS._local_mapping  # a later register() counts


@pytest.mark.parametrize("names", [("sdpa", "own"), ("own", "another")])
def test_parts_of_a_model_with_attention_functions_of_their_own_are_all_seen(names: tuple[str, str]) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import eager_attention_forward

    for name in ("own", "another"):
        transformers.AttentionInterface.register(name, lambda *args, **more: eager_attention_forward(*args, **more))
    model: Any = llama("sdpa")
    for name, layer in zip(names, model.model.layers, strict=True):
        layer.self_attn.config = copy.deepcopy(model.config)
        layer.self_attn.config._attn_implementation = name
    with watch(model) as seen:
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    assert len(seen.record["dq_error"]) == 2


@pytest.mark.parametrize("implementation", [None, "mine"])
@pytest.mark.parametrize("seen_by", [functools.partial(watch, every=1), functools.partial(capture, layers=(0,))])
def test_selective_checkpointing_does_what_it_does_unseen(implementation: str | None, seen_by: Any) -> None:
    """It tells operations apart by their order."""
    contexts = functools.partial(create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_SAVE)
    given: Any = {"input_ids": TOKENS, "labels": TOKENS} if implementation else {"x": data()}
    gradients = []
    for around in (contextlib.nullcontext, seen_by):
        torch.manual_seed(0)
        with around(model := llama(implementation) if implementation else Model()):
            with torch.autocast("cpu", torch.bfloat16):
                out = checkpoint(model, use_reentrant=False, context_fn=contexts, **given)
            (out.loss if implementation else out).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert same(*gradients)


class Growing(nn.Module):
    """One layer whose logits grow as the power ``power`` of the step."""

    def __init__(self, power: float, step: int = 0) -> None:
        super().__init__()
        self.power, self.step, self.weight = power, step, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        q = self.weight * x * 100 * (self.step / 10) ** self.power
        return functional.scaled_dot_product_attention(q, x, x).sum()


def growing(steps: range, log: Path | None = None, power: float = 4.0) -> tuple[Any, list[str]]:
    """What has watched some steps of a run of ``Growing``, and what was said."""
    said: list[str] = []
    with watch(model := Growing(power, steps.start), log=log, every=1, start=steps.start, say=said.append) as seen:
        for _ in steps:
            model(data().view(B, T, H, D).transpose(1, 2)).backward()
            model.weight.detach().zero_().add_(1)  # a step of no learning rate
    return seen, said


@pytest.mark.parametrize(("power", "flagged"), [(4.0, True), (2.0, False)])
def test_a_layer_that_is_flagged_is_named_in_one_line(power: float, flagged: bool) -> None:
    seen, said = growing(range(40), power=power)
    assert list(seen.flagged) == [0] * flagged
    assert len(seen._alarm._probes[0]) < 15  # of 40: those behind the window are dropped
    *told, last = said
    assert sum("is flagged" in line and "growing like the steps to the power" in line for line in told) == flagged
    assert all("layer 0" in line and "\n" not in line and len(line) < 200 for line in said)
    largest = max(seen.record["max_logit"][0])  # it grew to the end
    assert last.startswith(f"watch: largest logit {largest:.4g}, at step 39 in attention layer 0, one of 1")
    assert ("45,426" in last) == (largest > 45_426) == flagged


def test_large_logits_are_told_when_they_come_once_a_run(tmp_path: Path) -> None:
    """Above 1,000 and past the FMA threshold; a resumed run, which begins past both, tells the second."""
    _, said = growing(range(40), log=tmp_path / "log", power=4.0)
    told = [line for line in said[:-1] if "is flagged" not in line]
    assert [line.rpartition("; ")[2].partition(":")[0] for line in told] == ["above 1,000", "past 45,426"]
    step, logit = next((r["step"], x) for r in read_log(tmp_path / "log") if (x := max(r["max_logit"][0])) > 1000)
    assert told[1].endswith("; past 45,426: run the control, from a checkpoint with logits below 1,000")
    assert told[0].startswith(f"step {step}: attention layer 0: largest logit {logit:.4g};")
    _, again = growing(range(40, 44), log=tmp_path / "log", power=4.0)
    assert [line.rpartition("; ")[2].partition(":")[0] for line in again[1:-1]] == ["past 45,426"]


@pytest.mark.parametrize("preset", ["flash_consistent", "flash_delta_from_p"])
def test_a_control_is_told_what_the_verdict_says(preset: str, tmp_path: Path) -> None:
    with replace_sdpa(preset):
        _, said = growing(range(40), tmp_path / "log")
    told = [line.partition(": this run ")[2] or line.rpartition("; this run ")[2] for line in said]
    first = verdict(tmp_path / "log")[0].removeprefix("UNCLEAR: this run ")
    assert (len(told), all(line and first.startswith(line) for line in told), told[-1]) == (4, True, first)


def test_the_fma_threshold_is_that_of_the_dtype(tmp_path: Path) -> None:
    """Logits of about 14,400 are past that of FP16, and before that of BF16."""
    x, told = torch.randn(B, H, T, D, generator=torch.Generator().manual_seed(0)) * 60, []
    for dtype in (torch.float16, torch.bfloat16):
        log = tmp_path / str(dtype)
        with watch(model := Attends(), log=log, say=told.append):
            model(x.to(dtype).requires_grad_(), x.to(dtype), is_causal=True).float().sum().backward()
        told += table(read_log(log))[2:3]
    assert ["5,678" in line for line in told] == [True] * 3 + [False] * 3


def test_from_an_earlier_checkpoint_later_steps_count_no_more_and_are_kept(tmp_path: Path) -> None:
    """And a record that a kill cut short is left out."""
    log = tmp_path / "log"
    straight, _ = growing(range(40), tmp_path / "straight")
    growing(range(30), log)
    before = log.read_bytes()
    log.write_bytes(before + before[:40])
    again, _ = growing(range(6, 40), log)
    assert again.flagged == straight.flagged
    assert read_log(log) == read_log(tmp_path / "straight")
    assert log.read_bytes().startswith(before)


@pytest.mark.timeout(30)
def test_a_log_of_many_looks_is_read_at_once(tmp_path: Path) -> None:
    """A time that grows with the square of their number would be minutes."""
    (log := tmp_path / "log").write_text('{"step": 0, "clock": 0, "max_logit": [[1]]}\n' * 50_000)
    assert len(read_log(log)) == 50_000


@pytest.mark.parametrize(("kernel", "factor", "made"), [(True, 1.0, 1.0), (False, math.nan, 0.0), (False, 1.0, 0.0)])
def test_a_nan_that_a_kernel_made_is_told_from_the_models_own(kernel: bool, factor: float, made: float) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            q = x * 1.0
            o = functional.scaled_dot_product_attention(q, x.detach(), x.detach())
            return (o * factor).sum() + (q - q.detach()).norm()  # whose gradient is NaN, and so q's

    class Broken(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is functional.scaled_dot_product_attention:
                args = (args[0] * 1.0, *args[1:])
                args[0].register_hook(lambda gradient: gradient * torch.nan)
            return func(*args, **kwargs or {})

    said: list[str] = []
    with Broken() if kernel else contextlib.nullcontext(), watch(model := Model(), say=said.append) as seen:
        model(torch.randn(1, 1, 4, 8, requires_grad=True)).backward()
    assert seen.record["nan_made"] == [[made]]
    *warned, _ = said  # and the largest logit, at the end
    assert len(warned) == made


def test_a_ds_that_fp16_cannot_hold_is_no_mistake_of_the_kernel() -> None:
    """As behind a loss scale, in one of its heads; dQ itself would fit."""
    q, k, v, do = torch.randn(4, 1, H, T, D, generator=torch.Generator().manual_seed(0))
    do[:, 0] *= 8000
    given = {"q_BHTD": q, "k_BHSD": k / 20, "v_BHSD": v * 4, "o_BHTD": v, "do_BHTD": do, "dq_BHTD": q * torch.nan}
    shape: dict[str, Any] = {"mask_BHTS": None, "causal": True, "scale": 0.25, "softcap": 0.0, "dropout": 0.0}
    found = measure(Call(**{name: x.half() for name, x in given.items()}, **shape))
    assert found["nan_made"].tolist() == [0.0, 1.0, 1.0, 1.0]


def test_the_module_inside_a_compiled_one_is_refused_in_one_line() -> None:
    torch.compiler.reset()
    model = Growing(1.0)
    compiled = torch.compile(model, backend="eager")
    x = data().view(B, T, H, D).transpose(1, 2)
    refused = pytest.raises(ValueError, match=r"^watch: the model is compiled: expected what torch\.compile")
    with warnings.catch_warnings(action="ignore"), watch(model, every=1), refused:  # by dynamo, of what refuses
        compiled(x)
    with watch(compiled, every=1) as seen:
        compiled(x).backward()
    assert len(seen.record["max_logit"]) == 1


@pytest.mark.parametrize("foreign", ['{"loss": 1}\n', "without an end of line", '{"step": 1, "loss": 1}'])
def test_a_log_of_another_run_is_not_added_to(foreign: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, other = tmp_path / "log", tmp_path / "other"
    growing(range(3), log)
    before = log.read_bytes()
    other.write_text(foreign)
    for path, expected in (
        (log, r"a new file, as this one has steps to 2; or start="),
        (other, "line 1: expected a new file for watch"),
    ):
        with pytest.raises(ValueError, match=expected):
            watch(Model(), log=path)
    assert (log.read_bytes(), other.read_text()) == (before, foreign)
    monkeypatch.setattr("attention.watching.log.PATIENCE", 0.0)
    with watch(model := Model(), log=log, start=3):
        model(data()).backward()
        with pytest.raises(ValueError, match="a file that no other watch writes"):
            watch(Model(), log=log, start=4)


def test_threads_that_watch_replace_and_train_do_not_meet() -> None:
    """Half of them watch, half replace torch's function; each gets what it gets alone."""
    first = Model()  # torch has one generator for all threads

    def loss(numerics: str | None, watched: bool) -> float:
        model = copy.deepcopy(first)
        looking = watch(model, every=1) if watched else contextlib.nullcontext()
        with replace_sdpa(numerics) if numerics else contextlib.nullcontext(), looking as seen:
            with torch.autocast("cpu", torch.bfloat16):
                value = model(data())
            value.backward()
            assert not watched or len(seen.record["dq_error"]) == 2
        return value.item()

    kinds = [(numerics, watched) for numerics in (None, "flash") for watched in (False, True)]
    alone = {kind: loss(*kind) for kind in kinds}

    def many(kind: tuple[str | None, bool]) -> None:
        for _ in range(4):
            assert loss(*kind) == alone[kind], kind

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(many, kinds * 2))


@pytest.mark.parametrize("more", [{"s_aux": torch.zeros(2)}, {"position_ids": torch.tensor([[0, 1, 0, 1]])}], ids=str)
def test_a_call_with_a_keyword_that_may_change_attention_is_not_measured(more: dict[str, Tensor]) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import eager_attention_forward

    transformers.AttentionInterface.register("own", lambda *args, **more: eager_attention_forward(*args, **more))
    model, tokens = llama("own", 1), torch.zeros(1, 4, dtype=torch.int64)
    with watch(model, every=1) as seen:
        model(input_ids=tokens)
    assert len(seen.record["max_logit"]) == 1
    seen_with = r"huggingface\.register\(\) where a model refuses that.*"
    refused = pytest.raises(ValueError, match=seen_with + r"not seen: model\.layers\.0\.self_attn \(LlamaAttention\)")
    with watch(model), refused:
        model(input_ids=tokens, **more)


@pytest.mark.parametrize("way", [lambda model: model, copy.deepcopy, torch.optim.swa_utils.AveragedModel])
def test_a_copy_of_a_watched_model_is_an_unwatched_model(way: Callable[..., nn.Module], tmp_path: Path) -> None:
    model = Model()
    with watch(model, every=1, log=tmp_path / "log") as seen:
        model.watcher = seen  # as a model does that calls look()
        model(data()).backward()
        before = records(tmp_path / "log")
        other = pickle.loads(pickle.dumps(way(model))).train()
        other(data()).backward()
        assert records(tmp_path / "log") == before
        model(data()).backward()
    assert len(records(tmp_path / "log")) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_training_that_goes_on_after_an_interrupt_is_watched_on(error: type[BaseException], tmp_path: Path) -> None:
    """At an interrupt torch runs no hook."""
    model = Model(meddle=Mock(side_effect=chain([error], repeat(None))))
    with watch(model, every=1, log=tmp_path / "log"):
        with pytest.raises(error):
            model(data())
        for _ in range(2):
            model(data()).backward()
            assert torch.overrides._get_current_function_mode_stack() == []
    assert [len(record["max_logit"]) for record in records(tmp_path / "log")] == [2, 2]


# ---- failures of its own


def raises(*_: object, **__: object) -> None:
    raise RuntimeError("planted")


OWN_FAILURES = {
    "full disk": ({"log": "/dev/full"}, "the log ends before step 0"),
    "W&B": ({"wandb": type("Run", (), {"log": raises})()}, "RuntimeError: planted"),
    "say": ({"say": raises}, "RuntimeError: planted"),
    "measure": ({}, "measuring failed, and the training goes on"),
    "open": ({}, "measuring failed, and the training goes on: RuntimeError: planted"),
}


@pytest.mark.parametrize("name", OWN_FAILURES)
def test_a_failure_of_its_own_is_one_warning_and_moves_no_weight(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a measurement: as where the memory of a GPU does not suffice."""
    pytest.importorskip("wandb")
    train(plain := Model(), 4)
    planted = {"measure": "look.measure", "open": "passes._hugging_face"}
    if name in planted:
        monkeypatch.setattr(f"attention.watching.{planted[name]}", raises)
    settings, said = OWN_FAILURES[name]
    with (
        pytest.warns(UserWarning, match=said) as found,
        watch(watched := Model(), **{"every": 1, "say": lambda line: None} | settings),
    ):
        train(watched, 4)
    assert len(found) == 1
    assert same([*plain.parameters()], [*watched.parameters()])


def test_a_layer_that_cannot_be_measured_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Mock(side_effect=[{"max_logit": torch.ones(H)}, RuntimeError, RuntimeError])
    monkeypatch.setattr("attention.watching.look.measure", measured)
    with pytest.warns(UserWarning, match="RuntimeError"), watch(Model()) as seen:
        train(seen._model)
    assert (seen.record["layers"], seen.record["max_logit"]) == ([1], [[1.0] * H])


def test_a_look_that_fails_is_not_called_a_step_that_was_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attention.watching.look.measure", raises)
    with pytest.warns(UserWarning, match="planted"), watch(model := Model(), say=(said := Mock())):
        train(model)
    assert not said.mock_calls


@pytest.mark.parametrize(("every", "row"), [(2, 1), (1, 7)])
def test_wandb_loses_no_row_of_the_loop(every: int, row: int, tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    quiet = wandb.Settings(console="off", silent=True)
    run, steps = wandb.init(project="x", mode="offline", dir=str(tmp_path), settings=quiet), []
    with watch(model, every=every, optimizer=optimizer, wandb=run):
        for step in range(10):
            train(model, 1, optimizer)
            if (step + 1) % row == 0:
                run.log({"row": step // row}, step=step // row)
                steps.append(run.step)
    run.log({}, commit=True)
    kept, table = run.summary.get("row"), run.summary["attention"]
    run.finish()
    assert (kept, steps) == (max(10 // row - 1, 0), list(range(10 // row)))
    assert table["nrows"] == 2 * H


# ---- attention that hands itself over


class Own(Block):
    """The same by a softmax that no one sees; it hands over [B, T, H, D] as flash_attn has them, or [B, H, T, D]."""

    watcher: Any = None

    def __init__(self, number: int, layout: str = "BTHD") -> None:
        super().__init__(number)
        self.layout = layout

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.layout == "BTHD":  # what is handed over has to be what the gradient goes through
            q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        heads = self.layout.index("H")
        axes = self.layout.lower()
        keys = axes.replace("t", "s")
        s = torch.einsum(f"{axes},{keys}->bhts", q, k.repeat_interleave(2, heads)) * D**-0.5
        p = s.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
        o = torch.einsum(f"bhts,{keys}->{axes}", p, v.repeat_interleave(2, heads))
        if self.watcher is not None:
            self.watcher.look(q, k, v, o, layer=self.number, causal=True, layout=self.layout)
        return o.transpose(1, 2) if self.layout == "BTHD" else o


def looked_at(model: nn.Module) -> tuple[dict[str, Any], list[str]]:
    said: list[str] = []
    with watch(model, every=1, say=said.append) as seen:
        for layer in model.modules():
            if hasattr(layer, "watcher"):
                layer.watcher = seen
        model(data()).square().mean().backward()
    return seen.record, said


@pytest.mark.parametrize("layout", ["BTHD", "BHTD"])
@pytest.mark.parametrize("compiled", [False, True])
def test_attention_that_is_handed_over_is_measured_as_torchs(layout: str, compiled: bool) -> None:
    torch.compiler.reset()
    own, torchs = nn.Sequential(Own(3, layout), Own(7, layout)), nn.Sequential(Block(3), Block(7))
    called: Any = torch.compile(own, backend="eager", fullgraph=True) if compiled else own
    found, said = looked_at(called)
    expected, _ = looked_at(torchs)
    assert found.pop("layers") == [3, 7]
    assert ", one of 2" in said[-1]
    del expected["row_residual"]  # nobody knows what computed the others
    assert max(chain(*found.pop("o_error"))) < 1e-6
    assert set(found) == set(expected)
    for name in found:
        if isinstance(found[name], list):
            # Gradients of two formulas, which differ by FP32's rounding.
            torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(expected[name]), rtol=1e-4, atol=1e-5)


class HandsOver(Block):
    """Attention by ``attends``, which looks are told as ``told``, of a call of layer 0."""

    watcher: Any = None

    def __init__(self, attends: Callable[..., Tensor], **told: Any) -> None:
        super().__init__()
        self.attends, self.told = attends, told

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = self.attends(q, k, v)
        self.watcher.look(q, k, v, o, layer=0, **self.told)
        return o


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor = CAUSAL, sinks: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    s = (q @ k.mT * D**-0.5).masked_fill(~mask, -math.inf)
    if sinks is not None:
        s = torch.cat((s, sinks[:, None, None].expand(B, H, T, 1)), dim=-1)
    return functional.dropout(s.softmax(-1)[..., :T], dropout) @ v


@pytest.mark.parametrize(
    ("attends", "told", "said"),
    [
        ({"mask": CAUSAL.triu(-7)}, {"mask": CAUSAL.triu(-7)}, "NO: "),
        ({"mask": CAUSAL.triu(-8)}, {"mask": CAUSAL.triu(-7)}, "UNCLEAR: O of layer 0 ("),
        ({"sinks": torch.arange(4.0)}, {"causal": True, "sinks": torch.arange(4.0)}, "NO: "),
        ({"dropout": 0.5}, {"causal": True, "dropout": 0.5}, "UNCLEAR: 0 of 4 records have the gradient of every "),
    ],
    ids=["right", "another mask", "sinks", "dropout"],
)
def test_the_verdict_on_what_is_handed_over(
    attends: dict[str, Any], told: dict[str, Any], said: str, tmp_path: Path
) -> None:
    model = HandsOver(functools.partial(softmax_attention, **attends), **told)
    with watch(model, every=1, log=tmp_path / "log") as model.watcher, torch.autocast("cpu", torch.bfloat16):
        for step in range(4):
            model(data(step)).square().mean().backward()
    assert verdict(tmp_path / "log")[0].startswith(said)


def misreading(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """It takes dO [B, H, T, D] for [B, T, H, D] in memory, as a kept plan for another layout does (docs/kernels.md)."""
    o = softmax_attention(q, k, v)
    o.register_hook(lambda do: do.transpose(1, 2).reshape(do.shape))
    return o * 1.0


def test_a_kernel_that_misreads_do_shows_in_dq_error() -> None:
    models = (HandsOver(attends, causal=True) for attends in (softmax_attention, misreading))
    (right,), (wrong,) = (looked_at(model)[0]["dq_error"] for model in models)
    assert max(right) < 1e-4
    assert min(wrong) > 0.3


def test_a_look_without_o_has_no_error_of_o() -> None:
    q = torch.randn(1, H, T, D)
    with watch(model := Model(meddle=lambda: seen.look(q, q, q)), every=1) as seen:
        model(data())
    assert "o_error" not in seen.record


@pytest.mark.parametrize(("o_there", "do_there"), [(0.0, 1.0), (9.0, 0.0)])
def test_padded_queries_that_are_0_or_that_nobody_reads_are_no_error_of_o(o_there: float, do_there: float) -> None:
    q, do = torch.randn(2, 1, H, T, D, generator=torch.Generator().manual_seed(0))
    o = functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    o[:, :, 9:], do[:, :, 9:] = o_there, do_there
    shape: dict[str, Any] = {"mask_BHTS": None, "causal": True, "scale": 0.25, "softcap": 0.0, "dropout": 0.0}
    call = Call(q_BHTD=q, k_BHSD=q, v_BHSD=q, o_BHTD=o, do_BHTD=do, foreign=True, **shape)
    assert 0 < measure(call)["o_error"].max() < 1e-6


class Mixer(nn.Module):
    """Like attention by its code alone, as a router of experts is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.inner(x).mT).softmax(-1) @ x


def test_modules_whose_attention_is_not_seen_are_named(tmp_path: Path) -> None:
    """And the model's file never answers NO."""
    file, said = tmp_path / "log", []
    model = nn.Sequential(Block(), nn.Sequential(Own(1)), TorchsLayer(weights=True), TorchsLayer(weights=False))
    with watch(model, every=1, say=said.append, log=file) as seen:
        for _ in range(4):
            model(data()).square().mean().backward()
    named = ["not seen: 1.0 (Own), 2.attention (MultiheadAttention)" in line for line in said]
    assert named == [True, False, False]
    assert (seen.record["hidden"], len(seen.record["dq_error"])) == (2, 2)
    assert verdict(file)[0].startswith("UNCLEAR: 2 attention layer(s)")
    with watch(alone := nn.Sequential(Own(0))), pytest.raises(ValueError, match=r"not seen: 0 \(Own\)"):
        alone(data())
    alone(data())  # the hooks are gone


@pytest.mark.parametrize("kind", ["Mixer", "RecursiveScriptModule"])
def test_what_may_be_attention_is_named_only_where_nothing_is_seen(kind: str) -> None:
    layers = OrderedDict(q_proj=nn.Linear(C, C), k_proj=nn.Linear(C, C))
    with warnings.catch_warnings(action="ignore"):  # TorchScript is deprecated
        own = Mixer() if kind == "Mixer" else torch.jit.script(nn.Sequential(layers))
    with watch(model := nn.Sequential(own, Block())) as seen:
        model(data()).sum().backward()
    assert "hidden" not in seen.record
    with watch(model := nn.Sequential(own)), pytest.raises(ValueError, match=rf"not seen: 0 \({kind}\)"):
        model(data())


@pytest.mark.parametrize("rank", [0, 1])
def test_of_several_processes_only_the_first_says_and_warns(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: rank)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with watch(model := nn.Sequential(Block(), Own(1)), every=1, say=(said := Mock())):
            model(data()).sum().backward()
        watch(Model()).close()  # no pass
    assert (bool(said.mock_calls), len(warned)) == (rank == 0, rank == 0)


@pytest.mark.parametrize("training", [True, False])
def test_a_torch_layer_in_eval_mode_is_warned_of(training: bool) -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(C, H, batch_first=True, dropout=0.0), Block())
    model[0].requires_grad_(False).train(training)
    with warnings.catch_warnings(record=True) as said, watch(model, every=1):
        warnings.simplefilter("always")
        model(data()).sum().backward()
    assert [str(one.message).startswith("watch: 0 is in eval mode") for one in said] == [True] * (not training)


def test_a_look_at_a_call_of_torchs_is_told_that_watch_sees_that_itself() -> None:
    attends = functools.partial(functional.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    twice = r"layer = 0: expected each layer once .* torch's scaled_dot_product_attention need no look\(\)"
    with pytest.raises(ValueError, match=f"^watch: look: {twice}"):
        looked_at(HandsOver(attends, causal=True))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"k": torch.ones(B, T, 3, D)}, r"k = \[3, 24, 3, 16\]: expected a shape that fits q \[3, 24, 4, 16\], BTHD"),
        ({"causal": "no"}, "causal = 'no': expected True or False"),
        ({"causal": torch.ones(2)}, r"causal = tensor\(\[1\., 1\.\]\): expected True or False"),
        ({"scale": math.nan}, "scale = nan: expected a finite number or None"),
        ({"scale": math.inf}, "scale = inf: expected a finite number or None"),
        ({"softcap": -3.0}, r"softcap = -3\.0: expected a finite number of 0 or more"),
        ({"sinks": torch.ones(3)}, r"sinks = \[3\]: expected a tensor \[H\], H = 4"),
        ({"sinks": 1.0}, r"sinks = float: expected a tensor \[H\], H = 4"),
        ({"dropout": 1.5}, r"dropout = 1\.5: expected a number from 0 to 1"),
        ({"mask": torch.ones(T, T).long()}, r"mask is torch\.int64: expected a bool or floating tensor"),
        ({"mask": torch.ones(T, 5)}, r"mask = \[24, 5\]: expected a shape that broadcasts to \[3, 4, 24, 24\]"),
    ],
)
def test_settings_that_cannot_be_are_refused(setting: dict[str, Any], message: str) -> None:
    given = dict.fromkeys("qkv", torch.ones(B, T, H, D)) | setting
    model = Model(meddle=lambda: seen.look(**given, layout="BTHD"))
    with watch(model, every=1) as seen, pytest.raises(ValueError, match=f"^watch: look: {message}"):
        model(data())


@pytest.mark.parametrize("causal", [1, torch.tensor(True), None])
def test_settings_that_python_takes_for_others_are_read(causal: Any) -> None:
    q = torch.randn(1, H, T, D, requires_grad=True)
    model = Model(meddle=lambda: seen.look(q, q, q, causal=causal, softcap=None, dropout=None))
    with watch(model, every=1) as seen:
        model(data())
    assert seen.record["entropy"][1] == record_of(q, q, is_causal=bool(causal))["entropy"][0]
