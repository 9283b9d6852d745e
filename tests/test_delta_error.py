"""What ``capture`` takes of a model; delta in low and high precision against FP64 and the backward pass; the low-rank factors."""

import contextlib
import dataclasses
from typing import Any

import pytest
import torch
from attention_cases import causal_scores
from sites import CASES, DECLARED
from tiny_runs import tiny_model
from torch import Tensor

import attention
from attention import AttentionConfig, AttentionSpec
from attention.mask import NO_MASK
from attention.numerics import DELTA
from attention.reference.flash import row_deltas
from probes.capture import LayerCapture, capture
from probes.delta_error import delta_errors, effective_numerics, output_errors, row_residuals, summarize
from probes.low_rank import coherence, cross_coherence, weighted_keys

PAPER = AttentionSpec(numerics="rounded_forward")


def random_layer(*, spec: AttentionSpec | None = None, softcap: float = 0.0) -> LayerCapture:
    """A capture made by hand: independent normal q, k, v and dO [2, 40, 3, 16] in BF16, and X; O by ``attention.run``."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(2, 40, 3, 16, generator=generator).bfloat16() for _ in range(4))
    (plan,) = AttentionConfig(flash_backend="flash_reference", default=spec or AttentionSpec()).resolve(1, 3)
    seed = torch.tensor(7)
    o = attention.run(q, k, v, plan, rounding_seed=seed, softcap=softcap)
    return LayerCapture(
        layer=0,
        x_BTC=torch.randn(2, 40, 48, generator=torch.Generator().manual_seed(1)),
        **{"q_BTHD": q, "k_BTHD": k, "v_BTHD": v, "o_BTHD": o, "do_BTHD": do.to(o.dtype)},
        **{"scale": 1 / 4, "softcap": softcap, "plan": plan, "rounding_seed": seed},
    )


@pytest.mark.parametrize(
    "spec",
    [PAPER, *(AttentionSpec(sites=case.sites(changed=True)) for case in CASES if DELTA in DECLARED[case.site].acts_in)],
    ids=lambda spec: spec.numerics if spec == PAPER else " ".join(spec.sites),
)
def test_low_is_what_the_backward_pass_computes(spec: AttentionSpec) -> None:
    layer = random_layer(spec=spec)
    operands = (layer.q_BTHD, layer.k_BTHD, layer.v_BTHD, layer.do_BTHD)
    seed = layer.seed(layer.plan.groups[0])
    expected = row_deltas(*operands, spec.resolve(), seed=seed, scale=layer.scale)
    assert torch.equal(delta_errors(layer).low_BHT, expected)


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("numerics", ["hardware", "rounded_forward"])
def test_high_is_the_gradient_of_a_scale_of_o(numerics: str, softcap: float) -> None:
    """delta[T] = d/dc sum_d dO[T, d] (c O[T, d]), with plain softmax attention in FP64: off by FP32 noise, but for roundings of S and l."""
    layer = random_layer(spec=AttentionSpec(numerics=numerics), softcap=softcap)
    q, k, v, do = (x.double().transpose(1, 2) for x in (layer.q_BTHD, layer.k_BTHD, layer.v_BTHD, layer.do_BTHD))
    exact = (do * (causal_scores(q, k, layer.scale, softcap).softmax(dim=-1) @ v)).sum(dim=-1)
    error = (delta_errors(layer).high_BHT - exact).abs().max() / exact.abs().max()
    assert error > 1e-4 if numerics == "rounded_forward" else error < 1e-6


TILES = "tile_q=16 tile_k=16"


@pytest.mark.parametrize(
    ("preset", "sites"),
    [
        *(("fp8", f"tile_k=0 {site}") for site in ("", "values_in_dp=fp32", "delta_sum=bf16")),
        *(("flash", f"{TILES} {site}") for site in ("values_in_dp=e4m3_row", "row_sum_floor=0.3")),
        *(("flash", f"{TILES} {site}=bf16") for site in ("tile_sum", "probabilities_in_sum")),
    ],
)
def test_the_error_of_delta_from_p_is_that_of_its_sum_whatever_the_formats_of_p_and_dp(preset: str, sites: str) -> None:
    """What rounds P or the operands of dP sets delta apart from no row of dS."""
    spec = AttentionSpec(preset=preset, sites=("delta=rowsum_p_dp", *sites.split()))
    found = delta_errors(random_layer(spec=spec))
    error = found.error_BHT.norm() / found.high_BHT.norm()
    assert 1e-4 < error < 4e-3 if "delta_sum=bf16" in sites else error < 1e-6


def test_what_q_k_and_v_are_rounded_to_at_random_is_no_error_of_delta() -> None:
    """The probe draws as the run did."""
    sites = "values=e4m3_row_stochastic queries_and_keys=e4m3_row_stochastic output=fp32 probabilities=fp32"
    found = delta_errors(random_layer(spec=AttentionSpec(sites=tuple(sites.split()))))
    assert found.error_BHT.norm() < 1e-6 * found.high_BHT.norm()


@pytest.mark.parametrize("preset", ["flash_delta_from_p", "flash_fp32_pv_o"])
def test_an_error_of_o_that_delta_does_not_see(preset: str) -> None:
    """The O passed on is rounded, delta is not: the error of delta is FP32 noise, that of O is there all the same."""
    layer = random_layer(spec=AttentionSpec(preset=preset))
    size = delta_errors(layer).high_BHT.abs().max()
    assert delta_errors(layer).error_BHT.abs().max() < 1e-5 * size
    if preset != "flash_fp32_pv_o":
        assert output_errors(layer).abs().max() > 1e-3


def test_the_summary_of_known_numbers() -> None:
    error = torch.tensor([[[1.0, 3.0, 5.0, 7.0, -100.0]], [[2.0, 2.0, 0.0, 0.0, 0.0]]])  # [2, 1, 5], units of 2
    summary = summarize(error, unit=2)
    means = torch.tensor([2.0, 6.0, 2.0, 0.0], dtype=torch.float64)  # the fifth token is in no unit
    assert summary.units == 4
    assert summary.mean_H.item() == -8
    assert summary.standard_error_H.item() == pytest.approx(means.std().item() / 2)
    assert summary.positive_H.item() == pytest.approx(6 / 7)


def test_the_row_residual_is_what_dq_has_of_it() -> None:
    """dQ with r kept, less dQ of corrected rows, is scale * r * P K; after the correction hardly any r is left."""
    exact = ("output=m3", "score_gradients=fp32", "probabilities=fp32")
    kept, corrected = (
        random_layer(spec=AttentionSpec(sites=(*exact, f"row_residual={name}"))) for name in ("kept", "corrected_rows")
    )
    r_BHT, difference = row_residuals(kept), _dq(kept) - _dq(corrected)
    torch.testing.assert_close(kept.scale * r_BHT[..., None] * weighted_keys(kept), difference, rtol=1e-3, atol=1e-5)
    assert row_residuals(corrected).abs().max() < 1e-4 * r_BHT.abs().max()


@pytest.mark.parametrize("size", [1, 64])
def test_the_row_residual_of_the_math_kernel_is_its_own(size: int) -> None:
    """With a last feature of 1 in K and 0 in Q that of dQ / scale is rowsum(dS), in FP32 whatever the dtype and the logits."""
    layer = random_layer(spec=AttentionSpec(preset="sdpa_math"))
    q, k = size * layer.q_BTHD, layer.k_BTHD.clone()
    q[..., -1], k[..., -1] = 0, 1
    q.requires_grad_()
    o = attention.run(q, k, layer.v_BTHD, layer.plan, rounding_seed=layer.rounding_seed)
    dq = torch.autograd.grad(o, q, layer.do_BTHD)[0].float()
    found = row_residuals(dataclasses.replace(layer, q_BTHD=q.detach(), k_BTHD=k))
    assert found.norm().item() == pytest.approx(dq[..., -1].norm().item() / layer.scale, rel=0.3)


def _dq(layer: LayerCapture) -> Tensor:
    """[B, H, T, D] float32."""
    q, k, v, do = (x.float() for x in (layer.q_BTHD, layer.k_BTHD, layer.v_BTHD, layer.do_BTHD))
    (group,) = layer.plan.groups
    n = effective_numerics(group)
    q.requires_grad_()
    operator = torch.ops.attention.flash_reference_forward
    o, *_ = operator(q, k, v, layer.rounding_seed, n.key(), layer.scale, True, layer.softcap, None, *NO_MASK)
    return torch.autograd.grad(o, q, do)[0].transpose(1, 2)


def outer(pk: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The outer products of a sequence, scaled to norm 1, [H, T, D * C]."""
    products = torch.einsum("htd,tc->htdc", pk[0], x[0]).flatten(2)
    return torch.nn.functional.normalize(products, dim=-1)


