"""scripts/bench_exchange.py: GPT-2's gradients, averaged by two processes in every way that it times."""

from __future__ import annotations

import pytest
import torch
from test_shared_muon import launch

from model import GPT, MODEL_PRESETS
from scripts import bench_exchange as script

MAIN = """
import sys
from scripts import bench_exchange
bench_exchange.main(sys.argv[1:])
"""


def test_the_gradients_are_those_of_gpt2() -> None:
    shapes = [g.shape for g in script.gradients_of(768, torch.device("meta"))]
    with torch.device("meta"):
        model = GPT(MODEL_PRESETS["gpt2"], script.AttentionConfig().resolve(12, 12))
    assert shapes == [p.shape for p in model.parameters()]


def test_two_processes_time_every_way_and_one_of_them_tells() -> None:
    told, silent = launch(MAIN, ["--width", "12", "--repeats", "1"], 2)
    lines = told.splitlines()
    assert len(lines) == 7
    assert all(float(line.split(" ms ")[0].split()[-1]) > 0 for line in lines)
    assert silent == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "one process has nothing to exchange"), (["--width", "7"], "--width"), (["--repeats", "0"], "--repeats")],
)
def test_what_cannot_be_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        script.main(arguments)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line
