"""Captures from a local Hugging Face causal language model: the Llama family and GPT-2.

transformers calls an attention function by name; one of ours is registered under a name of its own. It computes attention by
``attention.run`` with the roundings asked for, since a folder of weights does not say which kernel it was trained with, and
keeps q, k, v and O. Llama rotates q and k behind their projections; the rotation is kept for ``low_rank``. Keys and values
that several heads share (grouped queries) are repeated, so that every head of queries has its own.

Legend: B batch, T positions, C width, H heads of queries, D head width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attention import AttentionConfig, AttentionSpec, LayerPlan, dispatch
from errors import UserError, check_finite, check_memory, check_size, invalid, reading
from probes.capture import LayerCapture, Record

FAMILIES = ("gpt2", "llama", "mistral", "qwen2")
"""Values of ``model_type`` whose attention is causal, plain, and, where it rotates, rotated by halves as Llama's."""
_SIZES = {
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "hidden_size": "n_embd",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "block_size",
}
_NAME = "capture_q_k_v_o"


@dataclass
class CausalModel:
    """A loaded model. ``capture`` leaves nothing behind on it."""

    model: Any
    plans: tuple[LayerPlan, ...]
    dtype: torch.dtype
    device: torch.device
    records: dict[int, Record] = field(default_factory=dict)

    @property
    def n_layer(self) -> int:
        return len(self.plans)

    @property
    def n_head(self) -> int:
        return int(self.model.config.num_attention_heads)

    @property
    def vocabulary_size(self) -> int:
        return int(self.model.config.vocab_size)

    @property
    def positions(self) -> int:
        """Longest sequence that the model takes."""
        return int(self.model.config.max_position_embeddings)

    def w_q(self, layer: int) -> Tensor:
        """W_Q of a layer, [H * D, C]; rows of a head together."""
        module = self._attentions()[layer]
        if self.model.config.model_type == "gpt2":
            return module.c_attn.weight.detach()[:, : module.embed_dim].T
        return module.q_proj.weight.detach()

    def capture(self, tokens_BT: Tensor, targets_BT: Tensor, layers: Sequence[int] | None = None) -> list[LayerCapture]:
        """As ``probes.capture.capture``: one forward pass under autocast, and dO of the layers asked for."""
        chosen = list(range(self.n_layer)) if layers is None else list(layers)
        self.records = {layer: Record() for layer in chosen}
        with torch.enable_grad(), self._hooked():
            with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32):
                logits_BTV = self.model(input_ids=tokens_BT.to(self.device), use_cache=False).logits
            flat_NV, targets_N = logits_BTV.float().flatten(0, 1), targets_BT.to(self.device).flatten()
            loss = torch.nn.functional.cross_entropy(flat_NV, targets_N, ignore_index=-1)
            outputs = [record.o_BTHD for record in self.records.values() if record.o_BTHD is not None]
            gradients = torch.autograd.grad(loss, outputs)
        seed = torch.zeros((), dtype=torch.int64, device=self.device)
        found = [
            self.records[layer].finished(layer, do, self.plans[layer], seed)
            for layer, do in zip(chosen, gradients, strict=True)
        ]
        self.records = {}
        return found

    def _attentions(self) -> list[Any]:
        if self.model.config.model_type == "gpt2":
            return [block.attn for block in self.model.transformer.h]
        return [block.self_attn for block in self.model.model.layers]

    @contextlib.contextmanager
    def _hooked(self) -> Iterator[None]:
        with contextlib.ExitStack() as undo:
            for layer, module in enumerate(self._attentions()):
                # The attention function is given the module, and finds the way back through it.
                module.capture_into = (self, layer)
                undo.callback(delattr, module, "capture_into")
                if layer in self.records:
                    hook = module.register_forward_pre_hook(_keep_input(self.records[layer]), with_kwargs=True)
                    undo.callback(hook.remove)
            yield


