"""Every rounding of attention has a name: ``Numerics``, one field per site, and the bases experiments start from.

A site is declared once, by ``site``: its values, where it acts, which backends have it, what it contradicts, one line about it.
Validation, refusals, the constants of the kernels and the list in README.md follow from the declaration.

Plain Python, no torch: a config can be read, checked and printed where torch is not installed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .user_error import invalid

DTYPE_FORMATS = ("fp32", "bf16", "fp16")
MANTISSA_FORMATS = tuple(f"m{bits}" for bits in range(1, 23))
FORMATS = ("input", *DTYPE_FORMATS, *MANTISSA_FORMATS)
LOW_FORMATS = tuple(
    fmt + scale + rounding
    for fmt in ("e4m3", "e5m2", "e2m1", "int8")
    for scale in ("", "_tensor", "_head", "_tile", "_row", "_mx", "_nv")
    for rounding in ("", "_stochastic")
    if scale != "_nv" or fmt == "e2m1"  # a / c of another format is too small for E4M3
)
"""Formats below BF16: ``low_formats.py``."""
KERNEL_SCALES = ("", "row", "mx", "nv")
OF_TILES = ("probabilities", "probabilities_in_dv", "probability_gradients", "score_gradients")
"""Operands that kernels have tile by tile: in ``LOW_FORMATS`` with ``KERNEL_SCALES`` alone, to nearest. Others they take rounded.
They refuse an ``mx`` of P whose largest value may be just above or below 1: 2^floor(log2 a) jumps there."""
OPERAND_FORMATS = (*FORMATS, *LOW_FORMATS)
FORMATS_LISTED = (
    "m1 to m22, e4m3 or e5m2 (FP8), e2m1 (FP4), int8, these four also with _tensor, _head, _tile, _row or _mx (e2m1 with _nv), "
    "and _stochastic behind that"
)
ROUNDINGS = ("nearest", "toward_zero", "stochastic")
LARGEST_SCALE = 2.0**100
"""Largest factor by which ``scaled`` scales ``row_sum_floor``: beyond it O is nearly 0, and l has to stay finite."""

FEATURES = {
    "softcap": "soft-cap",
    "grouped": "head of keys that several of queries share",
    "keys": "mask of keys",
    "ranges": "range of keys for each query",
    "value_dim": "head dim of V other than that of K",
    "sinks": "attention sink",
}
"""What a call may ask for besides causal or full attention, in words. A backend lacks it (``backends.Backend``), or a site excludes it
(``Site.without``), where its declaration says so."""

FORWARD, DELTA, BACKWARD = "forward", "delta", "backward"
EVERYWHERE = (FORWARD, DELTA, BACKWARD)
"""Where a site may act: making O (and what is kept for the backward pass); making delta; making dQ, dK and dV."""
FLASH = ("flash", "flash_reference")
REFERENCE = ("flash_reference",)


@dataclass(frozen=True, kw_only=True)
class Site:
    """What is declared of a rounding site, beside its name and default."""

    doc: str
    """One line for the list of sites."""
    choices: tuple[str, ...] = ()
    """Its values; or, for a number, ``within``: the range in words, and whether a number is in it."""
    within: tuple[str, Callable[[float], bool]] | None = None
    acts_in: tuple[str, ...]
    """Of FORWARD, DELTA, BACKWARD; the kernels of other passes do not get it."""
    backends: tuple[str, ...] = (*FLASH, "standard")
    """Which have it. The others refuse all values but ``elsewhere``, which is what they do."""
    elsewhere: Any
    conflict: tuple[str, Callable[[Numerics], bool]] | None = None
    """What is expected where other sites exclude the value, and whether those of a ``Numerics`` do."""
    unread_with: tuple[str, tuple[str, ...]] | None = None
    """Another site, and its values with which nothing reads this one."""
    without: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What excludes all values but the default, of ``FEATURES``, and why."""
    per_tile: bool = False
    """With all values but ``elsewhere`` the forward pass gives other values where tiles end elsewhere."""

    @property
    def is_format(self) -> bool:
        return set(FORMATS) <= set(self.choices)

    @property
    def listed(self) -> str:
        """Its choices in words, if it has all formats: over a hundred."""
        few = [one for one in self.choices if one not in (*MANTISSA_FORMATS, *LOW_FORMATS)]
        return "one of " + ", ".join((*few, FORMATS_LISTED)) if set(LOW_FORMATS) <= set(self.choices) else ""

    def expected(self, value: Any) -> str | tuple[str, ...] | None:
        """What a value should have been, in words or as the choices; None where it is right."""
        if self.choices:
            return None if value in self.choices else self.choices
        assert self.within is not None
        words, right = self.within
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return None if number and right(value) else words


