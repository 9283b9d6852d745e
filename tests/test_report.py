"""scripts/report.py and analysis/report*.py: what is kept of a run, what is said of it, and that the documents say it."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis import curves, recipe, report, report_blocks, report_files, report_heads, report_pictures, report_plots
from analysis.report import Evidence
from errors import UserError
from scripts import report as script

ROOT = Path(__file__).resolve().parent.parent
EVIDENCE = ROOT / script.EVIDENCE
STEPS, WARM_UP = 1500, 100


def loss_at(step: int, explodes_at: int | None) -> float:
    return 3.0 + 0.01 * math.sin(step) + (2.0 if explodes_at is not None and step >= explodes_at else 0.0)


def probe(step: int) -> dict[str, Any]:
    """2 layers of 2 heads; head 1 of layer 1 grows and has a mean error of four standard errors."""
    grows = [[1.0, 1.0], [1.0, 1.0 + step / 100]]
    flat = [[0.5, 0.5], [0.5, 0.5]]
    names = ("w_q_head_norm", "qk_head_norm", "max_logit", "ties_2e9", "top_1", "v_one_signed", "delta_error_rms")
    return {
        "step": step,
        "delta_units": 32,
        **dict.fromkeys(names, flat),
        "w_q_head_norm": grows,
        "max_logit": grows,
        "delta_error_mean": [[0.0, 0.1], [0.1, 0.4]],
        "delta_error_se": [[0.0, 0.1], [0.1, 0.1]],
        "delta_rms": [[1.0, 1.0], [1.0, 1.0]],
        "o_delta_error_mean": flat,
        "o_delta_error_se": flat,
    }


def write_run(
    folder: Path, *, explodes_at: int | None = None, seed: int = 42, steps: int = STEPS, preset: str = "flash"
) -> Path:
    """A run folder as the trainer leaves it."""
    folder.mkdir(parents=True)
    with open(folder / "metrics.jsonl", "w") as out:
        for step in range(steps):
            grad_norm = 30.0 if explodes_at is not None and step >= explodes_at - 50 else 0.3
            row = {"step": step, "train_loss": loss_at(step, explodes_at), "grad_norm": grad_norm}
            row |= {"tokens_per_second": 1000.0, "seconds": 0.1 * (step + 1), "data_digest": f"{step:016x}"}
            if step % 100 == 0:
                row |= {"val_loss": 3.1, "w_q_norm_0": 1.0, "w_q_norm_1": 1.0 + step / 100, "w_q_norm_max": 1.0}
            out.write(json.dumps(row) + "\n")
    (folder / "telemetry.jsonl").write_text("".join(json.dumps(probe(step)) + "\n" for step in range(0, steps, 100)))
    sections = {
        "run": {"name": folder.name, "steps": 2 * STEPS, "seed": seed},
        "optim": {"optimizer": "adamw", "lr": 1e-3, "warmup_steps": WARM_UP},
        "data": {"global_batch": 32, "sequence_length": 8},
        "model": {"n_layer": 2, "n_head": 2, "n_embd": 8, "block_size": 8, "vocab_size": 256, "qk_norm": False},
    }
    numerics = {"delta": "rowsum_do_o", "delta_output": "output"}
    content = {
        "config": sections,
        "git_commit": "0123",
        "sessions": [{"from_step": 0, "git_commit": "0123"}],
        "attention_name": preset,
        "attention": [{"backend": "flash", "numerics": numerics}],
        "batches": {
            **{"data_sha256": "d6", "data_tokens": 20_000, "validation_sha256": "67", "vocabulary": "bytes"},
            **{"sequence_length": 8, "global_batch": 32, "seed": 1337, "validation_sequences": 8},
            **{"recording": "r", "recording_start": "c2"},
        },
    }
    (folder / "config.json").write_text(json.dumps(content))
    return folder


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Evidence of a failing and a quiet run."""
    failing = write_run(tmp_path / "runs" / "failing", explodes_at=1000)
    quiet = write_run(tmp_path / "runs" / "quiet", preset="flash_fp32_o")
    script.main(["collect", str(failing), str(quiet), "--out", str(tmp_path / "out")])
    return tmp_path / "out"


def told(out: Path) -> dict[str, report.Facts]:
    return {run.name: facts for run, facts in report_blocks.told(script.read_evidence(out))}


# The documents.


@pytest.mark.parametrize("path", script.DOCUMENTS, ids=str)
def test_a_document_says_what_the_evidence_says(path: Path) -> None:
    old, new = script.documents(EVIDENCE, ROOT)[path]
    assert old == new, "python scripts/report.py tables"


