"""training/intervention.py: a layer's attention switched in mid-run, the same bits for a replay, a resume and a compiled model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tiny_runs import Place, column, preset

from attention import AttentionConfig, AttentionRule, AttentionSpec
from attention.plan import switched
from errors import UserError
from model import GPT, ModelConfig, initialize
from training.intervention import Switch, parse_switch, plans_at

BF16 = {"precision.dtype": "bfloat16"}
SWITCH = {"alarm.switches": ("7:1:flash_delta_from_p",)}


# ---- plans


def test_all_heads_move_and_keep_their_base_and_sites() -> None:
    rule = AttentionRule(
        heads=(1,), attention=AttentionSpec(preset="standard", numerics="rounded_forward", sites=("output=m7",))
    )
    (plan,) = AttentionConfig(
        flash_backend="flash_reference", default=AttentionSpec(numerics="rounded_forward"), rules=(rule,)
    ).resolve(1, 3)
    moved = switched(plan, "flash_fp32_o")
    assert [(group.heads, group.spec) for group in moved.groups] == [
        ((0, 2), AttentionSpec(preset="flash_fp32_o", numerics="rounded_forward")),
        ((1,), AttentionSpec(preset="flash_fp32_o", numerics="rounded_forward", sites=("output=m7",))),
    ]


@pytest.mark.parametrize(
    ("spec", "to", "backend", "expected"),
    [
        (AttentionSpec(preset="flash", backend="flash"), "flash_fp32_o", "", "flash"),
        (AttentionSpec(preset="flash", backend="flash"), "standard", "", "standard"),
        (AttentionSpec(preset="flash"), "flash_fp32_o", "flash", "flash"),
        (AttentionSpec(preset="sdpa_flash"), "flash_fp32_o", "", "flash_reference"),
    ],
)
def test_a_backend_stays_where_it_fits(spec: AttentionSpec, to: str, backend: str, expected: str) -> None:
    (plan,) = AttentionConfig(flash_backend="flash_reference", default=spec).resolve(1, 2)
    assert [group.backend for group in switched(plan, to, backend).groups] == [expected]


def test_plans_are_a_function_of_the_step() -> None:
    base = preset("flash").resolve(3, 2)
    switches = [Switch(9, 1, "flash_untiled"), Switch(4, 1, "flash_fp32_o"), Switch(4, 2, "standard")]
    names = {
        step: [plan.groups[0].spec.preset for plan in plans_at(base, switches, step)] for step in (3, 4, 8, 9, 100)
    }
    assert names[3] == ["flash"] * 3
    assert names[4] == names[8] == ["flash", "flash_fp32_o", "standard"]
    assert names[9] == names[100] == ["flash", "flash_untiled", "standard"]


@pytest.mark.parametrize("text", ["5000:1", "-5:1:flash", "5:1:flash:flash:flash"])
def test_what_is_no_switch_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"alarm\.switches.*STEP:LAYER:PRESET"):
        parse_switch(text)


@pytest.mark.parametrize(
    ("text", "message"), [("5:2:flash_fp32_o", "a layer from 0 to 1"), ("5:1:sdpa_cudnn", "it needs a CUDA device")]
)
def test_a_switch_that_cannot_be_fails_before_the_run_starts(place: Place, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        place.train("impossible", {"alarm.switches": (text,)})
    assert not (place.runs / "impossible").exists()


# ---- runs


@pytest.fixture(scope="module")
def switched_run(place: Place) -> Path:
    return place.train("switched", {**BF16, **SWITCH})


def test_the_switch_acts_from_its_step_on(place: Place, switched_run: Path) -> None:
    without = place.train("without", BF16)
    before, after = (column(run, "train_loss") for run in (without, switched_run))
    # delta takes part in the backward pass alone: step 7's loss is still the same, the weights behind it are not.
    assert before[:8] == after[:8]
    assert before[8] != after[8]


# ---- compiled


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
def test_a_compiled_model_follows_a_switch() -> None:
    config = ModelConfig(n_layer=2, n_head=2, n_embd=16, block_size=16, vocab_size=32, vocab_multiple=1)
    base = preset("flash").resolve(2, 2)
    tokens = torch.randint(32, (2, 17), generator=torch.Generator().manual_seed(0))
    torch._dynamo.reset()

    def gradients(compiled: bool) -> list[torch.Tensor]:
        model = GPT(config, base)
        initialize(model, seed=0)
        called = torch.compile(model) if compiled else model
        seen = []
        for plans in (base, plans_at(base, [Switch(0, 1, "flash", ""), Switch(0, 1, "flash_stochastic_o")], 0), base):
            model.set_plans(plans)
            for _ in range(2):
                model.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    _, loss = called(tokens[:, :-1], tokens[:, 1:], torch.tensor(3))
                loss.backward()
                seen.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        return seen

    eager, compiled = gradients(False), gradients(True)
    # The switch itself shows, far above the noise between eager and compiled.
    change = torch.linalg.norm(eager[2] - eager[0])
    for one, other in zip(eager, compiled, strict=True):
        assert torch.linalg.norm(one - other) < 0.05 * change
    assert torch.equal(compiled[0], compiled[4])
