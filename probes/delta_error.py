"""The error of delta, token by token: delta_lp - delta_hp of arXiv 2510.04212, Figure 5, and whether it is biased.

delta[T] = sum_d dO[T, d] O[T, d]. The backward pass forms dS = P * (dP - delta), so an error of delta adds
-scale * error[T] * (P K)[T] to dQ[T] (``probes.low_rank`` has what that makes of dW_Q). High precision is O = P V
in FP32 with the P that this backward pass recomputes, exp(S - L), S and L rounded as its numerics say, and the V of its dP. The equation
for dW_Q is then exact. The error is what makes dS inconsistent only where dP is not rounded (``standard`` and ``published`` round it) and
rows of P sum to 1; ``row_residuals`` has the sums of dS. Where none of ``OF_P_AND_V`` acts, it is all of attention in FP32 from the same
q, k and v, which leaves out what FP32 does to L at large logits: that P sums to 1 + y, |y| up to |L| 2^-24, a factor common to a row.

dO is the one that attention reads (rounded at site ``output_gradient``) on both sides, q, k and v as at site ``inputs``.

Legend: B batch, T positions, H heads, D head width, U units (blocks of tokens) of a standard error.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from attention.check.captured import Inputs
from attention.check.measures import rows_from_outside
from attention.dispatch import head_index
from attention.external import loaded
from attention.mask import NO_MASK
from attention.numerics import FP32, Numerics, numerics_from_key
from attention.plan import HeadGroup
from attention.presets import EXTERNAL
from attention.reference.exact import exact_float32
from attention.reference.exponent import exponent_of, probabilities, saved_rows
from attention.reference.flash import row_deltas
from attention.reference.flash import row_residuals as reference_row_residuals
from attention.reference.tiles import Problem, Sites, delta_of_output, make_problem, o_for_delta
from attention.rounding import FORMAT_OF
from probes.capture import LayerCapture

HIGH = FP32.with_sites({"output": "fp32", "inputs": "fp32", "tile_q": 0, "tile_k": 0})
"""O of this is unrounded FP32, in one tile."""

MATH = FP32.with_sites({"delta": "rowsum_p_dp", "saved_statistics": "max_and_sum"})
"""torch's math kernel: in FP32 until O and dQ, dK, dV have the dtype of q, and differentiated by autograd, from P and not from L."""

OF_P_AND_V = (
    *("queries_and_keys", "values", "values_in_dp", "scores", "statistics", "logsumexp", "backward_probabilities"),
    *("probabilities_in_sum", "tile_sum", "row_sum_floor"),
)
"""Sites that move the P of the backward pass, or the V of its dP, by more than the noise of FP32."""

UNIT = 32
"""Consecutive tokens whose mean error is one draw for the standard error: neighbors attend to the same keys."""


@dataclass(frozen=True)
class DeltaError:
    low_BHT: Tensor
    """As the backward pass of this layer and head sees it, float32."""
    high_BHT: Tensor
    """From the high-precision O, float32."""

    @property
    def error_BHT(self) -> Tensor:
        """delta_lp - delta_hp (Figure 5a), in the units of delta: loss times ``loss_scale``."""
        return self.low_BHT - self.high_BHT


@dataclass(frozen=True)
class Summary:
    """Is a set of errors biased? Each field [H] float64."""

    mean_H: Tensor
    """Over tokens."""
    standard_error_H: Tensor
    """Standard error of the mean, from the spread of the means of ``units`` blocks of tokens; NaN for a single unit."""
    rms_H: Tensor
    """Root mean square over tokens."""
    positive_H: Tensor
    """Share of tokens with an error above 0, of those with one (0.5 where there is none)."""
    units: int
    """n of the standard error."""


def effective_numerics(group: HeadGroup) -> Numerics:
    """The roundings of a group. ``HIGH`` stands for those of an external kernel, which are not known, nor is its delta."""
    if group.backend == EXTERNAL:
        return HIGH
    return MATH if group.backend == "sdpa_math" else numerics_from_key(group.numerics)


