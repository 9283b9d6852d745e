"""When an error of delta counts as biased: numbers, thresholds and the rule, and the dither that tells bias from repetition.

A mean error of delta that is many standard errors from zero has two possible causes. One is bias: whatever the mantissas of V, O is
rounded to one side (arXiv 2510.04212). The other is repetition: where O is nearly the same vector in every row (an attention sink, a
position that rules V), one rounding error is made over and over, in a direction that any change of the weights turns.
A dither parts them: each feature of V times a random number in [1, 2), rounded to V's format again, and dO divided by it.
Delta and the size of its error stay; mantissas are drawn anew. Bias stays, a repeated error averages out. So does a
correlation of dO with O's own rounding error, since dO belongs to the undithered O.

Legend: B batch, T positions, H heads, D head width.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from attention.numerics import Numerics
from attention.plan import AttentionSpec, HeadGroup, LayerPlan
from probes.capture import LayerCapture
from probes.delta_error import UNIT, Summary, delta_errors, summarize

SUSPECT_Z = 3.0
"""Least |mean| / standard error of the error of delta, as a normal variable's, for a head to be looked at more closely."""
BIAS_Z = 5.0
"""The same under dither, for a head to be accused: by chance one head in 1.7 million."""
BIAS_RATIO = 0.1
"""Least |mean| / root mean square of the error of delta, as captured and under dither. Healthy runs whose O has a single mantissa
bit reach 0.06 by the correlation of dO with O's error; repeated maxima with V and dO of one sign give 0.3 and more."""
NOISE = 1e-5
"""Errors of delta below this, relative to ||dO|| ||O||, are FP32 noise: that delta does not see the rounding of O. BF16's are
near 1e-3."""
LARGE_SHARE = 0.1
"""||error of dW_Q|| / ||dW_Q|| from which a head counts as strained even without a bias. The exploding CPU microcosm
(configs/quickstart.py, seed 42), whose cause is the correlation of dO with O's error and no bias of the rounding, has 0.1 in its worst
head at step 100, 1 at step 200 and 18 at step 300; its repaired runs 1e-7; random weights in BF16 below 0.03."""
MANY_SEQUENCES = 8
"""From this many sequences on, a sequence is one draw for the standard error; below, a block of ``UNIT`` tokens is."""
DRAWS = 8
"""Dithers of each batch."""
SCORES_AT_ONCE = 2**24
"""Scores of one head that are held at a time, 64 MiB: on a GPU the dithers of a batch cost little more than one of them."""