def site(default: Any, doc: str, **declared: Any) -> Any:
    """A field of ``Numerics``; ``declared`` as ``Site`` has it, ``elsewhere`` being the default unless given."""
    return dataclasses.field(default=default, metadata={"site": Site(doc=doc, **{"elsewhere": default} | declared)})


def _choice(doc: str, choices: tuple[str, ...], acts_in: tuple[str, ...], **declared: Any) -> Any:
    """One of ``choices``, of which the first is the default; in flash attention alone unless ``backends`` says otherwise."""
    return site(choices[0], doc, choices=choices, acts_in=acts_in, **{"backends": FLASH} | declared)


def _number(default: float, doc: str, within: tuple[str, Callable[[float], bool]], **declared: Any) -> Any:
    return site(default, doc, within=within, **{"acts_in": (FORWARD,)} | declared)


def _format(default: str, doc: str, **declared: Any) -> Any:
    return site(default, doc, **{"choices": FORMATS, "elsewhere": "fp32"} | declared)


def _operand(default: str, doc: str, same_as: str = "", **declared: Any) -> Any:
    """A format of an operand, those below BF16 among them; or ``same_as``, the name of the site that rounds it elsewhere."""
    alone = {"choices": (same_as, *OPERAND_FORMATS), "elsewhere": same_as, "backends": FLASH} if same_as else {}
    return _format(default, doc, **{"choices": OPERAND_FORMATS} | alone | declared)


