"""Signals, and other ends of a run: how its processes end, and what exit.json says."""

import contextlib
import errno
import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from tiny_runs import ROOT, Place, before_each_step, command, completed, environment, lines, make_data

import train
from errors import UserError
from training import checkpoint
from training.run import Run
from training.signals import EXIT_RESUME

AUTO = {"run.resume": "auto"}


def outcome_of(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / "exit.json").read_text())
    return content


# ---- one process


ENDS: dict[str, tuple[Any, int, int, int]] = {
    "SIGTERM": (signal.SIGTERM, EXIT_RESUME, 14, 14),
    "SIGUSR1": (signal.SIGUSR1, EXIT_RESUME, 14, 14),
    "SIGHUP": (signal.SIGHUP, EXIT_RESUME, 14, 14),
    "Ctrl-C": (KeyboardInterrupt, 130, 13, 10),
    "crash": (RuntimeError, 1, 13, 10),
    "finished": (None, 0, 20, 20),
}


@pytest.mark.parametrize("name", ENDS)
def test_exit_json_has_the_code_and_the_last_checkpoint(place: Place, name: str, monkeypatch: Any) -> None:
    end, code, step, checkpoint = ENDS[name]

    def at_13(run: Run, at: int) -> None:
        assert not (run.folder / "exit.json").exists()
        if at == 13 and isinstance(end, signal.Signals):
            signal.raise_signal(end)
        elif at == 13 and end:
            raise end

    before_each_step(monkeypatch, at_13)
    before = signal.getsignal(signal.SIGTERM)
    with contextlib.suppress(BaseException):
        place.train(name)
    assert signal.getsignal(signal.SIGTERM) == before  # who has called goes on
    run = place.runs / name
    left = outcome_of(run)
    assert (left["code"], left["step"]) == (code, step)
    assert left["checkpoint"] == str(run / f"checkpoints/step_{checkpoint:08d}")


def test_exit_json_says_of_a_full_disk_what_stderr_says(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(checkpoint, "_write", Mock(side_effect=full))
    said = r"^checkpoint of step 10 could not be written to .*\nthere is no checkpoint yet; "
    with pytest.raises(UserError, match=said) as refused:
        place.train("full_disk")
    assert outcome_of(place.runs / "full_disk")["reason"] == f"UserError: {refused.value}"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_asked_to_exit_unbuilt_it_says_start_again(place: Place, number: signal.Signals) -> None:
    name = f"start_{number.name}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "open_run", lambda *_: signal.raise_signal(number))
        with pytest.raises(SystemExit) as exit_:
            place.train(name, AUTO)
    assert exit_.value.code == outcome_of(place.runs / name)["code"] == EXIT_RESUME
    assert len(lines(place.train(name, {**AUTO, "run.steps": 2}))) == 3


def test_a_mistake_at_the_first_start_is_said_where_a_scheduler_looks_and_nowhere_else(place: Place) -> None:
    """With run.resume auto. The start that follows takes the folder."""
    mistake = {"data.dataset": "nowhere"}
    for resume in ("no", "yes", "auto"):
        with pytest.raises(UserError, match=r"nowhere|a checkpoint in"):
            place.train("mistaken", {**mistake, "run.resume": resume})
        assert (place.runs / "mistaken").exists() == (resume == "auto")
    assert outcome_of(place.runs / "mistaken")["code"] == 2
    assert outcome_of(place.train("mistaken", {**AUTO, "run.steps": 1}))["code"] == 0
    finished = (place.runs / "mistaken/exit.json").read_text()
    with pytest.raises(UserError, match="exists"):
        place.train("mistaken")
    assert (place.runs / "mistaken/exit.json").read_text() == finished


def test_a_resume_that_is_refused_keeps_the_step(place: Place) -> None:
    run = place.train("refused", {"run.steps": 5})
    for _ in range(2):
        with pytest.raises(UserError, match=r"^optim\.lr = 0\.5"):
            place.train("refused", {"run.resume": "yes", "optim.lr": 0.5})
        assert (outcome_of(run)["code"], outcome_of(run)["step"]) == (2, 5)


def run_alone(script: str) -> subprocess.CompletedProcess[str]:
    # SIGINT is ignored in what a shell starts with &.
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return completed([sys.executable, "-c", f"import signal; from training import signals\n{script}"], preexec_fn=heard)


@pytest.mark.parametrize(("number", "code"), [("SIGTERM", 75), ("SIGUSR1", 75), ("SIGHUP", 75), ("SIGINT", 130)])
def test_a_signal_while_torch_is_imported_ends_at_once_with_the_code_of_a_later_one(number: str, code: int) -> None:
    script = f"signals.exit_while_importing(); signal.raise_signal(signal.{number})"
    assert run_alone(script).returncode == code


def test_ctrl_c_at_the_first_own_import_is_no_traceback() -> None:
    script = """
import runpy, sys

class Interrupts:
    def find_spec(name, *_):
        if name == "errors":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupts)
runpy.run_path("train.py", run_name="__main__")
"""
    done = run_alone(script)
    assert (done.returncode, done.stderr) == (130, "")


def test_a_second_signal_ends_at_once_if_it_is_not_the_first_one_handed_on() -> None:
    script = """
with signals.PreemptionHandler() as preemption:
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    print(preemption.requested, flush=True)
    signals.ONE_REQUEST = 0.0
    signal.raise_signal(signal.SIGTERM)
    print("never")
"""
    done = run_alone(script)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "True\n")


