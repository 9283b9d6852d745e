"""torchrun with two processes (gloo), sums in any order: the same bits twice, the data and losses of one process, the kernels."""

from pathlib import Path
from typing import Any

import pytest
import torch
from test_tree_sum import assert_same, sessions
from tiny_runs import TINY, Place, column, recorded, weights

from attention import AttentionConfig, AttentionRule, AttentionSpec

pytestmark = pytest.mark.slow
# Summing the losses of a step's tokens in another order changes a mean by at most this much of it.
NOISE = TINY.data.global_batch * TINY.data.sequence_length * 2.0**-24
# Two micro-steps for each of two processes, four for one.
FIELDS: dict[str, Any] = {"data.micro_batch": 2, "precision.fixed_sum_order": False}


def trained(place: Place, name: str, folder: str, processes: int = 2, steps: int = 30, **fields: Any) -> Path:
    return sessions(place, name, folder, {**FIELDS, **fields}, [(processes, steps)])


@pytest.fixture(scope="module")
def two(place: Place) -> Path:
    """A run of two processes, to compare with."""
    return trained(place, "run", "two")


def test_two_processes_give_the_same_bits_twice(place: Place, two: Path) -> None:
    assert_same(trained(place, "run", "again"), two, 30)


def test_one_process_reads_the_data_of_two_and_its_losses_agree_to_rounding(place: Place, two: Path) -> None:
    one = trained(place, "run", "one", processes=1)
    assert recorded(one.parent / "recording") == recorded(two.parent / "recording")
    for name in ("train_loss", "val_loss"):
        assert max(abs(a - b) / b for a, b in zip(column(one, name), column(two, name), strict=True)) <= NOISE
    # Were they bit-equal, two processes would not have shared the work.
    assert column(one, "train_loss") != column(two, "train_loss")


@pytest.mark.gpu
def test_the_triton_kernels_compiled_give_the_same_bits_twice(place: Place) -> None:
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
    first, second = (trained(place, "kernels", folder, **fields) for folder in ("kernels_first", "kernels_second"))
    assert weights(first, 30) == weights(second, 30)
    alone = column(trained(place, "kernels", "kernels_one", processes=1, **fields), "train_loss")[0]
    assert abs(column(first, "train_loss")[0] - alone) < NOISE * alone
