"""Figures: each from a tiny real run, their numbers on captures and curves with known answers, the published pictures and tables."""

import csv
import dataclasses
import json
import math
import re
import runpy
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from attention_cases import causal_scores
from safetensors.torch import load_file, save_file
from test_delta_error import random_layer
from tiny_runs import Place
from torch import Tensor

from attention import AttentionConfig, AttentionSpec
from attention.check.captured import load
from attention.watching.growth import FMA_LOGIT
from config import from_json
from errors import UserError
from figures import canvas, curves, delta, inputs, pretrained, similarity
from figures.inputs import open_checkpoint, validation_tokens
from figures.runs import DrawnRun, draw_runs
from probes.capture import capture
from probes.low_rank import weighted_keys
from scripts import capture_attention, compare_runs, figures
from scripts.figures import REGISTRY
from training.intervention import parse_switch, plans_at

WRITTEN = ("png", "csv")


@pytest.fixture(scope="module")
def place(place: Place) -> Iterator[Place]:
    """A run of eight steps. Pictures are coarse, which saves seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(canvas, "DPI", 60)
        place.train("failing", {"telemetry.every": 2, "run.steps": 8})
        yield place


def checkpoint(place: Place) -> Path:
    return place.runs / "failing/checkpoints/step_00000008"


TEXT = r"the $quick brown \fox jumps over the $lazy dog"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama's folder. No key of layer 0 differs from another."""
    transformers = pytest.importorskip("transformers", minversion="4.56")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({word: token for token, word in enumerate(sorted({*TEXT.split(), "?"}))}, "?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "hidden_size": 32}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=16, intermediate_size=32, initializer_range=0.5, **heads)
    )
    model.model.layers[0].self_attn.k_proj.weight.data.zero_()
    folder = tmp_path_factory.mktemp("hf") / "llama"
    model.save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("number", REGISTRY)
def test_each_figure_is_a_png_and_a_csv_with_rows(place: Place, llama: Path, number: int, tmp_path: Path) -> None:
    given = f"--hf {llama} --runs {place.runs}/failing --checkpoint {checkpoint(place)} --sequences 4".split()
    figures.main([str(number), *given, "--text", TEXT, "--out", str(tmp_path)])
    assert all((tmp_path / f"figure_{number:02d}.{ending}").stat().st_size > 40 for ending in WRITTEN)
    with open(tmp_path / f"figure_{number:02d}.csv", newline="") as file:
        assert list(csv.DictReader(file))


def test_figure_4_refuses_qk_norm(place: Place, tmp_path: Path, refused: Callable[..., str]) -> None:
    """A gradient with respect to q is not pulled back through the norm."""
    place.train("normed", {"model.qk_norm": True, "run.steps": 2})
    message = refused(figures.main, 4, "--checkpoint", place.runs / "normed", "--out", tmp_path)
    assert message.startswith("error: model.qk_norm = True: expected False")


@pytest.mark.parametrize(
    ("checkpoints", "sequences", "message"),
    [(3, 4, "expected one or two for figure 4"), (1, 1, "--sequences = 1: expected 2 or more")],
)
def test_figure_4_draws_two_columns(
    place: Place, checkpoints: int, sequences: int, message: str, refused: Callable[..., str]
) -> None:
    given = ["--checkpoint", *[checkpoint(place)] * checkpoints, "--sequences", sequences]
    assert message in refused(figures.main, 4, *given)


def test_the_table_of_figure_4_has_the_cosine() -> None:
    rows = [similarity.rank_one(random_layer(), head=0, batch=0, token=t, source="m", label=str(t)) for t in (3, 7)]
    table = similarity.draw_similarity(rows).table
    expected = {"3": 1.0, "7": similarity.cosine(rows[0].outer(), rows[1].outer())}
    assert dict(zip(table["of"], table["cosine"], strict=True)) == pytest.approx(expected)


def test_the_outer_products_of_a_llama_sum_to_the_gradient_of_its_w_q(llama: Path) -> None:
    """dQ = P K in one head alone, by transformers' own backward pass."""
    import transformers

    row = pretrained.Llama(llama, torch.device("cpu")).rank_one(TEXT, layer=1, head=2)
    losses = []

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
        p = causal_scores(q, k, scaling).softmax(dim=-1)
        losses.append(((p @ k).detach() * q)[:, 2].sum())
        return (p @ v).transpose(1, 2), None

    transformers.AttentionInterface.register("dq_is_pk", attend)
    model = transformers.LlamaForCausalLM.from_pretrained(llama, attn_implementation="dq_is_pk")
    model(transformers.AutoTokenizer.from_pretrained(llama)(TEXT, return_tensors="pt")["input_ids"])
    losses[1].backward()
    gradient = model.model.layers[1].self_attn.q_proj.weight.grad.unflatten(0, (4, 8))
    torch.testing.assert_close(gradient[2], row.pk_TD.T @ row.x_TC, rtol=1e-4, atol=1e-4)


