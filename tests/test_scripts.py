"""Commands that start whole runs: the quickstart, the second stage of the crash test, the benchmark of steps, a Slurm job."""

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import ROOT, Place, completed, environment
from torch.distributed.run import get_args_parser

import config
from attention import AttentionConfig, AttentionRule, AttentionSpec
from scripts import bench_train
from scripts.crash_run import UNVERIFIED, attention_options, how_ended, main, verdict

DEBUG = str(ROOT / "configs/debug.py")
SCRIPT = ROOT / "scripts" / "quickstart.sh"


@pytest.mark.slow
@pytest.mark.timeout(800)
def test_quickstart_shows_the_explosion_and_its_cures(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ["bash", str(SCRIPT), "--python", sys.executable, "--out", str(out)]
    done = completed(command, env=None, timeout=None)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Data: identical" in done.stdout
    assert (out / "compare.png").stat().st_size > 20_000
    cells = (line.split(" | ") for line in (out / "compare.md").read_text().splitlines())
    rows = {row[0].strip("| ").removesuffix(" (reference)"): row for row in cells}
    header = rows["run"]
    stable = ("consistent", "delta_from_p", "standard")
    ended = {name: rows[name][header.index("ended")] for name in ("failing", *stable)}
    assert ended["failing"].startswith("exploded at ")
    for name in stable:
        assert ended[name].startswith("stable to "), name
    last = {name: json.loads((out / "runs" / name / "metrics.jsonl").read_text().splitlines()[-1]) for name in ended}
    for name in stable:
        assert last["failing"]["val_loss"] > last[name]["val_loss"] + 1
        assert last["failing"]["w_q_norm_max"] > 5 * last[name]["w_q_norm_max"]

    again = completed(command, env=None, timeout=None)
    assert again.returncode == 2
    assert "holds an earlier quickstart" in again.stderr


def test_the_quickstart_refuses_a_file_to_write_to_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = completed(["bash", str(SCRIPT), "--python", sys.executable, "--out", str(tmp_path / "file")])
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"error: --out {tmp_path}/file cannot be made a folder; usage: ")


def test_the_quickstart_takes_a_relative_interpreter_from_the_callers_folder(tmp_path: Path) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\n[ $# = 2 ] || echo its own >&2; exit $(($# != 2))\n")
    (tmp_path / "python").chmod(0o755)
    command = ["bash", str(SCRIPT), "--python", "./python", "--out", str(tmp_path / "out")]
    assert completed(command, cwd=tmp_path).stderr == "its own\n"


KERNEL = """
from attention import AttentionSpec, scaled_dot_product_attention

def attention(q, k, v, causal, scale):
    coarse = AttentionSpec(preset="flash", sites=("output=m1",))
    return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, numerics=coarse)
"""
STABLE = dict.fromkeys(("kernel", "control"), "stable to 790") | {"recipe": "exploded at 520"}


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
    found, sentence = verdict(STABLE | ended)
    assert found == code
    assert ("need not be the kernel's" in sentence) == ("unstable" in ended.get("control", ""))


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--patience", "0", "--patience = 0: expected a whole number of 1 or more"),
        ("--run.name", "a", "--run.name: crash_run.py sets this itself, for each run"),
        ("--attention.default.sites", "output=m1", "--attention.default.sites: crash_run.py sets this itself"),
        ("--run.setps", "9", "run.setps = '9': did you mean steps?"),
        ("--data.dataset", "nowhere", "nowhere: no such data set; "),
        ("--attention.flash-backend", "flash", "attention of layer 0 = "),
        ("--run.resume", "yes", "run.resume = 'yes': expected no, as all three runs are new"),
        ("--run.init-from", "nowhere", "nowhere: no such file; expected runs/NAME, "),
        ("--alarm.switches", "3:0:flash", "alarm.switches = ['3:0:flash']: expected none, as "),
    ],
)
def test_a_bad_option_is_found_before_the_crash_test(
    option: str, value: str, message: str, tmp_path: Path, refused: Callable[..., str]
) -> None:
    assert message in refused(main, "torch:math", "--out", tmp_path / "out", "--run.device", "cpu", option, value)


def test_arms_of_kernel_and_control_take_nothing_from_the_recipes_own_attention(place: Place) -> None:
    own = AttentionSpec(preset="flash", sites=("tile_k=16",), backend="flash_reference")
    recipe = place.preset_file(place.config("own", {"attention": AttentionConfig(default=own)}))
    for preset, kernel in (("flash_consistent", ""), ("external", "plain")):
        arm = config.load([str(recipe), *attention_options(preset, kernel)])
        assert arm.attention.default == AttentionSpec(preset=preset, kernel=kernel)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        # The kernel would run in no layer.
        ({"attention": AttentionConfig(rules=(AttentionRule(),))}, "attention.rules = ['flash']: expected"),
        ({"data.record": "mine"}, "data.record = 'mine': expected none"),
    ],
)
def test_a_recipe_that_three_runs_cannot_share_is_refused(
    fields: dict[str, Any], message: str, place: Place, refused: Callable[..., str]
) -> None:
    assert message in refused(main, "torch:math", place.preset_file(place.config("shared", fields)))


