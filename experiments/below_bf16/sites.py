"""Kernels for the crash test, as in layer 1 of the runs of GPT-2: flash with some sites in FP8, and fp8 in all, one tile a row.

In this folder: ``python -m low_precision_attention.check $(printf 'sites:%s ' p p_m3 p_delta_star qk v do ds all_but_p
fp8 fp8_delta_star fp8_consistent flash) --class captured_growing --csv check.csv``
"""

from collections.abc import Callable

from low_precision_attention import AttentionSpec, scaled_dot_product_attention
from torch import Tensor

P, QK, V = "probabilities=e4m3", "queries_and_keys=e4m3_row", "values=e4m3_row"
DO, DS = "output_gradient=e5m2_row", "score_gradients=e5m2_mx"


def kernel(preset: str, *sites: str) -> Callable[[Tensor, Tensor, Tensor, bool, float], Tensor]:
    spec = AttentionSpec(preset=preset, sites=("tile_k=0", *sites), backend="flash_reference")

    def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, numerics=spec)

    return attention


flash = kernel("flash")
p, qk, v, do, ds = (kernel("flash", site) for site in (P, QK, V, DO, DS))
p_m3, p_delta_star = kernel("flash", "probabilities=m3"), kernel("flash", P, "delta=rowsum_p_dp_normalized")
all_but_p = kernel("flash", QK, V, DO, DS)
fp8, fp8_consistent = kernel("fp8", DS), kernel("fp8_consistent", DS)
fp8_delta_star = kernel("fp8", DS, "delta=rowsum_p_dp_normalized")
