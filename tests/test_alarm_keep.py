"""scripts/alarm_table.py --keep: runs added to a table and a scan whose own runs' logs are gone."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from prose import prose
from test_alarm_table import EVERY, STEPS, published, write_run
from test_docs import ROOT, table

from scripts import alarm_rows, alarm_scan, alarm_table
from training.alarm import AlarmConfig, alarms

NAMES = ("failing", "sooner", "never_warned", "quiet", "a_quiet_one", "accused", "cut", "late")
"""In ``quiet`` and ``a_quiet_one`` the largest logits are the same to four digits, and it is the second's that is larger."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "failing", grows_from=1000, explodes_at=3000)
    write_run(folder / "sooner", grows_from=900, explodes_at=1500)
    write_run(folder / "never_warned", explodes_at=2000, logit=300.0)
    write_run(folder / "quiet", logit=700.01)
    write_run(folder / "a_quiet_one", logit=700.02)
    write_run(folder / "accused", grows_from=2000, logit=60.0)
    write_run(folder / "cut", grows_from=2500, planned=2 * STEPS)
    write_run(folder / "late", grows_from=1200, explodes_at=3900)
    return folder


@pytest.fixture(scope="module")
def made(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of three of them, with its scan beside it."""
    out = tmp_path_factory.mktemp("made") / "table.md"
    make(runs, ("failing", "quiet", "cut"), out, "--scan")
    return out


def make(runs: Path, names: tuple[str, ...], out: Path, *options: str) -> tuple[str, str]:
    """The table and the scan of some runs."""
    thin = out.with_name("thin_" + out.stem)
    alarm_table.main([*(str(runs / name) for name in names), "--out", str(out), "--thin", str(thin), *options])
    scan = out.with_name(f"{out.stem}_scan.md")
    return out.read_text(), scan.read_text() if scan.is_file() else ""


def cut_at(run: Path, step: int) -> Path:
    """The run as it was when it had come to ``step``."""
    for name, count in (("metrics.jsonl", step + 1), ("telemetry.jsonl", step // EVERY + 1)):
        lines = (run / name).read_text().splitlines(keepends=True)
        (run / name).write_text("".join(lines[:count]))
    return run


@pytest.mark.parametrize(("first", "turn"), [(1, 1), (5, 1), (3, -1)])
def test_runs_added_give_the_table_of_all_at_once(runs: Path, tmp_path: Path, first: int, turn: int) -> None:
    names = NAMES[::turn]
    whole = make(runs, names, tmp_path / "whole.md", "--scan")
    old = tmp_path / "old.md"
    make(runs, names[:first], old, "--scan")
    added = make(runs, names[first:], tmp_path / "added.md", "--scan", "--keep", str(old))
    assert added == whole
    assert "Of these runs, to their last steps: a_quiet_one to 3999, accused to 3999, " in added[1]
    assert {path.stem for path in (tmp_path / "thin_added").iterdir()} == set(names[first:])
    # As CSV, and in its own place.
    as_csv = make(runs, names, tmp_path / "whole.csv")[0]
    assert make(runs, names[first:], tmp_path / "added.csv", "--keep", str(old))[0] == as_csv
    assert make(runs, names[first:], old, "--keep", str(old))[0] == whole[0]


def test_of_two_runs_that_print_the_same_value_it_is_the_same_that_is_named(runs: Path, tmp_path: Path) -> None:
    alike = ("quiet", "a_quiet_one")
    _, whole = make(runs, alike, tmp_path / "whole.md", "--scan")
    assert "| largest logit | 700 (quiet) |" in whole
    for first, second in (alike, alike[::-1]):
        out = tmp_path / f"{first}.md"
        make(runs, (first,), out, "--scan")
        assert make(runs, (second,), out, "--keep", str(out), "--scan")[1] == whole


@pytest.mark.parametrize(
    ("name", "options"), [("gpt2", []), ("microcosm", ["--patience", "50", "--lead", "100"])], ids=str
)
def test_a_run_is_added_to_a_published_table(runs: Path, tmp_path: Path, name: str, options: list[str]) -> None:
    published = ROOT / f"results/alarm/{name}.md"
    text, scan = make(runs, ("failing",), tmp_path / "new.md", "--scan", "--keep", str(published), *options)
    after, before = (
        [line for line in one.splitlines() if line.startswith("|")] for one in (text, published.read_text())
    )
    (new,) = (line for line in after if line.startswith("| failing |"))
    assert [line for line in after if line != new] == before
    counts = [re.search(r"growth: warned of (\d+) of (\d+)", one) for one in (published.read_text(), text)]
    had, now = ([int(count) for count in found.groups()] for found in counts if found)
    assert now == [count + 1 for count in had]
    scans = (alarm_table.scan_file(published).read_text(), scan)
    had, now = (
        list(map(int, re.findall(r"^\| 0\.5 \| 500 \| (\d+) of (\d+) ", one, re.MULTILINE)[0])) for one in scans
    )
    assert now == [count + 1 for count in had]


@pytest.mark.parametrize(("name", "lead"), [("gpt2", 500), ("microcosm", 100)])
def test_a_published_scan_is_of_the_runs_of_its_table(name: str, lead: int) -> None:
    rows = table(ROOT / f"results/alarm/{name}.md", "run")
    last = {row["run"]: int(row["last step"]) for row in rows}
    none = alarm_scan.scan([], AlarmConfig(), lead)
    scan = alarm_scan.kept(ROOT / f"results/alarm/{name}_scan.md", none, last)
    exploding = sum(row["exploded at step"].isdigit() for row in rows)
    stable = sum(row["exploded at step"] == "no" for row in rows)
    assert scan.sizes == (stable, len(rows) - exploding - stable, exploding)
    assert none.plus(scan) == scan


def test_of_a_run_in_the_table_the_longer_counts(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = cut_at(write_run(tmp_path / "runs/failing", grows_from=1000, explodes_at=3000), 2500)
    kept, whole = tmp_path / "kept.md", tmp_path / "whole.md"
    make(short.parent, ("failing",), kept)
    make(runs, ("cut",), kept, "--keep", str(kept))
    both, _ = make(runs, ("failing", "cut"), whole)
    assert make(runs, ("failing",), tmp_path / "longer.md", "--keep", str(kept))[0] == both != kept.read_text()
    capsys.readouterr()
    assert make(short.parent, ("failing",), tmp_path / "shorter.md", "--keep", str(whole))[0] == both
    assert capsys.readouterr().err == f"failing: its row in {whole} stays, to step 3999\n"
    assert not (tmp_path / "thin_shorter").exists()


def test_a_scan_that_a_run_was_not_added_to_says_so_and_takes_no_more(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "table.md"
    _, scan = make(runs, ("failing",), out, "--scan")
    assert make(runs, ("quiet",), out, "--keep", str(out))[1] == scan
    assert f"{tmp_path}/table_scan.md: stays, of the runs that it names" in capsys.readouterr().err
    before = out.read_text()
    with pytest.raises(SystemExit):
        make(runs, ("cut",), out, "--keep", str(out), "--scan")
    assert "table_scan.md: it is not of the runs of the table to be kept: see quiet" in capsys.readouterr().err
    assert out.read_text() == before


def test_a_run_of_another_attention_is_another_run(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(runs, ("quiet",), tmp_path / "table.md")
    other = write_run(tmp_path / "runs/quiet")
    content = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(content | {"attention_name": "flash_run_a"}))
    with pytest.raises(SystemExit):
        make(other.parent, ("quiet",), tmp_path / "table.md", "--keep", str(tmp_path / "table.md"))
    assert "quiet: its attention is flash_run_a, in " in capsys.readouterr().err


def test_thresholds_are_told_where_they_are_not_those_of_always(runs: Path, tmp_path: Path) -> None:
    changed = ("--logit", "200", "--max-logit", "900")
    text, _ = make(runs, ("failing",), tmp_path / "table.md", *changed)
    assert text.endswith("- Thresholds: --max-logit 900, --logit 200; the others as by default.\n")
    added, _ = make(runs, ("quiet",), tmp_path / "added.md", *changed, "--keep", str(tmp_path / "table.md"))
    assert added == make(runs, ("failing", "quiet"), tmp_path / "both.md", *changed)[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--margin", "0.7"], "table.md: line 11 is '- Explosion: the first step from which the training loss stays"),
        (["--logit", "200"], "table.md: line 12 is '', and '- Thresholds: --logit 200; the others as by default.'"),
        (["--scan", "--lead", "300"], "table_scan.md: line 1 is "),
        (["--scan", "--keep", "nowhere.md"], "nowhere.md: unreadable (No such file or directory)"),
        (["--keep", "table.csv"], "--keep = 'table.csv': expected a table that --out wrote"),
    ],
)
def test_a_table_of_other_settings_is_refused(
    runs: Path, made: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = [made.read_text(), made.with_name("table_scan.md").read_text()]
    with pytest.raises(SystemExit) as stopped:
        make(runs, ("late",), made, "--keep", str(made), *options)
    assert stopped.value.code == 2
    complaint = capsys.readouterr().err
    assert message in complaint
    assert complaint.count("\n") == 1
    assert [made.read_text(), made.with_name("table_scan.md").read_text()] == before


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("table.md", "| flash | 3999 | 3000 |", "| flash | 3999 | 3001 |", "table.md: line 3 is "),
        ("table.md", "warned of 1 of 1", "warned of 1 of 2", "table.md: line 7 is "),
        ("table.md", "| loss: step (warning) ", "", "table.md: line 1 is "),
        ("table.md", "| no |", "| perhaps |", "table.md: not a row of this table: | quiet |"),
        ("table.md", "| quiet |", "| failing |", "table.md: it has a run twice"),
        ("table_scan.md", "| 0.5 | 500 | 1 of 1 |", "| 0.5 | 500 | 1 of 2 |", "table_scan.md: line "),
        ("table_scan.md", "quiet to 3999", "quiet to 3998", "not of the runs of the table to be kept: see quiet"),
        ("table_scan.md", "\n\nOf these runs", "\nOf these runs", "table_scan.md: not what --scan prints"),
        ("table_scan.md", "| 0.5 | 500 |", "| 0.5 | 600 |", "table_scan.md: it was made at other thresholds"),
        ("table_scan.md", "logit of 50%", "logit of 60%", "table_scan.md: it was made at other thresholds"),
    ],
)
def test_a_table_that_was_written_into_is_refused(
    runs: Path,
    made: Path,
    tmp_path: Path,
    file: str,
    old: str,
    new: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for path in (made, made.with_name("table_scan.md")):
        (tmp_path / path.name).write_text(path.read_text())
    text = (tmp_path / file).read_text()
    assert old in text
    (tmp_path / file).write_text(text.replace(old, new))
    with pytest.raises(SystemExit):
        make(runs, ("late",), tmp_path / "new.md", "--keep", str(tmp_path / "table.md"), "--scan")
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new.md").exists()


def test_a_run_is_taken_out_of_a_scan_by_the_logs_of_its_row(runs: Path, tmp_path: Path) -> None:
    names, scan = ("failing", "late", "quiet", "cut", "accused"), ("--scan",)
    whole = make(runs, names, tmp_path / "whole.md", *scan)
    short = tmp_path / "short"
    for name, step in (("late", 1500), ("accused", 3000)):  # neither is the furthest of those that are cut
        shutil.copytree(runs / name, short / name)
        cut_at(short / name, step)
    old = tmp_path / "old.md"
    alarm_table.main(
        [*(str(runs / name) for name in ("failing", "quiet", "cut")), str(short), "--out", str(old), *scan]
    )
    was = ("--keep", str(old), *scan, "--was", str(short))
    assert make(runs, ("late", "accused"), tmp_path / "new.md", *was) == whole


@pytest.mark.parametrize(
    ("names", "was", "message"),
    [
        (("quiet",), (), "--scan: quiet: in the place of a row of "),
        (("quiet", "late"), ("late",), "--was: late is not what a row of "),
        (("late",), ("cut",), "--was: cut is not what a row of "),
        (("quiet",), ("quiet",), "quiet: a value of the scan is theirs"),
        (("failing",), ("failing",), "failing: a value of the scan is theirs"),
    ],
)
def test_no_run_is_taken_out_of_a_scan_otherwise(
    runs: Path,
    made: Path,
    names: tuple[str, ...],
    was: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = made.with_name("table_scan.md").read_text()
    with pytest.raises(SystemExit):
        make(
            runs, names, made, "--keep", str(made), "--scan", *(["--was", *(str(runs / n) for n in was)] if was else [])
        )
    complaint = capsys.readouterr().err
    assert (message in complaint, complaint.count("\n")) == (True, 1)
    assert made.with_name("table_scan.md").read_text() == before


def test_was_is_for_a_scan_that_is_kept(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        alarm_table.main([str(runs / "quiet"), "--scan", "--was", str(runs / "quiet")])
    assert capsys.readouterr().err == "error: --was: it is for --keep with --scan\n"


def of_thinned(row: alarm_rows.Row) -> alarm_scan.Run:
    """A run of results/alarm/gpt2 with what its file lacks made up: every head has its layer's largest norm, half of them the logit of
    half, the others none."""
    probes = published(row.name)
    layers = range(sum(name.startswith("qk_head_norm_") for name in probes[0]))
    nothing = [[0.0] * 12] * len(layers)
    telemetry: list[dict[str, Any]] = []
    for probe in probes:
        norm, most, half, w_q = (
            [probe[f"{name}_{layer}"] for layer in layers]
            for name in ("qk_head_norm", "max_logit", "half_logit", "w_q_norm")
        )
        logits = [[a, *[b] * 5, *[0.0] * 6] for a, b in zip(most, half, strict=True)]
        record = {"step": probe["step"], "lr_sum": probe["lr_sum"], "w_q_norm": w_q, "max_logit": logits}
        record |= dict.fromkeys(("delta_error_mean", "delta_error_se", "delta_rms"), nothing)
        telemetry.append(record | {"qk_head_norm": [[value] * 12 for value in norm]})
    steps = [probe["step"] for probe in probes]
    return alarm_scan.Run(
        name=row.name,
        attention=row.attention,
        steps=steps,
        losses=[0.0] * len(steps),
        telemetry=telemetry,
        warm_up=1000,
        exploded_at=row.exploded_at,
        is_open=row.is_open,
        is_cut=row.is_cut,
        is_unstable=row.is_unstable,
    )


def test_what_the_thinned_runs_have_of_the_scan_is_said() -> None:
    """results/alarm/README.md: three statistics to about four digits, the rule growth not."""
    said = prose(ROOT / "results/alarm/README.md")
    rows = alarm_rows.kept(ROOT / "results/alarm/gpt2.md", alarm_table.settings(alarm_table.parse(["-"])))
    runs = [of_thinned(row) for row in rows]
    thinned = alarm_scan.scan(runs, AlarmConfig(), 500)
    full = alarm_scan.kept(
        ROOT / "results/alarm/gpt2_scan.md",
        alarm_scan.scan([], AlarmConfig(), 500),
        {row.name: row.last_step for row in rows},
    )
    *logits, norm = thinned.ends
    assert [thinned.ends[name] for name in logits] == [full.ends[name] for name in logits]
    pairs = [(a, b) for a, b in zip(thinned.ends[norm], full.ends[norm], strict=True) if a and b]
    assert [a[1] for a, _ in pairs] == [b[1] for _, b in pairs]
    differing = ", ".join(f"{a[0]:.4g} for {b[0]:.4g}" for a, b in pairs if a != b)
    assert f"within one unit of the fourth ({differing})" in said
    first = {run.name: next((one.step for one in alarms(run.telemetry, AlarmConfig(), 1000)), None) for run in runs}
    told = {row.name: row.first["growth"] for row in rows if row.first["growth"] is not None}
    late = sorted(step - told[name] for name, step in first.items() if step is not None and step != told[name])
    never = [name for name in told if first[name] is None]
    assert (len(late), len(told), never) == (12, 26, ["rounded_sum"])
    those = f"that of `{never[0]}` never."
    alarmed = f"twelve of its twenty-six alarms come {late[0]} to {late[-1]:,} steps late and {those}"
    assert alarmed in said