def test_keys_that_are_alike_share_the_maximum_of_a_llamas_rows(llama: Path) -> None:
    rows = pretrained.Llama(llama, torch.device("cpu")).repeated_maxima([TEXT])
    assert {row[1:3] for row in rows} == {(layer, head) for layer in range(2) for head in range(4)}
    for row in rows:
        assert row.top_S.all() == (row.layer == 0)
        assert row.p_S.sum() == pytest.approx(1, abs=1e-5)
        assert row.top_S[row.p_S.argmax()]


@pytest.mark.parametrize(
    ("broken", "message"),
    [("pickled", "no file named model.safetensors"), ("missing", "no weights for model.norm.weight")],
)
def test_a_llama_without_all_its_safetensors_is_refused(llama: Path, tmp_path: Path, broken: str, message: str) -> None:
    folder = Path(shutil.copytree(llama, tmp_path / "llama"))
    weights = load_file(folder / "model.safetensors")
    if broken == "pickled":
        (folder / "model.safetensors").unlink()
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        del weights["model.norm.weight"]
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=message):
        pretrained.Llama(folder, torch.device("cpu"))


def test_a_checkpoint_gives_a_file_of_captured_attention(place: Place, tmp_path: Path) -> None:
    """Its q, k, v and dO are those that ``probes.capture`` takes of the same weights and tokens, whose tests hold them to training."""
    part = ["--layers", "1", "--heads", "1", "--length", "6"]
    capture_attention.main([str(checkpoint(place)), *part, "--out", str(tmp_path)])
    (file,) = tmp_path.iterdir()
    found = load(file)
    opened = open_checkpoint(checkpoint(place), torch.device("cpu"))
    config = opened.config
    tokens = validation_tokens(Path(config.data.dataset), config.data.sequence_length, 1, 256, torch.device("cpu"))
    (layer,) = capture(opened.model, *tokens, [1], autocast=config.precision.autocast(torch.device("cpu")))
    assert torch.equal(found.q, layer.q_BTHD.transpose(1, 2)[:, 1:2, :6])
    assert torch.equal(found.do, layer.do_BTHD.transpose(1, 2)[:, 1:2, :6])
    assert (found.about["step"], found.about["layer"], found.about["heads"]) == (8, 1, [1])
    assert found.about["trained"][0]["source_sha256"]
    with pytest.raises(SystemExit):  # the file of another run, perhaps
        capture_attention.main([str(checkpoint(place)), *part, "--out", str(tmp_path)])


def test_an_external_kernel_that_cannot_run_here_is_not_replaced(
    place: Place, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = AttentionSpec(preset="external", kernel="torch:math")
    place.train("external", {"attention": AttentionConfig(default=spec), "run.steps": 2})
    monkeypatch.setattr(inputs, "check_plans", Mock(side_effect=UserError("no such kernel")))
    assert refused(capture_attention.main, place.runs / "external", "--layers", 1) == "error: no such kernel\n"


def test_a_folder_that_cannot_be_made_is_found_before_the_passes(
    place: Place, tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(capture_attention, "captured", None)
    message = refused(capture_attention.main, checkpoint(place), "--layers", 1, "--out", tmp_path / "file")
    assert message == f"error: --out {tmp_path}/file: cannot be made (File exists)\n"


def test_the_cosine_of_two_outer_products_is_that_of_the_matrix_of_pairs() -> None:
    layer = random_layer()
    row = similarity.rank_one(layer, head=0, batch=0, token=3, source="m", label="m")
    products = torch.einsum("td,tc->tdc", weighted_keys(layer)[0, 0], layer.x_BTC[0].float()).flatten(1)
    units = torch.nn.functional.normalize(products, dim=-1)
    assert similarity.cosine(row.outer(3), row.outer(7)) == pytest.approx((units @ units.T)[3, 7].item(), abs=1e-5)


def test_a_loss_scale_does_not_show_in_the_error_of_delta() -> None:
    layer = random_layer()
    scaled = dataclasses.replace(layer, do_BTHD=layer.do_BTHD * 2.0**10)
    one, two = (
        delta.head_error(captured, head=0, batch=0, token=3, label="m", loss_scale=scale)
        for captured, scale in ((layer, 1.0), (scaled, 2.0**10))
    )
    assert torch.equal(one.error_BT, two.error_BT)
    assert torch.equal(one.do_D, two.do_D)
    assert one.summary.mean_H == two.summary.mean_H != 0
    assert one.summary.rms_H == two.summary.rms_H != 0


def test_the_parts_of_an_error_of_delta_sum_to_it_where_attention_rounds_its_gradient() -> None:
    error = delta.head_error(random_layer(spec=AttentionSpec(preset="fp8")), head=0, batch=0, token=3, label="m")
    assert error.product_D.sum().item() == pytest.approx(error.error_BT[0, 3].item(), rel=1e-4)


@pytest.mark.parametrize("label", ["run: flash", "layer 1:0 flash_delta_from_p (output=e5m2), " * 9, "W" * 300])
def test_no_label_of_a_run_is_cut(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(canvas, "save", lambda figure, *_, **__: drawn.append(figure))
    draw_runs([DrawnRun(label, curves.by_step([{"step": 0, "train_loss": 3.0}]), None)] * 3, Path("unwritten"))
    drawn[0].draw_without_rendering()
    for text in drawn[0].legends[0].get_texts():
        (left, low), (right, high) = text.get_window_extent().get_points()
        assert 0 < left < right < drawn[0].bbox.width
        assert drawn[0].axes[0].get_window_extent().y1 < low < high < drawn[0].bbox.height
        assert re.sub(r"\s", "", text.get_text()) == label.replace(" ", "")


NAN = math.nan


@pytest.mark.parametrize(
    ("a", "b", "step"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], None),
        ([1.0, 2.0, 3.0], [1.0, 2.0 + 2**-51, 4.0], 1),
        ([1.0, NAN], [1.0, NAN], None),
        ([1.0, NAN], [1.0, 2.0], 1),
        ([0.0], [-0.0], 0),
        ([1.0, 2.0, 3.0], [1.0, 2.0], None),
    ],
)
def test_first_divergence_is_bitwise(a: list[float], b: list[float], step: int | None) -> None:
    rows = ([{"step": step, "train_loss": loss} for step, loss in enumerate(losses)] for losses in (a, b))
    first, second = (curves.column(curves.by_step(run), "train_loss") for run in rows)
    assert curves.first_difference(first, second) == step


ROOT = Path(__file__).resolve().parent.parent
EXPERIMENTS = ROOT / "experiments"
GIVEN_UP = {"compensated_delta", "recompute_o", "standard"}
"""Runs of what the code does not have any more: experiments/fast_failure/README.md names the commit that has it."""
RECORDS = sorted(path for path in EXPERIMENTS.rglob("config.json") if path.parent.name not in GIVEN_UP)
SUMMARIES = sorted(str(path.parent.relative_to(EXPERIMENTS)) for path in EXPERIMENTS.rglob("summary.csv"))
PATIENCE = {"who_is_at_risk/tiny": "50"}
"""Steps above the margin that are an explosion, where they are not 200."""


def test_the_pictures_can_be_drawn() -> None:
    draw = runpy.run_path(str(EXPERIMENTS / "draw_pictures.py"), run_name="imported")
    for name in ("front", "swiglu", "public_kernels", "other_blocks"):
        assert draw[name]().axes


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.parent.name)
def test_the_attention_of_a_published_run_is_known(path: Path) -> None:
    """By the names of its time, those that its layers were switched to as well."""
    config = json.loads(path.read_text())["config"]
    shape = config["model"]["n_layer"], config["model"]["n_head"]
    attention = config.get("attention", {})  # transformers' own has none
    base = from_json(AttentionConfig, attention).resolve(*shape)
    plans_at(base, [parse_switch(text) for text in config["alarm"]["switches"]], config["run"]["steps"])