def test_coherence_is_that_of_the_outer_products() -> None:
    generator = torch.Generator().manual_seed(0)
    pk, x = torch.randn(1, 2, 6, 4, generator=generator), torch.randn(1, 6, 5, generator=generator)
    expected = outer(pk, x) @ outer(pk, x).mT
    off_diagonal = (expected.sum(dim=(-2, -1)) - 6) / 30
    torch.testing.assert_close(coherence(pk, x).within_H, off_diagonal)
    other_pk, other_x = torch.randn(1, 2, 3, 4, generator=generator), torch.randn(1, 3, 5, generator=generator)
    across = (outer(pk, x) @ outer(other_pk, other_x).mT).mean(dim=(-2, -1))
    torch.testing.assert_close(cross_coherence(coherence(pk, x), coherence(other_pk, other_x)), across)


@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_weighted_keys_are_those_of_fp64(softcap: float) -> None:
    """Up to L in FP32, and probabilities in FP32."""
    layer = random_layer(softcap=softcap)
    q, k = (x.double().transpose(1, 2) for x in (layer.q_BTHD, layer.k_BTHD))
    p = (s := causal_scores(q, k, layer.scale, softcap)).softmax(dim=-1)
    slope = 1 - (s.tril() / softcap).square() if softcap else 1
    torch.testing.assert_close(weighted_keys(layer).double(), (p * slope) @ k, rtol=1e-4, atol=1e-5)


