"""The benchmark of scaling: its arithmetic on planted numbers, its watch over stand-ins for train.py, a true run of two processes."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import ROOT, TINY, Place, environment, new_place

from errors import UserError
from files import without_folders
from scripts import bench_scaling
from scripts.bench_scaling import Run, efficiency, measured, rate, summary, table


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with new_place(tmp_path_factory) as place:
        yield place


# ---- arithmetic


def test_a_rate_is_all_tokens_over_all_time_and_no_mean_of_rates() -> None:
    """Late values: one step seems to take no time, the next one twice as long."""
    seconds = [10.0, 10.001, 12.0, 12.001, 14.0]
    lines = [{"tokens": 100 * (i + 1), "seconds": s, "tokens_per_second": 1e5} for i, s in enumerate(seconds)]
    steps = rate(lines).pop("step_ms")
    assert rate(lines) == {"steps": 4, "tokens": 400, "seconds": 4.0, "tokens_per_second": 100.0, "step_ms": steps}
    assert steps == pytest.approx([1000 * (b - a) for a, b in itertools.pairwise(seconds)])


def planted(alone: list[float], **variants: float) -> dict[str, Any]:
    def of(value: float) -> dict[str, float]:
        return {"tokens_per_second": value}

    return {"alone": [of(a) for a in alone], "variants": {name: of(value) for name, value in variants.items()}}


ROUNDS = [
    planted([100.0, 80.0], plain=162.0, big=144.0),
    planted([110.0, 90.0], plain=170.0),
    planted([100.0, 100.0], plain=190.0),
]


def test_efficiency_is_of_the_same_rounds_sum_and_of_its_slowest() -> None:
    assert efficiency(ROUNDS[0], "plain") == {"of_sum": 162 / 180, "of_slowest": 162 / 160}


def test_the_summary_has_medians_and_ranges_over_rounds() -> None:
    rows = {row["name"]: row for row in summary(ROUNDS, {"big": "it fell over"})[:-1]}
    assert list(rows) == ["alone 0", "alone 1", "alone, sum", "plain", "big"]
    assert rows["alone 1"]["tokens_per_second"] == {"median": 90.0, "least": 80.0, "most": 100.0}
    assert rows["alone, sum"]["tokens_per_second"] == {"median": 200.0, "least": 180.0, "most": 200.0}
    assert rows["plain"]["of_sum"] == {"median": 0.9, "least": 0.85, "most": 0.95}
    assert (rows["plain"]["rounds"], rows["big"]["rounds"]) == (3, 1)


def test_the_table_says_what_failed_and_what_was_reached() -> None:
    lines = table(summary(ROUNDS, {"bad": "it fell over"})).splitlines()
    assert "90.0 % (85.0-95.0)" in next(line for line in lines if line.startswith("plain"))
    assert lines[-1].split() == ["bad", "failed:", "it", "fell", "over"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/root/place/recipe.py", "recipe.py"),
        ("data.dataset=/data/tokens/corpus", "data.dataset=corpus"),
        ("configs/fast_failure.py", "configs/fast_failure.py"),
        ("../nanoGPT/model.py", "../nanoGPT/model.py"),
        ("error: '/tmp/a/b' exists", "error: 'b' exists"),
    ],
)
def test_folders_of_the_machine_are_cut_off(text: str, expected: str) -> None:
    assert without_folders(text) == expected


# ---- the watch over runs

WRITER = """
import json, sys, time
from pathlib import Path
folder, delay, pause = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
time.sleep(delay)
folder.mkdir()
with open(folder / "metrics.jsonl", "a", buffering=1) as file:
    for step in range(10_000):
        time.sleep(pause)
        file.write(json.dumps({"step": step, "tokens": 10 * (step + 1), "seconds": time.monotonic()}) + "\\n")
"""


def run_of(folder: Path, name: str, code: str, *arguments: Any) -> Run:
    return Run(
        name,
        [sys.executable, "-S", "-c", code, str(folder / name), *map(str, arguments)],
        {},
        folder / name,
        folder / f"{name}.err",
    )


def commands_with(text: Path) -> list[bytes]:
    """Command lines of the processes that name a file there."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes())
        except OSError:
            continue  # it has just ended
    return [command for command in found if bytes(text) in command]


def test_runs_are_timed_while_all_of_them_train(tmp_path: Path) -> None:
    early, late = run_of(tmp_path, "early", WRITER, 0, 0.01), run_of(tmp_path, "late", WRITER, 1.0, 0.02)
    first, second = measured([early, late], skip=5, steps=25, seconds=30)
    # The early one was far beyond step 5 when the other one came to it.
    lines = [json.loads(line) for line in (tmp_path / "early/metrics.jsonl").read_text().splitlines()]
    began = next(line["seconds"] for line in lines if line["step"] == 5)
    other = json.loads((tmp_path / "late/metrics.jsonl").read_text().splitlines()[5])["seconds"]
    assert other > began + 0.5
    assert first["seconds"] == pytest.approx(second["seconds"], abs=0.3)
    assert min(first["steps"], second["steps"]) >= 20
    assert first["tokens_per_second"] > 1.5 * second["tokens_per_second"]


