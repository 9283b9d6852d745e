"""What changes where a run goes on: a layer's attention switched in mid-run, a new run from a checkpoint; else the bits are the same."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_cases import same
from tiny_runs import Place, column, lines, make_data, optimizer, preset, tiny_model, tree, weights

from attention import AttentionConfig, AttentionRule, AttentionSpec
from attention.plan import switched
from errors import UserError
from training.intervention import AlarmConfig, Interventions, Switch, parse_switch, plans_at

BF16 = {"precision.dtype": "bfloat16"}


# ---- plans


def test_all_heads_move_and_keep_their_base_and_sites() -> None:
    base, own = ({"numerics": "rounded_forward", "sites": sites} for sites in ((), ("output=m7",)))
    rules = (AttentionRule(heads=(1,), attention=AttentionSpec(preset="standard", **own)),)
    (plan,) = AttentionConfig(flash_backend="flash_reference", default=AttentionSpec(**base), rules=rules).resolve(1, 3)
    moved = [(group.heads, group.spec) for group in switched(plan, "flash_fp32_o").groups]
    assert moved == [(heads, AttentionSpec(preset="flash_fp32_o", **x)) for heads, x in (((0, 2), base), ((1,), own))]


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
    ("text", "message"),
    [
        ("5:2:flash_fp32_o", "layer = 2: expected 0 to 1"),
        ("5:1:sdpa_cudnn", ".* it needs a CUDA device"),
        ("5:1:flsh", "attention preset = 'flsh': did you mean flash"),
    ],
)
def test_a_switch_that_cannot_be_fails_before_the_run_starts(place: Place, text: str, message: str) -> None:
    with pytest.raises(UserError, match=rf"^alarm\.switches = '{text}': {message}"):
        place.train("impossible", {"alarm.switches": (text,)})
    assert not (place.runs / "impossible").exists()


# ---- runs


def test_the_switch_acts_from_its_step_on(place: Place) -> None:
    switch = {"alarm.switches": ("7:1:flash_delta_from_p",)}
    runs = (place.train("without", BF16), place.train("switched", {**BF16, **switch}))
    before, after = (column(run, "train_loss") for run in runs)
    # delta takes part in the backward pass alone: step 7's loss is still the same, the weights behind it are not.
    assert before[:8] == after[:8]
    assert before[8] != after[8]


def test_a_switch_at_the_end_acts_on_what_is_measured_there_alone_and_says_so(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    at_the_end = {**BF16, "run.steps": 4, "alarm.switches": ("4:1:standard",)}
    runs = (place.train("short", {**BF16, "run.steps": 4}), place.train("at_the_end", at_the_end))
    assert "alarm.switches: 4:1:standard acts on no training step: the run ends at 4" in capsys.readouterr().out
    before, after = (column(run, "val_loss") for run in runs)
    assert (before[:-1] == after[:-1], before[-1] != after[-1]) == (True, True)
    assert weights(runs[0], 4) == weights(runs[1], 4)


def test_a_switch_to_the_attention_that_a_layer_has_is_told() -> None:
    switches = [Switch(5, 0, "flash"), Switch(5, 1, "standard"), Switch(7, 1, "standard"), Switch(9, 1, "flash")]
    found = Interventions(preset("flash").resolve(2, 2), switches, lambda plans: None, None)
    assert found.idle == ["5:0:flash", "7:1:standard"]


# ---- compiled


def test_a_compiled_model_follows_a_switch() -> None:
    base, model = preset("flash").resolve(2, 2), tiny_model()
    tokens = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(0))
    torch._dynamo.reset()
    compiled, losses = torch.compile(model, backend="aot_eager"), []
    for plans in (base, plans_at(base, [Switch(0, 1, "flash_stochastic_o")], 0), base):
        model.set_plans(plans)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            eager, found = (f(tokens[:, :-1], tokens[:, 1:], torch.tensor(3))[1] for f in (model, compiled))
        gradients = (torch.autograd.grad(loss, [*model.parameters()]) for loss in (eager, found))
        assert same(*gradients)
        losses.append(found.item())
    assert losses[0] == losses[2] != losses[1]


STEP, LAST = 20, 30
FIELDS: dict[str, Any] = {
    "run.steps": LAST,
    "precision.dtype": "bfloat16",
    "attention": preset("flash_stochastic_p_o"),
    "alarm": AlarmConfig(switches=("7:1:flash_fp32_o",)),
    "checkpoint.keep_last": 9,
}


@pytest.fixture(scope="module")
def place(place: Place) -> Place:
    """With a run of 30 steps that recorded its batches, and checkpoints of 10, 20 and 30."""
    place.train("old", {**FIELDS, "data.record": place.recording("old")})
    return place


def fields_of(place: Place, **changes: Any) -> dict[str, Any]:
    checkpoint = place.runs / f"old/checkpoints/step_{STEP:08d}"
    return {**FIELDS, "run.init_from": str(checkpoint), **{name.replace("__", "."): v for name, v in changes.items()}}


def assert_goes_on_as_the_old_run(place: Place, run: Path) -> None:
    old = place.runs / "old"
    assert lines(run) == [line for line in lines(old) if line["step"] >= STEP]
    assert (weights(run, LAST), optimizer(run, LAST)) == (weights(old, LAST), optimizer(old, LAST))


@pytest.mark.parametrize("data", ["drawn", "replayed"])
def test_unchanged_it_goes_on_to_the_same_bits(place: Place, data: str) -> None:
    before = tree(place.runs / "old") | tree(Path(place.recording("old")))
    replay = place.recording("old") if data == "replayed" else ""
    assert_goes_on_as_the_old_run(place, place.train(data, fields_of(place, data__replay=replay)))
    assert tree(place.runs / "old") | tree(Path(place.recording("old"))) == before


@pytest.mark.parametrize("died_at", [22, 27])
def test_interrupted_it_resumes_to_the_same_bits(place: Place, died_at: int) -> None:
    """Before its own first checkpoint, from the other run's; then from its own, and the other run need not be there."""
    name, fields = f"died_at_{died_at}", fields_of(place, checkpoint__every=5)
    if died_at > 25:
        copy = place.folder / "moved"
        shutil.copytree(fields["run.init_from"], copy)
        fields["run.init_from"] = str(copy)
    place.train_until(died_at, name, fields)
    if died_at > 25:
        shutil.rmtree(copy)
    assert_goes_on_as_the_old_run(place, place.train(name, {**fields, "run.resume": "yes"}))


