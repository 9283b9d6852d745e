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
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
PAGE, DIAGNOSIS = ROOT / "docs" / "huggingface.md", ROOT / "docs" / "diagnosis.md"
NANOGPT = ROOT.parent / "nanoGPT" / "model.py"
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


def gradients(model: Any, loss: Any) -> Tensor:
    """With weights that matter to attention."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.1)
    with torch.autocast("cpu", torch.bfloat16, enabled=next(model.parameters()).dtype == torch.float32):
        value = loss(model)
    return torch.cat([x.flatten().double() for x in torch.autograd.grad(value, list(model.parameters()))])


@pytest.mark.skipif(not NANOGPT.is_file(), reason="git clone https://github.com/karpathy/nanoGPT beside this checkout")
def test_the_patch_of_nanogpt(low_precision_attention: ModuleType) -> None:
    """Patched as the page shows, or untouched under ``replace_sdpa``: the same bits, as near to float64 as with torch's attention."""
    source = NANOGPT.read_text()
    context, removed, added = "", "", []
    for line in "".join(blocks(PAGE, "diff")).splitlines():
        kind, text = line[0], line[1:]
        context, removed = (text, removed) if kind == " " else (context, text if kind == "-" else removed)
        added += [text] if kind == "+" else []
    assert source.count(context) == source.count(removed) == 1
    patched = source.replace(context, f"{added[0]}\n{context}").replace(removed, added[1])

    def made(text: str) -> Any:
        module = ModuleType("nanogpt_model")
        sys.modules[module.__name__] = module  # where dataclasses look
        exec(compile(text, "model.py", "exec"), module.__dict__)
        return module.GPT(module.GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=64, dropout=0.0))

    tokens = torch.arange(32).view(2, 16)

    def loss(model: Any) -> Tensor:
        return model(tokens, tokens)[1]

    exact, torchs, ours = (gradients(x, loss) for x in (made(source).double(), made(source), made(patched)))
    with low_precision_attention.replace_sdpa():
        assert torch.equal(gradients(made(source), loss), ours)
    assert (ours - torchs).norm() > 0
    assert (ours - exact).norm() <= 1.5 * (torchs - exact).norm()
