"""One row a rounding site: what it moves, which the tests of sites read. A field of ``Numerics`` without a row fails test_sites.py.

Choices come from the declaration (``numerics.site``); what a site reaches comes from the equations of attention/README.md, and stands here
a second time on purpose.
"""

from dataclasses import dataclass

import torch
from attention_cases import COMMON

from attention.numerics import SITES as DECLARED
from attention.numerics import Numerics

FIELDS = tuple(DECLARED)
CHOICES = {name: declared.choices for name, declared in DECLARED.items() if declared.choices}
DEFAULT = Numerics()
ALL, GRADIENTS = "o dq dk dv", "dq dk dv"
BY_DELTA = "o dq dk"  # O, and through rowsum(dO * O) dQ and dK, but not dV = P^T dO
DELTA = "dq dk"
REFUSED = None
PLAIN = ("exponent=subtract_first", "tile_q=32", "tile_k=16")
"""Beside which a site is changed, with q in FP32: nothing is rounded, tiles are several."""


@dataclass(frozen=True)
class Row:
    """What values of a site move in the flash backends and in ``standard`` (REFUSED: it lacks this site), given the sites ``beside``."""

    moves: str
    standard: str | None = REFUSED
    beside: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    """Empty: a coarse format, or all choices but the default and those of other rows."""


M7 = "probabilities=m7"
SITES: dict[str, tuple[Row, ...]] = {
    "inputs": (Row(ALL, standard=ALL),),
    "key_mean": (Row(ALL, beside=("queries_and_keys=m5",)),),
    "queries_and_keys": (Row(ALL),),
    "values": (Row(BY_DELTA),),
    "values_in_dp": (Row(DELTA),),
    "scores": (Row(ALL, standard=ALL),),
    "statistics": (Row(ALL),),
    "logsumexp": (Row(GRADIENTS),),
    "saved_statistics": (Row(GRADIENTS),),
    "exponent": (Row(ALL, beside=("exponent=fma",), values=("subtract_first", "separate_multiply")),),
    "probabilities": (Row(ALL, standard="o dv"),),
    "probabilities_rounding": (Row(BY_DELTA, beside=(M7,)),),
    "probabilities_in_dv": (Row("dv"),),
    "backward_probabilities": (
        Row(GRADIENTS, beside=("probabilities=m3", "divisor=rounded", "saved_statistics=max_and_sum")),
    ),
    "divisor": (Row(BY_DELTA, beside=("probabilities=m3",)),),
    "probabilities_in_sum": (Row(ALL),),
    "tile_sum": (Row(ALL),),
    "tile_product": (Row(BY_DELTA),),
    "accumulator": (Row(BY_DELTA),),
    "output": (Row(BY_DELTA, standard="o"),),
    "output_rounding": (Row(BY_DELTA, standard="o", beside=("output=m3",)),),
    "output_gradient": (Row(GRADIENTS, standard=GRADIENTS),),
    "output_gradient_in_dv": (Row("dv"),),
    "delta": (
        Row(DELTA, beside=("output=m3",)),
        Row(DELTA, beside=("output=m3", "logsumexp=m4"), values=("rowsum_p_dp_normalized",)),
    ),
    "delta_output": (Row(DELTA, beside=("output=m3",), values=("fp32", "m2", "low16")),),
    "delta_rounding": (Row(DELTA, beside=("delta_output=m3",)),),
    "probabilities_in_delta": (Row(DELTA, beside=("delta_output=fp32", "probabilities=m3")),),
    "delta_sum": (Row(DELTA, standard=DELTA),),
    "delta_error": (Row(DELTA, beside=("delta=rowsum_p_dp", "delta_error_size=0.5", "output=m3")),),
    "delta_error_size": (Row(DELTA, beside=("delta=rowsum_p_dp", "delta_error=constant"), values=("-0.5",)),),
    "delta_error_rows": (Row(DELTA, beside=("delta=rowsum_p_dp", "delta_error=random")),),
    "probability_gradients": (Row(DELTA, standard=DELTA),),
    "score_gradients": (Row(DELTA, standard=DELTA),),
    "row_residual": (
        Row(DELTA, beside=("delta_output=m3", "logsumexp=m5")),
        Row("dq", beside=("delta_output=m3",), values=("centered_keys",)),
    ),
    "gradient_accumulator": (Row(GRADIENTS),),
    "row_max": (Row(BY_DELTA, beside=(M7,)), Row(ALL, beside=("row_sum_floor=0.5",), values=("scaled",))),
    "row_max_rounding": (Row(BY_DELTA, beside=(M7, "exponent=fma")),),
    "row_max_beta": (Row(BY_DELTA, beside=(M7, "row_max=stabilized"), values=("3",)),),
    "row_max_gamma": (Row(BY_DELTA, beside=(M7, "row_max=stabilized", "tile_k=2"), values=("1.5",)),),
    "row_max_tolerance": (Row(BY_DELTA, beside=(M7, "row_max=stabilized"), values=("0.5",)),),
    "row_max_cap": (Row(BY_DELTA, beside=(M7, "row_max=stabilized_safe"), values=("0.5",)),),
    "row_sum_floor": (Row(ALL, values=("0.99",)),),
    "hidden_tiles": (Row(ALL, beside=("row_sum_floor=0.5",)),),
    "tile_q": (Row("dk dv", beside=("gradient_accumulator=m4",), values=("16",)),),
    "tile_k": (Row(ALL, beside=("accumulator=m4",), values=("32",)),),
}


