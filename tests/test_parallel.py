"""Several processes (gloo, CPU): DDP and FSDP2 train as one does, ``watch`` sees each; gradients are exchanged when they should be."""

from __future__ import annotations

import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_watching import B, C, Model, T
from tiny_runs import completed, reserved_port
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


WORLD = 3


WORKER = """
import hashlib, json
from pathlib import Path
import torch
from torch import nn
from training import distributed

place = distributed.start("cpu")
rank = place.rank
facts = {{}}

# Whole numbers that 3 divides: every sum and mean below is exact, in any order.
model = nn.Linear(4, 2)
parallel = distributed.wrap(model, place)
facts["steps"] = []
for micro in range(3):
    inputs = 3.0 * torch.arange(8.0).reshape(2, 4) + 30 * (micro * place.world_size + rank)
    with distributed.no_sync(parallel, last=micro == 2):
        parallel(inputs).sum().backward()
    facts["steps"].append(model.weight.grad[0].tolist())

# A model of more than one bucket; the same backward three times over.
torch.manual_seed(0)
deep = nn.Sequential(*[nn.Linear(256, 256) for _ in range(12)])
parallel = distributed.wrap(deep, place)
inputs = torch.randn(8, 256, generator=torch.Generator().manual_seed(rank))
distributed.settle(parallel, lambda: parallel(torch.ones_like(inputs)).sum().backward())
facts["digests"] = []
for _ in range(3):
    parallel.zero_grad()
    parallel(inputs).square().sum().backward()
    digest = hashlib.sha256()
    for parameter in deep.parameters():
        digest.update(parameter.grad.numpy().tobytes())
    facts["digests"].append(digest.hexdigest())
distributed.barrier()
distributed.stop()
Path({folder!r}, f"{{rank}}.json").write_text(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of three processes saw."""
    folder = tmp_path_factory.mktemp("ranks")
    worker = folder / "worker.py"
    worker.write_text(WORKER.format(folder=str(folder)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={WORLD}", str(worker)]
    done = completed(command)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]


def test_gradients_stay_local_until_the_last_micro_step(facts: list[dict[str, Any]]) -> None:
    for rank, fact in enumerate(facts):
        own = [sum(3.0 * (column + column + 4) + 2 * 30 * (m * WORLD + rank) for m in (0, 1)) for column in range(4)]
        assert fact["steps"][1] == own


def test_accumulated_gradients_are_the_single_process_sum_over_processes(facts: list[dict[str, Any]]) -> None:
    model = nn.Linear(4, 2)
    for micro_batch in range(3 * WORLD):
        inputs = 3.0 * torch.arange(8.0).reshape(2, 4) + 30 * micro_batch
        model(inputs).sum().backward()
    assert model.weight.grad is not None
    expected = (model.weight.grad[0] / WORLD).tolist()
    assert [fact["steps"][2] for fact in facts] == [expected] * WORLD


def test_first_backward_rounds_as_all_later_ones(facts: list[dict[str, Any]]) -> None:
    assert len({digest for fact in facts for digest in fact["digests"]}) == 1
