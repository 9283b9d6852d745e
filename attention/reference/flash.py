"""FlashAttention-2 forward and backward in PyTorch, tile by tile, with every rounding site of ``Numerics`` switchable.

Source of the algorithm: Dao, "FlashAttention-2" (arXiv 2307.08691), Algorithms 1 and 2. It runs on CPU and GPU, is slow, and is what
the kernels are checked against. Both directions are custom operators.

Legend: B batch, H heads, T sequence, D head dim; tiles have R rows and C columns. All tiles are float32; values are rounded by ``Sites``.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..mask import NO_MASK
from ..numerics import LARGEST_SCALE, LOW_FORMATS, Numerics
from ..operators import BACKWARD_TENSORS, FORWARD_TENSORS, differentiable, gradients_like, operator
from ..rounding import DELTA_STREAM, OUTPUT_STREAM, low_bits
from .dose import delta_errors, with_zero_sum_noise
from .exact import exact_float32
from .exponent import Exponent, exponent_of, probabilities, saved_rows, sink_probabilities, statistics_to_save
from .tiles import (
    Problem,
    Sites,
    delta_of_output,
    delta_operands,
    keeps_own_output,
    make_problem,
    o_for_delta,
    outputs_like,
    round_output,
    saved_shape,
)


class _RowSumFloor:
    """``row_sum_floor`` of the tiles of some rows, in order; ``scaled`` keeps the running m that ``stabilized`` would have beside m."""

    def __init__(self, numerics: Numerics, exponent: Exponent):
        self.numerics, self.exponent = numerics, exponent
        self.shifted = replace(numerics, row_max="stabilized") if numerics.row_max == "scaled" else None
        self.m_shifted: Tensor | None = None

    def of_tile(self, s: Tensor, m: Tensor, sites: Sites) -> Tensor:
        """The least row sum [B, H, R, 1] of a tile: 0 where the row does not see it, unless fully masked tiles are visited."""
        least = torch.full_like(m, self.numerics.row_sum_floor)
        if not self.numerics.row_sum_floor:
            return least
        if self.shifted is not None:
            r = self.exponent.row_max(s, self.shifted)
            self.m_shifted = sites.statistics(r if self.m_shifted is None else torch.maximum(self.m_shifted, r))
            least = least * self.exponent.rescale(self.m_shifted, m).clamp(max=LARGEST_SCALE)
        if self.numerics.hidden_tiles == "skipped":
            least = least.masked_fill(s.amax(dim=-1, keepdim=True) == -torch.inf, 0.0)
        return least


def _forward_rows(problem: Problem, rows: slice, seed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Algorithm 1 for one tile of rows: O before its final rounding, the same from an FP32 accumulation, and
    ``statistics_to_save`` [B, H, R, Z]."""
    sites, v, exponent = problem.sites, problem.v, exponent_of(problem)
    n = sites.numerics
    floor = _RowSumFloor(n, exponent)
    shape = (*problem.q[:, :, rows].shape[:3], 1)
    m = torch.full(shape, -torch.inf, dtype=torch.float32, device=v.device)
    row_sum = divisor = torch.zeros(shape, dtype=torch.float32, device=v.device)
    if problem.sinks is not None:
        sinks, m_of_sinks = exponent.sinks()
        m = sites.statistics(m_of_sinks).expand(shape)
        row_sum = divisor = sites.statistics(exponent.rescale(sinks, m))
    o_bar = torch.zeros((*shape[:3], v.shape[3]), dtype=torch.float32, device=v.device)
    coarse, apart = n.tile_product != "fp32" or n.accumulator != "fp32", n.probabilities_in_delta != "probabilities"
    o_exact = o_bar.clone() if coarse or apart else o_bar
    for columns in problem.column_tiles(rows, hidden=n.hidden_tiles == "visited"):
        s = exponent.scores(rows, columns)
        m_new = sites.statistics(torch.maximum(m, exponent.row_max(s)))
        base = problem.filled(m_new, 0.0)
        p_bar = exponent.exp(s, base)
        rescale = exponent.rescale(m, base)
        least = floor.of_tile(s, base, sites)
        summed = sites.probabilities_in_sum(p_bar).sum(dim=-1, keepdim=True)
        row_sum = sites.statistics(rescale * row_sum + sites.tile_sum(summed).clamp(min=least))
        weights = problem.weights(p_bar, rows, columns, seed)
        if n.divisor == "rounded":
            of_tile = sites.tile_sum(weights.sum(dim=-1, keepdim=True)).clamp(min=least)
            divisor = sites.statistics(rescale * divisor + of_tile)
        else:
            divisor = row_sum
        product = weights @ v[:, :, columns]
        o_bar = sites.accumulator(sites.accumulator(rescale * o_bar) + sites.tile_product(product))
        if apart:
            o_exact = rescale * o_exact + sites.probabilities_in_delta(p_bar) @ v[:, :, columns]
        else:
            o_exact = rescale * o_exact + product if coarse else o_bar
        m = m_new
    row_sum, divisor = (x.masked_fill(m == -torch.inf, 1.0) if problem.ranges else x for x in (row_sum, divisor))
    m = problem.filled(m, torch.inf)  # so that P is 0
    o_exact = o_exact / (row_sum if apart else divisor)
    return o_bar / divisor, o_exact, statistics_to_save(exponent, m, row_sum, divisor, sites)


