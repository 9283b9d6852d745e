"""training/evaluate.py: one number, however the fixed batches are dealt out, and a model left as it was."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.multiprocessing
from torch import Tensor, nn

from training.evaluate import evaluate

VOCABULARY, T = 11, 8
CPU = torch.device("cpu")


class TinyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, VOCABULARY)
        self.dropout = nn.Dropout(0.5)
        torch.manual_seed(0)
        nn.init.normal_(self.embedding.weight)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor, rounding_seed: Tensor | None) -> tuple[Tensor, Tensor]:
        logits_BTV = self.dropout(self.embedding(tokens_BT))
        return logits_BTV, nn.functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), ignore_index=-1)


class FixedBatches:
    """Micro-batches of different sizes; number i belongs to rank i % world_size."""

    def __init__(self, rank: int = 0, world_size: int = 1, count: int = 5):
        self.rank, self.world_size, self.count = rank, world_size, count

    def validation(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in range(self.rank, self.count, self.world_size):
            generator = torch.Generator().manual_seed(index)
            tokens = torch.randint(VOCABULARY, (1 + index % 3, T + 1), generator=generator)
            targets = tokens[:, 1:].clone()
            targets[:, : index % 4] = -1
            yield tokens[:, :-1], targets


def expected_loss() -> float:
    """Mean over all targets that count, in float64, of all batches at once."""
    weight = TinyModel().embedding.weight.detach().double()
    batches = list(FixedBatches().validation())
    tokens, targets = (torch.cat([batch[i].flatten() for batch in batches]) for i in range(2))
    return nn.functional.cross_entropy(weight[tokens], targets, ignore_index=-1).item()


def value(model: nn.Module, batches: FixedBatches) -> float:
    return evaluate(model, batches, CPU, contextlib.nullcontext(), None)


def test_the_mean_is_over_targets_not_over_batches() -> None:
    # In float64 throughout: fewer than 100 targets, one rounding for each addition at most.
    assert value(TinyModel().double(), FixedBatches()) == pytest.approx(expected_loss(), rel=100 * 2**-53)


def test_modes_are_put_back_module_by_module() -> None:
    model = TinyModel().train()
    model.embedding.eval()
    value(model, FixedBatches())
    assert (model.training, model.embedding.training, model.dropout.training) == (True, False, True)
