"""What the variants of the row normaliser do to rows of known kinds: bias and size of the error of O and of delta, and the range.

Every row maximum r of a stretch of four binades occurs equally often (512 BF16 numbers), of either sign. Of K keys the first has the score
r, the second lies a gap below it, the others 10 to 12 below; V has one sign and lies in [2, 4), so that the sum of two carries.
dO = 1, so delta is the sum of a row of O.

Legend: N rows, K keys, D head dim, R row maxima.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from analysis.row_normalisers import Normaliser, Outcome, attend, errors_in_units, exact, mean_by_maximum
from attention.numerics import HARDWARE, PAPER, Numerics
from attention.rounding import round_to

K, D, REPEATS = 8, 32, 2

FP32_STATISTICS = "paper fp32 m l"
NUMERICS: dict[str, Numerics] = {
    "paper": PAPER.concrete("bf16"),
    FP32_STATISTICS: PAPER.with_sites({"statistics": "fp32"}).concrete("bf16"),
    "hardware": HARDWARE.with_sites({"exponent": "subtracted"}).concrete("bf16"),
}
"""In BF16, S subtracted first. The second takes away the error that m and l in BF16 have of their own."""

CAP = HARDWARE.row_max_cap
ALL = None
VARIANTS: dict[str, Normaliser] = {
    "plain": Normaliser(),
    "beta 2": Normaliser(positive=2, negative=0),
    "beta 7": Normaliser(positive=7, negative=0),
    "beta 2 exact": Normaliser(positive=2, negative=0, tolerance=0.0),
    "beta 7 exact": Normaliser(positive=7, negative=0, tolerance=0.0),
    "beta 2 to 2^-9": Normaliser(positive=2, negative=0, tolerance=2.0**-9),
    "safe": Normaliser(positive=2, negative=0, tolerance=2.0**-9, cap=CAP),
    "offset ln 2": Normaliser(offset=math.log(2)),
    "offset 1": Normaliser(offset=1.0),
    "offset 2": Normaliser(offset=2.0),
    "offset 7": Normaliser(offset=7.0),
    "offset 7.0002": Normaliser(offset=CAP),
    "all beta 2": Normaliser(positive=2, negative=0, tolerance=ALL),
    "all beta 7": Normaliser(positive=7, negative=0, tolerance=ALL),
    "all offset 1": Normaliser(offset=1.0, tolerance=ALL),
    "all offset 7.0002": Normaliser(offset=CAP, tolerance=ALL),
    "beta 1.01": Normaliser(positive=1.01, negative=0),
    "gamma 0.5": Normaliser(positive=2, negative=0.5),
    "gamma 0.9": Normaliser(positive=2, negative=0.9),
    "gamma 0.99": Normaliser(positive=2, negative=0.99),
    "gamma 0.999": Normaliser(positive=2, negative=0.999),
    "gamma 2": Normaliser(positive=2, negative=2),
}
"""beta r for r > 0, gamma r for r < 0, r + offset; ties to 1e-3 and gamma 0 where nothing else is said. ``exact``: ties to 0;
``all``: every row. 7.0002 is ``row_max_cap``, ln(2^18 / 239): its P_bar, 239 * 2^-18, is a BF16 number."""
SHIFT_ALL = tuple(name for name, normaliser in VARIANTS.items() if normaliser.tolerance is None)
PRESET_OF = {"plain": "flash", "beta 2": "flash_stable", "beta 7 exact": "flash_stable_exact_ties"}
PRESET_OF |= {"safe": "flash_stable_safe"}
"""The presets whose row maximum a variant is."""


@dataclass(frozen=True)
class Kind:
    """Gap of the second score below the maximum, uniform; gaps of the others; size of V of the others against that of the first two."""

    gap: tuple[float, float]
    others: tuple[float, float] = (10.0, 12.0)
    size: float = 1.0


KINDS: dict[str, Kind] = {
    "tie": Kind((0.0, 0.0)),
    "tie small others": Kind((0.0, 0.0), size=0.25),
    "within 1e-3": Kind((1e-4, 1e-3)),
    "within 2^-9": Kind((1e-3, 2.0**-9)),
    "within 2^-7": Kind((2.0**-9, 2.0**-7)),
    "no tie": Kind((0.1, 4.0), others=(0.1, 4.0)),
}
MAGNITUDES = {"tiny": 2.0**-13, "usual": 0.5, "hundreds": 64.0, "failing": 8192.0}
"""The least |r| of four binades. Failing runs have logits of the last (8,192 to 130,560) and larger."""

CASES: tuple[tuple[str, str], ...] = (
    *(("tie", magnitude) for magnitude in MAGNITUDES),
    *(("tie small others", magnitude) for magnitude in ("usual", "hundreds", "failing")),
    *((kind, "usual") for kind in ("within 1e-3", "within 2^-9", "within 2^-7")),
    ("within 1e-3", "hundreds"),
    *(("no tie", magnitude) for magnitude in ("usual", "hundreds", "failing")),
)


@dataclass(frozen=True)
class Rows:
    """Rounded S [N, K] and V [N, K, D], float32; row i has row maximum number i % ``maxima``."""

    s_NK: Tensor
    v_NKD: Tensor
    maxima: int


def bf16_from(least: float, binades: int = 4) -> Tensor:
    """All BF16 numbers of the binades that begin at ``least``, a power of two: float32 [R]."""
    first = torch.tensor(least, dtype=torch.bfloat16).view(torch.int16).item()
    return torch.arange(first, first + 128 * binades, dtype=torch.int16).view(torch.bfloat16).float()


def make_rows(
    kind: Kind,
    maxima_R: Tensor,
    v_sign: float,
    seed: int,
    scores_format: str,
    *,
    width: int = D,
    repeats: int = REPEATS,
) -> Rows:
    """Rows of a kind, ``repeats`` for each row maximum. Where S is coarse, untied scores are a unit in its last place below at least."""
    generator = torch.Generator().manual_seed(seed)
    top_N1 = maxima_R.repeat(repeats)[:, None].double()
    n = len(top_N1)

    def gaps(bounds: tuple[float, float], keys: int) -> Tensor:
        low, high = bounds
        return low + (high - low) * torch.rand(n, keys, generator=generator, dtype=torch.float64)

    second_N1, others = gaps(kind.gap, 1), gaps(kind.others, K - 2)
    if scores_format == "bf16":
        unit_N1 = torch.ldexp(torch.ones_like(top_N1), torch.frexp(top_N1).exponent - 8)
        others = torch.maximum(others, unit_N1)
        if kind.gap[0] >= 0.1:
            second_N1 = torch.maximum(second_N1, unit_N1)
    below_NK = torch.cat([torch.zeros_like(top_N1), second_N1, others], dim=1)
    s_NK = round_to((top_N1 - below_NK).float(), scores_format)
    v_NKD = v_sign * (2 + 2 * torch.rand(n, K, width, generator=generator))
    v_NKD[:, 2:] *= kind.size
    return Rows(s_NK, round_to(v_NKD, "bf16"), len(maxima_R))


@dataclass(frozen=True)
class Measured:
    """One variant on one kind of row. Errors are in units of O's last place (BF16), counted over rows inside the range."""

    numerics: str
    kind: str
    magnitude: str
    maximum: str
    """Sign of r: + or -."""
    v: str
    """Sign of V: + or -."""
    variant: str
    rows: int
    several_ones: float
    """Share of rows in which more than one P_bar is exactly 1."""
    nonfinite: float
    zero: float
    subnormal: float
    n: int
    """Row maxima left inside the range: n of both standard errors."""
    mean: float
    """Of O's error, signed: away from zero has the sign of V."""
    standard_error: float
    lowest_seed: float
    highest_seed: float
    rms: float
    delta_mean: float
    delta_standard_error: float
    delta_sum: float
    """Over all rows inside the range."""
    delta_positive: float
    """Share of rows with a positive error, of those with one."""
    delta_rms: float


