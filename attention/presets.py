"""The presets a user types: a backend, and the sites it changes in the base numerics. Plain Python, no torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .numerics import BASES, HARDWARE, Numerics, lacked_by, unrounded

Sites = dict[str, Any]

RECOMMENDED = "flash_consistent"
"""The preset that ``scaled_dot_product_attention`` uses unless told otherwise, and that "robust" stands for."""

EXTERNAL = "external"
"""The preset of a kernel that ``AttentionSpec.kernel`` names. It has no sites, and so no place in ``PRESETS``."""

ALIASES = {"robust": RECOMMENDED}
"""Further names of presets."""


def unaliased(name: str) -> str:
    """The preset that ``name`` stands for, or ``name``."""
    return ALIASES.get(name, name)


@dataclass(frozen=True)
class Preset:
    """``sites``: what it changes, in any base or as a function of the base; ``doc``: one line for the list in README.md."""

    backend: str
    doc: str
    sites: Sites | Callable[[Numerics], Sites]

    def of(self, base: Numerics) -> Sites:
        return dict(self.sites) if isinstance(self.sites, dict) else self.sites(base)


def _flash(doc: str, sites: Callable[[Numerics], Sites] | None = None, **fixed: Any) -> Preset:
    """``fixed`` goes over what ``sites`` makes of the base."""
    return Preset("flash", doc, (lambda base: {**sites(base), **fixed}) if sites else fixed)


def _sdpa(name: str, doc: str, exponent: str) -> Preset:
    """torch's kernels round as they do; the exponent is for what emulates them: none has the FMA, as one-hot rows have O = V at any size of
    the logits. Flash and memory-efficient multiply separately; of cuDNN only such rows are known. On a CPU, flash subtracts first."""
    return Preset(name, doc, {"exponent": exponent})


def _standard(base: Numerics) -> Sites:
    # Eager attention writes S and dP to memory in the input's dtype; a base that rounds S itself keeps its own format.
    rounds = base in (HARDWARE, BASES["rounded_forward"], BASES["published"])
    eager = {"scores": "input", "probability_gradients": "input"} if rounds else {}
    return {**eager, **lacked_by("standard")}


def _stochastic_p(base: Numerics) -> Sites:
    """A base that leaves P_bar unrounded rounds it to the dtype of q here: there has to be something to draw."""
    rounded = {"probabilities": "input"} if base.probabilities == "fp32" else {}
    return {**rounded, "probabilities_rounding": "stochastic"}


def _consistent(base: Numerics) -> Sites:
    """A base that rounds S, m or l keeps them rounded, and has no m that is a whole number of log2: there rows of dS do not sum to 0."""
    whole = {"row_max_rounding": "up", "exponent": "fma"} if unrounded(base) else {}
    return {
        **whole,
        **_FP32_ACCUMULATION,
        "divisor": "rounded",
        "saved_statistics": "max_and_sum",
        "backward_probabilities": "forward",
        "delta_output": "low16",
    }


_FP32_ACCUMULATION: Sites = {"tile_product": "fp32", "accumulator": "fp32"}
_NEAREST_O: Sites = {**_FP32_ACCUMULATION, "output_rounding": "nearest"}


def _stable(**sites: Any) -> Callable[[Numerics], Sites]:
    """Ties are counted in one tile: on ``hardware`` that of a kernel, 64 columns; other bases have tiles of their own."""
    return lambda base: {**sites, **({"tile_k": 64} if base == HARDWARE else {})}


_STOCHASTIC_O: Sites = {
    **_FP32_ACCUMULATION,
    "output_rounding": "stochastic",
    "delta_output": "output",
    "delta_rounding": "nearest",
}


_ATTN_QAT: Sites = {
    "queries_and_keys": "e2m1_nv",
    "values": "e2m1_nv",
    "probabilities": "e2m1_nv",
    "probabilities_in_sum": "bf16",
    "tile_sum": "bf16",
    "delta_output": "input",
    "probabilities_in_delta": "bf16",
    "tile_k": 32,
}
"""Attn-QAT (arXiv 2603.00040) as its training kernel has it: FP4 operands in both passes, in blocks of 16 features of Q, K, V and 16 keys
of P; P quantized in dV and not in dS; for delta an O averaged with P that is not quantized. That P, and what l sums, are in BF16, where
the paper has FP32. experiments/below_bf16 holds it against that code."""

_SAGE_BWD: Sites = {
    "key_mean": "subtracted",
    "queries_and_keys": "int8_tile",
    "values": "int8_tile",
    "values_in_dp": "fp32",
    "probabilities": "int8_row",
    "probabilities_in_dv": "int8_tile",
    "output_gradient_in_dv": "int8_tile",
    "score_gradients": "int8_tile",
    "tile_q": 64,
    "tile_k": 64,
}
"""Algorithms 1 and 2 of SageBwd (arXiv 2603.02170) with its K-smoothing: six of the seven products in INT8, dP = dO V^T not. The paper
names no size of a tile: 64 is ours."""

_FP8: Sites = {
    "queries_and_keys": "e4m3_row",
    "values": "e4m3_row",
    "probabilities": "e4m3",
    "output_gradient": "e5m2_row",
    "score_gradients": "e5m2_row",
}


def _fp8_consistent(base: Numerics) -> Sites:
    """P of both passes is P_bar in E4M3 over its sum, in dV too: exactly so in one tile a row. With several, P_bar of earlier ones was
    rounded with another m, and differs where E4M3 runs out of exponents, below 2^-6 (experiments/below_bf16)."""
    return {**_consistent(base), **_FP8, "probabilities_in_dv": "fp32"}


PRESETS: dict[str, Preset] = {
    "standard": Preset("standard", "the control, as eager PyTorch computes it", _standard),
    "sdpa_flash": _sdpa("sdpa_flash", "torch's flash kernel", "separate_multiply"),
    "sdpa_cudnn": _sdpa("sdpa_cudnn", "cuDNN's, CUDA only", "separate_multiply"),
    "sdpa_efficient": _sdpa("sdpa_efficient", "torch's memory-efficient kernel, CUDA only", "separate_multiply"),
    "sdpa_math": _sdpa("sdpa_math", "torch's plain formula", "subtract_first"),
    "flash": _flash("the run that fails"),
    "flash_subtract_first": _flash("P_bar of a row's maximum is 1", exponent="subtract_first"),
    "flash_separate_multiply": _flash("torch's exponent in our kernels", exponent="separate_multiply"),
    "flash_rounded_sum": _flash(
        "weights of V that sum to 1 ([FlashAttention 2721](https://github.com/Dao-AILab/flash-attention/pull/2721))",
        divisor="rounded",
    ),
    "flash_untiled": _flash("is tiling the cause?", tile_q=0, tile_k=0),
    "flash_stable": _flash(
        "Algorithm 3, later version, for base `published`: in others a row whose maximum is tied and above about 90 or below -90 is NaN",
        _stable(row_max="stabilized", row_max_beta=2.0, row_max_tolerance=1e-3),
    ),
    "flash_stable_exact_ties": _flash(
        "Algorithm 3, first version, for base `published`: in others a row whose maximum is tied and above about 15 or below -90 is NaN",
        _stable(row_max="stabilized", row_max_beta=7.0, row_max_tolerance=0.0),
    ),
    "flash_stable_safe": _flash(
        "the later version with a bounded shift",
        _stable(row_max="stabilized_safe", row_max_beta=2.0, row_max_tolerance=2.0**-9),
    ),
    "flash_fp32_pv": _flash("does the error arise in P V?", probabilities="fp32", **_FP32_ACCUMULATION),
    "flash_fp32_pv_o": _flash(
        "P V and the O in delta in FP32", probabilities="fp32", delta_output="fp32", **_FP32_ACCUMULATION
    ),
    "flash_fp32_o": _flash("an unrounded O in delta", delta_output="fp32"),
    "flash_delta_from_p": _flash("standard attention's delta", delta="rowsum_p_dp"),
    "flash_delta_from_p_subtract_first": _flash(
        "the same; rows of P sum to 1 at any logit",
        delta="rowsum_p_dp",
        exponent="subtract_first",
        saved_statistics="max_and_sum",
    ),
    "flash_delta_normalized": _flash(
        "rows of dS sum to 0 even if rows of P do not sum to 1", delta="rowsum_p_dp_normalized"
    ),
    "flash_corrected_rows": _flash("takes rowsum(dS) out of dQ", row_residual="corrected_rows"),
    "flash_centered_keys": _flash("the same with the mean key", row_residual="centered_keys"),
    "flash_consistent": _flash(
        "the fix, or `robust`: the backward pass uses the forward pass's own P and O", _consistent
    ),
    "flash_stochastic_o": _flash("O without bias", **_STOCHASTIC_O),
    "flash_stochastic_p": _flash("P_bar without bias", _stochastic_p),
    "flash_stochastic_p_o": _flash("both", _stochastic_p, **_STOCHASTIC_O),
    "flash_o_stochastic_delta_nearest": _flash(
        "independently rounded O in delta, to nearest", lambda base: {**_STOCHASTIC_O, "delta_output": base.output}
    ),
    "flash_o_fp32_delta_nearest": _flash(
        "the model reads an unrounded O",
        lambda base: {**_FP32_ACCUMULATION, "output": "fp32", "delta_output": base.output},
    ),
    "flash_o_nearest_delta_stochastic": _flash(
        "independently rounded O in delta, stochastic",
        lambda base: {**_NEAREST_O, "delta_output": base.output, "delta_rounding": "stochastic"},
    ),
    "fp8": Preset("flash_reference", "FP8 operands; P and O of the two passes differ", _FP8),
    "fp8_consistent": Preset(
        "flash_reference", "the same with one P and one O, as `flash_consistent`, in one tile a row", _fp8_consistent
    ),
    "attn_qat": Preset(
        "flash_reference", "FP4, as the code of [Attn-QAT](https://arxiv.org/abs/2603.00040)", _ATTN_QAT
    ),
    "sage_bwd": Preset(
        "flash_reference", "INT8, as the paper's algorithms of [SageBwd](https://arxiv.org/abs/2603.02170)", _SAGE_BWD
    ),
}


def named(name: str) -> Preset:
    """The preset of that name, ``EXTERNAL`` too."""
    return Preset(EXTERNAL, "any kernel", {}) if name == EXTERNAL else PRESETS[name]
