"""training/telemetry_graph.py: what is replayed are the bits that are measured op by op; when which is done; what CUDA refuses is said."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tape import TapeRecorder
from tiny_runs import Place, preset
from torch import Tensor

from attention import AttentionConfig, AttentionRule, AttentionSpec
from attention.plan import switched
from model import GPT, ModelConfig, initialize
from probes.spectral import SpectralState
from training import telemetry
from training.cuda_graph import CudaRecorder
from training.precision import PrecisionConfig
from training.telemetry import TelemetryConfig, build_probe, read_telemetry
from training.telemetry_graph import Measurement, Probe, model_identity

CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def cuda(test: Callable[..., None]) -> Callable[..., None]:
    for mark in CUDA:
        test = mark(test)
    return test


# ---- when a probe runs op by op


class Script:
    """A measurement that says how it was made: a cold or a warm state, and how often it was called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __call__(self, state: SpectralState | None) -> Measurement:
        self.calls.append("cold" if state is None else "warm")
        x = torch.zeros(1) if state is None else state.whole + 1
        return Measurement({"x": x}, 1, SpectralState(x, x.clone(), x.clone()))


class Machine:
    def __init__(self) -> None:
        self.script, self.recorder, self.identity = Script(), TapeRecorder(), "a"
        self.probe = Probe(self.script, lambda: self.identity, self.recorder)
        self.values: list[float] = []

    def say(self, probes: int = 1) -> list[str]:
        """How each of the next probes was made."""
        said = []
        for _ in range(probes):
            calls, records, replays = len(self.script.calls), self.recorder.records, self.recorder.replays
            self.values.append(self.probe().columns["x"].item())
            word = "capture" if self.recorder.records > records else "replay"
            said.append(word if self.recorder.replays > replays else self.script.calls[calls])
        return said


def test_two_probes_run_op_by_op_the_third_is_captured_and_others_replayed() -> None:
    """After ``forget`` one runs op by op and the graph is kept; another identity is captured anew. Each goes on from the last."""
    machine = Machine()
    assert machine.say(5) == ["cold", "warm", "capture", "replay", "replay"]
    machine.probe.forget()
    assert machine.say(3) == ["cold", "replay", "replay"]
    machine.identity = "b"
    assert machine.say(3) == ["warm", "capture", "replay"]
    assert machine.values == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]


# ---- the same bits


def tiny(attention: AttentionConfig, device: str = "cpu", **changes: Any) -> GPT:
    width = 16 if device == "cpu" else 128
    shape: dict[str, Any] = {"n_layer": 3, "n_head": 2, "n_embd": width, "block_size": 256, "vocab_size": 64}
    config = ModelConfig(**{**shape, "vocab_multiple": 1, **changes})
    model = GPT(config, attention.resolve(3, 2), 16 if changes.get("gated_attention") else 0)
    initialize(model, seed=0)
    return model.to(device)


def a_probe(model: GPT, dtype: str, *, graph: bool, seed: Tensor | None = None, **settings: Any) -> Probe:
    """The probe of a run; on a CPU with a tape in the graph's place."""
    device = next(model.parameters()).device
    seed = torch.tensor(5, device=device) if seed is None else seed
    length = 16 if device.type == "cpu" else 256
    tokens = torch.randint(64, (2, length + 1), generator=torch.Generator().manual_seed(0))
    config = TelemetryConfig(cuda_graph=graph, **settings)
    batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    probe = build_probe(config, model, batch, device, PrecisionConfig(dtype=dtype), seed)  # type: ignore[arg-type]
    if graph and device.type == "cpu":
        probe._recorder = TapeRecorder()
    return probe


@torch.no_grad()
def update(model: GPT, step: int) -> None:
    """As an optimizer does: in place."""
    for index, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(100 * step + index)
        parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator).to(parameter.device))


def assert_same_bits(model: GPT, dtype: str, second: str, **settings: Any) -> None:
    """Probes with and without a graph over updates of the weights and of the seed, the vectors forgotten between, and a layer switched."""
    seed = torch.tensor(5, device=next(model.parameters()).device)
    probes = [a_probe(model, dtype, graph=graph, seed=seed, **settings) for graph in (True, False)]
    different, values = [], []
    for step in range(12):
        update(model, step)
        seed.fill_(step)
        if step in (1, 5):
            for probe in probes:
                probe.forget()
        if step == 8:
            plans = [attention.plan for attention in model.attentions()]
            model.set_plans((plans[0], switched(plans[1], second), *plans[2:]))
        replayed, eager = (probe() for probe in probes)
        assert replayed.units == eager.units
        pairs = {name: (replayed.columns[name], eager.columns[name]) for name in eager.columns}
        pairs |= {f"state {i}": pair for i, pair in enumerate(zip(replayed.state, eager.state, strict=True))}
        different += [(step, name) for name, (x, y) in pairs.items() if not same_bits(x, y)]
        values.append(eager.columns["max_logit"].clone())
    assert different == []
    # Updates show, so that a graph which measured old weights would have been found out.
    assert all(not torch.equal(x, y) for x, y in itertools.pairwise(values))


def same_bits(x: Tensor, y: Tensor) -> bool:
    return x.dtype == y.dtype and torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