def test_a_checkpoint_whose_layers_were_switched_is_no_start(place: Place, refused: Callable[..., str]) -> None:
    """They would keep that attention in all three runs."""
    run = place.train("switched", {"run.steps": 4, "alarm.switches": ("2:0:standard", "3:1:standard")})
    recipe = place.preset_file(place.config("recipe"))
    message = refused(main, "torch:math", recipe, "--out", place.folder / "out", "--run.init-from", run)
    assert message.startswith(f"error: run.init_from = '{run}': expected a checkpoint without alarm.switches (2:0:st")


@pytest.mark.parametrize(("mark", "ended"), [("overflow", "stable to 99"), ("stop", "NaN in a gradient at 9")])
def test_loss_scaling_is_no_failure(tmp_path: Path, mark: str, ended: str) -> None:
    (tmp_path / "kernel").mkdir()
    (tmp_path / "kernel/metrics.jsonl").write_text(f'{{"step": 9, "train_loss": 3.0, "nonfinite": "{mark}"}}\n')
    (table := tmp_path / "compare.csv").write_text("run,ended\nkernel,stable to 99\n")
    assert how_ended(tmp_path, table) == {"kernel": ended}


@pytest.mark.parametrize(("logit", "told"), [("17536.2", "17,536"), ("nan", "nan")])
def test_logits_that_run_away_are_not_stable(tmp_path: Path, logit: str, told: str) -> None:
    (tmp_path / "kernel").mkdir()
    (tmp_path / "kernel/metrics.jsonl").write_text('{"step": 9, "train_loss": 3.0}\n')
    (table := tmp_path / "compare.csv").write_text(f"run,ended,max_logit_max_largest\nkernel,stable to 499,{logit}\n")
    ended = STABLE | how_ended(tmp_path, table)
    assert verdict(ended) == (UNVERIFIED, f"unverified: the kernel's run is stable to 499, with a logit of {told}")


@pytest.mark.parametrize("option", ["--model.no-gated-attention", "--model.gated_attention"])
def test_a_switch_of_the_tiny_model_can_be_given(option: str, tmp_path: Path, refused: Callable[..., str]) -> None:
    """Its options are read before its folder is looked at."""
    arguments = "torch:flash", option, "--out", tmp_path
    assert f"--out {tmp_path}: it is there already" in refused(main, *arguments)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_kernel_with_a_coarse_delta_fails_beside_its_control(tmp_path: Path) -> None:
    (tmp_path / "one_bit.py").write_text(KERNEL)
    command = [sys.executable, str(ROOT / "scripts/crash_run.py"), "one_bit:attention", "--run.device", "cpu"]
    command += ["--out", str(tmp_path / "out"), "--data.dataset", str(ROOT / "data/tokens/stdlib")]
    subprocess.run([sys.executable, str(ROOT / "scripts/prepare_data.py"), "stdlib"], check=True)
    done = completed(command, env=os.environ | {"PYTHONPATH": str(tmp_path)}, cwd=tmp_path, timeout=None)
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-2000:]
    assert "Data: identical" in done.stdout
    assert (tmp_path / "out/compare.png").stat().st_size > 20_000


VARIANTS = ["plain", "deep: --model.n-layer 4", "bad: --attention.flash-backend flash"]


@pytest.mark.slow
def test_each_variant_has_a_row_with_the_flops_of_its_own_model_and_a_bad_one_says_why(tmp_path: Path) -> None:
    place = Place(tmp_path)
    recipe = place.preset_file(place.config("recipe", {}))
    arguments = ["--variants", *VARIANTS, "--rounds", "2", "--steps", "3", "--data.micro-batch", "8"]
    arguments += ["--json", str(tmp_path / "b.json")]
    command = [sys.executable, str(ROOT / "scripts/bench_train.py"), str(recipe), *arguments]
    done = completed(command, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: bad failed: UserError: at")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.json", "data", "recipe.py"]
    rows = {row["name"]: row for row in json.loads((tmp_path / "b.json").read_text())["rows"]}
    assert list(rows) == ["plain", "deep", "bad"]
    assert rows["deep"]["flops_per_token"] > 1.5 * rows["plain"]["flops_per_token"] > 0
    assert rows["bad"]["failed"].startswith("UserError: attention of layer 0")


