"""Every rounding of attention has a name: ``Numerics``, one field per site, and the bases experiments start from.

Plain Python, no torch: a config can be read, checked and printed where torch is not installed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from dataclasses import dataclass
from typing import Any

from errors import invalid

DTYPE_FORMATS = ("fp32", "bf16", "fp16")
MANTISSA_FORMATS = tuple(f"m{bits}" for bits in range(1, 23))
FORMATS = ("input", *DTYPE_FORMATS, *MANTISSA_FORMATS)
ROUNDINGS = ("nearest", "toward_zero", "stochastic")
PROBABILITIES_ROUNDINGS = ("nearest", "stochastic")
RESIDUALS = {"residual8": 8, "residual16": 16}
PRODUCTS = ("exact", "tf32x3")
DELTAS = ("rowsum_do_o", "rowsum_p_dp", "rowsum_p_dp_normalised", "recomputed_o")
ROW_RESIDUALS = ("kept", "centred_keys", "corrected_rows")
ROW_MAXES = ("plain", "stabilised", "stabilised_safe", "scaled")
LARGEST_SCALE = 2.0**100
"""By which ``scaled`` scales ``row_sum_floor`` at most: beyond it O is as good as 0, and l has to stay finite."""
HIDDEN_TILES = ("skipped", "visited")
EXPONENTS = ("folded", "subtracted", "unfused")
SAVED_STATISTICS = ("logsumexp", "max_and_sum")
DIVISORS = ("unrounded", "rounded")


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """How one attention call rounds, site by site.

    A format is ``input`` (the dtype of q), ``fp32``, ``bf16``, ``fp16``, or ``m1`` ... ``m22``: that many explicit mantissa
    bits with FP32's exponent range, so that ``m7`` is BF16 and ``m10`` is TF32. All arithmetic between sites is FP32. The
    final dq, dk and dv are stored in the dtype of q, nearest-even: autograd asks for it, so it is no site.

    Raises ``UserError`` for an unknown format, rounding, delta or row maximum, and for sizes out of range.
    """

    inputs: str = "input"
    """Q, K and V as the products read them."""
    scores: str = "fp32"
    """S = scale * Q K^T, after the soft-cap if there is one."""
    statistics: str = "fp32"
    """Running row maximum m and row sum l."""
    logsumexp: str = "fp32"
    """L = m + log l, from which the backward pass recomputes P."""
    saved_statistics: str = "logsumexp"
    """What the backward pass gets of a row to recompute P. ``logsumexp``, as FlashAttention-2: L, one number, whose rounding to FP32 is
    a factor of P common to the row. ``max_and_sum``, as the first FlashAttention: m and log l, two numbers, and P = exp(S - m) / l
    with the forward pass's exp(S - m) (site ``exponent``), whose rows sum to 1 at any size of the logits; L is not formed."""
    exponent: str = "folded"
    """How exp(S - m) is formed. ``subtracted``: the difference first, exact near the maximum, so that P_bar of a row's own maximum
    is 1. ``folded``, as most flash kernels do: exp2(fma(S', c, -m)), one rounding at its end, with S' = Q K^T and m = max(S') c rounded
    to FP32, c = scale * log2(e): the exponent at the maximum is off by up to half a unit of m. ``unfused``, as PyTorch's copy of
    FlashAttention-2: exp2(fp32(S' c) - m), exact at the maximum, where both were rounded alike, and elsewhere off by up to a unit of m.
    Both act where S, m, l and L are FP32, there is no soft-cap and scale > 0 (``folds``); elsewhere something reads S, and it is
    subtracted in any case. Where ``saved_statistics`` is L the kernels that subtract fold exp(S - L)."""
    probabilities: str = "input"
    """P_bar = exp(S - m) as operand of P_bar V, and P as operand of P^T dO. l sums the unrounded values."""
    probabilities_rounding: str = "nearest"
    """How P_bar is rounded for P_bar V. P for P^T dO is rounded to nearest in either case."""
    products: str = "exact"
    """How P_bar V multiplies where P_bar is FP32: exactly, or as three products of TF32 parts, which drops the product of the low ones."""
    divisor: str = "unrounded"
    """What O_bar is divided by at the end: l, or the sum of P_bar as P_bar V reads it (``probabilities``), rounded by ``statistics`` as l
    is. Then O is an average of V with weights that sum to 1, however P_bar is rounded, where ``statistics``, ``tile_product`` and
    ``accumulator`` are FP32. The backward pass has l in either case, as proposed for FlashAttention (Dao-AILab/flash-attention, pull
    request 2721)."""
    tile_product: str = "fp32"
    """P_bar V of one tile."""
    accumulator: str = "fp32"
    """Running O_bar between tiles, rounded after the rescaling and after the addition."""
    output: str = "input"
    """O as handed to the next layer."""
    output_rounding: str = "nearest"
    """Rounding at ``output``."""
    output_gradient: str = "input"
    """dO as the backward pass reads it."""
    delta: str = "rowsum_do_o"
    """delta = rowsum(dO * O); or rowsum(P * dP); or rowsum(P * dP) / rowsum(P), with which the rows of dS sum to 0 even where those of
    P do not sum to 1; or rowsum(dO * O) with O recomputed in FP32 from P."""
    delta_output: str = "output"
    """The O inside rowsum(dO * O): the values of ``output``; or the FP32 accumulation of P_bar V / l in a format of its own; or, by
    ``residual8`` and ``residual16``, ``output`` plus what it lacks of that accumulation, kept in so many bits (``rounding.residual``)."""
    delta_rounding: str = "nearest"
    """Rounding at ``delta_output``; a stochastic one draws independently of ``output_rounding``."""
    delta_sum: str = "fp32"
    """delta itself."""
    probability_gradients: str = "fp32"
    """dP = dO V^T."""
    score_gradients: str = "input"
    """dS = P * (dP - delta) as operand of dQ = dS K and dK = dS^T Q."""
    row_residual: str = "kept"
    """What becomes of r = rowsum(dS), which is 0 in exact arithmetic; without a soft-cap. An error e of delta leaves r = -e rowsum(P),
    and r (P K) / rowsum(P) in dQ. ``kept``: nothing. The others sum dS as rounded by ``score_gradients``. ``centred_keys``:
    dQ = scale (dS K - r c), c the mean over the sequence of K, one FP32 vector for each batch element and head; dK and dV are as they
    are. ``corrected_rows``: dQ = scale (dS K - r (P K) / rowsum(P)), P rounded by ``probabilities`` for that product, and the delta in dK
    is delta + r' / rowsum(P), r' the sum of dS before rounding, rounded by ``delta_sum``."""
    gradient_accumulator: str = "fp32"
    """Running dQ, dK and dV between tiles."""
    row_max: str = "plain"
    """Row normaliser: plain; stabilised (Algorithm 3 of arXiv 2510.04212); stabilised_safe (the same with a bounded shift); scaled: plain,
    but ``row_sum_floor`` counts from the m that ``stabilised`` would have, so that rows come out scaled down as the floor scales them
    there, while P_bar is not shifted."""
    row_max_beta: float = 2.0
    """beta of the stabilised forms: tied positive maxima are shifted to beta * r_m."""
    row_max_tolerance: float = 1e-3
    """Scores this close to the row maximum count as tied; 0 is the exact comparison of the paper's first version."""
    row_max_cap: float = math.log(2**18 / 239)
    """Largest shift above the row maximum in ``stabilised_safe``: l >= exp(-cap). At 7.0002, exp(-cap) = 239 * 2^-18 is a BF16 and
    FP16 number, so that rows at the cap lose nothing to the rounding of P_bar (where m + cap is exact), and one with an odd 8-bit
    significand, unlike 1."""
    row_sum_floor: float = 0.0
    """Least sum of P_bar over one tile of a row, before it is added to l: ``EPSILON`` = 1e-10 in the published code. It acts where every
    score of a tile is far below m: where ``stabilised`` shifts m by more than 23, l is the floor, and O comes out scaled down."""
    hidden_tiles: str = "skipped"
    """Tiles of keys that the causal mask hides from a row: skipped, as kernels do; or visited, as the published code does: each adds
    ``row_sum_floor`` to l, and ``stabilised`` takes their masked scores for tied negative ones, so that m is at least 0 from there on."""
    tile_q: int = 512
    """Rows of one tile; 0 is the whole sequence."""
    tile_k: int = 512
    """Columns of one tile; 0 is the whole sequence."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in _CHOICES and value not in _CHOICES[field.name]:
                raise invalid(f"attention numerics {field.name}", value, _CHOICES[field.name])
        coarse = (self.tile_product, self.accumulator) != ("fp32", "fp32")
        if self.delta_output in RESIDUALS and coarse:
            expected = "output or a format where tile_product or accumulator is not fp32: O then lacks more than a residual holds"
            raise invalid("attention numerics delta_output", self.delta_output, expected)
        if self.probabilities_rounding != "nearest" and self.probabilities == "fp32":
            expected = "nearest where probabilities is fp32 (or input, with q in float32): P_bar is not rounded there"
            raise invalid("attention numerics probabilities_rounding", self.probabilities_rounding, expected)
        if self.saved_statistics != "logsumexp" and self.logsumexp not in ("fp32", "input"):
            expected = (
                "logsumexp where the site logsumexp is not fp32 (nor input, with q in float32): there is no L to round"
            )
            raise invalid("attention numerics saved_statistics", self.saved_statistics, expected)
        if not self.row_max_beta > 1:
            raise invalid("attention numerics row_max_beta", self.row_max_beta, "a number above 1")
        if not 0 <= self.row_max_tolerance < 1:
            raise invalid("attention numerics row_max_tolerance", self.row_max_tolerance, "0 <= tolerance < 1")
        if not 0 < self.row_max_cap <= 80:
            raise invalid(
                "attention numerics row_max_cap", self.row_max_cap, "0 < cap <= 80 (exp(-cap) must be normal)"
            )
        if not 0 <= self.row_sum_floor < 1:
            raise invalid("attention numerics row_sum_floor", self.row_sum_floor, "0 <= floor < 1")
        if self.row_max == "scaled" and not self.row_sum_floor:
            expected = "a row_sum_floor above 0, which scales the rows; or another row_max"
            raise invalid("attention numerics row_max", self.row_max, expected)
        for name in ("tile_q", "tile_k"):
            if getattr(self, name) < 0:
                raise invalid(f"attention numerics {name}", getattr(self, name), "a size, or 0 for the whole sequence")

    def with_sites(self, sites: dict[str, Any]) -> Numerics:
        """A copy with other values at some sites. Raises ``UserError`` for a site that does not exist."""
        for name in sites:
            if name not in _FIELDS:
                raise invalid("attention numerics site", name, _FIELDS)
        return dataclasses.replace(self, **sites)

    def concrete(self, dtype: str) -> Numerics:
        """``input`` replaced by the format of q's dtype (``fp32``, ``bf16`` or ``fp16``), ``delta_output`` kept if ``output``.

        Raises ``UserError`` where sites contradict each other in that format.
        """
        changes: dict[str, Any] = {name: dtype for name in _FIELDS if getattr(self, name) == "input"}
        return dataclasses.replace(self, **changes)

    def key(self) -> str:
        """Canonical text, equal for equal values: what the custom operators carry. Inverse: ``numerics_from_key``."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    def differences(self, other: Numerics) -> tuple[str, ...]:
        """Sites at which ``self`` differs from ``other``, as ``site=value``."""
        return tuple(f"{n}={getattr(self, n)}" for n in _FIELDS if getattr(self, n) != getattr(other, n))


