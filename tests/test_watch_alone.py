"""attention/watching/: what is beside a watch stays as it was - threads, copies, other logs - and no failure of its own ends a training."""

from __future__ import annotations

import contextlib
import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from test_watching import B, C, D, H, T, data, llama, records, train
from test_watching import Model as Seen
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from attention import replace_sdpa, watch
from attention.watching import passes


class Model(Seen):
    """It keeps no tensors."""

    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x)
        for block in self.blocks:
            block.seen = ()
        return loss


def state_of_the_process() -> tuple[Any, ...]:
    import torch._dynamo.eval_frame

    modes = torch.overrides._get_current_function_mode_stack()
    return torch._dynamo.eval_frame._stance, modes, functional.scaled_dot_product_attention, dict(passes._replaced)


pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(autouse=True)
def nothing_stays_behind() -> Iterator[None]:
    before = state_of_the_process()
    yield
    assert state_of_the_process() == before


def in_threads(*jobs: Callable[[], object]) -> None:
    """Run them at once; the first failure is raised."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        for done in [pool.submit(job) for job in jobs]:
            done.result()


# ---- threads


def test_threads_that_watch_replace_and_train_do_not_meet() -> None:
    """Half of them watch, half replace torch's function; each gets what it gets alone."""
    first = Model()  # torch has one generator for all threads

    def loss(numerics: str | None, watched: bool) -> float:
        model = copy.deepcopy(first)
        with contextlib.ExitStack() as inside:
            if numerics:
                inside.enter_context(replace_sdpa(numerics))
            if watched:
                seen = inside.enter_context(watch(model, every=1, say=lambda line: None))
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

    in_threads(*(lambda kind=kind: many(kind) for kind in kinds * 2))


@pytest.mark.parametrize("more", [{"s_aux": torch.zeros(2)}, {"position_ids": torch.tensor([[0, 1, 0, 1]])}], ids=str)
def test_a_call_with_a_keyword_that_may_change_attention_is_not_measured(more: dict[str, Tensor]) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import eager_attention_forward

    transformers.AttentionInterface.register("own", lambda *args, **more: eager_attention_forward(*args, **more))
    model, tokens = llama("own", 1), torch.zeros(1, 4, dtype=torch.int64)
    with watch(model, every=1, say=lambda line: None) as seen:
        model(input_ids=tokens)
    assert len(seen.record["max_logit"]) == 1
    refused = pytest.raises(ValueError, match=r"not seen: model\.layers\.0\.self_attn \(LlamaAttention\)")
    with watch(model), refused:
        model(input_ids=tokens, **more)


# ---- copies


@pytest.mark.parametrize("way", [lambda model: model, copy.deepcopy, torch.optim.swa_utils.AveragedModel])
def test_a_copy_of_a_watched_model_is_an_unwatched_model(way: Callable[..., nn.Module], tmp_path: Path) -> None:
    model = Model()
    with watch(model, every=1, log=tmp_path / "log", say=lambda line: None) as seen:
        model.watcher = seen  # as a model does that calls look()
        model(data()).backward()
        before = records(tmp_path / "log")
        other = pickle.loads(pickle.dumps(way(model))).train()
        other(data()).backward()
        assert records(tmp_path / "log") == before
        model(data()).backward()
    assert len(records(tmp_path / "log")) == 2


# ---- inside of a forward pass


class Meddles(Model):
    """Does something to itself in the middle of its forward pass."""

    def __init__(self, what: Callable[[nn.Module], object]) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        self.blocks[0].seen = ()
        self.what(self)
        x, self.blocks[1].seen = self.blocks[1](x), ()
        return x.square().mean()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_training_that_goes_on_after_an_interrupt_is_watched_on(error: type[BaseException], tmp_path: Path) -> None:
    """At an interrupt torch runs no hook."""
    due = [True]

    def interrupt(_: nn.Module) -> None:
        if due:
            due.pop()
            raise error

    model = Meddles(interrupt)
    with watch(model, every=1, log=tmp_path / "log", say=lambda line: None):
        with pytest.raises(error):
            model(data())
        for _ in range(2):
            model(data()).backward()
            assert torch.overrides._get_current_function_mode_stack() == []
    assert [len(record["max_logit"]) for record in records(tmp_path / "log")] == [2, 2]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_model_is_one_pass_a_step(reentrant: bool, tmp_path: Path) -> None:
    """Activation checkpointing calls it again in the backward pass."""
    model = Model()
    with watch(model, every=1, log=tmp_path / "log", say=lambda line: None):
        for step in range(3):
            checkpoint(model, data(step).requires_grad_(), use_reentrant=reentrant).backward()
    assert [record["step"] for record in records(tmp_path / "log")] == [0, 1, 2]
    assert all("dq_error" in record for record in records(tmp_path / "log"))


# ---- failures of its own


def four_steps(settings: dict[str, Any]) -> list[str]:
    """What is warned of in four steps that are looked at; their weights are those of an unwatched model."""
    plain, watched = Model(), Model()
    train(plain, 4)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with watch(watched, **{"every": 1, "say": lambda line: None, **settings}):
            train(watched, 4)
    for one, other in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(one, other)
    return [str(warning.message) for warning in found]


def raises(*_: object, **__: object) -> None:
    raise RuntimeError("planted")


OWN_FAILURES = {
    "full disk": ({"log": "/dev/full"}, "the log ends before step 0"),
    "W&B": ({"wandb": type("Run", (), {"log": raises})()}, "RuntimeError: planted"),
    "say": ({"say": raises}, "RuntimeError: planted"),
    "measure": ({}, "measuring failed, and the training goes on"),
}


