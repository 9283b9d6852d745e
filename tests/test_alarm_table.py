"""scripts/alarm_table.py on made-up runs: who exploded, who warned when, who was accused for nothing."""

from __future__ import annotations

import csv
import itertools
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from test_docs import ROOT

from analysis.report_files import as_csv, read_csv
from scripts import alarm_rows, alarm_table

WARM_UP, EVERY, STEPS = 100, 50, 4000


def write_run(
    folder: Path,
    *,
    grows_from: int | None = None,
    explodes_at: int | None = None,
    logit: float = 600.0,
    planned: int = STEPS,
    unstable_from: int = STEPS,
) -> Path:
    """A run of 2 layers with 2 heads: layer 1, head 0 grows like clock^6 from a step on; the loss jumps by 2 nats at another, the gradient
    norm at a third."""
    folder.mkdir(parents=True)
    with open(folder / "metrics.jsonl", "w") as out:
        for step in range(STEPS):
            loss = 3.0 + 0.01 * math.sin(step) + (2.0 if explodes_at is not None and step >= explodes_at else 0.0)
            norm = 0.5 if step < unstable_from else 30.0
            out.write(json.dumps({"step": step, "train_loss": loss, "grad_norm": norm}) + "\n")
    with open(folder / "telemetry.jsonl", "w") as out:
        for step in range(0, STEPS, EVERY):
            clock = max(step - WARM_UP / 2, 1.0)
            factor = max(1.0, clock / (grows_from - WARM_UP / 2)) ** 6 if grows_from else 1.0
            norms = [[1.0, 1.0], [factor, 1.0]]
            entry: dict[str, Any] = {
                "step": step,
                "lr_sum": clock,
                "w_q_norm": [1.0, factor**0.5],
                "qk_head_norm": norms,
                "max_logit": [[logit * value for value in row] for row in norms],
                "top_1": [[1 - 0.5 / value for value in row] for row in norms],
                "delta_error_mean": [[0.0, 0.0], [0.0, 0.0]],
                "delta_error_se": [[1.0, 1.0], [1.0, 1.0]],
                "delta_rms": [[1.0, 1.0], [1.0, 1.0]],
            }
            out.write(json.dumps(entry) + "\n")
    content = {"config": {"optim": {"warmup_steps": WARM_UP}, "run": {"steps": planned}}, "attention_name": "flash"}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    failing = write_run(tmp_path / "failing", grows_from=1000, explodes_at=3000)
    stable = write_run(tmp_path / "stable")
    accused = write_run(tmp_path / "accused", grows_from=2000)
    return [str(folder) for folder in (stable, failing, accused)]


def table(tmp_path: Path, runs: list[str], *options: str) -> dict[str, dict[str, str]]:
    out = tmp_path / "table.csv"
    alarm_table.main([*runs, "--out", str(out), *options])
    with open(out) as file:
        return {row["run"]: row for row in csv.DictReader(file)}


