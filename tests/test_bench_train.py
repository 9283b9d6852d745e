"""The benchmark of whole steps, at a size for a CPU: its table, its JSON, and that one bad variant does not take the others along."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import ROOT, TINY, Place, environment

from scripts.bench_profile import kind_of
from scripts.bench_train import build
from scripts.bench_trial import Contender, Trial

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
VARIANTS = ["plain", "fused=optim.fused=on", "filled=precision.fill_memory=true,speed.reference=true"]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any], Path]:
    """(what it prints, its JSON, its profile)."""
    folder = tmp_path_factory.mktemp("bench")
    place = Place(folder)
    (folder / "nanogpt").mkdir()
    (folder / "nanogpt/model.py").write_text(NANOGPT)
    recipe = place.preset_file(place.config("recipe", {"run.peak_tflops": 1.0}))
    arguments = [
        "--variants",
        *VARIANTS,
        "bad=attention.flash_backend=flash",
        "--rounds",
        "2",
        "--steps",
        "3",
        "--matmuls",
    ]
    arguments += ["--set", "data.micro_batch=8", "--nanogpt", str(folder / "nanogpt")]
    arguments += ["--json", str(folder / "b.json"), "--profile", str(folder / "p.txt"), "--profile-variants", "plain"]
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
    assert sorted(path.name for path in folder.iterdir()) == ["b.json", "data", "nanogpt", "p.txt", "recipe.py"]
    return done.stdout, json.loads((folder / "b.json").read_text()), folder / "p.txt"


def rows(bench: tuple[str, dict[str, Any], Path]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in bench[1]["rows"]}


def test_every_variant_has_a_row(bench: Any) -> None:
    assert list(rows(bench)) == ["plain", "fused", "filled", "nanogpt", "bad"]
    assert rows(bench)["fused"]["settings"] == {"optim.fused": "on"}


def test_a_variant_that_raises_says_why(bench: Any) -> None:
    assert rows(bench)["bad"]["failed"].startswith("UserError: attention of layer 0")
    assert "bad " in bench[0]


def test_rates_follow_from_times(bench: Any) -> None:
    tokens = TINY.data.global_batch * TINY.data.sequence_length
    for name in ("plain", "fused", "filled"):
        row = rows(bench)[name]
        assert len(row["ms_all_rounds"]) == 2
        assert row["tokens_per_second"] == pytest.approx(1000 * tokens / row["ms_per_step"])
        assert row["mfu"] == pytest.approx(row["tokens_per_second"] * bench[1]["flops_per_token"] / 1e12)
        assert row["of_matmul_ceiling"] == pytest.approx(row["mfu"] / bench[1]["matmul_ceiling_tflops"])


def test_parts_are_parts_of_the_step(bench: Any) -> None:
    parts = rows(bench)["plain"]["parts_ms"]
    assert list(parts) == ["data", "forward", "backward", "clip", "optimiser", "logging"]
    assert all(part["device"] > 0 for part in parts.values())


def test_the_formula_and_the_products_are_printed(bench: Any) -> None:
    assert "6 N + 12 L C T" in bench[0]
    assert "all products:" in bench[0]


def test_the_profile_names_the_variant(bench: Any) -> None:
    assert bench[2].read_text().startswith("plain: ")


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("forward_kernel", "attention"),
        ("norm_forward_kernel", "norms"),
        ("norm_backward_kernel", "norms"),
        ("nvjet_sm90_tst_192x192_64x3_1x2_h_bz_coopB_splitK_NTN", "matrix products"),
        ("runs_kernel", "other"),
    ],
)
def test_a_kernel_is_of_its_kind(kernel: str, kind: str) -> None:
    assert kind_of(kernel) == kind


def test_the_json_says_that_it_is_complete(bench: Any) -> None:
    assert bench[1]["complete"] is True
    assert rows(bench)["plain"]["build_seconds"] > 0


def test_the_json_names_no_folder_of_the_machine(bench: Any) -> None:
    _, content, _ = bench
    assert "b.json" in content["command"]
    assert not any(word.startswith("/") for word in content["command"])


def test_the_json_says_how_many_threads_torch_has(bench: Any) -> None:
    assert bench[1]["machine"]["threads"] >= 1


def note_of(trial: Trial) -> dict[str, Any]:
    assert trial.json is not None
    return json.loads(trial.json.read_text())


def contender(name: str, run: Any = None) -> Contender:
    return Contender(name, 1, run, lambda: None, {})


def test_what_is_known_is_on_disk_before_the_next_one_is_built(tmp_path: Path) -> None:
    trial, seen = Trial(60.0, tmp_path / "b.json"), []

    def second() -> Contender:
        seen.append(note_of(trial))
        raise ValueError("no")

    trial.build("first", contender, "first")
    trial.build("second", second)
    assert [row["name"] for row in seen[0]["rows"]] == ["first"]
    assert seen[0]["complete"] is False


def test_one_that_never_ends_ends_the_process_and_shows_where_it_stood(tmp_path: Path) -> None:
    code = f"""
import sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from scripts.bench_trial import Contender, Trial
def stands_still(): time.sleep(60)
trial = Trial(0.5, Path("b.json"))
trial.build("first", Contender, "first", 1, None, None, {{}})
trial.build("second", stands_still)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(), cwd=tmp_path, timeout=50
    )
    assert done.returncode == 1
    assert "in stands_still" in done.stderr
    assert [row["name"] for row in json.loads((tmp_path / "b.json").read_text())["rows"]] == ["first"]


def test_a_variant_whose_loss_is_not_finite_says_so(tmp_path: Path) -> None:
    place = Place(tmp_path)
    recipe = place.config("recipe", {"optim.lr": 1e30, "optim.grad_clip": 0.0, "optim.schedule": "constant"})
    trial = Trial(60.0, None)
    trial.build("hot", build, recipe, "hot=optim.warmup_steps=0", tmp_path)
    assert "not finite; stopped" in trial.failed["hot"]
