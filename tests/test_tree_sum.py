"""Several processes (gloo). With precision.fixed_sum_order: the same bits on one, two and four, also where the number changes on the way;
without: the same bits twice, the data and losses of one process."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import TINY, Place, column, command, completed, left, preset, recorded, start_train, weights
from torch import Tensor, nn

import train
from attention import AttentionConfig, AttentionRule, AttentionSpec
from data.batches import DataConfig
from errors import UserError
from training.distributed import DistContext
from training.run import check_start
from training.tree_sum import TreeSum, check_processes
from training.weights import read_checkpoint

FIELDS: dict[str, Any] = {"data.micro_batch": 1}


def in_a_tree(terms: Tensor) -> Tensor:
    """The sum of rows, by its definition: halves while the number of rows is even, else one after the other."""
    if len(terms) % 2 == 0:
        first, second = terms.chunk(2)
        return in_a_tree(first) + in_a_tree(second)
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


@pytest.mark.parametrize("micro_batches", [1, 3, 8, 12])
def test_gradients_and_loss_are_added_in_the_tree(micro_batches: int) -> None:
    model = nn.Linear(50, 1, bias=False)
    inputs = torch.randn(micro_batches, 50, generator=torch.Generator().manual_seed(0))
    tree_sum, losses = TreeSum(model, micro_batches), []
    for row in inputs:
        loss = model(row).sum()
        loss.backward()
        tree_sum.add(loss)
        losses.append(loss.detach())
    total = tree_sum.total()
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad[0], in_a_tree(inputs))
    assert torch.equal(total, in_a_tree(torch.stack(losses)))


@pytest.mark.parametrize(
    ("processes", "ways"),
    [
        (3, "in a tree; or --precision.no-fixed-sum-order$"),
        (8, "in a tree; or, in a new run, --data.micro-batch 1, which allows 8$"),
        (16, "in a tree$"),  # they do not divide the batch, either
    ],
)
def test_processes_that_do_not_divide_the_tree_are_refused(processes: int, ways: str) -> None:
    with pytest.raises(UserError, match=rf"number of processes = {processes}: expected 1, 2, 4, as .* {ways}"):
        check_processes(DataConfig(global_batch=24, micro_batch=2), processes)


def test_a_checkpoint_from_before_the_field_is_one_of_ddp(place: Place) -> None:
    loaded = read_checkpoint(place.train("earlier", {"run.steps": 1}))
    del loaded.config_json["precision"]["fixed_sum_order"]
    alone = DistContext(rank=0, world_size=1, device=torch.device("cpu"))
    check_start(place.config("earlier", {"precision.fixed_sum_order": False}), alone, loaded, branch=False)
    with pytest.raises(UserError, match=r"precision.fixed_sum_order = True: expected False, as in the checkpoint"):
        check_start(place.config("earlier"), alone, loaded, branch=False)


def test_processes_that_would_compile_other_graphs_are_refused(place: Place) -> None:
    fields = {**FIELDS, "precision.compile": True, "data.micro_batch": 4, "data.validation_sequences": 10}
    with pytest.raises(UserError, match=r"data.validation_sequences = 10: expected a multiple of micro_batch = 4"):
        place.config("ragged", fields)


def sessions(place: Place, name: str, folder: str, fields: dict[str, Any], parts: list[tuple[int, int]]) -> Path:
    """A run in sessions of (processes, last step). Runs of one name in folders of their own: a recording's header holds the name."""
    here = {"run.folder": str(place.folder / folder), "data.record": str(place.folder / folder / "recording")}
    for number, (processes, steps) in enumerate(parts):
        resume = "yes" if number else "no"
        config = place.config(name, {**FIELDS, **fields, **here, "run.steps": steps, "run.resume": resume})
        if processes == 1:
            train.train(config)
            continue
        done = start_train([str(place.preset_file(config))], processes)
        assert done.returncode == 0, done.stderr
    run = place.folder / folder / name
    record = json.loads((run / "config.json").read_text())
    assert [session["device"]["processes"] for session in record["sessions"]] == [processes for processes, _ in parts]
    return run


def assert_same(run: Path, expected: Path, step: int) -> None:
    """Weights, moments, random states, logs and recording."""
    assert left(run, step) == left(expected, step)
    assert recorded(run.parent / "recording") == recorded(expected.parent / "recording")


def test_two_processes_then_one_give_the_bits_of_one(place: Place) -> None:
    """QK-clip acts in every step, by the largest logit of all processes and micro-steps."""
    fields = {"model.qk_clip_tau": 1e-3}
    one = sessions(place, "run", "one", fields, [(1, 8)])
    assert_same(sessions(place, "run", "two", fields, [(2, 5), (1, 8)]), one, 8)


