"""A run that was killed and goes on, or was stopped and goes on, is to the last bit the run that was never interrupted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import Place, column, lines, make_data, new_place, optimizer, preset, train_and_kill, tree, weights

import train
from attention import AttentionConfig, AttentionRule, AttentionSpec
from data.recording import Recording
from errors import UserError
from training import distributed
from training.distributed import Distributed

BF16 = {"precision.dtype": "bfloat16"}
RESUME = {"run.resume": True}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with new_place(tmp_path_factory) as place:
        yield place


def assert_same_run(a: Path, b: Path, step: int = 20) -> None:
    assert lines(a) == lines(b)
    assert weights(a, step) == weights(b, step)
    assert optimizer(a, step) == optimizer(b, step)


SETTINGS: dict[str, dict[str, Any]] = {
    "adamw_bfloat16_stochastic": {
        **BF16,
        "attention": AttentionConfig(
            flash_backend="flash_reference",
            default=AttentionSpec(preset="flash_stochastic_o"),
            rules=(AttentionRule(layers=(1,), heads=(1,), attention=AttentionSpec(preset="flash_run_d")),),
        ),
        "data.record_tokens": True,
    },
    "muon_float32": {"optim.optimizer": "muon", "optim.weight_decay": 0.1},
    "adamw_float16": {"precision.dtype": "float16", "model.qk_clip_tau": 0.2},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_killed_and_resumed_equals_straight(place: Place, name: str) -> None:
    # Runs of one name, for a recording's header holds it and its bytes are compared; so the folders differ.
    elsewhere = place.folder / "straight_runs"
    fields = {**SETTINGS[name], "data.record": place.recording(name)}
    place.train(name, {**fields, "run.folder": str(elsewhere), "data.record": place.recording(f"{name}_straight")})
    assert train_and_kill(place, place.config(name, fields)) == -9
    assert not (place.runs / name / "checkpoints/step_00000020").exists()
    assert Recording.open(Path(place.recording(name))).complete is False
    assert_same_run(place.train(name, {**fields, **RESUME}), elsewhere / name)
    assert tree(Path(place.recording(name))) == tree(Path(place.recording(f"{name}_straight")))


@pytest.fixture(scope="module")
def straight(place: Place) -> Path:
    return place.train("straight", {"run.steps": 30})


def test_finished_run_can_be_made_longer(place: Place, straight: Path) -> None:
    longer = place.train("longer", {"run.steps": 10})
    place.train("longer", {**RESUME, "run.steps": 30})
    assert_same_run(longer, straight, 30)


def test_resuming_a_finished_run_changes_nothing(place: Place) -> None:
    finished = place.train("finished")
    before = lines(finished), weights(finished, 20)
    place.train("finished", RESUME)
    assert (lines(finished), weights(finished, 20)) == before


def test_damaged_checkpoint_falls_back_to_the_one_before(
    place: Place, straight: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = place.train("damaged")
    model = damaged / "checkpoints/step_00000020/model.safetensors"
    content = bytearray(model.read_bytes())
    content[-1] ^= 1
    model.write_bytes(bytes(content))
    capsys.readouterr()
    place.train("damaged", {**RESUME, "run.steps": 30})
    warning = capsys.readouterr().err
    assert warning.startswith("warning: ")
    assert "step_00000020 is damaged" in warning
    assert "falling back to" in warning
    assert "step_00000010" in warning
    assert_same_run(damaged, straight, 30)


def test_replay_resumes_where_it_was(place: Place, straight: Path) -> None:
    place.train("original", {"run.steps": 30, "data.record": place.recording("original")})
    fields = {"data.replay": place.recording("original")}
    place.train("replayed", {**fields, "run.steps": 10})
    resumed = place.train("replayed", {**fields, **RESUME, "run.steps": 30})
    assert_same_run(resumed, straight, 30)


def test_time_goes_on_from_the_checkpoint(place: Place) -> None:
    run = place.train("timed", {"run.steps": 10})
    before = column(run, "seconds")[-1]
    place.train("timed", RESUME)
    seconds = column(run, "seconds")
    assert seconds == sorted(seconds)
    assert seconds[10] > before


FREE = {
    "run.log_every": 2,
    "evaluation.every": 5,
    "telemetry.every": 5,
    "checkpoint.every": 4,
    "nonfinite.policy": "skip",
    "data.verify": "size",
}


def test_when_things_are_written_may_change(place: Place, straight: Path) -> None:
    place.train("freer", {"run.steps": 10})
    freer = place.train("freer", {**RESUME, **FREE, "run.steps": 30})
    assert weights(freer, 30) == weights(straight, 30)


def test_data_may_move(place: Place, straight: Path, tmp_path: Path) -> None:
    moved = place.train("moved", {"run.steps": 10})
    shutil.copytree(place.data, tmp_path / "elsewhere")
    place.train("moved", {**RESUME, "run.steps": 30, "data.dataset": str(tmp_path / "elsewhere")})
    assert weights(moved, 30) == weights(straight, 30)


def refused(place: Place, name: str, fields: dict[str, Any], message: str) -> None:
    """Resuming with ``fields`` fails with ``message``, and leaves the run so that it can go on as it was."""
    place.train(name, {"run.steps": 10})
    before = lines(place.runs / name, without=()), weights(place.runs / name, 10)
    with pytest.raises(UserError, match=message):
        place.train(name, {**RESUME, **fields})
    assert (lines(place.runs / name, without=()), weights(place.runs / name, 10)) == before


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"optim.lr": 0.5}, r"^optim\.lr = 0\.5: expected 0\.01, as in the checkpoint .*step_00000010$"),
        ({"model.n_embd": 32}, r"^model\.n_embd = 32: expected 16, as in the checkpoint"),
        ({"run.seed": 7}, r"^run\.seed = 7: expected 42, as in"),
        ({"attention": preset("standard")}, r"^attention\.default\.preset = 'standard': expected 'flash', as in"),
        ({"run.steps": 9}, r"^run\.steps = 9: expected at least 10, where the checkpoint .* stands$"),
    ],
)
def test_another_setting_is_refused_by_name_with_both_values(
    place: Place, fields: dict[str, Any], message: str
) -> None:
    refused(place, f"refused_{next(iter(fields))}", fields, message)


def test_other_data_is_refused(place: Place, tmp_path: Path) -> None:
    other = str(make_data(tmp_path / "other", seed=1))
    refused(
        place,
        "other_data",
        {"data.dataset": other},
        rf"^data\.dataset = '{other}': expected the data that .*step_00000010",
    )


def test_another_number_of_processes_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.train("alone", {"run.steps": 10})
    two = Distributed(rank=0, local_rank=0, world_size=2, device=distributed.start("cpu").device)
    monkeypatch.setattr(distributed, "start", lambda device: two)
    with pytest.raises(UserError, match=r"step_00000010 is of 1 processes, not 2"):
        train.train(place.config("alone", {**RESUME, "data.micro_batch": 4}))


def test_replay_that_is_too_short_to_go_on_is_refused(place: Place) -> None:
    place.train("short", {"run.steps": 10, "data.record": place.recording("short")})
    fields = {"data.replay": place.recording("short")}
    place.train("short_replay", {**fields, "run.steps": 10})
    with pytest.raises(UserError, match=r"^run\.steps = 20: expected at most 10: .*short ends there"):
        place.train("short_replay", {**fields, **RESUME})


def test_record_of_a_resumed_run_says_so(place: Place) -> None:
    run = place.train("said", {"run.steps": 10})
    place.train("said", RESUME)
    assert json.loads((run / "config.json").read_text())["config"]["run"]["resume"] is True
