"""What the PyTorch backends share: operands in float32, named rounding sites, tiles and masked scores.

Legend: B batch, H heads, T sequence, D head dim; a tile has R rows (queries) and C columns (keys).
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..low_formats import round_low
from ..mask import NO_MASK, KeyRanges, Mask
from ..numerics import LOW_FORMATS, OF_TILES, SITES, Numerics, numerics_from_key
from ..rounding import (
    FORMAT_OF,
    NUMBERS_OF_SITES,
    PROBABILITIES_STREAM,
    SITE_STREAMS,
    random_bits,
    round_to,
    storage_dtype,
    tile_random_bits,
    with_low_bits,
)

Place = tuple[Tensor, slice, slice]
"""Of a tile: the numbers of its heads [B H], its rows and its columns."""
OF_PLACES = (*OF_TILES, "output_gradient_in_dv")
"""Sites that round tile by tile."""


class Sites:
    """Rounds a value at a named site: ``sites.scores(x)``; x is [B, H, ., .] where its format is below BF16.

    Sites that round a tile get its ``Problem.place``, too. A stochastic format draws by it, so that a value that is formed several times
    is rounded alike each time.
    """

    def __init__(self, numerics: Numerics, dtype: torch.dtype, seed: Tensor | None = None):
        self.numerics, self.seed = numerics.concrete(FORMAT_OF[dtype]), seed
        self.calls = Counter[str]()

    def __getattr__(self, site: str) -> Callable[..., Tensor]:
        fmt = getattr(self.numerics, site)
        if fmt in SITES:
            fmt = getattr(self.numerics, fmt)
        if fmt in LOW_FORMATS:
            if site in OF_PLACES:
                fmt = fmt.replace("_tensor", "_head")  # which heads are beside a tile's is no part of the numerics
            return lambda x, place=None: self._low(x, site, fmt, place)
        return lambda x, place=None: round_to(x, fmt)

    def _low(self, x: Tensor, site: str, fmt: str, place: Place | None) -> Tensor:
        size = ("_tile" in fmt and self.numerics.tile_k) or x.shape[-2]
        parts = x.split(size, dim=-2)
        bits = self._bits(site, x, place).split(size, dim=-2) if fmt.endswith("_stochastic") else [None] * len(parts)
        return torch.cat([round_low(part, fmt, drawn) for part, drawn in zip(parts, bits, strict=True)], dim=-2)

    def _bits(self, site: str, x: Tensor, place: Place | None) -> Tensor:
        if self.seed is None:
            raise ValueError(f"{site} is rounded stochastically, which needs a seed")
        stream = SITE_STREAMS * NUMBERS_OF_SITES[site]
        if site in OF_PLACES:
            assert place is not None
            return tile_random_bits(self.seed, stream, *place).view(x.shape)
        stream += self.calls[site]
        self.calls[site] += 1
        return random_bits(self.seed, stream, x.shape)


@dataclass(frozen=True)
class Problem:
    """What both directions share: operands in float32 [B, H, T, D], the sites, and the shape of the mask.

    Heads that share keys have each a copy here.
    """

    sites: Sites
    q: Tensor
    k: Tensor
    v: Tensor
    v_of_dp: Tensor
    """V in dO V^T."""
    scale: float
    causal: bool
    softcap: float
    group: int
    """Heads of queries that share one head of keys."""
    numbers: Tensor
    """Of the heads, counted over the batch: b H + h, [B, H] int64."""
    ranges: KeyRanges | None
    """What is hidden, where that is more than ``causal`` says."""
    sinks: Tensor | None = None
    """One more logit of each row, the same for all rows of a head, whose value is 0; [H, 1, 1] float32."""

    def of_heads(self, heads: slice) -> "Problem":
        sinks = None if self.sinks is None else self.sinks[heads]
        qkv = {name: getattr(self, name)[:, heads] for name in ("q", "k", "v", "v_of_dp", "numbers")}
        return replace(self, **qkv, sinks=sinks)

    def place(self, rows: slice, columns: slice) -> Place:
        """Of a tile, for ``Sites``."""
        return self.numbers.flatten(), rows, columns

    def dp(self, do: Tensor, rows: slice, columns: slice, s: Tensor) -> Tensor:
        """dP of one tile [B, H, R, C], rounded, from the dO of its rows and its masked S."""
        dp = do @ self.v_of_dp[:, :, columns].transpose(-1, -2)
        if self.sites.numerics.probability_gradients in LOW_FORMATS:
            dp = dp.masked_fill(s == -torch.inf, 0.0)  # what is hidden has no part in a scale
        return self.sites.probability_gradients(dp, self.place(rows, columns))

    def row_tiles(self) -> Iterator[slice]:
        yield from _slices(self.q.shape[2], self.sites.numerics.tile_q)

    def column_tiles(self, rows: slice, *, hidden: bool = False) -> Iterator[slice]:
        """Tiles of keys that some of these rows may see, or all."""
        for columns in _slices(self.k.shape[2], self.sites.numerics.tile_k):
            if hidden or self.ranges is not None or not self.causal or columns.start < rows.stop:
                yield columns

    def scores(self, rows: slice, columns: slice) -> Tensor:
        """S of one tile [B, H, R, C], rounded; masked entries -inf."""
        s = self.scale * (self.q[:, :, rows] @ self.k[:, :, columns].transpose(-1, -2))
        if self.softcap:
            s = self.softcap * torch.tanh(s / self.softcap)
        return self._masked(self.sites.scores(s), rows, columns)

    def products(self, rows: slice, columns: slice) -> Tensor:
        """S' = Q K^T of one tile [B, H, R, C], without scale; masked entries -inf."""
        return self._masked(self.q[:, :, rows] @ self.k[:, :, columns].transpose(-1, -2), rows, columns)

    def _masked(self, s: Tensor, rows: slice, columns: slice) -> Tensor:
        if self.ranges is not None:
            first, last = (x[:, rows, None] for x in self.ranges.keys_of_queries.unbind(1))
            column = torch.arange(columns.start, columns.stop, device=s.device)
            visible = (column >= first) & (column < last)
            if self.ranges.padding is not None:
                visible = visible & self.ranges.padding[:, None, columns]
            return s.masked_fill(~visible[:, None], -torch.inf)
        if self.causal and columns.stop > rows.start + 1:
            row = torch.arange(rows.start, rows.stop, device=s.device)[:, None]
            column = torch.arange(columns.start, columns.stop, device=s.device)
            s = s.masked_fill(column > row, -torch.inf)
        return s

    def filled(self, m: Tensor, value: float) -> Tensor:
        """m [B, H, R, 1] with ``value`` in rows that have seen no key."""
        return m if self.ranges is None else m.masked_fill(m == -torch.inf, value)

    def visible_rows(self, x: Tensor) -> Tensor:
        """x [B, H, T, D] with 0 in rows that see no key."""
        return x if self.ranges is None else x.masked_fill(self.ranges.empty()[:, None, :, None], 0.0)

    def mean_key(self) -> Tensor:
        """The mean of the keys that some query sees, [B, H, 1, D]."""
        if self.ranges is None:
            return self.k.mean(dim=2, keepdim=True)
        count = (~self.ranges.hidden_keys()).sum(dim=1).clamp(min=1)
        return self.k.sum(dim=2, keepdim=True) / count[:, None, None, None]

    def weights(self, p_bar_BHRC: Tensor, rows: slice, columns: slice, seed: Tensor) -> Tensor:
        """P_bar of one tile as P_bar V reads it: rounded, as ``probabilities_rounding`` says."""
        n = self.sites.numerics
        if n.probabilities_rounding == "nearest":
            return self.sites.probabilities(p_bar_BHRC, self.place(rows, columns))
        bits = tile_random_bits(seed, PROBABILITIES_STREAM, *self.place(rows, columns)).view(p_bar_BHRC.shape)
        return round_to(p_bar_BHRC, n.probabilities, n.probabilities_rounding, bits)

    def through_softcap(self, ds: Tensor, s: Tensor) -> Tensor:
        """Gradient of the scores before the soft-cap: d/dx c tanh(x / c) = 1 - tanh(x / c)^2. Masked entries stay 0."""
        if not self.softcap:
            return ds
        return ds * (1 - (s / self.softcap).square()).masked_fill(s == -torch.inf, 0.0)

    def gradients(self, dq: Tensor, dk: Tensor, dv: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """dQ, dK, dV [B, H, T, D] as autograd wants them: [B, T, H, D] in the dtype of q."""
        return tuple(x.transpose(1, 2).to(dtype).contiguous() for x in (dq, dk, dv))  # type: ignore[return-value]


def _slices(length: int, tile: int) -> Iterator[slice]:
    step = tile or length
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def make_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key: str,
    scale: float,
    causal: bool,
    softcap: float,
    sinks: Tensor | None = None,
    mask: Mask = NO_MASK,
    *,
    seed: Tensor | None = None,
) -> Problem:
    """``seed`` is for stochastic casts of formats below BF16; both passes draw alike for Q, K and V."""
    sites = Sites(numerics_from_key(key), q.dtype, seed)
    q_BHTD, k_BHTD, v_BHTD = (x.transpose(1, 2).float() for x in (q, k, v))
    ranges = mask.key_ranges(q.shape[0], q.shape[1], k.shape[1], causal, q.device)
    if ranges is not None:
        # What nobody sees may be anything: 0 times NaN is NaN.
        hidden = ranges.hidden_keys()[:, None, :, None]
        k_BHTD, v_BHTD = (x.masked_fill(hidden, 0.0) for x in (k_BHTD, v_BHTD))
        q_BHTD = q_BHTD.masked_fill(ranges.empty()[:, None, :, None], 0.0)
    q_BHTD, k_BHTD, v_BHTD = (sites.inputs(x) for x in (q_BHTD, k_BHTD, v_BHTD))
    if sites.numerics.key_mean == "subtracted":
        k_BHTD = k_BHTD - k_BHTD.mean(dim=2, keepdim=True)
    v_of_dp = None if sites.numerics.values_in_dp == "values" else sites.values_in_dp(v_BHTD)
    q_BHTD, k_BHTD, v_BHTD = sites.queries_and_keys(q_BHTD), sites.queries_and_keys(k_BHTD), sites.values(v_BHTD)
    v_of_dp = v_BHTD if v_of_dp is None else v_of_dp
    group = q_BHTD.shape[1] // k_BHTD.shape[1]
    if group > 1:
        k_BHTD, v_BHTD, v_of_dp = (x.repeat_interleave(group, dim=1) for x in (k_BHTD, v_BHTD, v_of_dp))
    of_heads = None if sinks is None else sinks.float()[:, None, None]
    numbers = torch.arange(q.shape[0] * q.shape[2], device=q.device).view(q.shape[0], q.shape[2])
    return Problem(sites, q_BHTD, k_BHTD, v_BHTD, v_of_dp, scale, causal, softcap, group, numbers, ranges, of_heads)


