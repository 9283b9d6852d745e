"""The benchmark of whole steps, at a size for a CPU: its table, its JSON, and that one bad variant does not take the others along."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from tiny_runs import ROOT, Place, environment

pytestmark = pytest.mark.slow

# What bench_train.py uses of nanoGPT's model.py.
NANOGPT = """
import torch
from dataclasses import dataclass
from torch import nn

@dataclass
class GPTConfig:
    block_size: int = 1
    vocab_size: int = 1
    n_layer: int = 1
    n_head: int = 1
    n_embd: int = 1
    dropout: float = 0.0
    bias: bool = True

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.table = nn.Embedding(config.vocab_size, config.vocab_size)

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), lr=learning_rate)

    def forward(self, x, y):
        logits = self.table(x)
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
"""
VARIANTS = [
    "plain",
    "fused: --optim.fused on",
    "reference: --speed.reference --optim.lr 1e-4",
    "deep: --model.n-layer 4",
]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """(what it prints, its JSON)."""
    folder = tmp_path_factory.mktemp("bench")
    place = Place(folder)
    (folder / "nanogpt").mkdir()
    (folder / "nanogpt/model.py").write_text(NANOGPT)
    recipe = place.preset_file(place.config("recipe", {"run.peak_tflops": 1.0}))
    arguments = ["--variants", *VARIANTS, "bad: --attention.flash-backend flash", "--rounds", "2", "--steps", "3"]
    arguments += ["--data.micro-batch", "8", "--nanogpt", str(folder / "nanogpt")]
    arguments += ["--json", str(folder / "b.json")]
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/bench_train.py"), str(recipe), *arguments],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=folder,
        timeout=120,
    )
    said = done.stderr.splitlines()[-1]
    assert (done.returncode, said[:32]) == (2, "error: bad failed: UserError: at"), done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["b.json", "data", "nanogpt", "recipe.py"]
    return done.stdout, json.loads((folder / "b.json").read_text())


def rows(bench: tuple[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in bench[1]["rows"]}


def test_every_variant_has_a_row(bench: Any) -> None:
    assert list(rows(bench)) == ["plain", "fused", "reference", "deep", "bad", "nanogpt"]
    assert rows(bench)["fused"]["settings"] == "--optim.fused on"


def test_mfu_is_of_the_variants_own_model(bench: Any) -> None:
    plain, deep = (rows(bench)[name] for name in ("plain", "deep"))
    assert deep["flops_per_token"] > 1.5 * plain["flops_per_token"] > 0
    for row in (plain, deep):
        assert row["mfu"] == pytest.approx(row["tokens_per_second"] * row["flops_per_token"] / 1e12)


def test_a_variant_that_raises_says_why(bench: Any) -> None:
    assert rows(bench)["bad"]["failed"].startswith("UserError: attention of layer 0")
    assert "bad " in bench[0]