def _size(doc: str, **declared: Any) -> Any:
    sizes = ("a size, or 0 for the whole sequence", lambda size: type(size) is int and size >= 0)
    return site(512, doc, within=sizes, acts_in=EVERYWHERE, backends=FLASH, elsewhere=0)


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """How one attention call rounds, site by site.

    A format is ``input`` (the dtype of q), ``fp32``, ``bf16``, ``fp16``, or ``m1`` ... ``m22``: that many explicit mantissa
    bits with FP32's exponent range, so that ``m7`` is BF16 and ``m10`` is TF32. An operand of a product may be in one of
    ``LOW_FORMATS``, too: of P, dP, dS, and dO in P^T dO a ``tensor`` or ``head`` is one tile. All arithmetic between sites is FP32. The
    final dq, dk and dv are stored in the dtype of q, nearest-even: autograd asks for it, so it is no site.

    Raises ``UserError`` for an unknown format, rounding, delta or row maximum, for numbers out of range, and for sites that exclude
    each other.
    """

    inputs: str = _format("input", "Q, K, V as the products read them", acts_in=EVERYWHERE)
    key_mean: str = _choice(
        "the mean of K over the sequence, which moves no P: kept, subtracted (before queries_and_keys)",
        ("kept", "subtracted"),
        EVERYWHERE,
        backends=REFERENCE,
        without=dict.fromkeys(("softcap", "sinks"), "there the mean of K moves P")
        | dict.fromkeys(("keys", "ranges"), "the mean is that of all keys"),
    )
    queries_and_keys: str = _operand(
        "fp32", "Q and K in all their products, after inputs", acts_in=EVERYWHERE, backends=FLASH
    )
    values: str = _operand("fp32", "V, after inputs", acts_in=EVERYWHERE, backends=FLASH)
    values_in_dp: str = _operand(
        "values",
        "V, after inputs, in dO V^T: values (the same), or a format",
        same_as="values",
        acts_in=(DELTA, BACKWARD),
    )
    scores: str = _format("fp32", "S, after scale and soft-cap", acts_in=EVERYWHERE)
    statistics: str = _format("fp32", "running m and l", acts_in=(FORWARD,), backends=FLASH, per_tile=True)
    logsumexp: str = _format("fp32", "L", acts_in=(FORWARD,), backends=FLASH)
    saved_statistics: str = _choice(
        "what the backward pass forms P from: logsumexp (L), max_and_sum (m and log l, or 1 / d)",
        ("logsumexp", "max_and_sum"),
        EVERYWHERE,
        conflict=(
            "logsumexp where the site logsumexp is not fp32 (nor input, with q in float32): there is no L to round",
            lambda n: n.saved_statistics != "logsumexp" and n.logsumexp not in ("fp32", "input"),
        ),
    )
    """``logsumexp``, as FlashAttention-2: L, one number, whose rounding to FP32 is a factor of P common to the row. ``max_and_sum``, as
    the first FlashAttention: m and log l, two numbers, and P = exp(S - m) / l with the forward pass's exp(S - m) (site ``exponent``),
    whose rows sum to 1 at any size of the logits; L is not formed."""
    exponent: str = _choice(
        "exp of a difference: fma, separate_multiply, subtract_first",
        ("fma", "subtract_first", "separate_multiply"),
        EVERYWHERE,
        elsewhere="subtract_first",
    )
    """How exp(S - m) is formed. ``subtract_first``: the difference first, exact near the maximum, so that P_bar of a row's own maximum
    is 1. ``fma``, as FlashAttention-2's source lets its compiler do: exp2(fma(S', c, -m)), one rounding at its end, with S' = Q K^T and
    m = max(S') c rounded to FP32, c = scale * log2(e): the exponent at the maximum is off by up to half a unit of m. ``separate_multiply``,
    as PyTorch's copy of FlashAttention-2: exp2(fp32(S' c) - m), exact at the maximum, where both were rounded alike,
    and elsewhere off by up to a unit of m.
    Both act where S, m, l and L are FP32, there is no soft-cap and scale > 0 (``folds``); elsewhere something reads S, and it is
    subtracted first. With ``subtract_first`` and ``saved_statistics`` L, kernels form exp(S - L) by an FMA."""
    probabilities: str = _operand("input", "P_bar in P_bar V; P in P^T dO", acts_in=(FORWARD, BACKWARD))
    probabilities_rounding: str = _choice(
        "of P_bar in P_bar V: nearest, stochastic",
        ("nearest", "stochastic"),
        (FORWARD,),
        conflict=(
            "nearest where probabilities is fp32 (or input, with q in float32): P_bar is not rounded there; or a format below BF16, "
            "whose name says it",
            lambda n: n.probabilities_rounding != "nearest" and n.probabilities in ("fp32", *LOW_FORMATS),
        ),
    )
    """P for P^T dO is rounded to nearest in either case."""
    probabilities_in_dv: str = _operand(
        "probabilities",
        "P in P^T dO: probabilities (in the same format), or a format",
        same_as="probabilities",
        acts_in=(BACKWARD,),
    )
    backward_probabilities: str = _choice(
        "P in the backward pass: unrounded, forward (P_bar as P_bar V reads it, over its sum)",
        ("unrounded", "forward"),
        EVERYWHERE,
        conflict=(
            "unrounded where divisor is not rounded, saved_statistics not max_and_sum, or P_bar not rounded to nearest",
            lambda n: (
                n.backward_probabilities == "forward"
                and (
                    (n.divisor, n.saved_statistics, n.probabilities_rounding) != ("rounded", "max_and_sum", "nearest")
                    or n.probabilities.endswith("_stochastic")
                )
            ),
        ),
    )
    """``forward``: probabilities(exp(S - m)) / d with the last m, so that P of the backward pass is what O was averaged with, and rows of
    dS sum to 0 if delta reads an unrounded O. Earlier tiles rounded P_bar with an earlier m: it came out alike if ``row_max_rounding``
    is ``up``, and the format has no largest or least number in reach, as those of ``LOW_FORMATS`` have."""
    divisor: str = _choice(
        "of O_bar: unrounded (l), rounded (sum of the rounded P_bar)", ("unrounded", "rounded"), (FORWARD,)
    )
    """``rounded``: the sum of P_bar as P_bar V reads it (``probabilities``), rounded by ``statistics`` as l is. Then O is an average of V
    with weights that sum to 1, however P_bar is rounded, where ``statistics``, ``tile_product`` and ``accumulator`` are FP32. The
    backward pass has l, as proposed for FlashAttention (Dao-AILab/flash-attention, pull request 2721), but for
    ``backward_probabilities``."""
    probabilities_in_sum: str = _format("fp32", "P_bar in l", acts_in=(FORWARD,), backends=REFERENCE)
    tile_sum: str = _format(
        "fp32", "sum of P_bar over one tile of a row", acts_in=(FORWARD,), backends=REFERENCE, per_tile=True
    )
    tile_product: str = _format("fp32", "P_bar V of one tile", acts_in=(FORWARD,), backends=FLASH, per_tile=True)
    accumulator: str = _format(
        "fp32", "O_bar, after the rescaling and after the addition", acts_in=(FORWARD,), backends=FLASH, per_tile=True
    )
    output: str = _format("input", "the O passed to the next layer", acts_in=(FORWARD, DELTA))
    output_rounding: str = _choice(
        "nearest, toward_zero, stochastic",
        ROUNDINGS,
        (FORWARD,),
        backends=(*FLASH, "standard"),
        conflict=(
            "nearest where output is fp32 (or input, with q in float32): O is not rounded there",
            lambda n: n.output_rounding != "nearest" and n.output == "fp32",
        ),
    )
    """In FP16 whatever is below 2^-14 is rounded to nearest, as by every rounding of its kind: see ``rounding.round_to``."""
    output_gradient: str = _operand("input", "dO as the backward pass reads it", acts_in=(DELTA, BACKWARD))
    output_gradient_in_dv: str = _operand(
        "fp32", "dO in P^T dO, after output_gradient", acts_in=(BACKWARD,), backends=REFERENCE
    )
    delta: str = _choice(
        "formula (a) to (c) of the equations",
        ("rowsum_do_o", "rowsum_p_dp", "rowsum_p_dp_normalized"),
        (FORWARD, DELTA),
        elsewhere="rowsum_p_dp",
    )
    """delta = rowsum(dO * O); or rowsum(P * dP); or rowsum(P * dP) / rowsum(P), with which the rows of dS sum to 0 even where those of
    P do not sum to 1."""
    delta_output: str = _choice(
        "the O in delta: output (the same values), or a format or low16 of an O that accumulator has not rounded",
        ("output", *OPERAND_FORMATS, "low16"),
        (FORWARD, DELTA),
        unread_with=("delta", ("rowsum_p_dp", "rowsum_p_dp_normalized")),
        conflict=(
            "output or a format where tile_product or accumulator is not fp32, or output_rounding not nearest: O then "
            "lacks more than low16 holds",
            lambda n: (
                n.delta_output == "low16"
                and (n.tile_product, n.accumulator, n.output_rounding) != ("fp32", "fp32", "nearest")
            ),
        ),
    )
    """The O inside rowsum(dO * O): the values of ``output``; or the FP32 accumulation of P_bar V / l in a format of its own; or, by
    ``low16``, ``output`` plus what it lacks of that accumulation, kept as a difference of bit patterns (``rounding.low_bits``): BF16 and
    16 bits are FP32 itself."""
    delta_rounding: str = _choice(
        "of delta_output, if it has a format of its own",
        ROUNDINGS,
        (FORWARD,),
        unread_with=("delta", ("rowsum_p_dp", "rowsum_p_dp_normalized")),
        conflict=(
            "nearest where delta_output is output, low16 or fp32 (or input, with q in float32): delta's O is not rounded there; or a "
            "format below BF16, whose name says it",
            lambda n: n.delta_rounding != "nearest" and n.delta_output in ("output", "low16", "fp32", *LOW_FORMATS),
        ),
    )
    """A stochastic one draws independently of ``output_rounding``."""
    probabilities_in_delta: str = _choice(
        "P_bar in the O in delta: probabilities (that of O); or fp32, bf16, fp16 (over l)",
        ("probabilities", *DTYPE_FORMATS),
        (FORWARD,),
        backends=REFERENCE,
        unread_with=("delta", ("rowsum_p_dp", "rowsum_p_dp_normalized")),
        conflict=(
            "probabilities where delta_output is output or low16: delta then reads O",
            lambda n: n.probabilities_in_delta != "probabilities" and n.delta_output in ("output", "low16"),
        ),
    )
    delta_sum: str = _format("fp32", "delta", acts_in=(DELTA,))
    delta_error: str = _choice(
        "a chosen error of delta: none, random, constant, scale, rounding, zero_sum",
        ("none", "random", "constant", "scale", "rounding", "zero_sum"),
        (DELTA,),
        conflict=(
            "none where delta is rowsum_do_o: the error is added to a delta from P",
            lambda n: n.delta_error != "none" and n.delta == "rowsum_do_o",
        ),
    )
    """delta + e, to ask which errors do harm. With a the ``delta_error_size`` and rms(delta) the root mean square over the rows of a
    batch element and head: ``random``: +-a rms(delta), a sign each row; ``constant``: a rms(delta); ``scale``: a delta; ``rounding``:
    a (rowsum(dO * O) - delta), O being the ``output`` whatever ``delta_output`` is, so that a = 1 is ``rowsum_do_o`` with ``delta_output``
    ``output``. ``zero_sum``: delta stays exact and dP is off by the e of ``random`` times a sign each key, so that rows of dS still sum
    to 0."""
    delta_error_size: float = _number(
        0.01,
        "a of delta_error",
        ("a finite number other than 0", lambda size: math.isfinite(size) and size != 0),
        acts_in=(DELTA,),
        backends=FLASH,
        unread_with=("delta_error", ("none",)),
    )
    delta_error_rows: str = _choice(
        "rows with delta_error: all, tied, untied, one_hot, as_many_as_tied, as_many_as_untied",
        ("all", "tied", "untied", "one_hot", "as_many_as_tied", "as_many_as_untied"),
        (DELTA,),
        conflict=(
            "all where delta_error is none",
            lambda n: n.delta_error_rows != "all" and n.delta_error == "none",
        ),
    )
    """``tied``: two P are within a factor of 1 - 2^-9, so that if one P_bar rounds to 1 in BF16, both do. ``one_hot``: a P is at least
    1 - 2^-9. ``as_many_as_``: so many rows of each batch element and head, drawn at random."""
    probability_gradients: str = _operand("fp32", "dP", acts_in=(DELTA, BACKWARD))
    score_gradients: str = _operand("input", "dS in dS K and dS^T Q", acts_in=(BACKWARD,))
    row_residual: str = _choice(
        "what becomes of rowsum(dS): kept, centered_keys, corrected_rows",
        ("kept", "centered_keys", "corrected_rows"),
        (DELTA,),
        without={"softcap": "behind it dS does not sum to 0", "sinks": "beside it dS of the keys does not sum to 0"},
    )
    """What becomes of r = rowsum(dS), which is 0 in exact arithmetic; without a soft-cap. An error e of delta leaves r = -e rowsum(P),
    and r (P K) / rowsum(P) in dQ. ``kept``: nothing. The others sum dS as rounded by ``score_gradients``. ``centered_keys``:
    dQ = scale (dS K - r c), c the mean over the sequence of K, one FP32 vector for each batch element and head; dK and dV are as they
    are. ``corrected_rows``: dQ = scale (dS K - r (P K) / rowsum(P)), P rounded by ``probabilities`` for that product, and the delta in dK
    is delta + r' / rowsum(P), r' the sum of dS before rounding, rounded by ``delta_sum``. What is taken out is taken from the finished dQ,
    which ``gradient_accumulator`` then rounds once more."""
    gradient_accumulator: str = _format("fp32", "dQ, dK, dV between tiles", acts_in=(BACKWARD,), backends=REFERENCE)
    row_max: str = _choice(
        "plain, stabilized (Algorithm 3), stabilized_safe, scaled",
        ("plain", "stabilized", "stabilized_safe", "scaled"),
        (FORWARD,),
        conflict=(
            "a row_sum_floor above 0, which scales the rows, and statistics other than fp16 (or input, with q in float16), whose range "
            "they leave; or another row_max",
            lambda n: n.row_max == "scaled" and (not n.row_sum_floor or n.statistics == "fp16"),
        ),
        per_tile=True,
    )
    """Row normalizer: plain; stabilized (Algorithm 3 of arXiv 2510.04212); stabilized_safe (the same, shifted by at most
    ``row_max_cap``); scaled: plain, but ``row_sum_floor`` is times exp(m* - m), at most ``LARGEST_SCALE``, with m* the running m that
    ``stabilized`` would have, so that rows come out scaled down as the floor scales them there, while P_bar is not shifted."""
    row_max_rounding: str = _choice(
        "of m: unrounded, up (exp(m) to a power of 2)",
        ("unrounded", "up"),
        (FORWARD,),
        conflict=(
            "unrounded where S, m, l or L is rounded, exponent is subtract_first, or row_max is not plain",
            lambda n: (
                n.row_max_rounding == "up"
                and (n.row_max != "plain" or n.exponent == "subtract_first" or not unrounded(n, also="input"))
            ),
        ),
    )
    """``up``: m to the next whole multiple of ln 2. Then exp(m - m') is a power of 2, and P_bar is rounded alike whichever m it was formed
    with. It is in (1/2, 1] at the row's maximum, but for the FMA's half unit of m."""
    row_max_beta: float = _number(
        2.0,
        "beta of the stabilized forms",
        ("a number above 1", lambda beta: 1 < beta < math.inf),
        backends=FLASH,
        unread_with=("row_max", ("plain",)),
    )
    """Tied positive maxima are shifted to beta * r_m."""
    row_max_gamma: float = _number(
        0.0,
        "gamma of the stabilized forms",
        ("a finite number, 0 or above", lambda gamma: 0 <= gamma < math.inf),
        backends=REFERENCE,
        unread_with=("row_max", ("plain",)),
        conflict=(
            "0 where hidden_tiles is visited: a masked row of a tile would be shifted to gamma times the lowest number",
            lambda n: n.row_max_gamma != 0 and n.hidden_tiles == "visited",
        ),
    )
    """Tied negative maxima are shifted to gamma * r_m: 0 in Algorithm 3, 1 leaves them as they are."""
    row_max_tolerance: float = _number(
        1e-3,
        "scores this close to the maximum are ties",
        ("0 <= tolerance < 1", lambda tolerance: 0 <= tolerance < 1),
        backends=FLASH,
        unread_with=("row_max", ("plain",)),
    )
    """0 is the exact comparison of the paper's first version."""
    row_max_cap: float = _number(
        math.log(2**18 / 239),
        "largest shift of stabilized_safe, ln(2^18 / 239)",
        ("0 < cap <= 80 (exp(-cap) must be normal)", lambda cap: 0 < cap <= 80),
        backends=FLASH,
        unread_with=("row_max", ("plain", "stabilized", "scaled")),
    )
    """Above the row maximum: l >= exp(-cap). At 7.0002, exp(-cap) = 239 * 2^-18 is a BF16 and FP16 number, so that rows at the cap lose
    nothing to the rounding of P_bar (where m + cap is exact), and one with an odd 8-bit significand, unlike 1."""
    row_sum_floor: float = _number(
        0.0,
        "least sum of P_bar over one tile of a row",
        ("0 <= floor < 1", lambda floor: 0 <= floor < 1),
        backends=FLASH,
        per_tile=True,
    )
    """Before it is added to l: ``EPSILON`` = 1e-10 in the published code. It acts where every score of a tile is far below m: where
    ``stabilized`` shifts m by more than 23, l is the floor, and O comes out scaled down."""
    hidden_tiles: str = _choice(
        "fully masked tiles: skipped, visited",
        ("skipped", "visited"),
        (FORWARD,),
        without=dict.fromkeys(("keys", "ranges", "sinks"), "the published code is causal, and no more"),
    )
    """Skipped, as kernels do; or visited, as the published code does: each adds ``row_sum_floor`` to l, and ``stabilized`` takes their
    masked scores for tied negative ones, so that m is at least 0 from there on."""
    tile_q: int = _size("rows of a tile; 0: the whole sequence")
    tile_k: int = _size("columns of a tile; 0: the whole sequence")
    """Kernels keep it where a site rounds or normalizes once a tile (``Site.per_tile``) or P_bar is in a format below BF16, and elsewhere
    have blocks of their own: m, against which P_bar is rounded, is then that of a block."""

    def __post_init__(self) -> None:
        for name, declared in SITES.items():
            expected = declared.expected(getattr(self, name))
            if expected is not None:
                raise invalid(
                    f"attention numerics {name}",
                    getattr(self, name),
                    declared.listed or expected,
                    choices=declared.choices,
                )
        for name, declared in SITES.items():
            if declared.conflict is not None and declared.conflict[1](self):
                raise invalid(f"attention numerics {name}", getattr(self, name), declared.conflict[0])

    @property
    def draws(self) -> bool:
        """Whether something is drawn at random, so that every call needs a seed of its own."""
        dose = self.delta_error in ("random", "zero_sum") or self.delta_error_rows.startswith("as_many")
        return dose or any(str(getattr(self, name)).endswith("stochastic") for name in SITES)

    def with_sites(self, sites: dict[str, Any]) -> Numerics:
        """A copy with other values at some sites. Raises ``UserError`` for a site that does not exist."""
        for name in sites:
            if name not in SITES:
                raise invalid("attention numerics site", name, SITES)
        return dataclasses.replace(self, **sites)

    def concrete(self, dtype: str) -> Numerics:
        """``input`` replaced by the format of q's dtype (``fp32``, ``bf16`` or ``fp16``), ``delta_output`` kept if ``output``.

        Raises ``UserError`` where sites contradict each other in that format.
        """
        return _concrete(self, dtype)

    def key(self) -> str:
        """Canonical text, equal for equal values: what the custom operators carry. Inverse: ``numerics_from_key``."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    def differences(self, other: Numerics) -> tuple[str, ...]:
        """Sites at which ``self`` differs from ``other``, as ``site=value``."""
        return tuple(f"{n}={getattr(self, n)}" for n in SITES if getattr(self, n) != getattr(other, n))

    def refused_by(self, backend: str, features: tuple[str, ...]) -> str | None:
        """The first site that the backend does not have, or that one of the ``FEATURES`` excludes, in words;
        None without one. ``self`` is concrete."""
        for name, declared in SITES.items():
            value = getattr(self, name)
            if backend not in declared.backends and value != declared.elsewhere:
                return f"it does not have this site: {name} = {value!r}, expected {declared.elsewhere}"
            if value in LOW_FORMATS and backend not in FLASH:
                return f"it has no formats below BF16: {name} = {value!r}, expected {', '.join(DTYPE_FORMATS)} or m1 to m22"
            low_in_kernel = value in LOW_FORMATS and backend not in REFERENCE and name in OF_TILES
            if low_in_kernel and value.partition("_")[2] not in KERNEL_SCALES:
                return f"it rounds P, dP and dS block by block: {name} = {value!r}, expected no scale, or row, mx or e2m1_nv, to nearest"
            for feature in features:
                if feature in declared.without and value != DEFAULTS[name]:
                    expected = f"{DEFAULTS[name]} with this {FEATURES[feature]}: {declared.without[feature]}"
                    return f"{name} = {value!r}, expected {expected}"
        return None


SITES: dict[str, Site] = {field.name: field.metadata["site"] for field in dataclasses.fields(Numerics)}
"""Every declaration by its name, in the order of the list."""
DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Numerics)}


@functools.lru_cache(maxsize=256)  # every launch of a kernel asks
def _concrete(n: Numerics, dtype: str) -> Numerics:
    changes: dict[str, Any] = {name: dtype for name in SITES if getattr(n, name) == "input"}
    return dataclasses.replace(n, **changes)


@functools.lru_cache(maxsize=256)
def numerics_from_key(key: str) -> Numerics:
    """The ``Numerics`` that ``Numerics.key`` wrote."""
    return Numerics(**json.loads(key))


def unrounded(n: Numerics, also: str = "fp32") -> bool:
    """Whether S, m, l and L are FP32, or all of them in the format ``also``."""
    return all(fmt in ("fp32", also) for fmt in (n.scores, n.statistics, n.logsumexp))


def lacked_by(backend: str) -> dict[str, Any]:
    """The sites that a backend does not have, and the values that it has in their place."""
    return {name: declared.elsewhere for name, declared in SITES.items() if backend not in declared.backends}


def unread(values: Mapping[str, Any]) -> dict[str, str]:
    """The sites of a ``Numerics`` that nothing reads, given its ``values`` by name, and what of them is why, as ``site=value``."""
    beside = ((name, *declared.unread_with) for name, declared in SITES.items() if declared.unread_with)
    return {name: f"{other}={values[other]}" for name, other, why in beside if values.get(other) in why}


def folds(n: Numerics, scale: float, softcap: float) -> bool:
    """Whether nothing reads S between Q K^T and the exponential, so that it may take the scale; ``n`` is concrete."""
    return unrounded(n) and not softcap and scale > 0


def parse_site(text: str) -> tuple[str, Any]:
    """``"site=value"`` as typed on a command line, the value converted to the site's type where it can be.

    Raises ``UserError`` for a missing ``=`` and an unknown site.
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise invalid("attention sites", text, "site=value, for example output=bf16")
    if name not in SITES:
        raise invalid("attention sites", name, SITES)
    if "," in value:
        raise invalid("attention sites", text, "a space between two sites, not a comma")
    try:
        return name, type(DEFAULTS[name])(value)
    except ValueError:
        return name, value  # ``Numerics`` refuses it as any other, with what was expected