def delta_errors(layer: LayerCapture) -> DeltaError:
    """delta in low and high precision for each token and head of a layer (arXiv 2510.04212, section 3.2, Figure 5a).

    Low precision is, head by head, what the layer's plan says: rowsum(dO * O) with the O that was produced where that O is
    the one in delta; otherwise what ``attention.reference.flash.row_deltas`` makes of the same q, k, v (a stochastic rounding
    of a separate O is drawn again, with the run's seed). NaN: an external kernel does not say.
    """
    return DeltaError(
        low_BHT=over_groups(layer, lambda group: _low(layer, group)),
        high_BHT=over_groups(
            layer, lambda group: delta_of_output(output_gradient(layer, group), high_output(layer, group), HIGH)
        ),
    )


def feature_errors(layer: LayerCapture) -> Tensor:
    """dO[T, d] * (O_lp - O_hp)[T, d], [B, H, T, D]: the error of rowsum(dO * O) by feature (Figures 5b and 5c).

    O_lp is the O inside delta. For heads whose delta has no O in it (rowsum(P * dP)), it is the O passed on: the
    error that rowsum(dO * O) would have.
    """
    return over_groups(layer, lambda group: output_gradient(layer, group)) * output_errors(layer)


@torch.no_grad()
def row_residuals(layer: LayerCapture) -> Tensor:
    """r = rowsum(dS) that dQ keeps, [B, H, T] float32, in the units of delta.

    Exact arithmetic has r = 0. As ``attention.reference.flash.row_residuals`` has it with the roundings of each head; kernels of torch's
    as they are emulated, external ones as ``rows_from_outside`` measures them.
    """

    def measured(group: HeadGroup) -> Tensor:
        q, k, v, _, do = layer.heads(group)
        if group.backend == EXTERNAL:
            q, k, v, do = (x.transpose(1, 2) for x in (q, k, v, do))
            with torch.enable_grad():
                return rows_from_outside(loaded(group.numerics), Inputs(q, k, v, do, layer.scale))
        settings: dict[str, Any] = {"seed": layer.seed(group), "scale": layer.scale, "softcap": layer.softcap}
        return reference_row_residuals(q, k, v, do, effective_numerics(group), **settings)

    return over_groups(layer, measured)


def output_errors(layer: LayerCapture) -> Tensor:
    """O_lp - O_hp, [B, H, T, D], of the O inside delta (of the O passed on, where delta has none in it)."""
    return over_groups(layer, lambda group: _low_output(layer, group) - high_output(layer, group))


def summarize(error_BHT: Tensor, *, unit: int = UNIT) -> Summary:
    """Mean, standard error, size and sign of an error for each head. No host synchronization.

    ``unit``: tokens in a row whose mean counts as one draw; a shorter rest of a sequence is left out of the standard error alone.
    """
    error_HBT = error_BHT.double().transpose(0, 1)
    B, T = error_HBT.shape[1:]
    unit = min(unit, T)
    blocks = T // unit
    units = B * blocks
    mean_HU = error_HBT[:, :, : blocks * unit].reshape(-1, units, unit).mean(dim=-1)
    error_HN = error_HBT.flatten(1)
    mean_H, signed_H = error_HN.mean(dim=-1), (error_HN != 0).sum(dim=-1)
    positive_H = torch.where(signed_H > 0, (error_HN > 0).sum(dim=-1) / signed_H, 0.5).double()
    return Summary(
        mean_H=mean_H,
        # One unit has no spread, and torch would warn.
        standard_error_H=mean_HU.std(dim=-1) / math.sqrt(units) if units > 1 else torch.full_like(mean_H, math.nan),
        rms_H=error_HN.square().mean(dim=-1).sqrt(),
        positive_H=positive_H.where(~error_HN.isnan().any(-1), math.nan),
        units=units,
    )


def over_groups(layer: LayerCapture, measure: Callable[[HeadGroup], Tensor]) -> Tensor:
    """``measure`` of every group of heads, [B, heads of the group, ...], put together in the order of the heads [B, H, ...]."""
    parts = [measure(group) for group in layer.plan.groups]
    if len(parts) == 1:
        return parts[0]
    order = [head for group in layer.plan.groups for head in group.heads]
    back = head_index(tuple(order.index(head) for head in range(layer.plan.n_head)), parts[0].device)
    return torch.cat(parts, dim=1)[:, back]


