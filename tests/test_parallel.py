"""Several processes (gloo, CPU): with DDP and FSDP2 they train as one does, and ``watch`` sees each."""

import faulthandler
import json
import multiprocessing
from collections.abc import Callable
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

# What this file imports, once and not in each process; none of it starts a thread.
multiprocessing.set_forkserver_preload(["torch", "tiny_runs", "test_watching"])
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


def join(rank: int, world_size: int, port: int) -> None:
    faulthandler.dump_traceback_later(120, exit=True)  # a process that waits for ever says where
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)


def process(rank: int, how: str, port: int, folder: Path) -> None:
    join(rank, 2, port)
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


def start(work: Callable[..., None], processes: int, folder: Path, *arguments: Any) -> None:
    with reserved_port() as port:
        # Forks of a server that never ran anything: a fork of this process, which has threads, may wait for a lock for ever.
        given = (*arguments, port, folder)
        torch.multiprocessing.start_processes(work, given, nprocs=processes, start_method="forkserver")


@pytest.mark.filterwarnings("ignore:replace_sdpa")
@pytest.mark.parametrize("how", ["DDP", "FSDP2", "DDP compiled", "FSDP2 checkpointed"])
def test_two_processes_train_as_one(how: str, tmp_path: Path) -> None:
    start(process, 2, tmp_path, how)
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