Finding = Literal["biased", "repeated error", "strained", "unbiased", "no error", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Bias:
    """An error of delta in numbers. Units: loss times loss scale, as delta."""

    mean: float
    standard_error: float
    rms: float
    positive: float
    """Share of tokens with an error above 0."""
    relative: float
    """rms over the root mean square of ||dO|| ||O||."""
    units: int
    """n of the standard error."""

    @property
    def z(self) -> float:
        """Mean over standard error, as a normal variable of the same probability; 0 for no error."""
        if self.mean == 0:
            return 0.0
        return normal_equivalent(self.mean / self.standard_error, self.units - 1) if self.standard_error else math.inf

    @property
    def ratio(self) -> float:
        """|mean| / rms: 1 if every token has the same error."""
        return abs(self.mean) / self.rms if self.rms else 0.0


def suspect(bias: Bias) -> bool:
    """Whether the error of delta, as captured, has a mean worth a closer look."""
    seen = math.isfinite(bias.mean) and bias.relative >= NOISE and not math.isnan(bias.z)
    return seen and abs(bias.z) >= SUSPECT_Z and bias.ratio >= BIAS_RATIO


def verdict(bias: Bias, dithered: Bias | None, error_to_gradient: float) -> Finding:
    """The rule. ``bias``: the error of delta as captured; ``dithered``: under dither, measured for suspects.

    In this order:
    ``unknown``: not finite, or no standard error.
    ``no error``: below ``NOISE``.
    ``biased``: a suspect (``SUSPECT_Z``, ``BIAS_RATIO``) whose dithered error has the same sign, |z| >= ``BIAS_Z`` and
    |mean| / rms >= ``BIAS_RATIO``.
    ``repeated error``: a suspect that dither clears.
    ``strained``: no suspect, yet the error is ``LARGE_SHARE`` of dW_Q or more, or has a small mean with |z| >= ``BIAS_Z``: rounding reaches
    W_Q, by another way than the bias of arXiv 2510.04212.
    ``unbiased``: none of these.
    """
    if not (math.isfinite(bias.mean) and math.isfinite(bias.rms)):
        return "unknown"
    if bias.relative < NOISE:
        return "no error"
    if math.isnan(bias.z):
        return "unknown"
    if suspect(bias):
        return "biased" if dithered and is_bias(dithered) and dithered.mean * bias.mean > 0 else "repeated error"
    return "strained" if error_to_gradient >= LARGE_SHARE or abs(bias.z) >= BIAS_Z else "unbiased"


def is_bias(dithered: Bias) -> bool:
    """Whether an error measured under dither is biased."""
    return dithered.relative >= NOISE and abs(dithered.z) >= BIAS_Z and dithered.ratio >= BIAS_RATIO


def normal_equivalent(t: float, degrees: int) -> float:
    """The normal variable that is as improbable as Student's t with so many degrees of freedom (Wallace 1959), signed."""
    if degrees < 1 or math.isnan(t):
        return math.nan
    correction = (8 * degrees + 1) / (8 * degrees + 3)
    return math.copysign(correction * math.sqrt(degrees * math.log1p(t * t / degrees)), t)


def measure_bias(error_BHT: Tensor, size_BHT: Tensor) -> list[Bias]:
    """The bias of each head's error; ``size_BHT`` is ||dO|| ||O|| of each token. All sequences of all batches at once."""
    summary = summary_of(error_BHT)
    size_H = size_BHT.double().square().mean(dim=(0, 2)).sqrt()
    relative_H = summary.rms_H / torch.where(size_H > 0, size_H, 1.0)
    columns = (summary.mean_H, summary.standard_error_H, summary.rms_H, summary.positive_H, relative_H)
    rows = torch.stack([column.double().cpu() for column in columns], dim=1).tolist()
    return [
        Bias(mean=mean, standard_error=error, rms=rms, positive=positive, relative=relative, units=summary.units)
        for mean, error, rms, positive, relative in rows
    ]


def summary_of(error_BHT: Tensor) -> Summary:
    """``summarize`` with sequences as units where there are enough of them."""
    return summarize(error_BHT, unit=error_BHT.shape[2] if error_BHT.shape[0] >= MANY_SEQUENCES else UNIT)


def token_sizes(layer: LayerCapture) -> Tensor:
    """||dO[T]|| ||O[T]||, [B, H, T]: what an error of delta is small against."""
    o_BHT, do_BHT = (x.float().norm(dim=-1).transpose(1, 2) for x in (layer.o_BTHD, layer.do_BTHD))
    return o_BHT * do_BHT


def head_with(layer: LayerCapture, head: int, numerics: Numerics, draws: Sequence[int] = ()) -> LayerCapture:
    """One head's operands with O computed again by ``flash_reference`` with ``numerics``; dithered if draws are given.

    The batch is repeated for each draw, [draws * B, T, 1, D] with a draw's sequences together. The factors are a pure function of the
    draw: every change of numerics is measured under the same ones.
    """
    q, k, v, do = (x[:, :, head : head + 1] for x in (layer.q_BTHD, layer.k_BTHD, layer.v_BTHD, layer.do_BTHD))
    if draws:
        B, _, _, D = v.shape
        factors_ND = torch.stack([torch.exp2(torch.rand(D, generator=torch.Generator().manual_seed(n))) for n in draws])
        factor_BTHD = factors_ND.to(v.device).repeat_interleave(B, dim=0)[:, None, None]
        q, k, v, do = (x.repeat(len(draws), 1, 1, 1) for x in (q, k, v, do))
        v, do = (v.float() * factor_BTHD).to(v.dtype), do.float() / factor_BTHD
        numerics = numerics.with_sites({"output_gradient": "fp32"})
    with torch.no_grad():
        operator = torch.ops.attention.flash_reference_forward
        o = operator(q, k, v, layer.rounding_seed, numerics.key(), layer.scale, True, layer.softcap)[0]
    group = HeadGroup((0,), AttentionSpec(), "flash_reference", numerics.key())
    plan = LayerPlan(layer.plan.layer, 1, (group,))
    return dataclasses.replace(layer, q_BTHD=q, k_BTHD=k, v_BTHD=v, o_BTHD=o, do_BTHD=do, plan=plan)


def dithered_errors(layer: LayerCapture, head: int, numerics: Numerics, batch: int) -> tuple[Tensor, Tensor]:
    """Error of delta and ||dO|| ||O|| of one head under ``DRAWS`` dithers, each [DRAWS, 1, B * T]: a dither is one draw."""
    B, T = layer.q_BTHD.shape[:2]
    at_once = min(max(SCORES_AT_ONCE // (B * T * T), 1), DRAWS)
    errors, sizes = [], []
    for first in range(0, DRAWS, at_once):
        draws = range(batch * DRAWS + first, batch * DRAWS + min(first + at_once, DRAWS))
        one = head_with(layer, head, numerics, draws)
        errors.append(delta_errors(one).error_BHT.reshape(len(draws), 1, B * T).cpu())
        sizes.append(token_sizes(one).reshape(len(draws), 1, B * T).cpu())
    return torch.cat(errors), torch.cat(sizes)
