"""Gradients averaged where they lie: DDP's bits for two processes, one call, no copy; whole runs as with DDP, and what is refused."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_alarm import touchy
from test_nonfinite import BAD_BATCH, ODD, events, place_of
from test_shared_muon import launch
from tiny_runs import (
    ROOT,
    Place,
    changed,
    column,
    command,
    environment,
    lines,
    new_place,
    optimizer,
    start_train,
    train_and_kill,
    tree,
    weights,
)

import config as configuration
import train
from attention import AttentionConfig
from data.batches import open_batches
from errors import UserError
from model import GPT, initialise
from training import distributed, speed
from training.distributed import Distributed, average_gradients
from training.speed import SpeedConfig
from training.telemetry import read_telemetry

IN_PLACE = {"speed.exchange": "in_place"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Batch ``BAD_BATCH`` holds an odd byte, of which ``RUNS`` can make a NaN."""
    with new_place(tmp_path_factory, plant={place_of(BAD_BATCH): ODD}) as place:
        yield place


# ---- the exchange itself

# A model of more than one bucket, without and with accumulation; what each process saw, as JSON.
WORKER = """
import hashlib, json, warnings
import torch
import torch.distributed as dist
from torch import nn
from training import distributed

warnings.simplefilter("error")
place = distributed.start("cpu")
torch.set_num_threads(1)
facts = {}

def digest(tensors):
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()

torch.manual_seed(place.rank)  # another start on each process
model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(12)])
model.register_buffer("buffer", torch.rand(3))
frozen = nn.Parameter(torch.rand(3), requires_grad=False)
model.register_parameter("frozen", frozen)
facts["before"] = digest([*model.parameters(), model.buffer])
distributed.equalise(model)
facts["after"] = digest([*model.parameters(), model.buffer])

calls = []
for name in ("allreduce", "allreduce_coalesced"):
    def counted(self, tensors, options, name=name, sound=getattr(dist.ProcessGroup, name)):
        calls.append((name, len(tensors)))
        return sound(self, tensors, options)
    setattr(dist.ProcessGroup, name, counted)

generator = torch.Generator().manual_seed(place.rank)
inputs = [torch.randn(8, 256, generator=generator) for _ in range(2)]
parallel = distributed.wrap(model, place)
distributed.settle(parallel, lambda: parallel(inputs[0]).sum().backward())
trained = [p for p in model.parameters() if p.requires_grad]

def accumulated(which):
    model.zero_grad(set_to_none=True)
    for index, batch in enumerate(inputs):
        with distributed.no_sync(which, last=index == 1):
            which(batch).square().sum().backward()

accumulated(parallel)
facts["ddp"] = digest([p.grad for p in trained])
del parallel
facts["ours"] = []
for _ in range(3):
    accumulated(model)
    own, loss = [p.grad for p in trained], torch.tensor(3.0 + 6 * place.rank)
    places = [g.data_ptr() for g in own]
    facts["local"] = digest(own)
    calls.clear()
    distributed.average_gradients(model, loss)
    facts["calls"] = list(calls)
    facts["moved"] = [p.grad.data_ptr() for p in trained] != places
    facts["ours"].append(digest([p.grad for p in trained]))
facts["loss"] = loss.item()

trained[5].grad = None
try:
    distributed.average_gradients(model)
except RuntimeError as error:
    facts["missing"] = str(error)
distributed.stop()
print(json.dumps(facts))
"""


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def facts(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return [json.loads(printed) for printed in launch(WORKER, [], request.param)]


def test_every_process_starts_with_rank_0s_weights_and_buffers(facts: list[dict[str, Any]]) -> None:
    assert len({fact["before"] for fact in facts}) == len(facts)
    assert {fact["after"] for fact in facts} == {facts[0]["before"]}


def test_two_processes_average_to_ddps_bits(facts: list[dict[str, Any]]) -> None:
    """More than two take their sums in an order that depends on a value's place in the buffer."""
    if len(facts) == 2:
        assert {digest for fact in facts for digest in fact["ours"]} == {facts[0]["ddp"]}


def test_all_processes_have_the_same_bits_every_time(facts: list[dict[str, Any]]) -> None:
    assert len({digest for fact in facts for digest in fact["ours"]}) == 1
    assert facts[0]["local"] not in facts[0]["ours"]


def test_all_gradients_and_the_loss_are_one_call_and_stay_where_they_are(facts: list[dict[str, Any]]) -> None:
    assert [(fact["calls"], fact["moved"]) for fact in facts] == [([["allreduce_coalesced", 25]], False)] * len(facts)
    assert {fact["loss"] for fact in facts} == {sum(3.0 + 6 * rank for rank in range(len(facts))) / len(facts)}


def test_a_parameter_without_a_gradient_is_an_error_and_a_frozen_one_is_not(facts: list[dict[str, Any]]) -> None:
    assert {fact["missing"] for fact in facts} == {"no gradient to average over processes: 2.bias"}


def test_one_process_has_nothing_to_average() -> None:
    model = torch.nn.Linear(2, 2)
    average_gradients(model, loss := torch.tensor(3.0))
    assert loss == 3.0
    assert model.weight.grad is None


@pytest.mark.parametrize(
    ("fields", "exchanged"),
    [
        ({}, True),
        ({"precision.compile": True}, True),
        ({"precision.compile": True, "speed.overlap": True}, True),
        (IN_PLACE, False),
        ({**IN_PLACE, "precision.compile": True}, False),
    ],
    ids=str,
)
def test_in_place_there_is_no_ddp_and_an_equal_start(
    place: Place, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], exchanged: bool
) -> None:
    equalised: list[torch.nn.Module] = []
    monkeypatch.setattr(distributed, "equalise", equalised.append)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    first_of_two = Distributed(rank=0, local_rank=0, world_size=2, device=torch.device("cpu"))
    linear = torch.nn.Linear(2, 2)
    trained, evaluated = speed.wrapped(linear, place.config("wrapped", fields), first_of_two)
    assert distributed.in_ddp(trained) is exchanged
    assert equalised == ([] if exchanged else [linear])
    assert (trained is evaluated) is not exchanged
    del trained
    distributed.stop()