@dataclass(frozen=True)
class Case:
    """One value of one site."""

    site: str
    value: str
    row: Row

    def __str__(self) -> str:
        return f"{self.site}={self.value}"

    @property
    def changed(self) -> tuple[str, ...]:
        """Names of the site, and of those that it needs beside it to act."""
        return (self.site, *(site.partition("=")[0] for site in self.row.beside))

    def sites(self, *, changed: bool) -> tuple[str, ...]:
        """Single sites of an ``AttentionSpec``: those beside the site, and, if ``changed``, the site itself."""
        chosen = dict(site.split("=") for site in (*PLAIN, *self.row.beside))
        return tuple(f"{k}={v}" for k, v in (chosen | ({self.site: self.value} if changed else {})).items())


def _values(name: str, row: Row) -> tuple[str, ...]:
    if row.values:
        return row.values
    if DECLARED[name].is_format:
        return ("m3",)
    others = {value for other in SITES[name] for value in other.values}
    return tuple(value for value in CHOICES[name] if value not in (getattr(DEFAULT, name), *others))


CASES = [Case(name, value, row) for name, rows in SITES.items() for row in rows for value in _values(name, row)]


@dataclass(frozen=True)
class Meeting:
    """Sites that act together, on inputs of ``attention_cases``, in the flash backends."""

    sites: str
    inputs: str = "random"
    dtype: torch.dtype = torch.float32
    softcap: float = 0.0
    numerics: str = "hardware"

    def __str__(self) -> str:
        return f"{self.numerics} {self.sites} {self.dtype}"


