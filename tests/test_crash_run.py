"""The second stage of the crash test: training with a kernel, and what is concluded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import ROOT

from scripts.crash_run import verdict

KERNEL = """
import torch

class OneBit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, scale):
        future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        p = (q.float() @ k.float().mT * scale).masked_fill(future, -torch.inf).softmax(-1)
        mantissa, exponent = torch.frexp(p @ v.float())
        o = torch.ldexp((mantissa * 4).round() / 4, exponent)
        ctx.save_for_backward(q, k, v, p, o)
        ctx.scale = scale
        return o.to(q.dtype)

    @staticmethod
    def backward(ctx, do):
        q, k, v, p, o = ctx.saved_tensors
        do = do.float()
        ds = p * (do @ v.float().mT - (do * o).sum(-1, keepdim=True)) * ctx.scale
        return *(x.to(q.dtype) for x in (ds @ k.float(), ds.mT @ q.float(), p.mT @ do)), None

def attention(q, k, v, causal, scale):
    assert causal
    return OneBit.apply(q, k, v, scale)
"""
STABLE = dict.fromkeys(("kernel", "control", "plain"), "stable to 790") | {"recipe": "exploded at 520"}


@pytest.mark.parametrize(
    ("ended", "code"),
    [
        ({}, 0),
        ({"kernel": "exploded at 690"}, 1),
        ({"kernel": "NaN in a gradient at 3", "recipe": "stable to 790"}, 1),
        ({"kernel": "exploded at 690", "control": "unstable since 300"}, 3),
        ({"recipe": "stable to 790"}, 3),
        ({"control": "stable to 19 (too short to tell)"}, 3),
    ],
    ids=str,
)
def test_a_verdict_needs_a_stable_control_and_a_recipe_that_fails(ended: dict[str, str], code: int) -> None:
    assert verdict(STABLE | ended)[0] == code


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_kernel_with_a_coarse_delta_fails_beside_its_control(tmp_path: Path) -> None:
    (tmp_path / "one_bit.py").write_text(KERNEL)
    command = [sys.executable, str(ROOT / "scripts/crash_run.py"), "one_bit:attention", "--run.device", "cpu"]
    command += ["--out", str(tmp_path / "out"), "--data.dataset", str(ROOT / "data/tokens/stdlib")]
    subprocess.run([sys.executable, str(ROOT / "scripts/prepare_data.py"), "stdlib"], check=True)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-2000:]
    assert "Data: identical" in done.stdout
    assert (tmp_path / "out/compare.png").stat().st_size > 20_000
