"""Pages: tables against the code, examples by running them; links lead to what exists, and so do commands."""

import contextlib
import json
import re
import runpy
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from test_watching import llama
from torch.nn import functional

import attention
import config
from attention.check import Shape, check_attention, make
from attention.check.measures import plain
from attention.numerics import SITES
from attention.readme import written

ROOT = Path(__file__).resolve().parent.parent
ATTENTION = ROOT / "attention" / "README.md"
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


def blocks(document: Path, language: str) -> list[str]:
    """Fenced code blocks of a language ("" for none)."""
    return [block for name, block in _FENCE.findall(document.read_text()) if name == language]


def test_the_lists_are_those_that_the_declarations_make() -> None:
    as_made = written(ATTENTION.read_text()) == ATTENTION.read_text()
    assert as_made, "run python -m attention.readme"


def test_presets_that_make_the_accumulator_fp32_are_marked() -> None:
    """In base ``hardware`` it is, and so it is no site in which they differ."""
    assert re.findall(r"^- `(flash(?:_consistent)?|standard)`(§?)", ATTENTION.read_text(), re.MULTILINE) == [
        ("standard", "§"),
        ("flash", ""),
        ("flash_consistent", "§"),
    ]


def test_each_format_stands_in_the_equations() -> None:
    """Choices and numbers need not: the list of sites says what they are."""
    equations = set(re.findall(r"\w+", ATTENTION.read_text().partition("## Equations")[2].replace(r"\_", "_")))
    absent = {name for name, declared in SITES.items() if declared.is_format} - equations
    assert not absent, f"put the site into an equation of attention/README.md: {absent}"


def test_python_examples_of_attention_run() -> None:
    examples = blocks(ATTENTION, "python")
    assert examples
    for example in examples:
        exec(compile(example, str(ATTENTION), "exec"), {})


def dense_kernel(q: Any, k: Any, v: Any, *, causal: bool, softmax_scale: float) -> tuple[Any, str]:
    return plain(*(x.transpose(1, 2) for x in (q, k, v)), causal, softmax_scale).transpose(1, 2), "lse"


def packed_kernel(q: Any, k: Any, v: Any, cu_seqlens: Any, *, softmax_scale: float) -> Any:
    """q [tokens, H, D], k [tokens, G, D], v [tokens, G, DV], cu_seqlens int32 [B + 1]."""
    ends = cu_seqlens[1:-1].tolist()
    each = zip(*(x[None].tensor_split(ends, 1) for x in (q, k, v)), strict=True)
    return torch.cat([dense_kernel(*qkv, causal=True, softmax_scale=softmax_scale)[0][0] for qkv in each])


def adapters() -> dict[str, Any]:
    names: dict[str, Any] = {"torch": torch, "dense_kernel": dense_kernel, "packed_kernel": packed_kernel}
    for example in blocks(ROOT / "docs" / "kernels.md", "python"):
        if "\ndef " in f"\n{example}":
            exec(example, names)
    return names


@pytest.mark.parametrize(("name", "raises"), [("attention", []), ("packed", ["full", "window", "float_mask"])])
def test_adapters_of_the_page_on_kernels_are_safe_or_raise(name: str, raises: list[str]) -> None:
    classes = ("common_part", "grouped", "repeatability", *raises)
    report = check_attention(adapters()[name], device="cpu", shape=Shape(T=64, D=48, DV=32), classes=classes)
    assert [case.name for case in report.cases if case.verdict != "safe"] == raises
    assert all("NotImplementedError: more than causal" in case.reason for case in report.cases[3:])


def test_the_adapter_of_packed_sequences_takes_padding() -> None:
    p = make("padding", Shape(T=64, D=48, DV=32), torch.float32, "cpu")
    visible = p.visible()
    o = adapters()["packed"](p.q, p.k, p.v, visible, scale=p.scale)
    expected = functional.scaled_dot_product_attention(p.q, p.k, p.v, visible, scale=p.scale)
    torch.testing.assert_close(o, expected * visible.diagonal(dim1=-2, dim2=-1)[..., None])


def test_the_page_on_kernels_shows_a_test_of_all_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = (text for text in blocks(ROOT / "docs" / "kernels.md", "python") if "assert_safe(" in text)
    checked = Mock(return_value=SimpleNamespace(cases=[SimpleNamespace(name="", verdict="safe")], is_unseen=False))
    monkeypatch.setattr("attention.check.report.check_attention", checked)
    exec(example.replace("low_precision_attention", "attention"), {})
    assert checked.call_args.kwargs["classes"] == ()


