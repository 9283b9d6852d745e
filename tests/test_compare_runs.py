"""scripts/compare_runs.py: the table, the sentence about the data, and one line for each mistake."""

import json
import math
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from test_checkpoint import flip_a_byte
from tiny_runs import Place, lines

from attention.plan import AttentionConfig, AttentionRule, AttentionSpec, describe
from scripts import compare_runs
from training.checkpoint import CheckpointConfig, Checkpoints
from training.metrics import Metrics, text_of

BATCHES = {"data_sha256": "aa", "recording": "night", "recording_start": "00", "sequence_length": 64}


def write_run(
    folder: Path,
    losses: list[float],
    *,
    digests: str = "",
    first: int = 0,
    preset: str = "flash",
    config: dict[str, Any] | None = None,
    record: dict[str, Any] | None = None,
    probes: str = "",
    **columns: float,
) -> Path:
    """A run whose step s has digest ``digests[s]`` (repeated to length; "" for none). ``config`` and ``record``: further entries;
    ``probes``: lines of probes.csv, step and largest logit by layer."""
    folder.mkdir(parents=True, exist_ok=True)
    metrics = Metrics(folder)
    for i, loss in enumerate(losses):
        digest = {"data_digest": digests[min(i, len(digests) - 1)] * 16} if digests else {}
        metrics.log(first + i, train_loss=loss, **digest, **columns)
    metrics.close()
    run = {"name": folder.name, "seed": 42, "steps": 6}
    settings = {"attention": {"default": {"preset": preset}}, "run": run} | (config or {})
    content = {"config": settings, "attention_name": f"{preset} (paper)", "batches": BATCHES} | (record or {})
    (folder / "config.json").write_text(json.dumps(content))
    if probes:
        layers = range(probes.partition("\n")[0].count(","))
        (folder / "probes.csv").write_text(f"step,{','.join(f'max_logit_{layer}' for layer in layers)}\n{probes}\n")
    return folder


def compare(*arguments: object) -> None:
    compare_runs.main([str(argument) for argument in arguments])


def told(capsys: pytest.CaptureFixture[str], *folders: Path) -> str:
    compare(*folders, "--out", "none", "--patience", 3)
    return capsys.readouterr().out


ALL, ONE, REST = {"0": [0, 1], "1": [0, 1]}, {"0": [0]}, {"0": [1], "1": [0, 1]}
ODD = f"delta x -> y, {', '.join(f's{i:02} x -> y' for i in range(11))} and 2 more"
FAILING = {"losses": [3.0, 2.0, 2.0, 4.0, 4.0, 5.0], "digests": "d"}
NO_SETTING = "the same bits in every loss, gradient norm and probe that both logged (6 steps, to 5); no setting differs"


def with_sites(value: str, preset: str, *heads: Any, backend: str = "flash") -> dict[str, Any]:
    numerics = dict.fromkeys(("delta", *(f"s{i:02}" for i in range(13))), value) | {"output": "same", f"in_{value}": 1}
    groups = [{"backend": backend, "numerics": numerics, "heads_of_layer": of_layer} for of_layer in heads]
    return {"preset": preset, "record": {"attention": groups}}


def runaway(last: str) -> list[dict[str, Any]]:
    return [{"probes": f"0,1,1,1,1\n2,1,1,10001,1\n4,{last}"}]


