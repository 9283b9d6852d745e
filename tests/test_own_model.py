"""docs/huggingface.md and the example: what they show, run; other people's trainers where they are installed."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from test_docs import blocks

ROOT = Path(__file__).resolve().parent.parent
PAGE, DIAGNOSIS = ROOT / "docs" / "huggingface.md", ROOT / "docs" / "diagnosis.md"
pytestmark = pytest.mark.usefixtures("low_precision_attention")


def test_control_runs_of_the_diagnosis(low_precision_attention: ModuleType) -> None:
    """A second preset goes by another name than the first."""
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.LlamaConfig(vocab_size=8, **shape)
    name = low_precision_attention.huggingface.register()
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=name)
    tokens, losses = torch.arange(8)[None], []

    def train() -> None:
        losses.append(model(input_ids=tokens, labels=tokens).loss)
        losses[-1].backward()

    names: dict[str, Any] = {"low_precision_attention": low_precision_attention, "model": model, "torch": torch}
    names["trainer"] = SimpleNamespace(train=train)
    preset, plain = (text for text in blocks(DIAGNOSIS, "python") if "set_attn" in text or "MATH" in text)
    train()
    exec(preset, names)
    assert model.config._attn_implementation == "control"
    train()
    model.set_attn_implementation("sdpa")
    exec(plain, names)
    torch.testing.assert_close(torch.stack(losses), losses[0].expand(3))


def test_watch_in_a_trainer_counts_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(vocab_size=8, **shape))
    settings = {"max_steps": 101, "gradient_accumulation_steps": 2, "learning_rate": 0.01, "warmup_steps": 100}
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    row = {"input_ids": torch.arange(8), "labels": torch.arange(8)}
    trainer = transformers.Trainer(
        model, transformers.TrainingArguments(str(tmp_path), **settings, **quiet), train_dataset=[row] * 8
    )
    (example,) = (text for text in blocks(PAGE, "python") if "trainer." in text)
    exec(compile(example, "huggingface.md", "exec"), {"trainer": trainer})
    looks = [json.loads(line) for line in (tmp_path / "watch.jsonl").read_text().splitlines()]
    assert [look["step"] for look in looks] == [0, 100]
    assert looks[1]["clock"] == pytest.approx(sum(0.01 * step / 100 for step in range(100)))


def test_the_example_learns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(sys, "argv", ["example", "--steps", "21", "--length", "32"])
    runpy.run_path(str(ROOT / "examples" / "huggingface_finetune.py"), run_name="__main__")
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert losses[-1] < losses[0] - 1
