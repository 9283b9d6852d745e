"""attention/watching/: what it measures of anyone's model, that it changes nothing, and what it says."""

from __future__ import annotations

import gc
import json
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from attention import watch
from attention.watching.log import read_log
from attention.watching.measure import COLUMNS
from attention.watching.verdict import answer

B, T, H, D, C = 3, 24, 4, 16, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(C, 3 * C), nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.view(B, T, H, D).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        o = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        self.seen = (q, k, v, o)
        return x + self.out(o.transpose(1, 2).reshape(B, T, C))


class Model(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x.square().mean()


def data(step: int = 0) -> Tensor:
    return torch.randn(B, T, C, generator=torch.Generator().manual_seed(step))


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
    model = Model().to(device)
    with watch(model, sequences=B) as seen, torch.autocast(device.type, torch.bfloat16):
        loss = model(data().to(device))
        block = model.blocks[1]
        q, k, v, o = block.seen
        do, dq = torch.autograd.grad(loss, (o, q), retain_graph=True)
        loss.backward()
    q, k, v, o, do, dq = (x.detach().to(torch.bfloat16).double().cpu() for x in (q, k, v, o, do, dq))
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
    s = (q @ k.mT / D**0.5).masked_fill(hidden, -math.inf)
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
    assert set(expected) | {"row_residual"} == set(COLUMNS)
    for name, value in expected.items():
        torch.testing.assert_close(torch.tensor(seen.record[name][1]).double(), value, rtol=2e-3, atol=1e-6, msg=name)


def test_the_rounding_of_o_is_seen_in_delta_and_in_r_and_is_none_in_fp32() -> None:
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        model = Model().to(dtype)
        with watch(model) as seen:
            model(data().to(dtype)).backward()
        found[dtype] = {name: max(map(max, seen.record[name])) for name in ("delta_error", "row_residual", "dq_error")}
    for name, rounded in found[torch.bfloat16].items():
        assert rounded > 1e-3 > 100 * found[torch.float32][name]


@pytest.mark.parametrize("masked", [False, True])
def test_row_residuals_are_those_of_the_kernel_in_use(masked: bool) -> None:
    """torch's math formula forms delta from P: its rows sum to 0 though O is in BF16. Only the forward pass has a pinned kernel."""

    class Attends(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            mask = torch.zeros(T, T).masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -math.inf)
            mask[0] = -math.inf  # as of padding
            how = {"attn_mask": mask.bfloat16()} if masked else {"is_causal": True}
            return functional.scaled_dot_product_attention(q, k, k * 1.0, **how)[:, :, 1:].square().sum()

    draw = torch.Generator().manual_seed(1)
    q, k = (torch.randn(B, H, T, D, generator=draw).bfloat16().requires_grad_() for _ in range(2))
    found, error = {}, 0.0
    for name in ("flash", "math"):
        with watch(model := Attends(), say=lambda line: None) as seen:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION if name == "flash" else SDPBackend.MATH):
                loss = model(q, k)
            loss.backward()
        error, found[name] = (math.hypot(*seen.record[column][0]) for column in ("delta_error", "row_residual"))
    assert 0.5 * error < found["flash"] < 2 * error
    assert found["math"] < 1e-2 * error


@pytest.mark.parametrize("counted_by", ["forward passes", "optimizer"])
def test_every_nth_step_is_looked_at_once(tmp_path: Path, counted_by: str) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if counted_by == "optimizer" else None
    with watch(model, every=2, log=tmp_path / "log", optimizer=optimizer, start=7):
        train(model, 5, optimizer)
        model.eval()
        model(data())
    looks = records(tmp_path / "log")
    assert [look["step"] for look in looks] == [8, 10]
    assert [look["clock"] for look in looks] == pytest.approx([0.8, 1.0] if optimizer else [8, 10])


def two_forwards_and_one_backward(model: nn.Module) -> None:
    (model(data(0)) + model(data(1))).backward()


def two_backwards_of_one_forward(model: nn.Module) -> None:
    loss = model(data())
    loss.backward(retain_graph=True)
    loss.backward()


def backwards_in_another_order(model: nn.Module) -> None:
    losses = [model(data(step)) for step in range(2)]
    for loss in reversed(losses):
        loss.backward()


@pytest.mark.parametrize("every", [1, 100])
@pytest.mark.parametrize(
    "loop", [two_forwards_and_one_backward, two_backwards_of_one_forward, backwards_in_another_order]
)
def test_any_order_of_passes_is_watched(loop: Any, every: int, tmp_path: Path) -> None:
    with watch(model := Model(), every=every, log=tmp_path / "log"):
        loop(model)
    assert len(records(tmp_path / "log")[-1]["dq_error"]) == 2


