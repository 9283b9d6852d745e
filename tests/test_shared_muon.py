"""Muon shared over processes: torch.optim.Muon's own bits, whatever the number of processes; and two nodes as one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_runs import ROOT, Place, environment, lines, new_place, optimizer, reserved_port, weights

from training.shared_muon import cost, shares

GPT2 = [(2304, 768), (768, 768), (3072, 768), (768, 3072)] * 12

# Each process steps both on equal gradients; rank 0 alone could pass by computing everything, so the others report too.
STEPS = """
import sys
import torch
from torch.optim import Muon
from training import distributed
from training.shared_muon import SharedMuon
import training.newton_schulz as module

place = distributed.start("cpu")
torch.set_num_threads(1)
worked = 0
sound = module._zeropower_via_newtonschulz
def counted(*args):
    global worked
    worked += 1
    return sound(*args)
module._zeropower_via_newtonschulz = counted
shapes = [(24, 8), (8, 8), (32, 8), (8, 32), (5, 7)]
generator = torch.Generator().manual_seed(0)
start = [torch.randn(s, generator=generator) for s in shapes]
ours, theirs = ([torch.nn.Parameter(w.clone()) for w in start] for _ in range(2))
settings = {"lr": 0.02, "weight_decay": float(sys.argv[1]), "momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"}
way = sys.argv[2]
if way == "replayed":
    sys.path.insert(0, sys.argv[3])
    from tape import TapeRecorder
    orthogonalise = module.Replayed(TapeRecorder())
else:
    orthogonalise = getattr(module, way)
pair = [(ours, SharedMuon(ours, orthogonalise=orthogonalise, **settings)), (theirs, Muon(theirs, **settings))]
for step in range(4):
    gradients = [torch.randn(s, generator=generator) for s in shapes]
    for parameters, optimizer in pair:
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = gradient.clone()
        optimizer.step()
assert not torch.equal(ours[0], start[0])
near = torch.equal if way != "batched" else lambda a, b: (a - b).norm() < 1e-3 * b.norm()
assert all(near(a, b) for a, b in zip(ours, theirs))
everywhere = distributed.gather_equal(torch.cat([p.detach().flatten() for p in ours]))
assert all(torch.equal(one, everywhere[0]) for one in everywhere)
buffers = [[o.state[p]["momentum_buffer"] for p in ps] for ps, o in pair]
assert all(torch.equal(a, b) for a, b in zip(*buffers))
print(f"rank {place.rank} worked {worked}")
distributed.stop()
"""


def launch(script: str, arguments: list[str], processes: int) -> list[str]:
    """The script in so many processes of one group; what each printed."""
    with reserved_port() as port:
        meeting = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", script, *arguments],
                env=environment() | meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(processes)
        ]
        outputs = [rank.communicate(timeout=100) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * processes, outputs
    return [out for out, _ in outputs]


@pytest.mark.parametrize("weight_decay", ["0", "0.1"])
def test_two_processes_give_the_bits_of_torchs_muon_at_half_the_work(weight_decay: str) -> None:
    printed = launch(STEPS, [weight_decay, "each"], 2)
    worked = [int(line.split()[-1]) for line in printed]
    assert sum(worked) == 4 * 5
    assert min(worked) >= 4


def test_replayed_shares_give_the_bits_of_torchs_muon() -> None:
    """With a tape in the graph's place; every process captures its own matrices, once."""
    printed = launch(STEPS, ["0.1", "replayed", str(ROOT / "tests")], 2)
    worked = [int(line.split()[-1]) for line in printed]
    assert sum(worked) == 5
    assert min(worked) >= 1


def test_one_process_is_torchs_own_step() -> None:
    assert launch(STEPS, ["0.1", "each"], 1) == ["rank 0 worked 0\n"]


@pytest.mark.parametrize("processes", [1, 2])
def test_batched_shares_are_near_torchs_muon_and_the_same_everywhere(processes: int) -> None:
    expected = [f"rank {rank} worked 0\n" for rank in range(processes)]  # by no call for a single matrix
    assert launch(STEPS, ["0.1", "batched"], processes) == expected


@pytest.mark.parametrize("processes", [1, 2, 3, 8, 100])
def test_every_matrix_has_one_owner_and_loads_are_even(processes: int) -> None:
    owners = shares(GPT2, processes)
    loads = [sum(cost(*s) for s, owner in zip(GPT2, owners, strict=True) if owner == rank) for rank in range(processes)]
    assert set(owners) <= set(range(processes))
    # Nobody can have less than the costliest matrix or the mean; the greedy order stays within a third of that (Graham 1969).
    assert max(loads) <= 4 / 3 * max(sum(loads) / processes, max(cost(*s) for s in GPT2))


# ---- two nodes


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with new_place(tmp_path_factory) as place:
        yield place


def agent(place: Place, recipe: Path, node: int, port: int) -> subprocess.Popen[str]:
    """torchrun as on node ``node`` of two, each at an address of its own."""
    where = ["--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=test"]
    where += [f"--rdzv-endpoint=127.0.0.1:{port}", f"--local-addr=127.0.0.{node + 1}"]
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *where, str(ROOT / "train.py"), str(recipe)],
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2 is an address on Linux only")
def test_two_nodes_give_the_bits_of_one_node_with_two_processes(place: Place) -> None:
    fields = {"run.steps": 10, "optim.optimizer": "muon", "data.micro_batch": 2}
    here, there = (
        {**fields, "run.folder": str(place.folder / where), "data.record": str(place.folder / where / "recording")}
        for where in ("one_node", "two_nodes")
    )
    recipe = place.preset_file(place.config("run", here))
    one = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*one, str(ROOT / "train.py"), str(recipe)], env=environment(), cwd=ROOT, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    recipe = place.preset_file(place.config("run", there))
    with reserved_port() as port:
        agents = [agent(place, recipe, node, port) for node in (0, 1)]
        try:
            outputs = [a.communicate(timeout=120) for a in agents]
            assert [a.returncode for a in agents] == [0, 0], outputs
        finally:
            for a in agents:
                a.kill()
    runs = [place.folder / where / "run" for where in ("one_node", "two_nodes")]
    assert lines(runs[0]) == lines(runs[1])
    assert weights(runs[0], 10) == weights(runs[1], 10)
    assert optimizer(runs[0], 10) == optimizer(runs[1], 10)
    assert "2 process(es)" in outputs[0][0] + outputs[1][0]
    assert os.path.isfile(runs[1] / "metrics.jsonl")