ALL_SWITCHES = {
    "precision.dtype": "bfloat16",
    "speed.loss_chunk": 24,
    "speed.fused_norm": True,
    "speed.fused_mlp": True,
    "speed.float32_gradients": True,
    "speed.sorted_embedding": True,
}


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fields", [{}, {"model.bias": True}, ALL_SWITCHES], ids=["plain", "bias", "all"])
def test_no_two_gradients_share_memory(place: Place, fields: dict[str, Any], compiled: bool) -> None:
    """What lay in two of them would be averaged twice."""
    config = place.config("memory", {**fields, "precision.compile": compiled})
    plans = config.attention.resolve(config.model.n_layer, config.model.n_head)
    model = GPT(config.model, plans, speed.operators(config.speed))
    initialise(model, seed=1)
    trained = torch.compile(model) if compiled else model
    ((inputs_BT, targets_BT), *_) = open_batches(config.data).next()
    with config.precision.autocast(torch.device("cpu")):
        _, loss = trained(inputs_BT, targets_BT, torch.zeros((), dtype=torch.int64))
    loss.backward()
    spans = []
    for parameter in model.parameters():
        gradient = parameter.grad
        assert gradient is not None
        assert gradient.is_contiguous()
        spans.append((gradient.data_ptr(), gradient.data_ptr() + gradient.nbytes))
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


# ---- whole runs, two processes

# All runs of a list in one start of two processes, which stay in one group; ``odd`` ones meet a NaN in the batch with the odd byte.
RUNS = """
import json, math, sys
from pathlib import Path
import torch
import config, train
from model import GPT
from training import distributed

place, start, stop, sound = distributed.start("cpu"), distributed.start, distributed.stop, GPT.loss
distributed.start, distributed.stop = lambda device: place, lambda: None

def loss(self, logits, targets):
    value = sound(self, logits, targets)
    return value * math.nan if bool((targets == 255).any()) else value

codes = []
for odd, content in json.loads(Path(sys.argv[1]).read_text()):
    GPT.loss = loss if odd else sound
    torch._dynamo.reset()
    try:
        train.train(config.from_json(config.TrainConfig, content))
        codes.append(0)
    except SystemExit as end:
        codes.append(end.code)
stop()
if place.is_main:
    Path(sys.argv[2]).write_text(json.dumps(codes))
"""

