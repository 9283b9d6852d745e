"""scripts/enlarge_logits.py: a run that goes on with larger logits, all else as it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_runs import Place, column, new_place, weights

from scripts import enlarge_logits as script
from scripts.autopsy import read_checkpoint

C = 16


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with new_place(tmp_path_factory) as place:
        place.train("small")
        yield place


def enlarge(place: Place, name: str, *arguments: str) -> Path:
    script.main([str(place.runs / "small"), str(place.runs / name), *arguments])
    return place.runs / name


def test_w_q_and_w_k_of_the_layer_alone_are_larger(place: Place) -> None:
    out = enlarge(place, "large", "--layer", "1", "--factor", "16")
    before, after = (read_checkpoint(run) for run in (place.runs / "small", out))
    for name, value in before.model_state.items():
        expected = value.clone()
        if name == "transformer.h.1.attn.c_attn.weight":
            expected[: 2 * C] *= 4
        assert torch.equal(after.model_state[name], expected), name
    assert after.optimizer_state["param_groups"] == before.optimizer_state["param_groups"]
    assert (after.step, after.position) == (before.step, before.position)
    assert after.config_json == before.config_json | {"run": before.config_json["run"] | {"name": "large"}}


def test_the_run_goes_on_as_the_old_one_where_the_factor_is_one(place: Place) -> None:
    longer = {"run.steps": 22, "run.resume": True}
    same = enlarge(place, "same", "--layer", "0", "--factor", "1")
    place.train("same", longer)
    place.train("small", longer)
    assert weights(same, 22) == weights(place.runs / "small", 22)
    assert column(same, "train_loss") == column(place.runs / "small", "train_loss")[-2:]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layer", "2", "--factor", "4"], "--layer = 2: expected 0 to 1"),
        (["--layer", "0", "--factor", "0"], "--factor = 0.0"),
        (["--layer", "0", "--factor", "inf"], "--factor = inf"),
    ],
)
def test_what_cannot_be_is_one_line(
    place: Place, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        enlarge(place, "refused", *arguments)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line
    assert not (place.runs / "refused").exists()


def test_a_run_that_exists_stays(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    before = weights(place.runs / "small", 20)
    with pytest.raises(SystemExit):
        enlarge(place, "small", "--layer", "0", "--factor", "4")
    assert "exists" in capsys.readouterr().err
    assert weights(place.runs / "small", 20) == before
