"""nanoGPT's ckpt.pt as the start of a run; what is none is refused in one line."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import Place, preset, tiny_model
from torch import Tensor

from errors import UserError
from files import read_json, sha256_file
from model import GPT
from training.weights import load_nanogpt

L, H, C, T, V = 2, 2, 16, 16, 256
SIZES = {"n_layer": L, "n_head": H, "n_embd": C, "block_size": T, "vocab_size": V}
Spoil = Callable[[dict[str, Any]], object]


def nanogpt(bias: bool = False, prefix: str = "") -> dict[str, Any]:
    """What nanoGPT's train.py saves, of random weights; ``lm_head`` shares ``wte``'s storage."""
    generator = torch.Generator().manual_seed(3)
    shapes = {"transformer.wte.weight": (V, C), "transformer.wpe.weight": (T, C), "transformer.ln_f.weight": (C,)}
    for layer in range(L):
        inner = {"ln_1": (C,), "attn.c_attn": (3 * C, C), "attn.c_proj": (C, C)}
        inner |= {"ln_2": (C,), "mlp.c_fc": (4 * C, C), "mlp.c_proj": (C, 4 * C)}
        shapes |= {f"transformer.h.{layer}.{name}.weight": shape for name, shape in inner.items()}
    if bias:
        linear = [name for name in shapes if ".wte." not in name and ".wpe." not in name]
        shapes |= {name.replace("weight", "bias"): shapes[name][:1] for name in linear}
    weights = {prefix + name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    weights[f"{prefix}lm_head.weight"] = weights[f"{prefix}transformer.wte.weight"]
    model_args = {**SIZES, "bias": bias, "dropout": 0.0}
    rest = {"optimizer": {"state": {}, "param_groups": []}, "iter_num": 7, "best_val_loss": torch.tensor(1.0)}
    return {"model": weights, "model_args": model_args, **rest, "config": {"dtype": "bfloat16"}}


def logits(weights: dict[str, Tensor], tokens_T: Tensor) -> Tensor:
    """[T, V] of one sequence by transformers' GPT-2 in float64: its names are nanoGPT's, but it multiplies by matrices that are turned."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": V, "n_positions": T, "n_embd": C, "n_layer": L, "n_head": H}
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, activation_function="gelu")).eval().double()
    weights = {name.removeprefix("_orig_mod."): weight for name, weight in weights.items()}
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            weight = weights.get(name, torch.zeros_like(parameter))
            parameter.copy_(weight.T if ".h." in name and weight.ndim == 2 else weight)
    return theirs(tokens_T[None]).logits[0]


def save(content: Any, folder: Path) -> Path:
    torch.save(content, folder / "ckpt.pt")
    return folder / "ckpt.pt"


def built(**changes: Any) -> GPT:
    return tiny_model(preset("standard", "fp32"), vocab_multiple=64, **changes)


@pytest.mark.parametrize(("bias", "prefix"), [(False, ""), (True, "_orig_mod.")])
def test_the_logits_are_those_of_the_file(bias: bool, prefix: str, tmp_path: Path) -> None:
    content = nanogpt(bias, prefix)
    content["model"][f"{prefix}transformer.h.0.attn.bias"] = torch.ones(1, 1, T, T).tril()  # of an older torch
    model = built(vocab_size=250, bias=bias)  # padded to 256
    load_nanogpt(model, save(content, tmp_path))
    del content["model"][f"{prefix}transformer.h.0.attn.bias"]
    tokens_T = torch.randint(V, (T,), generator=torch.Generator().manual_seed(5))
    expected = logits(content["model"], tokens_T)
    torch.testing.assert_close(model(tokens_T[None])[0][0].double(), expected, rtol=1e-4, atol=1e-4)


def setting(name: str, value: object) -> Spoil:
    return lambda content: content["model_args"].update({name: value})


def weight(name: str, value: object) -> Spoil:
    return lambda content: content["model"].update({name: value})


WPE = "transformer.wpe.weight"
SPOILT: list[tuple[Spoil, str]] = [
    (lambda content: content.pop("model"), "expected a dictionary with model and model_args"),
    (lambda content: content.update(config=Path("code")), "cannot be read: UnpicklingError"),
    (setting("n_layer", "2"), "model.n_layer = '2'"),
    (weight(WPE, torch.full((T, C), math.nan)), f"{WPE} is not finite"),
]


@pytest.mark.parametrize(("spoil", "message"), SPOILT)
def test_what_is_spoilt_is_refused(spoil: Spoil, message: str, tmp_path: Path) -> None:
    content = nanogpt()
    spoil(content)
    with pytest.raises(UserError, match=re.escape(message)):
        load_nanogpt(built(), save(content, tmp_path))


@pytest.mark.parametrize("name", ["qk_norm", "gated_attention"])
def test_a_stabilizer_with_parameters_of_its_own_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"^model\.{name} = True: expected False, as in "):
        load_nanogpt(built(**{name: True}), save(nanogpt(), tmp_path))


def test_a_run_starts_from_it(place: Place, tmp_path: Path) -> None:
    path = save(nanogpt(), tmp_path)
    run = place.train("from_nanogpt", {"run.steps": 1, "run.init_from": str(path)})
    place.train("from_nanogpt", {"run.steps": 2, "run.init_from": str(path), "run.resume": "yes"})
    # Which weights it began with is in the record of the session that read them.
    sessions = read_json(run / "config.json")["sessions"]
    assert [session.get("init_sha256") for session in sessions] == [sha256_file(path), None]
