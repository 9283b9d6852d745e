"""Pages: tables against the code, examples by running them; links lead to what exists, and so do commands."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

import config
from attention.readme import written

ROOT = Path(__file__).resolve().parent.parent
ATTENTION = ROOT / "attention" / "README.md"


def blocks(document: Path, language: str) -> list[str]:
    """Fenced code blocks of a language ("" for none)."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [block for name, block in fenced if name == language]


def test_the_lists_are_those_that_the_declarations_make() -> None:
    """``python -m attention.readme`` writes them."""
    assert written(ATTENTION.read_text()) == ATTENTION.read_text()


def test_python_examples_of_attention_run() -> None:
    examples = blocks(ATTENTION, "python")
    assert examples
    for example in examples:
        exec(compile(example, str(ATTENTION), "exec"), {})


class OneCall(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(self.weight * q, k, k, is_causal=True, enable_gqa=True).sum()


def test_the_example_of_the_diagnosis_measures_causal_logits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    k[0, 0, 4] = 100 * q[0, 0, 0]  # a key that row 0 may not see

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(q, k).backward()
        optimizer.step()

    monkeypatch.chdir(tmp_path)
    model = OneCall()
    names: dict[str, Any] = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "train": train}
    example = next(text for text in blocks(ROOT / "docs" / "diagnosis.md", "python") if "watch(" in text)
    exec(compile(example.replace("low_precision_attention", "attention"), "diagnosis.md", "exec"), names)
    visible = [
        max((q[0, h, i] @ k[0, h // 2, j] / 8**0.5).item() for i in range(5) for j in range(i + 1)) for h in range(4)
    ]
    measured = json.loads(Path("watch.jsonl").read_text())["max_logit"][0]
    torch.testing.assert_close(torch.tensor(measured), torch.tensor(visible))


def test_the_example_for_attention_of_another_kind_measures_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from attention import watch

    handed, loop = (text for text in blocks(ROOT / "docs" / "diagnosis.md", "python") if "watcher" in text)
    q, k = torch.randn(1, 5, 4, 8, requires_grad=True), torch.randn(1, 5, 2, 8)

    class Own(torch.nn.Module):
        def forward(self) -> torch.Tensor:
            s = torch.einsum("bthd,bshd->bhts", q, k.repeat_interleave(2, 2)) / 8**0.5
            self.largest = s.tril().masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf).amax(dim=(0, 2, 3))
            p = s.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf).softmax(-1)
            o = torch.einsum("bhts,bshd->bthd", p, k.repeat_interleave(2, 2))
            exec(handed, {}, {"self": self, "q": q, "k": k, "v": k, "o": o})
            return o.square().sum()

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model().backward()
        optimizer.step()

    monkeypatch.chdir(tmp_path)
    model = Own()
    model.layers = [model]
    exec(loop, {"model": model, "optimizer": torch.optim.SGD([q], lr=0.1), "train": train, "watch": watch})
    record = json.loads(Path("watch.jsonl").read_text())
    torch.testing.assert_close(torch.tensor(record["max_logit"][0]), model.largest)
    assert max(record["dq_error"][0]) < 1e-5


PAGE, DIAGNOSIS = ROOT / "docs" / "huggingface.md", ROOT / "docs" / "diagnosis.md"


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


@pytest.mark.usefixtures("low_precision_attention")
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


@pytest.mark.usefixtures("low_precision_attention")
def test_the_example_learns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(sys, "argv", ["example", "--steps", "21", "--length", "32"])
    runpy.run_path(str(ROOT / "examples" / "huggingface_finetune.py"), run_name="__main__")
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert losses[-1] < losses[0] - 1


# Folders of the project, not those that a user's runs and environments make.
FOLDERS = ("attention", "data", "docs", "experiments", "replay_batches", "scripts", "tests")
PAGES = sorted([*ROOT.glob("*.md"), *(page for name in FOLDERS for page in (ROOT / name).rglob("*.md"))])
# Pages for users: a reader types what stands there. Pages of single studies name the commands of the commit that they were made at.
USERS = [page for page in PAGES if "experiments" not in page.parts]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


def links(page: Path) -> list[str]:
    """Targets of the page's links and pictures, but for addresses of the web."""
    text = re.sub(r"`[^`\n]*`", "", _FENCE.sub("", page.read_text()))
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]


def anchors(page: Path) -> set[str]:
    """Names of the page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", page.read_text()), flags=re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


def commands(page: Path) -> list[list[str]]:
    """Words of the page's lines of code that call Python or bash on a file of this checkout."""
    code = "\n".join(body for language, body in _FENCE.findall(page.read_text()) if not language)
    lines = code.replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if re.match(r"(python|bash) \S+\.(py|sh)", line)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: no such file"
        assert not anchor or anchor in anchors(target), f"{link}: no such heading"


@pytest.mark.parametrize("page", USERS, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_name_what_exists(page: Path) -> None:
    for script, *arguments in commands(page):
        assert (ROOT / script).is_file(), script
        if script != "train.py":
            source = (ROOT / script).read_text()
            missing = [word for word in arguments if word.startswith("--") and word.split("=")[0] not in source]
            assert not missing, f"{script} has no {missing}"


@pytest.mark.parametrize("page", USERS, ids=lambda page: str(page.relative_to(ROOT)))
def test_training_commands_are_understood(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for script, *arguments in commands(page):
        if script == "train.py" and not any(word.isupper() for word in arguments):
            assert config.load(arguments) != config.load(arguments[:1])
