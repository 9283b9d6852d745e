"""Attention of Hugging Face models with the roundings chosen by name, by transformers' registries (>= 4.56)."""

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from . import huggingface_models
from .functional import scaled_dot_product_attention, spec_of, stochastic
from .plan import AttentionSpec
from .presets import RECOMMENDED
from .user_error import refuse


def register(numerics: str | AttentionSpec = RECOMMENDED, name: str = "low_precision_attention") -> str:
    """Make ``numerics`` known to transformers as ``name``, and return that.

    Then ``model.set_attn_implementation(name)``, or ``attn_implementation=name`` where a model is made. Several may be registered, each
    under a name of its own. Single-token decoding runs in the same kernels. Raises ``ValueError`` for a name that other numerics or another
    attention of transformers have (models look it up at each call), for one with "flash" in it, which transformers takes for a
    flash-attention package, for numerics that are unknown or draw at random, and for transformers before 4.56.

    A model whose attention code is its own, and never calls ours, raises ``ValueError`` when it is made, switched or (if made after this)
    called; so does one that a dict of names leaves without ours.
    A model's call raises it for what ``scaled_dot_product_attention`` refuses, attention dropout above all, and for each keyword that
    is not known to be harmless: position biases, indices of sparse attention, paged caches, ``output_attentions``.
    """
    import transformers

    version = transformers.__version__
    refuse(TorchVersion(version) < "4.56", f"transformers = {version}: expected 4.56 or newer")
    from transformers import AttentionInterface, AttentionMaskInterface

    plain = isinstance(name, str) and re.fullmatch(r"[\w.-]+", name)
    refuse(not plain, f"name = {name!r}: expected one of letters, digits, '_', '-' and '.'")
    refuse("flash" in name, f"name = {name!r}: expected one without 'flash', which transformers reserves")
    spec = spec_of(numerics)
    refuse(stochastic(spec), f"numerics = {spec.label()}: expected none that draws at random: no seed reaches it")
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
        s_aux: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        _refuse_others(module, others)
        if dropout != 0:
            expected = f"expected 0, it has no dropout; make or load the model with {_dropout_off(module)}"
            late = "changing the config of a made model does not help"
            refuse(True, f"{type(module).__name__}: dropout = {dropout}: {expected}; {late}")
        causal = False
        if attention_mask is None:
            causal, attention_mask = _without_mask(module, query, key, is_causal, others.get("sliding_window"))
        elif isinstance(attention_mask, Tensor) and attention_mask.ndim != 4:  # [batch, keys] might pass for both
            shape = list(attention_mask.shape)
            refuse(True, f"{type(module).__name__}: attention mask of shape {shape}, not [batch, 1, queries, keys]")
        named: dict[str, Any] = {"enable_gqa": True, "numerics": numerics, "softcap": softcap or 0.0, "sinks": s_aux}
        o = scaled_dot_product_attention(query, key, value, attention_mask, dropout, causal, scaling, **named)
        return o.transpose(1, 2).contiguous(), None

    # Told by the function itself, as this module may be there twice: installed, and in a checkout as ``attention``.
    forward.rounded_as = spec.label()  # type: ignore[attr-defined]
    huggingface_models.guard()
    AttentionInterface.register(name, forward)
    # transformers makes no mask, not even for padding, for a name that this registry does not hold.
    AttentionMaskInterface.register(name, _mask)
    return name


HARMLESS = {
    "sliding_window": "the mask has it; looked at where there is none",
    # Not all models make their mask of them. To look here for packed sequences would make each layer wait for a GPU.
    "position_ids": "queries and keys are rotated by then, and most masks are made of them",
    "position_embeddings": "the same",
    "cache_position": "the same",
    "past_key_values": "keys and values come from it already",
    "use_cache": "the same",
    "max_length_q": "a size, of what cu_seq_lens_q says",
    "max_length_k": "the same",
    "deterministic": "every call is",
    "seq_idx": "of layers without attention",
    "num_items_in_batch": "of the loss",
    "output_hidden_states": "of the model's output",
    "output_router_logits": "the same",
    "return_dict": "the same",
    "logits_to_keep": "the same",
}
"""Keywords that do not affect which keys a query sees or how it weighs them, and why. Others are refused unless they are None."""
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k")
"""Where packed sequences begin, for flash-attention packages. "eager" ignores them, so that sequences attend to each other."""


def _dropout_off(module: nn.Module) -> str:
    """The settings of its config to make it without attention dropout: those on attention, or any where none is of attention."""
    config = getattr(module, "config", None)
    values = vars(config) if hasattr(config, "__dict__") else {}
    on = [name for name, x in values.items() if re.search("dropout|pdrop", name) and isinstance(x, float) and x]
    on = [name for name in on if "att" in name] or on
    return ", ".join(f"{name}=0" for name in on) or "attention_dropout=0 (GPT-2: attn_pdrop=0)"


def _refuse_others(module: nn.Module, others: dict[str, Any]) -> None:
    what = type(module).__name__
    refuse(bool(others.get("output_attentions")), f"{what}: it keeps no P (output_attentions); 'eager' attention does")
    for name, value in others.items():
        if value is not None and name not in HARMLESS and name != "output_attentions":
            cure = "'eager' attention may"
            if name in _PACKED:
                cure = "expected position_ids alone, as of DataCollatorWithFlattening(return_flash_attn_kwargs=False)"
                cure += ", if the model makes its mask of them (GPT-OSS, OPT and BioGPT do not; LFM2 and MiniMax mix sequences elsewhere)"
            refuse(True, f"{what}: it has no {name}, which the model hands to its attention; {cure}")


def _without_mask(
    module: nn.Module, query: Tensor, key: Tensor, is_causal: bool | None, window: int | None
) -> tuple[bool, Tensor | None]:
    """What "no mask" stands for: ``is_causal`` and ``attn_mask`` of our function."""
    what, T, S = type(module).__name__, query.shape[2], key.shape[2]
    refuse(window is not None and window < S, f"{what}: sliding_window = {window} of {S} keys: expected a mask")
    if T == 1:  # a step of decoding sees all that the cache holds
        return False, None
    if is_causal is None:
        is_causal = getattr(module, "is_causal", None)
        # "sdpa" takes it for causal, "eager" for full attention.
        refuse(is_causal is None, f"{what}: no attention mask and no is_causal: expected one of them")
    if not is_causal or T == S:
        return bool(is_causal), None
    # Our masks are not left out for a static cache that is still empty, so these queries are the last of the sequence.
    refuse(T > S, f"{what}: {T} causal queries, {S} keys, no attention mask: expected one")
    return False, torch.ones(T, S, dtype=torch.bool, device=query.device).tril(S - T)


def _mask(**settings: Any) -> Tensor | None:
    """transformers' bool mask, or None: T causal queries of T keys, one query that sees all keys, or nothing is hidden at all."""
    from transformers.masking_utils import sdpa_mask

    place = settings.get("cache_position")  # before transformers 5
    queries, keys = settings["q_length"] if place is None else place.shape[0], settings["kv_length"]
    if queries != 1 and queries != keys:  # torch 2.11's compiler finds no symbolic size by `in`
        settings["allow_is_causal_skip"] = False
    return sdpa_mask(**settings)