def test_records_name_no_folder_of_the_machine_that_made_them() -> None:
    assert not [path for path in RECORDS if '"/' in path.read_text()]


@pytest.mark.parametrize("study", SUMMARIES)
def test_the_summary_of_runs_is_that_of_their_files(study: str, tmp_path: Path) -> None:
    header = (EXPERIMENTS / study / "summary.csv").read_text().splitlines()[0]
    steps = sorted(set(re.findall(r"_at_(\d+)", header)), key=int)
    folder, table = str(EXPERIMENTS / study / "runs"), str(tmp_path / "summary.csv")
    layer = ["--layer", "1"] if "max_logit_1_" in header else []  # else of all layers
    patience = PATIENCE.get(study, "200")
    compare_runs.main([folder, *layer, "--out", "none", "--table", table, "--patience", patience, "--at", *steps])
    assert (tmp_path / "summary.csv").read_text() == (EXPERIMENTS / study / "summary.csv").read_text()


def test_the_table_of_jumps_is_that_of_the_runs() -> None:
    """Runs of ``flash`` whose largest logit passes the FMA threshold: the first probe that sees it, and, from the probe before on, the
    first gradient norm above 20 and the first loss above the margin."""
    rows = ["run,logit_past_threshold_at,grad_norm_above_20_at,loss_above_margin_at,steps_until_both"]
    for study in ("matched_pairs", "one_wheel", "who_is_at_risk/gpt2"):
        for path in sorted(EXPERIMENTS.glob(f"{study}/runs/*flash*/config.json")):
            run = compare_runs.load(path.parent)
            logits, losses = run.of_layers("max_logit", "max"), run.column("train_loss")
            past = logits.index[logits > FMA_LOGIT]
            # The first 6,000 steps of flash_2_to_6500 stand in the folder flash_2 of that study.
            if run.config["attention_name"] != "flash" or past.empty or path.parent.match("matched_pairs/runs/flash_2"):
                continue
            before = logits.index[logits.index < past[0]][-1]
            above = losses.index[losses > losses.cummin() + 0.5]
            jump, rise = (
                next(step for step in steps if step >= before)
                for steps in (compare_runs.large_norms(run.column("grad_norm")), above)
            )
            rows.append(f"{study}/{run.name},{past[0]},{jump},{rise},{max(jump, rise) - past[0]}")
    assert (EXPERIMENTS / "past_the_threshold.csv").read_text().splitlines() == rows