@pytest.mark.parametrize("own_session", [False, True])
def test_runs_are_over_when_they_are_timed(tmp_path: Path, own_session: bool) -> None:
    """What they have started, too, wherever it is: this parent ends without a word to its child, as a killed torchrun does."""
    child = f"[sys.executable, '-S', '-c', 'import time; time.sleep(60)', sys.argv[1]], start_new_session={own_session}"
    run = run_of(tmp_path, "parent", f"import subprocess, sys\nsubprocess.Popen({child})\n{WRITER}", 0, 0.01)
    measured([run], skip=0, steps=5, seconds=30)
    assert commands_with(run.folder) == []


def test_a_run_that_never_gets_there_is_ended_after_its_time(tmp_path: Path) -> None:
    slow, stuck = run_of(tmp_path, "fine", WRITER, 0, 0.01), run_of(tmp_path, "stuck", WRITER, 60, 0.01)
    began = time.monotonic()
    with pytest.raises(UserError, match=r"^stuck: --run-seconds were over after 0 of 6 steps: it said nothing$"):
        measured([slow, stuck], skip=5, steps=25, seconds=1)
    assert time.monotonic() - began < 20
    assert all(run.process is not None and run.process.returncode is not None for run in (slow, stuck))


def test_a_run_that_does_not_hear_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_scaling, "PATIENCE_FOR_AN_END", 0.5)
    run = run_of(tmp_path, "deaf", "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WRITER, 0, 0.01)
    measured([run], skip=0, steps=5, seconds=30)
    assert run.process is not None
    assert run.process.returncode == -9


def test_a_run_that_fails_says_its_last_words_and_takes_the_others_along(tmp_path: Path) -> None:
    fine = run_of(tmp_path, "fine", WRITER, 0, 0.01)
    broken = run_of(tmp_path, "broken", "import sys; print('step 1'); sys.exit('first\\nthe disk is full')")
    with pytest.raises(
        UserError, match=r"^broken: ended by itself after 0 steps, exit code 1: first \| the disk is full \| step 1$"
    ):
        measured([fine, broken], skip=5, steps=25, seconds=30)
    assert fine.process is not None
    assert fine.process.returncode is not None


def test_last_words_are_those_of_the_process_and_not_torchruns(tmp_path: Path) -> None:
    run = run_of(tmp_path, "run", "")
    report = "W1 torch/distributed/elastic/multiprocessing/api.py:1] Sending\nE1 x] failed (exitcode: 2)\nTraceback"
    run.log.with_suffix(".out").write_text("")
    run.log.write_text(f"error: optim.lr = 0\n{report}\n")
    assert run.last_words() == "error: optim.lr = 0"


# ---- the command line


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        bench_scaling.main(arguments)
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "--processes"),
        ("--processes 0", "--processes = 0: expected at least 1"),
        ("--processes 2 --steps 30", "--steps = 30: expected at least 31"),
        ("--processes 2 --rounds 0", "--rounds = 0: expected at least 1"),
        ("--processes 2 --variants a a", "each name once"),
        ("--processes 2 --variants alone", "each name once, and not alone"),
        ("--processes 2 --variants a=speed.overlap", "--variants = 'speed.overlap': expected section.field=value"),
        ("--processes 2 --variants a=speed.overlap=yes", "expected true or false"),
        ("--processes 2 --variants a=speed.bucket_mb=0", "speed.bucket_mb = 0: expected a whole number of 1 or more"),
        ("--processes 2 --variants a=speed.exchange=flat", "invalid choice 'flat'"),
        ("--processes 2 --variants a=speed.exchange=in_place,speed.bucket_mb=50", "speed.bucket_mb = 50: expected 25"),
        ("--processes 2 --set speed.bucket=3", "speed.bucket = '3': expected one of"),
        ("--processes 2 --set overlap", "--set = 'overlap': expected section.field=value"),
        ("--processes 2 --json /nowhere/at/all.json", "--json /nowhere/at/all.json: cannot write it"),
    ],
)
def test_bad_input_is_one_line(place: Place, capsys: pytest.CaptureFixture[str], arguments: str, said: str) -> None:
    recipe = str(place.preset_file(place.config("recipe")))
    assert said in refused([recipe, *arguments.split()], capsys)


