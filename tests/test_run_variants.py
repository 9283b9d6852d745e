"""scripts/run_variants.py: several runs at once, one stopped behind its explosion, the others seen through."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import ROOT, Place, changed, column, lines, start_train, weights

import config
import train
from scripts import run_variants
from scripts.run_variants import Variant
from training.alarm import AlarmConfig
from training.run import Run


def start(place: Place, *arguments: str) -> None:
    recipe = str(place.preset_file(place.config("recipe")))
    logs = ["--logs", str(place.folder / "logs"), "--every", "0.2"]
    run_variants.main([recipe, *arguments, *logs])


@pytest.mark.slow
def test_a_run_that_explodes_is_stopped_and_the_others_end(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    flags = "--optim.lr 1e4 --optim.grad-clip 0 --nonfinite.policy continue --run.steps 100000 --checkpoint.every 0"
    start(place, "--variants", "quiet", f"wild: {flags}", "--slots", "2", "--after", "5", "--run.log-every", "1")
    said = capsys.readouterr().out
    assert "quiet  ended at step 19" in said
    assert "wild   exploded at step" in said
    assert "stopped at step" in said
    start_train([str(place.preset_file(place.config("alone")))])
    assert column(place.runs / "quiet", "train_loss") == column(place.runs / "alone", "train_loss")
    again = lines(place.runs / "quiet")
    start(place, "--variants", "quiet", "--resume")
    assert "quiet  ended at step 19" in capsys.readouterr().out
    assert lines(place.runs / "quiet") == again


def test_a_run_killed_before_its_last_checkpoint_is_seen_to_its_end(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All steps are measured; the last evaluation and checkpoint are not made."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    straight = place.train("whole")
    config = place.config("cut", {"run.steps": 20})
    validate = train.validate

    def dying(run: Run) -> float:
        if run.batches.position == 20:
            raise OSError("the machine is gone")
        return validate(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "validate", dying)
        with pytest.raises(OSError, match="the machine is gone"):
            train.train(config)
    cut = place.runs / "cut"
    assert lines(cut)[-1]["step"] == 19
    start(place, "--variants", "cut", "--resume")
    assert "cut  ended at step 19" in capsys.readouterr().out
    assert lines(cut) == lines(straight)
    assert weights(cut, 20) == weights(straight, 20)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--variants", "a", "a"], "each name once"),
        (["--variants", "a: --optim.lr fast"], "optim.lr"),
        (["--variants", "a: --attention.default.preset flsh"], "attention preset = 'flsh'"),
        ([], "--variants"),
    ],
)
def test_what_cannot_be_is_told_before_anything_starts(place: Place, arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as stop:
        start(place, *arguments)
    assert stop.value.code == 2
    assert not (place.runs / "a").exists()


# ---- which GPU a run sees


@pytest.mark.parametrize(
    ("listed", "slots", "seen"),
    [
        ("", [], ["0", "1"]),
        ("4,5", [], ["4", "5"]),
        ("GPU-a1, GPU-b2", [], ["GPU-a1", "GPU-b2"]),
        ("4,5", ["1"], ["4"]),
    ],
)
def test_a_run_is_started_on_a_visible_gpu(
    place: Place, monkeypatch: pytest.MonkeyPatch, listed: str, slots: list[str], seen: list[str]
) -> None:
    given: list[str] = []

    def noted(self: Variant, gpu: str, logs: Path) -> None:
        given.append(gpu)
        self.process = subprocess.Popen([sys.executable, "-c", ""])

    monkeypatch.setattr(Variant, "start", noted)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    monkeypatch.setattr(run_variants.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(run_variants.torch.cuda, "device_count", lambda: 2)
    start(place, "--variants", "first", "second", "--run.device", "auto", *(["--slots", *slots] if slots else []))
    assert set(given) == set(seen)
    assert len(given) == 2


# ---- runs that an alarm stops


def test_a_run_that_its_alarm_stopped_has_not_failed(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    touchy = AlarmConfig(response="stop", growth_exponent=0.1, growth_logit=0.0, growth_probes=1, warm_up=0)
    fields = {"alarm": touchy, "telemetry.every": 3, "precision.dtype": "bfloat16"}
    recipe = str(place.preset_file(changed(place.config("touchy"), fields)))
    arguments = [recipe, "--variants", "alarmed", "--logs", str(place.folder / "logs"), "--every", "0.2"]
    run_variants.main(arguments)
    step = lines(place.runs / "alarmed")[-1]["step"]
    assert f"alarmed: stopped by its alarm at step {step}\n" in capsys.readouterr().out


# ---- Ctrl-C

# Where the tests themselves run in the background of a script, a child would begin with SIGINT ignored.
POLITE, DEAF = (
    f"import signal, time; signal.signal(signal.SIGINT, signal.{way}); print(flush=True); time.sleep(60)"
    for way in ("SIG_DFL", "SIG_IGN")
)


@pytest.mark.parametrize(("program", "ending"), [(POLITE, signal.SIGINT), (DEAF, signal.SIGTERM)])
def test_an_interrupt_ends_the_runs_and_is_one_line(
    place: Place, program: str, ending: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def interrupted(queue: list[Variant], args: argparse.Namespace, gpus: list[str]) -> None:
        queue[0].process = subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        started.append(queue[0].process)
        assert queue[0].process.stdout is not None
        queue[0].process.stdout.readline()
        raise KeyboardInterrupt

    monkeypatch.setattr(run_variants, "PATIENCE_FOR_AN_END", 1.0)
    monkeypatch.setattr(run_variants, "run", interrupted)
    with pytest.raises(SystemExit) as stop:
        start(place, "--variants", "a")
    assert stop.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert started[0].wait(timeout=10) == -ending


# ---- what is asked for


def test_every_variant_of_the_reproduction_is_understood(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    recording = ["--data.replay", "replay_batches/fast_failure", "--run.folder", str(tmp_path)]
    arguments = ["configs/fast_failure.py", *recording, "--variants", "@configs/reproduction.txt"]
    made = run_variants.variants(*run_variants.parse(arguments))
    assert len(made) == len({variant.name for variant in made}) > 30
    assert len({str(config.load(variant.arguments).attention) for variant in made}) > 15
