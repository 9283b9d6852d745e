"""The benchmark of whole steps, at a size for a CPU: its table, its JSON, and that one bad variant does not take the others along."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import ROOT, Place, environment

pytestmark = pytest.mark.slow

VARIANTS = ["plain", "deep: --model.n-layer 4", "bad: --attention.flash-backend flash"]
# What bench_train.py uses of nanoGPT's model.py.
NANOGPT = """
import torch
from torch import nn

class GPTConfig:
    def __init__(self, vocab_size, **_):
        self.vocab_size = vocab_size

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.table = nn.Embedding(config.vocab_size, config.vocab_size)

    def configure_optimizers(self, **_):
        return torch.optim.AdamW(self.parameters())

    def forward(self, x, y):
        logits = self.table(x)
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
"""


def test_each_variant_has_a_row_with_the_mfu_of_its_own_model_and_a_bad_one_says_why(tmp_path: Path) -> None:
    place = Place(tmp_path)
    (tmp_path / "nanogpt").mkdir()
    (tmp_path / "nanogpt/model.py").write_text(NANOGPT)
    recipe = place.preset_file(place.config("recipe", {"run.peak_tflops": 1.0}))
    arguments = ["--variants", *VARIANTS, "--rounds", "2", "--steps", "3", "--data.micro-batch", "8"]
    arguments += ["--nanogpt", str(tmp_path / "nanogpt"), "--json", str(tmp_path / "b.json")]
    command = [sys.executable, str(ROOT / "scripts/bench_train.py"), str(recipe), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=tmp_path, timeout=120)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: bad failed: UserError: at")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.json", "data", "nanogpt", "recipe.py"]
    rows = {row["name"]: row for row in json.loads((tmp_path / "b.json").read_text())["rows"]}
    assert list(rows) == ["plain", "deep", "bad", "nanogpt"]
    assert rows["deep"]["flops_per_token"] > 1.5 * rows["plain"]["flops_per_token"] > 0
    for row in (rows["plain"], rows["deep"]):
        assert row["mfu"] == pytest.approx(row["tokens_per_second"] * row["flops_per_token"] / 1e12)
    assert rows["bad"]["failed"].startswith("UserError: attention of layer 0")