def test_more_processes_than_gpus_are_refused(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    recipe = str(place.preset_file(place.config("on_gpus", {"run.device": "cuda"})))
    said = refused([recipe, "--processes", "3"], capsys)
    assert "--processes = 3: expected at most 2, the GPUs of this host" in said


# ---- what is known at any time


@pytest.fixture
def stand_ins(place: Place, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[str]:
    """Arguments for ``main``, which then measures stand-ins for train.py; the variants named ``hangs`` never take a step."""

    def alone(bench: bench_scaling.Bench, number: int) -> list[Run]:
        return [run_of(bench.folder, f"alone-{gpu}-{number}", WRITER, 0, 0.002) for gpu in range(bench.args.processes)]

    def together(bench: bench_scaling.Bench, name: str, number: int) -> list[Run]:
        return [run_of(bench.folder, f"{name}-{number}", WRITER, 1000 if name == "hangs" else 0, 0.002)]

    monkeypatch.setattr(bench_scaling.Bench, "alone", alone)
    monkeypatch.setattr(bench_scaling.Bench, "together", together)
    monkeypatch.setattr(bench_scaling, "machine_of", lambda folders: {"runs": len(folders)})
    monkeypatch.setattr(bench_scaling, "LOOK_EVERY", 0.02)
    name = request.node.name
    recipe = str(place.preset_file(place.config(re.sub(r"\W", "_", name))))
    return [recipe, "--processes", "2", "--steps", "10", "--skip", "2", "--json", str(place.folder / f"{name}.json")]


def known(path: str | Path) -> tuple[bool, list[list[str]], list[str]]:
    """Of a JSON: whether it is complete, the variants of each round, the names of the rows."""
    content = json.loads(Path(path).read_text())
    return content["complete"], [list(r["variants"]) for r in content["rounds"]], [r["name"] for r in content["rows"]]


ALONE = ["alone 0", "alone 1", "alone, sum"]


def test_the_json_is_rewritten_after_every_measurement(stand_ins: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    write = bench_scaling.write

    def seen(path: Path, **content: Any) -> None:
        write(path, **content)
        written.append(known(path))

    monkeypatch.setattr(bench_scaling, "write", seen)
    bench_scaling.main([*stand_ins, "--rounds", "2", "--variants", "plain", "other"])
    names = ["plain", "other"]
    assert written == [
        (False, [], []),
        (False, [[]], ALONE),
        (False, [names[:1]], [*ALONE, "plain"]),
        (False, [names], [*ALONE, *names]),
        (False, [names, []], [*ALONE, *names]),
        (False, [names, names[:1]], [*ALONE, *names]),
        (True, [names, names], [*ALONE, *names]),
    ]


def test_the_json_has_what_is_known_where_a_variant_hangs(stand_ins: list[str]) -> None:
    """Its time is over; the variants before and behind it are there."""
    limits = ["--rounds", "1", "--run-seconds", "2"]
    with pytest.raises(SystemExit):
        bench_scaling.main([*stand_ins, *limits, "--variants", "plain", "hangs", "other"])
    assert known(stand_ins[-1]) == (True, [["plain", "other"]], [*ALONE, "plain", "other", "hangs"])


@pytest.fixture
def heard() -> Iterator[None]:
    """Signals end this process where they are not caught, also where it was started in the background or under nohup."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}
    yield
    for number in numbers:
        signal.signal(number, before[number])


def end_once(ready: Callable[[], bool], number: signal.Signals) -> threading.Thread:
    """A thread that sends this process a signal once it is time for it."""

    def watch() -> None:
        deadline = time.monotonic() + 30
        while not ready() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_json_has_what_is_known_where_the_script_is_told_to_end(
    stand_ins: list[str], number: signal.Signals
) -> None:
    """In the middle of a variant that hangs: what was measured before it is there already while it does, and stays."""
    path = Path(stand_ins[-1])
    during = []

    def ready() -> bool:
        during[:] = [known(path)] if path.exists() else []
        return bool(during) and during[0][1] == [["plain"]]

    thread = end_once(ready, number)
    with pytest.raises(SystemExit) as ended:
        bench_scaling.main([*stand_ins, "--rounds", "1", "--variants", "plain", "hangs"])
    thread.join()
    assert ended.value.code == 128 + number
    assert [*during, known(path)] == 2 * [(False, [["plain"]], [*ALONE, "plain"])]


def test_a_signal_while_a_run_is_started_leaves_none_behind(
    stand_ins: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes when the second process is there and nobody has noted its number yet."""
    started: list[Any] = []

    class Told(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            started.append(self)
            if len(started) == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(subprocess, "Popen", Told)
    with pytest.raises(SystemExit) as ended:
        bench_scaling.main(stand_ins)
    codes = [process.poll() for process in started]
    for process in started:
        process.kill()
    assert (ended.value.code, codes) == (143, [-signal.SIGTERM, -signal.SIGTERM])


def test_a_signal_while_runs_are_ended_leaves_none_behind(tmp_path: Path) -> None:
    """It comes when the first is told to end, and is obeyed when both are over."""
    code = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: (os.kill(os.getppid(), signal.SIGTERM), time.sleep(0.3), sys.exit()))\n"
    )
    runs = [run_of(tmp_path, "first", code + WRITER, 0, 0.01), run_of(tmp_path, "second", WRITER, 0, 0.01)]
    request = bench_scaling.Request()
    with request.listening():
        measured(runs, skip=0, steps=5, seconds=30, look=request.obey)
        assert [run.process.returncode for run in runs if run.process is not None] == [0, -signal.SIGTERM]
        with pytest.raises(SystemExit):
            request.obey()


def test_a_signal_between_two_measurements_starts_no_other_run(
    stand_ins: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    together: list[str] = []
    write = bench_scaling.write

    def told(path: Path, **content: Any) -> None:
        write(path, **content)
        if content["rounds"]:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(bench_scaling, "write", told)
    monkeypatch.setattr(bench_scaling.Bench, "together", lambda bench, name, number: together.append(name) or [])
    with pytest.raises(SystemExit) as ended:
        bench_scaling.main(stand_ins)
    assert (ended.value.code, together) == (143, [])


def test_an_ignored_signal_stays_ignored() -> None:
    """SIGHUP under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with bench_scaling.Request().listening():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


# ---- a true run


@pytest.fixture(scope="module")
def bench(place: Place) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Two processes, a variant that train.py refuses before one that is fine; what was said, and the JSON."""
    recipe = str(place.preset_file(place.config("scaled", {"checkpoint.every": 1, "telemetry.every": 1})))
    arguments = [recipe, "--processes", "2", "--rounds", "1", "--steps", "12", "--skip", "2", "--set", "data.seed=5"]
    arguments += ["--variants", "bad=speed.late_values=true", "plain", "--json", str(place.folder / "scaling.json")]
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/bench_scaling.py"), *arguments],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=200,
    )
    return done, json.loads((place.folder / "scaling.json").read_text())


@pytest.mark.slow
def test_two_processes_are_measured_beside_two_alone(bench: tuple[Any, dict[str, Any]]) -> None:
    done, content = bench
    assert [row["name"] for row in content["rows"]] == ["alone 0", "alone 1", "alone, sum", "plain", "bad"]
    ((alone, plain),) = [(one["alone"], one["variants"]["plain"]) for one in content["rounds"]]
    tokens = TINY.data.global_batch * TINY.data.sequence_length
    assert [one["tokens"] for one in alone] == [tokens * one["steps"] for one in alone]
    assert plain["tokens"] == 2 * tokens * plain["steps"]
    assert min(one["steps"] for one in (*alone, plain)) >= 10
    assert content["complete"] is True
    assert [device["processes"] for device in content["machine"]["devices"]] == [1, 1]
    assert "\nplain " in done.stdout


@pytest.mark.slow
def test_a_variant_that_fails_is_told_and_the_others_go_on(bench: tuple[Any, dict[str, Any]]) -> None:
    done, content = bench
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: bad failed: bad-0: ended by itself after 0 steps")
    assert "error: optim.fused = 'auto'" in last
    assert "elastic" not in last
    assert [list(one["variants"]) for one in content["rounds"]] == [["plain"]]


@pytest.mark.slow
def test_no_run_is_left_behind(place: Place, bench: tuple[Any, dict[str, Any]]) -> None:
    assert commands_with(place.folder) == []


@pytest.mark.slow
def test_no_run_is_left_behind_by_one_that_is_told_to_end(place: Place) -> None:
    recipe = str(place.preset_file(place.config("ended")))
    command = [sys.executable, str(ROOT / "scripts/bench_scaling.py"), recipe, "--processes", "2", "--steps", "100000"]
    with subprocess.Popen(command, env=environment(), stderr=subprocess.DEVNULL) as process:
        try:
            for _ in range(600):
                if len(commands_with(Path(recipe))) == 3:
                    break
                time.sleep(0.1)
            else:
                pytest.fail("its runs have not started")
            process.terminate()
            assert process.wait(timeout=90) == 143
        finally:
            process.kill()
    assert commands_with(Path(recipe)) == []


@pytest.mark.slow
def test_the_json_has_no_folder_of_the_machine(bench: tuple[Any, dict[str, Any]]) -> None:
    _, content = bench
    assert content["command"][1] == "scaled.py"
    assert content == json.loads(without_folders(json.dumps(content)))
