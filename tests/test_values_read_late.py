"""Values that stay on the device for some steps: no bit of a run changes, and the host says later which step was not finite."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from test_nonfinite import BAD_BATCH, events, place, stopped  # noqa: F401  (place: data whose batch 14 gives a NaN)
from tiny_runs import Place, before_each_step, lines, optimizer, weights
from torch import nn

import train
from training.nonfinite import FoundInf, step_unless
from training.run import Run

FUSED = {"optim.fused": "on"}


def run_of(place: Place, name: str, fields: dict[str, Any]) -> Any:  # noqa: F811
    """Its lines and what its checkpoints hold, whether it ends or is stopped."""
    with contextlib.suppress(SystemExit):
        place.train(name, fields)
    run = place.runs / name
    steps = [int(path.name.removeprefix("step_")) for path in sorted((run / "checkpoints").glob("step_*"))]
    return lines(run), [(step, weights(run, step), optimizer(run, step)) for step in steps]


SETTINGS: dict[str, dict[str, Any]] = {
    "skip": {"nonfinite.policy": "skip", "telemetry.every": 4, "data.micro_batch": 2},
    "stop": {},
    "float16": {"precision.dtype": "float16", "nonfinite.policy": "skip", "model.qk_clip_tau": 0.1},
    "muon": {"optim.optimizer": "muon", "nonfinite.policy": "skip", "model.qk_clip_tau": 0.1},
    "sparse": {"run.log_every": 5, "nonfinite.policy": "skip", "evaluation.every": 0, "telemetry.every": 0},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_late_values_change_no_bit_and_no_line(place: Place, name: str) -> None:  # noqa: F811
    """Across a step that is not finite, measurements and checkpoints."""
    fields = {"checkpoint.every": 6, **SETTINGS[name]}
    at_once = run_of(place, f"{name}_at_once", fields)
    assert BAD_BATCH in [batch for _, batch, _ in events(place.runs / f"{name}_at_once")]
    for every in (2, 7):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train, "READ_EVERY", {"cpu": every})
            assert run_of(place, f"{name}_late_{every}", fields) == at_once


def test_a_stop_that_is_found_late_leaves_the_weights_of_before(
    place: Place,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen: list[dict[str, torch.Tensor]] = []
    runs: list[Run] = []

    def watched(run: Run, step: int) -> None:
        seen.append({name: tensor.clone() for name, tensor in run.network.raw.state_dict().items()})
        runs.append(run)

    monkeypatch.setattr(train, "READ_EVERY", {"cpu": 9})
    before_each_step(monkeypatch, watched)
    run = stopped(place, "late_stop", FUSED)
    assert events(run) == [(BAD_BATCH, BAD_BATCH, "stop")]
    assert "step 14, batch 14: loss nan" in capsys.readouterr().out
    # The steps up to the next reading were taken, and their updates skipped: their losses are finite.
    assert len(seen) == 18
    final = runs[-1].network.raw.state_dict()
    assert all(torch.equal(final[name], seen[BAD_BATCH][name]) for name in final)
    assert not torch.equal(final["lm_head.weight"], seen[BAD_BATCH - 1]["lm_head.weight"])
    assert max(line["step"] for line in lines(run)) == BAD_BATCH


# ---- the parts


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("policy", "moves"), [("stop", [0]), ("skip", [0, 2])])
def test_an_update_is_skipped_by_the_policy(policy: Any, moves: list[int], fused: bool, device: torch.device) -> None:
    """Three steps, the second with a norm that is not finite."""
    weight = nn.Parameter(torch.ones(4, device=device))
    adamw = torch.optim.AdamW([weight], lr=0.1, fused=fused)
    found_inf_of = FoundInf(policy, device)
    moved = []
    for step, norm in enumerate((1.0, torch.inf, 1.0)):
        weight.grad = torch.ones_like(weight)
        before = weight.detach().clone()
        overflow, found_inf = found_inf_of(torch.tensor(2.0, device=device), torch.tensor(norm, device=device), None)
        step_unless(found_inf, adamw)
        assert not overflow.item()
        if not torch.equal(weight.detach(), before):
            moved.append(step)
    assert moved == moves
    assert adamw.state[weight]["step"].item() == len(moves)
