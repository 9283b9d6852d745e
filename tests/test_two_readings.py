"""analysis/two_readings.py and its script: the two parts of e . dO, on a model that has learnt something."""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from prose import prose
from tiny_runs import ROOT, Place, new_place, preset
from torch import Tensor

from analysis import two_readings
from analysis.capture import LayerCapture
from analysis.low_rank import predicted_dw_q_error, weighted_keys
from analysis.two_readings import Reading, mean_of, readings
from attention import AttentionConfig, AttentionSpec
from model import GPT, ModelConfig, initialise
from scripts import two_readings as script

T, V = 32, 16


def batch(seed: int, sequences: int = 32) -> tuple[Tensor, Tensor]:
    """Tokens that are mostly those two places before: something for attention to learn, and never all."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(V, (sequences, T + 1), generator=generator)
    for t in range(2, T + 1):
        follows = torch.rand(sequences, generator=generator) < 0.8
        tokens[:, t] = torch.where(follows, tokens[:, t - 2], tokens[:, t])
    return tokens[:, :-1], tokens[:, 1:]


@pytest.fixture(scope="module")
def model() -> GPT:
    config = ModelConfig(n_layer=2, n_head=2, n_embd=32, block_size=T, vocab_size=V)
    spec = AttentionSpec(preset="flash", numerics="microcosm")
    plans = AttentionConfig(flash_backend="flash_reference", default=spec).resolve(2, 2)
    model = GPT(config, two_readings.EXACT.resolve(2, 2))
    initialise(model, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(150):
        _, loss = model(*batch(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.zero_grad()
    model.set_plans(plans)
    return model


def measured(model: GPT, layer: int = 1, batches: int = 4) -> dict[str, list[Reading]]:
    plan = model.attentions()[layer].plan
    found: dict[str, list[Reading]] = {}
    for number in range(batches):
        made = readings(model, plan, *batch(1000 + number), torch.float32, seed=torch.tensor(number))
        for name, reading in made.items():
            found.setdefault(name, []).append(reading)
    return found


def z_of(found: list[Reading], part: str) -> float:
    return mean_of([getattr(reading, part) for reading in found], [reading.delta_BHT for reading in found]).z


@pytest.mark.parametrize("layer", [0, 1])
def test_an_unbiased_rounding_still_correlates_with_its_gradient(model: GPT, layer: int) -> None:
    found = measured(model, layer)["stochastic"]
    assert z_of(found, "second_BHT") > 6
    assert abs(z_of(found, "first_BHT")) < 4


def test_with_o_unrounded_less_of_the_correlation_is_left_but_not_nothing(model: GPT) -> None:
    found = measured(model)
    whole, rest = (
        mean_of([reading.second_BHT for reading in found[name]], [reading.delta_BHT for reading in found[name]])
        for name in ("as trained", "O unrounded")
    )
    assert rest.z > 6
    assert whole.mean - rest.mean > 6 * math.hypot(whole.standard_error, rest.standard_error)


def test_both_parts_add_up_to_the_error_of_delta(model: GPT) -> None:
    tokens, targets = batch(7)
    plan = model.attentions()[1].plan
    seen: list[Tensor] = []
    original = two_readings._gradient

    def noted(model: GPT, layer: int, o_BHTD: Tensor, *data: Tensor) -> Tensor:
        gradient = original(model, layer, o_BHTD, *data)
        seen.extend((o_BHTD, gradient))
        return gradient

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(two_readings, "_gradient", noted)
        reading = readings(model, plan, tokens, targets, torch.float32, seed=torch.tensor(0))["as trained"]
    high, exact, o, gradient = seen[:4]
    torch.testing.assert_close(reading.delta_BHT, (high * exact).sum(-1))
    torch.testing.assert_close(
        reading.first_BHT + reading.second_BHT, ((o - high) * gradient).sum(-1), rtol=1e-4, atol=1e-9
    )


def test_the_gradient_is_that_of_the_loss(model: GPT) -> None:
    tokens, targets = batch(7, sequences=2)
    o = torch.randn(2, 2, T, 16, generator=torch.Generator().manual_seed(0))
    direction = torch.randn(o.shape, generator=torch.Generator().manual_seed(1))
    slope = (two_readings._gradient(model, 1, o, tokens, targets) * direction).sum()

    def loss(o_BHTD: Tensor) -> float:
        attention = model.attentions()[1]
        attention.attend = lambda *_: o_BHTD.transpose(1, 2)  # type: ignore[method-assign]
        try:
            with torch.no_grad():
                return float(model(tokens, targets)[1])
        finally:
            del attention.attend

    assert (loss(o + 0.1 * direction) - loss(o - 0.1 * direction)) / 0.2 == pytest.approx(float(slope), rel=2e-2)


def test_without_an_error_there_is_neither(model: GPT) -> None:
    plan = AttentionConfig(
        flash_backend="flash_reference", default=AttentionSpec(preset="flash", numerics="fp32")
    ).resolve(2, 2)[1]
    reading = readings(model, plan, *batch(7), torch.float32, seed=torch.tensor(0))["as trained"]
    assert reading.first_BHT.abs().max() < 1e-6 * reading.delta_BHT.abs().max()
    assert reading.second_BHT.abs().max() < 1e-6 * reading.delta_BHT.abs().max()


def test_pull_is_what_an_error_of_delta_does_to_the_largest_singular_value(model: GPT) -> None:
    """Descent along the gradient that the error makes (equation 3), held against the singular values of W_Q before and after."""
    tokens, targets = batch(7)
    plan = model.attentions()[1].plan
    captured: list[LayerCapture] = []
    original = two_readings._pull
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(two_readings, "_pull", lambda layer, w_q: captured.append(layer) or original(layer, w_q))
        pull_BHT = readings(model, plan, tokens, targets, torch.float32, seed=torch.tensor(0))["as trained"].pull_BHT
    error_BHT = torch.randn(pull_BHT.shape, generator=torch.Generator().manual_seed(3))
    layer = captured[0]
    dw_q_HDC = predicted_dw_q_error(error_BHT, weighted_keys(layer), layer.x_BTC, layer.scale)
    w_q_HDC = model.w_q(1).detach().unflatten(0, dw_q_HDC.shape[:2]).double()
    rate = 1e-7
    # The gradient with the error is less by dw_q than without.
    grown_H = torch.linalg.matrix_norm(w_q_HDC + rate * dw_q_HDC.double(), 2) - torch.linalg.matrix_norm(w_q_HDC, 2)
    expected_H = layer.scale * (error_BHT * pull_BHT).sum(dim=(0, 2))
    torch.testing.assert_close(
        (grown_H / rate).float(), expected_H, rtol=1e-3, atol=1e-3 * float(expected_H.abs().max())
    )


def test_a_drift_is_seen_that_the_mean_does_not_show() -> None:
    """An error that goes with pull has a drift and, where pull has both signs, no mean."""
    generator = torch.Generator().manual_seed(0)
    pulls, noise = ([torch.randn(64, 2, 16, generator=generator) for _ in range(2)] for _ in range(2))
    parts = [a + 0.3 * pull for a, pull in zip(noise, pulls, strict=True)]
    assert abs(mean_of(parts, noise).z) < 3
    drift = mean_of(parts, noise, pulls_BHT=pulls)
    assert drift.mean == pytest.approx(0.3, abs=4 * drift.standard_error)
    assert drift.z > 10
    assert abs(mean_of(noise, noise, pulls_BHT=pulls).z) < 3


def test_a_bias_shows_in_the_first_part(model: GPT, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error along dO itself, of a thousandth: the first part is a thousandth of |dO|^2."""
    tokens, targets = batch(7)
    plan = model.attentions()[1].plan
    gradients: list[Tensor] = []
    original = two_readings._gradient

    def noted(*arguments: object) -> Tensor:
        gradients.append(original(*arguments))  # type: ignore[arg-type]
        return gradients[-1]

    monkeypatch.setattr(two_readings, "_gradient", noted)
    monkeypatch.setattr(
        two_readings, "_output", lambda layer, change: two_readings.high_outputs(layer) + 1e-3 * gradients[0]
    )
    reading = readings(model, plan, tokens, targets, torch.float32, seed=torch.tensor(0))["as trained"]
    torch.testing.assert_close(reading.first_BHT, 1e-3 * gradients[0].square().sum(-1), rtol=1e-2, atol=1e-9)


