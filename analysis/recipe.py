"""The recipe of a run, all that decides it but attention, seed and data: the base experiment's, and in what another differs from it.

Settings have their dotted names of config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

BASE: Mapping[str, Any] = {
    **{"optim.optimizer": "adamw", "optim.lr": 2e-3, "optim.warmup_steps": 1000, "data.global_batch": 32},
    **{"optim.min_lr": 1e-5, "optim.decay_steps": 600_000, "optim.schedule": "cosine", "optim.weight_decay": 0.0},
    **{"optim.beta1": 0.9, "optim.beta2": 0.95, "optim.eps": 1e-8, "optim.grad_clip": 1.0, "optim.muon_momentum": 0.95},
    **{"data.sequence_length": 1024, "precision.dtype": "bfloat16", "precision.tf32": False, "run.init_from": ""},
    **{"model.n_layer": 12, "model.n_head": 12, "model.n_embd": 768, "model.block_size": 1024},
    **{"model.vocab_size": 50257, "model.vocab_multiple": 128, "model.bias": False, "model.activation": "gelu"},
    **{"model.tie_embeddings": True, "model.qk_norm": False, "model.attention_softcap": 0.0},
    **{"model.logit_softcap": 0.0, "model.gated_attention": False, "model.z_loss": 0.0, "model.qk_clip_tau": 0.0},
}
"""configs/fast_failure.py as the published runs have it, which a test holds it to. Written out and not counted from the evidence: the
documents name that file, and what most runs share changes with the runs."""
STEPS = 13_000
"""Its length."""
COMPUTED_OTHERWISE = ("optim.fused", "optim.newton_schulz")
"""Settings of model and optimiser that are no part of a recipe: they change the last bits of an update, as those of ``speed`` do."""
COLUMNS = ("optim.optimizer", "optim.lr", "optim.warmup_steps", "data.global_batch")
"""Settings that a table of recipes shows of each."""

_WORDS = {
    "optim.optimizer": "{}",
    "optim.lr": "lr {}",
    "optim.warmup_steps": "warm-up {}",
    "optim.weight_decay": "weight decay {}",
    "data.global_batch": "{} sequences",
    "model.n_layer": "{} layers",
    "model.qk_norm": "QK-norm",
    "model.attention_softcap": "soft-cap {}",
    "model.gated_attention": "gated attention",
    "model.qk_clip_tau": "QK-clip {}",
}
"""Of a value that is not the base's; a switch that the base has off needs no value."""
_SIZE = ("model.n_layer", "model.n_head", "model.n_embd")
_MODELS = {(24, 16, 1024): "GPT-2 medium", (36, 20, 1280): "GPT-2 large"}
"""Of model.MODEL_PRESETS, by ``_SIZE``: told by name, as three settings would be read one by one."""
_NAMES = {"adamw": "AdamW", "muon": "Muon"}

Changes = tuple[tuple[str, Any], ...]
"""(setting, value) of all in which a recipe differs from ``BASE``, in its order: none for the base recipe."""


def changes(setting: Callable[[str], Any]) -> Changes:
    """In what a run differs from ``BASE``; ``setting``: its value by name, None where its record has none.

    What a record lacks did not exist when the run was made, and a new setting begins as what was done before: it is no change.
    """
    found = {name: setting(name) for name in BASE}
    return tuple((name, value) for name, value in found.items() if value is not None and value != BASE[name])


def words(found: Changes) -> str:
    """Changes in words, ``lr 1e-3, QK-norm``, a model of a known size by its name; empty for the base recipe."""
    size = tuple(dict(found).get(name, BASE[name]) for name in _SIZE)
    model = [_MODELS[size]] if size in _MODELS else []
    rest = [(name, value) for name, value in found if not (model and name in _SIZE)]
    return ", ".join([*model, *(_WORDS.get(name, f"{name} {{}}").format(shown(value)) for name, value in rest)])


def shown(value: Any) -> str:
    """A value of a setting: 1.5e-3, 1,000, AdamW."""
    if isinstance(value, float) and 0 < abs(value) < 0.01:
        mantissa, exponent = f"{value:e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return _NAMES.get(value, str(value))