# Runs a, b, c by what ``write_run`` is given, and what is printed of them.
TOLD: dict[str, tuple[list[dict[str, Any]], str]] = {
    "where they part, and why": (
        [FAILING, {"losses": [3.0, 2.0, 1.9, 1.8, 1.7, 1.6], "preset": "flash_delta_from_p"}],
        "b against a: bits differ from step 2 on, first in train_loss; "
        "attention.default.preset: 'flash' -> 'flash_delta_from_p'.\n",
    ),
    "the reference": ([FAILING, {}], "| a (reference) | flash (paper) | 42 | exploded at 3 |"),
    "norms": ([{"grad_norm": 1.0}, {"grad_norm": 1.5}], "from step 0 on, first in grad_norm; no setting differs.\n"),
    "three of five that part": (
        [{"losses": [x] * 6, "grad_norm": x, "val_loss": x, "probes": f"0,{x},{x}"} for x in (1.0, 2.0)],
        "bits differ from step 0 on, first in train_loss, grad_norm, val_loss and 2 more; ",
    ),
    "another environment": (
        [{"record": {"device": {"processes": n}}} for n in (1, 2)],
        f"b against a: {NO_SETTING}; environment: device.processes: 1 -> 2.",
    ),
    "one step in common": ([{}, {"losses": [2.0]}], "b against a: " + NO_SETTING.replace("6 steps, to 5", "1 step, to 0")),
    "no step in common": ([{}, {"first": 10}], "b against a: no step in common"),
    "short, whatever the last step's number": ([{"losses": [2.0] * 2, "first": 10}], "| stable to 11 (too short to tell) |"),
    "a branch from the best loss before it": (
        [FAILING, {"losses": [4.0] * 3, "digests": "d", "first": 4}], "| b | flash (paper) | 42 | exploded at 3 |"
    ),
    "a branch on other batches from its own": (
        [FAILING, {"losses": [4.0] * 3, "digests": "x", "first": 4}], "| b | flash (paper) | 42 | stable to 6 |"
    ),
    "a log that a resume found changed": (
        [{"record": {"sessions": [{}, {"logs_changed": ["metrics.jsonl: changed since S: line 3"]}]}}],
        "\na: metrics.jsonl: changed since S: line 3.\n",
    ),
    "rules as the table names them": (
        [
            {"config": {"attention": {"rules": rules}}, "record": {"attention_name": f"flash{label}"}}
            for rules, label in (([], ""), ([{"layers": [1]}], "; layer 1 fp8 (tile_k=0); layer 2 fp8"))
        ],
        "; attention.rules: none -> (layer 1 fp8 (tile_k=0); layer 2 fp8).\n",
    ),
    **{
        f"sites behind a preset {i}": (
            [with_sites("x", "flash", *ours), with_sites("y", "standard", *theirs)],
            f"; attention.default.preset: 'flash' -> 'standard'; attention sites: {ODD}.\n",
        )
        for i, (ours, theirs) in enumerate(((["all"], [ALL]), ([REST, ONE], [ONE, REST]), (["all"], [REST, ONE])))
    },
    "no sites of a backend that has its own": (
        [with_sites(value, preset, "all", backend="sdpa_flash") for value, preset in (("x", "flash"), ("y", "standard"))],
        "; attention.default.preset: 'flash' -> 'standard'.\n",
    ),
    "one order of batches": (
        [{"digests": "abcd"}] * 2,
        "\nData: identical: all 2 runs saw the same batches in the same order through step 5 (recording night).\n",
    ),
    "other batches": (
        [{"digests": "abcd"}, {"digests": "abxy"}], "\nData: NOT identical: other batches than a: b from step 2 on.\n"
    ),
    "no digest": ([{"digests": "d"}, {}], "\nData: unknown: no data_digest at a step in common with a: b.\n"),
    "bytes that nobody read": (
        [{"digests": "d", "config": {"data": {"verify": verify}}} for verify in ("sha256", "size")],
        "(recording night); the bytes of b were not verified (data.verify size).\n",
    ),
    "layer of the largest logit": ([{"probes": "0,1,7\n2,5,5"}], " | 7 in layer 1 |"),
    "layer of a logit that is none": ([{"probes": "0,1,7\n2,nan,5"}], " | nan in layer 0 |"),
    "two that run away": (runaway("9,20001,20002,9"), " to 5; layer 2 above 10,000 from 2; layer 1 above 10,000 from 4 |"),
    "three": (runaway("10001,20001,20002,9"), "; layer 2 above 10,000 from 2; layer 0 above 10,000 from 4 and 1 more |"),
    "logits that are none": (runaway("nan,nan,nan,nan"), "; layer 2 above 10,000 from 2; logits not a number from 4 |"),
}  # fmt: skip