_FIELDS: tuple[str, ...] = tuple(field.name for field in dataclasses.fields(Numerics))
_CHOICES: dict[str, tuple[str, ...]] = {
    **{
        name: FORMATS
        for name in _FIELDS
        if not name.startswith(("row_max", "row_sum_floor", "tile_q", "tile_k"))
        and name not in ("exponent", "saved_statistics", "delta", "delta_output", "products", "divisor", "row_residual")
        and name != "hidden_tiles"
    },
    "exponent": EXPONENTS,
    "saved_statistics": SAVED_STATISTICS,
    "probabilities_rounding": PROBABILITIES_ROUNDINGS,
    "output_rounding": ROUNDINGS,
    "delta_rounding": ROUNDINGS,
    "products": PRODUCTS,
    "divisor": DIVISORS,
    "delta": DELTAS,
    "row_residual": ROW_RESIDUALS,
    "delta_output": ("output", *FORMATS, *RESIDUALS),
    "row_max": ROW_MAXES,
    "hidden_tiles": HIDDEN_TILES,
}


@functools.lru_cache(maxsize=256)
def numerics_from_key(key: str) -> Numerics:
    """The ``Numerics`` that ``Numerics.key`` wrote.

    One written before ``exponent`` had a name was folded by the kernels wherever that acts; the bases that round S subtract.
    """
    sites = json.loads(key)
    return Numerics(**{"exponent": "folded" if _unrounded(Numerics(**sites)) else "subtracted", **sites})