def _keep_input(record: Record) -> Any:
    def hook(module: torch.nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        record.x_BTC = (inputs[0] if inputs else named["hidden_states"]).detach()
        tables = named.get("position_embeddings")
        if tables is not None:
            record.rotary = (tables[0][0].detach(), tables[1][0].detach())

    return hook


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    """transformers' attention function: q, k, v [B, heads, T, D] -> O [B, T, H, D]."""
    owner, layer = module.capture_into
    window = settings.get("sliding_window")
    if attention_mask is not None or (window is not None and window < query.shape[2]):
        raise UserError(f"layer {layer} masks more than the future: only plain causal attention can be looked at")
    repeats = query.shape[1] // key.shape[1]
    # Rotated q and k come in the tables' dtype; kernels read all three in that of autocast.
    q, k, v = (x.transpose(1, 2).to(owner.dtype) for x in (query, key, value))
    k, v = (x.repeat_interleave(repeats, dim=2) for x in (k, v))
    scale = settings.get("scaling") or query.shape[-1] ** -0.5
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    o = dispatch.run(q, k, v, owner.plans[layer], rounding_seed=seed, scale=scale)
    if layer in owner.records:
        o = owner.records[layer].keep(q, k, v, o, scale)
    return o, None


def load(folder: Path, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> CausalModel:
    """The model of a local folder, weights in float32, to be run under autocast to ``dtype`` with attention as ``spec`` says.

    Raises:
        UserError: no folder, no transformers, no weights as safetensors, or a family whose attention is another.
    """
    try:
        from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError:
        raise UserError("--hf needs transformers, which is not installed: pip install transformers") from None
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: no config.json; expected a local folder of a Hugging Face causal language model")
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"{folder}: no weights; expected *.safetensors (pickles are not read: they can run code)")
    AttentionInterface.register(_NAME, _attend)
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # what is wrong with a folder is told below, in one line
    with reading(folder):
        settings = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if settings.model_type not in FAMILIES:
            raise invalid(f"{folder}: model_type", settings.model_type, FAMILIES)
        for name, ours in _SIZES.items():
            check_size(f"{folder}: {name}: model.{ours}", getattr(settings, name), 1)
        weights = 4 * settings.num_hidden_layers * settings.hidden_size**2
        check_memory(
            f"{folder}: hidden_size", settings.hidden_size, 4 * (weights + settings.vocab_size * settings.hidden_size)
        )
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=settings,
            attn_implementation=_NAME,
            dtype=torch.float32,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    model, loading = loaded
    # transformers fills what a folder lacks with random numbers.
    if lacking := sorted(loading["missing_keys"]):
        raise UserError(f"{folder}: the weights lack {lacking[0]} ({len(lacking)} missing)")
    check_finite(model.named_parameters(), folder)
    if settings.model_type == "gpt2" and (settings.add_cross_attention or settings.reorder_and_upcast_attn):
        raise UserError(f"{folder}: cross-attention and upcast attention of GPT-2 are not looked at")
    # The reference takes any head dim, on any device; what is assumed of the attention is its numerics.
    assumed = AttentionConfig(flash_backend="flash_reference", default=spec)
    plans = assumed.resolve(settings.num_hidden_layers, settings.num_attention_heads)
    # Eval mode: dropout would make the two passes of an autopsy differ.
    return CausalModel(model.eval().requires_grad_(False).to(device), plans, dtype, device)


def open_tokenizer(folder: Path) -> Any:
    """The tokenizer of a local folder. Raises ``UserError`` where there is none."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception:  # what it raises depends on what is wrong with which file
        tokenizer = None
    # transformers 5 makes one that knows nothing but its special tokens, of a folder that has none.
    if tokenizer is None or len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise UserError(f"{folder}: no tokenizer in it, to read a text with; --data DATASET takes tokens instead")
    return tokenizer


def tokenize(folder: Path, text: Path) -> Tensor:
    """Tokens [N] int64 of a UTF-8 text by the tokenizer of a local folder. Raises ``UserError`` where there is none."""
    tokenizer = open_tokenizer(folder)
    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{text} cannot be turned into tokens of {folder}: {str(error).splitlines()[0]}") from None
    return torch.tensor(tokenizer(content, add_special_tokens=False)["input_ids"], dtype=torch.int64)