def _forward_pass(q: Tensor, k: Tensor, v: Tensor, seed: Tensor, *settings: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(O [B, T, H, D], O for delta or an empty tensor where it is O itself, and of ``saved_shape`` float32 what the backward pass
    forms P from, in the units of ``exponent_of``)."""
    with exact_float32(q.device):
        problem = make_problem(q, k, v, *settings, seed=seed)
        parts = [_forward_rows(problem, rows, seed) for rows in problem.row_tiles()]
        o, o_exact, saved = (torch.cat(part, dim=2) for part in zip(*parts, strict=True))
        n = problem.sites.numerics
        if n.delta_output in LOW_FORMATS:
            o_exact = problem.sites.delta_output(o_exact)
        o, o_exact = o.transpose(1, 2).contiguous(), o_exact.transpose(1, 2).contiguous()
        output = round_output(o, n.output, n.output_rounding, seed, OUTPUT_STREAM, q.dtype)
        if not keeps_own_output(n):
            delta_output = torch.empty(0, device=q.device, dtype=q.dtype)
        elif n.delta_output in LOW_FORMATS:
            delta_output = o_exact
        elif n.delta_output == "low16":
            delta_output = low_bits(o_exact, output.float(), n.output)
        else:
            delta_output = round_output(o_exact, n.delta_output, n.delta_rounding, seed, DELTA_STREAM, q.dtype)
        return output, delta_output, saved.transpose(-1, -2).contiguous().view(saved_shape(q, n))


_forward = operator("flash_reference_forward", FORWARD_TENSORS, 3, _forward_pass, outputs_like)


def _delta_rows(problem: Problem, rows: slice, do: Tensor, o: Tensor, saved: Tensor) -> Tensor:
    """delta of one tile of rows [B, H, R, 1]. Inputs are that tile's dO and O [B, H, R, D] and what is saved of its rows [B, H, R, Z]."""
    n = problem.sites.numerics
    if n.delta == "rowsum_do_o":
        return delta_of_output(do, o, n)[..., None]
    exponent = exponent_of(problem)
    total = torch.zeros_like(saved[..., :1])
    row_sum = torch.zeros_like(total)
    for columns in problem.column_tiles(rows):
        s = exponent.scores(rows, columns)
        p = probabilities(exponent, s, saved)
        dp = problem.dp(do, rows, columns, s)
        total += (p * dp).sum(dim=-1, keepdim=True)
        row_sum += p.sum(dim=-1, keepdim=True)
    if problem.sinks is not None:
        row_sum += sink_probabilities(exponent, saved)
    if n.delta == "rowsum_p_dp_normalized":
        total = _over_row_sum(total, row_sum)
    return problem.sites.delta_sum(total)


def _top_two(problem: Problem, rows: slice, saved: Tensor) -> Tensor:
    top = torch.zeros_like(saved[..., :1]).expand(*saved.shape[:3], 2)
    exponent = exponent_of(problem)
    for columns in problem.column_tiles(rows):
        p = probabilities(exponent, exponent.scores(rows, columns), saved)
        top = torch.cat((top, p), dim=-1).topk(2, dim=-1).values
    return top.transpose(-1, -2)


def _deltas(problem: Problem, do: Tensor, o: Tensor, saved: Tensor, seed: Tensor) -> tuple[Tensor, Tensor | None]:
    """delta of all rows and its ``delta_error``, None where there is none, [B, H, T, 1]; the operands are those of ``_delta_rows``."""
    n = problem.sites.numerics
    tiles = [(rows, saved_rows(saved, rows)) for rows in problem.row_tiles()]
    delta = torch.cat([_delta_rows(problem, rows, do[:, :, rows], o[:, :, rows], kept) for rows, kept in tiles], dim=2)
    if n.delta_error == "none":
        return delta, None
    top_two = None
    if n.delta_error_rows != "all":
        top_two = torch.cat([_top_two(problem, rows, kept) for rows, kept in tiles], dim=3)
    error = delta_errors(delta.squeeze(-1), do.transpose(1, 2), o.transpose(1, 2), top_two, seed, n)
    return delta, error[..., None]


def _over_row_sum(x: Tensor, row_sum: Tensor) -> Tensor:
    """x / rowsum(P) [B, H, R, .]; 0 in a row whose P is 0 throughout (an L far too large), as x is there."""
    return x / row_sum.masked_fill(row_sum == 0, 1.0)


def _score_gradients(
    problem: Problem, rows: slice, columns: slice, do: Tensor, saved: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor]:
    """P and dS of one tile [B, H, R, C], before they are rounded as operands."""
    exponent = exponent_of(problem)
    s = exponent.scores(rows, columns)
    p = probabilities(exponent, s, saved)
    return p, problem.through_softcap(p * (problem.dp(do, rows, columns, s) - delta), s)


def _backward_tile(
    problem: Problem, rows: slice, columns: slice, do: Tensor, saved: Tensor, delta: Tensor, delta_of_keys: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Contributions of one tile to dQ [B, H, R, D] and to dK, dV [B, H, C, D] (Algorithm 2)."""
    sites, place = problem.sites, problem.place(rows, columns)
    p, ds = _score_gradients(problem, rows, columns, do, saved, delta)
    ds_of_keys = ds
    if delta_of_keys is not delta:
        _, ds_of_keys = _score_gradients(problem, rows, columns, do, saved, delta_of_keys)
    dq = problem.scale * (sites.score_gradients(ds, place) @ problem.k[:, :, columns])
    dk = problem.scale * (sites.score_gradients(ds_of_keys, place).transpose(-1, -2) @ problem.q[:, :, rows])
    features = slice(0, problem.v.shape[3])  # without the noise of delta_error
    do_of_dv = sites.output_gradient_in_dv(do[..., features], problem.place(rows, features))
    dv = sites.probabilities_in_dv(p, place).transpose(-1, -2) @ do_of_dv
    return dq, dk, dv


class _RowSums(NamedTuple):
    """Sums over the keys, for a tile of rows: [B, H, R, 1], and P K [B, H, R, D]. dS is taken before the soft-cap."""

    ds: Tensor
    """Sum of dS as ``score_gradients`` rounds it."""
    ds_unrounded: Tensor
    p: Tensor
    p_rounded: Tensor
    """Sum of P as ``probabilities`` rounds it."""
    pk: Tensor
    """P K with P so rounded."""


def _row_sums(problem: Problem, rows: slice, do: Tensor, saved: Tensor, delta: Tensor) -> _RowSums:
    sites, exponent = problem.sites, exponent_of(problem)
    nothing = [torch.zeros_like(delta) for _ in range(4)]
    sums = _RowSums(nothing[0], nothing[1], nothing[2], nothing[3], torch.zeros_like(problem.q[:, :, rows]))
    for columns in problem.column_tiles(rows):
        s = exponent.scores(rows, columns)
        p = probabilities(exponent, s, saved)
        place, k = problem.place(rows, columns), problem.k[:, :, columns]
        ds = p * (problem.dp(do, rows, columns, s) - delta)
        ds_rounded, p_rounded = sites.score_gradients(ds, place), sites.probabilities(p, place)
        parts = (*(x.sum(dim=-1, keepdim=True) for x in (ds_rounded, ds, p, p_rounded)), p_rounded @ k)
        for total, part in zip(sums, parts, strict=True):
            total += part
    return sums


def _row_residual(
    problem: Problem, rows: slice, do: Tensor, saved: Tensor, delta: Tensor
) -> tuple[Tensor | None, Tensor]:
    """Site ``row_residual`` for one tile of rows: what dQ [B, H, R, D] is too large by (None: nothing is taken out), and the delta
    [B, H, R, 1] in dK."""
    sites, chosen = problem.sites, problem.sites.numerics.row_residual
    if chosen == "kept":
        return None, delta
    sums = _row_sums(problem, rows, do, saved, delta)
    if chosen == "centered_keys":
        return problem.scale * (sums.ds * problem.mean_key()), delta
    excess = problem.scale * (_over_row_sum(sums.ds, sums.p) * sums.pk)
    return excess, sites.delta_sum(delta + _over_row_sum(sums.ds_unrounded, sums.p))


def _add_gradients(
    totals: tuple[Tensor, ...], problem: Problem, heads: slice, do: Tensor, delta: Tensor, saved: Tensor
) -> None:
    """Add to dQ [B, H, T, D], to dK and dV [B, HK, S, D] and to the gradient of the sinks [H] what comes of ``problem``: those of the H
    heads that ``heads`` names, no two with the same keys. dO and delta are of all heads, as is what was saved."""
    dq, dk, dv, dsinks = totals[0][:, heads], *totals[1:3], totals[3][heads]
    do, deltas, saved = do[:, heads], delta[:, heads], saved[:, heads]
    add = problem.sites.gradient_accumulator
    for rows in problem.row_tiles():
        do_rows, kept_rows = do[:, :, rows], saved_rows(saved, rows)
        delta = deltas[:, :, rows]
        excess, delta_of_keys = _row_residual(problem, rows, do_rows, kept_rows, delta)
        if problem.sinks is not None:
            dsinks -= (sink_probabilities(exponent_of(problem), kept_rows) * delta).sum(dim=(0, 2, 3))
        for columns in problem.column_tiles(rows):
            parts = _backward_tile(problem, rows, columns, do_rows, kept_rows, delta, delta_of_keys)
            for total, where, part in zip((dq, dk, dv), (rows, columns, columns), parts, strict=True):
                total[:, :, where] = add(total[:, :, where] + part)
        if excess is not None:
            dq[:, :, rows] = add(dq[:, :, rows] - excess)


def _backward_pass(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seed: Tensor,
    o: Tensor,
    low_bits: Tensor,
    saved: Tensor,
    *settings: Any,
) -> tuple[Tensor, ...]:
    """(dQ, dK, dV), each [B, T, H, D] in q's dtype, and the gradient of the sinks, float32. ``o`` and ``low_bits`` are
    ``tiles.delta_operands``; ``saved``: ``saved_shape``."""
    with exact_float32(q.device):
        problem = make_problem(q, k, v, *settings, seed=seed)
        do_BHTD = problem.sites.output_gradient(problem.visible_rows(do.transpose(1, 2).float()))
        o_BHTD = o_for_delta(o, low_bits, problem.sites.numerics).transpose(1, 2)
        delta, error = _deltas(problem, do_BHTD, o_BHTD, saved, seed)
        if error is not None and problem.sites.numerics.delta_error == "zero_sum":
            # Beside V and dO as they are rounded: a format with a scale, or a random one, would round them anew.
            noise = with_zero_sum_noise(do[..., :0], v[..., :0], error.squeeze(-1), seed)
            of_do, of_v = (x.transpose(1, 2).float() for x in noise)
            if problem.sites.numerics.output_gradient not in LOW_FORMATS:
                of_do = problem.sites.output_gradient(of_do)
            do_BHTD = torch.cat((do_BHTD, problem.visible_rows(of_do)), dim=-1)
            of_v = of_v.repeat_interleave(problem.group, dim=1)
            problem = replace(problem, v_of_dp=torch.cat((problem.v_of_dp, of_v), dim=-1))
            delta, _ = _deltas(problem, do_BHTD, o_BHTD, saved, seed)
        elif error is not None:
            delta = delta + error
        dk, dv = (torch.zeros_like(x[:, :: problem.group]) for x in (problem.k, problem.v))
        dsinks = torch.zeros(q.shape[2] if problem.sinks is not None else 0, dtype=torch.float32, device=q.device)
        totals = torch.zeros_like(problem.q), dk, dv, dsinks
        for heads in (slice(head, None, problem.group) for head in range(problem.group)):
            _add_gradients(totals, problem.of_heads(heads), heads, do_BHTD, delta, saved)
        return *problem.gradients(*totals[:3], q.dtype), dsinks


_backward = operator("flash_reference_backward", BACKWARD_TENSORS, 4, _backward_pass, gradients_like)


def row_deltas(q: Tensor, k: Tensor, v: Tensor, do: Tensor, numerics: Numerics, **settings: Any) -> Tensor:
    """delta of every row, [B, H, T] float32, as the backward pass with ``numerics`` sees it, before ``row_residual`` mends it.

    Operands are [B, T, H, D]; settings are seed, scale, causal and softcap. A probe: it records no graph.
    """
    with torch.no_grad(), exact_float32(q.device):
        tiles = _delta_tiles(q, k, v, do, numerics.key(), **settings)
        return torch.cat([delta for *_, delta in tiles], dim=2).squeeze(-1)


def row_residuals(q: Tensor, k: Tensor, v: Tensor, do: Tensor, numerics: Numerics, **settings: Any) -> Tensor:
    """r = rowsum(dS) as dQ keeps it after ``row_residual``, [B, H, T] float32.

    In exact arithmetic r is 0; an error e of delta leaves -e rowsum(P), and r (P K) / rowsum(P) in dQ / scale. With a soft-cap dS is
    the gradient behind it. Arguments and graph as in ``row_deltas``.
    """
    residuals = []
    with torch.no_grad(), exact_float32(q.device):
        for problem, rows, do_rows, saved, delta in _delta_tiles(q, k, v, do, numerics.key(), **settings):
            sums = _row_sums(problem, rows, do_rows, saved, delta)
            taken = {
                "kept": torch.zeros_like(sums.ds),
                "centered_keys": sums.ds,
                "corrected_rows": _over_row_sum(sums.ds, sums.p) * sums.p_rounded,
            }
            residuals.append(sums.ds - taken[problem.sites.numerics.row_residual])
    return torch.cat(residuals, dim=2).squeeze(-1)


def _delta_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    key: str,
    *,
    seed: Tensor,
    scale: float,
    causal: bool = True,
    softcap: float = 0.0,
) -> Iterator[tuple[Problem, slice, Tensor, Tensor, Tensor]]:
    """The problem, and of each tile of rows its place, dO [B, H, R, D], what was saved [B, H, R, Z] and delta [B, H, R, 1]."""
    o, delta_output, saved = _forward(q, k, v, seed, key, scale, causal, softcap, None, *NO_MASK)
    problem = make_problem(q, k, v, key, scale, causal, softcap, seed=seed)
    do_BHTD = problem.sites.output_gradient(do.transpose(1, 2).float())
    o_BHTD = o_for_delta(*delta_operands(o, delta_output), problem.sites.numerics).transpose(1, 2)
    delta, error = _deltas(problem, do_BHTD, o_BHTD, saved, seed)
    if error is not None and problem.sites.numerics.delta_error != "zero_sum":
        delta = delta + error
    for rows in problem.row_tiles():
        yield problem, rows, do_BHTD[:, :, rows], saved_rows(saved, rows), delta[:, :, rows]


def kept_of(seed: Tensor, o: Tensor, delta_output: Tensor, saved: Tensor) -> tuple[Tensor, ...]:
    """What the backward pass needs of the outputs, and the seed."""
    return seed, *delta_operands(o, delta_output), saved


flash_reference = differentiable(_forward, _backward, kept_of)