def test_a_look_keeps_no_graph() -> None:
    """A hook that holds a tensor of its own graph makes a circle through C++, which no collector finds."""
    model, seen = Model(), []
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


def test_attention_in_torchs_own_module_is_seen(tmp_path: Path) -> None:
    model, file = Model(), tmp_path / "watch.jsonl"
    model.blocks.append(TorchsLayer(weights=False))
    with watch(model, every=1, log=file, sequences=B):
        x = data()
        model(x).backward()
    with torch.no_grad():
        for block in model.blocks[:2]:
            x = block(x)
        module = model.blocks[2].attention
        q, k, _ = (x @ module.in_proj_weight.T).view(B, T, 3, H, D).permute(2, 0, 3, 1, 4)
    [record] = records(file)
    assert record["max_logit"][2] == pytest.approx((q @ k.mT / D**0.5).amax(dim=(0, 2, 3)).tolist(), rel=1e-4)
    assert len(record["dq_error"]) == 3
    assert "hidden" not in record


def test_attention_that_cannot_be_seen_is_said_and_its_file_never_answers_no(tmp_path: Path) -> None:
    model, file, said = Model(), tmp_path / "watch.jsonl", []
    with watch(model, every=1, log=file):
        train(model, 4)
    assert verdict(file)[0].startswith("NO")
    model.blocks.append(TorchsLayer(weights=True))
    with watch(model, every=1, log=file, start=4, say=said.append):
        train(model, 4)
    assert [line for line in said if "not seen: blocks.2.attention (MultiheadAttention)" in line] == said[:1]
    assert verdict(file)[0].startswith("UNCLEAR: 1 attention layer")


def test_activation_checkpointing_and_compilation_hide_nothing(device: torch.device) -> None:
    looks, x = [], data().to(device)
    for kind in ("plain", "checkpointed", "compiled"):
        model = Model().to(device)
        model.checkpointed = kind == "checkpointed"
        backend = "eager" if device.type == "cpu" else "inductor"
        called: Any = torch.compile(model, backend=backend) if kind == "compiled" else model
        if kind == "compiled":
            called(x).backward()
            model.zero_grad()
        with watch(called) as seen:
            called(x).backward()
        looks.append({name: value for name, value in seen.record.items() if name != "clock"})
    assert looks[0] == looks[1] == looks[2]
    assert len(looks[0]["dq_error"]) == 2


