"""Checkpoints come back bit by bit, and no kill, damage or full disk costs the one before."""

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_cases import same

import files
import training.checkpoint as checkpoint
from errors import UserError
from training.checkpoint import CheckpointConfig, Checkpoints, Content, Loaded, rng_state, set_rng_state
from training.weights import read_checkpoint

EXTRA: dict[str, Any] = {"guard": {}, "seconds": 1.5, "data_digest": ""}
FILES = {"model.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json", "SHA256SUMS"}


def save(checkpoints: Checkpoints, step: int, **changes: Any) -> Path:
    contents: dict[str, Any] = {
        "model_state": {"weight": torch.full((3, 2), float(step))},
        "optimizer_state": {"state": {}, "param_groups": []},
        "scaler_state": {},
        "rng": [rng_state("cpu")],
        "position": step,
        "config_json": {},
        "extra": EXTRA,
    }
    return checkpoints.save(Content(step=step, **(contents | changes)))


def make(folder: Path, *steps: int, **config: Any) -> Checkpoints:
    checkpoints = Checkpoints(folder / "checkpoints", CheckpointConfig(**({"keep_last": 9} | config)))
    for step in steps:
        save(checkpoints, step)
    return checkpoints


def newest(checkpoints: Checkpoints) -> Loaded:
    loaded = checkpoints.load_newest()
    assert loaded is not None
    return loaded


def steps_in(checkpoints: Checkpoints) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in checkpoints.folder.glob("step_*"))


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_runs_folder_stands_for_its_newest_checkpoint(tmp_path: Path) -> None:
    """Steps have eight digits or more: their names in order are not the steps in order."""
    make(tmp_path, 99_999_999, 100_000_000)
    assert read_checkpoint(tmp_path).step == 100_000_000


def test_all_that_is_saved_comes_back(tmp_path: Path) -> None:
    """Of tensors a transposed view, none at all, two names of one: all that is ours, as the bits are safetensors'."""
    tensors = {"view": torch.randn(4, 6).T, "none": torch.empty(0, 3), "tied": (tied := torch.randn(3)), "again": tied}
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13 / 3)
    scaler.scale(torch.zeros(()))
    given: dict[str, Any] = {
        "scaler_state": scaler.state_dict(),
        "rng": [torch.arange(5, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8)],
        "position": 123,
        "config_json": {"optim": {"lr": 0.1 + 0.2, "betas": [0.9, 0.95]}, "names": ["ä"]},
        "extra": EXTRA | {"best": 1e-30, "skipped": [3, 4]},
    }
    path = save(checkpoints := make(tmp_path), 7, model_state=tensors, **given)
    loaded = newest(checkpoints)
    assert (loaded.path, loaded.step) == (path, 7)
    assert same(loaded.rng, given.pop("rng"))
    assert {key: getattr(loaded, key) for key in given} == given
    assert loaded.model_state.keys() == tensors.keys()
    assert all(torch.equal(loaded.model_state[name], tensor) for name, tensor in tensors.items())


def test_random_numbers_continue_where_they_were(device: torch.device) -> None:
    state = rng_state(device)
    expected = torch.rand(5, device=device), torch.rand(5)
    set_rng_state(state, device)
    assert torch.equal(torch.rand(5, device=device), expected[0])
    assert torch.equal(torch.rand(5), expected[1])


@pytest.mark.parametrize(
    ("damage", "file"),
    [*((flip_a_byte, file) for file in sorted(FILES)), (Path.unlink, "state.json"), (Path.unlink, "SHA256SUMS")],
)
def test_a_damaged_one_falls_back_and_names_both(
    tmp_path: Path, damage: Callable[[Path], None], file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = make(tmp_path, 1, 2)
    damage(checkpoints.folder / "step_00000002" / file)
    assert newest(checkpoints).step == 1
    warning = capsys.readouterr().err
    assert warning.startswith("warning: ")
    assert warning.count("\n") == 1
    assert str(checkpoints.folder / "step_00000001") in warning
    assert str(checkpoints.folder / "step_00000002") in warning


@pytest.mark.parametrize("file", sorted(FILES))
@pytest.mark.parametrize("reason", [errno.EACCES, errno.EIO, errno.EMFILE])
def test_one_that_cannot_be_read_may_be_intact_and_is_not_passed_over(
    tmp_path: Path, file: str, reason: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(tmp_path, 1, 2).folder / "step_00000002"

    def refuses(opened: Path, *mode: str) -> Any:
        if opened == path / file:
            raise OSError(reason, "not today", str(opened))
        return open(opened, *mode)

    monkeypatch.setattr(files, "open", refuses, raising=False)
    with pytest.raises(UserError, match=rf"^checkpoint {path} cannot be read \({file}: not today\)"):
        make(tmp_path).load_newest()


def test_unknown_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = make(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "FORMAT_VERSION", 99)
        save(checkpoints, 2)
    with pytest.raises(UserError, match="format_version 99"):
        checkpoints.load_newest()


def test_a_renamed_one_is_passed_over_and_no_save_deletes_it(tmp_path: Path) -> None:
    checkpoints = make(tmp_path, 1, 2, keep_last=2)
    os.rename(checkpoints.folder / "step_00000001", checkpoints.folder / "step_00000009")
    assert newest(checkpoints).step == 2
    save(checkpoints, 3)
    assert steps_in(checkpoints) == [2, 3, 9]


def test_every_nth_stays_for_good(tmp_path: Path) -> None:
    assert steps_in(make(tmp_path, *range(1, 12), keep_last=2, keep_every=4)) == [4, 8, 10, 11]


def test_of_damaged_ones_of_a_step_the_first_stays(tmp_path: Path) -> None:
    checkpoints = make(tmp_path, 1)
    for position in (7, 8):
        save(checkpoints, 2, position=position)
        checkpoints.set_aside(1)
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["damaged_step_00000002", "step_00000001"]
    assert json.loads((checkpoints.folder / "damaged_step_00000002/state.json").read_text())["position"] == 7


@pytest.mark.parametrize("file", sorted(FILES))
def test_a_full_disk_is_told_and_costs_no_other(tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = make(tmp_path, 1, 2)
    write = checkpoint._write

    def full(path: Path, content: Any) -> str:
        if path.name == file:
            path.write_bytes(b"12345")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, content)

    monkeypatch.setattr(checkpoint, "_write", full)
    with pytest.raises(UserError) as caught:
        save(checkpoints, 3)
    message = str(caught.value)
    assert "No space left on device" in message
    assert f"written to {checkpoints.folder}:" in message
    assert re.search(r"needs about \d+ bytes, \d+ are free", message)
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["step_00000001", "step_00000002"]


def test_files_have_the_modes_that_the_umask_allows(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        path = save(make(tmp_path), 1)
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o640}
