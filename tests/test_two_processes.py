"""torchrun with two processes on one machine (gloo, DDP): the same bits twice, the same data as one process, one writer, one way out."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import (
    ROOT,
    TINY,
    Place,
    column,
    command,
    environment,
    lines,
    optimizer,
    preset,
    recorded,
    reserved_port,
    start_train,
    weights,
)

from attention import AttentionConfig, AttentionRule, AttentionSpec
from config import TrainConfig

pytestmark = pytest.mark.slow
# Summing the losses of a step's tokens in another order changes a mean by at most this much of it, see test_train.py.
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
    (place.folder / folder / "stdout").write_text(done.stdout)
    return place.folder / folder / name


@pytest.fixture(scope="module")
def two(place: Place) -> Path:
    """A run of two processes, to compare with."""
    return torchrun(place, "run", "two")


def test_two_processes_give_the_same_bits_twice(place: Place, two: Path) -> None:
    again = torchrun(place, "run", "again")
    assert lines(again) == lines(two)
    assert weights(again, 30) == weights(two, 30)
    assert optimizer(again, 30) == optimizer(two, 30)
    assert recorded(again.parent / "recording") == recorded(two.parent / "recording")


@pytest.fixture(scope="module")
def one(place: Place, two: Path) -> Path:
    place.train("run", {**FIELDS, "run.folder": str(place.folder / "one"), "data.record": place.recording("one")})
    return place.folder / "one/run"


def test_one_process_reads_exactly_the_data_of_two(place: Place, one: Path, two: Path) -> None:
    assert recorded(Path(place.recording("one"))) == recorded(two.parent / "recording")
    assert column(one, "data_digest") == column(two, "data_digest")


@pytest.mark.parametrize("name", ["train_loss", "val_loss"])
def test_losses_of_one_and_two_processes_agree_to_rounding(one: Path, two: Path, name: str) -> None:
    pairs = list(zip(column(one, name), column(two, name), strict=True))
    assert max(abs(a - b) / b for a, b in pairs) <= NOISE
    # Were they bit-equal, two processes would not have shared the work.
    assert name == "val_loss" or any(a != b for a, b in pairs)


def test_a_stop_takes_all_processes_along(place: Place) -> None:
    """The first update throws the weights so far that every loss after it overflows."""
    config = config_of(place, "stop", "stop", {"optim.warmup_steps": 0, "optim.lr": 1e18})
    # Started by hand: torchrun would end one process as soon as the other has failed.
    arguments = command(ROOT / "train.py", [str(place.preset_file(config))])
    with reserved_port() as port:
        shared = environment() | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks = [subprocess.Popen(arguments, env=shared | {"RANK": rank, "LOCAL_RANK": rank}) for rank in "01"]
        try:
            assert [rank.wait(timeout=60) for rank in ranks] == [1, 1]
        finally:
            for rank in ranks:
                rank.kill()
    stopped = lines(place.folder / "stop/stop")
    events = [(line["step"], line["batch"], line["nonfinite"]) for line in stopped if "nonfinite" in line]
    assert events == [(1, 1, "stop")]


def test_stochastic_rounding_does_not_depend_on_the_number_of_processes(place: Place) -> None:
    # O of one mantissa bit, so that another draw shows in the first loss.
    fields = {"attention": preset("flash_stochastic_o", "microcosm"), "run.steps": 1}
    two = column(torchrun(place, "stochastic", "stochastic", fields), "train_loss")[0]
    one, other_draws = (
        column(place.train(f"stochastic_{size}", {**fields, "data.micro_batch": size}), "train_loss")[0]
        for size in (2, 4)
    )
    # The losses of the four micro-batches are the same bits, their mean is four terms in another order.
    four_terms = 4 * 2.0**-24
    assert abs(one - two) / two <= four_terms
    assert abs(one - other_draws) / one > four_terms


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