BF16 = torch.bfloat16
APART = "saved_statistics=max_and_sum delta=rowsum_p_dp"
ROUNDED_SUM = "divisor=rounded probabilities=m3"  # in three bits its sum is far from l
DRAWN = "probabilities_rounding=stochastic"
OF_KERNELS = {name: site.acts_in for name, site in DECLARED.items() if site.is_format and "flash" in site.backends}
BACKWARD_FORMATS = [name for name, acts_in in OF_KERNELS.items() if {"delta", "backward"} & {*acts_in}]
FORWARD_FORMATS = [name for name, acts_in in OF_KERNELS.items() if "forward" in acts_in]
MANY_BLOCKS = "statistics=bf16 tile_product=bf16 accumulator=m4"  # tile_k of 48 and 0 are no block sizes
FP4 = "queries_and_keys=e2m1_nv values=e2m1_nv probabilities=e2m1_nv output_gradient=e5m2_row score_gradients=e5m2_row"
ONE_P = (
    "saved_statistics=max_and_sum backward_probabilities=forward divisor=rounded delta_output=low16 row_max_rounding=up"
)
TOGETHER = [
    Meeting(FP4, dtype=BF16),
    Meeting(f"{FP4} {ONE_P} probabilities_in_dv=fp32", dtype=BF16),
    Meeting(
        "delta_output=e4m3_head_stochastic probability_gradients=e5m2_mx probabilities_in_dv=int8_row tile_k=32",
        dtype=BF16,
    ),
    Meeting(
        "queries_and_keys=e4m3_row_stochastic values_in_dp=m5 output_gradient=e4m3 delta=rowsum_p_dp_normalized",
        dtype=BF16,
    ),
    *(Meeting(f"{APART} exponent={form} row_max=stabilized_safe", "tied") for form in CHOICES["exponent"]),
    Meeting(f"{APART} scores=m20 statistics=m20 tile_k=48", "tied"),
    Meeting("delta=rowsum_p_dp", "peaked", softcap=5.0),
    Meeting(f"{ROUNDED_SUM} {DRAWN}"),
    Meeting(f"{ROUNDED_SUM} statistics=m4 tile_product=m6"),
    Meeting(f"{ROUNDED_SUM} row_max=stabilized_safe"),
    Meeting(f"{ROUNDED_SUM} tile_k=48 delta_output=fp32 accumulator=m5"),
    Meeting(DRAWN, dtype=torch.float16),
    Meeting(f"{DRAWN} probabilities=m3"),  # fewer random bits than are cut off
    Meeting(f"{DRAWN} tile_k=48 statistics=m12 tile_product=m12 accumulator=m12", dtype=BF16),
    Meeting(f"{DRAWN} row_max=stabilized_safe", dtype=BF16),
    Meeting(f"{DRAWN} output_rounding=stochastic delta_output=m4 delta_rounding=stochastic", dtype=BF16),
    Meeting(f"{MANY_BLOCKS} tile_k=0", "tied", BF16),
    Meeting(f"{MANY_BLOCKS} tile_k=48 row_max=stabilized", "tied", BF16),
    Meeting(f"{MANY_BLOCKS} tile_k=48 delta_output=fp32", "tied", BF16),
    Meeting("delta=rowsum_p_dp", numerics="microcosm"),
    Meeting("output_rounding=stochastic", numerics="microcosm"),
    Meeting("delta=rowsum_p_dp delta_error=rounding delta_error_rows=as_many_as_tied", "tied", BF16),
    Meeting("delta=rowsum_p_dp_normalized delta_error=zero_sum row_residual=corrected_rows", COMMON, BF16),
    Meeting("delta=rowsum_p_dp delta_error=zero_sum delta_error_rows=tied", "tied", BF16),
    Meeting("delta=rowsum_p_dp delta_output=m4 delta_rounding=stochastic"),  # which nothing reads
    *(
        Meeting(f"row_residual={residual} {sites}", COMMON, dtype)
        for residual in ("centered_keys", "corrected_rows")
        for dtype, sites in (
            *((BF16, f"delta={delta}") for delta in CHOICES["delta"]),
            (BF16, "probabilities=fp32 inputs=m5 saved_statistics=max_and_sum"),
            (torch.float32, "score_gradients=m3 probabilities=m3 delta_sum=m6"),
            (torch.float32, "logsumexp=m4 exponent=separate_multiply delta=rowsum_p_dp_normalized"),
        )
    ),
    # Tiles larger than a block, which a sum that is rounded once a tile needs, have a code of their own.
    *(Meeting(f"accumulator=m16 {name}=m3 tile_k=48") for name in FORWARD_FORMATS if name != "accumulator"),
    Meeting("accumulator=m3 tile_k=48"),
    # Where keys have a part in common, m moves from tile to tile, and in many rows it is below 0, where a hidden tile moves it, too.
    Meeting("divisor=rounded statistics=m4 tile_product=m6 accumulator=m4 tile_k=48", COMMON),
    Meeting(
        "divisor=rounded hidden_tiles=visited row_max=stabilized statistics=m3 accumulator=m3 delta_output=fp32", COMMON
    ),
    # dS is formed in more than one place: for its products, for delta from P, for its row sums.
    *(
        Meeting(f"{name}=m3 delta_output=m3 {beside}")
        for name in BACKWARD_FORMATS
        for beside in ("row_residual=corrected_rows", "delta=rowsum_p_dp")
        if name != "delta_output"
    ),
]