@dataclass(frozen=True)
class _Errors:
    """Row by row: mean of O's error, mean of its square, delta's error, and whether the row is inside the range; each [N]."""

    o_N: Tensor
    square_N: Tensor
    delta_N: Tensor
    inside_N: Tensor


def _errors(outcome: Outcome, exact_ND: Tensor) -> _Errors:
    error_ND = errors_in_units(outcome.o_ND, exact_ND)
    unit_N = torch.ldexp(torch.ones(len(exact_ND)).double(), torch.frexp(exact_ND.mean(dim=-1)).exponent - 8)
    delta_N = (outcome.o_ND.sum(dim=-1).double() - exact_ND.sum(dim=-1)) / unit_N
    return _Errors(error_ND.mean(dim=-1), error_ND.square().mean(dim=-1), delta_N, outcome.inside_N)


def measure(
    numerics: str, kind: str, magnitude: str, maximum: str, v: str, variants: Sequence[str], seeds: int
) -> list[Measured]:
    """All ``variants`` on the same rows; seeds 0 to ``seeds`` - 1, others for V below zero, so that both signs are measurements."""
    rounding = NUMERICS[numerics]
    maxima_R = bf16_from(MAGNITUDES[magnitude]) * (1 if maximum == "+" else -1)
    made = [
        make_rows(KINDS[kind], maxima_R, 1.0 if v == "+" else -1.0, 2 * seed + (v == "-"), rounding.scores)
        for seed in range(seeds)
    ]
    references = [exact(rows.s_NK, rows.v_NKD) for rows in made]
    found = []
    for variant in variants:
        outcomes = [attend(rows.s_NK, rows.v_NKD, rounding, VARIANTS[variant]) for rows in made]
        errors = [_errors(outcome, reference) for outcome, reference in zip(outcomes, references, strict=True)]
        found.append(_measured((numerics, kind, magnitude, maximum, v, variant), outcomes, errors, len(maxima_R)))
    return found