FAULTY = """
import errno, os, pytest, signal, sys, time, train, training.checkpoint
from tiny_runs import before_each_step

rank, action = int(sys.argv.pop()), sys.argv.pop()

def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")

def fault(run, step):
    if step == 23 and run.dist.rank == rank:
        exec(action)

before_each_step(pytest.MonkeyPatch(), fault)
train.main()
"""
FAULTS = {
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", 3),
    "hangs": ("time.sleep(100)", 1),
    "NaN": ("next(run.network.raw.parameters()).register_hook(lambda g: g * float('nan'))", 1),
    "full disk": ("training.checkpoint._write = full", 0),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM)", 1),
}


@pytest.fixture(scope="module")
def straight(place: Place) -> Path:
    return sessions(place, "faulty", "straight", {}, [(1, 40)])


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_after_a_fault_of_one_process_two_go_on(place: Place, tmp_path: Path, straight: Path, fault: str) -> None:
    """It happens to one of four processes; two go on."""
    folder, (action, rank) = place.folder / fault.replace(" ", "_"), FAULTS[fault]
    fields = {**FIELDS, "run.folder": str(folder), "data.record": str(folder / "recording"), "run.steps": 40}
    config = place.preset_file(place.config("faulty", {**fields, "run.resume": "auto", "run.timeout": 20.0}))
    (tmp_path / "faulty.py").write_text(FAULTY)
    line = command(tmp_path / "faulty.py", [str(config), action, str(rank)], 4)
    assert completed(line).returncode == 1
    assert not (folder / "faulty/checkpoints/step_00000040").exists()
    done = start_train([str(config)], 2)
    assert done.returncode == 0, done.stderr
    assert_same(folder / "faulty", straight, 40)


