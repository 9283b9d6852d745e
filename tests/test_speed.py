"""The switches of speed: each leaves the run as it was, to the bit or within the noise that it states, or says why it cannot serve."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_nonfinite import BAD_BATCH, events, place, stopped  # noqa: F401  (place: data whose batch 14 gives a NaN)
from tiny_runs import ROOT, TINY, Place, changed, column, lines, optimizer, start_train, weights
from torch import nn

import config as configuration
from errors import UserError
from training import speed
from training.distributed import Distributed, stop
from training.late import DeviceGuard, Reading
from training.optim import OptimConfig, build_optimizer, clip_gradients, clip_in_step
from training.session import Session
from training.speed import SpeedConfig
from training.step import train_step

FUSED = {"optim.fused": "on"}
LATE = {**FUSED, "speed.late_values": True}


# ---- values read one step late


@pytest.mark.parametrize("policy", ["skip", "continue"])
def test_late_values_change_no_bit_of_a_run(place: Place, policy: str) -> None:  # noqa: F811
    """Across a step that is not finite, measurements and checkpoints."""
    fields = {"nonfinite.policy": policy, "checkpoint.every": 6, "telemetry.every": 4, "data.micro_batch": 2}
    at_once = place.train(f"at_once_{policy}", {**FUSED, **fields})
    late = place.train(f"late_{policy}", {**LATE, **fields})
    assert events(late)[0] == (BAD_BATCH, BAD_BATCH, policy)
    assert lines(late) == lines(at_once)
    for step in (18, 20):
        assert weights(late, step) == weights(at_once, step)
        assert optimizer(late, step) == optimizer(at_once, step)


def test_late_values_resume_to_the_same_bits(place: Place) -> None:  # noqa: F811
    fields = {**LATE, "nonfinite.policy": "skip"}
    straight = place.train("late_straight", fields)
    place.train("late_resumed", {**fields, "run.steps": 10})
    resumed = place.train("late_resumed", {**fields, "run.resume": True})
    assert lines(resumed) == lines(straight)
    assert weights(resumed, 20) == weights(straight, 20)


def test_late_values_may_be_switched_on_a_resume(place: Place) -> None:  # noqa: F811
    fields = {**FUSED, "nonfinite.policy": "skip", "run.steps": 10}
    place.train("switched", fields)
    resumed = place.train(
        "switched", {**LATE, **fields, "run.steps": 20, "run.resume": True, "speed.fill_memory": False}
    )
    straight = place.train("not_switched", {**fields, "run.steps": 20})
    assert lines(resumed) == lines(straight)
    assert weights(resumed, 20) == weights(straight, 20)


@pytest.mark.slow
def test_late_values_of_two_processes_change_no_bit(place: Place) -> None:  # noqa: F811
    runs = []
    for fields in (FUSED, LATE):
        name = f"two_{len(fields)}"
        config = place.config(name, {**fields, "data.micro_batch": 2, "nonfinite.policy": "skip"})
        done = start_train([str(place.preset_file(config))], processes=2)
        assert done.returncode == 0, done.stderr
        runs.append(place.runs / name)
    assert lines(runs[0]) == lines(runs[1])
    assert weights(runs[0], 20) == weights(runs[1], 20)


def test_stop_with_late_values_leaves_the_weights_of_before(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    seen: list[dict[str, torch.Tensor]] = []
    sound = Session.train_step

    def watched(self: Session, step: int) -> Any:
        seen.append({name: tensor.clone() for name, tensor in self.raw_model.state_dict().items()})
        sessions.append(self)
        return sound(self, step)

    sessions: list[Session] = []
    monkeypatch.setattr(Session, "train_step", watched)
    run = stopped(place, "late_stop", LATE)
    assert events(run) == [(BAD_BATCH, BAD_BATCH, "stop")]
    # The step after the bad one was launched, and its update withheld.
    assert len(seen) == BAD_BATCH + 2
    final = sessions[-1].raw_model.state_dict()
    assert all(torch.equal(final[name], seen[BAD_BATCH][name]) for name in final)
    assert not torch.equal(final["lm_head.weight"], seen[BAD_BATCH - 1]["lm_head.weight"])


def test_lines_before_a_late_stop_are_those_of_a_stop_at_once(place: Place) -> None:  # noqa: F811
    at_once, late = stopped(place, "stop_at_once", FUSED), stopped(place, "stop_late", LATE)
    assert lines(late) == lines(at_once)


@pytest.mark.parametrize(("policy", "moves"), [("stop", [0]), ("skip", [0, 2]), ("continue", [0, 1, 2])])
def test_device_guard_withholds_what_the_policy_says(policy: Any, moves: list[int], device: torch.device) -> None:
    """Three steps, the second with a norm that is not finite."""
    weight = nn.Parameter(torch.ones(4, device=device))
    adamw = torch.optim.AdamW([weight], lr=0.1, fused=True)
    guard = DeviceGuard(policy, device)
    moved = []
    for step, norm in enumerate((1.0, torch.inf, 1.0)):
        weight.grad = torch.ones_like(weight)
        before = weight.detach().clone()
        guard.step(adamw, torch.tensor(2.0, device=device), torch.tensor(norm, device=device))
        if not torch.equal(weight.detach(), before):
            moved.append(step)
    assert moved == moves
    assert adamw.state[weight]["step"].item() == len(moves)


def test_reading_gives_the_values_of_its_time(device: torch.device) -> None:
    values = torch.tensor([1.5, torch.nan], device=device)
    reading = Reading(values * 2)
    values.zero_()
    first, second = reading.read()
    assert first == 3.0
    assert second != second


def test_the_rounding_seed_reaches_the_model_whole(device: torch.device) -> None:
    """All 63 bits of it: it is filled in on the device, not copied."""
    seen = []

    class Listener(nn.Linear):
        def forward(self, tokens: torch.Tensor, targets: torch.Tensor, seed: torch.Tensor) -> Any:  # type: ignore[override]
            seen.append(seed)
            return None, super().forward(tokens.float()).sum()

    model = Listener(4, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler, zeros = torch.amp.GradScaler(device.type, enabled=False), torch.zeros(2, 4, dtype=torch.int64)
    seeds = [2**63 - 1, 2**62 + 1]
    settings = {"device": device, "autocast": contextlib.nullcontext, "grad_clip": 1.0, "apply_nonfinite": False}
    train_step(model, optimizer, scaler, [(zeros, zeros)] * 2, seeds, **settings)  # type: ignore[arg-type]
    assert [seed.item() for seed in seen] == seeds
    assert all(seed.dtype == torch.int64 and seed.device.type == device.type for seed in seen)


# ---- clipping inside the optimiser


def stepped(clip: Any, dtype: torch.dtype, max_norm: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weight, clipped gradient and norm after one AdamW step."""
    generator = torch.Generator().manual_seed(3)
    model = nn.Linear(64, 32, bias=False).to(dtype)
    model.weight.data = torch.randn(32, 64, generator=generator).to(dtype)
    model.weight.grad = torch.randn(32, 64, generator=generator).to(dtype)
    adamw = build_optimizer(model, OptimConfig(lr=1e-2, fused="on"), "cpu")
    norm = clip(model, adamw, max_norm)
    adamw.step()
    return model.weight.detach(), model.weight.grad, norm


