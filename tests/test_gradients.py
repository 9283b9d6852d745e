"""analysis/gradients.py and its script: on a BF16 model whose layer 1 looks at single keys, with logits of several hundred."""

from __future__ import annotations

import csv
import dataclasses
import functools
import itertools
import re
import statistics
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
import torch
from prose import prose
from tiny_runs import Place, new_place
from torch import Tensor

import config as configuration
from analysis import gradients as module
from analysis.attention_statistics import attention_statistics
from analysis.capture import capture
from analysis.gradients import (
    REFERENCE,
    compare,
    gradients,
    larger_logits,
    layer_of_largest_w_q,
    parse_attention,
    replaced,
    served_by,
)
from analysis.report_onset import THRESHOLD
from attention import AttentionConfig, AttentionRule, AttentionSpec, LayerPlan
from config import TrainConfig
from data.batches import DataConfig
from errors import UserError
from model import GPT, ModelConfig, initialise
from scripts import gradients as script
from training.checkpoint import CheckpointConfig, Checkpoints
from training.intervention import Switch
from training.optim import gradient_norm
from training.precision import PrecisionConfig

T, LAYER = 32, 1
SHAPE = ModelConfig(n_layer=3, n_head=2, n_embd=32, block_size=T, vocab_size=256, vocab_multiple=1)
OWN = AttentionConfig(flash_backend="flash_reference", default=AttentionSpec(preset="flash"))