CASES: dict[str, dict[str, Any]] = {
    "adamw": {},
    # Twelve micro-batches: four leaves of three. The clip acts in every step.
    "muon": {"optim.optimizer": "muon", "data.global_batch": 12, "model.qk_clip_tau": 1e-3},
    "bfloat16": {
        "precision.dtype": "bfloat16",
        "model.tie_embeddings": False,
        "attention": preset("flash_stochastic_o"),
    },
    "compiled": {"precision.compile": True, "model.n_layer": 1, "evaluation.every": 0, "data.micro_batch": 2},
    "float16": {"precision.dtype": "float16"},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_any_number_of_processes_gives_the_same_bits(place: Place, case: str) -> None:
    if case == "compiled" and shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler on the CPU")
    torch._dynamo.reset()
    fields = CASES[case]
    one = sessions(place, case, f"{case}_one", fields, [(1, 60)])
    assert_same(sessions(place, case, f"{case}_any", fields, [(4, 23), (1, 41), (2, 60)]), one, 60)


IN_PLACE = """
import sys, torch, torch.distributed as dist
from training import distributed

folder, context = sys.argv[1], distributed.start("cpu")

class Peers:  # of GPUs that reach each other's memory, played by files that all processes map
    def get_buffer(self, rank, sizes, dtype, offset):
        return torch.from_file(f"{folder}/{rank}", shared=True, size=length, dtype=dtype)[offset : offset + sizes[0]]
    def barrier(self, channel, timeout_ms):
        assert timeout_ms == 7000
        dist.barrier()

def shared_zeros(like, size):
    global length
    length = size
    mine = torch.from_file(f"{folder}/{context.rank}", shared=True, size=size, dtype=like.dtype)
    return mine.zero_(), Peers()

ours, theirs = distributed.PairSum(), distributed.PairSum(7.0)
kept = distributed._shared_zeros
for step in range(3):
    generator = torch.Generator().manual_seed(10 * step + context.rank)
    tensors = [torch.randn(shape, generator=generator) for shape in ((3, 50), (), (129,), (1,))]
    by_collectives = [x.clone() for x in ours(tensors)]
    distributed._shared_zeros = shared_zeros
    in_place = theirs(tensors)
    distributed._shared_zeros = kept
    assert all(torch.equal(a, b) and a.shape == b.shape for a, b in zip(by_collectives, in_place))
    assert all(x.data_ptr() % 512 == in_place[0].data_ptr() % 512 for x in in_place)
    everyone = [None] * context.world_size
    dist.all_gather_object(everyone, tensors)
    while len(everyone) > 1:
        everyone = [[a + b for a, b in zip(*pair)] for pair in zip(everyone[::2], everyone[1::2])]
    assert all(map(torch.equal, everyone[0], in_place))
distributed.stop()
"""


def test_sums_in_each_others_memory_are_those_of_collectives(tmp_path: Path) -> None:
    """Of four processes: one level of the tree has two pairs, the other is that of two processes."""
    (tmp_path / "in_place.py").write_text(IN_PLACE)
    done = completed(command(tmp_path / "in_place.py", [str(tmp_path)], 4))
    assert done.returncode == 0, done.stderr


@pytest.fixture
def gpus() -> dict[str, Any]:
    """Settings of a run whose processes have GPUs that reach each other's memory."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    if not torch.cuda.can_device_access_peer(0, 1):
        pytest.skip("needs CUDA devices that reach each other's memory")
    return {"run.device": "cuda", "model.n_embd": 32, "precision.dtype": "bfloat16", "precision.compile": True}


@pytest.mark.gpu
def test_gpus_that_write_into_each_others_memory_give_the_bits_of_one(place: Place, gpus: dict[str, Any]) -> None:
    fields = {**gpus, "data.micro_batch": 2}
    most = 4 if torch.cuda.device_count() >= 4 else 2
    one = sessions(place, "gpus", "gpus_one", fields, [(1, 30)])
    assert_same(sessions(place, "gpus", "gpus_most", fields, [(most, 20), (2, 30)]), one, 30)


@pytest.mark.gpu
@pytest.mark.slow
def test_a_gpu_waits_for_one_that_hangs_no_longer_than_run_timeout(
    place: Place, tmp_path: Path, gpus: dict[str, Any]
) -> None:
    action, _ = FAULTS["hangs"]
    fields = {**gpus, "data.micro_batch": 2, "data.record": "", "run.steps": 40, "run.timeout": 20.0}
    (tmp_path / "faulty.py").write_text(FAULTY)
    config = place.preset_file(place.config("hangs", {**fields, "run.folder": str(place.folder / "gpus_hang")}))
    ended = completed(command(tmp_path / "faulty.py", [str(config), action, "1"], 2), timeout=240)
    assert ended.returncode == 1
    assert "failed to receive signal" in ended.stderr + ended.stdout
    assert "Traceback" in ended.stderr


# ---- sums in any order


# Summing the losses of a step's tokens in another order changes a mean by at most this much of it.
NOISE = TINY.data.global_batch * TINY.data.sequence_length * 2.0**-24


def in_any_order(place: Place, folder: str, processes: int = 2, **fields: Any) -> Path:
    """A run of 30 steps; two micro-steps for each of two processes, four for one."""
    fields = {"data.micro_batch": 2, "precision.fixed_sum_order": False, **fields}
    return sessions(place, "any_order", folder, fields, [(processes, 30)])


@pytest.fixture(scope="module")
def two(place: Place) -> Path:
    """A run of two processes, to compare with."""
    return in_any_order(place, "any_two")


@pytest.mark.slow
def test_two_processes_give_the_same_bits_twice(place: Place, two: Path) -> None:
    assert_same(in_any_order(place, "any_again"), two, 30)


@pytest.mark.slow
def test_one_process_reads_the_data_of_two_and_its_losses_agree_to_rounding(place: Place, two: Path) -> None:
    one = in_any_order(place, "any_one", processes=1)
    assert recorded(one.parent / "recording") == recorded(two.parent / "recording")
    for name in ("train_loss", "val_loss"):
        assert max(abs(a - b) / b for a, b in zip(column(one, name), column(two, name), strict=True)) <= NOISE
    # Were they bit-equal, two processes would not have shared the work.
    assert column(one, "train_loss") != column(two, "train_loss")


@pytest.mark.gpu
@pytest.mark.slow
def test_the_triton_kernels_compiled_give_the_same_bits_twice(place: Place, gpus: dict[str, Any]) -> None:
    """Two presets in one layer, one of them stochastic; the first loss is that of one process, whose sums have another order."""
    rule = AttentionRule(layers=(1,), heads=(1,), attention=AttentionSpec(preset="flash_stochastic_o"))
    fields = {**gpus, "attention": AttentionConfig(rules=(rule,))}
    first, second = (in_any_order(place, folder, **fields) for folder in ("kernels_first", "kernels_second"))
    assert weights(first, 30) == weights(second, 30)
    alone = column(in_any_order(place, "kernels_one", processes=1, **fields), "train_loss")[0]
    assert abs(column(first, "train_loss")[0] - alone) < NOISE * alone


LOST = """
import torch
from training import distributed

class Stream:
    def query(self):
        raise RuntimeError("CUDA error: unspecified launch failure")

torch.distributed.is_initialized = torch.cuda.is_initialized = lambda: True
torch.cuda.current_stream = Stream
try:
    raise ValueError("the step's own error")
except ValueError:
    distributed.exit_where_device_is_lost()
print("went on")
"""


def test_a_process_that_has_lost_its_gpu_says_why_and_exits() -> None:
    done = completed([sys.executable, "-c", LOST])
    assert (done.returncode, done.stdout) == (1, "")
    assert "the step's own error" in done.stderr
