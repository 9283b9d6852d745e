"""attention/watching/verdict.py: the table of docs/diagnosis.md, on made-up records."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from attention.watching.verdict import answer
from errors import UserError


def record(step: int, logit: float, **columns: list[float]) -> dict[str, Any]:
    """Two layers of two heads; the second has the logit and the columns."""
    columns = {"dq_error": [0.1, 0.1], **columns}
    return {"step": step, "clock": step, "max_logit": [[1.0, 1.0], [logit, logit]]} | {
        name: [[0.0, 0.0], values] for name, values in columns.items()
    }


def without_gradients(step: int, *, layer: int | None = None) -> dict[str, Any]:
    """Of no layer, or not of one."""
    found = record(step, 50.0)
    if layer is None:
        del found["dq_error"]
    else:
        found["dq_error"][layer] = None
    return found


RUNS_AWAY = [record(step, (step / 100) ** 4) for step in range(100, 1001, 100)]


@pytest.mark.parametrize(
    ("records", "first"),
    [
        ([record(0, 50.0), record(100, 90.0), record(200, 90.0)], "NO"),
        ([record(0, 50.0), record(100, 90.0), record(200, 90.0), record(300, math.nan)], "UNCLEAR"),
        ([record(0, 50.0), record(199, 90.0), record(200, 90.0), record(201, math.nan)], "NO"),
        ([record(0, 50.0), record(100, 1e5), record(200, 50.0)], "UNCLEAR"),
        ([record(step, 50.0, dq_error=[0.1, 5.0 if step < 3 else 0.1]) for step in range(4)], "SUSPECT"),
        ([record(0, 50.0, dq_error=[0.8, 0.8])], "SUSPECT"),
        ([record(0, 50.0, dq_error=[0.1, 2.0], delta_error=[1e-7, 1e-3])], "SUSPECT"),
        ([record(0, 50.0, dq_error=[0.1, 2.0], delta_error=[1e-7, 1e-7])], "UNCLEAR"),
        (RUNS_AWAY, "SUSPECT"),
        ([record(0, 50.0, nan_made=[0.0, 1.0]), record(100, math.nan)], "KERNEL"),
        ([without_gradients(step) for step in range(5)], "UNCLEAR"),
        ([without_gradients(step, layer=0) for step in range(5)], "UNCLEAR"),
        ([without_gradients(0), *(record(step, 50.0) for step in (1, 2, 3))], "NO"),
        ([record(step, 50.0) | {"hidden": 1} for step in range(5)], "UNCLEAR"),
    ],
)
def test_a_watched_run_is_judged_by_the_table_of_the_diagnosis(records: list[dict[str, Any]], first: str) -> None:
    assert answer(records)[0].split(":")[0] == first


@pytest.mark.parametrize(("layers", "name"), [({}, 1), ({"layers": [3, 7]}, 7)])
def test_the_layer_that_ran_away_is_named_with_its_step(layers: dict[str, list[int]], name: int) -> None:
    # Past 500 first at (step / 100)^4 with step 500; two looks must agree.
    assert answer([one | layers for one in RUNS_AWAY])[1] == f"Layer {name} ran away at step 600."


def test_layers_that_come_and_go_and_files_of_two_runs_are_refused() -> None:
    fewer = record(100, 1.0)
    fewer["max_logit"].pop()
    with pytest.raises(UserError, match=r"\{0: 2, 1: 2\} at step 0 and \{0: 2\} at step 100"):
        answer([record(0, 1.0), fewer])
    with pytest.raises(UserError, match="step 0 follows step 100; expected a file of its own"):
        answer([record(0, 1.0), record(100, 1.0), record(0, 1.0)])


def test_the_command_says_the_verdict_or_exits_with_2(tmp_path: Path) -> None:
    path = tmp_path / "watch.jsonl"
    path.write_text('{"step": 0, "clock": 0, "max_logit": [["nan"]]}\n')
    for arguments, code, words in (([str(path)], 0, "UNCLEAR: no record has finite logits"), ([], 2, "usage: ")):
        command = [sys.executable, "-m", "attention.watching", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
        assert done.returncode == code
        assert (done.stderr if code else done.stdout).startswith(words)
        assert len(done.stderr.splitlines()) == bool(code)