@pytest.mark.parametrize("case", TOLD)
def test_what_is_told_of_runs(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs, expected = TOLD[case]
    folders = [
        write_run(tmp_path / name, **({"losses": [2.0] * 6} | run)) for name, run in zip("ab", runs, strict=False)
    ]
    assert expected in told(capsys, *folders)


def test_a_run_of_nothing_but_nan_has_its_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", [math.nan] * 6, grad_norm=math.nan, val_loss=math.nan)
    compare(run, "--out", "none", "--at", 5, "--table", tmp_path / "table.csv")
    shown = capsys.readouterr().out
    assert "| largest logged gradient norm | validation loss best | validation loss at 5 |\n" in shown
    assert "| run | flash (paper) | 42 | NaN at 0 | nan at 0 | nan | nan |\n" in shown
    assert (tmp_path / "table.csv").read_text().endswith("NaN at 0,0,5,nan,0,nan,nan,nan\n")


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_logit_that_is_not_finite_is_the_largest(tmp_path: Path, kept: bool, value: float) -> None:
    run = write_run(tmp_path / "run", [2.0] * 6, probes=f"0,1.5,2.5\n2,{value},3.5\n4,9.5," if kept else "")
    if not kept:
        logits = {0: [[1.5], [2.5]], 2: [[value], [3.5]]}
        rows = [{"step": step, "w_q_norm": [1.0, 1.0], "max_logit": by_layer} for step, by_layer in logits.items()]
        (run / "telemetry.jsonl").write_text(text_of(rows))
    row = compare_runs.summarize(compare_runs.load(run), None, [0, 2, 4], 0.5, 200)
    shown = [row[f"max_logit_max_{which}"] for which in ("at_0", "at_2", "at_4", "largest")]
    assert list(map(str, shown)) == ["2.5", str(value), "None", str(value)]


def test_a_layer_whose_logits_run_away_is_told_behind_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the printed table alone: published tables have the words of ``ended``."""
    run = write_run(tmp_path / "run", [2.0] * 6, probes="0,1,10000\n2,10001,5\n4,20000,5")
    compare(run, "--out", "none", "--patience", 3, "--table", tmp_path / "table.csv")
    assert "| not failed by this rule to 5; layer 0 above 10,000 from 2 |" in capsys.readouterr().out
    assert ",stable to 5," in (tmp_path / "table.csv").read_text()


def test_losses_of_another_validation_text_do_not_part_training(tmp_path: Path) -> None:
    """Checkpoints behind that step are compared still."""
    one, other = (write_run(tmp_path / name, [2.0] * 6, val_loss=x) for name, x in (("one", 1.0), ("other", 2.0)))
    step, told = compare_runs.where_bits_part(*map(compare_runs.load, (one, other)))
    assert (step, told) == (math.inf, "bits differ from step 0 on, first in val_loss")


def test_why_a_run_stopped_early_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, steps, code in (("cut", 4, 141), ("whole", 6, 0)):
        why = {"code": code, "reason": "BrokenPipeError: Broken pipe"}
        (write_run(tmp_path / name, [2.0] * steps) / "exit.json").write_text(json.dumps(why))
    shown = told(capsys, tmp_path / "cut", tmp_path / "whole")
    assert "\ncut stopped with exit code 141: BrokenPipeError: Broken pipe.\n" in shown
    assert "whole stopped" not in shown


def test_the_sites_of_a_rule_are_told_with_its_heads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As config.json has them; of what nothing reads there is no value."""
    rule = AttentionRule(layers=(1,), heads=(0,), attention=AttentionSpec(preset="flash_delta_from_p"))
    for name, config in (("a", AttentionConfig()), ("b", AttentionConfig(rules=(rule,)))):
        path = write_run(tmp_path / name, [2.0] * 6) / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"attention": describe(config.resolve(2, 2))}))
    change = "attention sites in layer 1 (heads 0): delta rowsum_do_o -> rowsum_p_dp"
    assert f"; {change}.\n" in told(capsys, tmp_path / "a", tmp_path / "b")
    path.write_text(path.read_text().replace('"delta_output": "output"', '"delta_output": "fp32"'))
    changes = "attention sites in layer 0, 1 (heads 1): delta_output output -> fp32; " + change
    assert f"; {changes}, delta_output output -> unread.\n" in told(capsys, tmp_path / "a", tmp_path / "b")


def test_a_run_that_cannot_be_read_is_left_out_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "runs/good", [2.0] * 6)
    (tmp_path / "runs/new").mkdir()
    (tmp_path / "runs/new/metrics.jsonl").touch()
    compare(tmp_path / "runs", "--out", "none")
    shown = capsys.readouterr().out
    assert "| good |" in shown
    assert re.search(r"^Left out: .*runs/new/metrics\.jsonl", shown, re.M)


@pytest.mark.parametrize(
    "broken",
    [
        {"config": {"run": {"seed": 1, "steps": "x"}}},
        {"config": {"run": {"seed": 1, "steps": 6}, "alarm": [1]}},
        {"batches": [1]},
        {"attention_name": 3},
        {"sessions": 5},
        {"sessions": [5]},
        {"sessions": [{"logs_changed": None}]},
        {"attention": 5},
        {"switches": [7]},
    ],
    ids=str,
)
def test_a_record_with_a_value_of_another_type_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], broken: dict[str, Any]
) -> None:
    write_run(tmp_path / "runs/good", [2.0] * 6)
    odd = write_run(tmp_path / "runs/odd", [2.0] * 6, record=broken)
    assert f"Left out: {odd}/config.json: not the record of a run." in told(capsys, tmp_path / "runs")


