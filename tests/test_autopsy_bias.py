"""The rule of the verdict at each of its thresholds, and the dither on captures made by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from layer_captures import make_layer, random_layer, tied_layer

from attention import AttentionSpec
from autopsy import verdict as autopsy_bias
from autopsy.verdict import (
    BIAS_RATIO,
    BIAS_Z,
    DRAWS,
    LARGE_SHARE,
    NOISE,
    SUSPECT_Z,
    Bias,
    dithered_errors,
    head_with,
    measure_bias,
    normal_equivalent,
    verdict,
)
from probes.delta_error import delta_errors

PAPER = AttentionSpec(numerics="rounded_forward").resolve()
MANY = 10**9
"""Units so many that z is t."""


def bias(z: float, ratio: float, relative: float = 1e-3) -> Bias:
    return Bias(mean=ratio, standard_error=ratio / z, rms=1.0, positive=0.5, relative=relative, units=MANY)


STRONG = bias(BIAS_Z + 0.1, 0.5)


@pytest.mark.parametrize(
    ("found", "dithered", "share", "expected"),
    [
        (STRONG, STRONG, 0.0, "biased"),
        (bias(SUSPECT_Z + 0.1, BIAS_RATIO + 0.01), bias(BIAS_Z + 0.1, BIAS_RATIO + 0.01), 0.0, "biased"),
        (STRONG, None, 0.0, "repeated error"),
        (STRONG, bias(BIAS_Z - 0.1, 0.5), 0.0, "repeated error"),
        (STRONG, bias(BIAS_Z + 0.1, BIAS_RATIO - 0.01), 0.0, "repeated error"),
        (STRONG, dataclasses.replace(STRONG, mean=-0.5), 0.0, "repeated error"),
        (bias(SUSPECT_Z - 0.1, 0.5), STRONG, 0.0, "unbiased"),
        (bias(BIAS_Z - 0.1, BIAS_RATIO - 0.01), STRONG, 0.0, "unbiased"),
        (bias(BIAS_Z + 0.1, BIAS_RATIO - 0.01), None, 0.0, "strained"),
        (bias(0.1, 0.001), None, LARGE_SHARE + 0.01, "strained"),
        (bias(0.1, 0.001), None, LARGE_SHARE - 0.01, "unbiased"),
        (bias(BIAS_Z + 0.1, 0.5, relative=NOISE / 2), STRONG, 1.0, "no error"),
        (dataclasses.replace(STRONG, mean=math.nan), STRONG, 0.0, "unknown"),
        (dataclasses.replace(STRONG, standard_error=math.nan), STRONG, 0.0, "unknown"),
    ],
)
def test_the_rule(found: Bias, dithered: Bias | None, share: float, expected: str) -> None:
    assert verdict(found, dithered, share) == expected


@pytest.mark.parametrize(("t", "degrees", "z"), [(2.571, 5, 1.960), (4.587, 10, 3.291), (2.042, 30, 1.960)])
def test_students_t_as_a_normal_variable(t: float, degrees: int, z: float) -> None:
    """Quantiles of Student's t and of the normal distribution from tables: 97.5 %, 99.95 %, 97.5 %."""
    assert normal_equivalent(t, degrees) == pytest.approx(z, abs=0.01)
    assert normal_equivalent(-t, degrees) == pytest.approx(-z, abs=0.01)


def test_dither_keeps_delta_and_the_size_of_its_error() -> None:
    layer = random_layer(shape=(4, 64, 2, 16), spec=AttentionSpec(numerics="rounded_forward"))
    plain, dithered = head_with(layer, 1, PAPER), head_with(layer, 1, PAPER, (3,))
    assert not torch.equal(plain.v_BTHD, dithered.v_BTHD)
    # V is rounded again, so delta moves by its rounding.
    difference = delta_errors(plain).high_BHT - delta_errors(dithered).high_BHT
    assert difference.norm() < 0.01 * delta_errors(plain).high_BHT.norm()
    error = dithered_errors(layer, 1, PAPER, 0)[0]
    assert 0.8 < error.square().mean().sqrt() / delta_errors(plain).error_BHT.square().mean().sqrt() < 1.25


def test_dithers_at_once_are_the_dithers_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = random_layer(shape=(2, 16, 2, 16), spec=AttentionSpec(numerics="rounded_forward"))
    at_once = dithered_errors(layer, 1, PAPER, 1)
    monkeypatch.setattr(autopsy_bias, "SCORES_AT_ONCE", 3 * 2 * 16 * 16)
    for together, apart in zip(at_once, dithered_errors(layer, 1, PAPER, 1), strict=True):
        torch.testing.assert_close(together, apart)
    expected = delta_errors(head_with(layer, 1, PAPER, (DRAWS + 5,))).error_BHT
    torch.testing.assert_close(at_once[0][5].reshape(2, 1, 16), expected)


def test_bias_survives_the_dither() -> None:
    found = measure_bias(*dithered_errors(tied_layer(spec=AttentionSpec(numerics="rounded_forward")), 1, PAPER, 0))[0]
    assert found.units == DRAWS
    assert found.z < -BIAS_Z
    assert found.ratio > 0.3


def test_a_repeated_error_does_not() -> None:
    """Every sequence has the same V: the same errors of O in each, of a sign that means nothing."""
    generator = torch.Generator().manual_seed(2)
    shape = (32, 8, 1, 16)
    v = torch.randn(1, *shape[1:], generator=generator).expand(shape)
    do = torch.randn(16, generator=generator) + 0.1 * torch.randn(shape, generator=generator)
    layer = make_layer(torch.zeros(shape), torch.zeros(shape), v, do, spec=AttentionSpec())
    as_captured = measure_bias(delta_errors(layer).error_BHT, torch.ones(32, 1, 8))[0]
    assert abs(as_captured.z) > BIAS_Z
    assert as_captured.ratio > BIAS_RATIO
    dithered = measure_bias(*dithered_errors(layer, 0, AttentionSpec().resolve(), 0))[0]
    assert abs(dithered.z) < SUSPECT_Z
