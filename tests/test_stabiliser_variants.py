"""What appendix C argues about the row normaliser, on rows: sign and mean of the errors of O and delta, with standard error, and the range.

n = 512 row maxima, the unit of every standard error; two draws of gaps and values.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from analysis import normaliser_study as study
from analysis import normaliser_tables
from analysis.normaliser_study import FP32_STATISTICS, KINDS, NUMERICS, PRESET_OF, VARIANTS, Measured
from analysis.row_normalisers import Normaliser, attend, exact, mean_by_maximum
from attention.flash_reference import _forward
from attention.plan import AttentionSpec
from scripts import stabiliser_variants

RESULTS = Path(__file__).resolve().parent.parent / "results" / "appendix_c"
SIGNS = pytest.mark.parametrize("v", ["+", "-"])


def measured(
    variant: str, numerics: str = "paper", kind: str = "tie", magnitude: str = "usual", maximum: str = "+", v: str = "+"
) -> Measured:
    return study.measure(numerics, kind, magnitude, maximum, v, [variant], seeds=2)[0]


def outward(found: Measured) -> float:
    """Mean error of O in its standard errors, positive away from zero."""
    return (1 if found.v == "+" else -1) * found.mean / found.standard_error


# The measurement itself.


@pytest.mark.parametrize("numerics", ["paper", "hardware"])
@pytest.mark.parametrize("variant", PRESET_OF)
def test_a_variant_that_is_a_preset_is_the_reference_bit_for_bit(variant: str, numerics: str) -> None:
    spec = AttentionSpec(preset=PRESET_OF[variant], numerics=numerics).resolve().concrete("bf16")
    spec = dataclasses.replace(spec, inputs="fp32", exponent="subtracted", tile_k=0)
    for kind, least in (("tie", 0.5), ("within 1e-3", -64.0), ("no tie", 0.5), ("tie", 8192.0)):
        maxima_R = math.copysign(1, least) * study.bf16_from(abs(least))
        rows = study.make_rows(KINDS[kind], maxima_R, -1.0, 3, spec.scores)
        n, keys = rows.s_NK.shape
        o, _, _ = _forward(
            torch.ones(n, 1, 1, 1),
            rows.s_NK.reshape(n, keys, 1, 1),
            rows.v_NKD[:, :, None],
            torch.tensor(0),
            spec.key(),
            1.0,
            False,
            0.0,
        )
        own = attend(rows.s_NK, rows.v_NKD, NUMERICS[numerics], VARIANTS[variant]).o_ND
        assert torch.allclose(own, o[:, 0, 0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_without_rounding_the_normaliser_makes_no_difference(variant: str) -> None:
    formats = dict.fromkeys(("statistics", "probabilities", "tile_product", "accumulator", "output"), "fp32")
    rounding = NUMERICS["hardware"].with_sites(formats)
    for kind in KINDS.values():
        rows = study.make_rows(kind, -study.bf16_from(0.5), 1.0, 0, "fp32")
        o_ND = attend(rows.s_NK, rows.v_NKD, rounding, VARIANTS[variant]).o_ND
        assert (o_ND - exact(rows.s_NK, rows.v_NKD)).abs().max() < 4 * 2.0**-20


def test_rows_outside_the_range_are_not_counted() -> None:
    inside_N = torch.tensor([True, False, True, False, False, True])
    found = mean_by_maximum(torch.tensor([1.0, math.nan, 2.0, math.inf, 5.0, 4.0]), inside_N, maxima=3)
    assert (found.mean, found.n) == (2.0, 2)  # maxima 0: 1; 1: none; 2: 2 and 4
    assert found.standard_error == pytest.approx(1.0)  # of 1 and 3


def test_a_row_leaves_the_range_in_one_way() -> None:
    """r = 0.5: inside. 90, 95, 110 with beta 2: every P_bar subnormal; zero in BF16; l = 0."""
    top = torch.tensor([[0.5], [90.0], [95.0], [110.0]])
    scores_NK = torch.cat([top, top, top - 11], dim=1)
    outcome = attend(scores_NK, torch.full((4, 3, 2), 3.0), NUMERICS["hardware"], VARIANTS["beta 2"])
    states = torch.stack([outcome.inside_N, outcome.subnormal_N, outcome.zero_N, outcome.nonfinite_N])
    assert states.tolist() == torch.eye(4).bool().tolist()


# Repeated maxima.


@SIGNS
@pytest.mark.parametrize("maximum", ["+", "-"])
@pytest.mark.parametrize("numerics", ["paper", FP32_STATISTICS])
def test_the_plain_normaliser_pushes_o_away_from_zero(numerics: str, maximum: str, v: str) -> None:
    """A quarter of a unit: half of the sums of two are ties, all decided upwards."""
    found = measured("plain", numerics, maximum=maximum, v=v)
    assert outward(found) > 10
    assert abs(found.mean) == pytest.approx(0.25, rel=0.05)


@SIGNS
@pytest.mark.parametrize("variant", ["beta 2", "beta 7", "beta 7 exact", "safe"])
@pytest.mark.parametrize("numerics", ["paper", FP32_STATISTICS])
def test_algorithm_3_removes_the_bias(numerics: str, variant: str, v: str) -> None:
    """Within four standard errors, and the test could have seen a quarter of what the plain one has."""
    found = measured(variant, numerics, v=v)
    assert abs(outward(found)) < 4
    assert 4 * found.standard_error < 0.25 / 4


@SIGNS
def test_delta_has_the_sign_of_the_bias_in_every_row(v: str) -> None:
    plain, stable = measured("plain", v=v), measured("beta 2", v=v)
    sign = 1 if v == "+" else -1
    assert sign * plain.delta_mean > 10 * plain.delta_standard_error
    assert sign * plain.delta_sum > 0.9 * plain.rows * 8
    assert abs(stable.delta_mean) < 4 * stable.delta_standard_error
    assert 0.4 < stable.delta_positive < 0.6


def test_for_kernels_the_shift_enlarges_the_error_of_delta() -> None:
    """All features of a row share the rounding of P_bar."""
    assert measured("beta 2", "hardware").delta_rms > 4 * measured("plain", "hardware").delta_rms


# A fixed offset.


@SIGNS
@pytest.mark.parametrize(
    ("variant", "direction"), [("offset ln 2", 1), ("offset 1", -1), ("offset 2", 1), ("offset 7", -1)]
)
def test_a_fixed_offset_leaves_a_bias_of_its_own(variant: str, direction: int, v: str) -> None:
    assert direction * outward(measured(variant, FP32_STATISTICS, v=v)) > 10


@SIGNS
def test_an_offset_with_an_exact_exponential_removes_most_of_the_bias(v: str) -> None:
    found = measured("offset 7.0002", FP32_STATISTICS, v=v)
    assert outward(found) > 4
    assert abs(found.mean) < 0.25 / 5


@SIGNS
@pytest.mark.parametrize("variant", ["plain", "offset 1", "offset 7.0002"])
def test_no_offset_helps_kernels(variant: str, v: str) -> None:
    """They divide by l before they round: a factor that P_bar of all tied keys share is gone by then."""
    found = measured(variant, "hardware", "tie small others", v=v)
    assert outward(found) < -10
    assert abs(found.mean) == pytest.approx(0.24, rel=0.05)


def test_the_bounded_shift_is_a_fixed_offset_for_large_maxima() -> None:
    large = {"numerics": "hardware", "kind": "tie small others", "magnitude": "hundreds"}
    assert outward(measured("safe", **large)) < -10
    assert outward(measured("safe", "hardware", magnitude="failing")) < -10
    assert abs(outward(measured("plain", "hardware", magnitude="failing"))) < 4


# All rows.


@pytest.mark.parametrize("numerics", ["paper", "hardware"])
def test_rows_without_a_tie_are_left_alone_unless_all_are_shifted(numerics: str) -> None:
    rows = study.make_rows(KINDS["no tie"], study.bf16_from(64.0), 1.0, 0, NUMERICS[numerics].scores)
    outcomes = {name: attend(rows.s_NK, rows.v_NKD, NUMERICS[numerics], one).o_ND for name, one in VARIANTS.items()}
    same = {name for name, o_ND in outcomes.items() if torch.equal(o_ND, outcomes["plain"])}
    assert same == set(VARIANTS) - set(study.SHIFT_ALL)


@SIGNS
def test_shifting_untied_rows_enlarges_the_error_of_delta(v: str) -> None:
    plain, shifted = (measured(name, "hardware", "no tie", v=v) for name in ("plain", "all beta 2"))
    assert shifted.delta_rms > 1.3 * plain.delta_rms
    assert abs(outward(shifted)) < 4
    assert outward(measured("all offset 1", "hardware", "no tie", v=v)) < -10


def test_shifting_untied_rows_loses_those_with_large_maxima() -> None:
    lost = measured("all beta 2", "hardware", "no tie", "hundreds")
    assert lost.nonfinite + lost.zero + lost.subnormal > 0.9
    kept = measured("beta 2", "hardware", "no tie", "hundreds")
    assert kept.nonfinite + kept.zero + kept.subnormal == 0


# gamma, tolerance, beta.


@SIGNS
def test_gamma_near_one_leaves_negative_maxima_as_they_were(v: str) -> None:
    near = measured("gamma 0.999", maximum="-", v=v)
    assert near.several_ones == 1
    assert outward(near) > 10
    assert measured("gamma 0.999", "hardware", maximum="-", v=v).several_ones == pytest.approx(0.5, abs=0.1)
    zero = measured("beta 2", maximum="-", v=v)
    assert zero.several_ones == 0
    assert abs(outward(zero)) < 4


@SIGNS
@pytest.mark.parametrize(
    ("kind", "biased"), [("within 1e-3", (True, False, False)), ("within 2^-9", (True, True, False))]
)
def test_the_tolerance_must_reach_every_score_whose_p_bar_is_one(kind: str, biased: tuple[bool, ...], v: str) -> None:
    for variant, expected in zip(("beta 2 exact", "beta 2", "beta 2 to 2^-9"), biased, strict=True):
        found = measured(variant, "hardware", kind, v=v)
        assert found.several_ones == expected
        assert outward(found) > 10 if expected else abs(outward(found)) < 4


def test_with_scores_in_bfloat16_all_tolerances_are_one() -> None:
    for kind in ("tie", "within 1e-3", "no tie"):
        rows = study.make_rows(KINDS[kind], study.bf16_from(0.5), 1.0, 0, "bf16")
        o = [
            attend(rows.s_NK, rows.v_NKD, NUMERICS["paper"], Normaliser(positive=2, negative=0, tolerance=t)).o_ND
            for t in (0.0, 1e-3)
        ]
        assert torch.equal(*o)


def test_the_range_of_beta_and_gamma() -> None:
    """FP32 exp is subnormal from 87.3, BF16 P_bar zero from 92.9, l zero from 104: of the shift (beta - 1) r, or (gamma - 1) r."""
    for variant, maximum, factor in (
        ("beta 2", "+", 1),
        ("beta 7", "+", 6),
        ("beta 2", "-", 1),
        ("gamma 0.9", "-", 0.1),
    ):
        found = study.leaving("hardware", "tie", maximum, variant)
        starts = (found.subnormal_from, found.zero_from, found.nonfinite_from)
        for start, limit in zip(starts, (87.34, 92.9, 103.97), strict=True):
            assert start is not None
            assert limit <= start * factor * 1.0001 <= limit * 1.01


@pytest.mark.parametrize("variant", ["plain", "safe", "offset 7"])
def test_a_bounded_shift_never_leaves_the_range(variant: str) -> None:
    found = study.leaving("hardware", "tie", "+", variant)
    assert (found.subnormal_from, found.zero_from, found.nonfinite_from) == (None, None, None)
    assert found.at_100000 == "right"


@SIGNS
def test_algorithm_3_biases_kernels_where_the_shift_is_tiny(v: str) -> None:
    assert abs(outward(measured("plain", "hardware", magnitude="tiny", v=v))) < 4
    assert outward(measured("beta 2", "hardware", magnitude="tiny", v=v)) > 10


# What is published.


def test_the_published_tables_are_those_of_the_published_numbers(tmp_path: Path) -> None:
    for name in ("bias.csv", "range.csv"):
        (tmp_path / name).write_text((RESULTS / name).read_text())
    stabiliser_variants.main(["--tables", "--out", str(tmp_path)])
    for name in ("table.md", "summary.md"):
        assert (tmp_path / name).read_text() == (RESULTS / name).read_text()


@pytest.mark.parametrize("kind", ["tie", "within 2^-9"])
def test_a_published_number_is_measured_again(kind: str) -> None:
    published = normaliser_tables.measured_from((RESULTS / "bias.csv").read_text())
    again = study.measure("hardware", kind, "usual", "+", "-", ["safe"], seeds=5)[0]
    found = next(m for m in published if (m.numerics, m.kind, m.magnitude) == ("hardware", kind, "usual")
                 and (m.maximum, m.v, m.variant) == ("+", "-", "safe"))  # fmt: skip
    assert found.rows == again.rows
    assert found.mean == pytest.approx(again.mean, abs=again.standard_error / 10)
    assert found.delta_rms == pytest.approx(again.delta_rms, rel=0.01)


def test_records_survive_their_file() -> None:
    one = measured("gamma 2", maximum="-")
    assert normaliser_tables.measured_from(normaliser_tables.to_csv([one], ".17g")) == [one]
    limits = study.leaving("paper", "tie", "-", "gamma 0.9")
    assert limits.zero_from is None
    assert normaliser_tables.ranges_from(normaliser_tables.to_csv([limits], ".17g")) == [limits]


def test_the_summary_has_no_cell_that_breaks_its_table() -> None:
    lines = (RESULTS / "summary.md").read_text().splitlines()
    assert {line.count("|") for line in lines} == {4}
    assert "nan" not in (RESULTS / "summary.md").read_text()


@pytest.mark.parametrize("arguments", [["--tables", "--out", "nowhere"], ["--seeds", "0"]])
def test_a_mistake_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        stabiliser_variants.main(arguments)
    assert stopped.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
