"""Train with an attention kernel: does it fail where its control does not?

    python scripts/crash_run.py mykernels:attention
    python scripts/crash_run.py torch:flash configs/fast_failure.py --model.activation swiglu --data.replay replay_batches/ansible \\
        --run.seed 22 --run.steps 4000

Crash-tests the kernel, then trains three runs on the same batches and compares them: with the kernel, with plain attention (the control),
and with the recipe's own attention, which should fail. KERNEL is that of python -m low_precision_attention.check. CONFIG and the options
behind it are train.py's, for all three; --run.name, --run.folder and --attention.default, in which they differ, it sets itself, and
attention.rules, alarm.switches (those of a checkpoint, too), data.record and run.resume it refuses. Without CONFIG it is the tiny model
of configs/quickstart.py in BF16, minutes on a CPU, whose own attention has an O of one mantissa bit: a kernel fails there whose delta is
about as far off. No BF16 kernel should, and one that does not may still fail a larger model.

Exit codes: 0 the kernel is stable and the recipe's own attention fails; 1 the kernel fails and its control is stable; 2 usage;
3 unverified: it cannot run, its control is not stable, its logits run away without a failure, or nothing failed.
"""

import contextlib
import csv
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import _root  # noqa: F401

from errors import OneLineParser, UserError, check_size, exit_on_user_error, invalid, trainer_packages

with trainer_packages():
    import config as configuration
    from attention.check import check_attention
    from attention.presets import PRESETS, unaliased
    from model import GPT
    from training import distributed
    from training.intervention import made_by
    from training.metrics import METRICS_FILE, read_metrics
    from training.run import Origin, check_plans, checkpoint_to_branch_from, open_data
    from training.weights import load_nanogpt

ROOT = Path(__file__).resolve().parent.parent
TINY = ("--model.gated-attention", "--run.steps=800", "--precision.dtype=bfloat16", "--run.device=auto")
CLASSES = ("gaussian", "common_part", "shared_direction", "peaked_1000", "one_hot", "mask_edges")
OWN = ("--run.name", "--run.folder", "--data.record", "--attention.default.")
"""Options in which the runs differ, or that three runs cannot share."""
UNVERIFIED = 3
RUNAWAY_LOGIT = 10_000.0
"""As in docs/results.md and compare_runs.py."""


def attention_options(preset: str, kernel: str = "") -> list[str]:
    """Nothing of the recipe's own spec is left in the run's."""
    spec = {"preset": preset, "numerics": "hardware", "backend": "", "kernel": kernel}
    return [f"--attention.default.{name}={value}" for name, value in spec.items()] + ["--attention.default.sites"]


def verdict(ended: dict[str, str]) -> tuple[int, str]:
    """Exit code and sentence, of how each run ended (``compare_runs``)."""
    failed = {run for run, how in ended.items() if how.startswith(("exploded", "NaN", "unstable"))}
    stable = {run for run, how in ended.items() if how.startswith("stable") and not re.search("too short|logit", how)}
    if "control" not in stable:
        so = ", so a failure need not be the kernel's" if "control" in failed else ""
        return UNVERIFIED, f"unverified: the control's run is {ended['control']}{so}"
    if "kernel" in failed:
        return 1, f"the kernel fails ({ended['kernel']}), its control does not"
    if "kernel" not in stable:
        return UNVERIFIED, f"unverified: the kernel's run is {ended['kernel']}"
    if "recipe" not in failed:
        why = "the recipe's own attention does not fail, so that the kernel is stable says nothing"
        return UNVERIFIED, f"unverified: {why}"
    return 0, "the kernel is stable, on batches on which the recipe's own attention fails"


def train(options: Sequence[str], folder: Path, name: str, cpu: bool) -> None:
    """One run. Raises ``UserError`` where it did not start."""
    print(f"== {name}", flush=True)
    # One thread: the same bits on every machine of a kind.
    environment = os.environ | ({"OMP_NUM_THREADS": "1"} if cpu else {})
    command = [sys.executable, str(ROOT / "train.py"), *options, "--run.folder", str(folder), "--run.name", name]
    code = subprocess.run(command, env=environment).returncode
    if code == 130:
        raise KeyboardInterrupt
    if not (folder / name / METRICS_FILE).is_file():
        error = f"the run {name} did not start (exit code {code})"
        if name == "kernel":  # the recipe's settings and data were read before
            print(f"verdict: unverified: {error}")
            raise SystemExit(UNVERIFIED)
        raise UserError(error)


