"""Rounding sites as Triton kernels know them: numbers in place of names, and the compile-time constants of a launch.

A format is a number, because kernels cannot read text: its explicit mantissa bits, 23 for FP32 (nothing to do), and ``FP16`` for the
one format whose exponents differ too.
"""

import functools
from collections import namedtuple
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..numerics import LARGEST_SCALE, LOW_FORMATS, ROUNDINGS, SITES, Numerics, folds
from .block_sizes import boundaries_matter
from .low_blocks import low_code

FP_FUSION = True
"""``enable_fp_fusion`` of every launch: the compiler may make a * b + c one operation with one rounding. Values depend on it, and its
default on Triton's version."""
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
FP16 = tl.constexpr(0)
BF16 = tl.constexpr(7)
FP32 = tl.constexpr(23)
OUTPUT_ITSELF = tl.constexpr(-1)
"""The O in delta where it is the output."""
LOW_BITS = tl.constexpr(-32)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LARGEST = tl.constexpr(LARGEST_SCALE)


def _codes(values: Iterable[str]) -> list[tl.constexpr]:
    return [tl.constexpr(code) for code, _ in enumerate(values)]


NEAREST, TOWARD_ZERO, STOCHASTIC = _codes(ROUNDINGS)
PLAIN, STABILIZED, STABILIZED_SAFE, SCALED_ROW_MAX = _codes(SITES["row_max"].choices)
LOGSUMEXP, MAX_AND_SUM = _codes(SITES["saved_statistics"].choices)
UNROUNDED, ROUNDED = _codes(SITES["divisor"].choices)
SKIPPED, VISITED = _codes(SITES["hidden_tiles"].choices)
_, FROM_FORWARD = _codes(SITES["backward_probabilities"].choices)
_, UP = _codes(SITES["row_max_rounding"].choices)
KEPT, CENTERED_KEYS, CORRECTED_ROWS = _codes(SITES["row_residual"].choices)
ROWSUM_DO_O, ROWSUM_P_DP, ROWSUM_P_DP_NORMALIZED = _codes(SITES["delta"].choices)
NO_ERROR, *_ = _codes(SITES["delta_error"].choices)
ALL_ROWS, *_ = _codes(SITES["delta_error_rows"].choices)
LOADED = tl.constexpr(len(SITES["delta"].choices))
"""delta that an earlier launch made."""
S_IS_SCALED, FMA, SUBTRACT_FIRST, SEPARATE_MULTIPLY = _codes(("scaled", *SITES["exponent"].choices))
"""Where the scale comes in exp(S - m): see ``exponential``."""


def format_code(fmt: str) -> int:
    """The number by which kernels know a format of ``attention.numerics``."""
    named = {"fp32": FP32, "bf16": BF16, "fp16": FP16, "output": OUTPUT_ITSELF, "low16": LOW_BITS}
    if fmt in LOW_FORMATS:
        return low_code(fmt)
    return named[fmt].value if fmt in named else int(fmt[1:])


def stored_code(fmt: str, dtype: torch.dtype) -> int:
    """``format_code``, or FP32's where values of ``dtype`` lie on the format's grid already, so that a load needs no rounding."""
    code = format_code(fmt)
    exact = {torch.bfloat16: code >= BF16.value, torch.float16: code == FP16.value or code >= 10}
    return FP32.value if exact.get(dtype, False) else code


def exponent_code(n: Numerics, scale: float, softcap: float) -> int:
    """Where the scale comes in exp(S - m), for ``exponential``; L counts in log2 but where S is S_IS_SCALED. ``n`` is concrete."""
    return 1 + SITES["exponent"].choices.index(n.exponent) if folds(n, scale, softcap) else S_IS_SCALED.value


def _code(name: str, value: str) -> int:
    declared = SITES[name]
    if declared.is_format:
        return format_code(value)
    return ROUNDINGS.index(value) if value in ROUNDINGS else declared.choices.index(value)


@functools.cache
def _sites_in(passes: tuple[str, ...]) -> Any:
    of_kernels = {name: x for name, x in SITES.items() if "flash" in x.backends and x.choices}
    return namedtuple("Sites", [name for name, x in of_kernels.items() if not set(passes).isdisjoint(x.acts_in)])


