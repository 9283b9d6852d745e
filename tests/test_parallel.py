"""In two processes (gloo, CPU): DDP and FSDP2 train as one process does on both halves of a batch; ``watch`` sees each, and writes one."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_watching import B, C, Model, T
from tiny_runs import reserved_port
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from attention import replace_sdpa, watch

multiprocessing.set_forkserver_preload(["torch"])
HALVES = torch.randn(2, B, T, C, generator=torch.Generator().manual_seed(0))


def weights_after_three_steps(model: nn.Module, halves: list[Tensor]) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        for half in halves:
            (model(half) / len(halves)).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = (p.detach() for p in model.parameters())
    return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in weights]


def process(rank: int, how: str, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    model: Any = Model()
    model.checkpointed = how.endswith("checkpointed")
    if how.startswith("DDP"):
        model = DistributedDataParallel(model)
    else:
        for module in (*model.blocks, model):
            fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    if how.endswith("compiled"):
        model = torch.compile(model, backend="eager")
    with replace_sdpa("flash_delta_from_p"), watch(model, every=2, log=folder / "watch.jsonl") as seen:
        weights = weights_after_three_steps(model, [HALVES[rank]])
    torch.save({"weights": weights, "record": seen.record}, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:replace_sdpa")
@pytest.mark.parametrize("how", ["DDP", "FSDP2", "DDP compiled", "FSDP2 checkpointed"])
def test_two_processes_train_as_one(how: str, tmp_path: Path) -> None:
    with reserved_port() as port:
        # Forks of a server that never ran anything: a fork of this process, which has threads, may wait for a lock for ever.
        arguments = (how, port, tmp_path)
        torch.multiprocessing.start_processes(process, arguments, nprocs=2, start_method="forkserver")
    with replace_sdpa("flash_delta_from_p"):
        expected = weights_after_three_steps(Model(), list(HALVES))
    assert any(not torch.equal(a, b) for a, b in zip(expected, Model().parameters(), strict=True))
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for rank in range(2):
        for a, b in zip(found[rank]["weights"], expected, strict=True):
            torch.testing.assert_close(a, b)
        assert len(found[rank]["record"]["dq_error"]) == 2
    looks = [json.loads(line) for line in (tmp_path / "watch.jsonl").read_text().splitlines()]
    assert [look["step"] for look in looks] == [0, 2]
    assert looks[1] == found[0]["record"]
    assert found[0]["record"]["max_logit"] != found[1]["record"]["max_logit"]
