"""All model classes of transformers: each gives what "eager" gives and calls our attention, or is refused in our words.

A class is made tiny, with random weights, and run on tokens with padding, pixels or sounds. Where no tiny one can be made or run, its
default is made without memory, and transformers' own word on it (a search of its source) is held against ours.
"""

import contextlib
import copy
import importlib
import inspect
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import attention.huggingface as huggingface

transformers = pytest.importorskip("transformers", minversion="5.0")

OURS = "low_precision_attention"
SLICES = 24
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")
SIZES: dict[str, int] = {
    **dict.fromkeys((*LAYERS, "num_encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim"), 32),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "num_key_value_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff"), 48),
    **dict.fromkeys(("moe_intermediate_size", "projection_dim"), 16),
    **dict.fromkeys(("head_dim", "d_kv", "patch_size"), 8),
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "image_size": 32,
}
FEW = (*LAYERS, "num_encoder_layers", "num_decoder_layers", "vocab_size")
# Which sizes shrink, in the order of trying: configs hang together in many ways.
VARIANTS = (tuple(SIZES), tuple(set(SIZES) - {"head_dim", "patch_size", "image_size", "num_key_value_heads"}), FEW)
LARGEST = 50_000_000
ROOT = Path(transformers.__file__).parent / "models"
FOLDERS = sorted(path.name for path in ROOT.iterdir() if list(path.glob("modeling_*.py")))


@contextlib.contextmanager
def counted() -> Iterator[list[Any]]:
    """Calls of our function meanwhile."""
    calls, real = list[Any](), huggingface.scaled_dot_product_attention
    huggingface.scaled_dot_product_attention = lambda *a, **k: calls.append(a[0].shape) or real(*a, **k)
    try:
        yield calls
    finally:
        huggingface.scaled_dot_product_attention = real


def classes(folder: str) -> list[Any]:
    found = []
    for path in sorted((ROOT / folder).glob("modeling_*.py")):
        try:
            module = importlib.import_module(f"transformers.models.{folder}.{path.stem}")
        except ImportError:  # of a library that is not here
            continue
        for name, one in sorted(vars(module).items()):
            mine = isinstance(one, type) and issubclass(one, transformers.PreTrainedModel)
            if mine and one.__module__ == module.__name__ and not name.endswith("PreTrainedModel"):
                found.append(one)
    return found


def shrink(config: Any, names: tuple[str, ...]) -> Any:
    values = dict(vars(config))
    changes: dict[str, Any] = {name: SIZES[name] for name in names if type(values.get(name)) is int}
    changes |= {name: 0.0 for name, x in values.items() if "drop" in name and isinstance(x, float)}
    if "vocab_size" in names:
        large = {name for name, x in values.items() if name.endswith("token_id") and isinstance(x, int) and x >= 100}
        changes |= {name: 0 if name == "pad_token_id" else None for name in large}
    if isinstance(values.get("layer_types"), list | tuple):
        changes["layer_types"] = [values["layer_types"][0], values["layer_types"][-1]]
    for name, value in changes.items():
        with contextlib.suppress(Exception):
            setattr(config, name, value)
    for part in getattr(config, "sub_configs", ()):
        if getattr(config, part, None) is not None:
            shrink(getattr(config, part), names)
    return config


def make(one: Any, config: Any, attention: str) -> Any:
    torch.manual_seed(0)
    model = one._from_config(copy.deepcopy(config), attn_implementation=attention).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 and parameter.is_floating_point():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
    return model