@functools.lru_cache(maxsize=1024)
def kernel_sites(n: Numerics, passes: tuple[str, ...], scale: float, softcap: float, causal: bool, **known: int) -> Any:
    """The sites declared to act in these passes as a NamedTuple of numbers, one constexpr of a kernel: a kernel that reads another one does
    not compile. ``n`` is concrete; ``exponent`` is ``exponent_code``; ``known``: sites whose number the launch knows better.

    Sites that cannot act beside the others have their default, so that what differs in nothing is compiled once.
    """
    unused: dict[str, Any] = {"values_in_dp": "fp32"}  # the launch rounds V
    if n.probabilities_in_dv == "probabilities":
        unused["probabilities_in_dv"] = n.probabilities
    if n.delta != "rowsum_do_o":
        unused |= {"delta_output": "output", "delta_rounding": "nearest"}
    if not (causal and boundaries_matter(n)):
        unused["hidden_tiles"] = "skipped"
    n = replace(n, **unused)
    sites = _sites_in(passes)
    codes = {name: _code(name, getattr(n, name)) for name in sites._fields}
    return sites(**codes | {"exponent": exponent_code(n, scale, softcap)} | known)


class Shape(NamedTuple):
    """What a launch decides besides the sites: one constexpr of a kernel."""

    BT: int
    """Rows (queries) of a block."""
    BS: int
    """Columns (keys) of a block."""
    D: int
    """Head dim of Q and K."""
    WIDTH: int
    """Columns that a block of rows has on chip: D, or the power of 2 above it."""
    DV: int
    """Head dim of V and O."""
    WIDTH_V: int
    GROUP: int
    """Heads of queries that share one head of keys."""
    HEADS: int
    """Heads that programs walk side by side."""
    TMA: bool
    """Blocks that the loop walks are loaded through descriptors."""
    CAUSAL: bool
    SOFTCAP: bool
    EVEN: bool = False
    """There are no columns (dK/dV kernel: rows) past the end of the last block."""
    ONE_LOOP: bool = False
    """One loop walks blocks on the diagonal and the others."""
    TILED: bool = False
    """A tile of ``Numerics`` is many blocks."""
    FLOOR: bool = False
    """``row_sum_floor`` is above 0."""
    MMA_SUMS: bool = False
    """``rounded_and_summed`` may be used: blocks of S are as warpgroups' products leave them, 32 elements a thread."""
    RANGES: bool = False
    """The range of keys that a query sees is read (``mask.KeyRanges``), in place of CAUSAL."""
    PADDED: bool = False
    """Keys inside of a range may be hidden."""


class Strides(NamedTuple):
    """Strides of a tensor [B, T, H, D], in elements."""

    b: int
    t: int
    h: int
    d: int


class VisibleRanges(NamedTuple):
    """Which keys a block of rows sees, inside a kernel: ranges [first, last)."""

    b_first: Any
    """[BT]"""
    b_last: Any
    some_from: Any
    """Some row sees keys from here on, up to ``some_to``."""
    some_to: Any
    all_from: Any
    """All rows see all keys from here on, up to ``all_to``, but for padding."""
    all_to: Any
    p_padding: Any
    """Padding of the batch entry, if PADDED."""


class Queries(NamedTuple):
    """A block of queries, inside a kernel."""

    b_q: Any
    """[BT, WIDTH]"""
    o_t: Any
    """[BT]: their rows."""
    i_bh: Any
    """Index of batch entry and head, of B H."""
    H: Any
    ranges: Any
    """``VisibleRanges``, or None."""


class Keys(NamedTuple):
    """The keys and values that the blocks of a loop are loaded from, inside a kernel; pointers or descriptors."""

    p_k: Any
    p_v: Any
    strides_k: Any
    strides_v: Any
    S: Any
    """Keys from here on are hidden from all rows."""


class State(NamedTuple):
    """What Algorithm 1 carries from tile to tile for a block of rows, inside a kernel."""

    b_acc: Any
    """O_bar, [BT, WIDTH]"""
    b_exact: Any
    """The same in FP32, where delta reads that and O_bar is rounded."""
    b_m: Any
    """[BT]"""
    b_l: Any
    b_d: Any
    """Sum of P_bar as rounded."""
    b_f: Any
    """The m that STABILIZED would have, where rows are SCALED_ROW_MAX."""


class Scalars(NamedTuple):
    """``unit``: scale log2(e) where the exponential takes the scale, else 1."""

    scale: float
    unit: float
    softcap: float


class Limits(NamedTuple):
    """Numbers of the row normalizer, the second and third in the unit of what they are compared with."""

    beta: float
    tolerance: float
    cap: float
    floor: float