def _measured(
    names: tuple[str, str, str, str, str, str], outcomes: list[Outcome], errors: list[_Errors], maxima: int
) -> Measured:
    inside_N = torch.cat([e.inside_N for e in errors])
    o, delta = (
        mean_by_maximum(torch.cat([getattr(e, name) for e in errors]), inside_N, maxima) for name in ("o_N", "delta_N")
    )
    seeds = [mean_by_maximum(e.o_N, e.inside_N, maxima).mean for e in errors]
    square_N = torch.cat([e.square_N for e in errors])[inside_N]
    delta_N = torch.cat([e.delta_N for e in errors])[inside_N]

    def share(name: str) -> float:
        return torch.cat([getattr(one, name) for one in outcomes]).double().mean().item()

    return Measured(
        *names,
        rows=len(inside_N),
        several_ones=(torch.cat([one.ones_N for one in outcomes]) > 1).double().mean().item(),
        nonfinite=share("nonfinite_N"),
        zero=share("zero_N"),
        subnormal=share("subnormal_N"),
        n=o.n,
        mean=o.mean,
        standard_error=o.standard_error,
        lowest_seed=min(seeds),
        highest_seed=max(seeds),
        rms=square_N.mean().sqrt().item(),
        delta_mean=delta.mean,
        delta_standard_error=delta.standard_error,
        delta_sum=delta_N.sum().item(),
        delta_positive=(delta_N[delta_N != 0] > 0).double().mean().item(),
        delta_rms=delta_N.square().mean().sqrt().item(),
    )


def study(seeds: int) -> list[Measured]:
    """Every case, both signs of the row maximum (of ties and untied rows) and of V, every numerics and variant that differ there."""
    return [
        measured
        for numerics in NUMERICS
        for kind, magnitude in CASES
        if kind == "tie" or numerics != FP32_STATISTICS
        for maximum in ("+" if kind.startswith("within") else "+-")
        for v in "+-"
        for measured in measure(numerics, kind, magnitude, maximum, v, told_apart(maximum, kind), seeds)
    ]


def told_apart(maximum: str, kind: str = "tie") -> list[str]:
    """Variants without those that do to such rows what another one does: with ``beta 2`` (other sign), with ``plain`` (no tie)."""
    same = ("gamma",) if maximum == "+" else ("beta 1.01", "beta 7", "all beta 7")
    names = [name for name in VARIANTS if not name.startswith(same)]
    return [name for name in names if kind != "no tie" or name in ("plain", *SHIFT_ALL)]


@dataclass(frozen=True)
class Range:
    """Where a variant leaves the range: |r| of the first row, of the BF16 numbers from 0.5 to 130,560, that does; None: none does."""

    numerics: str
    kind: str
    maximum: str
    variant: str
    subnormal_from: float | None
    zero_from: float | None
    nonfinite_from: float | None
    at_100: str
    """What becomes of the rows with |r| from 100 to 200: right, subnormal, zero or nonfinite, or the shares of each."""
    at_100000: str
    """The same from 100,000 on."""


def leaving(numerics: str, kind: str, maximum: str, variant: str) -> Range:
    """One row for every |r|, V = 1 up to its sign and size."""
    rounding = NUMERICS[numerics]
    sizes_R = bf16_from(0.5, binades=18)
    rows = make_rows(KINDS[kind], sizes_R if maximum == "+" else -sizes_R, 1.0, 0, rounding.scores, width=1, repeats=1)
    outcome = attend(rows.s_NK, rows.v_NKD, rounding, VARIANTS[variant])
    states = {name: getattr(outcome, f"{name}_N") for name in ("subnormal", "zero", "nonfinite")}

    def first(state: str) -> float | None:
        return sizes_R[states[state]].min().item() if states[state].any() else None

    def among(low: float, high: float) -> str:
        here = (sizes_R >= low) & (sizes_R < high)
        shares = {"right": outcome.inside_N[here], **{name: flags[here] for name, flags in states.items()}}
        found = {name: flags.double().mean().item() for name, flags in shares.items() if flags.any()}
        return next(iter(found)) if len(found) == 1 else ", ".join(f"{s:.0%} {name}" for name, s in found.items())

    names = (first("subnormal"), first("zero"), first("nonfinite"))
    return Range(numerics, kind, maximum, variant, *names, among(100, 200), among(1e5, math.inf))


def ranges() -> list[Range]:
    """Tied and untied rows of both signs, ``paper`` and ``hardware``, every variant."""
    return [
        leaving(numerics, kind, maximum, variant)
        for numerics in ("paper", "hardware")
        for kind in ("tie", "no tie")
        for maximum in "+-"
        for variant in told_apart(maximum, kind)
    ]
