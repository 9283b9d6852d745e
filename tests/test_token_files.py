"""data/token_files.py"""

import itertools
import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from data.token_files import TokenFile, TokenWriter, new_dataset
from errors import UserError

FACTS = {"dtype": "uint16", "vocabulary": "gpt2", "vocabulary_size": 50257, "source": "a test"}


def write(folder, split="train", tokens=(1, 2, 50256), **changes):
    with TokenWriter(folder, split, **{**FACTS, **changes}) as writer:
        writer.write(np.array(tokens))
    return writer


def edit_header(folder, **changes):
    path = folder / "train.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_signed_token_beyond_the_vocabulary_is_refused(tmp_path):
    write(tmp_path)
    edit_header(tmp_path, vocabulary_size=50256)
    with pytest.raises(UserError, match="token 50256 in a vocabulary of 50256"):
        TokenFile.open(tmp_path, "train", verify="sha256")


@pytest.mark.parametrize("token", [-1, 50257, 65536 + 5])
def test_token_outside_the_vocabulary_is_refused_and_leaves_nothing(tmp_path, token):
    with pytest.raises(ValueError, match="in a vocabulary of 50257"), new_dataset(tmp_path / "a") as staging:
        write(staging, tokens=[0, token])
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "train.json").unlink(), r"train.json: no such header"),
        (lambda folder: (folder / "train.bin").unlink(), r"train.bin: no such file"),
        (lambda folder: os.truncate(folder / "train.bin", 4), "4 bytes, its header says 6"),
    ],
)
def test_what_is_not_there_is_told(tmp_path, damage, message):
    write(tmp_path)
    damage(tmp_path)
    with pytest.raises(UserError, match=message):
        TokenFile.open(tmp_path, "train")


def replaced_until(at: int, folder: Path) -> int:
    """Replace the data set, in a process that is killed at its change number ``at`` of a folder; its exit code."""
    child = os.fork()
    if child == 0:
        changes = itertools.count(1)

        def kill(event: str, arguments: tuple[object, ...]) -> None:
            if event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir") and next(changes) == at:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(kill)
        with new_dataset(folder, force=True) as staging:
            write(staging, tokens=(7, 8))
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_wherever_a_replacement_is_killed_the_old_or_the_new_data_set_is_whole(tmp_path):
    for at in itertools.count(1):
        parent = tmp_path / str(at)
        write(parent / "a")
        code = replaced_until(at, parent / "a")
        where = parent / "a" if (parent / "a").exists() else parent / ".a.old"
        assert TokenFile.open(where, "train", verify="sha256").tokens.tolist() in ([1, 2, 50256], [7, 8])
        if where.name == ".a.old":
            with pytest.raises(UserError, match=r"its replacement was cut off; go on with .*\.a\.old, or"):
                TokenFile.open(parent / "a", "train")
        assert replaced_until(0, parent / "a") == 0
        assert names(parent) == ["a"]
        if code == 0:
            break
    assert at > 5


def test_force_spares_a_folder_of_other_files(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"'notes.txt', no token file"), new_dataset(tmp_path, force=True):
        pass
    assert (tmp_path / "notes.txt").read_text() == "mine"
