"""Whole runs in one process: the same bits twice, the same batches replayed, loss that falls, and the record a run leaves.

Two float32 ways of computing one number are called equal when they differ by at most N * 2^-24 of it, the bound for summing N float32
terms in another order; N is the number of tokens whose losses a step averages.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_runs import TINY, Place, before_each_step, column, lines, preset, tree, weights

from data.batches import open_batches
from errors import UserError
from model import GPT, initialize
from training.run import Run

TOKENS = TINY.data.global_batch * TINY.data.sequence_length
NOISE = TOKENS * 2.0**-24
BF16 = {"precision.dtype": "bfloat16"}


def assert_same_to_noise(a: Path, b: Path) -> None:
    losses_a, losses_b = column(a, "train_loss"), column(b, "train_loss")
    assert len(losses_a) == len(losses_b) > 0
    assert max(abs(x - y) / x for x, y in zip(losses_a, losses_b, strict=True)) <= NOISE


# ---- the same bits


@pytest.fixture(scope="module")
def recorded(place: Place) -> Path:
    """A run of 30 steps in BF16, recorded."""
    fields = {**BF16, "run.steps": 30, "data.record": place.recording("r"), "data.seed": 99}
    return place.train("recorded", fields)


def test_replay_gives_the_same_bits(place: Place, recorded: Path) -> None:
    # With the default seed, so the order comes from the recording.
    replayed = place.train("replayed", {**BF16, "run.steps": 30, "data.replay": place.recording("r")})
    assert lines(replayed) == lines(recorded)
    assert weights(replayed, 30) == weights(recorded, 30)


# ---- optimization


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_loss_falls(place: Place, optimizer: str) -> None:
    run = place.train(f"falls_{optimizer}", {"run.steps": 60, "optim.optimizer": optimizer})
    losses, validation = column(run, "train_loss"), column(run, "val_loss")
    # Sixteen words, equally likely: ln 16 nats for at least three bytes each, and the first bytes of a sequence are a guess.
    assert losses[0] > 0.95 * math.log(256)
    assert max(losses[-10:]) < 0.5 * losses[0]
    assert validation[-1] < 0.5 * validation[0]


def gradients(place: Place, micro_batch: int) -> torch.Tensor:
    """All gradients of one step, flat, unclipped, which the loop leaves."""
    runs: list[Run] = []
    fields = {"run.steps": 1, "run.seed": 1, "optim.grad_clip": 0.0, "attention": preset("sdpa_math")}
    with pytest.MonkeyPatch.context() as patch:
        before_each_step(patch, lambda run, step: runs.append(run))
        place.train(f"gradients_{time.monotonic_ns()}", {**fields, "data.micro_batch": micro_batch})
    return torch.cat([p.grad.flatten() for p in runs[0].network.raw.parameters() if p.grad is not None]).double()


def exact_gradients(place: Place) -> torch.Tensor:
    """Of the mean over the whole batch, in float64."""
    config = place.config("unused", {"data.micro_batch": TINY.data.global_batch, "attention": preset("sdpa_math")})
    model = GPT(config.model, config.attention.resolve(config.model.n_layer, config.model.n_head))
    initialize(model, seed=1)
    ((inputs_BT, targets_BT),) = open_batches(config.data).next()
    model.double()(inputs_BT, targets_BT)[1].backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_accumulated_gradients_are_as_exact_as_those_of_one_batch(place: Place, micro_batch: int) -> None:
    # GPT.loss is float32 by design, so even the float64 model is exact to about 2^-24 only, at the loss alone.
    exact, whole, accumulated = exact_gradients(place), gradients(place, 8), gradients(place, micro_batch)
    assert torch.linalg.norm(accumulated - exact) <= 2 * torch.linalg.norm(whole - exact)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
def test_compiled_equals_eager(place: Place) -> None:
    # Compiling takes the time here: one layer, and no evaluation, which would be a second graph.
    small = {"model.n_layer": 1, "evaluation.every": 0}
    eager = place.train("eager", small)
    compiled = place.train("compiled", {**small, "precision.compile": True})
    assert_same_to_noise(eager, compiled)


# ---- what a run leaves


def test_a_run_writes_into_its_folder_only(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = tree(place.data)
    run = place.train("contained", {"run.steps": 2})
    assert tree(tmp_path) == {}
    assert tree(place.data) == before
    logs = {"metrics.jsonl", "telemetry.jsonl"}
    assert {path.name for path in run.iterdir()} == {"config.json", *logs, "checkpoints", "lock", "exit.json"}


def overwrite_the_last_byte(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\0")


def cut_short(path: Path) -> None:
    os.truncate(path, 200)


@pytest.mark.parametrize("name", ["train.bin", "val.bin", "offsets.npy"])
@pytest.mark.parametrize(
    ("change", "told"),
    [(overwrite_the_last_byte, "was written to while the run read it"), (cut_short, "was cut short while it was read")],
)
def test_data_that_change_under_a_run_end_it_with_the_last_good_checkpoint_named(
    place: Place, name: str, change: Callable[[Path], None], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = f"{name}_{change.__name__}"
    data = shutil.copytree(place.data, place.folder / f"data_{case}")
    fields = {"data.dataset": str(data), "run.steps": 30}
    place.train(f"source_{case}", {**fields, "data.record": place.recording(case)})
    path = next(folder / name for folder in (data, Path(place.recording(case))) if (folder / name).exists())

    def at_13(run: Run, step: int) -> None:
        if step == 13:
            change(path)

    before_each_step(monkeypatch, at_13)
    with pytest.raises(UserError, match=rf"{name}: it {told}\nthe newest checkpoint is .*step_00000010;"):
        place.train(f"changed_{case}", {**fields, "data.replay": place.recording(case)})
    assert not (place.runs / f"changed_{case}/checkpoints/step_00000020").exists()