@pytest.mark.parametrize("name", OWN_FAILURES)
def test_a_failure_of_its_own_is_one_warning(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a measurement: as where the memory of a GPU does not suffice."""
    pytest.importorskip("wandb")
    if name == "measure":
        monkeypatch.setattr("attention.watching.look.measure", raises)
    settings, said = OWN_FAILURES[name]
    (warning,) = four_steps(settings)
    assert said in warning


# ---- W&B


@pytest.mark.parametrize(("every", "row"), [(2, 1), (1, 7)])
def test_wandb_loses_no_row_of_the_loop(every: int, row: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = wandb.init(project="x", dir=str(tmp_path), settings=wandb.Settings(console="off", silent=True))
    steps = []
    with watch(model, every=every, optimizer=optimizer, wandb=run, say=lambda line: None):
        for step in range(10):
            train(model, 1, optimizer)
            if (step + 1) % row == 0:
                run.log({"row": step // row}, step=step // row)
                steps.append(run.step)
    run.log({}, commit=True)
    kept = run.summary.get("row")
    table = run.summary["attention"]
    run.finish()
    assert kept == max(10 // row - 1, 0)
    assert steps == list(range(10 // row))
    assert table["nrows"] == 2 * H


# ---- attention that hands itself over


class Own(nn.Module):
    """Two key heads, and a softmax that no one sees; tensors [B, T, H, D] as flash_attn has them, or [B, H, T, D]."""

    def __init__(self, number: int, layout: str = "BTHD") -> None:
        super().__init__()
        torch.manual_seed(number)
        self.q_proj, self.kv_proj, self.out = nn.Linear(C, H * D), nn.Linear(C, H * D), nn.Linear(H * D, C)
        self.number, self.layout, self.watcher = number, layout, None

    def operands(self, x: Tensor) -> list[Tensor]:
        """[B, H, T, D]"""
        q = self.q_proj(x).view(B, T, H, D)
        return [y.transpose(1, 2) for y in (q, *self.kv_proj(x).view(B, T, 2, H // 2, D).unbind(2))]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.operands(x)
        if self.layout == "BTHD":
            q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        heads = self.layout.index("H")
        axes = self.layout.lower()
        s = torch.einsum(f"{axes},{axes.replace('t', 's')}->bhts", q, k.repeat_interleave(2, heads)) * D**-0.5
        p = s.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
        o = torch.einsum(f"bhts,{axes.replace('t', 's')}->{axes}", p, v.repeat_interleave(2, heads))
        if self.watcher is not None:
            self.watcher.look(q, k, v, o, layer=self.number, causal=True, layout=self.layout)
        o = o if self.layout == "BTHD" else o.transpose(1, 2)
        return x + self.out(o.reshape(B, T, C))


class Torchs(Own):
    """The same by torch's function."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.operands(x)
        o = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.out(o.transpose(1, 2).reshape(B, T, C))


def looked_at(model: nn.Module) -> tuple[dict[str, Any], list[str]]:
    said: list[str] = []
    with watch(model, every=1, say=said.append) as seen:
        for layer in model.modules():
            if isinstance(layer, Own):
                layer.watcher = seen
        model(data()).square().mean().backward()
    return seen.record, said


@pytest.mark.parametrize("layout", ["BTHD", "BHTD"])
@pytest.mark.parametrize("compiled", [False, True])
def test_attention_that_is_handed_over_is_measured_as_torchs(layout: str, compiled: bool) -> None:
    torch.compiler.reset()
    own, torchs = nn.Sequential(Own(3, layout), Own(7, layout)), nn.Sequential(Torchs(3), Torchs(7))
    called: Any = torch.compile(own, backend="eager", fullgraph=True) if compiled else own
    found, said = looked_at(called)
    expected, _ = looked_at(torchs)
    assert found.pop("layers") == [3, 7]
    assert "of layers 3, 7" in said[-1]
    del expected["row_residual"]  # nobody knows what computed the others
    assert set(found) == set(expected)
    for name in found:
        if isinstance(found[name], list):
            # Gradients of two formulas, which differ by FP32's rounding.
            torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(expected[name]), rtol=1e-4, atol=1e-5)


def test_modules_whose_attention_is_not_seen_are_named() -> None:
    model = nn.Sequential(Torchs(0), nn.Sequential(Own(1)), nn.Linear(C, C))
    said: list[str] = []
    with watch(model, every=1, say=said.append) as seen:
        for _ in range(2):
            model(data()).sum().backward()
    assert ["not seen: 1.0 (Own)" in line for line in said] == [True, False]
    assert seen.record["hidden"] == 1
    with watch(alone := nn.Sequential(Own(0))), pytest.raises(ValueError, match=r"not seen: 0 \(Own\)"):
        alone(data())
    alone(data())  # the hooks are gone


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.ones(B, T, 3, D)}, r"k = \[3, 24, 3, 16\]: expected a shape that fits q \[3, 24, 4, 16\], BTHD"),
        ({"o": torch.ones(B, H, T, D)}, "o = .*: expected a shape"),
        ({"layer": 0}, "layer = 0: expected each layer once"),
    ],
)
def test_what_cannot_be_handed_over_is_refused(change: dict[str, Any], message: str) -> None:
    class Hands(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            q, k = x * torch.ones(B, T, H, D), x * torch.ones(B, T, 2, D)
            good = {"q": q, "k": k, "v": k, "o": q * 1.0, "layout": "BTHD"}
            self.watcher.look(**good, layer=0)
            self.watcher.look(**{**good, "layer": 1, **change})
            return q.sum()

    with watch(model := Hands(), every=1) as model.watcher, pytest.raises(ValueError, match=f"^watch: look: {message}"):
        model(torch.ones((), requires_grad=True))
