"""Checkpoints that are complete or absent: written aside, flushed, checksummed, renamed; no pickle.

``FOLDER/step_00001000/`` holds
    model.safetensors      parameters and buffers, tied ones once
    optimizer.safetensors  tensors named ``state.<index of the parameter>.<key>``
    rng.safetensors        ``rank.<r>``: that process's generator states
    state.json             step, sampler position, parameter groups, scaler, config, versions, names of tied tensors
    SHA256SUMS             of the four, for ``sha256sum -c`` too
A name that begins with a dot is work in progress (``.tmp``).
"""

import errno
import hashlib
import os
import platform
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as serialize
from torch import Tensor

from errors import UserError, check_size, on_disk, warn
from files import json_text, open_file, read_json, sha256_file, sync_folder

FORMAT_VERSION = 1
MODEL_FILE, OPTIMIZER_FILE = "model.safetensors", "optimizer.safetensors"
_FILES = (MODEL_FILE, OPTIMIZER_FILE, "rng.safetensors", "state.json")
_NEEDED = ("guard", "seconds", "data_digest")
"""What a resume reads from extra."""
_FOLDER = re.compile(r"step_(\d{8,})")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written and how long they are kept."""

    every: int = 1000
    """Optimizer steps from one checkpoint to the next; 0 writes one at the end only."""
    keep_last: int = 2
    """Number of newest checkpoints to keep."""
    keep_every: int = 0
    """Checkpoints of steps divisible by this are kept forever; 0 keeps none."""

    def __post_init__(self) -> None:
        for name, least in (("every", 0), ("keep_last", 1), ("keep_every", 0)):
            check_size(f"checkpoint.{name}", getattr(self, name), least)


@dataclass(frozen=True, kw_only=True)
class Content:
    """What a checkpoint holds. The dicts but those of tensors are plain JSON."""

    step: int
    model_state: dict[str, Tensor]
    optimizer_state: dict[str, Any]
    """A torch optimizer's ``state_dict()``."""
    scaler_state: dict[str, Any]
    rng: list[Tensor]
    """One ``rng_state()`` a process."""
    position: int
    config_json: dict[str, Any]
    extra: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Loaded(Content):
    """As ``Checkpoints.save`` got it, tensors on the CPU."""

    path: Path


class DamagedCheckpointError(UserError):
    """A checkpoint that changed after it was written, or that other code wrote."""


