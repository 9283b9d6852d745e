"""experiments/: its pictures can be drawn, and the tables of runs are those of their files."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

from attention import AttentionConfig
from config import from_json
from scripts import compare_runs
from training.intervention import parse_switch, plans_at

ROOT = Path(__file__).resolve().parent.parent
EXPERIMENTS = ROOT / "experiments"
GIVEN_UP = {"compensated_delta", "recompute_o", "standard"}
"""Runs of what the code does not have any more: experiments/fast_failure/README.md names the commit that has it."""
RECORDS = sorted(path for path in EXPERIMENTS.rglob("config.json") if path.parent.name not in GIVEN_UP)
SUMMARIES = sorted(path.parent.name for path in EXPERIMENTS.glob("*/summary.csv"))


def test_the_pictures_can_be_drawn() -> None:
    draw = runpy.run_path(str(EXPERIMENTS / "draw_pictures.py"), run_name="imported")
    for name in ("front", "layers", "large_logits"):
        assert draw[name]().axes


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.parent.name)
def test_the_attention_of_a_published_run_is_known(path: Path) -> None:
    """By the names of its time, those that its layers were switched to as well."""
    config = json.loads(path.read_text())["config"]
    base = from_json(AttentionConfig, config["attention"]).resolve(
        config["model"]["n_layer"], config["model"]["n_head"]
    )
    plans_at(base, [parse_switch(text) for text in config["alarm"]["switches"]], config["run"]["steps"])


@pytest.mark.parametrize("study", SUMMARIES)
def test_the_summary_of_runs_is_that_of_their_files(study: str, tmp_path: Path) -> None:
    header = (EXPERIMENTS / study / "summary.csv").read_text().splitlines()[0]
    steps = sorted(set(re.findall(r"_at_(\d+)", header)), key=int)
    folder, table = str(EXPERIMENTS / study / "runs"), str(tmp_path / "summary.csv")
    layer = ["--layer", "1"] if "max_logit_1_" in header else []  # else of all layers
    compare_runs.main([folder, *layer, "--out", "none", "--table", table, "--at", *steps])
    assert (tmp_path / "summary.csv").read_text() == (EXPERIMENTS / study / "summary.csv").read_text()
