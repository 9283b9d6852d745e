"""The site ``exponent``: what folding the scale into exp(S - m) does to rows whose weight lies on one key, where O should be that key's V.

q and k are such that S' = Q K^T is exact in FP32 in any order of summation, so that kernels and reference see the same last bits. The
kernels' tests on the CPU run in a pytest of their own (``kernel_tests``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch
from attention_cases import Problem, make, relative_errors, run
from kernel_tests import INTERPRETED, pass_in_the_interpreter
from torch import Tensor

import attention
from attention import AttentionConfig, AttentionSpec
from attention.exponent import Folded, Subtracted, exponent_of
from attention.flash_reference import row_deltas
from attention.tiles import make_problem
from errors import UserError

THRESHOLD = 2**16 * math.log(2)
"""45,426: from here on m log2(e) has a unit of 2^-7 and more, and P_bar of the maximum may be 2^-9 below 1, half a unit of BF16."""
WHOLE = slice(0, 64)
LOGITS = (1e3, 2e4, 2e5, 1e6)
DEVICES = ["cpu"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)]


@dataclass
class OneHot:
    """Rows [B, T, H, D] that see themselves alone; ``scale`` brings their logits to [low, high]."""

    p: Problem
    scale: float
    low: float
    high: float

    def run(self, *sites: str, backend: str = "flash_reference", preset: str = "flash") -> tuple[Tensor, ...]:
        """O, dQ, dK, dV."""
        spec = AttentionSpec(preset=preset, sites=sites, backend=backend)
        plan = AttentionConfig(default=spec).resolve(1, self.p.q.shape[2])[0]
        q, k, v = (x.detach().clone().requires_grad_() for x in (self.p.q, self.p.k, self.p.v))
        seed = torch.tensor(0, device=q.device)
        o = attention.run(q, k, v, plan, rounding_seed=seed, scale=self.scale)
        return o.detach(), *torch.autograd.grad(o, (q, k, v), self.p.do)

    def delta_errors(self, *sites: str) -> Tensor:
        """Error of delta along its sign, over the root mean square of delta, one a row; float64."""
        numerics = AttentionSpec(sites=sites).resolve()
        low_BHT = row_deltas(
            self.p.q, self.p.k, self.p.v, self.p.do, numerics, seed=torch.tensor(0), scale=self.scale
        ).double()
        exact_BHT = (self.p.do.double() * self.p.v.double()).sum(dim=-1).transpose(1, 2)
        return ((low_BHT - exact_BHT) * exact_BHT.sign() / exact_BHT.square().mean().sqrt()).flatten()


def one_hot(
    *, low: float = 0.0, high: float = 0.0, shape: tuple[int, ...] = (64, 64, 2, 64), device: str = "cpu"
) -> OneHot:
    """Rows whose smallest logit is ``low`` or whose largest is ``high``; the others are within a factor of about 2 (D = 64)."""
    generator = torch.Generator().manual_seed(0)
    sign = torch.randint(0, 2, shape, generator=generator) * 2.0 - 1
    size = torch.randint(128, 256, shape, generator=generator) * 2.0 ** torch.randint(0, 4, shape, generator=generator)
    v, do = (torch.randn(shape, generator=generator) for _ in range(2))
    products = size.sum(dim=-1)  # up to 18 bits
    scale = low / products.min().item() if low else high / products.max().item()
    p = Problem(*(x.to(device, torch.bfloat16) for x in (sign * size, sign, v, do)))
    return OneHot(p, scale, scale * products.min().item(), scale * products.max().item())


def exponents(x: OneHot, *sites: str) -> tuple[Tensor, Subtracted | Folded]:
    """S of all rows in the unit of the form, and the form."""
    numerics = AttentionSpec(sites=sites).resolve()
    form = exponent_of(make_problem(x.p.q, x.p.k, x.p.v, numerics.key(), x.scale, True, 0.0))
    return form.scores(WHOLE, WHOLE), form


@pytest.mark.skipif(INTERPRETED, reason="no kernel in it")
class TestReference:
    def test_rows_see_themselves_alone(self) -> None:
        x = one_hot(low=1e3)
        assert x.high < 2.2 * x.low
        assert torch.equal(x.run("exponent=subtracted")[0], x.p.v)

    def test_folded_the_error_starts_where_the_unit_of_m_passes_that_of_p_bar(self) -> None:
        assert torch.equal(one_hot(high=THRESHOLD - 1).run()[0], one_hot(high=THRESHOLD - 1).p.v)
        above = one_hot(low=THRESHOLD + 1)
        assert (above.run()[0] != above.p.v).any(dim=-1).double().mean() > 0.1

    @pytest.mark.parametrize("logit", [1e3, 2e4])
    def test_folded_delta_has_no_error_below(self, logit: float) -> None:
        assert one_hot(high=logit).delta_errors().abs().max() < 1e-6

    def test_folded_delta_has_an_error_of_a_bfloat16_rounding_at_200_000(self) -> None:
        assert 1.5e-3 < one_hot(high=2e5).delta_errors().square().mean().sqrt() < 2.5e-3

    def test_folded_the_error_leans_towards_a_smaller_delta(self) -> None:
        """n = 8,192 rows of logits from 45,427 to twice that: P_bar just above 1 rounds to 1, but l does not."""
        errors = one_hot(low=THRESHOLD + 1).delta_errors()
        assert len(errors) == 8192
        standard_error = errors.std() / len(errors) ** 0.5
        assert errors.mean() < -10 * standard_error

    @pytest.mark.parametrize("logit", LOGITS)
    @pytest.mark.parametrize("sites", [("exponent=subtracted",), ("probabilities=fp32",)])
    def test_subtracted_or_with_p_bar_in_fp32_o_is_v(self, sites: tuple[str, ...], logit: float) -> None:
        x = one_hot(high=logit)
        assert torch.equal(x.run(*sites)[0], x.p.v)
        assert x.delta_errors(*sites).abs().max() < 1e-6

    @pytest.mark.parametrize("logit", LOGITS)
    def test_subtracted_p_bar_of_the_maximum_is_one(self, logit: float) -> None:
        s, form = exponents(one_hot(high=logit, shape=(8, 64, 2, 64)), "exponent=subtracted")
        assert torch.all(form.exp(s, form.row_max(s)).amax(dim=-1) == 1)

    @pytest.mark.parametrize("logit", LOGITS)
    def test_folded_p_bar_of_the_maximum_is_off_by_up_to_half_a_unit_of_m(self, logit: float) -> None:
        x = one_hot(high=logit, shape=(8, 64, 2, 64))
        s, form = exponents(x)
        off = form.exp(s, form.row_max(s)).amax(dim=-1).double().log2().abs().max().item()
        half = 2.0 ** (math.floor(math.log2(x.high / math.log(2))) - 24)
        assert half / 2 < off < half * 1.01 + 2.0**-23

    def test_the_multiply_add_rounds_once(self) -> None:
        generator = torch.Generator().manual_seed(1)
        s = torch.randn(500, generator=generator) * 1e6
        form = Folded(make_problem(*torch.ones(3, 1, 1, 1, 1), AttentionSpec().resolve().key(), 0.0883, True, 0.0))
        m = (s * form.c) * (1 + torch.randint(-2, 3, (500,), generator=generator) * 2.0**-20)
        found = form.exp(s, m).double().log2()
        for one_s, one_m, one in zip(s.tolist(), m.tolist(), found.tolist(), strict=True):
            exact = float(Fraction(one_s) * Fraction(form.c) - Fraction(one_m))
            if -20 < exact < 20:
                assert one == pytest.approx(exact, abs=2.0**-22, rel=2.0**-22)

    @pytest.mark.parametrize("sites", [("scores=bf16",), ("statistics=bf16",), ("logsumexp=m20",), ()])
    def test_where_something_reads_s_it_is_subtracted_in_either_case(self, sites: tuple[str, ...]) -> None:
        p = make("random", torch.float32, torch.device("cpu"))
        found, expected = (run(p, AttentionSpec(sites=(*sites, f"exponent={f}"))) for f in ("folded", "subtracted"))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)) == bool(sites)

    @pytest.mark.parametrize(("scale", "softcap"), [(-0.125, 0.0), (0.125, 50.0)])
    def test_no_folding_with_a_soft_cap_or_a_negative_scale(self, scale: float, softcap: float) -> None:
        p = one_hot(high=1.0, shape=(1, 4, 1, 16)).p
        key = AttentionSpec().resolve().key()
        assert isinstance(exponent_of(make_problem(p.q, p.k, p.v, key, scale, True, softcap)), Subtracted)
        assert isinstance(exponent_of(make_problem(p.q, p.k, p.v, key, 0.125, True, 0.0)), Folded)

    def test_standard_attention_refuses_to_fold(self) -> None:
        plans = AttentionConfig(default=AttentionSpec(preset="standard", sites=("exponent=folded",))).resolve(1, 1)
        with pytest.raises(UserError, match="it subtracts the row maximum from S first"):
            attention.check(plans, device=torch.device("cpu"), dtype=torch.bfloat16, head_dim=64)

    def test_run_a_can_subtract(self) -> None:
        changed = AttentionSpec(preset="flash_run_a", sites=("exponent=subtracted",)).resolve()
        assert changed.differences(AttentionSpec(preset="flash_run_a").resolve()) == ("exponent=subtracted",)
        x = one_hot(high=2e5, shape=(2, 64, 2, 64))
        assert torch.equal(x.run("exponent=subtracted", preset="flash_run_a")[0], x.p.v)

    @pytest.mark.timeout(300)
    def test_the_kernels_in_tritons_interpreter(self) -> None:
        pass_in_the_interpreter(__file__)


def kernel_rows(logit: float, device: str) -> OneHot:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return one_hot(high=logit, shape=(1, 64, 2, 64) if INTERPRETED else (4, 256, 4, 64), device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("logit", LOGITS)
def test_kernels_that_subtract_give_the_v_of_a_single_key(logit: float, device: str) -> None:
    x = kernel_rows(logit, device)
    assert torch.equal(x.run(backend="flash", preset="flash_subtracted")[0], x.p.v)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("logit", LOGITS)
def test_kernels_that_fold_are_off_as_the_reference_is(logit: float, device: str) -> None:
    """Row by row, within one unit of BF16; a few rows may differ by the last bit of exp2."""
    x = kernel_rows(logit, device)
    found, expected = (x.run(backend=backend)[0].double() for backend in ("flash", "flash_reference"))
    unit = torch.ldexp(torch.ones_like(found), torch.frexp(x.p.v.double()).exponent - 8)
    assert ((found - expected).abs() <= unit).all(dim=-1).double().mean() >= 0.99
    # A unit is as large as the error is: most rows are to be equal.
    assert (found == expected).all(dim=-1).double().mean() >= 0.95
    assert bool((found != x.p.v.double()).any()) == (logit > THRESHOLD)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("preset", ["flash", "flash_stable_safe", "flash_delta_from_p"])
def test_kernels_that_fold_have_the_references_gradients_at_200_000(preset: str, device: str) -> None:
    """Where the exact dQ and dK are 0, they are the error of O, or that of L, times delta: the same error in both.

    Errors that had nothing to do with each other would be 1.4 apart; one row in a hundred that differs by a unit makes 0.1.
    """
    x = kernel_rows(2e5, device)
    found, expected = (x.run(backend=backend, preset=preset)[1:] for backend in ("flash", "flash_reference"))
    assert max(relative_errors(found, tuple(a.double() for a in expected))) < 0.1


@pytest.mark.parametrize("device", DEVICES)
def test_kernels_that_subtract_have_next_to_no_gradients_where_there_are_none(device: str) -> None:
    x = kernel_rows(2e5, device)
    subtracted, folded = (x.run(backend="flash", preset=preset) for preset in ("flash_subtracted", "flash"))
    for name, a, b in zip(("dq", "dk"), subtracted[1:3], folded[1:3], strict=True):
        assert a.double().norm() < 1e-2 * b.double().norm(), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("exponent", ["folded", "subtracted"])
def test_kernels_weights_near_a_maximum_of_200_000_are_exact_in_either_form(exponent: str, device: str) -> None:
    """Folded, x is common to a row and drops out of P_bar / l unrounded; the scale, no power of two, rounds nothing."""
    shape, scale = (1, 64, 1, 16), 0.37
    p = kernel_rows(1.0, device).p
    q, k = (torch.zeros(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    q[..., 0], q[..., 1], k[..., 0] = 2.0**19, 1.0, 1.0
    k[0, :, 0, 1] = torch.arange(64, device=device) % 5
    v = p.v[:1, :64, :1, :16].contiguous()
    spec = AttentionSpec(sites=("probabilities=fp32", "output=fp32", f"exponent={exponent}"), backend="flash")
    plan = AttentionConfig(default=spec).resolve(1, 1)[0]
    o = attention.run(q, k, v, plan, rounding_seed=torch.tensor(0, device=device), scale=scale)
    s = scale * torch.einsum("bthd,bshd->bhts", q.double(), k.double())
    s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf)
    exact = torch.einsum("bhts,bshd->bthd", torch.softmax(s, dim=-1), v.double())
    assert (o.double() - exact).abs().max() < 1e-5