def keeps_own_output(n: Numerics) -> bool:
    """Whether delta has an O of its own, kept beside O."""
    return n.delta == "rowsum_do_o" and n.delta_output != "output"


def saved_shape(q_BTHD: Tensor, n: Numerics) -> tuple[int, ...]:
    """Shape of what is kept of the rows: L [B, H, T], or m and log l or 1 / d [B, H, 2, T] (site ``saved_statistics``)."""
    B, T, H, _ = q_BTHD.shape
    return (B, H, 2, T) if n.saved_statistics == "max_and_sum" else (B, H, T)


def empty_outputs(q: Tensor, v: Tensor, n: Numerics) -> tuple[Tensor, Tensor, Tensor]:
    """O and the O for delta [B, T, H, DV] (the latter empty where it is O itself), and what is kept of the rows (``saved_shape``),
    float32, all unwritten; ``n`` is concrete."""
    shape = (*q.shape[:3], v.shape[3])
    o = torch.empty(shape, device=q.device, dtype=storage_dtype(n.output, q.dtype))
    keep = keeps_own_output(n)
    delta_dtype = storage_dtype(n.delta_output, q.dtype) if keep else q.dtype
    delta_o = torch.empty(shape if keep else 0, device=q.device, dtype=delta_dtype)
    return o, delta_o, torch.empty(saved_shape(q, n), device=q.device, dtype=torch.float32)


