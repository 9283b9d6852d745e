"""experiments/: its scripts still run, and the tables of its pages are those of its files."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from attention import AttentionConfig, AttentionSpec
from config import from_json
from scripts import compare_runs
from training.intervention import parse_switch, plans_at

ROOT = Path(__file__).resolve().parent.parent
EXPERIMENTS = ROOT / "experiments"
SCRIPTS = sorted(path.relative_to(EXPERIMENTS) for path in EXPERIMENTS.rglob("*.py"))
SUMMARIES = sorted(path.parent.name for path in EXPERIMENTS.glob("*/summary.csv"))


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_a_script_can_be_imported(script: Path) -> None:
    runpy.run_path(str(EXPERIMENTS / script), run_name="imported")


@pytest.mark.parametrize("path", sorted(EXPERIMENTS.rglob("config.json")), ids=lambda path: path.parent.name)
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
    compare_runs.main([folder, "--layer", "1", "--out", "none", "--table", table, "--at", *steps])
    assert (tmp_path / "summary.csv").read_text() == (EXPERIMENTS / study / "summary.csv").read_text()


def test_the_tables_of_fast_failure_are_those_of_its_files() -> None:
    folder = EXPERIMENTS / "fast_failure"

    def printed(*arguments: str) -> str:
        command = [sys.executable, str(folder / "tables.py"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert printed() in (folder / "README.md").read_text()
    for name in ("one_hot", "jumps"):
        assert printed(name) == (folder / f"{name}.csv").read_text()


def test_rows_that_look_at_one_key_are_exact_below_the_threshold_and_off_above() -> None:
    rows = runpy.run_path(str(EXPERIMENTS / "one_hot_rows/rows.py"), run_name="imported")
    assert rows["measure"]("flash", 32_768) == (0.0, 0.0, 0.0, 0.0)
    assert rows["measure"]("flash_subtract_first", 262_144) == (0.0, 0.0, 0.0, 0.0)
    error, _, too_large, standard_error = rows["measure"]("flash", 262_144)
    assert error > 1e-3
    assert too_large < -5 * standard_error


def test_the_table_of_row_residual_is_that_of_its_files() -> None:
    folder = EXPERIMENTS / "row_residual"
    scatter = runpy.run_path(str(folder / "scatter.py"), run_name="imported")
    assert scatter["by_kind"](scatter["pd"].read_csv(folder / "rows.csv")) in (folder / "README.md").read_text()


def test_the_alarm_on_logits_is_that_of_the_probes() -> None:
    command = [sys.executable, "-m", "experiments.alarm.logits"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert printed == (EXPERIMENTS / "alarm/logits.csv").read_text()


def test_a_level_is_added_to_every_logit_and_a_softmax_does_not_see_it() -> None:
    """At 2^4, where FP32 has a spacing of 16 eps: two roundings of a score. The feature that the level replaces does not matter."""
    at_level = runpy.run_path(str(EXPERIMENTS / "invariant/train_at_large_logits.py"), run_name="imported")["at_level"]
    plan = AttentionConfig(default=AttentionSpec(preset="standard", numerics="fp32")).resolve(1, 2)[0]
    layer = SimpleNamespace(plan=plan, softcap=0.0)
    q, k, v = torch.randn((3, 1, 16, 2, 8), generator=torch.Generator().manual_seed(0)).requires_grad_()
    seed = torch.tensor(0)
    o = at_level(layer, q, k, v, seed, level=2.0**4)
    seven, scale = slice(0, 7), 8**-0.5
    scores = torch.einsum("bthd,bshd->bhts", q[..., seven], k[..., seven]) * scale
    hidden = torch.ones(16, 16, dtype=torch.bool).triu(1)
    expected = torch.einsum("bhts,bshd->bthd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
    torch.testing.assert_close(o, expected, rtol=0, atol=32 * torch.finfo(torch.float32).eps)
    (dq,) = torch.autograd.grad(o.square().sum(), q)
    assert dq[..., 7].abs().max() == 0
    assert dq[..., seven].abs().max() > 1e-3
