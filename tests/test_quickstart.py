"""The README's first command, less the installation: it ends with an explosion, three runs without, and a picture."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "quickstart.sh"


@pytest.mark.slow
@pytest.mark.timeout(800)
def test_quickstart_shows_the_explosion_and_its_cures(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ["bash", str(SCRIPT), "--python", sys.executable, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Data: identical" in done.stdout
    assert (out / "compare.png").stat().st_size > 20_000
    rows = {
        line.split(" | ")[0].strip("| "): line.split(" | ") for line in (out / "compare.md").read_text().splitlines()
    }
    header = rows["run"]
    stable = ("consistent", "delta_from_p", "standard")
    ended = {name: rows[name][header.index("ended")] for name in ("failing", *stable)}
    assert ended["failing"].startswith("exploded at ")
    for name in stable:
        assert ended[name].startswith("stable to "), name
    last = {name: json.loads((out / "runs" / name / "metrics.jsonl").read_text().splitlines()[-1]) for name in ended}
    for name in stable:
        assert last["failing"]["val_loss"] > last[name]["val_loss"] + 1
        assert last["failing"]["w_q_norm_max"] > 5 * last[name]["w_q_norm_max"]

    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert "holds an earlier quickstart" in again.stderr


@pytest.mark.parametrize("arguments", [["--pyton", "x"], ["--out"], ["--python", "/nope"]])
def test_unknown_options_are_one_line(arguments: list[str]) -> None:
    done = subprocess.run(["bash", str(SCRIPT), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