NUMBER = re.compile(r"(?<![\w.])(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?!\w|\.\d|,\d{3})")
NOT_MEASURED = re.compile(r"^```.*?^```$|\]\([^)]*\)|arXiv [\d.]+|^\| [\d.]+ \|", re.MULTILINE | re.DOTALL)
"""Code and what it prints, addresses, the paper's number, what a table's line is called."""
SOURCES = {
    "docs/reproduction.md": (
        *(f"results/{name}/README.md" for name in ("figures", "fast_failure", "two_readings", "autopsy", "gradients")),
        *("results/microcosm/ablations.md", "configs/gpt2_paper.py", "configs/fast_failure.py"),
    ),
    "README.md": (
        *("docs/throughput.md", "results/fast_failure/README.md", "results/gradients/README.md", "constraints.txt"),
        "pyproject.toml",
    ),
    "docs/diagnosis.md": (
        *(f"results/alarm/{name}.md" for name in ("README", "gpt2", "gpt2_scan", "microcosm", "microcosm_scan")),
        *(f"results/{name}/README.md" for name in ("autopsy", "fast_failure", "gradients", "telemetry")),
        "configs/fast_failure.py",
    ),
}
CHOSEN = {
    "docs/reproduction.md": {f"{step:,}" for step in (*report_blocks.NORM_AT, 1500, 2500, 6000)}
    | {"3.1", "3.2", "3.3", f"{report.MARGIN:g}"},
    # The last version below pyproject.toml's bound.
    "README.md": {"2.14"},
    # The first is a count of operations that no file has; the others are in tests/test_diagnosis_doc.py.
    "docs/diagnosis.md": {
        "1,150",
        "1.170",
        "1.270",
        "1.632",
        "3,069",
        "5,200",
        "6,700",
        "8,400",
        "165,000",
        "75.3",
        "2.9",
    },
}
"""Steps; sections of the paper; and what has a test of its own."""


def numbers(text: str) -> set[str]:
    """All numbers of a text, as they are written."""
    return set(NUMBER.findall(text))


@pytest.mark.parametrize("document", SOURCES)
def test_every_number_in_a_sentence_has_a_source(document: str) -> None:
    """Decimals and thousands outside the marked parts are quoted from one of the files that hold what was measured or chosen."""
    text = report_blocks.outside((ROOT / document).read_text())
    if document == "docs/diagnosis.md":
        text = re.sub(r"^\|.*$", "", text, flags=re.MULTILINE)  # its tables have tests of their own
    text = NOT_MEASURED.sub("", text)
    quoted = {number for number in numbers(text) if not number.isdigit()}
    written = {number for name in SOURCES[document] for number in numbers((ROOT / name).read_text())}
    assert quoted
    assert {number for number in quoted - CHOSEN[document] if not {number, number.replace(",", "")} & written} == set()


def test_a_changed_number_is_set_right() -> None:
    text = "<!-- report: a -->\nold\n<!-- /report --> and <!-- value: b -->7<!-- / -->, <!-- value: b --><!-- / -->\n"
    new = report_blocks.refreshed(text, {"a": "new\n"}, {"b": "8"}, "doc")
    assert new == text.replace("old", "new").replace("-->7<", "-->8<").replace("--><!-- / -->", "-->8<!-- / -->")


@pytest.mark.parametrize("text", ["<!-- report: x -->\n<!-- /report -->", "<!-- value: x -->1<!-- / -->"])
def test_a_name_without_evidence_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="'x'"):
        report_blocks.refreshed(text, {}, {}, "doc")


def test_a_value_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UserError, match="exploded"):
        report_blocks.refreshed("<!-- value: a.exploded -->5<!-- / -->", {}, {"a.exploded": "-"}, "doc")


# The published files.


def test_published_files_are_small() -> None:
    own = ROOT / "results/quickstart"  # what the README's first command leaves there, which git ignores
    files = [path for path in (ROOT / "results").rglob("*") if path.is_file() and own not in path.parents]
    assert sum(path.stat().st_size for path in files) <= 15e6
    assert [str(path) for path in files if path.stat().st_size > 500_000] == []
    assert [str(path) for path in EVIDENCE.rglob("*.csv") if path.stat().st_size > script.MOST_BYTES] == []
    runs = {folder.name: sum(path.stat().st_size for path in folder.iterdir()) for folder in EVIDENCE.glob("*/")}
    assert {name: size for name, size in runs.items() if size > 240_000} == {}
    pictures = [*EVIDENCE.glob("*.png"), *(ROOT / "results/figures").glob("*.png")]
    assert pictures
    assert [str(path) for path in pictures if path.stat().st_size > 300_000] == []