LAYERS_APART = AttentionConfig(
    flash_backend="flash_reference",
    default=AttentionSpec(preset="flash_stochastic_p_o"),
    rules=(AttentionRule(layers=(2,), attention=AttentionSpec(preset="standard", numerics="rounded_forward")),),
)
HEADS_APART = AttentionConfig(
    flash_backend="flash_reference",
    rules=(
        AttentionRule(layers=(0, 2), heads=(0,), attention=AttentionSpec(preset="flash_o_nearest_delta_stochastic")),
    ),
)
# attention, dtype, changes of the model, settings of the probe
CASES: dict[str, tuple[AttentionConfig, str, dict[str, Any], dict[str, Any]]] = {
    "plain": (preset("flash"), "bfloat16", {}, {}),
    "layers_apart": (LAYERS_APART, "bfloat16", {}, {}),
    "heads_apart": (HEADS_APART, "bfloat16", {}, {}),
    "rounded_forward": (preset("flash_recompute_o", "rounded_forward"), "bfloat16", {"attention_softcap": 20.0}, {}),
    "float32": (preset("flash_stable_safe"), "float32", {"qk_norm": True, "bias": True}, {}),
    "operators": (
        preset("flash_o_nearest_delta_stochastic"),
        "bfloat16",
        {"gated_attention": True},
        {},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_replayed_are_the_bits_measured_op_by_op(name: str) -> None:
    attention, dtype, changes, settings = CASES[name]
    assert_same_bits(tiny(attention, **changes), dtype, "flash_fp32_o", **settings)


def test_a_run_with_checkpoints_and_a_switch_has_the_telemetry_it_has_without(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {
        "precision.dtype": "bfloat16",
        "run.steps": 16,
        "telemetry.every": 1,
        "checkpoint.every": 6,
        "alarm.switches": ("10:1:flash_fp32_o",),
    }
    recorder = TapeRecorder()
    runs = [place.train("eager", fields)]
    monkeypatch.setattr(telemetry, "Probe", lambda measure, identity, _: Probe(measure, identity, recorder))
    runs.append(place.train("taped", fields))
    eager, taped = ([{**record, "probe_seconds": 0} for record in read_telemetry(run)] for run in runs)
    assert taped == eager
    assert recorder.records == 2
    assert recorder.replays > 8


ON_CUDA: dict[str, tuple[AttentionConfig, str, dict[str, Any], dict[str, Any]]] = {
    **{f"{name}_reference": case for name, case in CASES.items()},
    **{
        name: (AttentionConfig(default=AttentionSpec(preset=name)), "bfloat16", {}, {})
        for name in ("flash", "flash_stochastic_p_o", "flash_compensated_delta", "flash_delta_from_p", "sdpa_math")
    },
    "flash_heads_apart": (
        AttentionConfig(rules=(AttentionRule(layers=(1,), heads=(0,), attention=AttentionSpec(preset="standard")),)),
        "bfloat16",
        {},
        {},
    ),
    "flash_operators": (AttentionConfig(), "bfloat16", {"gated_attention": True, "bias": True}, {}),
    "flash_float16": (AttentionConfig(), "float16", {}, {}),
}


@cuda
@pytest.mark.parametrize("name", ON_CUDA)
def test_a_cuda_graph_gives_the_bits_measured_op_by_op(name: str) -> None:
    attention, dtype, changes, settings = ON_CUDA[name]
    assert_same_bits(tiny(attention, "cuda", **changes), dtype, "flash_fp32_o", **settings)


@cuda
def test_a_cuda_graph_leaves_generator_gradients_and_stream_alone() -> None:
    model = tiny(AttentionConfig(), "cuda")
    probe = a_probe(model, "bfloat16", graph=True)
    before = torch.cuda.get_rng_state(), torch.cuda.current_stream()
    for _ in range(4):
        probe()
    assert isinstance(probe._recorder, CudaRecorder)
    assert probe._graph is not None
    assert torch.equal(torch.cuda.get_rng_state(), before[0])
    assert torch.cuda.current_stream() == before[1]
    assert all(parameter.grad is None for parameter in model.parameters())


@cuda
def test_a_replay_never_waits_for_the_gpu() -> None:
    probe = a_probe(tiny(AttentionConfig(), "cuda"), "bfloat16", graph=True)
    for _ in range(3):
        probe()
    torch.cuda.set_sync_debug_mode("error")
    try:
        columns = probe().columns
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(columns["w_q_norm"].isfinite().all())


REFUSED = """
import torch
from probes.spectral import SpectralState
from errors import UserError
from training.cuda_graph import CudaRecorder
from training.telemetry_graph import Measurement

state = SpectralState(*(torch.zeros(1, device="cuda") for _ in range(3)))
before = torch.cuda.current_stream()
try:
    recorder = CudaRecorder(torch.device("cuda", 0), "the probe", "go on without")
    recorder.record(lambda: Measurement({"x": state.whole * state.whole.item()}, 1, state))
except UserError as error:
    print(error)
assert torch.cuda.current_stream() == before
assert state.whole.item() == 0
"""


@cuda
def test_what_cuda_refuses_is_a_user_error_with_a_way_out() -> None:
    # In a process of its own: torch's allocator does not recover from a failed capture altogether.
    root = Path(__file__).resolve().parent.parent
    said = subprocess.run([sys.executable, "-c", REFUSED], cwd=root, capture_output=True, text=True, timeout=120)
    assert said.returncode == 0, said.stderr
    assert said.stdout.startswith("the probe could not be captured")
    assert said.stdout.endswith("go on without\n")
    assert "captur" in said.stdout.split("(", 1)[1].lower()


# ---- what identifies a captured pass, and what a tape would miss


def test_plans_mode_and_places_of_the_weights_identify_a_pass() -> None:
    model = tiny(preset("flash"))
    seen = [model_identity(model)]
    update(model, 0)
    assert model_identity(model) == seen[0]
    plans = [attention.plan for attention in model.attentions()]
    model.set_plans((*plans[:2], switched(plans[2], "standard")))
    seen.append(model_identity(model))
    model.eval()
    seen.append(model_identity(model))
    weight = model.lm_head.weight
    weight.data = weight.data.clone()
    seen.append(model_identity(model))
    assert len(set(seen)) == 4