def test_nothing_is_left_behind(model: GPT, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [attention.plan for attention in model.attentions()]
    measured(model, batches=1)
    monkeypatch.setattr(two_readings, "_output", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        measured(model, batches=1)
    assert [attention.plan for attention in model.attentions()] == plans
    assert all("attend" not in vars(attention) for attention in model.attentions())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_mean_is_of_sequences_relative_to_delta() -> None:
    part = torch.tensor([[[1.0, 3.0]], [[5.0, 7.0]]])  # means 2 and 6 of two sequences
    mean = mean_of([part], [torch.full_like(part, 2.0)])
    assert (mean.mean, mean.sequences) == (2.0, 2)
    assert mean.standard_error == pytest.approx(1.0)
    assert mean.z == pytest.approx(2.0)
    assert dataclasses.astuple(mean_of([part], [part], head=0))[2] == 2


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with new_place(tmp_path_factory) as place:
        bf16_flash = {"precision.dtype": "bfloat16", "attention": preset("flash")}
        place.train("run", {"checkpoint.every": 10, **bf16_flash})
        yield place


def test_the_script_writes_every_head(place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "readings.csv"
    script.main([str(place.runs / "run"), "--batches", "2", "--sequences", "2", "--length", "8", "--out", str(out)])
    said = capsys.readouterr().out
    assert "as trained" in said
    assert "stochastic" in said
    assert "O unrounded" in said
    rows = list(csv.DictReader(out.open()))
    assert tuple(rows[0]) == script.columns_of(("first", "second", "first drift", "second drift"))
    assert len(rows) == len({tuple(row[name] for name in ("layer", "head", "rounding")) for row in rows})
    assert {row["sequences"] for row in rows} == {"4"}
    assert "| readings | O unrounded, drift | 1 | 1 |" in script.summary([out])


def test_roundings_and_split_can_be_chosen(place: Place, tmp_path: Path) -> None:
    few = ["--batches", "2", "--sequences", "2", "--length", "8", "--layers", "1"]
    files = {split: tmp_path / f"{split}.csv" for split in ("val", "train")}
    for split, out in files.items():
        given = ["--roundings", "as trained", "--split", split, "--out", str(out)]
        script.main([str(place.runs / "run"), *few, *given])
    rows = {split: list(csv.DictReader(out.open())) for split, out in files.items()}
    assert {row["rounding"] for row in rows["val"]} == {"as trained"}
    assert rows["val"] != rows["train"]


@pytest.mark.parametrize(
    "names",
    [
        ("bf16", "paper", "microcosm"),
        ("gpt2_run_a",),
        ("microcosm_run_a", "microcosm_flash", "microcosm_fp32_pv"),
        ("gpt2_drift_flash", "gpt2_drift_run_a_fp32_pv"),
    ],
)
def test_the_published_table_is_that_of_its_files(names: tuple[str, ...]) -> None:
    folder = ROOT / "results/two_readings"
    assert script.summary([folder / f"{name}.csv" for name in names]) in (folder / "README.md").read_text()


def _all_heads(name: str) -> list[tuple[str, str, str, int, int, float, float]]:
    """(rounding, part, checkpoint, step, layer, mean in millionths, mean in standard errors) of all heads together."""
    columns, rows = script.read(ROOT / f"results/two_readings/{name}.csv")
    return [
        (
            *(row["rounding"], part, row["checkpoint"]),
            *(int(row[column]) for column in ("step", "layer")),
            1e6 * float(row[part]),
            float(row[part]) / float(row[f"{part} s.e."]),
        )
        for row in rows
        for part in script.PARTS
        if part in columns
    ]


@pytest.mark.parametrize("name", ["gpt2_flash_seed_2", "gpt2_fp32_pv"])
def test_the_published_lines_of_layer_1_are_those_of_the_file(name: str) -> None:
    folder = ROOT / "results/two_readings"
    lines = [line for line in script.summary([folder / f"{name}.csv"]).splitlines() if "| 1 |" in line]
    assert len(lines) == 3
    assert "\n".join(lines) in (folder / "README.md").read_text()


def test_what_is_said_of_the_drift_is_in_its_files() -> None:
    rows = [row for name in ("microcosm_flash", "microcosm_fp32_pv") for row in _all_heads(name)]
    first, drift, plain = (
        [row for row in rows if row[1] == part] for part in ("first drift", "second drift", "second")
    )
    readme = prose(ROOT / "results/two_readings/README.md")
    assert (
        f"in both layers of `flash` and `fp32_pv`**, {min(z for *_, z in drift):.1f} standard errors from zero at least"
        in readme
    )
    beyond, positive = (sum(wanted(z) for *_, z in first) for wanted in (lambda z: abs(z) > 3, lambda z: z > 0))
    most = max(abs(z) for *_, z in first)
    said = (
        f"beyond three in {beyond} of the {len(first)} readings, up to {most:.1f}, and positive in {positive} of them"
    )
    assert said in readme
    of_a = _all_heads("microcosm_run_a")
    most = max(abs(row[-1]) for row in of_a if row[1] == "first drift")
    positive = [row[-1] > 0 for row in of_a if row[1] == "second drift"]
    assert f"within {most:.1f} standard errors" in readme
    assert f"self-correlation positive in {sum(positive)} of the {len(positive)} readings" in readme
    ratios = [one[-2] / other[-2] for one, other in zip(drift, plain, strict=True)]
    assert f"It is {min(ratios):.2f} to {max(ratios):.2f} times the plain mean" in readme


@pytest.mark.parametrize("place", ["docs/reproduction.md", "results/two_readings/README.md"])
def test_what_is_said_of_gpt2s_drift_is_in_its_files(place: str) -> None:
    files = [_all_heads(f"gpt2_drift_{name}") for name in ("flash", "run_a_fp32_pv")]
    flash, unrounded = ([row for row in rows if row[0] == "as trained"] for rows in files)
    drifts = [[row[-2] for row in rows if row[1] == "second drift"] for rows in (flash, unrounded)]
    said = prose(ROOT / place)
    assert all(f"+{before:.3g}" in said and f"+{after:.3g}" in said for before, after in drifts)
    z = [row[-1] for row in flash + unrounded if row[1] == "second drift"]
    assert f"{min(z):.0f} to {max(z):.0f} standard errors from zero" in said
    biases = [row for row in flash + unrounded if row[1] == "first drift"]
    most, error = max(abs(row[-1]) for row in biases), max(row[-2] / row[-1] for row in biases)
    assert f"within {most:.1f} (one is up to {error:.2f} millionths)" in said


def test_gpt2s_drift_is_no_constant_share_of_the_mean() -> None:
    readme = prose(ROOT / "results/two_readings/README.md")
    rows = {name: _all_heads(f"gpt2_drift_{name}") for name in ("flash", "run_a_fp32_pv")}
    ratios, left = [], []
    for name, found in rows.items():
        at = {(row[0], row[1], row[3]): row[-2] for row in found}
        for step in (1000, 2000):
            drift = at["as trained", "second drift", step]
            ratios.append(drift / at["as trained", "second", step])
            if name == "flash":
                left.append(at["O unrounded", "second drift", step] / drift)
    assert f"It is {min(ratios):.2f} to {max(ratios):.2f} times the plain mean" in readme
    assert f"leaves {left[0]:.2f} and {left[1]:.2f} of the drift in `flash`" in readme


def test_what_is_said_of_gpt2_is_in_its_file() -> None:
    rows = _all_heads("gpt2_run_a")
    first, second = ([row[3:] for row in rows if row[1] == part] for part in ("first", "second"))
    document, readme = (
        prose(ROOT / "docs/reproduction.md"),
        prose(ROOT / "results/two_readings/README.md"),
    )
    assert len(second) == 36
    assert [(step, layer) for step, layer, _, z in second if z < 3] == [(3000, 0)]
    assert min(mean for *_, mean, _ in second) > 0
    means = sorted(mean for *_, mean, _ in second)
    assert f"{means[0]:+.3g} to {means[-1]:+.3g} millionths of delta" in document
    assert max(abs(z) for *_, z in first) < 3
    assert f"which are up to {max(3 * mean / z for *_, mean, z in first):.3g} millionths" in document
    at = {(step, layer): mean for step, layer, mean, _ in second}
    assert f"{at[1000, 1]:+.3g} at 1,000, {at[2000, 1]:+.3g} at 2,000, {at[3000, 1]:+.3g} at 3,000" in document
    for step in (2000, 3000):
        growth = sorted((at[step, layer] / at[1000, layer], layer) for layer in range(12))
        assert growth[-1][1] == 1
        assert (
            f"by {growth[-1][0]:.1f} from step 1,000 to {step:,}, the other layers by {growth[-2][0]:.1f} at most"
            in readme
        )


def test_the_document_says_what_the_files_say() -> None:
    rows = [row for row in _all_heads("bf16") if row[0] == "as trained"]
    first, second = ([(mean, z) for _, part, *_, mean, z in rows if part == name] for name in ("first", "second"))
    document = prose(ROOT / "docs/reproduction.md")
    means, z = zip(*sorted(second), strict=True)
    assert f"{means[0]:+.3g} to {means[-1]:+.3g} millionths of delta, {min(z):.0f} to {max(z):.0f}" in document
    assert max(abs(z) for _, z in first) < 3
    assert f"which are up to {max(3 * mean / z for mean, z in first):.0f} millionths" in document


@pytest.mark.parametrize("name", ["bf16", "paper"])
def test_what_is_left_with_o_unrounded(name: str) -> None:
    second = {(row[0], row[2:5]): row[5] for row in _all_heads(name) if row[1] == "second"}
    shares = [mean / second["as trained", key] for (rounding, key), mean in second.items() if rounding == "O unrounded"]
    assert len(shares) == 18
    said = f"{min(shares):.2f} to {max(shares):.2f} of"
    assert f"in `{name}` {said.removesuffix(' of')}" in prose(ROOT / "results/two_readings/README.md")
    assert name != "bf16" or said in prose(ROOT / "docs/reproduction.md")


def test_a_file_with_other_columns_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.csv"
    other.write_text("checkpoint,step,layer,head,part,mean\nx,1,0,-1,first,2\n")
    with pytest.raises(SystemExit):
        script.main(["--table", str(other)])
    assert "not readings as --out writes them" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["x", "--table", "y"], ["--table", "nowhere.csv"]])
def test_a_table_is_asked_for_alone(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        script.main(arguments)
    assert stop.value.code == 2
    assert "--table" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--layers", "9"], "--layers"), (["--batches", "0"], "--batches"), (["--what"], "unrecognized")],
)
def test_what_cannot_be_is_one_line(
    place: Place, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        script.main([str(place.runs / "run"), *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