def test_published_runs_saw_the_same_batches() -> None:
    runs = script.read_evidence(EVIDENCE)
    digests = {run.name: dict(zip(*curves.column(run.records, "data_digest"), strict=True)) for run in runs}
    first = digests[max(digests, key=lambda name: max(digests[name]))]
    for name, found in digests.items():
        common = found.keys() & first.keys()
        assert len(common) >= min(5, 1 + max(found) // script.DIGEST_EVERY), name
        assert {step: found[step] for step in common} == {step: first[step] for step in common}, name


def test_a_record_keeps_only_the_name_of_the_folder_of_its_runs(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one")
    content = json.loads((run / "config.json").read_text())
    content["config"]["run"]["folder"] = "/home/somebody/experiments"
    (run / "config.json").write_text(json.dumps(content))
    script.main(["collect", str(run), "--out", str(tmp_path / "out")])
    kept = json.loads((tmp_path / "out" / "one" / "config.json").read_text())
    assert kept["config"]["run"] == {**content["config"]["run"], "folder": "experiments"}


def test_published_text_names_no_folder_of_a_machine() -> None:
    texts = [p.read_text() for p in EVIDENCE.rglob("*") if p.suffix in (".json", ".csv", ".md")]
    assert not any(re.search(r"(?<![\w.])/(home|root|tmp|work|Users)/", text) for text in texts)


# Thinning.


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 300), st.sampled_from([3.0, 3.4, 3.6, 4.2, math.nan])), max_size=14),
    st.integers(0, 9),
)
def test_thinned_losses_tell_the_same_story(stretches: list[tuple[int, float]], seed: int) -> None:
    losses = [level - 0.001 * seed * (i % 7) for count, level in stretches for i in range(count)] or [3.0]
    steps = list(range(len(losses)))
    keep = sorted(report.excursion_rows(steps, losses))
    thinned = [losses[step] for step in keep]
    for verdict in (curves.explosion_step, curves.open_excursion):
        assert verdict(thinned, steps=keep) == verdict(losses, steps=steps)


def test_an_explosion_is_kept_although_the_step_that_makes_it_long_enough_was_not_logged() -> None:
    steps = [step for step in range(2000) if step != 1202]
    records = [{"step": step, "train_loss": 7.0 if 1003 <= step <= 1205 else 5.0} for step in steps]
    keep = report.excursion_rows(steps, [row["train_loss"] for row in records])
    kept = [row for row in records if row["step"] in keep or row["step"] % 10 == 0]
    found = [
        curves.explosion_step([row["train_loss"] for row in rows], 0.5, 200, steps=[row["step"] for row in rows])
        for rows in (records, kept)
    ]
    assert found == [1003, 1003]


def test_steps_near_the_departure_are_all_kept(out: Path) -> None:
    (run,) = (run for run in script.read_evidence(out) if run.name == "failing")
    kept = {record["step"] for record in run.records}
    assert set(range(950 - report.NEAR, 1000 + report.NEAR + 1)) <= kept
    assert len(kept) < STEPS / 2


def test_a_run_that_went_back_counts_once() -> None:
    records = [{"step": 0, "a": 1}, {"step": 1, "a": 2}, {"step": 2, "a": 3}, {"step": 1, "a": 5}, {"step": 1, "b": 6}]
    assert report.by_step(records) == [{"step": 0, "a": 1}, {"step": 1, "a": 5, "b": 6}]


def spoiled_probe(**changes: Any) -> dict[str, Any]:
    return {name: value for name, value in (probe(100) | changes).items() if value is not None}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"step": 100}, "delta_units of step 100 is no whole number"),
        (spoiled_probe(delta_units="32"), "delta_units of step 100 is no whole number"),
        (spoiled_probe(delta_rms=None), "delta_rms of step 100 has not a number for each head of each layer"),
        (spoiled_probe(delta_rms=[1.0, 1.0]), "delta_rms of step 100 has not a number"),
        (spoiled_probe(top_1=[[1.0, 1.0], [1.0]]), "top_1 of step 100 has not a number"),
        (spoiled_probe(ties_2e9=[[1.0, "much"], [1.0, 1.0]]), "ties_2e9 of step 100 has not a number"),
        (spoiled_probe(max_logit=None), "w_q_head_norm of step 100 lacks layer 1"),
        (spoiled_probe(max_logit=[[1.0, 1.0]]), "w_q_head_norm of step 100 lacks layer 1"),
    ],
)
def test_a_foreign_probe_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: dict[str, Any], message: str
) -> None:
    run = write_run(tmp_path / "run")
    (run / "telemetry.jsonl").write_text(json.dumps(probe(0)) + "\n" + json.dumps(line) + "\n")
    with pytest.raises(SystemExit) as stop:
        script.main(["collect", str(run), "--out", str(tmp_path / "out")])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {run}/telemetry.jsonl: {message}")
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["train_loss", "w_q_norm_1", "tokens_per_second"])
def test_a_word_in_the_metrics_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    run = write_run(tmp_path / "run")
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": STEPS, name: "much"}) + "\n")
    with pytest.raises(SystemExit) as stop:
        script.main(["collect", str(run), "--out", str(tmp_path / "out")])
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"error: {run}/metrics.jsonl: {name} of step {STEPS} is no number\n"