@pytest.mark.parametrize(
    ("command", "variant", "found"),
    [("", "", "FOLDER/data"), ("--data.dataset X", "", "X"), ("--data.dataset=X", "--data.dataset Y", "Y")],
)
def test_the_benchmark_trains_on_the_data_set_that_is_named(command: str, variant: str, found: str) -> None:
    args = argparse.Namespace(recipe=[DEBUG], variants=[], nanogpt=None, json=None, rounds=1, steps=1)
    recipe = bench_train.check(args, command.split(), Path("FOLDER"))
    _, config, _ = bench_train.parse_variant(recipe, f"a: {variant}", Path("FOLDER"))
    assert config.data.dataset == found


@pytest.mark.parametrize("words", [["--run.name=a"], ["--variants", "a: --evaluation.every 5"]])
def test_the_benchmark_refuses_what_it_sets_itself(words: list[str], refused: Callable[..., str]) -> None:
    assert "bench_train.py sets this itself" in refused(bench_train.main, DEBUG, *words)


ARGUMENTS = ["--run.name", "a", "--wandb.project", "two words"]
PLAYED = {
    "scontrol": '[ "$*" = "show hostnames node[3-4]" ] && printf "node3\\nnode4\\n" || echo "scontrol $*"',
    "srun": '[ "$1" = "--cpus-per-task=96" ] && shift && exec "$@"',
    "torchrun": 'printf "%s\\n" "$@"; [ -z "$CODE" ] || echo "{\\"code\\": $CODE}" > "$RUN/exit.json"; exit $STATUS',
    "python": f'exec {sys.executable} "$@"',
}
# What the real one says of these arguments, without the seconds in which it imports torch.
PLAYED_PYTHON = 'echo "$RUN/exit.json"'


def slurm_job(
    folder: Path, code: str, *arguments: str, status: int = 1, **played: str
) -> subprocess.CompletedProcess[str]:
    """A script that Slurm has copied elsewhere, as it does; it prints what torchrun and scontrol are told. The run ends with ``code``,
    torchrun with ``status``."""
    for name, line in (PLAYED | played).items():
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
        "STATUS": str(status),
    }
    command = ["bash", str(script), *arguments, "--run.folder", str(run.parent)]
    return completed(command, env=environment() | variables)


def told(folder: Path, code: str, status: int = 1, **played: str) -> list[str]:
    (folder / "prints.py").write_text("from configs.gpt2_paper import config\nprint('loaded')\n")
    done = slurm_job(folder, code, str(folder / "prints.py"), *ARGUMENTS, status=status, **played)
    assert done.returncode == status, done.stderr
    return done.stdout.splitlines()


def test_torchrun_is_told_where_to_meet_and_a_run_that_asks_for_it_is_queued_again(tmp_path: Path) -> None:
    *arguments, requeue = told(tmp_path, "75")
    args = get_args_parser().parse_args(arguments)
    assert (args.nnodes, args.nproc_per_node, args.rdzv_backend) == ("2", "8", "c10d")
    assert (args.rdzv_id, args.rdzv_endpoint) == ("17", "node3:29500")
    assert "SIGUSR1" in args.signals_to_handle
    assert Path(args.training_script) == ROOT / "train.py"
    own = args.training_script_args
    assert own[1 : len(ARGUMENTS) + 1] == ARGUMENTS
    assert own[-2:] == ["--run.resume", "auto"]
    assert requeue == "scontrol requeue 17"


def test_a_job_whose_torchrun_is_stopped_before_it_starts_a_process_is_queued_again(tmp_path: Path) -> None:
    assert told(tmp_path, "", 128 + signal.SIGTERM, python=PLAYED_PYTHON)[-1] == "scontrol requeue 17"


@pytest.mark.parametrize(("code", "status"), [("", 1), ("2", 1), ("2", 128 + signal.SIGTERM)])
def test_a_run_that_ends_otherwise_is_not_queued_again(tmp_path: Path, code: str, status: int) -> None:
    """Neither for what the job before has left."""
    assert told(tmp_path, code, status, python=PLAYED_PYTHON)[-1] == "auto"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("configs/x.py", "config file = 'configs/x.py'"),
        ("configs/debug.py --run.resume auto", "--run.resume: train.slurm"),
    ],
)
def test_a_slurm_job_with_a_mistake_is_one_line(tmp_path: Path, arguments: str, message: str) -> None:
    done = slurm_job(tmp_path, "", *arguments.split())
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith(f"error: {message}")


def test_help_of_a_slurm_job_starts_nothing(tmp_path: Path) -> None:
    done = slurm_job(tmp_path, "", "configs/debug.py", "--help")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
