"""The record of a run: its resolved configuration and everything else that decides its numbers, in runs/NAME/config.json."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from errors import UserError
from files import write_json

_PACKAGES = ("torch", "triton", "numpy", "safetensors", "tyro", "wandb")


def environment(device: torch.device, world_size: int) -> dict[str, Any]:
    """Versions, commit and hardware as JSON values; absent packages are None."""
    versions: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    hardware = {"type": device.type, "name": platform.processor() or platform.machine(), "processes": world_size}
    # On a CPU the number of threads decides in which order sums are taken, and so the last bits.
    hardware |= {"threads": torch.get_num_threads()}
    if device.type == "cuda":
        hardware |= {"name": torch.cuda.get_device_name(device), "driver": _driver()}
    return {"versions": versions, "git_commit": _git_commit(), "device": hardware}


def taken(folder: Path) -> UserError:
    """What to tell somebody whose new run would go where another one is."""
    return UserError(f"run.name = {folder.name!r}: {folder} exists; choose another name, or --run.resume to go on")


def make_folder(folder: Path) -> None:
    """Make a new run's folder. Raises ``UserError`` when it cannot be made, or when a run that started meanwhile made it."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise taken(folder) from None
    except OSError as error:
        raise UserError(f"run.folder: cannot make {folder} ({error.strerror})") from error


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Write ``folder``/config.json, aside and renamed. Raises ``UserError`` when the disk takes it not."""
    try:
        write_json(folder / "config.json", record)
    except OSError as error:
        raise UserError(f"run.folder: cannot write {folder / 'config.json'} ({error.strerror})") from error


def _git_commit() -> str | None:
    """Commit of the checkout this file lies in, with ``+changes`` where tracked files differ from it."""
    root = Path(__file__).resolve().parent.parent
    commit = _output("git", "-C", str(root), "rev-parse", "HEAD")
    changes = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return f"{commit}+changes" if commit and changes else commit


def _driver() -> str | None:
    return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