def _unrounded(n: Numerics) -> bool:
    """Whether S, m, l and L are FP32."""
    return (n.scores, n.statistics, n.logsumexp) == ("fp32", "fp32", "fp32")


def folds(n: Numerics, scale: float, softcap: float) -> bool:
    """Whether nothing reads S between Q K^T and the exponential, so that it may take the scale; ``n`` is concrete."""
    return _unrounded(n) and not softcap and scale > 0


def parse_site(text: str) -> tuple[str, Any]:
    """``"site=value"`` as typed on a command line, the value converted to the site's type.

    Raises ``UserError`` for a missing ``=``, an unknown site, or a value of another type.
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise invalid("attention sites", text, "site=value, for example output=bf16")
    if name not in _FIELDS:
        raise invalid("attention sites", name, _FIELDS)
    kind = type(getattr(Numerics(), name))
    try:
        return name, kind(value)
    except ValueError:
        raise invalid(f"attention sites {name}", value, f"a value of type {kind.__name__}") from None


HARDWARE = Numerics()
"""Flash attention as GPU kernels do it: S, m, l and accumulators in FP32; P, O and dS rounded to the input's dtype; the scale
folded into the exponential."""

PAPER = Numerics(scores="input", statistics="input", exponent="subtracted", tile_product="input", accumulator="input")
"""What arXiv 2510.04212 says of its code: S, m, l, tile products and O_bar kept in the input's dtype, tiles of 512."""

