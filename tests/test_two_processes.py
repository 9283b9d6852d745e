"""torchrun with two processes on one machine (gloo, DDP): the same bits twice, the data and losses of one process, the kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import TINY, Place, column, left, recorded, start_train, weights

import train
from attention import AttentionConfig, AttentionRule, AttentionSpec
from config import TrainConfig

pytestmark = pytest.mark.slow
# Summing the losses of a step's tokens in another order changes a mean by at most this much of it.
NOISE = TINY.data.global_batch * TINY.data.sequence_length * 2.0**-24
# Two micro-steps for each of two processes, four for one.
FIELDS: dict[str, Any] = {"run.steps": 30, "data.micro_batch": 2, "precision.fixed_sum_order": False}


def config_of(place: Place, name: str, folder: str, fields: dict[str, Any]) -> TrainConfig:
    """Runs of one name in folders of their own: a recording's header holds the name, and its bytes are compared."""
    here = {"run.folder": str(place.folder / folder), "data.record": str(place.folder / folder / "recording")}
    return place.config(name, {**FIELDS, **here, **fields})


def torchrun(place: Place, name: str, folder: str, fields: dict[str, Any] | None = None) -> Path:
    config = config_of(place, name, folder, fields or {})
    done = start_train([str(place.preset_file(config))], processes=2)
    assert done.returncode == 0, done.stderr
    return place.folder / folder / name


@pytest.fixture(scope="module")
def two(place: Place) -> Path:
    """A run of two processes, to compare with."""
    return torchrun(place, "run", "two")


def test_two_processes_give_the_same_bits_twice(place: Place, two: Path) -> None:
    again = torchrun(place, "run", "again")
    assert left(again, 30) == left(two, 30)
    assert recorded(again.parent / "recording") == recorded(two.parent / "recording")


def test_one_process_reads_the_data_of_two_and_its_losses_agree_to_rounding(place: Place, two: Path) -> None:
    train.train(config_of(place, "run", "one", {}))
    one = place.folder / "one/run"
    assert recorded(one.parent / "recording") == recorded(two.parent / "recording")
    for name in ("train_loss", "val_loss"):
        assert max(abs(a - b) / b for a, b in zip(column(one, name), column(two, name), strict=True)) <= NOISE
    # Were they bit-equal, two processes would not have shared the work.
    assert column(one, "train_loss") != column(two, "train_loss")


def test_the_triton_kernels_under_ddp_in_the_interpreter(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """DDP's hooks hear the operators' gradients, which are views of one tensor; the first loss is that of ``flash_reference``."""
    pytest.importorskip("triton")
    fields: dict[str, Any] = {"model.n_embd": 32, "run.steps": 2, "evaluation.every": 0, "telemetry.every": 0}
    reference = torchrun(place, "interpreted", "reference", fields)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    fields["attention.flash_backend"] = "flash"
    first, second = (torchrun(place, "interpreted", folder, fields) for folder in ("first", "second"))
    assert weights(first, 2) == weights(second, 2)
    losses, expected = column(first, "train_loss"), column(reference, "train_loss")
    assert len(losses) == 2
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 1e-4


@pytest.mark.gpu
def test_the_triton_kernels_under_ddp_and_compile_give_the_same_bits_twice(place: Place) -> None:
    """Two GPUs; two presets in one layer, one of them stochastic; the first loss is that of one process, whose sums have another order."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    rule = AttentionRule(layers=(1,), heads=(1,), attention=AttentionSpec(preset="flash_stochastic_o"))
    fields: dict[str, Any] = {
        "run.device": "cuda",
        "model.n_embd": 32,
        "attention": AttentionConfig(rules=(rule,)),
        "precision.dtype": "bfloat16",
        "precision.compile": True,
    }
    first, second = (torchrun(place, "kernels", folder, fields) for folder in ("kernels_first", "kernels_second"))
    assert weights(first, 30) == weights(second, 30)
    alone_fields = {"run.folder": str(place.folder / "kernels_one")}
    place.train("kernels", {**FIELDS, **fields, **alone_fields})
    alone = column(place.folder / "kernels_one/kernels", "train_loss")[0]
    assert abs(column(first, "train_loss")[0] - alone) < NOISE * alone