def before_the_step(model: nn.Module, _: Any, max_norm: float) -> torch.Tensor:
    return clip_gradients(model, max_norm)


@pytest.mark.parametrize("max_norm", [1.0, 7.3])
def test_fused_clip_errs_no_more_than_twice_the_plain_clip(max_norm: float) -> None:
    exact = stepped(before_the_step, torch.float64, max_norm)
    plain = stepped(before_the_step, torch.float32, max_norm)
    fused = stepped(clip_in_step, torch.float32, max_norm)
    assert exact[2] > max_norm
    for a, b, c in zip(fused, plain, exact, strict=True):
        assert (a - c).norm() <= 2 * (b - c).norm()


@pytest.mark.parametrize("max_norm", [0.0, 1e6])
def test_fused_clip_is_exact_where_nothing_is_clipped(max_norm: float) -> None:
    results = [stepped(clip, torch.float32, max_norm) for clip in (before_the_step, clip_in_step)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# ---- whole runs


@pytest.fixture(scope="module")
def plain(place: Place) -> Path:  # noqa: F811
    return place.train("plain", {"run.steps": 12, **FUSED})


IN_FLOAT32: list[dict[str, Any]] = [
    {"speed.loss_chunk": 24},
    {"speed.fused_norm": True},
    {"speed.sorted_embedding": True},
    {"speed.fused_clip": True},
    {"speed.fill_memory": False},
]
UNDER_AUTOCAST: list[dict[str, Any]] = [
    {"speed.loss_chunk": 24},
    {"speed.fused_norm": True},
    {"speed.float32_gradients": True},
    {"speed.fused_mlp": True},
]
SEEDS = (42, 1, 2)


@pytest.mark.parametrize("fields", IN_FLOAT32, ids=str)
def test_losses_stay_within_noise_of_the_plain_path(place: Place, plain: Path, fields: dict[str, Any]) -> None:  # noqa: F811
    run = place.train("_".join(fields), {"run.steps": 12, **FUSED, **fields})
    # The bound that test_train.py gives for sums of a step's token losses taken in another order.
    noise = TINY.data.global_batch * TINY.data.sequence_length * 2.0**-24
    pairs = list(zip(column(run, "train_loss"), column(plain, "train_loss"), strict=True))
    assert max(abs(a - b) / b for a, b in pairs) <= noise


def losses_by_seed(place: Place, name: str, fields: dict[str, Any]) -> np.ndarray:  # noqa: F811
    """Training losses, [seeds, steps]."""
    runs = [place.train(f"{name}_{seed}", {"run.steps": 12, "run.seed": seed, **FUSED, **fields}) for seed in SEEDS]
    return np.array([column(run, "train_loss") for run in runs])


@pytest.fixture(scope="module")
def both_precisions(place: Place) -> tuple[np.ndarray, np.ndarray]:  # noqa: F811
    """Losses of the plain path in float32 and in BF16."""
    return losses_by_seed(place, "in_float32", {}), losses_by_seed(place, "in_bf16", {"precision.dtype": "bfloat16"})


@pytest.mark.parametrize("fields", UNDER_AUTOCAST, ids=str)
def test_losses_under_autocast_err_no_more_than_twice_the_plain_path(
    place: Place,  # noqa: F811
    both_precisions: tuple[np.ndarray, np.ndarray],
    fields: dict[str, Any],
) -> None:
    """Root mean square over steps and seeds, against the same runs in float32."""
    exact, plain = both_precisions
    switched = losses_by_seed(place, "bf16_" + "_".join(fields), {"precision.dtype": "bfloat16", **fields})
    assert (switched != plain).any(), "the switch reaches nothing"
    assert np.square(switched - exact).mean() ** 0.5 <= 2 * np.square(plain - exact).mean() ** 0.5


def test_all_switches_give_the_same_bits_twice(place: Place) -> None:  # noqa: F811
    fields = {**LATE, "run.steps": 12, "precision.dtype": "bfloat16"}
    for one in [*IN_FLOAT32, *UNDER_AUTOCAST]:
        fields |= one
    once, again = place.train("all_once", fields), place.train("all_again", fields)
    assert lines(once) == lines(again)
    assert weights(once, 12) == weights(again, 12)


@pytest.mark.slow
def test_compiling_around_ddp_leaves_the_losses_within_noise(place: Place) -> None:  # noqa: F811
    """Two processes, accumulation, a validation in between."""
    runs = []
    for overlap in (False, True):
        fields = {"run.steps": 5, "precision.compile": True, "data.micro_batch": 2, "evaluation.every": 3}
        config = place.config(f"overlap_{overlap}", {**fields, "speed.overlap": overlap})
        done = start_train([str(place.preset_file(config))], processes=2)
        assert done.returncode == 0, done.stderr
        runs.append(place.runs / config.run.name)
    noise = TINY.data.global_batch * TINY.data.sequence_length * 2.0**-24
    for name in ("train_loss", "val_loss"):
        pairs = list(zip(*(column(run, name) for run in runs), strict=True))
        assert max(abs(a - b) / b for a, b in pairs) <= noise


@pytest.mark.parametrize(
    "compiled", [{}, {"precision.compile": True}, {"precision.compile": True, "speed.overlap": True}], ids=str
)
def test_the_size_of_buckets_reaches_ddp(place: Place, compiled: dict[str, Any]) -> None:  # noqa: F811
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    first_of_two = Distributed(rank=0, local_rank=0, world_size=2, device=torch.device("cpu"))
    model, _ = speed.wrapped(nn.Linear(2, 2), place.config("buckets", {**compiled, "speed.bucket_mb": 3}), first_of_two)
    assert getattr(model, "_orig_mod", model).bucket_bytes_cap == 3 * 2**20
    del model
    stop()


def test_the_size_of_buckets_stays_on_a_resume(place: Place) -> None:  # noqa: F811
    """It decides the order of sums over more than two processes, and where torch.compile cuts the graph."""
    place.train("same_buckets", {"run.steps": 1})
    with pytest.raises(UserError, match=r"speed\.bucket_mb = 50: expected 25, as in the checkpoint"):
        place.train("same_buckets", {"run.steps": 2, "run.resume": True, "speed.bucket_mb": 50})


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, None),
        ({"speed.compile_mode": "reduce-overhead"}, {"triton.cudagraphs": True}),
        ({"speed.coordinate_descent": True}, {"coordinate_descent_tuning": True}),
        (
            {"speed.compile_mode": "max-autotune-no-cudagraphs", "speed.coordinate_descent": True},
            {"max_autotune": True, "coordinate_descent_tuning": True},
        ),
    ],
    ids=str,
)
def test_the_mode_of_compilation_reaches_torch(
    place: Place,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, Any],
    options: dict[str, Any] | None,
) -> None:
    given = []
    monkeypatch.setattr(torch, "compile", lambda model, options: given.append(options) or model)
    alone = Distributed(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))
    speed.wrapped(nn.Linear(2, 2), place.config("mode", {"precision.compile": True, **fields}), alone)
    assert given[0] == options or (options and options.items() <= given[0].items())