PUBLISHED = Numerics(
    scores="input",
    statistics="input",
    exponent="subtracted",
    tile_product="input",
    probability_gradients="input",
    row_sum_floor=1e-10,
    hidden_tiles="visited",
)
"""The published code of arXiv 2510.04212 as its authors ran it: compiled, forward and backward pass under CUDA's BF16 autocast, where
exp, log and sum give FP32. S, the tile products and dP are stored in BF16 between kernels; O_bar, L and delta never are, as
torch.compile fuses what makes them. l is, of some rows. ``experiments/paper_fix/check_published.py`` holds it against that code."""

FP32 = Numerics(
    exponent="subtracted",
    probabilities="fp32",
    output_gradient="fp32",
    delta_output="fp32",
    score_gradients="fp32",
    logsumexp="fp32",
)
"""Everything in FP32 except O as handed on, which keeps the input's dtype."""

MICROCOSM = Numerics(
    inputs="m7",
    scores="m7",
    statistics="m7",
    exponent="subtracted",
    probabilities="m7",
    accumulator="m1",
    output="m1",
    tile_q=0,
    tile_k=0,
)
"""The CPU microcosm in FP32 tensors: Q, K, V, S, P, m, l at BF16's 7 bits, O_bar and O at a single mantissa bit."""

BASES: dict[str, Numerics] = {
    "hardware": HARDWARE,
    "paper": PAPER,
    "published": PUBLISHED,
    "fp32": FP32,
    "microcosm": MICROCOSM,
}
