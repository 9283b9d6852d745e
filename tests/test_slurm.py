"""scripts/train.slurm: what each node is told to start, with Slurm's own commands and variables played by the test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import ROOT, environment
from torch.distributed.run import get_args_parser

ARGUMENTS = ["configs/gpt2_paper.py", "--run.name", "a", "--wandb.project", "two words"]
PLAYED = {
    "scontrol": '[ "$*" = "show hostnames node[3-4]" ] && printf "node3\\nnode4\\n" || echo "scontrol $*"',
    "srun": '[ "$1" = "--cpus-per-task=96" ] && shift && exec "$@"',
    "torchrun": 'printf "%s\\n" "$@"; [ -z "$CODE" ] || echo "{\\"code\\": $CODE}" > "$RUN/exit.json"; exit 1',
    "python": f'exec {sys.executable} "$@"',
}


def told(folder: Path, code: str) -> list[str]:
    """What torchrun and scontrol are told by a script that Slurm has copied elsewhere, as it does. The run ends with ``code``."""
    for name, line in PLAYED.items():
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    script, run = folder / "slurm_script", folder / "runs/a"
    script.write_bytes((ROOT / "scripts/train.slurm").read_bytes())
    run.mkdir(parents=True)
    (run / "exit.json").write_text('{"code": 75}')  # of the job before
    variables = {
        "SLURM_JOB_NODELIST": "node[3-4]",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_CPUS_ON_NODE": "96",
        "SLURM_JOB_ID": "17",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "PATH": f"{folder}:/usr/bin:/bin",
        "RUN": str(run),
        "CODE": code,
    }
    command = ["bash", str(script), *ARGUMENTS, "--run.folder", str(run.parent)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment() | variables, timeout=100)
    assert done.returncode == 1, done.stderr
    return done.stdout.splitlines()


def test_torchrun_is_told_where_to_meet_and_a_run_that_asks_for_it_is_queued_again(tmp_path: Path) -> None:
    *arguments, requeue = told(tmp_path, "75")
    args = get_args_parser().parse_args(arguments)
    assert (args.nnodes, args.nproc_per_node, args.rdzv_backend) == ("2", "8", "c10d")
    assert (args.rdzv_id, args.rdzv_endpoint) == ("17", "node3:29500")
    assert "SIGUSR1" in args.signals_to_handle
    assert Path(args.training_script) == ROOT / "train.py"
    own = args.training_script_args
    assert own[: len(ARGUMENTS)] == ARGUMENTS
    assert own[-2:] == ["--run.resume", "auto"]
    assert requeue == "scontrol requeue 17"


@pytest.mark.parametrize("code", ["", "2"])
def test_a_run_that_ends_otherwise_is_not_queued_again(tmp_path: Path, code: str) -> None:
    """Neither for what the job before has left."""
    assert told(tmp_path, code)[-1] == "auto"