FUSED = {"optim.fused": "on"}
CASES: dict[str, dict[str, Any]] = {
    "accumulation": {"data.micro_batch": 2, "data.record_tokens": True},
    "compiled": {"precision.compile": True, "data.micro_batch": 2, "run.steps": 12},
    "float16": {"precision.dtype": "float16", "nonfinite.policy": "skip"},
    "muon": {"optim.optimizer": "muon", "optim.weight_decay": 0.1},
    "qk_clip": {"model.qk_clip_tau": 0.05},
    "late": {**FUSED, "speed.late_values": True, "speed.fused_clip": True, "data.micro_batch": 2},
    "switch_by_alarm": touchy(response="switch", switch_to="flash_delta_from_p"),
    "stop_by_alarm": touchy(response="stop"),
    "odd_stop": {"nonfinite.policy": "stop"},
    "odd_stop_late": {**FUSED, "nonfinite.policy": "stop", "speed.late_values": True},
    "odd_skip": {"nonfinite.policy": "skip"},
    "odd_rollback": {"nonfinite.policy": "rollback"},
    "odd_continue": {"nonfinite.policy": "continue"},
}
ENDS_EARLY = {"stop_by_alarm", "odd_stop", "odd_stop_late"}


def configs(place: Place, exchange: str) -> list[configuration.TrainConfig]:
    """Runs of one name in folders of their own: a recording's header holds the name, and its bytes are compared."""
    made = []
    for name, fields in CASES.items():
        folder = place.folder / exchange / name
        here = {"run.folder": str(folder), "data.record": str(folder / "recording"), "speed.exchange": exchange}
        made.append(changed(place.config("run", here), fields))
    return made


