"""What a run measures and writes: JSON lines that survive kills and NaN, W&B, validation, source digest, peak of the GPU."""

import contextlib
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from tiny_runs import ROOT, tiny_model
from torch import Tensor
from torch.nn import functional

from model import GPT
from training import record
from training.evaluate import evaluate
from training.metrics import Metrics, WandbConfig, read_metrics, start_wandb
from training.throughput import peak_flops


def make(folder: Path, mode: Any = "disabled") -> Metrics:
    record = {"run_id": "0123abcd", "attention_name": "flash (hardware)", "batches": {"recording": "night"}}
    folder.mkdir(exist_ok=True)
    return Metrics(folder, start_wandb(folder, WandbConfig(mode=mode), record))


def test_a_mode_in_the_environment_that_wandb_mode_is_not_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    make(tmp_path)
    assert capsys.readouterr().err == "warning: WANDB_MODE = offline is not read: wandb.mode is disabled\n"


def test_a_broken_wandb_does_not_end_the_run(tmp_path: Path) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("gone")

    metrics = make(tmp_path)
    metrics._wandb_run = broken = SimpleNamespace(log=fail, finish=fail)
    with pytest.warns(UserWarning, match="gone"):
        metrics.log(0, train_loss=1.0)
    metrics.log(1, train_loss=1.0)
    assert len(read_metrics(tmp_path)) == 2
    metrics._wandb_run = broken
    with pytest.warns(UserWarning, match="gone"):
        metrics.close()


def test_wandb_has_numbers_by_step_and_a_resumed_run_keeps_its_id(tmp_path: Path, monkeypatch: Any) -> None:
    """What an offline W&B is given: the options of each run that is started, and the rows of all."""
    wandb, options, rows = pytest.importorskip("wandb"), [], []
    init = wandb.init

    def watched(**given: Any) -> Any:
        run = init(**given)
        log = run.log
        monkeypatch.setattr(run, "log", lambda row: (rows.append(row), log(row)))
        options.append(given)
        return run

    monkeypatch.setattr(wandb, "init", watched)
    first, second, third = {"val_loss": 10.25}, {"train_loss": 9.0}, {"train_loss": 8.0}
    for session in ([(0, first), (0, second | {"data_digest": "0123456789abcdef"})], [(1, third)]):
        metrics = make(tmp_path / "run", "offline")
        for step, values in session:
            metrics.log(step, **values)
        metrics.close()
    assert rows == [{"step": 0} | first, {"step": 0} | second, {"step": 1} | third]
    started, resumed = options
    assert {started["id"], resumed["id"]} == {"0123abcd"}
    # Runs of one recording are a group; names tell seeds of one attention apart.
    expected = {"group": "night", "name": "run: flash (hardware)", "project": "low-precision-attention"}
    assert expected.items() <= started.items()
    assert list(tmp_path.glob("run/wandb/offline-run-*/run-*.wandb"))


SOURCES = ("train.py", "attention/plan.py", "data/text/words.py")
OTHERS = ("my_kernels.py", "runs/a/x.py", ".venv/x.py", "tests/x.py", "attention/notes.md", "data/tokens/a/train.bin")


@pytest.mark.parametrize("name", [*SOURCES, *OTHERS])
def test_a_changed_source_of_the_project_changes_the_digest_and_nothing_else_does(tmp_path: Path, name: str) -> None:
    digests = []
    for changed in (*SOURCES, name):
        (tmp_path / changed).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / changed).write_text("# one" if len(digests) < 3 else "# other")
        digests.append(record.source_sha256(tmp_path))
    assert (digests[3] != digests[2]) == (name in SOURCES)


def test_the_digest_knows_every_file_in_the_root() -> None:
    checked = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["files"]
    assert {name for name in checked if name.endswith(".py")} == {*record._ROOT_FILES}


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GB200", None),
    ],
)
def test_a_peak_is_that_of_the_card_or_none(name: str, tflops: float | None) -> None:
    with mock.patch("torch.cuda.get_device_name", return_value=name):
        assert peak_flops(torch.device("cuda")) == (None if tflops is None else tflops * 1e12)


CPU = torch.device("cpu")


def model_of() -> GPT:
    """With weights of 1, so that losses of batches differ."""
    model = tiny_model()
    with torch.no_grad():
        model.transformer.wte.weight *= 50
    return model


class Batches:
    """Of different sizes, and with different numbers of targets that count."""

    def validation(self) -> Iterator[tuple[Tensor, Tensor]]:
        for size in (1, 2, 3):
            tokens, targets = torch.randint(256, (2, size, 16), generator=torch.Generator().manual_seed(size))
            yield tokens, targets.index_fill(1, torch.arange(5 * size - 5), -1)


def test_the_mean_is_over_targets_not_over_batches() -> None:
    model = model_of().eval()
    pairs = [(model(tokens)[0].double().flatten(0, 1), targets.flatten()) for tokens, targets in Batches().validation()]
    logits, targets = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    expected = functional.cross_entropy(logits, targets, ignore_index=-1).item()
    # A model's loss is the float32 mean of at most 48 targets.
    found = evaluate(model, Batches(), CPU, contextlib.nullcontext())
    assert found == pytest.approx(expected, rel=48 * 2**-24)


def test_modes_are_eval_and_put_back_module_by_module() -> None:
    model, seen = model_of().train(), []
    model.transformer.ln_f.eval()
    model.register_forward_pre_hook(lambda model, _: seen.append(model.training))
    evaluate(model, Batches(), CPU, contextlib.nullcontext())
    assert not any(seen)
    assert (model.training, model.transformer.wte.training, model.transformer.ln_f.training) == (True, True, False)