def inputs(model: Any) -> dict[str, Tensor]:
    takes, generator = inspect.signature(model.forward).parameters, torch.Generator().manual_seed(1)
    config = model.config
    parts = (config, getattr(config, "vision_config", None), getattr(config, "text_config", None))

    def size(name: str, default: int) -> int:
        return next((x for x in (getattr(part, name, None) for part in parts) if isinstance(x, int)), default)

    def noise(*shape: int) -> Tensor:
        return torch.randn(2, *shape, generator=generator)

    tokens = torch.randint(3, max(5, min(60, size("vocab_size", 60))), (2, 12), generator=generator)
    main = model.main_input_name
    given: dict[str, Tensor] = {}
    if "input_ids" in takes and main in ("input_ids", "pixel_values"):
        given["input_ids"] = tokens
        if "attention_mask" in takes:
            given["attention_mask"] = torch.ones_like(tokens)
            given["attention_mask"][0, 8:] = 0
    if "decoder_input_ids" in takes:
        given["decoder_input_ids"] = tokens[:, :7]
    needed = "pixel_values" in takes and takes["pixel_values"].default is inspect.Parameter.empty
    if main == "pixel_values" or needed:
        given["pixel_values"] = noise(size("num_channels", 3), *[size("image_size", 32)] * 2)
    if main == "input_values":
        given["input_values"] = noise(4000)
    if main == "input_features":
        given["input_features"] = noise(size("num_mel_bins", 80), 2 * size("max_source_positions", 50))
    if not given:
        given["inputs_embeds" if "inputs_embeds" in takes else "hidden_states"] = noise(12, size("hidden_size", 32))
    return given


def run(model: Any, given: dict[str, Tensor]) -> Tensor:
    """Its first output, at real tokens."""
    with torch.no_grad():
        output = next(x for x in tree_leaves(model(**given)) if isinstance(x, Tensor)).float()
    mask = given.get("attention_mask")
    return output[mask.bool()] if mask is not None and output.shape[:2] == mask.shape else output


def tiny(one: Any) -> tuple[Any, dict[str, Tensor], Tensor] | None:
    """Config, inputs and the output with "eager" attention; None where this cannot be had."""
    for names in VARIANTS:
        try:
            config = shrink(one.config_class(), names)
            with torch.device("meta"):
                weights = sum(x.numel() for x in one(copy.deepcopy(config)).parameters())
            if weights <= LARGEST:
                model = make(one, config, "eager")
                given = inputs(model)
                expected = run(model, given)
                if expected.isfinite().all() and expected.norm() > 0:
                    return config, given, expected
        except Exception:
            continue
    return None


def named_attention(model: Any) -> list[str]:
    names = {type(module) for module in model.modules() if not type(module).__module__.startswith("torch.")}
    return sorted(one.__name__ for one in names if "attention" in one.__name__.lower())


def compared(one: Any, config: Any, given: dict[str, Tensor], expected: Tensor) -> str:
    """ "same", "refused", or what is wrong."""
    with counted() as calls:
        try:
            model = make(one, config, OURS)
            found = run(model, given)
        except ValueError as error:
            return "refused" if str(error).startswith("low-precision attention: ") else f"ValueError: {error}"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    if found.shape != expected.shape or not (found - expected).norm() <= 1e-3 * expected.norm():
        return f"another output, {len(calls)} calls"
    return "same" if calls or not named_attention(model) else f"no call, but {named_attention(model)}"


def looked_at(one: Any) -> str:
    """Where it cannot be run: "refused", "made", "not made", or what is wrong."""
    try:
        config = shrink(one.config_class(), FEW[:-1])
        with torch.device("meta"):
            model = one._from_config(config, attn_implementation=OURS)
    except ValueError as error:
        return "refused" if str(error).startswith("low-precision attention: ") else "not made"
    except Exception:
        return "not made"
    mine = [name for name in named_attention(model) if hasattr(inspect.getmodule(one), name)]
    return (
        f"transformers says that it cannot have it: {mine}"
        if mine and not one._can_set_attn_implementation()
        else "made"
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(SLICES))
def test_each_model_class_gives_what_eager_gives_or_is_refused(part: int, caplog: pytest.LogCaptureFixture) -> None:
    assert huggingface.register() == OURS
    caplog.set_level(logging.CRITICAL)
    transformers.logging.set_verbosity_error()
    results = {}
    for folder in FOLDERS[part::SLICES]:
        for one in classes(folder):
            base = one.__name__.endswith(("Model", "ForCausalLM", "ForConditionalGeneration"))
            case = tiny(one) if base else None
            results[f"{folder}.{one.__name__}"] = compared(one, *case) if case else looked_at(one)
    counts = {value: list(results.values()).count(value) for value in ("same", "refused", "made", "not made")}
    print(counts)
    wrong = {name: value for name, value in results.items() if value not in counts}
    assert not wrong
    assert counts["same"] >= 5
    assert counts["not made"] < len(results) / 3