def outputs_like(
    q: Tensor, k: Tensor, v: Tensor, seed: Tensor, numerics: str, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """``empty_outputs`` by the arguments of a forward operator."""
    return empty_outputs(q, v, numerics_from_key(numerics).concrete(FORMAT_OF[q.dtype]))


def delta_operands(o: Tensor, delta_output: Tensor) -> tuple[Tensor, Tensor]:
    """What the backward pass needs of O [B, T, H, D]: the O for delta, and its low bits, empty where there are none."""
    if not delta_output.numel():
        return o, delta_output
    if delta_output.is_floating_point():
        return delta_output, delta_output.new_empty(0)
    return o, delta_output


def o_for_delta(o: Tensor, low_bits: Tensor, n: Numerics) -> Tensor:
    """The O inside delta, float32, from ``delta_operands``; ``n`` is concrete."""
    return with_low_bits(o.float(), low_bits, n.output) if low_bits.numel() else o.float()


def delta_of_output(do: Tensor, o: Tensor, n: Numerics) -> Tensor:
    """delta = rowsum(dO * O), rounded, [...] from dO and O [..., D], float32 and rounded as the backward pass reads them; ``n`` is
    concrete."""
    return round_to((do * o).sum(dim=-1), n.delta_sum)


def round_output(o_BTHD: Tensor, fmt: str, rounding: str, seed: Tensor, stream: int, dtype: torch.dtype) -> Tensor:
    bits = random_bits(seed, stream, o_BTHD.shape) if rounding == "stochastic" and fmt != "fp32" else None
    return round_to(o_BTHD, fmt, rounding, bits).to(storage_dtype(fmt, dtype))