def test_explosion_warning_and_false_alarms(
    tmp_path: Path, runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = table(tmp_path, runs)
    assert {name: row["exploded_at"] for name, row in rows.items()} == {"failing": "3000", "stable": "", "accused": ""}
    # The sixth power over a window of which half must have grown: 1.3^3, and two probes.
    assert 1000 < int(rows["failing"]["growth"]) <= 1300
    assert rows["failing"]["growth_names"] == "layer 1, heads 0"
    assert rows["stable"]["growth"] == rows["stable"]["max_logit"] == rows["stable"]["loss"] == ""
    printed = capsys.readouterr().out
    warning = 3000 - int(rows["failing"]["growth"])
    assert f"growth: warned of 1 of 1 explosions, {warning} to {warning} steps ahead (median {warning})" in printed
    assert "; false alarms in 1 of 2 stable runs." in printed
    assert f"| {rows['failing']['growth']} ({warning}) |" in printed
    assert f"**{rows['accused']['growth']}** (false)" in printed


def test_the_loss_alone_warns_when_it_is_too_late(tmp_path: Path, runs: list[str]) -> None:
    assert table(tmp_path, runs)["failing"]["loss"] == "3000"


def test_the_largest_logit_alone_is_a_threshold(tmp_path: Path, runs: list[str]) -> None:
    rows = table(tmp_path, runs, "--max-logit", "1000")
    # 600 * ((c / 950)^6) passes 1000 at c = 950 * (10 / 6)^(1/6) = 1034, at the probe of step 1100.
    assert rows["failing"]["max_logit"] == "1100"
    assert table(tmp_path, runs, "--max-logit", "599")["stable"]["max_logit"] == "0"


def test_thresholds_can_be_tried(tmp_path: Path, runs: list[str]) -> None:
    assert table(tmp_path, runs, "--exponent", "7")["failing"]["growth"] == ""
    assert table(tmp_path, runs, "--logit", "1e9")["failing"]["growth"] == ""


def test_a_run_that_ends_in_the_excursion_is_neither(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    late = write_run(tmp_path / "late", grows_from=1000, explodes_at=3900)
    alarm_table.main([str(late)])
    printed = capsys.readouterr().out
    assert "too soon to tell" in printed
    assert "warned of 0 of 0 explosions; false alarms in 0 of 0 stable runs" in printed


def test_an_alarm_in_a_run_that_was_cut_is_not_called_false(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alarm_table.main([str(write_run(tmp_path / "cut", grows_from=2000, planned=2 * STEPS))])
    printed = capsys.readouterr().out
    assert "| no, cut |" in printed
    assert "(false)" not in printed
    assert "false alarms in 0 of 0 stable runs; alarms in 1 of 1 cut or unstable." in printed


def test_an_alarm_in_a_run_that_came_to_its_end_unstable_is_not_called_false(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One high gradient norm among ordinary ones does not make it so, and the table can be read again."""
    write_run(tmp_path / "unstable", grows_from=2000, unstable_from=2900)
    write_run(tmp_path / "cut", grows_from=2000, unstable_from=2900, planned=2 * STEPS)
    write_run(tmp_path / "single", grows_from=2000, unstable_from=STEPS - 1)
    out = tmp_path / "table.md"
    alarm_table.main([str(tmp_path / "unstable"), str(tmp_path / "single"), "--scan", "--out", str(out)])
    printed = capsys.readouterr().out
    assert "| unstable | flash | 3999 | no, unstable | 2" in printed
    assert "| single | flash | 3999 | no | **2" in printed
    assert (
        "growth: warned of 0 of 0 explosions; false alarms in 1 of 1 stable runs; alarms in 1 of 1 cut or unstable."
        in printed
    )
    rows = alarm_rows.kept(out, alarm_table.settings(alarm_table.parse(["-"])))
    assert {row.name: row.is_stable for row in rows} == {"unstable": False, "single": True}
    assert "| 0.5 | 500 | 0 of 0 | - | 1 of 1 | 1 of 1 |" in printed
    found = table(tmp_path, [str(tmp_path / name) for name in ("unstable", "single", "cut")])
    assert {name: row["too_soon_to_tell"] for name, row in found.items()} == {
        "unstable": "1",
        "single": "0",
        "cut": "1",
    }
    alarm_table.main([str(tmp_path / "cut")])
    assert "| cut | flash | 3999 | no, cut | 2" in capsys.readouterr().out
    args = alarm_table.parse(["-"])
    ends = [alarm_table.read_run(tmp_path / name, args) for name in ("unstable", "single", "cut")]
    assert [run.is_unstable for run in ends] == [True, False, False]


def _lose_the_end(run: Path, logs: Path, last: int) -> None:
    """Metrics and telemetry end at step ``last``; what the run printed is whole."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    logs.mkdir()
    records = [json.loads(line) for line in lines]
    (logs / f"{run.name}.log").write_text(
        "".join(f"step {r['step']}  train_loss {r['train_loss']:.4g}\n" for r in records)
    )
    (run / "metrics.jsonl").write_text("\n".join(lines[: last + 1]) + "\n")
    probes = (run / "telemetry.jsonl").read_text().splitlines()[: last // EVERY + 1]
    (run / "telemetry.jsonl").write_text("\n".join(probes) + "\n")


def test_what_a_run_printed_stands_for_the_metrics_that_it_lost(tmp_path: Path) -> None:
    run = write_run(tmp_path / "failing", grows_from=1000, explodes_at=3000)
    whole = table(tmp_path, [str(run)])["failing"]
    _lose_the_end(run, tmp_path / "logs", last=3100)
    assert table(tmp_path, [str(run)])["failing"]["exploded_at"] == ""
    assert table(tmp_path, [str(run)], "--printed", str(tmp_path / "logs"))["failing"] == whole


def test_of_two_runs_that_printed_as_much_the_one_with_more_probes_counts(tmp_path: Path) -> None:
    short, longer = (write_run(tmp_path / name / "failing", grows_from=1000, explodes_at=3000) for name in ("a", "b"))
    _lose_the_end(short, tmp_path / "logs", last=500)
    for order in ([short, longer], [longer, short]):
        assert table(tmp_path, [*map(str, order)], "--printed", str(tmp_path / "logs"))["failing"]["growth"] != ""


def test_a_folder_stands_for_its_runs_and_the_longer_of_a_name_counts(
    tmp_path: Path, runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    old = write_run(tmp_path / "others" / "failing_lr2e-3", planned=2 * STEPS)
    lines = (old / "metrics.jsonl").read_text().splitlines()[: STEPS // 2]
    (old / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    probes = (old / "telemetry.jsonl").read_text().splitlines()[: STEPS // 2 // EVERY]
    (old / "telemetry.jsonl").write_text("\n".join(probes) + "\n")
    for order in ([str(old.parent), str(tmp_path)], [str(tmp_path), str(old.parent)]):
        rows = table(tmp_path, order)
        assert list(rows) == ["failing", "accused", "stable"]
        assert rows["failing"]["exploded_at"] == "3000"
        assert "failing: more than one run of that name; the longer counts, to step 3999" in capsys.readouterr().err


def test_the_scan_says_what_parts_the_runs(tmp_path: Path, runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    alarm_table.main([runs[0], runs[1], "--scan"])
    printed = capsys.readouterr().out
    # By step 2500 the failing head's logits are at 600 * (2450 / 950)^6; the last two probes are those of 2450 and 2500.
    passed = 600 * (2400 / 950) ** 6
    assert f"| largest logit | 600 (stable) | - | {passed:.4g} (failing) |" in printed
    assert "| 0.5 | 500 | 1 of 1 | 1750 | 0 of 1 | 0 of 0 |" in printed
    assert "| 0.5 | 10000 | 1 of 1 | " in printed


def test_the_evidence_is_a_line_a_probe(tmp_path: Path, runs: list[str]) -> None:
    alarm_table.main([*runs, "--thin", str(tmp_path / "thin")])
    with open(tmp_path / "thin" / "failing.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == STEPS // EVERY
    assert float(rows[-1]["qk_head_norm_1"]) > 1000 * float(rows[-1]["qk_head_norm_0"])
    assert [row["step"] for row in rows[:2]] == ["0", "50"]


def published(name: str) -> list[dict[str, Any]]:
    """Rows of a run of results/alarm/gpt2, with what its file leaves to results/fast_failure."""
    has = alarm_table.collected_probes(ROOT / "results/fast_failure", name)
    with (ROOT / f"results/alarm/gpt2/{name}.csv").open(newline="") as file:
        return [has[row["step"]] | row for row in read_csv(file)]


def test_what_is_collected_is_left_out(tmp_path: Path, runs: list[str]) -> None:
    """W_Q of both layers, the largest logit of layer 0; nothing of a run that is not there, or whose values are others."""
    columns = ["step", "delta_units", "w_q_norm_0", "w_q_norm_1", "max_logit_0"]
    for name, grows_from in (("failing", 1000), ("accused", 2001)):
        (tmp_path / "out" / name).mkdir(parents=True)
        made = write_run(tmp_path / "again" / name, grows_from=grows_from)
        probes = [json.loads(line) for line in (made / "telemetry.jsonl").read_text().splitlines()]
        cells = [
            {"step": one["step"], "delta_units": 8, "w_q_norm_0": one["w_q_norm"][0], "w_q_norm_1": one["w_q_norm"][1]}
            | {"max_logit_0": max(one["max_logit"][0])}
            for one in probes
        ]
        (tmp_path / "out" / name / "probes.csv").write_text(as_csv(columns, cells))
    alarm_table.main([*runs, "--thin", str(tmp_path / "whole")])
    alarm_table.main([*runs, "--thin", str(tmp_path / "thin"), "--collected", str(tmp_path / "out")])
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for folder, name in itertools.product(("whole", "thin"), ("failing", "accused", "stable")):
        with open(tmp_path / folder / f"{name}.csv", newline="") as file:
            rows[folder, name] = read_csv(file)
    assert rows["thin", "stable"] == rows["whole", "stable"]
    left = {name: rows["whole", name][0].keys() - rows["thin", name][0].keys() for name in ("failing", "accused")}
    assert left == {"failing": set(columns[2:]), "accused": {"w_q_norm_0", "max_logit_0"}}
    has = alarm_table.collected_probes(tmp_path / "out", "failing")
    for whole, thin in zip(rows["whole", "failing"], rows["thin", "failing"], strict=True):
        assert has[thin["step"]] | thin == pytest.approx(whole | {"delta_units": 8}, rel=1e-3)


def test_a_damaged_collected_file_is_told_in_one_line(
    tmp_path: Path, runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out" / "failing").mkdir(parents=True)
    (tmp_path / "out" / "failing" / "probes.csv").write_text("step,w_q_norm_0\n0,much\n")
    with pytest.raises(SystemExit):
        alarm_table.main([*runs, "--thin", str(tmp_path / "thin"), "--collected", str(tmp_path / "out")])
    said = f"error: {tmp_path}/out/failing/probes.csv: not what scripts/report.py collect writes\n"
    assert capsys.readouterr().err == said
    assert not (tmp_path / "thin").exists()


def test_a_published_file_lacks_nothing_that_is_not_collected() -> None:
    """Nor has it what is, but for two runs whose last probe lies behind their metrics."""
    for path in sorted((ROOT / "results/alarm/gpt2").glob("*.csv")):
        rows = published(path.stem)
        layers = range(24 if path.stem.startswith("gpt2_medium") else 12)
        names = [f"{name}_{i}" for i in layers for name in ("w_q_norm", "qk_head_norm", "max_logit", "half_logit")]
        assert all(row.keys() >= {"lr_sum", *names} for row in rows), path
        has = alarm_table.collected_probes(ROOT / "results/fast_failure", path.stem)
        with path.open(newline="") as file:
            own = set(next(csv.reader(file)))
        there = set.intersection(*(set(has[row["step"]]) for row in rows))
        assert own & there == {"step"}, path


def _reached(name: str, key: str, before: int = 10**9) -> float:
    """The most that a statistic of results/alarm/gpt2 had at two probes in a row, from the end of warm-up to step ``before``."""
    rows = [row for row in published(name) if 1000 <= row["step"] <= before]
    columns = [[row[f"{key}_{layer}"] for layer in range(12)] for row in rows]
    over = [max(v) / (statistics.median(v) if key == "w_q_norm" else 1.0) for v in columns]
    return max(min(pair) for pair in itertools.pairwise(over))


@pytest.mark.parametrize("key", ["max_logit", "half_logit", "w_q_norm"])
def test_the_run_that_took_off_late_was_like_a_quiet_one(key: str) -> None:
    """What docs/diagnosis.md says of run_a_seed_1, 500 steps before its explosion at 3,387, and of another failing run it does not."""
    quiet = ("delta_from_p", "delta_from_p_seed_1", "delta_from_p_seed_2", "fp32_o", "fp32_o_seed_1", "fp32_o_seed_2")
    quiet += ("run_b_seed_1", "run_c", "run_d")
    most = max(_reached(name, key) for name in quiet)
    assert _reached("run_a_seed_1", key, before=3387 - 500) < most < _reached("flash", key, before=5115 - 500)


def test_the_document_has_the_tables_that_were_published() -> None:
    root = Path(__file__).resolve().parent.parent
    document = (root / "docs/diagnosis.md").read_text()
    for name in ("microcosm", "gpt2"):
        text = (root / f"results/alarm/{name}.md").read_text()
        rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")][2:]
        assert rows
        assert f"<!-- report: alarm_{name} -->\n{text}<!-- /report -->" in document
        assert sorted(path.stem for path in (root / f"results/alarm/{name}").glob("*.csv")) == sorted(rows)


def test_a_run_without_a_loss_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "new")
    (run / "metrics.jsonl").write_text('{"step": 0, "val_loss": 1.0}\n')
    with pytest.raises(SystemExit):
        alarm_table.main([str(run)])
    assert "new: its metrics have no train_loss yet" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "no such run folder"),
        (["nowhere", "--collected", "no_folder"], "--collected no_folder: no such folder"),
        (["nowhere", "--printed", "no_logs"], "--printed no_logs: no such folder"),
        (["{folder}"], "no telemetry.jsonl in it"),
        (["{folder}", "--patience", "0"], "--patience"),
        (["{folder}", "--out", "x.png"], "--out"),
        ([], "the following arguments are required: runs"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "train_loss": 1.0}\n')
    with pytest.raises(SystemExit) as stopped:
        alarm_table.main([argument.format(folder=tmp_path) for argument in arguments])
    assert stopped.value.code == 2
    complaint = capsys.readouterr().err
    assert message in complaint
    assert complaint.count("\n") == 1
