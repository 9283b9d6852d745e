"""Attention of Hugging Face models with the roundings chosen by name, by transformers' registries (>= 4.54)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .functional import refuse, scaled_dot_product_attention, spec_of, stochastic
from .plan import AttentionSpec
from .presets import RECOMMENDED


def register(numerics: str | AttentionSpec = RECOMMENDED, name: str = "low_precision_attention") -> str:
    """Make ``numerics`` known to transformers as ``name``, and return that.

    Then ``model.set_attn_implementation(name)``, or ``attn_implementation=name`` where a model is made. Several may be registered, each
    under a name of its own. Single-token decoding runs in the same kernels. Raises ``ValueError`` for a name that other numerics or another
    attention of transformers have, as models look it up at each call, for one with "flash" in it, which transformers takes for a
    flash-attention package, and for numerics that are unknown or stochastic.

    A model's call raises ``ValueError`` for what ``scaled_dot_product_attention`` refuses, attention dropout above all, and for sinks,
    position biases, paged caches and ``output_attentions``. GPT-2 does not hand the last on: there ``attentions`` comes back empty, as with
    transformers' own SDPA.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    refuse(not (isinstance(name, str) and name), f"name = {name!r}: expected a name of one letter or more")
    refuse("flash" in name, f"name = {name!r}: expected one without 'flash', which transformers reserves")
    spec = spec_of(numerics)
    refuse(
        stochastic(spec), f"numerics = {spec.label()}: expected none that rounds stochastically, as no seed reaches it"
    )
    there = AttentionInterface().get(name, name == "eager" or None)
    stands_for = getattr(there, "rounded_as", None)
    foreign = there is not None and stands_for is None
    refuse(foreign, f"name = {name!r}: expected another one, under which transformers has no attention yet")
    other = stands_for is not None and stands_for != spec.label()
    refuse(other, f"name = {name!r}: expected another one for {spec.label()}, as it stands for {stands_for}")

    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        softcap: float | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        for lacking in ("s_aux", "position_bias", "cache"):
            refuse(others.get(lacking) is not None, f"{type(module).__name__}: it has no {lacking}")
        wanted = bool(others.get("output_attentions"))
        refuse(wanted, f"{type(module).__name__}: it keeps no P (output_attentions); 'eager' attention does")
        cure = "make or load the model with attention_dropout=0 (GPT-2: attn_pdrop=0)"
        refuse(dropout != 0, f"{type(module).__name__}: dropout = {dropout}: expected 0, it has no dropout; {cure}")
        lengths = query.shape[2], key.shape[2]
        # As transformers' own for SDPA: a mask says everything, and the one query of a decoding step sees all that the cache holds.
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        causal = lengths[0] > 1 and attention_mask is None and causal
        if causal and lengths[1] > lengths[0]:  # a static cache that is still empty
            key, value = key[:, :, : lengths[0]], value[:, :, : lengths[0]]
        o = scaled_dot_product_attention(
            query,
            key,
            value,
            attention_mask,
            dropout,
            causal,
            scaling,
            enable_gqa=True,
            numerics=numerics,
            softcap=softcap or 0.0,
        )
        return o.transpose(1, 2).contiguous(), None

    # Told by the function itself, as this module may be there twice: installed, and in a checkout as ``attention``.
    forward.rounded_as = spec.label()  # type: ignore[attr-defined]
    AttentionInterface.register(name, forward)
    # transformers makes no mask, not even for padding, for a name that this registry does not hold.
    AttentionMaskInterface.register(name, sdpa_mask)
    return name