def llama(implementation: str, layers: int = 2) -> nn.Module:
    """A model of Hugging Face with two key heads. Implementation "mine": torch's function, under a name that was registered."""
    transformers = pytest.importorskip("transformers")
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    transformers.AttentionInterface.register("mine", lambda *args, **more: sdpa_attention_forward(*args, **more))
    shape = {"num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    config = transformers.LlamaConfig(**shape, intermediate_size=64, vocab_size=50)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).train()


TOKENS = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("implementation", ["sdpa", "mine", "local"])
def test_hugging_face_models_with_grouped_queries(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = pytest.importorskip("transformers.modeling_utils")
    functions = library.ALL_ATTENTION_FUNCTIONS
    monkeypatch.setitem(functions, "local", lambda *args, **more: functions["sdpa"](*args, **more))
    torch.manual_seed(0)
    model = llama(implementation)
    before = dict(functions)
    with watch(model) as seen:
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    assert dict(functions) == before
    assert [len(heads) for heads in seen.record["max_logit"]] == [4, 4]
    assert all(0 < error < 1e-3 for heads in seen.record["dq_error"] for error in heads)


class Growing(nn.Module):
    """One head of two, whose logits grow as the power ``power`` of the step."""

    def __init__(self, power: float) -> None:
        super().__init__()
        self.power, self.step, self.weight = power, 0, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        q = self.weight * x * 100 * (self.step / 10) ** self.power
        return functional.scaled_dot_product_attention(q, x, x).sum()


@pytest.mark.parametrize(("power", "leaves"), [(4.0, True), (2.0, False)])
def test_a_layer_that_leaves_is_named_in_one_line(power: float, leaves: bool) -> None:
    said: list[str] = []
    model = Growing(power)
    with watch(model, every=1, say=said.append) as seen:
        for _ in range(40):
            model(data().view(B, T, H, D).transpose(1, 2)).backward()
    assert list(seen.left) == [0] * leaves
    assert len(seen._alarm._probes[0]) < 15  # of 40: those behind the window are dropped
    *warned, last = said
    assert len(warned) == leaves
    assert all("layer 0" in line and "\n" not in line for line in said)
    largest = max(seen.record["max_logit"][0])  # it grew to the end
    assert last.startswith(f"watch: largest logit {largest:.4g}, at step 39 in attention layer 0 of layers 0 to 0")
    assert ("45,426" in last) == (largest > 45_426) == leaves


def growing(steps: range, log: Path | None, **chosen: Any) -> tuple[dict[int, int], list[str]]:
    """Layers that ran away, and what was said, in some steps of a run of ``Growing``."""
    said: list[str] = []
    model = Growing(4.0)
    model.step = steps.start
    with watch(model, every=1, log=log, start=steps.start, say=said.append, **chosen) as seen:
        for _ in steps:
            model(data().view(B, T, H, D).transpose(1, 2)).backward()
    return seen.left, said


def test_from_an_earlier_checkpoint_later_steps_go_off_the_log_and_are_kept_beside_it(tmp_path: Path) -> None:
    straight, _ = growing(range(40), tmp_path / "straight")
    growing(range(30), tmp_path / "log")
    before = (tmp_path / "log").read_bytes()
    left, said = growing(range(6, 40), tmp_path / "log")
    assert left == straight
    assert records(tmp_path / "log") == records(tmp_path / "straight")
    assert (tmp_path / "log.before_6").read_bytes() == before
    assert "24 record(s) from step 6 on are taken off; log.before_6 has them" in said[0]
    growing(range(6, 7), tmp_path / "log")
    assert (tmp_path / "log.before_6").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "log.before_6", "log.before_6_2", "straight"]


def test_a_record_that_a_kill_cut_short_is_left_out(tmp_path: Path) -> None:
    log = tmp_path / "log"
    growing(range(5), log)
    log.write_bytes(log.read_bytes()[:-7])
    growing(range(5, 7), log)
    assert [record["step"] for record in records(log)] == [0, 1, 2, 3, 5, 6]


class NanGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.nan


@pytest.mark.parametrize(("kernel", "factor", "made"), [(True, 1.0, 1.0), (False, math.nan, 0.0), (False, 1.0, 0.0)])
def test_a_nan_that_a_kernel_made_is_told_from_the_models_own(kernel: bool, factor: float, made: float) -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            q = x * 1.0
            o = functional.scaled_dot_product_attention(q, x.detach(), x.detach())
            return (o * factor).sum() + (NanGradient.apply(q).sum() if kernel else 0.0)

    said: list[str] = []
    with watch(model := Broken(), say=said.append) as seen:
        model(torch.randn(1, 1, 4, 8, requires_grad=True)).backward()
    assert seen.record["nan_made"] == [[made]]
    *warned, _ = said  # and the largest logit, at the end
    assert len(warned) == made


def test_the_module_inside_a_compiled_one_is_refused_in_one_line() -> None:
    torch.compiler.reset()
    model = Growing(1.0)
    compiled = torch.compile(model, backend="eager")
    x = data().view(B, T, H, D).transpose(1, 2)
    with (
        watch(model, every=1),
        pytest.raises(
            ValueError, match=r"^watch: the model is compiled: expected what torch\.compile\(model\) returned"
        ),
    ):
        compiled(x)
    with watch(compiled, every=1) as seen:
        compiled(x).backward()
    assert len(seen.record["max_logit"]) == 1


@pytest.mark.parametrize(("field", "value"), [("every", 0), ("log", "no/such/folder/watch.jsonl")])
def test_arguments_of_another_kind_are_refused_in_one_line(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{value!r}: .*expected") as error:
        watch(**({"model": Model()} | {field: value}))
    assert "\n" not in str(error.value)


def test_a_log_of_another_run_is_not_added_to_and_loses_nothing(tmp_path: Path) -> None:
    log, other = tmp_path / "log", tmp_path / "other"
    growing(range(3), log)
    before = log.read_bytes()
    with pytest.raises(ValueError, match=r"a new file, as this one has steps to 2; or start=") as error:
        watch(Model(), log=log)
    assert "\n" not in str(error.value)
    assert log.read_bytes() == before
    for text in ("notes\n", "[]\n", '{"loss": 1}\n'):
        other.write_text(text)
        with pytest.raises(ValueError, match="a new file, or one of watch"):
            watch(Model(), log=other)
        assert other.read_text() == text
