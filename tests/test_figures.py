"""scripts/figures.py: every figure from a tiny real run, its numbers beside it; one line for each mistake."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_runs import Place, new_place

from attention.check.captured import load
from figures import canvas
from figures.checkpoints import validation_tokens
from figures.inputs import open_checkpoint
from probes.capture import capture
from scripts import capture_attention, figures
from scripts.figures import REGISTRY

WRITTEN = ("png", "csv")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A run of eight steps. Pictures are coarse, which saves seconds."""
    with new_place(tmp_path_factory) as place, pytest.MonkeyPatch.context() as patch:
        patch.setattr(canvas, "DPI", 60)
        place.train("failing", {"telemetry.every": 2, "run.steps": 8})
        yield place


def checkpoint(place: Place, name: str = "failing", step: int = 8) -> Path:
    return place.runs / f"{name}/checkpoints/step_{step:08d}"


@pytest.mark.parametrize("number", REGISTRY)
def test_each_figure_is_a_png_and_a_csv_with_rows(place: Place, number: int, tmp_path: Path) -> None:
    given = ["--runs", str(place.runs / "failing"), "--checkpoint", str(checkpoint(place)), "--sequences", "4"]
    figures.main([str(number), *given, "--out", str(tmp_path)])
    assert all((tmp_path / f"figure_{number:02d}.{ending}").stat().st_size > 40 for ending in WRITTEN)
    with open(tmp_path / f"figure_{number:02d}.csv", newline="") as file:
        assert list(csv.DictReader(file))


def test_a_checkpoint_gives_a_file_of_captured_attention(place: Place, tmp_path: Path) -> None:
    """Its q, k, v and dO are those that ``probes.capture`` takes of the same weights and tokens, whose tests hold them to training."""
    capture_attention.main(
        [str(checkpoint(place)), "--layers", "1", "--heads", "1", "--length", "6", "--out", str(tmp_path)]
    )
    (file,) = tmp_path.iterdir()
    found = load(file)
    opened = open_checkpoint(checkpoint(place), torch.device("cpu"))
    config = opened.config
    tokens = validation_tokens(Path(config.data.dataset), config.data.sequence_length, 1, 256, torch.device("cpu"))
    (layer,) = capture(opened.model, *tokens, [1], autocast=config.precision.autocast(torch.device("cpu")))
    assert torch.equal(found.q, layer.q_BTHD.transpose(1, 2)[:, 1:2, :6])
    assert torch.equal(found.do, layer.do_BTHD.transpose(1, 2)[:, 1:2, :6])
    assert (found.about["step"], found.about["layer"], found.about["heads"]) == (8, 1, [1])
    assert found.about["trained"][0]["source_sha256"]
