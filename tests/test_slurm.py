"""scripts/train.slurm: what each node is told to start, with Slurm's own commands and variables played by the test."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tiny_runs import ROOT, environment
from torch.distributed.run import get_args_parser

PLAYED = {
    "scontrol": '[ "$*" = "show hostnames node[3-4]" ] && printf "node3\\nnode4\\n"',
    "srun": '[ "$1" = "--cpus-per-task=96" ] && shift && exec "$@"',
    "torchrun": 'printf "%s\\n" "$@"',
}


@pytest.fixture
def told(tmp_path: Path) -> list[str]:
    """The arguments that torchrun gets, from a script that Slurm has copied elsewhere, as it does."""
    for name, line in PLAYED.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    script = tmp_path / "slurm_script"
    script.write_bytes((ROOT / "scripts/train.slurm").read_bytes())
    variables = {
        "SLURM_JOB_NODELIST": "node[3-4]",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_CPUS_ON_NODE": "96",
        "SLURM_JOB_ID": "17",
    }
    variables |= {"SLURM_SUBMIT_DIR": str(ROOT), "PATH": f"{tmp_path}:/usr/bin:/bin"}
    command = ["bash", str(script), "configs/gpt2_paper.py", "--run.name", "two words"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment() | variables, timeout=30)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_torchrun_is_told_the_nodes_and_where_to_meet(told: list[str]) -> None:
    args = get_args_parser().parse_args(told)
    assert (args.nnodes, args.nproc_per_node, args.rdzv_backend) == ("2", "8", "c10d")
    assert (args.rdzv_id, args.rdzv_endpoint) == ("17", "node3:29500")


def test_the_arguments_are_train_pys(told: list[str]) -> None:
    args = get_args_parser().parse_args(told)
    assert Path(args.training_script) == ROOT / "train.py"
    assert args.training_script_args == ["configs/gpt2_paper.py", "--run.name", "two words", "--run.resume", "auto"]