def autocast() -> AbstractContextManager[object]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def batch(seed: int, sequences: int = 4) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(SHAPE.vocab_size, (sequences, T + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


BATCHES = [batch(seed) for seed in range(3)]


def sharp(attention: AttentionConfig = OWN) -> GPT:
    """Random weights; W_Q and W_K of layer 1 are so long that its rows have one key each."""
    model = GPT(SHAPE, attention.resolve(SHAPE.n_layer, SHAPE.n_head))
    initialise(model, 1)
    with torch.no_grad():
        model.transformer.wte.weight *= 50
        model.attentions()[LAYER].c_attn.weight[: 2 * SHAPE.n_embd] *= 80
    return model.train()


@pytest.fixture(scope="module")
def model() -> GPT:
    return sharp()


def own(model: GPT) -> tuple[LayerPlan, ...]:
    return tuple(attention.plan for attention in model.attentions())


def measured(model: GPT, name: str, batches: Sequence[tuple[Tensor, Tensor]] = BATCHES, **settings: float):  # type: ignore[no-untyped-def]
    plans = replaced(own(model), parse_attention(name), LAYER)
    return gradients(model, plans, batches, LAYER, autocast=autocast, **settings)  # type: ignore[arg-type]


def differences(model: GPT, name: str) -> list[float]:
    """On every batch, then of the average."""
    found, reference = ([*each, average] for each, average in (measured(model, name), measured(model, REFERENCE)))
    return [compare(one, other).difference for one, other in zip(found, reference, strict=True)]


def test_the_model_is_as_its_name_says(model: GPT) -> None:
    (seen,) = capture(model, *BATCHES[0], [LAYER], autocast=autocast())
    statistics = attention_statistics(seen.q_BTHD, seen.k_BTHD, scale=seen.scale)
    assert statistics.max_logit.min() > 200
    assert statistics.top_1.min() > 0.9


def test_the_reference_does_not_differ_from_itself(model: GPT) -> None:
    assert differences(model, "standard numerics=fp32") == [0.0] * 4


def test_delta_from_p_is_nearer_to_the_reference_where_the_error_of_delta_matters(model: GPT) -> None:
    for flash, from_p in zip(differences(model, "flash"), differences(model, "flash_delta_from_p"), strict=True):
        assert 0 < 2 * from_p < flash


def test_a_site_of_the_command_line_counts(model: GPT) -> None:
    """One site away from the reference, delta from P makes all the difference."""
    rounded, unrounded = (
        differences(model, f"flash numerics=fp32 delta_output={value}") for value in ("output", "fp32")
    )
    assert all(0 < 2 * b < a for a, b in zip(rounded, unrounded, strict=True))


def test_the_own_attention_gives_the_loss_and_the_gradient_of_training(model: GPT) -> None:
    each, _ = measured(model, "run")
    for number, (found, (tokens, targets)) in enumerate(zip(each, BATCHES, strict=True)):
        twin = sharp()
        with autocast():
            _, loss = twin(tokens, targets, torch.tensor(number))
        loss.backward()
        assert found.loss == loss.item()
        weight = twin.attentions()[LAYER].c_attn.weight
        assert weight.grad is not None
        assert torch.equal(found.dw_q_CC, weight.grad[: SHAPE.n_embd])
        assert found.norm == pytest.approx(gradient_norm(twin).item(), rel=1e-6)


def test_the_average_is_that_of_the_gradients(model: GPT) -> None:
    each, average = measured(model, "flash")
    reference_each, reference = measured(model, REFERENCE)
    dw, dw_reference = (
        np.mean([one.dw_q_CC.double().numpy() for one in found], axis=0) for found in (each, reference_each)
    )
    compared = compare(average, reference)
    assert compared.difference == pytest.approx(np.linalg.norm(dw - dw_reference) / np.linalg.norm(dw_reference))
    cosine = (dw * dw_reference).sum() / np.linalg.norm(dw) / np.linalg.norm(dw_reference)
    assert 1 - compared.cosine == pytest.approx(1 - cosine, rel=1e-6)
    assert (compared.spectral, compared.frobenius) == pytest.approx((np.linalg.norm(dw, 2), np.linalg.norm(dw)))
    assert average.loss == pytest.approx(np.mean([one.loss for one in each]))
    assert average.max_logit == max(one.max_logit for one in each)


def test_the_norm_of_the_average_is_that_of_one_large_batch(model: GPT) -> None:
    """In FP32, where the size of a batch rounds nothing."""
    together = tuple(torch.cat(parts) for parts in zip(*BATCHES, strict=True))
    plans = replaced(own(model), parse_attention(REFERENCE))
    context = lambda: torch.autocast("cpu", enabled=False)  # noqa: E731
    (large,), _ = gradients(model, plans, [together], LAYER, autocast=context)  # type: ignore[list-item]
    each, average = gradients(model, plans, BATCHES, LAYER, autocast=context)
    assert average.norm == pytest.approx(large.norm, rel=1e-3)
    assert np.mean([one.norm for one in each]) > 1.02 * average.norm


def test_the_largest_logit_is_that_of_the_layer(model: GPT) -> None:
    each, _ = measured(model, "run", BATCHES[:1])
    (seen,) = capture(model, *BATCHES[0], [LAYER], autocast=autocast())
    expected = attention_statistics(seen.q_BTHD, seen.k_BTHD, scale=seen.scale).max_logit.max()
    assert each[0].max_logit == pytest.approx(float(expected), rel=1e-6)


def test_a_batch_draws_the_same_for_every_attention_and_another_batch_draws_anew(model: GPT) -> None:
    each, _ = measured(model, "flash_run_a", [BATCHES[0]] * 2)
    again, _ = measured(model, "flash_run_a", [BATCHES[0]] * 2)
    assert all(torch.equal(one.dw_q_CC, other.dw_q_CC) for one, other in zip(each, again, strict=True))
    assert not torch.equal(each[0].dw_q_CC, each[1].dw_q_CC)


def test_a_loss_scale_is_taken_out_again(model: GPT) -> None:
    (plain,), _ = measured(model, "flash", BATCHES[:1])
    (scaled,), _ = measured(model, "flash", BATCHES[:1], loss_scale=2.0**10)
    assert torch.equal(plain.dw_q_CC, scaled.dw_q_CC)
    assert plain.norm == scaled.norm


def test_nothing_is_left_behind(model: GPT, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = own(model)
    measured(model, "flash_fp32_pv")
    monkeypatch.setattr(module, "_norm", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        measured(model, "flash_fp32_pv")
    assert own(model) == plans
    assert all("attend" not in vars(attention) for attention in model.attentions())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_layer_with_the_largest_w_q_is_found(model: GPT) -> None:
    assert layer_of_largest_w_q(model) == LAYER


MIXED = AttentionConfig(
    default=AttentionSpec(numerics="paper", sites=("accumulator=fp32",)),
    rules=(AttentionRule(layers=(1,), heads=(1,), attention=AttentionSpec(preset="flash_fp32_o")),),
).resolve(3, 2)


def test_one_layer_leaves_the_plans_of_the_others_alone() -> None:
    plans = replaced(MIXED, parse_attention("flash_delta_from_p"), 1)
    assert [plan is before for plan, before in zip(plans, MIXED, strict=True)] == [True, False, True]


def test_a_preset_keeps_the_base_of_every_head_and_no_single_site() -> None:
    groups = replaced(MIXED, parse_attention("flash_delta_from_p output=m5"), 1)[1].groups
    assert {group.heads: (group.spec.numerics, group.spec.sites) for group in groups} == {
        (0,): ("paper", ("output=m5",)),
        (1,): ("hardware", ("output=m5",)),
    }


def test_a_base_that_is_named_is_that_of_all_heads() -> None:
    for plan in replaced(MIXED, parse_attention("standard numerics=fp32")):
        assert [(group.heads, group.spec.numerics) for group in plan.groups] == [((0, 1), "fp32")]


def test_a_backend_serves_the_flash_presets_alone() -> None:
    mixed = AttentionConfig(rules=(AttentionRule(layers=(0,), attention=AttentionSpec(preset="standard")),))
    plans = served_by(mixed.resolve(2, 2), "flash_reference")
    assert [plan.groups[0].backend for plan in plans] == ["standard", "flash_reference"]
    assert replaced(plans, parse_attention("flash_run_a"))[0].groups[0].backend == "flash_reference"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("flashy", "'flashy': expected one of run, standard"),
        ("flash numerics=hardwear", "'hardwear': expected one of hardware"),
        ("flash no_site=fp32", "'no_site': expected one of inputs"),
        ("flash fp32", "'fp32': expected site=value"),
        ("flash numerics=fp32 numerics=paper", "one numerics=BASE at most"),
        ("", "'': expected one of run"),
    ],
)
def test_an_attention_that_there_is_not_is_named(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse_attention(text)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with new_place(tmp_path_factory) as place:
        yield place


@pytest.fixture(scope="module")
def checkpoint(place: Place) -> Path:
    """Of a run with Triton's kernels, which switched its last layer."""
    config = TrainConfig(
        model=SHAPE,
        attention=AttentionConfig(),
        data=DataConfig(dataset=str(place.data), sequence_length=T),
        precision=PrecisionConfig(dtype="bfloat16"),
    )
    return Checkpoints(place.folder / "checkpoints", CheckpointConfig()).save(
        7,
        model_state=sharp().state_dict(),
        optimizer_state={"state": {}, "param_groups": []},
        scaler_state={},
        rng=[torch.zeros(1, dtype=torch.uint8)],
        position=0,
        config_json=configuration.to_json(config),
        extra={"switches": [dataclasses.asdict(Switch(5, 2, "flash_fp32_o"))]},
    )


FEW = ["--batches", "2", "--sequences", "2", "--backend", "flash_reference", "--device", "cpu"]


def test_what_is_written_reads_back(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "gradients.csv"
    names = ["run", "flash_fp32_o", "flash  probabilities=fp32"]
    script.main([str(checkpoint), *FEW, "--layer", "2", "--attention", *names, "--out", str(out)])
    said = capsys.readouterr().out
    assert "attention replaced in layer 2; dW_Q of layer 2" in said
    rows = list(csv.DictReader(out.open()))
    assert tuple(rows[0]) == script.COLUMNS
    attentions = ["reference", "run", "flash_fp32_o", "flash probabilities=fp32"]
    assert [(row["attention"], row["batch"]) for row in rows] == [
        (name, number) for name in attentions for number in ("0", "1", "average")
    ]
    numbers = {
        name: [[row[key] for key in script.NUMBERS] for row in rows if row["attention"] == name] for name in attentions
    }
    # The run has switched that layer to this preset.
    assert numbers["run"] == numbers["flash_fp32_o"]
    assert numbers["run"] != numbers["flash probabilities=fp32"]
    assert [float(row["difference"]) > 0 for row in rows] == [row["attention"] != "reference" for row in rows]
    assert {(row["step"], row["layer"], row["replaced"]) for row in rows} == {("7", "2", "layer 2")}
    assert {(row["batch"] == "average", row["sequences"], row["tokens"]) for row in rows} == {
        (False, "2", "32"),
        (True, "4", "32"),
    }
    line = next(row for row in rows if (row["attention"], row["batch"]) == ("run", "average"))
    assert f"{float(line['difference']):>10.3g}  {float(line['cosine']):>+9.4f}" in said


def test_the_table_has_a_line_an_attention(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "gradients.csv"
    script.main([str(checkpoint), *FEW, "--attention", "run", "--out", str(out)])
    capsys.readouterr()
    script.main(["--table", str(out)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert len({line.count("|") for line in lines}) == 1
    rows = [row for row in csv.DictReader(out.open()) if row["attention"] == "run"]
    norms = sorted(float(row["gradient_norm"]) for row in rows[:2])
    assert (
        f"| {np.mean(norms):.4g} ({norms[0]:.4g} to {norms[1]:.4g}) | {float(rows[2]['gradient_norm']):.4g} |"
        in lines[3]
    )
    assert "| all layers | 1 | `run` | 2 |" in lines[3]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--attention", "flashy"], "'flashy': expected one of"),
        (["--attention", "flash", "flash"], "'flash': expected each named once"),
        (["--attention", "flash no_site=1"], "'no_site': expected one of"),
        (["--attention", "flash output=fp33"], "'fp33': expected one of"),
        (["--attention", "sdpa_math output=m5"], "it rounds as its kernel does"),
        (["--layer", "3"], "--layer = 3: expected 0 to 2"),
        (["--layer", "-1"], "--layer = -1: expected 0 to 2"),
        (["--backend", "standard"], "--backend"),
        (["--backend", ""], "--backend"),
        (["--batches", "0"], "--batches"),
        (["--table", "nowhere.csv"], "--table"),
    ],
)
def test_what_cannot_be_is_one_line(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        script.main([str(checkpoint), *FEW, *arguments])
    message = capsys.readouterr().err
    assert (stop.value.code, message.count("\n")) == (2, 1)
    assert words in message


def test_nothing_stands_in_for_a_kernel_that_cannot_run(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attention.registry._interprets", lambda: False)
    with pytest.raises(SystemExit) as stop:
        script.main([str(checkpoint), "--device", "cpu"])
    assert stop.value.code == 2
    assert "--backend flash_reference" in capsys.readouterr().err


def test_a_file_of_another_kind_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.csv").write_text("step,loss\n1,2\n")
    with pytest.raises(SystemExit) as stop:
        script.main(["--table", str(tmp_path / "x.csv")])
    assert stop.value.code == 2
    assert "other columns" in capsys.readouterr().err


# ---- larger logits


def test_larger_logits_are_larger_by_the_factor_and_go_back_to_the_bit(model: GPT) -> None:
    weight = model.attentions()[LAYER].c_attn.weight
    before = weight.detach().clone()
    (plain,), _ = gradients(model, own(model), BATCHES[:1], LAYER, autocast=autocast)
    with larger_logits(model, LAYER, 16.0):
        (large,), _ = gradients(model, own(model), BATCHES[:1], LAYER, autocast=autocast)
    # By a power of two, which no rounding of q and k sees.
    assert large.max_logit == 16 * plain.max_logit
    assert torch.equal(weight, before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--enlarge", "10"], "1 without --layer"),
        (["--enlarge", "0", "--layer", "1"], "numbers above 0"),
        (["--enlarge", "nan", "--layer", "1"], "numbers above 0"),
    ],
)
def test_factors_that_cannot_be_are_one_line(
    checkpoint: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        script.main([str(checkpoint), *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_several_factors_are_measured_one_after_the_other(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "enlarged.csv"
    sampling = ["--batches", "1", "--sequences", "2", "--device", "cpu", "--backend", "flash_reference"]
    script.main([str(checkpoint), "--layer", "1", "--enlarge", "1", "4", *sampling, "--out", str(out)])
    with out.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["attention"] == "reference" and row["batch"] == "0"]
    assert [row["enlarged"] for row in rows] == ["1", "4"]
    assert float(rows[1]["max_logit"]) == pytest.approx(4 * float(rows[0]["max_logit"]), rel=1e-6)
    assert "logits of layer 1 times 4:" in capsys.readouterr().out


FOLDER = Path(__file__).resolve().parent.parent / "results/gradients"


def published(name: str = "enlarged.csv") -> dict[tuple[str, str], list[tuple[float, float]]]:
    """(factor, attention) -> (median difference over the batches, largest logit) of each checkpoint."""
    with (FOLDER / name).open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["batch"] != script.AVERAGE]
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for key in dict.fromkeys((row["checkpoint"], row["enlarged"], row["attention"]) for row in rows):
        same = [row for row in rows if (row["checkpoint"], row["enlarged"], row["attention"]) == key]
        median = statistics.median(float(row["difference"]) for row in same)
        found.setdefault(key[1:], []).append((median, max(float(row["max_logit"]) for row in same)))
    return found


@pytest.mark.parametrize("name", ["enlarged.csv", "saved_statistics.csv"])
def test_the_published_table_is_that_of_its_file(name: str) -> None:
    found, readme = published(name), prose(FOLDER / "README.md")
    names = [name for name in dict.fromkeys(name for _, name in found) if name != "reference"]
    assert f"| logits times | largest logit | {' | '.join(f'`{name}`' for name in names)} |" in readme
    for factor in dict.fromkeys(factor for factor, _ in found):
        logits = [logit for _, logit in found[factor, "reference"]]
        cells = [" / ".join(f"{median:.2g}" for median, _ in found[factor, name]) for name in names]
        largest = " / ".join(f"{logit:,.0f}" for logit in logits)
        assert f"| {int(factor):,} | {largest} | {' | '.join(cells)} |" in readme


@pytest.mark.parametrize("place", ["results/gradients/README.md", "docs/reproduction.md"])
def test_what_is_said_beyond_twice_the_threshold_is_in_the_file(place: str) -> None:
    found, said = published(), (FOLDER.parent.parent / place).read_text()
    ranges = []
    for name in ("flash", "flash_subtracted"):
        beyond = [
            m
            for (_, attention), pairs in found.items()
            if attention == name
            for m, logit in pairs
            if logit > 2 * THRESHOLD
        ]
        ranges.append(f"{min(beyond):.1g} to {max(beyond):.2g}")
    assert f"off by {ranges[0]} times its size" in said
    assert f"by {ranges[1]}" in said.partition(ranges[0])[2]


def test_behind_the_threshold_the_multiply_add_alone_makes_the_difference() -> None:
    """Same weights and batches, one site changed: on each of the three models."""
    found = published()
    for folded, subtracted in (("flash", "flash_subtracted"), ("flash_run_a", "flash_run_a exponent=subtracted")):
        pairs = zip(found["30000", folded], found["30000", subtracted], strict=True)
        assert min(one / other for (one, _), (other, _) in pairs) > 10
    pairs = zip(found["1000", "flash"], found["1000", "flash_subtracted"], strict=True)
    assert all(0.8 < one / other < 1.25 for (one, _), (other, _) in pairs)


def test_the_two_published_files_agree_where_they_measure_the_same() -> None:
    apart, found = published("saved_statistics.csv"), published()
    common = found.keys() & apart.keys()
    assert {name for _, name in common} == {"reference", "flash_delta_from_p"}
    assert all(found[key] == apart[key] for key in common)


APART = "flash_delta_from_p saved_statistics=max_and_sum"
CURE = "flash_delta_from_p_subtracted"


def test_with_m_and_log_l_apart_delta_from_p_has_the_same_error_at_all_sizes() -> None:
    found, said = published("saved_statistics.csv"), prose(FOLDER / "README.md")
    medians = [m for (_, name), pairs in found.items() if name in (APART, CURE) for m, _ in pairs]
    assert len(medians) == 30
    assert f"at all sizes, {min(medians):.2g} to {max(medians):.2g}.**" in said
    assert max(medians) < 2 * min(medians)


def test_at_the_largest_logits_it_is_the_best_of_both_files() -> None:
    found, said = published() | published("saved_statistics.csv"), prose(FOLDER / "README.md")
    largest = {name: [m for m, _ in pairs] for (factor, name), pairs in found.items() if factor == "30000"}
    best = min((m for name, m in largest.items() if name not in ("reference", APART) and CURE not in name), key=max)
    assert f"the best of all others in both tables by {min(best):.2g} to {max(best):.2g}." in said
    assert max(largest[CURE]) < 0.25 * min(best)


def test_no_batch_is_far_off_with_it() -> None:
    with (FOLDER / "saved_statistics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["attention"] == CURE and row["batch"] != script.AVERAGE]
    assert f"No batch of the {len(rows)} is off by more than 0.011" in prose(FOLDER / "README.md")
    assert max(float(row["difference"]) for row in rows) < 0.011


def printed() -> dict[tuple[str, str], tuple[str, str]]:
    """(step, attention) -> (gradient norm, difference of dW_Q), medians over the batches, as the script printed them."""
    found, step = {}, ""
    for line in (FOLDER / "flash_printed.txt").read_text().splitlines():
        if start := re.search(r": step (\d+), trained with", line):
            step = start[1]
        elif " batches " in line:
            name, numbers = line.split("  batches  ")
            fields = numbers.replace(" to ", "-").split()
            found[step, name.strip()] = (fields[1], fields[5])
    return found


def test_the_published_table_of_gpt_2_is_what_was_printed() -> None:
    found, readme = printed(), prose(FOLDER / "README.md")
    names = [name for step, name in found if step == "3000" and name != "standard numerics=fp32"]
    assert len(names) == 10
    for name in names:
        cells = [*found["3000", name], *found["3500", name]]
        assert f"| {name} | {' | '.join(cells)} |" in readme


def test_in_gpt_2_too_the_multiply_add_alone_makes_the_gradient() -> None:
    """The same checkpoint of `flash`, one site of one layer changed: behind 2^16 ln 2 it decides, before it does not."""
    norms = {key: float(norm) for key, (norm, _) in printed().items()}
    for folded, subtracted in (("run", "flash_subtracted"), ("flash_run_a", "flash_run_a exponent=subtracted")):
        assert norms["3500", folded] > 8 * norms["3500", subtracted]
    assert norms["3000", "run"] == pytest.approx(norms["3000", "flash_subtracted"], rel=0.01)


NEXT = (("8050", "2"), ("8090", "2"), ("8100", "2"), ("8200", "2"), ("8100", "3"), ("8100", "1"))
RUN, UNROUNDED, WIDE_O = "run", "flash_fp32_pv", "flash_fp32_o exponent=subtracted"
SAME_FORWARD = (RUN, WIDE_O, CURE)


@functools.cache
def rows_of_next_layers() -> tuple[dict[str, str], ...]:
    with (FOLDER / "next_layers.csv").open(newline="") as file:
        return tuple(csv.DictReader(file))


def replaced_in(place: tuple[str, str], attention: str, column: str) -> tuple[list[float], float]:
    """A column of next_layers.csv at (step, layer): of every batch, and of the average."""
    rows = (
        row for row in rows_of_next_layers() if (row["step"], row["layer"], row["attention"]) == (*place, attention)
    )
    found = {row["batch"]: float(row[column]) for row in rows}
    average = found.pop(script.AVERAGE)
    assert list(found) == [str(number) for number in range(8)]
    return list(found.values()), average


def attentions_of_next_layers() -> list[str]:
    return [name for name in dict.fromkeys(row["attention"] for row in rows_of_next_layers()) if name != REFERENCE]


def three_digits(value: float) -> str:
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 1000 else f"{value:.3g}"


def errors_of(place: tuple[str, str], attention: str) -> tuple[list[float], float]:
    """||dW_Q - dW_ref|| of every batch, and of the average."""
    each, average = replaced_in(place, attention, "difference")
    sizes, of_average = replaced_in(place, "reference", "dw_q_frobenius")
    return [a * b for a, b in zip(each, sizes, strict=True)], average * of_average


def cosine_of_two(each: Sequence[float], average: float) -> float:
    """Of two batches' errors, from their sizes and that of their mean: over all pairs, weighted by the sizes."""
    squares = sum(size**2 for size in each)
    return float(((len(each) * average) ** 2 - squares) / (sum(each) ** 2 - squares))


def signs_as_large(each: Sequence[float], average: float) -> int:
    """Of all signs that errors along one line can have: with how many is their mean as large?"""
    signs = itertools.product((1, -1), repeat=len(each))
    means = (abs(sum(s * size for s, size in zip(one, each, strict=True))) / len(each) for one in signs)
    return sum(mean >= average for mean in means)


def test_the_cosine_of_two_errors_is_that_of_vectors() -> None:
    errors = np.random.default_rng(0).standard_normal((8, 5)) + 0.5
    sizes, average = np.linalg.norm(errors, axis=1), np.linalg.norm(errors.mean(axis=0))
    weights = np.outer(sizes, sizes)[np.triu_indices(8, 1)]
    pairs = (errors @ errors.T)[np.triu_indices(8, 1)]
    assert cosine_of_two(list(sizes), float(average)) == pytest.approx(pairs.sum() / weights.sum())


def test_the_published_tables_of_the_next_layers_are_those_of_their_file() -> None:
    readme, names = prose(FOLDER / "README.md"), attentions_of_next_layers()

    def line(name: str, cells: Sequence[str]) -> str:
        return f"| {name} | {' | '.join(cells)} |"

    def both(column: str, attention: str) -> list[str]:
        pairs = (replaced_in(place, attention, column) for place in NEXT)
        return [f"{three_digits(statistics.median(each))} / {three_digits(average)}" for each, average in pairs]

    places = [f"layer {layer} at {int(step):,}" for step, layer in NEXT]
    for title in ("dW_Q off by, of its size", "gradient norm", "cosine of two batches' errors"):
        assert line(title, places) in readme
    largest = [f"{max(replaced_in(place, 'reference', 'max_logit')[0]):,.0f}" for place in NEXT]
    assert line("largest logit", largest) in readme
    assert line("its size in the reference", both("dw_q_frobenius", "reference")) in readme
    assert line("reference", both("gradient_norm", "reference")) in readme
    assert names == ["reference", RUN, UNROUNDED, "flash_delta_from_p", CURE, WIDE_O]
    for name in names[1:]:
        cosines = [f"{cosine_of_two(*errors_of(place, name)):+.2f}" for place in NEXT]
        for cells in (both("difference", name), both("gradient_norm", name), cosines):
            assert line(f"`{name}`", cells) in readme


@pytest.mark.parametrize("place", NEXT, ids="-".join)
def test_three_of_these_attentions_have_one_forward_pass(place: tuple[str, str]) -> None:
    own, *others = (replaced_in(place, name, "loss") for name in SAME_FORWARD)
    assert all(other == own for other in others)
    assert replaced_in(place, "reference", "loss") != own


def test_at_8200_layer_2_makes_the_gradient_by_the_rounding_of_o() -> None:
    """In every batch, with the same forward pass; P_bar unrounded is no help."""
    place = ("8200", "2")
    own, wide, cured = (replaced_in(place, name, "gradient_norm") for name in SAME_FORWARD)
    assert min(a / b for a, b in zip(own[0], cured[0], strict=True)) > 1.8
    assert all(a > b for a, b in zip(own[0], wide[0], strict=True))
    assert own[1] > 4 * max(wide[1], cured[1])
    assert replaced_in(place, UNROUNDED, "gradient_norm")[1] > 0.9 * own[1]
    readme = prose(FOLDER / "README.md")
    errors = [errors_of(place, name) for name in SAME_FORWARD]
    first, *rest = [(three_digits(statistics.median(each)), three_digits(average)) for each, average in errors]
    others = "; ".join(" and ".join(pair) for pair in rest)
    assert f"dW_Q is off by {first[0]} in the median batch, {first[1]} in the average; {others};" in readme


def test_up_to_8100_the_gradient_norm_is_hardly_that_of_layer_2() -> None:
    readme = prose(FOLDER / "README.md")
    own, cured = (replaced_in(("8100", "2"), name, "gradient_norm")[0] for name in (RUN, CURE))
    times = [a / b for a, b in zip(own, cured, strict=True)]
    assert min(times) > 1
    assert f"is {min(times):.2f} to {max(times):.2f} times that of `{CURE}`" in readme
    (own_8090, reference_8090), (own_8050, reference_8050) = (
        [replaced_in((step, "2"), name, "gradient_norm")[1] for name in (RUN, "reference")] for step in ("8090", "8050")
    )
    said = f"{own_8090:.3g} with the run's own attention there, {reference_8090:.3g} with the reference"
    assert f"{said}, against {own_8050:.3g} and {reference_8050:.3g} at 8,050" in readme
    cosines = [statistics.median(replaced_in((step, "2"), RUN, "cosine")[0]) for step in ("8100", "8200")]
    assert f"{cosines[0]:+.2f} in the median batch; at 8,200 {cosines[1]:+.2f}" in readme


def test_at_8200_the_error_of_a_rounded_o_points_one_way_in_all_batches_and_no_other_does() -> None:
    for place in NEXT:
        for name in attentions_of_next_layers()[1:]:
            each, average = errors_of(place, name)
            if place == ("8200", "2") and name in (RUN, UNROUNDED):
                assert cosine_of_two(each, average) > 0.85
                assert signs_as_large(each, average) == 2
            else:
                assert abs(cosine_of_two(each, average)) < 0.25
                assert signs_as_large(each, average) > 25
    before = [str(signs_as_large(*errors_of((step, "2"), RUN))) for step in ("8050", "8090", "8100")]
    assert f"for which {before[0]}, {before[1]} and {before[2]} of the 256" in prose(FOLDER / "README.md")


def test_layer_1_of_flash_had_such_errors_before_its_break() -> None:
    """From printed medians: the error of the average over that of the median batch."""
    sizes, found, step, name = dict[str, float](), dict[tuple[str, str], float](), "", ""
    for line in (FOLDER / "flash_printed.txt").read_text().splitlines():
        if start := re.search(r": step (\d+), trained with", line):
            step = start[1]
        elif match := re.match(r"(.*?) (batches|average) (.*)", line):
            numbers = match[3].replace(" to ", "-").split()
            name = match[1].strip() or name
            size, difference = map(float, numbers[4:6] if match[2] == "batches" else numbers[3:5])
            if name == "reference":
                sizes[match[2]] = size
            elif match[2] == "batches":
                found[step, name] = 1 / (difference * sizes["batches"]) if difference else 0.0
            else:
                found[step, name] *= difference * sizes["average"]
    early = {name: f"{found['3000', name]:.2f}" for name in (RUN, "flash_subtracted", UNROUNDED, "sdpa_flash")}
    readme = prose(FOLDER / "README.md")
    assert f"is {early.pop(RUN)} of the median batch's at 3,000, before the break" in readme
    assert f"({', '.join(f'`{name}` {ratio}' for name, ratio in early.items())})" in readme
    assert f"and {found['3500', RUN]:.2f} at 3,500" in readme


def test_the_error_of_layer_1_is_as_its_sentence_says() -> None:
    place, readme = ("8100", "1"), prose(FOLDER / "README.md")
    (size, error, norm), cosine = (
        (
            statistics.median(replaced_in(place, "reference", "dw_q_frobenius")[0]),
            statistics.median(errors_of(place, RUN)[0]),
            statistics.median(replaced_in(place, RUN, "gradient_norm")[0]),
        ),
        statistics.median(replaced_in(place, RUN, "cosine")[0]),
    )
    assert f"cosine {cosine:+.2f}. That size is {size:.3g}," in readme
    assert f"the error, {error:.3g}, is {100 * error / norm:.1f} % of the gradient norm" in readme
    names = [name for name in attentions_of_next_layers() if name != "flash_delta_from_p"]
    norms = [statistics.median(replaced_in(place, name, "gradient_norm")[0]) for name in names]
    assert f"which is {min(norms):.3g} to {max(norms):.3g} with any" in readme


def test_w_q_of_layer_2_grows_meanwhile_as_said() -> None:
    with (FOLDER.parent / "fast_failure/flash_subtracted/probes.csv").open(newline="") as file:
        norms = {row["step"]: float(row["w_q_norm_2"]) for row in csv.DictReader(file)}
    assert f"goes from {norms['8100']:.0f} to {norms['8200']:.0f} in these 100 steps" in prose(FOLDER / "README.md")


def test_what_was_expected_of_8100_did_not_come_true() -> None:
    """Of docs/reproduction.md: more than dW_Q's size with the run's attention, less than a tenth of it with m and log l apart."""
    said = prose(FOLDER.parent.parent / "docs/reproduction.md")
    layer_2 = [place for place in NEXT if place[1] == "2"]
    off = {(step, name): replaced_in((step, "2"), name, "difference") for step, _ in layer_2 for name in (RUN, CURE)}
    both = {key: (statistics.median(each), average) for key, (each, average) in off.items()}
    assert max(both["8100", RUN]) < 1 < min(both["8200", RUN])
    assert min(value for (_, name), pair in both.items() if name == CURE for value in pair) > 0.1
    assert all(both[step, RUN] > both[step, CURE] for step, _ in layer_2)
    median, average = both["8100", RUN]
    assert f"by {median:.3g} of its size in the median of 8 batches ({average:.3g} in their average)" in said
    for step, name in (("8100", CURE), ("8200", CURE)):
        median, average = both[step, name]
        assert f"by {median:.3g} ({average:.3g})" in said
    median, average = both["8200", RUN]
    assert f"by {median:.3g} times its size ({average:.3g})" in said


def after(factor: str, attention: str, column: str) -> list[float]:
    """What the table of runs has in a row and column, seed by seed."""
    with (FOLDER / "after.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if (row["enlarged"], row["attention"]) == (factor, attention)]
    found = []
    for seed in dict.fromkeys(row["seed"] for row in rows):
        own = [row for row in rows if row["seed"] == seed]
        late = [float(row[column]) for row in own if row[column] and int(row["step"]) >= 602]
        found.append(statistics.median(late) if column == "grad_norm" else late[-1])
    return found


def test_the_published_runs_are_those_of_their_file() -> None:
    readme = prose(FOLDER / "README.md")
    names = ("flash", "flash_subtracted", "flash_fp32_pv", "flash_delta_from_p", "flash_delta_from_p_subtracted")
    titles = {"val_loss": ("validation loss at 802", ".3f"), "grad_norm": ("gradient norm, 602 - 801", ".3g")}
    titles["max_logit"] = ("largest logit at 802", ",.0f")
    for factor in ("10000", "30000"):
        for column, (title, form) in titles.items():
            cells = [" / ".join(format(value, form) for value in after(factor, name, column)) for name in names]
            assert f"| {int(factor):,} | {title} | {' | '.join(cells)} |" in readme


def test_in_training_the_multiply_add_alone_makes_the_difference() -> None:
    """Same weights, same batches, one site: on each of three models."""
    folded, subtracted, unrounded = (
        after("30000", name, "grad_norm") for name in ("flash", "flash_subtracted", "flash_fp32_pv")
    )
    assert min(one / other for one, other in zip(folded, subtracted, strict=True)) > 3
    assert all(0.75 < one / other < 1.25 for one, other in zip(subtracted, unrounded, strict=True))
    losses = [after("30000", name, "val_loss") for name in ("flash", "flash_subtracted")]
    more = ", ".join(f"{one - other:.3f}" for one, other in zip(*losses, strict=True))
    assert f"by {more.replace(', 0.330', ' and 0.330')}" in prose(FOLDER / "README.md")


def test_in_training_delta_from_p_with_m_and_log_l_apart_ends_lowest() -> None:
    """At 30,000 times, on each of three models; by how much under ``flash_subtracted`` is in the README."""
    names = ("flash", "flash_subtracted", "flash_fp32_pv", "flash_delta_from_p")
    cured, *others = (after("30000", name, "val_loss") for name in (CURE, *names))
    assert all(loss < min(rest) for loss, *rest in zip(cured, *others, strict=True))
    less = [round(a, 3) - round(b, 3) for a, b in zip(others[1], cured, strict=True)]
    assert f"by {min(less):.3f} to {max(less):.3f} under" in prose(FOLDER / "README.md")
    norms, *rest = (after("30000", name, "grad_norm") for name in (CURE, *names))
    assert all(norm < min(others) for norm, *others in zip(norms, *rest, strict=True))