def test_fill_memory_off_changes_no_bit(place: Place, plain: Path) -> None:  # noqa: F811
    run = place.train("unfilled", {"run.steps": 12, **FUSED, "speed.fill_memory": False})
    assert lines(run) == lines(plain)
    assert weights(run, 12) == weights(plain, 12)


# ---- torch.compile


def test_inductor_knows_the_operators_with_the_layout_that_it_would_choose_itself() -> None:
    """In a process of its own: what one compilation has met, all later ones know."""
    code = """
import torch
import model, training.speed
from attention import flash_reference
from torch._inductor import lowering
from torch._library.utils import get_layout_constraint_tag
training.speed.announce_operators()
training.speed.announce_operators()
fused = torch.ops.fused
for op in (fused.add_norm, fused.add_norm_backward, fused.linear_cross_entropy, fused.float32_product, fused.table_gradient,
           fused.linear_gelu, fused.gelu_gradient, torch.ops.attention.flash_reference_forward):
    assert op.default in lowering.lowerings, op
    chosen = lowering.tag_to_layout_constraint(get_layout_constraint_tag(op.default, with_default=True))
    assert lowering.maybe_layout_constraints(op.default) is chosen, op
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


def test_compiling_announces_the_operators_before_torch_2_13(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    config = place.config("announced", {"precision.compile": True})
    alone, model, calls = (
        Distributed(rank=0, local_rank=0, world_size=1, device=torch.device("cpu")),
        nn.Linear(2, 2),
        [],
    )
    monkeypatch.setattr(speed, "announce_operators", lambda: calls.append(torch.__version__))
    for version in ("2.11.0+cu130", "2.13.0"):
        monkeypatch.setattr(torch, "__version__", version)
        speed.wrapped(model, config, alone)
    assert calls == ["2.11.0+cu130"]


def test_fill_memory_is_torchs_switch(place: Place) -> None:  # noqa: F811
    for on in (False, True):
        place.train(f"fill_{on}", {"run.steps": 1, "speed.fill_memory": on})
        assert torch.utils.deterministic.fill_uninitialized_memory is on  # type: ignore[attr-defined]


# ---- refusals


BF16 = {"precision.dtype": "bfloat16"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"speed.late_values": True, "optim.fused": "off"}, "optim.fused = 'off'"),
    ({"speed.late_values": True}, "optim.fused = 'auto'"),
    ({**LATE, "optim.optimizer": "muon"}, "optim.optimizer = 'muon'"),
    ({**LATE, "precision.dtype": "float16"}, "precision.dtype = 'float16'"),
    ({**LATE, "nonfinite.policy": "rollback"}, "nonfinite.policy = 'rollback'"),
    ({**LATE, "model.qk_clip_tau": 100.0}, "model.qk_clip_tau = 100.0"),
    ({"speed.fused_clip": True}, "optim.fused = 'auto'"),
    ({"speed.fused_mlp": True}, "precision.dtype = 'float32'"),
    ({"speed.float32_gradients": True}, "precision.dtype = 'float32'"),
    ({"speed.fused_mlp": True, **BF16, "model.bias": True}, "model.bias = True"),
    ({"speed.fused_mlp": True, **BF16, "model.activation": "gelu_tanh"}, "model.activation = 'gelu_tanh'"),
    ({"speed.compile_mode": "max-autotune"}, "precision.compile = False"),
]


@pytest.mark.parametrize(("fields", "named"), REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_what_cannot_serve_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as error:
        speed.check(changed(TINY, fields), torch.device("cpu"))
    assert str(error.value).startswith(named)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("fields", [{"loss_chunk": -1}, {"bucket_mb": 0}, {"compile_mode": "fastest"}], ids=str)
def test_bad_values_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"speed.{next(iter(fields))} = "):
        SpeedConfig(**fields)


def test_switches_survive_json() -> None:
    config = changed(TINY, {"speed.loss_chunk": 5, "speed.compile_mode": "max-autotune"})
    assert configuration.from_json(configuration.TrainConfig, configuration.to_json(config)) == config


@pytest.fixture(autouse=True)
def _torchs_switch() -> Iterator[None]:
    before = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    yield
    torch.utils.deterministic.fill_uninitialized_memory = before  # type: ignore[attr-defined]
