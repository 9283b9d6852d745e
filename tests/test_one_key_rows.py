"""analysis/one_key_rows.py and its script: rows whose O must be one V, and what is said of an O that is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from analysis import one_key_rows
from analysis.one_key_rows import Found, Rows, make_rows, measure, summed_up
from attention import AttentionSpec
from errors import UserError
from scripts import one_key_rows as script

CPU = torch.device("cpu")


def rows(largest: float, count: int = 4) -> Rows:
    return make_rows(largest, dtype=torch.bfloat16, device=CPU, count=count)


@pytest.mark.parametrize("largest", [500.0, 1e5, 2e6])
def test_rows_look_at_one_key_and_their_products_are_exact(largest: float) -> None:
    made = rows(largest)
    s_BTS = made.q_BTHD[:, :, 0].double() @ made.k_BTHD[:, :, 0].double().mT
    assert torch.equal(s_BTS.float().double(), s_BTS)
    top, others = s_BTS.max(dim=-1), s_BTS.scatter(-1, s_BTS.argmax(dim=-1, keepdim=True), 0.0)
    logit = top.values / one_key_rows.WIDTH**0.5
    # BF16 rounds q by 2^-9 of it.
    assert largest / 2 * (1 - 2.0**-8) <= logit.min()
    assert logit.max() <= largest * (1 + 2.0**-8)
    assert not others.any()
    assert (top.indices <= torch.arange(one_key_rows.WIDTH)).all()
    assert torch.equal(
        made.v_BTHD[:, :, 0].gather(1, top.indices[..., None].expand(-1, -1, one_key_rows.WIDTH)), made.o_BTHD[:, :, 0]
    )


@pytest.mark.parametrize("preset", ["sdpa_flash", "sdpa_math", "standard"])
def test_attention_that_subtracts_first_is_exact(preset: str) -> None:
    assert measure(rows(2e5), AttentionSpec(preset=preset)) == Found(
        wrong=0.0, error=0.0, mean=0.0, standard_error=0.0, rows=256
    )


def test_an_error_is_relative_to_delta_and_keeps_its_sign() -> None:
    made = rows(500.0)
    found = summed_up(made, made.o_BTHD.double() * 1.25)
    assert found.error == pytest.approx(0.25)
    delta = (made.do_BTHD.double() * made.o_BTHD.double()).sum(dim=-1)
    assert found.mean == pytest.approx(0.25 * (delta.mean() / delta.square().mean().sqrt()).item())
    assert found.wrong == 1.0
    assert summed_up(made, made.o_BTHD.double() * 0.75).mean == pytest.approx(-found.mean)


def test_a_row_counts_as_wrong_for_a_single_feature() -> None:
    made = rows(500.0)
    o_BTHD = made.o_BTHD.clone()
    o_BTHD[0, 0, 0, 0] += 1
    assert summed_up(made, o_BTHD).wrong == 1 / 256


def test_logits_that_leave_other_keys_a_share_are_refused() -> None:
    with pytest.raises(UserError, match="400 or more"):
        rows(399.0)


def test_the_script_tells_what_it_left_out_and_writes_all_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.json"
    script.main(["--sizes", "1024", "131072", "--count", "2", "--device", "cpu", "--json", str(out)])
    printed = capsys.readouterr()
    assert "left out: sdpa_cudnn: " in printed.err
    assert printed.out.splitlines()[-1].split()[0] == "131,072"
    written = json.loads(out.read_text())
    assert list(written["found"]["sdpa_math"]) == ["1024", "131072"]
    assert written["found"]["sdpa_math"]["131072"]["rows"] == 128


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--attention", "sdpa_cudnn"], "it needs a CUDA device"),
        (["--attention", "nothing"], "--attention = 'nothing'"),
        (["--attention", "run"], "there is no run here"),
        (["--sizes", "10"], "400 or more"),
        (["--count", "0"], "--count"),
    ],
)
def test_what_cannot_be_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        script.main([*arguments, "--device", "cpu"])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line


def test_the_published_table_is_that_of_its_file() -> None:
    folder = Path(__file__).resolve().parent.parent / "results/one_key_rows"
    found = json.loads((folder / "cpu.json").read_text())["found"]
    readme = (folder / "README.md").read_text()
    assert f"| logits up to | {' | '.join(f'`{name}`' for name in found)} |" in readme
    for size in found["flash"]:
        numbers = [(each[size]["error"], each[size]["wrong"]) for each in found.values()]
        cells = ["0" if error == 0 else f"{error:.1e} ({wrong:.2f})" for error, wrong in numbers]
        assert f"| {int(size):,} | {' | '.join(cells)} |" in readme


def test_the_published_errors_are_those_of_today() -> None:
    folder = Path(__file__).resolve().parent.parent / "results/one_key_rows"
    found = json.loads((folder / "cpu.json").read_text())["found"]["flash"]
    for size in ("32768", "131072"):
        made = make_rows(float(size), dtype=torch.bfloat16, device=CPU)
        now = measure(made, AttentionSpec(preset="flash"), "flash_reference")
        assert now.error == pytest.approx(found[size]["error"], rel=1e-6)


def test_the_published_kernels_do_what_the_reference_does_and_torchs_keep_v() -> None:
    folder = Path(__file__).resolve().parent.parent / "results/one_key_rows"
    reference, kernels = (json.loads((folder / name).read_text())["found"] for name in ("cpu.json", "h200.json"))
    torchs = {"sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa_math"}
    assert torchs < kernels.keys()
    for name, sizes in kernels.items():
        for size, found in sizes.items():
            if name in torchs:
                assert (found["error"], found["wrong"]) == (0.0, 0.0)
            else:
                expected = reference[name][size]
                assert found["wrong"] == pytest.approx(expected["wrong"], abs=0.005)
                assert found["error"] == pytest.approx(expected["error"], rel=0.02)
    assert kernels["flash"]["131072"]["error"] > 1e-3


def test_the_published_kernels_with_torchs_exponential_keep_v_where_the_folded_ones_do_not() -> None:
    folder = Path(__file__).resolve().parent.parent / "results/one_key_rows"
    kernels = json.loads((folder / "h200_unfused.json").read_text())["found"]
    unfused = {"flash_unfused", "flash_run_a exponent=unfused", "flash_delta_from_p exponent=unfused"}
    assert unfused < kernels.keys()
    for name in unfused | {"sdpa_flash"}:
        assert {(found["error"], found["wrong"]) for found in kernels[name].values()} == {(0.0, 0.0)}
    before = json.loads((folder / "h200.json").read_text())["found"]
    assert kernels["flash"] == before["flash"]


def test_the_published_rows_divided_by_the_p_bar_that_is_read_keep_v_where_the_others_do_not() -> None:
    folder = Path(__file__).resolve().parent.parent / "results/one_key_rows"
    found = json.loads((folder / "cpu_rounded_sum.json").read_text())["found"]
    divided = {"flash_rounded_sum"} | {
        f"{name} divisor=rounded" for name in ("flash_run_a", "flash_stochastic_p", "flash_stable_safe")
    }
    assert found.keys() == divided | {"flash"}
    for name in divided:
        assert {(row["error"], row["wrong"]) for row in found[name].values()} == {(0.0, 0.0)}
    assert found["flash"] == json.loads((folder / "cpu.json").read_text())["found"]["flash"]


@pytest.mark.parametrize("attention", ["flash_rounded_sum", "flash_run_a divisor=rounded"])
def test_rows_divided_by_the_p_bar_that_is_read_keep_v(attention: str) -> None:
    preset, *sites = attention.split()
    rows = make_rows(131072.0, dtype=torch.bfloat16, device=CPU, count=8)
    assert measure(rows, AttentionSpec(preset="flash"), "flash_reference").wrong > 0.1
    kept = measure(rows, AttentionSpec(preset=preset, sites=tuple(sites)), "flash_reference")
    assert (kept.error, kept.wrong) == (0.0, 0.0)
