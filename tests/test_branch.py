"""run.init_from with another run's checkpoint: a new run that begins there, with the same bits where nothing is changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import Place, lines, make_data, optimizer, preset, tree, weights

from errors import UserError
from training.alarm import AlarmConfig

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
