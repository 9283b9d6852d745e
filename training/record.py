"""The record of a run: its resolved configuration and everything else that decides its numbers, in runs/NAME/config.json."""

import contextlib
import hashlib
import importlib.metadata
import itertools
import platform
import shutil
import subprocess
from collections.abc import Iterable
from io import FileIO
from pathlib import Path
from typing import Any

import torch

import files
from data.recording import recorded_by
from errors import BusyError, UserError, invalid, on_disk, warn
from files import check_writable, json_text, read_json, write_all
from training import distributed
from training.checkpoint import Loaded, found_in
from training.metrics import METRICS_FILE, line_digests, read_lines, text_of
from training.settings import Resume, TrainConfig, to_json
from training.telemetry import TELEMETRY_FILE

LOCK_FILE = "lock"
EXIT_FILE = "exit.json"
LOGS = (METRICS_FILE, TELEMETRY_FILE)
# Files that a start may leave in a run's folder before it writes config.json.
# The lock comes first and goes last: a folder without it is not a run's, unless it is empty.
_OF_A_START = (EXIT_FILE, f"{EXIT_FILE}.tmp", "config.json.tmp", "wandb", LOCK_FILE)
_PACKAGES = ("torch", "triton", "numpy", "safetensors", "tyro", "wandb")
_CUBLAS = ("nvidia-cublas", "nvidia-cublas-cu12")
"""Its packages, by CUDA's version. A user can upgrade it alone."""
_DECIDE_BITS = ("torch", "triton", "cuda", "cublas", "numpy")
# A resumed run may differ from its checkpoint in these: where things lie and run, when they are written, what happens when a step fails.
# Of these only run.device, alarm.switches and nonfinite.policy change what is computed, each by a user's choice on the way; the digest
# shows that a data set in another folder is the same data.
_FREE_ON_RESUME = (
    *(f"run.{name}" for name in ("resume", "steps", "device", "timeout", "folder", "log_every")),
    *("data.dataset", "data.verify", "evaluation", "telemetry", "alarm", "checkpoint", "nonfinite", "wandb"),
)
# A new run that begins at a checkpoint may differ in these, too. Its batches must be the same ones, which their digest shows.
_FREE_IN_A_BRANCH = ("run.name", "run.init_from", "attention", "data.record", "data.replay")
SUM_ORDER = "precision.fixed_sum_order"
_BEFORE_THE_FIELD = {SUM_ORDER: False}
"""What a record without it stands for, where that is not today's default."""
_ROOT = Path(__file__).resolve().parent.parent
_ROOT_FILES = ("train.py", "config.py", "errors.py", "files.py", "model.py")
_CODE = ("attention", "training", "data", "probes", "fused", "scripts")


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment(device: torch.device, world_size: int) -> dict[str, Any]:
    """Versions, commit, digest of the code and hardware as JSON values; absent packages are None."""
    versions = {"python": platform.python_version(), "cuda": torch.version.cuda}
    versions |= {package: version(package) for package in _PACKAGES}
    versions["cublas"] = next(filter(None, map(version, _CUBLAS)), None)
    hardware = {"type": device.type, "name": platform.processor() or platform.machine(), "processes": world_size}
    # On a CPU the number of threads and the kernels for its instructions decide in which order sums are taken, and so the last bits.
    hardware |= {"threads": torch.get_num_threads(), "instructions": torch.backends.cpu.get_cpu_capability()}
    if device.type == "cpu":
        hardware["products"] = _products()
    else:
        driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
        hardware |= {"name": torch.cuda.get_device_name(device), "driver": driver}
    code = {"git_commit": _git_commit(), "source_sha256": source_sha256(_ROOT)}
    return {"versions": versions, **code, "device": hardware}


def _products() -> str:
    """Digest of matrix products on the CPU: MKL and oneDNN choose kernels by the CPU and by variables of theirs, and report neither."""
    digest, generator = hashlib.sha256(), torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        for m, k, n in ((48, 16, 48), (256, 128, 384)):
            a_MK, b_KN = (torch.randn(shape, generator=generator).to(dtype) for shape in ((m, k), (k, n)))
            digest.update((a_MK @ b_KN).float().numpy().tobytes())
    return digest.hexdigest()[:12]