B, T = 2, 24
SIZES: dict[str, Any] = {"n_layer": 3, "n_head": 4, "n_embd": 32, "block_size": 32, "vocab_size": 64}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "qk_norm": {"qk_norm": True},
    "gated": {"gated_attention": True},
    "softcap": {"attention_softcap": 5.0},
    "llama": {"position": "rotary", "norm": "rms", "activation": "swiglu"},
}


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 64, (B, T + 1), generator=torch.Generator().manual_seed(5))
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_of_the_weights_follow_from_what_was_captured(variant: str) -> None:
    """dO through attention and ``c_attn`` gives the gradient of W_v that ``backward`` gives: dO is training's own."""
    model = tiny_model(seed=3, **SIZES, **VARIANTS[variant])
    model.train()
    layers = capture(model, *batch(), autocast=contextlib.nullcontext())
    model(*batch())[1].backward()
    for layer, module in zip(layers, model.attentions(), strict=True):
        q, k, v = (x.clone().requires_grad_() for x in (layer.q_BTHD, layer.k_BTHD, layer.v_BTHD))
        o = attention.run(q, k, v, layer.plan, rounding_seed=torch.tensor(0), softcap=layer.softcap)
        (dv,) = torch.autograd.grad(o, v, layer.do_BTHD)
        expected = module.c_attn.weight.grad[2 * 32 :]
        torch.testing.assert_close(dv.flatten(2).flatten(0, 1).T @ layer.x_BTC.flatten(0, 1), expected)