def test_a_window_has_the_form_and_width_that_the_page_on_kernels_says() -> None:
    p = make("window", Shape(T=64), torch.float32, "cpu")
    B, _, T, _ = p.q.shape
    near = torch.ones(B, 1, T, T).tril().triu(-(T // 4)).bool()
    assert torch.equal(p.visible(), near)


PAGE, DIAGNOSIS = ROOT / "docs" / "huggingface.md", ROOT / "docs" / "diagnosis.md"


@pytest.mark.parametrize("example", ["plain", "control", "handed over"])
def test_examples_of_the_diagnosis_measure_it(example: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Causal logits of torch's function, of the control, and of attention that hands itself over."""
    plain, control, hand_over, loop = (text for text in blocks(DIAGNOSIS, "python") if "watch" in text)
    handed = example == "handed over"
    q, k = torch.randn(2, 1, 5, 4, 8)
    k[0, 4], q[0, 4] = 100 * q[0, 0], 0  # a key that rows 0 to 3 may not see, and that row 4 has no use for
    q.requires_grad_()
    s = torch.einsum("bthd,bshd->bhts", q, k) / 8**0.5
    s = s.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)

    class Attends(torch.nn.Module):
        def forward(self) -> torch.Tensor:
            if not handed:
                return functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, k)), is_causal=True)
            o = torch.einsum("bhts,bshd->bthd", s.softmax(-1), k)
            exec(hand_over, {}, {"self": self, "q": q, "k": k, "v": k, "o": o})
            return o

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model().square().sum().backward()
        optimizer.step()

    monkeypatch.chdir(tmp_path)
    model = Attends()
    model.layers = [model]
    names = {"model": model, "optimizer": torch.optim.SGD([q], lr=0.1), "train": train, "watch": attention.watch}
    chosen = {"plain": plain, "control": control, "handed over": loop}[example]
    exec(chosen.replace("low_precision_attention", "attention"), names | {"N": 0})
    (log,) = tmp_path.iterdir()
    record = json.loads(log.read_text())
    assert record.get("attention") == ("flash_delta_from_p" if example == "control" else None)
    torch.testing.assert_close(torch.tensor(record["max_logit"][0]), s.amax(dim=(0, 2, 3)))
    assert max(record["dq_error"][0]) < 1e-5


def test_control_runs_of_the_diagnosis(low_precision_attention: ModuleType) -> None:
    """A second preset goes by another name than the first."""
    model = llama(low_precision_attention.huggingface.register(), 1)
    tokens, losses = torch.arange(8)[None], []

    def train() -> None:
        losses.append(model(input_ids=tokens, labels=tokens).loss)
        losses[-1].backward()

    names: dict[str, Any] = {"low_precision_attention": low_precision_attention, "model": model, "torch": torch}
    names["trainer"] = SimpleNamespace(train=train)
    preset, plain = (text for text in blocks(DIAGNOSIS, "python") if "set_attn" in text or "SDPBackend.MATH" in text)
    train()
    exec(preset, names)
    assert model.config._attn_implementation == "control"
    train()
    model.set_attn_implementation("sdpa")
    exec(plain, names)
    torch.testing.assert_close(torch.stack(losses), losses[0].expand(3))


def trainer_of(transformers: Any, folder: Path, **settings: Any) -> Any:
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    row = {"input_ids": torch.arange(8), "labels": torch.arange(8)}
    arguments = transformers.TrainingArguments(str(folder), **settings, **quiet)
    return transformers.Trainer(llama("sdpa", 1), arguments, train_dataset=[row] * 8)


@pytest.mark.usefixtures("low_precision_attention")
def test_watch_in_a_trainer_counts_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    settings = {"max_steps": 101, "gradient_accumulation_steps": 2, "learning_rate": 0.01, "warmup_steps": 100}
    trainer = trainer_of(transformers, tmp_path, **settings)
    (example,) = (text for text in blocks(PAGE, "python") if "trainer." in text)
    exec(compile(example, "huggingface.md", "exec"), {"trainer": trainer})
    looks = [json.loads(line) for line in (tmp_path / "watch.jsonl").read_text().splitlines()]
    assert [look["step"] for look in looks] == list(range(0, 101, 20))
    assert looks[-1]["clock"] == pytest.approx(sum(0.01 * step / 100 for step in range(100)))