HARDWARE = Numerics()
"""Flash attention as our Triton kernels do it: S, m, l and accumulators in FP32; P, O and dS rounded to the input's dtype; the
exponential by an FMA."""

ROUNDED_FORWARD = Numerics(
    scores="input", statistics="input", exponent="subtract_first", tile_product="input", accumulator="input"
)
"""Our first emulation of the published forward pass; for the published code: ``PUBLISHED``.
S, m, l, tile products and O_bar kept in the input's dtype, tiles of 512."""

PUBLISHED = Numerics(
    scores="input",
    statistics="input",
    exponent="subtract_first",
    tile_product="input",
    probability_gradients="input",
    row_sum_floor=1e-10,
    hidden_tiles="visited",
)
"""Our closest emulation of the published code of arXiv 2510.04212 as its authors ran it: compiled, forward and backward pass under CUDA's
BF16 autocast, where exp, log and sum give FP32. S, the tile products and dP are stored in BF16 between kernels; O_bar, L and delta never
are, as torch.compile fuses what makes them. l is, of some rows. experiments/published_fix holds it against that code."""

FP32 = Numerics(
    exponent="subtract_first",
    probabilities="fp32",
    output_gradient="fp32",
    delta_output="fp32",
    score_gradients="fp32",
    logsumexp="fp32",
)
"""Everything in FP32 except O as passed to the next layer, which keeps the input's dtype."""

MICROCOSM = Numerics(
    inputs="m7",
    scores="m7",
    statistics="m7",
    exponent="subtract_first",
    probabilities="m7",
    accumulator="m1",
    output="m1",
    tile_q=0,
    tile_k=0,
)
"""The CPU microcosm in FP32 tensors: Q, K, V, S, P, m, l at BF16's 7 bits, O_bar and O at a single mantissa bit."""

BASES: dict[str, Numerics] = {
    "hardware": HARDWARE,
    "rounded_forward": ROUNDED_FORWARD,
    "published": PUBLISHED,
    "fp32": FP32,
    "microcosm": MICROCOSM,
}
USES = {
    "hardware": "as our Triton kernels round by default",
    "rounded_forward": "an earlier emulation of the published forward pass",
    "published": "our closest emulation of the published code",
    "fp32": "rounds nowhere but at O, to the tensors' dtype",
    "microcosm": "for FP32 tensors on a CPU: O of one bit",
}
"""What each base is for, in the list of README.md."""
