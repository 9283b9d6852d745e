"""One row a rounding site: what it moves, which the tests of sites read. A field of ``Numerics`` without a row fails test_sites.py.

Choices come from the declaration (``CHOICES``); what a site reaches comes from the equations of attention/README.md, and stands here
a second time on purpose.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from attention.numerics import _CHOICES as CHOICES
from attention.numerics import FORMATS, Numerics

FIELDS = tuple(field.name for field in dataclasses.fields(Numerics))
DEFAULT = Numerics()
ALL, GRADIENTS, NOTHING = "o dq dk dv", "dq dk dv", ""
BY_DELTA = "o dq dk"  # O, and through rowsum(dO * O) dQ and dK, but not dV = P^T dO
DELTA = "dq dk"
REFUSED = None
PLAIN = ("exponent=subtracted", "tile_q=32", "tile_k=16")
"""Beside which a site is changed, with q in FP32: nothing is rounded, tiles are several."""


@dataclass(frozen=True)
class Site:
    """What a site moves in the flash backends and in ``standard`` (REFUSED: it has not this site), given the sites ``beside`` it."""

    moves: str
    standard: str | None = REFUSED
    beside: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    """Values to try; empty: a coarse format, or all choices but the default."""


SITES: dict[str, Site] = {
    "inputs": Site(ALL, standard=ALL),
    "scores": Site(ALL, standard=ALL),
    "statistics": Site(ALL),
    "logsumexp": Site(GRADIENTS, standard=NOTHING),
    "saved_statistics": Site(GRADIENTS),
    "exponent": Site(ALL, beside=("exponent=folded",), values=("subtracted", "unfused")),
    "probabilities": Site(ALL, standard=ALL.replace("dq dk ", "")),
    "probabilities_rounding": Site(BY_DELTA, beside=("probabilities=m7",)),
    "products": Site(BY_DELTA, standard=NOTHING),
    "divisor": Site(BY_DELTA, beside=("probabilities=m3",)),
    "tile_product": Site(BY_DELTA),
    "accumulator": Site(BY_DELTA),
    "output": Site(BY_DELTA, standard="o"),
    "output_rounding": Site(BY_DELTA, standard="o", beside=("output=m3",)),
    "output_gradient": Site(GRADIENTS, standard=GRADIENTS),
    "delta": Site(DELTA, beside=("output=m3",)),
    "delta_output": Site(DELTA, beside=("output=m3",), values=("fp32", "m2", "residual8", "residual16")),
    "delta_rounding": Site(DELTA, standard=NOTHING, beside=("delta_output=m3",)),
    "delta_sum": Site(DELTA, standard=DELTA),
    "probability_gradients": Site(DELTA, standard=DELTA),
    "score_gradients": Site(DELTA, standard=DELTA),
    "gradient_accumulator": Site(GRADIENTS, standard=NOTHING),
    "row_max": Site(BY_DELTA, beside=("probabilities=m7",)),
    "row_max_beta": Site(BY_DELTA, beside=("probabilities=m7", "row_max=stabilised"), values=("3",)),
    "row_max_tolerance": Site(BY_DELTA, beside=("probabilities=m7", "row_max=stabilised"), values=("0.5",)),
    "row_max_cap": Site(BY_DELTA, beside=("probabilities=m7", "row_max=stabilised_safe"), values=("0.5",)),
    "tile_q": Site("dk dv", beside=("gradient_accumulator=m4",), values=("16",)),
    "tile_k": Site(ALL, beside=("accumulator=m4",), values=("32",)),
}


def is_format(name: str) -> bool:
    """Whether a site takes formats."""
    return set(FORMATS) <= set(CHOICES.get(name, ()))


def values(name: str) -> tuple[str, ...]:
    """Values of a site to try beside ``SITES[name].beside``."""
    if SITES[name].values:
        return SITES[name].values
    if is_format(name):
        return ("m3",)
    return tuple(value for value in CHOICES[name] if value != getattr(DEFAULT, name))


CASES = [(name, value) for name in SITES for value in values(name)]


def sites_of(name: str, value: str = "") -> tuple[str, ...]:
    """Single sites of an ``AttentionSpec``: those beside the site, and, if a value is given, the site itself."""
    chosen = dict(site.split("=") for site in (*PLAIN, *SITES[name].beside))
    return tuple(f"{site}={text}" for site, text in (chosen | ({name: value} if value else {})).items())
