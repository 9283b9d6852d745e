"""What docs/diagnosis.md says of single runs is what results/ has of them."""

from __future__ import annotations

import csv
import itertools
from collections import Counter

import pytest
from prose import prose
from test_docs import ROOT, table

from analysis import curves, report
from analysis.report_files import by_head, read_csv
from training.alarm import AlarmConfig

DOCUMENT = ROOT / "docs/diagnosis.md"
RUNS = ROOT / "results/fast_failure"


def large_heads(run: str) -> Counter[int]:
    """Heads of layer 1 whose largest logit reaches the alarm's, by step of the probe."""
    with (RUNS / run / "heads.csv").open(newline="") as file:
        rows = by_head(read_csv(file))
    return Counter(row["step"] for row in rows if row["max_logit"] >= AlarmConfig().growth_logit)


@pytest.mark.parametrize(
    ("run", "counts", "sentence"),
    [
        ("run_a_seed_1", {2900: 3, 3100: 6}, "in the first three heads of layer 1 are above 500 at step 2,900, six at"),
        ("flash_all_switches", {3000: 5, 3100: 9}, "in the second five at 3,000, nine at 3,100"),
        ("fp32_pv", {5800: 6, 13000: 11}, "`fp32_pv` is, at 5,800: six heads, at 13,000 eleven"),
    ],
)
def test_so_many_heads_have_large_logits(run: str, counts: dict[int, int], sentence: str) -> None:
    assert {step: large_heads(run)[step] for step in counts} == counts
    assert sentence in prose(DOCUMENT)


def test_the_share_of_heads_has_so_little_room() -> None:
    counts = [large_heads(run) for run in ("fp32_o", "run_c", "run_c_fp32_pv")]
    most = [max(count.values()) for count in counts]
    first, second, third = (min(step for step in count if count[step] == max(count.values())) for count in counts)
    assert most == [5, 6, 5]
    said = prose(DOCUMENT)
    assert f"only C ever has large logits in half of a layer's heads, first at {second:,}, when no head" in said
    assert f"`fp32_o` came to five of twelve, first at step {first:,}, and `run_c_fp32_pv` at {third:,}," in said


def test_run_b_breaks_by_one_head_and_is_accused_behind_that() -> None:
    (alarm,) = (row for row in table(ROOT / "results/alarm/gpt2.md", "run") if row["run"] == "run_b")
    accused = int(alarm["growth: step (warning)"].split()[0])
    with (RUNS / "run_b/metrics.csv").open(newline="") as file:
        departed = report.departure_step(read_csv(file))
    assert departed is not None
    before = (departed // 100) * 100
    assert large_heads("run_b")[before] == 3
    said = (
        f"three heads being above 500: it is accused at {accused:,}, {int(alarm['exploded at step']) - accused} steps"
    )
    assert f"{said} ahead of its explosion, but {accused - departed} after its gradient norm had passed 20." in prose(
        DOCUMENT
    )


def test_the_size_that_fp32_pv_came_to() -> None:
    with (RUNS / "fp32_pv/heads.csv").open(newline="") as file:
        logit = max(row["max_logit"] for row in by_head(read_csv(file)) if row["step"] == 13000)
    norm = w_q_norms("fp32_pv")[13000]
    assert f"with logits to {round(logit, -3):,.0f} and a W_Q of {norm:.0f}." in prose(DOCUMENT)


def w_q_norms(run: str) -> dict[int, float]:
    """W_Q's norm in layer 1 by step."""
    with (RUNS / run / "probes.csv").open(newline="") as file:
        return {row["step"]: row["w_q_norm_1"] for row in read_csv(file)}


def test_power_iteration_read_two_norms_of_the_same_bits() -> None:
    """The branch's own run wrote a checkpoint at 300, behind which its iterations begin afresh."""
    warm, fresh = (w_q_norms(run) for run in ("flash", "switch_at_1500"))
    said = f"at step 300 of `flash` layer 1 read {warm[300]:.3f}, and {fresh[300]:.3f} in a run of the same bits"
    assert said in prose(DOCUMENT)
    assert warm[400] == fresh[400]
    assert f"at 400 both read {warm[400]:.3f}." in prose(DOCUMENT)


def test_the_first_excursion_of_flash_seed_2_is_where_it_is_said() -> None:
    with (RUNS / "flash_seed_2/metrics.csv").open(newline="") as file:
        steps, losses = curves.column(read_csv(file), "train_loss")
    early, final = (curves.explosion_step(losses, patience=patience, steps=steps) for patience in (100, 200))
    assert early is not None
    (alarm,) = (row for row in table(ROOT / "results/alarm/gpt2.md", "run") if row["run"] == "flash_seed_2")
    later = early - int(alarm["growth: step (warning)"].split()[0])
    said = f"a first excursion of its loss at {early:,}, more than 100 steps long, {later} after the alarm;"
    assert f"`flash_seed_2` had {said} it came back and exploded at {final:,}." in prose(DOCUMENT)


def test_the_later_layers_of_flash_subtracted_are_accused_when_it_is_said() -> None:
    """Half of the heads of a layer at the rule's logit at two probes in a row."""
    with (ROOT / "results/alarm/gpt2/flash_subtracted.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    accused = {}
    for layer in (2, 3):
        pairs = itertools.pairwise(rows)
        large = (b["step"] for a, b in pairs if min(float(row[f"half_logit_{layer}"]) for row in (a, b)) >= 500)
        accused[layer] = int(next(large))
    said = f"which the rule accused at {accused[2]:,}, {8471 - accused[2]} steps ahead (layer 3 at {accused[3]:,})"
    assert said in prose(DOCUMENT)


def test_the_table_of_switched_runs_is_that_of_their_file() -> None:
    rows = {row["run"]: row for row in table(ROOT / "results/alarm/switch.md", "run")}
    for row in table(DOCUMENT, "seed"):
        names = (f"{name}_{row['seed']}" for name in ("flash", "switch", "delta_from_p"))
        losses = [float(rows[name]["train loss final"]) for name in names]
        steps = int(rows[f"flash_{row['seed']}"]["last step"]) + 1
        late = " (at 2,000 steps)" if steps == 2000 else ""
        assert list(row.values())[1:] == [f"{losses[0]:.2f}{late}", *(f"{loss:.2f}" for loss in losses[1:])]


def test_what_is_quoted_of_gradients_at_large_logits_is_in_their_table() -> None:
    rows = table(ROOT / "results/gradients/README.md", "attention in layer 1")
    norms = {row["attention in layer 1"]: float(row["gradient norm at 3,500 (235,027)"]) for row in rows}
    apart, own, cured = (f"{norms[name]:.1f}" for name in ("flash_delta_from_p", "run", "flash_subtracted"))
    said = f"a step is {apart} with delta from P, {own} with `flash`, {cured} with `flash_subtracted`."
    assert f"at logits of 235,027 the gradient norm of {said}" in prose(DOCUMENT)
