"""Configs from before some fields were gone: read, gone on with where the arithmetic is today's, else refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import Place, weights

import config as configuration
from config import TrainConfig
from errors import UserError
from files import sha256_file, write_json
from training.retired import RETIRED, upgraded

ROOT = Path(__file__).resolve().parent.parent
# As the published runs have it.
PUBLISHED = {
    "loss_chunk": 0,
    "fused_norm": False,
    "fused_mlp": False,
    "float32_gradients": False,
    "sorted_embedding": False,
    "late_values": True,
    "fused_clip": False,
    "fill_memory": False,
    "compile_mode": "default",
    "exchange": "ddp",
    "overlap": False,
    "bucket_mb": 25,
    "coordinate_descent": False,
}


def published(**changes: Any) -> dict[str, Any]:
    content = configuration.to_json(TrainConfig())
    return {**content, "speed": {**PUBLISHED, **changes}, "optim": {**content["optim"], "newton_schulz": "each"}}


def test_a_published_config_reads_as_todays_with_the_reference_operators() -> None:
    read = configuration.from_json(TrainConfig, published())
    assert read == configuration.override(TrainConfig(), ["--speed.reference"])


def test_a_published_config_with_the_chunked_loss_reads_as_todays_default() -> None:
    assert configuration.from_json(TrainConfig, published(loss_chunk=32_768)) == TrainConfig()


def test_no_retired_field_is_a_field_of_today() -> None:
    content = configuration.to_json(TrainConfig())
    assert [field for field in RETIRED if field.split(".")[1] in content[field.split(".")[0]]] == []


@pytest.mark.parametrize(
    "typed",
    ["--speed.loss-chunk 32768", "--speed.no-fill-memory", "--speed.late-values", "--optim.newton-schulz graph"],
)
def test_a_command_of_before_is_told_what_replaced_its_option(typed: str) -> None:
    with pytest.raises(UserError, match=rf"^{typed.split()[0]} is gone: commit c487be1 had it; .*--speed\.reference"):
        configuration.override(TrainConfig(), typed.split())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fused_norm": True}, r"^speed\.fused_norm = True: expected False to go on from step_8: commit c487be1 has"),
        ({"loss_chunk": 64}, r"^speed\.loss_chunk = 64: expected 0 or 32768 to go on from step_8"),
    ],
)
def test_other_arithmetic_is_not_gone_on_with(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        upgraded(published(**changes), goes_on_from="step_8")


@pytest.mark.parametrize(
    "path",
    sorted((ROOT / "experiments").rglob("config.json")),
    ids=str,
)
def test_every_published_config_is_read(path: Path) -> None:
    content = json.loads(path.read_text())
    if "run" in content.get("config", {}):
        assert isinstance(configuration.from_json(TrainConfig, content["config"]), TrainConfig)


# ---- a run from before


def aged(run: Path, **changes: Any) -> Path:
    """Give a run and its checkpoint the fields of the published runs."""
    state = run / "checkpoints/step_00000010/state.json"
    for path in (run / "config.json", state):
        content = json.loads(path.read_text())
        content["config"]["speed"] = {**PUBLISHED, **changes}
        write_json(path, content)
    sums = state.with_name("SHA256SUMS")
    lines = [
        line if "state.json" not in line else f"{sha256_file(state)}  state.json"
        for line in sums.read_text().splitlines()
    ]
    sums.write_text("\n".join(lines) + "\n")
    return run


def test_a_run_from_before_goes_on_to_the_same_bits(place: Place) -> None:
    straight = place.train("straight")
    run = aged(place.train("before", {"run.steps": 10}))
    with pytest.raises(
        UserError, match=r"^speed\.reference = False: expected True, as in the checkpoint .*step_00000010$"
    ):
        place.train("before", {"run.resume": "yes"})
    place.train("before", {"run.resume": "yes", "speed.reference": True})
    assert weights(run, 20) == weights(straight, 20)


def test_a_run_of_an_operator_that_is_gone_is_refused(place: Place) -> None:
    aged(place.train("operator", {"run.steps": 10}), fused_norm=True)
    with pytest.raises(UserError, match=r"^speed\.fused_norm = True: expected False to go on from .*step_00000010"):
        place.train("operator", {"run.resume": "yes", "speed.reference": True})
