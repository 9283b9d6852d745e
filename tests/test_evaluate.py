"""training/evaluate.py: the mean is over targets, and the model is left as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from attention import AttentionConfig
from model import GPT, ModelConfig, initialize
from training.evaluate import evaluate

CPU = torch.device("cpu")
SHAPE = ModelConfig(n_layer=2, n_head=2, n_embd=16, block_size=16, vocab_size=64, vocab_multiple=1)


def model_of() -> GPT:
    """With weights of 1, so that losses of batches differ."""
    model = GPT(SHAPE, AttentionConfig(flash_backend="flash_reference").resolve(SHAPE.n_layer, SHAPE.n_head))
    initialize(model, 0)
    with torch.no_grad():
        model.transformer.wte.weight *= 50
    return model


class Batches:
    """Of different sizes, and with different numbers of targets that count."""

    def validation(self) -> Iterator[tuple[Tensor, Tensor]]:
        for size in (1, 2, 3):
            tokens, targets = torch.randint(64, (2, size, 16), generator=torch.Generator().manual_seed(size))
            yield tokens, targets.index_fill(1, torch.arange(5 * size - 5), -1)


def test_the_mean_is_over_targets_not_over_batches() -> None:
    model = model_of().eval()
    pairs = [(model(tokens)[0].double().flatten(0, 1), targets.flatten()) for tokens, targets in Batches().validation()]
    logits, targets = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    expected = functional.cross_entropy(logits, targets, ignore_index=-1).item()
    # A model's loss is the float32 mean of at most 48 targets.
    found = evaluate(model, Batches(), CPU, contextlib.nullcontext())
    assert found == pytest.approx(expected, rel=48 * 2**-24)


def test_modes_are_eval_and_put_back_module_by_module() -> None:
    model, seen = model_of().train(), []
    model.transformer.ln_f.eval()
    model.register_forward_pre_hook(lambda model, _: seen.append(model.training))
    evaluate(model, Batches(), CPU, contextlib.nullcontext())
    assert not any(seen)
    assert (model.training, model.transformer.wte.training, model.transformer.ln_f.training) == (True, True, False)