def test_a_signal_after_the_silence_is_no_error_of_a_pipe() -> None:
    script = """
import threading
signals.SILENCE, silent = 0.01, threading.Event()
with signals.PreemptionHandler() as preemption:
    preemption.on_silence = lambda number: (print(number, flush=True), silent.set())
    signal.raise_signal(signal.SIGTERM)
    silent.wait()
    signal.raise_signal(signal.SIGTERM)
"""
    done = run_alone(script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "15\n", "")


@pytest.mark.parametrize("number", ["SIGTERM", "SIGUSR1", "SIGHUP"])
def test_a_second_signal_while_the_interpreter_ends_does_not_change_the_code(number: str) -> None:
    script = f"""
with signals.PreemptionHandler(leaving=True):
    signal.raise_signal(signal.SIGTERM)
signal.raise_signal(signal.{number})
raise SystemExit(signals.EXIT_RESUME)
"""
    assert run_alone(script).returncode == EXIT_RESUME


# ---- two processes under torchrun

HELD = """
import os, pytest, sys, time, train
from pathlib import Path
from tiny_runs import before_each_step

marks = Path(os.environ["MARKS"])

def mark(rank):
    (marks / f"{rank}.tmp").write_text(str(os.getpid()))
    os.rename(marks / f"{rank}.tmp", marks / str(rank))

def at_the_start(config, dist):
    mark(dist.rank)
    for _ in range(3000):
        time.sleep(0.02)

def slowly(run, step):
    if step == 2:
        mark(run.dist.rank)
    time.sleep(0.02)

if os.environ["PHASE"] == "start":
    train.open_run = at_the_start
else:
    before_each_step(pytest.MonkeyPatch(), slowly)
train.main()
"""


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


class Held:
    """A run of two processes, held at the start or slowed down in the loop."""

    def __init__(self, place: Place, tmp_path: Path, name: str, phase: str, fields: dict[str, Any], *launch: str):
        (tmp_path / "held.py").write_text(HELD)
        config = place.config(name, {"run.resume": "auto", "run.steps": 10**5, "data.micro_batch": 2, **fields})
        line = command(tmp_path / "held.py", [str(place.preset_file(config))], 2)
        line[line.index("--standalone") : line.index("--standalone")] = launch
        self.run, self.marks = place.runs / name, tmp_path / "marks"
        self.marks.mkdir()
        known = environment() | {"PHASE": phase, "MARKS": str(self.marks)}
        self.output = tmp_path / "output"
        with open(self.output, "w") as output:
            self.launcher = subprocess.Popen(line, env=known, stdout=output, stderr=output, start_new_session=True)
        self._until(lambda: all((self.marks / rank).exists() for rank in "01"), 120)
        self.ranks = [int((self.marks / rank).read_text()) for rank in "01"]

    def _until(self, done: Any, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < end, self.output.read_text()
            time.sleep(0.05)

    def send(self, number: signal.Signals, to: str) -> None:
        launcher = self.launcher.pid
        for pid in {"rank 1": self.ranks[1:], "launcher": [launcher], "everybody": [*self.ranks, launcher]}[to]:
            os.kill(pid, number)

    def left(self) -> int | None:
        """The code in exit.json after all processes have ended; None where there is none."""
        try:
            self.launcher.wait(60)
            self._until(lambda: not any(map(alive, self.ranks)), 60)
        finally:
            for pid in self.ranks:
                if alive(pid):
                    os.kill(pid, signal.SIGKILL)
            self.launcher.kill()
        return outcome_of(self.run)["code"] if (self.run / "exit.json").exists() else None


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("phase", "number", "to", "code"),
    [
        ("loop", signal.SIGKILL, "launcher", EXIT_RESUME),
        ("loop", signal.SIGTERM, "rank 1", EXIT_RESUME),
        ("loop", signal.SIGTERM, "launcher", EXIT_RESUME),
        ("loop", signal.SIGHUP, "rank 1", EXIT_RESUME),
        ("loop", signal.SIGINT, "everybody", 130),
        ("start", signal.SIGINT, "everybody", 130),
    ],
)
def test_a_signal_ends_all_processes_and_exit_json_says_how(
    place: Place, tmp_path: Path, phase: str, number: signal.Signals, to: str, code: int | None
) -> None:
    held = Held(place, tmp_path, f"{phase}_{number.name}_{to.replace(' ', '_')}", phase, {})
    held.send(number, to)
    assert held.left() == code, held.output.read_text()