class Checkpoints:
    """The checkpoints of one run. One process saves; any number may load, also while it does."""

    def __init__(self, folder: Path, config: CheckpointConfig):
        self.folder = folder
        self.config = config

    def save(self, content: Content, *, prune: bool = True) -> Path:
        """Write a checkpoint, then (``prune``) delete what the policy no longer keeps; returns its folder.

        Raises ``UserError`` where the disk refuses; the half-written one is then gone.
        """
        step, (model, tied) = content.step, _untied(content.model_state)
        tensors, optimizer_rest = _split_optimizer(content.optimizer_state)
        state = {
            "format_version": FORMAT_VERSION,
            "step": step,
            "position": content.position,
            "processes": len(content.rng),
            "tied": tied,
            "optimizer": optimizer_rest,
            "scaler": content.scaler_state,
            "config": content.config_json,
            "extra": content.extra,
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
        }
        generators = {f"rank.{rank}": value for rank, value in enumerate(content.rng)}
        parts = {MODEL_FILE: model, OPTIMIZER_FILE: tensors, "rng.safetensors": generators}
        aside = self.folder / f".{_name(step)}.tmp"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            sync_folder(self.folder.parent)
            self.clear()
            aside.mkdir()
            sums = {name: _write(aside / name, _serialized(part)) for name, part in parts.items()}
            sums["state.json"] = _write(aside / "state.json", json_text(state).encode())
            _write(aside / "SHA256SUMS", "".join(f"{digest}  {name}\n" for name, digest in sums.items()).encode())
            sync_folder(aside)
            path = self.folder / _name(step)
            os.rename(aside, path)
            sync_folder(self.folder)
        except BaseException as error:
            shutil.rmtree(aside, ignore_errors=True)
            if isinstance(error, OSError):
                needed = sum(tensor.nbytes for part in parts.values() for tensor in part.values())
                raise self._refused(step, needed, error) from error
            raise
        if prune:
            self.prune()
        return path

    def load_newest(self) -> Loaded | None:
        """The newest intact checkpoint, or None where there is none at all.

        Every file's SHA-256 is verified. Damaged ones are passed over, with a warning on stderr that names both. Raises ``UserError``
        where all are damaged, and for one that cannot be read: it may be intact.
        """
        damaged: list[str] = []
        for _, path in sorted(found_in(self.folder).items(), reverse=True):
            try:
                loaded = Checkpoints.load(path)
            except DamagedCheckpointError as damage:
                damaged.append(str(damage))
                continue
            for line in damaged:
                warn(f"{line}; falling back to {path}")
            return loaded
        if damaged:
            raise UserError("no intact checkpoint: " + "; ".join(damaged) + "; start a new run or restore one of them")
        return None

    def how_to_resume(self) -> str:
        if found := found_in(self.folder):
            return f"the newest checkpoint is {found[max(found)]}; the same command with --run.resume yes goes on from there"
        return "there is no checkpoint yet; the same command with --run.resume yes starts again"

    @staticmethod
    def load(path: Path) -> Loaded:
        """The checkpoint in folder ``path``.

        Raises ``UserError`` where it is damaged, cannot be read, or is of a format that this code does not know.
        """
        try:
            if (damage := _damage(path)) is not None:
                raise DamagedCheckpointError(f"checkpoint {path} is damaged ({damage})")
            loaded = _read(path)
        except UserError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, FileNotFoundError, SafetensorError) as error:
            what = f"its sums are right, and it cannot be read: {type(error).__name__}: {str(error)[:200]}"
            raise DamagedCheckpointError(f"checkpoint {path} is damaged ({what})") from error
        except OSError as error:  # it may be intact
            what = f"{Path(error.filename or path).name}: {error.strerror or error}"
            raise UserError(f"checkpoint {path} cannot be read ({what}): mend that, or move it away") from error
        match = _FOLDER.fullmatch(path.name)
        if match and int(match[1]) != loaded.step:
            raise DamagedCheckpointError(f"checkpoint {path} is of step {loaded.step} by its contents: it was renamed")
        return loaded

    def clear(self) -> None:
        """Remove what a killed save or deletion left. Loading does not: the folder may be another, living process's."""
        for path in self.folder.glob(".step_*.tmp"):
            shutil.rmtree(path, ignore_errors=True)

    def set_aside(self, newest: int) -> None:
        """Rename the damaged ones behind step ``newest``, which a resume has passed over: whoever looks for the last one finds that. Of
        each step the first stays."""
        for step, path in found_in(self.folder).items():
            aside = path.with_name(f"damaged_{path.name}")
            if step > newest and aside.exists():
                shutil.rmtree(path)
            elif step > newest:
                os.rename(path, aside)

    def prune(self) -> None:
        """Delete what the policy no longer keeps."""
        found = {step: path for step, path in found_in(self.folder).items() if _step_inside(path) in (step, None)}
        kept = sorted(found)[-self.config.keep_last :]
        for step, path in found.items():
            for_good = self.config.keep_every > 0 and step % self.config.keep_every == 0
            if not (step in kept or for_good):
                # Renamed first, so that a kill in between leaves no incomplete checkpoint.
                doomed = self.folder / f".{_name(step)}.tmp"
                os.rename(path, doomed)
                shutil.rmtree(doomed, ignore_errors=True)

    def _refused(self, step: int, needed: int, error: OSError) -> UserError:
        """The error for a save that ``error`` stopped."""
        existing = next(folder for folder in (self.folder, *self.folder.parents) if folder.exists())
        free = shutil.disk_usage(existing).free
        return UserError(
            f"checkpoint of step {step} could not be written to {self.folder}: {error.strerror or error} "
            f"(it needs about {needed} bytes, {free} are free)"
        )