def test_watch_opened_by_a_callback_sees_a_model_that_the_trainer_compiles(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    transformers: Any = pytest.importorskip("transformers")
    compiled = {"torch_compile": True, "torch_compile_backend": "eager"}
    trainer = trainer_of(transformers, tmp_path, max_steps=3, **compiled)

    class Watches(transformers.TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.watch = attention.watch(
                trainer.model_wrapped, optimizer=trainer.optimizer, log=tmp_path / "watch.jsonl", every=1
            )

        def on_train_end(self, *_: Any, **__: Any) -> None:
            self.watch.close()

    trainer.add_callback(Watches())
    trainer.train()
    looks = [json.loads(line) for line in (tmp_path / "watch.jsonl").read_text().splitlines()]
    assert [look["step"] for look in looks] == [0, 1, 2]


@pytest.fixture
def example(
    low_precision_attention: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., list[str]]:
    """Run examples/huggingface_finetune.py: the lines that it prints, or the one that it says where it refuses, with code 2."""
    pytest.importorskip("transformers")

    def run(*arguments: object, refuses: bool = False) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["example", *map(str, arguments)])
        with pytest.raises(SystemExit, match="2") if refuses else contextlib.nullcontext():
            runpy.run_path(str(ROOT / "examples" / "huggingface_finetune.py"), run_name="__main__")
        said = capsys.readouterr()
        return said.err.splitlines()[-1:] if refuses else said.out.splitlines()

    return run


def test_the_example_learns(example: Callable[..., list[str]]) -> None:
    losses = [float(line.split()[-1]) for line in example("--steps", 21, "--length", 32)]
    assert losses[-1] < losses[0] - 1


WITH_DROPOUT = {
    "GPT2": {"n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2},
    "BioGpt": {"max_position_embeddings": 16, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
}


@pytest.mark.parametrize("family", WITH_DROPOUT)
def test_the_example_trains_a_model_of_its_length(
    family: str, tmp_path: Path, example: Callable[..., list[str]]
) -> None:
    """Its attention dropout is 0.1 unless told otherwise, each under a name of its own."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"?": 0, "import": 1, "def": 2}, "?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(tmp_path)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=3, **WITH_DROPOUT[family], bos_token_id=0, eos_token_id=0
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    arguments = "--model", tmp_path, "--steps", 1, "--length"
    assert example(*arguments, 16)[0].startswith("step 0: loss ")
    assert "--length 17: expected at most 16" in example(*arguments, 17, refuses=True)[0]


def test_a_model_whose_call_is_refused_ends_the_example_in_one_line(
    example: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = Mock(side_effect=ValueError("Attention: it has no\nposition_bias"))
    monkeypatch.setattr("transformers.LlamaForCausalLM.forward", refused)
    assert "--model '': Attention: it has no position_bias" in example("--length", 32, refuses=True)[0]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--numerics flash_stochastic_o", "invalid choice: 'flash_stochastic_o'"),
        ("--numerics sdpa_cudnn", "it needs a CUDA device"),
        ("--model /nonexistent", "/nonexistent"),
        ("--batch 0", "--batch 0 "),
        ("--learning-rate nan", "--learning-rate nan: "),
        *((f"--length {n}", f"--length {n}: expected 2 or more") for n in (-3, 0, 1)),
    ],
)
def test_the_example_refuses_in_one_line(
    arguments: str, expected: str, example: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert expected in example(*arguments.split(), refuses=True)[0]


# Folders of the project, not those that a user's runs and environments make.
FOLDERS = ("attention", "data", "docs", "experiments", "replay_batches", "scripts", "tests")
PAGES = sorted([*ROOT.glob("*.md"), *(page for name in FOLDERS for page in (ROOT / name).rglob("*.md"))])
# Pages for users: a reader types what stands there. Pages of single studies name the commands of the commit that they were made at.
USERS = [page for page in PAGES if "experiments" not in page.parts]


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
    code = "\n".join(blocks(page, ""))
    for name, value in re.findall(r'^export .*\b(\w+)="(.*)"$', code, re.MULTILINE):
        code = code.replace(f"${name}", value)
    lines = re.sub(r"^torchrun( --\S+)+", "python", code.replace("\\\n", " "), flags=re.MULTILINE).splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if re.match(r"(python|bash) \S+\.(py|sh)", line)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: no such file"
        assert not anchor or anchor in anchors(target), f"{link}: no such heading"


@pytest.mark.parametrize("page", USERS, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_name_what_exists_and_those_of_training_are_understood(
    page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    for script, *arguments in commands(page):
        source = Path(script).read_text()
        if script != "train.py":
            missing = [word for word in arguments if word.startswith("--") and word.split("=")[0] not in source]
            assert not missing, f"{script} has no {missing}"
        elif not any(word.isupper() for word in arguments):
            assert config.load(arguments) != config.load(arguments[:1]) or len(arguments) == 1