def problem_of(layer: LayerCapture, group: HeadGroup) -> Problem:
    """Q, K and V of a group as its products read them."""
    q, k, v, _, _ = layer.heads(group)
    key = effective_numerics(group).key()
    return make_problem(q, k, v, key, layer.scale, True, layer.softcap, seed=layer.seed(group))


@torch.no_grad()
def forward_pass(layer: LayerCapture, group: HeadGroup, numerics: Numerics) -> tuple[Tensor, Tensor, Tensor]:
    """O, the O inside delta (empty where it is O) [B, T, H, D], and what ``saved_shape`` says, by ``flash_reference``."""
    q, k, v, _, _ = layer.heads(group)
    operator = torch.ops.attention.flash_reference_forward
    settings = numerics.key(), layer.scale, True, layer.softcap, None, *NO_MASK
    o, delta_o, saved = operator(q, k, v, layer.seed(group), *settings)
    if delta_o.numel() and not delta_o.is_floating_point():
        delta_o = o_for_delta(o, delta_o, numerics.concrete(FORMAT_OF[q.dtype]))
    return o, delta_o, saved


@torch.no_grad()
def high_output(layer: LayerCapture, group: HeadGroup) -> Tensor:
    """O of a group in high precision, [B, H, T, D]; see the top of this module."""
    numerics = effective_numerics(group)
    n = numerics.concrete(FORMAT_OF[layer.q_BTHD.dtype])
    if all(getattr(n, site) == getattr(HIGH, site) for site in OF_P_AND_V):
        return forward_pass(layer, group, HIGH.with_sites({"inputs": n.inputs}))[0].transpose(1, 2)
    return under_p(layer, group, "v")


@torch.no_grad()
def under_p(layer: LayerCapture, group: HeadGroup, name: Literal["k", "v"], *, through_softcap: bool = False) -> Tensor:
    """P K or P V of a group with the P that its backward pass recomputes and the V of its dP, float32 [B, H, T, D].

    ``through_softcap``: each P carries the factor of the soft-cap's gradient.
    """
    saved = forward_pass(layer, group, effective_numerics(group))[2]
    with exact_float32(layer.q_BTHD.device):
        problem = problem_of(layer, group)
        exponent, x, parts = exponent_of(problem), problem.k if name == "k" else problem.v_of_dp, []
        for rows in problem.row_tiles():
            total = torch.zeros_like(x[:, :, rows])
            for columns in problem.column_tiles(rows):
                s = exponent.scores(rows, columns)
                p = probabilities(exponent, s, saved_rows(saved, rows))
                total += (problem.through_softcap(p, s) if through_softcap else p) @ x[:, :, columns]
            parts.append(total)
        return torch.cat(parts, dim=2)


def output_gradient(layer: LayerCapture, group: HeadGroup) -> Tensor:
    """dO of a group as the backward pass reads it, float32 [B, H, T, D]."""
    do_BTHD = layer.heads(group)[4]
    sites = Sites(effective_numerics(group), layer.q_BTHD.dtype, layer.seed(group))
    return sites.output_gradient(do_BTHD.transpose(1, 2).float())


@torch.no_grad()
def _low_output(layer: LayerCapture, group: HeadGroup) -> Tensor:
    """The O inside delta, or where delta has none the O passed on, float32 [B, H, T, D]."""
    numerics = effective_numerics(group)
    o_BTHD = layer.heads(group)[3]
    known = group.backend != EXTERNAL
    if known and numerics.delta == "rowsum_do_o" and numerics.delta_output != "output":
        o_BTHD = forward_pass(layer, group, numerics)[1]
    return o_BTHD.transpose(1, 2).float()


@torch.no_grad()
def _low(layer: LayerCapture, group: HeadGroup) -> Tensor:
    numerics = effective_numerics(group)
    q, k, v, _, do = layer.heads(group)
    if group.backend == EXTERNAL:
        return do.new_full(do.transpose(1, 2).shape[:3], math.nan, dtype=torch.float32)
    if numerics.delta == "rowsum_do_o":
        n = numerics.concrete(FORMAT_OF[q.dtype])
        return delta_of_output(output_gradient(layer, group), _low_output(layer, group), n)
    return row_deltas(q, k, v, do, numerics, seed=layer.seed(group), scale=layer.scale, softcap=layer.softcap)