@pytest.fixture(scope="module")
def both(place: Place) -> dict[str, tuple[Path, Path]]:
    """Each case's run with DDP and in place."""
    script, asked, codes = (place.folder / name for name in ("runs.py", "runs.json", "codes.json"))
    script.write_text(RUNS)
    content = [
        (name.startswith("odd"), configuration.to_json(config))
        for exchange in ("ddp", "in_place")
        for name, config in zip(CASES, configs(place, exchange), strict=True)
    ]
    asked.write_text(json.dumps(content))
    done = subprocess.run(
        command(script, [str(asked), str(codes)], processes=2),
        capture_output=True,
        text=True,
        env=environment(),
        cwd=ROOT,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(codes.read_text()) == 2 * [int(name in ENDS_EARLY) for name in CASES]
    ddp, in_place = place.folder / "ddp", place.folder / "in_place"
    return {name: (ddp / name / "run", in_place / name / "run") for name in CASES}


def left_behind(run: Path) -> dict[str, Any]:
    """All that a run wrote and that does not tell time or the config."""
    kept = ("model.safetensors", "optimizer.safetensors", "interventions.jsonl")
    found: dict[str, Any] = {name: digest for name, digest in tree(run).items() if name.endswith(kept)}
    probes = [{k: v for k, v in record.items() if k != "probe_seconds"} for record in read_telemetry(run)]
    return found | {"lines": lines(run), "probes": probes, "recording": tree(run.parent / "recording")}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_run_of_two_processes_is_ddps_to_the_bit(both: dict[str, tuple[Path, Path]], name: str) -> None:
    """Losses, validation, probes, alarms, what is not finite, weights and optimiser of all checkpoints, the recording."""
    ddp, in_place = both[name]
    assert left_behind(in_place) == left_behind(ddp)
    assert len(column(in_place, "train_loss")) >= 9


@pytest.mark.slow
def test_the_runs_compared_did_what_they_are_named_for(both: dict[str, tuple[Path, Path]]) -> None:
    runs = {name: in_place for name, (_, in_place) in both.items()}
    assert column(runs["stop_by_alarm"], "alarm") == ["stop"]
    assert "switch" in column(runs["switch_by_alarm"], "alarm")
    found = {name: events(run)[0][2] for name, run in runs.items() if name.startswith("odd")}
    assert found == {name: name.split("_")[1] for name in found}
    # A clip of no head would leave the weights of the run without it.
    assert weights(runs["qk_clip"], 20) != weights(runs["accumulation"], 20)
    assert len(column(runs["accumulation"], "val_loss")) == 3


def two(place: Place, folder: str, fields: dict[str, Any]) -> Path:
    here = {"run.folder": str(place.folder / folder), "data.record": str(place.folder / folder / "recording")}
    config = place.config("run", {**here, **IN_PLACE, **fields})
    done = start_train([str(place.preset_file(config))], processes=2)
    assert done.returncode == 0, done.stderr
    return place.folder / folder / "run"


@pytest.mark.slow
def test_killed_and_resumed_equals_straight(place: Place, both: dict[str, tuple[Path, Path]]) -> None:
    fields = CASES["accumulation"]
    here = {"run.folder": str(place.runs), "data.record": str(place.runs / "recording")}
    assert train_and_kill(place, place.config("run", {**here, **IN_PLACE, **fields}), processes=2) != 0
    assert not (place.runs / "run/checkpoints/step_00000020").exists()
    resumed = two(place, "runs", {**fields, "run.resume": True})
    assert left_behind(resumed) == left_behind(both["accumulation"][1])


@pytest.mark.gpu
def test_two_gpus_average_to_ddps_bits(place: Place) -> None:
    """NCCL multiplies by 1 / 2 as it reads, DDP as it copies into its buckets."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    fields: dict[str, Any] = {"run.device": "cuda", "data.micro_batch": 2, "model.n_embd": 32}
    fields |= {"attention": AttentionConfig(), "precision.dtype": "bfloat16", "precision.compile": True}
    runs = [two(place, f"gpus_{e}", {**fields, "speed.exchange": e}) for e in ("ddp", "in_place")]
    assert lines(runs[0]) == lines(runs[1])
    assert weights(runs[0], 20) == weights(runs[1], 20)
    assert optimizer(runs[0], 20) == optimizer(runs[1], 20)


# ---- one process, and refusals


def test_one_process_trains_as_it_does_without(place: Place) -> None:
    alone, in_place = (place.train(f"one_{len(fields)}", fields) for fields in ({}, IN_PLACE))
    assert lines(alone) == lines(in_place)
    assert (weights(alone, 20), optimizer(alone, 20)) == (weights(in_place, 20), optimizer(in_place, 20))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"overlap": True}, "speed.overlap = True: expected False with speed.exchange = 'in_place'"),
        ({"bucket_mb": 100}, "speed.bucket_mb = 100: expected 25 with speed.exchange = 'in_place'"),
    ],
)
def test_options_of_ddp_are_refused_beside_it(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        SpeedConfig(exchange="in_place", **fields)
    assert str(error.value) == said


def test_an_unknown_exchange_names_the_choices() -> None:
    with pytest.raises(UserError, match=r"^speed\.exchange = 'flat': expected one of ddp, in_place$"):
        SpeedConfig(exchange="flat")  # type: ignore[arg-type]


def test_a_refusal_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [str(ROOT / "configs/debug.py"), "--speed.exchange", "in_place", "--precision.compile", "--speed.overlap"]
    monkeypatch.setattr(sys, "argv", ["train.py", *options])
    with pytest.raises(SystemExit) as end:
        train.main()
    assert end.value.code == 2
    assert capsys.readouterr().err == "error: speed.overlap = True: expected False with speed.exchange = 'in_place'\n"


def test_the_exchange_stays_on_a_resume(place: Place) -> None:
    """Over more than two processes it decides the order of sums."""
    place.train("same_exchange", {"run.steps": 1})
    with pytest.raises(UserError, match=r"speed\.exchange = 'in_place': expected 'ddp', as in the checkpoint"):
        place.train("same_exchange", {**IN_PLACE, "run.steps": 2, "run.resume": True})
