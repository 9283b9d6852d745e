"""What results/fast_failure/README.md says of how its runs were made is what their records say."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from prose import prose
from test_docs import ROOT, table

from analysis import report as analysis_report
from analysis import report_blocks, report_sharing
from analysis.report_files import by_head, read_csv
from scripts import report

FOLDER = ROOT / "results/fast_failure"


def makers() -> list[tuple[list[str], str]]:
    """(runs, digest of the code) of every line of the table of commits; the digest is "-" where the records have none."""
    remark = r"\([^)]*\)"
    rows = table(FOLDER / "README.md", "runs")
    return [(re.sub(remark, "", row["runs"]).replace(" ", "").split(","), row["source_sha256"]) for row in rows]


def test_every_run_is_in_one_line_of_the_table_of_commits() -> None:
    named = [name for names, _ in makers() for name in names]
    assert sorted(named) == sorted(path.parent.name for path in FOLDER.glob("*/config.json"))


def test_the_runs_of_a_line_were_made_by_one_state_of_the_code() -> None:
    for names, digest in makers():
        records = [json.loads((FOLDER / name / "config.json").read_text()) for name in names]
        assert {(record.get("source_sha256") or "-")[:8] for record in records} == {digest}


def spread_of_sums(by_head: dict[str, list[float]]) -> float:
    """Mean over heads of (sum of z over probes)^2 / probes, 1 where probes are independent."""
    sums = [sum(found) ** 2 / len(found) for found in by_head.values() if len(found) > 20]
    return sum(sums) / len(sums) if sums else math.nan


def of_other_layers(run: Path, last: int) -> float:
    by_head: dict[str, list[float]] = defaultdict(list)
    with (run / "probes.csv").open(newline="") as file:
        for row in read_csv(file):
            for name, z in row.items():
                if name.startswith("z_") and row["step"] <= last and math.isfinite(z):
                    by_head[name].append(z)
    return spread_of_sums(by_head)


def of_layer_1(run: Path, last: int) -> float:
    by_head: dict[str, list[float]] = defaultdict(list)
    with (run / "heads.csv").open(newline="") as file:
        for row in read_csv(file):
            for name, mean in row.items():
                error = row.get(name.replace("_mean_", "_se_"), math.nan)
                if name.startswith("delta_error_mean_") and row["step"] <= last and math.isfinite(mean) and error > 0:
                    by_head[name].append(mean / error)
    return spread_of_sums(by_head)


def test_probes_that_round_the_o_of_delta_stochastically_all_drew_the_same() -> None:
    runs = ["run_a_seed_1", "run_a", "run_a_seed_2", "run_d", "run_d_fp32_pv", "run_a_fp32_pv"]
    said = prose(FOLDER / "README.md")
    listed = ", ".join(f"`{name}`" for name in runs[:-1]) + f" and `{runs[-1]}`"
    for measured, opening in ((of_other_layers, f"in {listed} it is"), (of_layer_1, "in the same order:")):
        found = {path.parent.name: measured(path.parent, 5000) for path in FOLDER.glob("*/probes.csv")}
        others = [value for name, value in found.items() if name not in runs and value == value]
        *most, last = [f"{found[name]:.2f}" for name in runs]
        values = f"{opening} {', '.join(most)} and {last}, in all other runs {min(others):.2f} to {max(others):.2f}."
        assert values in said
    # The table of docs/reproduction.md is of layer 1: the last round of the loop.
    low, high = (math.sqrt(pick(found[name] for name in runs)) for pick in (min, max))
    long = math.sqrt(of_layer_1(FOLDER / "run_d", 13_000))
    assert f"{low:.1f} to {high:.1f} times to 5,000; over all of `run_d`, the longest, {long:.1f} times" in said
    # Its delta is rounded stochastically, too, and every probe draws its own numbers.
    afresh = [measured(FOLDER / "run_c_fp32_pv_stochastic", 5000) for measured in (of_other_layers, of_layer_1)]
    assert f"in `run_c_fp32_pv_stochastic`, made with that, it is {afresh[0]:.2f} and {afresh[1]:.2f}." in said
    linked = f"first in `run_c_fp32_pv_stochastic`, [{afresh[0]:.2f} and {afresh[1]:.2f}]"
    assert linked in prose(ROOT / "docs/reproduction.md")


def heads_of(run: str) -> dict[int, dict[int, dict[str, float]]]:
    """By step and head of layer 1, the columns of heads.csv."""
    found: dict[int, dict[int, dict[str, float]]] = defaultdict(dict)
    with (FOLDER / run / "heads.csv").open(newline="") as file:
        for row in by_head(read_csv(file)):
            found[row["step"]][row["head"]] = row
    return found


def relative(row: dict[str, float]) -> float:
    return row["delta_error_rms"] / row["delta_rms"]


def in_words(values: Sequence[object]) -> str:
    *most, last = [str(value) for value in values]
    return f"{', '.join(most)} and {last}"


def short(value: float) -> str:
    return f"{value:.1e}".replace("e-0", "e-")


def test_what_is_said_of_the_heads_of_run_c_fp32_pv() -> None:
    found, said = heads_of("run_c_fp32_pv"), prose(FOLDER / "README.md")
    logits = {head: {step: rows[head]["max_logit"] for step, rows in found.items()} for head in range(12)}
    first = {head: min((s for s, x in of.items() if x > 1000), default=None) for head, of in logits.items()}
    grown = sorted((step, head) for head, step in first.items() if step is not None)
    heads = [head for _, head in grown]
    steps = in_words([f"{step:,}" for step, _ in grown])
    assert f"heads {in_words(heads)} of layer 1 grow, beyond 1,000 at {steps}; no other comes beyond 540" in said
    assert max(max(of.values()) for head, of in logits.items() if head not in heads) <= 540
    at = logits[heads[0]]
    assert (
        f"has {at[2000]:,.0f} at 2,000, {at[4000]:,.0f} at 4,000, and the largest, {max(at.values()):,.0f}, at" in said
    )
    later = {head: statistics.median(relative(rows[head]) for s, rows in found.items() if s >= 1500) for head in heads}
    whole = statistics.median(relative(row) for s, rows in found.items() if s >= 1500 for row in rows.values())
    a, b, c, d, e = heads
    assert f"in heads {in_words([a, b, c])} is {in_words([short(later[head]) for head in (a, b, c)])}, in" in said
    assert f"in {d} and {e} {short(later[d])} and {short(later[e])}, medians of the probes from 1,500 on" in said
    assert f"in all heads of the layer together {short(whole)}" in said
    top = [statistics.median(rows[head]["top_1"] for s, rows in found.items() if s >= 1500) for head in heads]
    assert f"their largest P is {min(top):.2f} to {max(top):.2f}." in said
    before = found[1000]
    first_three = in_words([f"{before[head]['top_1']:.2f}" for head in (a, b, c)])
    others = in_words([f"{before[head]['top_1']:.2f}" for head in (d, e)])
    assert f"the largest P is {first_three} in heads {in_words([a, b, c])} and {others} in {d} and {e}" in said
    assert f"in the layer's median head {statistics.median(row['top_1'] for row in before.values()):.2f}, and" in said
    errors = [relative(before[head]) for head in heads]
    assert f"the relative error {short(min(errors))} to {short(max(errors))} in the five" in said
    assert f"median head {short(statistics.median(relative(row) for row in before.values()))}." in said
    from_1000 = [rows[head] for s, rows in found.items() if s >= 1000 for head in heads]
    largest = max(abs(row["delta_error_mean"] / row["delta_error_se"]) for row in from_1000)
    assert f"more than {math.ceil(largest * 10) / 10} standard errors from zero at any probe from 1,000 on" in said


def test_how_heads_go_on_that_an_error_of_deltas_own_has_made_large() -> None:
    said = prose(FOLDER / "README.md")

    def grown(run: str) -> dict[int, dict[int, float]]:
        """The largest logits, by step, of the heads of layer 1 that come beyond 1,000."""
        found = heads_of(run)
        logits = {head: {step: rows[head]["max_logit"] for step, rows in found.items()} for head in range(12)}
        return {head: of for head, of in logits.items() if max(of.values()) > 1000}

    nearest, of_b = grown("run_c_fp32_pv"), grown("run_b_fp32_pv")
    ends = [of[5100] for of in nearest.values()]
    assert (
        f"At its last probe, {max(nearest[0]):,}, all five are above 1,000 ({min(ends):,.0f} to {max(ends):,.0f})"
        in said
    )
    lowest = {head: min(of[s] for s in of if s > min(t for t in of if of[t] > 1000)) for head, of in nearest.items()}
    again = {head: logit for head, logit in lowest.items() if logit < 1000}
    values = in_words([f"{logit:,.0f}" for logit in again.values()])
    assert f"heads {in_words(again)} after having been below it again (the lowest {values}); of the three" in said
    low, middle, high = sorted(of[5100] for of in of_b.values())
    assert f"of the three of `run_b_fp32_pv` one ({high:,.0f}; the others {low:,.0f} and {middle:,.0f})" in said

    found, back = heads_of("run_c_fp32_pv_stochastic"), grown("run_c_fp32_pv_stochastic")
    a, b = back
    steps = [in_words([f"{step:,}" for step, logit in of.items() if logit > 1000]) for of in back.values()]
    assert f"heads {a} and {b} of layer 1 alone come beyond 1,000, {a} at {steps[0]}, {b} at {steps[1]}; to" in said
    peaks = {head: max(of, key=of.__getitem__) for head, of in back.items()}
    at_peak = [found[step][head] for head, step in peaks.items()]
    largest = in_words([f"{back[head][step]:,.0f} at {step:,}" for head, step in peaks.items()])
    tops = in_words([f"{row['top_1']:.2f}" for row in at_peak])
    errors = in_words([short(relative(row)) for row in at_peak])
    assert f"to {largest}. Their largest P is {tops} there, and the relative error of delta {errors}." in said
    assert f"At 5,100 their logits are {back[a][5100]:.0f} and {back[b][5100]:.0f}." in said
    others = [found[step][head]["max_logit"] for step in found for head in range(12) if head not in (a, b, 9)]
    ninth = {step: rows[9]["max_logit"] for step, rows in found.items()}
    assert f"Head 9 comes to {max(ninth.values()):.0f} once, at {max(ninth, key=ninth.__getitem__):,}, no other" in said
    assert sum(logit > 500 for logit in ninth.values()) == 1
    assert "no other beyond 210, no other layer beyond 490." in said
    assert 200 < max(others) <= 210
    with (FOLDER / "run_c_fp32_pv_stochastic/probes.csv").open(newline="") as file:
        layers = [row[name] for row in read_csv(file) for name in row if name.startswith("max_logit_")]
    assert 480 < max(layers) <= 490
    whole = statistics.median(relative(row) for s, rows in found.items() if s >= 1500 for row in rows.values())
    assert f"in all heads of the layer together is {short(whole)}, median of the probes from 1,500 on" in said


def test_how_run_c_fp32_pv_stands_among_those_with_both_roundings() -> None:
    runs = [run for run in report.read_evidence(FOLDER) if run.has_base_recipe and not run.is_switched]
    groups = report_sharing.chosen(runs)
    ((_, own),) = [pair for pair in groups[report_sharing.OWN] if pair[0].name == "run_c_fp32_pv"]
    both = groups[report_sharing.BOTH]
    above = [run.name for run, facts in both if facts.logit[2000] > own.logit[2000]]
    wider = [run.name for run, facts in both if facts.w_q[2000] > own.w_q[2000]]
    assert (len(both), above, len(wider)) == (18, ["paper"], 4)
    assert sum(facts.logit[2400] > own.logit[2400] for _, facts in both) == 14
    assert [facts.w_q[5000] > own.w_q[5000] for _, facts in both if 5000 in facts.w_q] == [True] * 14
    said = f"one has a larger logit than {own.logit[2000]:,.0f} at 2,000, `paper`, and four a larger W_Q than"
    said += f" {own.w_q[2000]:.1f}; at 2,400 it is 14 of 18 with a larger logit than {own.logit[2400]:,.0f}, at 5,000 all 14"
    assert said in prose(FOLDER / "README.md")
    ((_, shares),) = [pair for pair in groups[report_sharing.OUTPUT] if pair[0].name == "fp32_pv"]
    steps = [step for step in own.logit if step >= report_sharing.FROM]
    # docs/reproduction.md: behind it at every probe to 5,000.
    assert len(steps) > 40
    assert all(shares.logit[step] < own.logit[step] for step in steps)


def test_how_much_heads_look_at_one_key_where_delta_has_an_error_of_its_own() -> None:
    runs = [run for run in report.read_evidence(FOLDER) if run.has_base_recipe and not run.is_switched]
    small = [run.name for run, _ in report_sharing.chosen(runs)[report_sharing.NEITHER]]

    def middle(run: str) -> float:
        return statistics.median(row["top_1"] for row in heads_of(run)[5000].values())

    with_one = ("run_d_fp32_pv", "run_b_fp32_pv", "run_c_fp32_pv", "run_c_fp32_pv_stochastic")
    own = ", ".join(f"{middle(run):.3f} in `{run}`" for run in with_one)
    ends = sorted(map(middle, small))
    said = f"{own}, and {ends[0]:.3f} to {ends[-1]:.3f} in the nine runs with hardly an error"
    assert len(small) == 9
    assert said in prose(FOLDER / "README.md")
    two = f"{middle('run_c_fp32_pv_stochastic'):.3f}; to nearest {middle('run_c_fp32_pv'):.3f}"
    assert f"[largest P, median over heads, {two}]" in prose(ROOT / "docs/reproduction.md")


def test_where_the_gradient_norm_of_torchs_kernel_is_above_one() -> None:
    """The grey points of large_logits.png."""
    by_name = {run.name: (run, facts) for run, facts in report_blocks.told(report.read_evidence(FOLDER))}

    def above(name: str) -> list[int]:
        run, facts = by_name[name]
        medians = {
            step: analysis_report.grad_norms(run.records, step, step + 100) for step in facts.logit if step >= 1000
        }
        return [step for step, norms in medians.items() if norms and statistics.median(norms) > 1]

    first, second = above("sdpa_flash"), above("sdpa_flash_seed_2")
    said = (
        f"is above 1 at {len(first)} probes, from {first[0]:,} on, that of `sdpa_flash_seed_2` at {len(second)}, from"
    )
    assert f"{said} {second[0]:,} on, that of `sdpa_flash_seed_1` at none" in prose(FOLDER / "README.md")
    assert above("sdpa_flash_seed_1") == []
    caption = prose(ROOT / "docs/reproduction.md")
    assert f"torch's kernel on seed 42 [from {first[0]:,} on" in caption
    assert f"and on seed 2 from {second[0]:,} on]" in caption


def test_what_is_said_of_softcap() -> None:
    logits = [
        max(row["max_logit"] for row in rows.values()) for step, rows in heads_of("softcap").items() if step >= 1100
    ]
    said = f"the largest logit of layer 1, behind the cap, is {min(logits):.1f} to {max(logits):.1f} from 1,100 on."
    assert said in prose(FOLDER / "README.md")


def largest_of_layers(run: str) -> dict[int, dict[int, float]]:
    """By step and layer: heads.csv has layer 1, probes.csv the others."""
    found = {step: {1: max(row["max_logit"] for row in rows.values())} for step, rows in heads_of(run).items()}
    with (FOLDER / run / "probes.csv").open(newline="") as file:
        for row in read_csv(file):
            prefix = "max_logit_"
            found[row["step"]] |= {int(name.removeprefix(prefix)): row[name] for name in row if name.startswith(prefix)}
    return found


def test_what_is_said_of_qk_clip() -> None:
    said, docs = prose(FOLDER / "README.md"), prose(ROOT / "docs/reproduction.md")
    found = largest_of_layers("qk_clip")
    assert {len(layers) for layers in found.values()} == {12}
    largest, step, layer = max(
        (logit, step, layer) for step, layers in found.items() for layer, logit in layers.items()
    )
    first = max(layers[1] for layers in found.values())
    assert f"probe is {largest:.1f}, in layer {layer} at {step:,}; of layer 1 it is {first:.1f}. No gradient" in said
    assert f"[no probe has a logit above {math.ceil(largest)}, in any layer]" in docs

    by_name = {run.name: run for run in report.read_evidence(FOLDER)}

    def at_the_end(run: str) -> str:
        records = [row for row in by_name[run].records if 12_500 <= row["step"] < 13_000 and row["step"] % 10 == 0]
        assert len(records) == 50
        return f"{statistics.mean(row['train_loss'] for row in records):.3f}"

    own, normed, capped, unbiased = (at_the_end(run) for run in ("qk_clip", "qk_norm", "softcap", "delta_from_p"))
    others = f"{own}, that of `qk_norm` {normed}, of `softcap` {capped}, of `delta_from_p` {unbiased}"
    assert f"every tenth step of the last 500, is {others}" in said
    assert f"in the last 500 steps it is [{others}]" in docs

    def lowest(run: str) -> tuple[float, int]:
        return min((row["val_loss"], row["step"]) for row in by_name[run].records if "val_loss" in row)

    (loss, step), (unbiased_loss, unbiased_step) = lowest("qk_clip"), lowest("delta_from_p")
    text = f"lowest at {step:,}, {loss:.3f}, that of `delta_from_p` at {unbiased_step:,}, {unbiased_loss:.3f}."
    assert text in said
    assert f"([{loss:.3f} and {unbiased_loss:.3f}]" in docs


def test_what_is_said_of_run_c_fp32_pv_o() -> None:
    found = largest_of_layers("run_c_fp32_pv_o")
    assert {len(layers) for layers in found.values()} == {12}
    first, step = max((layers[1], step) for step, layers in found.items())
    logits = {head: row["max_logit"] for head, row in heads_of("run_c_fp32_pv_o")[step].items()}
    others = [(x, layer, step) for step, layers in found.items() for layer, x in layers.items() if layer != 1]
    largest, layer, at = max(others)
    said = f"layer 1 is {first:.1f}, in head {max(logits, key=logits.__getitem__)} at {step:,}, of any other layer"
    assert f"{said} {largest:.1f} (layer {layer}, {at:,})." in prose(FOLDER / "README.md")
