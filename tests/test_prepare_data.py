"""scripts/prepare_data.py: the command line, and what a kill leaves."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data.token_files import TokenFile

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "prepare_data.py"


def run(*arguments, cwd):
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "some.words.txt"
    path.write_text("a\n<|endoftext|>\nb\n")
    return path


def bytes_options(text):
    return ["text", text, "--vocabulary", "bytes", "--val-fraction", "0.5", "--workers", "1"]


def test_text_goes_to_the_default_place_under_its_own_name(tmp_path, text):
    result = run(*bytes_options(text), cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert TokenFile.open(tmp_path / "data/tokens/some", "train").tokens.tobytes() == b"a\0"


@pytest.fixture
def half_way(tmp_path):
    """A run that has written tokens and waits for more text: its source is a pipe kept open."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    command = [sys.executable, str(SCRIPT), "text", str(pipe), "--vocabulary", "bytes", "--workers", "2", "--name", "a"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    with open(pipe, "wb", buffering=0) as feed:
        # More than is encoded at once, so that some of it was written.
        feed.write((b"word " * 1000 + b"\n<|endoftext|>\n") * 2000)
        written = tmp_path / "data/tokens/.a.partial/a/train.bin"
        wait_for(lambda: written.exists() and written.stat().st_size > 0)
        yield process
    process.kill()
    process.communicate()


def wait_for(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_run_after_a_killed_one_is_whole_and_clears_its_rest(tmp_path, half_way, text):
    half_way.kill()
    half_way.wait()
    result = run(*bytes_options(text), "--name", "a", cwd=tmp_path)
    assert result.returncode == 0
    assert [path.name for path in (tmp_path / "data/tokens").iterdir()] == ["a"]
    assert TokenFile.open(tmp_path / "data/tokens/a", "val", verify="sha256").tokens.tobytes() == b"b\0"


@pytest.mark.parametrize("number", [signal.SIGTERM])
def test_interrupted_run_clears_what_it_began(tmp_path, half_way, number):
    half_way.send_signal(number)
    assert half_way.wait(timeout=20) == 128 + number
    assert list((tmp_path / "data/tokens").iterdir()) == []