def test_another_attention_acts_from_there_on_and_is_on_record(place: Place) -> None:
    run = place.train("other", fields_of(place, attention=preset("flash_fp32_o"), alarm=AlarmConfig()))
    assert lines(run)[0]["data_digest"] == lines(place.runs / "old")[STEP]["data_digest"]
    assert weights(run, LAST) != weights(place.runs / "old", LAST)
    record = json.loads((run / "config.json").read_text())
    assert [session["from_step"] for session in record["sessions"]] == [STEP]
    assert record["config"]["run"]["init_from"].endswith(f"step_{STEP:08d}")


def test_a_switch_of_the_checkpoint_that_the_base_does_not_suit_is_named_until_another_takes_its_place(
    place: Place,
) -> None:
    fused = place.train("fused", {"run.steps": 10, "alarm.switches": ("4:0:standard", "7:1:sdpa_flash")})
    fields = {"attention": preset("flash", "microcosm"), "run.init_from": str(fused)}
    with pytest.raises(UserError, match=r"step_00000010: .*7:1:sdpa_flash.*: attention numerics of sdpa_flash = 'mic"):
        place.train("moved_again", fields)
    place.train_until(15, "moved_again", {**fields, "alarm.switches": ("10:1:flash_fp32_o",), "checkpoint.every": 4})
    place.train("moved_again", {**fields, "run.resume": "yes"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__record": "{place}/new"}, r"data\.record = .*: expected none with run\.init_from"),
        ({"data__dataset": "{place}/others"}, r"data\.dataset = .*: this gives other batches"),
    ],
)
def test_what_does_not_fit_the_checkpoint_is_refused(place: Place, changes: dict[str, Any], message: str) -> None:
    make_data(place.folder / "others", seed=1)
    changes = {name: v.format(place=place.folder) if isinstance(v, str) else v for name, v in changes.items()}
    with pytest.raises(UserError, match=message):
        place.train("refused", fields_of(place, **changes))
    assert not (place.runs / "refused").exists()