# ---- rows of runs as train.py leaves them, and of ones that are kept as CSV


@pytest.fixture(scope="module")
def place(place: Place) -> Place:
    place.train("one")
    return place


def published(folder: Path, losses: list[str], norms: list[float] | None = None, planned: int = 0) -> Path:
    """A run of 10 steps a row, as experiments/ keeps it."""
    folder.mkdir(parents=True)
    norms = norms or [1.0] * len(losses)
    rows = [f"{10 * i},{loss},{norm}" for i, (loss, norm) in enumerate(zip(losses, norms, strict=True))]
    (folder / "metrics.csv").write_text("\n".join(["step,train_loss,grad_norm", *rows, ""]))
    run = {"seed": 3, "steps": planned or 10 * len(losses) - 9}
    (folder / "config.json").write_text(json.dumps({"config": {"run": run}, "attention_name": "flash"}))
    return folder


def summary(folder: Path, at: Sequence[int] = ()) -> dict[str, Any]:
    return compare_runs.summarize(compare_runs.load(folder), 1, at, 0.5, 200)


def test_a_run_of_train_py_has_its_row(place: Place) -> None:
    row = summary(place.runs / "one", [10])
    logged, probes = lines(place.runs / "one"), lines(place.runs / "one", name="telemetry.jsonl")
    losses = [line["train_loss"] for line in logged if "train_loss" in line]
    validation = {line["step"]: line["val_loss"] for line in logged if "val_loss" in line}
    assert (row["ended"], row["last_step"], row["attention"]) == ("stable to 19 (too short to tell)", 19, "flash")
    assert row["train_loss_end"] == pytest.approx(sum(losses[-2:]) / 2)
    assert (row["val_loss_at_10"], row["val_loss_best"]) == (validation[10], min(validation.values()))
    assert row["max_logit_1_largest"] == max(max(probe["max_logit"][1]) for probe in probes)
    assert row["w_q_norm_1_at_10"] == next(probe["w_q_norm"][1] for probe in probes if probe["step"] == 10)


