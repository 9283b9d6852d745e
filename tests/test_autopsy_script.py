"""The autopsy's command line: a checkpoint of a run, its page and its text; one line for what cannot be examined."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from planted_models import PAPER, SHAPE, healthy, plant
from tiny_runs import Place, preset

import config as configuration
from attention import AttentionConfig
from autopsy.measure import FIXES
from config import TrainConfig
from data.batches import DataConfig
from data.token_files import TokenWriter
from model import GPT
from scripts import autopsy
from training.checkpoint import CheckpointConfig, Checkpoints
from training.intervention import Switch

Command = Callable[..., str]


@pytest.fixture(scope="module")
def run(place: Place) -> Path:
    return place.train(
        "run", {"run.steps": 10, "precision.dtype": "bfloat16", "attention": preset("flash", "rounded_forward")}
    )


@pytest.fixture
def examined(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """What the command prints."""

    def run(*arguments: object) -> str:
        monkeypatch.setattr("sys.argv", ["autopsy.py", *map(str, arguments), "--device", "cpu"])
        autopsy.main()
        return capsys.readouterr().out

    return run


def save(model: GPT, folder: Path, data: Path, switches: tuple[Switch, ...] = ()) -> Path:
    """A checkpoint of a model that no run has trained."""
    config = TrainConfig(
        model=SHAPE,
        attention=AttentionConfig(flash_backend="flash_reference", default=PAPER),
        data=DataConfig(dataset=str(data), sequence_length=16),
    )
    return Checkpoints(folder, CheckpointConfig()).save(
        7,
        model_state=model.state_dict(),
        optimizer_state={"state": {}, "param_groups": []},
        scaler_state={},
        rng=[torch.zeros(1, dtype=torch.uint8)],
        position=0,
        config_json=configuration.to_json(config),
        extra={"switches": [dataclasses.asdict(switch) for switch in switches]},
    )


@pytest.fixture
def skewed_data(tmp_path: Path) -> Path:
    """Validation tokens of which most are one: dO has a direction. The planted models' vocabulary."""
    generator = np.random.default_rng(0)
    tokens = np.where(generator.random(20_000) < 0.6, 5, generator.integers(0, 64, 20_000)).astype(np.uint8)
    for split in ("train", "val"):
        with TokenWriter(
            tmp_path / "data", split, dtype="uint8", vocabulary="bytes", vocabulary_size=64, source="test"
        ) as out:
            out.write(tokens)
    return tmp_path / "data"


def test_a_planted_checkpoint(tmp_path: Path, skewed_data: Path, examined: Command) -> None:
    checkpoint = save(plant(healthy(15), 0, 3, seed=15), tmp_path / "checkpoints", skewed_data)
    out = tmp_path / "page"
    printed = examined(checkpoint, "--sequences", 16, "--out", out)
    assert printed.splitlines()[0].startswith("YES: ")
    assert f"Switch on: --attention.default.preset {FIXES[0]} " in printed
    assert len((out / "autopsy.txt").read_text().splitlines()) > len(printed.splitlines()) - 2


def test_a_layer_that_was_switched_is_examined_as_switched(
    tmp_path: Path, skewed_data: Path, examined: Command
) -> None:
    """The same planted weights, whose layer moved to another delta at step 5, and one that is to move after the checkpoint."""
    switches = (Switch(5, 1, "flash_recompute_o"), Switch(9, 0, "standard"))
    checkpoint = save(plant(healthy(3), 1, 3, seed=3), tmp_path / "checkpoints", skewed_data, switches)
    printed = examined(checkpoint, "--sequences", 16)
    assert printed.startswith("NO: ")
    assert "switched: 5:1:flash_recompute_o (step:layer:preset)" in printed


def changed_checkpoint(run: Path, folder: Path, section: str, **fields: object) -> Path:
    """A copy whose config has other fields; its checksums fit."""
    path = folder / "checkpoints/step_00000010"
    shutil.copytree(run / "checkpoints/step_00000010", path)
    state = json.loads((path / "state.json").read_text())
    state["config"][section] |= fields
    (path / "state.json").write_text(json.dumps(state))
    names = [line.split()[1] for line in (path / "SHA256SUMS").read_text().splitlines()]
    sums = "".join(f"{autopsy.files.sha256_file(path / name)}  {name}\n" for name in names)
    (path / "SHA256SUMS").write_text(sums)
    return path


def test_a_backend_that_cannot_run_here_is_replaced_aloud(run: Path, tmp_path: Path, examined: Command) -> None:
    """A checkpoint of a GPU's kernel, examined on a CPU."""
    path = changed_checkpoint(run, tmp_path, "attention", default={"preset": "sdpa_cudnn", "numerics": "hardware"})
    assert "computed by: flash_reference in place of sdpa_cudnn, which cannot run here" in examined(path)


def test_a_checkpoint_of_another_shape(run: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    path = changed_checkpoint(run, tmp_path, "model", n_embd=32)
    message = refused(autopsy.main, path, "--device", "cpu")
    words = "its weights do not fit its config: transformer.wte.weight has shape [256, 16], expected [256, 32]"
    assert re.search(rf"{re.escape(words)} \(\d+ tensors do not fit\)$", message.strip())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name one thing"),
        (["x", "--hf", "y"], "name one thing"),
        (["x", "--batches", "0"], "--batches = 0"),
        (["x", "--attention", "flash"], "--attention flash: it is for --hf"),
        (["--hf", "nowhere"], "no config.json"),
        (["--hf", "nowhere", "--attention", "flesh"], "attention preset"),
    ],
)
def test_what_cannot_be_asked(arguments: list[str], message: str, refused: Callable[..., str]) -> None:
    assert message in refused(autopsy.main, *arguments)


def test_without_what_the_trainer_needs(
    tmp_path: Path, examined: Command, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint is refused in one line; a file of ``watch`` is judged."""
    for module in ("autopsy.subjects", "config"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert refused(autopsy.main, "x") == "error: this needs the package tyro: pip install '.[train]'\n"
    log = tmp_path / "watch.jsonl"
    log.write_text('{"step": 0, "clock": 0, "max_logit": [[1.0]]}\n')
    assert examined(log).startswith("UNCLEAR")


def test_a_gpt2_of_hugging_face(
    tmp_path: Path,
    skewed_data: Path,
    examined: Command,
    refused: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    transformers = pytest.importorskip("transformers")
    shape = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=32, vocab_size=64)
    transformers.GPT2LMHeadModel(shape).save_pretrained(tmp_path / "gpt2")
    transformers.LlamaConfig(num_hidden_layers=1).save_pretrained(tmp_path / "llama")
    capsys.readouterr()
    folder = tmp_path / "gpt2"
    printed = examined("--hf", folder, "--attention", "sdpa_flash", "--data", skewed_data, "--length", 32)
    assert "attention: sdpa_flash (assumed: the folder does not say)" in printed
    assert "needs --data" in refused(autopsy.main, "--hf", folder)
    assert "model_type = 'llama': expected gpt2; low_precision_attention.watch() examines other models" in refused(
        autopsy.main, "--hf", tmp_path / "llama", "--data", skewed_data
    )