def how_ended(folder: Path, table: Path) -> dict[str, str]:
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    ended = {row["run"]: row["ended"] for row in rows}
    for row in rows:  # in a short run neither the loss nor a gradient norm need have risen yet
        if not (logit := float(row.get("max_logit_max_largest") or 0)) <= RUNAWAY_LOGIT:  # or NaN
            ended[row["run"]] += f", with a logit of {logit:,.0f}"
    for name in ended:
        # An overflow of FP16 is loss scaling at work.
        bad = [line["step"] for line in read_metrics(folder / name) if line.get("nonfinite") in ("skip", "stop")]
        if bad and not ended[name].startswith(("exploded", "NaN")):
            ended[name] = f"NaN in a gradient at {bad[0]:,}"
    return ended


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    argv = list(sys.argv[1:] if argv is None else argv)
    names = list(itertools.takewhile(lambda argument: not argument.startswith("-"), argv))
    usage = "crash_run.py KERNEL [CONFIG] [--out FOLDER] [options of train.py]"
    parser = OneLineParser(description=__doc__, usage=usage)
    parser.add_argument("--out", type=Path, help="folder of runs and picture (runs/crash_run/KERNEL)")
    explosion = "steps above the margin that make an explosion: see compare_runs.py (200; without CONFIG 50)"
    parser.add_argument("--patience", type=int, metavar="N", help=explosion)
    options, rest = parser.parse_known_args(argv[len(names) :])
    if len(names) not in (1, 2):
        raise UserError(f"usage: {usage}; --help says more")
    kernel, tiny = names[0], len(names) == 1
    patience = (50 if tiny else 200) if options.patience is None else options.patience
    check_size("--patience", patience, 1)
    if own := [option for option in rest if option.replace("_", "-").startswith(OWN)]:
        raise UserError(f"{own[0].partition('=')[0]}: crash_run.py sets this itself, for each run")
    replaced = {option.partition("=")[0].replace("_", "-") for option in rest}
    tiny_options = [one for one in TINY if not {one.partition("=")[0], one.replace(".", ".no-")} & replaced]
    recipe = [str(ROOT / "configs/quickstart.py"), *tiny_options, *rest] if tiny else [names[1], *rest]
    config = configuration.load(recipe)
    rules = [rule.attention.preset for rule in config.attention.rules]
    for name, own in (("attention.rules", rules), ("alarm.switches", list(config.alarm.switches))):
        if own:
            raise invalid(name, own, "none, as the kernel's and the control's run have one attention in all layers")
    if config.data.record:
        raise invalid("data.record", config.data.record, "none, as three runs cannot make one recording")
    if config.run.resume != "no":
        raise invalid("run.resume", config.run.resume, "no, as all three runs are new")
    folder = options.out or Path("runs/crash_run", re.sub(r"[^A-Za-z0-9._-]", "_", kernel))
    if folder.exists():
        raise UserError(f"--out {folder}: it is there already: remove it or name another folder")

    tested = attention_options(kernel) if unaliased(kernel) in PRESETS else attention_options("external", kernel)
    of_arms = {"kernel": tested, "control": attention_options("external", "plain"), "recipe": []}
    dist = distributed.start(config.run.device)
    device = dist.device.type
    if device == "cuda":  # as the crash test runs a preset there, and not in a recipe's reference
        of_arms["kernel"].append("--attention.flash-backend=flash")
    # What the kernel cannot help is no verdict on it, and shows before anything runs.
    for arm in (configuration.load([*recipe, *of_arms["control"]]), config):
        plans = arm.attention.resolve(arm.model.n_layer, arm.model.n_head)
        check_plans(arm, dist.device, plans)
    start = checkpoint_to_branch_from(config, dist)
    if start is None and config.run.init_from:
        load_nanogpt(GPT(config.model, plans), Path(config.run.init_from))
    if start and (switches := ", ".join(switch.option() for switch in made_by(start))):
        expected = f"a checkpoint without alarm.switches ({switches}), which would hold in all three runs"
        raise invalid("run.init_from", config.run.init_from, expected)
    with contextlib.ExitStack() as undo:
        open_data(config, dist, Origin("", False, None, start), undo)
    del start  # the runs read it, each its own
    dtype = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[config.precision.dtype]
    report = check_attention(kernel, device=device, dtype=dtype, classes=CLASSES)
    print(report.text(), flush=True)
    if report.cases[0].verdict == "unverified":
        raise SystemExit(UNVERIFIED)

    for name, attention in of_arms.items():
        try:
            train([*recipe, *attention], folder, name, device == "cpu")
        except KeyboardInterrupt:
            print(f"interrupted: compare_runs.py reads what is in {folder}; remove it to begin again", file=sys.stderr)
            raise
    table = folder / "compare.csv"
    compare = [sys.executable, str(ROOT / "scripts/compare_runs.py"), *(str(folder / name) for name in of_arms)]
    compare += ["--out", str(folder / "compare.png"), "--table", str(table), "--patience", str(patience)]
    if code := subprocess.run(compare).returncode:
        raise SystemExit(code)
    code, sentence = verdict(how_ended(folder, table))
    print(f"verdict: {sentence}")
    if tiny and code == 0:
        size = "as large as that of an O of one mantissa bit"
        print(f"An error of delta shows here where it is {size}: what is at risk above may fail a larger model.")
    raise SystemExit(code)


if __name__ == "__main__":
    main()