def test_the_first_difference_is_named(place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = place.runs / "one", tmp_path / "other"
    shutil.copytree(one, other)
    assert "; the same weights and moments in checkpoints of step 10, 20; no setting" in told(capsys, one, other)
    loaded = Checkpoints.load(other / "checkpoints/step_00000020")
    moment = loaded.optimizer_state["state"][3]["exp_avg"]
    moment.view(torch.int32)[-1] ^= 1  # the last bit
    shutil.rmtree(loaded.path)
    Checkpoints(other / "checkpoints", CheckpointConfig()).save(loaded)
    where = "; checkpoints differ first at step 20, in 1 of 45 tensors of optimizer.safetensors, first "
    assert f"{where}state.3.exp_avg;" in told(capsys, one, other)


def test_checkpoints_behind_where_bits_part_are_not_told(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = place.runs / "one", shutil.copytree(place.runs / "one", tmp_path / "other")
    rows = lines(other)
    rows[15]["train_loss"] += 1
    (other / "metrics.jsonl").write_text(text_of(rows))
    where = f"bits differ from step {rows[15]['step']} on, first in train_loss; "
    assert f"{where}the same weights and moments in checkpoints of step 10; no" in told(capsys, one, other)


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors"])
def test_a_damaged_checkpoint_is_named_and_others_are_compared(
    place: Place, tmp_path: Path, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = shutil.copytree(place.runs / "one", tmp_path / "whole")
    damaged = shutil.copytree(place.runs / "one", tmp_path / "other") / "checkpoints/step_00000020"
    flip_a_byte(damaged / file)
    shown = told(capsys, place.runs / "one", tmp_path / "other", whole)
    assert f"; checkpoints not compared: checkpoint {damaged} is damaged (the SHA-256 of {file} differs); no" in shown
    assert "; the same weights and moments in checkpoints of step 10, 20; no setting" in shown


def test_a_checkpoint_that_goes_while_it_is_compared_is_passed_over(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, lives = place.runs / "one", shutil.copytree(place.runs / "one", tmp_path / "lives")
    read = compare_runs.written_sums

    def prunes_and_reads(path: Path) -> dict[str, str]:
        shutil.rmtree(lives / "checkpoints/step_00000010", ignore_errors=True)
        return read(path)

    monkeypatch.setattr(compare_runs, "written_sums", prunes_and_reads)
    assert "; the same weights and moments in checkpoints of step 20; no setting" in told(capsys, one, lives)


@pytest.mark.parametrize(
    ("losses", "norms", "planned", "ended"),
    [
        (["3"] * 100, None, 0, "stable to 990"),
        (["3"] * 100, None, 2000, "stopped early at 990"),
        (["3"] * 50 + ["3.6"] * 50, None, 0, "exploded at 500"),
        (["3"] * 50 + ["3.6"] * 10 + ["3"] * 40, None, 0, "stable to 990"),
        (["3"] * 95 + ["3.6"] * 5, None, 0, "open since 950"),
        (["3"] * 50 + ["3.5"] * 50, None, 0, "stable to 990"),
        (["3"] * 99 + ["nan"], None, 0, "NaN at 990"),
        (["3"] * 95 + ["9"] * 4 + ["nan"], None, 0, "exploded at 950"),
        (["3"] * 200, [1.0] * 120 + [30.0] * 80, 0, "unstable since 1,200"),
        (["3"] * 200, [1.0] * 120 + [30.0] + [1.0] * 79, 0, "stable to 1,990"),
        (["3"] * 401, [1.0] * 100 + [30.0] + [1.0] * 200 + [30.0] * 100, 0, "unstable since 3,010"),
    ],
)
def test_how_a_run_ended(tmp_path: Path, losses: list[str], norms: Any, planned: int, ended: str) -> None:
    assert summary(published(tmp_path / "run", losses, norms, planned))["ended"] == ended


def test_updates_that_were_skipped_are_no_failure(tmp_path: Path) -> None:
    """An overflow does not hide later instability, either."""
    run = write_run(tmp_path / "run", [3.0] * 2000, grad_norm=1.0)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows[300] |= {"train_loss": "nan", "grad_norm": "nan", "nonfinite": "skip"}
    rows[900] |= {"grad_norm": "inf", "nonfinite": "overflow"}
    for noisy in (False, True):
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert summary(run)["ended"] == ("unstable since 1,200" if noisy else "stable to 1,999")
        for row in rows[1200:]:
            row["grad_norm"] = 30.0


def test_a_run_that_a_policy_ended_is_nan_from_its_first_skip(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [3.0] * 400, grad_norm=1.0)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows[380:]:
        row |= {"train_loss": "nan", "grad_norm": "nan", "nonfinite": "skip"}
    rows[-1]["nonfinite"] = "stop"
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert summary(run)["ended"] == "NaN at 380"


def test_what_is_written_has_a_row_a_run_and_explosions_first(place: Place, tmp_path: Path) -> None:
    published(tmp_path / "runs/late", ["3"] * 50 + ["9"] * 50)
    published(tmp_path / "runs/early", ["3"] * 30 + ["9"] * 50)
    published(tmp_path / "runs/calm", ["3"] * 50)
    for ending in ("csv", "md"):
        compare(tmp_path / "runs", place.runs / "one", "--out", "none", "--table", tmp_path / f"out/table.{ending}")
    table = pd.read_csv(tmp_path / "out/table.csv")
    assert table["run"].tolist() == ["early", "late", "calm", "one"]
    assert table["exploded_at"].tolist()[:2] == [300, 500]
    rows = [line.split(" | ") for line in (tmp_path / "out/table.md").read_text().splitlines() if line.startswith("|")]
    assert [row[0].strip("| ").removesuffix(" (reference)") for row in rows[2:]] == table["run"].tolist()
    assert {len(row) for row in rows} == {len(rows[0])}


def test_what_cannot_be_is_one_line(place: Place, tmp_path: Path, refused: Callable[..., str]) -> None:
    one = place.runs / "one"
    broken = published(tmp_path / "broken", ["3"])
    (broken / "metrics.csv").write_text("loss\n3\n")
    a = write_run(tmp_path / "a", [2.0] * 3)
    assert "--at = 99: expected a step" in refused(compare_runs.main, a, "--out", "none", "--at", 99)
    twin = write_run(tmp_path / "other/a", [2.0] * 3)
    assert "two runs have the name a" in refused(compare_runs.main, a, twin)
    assert "--layer = 2: expected 0 to 1" in refused(compare_runs.main, one, "--layer", "2")
    assert "expected a column step of whole numbers" in refused(compare_runs.main, broken)