def found_in(folder: Path) -> dict[int, Path]:
    """Step -> folder of each checkpoint. Raises ``UserError`` where the folder cannot be read."""
    with on_disk(folder, "be read"):
        paths = [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    return {int(match[1]): path for path in paths if (match := _FOLDER.fullmatch(path.name))}


def _step_inside(path: Path) -> int | None:
    try:
        step = read_json(path / "state.json")["step"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return step if type(step) is int else None


def _name(step: int) -> str:
    return f"step_{step:08d}"


def _serialized(tensors: dict[str, Tensor]) -> bytes:
    # Not safetensors' own file: that knows no umask, and has an error of the disk in words only.
    return serialize({name: tensor.detach().contiguous() for name, tensor in tensors.items()})


def _write(path: Path, content: bytes) -> str:
    """Write and flush a file; returns its SHA-256. Raises ``OSError`` when the disk refuses."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(content).hexdigest()


def _untied(model_state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each stored tensor once, and which further names are the same tensor: (first name -> tensor, other -> first)."""
    first: dict[tuple[object, ...], str] = {}
    kept: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    for name, tensor in model_state.items():
        # An empty tensor has no storage to share.
        place = (tensor.data_ptr() or name, tensor.dtype, tensor.shape, tensor.stride())
        if first.setdefault(place, name) == name:
            kept[name] = tensor
        else:
            tied[name] = first[place]
    return kept, tied


def _split_optimizer(state_dict: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A torch optimizer's state as (tensors by name, plain JSON for the rest)."""
    states = state_dict["state"].items()
    tensors = {f"state.{index}.{key}": tensor for index, entries in states for key, tensor in entries.items()}
    return tensors, {"param_groups": state_dict["param_groups"]}


def _joined_optimizer(tensors: dict[str, Tensor], rest: dict[str, Any]) -> dict[str, Any]:
    """The inverse of ``_split_optimizer``. JSON has no tuples: a group's become lists, which torch takes."""
    state: dict[int, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        _, index, key = name.split(".", 2)
        state.setdefault(int(index), {})[key] = tensor
    return {"state": state, "param_groups": rest["param_groups"]}


def written_sums(path: Path) -> dict[str, str]:
    """File -> SHA-256 when the checkpoint ``path`` was written. Raises ``OSError``, and ``UnicodeDecodeError`` for what is no text."""
    with open_file(path / "SHA256SUMS") as file:
        lines = file.read().decode().splitlines()
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


def _damage(path: Path) -> str | None:
    """What is wrong with its files. Raises ``OSError`` where one is there and cannot be read."""
    try:
        sums = written_sums(path)
        if set(sums) != set(_FILES):
            return "SHA256SUMS does not list its files"
        for name in _FILES:
            if sha256_file(path / name) != sums[name]:
                return f"the SHA-256 of {name} differs"
    except UnicodeDecodeError:
        return "SHA256SUMS is no text"
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EINVAL):  # missing, or not a file
            raise
        return f"{Path(error.filename or path).name}: {error.strerror}"
    return None


def _read(path: Path) -> Loaded:
    state = read_json(path / "state.json")
    if state.get("format_version") != FORMAT_VERSION:
        raise UserError(
            f"checkpoint {path} has format_version {state.get('format_version')!r}: this code reads {FORMAT_VERSION}"
        )
    kinds: dict[str, type] = dict.fromkeys(("step", "position", "processes"), int)
    kinds |= dict.fromkeys(("tied", "scaler", "config", "extra"), dict)
    if wrong := [name for name, kind in kinds.items() if type(state[name]) is not kind]:
        raise TypeError(f"{wrong[0]} of state.json is of type {type(state[wrong[0]]).__name__}")
    if missing := [name for name in _NEEDED if name not in state["extra"]]:
        raise ValueError(f"extra of state.json has no {missing[0]}")
    model = _tensors(path / MODEL_FILE)
    rng = _tensors(path / "rng.safetensors")
    return Loaded(
        path=path,
        step=state["step"],
        model_state=model | {name: model[first] for name, first in state["tied"].items()},
        optimizer_state=_joined_optimizer(_tensors(path / OPTIMIZER_FILE), state["optimizer"]),
        scaler_state=state["scaler"],
        rng=[rng[f"rank.{rank}"] for rank in range(state["processes"])],
        position=state["position"],
        config_json=state["config"],
        extra=state["extra"],
    )


def _tensors(path: Path) -> dict[str, Tensor]:
    """A safetensors file's tensors, copied out of the file's mapping: they must outlive the file."""
    return {name: tensor.clone() for name, tensor in load_file(path).items()}


def rng_state(device: torch.device | str) -> Tensor:
    """Torch's CPU generator state, followed by the CUDA device's where ``device`` is one: 1-D uint8 on the CPU.

    Python's and NumPy's global generators are not in it: nothing here draws from them.
    """
    states = [torch.get_rng_state()]
    if torch.device(device).type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return torch.cat(states)


def set_rng_state(state: Tensor, device: torch.device | str) -> None:
    """The inverse of ``rng_state``. Raises ``UserError`` for a state of another type of device."""
    sizes = [torch.get_rng_state().numel()]
    if torch.device(device).type == "cuda":
        sizes.append(torch.cuda.get_rng_state(device).numel())
    if state.numel() != sum(sizes):
        raise UserError(
            f"the checkpoint's random state has {state.numel()} bytes, {torch.device(device).type} takes {sum(sizes)}: "
            "resume on the type of device that the run was started on"
        )
    parts = state.cpu().split(sizes)
    torch.set_rng_state(parts[0].clone())
    if len(parts) > 1:
        torch.cuda.set_rng_state(parts[1].clone(), device)