def source_sha256(root: Path) -> str:
    """SHA-256 over the Python sources of the checkout ``root``, its own files and those of its packages: path, length, bytes of each.

    Not over other files in ``root``: a user may keep a kernel or a script there. Of ``_ROOT_FILES`` an earlier commit may lack some.
    """
    paths = [
        *filter(Path.exists, map(root.joinpath, _ROOT_FILES)),
        *(path for package in _CODE for path in (root / package).rglob("*.py")),
    ]
    digest = hashlib.sha256()
    for name, path in sorted((path.relative_to(root).as_posix(), path) for path in paths):
        content = path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def sessions(folder: Path, from_step: int, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """The sessions of a run, one entry each: those in ``folder``/config.json, and one that begins at ``from_step`` with ``facts``.

    Raises ``UserError`` for a config.json that is no record.
    """
    return [*_read_record(folder).get("sessions", []), {"from_step": from_step, **facts}]


def what_changed(of_run: list[dict[str, Any]]) -> str:
    """A sentence if the last two sessions of a run differ in what decides last bits: sources, versions, machine; "" otherwise."""
    if len(of_run) < 2:  # its config.json is gone
        return ""
    before, now = (
        {"source_sha256": session.get("source_sha256", "unknown")[:12]}
        | {name: session.get("versions", {}).get(name, "unknown") for name in _DECIDE_BITS}
        | {name: value for name, value in session.get("device", {}).items() if name != "processes"}
        | session.get("kernels", {})
        for session in of_run[-2:]
    )
    pairs = [f"{name} {before[name]} -> {now[name]}" for name in before if name in now and before[name] != now[name]]
    return f"{', '.join(pairs)}: it may differ from a run made in one go; config.json has both" if pairs else ""


def run_id(folder: Path, loaded: Loaded | None) -> str:
    """The id of the run in ``folder``, from config.json and its checkpoint; "" for a run from before there were any.

    Raises ``UserError`` for a checkpoint of another run.
    """
    known = (_read_record(folder), loaded.extra if loaded else {})
    ids = [str(one["run_id"]) for one in known if "run_id" in one]
    if loaded is not None and len(set(ids)) > 1:
        differ = f"its run_id is {ids[1]!r}, that of {folder / 'config.json'} is {ids[0]!r}"
        raise UserError(f"{loaded.path}: {differ}: not this run's checkpoint")
    return ids[0] if ids else ""


def check_restart(folder: Path, checkpoints: Path, now: TrainConfig, began: dict[str, Any]) -> None:
    """Raise ``UserError`` unless ``folder`` holds a run that has ended before its first checkpoint, and so can start again.

    ``began``: from_step and init_sha256 of a session that begins now.
    """
    content = _read_record(folder)
    if not content:
        again = f"remove {folder} and start the run again" if folder.exists() else "start the run again"
        raise invalid("run.resume", "yes", f"a checkpoint in {checkpoints}, and there is none: {again}")
    check_settings(str(folder / "config.json"), content["config"], now, branch=False)
    steps, every = content["config"]["run"]["steps"], content["config"]["checkpoint"]["every"]
    first = content["sessions"][0]
    # The line of a step follows its checkpoint.
    due = min((first["from_step"] // every + 1) * every, steps) if every else steps
    metrics = folder / METRICS_FILE
    last = max((row["step"] for row in read_lines(metrics)), default=0) if metrics.exists() else 0
    otherwise = f"choose another name, or remove {folder} and start the run again"
    went_on = content["sessions"][-1]["from_step"] > first["from_step"]  # at one; every may have been another then
    if went_on or last >= due > first["from_step"]:  # a branch of no step has saved nothing
        gone = f"a checkpoint in {checkpoints}; they are gone, while {metrics} goes to step {last}"
        raise invalid("run.resume", "yes", f"{gone}: {otherwise}")
    if began != {name: first[name] for name in ("from_step", "init_sha256") if name in first}:
        expected = f"the weights of step {first['from_step']} that {folder} began with, and these are others, of step {began['from_step']}"
        raise invalid("run.init_from", now.run.init_from, f"{expected}: {otherwise}")


def check_data(folder: Path, dataset: str, identity: dict[str, Any]) -> None:
    """Raise ``UserError`` where the tokens of ``identity`` are not those that the run in ``folder`` began with."""
    before = _read_record(folder).get("batches", {})
    if any(before.get(name, identity[name]) != identity[name] for name in ("data_sha256", "validation_sha256")):
        raise invalid("data.dataset", dataset, f"the data that {folder} began with: this has other tokens")


def check_logs(folder: Path) -> None:
    """Raise ``UserError`` for a file that a resume rewrites and that is damaged or cannot be replaced."""
    for path in (folder / name for name in ("config.json", *LOGS)):
        if path.exists():
            if path.name in LOGS:
                list(read_lines(path))
            check_writable(path)


def logs_before(folder: Path, loaded: Loaded) -> tuple[dict[str, bytes], list[str]]:
    """What the run in ``folder`` had logged when it wrote the checkpoint, by file; and what is gone or changed, of which it warns."""
    odd = []
    contents = {
        name: text_of(line for line in read_lines(folder / name) if line["step"] < loaded.step).encode()
        for name in LOGS
        if (folder / name).is_file()
    }
    for name, digests in loaded.extra.get("logs", {}).items():
        written, there = digests.split(), line_digests(contents.get(name, b""))
        if written != there:
            pairs = enumerate(itertools.zip_longest(written, there), start=1)
            first = next(number for number, (old, new) in pairs if old != new)
            gone, then = len(written) - len(there), loaded.path
            what = f"{gone} lines from before {then} are gone, the first" if gone > 0 else f"changed since {then}"
            warn(f"{folder / name}: {what}: line {first}; the weights do not depend on it")
            odd.append(f"{name}: {what}: line {first}")
    if not (folder / "config.json").is_file():
        what = f"gone, and with it what it said of the sessions before {loaded.path}"
        warn(f"{folder / 'config.json'}: {what}; a new one is written")
        odd.append(f"config.json: {what}")
    return contents, odd


def log_digests(folder: Path, written: dict[str, list[str]]) -> dict[str, str]:
    """``line_digests`` of every log, for a checkpoint: as this process has written it, else as it stands in the folder."""
    stand = {name: line_digests((folder / name).read_bytes()) for name in LOGS if (folder / name).is_file()}
    return {name: " ".join(digests) for name, digests in (stand | written).items()}


def _read_record(folder: Path) -> dict[str, Any]:
    """Empty where there is none. Raises ``UserError`` for a config.json that is none."""
    path = folder / "config.json"
    if not path.is_file():
        return {}
    try:
        content: dict[str, Any] = read_json(path)
        config, began = content["config"], [session["from_step"] for session in content["sessions"]]
        has_what_resuming_reads = "steps" in config["run"] and "every" in config["checkpoint"]
    except (OSError, ValueError, KeyError, TypeError):
        has_what_resuming_reads = False
    if not has_what_resuming_reads:
        raise UserError(f"{path}: not the record of a run")
    if not began:
        raise invalid(f"{path}: sessions", content["sessions"], "one or more: a run has begun once at least")
    return content


def hold(folder: Path, resume: Resume, is_main: bool) -> tuple[bool, FileIO | None]:
    """Whether a run has begun in ``folder``, as rank 0 sees it; and there, if one has, its ``lock``. All ranks get the answer.

    Raises ``UserError`` for one that run.resume no does not want, or another process has, and for a folder that no run has made. Every
    rank must call it.
    """
    held = None
    with (
        distributed.all_or_none(f"run.name = {folder.name!r}: rank 0 cannot use {folder}"),
        on_disk("run.folder", f"read {folder}"),
        contextlib.suppress(FileNotFoundError),  # another start has just taken back what it had made
    ):
        foreign = (
            _foreign(folder) if is_main else ""
        )  # before the look for a run, which another start may just be writing
        if is_main and begun(folder):
            if resume == "no":
                raise name_taken(folder)
            held = lock(folder)
        elif foreign:
            raise invalid("run.name", folder.name, f"a new name, or a run's: {folder} is {foreign}")
    return distributed.any_rank(held is not None), held


def begun(folder: Path) -> bool:
    """Whether the folder holds a run, and not only what a start leaves, or a ``checkpoints`` of somebody else's.

    Raises ``UserError`` where that cannot be read.
    """
    return (folder / "config.json").exists() or bool(found_in(folder / "checkpoints"))


def free(folder: Path) -> bool:
    """Whether nothing is there, or nothing but what a start leaves."""
    return not _foreign(folder)


def _foreign(folder: Path) -> str:
    """What the folder is if a start has not made it, or all that is in it; else ""."""
    if not folder.is_dir():
        return "a file" if folder.exists() else ""
    own = _OF_A_START if (folder / LOCK_FILE).exists() else ()
    names = sorted(path.name for path in folder.iterdir() if path.name not in own)
    return f"none, with {names[0]} in it" if names else ""


def remove_folder(folder: Path) -> None:
    """Remove a new run's files, and the folder if it holds nothing else. A mount or a link stays."""
    _remove(folder, (*LOGS, "config.json", *_OF_A_START))
    remove_empty([folder])


def remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _remove(folder: Path, names: Iterable[str]) -> None:
    for path in (folder / name for name in names):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def name_taken(folder: Path) -> BusyError:
    return BusyError(f"run.name = {folder.name!r}: {folder} exists; choose another name, or --run.resume yes to go on")


def make_folder(folder: Path) -> FileIO:
    """Make a new run's folder, or take one without what a killed start left; its ``lock``. Raises ``UserError`` when it cannot be made, or
    holds anything else."""
    with on_disk("run.folder", f"make {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    file = lock(folder)
    if not free(folder):  # another start was faster
        file.close()
        raise name_taken(folder)
    _remove(folder, (name for name in _OF_A_START if name != LOCK_FILE))
    return file


def lock(folder: Path) -> FileIO:
    """``files.lock`` of the run in ``folder``. Raises ``BusyError`` when another process has it, ``UserError`` where no file can be."""
    path = folder / LOCK_FILE
    busy = f"another process is training {folder} (it has locked {path}): wait for its end, or stop it"
    with on_disk("run.folder", f"write {path}"):
        return files.lock(path, "ab", f"run.name = {folder.name!r}: {busy}")


def check_settings(where: str, saved: dict[str, Any], now: TrainConfig, *, branch: bool) -> None:
    """Raise ``UserError`` for a setting that must be as ``saved`` and is not; ``branch``: for a new run that begins there."""
    free = _FREE_ON_RESUME + (_FREE_IN_A_BRANCH if branch else ())
    odd = [one for one in differences(saved, now) if not one[0].startswith(free)]
    if not odd:
        return
    name, before, value = odd[0]
    switch = "; --alarm.switches STEP:LAYER:PRESET changes it on the way" * name.startswith("attention")
    expected = "none" if before in ("", None) else repr(before)
    # An option that was given at the start and is missing now has its default value.
    if isinstance(before, str | int | float) and before and before is not True:
        expected += f" (--{name.replace('_', '-')} {before})"
    switch += "; a run that begins there may change attention and what a resume may, no more" * branch
    others = f"; {len(odd) - 1} more differ: {', '.join(name for name, *_ in odd[1:])}" if len(odd) > 1 else ""
    raise invalid(name, value, f"{expected}, as in {where}{switch}{others}")


def settings_changed(folder: Path, now: TrainConfig) -> str:
    """Which settings of a run that goes on are not those of its last session, in a sentence; "" where all are."""
    if not (content := _read_record(folder)):
        return ""
    found = differences(content["config"], now)
    pairs = [f"{name} {before!r} -> {value!r}" for name, before, value in found if name != "run.resume"]
    return f"not as in its last session: {', '.join(pairs)}" if pairs else ""


def sum_order_of(recording: Path, folder: Path) -> bool | None:
    """precision.fixed_sum_order of the run in ``folder``, if it made the recording."""
    with contextlib.suppress(UserError):
        content = _read_record(folder)
        if content and content.get("run_id", "") == recorded_by(recording):
            return bool((_BEFORE_THE_FIELD | flat(content["config"]))[SUM_ORDER])
    return None


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of JSON by their dotted names."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return leaves


def differences(saved: dict[str, Any], now: TrainConfig) -> list[tuple[str, Any, Any]]:
    """Settings that differ from a config as JSON: (name, saved, now). What ``saved`` lacks came later and was its default."""
    before, after = flat(saved), flat(to_json(now))
    before = flat(to_json(TrainConfig())) | _BEFORE_THE_FIELD | before
    return [(name, before[name], after.get(name)) for name in before if before[name] != after.get(name)]


def write_record(folder: Path, record: dict[str, Any], logs: dict[str, bytes]) -> None:
    """Write ``folder``/config.json and replace the logs by ``logs``, all at once.

    Raises ``UserError`` when the disk refuses; everything is then unchanged.
    """
    try:
        write_all(folder, {"config.json": json_text(record).encode(), **logs})
        for name in set(LOGS) - set(logs):
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"run.folder: cannot write {error.filename or folder} ({error.strerror})") from error


def _git_commit() -> str | None:
    """Commit of the checkout this file lies in, with ``+changes`` where tracked files differ from it."""
    commit = _output("git", "-C", str(_ROOT), "rev-parse", "HEAD")
    # Without locks: a commit that somebody makes at this moment would fail.
    changes = _output("git", "--no-optional-locks", "-C", str(_ROOT), "status", "--porcelain", "--untracked-files=no")
    return f"{commit}+changes" if commit and changes else commit


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
