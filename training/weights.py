"""Checkpoints as command lines name them: the folder of a checkpoint, or of a run, which means its newest."""

from pathlib import Path

import torch

from errors import UserError
from model import GPT
from training.checkpoint import Checkpoints, Loaded, found_in


def is_checkpoint(path: Path) -> bool:
    """Whether it is a checkpoint's folder or a run's, rather than weights from elsewhere."""
    return (path / "SHA256SUMS").is_file() or (path / "checkpoints").is_dir()


def read_checkpoint(path: Path) -> Loaded:
    """The checkpoint at ``path``; of a run's folder, the newest. Raises ``UserError`` for what is neither, and for a damaged one."""
    if not path.is_dir():
        there = ", ".join(sorted(one.name for one in path.parent.glob("step_*"))[-5:])
        expected = f"one of {there}" if there else "a checkpoint such as runs/NAME/checkpoints/step_00001000"
        raise UserError(f"{path}: no such folder; expected {expected}")
    if (path / "SHA256SUMS").is_file():
        return Checkpoints.load(path)
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    found = {step: one for step, one in found_in(folder).items() if (one / "SHA256SUMS").is_file()}
    if not found:
        raise UserError(f"{path}: no weights; expected a checkpoint such as runs/NAME/checkpoints/step_00001000")
    return Checkpoints.load(found[max(found)])


def load_weights(model: GPT, checkpoint: Loaded) -> None:
    """Fill the model. Raises ``UserError``, which names one tensor, where the checkpoint is of another shape."""
    expected, found = (
        {name: f"{list(t.shape)}" + (t.dtype != torch.float32) * f" of {t.dtype}" for name, t in state.items()}
        for state in (model.state_dict(), checkpoint.model_state)
    )
    misfits = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
    if misfits:
        name = misfits[0]
        has = f"has shape {found[name]}" if name in found else "is missing"
        wanted = f"expected {expected[name]}" if name in expected else "the config has no such layer"
        others = f" ({len(misfits)} tensors do not fit)" if len(misfits) > 1 else ""
        raise UserError(f"checkpoint {checkpoint.path}: weights do not fit its config: {name} {has}, {wanted}{others}")
    model.load_state_dict(checkpoint.model_state)
