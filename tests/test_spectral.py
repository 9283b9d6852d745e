"""What probes measure of weights and of attention: against a plain float64 computation, and on matrices whose values are known."""

import pytest
import torch
from attention_cases import causal_scores
from torch import Tensor

from attention.rounding import round_to
from attention.watching.measure import attention_statistics
from probes.spectral import attention_norms, product_norm, spectral_norm

# ---- what a probe measures


def planted(*singular_values: float) -> torch.Tensor:
    """A float32 matrix with the given leading singular values (zeros follow)."""
    generator, values = torch.Generator().manual_seed(0), torch.tensor(singular_values).double()
    left, right = (
        torch.linalg.qr(torch.randn(rows, len(values), dtype=torch.float64, generator=generator)).Q for rows in (24, 40)
    )
    return (left * values @ right.T).float()


@pytest.mark.parametrize("gap", [0.5, 0.9, 0.99])
def test_the_norm_is_the_largest_singular_value(gap: float) -> None:
    matrix = planted(3.0, 3.0 * gap, 2.0 * gap, 1.0 * gap)
    assert spectral_norm(matrix).item() == pytest.approx(3.0, rel=1e-5)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_no_square_overflows_or_vanishes(size: float) -> None:
    assert spectral_norm(size * planted(3.0, 1.0)).item() == pytest.approx(3.0 * size, rel=1e-5)


@pytest.mark.parametrize("size", [1e-12, 1e-9, 1e12])
def test_no_square_of_a_product_overflows_or_vanishes(size: float) -> None:
    left, right = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(7))
    norm = torch.linalg.matrix_norm(left.T @ right, ord=2).item()
    assert product_norm(size * left, size * right).item() == pytest.approx(size * size * norm, rel=1e-3, abs=0)
    assert product_norm(size * left, right / size).item() == pytest.approx(norm, rel=1e-3, abs=0)


def test_norms_are_those_of_the_matrices_and_of_the_heads_rows() -> None:
    w_q, w_k = torch.randn(2, 2, 16, 16, generator=torch.Generator().manual_seed(7))
    norms = attention_norms(w_q, w_k, 2)
    of_heads = w_q.view(2, 2, 8, 16).mT @ w_k.view(2, 2, 8, 16)
    for name, matrices in (("w_q_norm", w_q), ("w_k_norm", w_k), ("qk_head_norm", of_heads)):
        torch.testing.assert_close(norms[name], torch.linalg.matrix_norm(matrices, ord=2), rtol=1e-3, atol=0)


def test_only_the_layer_that_is_not_finite_is_nan_() -> None:
    w_q = torch.stack([torch.eye(8), torch.eye(8)])
    w_q[1, 0, 0] = torch.inf
    assert attention_norms(w_q, w_q.clone(), 2)["w_q_norm"].isfinite().tolist() == [True, False]


B, T, H, D = 2, 37, 3, 8
SCALE = D**-0.5


def operands(seed: int = 0, spread: float = 1.0) -> tuple[Tensor, Tensor]:
    return tuple(spread * torch.randn(2, B, T, H, D, generator=torch.Generator().manual_seed(seed)))


def scores(q: Tensor, k: Tensor, softcap: float = 0.0) -> Tensor:
    """S [B, H, T, T]."""
    return causal_scores(q.transpose(1, 2), k.transpose(1, 2), SCALE, softcap)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("chunk", [1, 16, 128])
def test_statistics_are_those_of_the_whole_matrix(chunk: int, softcap: float) -> None:
    q, k = operands(spread=2.0)
    measured = attention_statistics(q, k, scale=SCALE, softcap=softcap, chunk=chunk)
    s = scores(q.double(), k.double(), softcap)
    p = s.softmax(dim=-1)
    expected = {
        "max_logit": s.amax(dim=(0, 2, 3)),
        "min_row_max": s.amax(dim=-1).amin(dim=(0, 2)),
        "sink": p[:, :, 1:, 0].mean(dim=(0, 2)),
        "entropy": -(p * p.clamp(min=1e-300).log()).sum(dim=-1).mean(dim=(0, 2)),
        "top_1": p.amax(dim=-1).mean(dim=(0, 2)),
    }
    for name, value in expected.items():
        # Scores of at most 40 in float32 are off by 40 * D * 2^-24, and so, relatively, are probabilities.
        torch.testing.assert_close(measured[name].double(), value, rtol=40 * D * 2.0**-24, atol=1e-6)


def test_repeated_maxima_are_told_by_tolerance() -> None:
    # Row t sees the first t + 1 scores: alone; 2^-9 apart; less than 1e-3 apart; exactly tied.
    k = torch.tensor([1.0, 1.0 + 2.0**-9, 1.0 + 2.0**-9 + 0.0009, 1.0 + 2.0**-9 + 0.0009]).view(1, 4, 1, 1)
    ties = attention_statistics(torch.ones_like(k), k, scale=1.0)["ties"]
    torch.testing.assert_close(ties, torch.tensor([2 / 4]))


def test_rounded_scores_are_counted_as_by_hand() -> None:
    q, k = operands(seed=3)
    s = round_to(scores(q, k).contiguous(), "m2")
    expected = ((s >= s.amax(dim=-1, keepdim=True) - 1e-3).sum(dim=-1) > 1).float().mean(dim=(0, 2))
    measured, exact = (attention_statistics(q, k, scale=SCALE, scores_format=f, chunk=T) for f in ("m2", "fp32"))
    assert torch.equal(measured["ties"], expected)
    assert torch.equal(measured["entropy"], exact["entropy"])
    assert (expected > 0).all()