def test_thinned_metrics_that_tell_another_story_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run", explodes_at=1001)
    monkeypatch.setattr(report, "kept_steps", lambda records, every: set(range(0, STEPS, 7)))
    with pytest.raises(SystemExit):
        script.main(["collect", str(run), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


# A run of a name that is there already.


def last_step(out: Path, name: str) -> int:
    return told(out)[name].last_step


@pytest.mark.parametrize("order", [(900, STEPS), (STEPS, 900)])
def test_the_longer_run_of_a_name_stays(
    tmp_path: Path, order: tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    for number, steps in enumerate(order):
        folder = write_run(tmp_path / str(number) / "r", steps=steps)
        script.main(["collect", str(folder), "--out", str(tmp_path / "out")])
    assert last_step(tmp_path / "out", "r") == STEPS - 1
    assert ("kept; it goes to step 1,499" in capsys.readouterr().out) == (order[0] == STEPS)


def test_a_measured_run_replaces_one_that_is_longer_by_printed_lines_only(tmp_path: Path) -> None:
    logs = write_log(tmp_path / "logs", 1800, None)
    for number, steps in enumerate((1000, STEPS)):
        folder = write_run(tmp_path / str(number) / "failing", steps=steps)
        script.main(
            [
                "collect",
                str(folder),
                "--printed",
                str(logs) if not number else str(tmp_path),
                "--out",
                str(tmp_path / "out"),
            ]
        )
    assert told(tmp_path / "out")["failing"].printed_from is None


def test_a_name_that_another_variant_has_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = write_run(tmp_path / "a" / "r"), write_run(tmp_path / "b" / "r", seed=1)
    with pytest.raises(SystemExit):
        script.main(["collect", str(one), str(other), "--out", str(tmp_path / "out")])
    assert "another run of that name is there: flash, seeds (42, 1337)" in capsys.readouterr().err


def test_a_folder_stands_for_its_runs_under_their_names_of_today(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "flash_lr2e-3")
    write_run(tmp_path / "runs" / "quiet", preset="flash_fp32_o")
    script.main(["collect", str(tmp_path / "runs"), "--out", str(tmp_path / "out")])
    assert sorted(told(tmp_path / "out")) == ["flash", "quiet"]


def test_settings_of_the_model_part_variants(tmp_path: Path) -> None:
    plain, normed = write_run(tmp_path / "plain"), write_run(tmp_path / "qk_norm", seed=1)
    content = json.loads((normed / "config.json").read_text())
    content["config"]["model"]["qk_norm"] = True
    (normed / "config.json").write_text(json.dumps(content))
    script.main(["collect", str(plain), str(normed), "--out", str(tmp_path / "out")])
    runs = report_blocks.told(script.read_evidence(tmp_path / "out"))
    assert [report_blocks.count_of(run, runs) for run, _ in runs] == [1, 1]


# What may not go into the evidence.


def altered(folder: Path, section: str, **values: Any) -> Path:
    """A run with other values in a section of its record."""
    content = json.loads((folder / "config.json").read_text())
    (content["config"]["model"] if section == "model" else content["batches"]).update(values)
    (folder / "config.json").write_text(json.dumps(content))
    return folder


FOREIGN = {
    "block_size = 4: expected 8, as in the run failing": ("model", {"block_size": 4}),
    "vocab_size = 512: expected 256": ("model", {"vocab_size": 512}),
    "data_sha256 = 'ff': expected 'd6'": ("batches", {"data_sha256": "ff"}),
    "sequence_length = 16: expected 8": ("batches", {"sequence_length": 16}),
    "recording = 'debug': expected 'r'": ("batches", {"recording": "debug"}),
}


@pytest.mark.parametrize("message", FOREIGN)
def test_a_run_of_another_recipe_is_refused(out: Path, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    section, values = FOREIGN[message]
    other = altered(write_run(out.parent / "debug"), section, **values)
    with pytest.raises(SystemExit):
        script.main(["collect", str(other), "--out", str(out)])
    assert message in capsys.readouterr().err
    assert sorted(told(out)) == ["failing", "quiet"]


def test_a_run_on_other_batches_is_refused(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = write_run(out.parent / "debug", steps=900)
    text = (other / "metrics.jsonl").read_text()
    (other / "metrics.jsonl").write_text(re.sub(r'"data_digest": "0', '"data_digest": "f', text))
    with pytest.raises(SystemExit):
        script.main(["collect", str(other), "--out", str(out)])
    assert "data_digest of step 500 = 'f0000000000001f4': expected '00000000000001f4'" in capsys.readouterr().err


def test_a_run_that_did_not_record_its_batches_goes_with_those_that_did(out: Path) -> None:
    other = altered(write_run(out.parent / "plain"), "batches", recording="", recording_start="")
    script.main(["collect", str(other), "--out", str(out)])
    assert sorted(told(out)) == ["failing", "plain", "quiet"]


def test_a_larger_model_on_the_same_data_is_a_recipe_of_its_own(out: Path) -> None:
    script.main(["collect", str(altered(write_run(out.parent / "wide"), "model", n_embd=16)), "--out", str(out)])
    kept = {run.name: run for run in script.read_evidence(out)}
    assert kept["wide"].recipe != kept["quiet"].recipe == kept["failing"].recipe


def test_a_run_of_other_batches_is_held_to_those_with_as_many_sequences(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Twice the sequences have another recording and other digests; a second run of that size must have theirs."""

    def of_64(name: str, digest: str) -> Path:
        run = altered(write_run(out.parent / name), "batches", global_batch=64, recording="r64", recording_start="s64")
        text = (run / "metrics.jsonl").read_text()
        (run / "metrics.jsonl").write_text(text.replace('"data_digest": "0', f'"data_digest": "{digest}'))
        return run

    script.main(["collect", str(of_64("large", "a")), "--out", str(out)])
    assert sorted(told(out)) == ["failing", "large", "quiet"]
    with pytest.raises(SystemExit):
        script.main(["collect", str(of_64("other", "b")), "--out", str(out)])
    assert "expected 'a" in capsys.readouterr().err
    assert "other" not in told(out)


def test_all_runs_are_checked_before_one_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = write_run(tmp_path / "runs" / "a")
    altered(write_run(tmp_path / "runs" / "b", preset="standard"), "model", block_size=16)
    with pytest.raises(SystemExit):
        script.main(["collect", str(first.parent), "--out", str(tmp_path / "out")])
    assert "block_size = 16: expected 8, as in the run a" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_of_two_makings_in_one_call_the_longer_is_written(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(steps) / "r", steps=steps) for steps in (STEPS, 900)]
    script.main(["collect", *map(str, runs), "--out", str(tmp_path / "out")])
    assert last_step(tmp_path / "out", "r") == STEPS - 1


# What is said of a run.


def test_an_explosion_is_told(out: Path) -> None:
    failing = told(out)["failing"]
    assert (failing.exploded_at, failing.departed_at, failing.last_step) == (1000, 950, STEPS - 1)
    assert failing.verdict == "exploded at 1,000, logs to 1,499"


def test_a_run_that_was_cut_says_so(out: Path) -> None:
    assert told(out)["quiet"].verdict == "cut at 1,499, quiet"


def test_an_excursion_that_the_end_cuts_short_is_no_verdict(tmp_path: Path) -> None:
    script.main(["collect", str(write_run(tmp_path / "r", explodes_at=STEPS - 50)), "--out", str(tmp_path / "out")])
    assert told(tmp_path / "out")["r"].verdict == "above the margin since 1,450, cut at 1,499: too soon to tell"


def test_a_rising_gradient_is_not_quiet() -> None:
    records = [{"step": s, "grad_norm": 0.3 if s < 1400 else 0.9} for s in range(1500)]
    assert report.unrest(records) == pytest.approx(3.0)
    assert report.unrest(records[:1400]) == 1.0


@pytest.mark.parametrize(
    ("high", "since"), [(range(900, 1500, 3), 900), (range(900, 901), None), (range(1480, 1500), None)]
)
def test_instability_is_more_than_one_high_gradient(high: range, since: int | None) -> None:
    """High here and there, restless in between; one spike among ordinary norms; too late to tell."""
    restless = len(high) > 1
    records = [
        {"step": s, "grad_norm": 30.0 if s in high else 0.9 if restless and s > high[0] else 0.3} for s in range(1500)
    ]
    assert report.unstable_since(records) == since


def test_norms_and_logits_are_those_of_layer_1(out: Path) -> None:
    quiet = told(out)["quiet"]
    assert quiet.w_q[1000] == quiet.logit[1000] == 11.0
    assert quiet.largest_w_q_in_layer == (9, 9)


def test_the_time_of_all_steps_is_at_the_median_speed(out: Path) -> None:
    assert report_blocks.values(script.read_evidence(out))["quiet.whole"] == f"{2 * STEPS * 32 * 8 / 1000 / 60:.0f}"


def test_n_counts_seeds_of_one_variant(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / f"r{seed}", seed=seed) for seed in (1, 2)]
    other = write_run(tmp_path / "other", preset="standard")
    script.main(["collect", *map(str, [*folders, other]), "--out", str(tmp_path / "out")])
    runs = report_blocks.told(script.read_evidence(tmp_path / "out"))
    assert {run.name: report_blocks.count_of(run, runs) for run, _ in runs} == {"r1": 2, "r2": 2, "other": 1}


def test_growth_of_an_exponential_is_its_factor() -> None:
    found = report_heads.growth({step: 2.0 ** (step / 1000) for step in range(0, 4001, 100)}, 1000, 3000)
    assert found is not None
    assert found.factor == pytest.approx(2.0)


def test_growth_of_a_line_is_its_slope() -> None:
    found = report_heads.growth({step: 5 + step / 100 for step in range(0, 4001, 100)}, 1000, 3000)
    assert found is not None
    assert found.per_thousand == pytest.approx(10.0)


def test_growth_of_a_run_that_was_cut_before_is_none() -> None:
    assert report_heads.growth({1000: 1.0, 2000: 2.0}, 1000, 3000) is None


@pytest.mark.parametrize(("t", "freedom", "tail"), [(2.042, 30, 0.05), (2.750, 30, 0.01), (12.706, 1, 0.05)])
def test_tails_are_those_of_the_printed_tables(t: float, freedom: int, tail: float) -> None:
    assert report_heads.student_tail(t, freedom) == pytest.approx(tail, rel=2e-3)


def test_bias_counts_heads_that_have_an_error(out: Path) -> None:
    (run,) = (run for run in script.read_evidence(out) if run.name == "quiet")
    found = report_heads.bias(run.heads)
    assert found is not None
    probes = STEPS // 100
    assert (found.tests, found.beyond_3, found.positive) == (2 * probes, probes, 2 * probes)
    assert found.relative_mean == pytest.approx(0.25)
    assert found.relative_se == pytest.approx(0.1 / math.sqrt(2 * probes))
    assert found.sum_z == pytest.approx(2.5 * math.sqrt(2 * probes))


def test_z_of_a_head_without_error_is_left_out(out: Path) -> None:
    (run,) = (run for run in script.read_evidence(out) if run.name == "quiet")
    assert len(run.z_scores) == 3 * STEPS // 100


# What is written of a run.


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((0.25, "0.25"), (2.0, "2"), (200.0, "200"), (70_614.0, "70610"), (7.0614e-9, "7.061e-9"), (7e12, "7e12")),
        *((-0.0, "0"), (9999.7, "1e4"), (math.nan, "nan"), (-math.inf, "-inf")),
    ],
)
def test_a_number_takes_no_more_characters_than_it_needs(value: float, text: str) -> None:
    assert report_files.short(value) == text


def test_a_column_in_a_unit_is_read_in_its_own() -> None:
    rows = [{"step": 7, "delta_error_mean": -3.4957e-11, "z_0_1": -1.344, "w_q_norm_0": 12.3456, "source": "printed"}]
    text = report_files.as_csv(list(rows[0]), rows)
    assert text == "step,delta_error_mean:1e-12,z_0_1:0.01,w_q_norm_0,source\n7,-34.96,-134,12.346,printed\n"
    (row,) = report_files.read_csv(io.StringIO(text))
    expected = {"step": 7, "delta_error_mean": -3.496e-11, "z_0_1": -1.34, "w_q_norm_0": 12.346, "source": "printed"}
    assert row == pytest.approx(expected)


def test_what_documents_show_of_a_probe_keeps_five_digits(tmp_path: Path) -> None:
    """Of a number with one digit less the last one shown would be rounded twice."""
    folder = write_run(tmp_path / "r", steps=300)
    probes = [json.loads(line) for line in (folder / "telemetry.jsonl").read_text().splitlines()]
    shown = {"max_logit": 123.454, "top_1": 0.0123454, "delta_rms": 1.23454e-5, "delta_error_rms": 1.23454e-9}
    probes = [one | {name: [[value] * 2] * 2 for name, value in shown.items()} for one in probes]
    (folder / "telemetry.jsonl").write_text("".join(json.dumps(one) + "\n" for one in probes))
    script.main(["collect", str(folder), "--out", str(tmp_path / "out")])
    (run,) = script.read_evidence(tmp_path / "out")
    assert {name: run.heads[0][name] for name in shown} == pytest.approx(shown, rel=4e-5)


def test_the_heads_of_a_probe_are_read_as_they_were_written(tmp_path: Path) -> None:
    """A line a probe, a row a head again."""
    folder = write_run(tmp_path / "r", steps=300)
    script.main(["collect", str(folder), "--out", str(tmp_path / "out")])
    text = (tmp_path / "out" / "r" / "heads.csv").read_text()
    assert text.startswith("step,w_q_head_norm_1_0,w_q_head_norm_1_1,max_logit_1_0,")
    assert text.count("\n") == 1 + 3
    written = report_files.read_csv(io.StringIO(text))
    assert report_files.probes_csv(written) == text
    rows = report_files.by_head(written)
    assert [(row["step"], row["head"]) for row in rows] == [(step, head) for step in (0, 100, 200) for head in (0, 1)]
    for row in rows:
        of_probe = probe(row["step"])
        assert row.keys() == {"step", "head", *report_files.HEADS}
        expected = {name: of_probe[name][1][row["head"]] for name in report_files.HEADS}
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=5e-4)


def test_a_record_has_a_line_for_each_of_its_innermost_parts(out: Path) -> None:
    content = {"a": {"b": 1, "c": "d, e"}, "f": [{"g": [0, 1]}, {"g": []}], "h": {}, "i": None}
    lines = ["{", ' "a": {"b": 1, "c": "d, e"},', ' "f": [', "  {", '   "g": [0, 1]', "  },", '  {"g": []}', " ],"]
    text = report_files.as_json(content)
    assert text == "\n".join([*lines, ' "h": {},', ' "i": null', "}", ""])
    assert json.loads(text) == content
    kept = (out / "quiet" / "config.json").read_text()
    assert kept == report_files.as_json(json.loads(kept))


@pytest.mark.parametrize("folder", sorted(EVIDENCE.glob("*/")), ids=lambda folder: folder.name)
def test_published_files_are_as_collect_writes_them(folder: Path) -> None:
    text = (folder / "config.json").read_text()
    assert text == report_files.as_json(json.loads(text))
    for name in ("heads.csv", "probes.csv"):
        text = (folder / name).read_text()
        assert text == report_files.probes_csv(report_files.read_csv(io.StringIO(text)))


def test_the_wall_time_stays_at_probes_and_at_the_end(out: Path) -> None:
    (run,) = (run for run in script.read_evidence(out) if run.name == "quiet")
    assert curves.column(run.records, "seconds")[0] == [*range(0, STEPS, 100), STEPS - 1]


def test_the_norms_of_all_layers_are_read_with_the_probes(out: Path) -> None:
    (run,) = (run for run in script.read_evidence(out) if run.name == "quiet")
    found = [curves.column(run.records, f"w_q_norm_{layer}")[1] for layer in (0, 1)]
    assert found == [[1.0] * (STEPS // 100), [1.0 + step / 100 for step in range(0, STEPS, 100)]]


# Runs of which only what they printed is left, and runs made twice.

LINE = "step {step}  train_loss {loss:.4g}  grad_norm 0.3  lr 0.001  tokens_per_second 1000  mfu 0.1\n"


def write_log(folder: Path, steps: int, explodes_at: int | None, offset: float = 0.0) -> Path:
    folder.mkdir()
    lines = [LINE.format(step=step, loss=loss_at(step, explodes_at) + offset) for step in range(steps)]
    (folder / "failing.log").write_text("runs/failing: attention flash\n" + "".join(lines) + "step 17  train_lo")
    return folder


def test_printed_lines_go_on_where_the_metrics_end(tmp_path: Path) -> None:
    run = write_run(tmp_path / "failing", explodes_at=1400)
    logs = write_log(tmp_path / "logs", 1800, 1400)
    script.main(["collect", str(run), "--printed", str(logs), "--out", str(tmp_path / "out")])
    facts = told(tmp_path / "out")["failing"]
    assert (facts.exploded_at, facts.last_step, facts.printed_from) == (1400, 1799, STEPS)


def test_printed_lines_of_another_run_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "failing")
    logs = write_log(tmp_path / "logs", 1800, None, offset=0.1)
    with pytest.raises(SystemExit):
        script.main(["collect", str(run), "--printed", str(logs), "--out", str(tmp_path / "out")])
    assert "another run" in capsys.readouterr().err


@pytest.mark.parametrize(("explodes_at", "difference"), [(None, ""), (800, "750")])
def test_runs_made_twice_are_compared(tmp_path: Path, explodes_at: int | None, difference: str) -> None:
    first, again = write_run(tmp_path / "a" / "r"), write_run(tmp_path / "b" / "r", explodes_at=explodes_at, steps=900)
    script.main(["collect", str(first), "--again", str(again), "--out", str(tmp_path / "out")])
    with open(tmp_path / "out" / "again.csv") as file:
        (row,) = csv.DictReader(file)
    assert (row["run"], row["common_steps"], row["first_difference"]) == ("r", "900", difference)


def test_the_commit_of_a_lent_machine_is_not_published(out: Path) -> None:
    content = json.loads((out / "quiet" / "config.json").read_text())
    assert content["git_commit"] is None
    assert content["sessions"] == [{"from_step": 0, "git_commit": None}]


# Tables and pictures.


def test_the_readme_shows_the_runs_of_its_picture(out: Path, tmp_path: Path) -> None:
    """All seeds of its variants, and no other run."""
    write_run(tmp_path / "more" / "flash_seed_7", explodes_at=900, seed=7)
    script.main(["collect", str(tmp_path / "more"), "--out", str(out)])
    table = report_blocks.short_table(report_blocks.told(script.read_evidence(out)))
    assert [line.split(" | ")[0] for line in table.splitlines()[2:]] == ["| flash_seed_7"]


def test_a_column_without_content_is_left_out(out: Path) -> None:
    text = report_blocks.runs_table(report_blocks.told(script.read_evidence(out)))
    assert "validation loss at 10,000" not in text
    assert len({line.count("|") for line in text.splitlines()}) == 1


def test_plots_write_the_pictures_that_have_runs(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_pictures, "PICTURES", {"one.png": ("failing", "absent"), "none.png": ("absent",)})
    monkeypatch.setattr(recipe, "BASE", {})  # that of the made-up runs, whatever it is
    script.main(["plots", "--out", str(out)])
    assert {path.name for path in out.glob("*.png")} == {"curves.png", "one.png", "sharing.png"}
    assert (out / "one.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_has_one_colour_in_both_pictures(out: Path) -> None:
    runs = report_blocks.told(script.read_evidence(out))
    look = report_plots.looks(runs, [])
    alone = report_plots.figure(runs[1:], report_plots.PANELS[:1], look).axes[0].lines[0]
    assert alone.get_color() == report_plots.figure(runs, report_plots.PANELS[:1], look).axes[0].lines[-1].get_color()


def test_other_seeds_look_like_their_variant_but_thin(out: Path) -> None:
    (run, facts), *rest = report_blocks.told(script.read_evidence(out))
    seeds = [(dataclasses.replace(run, name=name), facts) for name in ("failing_seed_1", "failing", "failing_seed_2")]
    look = report_plots.looks([*rest, *seeds], ["absent", "failing"])
    assert len({look[name]["color"] for name in ("failing", "failing_seed_1", "failing_seed_2")}) == 1
    assert look["failing_seed_1"]["linewidth"] == look["failing_seed_2"]["linewidth"] < look["failing"]["linewidth"]
    assert all(look[other.name]["color"] != look["failing"]["color"] for other, _ in rest)
    legend = report_plots.figure(seeds, report_plots.PANELS[:1], look).legends[0].get_texts()
    assert [text.get_text().partition(":")[0] for text in legend] == ["failing"]


def test_a_long_line_of_the_legend_is_broken_and_not_cut_off(out: Path) -> None:
    """Three seeds, each with another end."""
    (run, facts), *_ = report_blocks.told(script.read_evidence(out))
    ends = {"exploded_at": None, "unstable_since": 8116, "last_step": 12999, "is_finished": True}
    names = ("failing", "failing_seed_1", "failing_seed_2")
    settings = [{**run.config, "config": {**run.config["config"], "run": {"seed": seed}}} for seed in (42, 1, 2)]
    seeds = [
        (
            dataclasses.replace(run, name=name, config=config),
            dataclasses.replace(facts, **{**ends, "unstable_since": at}),
        )
        for name, config, at in zip(names, settings, (8116, 9288, 9999), strict=True)
    ]
    drawn = report_plots.figure(seeds, report_plots.PANELS[:1], report_plots.looks(seeds, []))
    drawn.canvas.draw()
    (text,) = drawn.legends[0].get_texts()
    assert text.get_text().count("unstable since") == 3
    box = drawn.legends[0].get_window_extent()
    assert 0 <= box.x0 < box.x1 <= drawn.bbox.x1
    panel = drawn.axes[0].get_window_extent()
    assert panel.y1 < box.y0 < box.y1 <= drawn.bbox.y1
    short = report_plots.figure(seeds[:1], report_plots.PANELS[:1], report_plots.looks(seeds[:1], []))
    short.canvas.draw()
    # The lines have room of their own.
    assert panel.height == pytest.approx(short.axes[0].get_window_extent().height, abs=0.05 * report_plots.DPI)


def test_a_picture_ends_where_it_is_asked_to(out: Path) -> None:
    runs = report_blocks.told(script.read_evidence(out))
    panels, look = report_plots.PANELS[:2], report_plots.looks(runs, [])
    whole, part = report_plots.figure(runs, panels, look), report_plots.figure(runs, panels, look, last_step=40)
    assert whole.axes[0].get_xlim()[1] > max(facts.last_step for _, facts in runs) > 41
    assert all(40 < axes.get_xlim()[1] < 41 for axes in part.axes)


def test_stretches_are_means_over_steps_not_rows() -> None:
    steps, means = report_plots.stretches([0, 1, 2, 60], [1.0, 2.0, 3.0, 9.0], is_log=False)
    assert (steps.tolist(), means.tolist()) == ([1.0, 60.0], [2.0, 9.0])


def test_evidence_is_refused_where_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run in it"):
        script.read_evidence(tmp_path)


def test_facts_of_records_in_full_and_thinned_agree(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", explodes_at=1234)
    records = report.by_step(script.read_metrics(folder))
    run = Evidence(name="r", config=script.load_config(folder), records=records)
    _, thinned = script.thin(run)
    short = Evidence(name="r", config=run.config, records=thinned)
    full, less = report.facts(run), report.facts(short)
    assert (full.exploded_at, full.departed_at, full.verdict) == (less.exploded_at, less.departed_at, less.verdict)
    assert full.loss_at_end == pytest.approx(less.loss_at_end, rel=1e-6)