@pytest.mark.slow
def test_a_process_that_does_not_answer_ends_the_run_and_names_a_checkpoint(place: Place, tmp_path: Path) -> None:
    held = Held(place, tmp_path, "silent", "loop", {"run.timeout": 5.0, "checkpoint.every": 2})
    held.send(signal.SIGSTOP, "rank 1")
    assert held.left() == 1
    assert "the newest checkpoint is" in held.output.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("stopped", "number", "code"), [(0, signal.SIGTERM, 1), (1, signal.SIGUSR1, EXIT_RESUME)])
def test_asked_to_exit_while_a_process_is_stopped_a_run_names_its_last_checkpoint_and_ends_with_torchrun(
    place: Place, tmp_path: Path, stopped: int, number: signal.Signals, code: int
) -> None:
    fields = {"run.timeout": 300.0, "checkpoint.every": 2}
    launch = ("--shutdown-timeout=15", "--signals-to-handle=SIGTERM,SIGUSR1")
    held = Held(place, tmp_path, f"stopped_{stopped}", "loop", fields, *launch)
    os.kill(held.ranks[stopped], signal.SIGSTOP)
    time.sleep(1)
    held.send(number, "launcher")
    assert held.left() == code
    assert "if it is killed now: the newest checkpoint is" in held.output.read_text()
    assert Path(outcome_of(held.run)["checkpoint"]).is_dir()


OTHERWISE = """
import os, sys, train
from errors import UserError
from training import distributed
start = distributed.start

def refused(*arguments):
    if os.environ["RANK"] == "1":
        raise UserError("no GPU of its own")
    return start(*arguments)

if sys.argv.pop() == "no GPU of its own":
    distributed.start = refused
elif os.environ["RANK"] == "1":
    sys.argv += ["--data.dataset", sys.argv[1].replace("told.py", "other")]
train.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("case", ["no GPU of its own", "the same data and checkpoint for every process"])
def test_a_mistake_that_another_rank_finds_is_not_start_me_again(place: Place, tmp_path: Path, case: str) -> None:
    make_data(place.folder / "other", seed=1)
    (tmp_path / "otherwise.py").write_text(OTHERWISE)
    preset = place.preset_file(place.config("told", {**AUTO, "data.micro_batch": 2}))
    assert completed(command(tmp_path / "otherwise.py", [str(preset), case], 2)).returncode == 1
    left = outcome_of(place.runs / "told")
    assert left["code"] == 2
    assert case in left["reason"]


@pytest.mark.slow
def test_torchrun_does_not_restart_a_mistake(place: Place) -> None:
    config = place.config("mistake", {"data.micro_batch": 2, "model.vocab_size": 128})
    line = command(ROOT / "train.py", [str(place.preset_file(config))], 2)
    line.insert(line.index("--standalone"), "--max-restarts=3")
    done = completed(line)
    assert done.returncode == 1
    assert done.stderr.count("error: model.vocab_size") in (1, 2)
