"""The sites ``exponent`` and ``saved_statistics`` at large logits: P_bar of a row's maximum, P from L or from m and l.

q and k are such that S' = Q K^T is exact in FP32 in any order of summation, so that kernels and reference see the same last bits. The
kernels' tests on the CPU run in a pytest of their own (``kernel_tests``).
"""

import dataclasses
import math
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

import kernel_tests
import pytest
import torch
from attention_cases import Problem, run
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_tests import INTERPRETED, Runner
from torch import Tensor

from attention import AttentionSpec
from attention.numerics import SITES
from attention.reference.exponent import Fma, SeparateMultiply, SubtractFirst, exponent_of
from attention.reference.tiles import make_problem
from errors import UserError

WHOLE = slice(0, 64)
LOGITS = (1e3, 2e4, 2e5, 1e6)
ANY = (*LOGITS, 1e7)
CHOSEN = st.fixed_dictionaries(
    {
        "exponent": st.sampled_from(SITES["exponent"].choices),
        "saved_statistics": st.sampled_from(SITES["saved_statistics"].choices),
        **{site: st.sampled_from(("fp32", "input", "m20")) for site in ("scores", "statistics", "logsumexp")},
    }
)
CURE = "flash_delta_from_p_subtract_first"
BLOCKS = ("tile_q=16", "tile_k=16")
runner = kernel_tests.runner


@dataclass
class OneHot:
    """Rows [B, T, H, D] that see themselves alone; ``scale`` brings the largest of their logits to ``high``."""

    p: Problem
    scale: float
    high: float

    def run(self, *sites: str, backend: str = "flash_reference", preset: str = "flash") -> tuple[Tensor, ...]:
        """O, dQ, dK, dV."""
        return run(self.p, AttentionSpec(preset=preset, sites=sites, backend=backend), scale=self.scale)


def one_hot(*, high: float, shape: tuple[int, ...], device: torch.device | str = "cpu") -> OneHot:
    """Rows whose largest logit is ``high``; the others are within a factor of about 2 (D = 64)."""
    generator = torch.Generator().manual_seed(0)
    sign = torch.randint(0, 2, shape, generator=generator) * 2.0 - 1
    size = torch.randint(128, 256, shape, generator=generator) * 2.0 ** torch.randint(0, 4, shape, generator=generator)
    v, do = (torch.randn(shape, generator=generator) for _ in range(2))
    products = size.sum(dim=-1)  # up to 18 bits
    scale = high / products.max().item()
    p = Problem(*(x.to(device, torch.bfloat16) for x in (sign * size, sign, v, do)))
    return OneHot(p, scale, scale * products.max().item())


def half_a_unit(x: OneHot) -> float:
    """Of m in log2, in FP32."""
    return 2.0 ** (math.floor(math.log2(x.high / math.log(2))) - 24)


def kernel_rows(logit: float, device: torch.device) -> OneHot:
    return one_hot(high=logit, shape=(1, 64, 2, 64) if INTERPRETED else (4, 256, 4, 64), device=device)


@pytest.mark.parametrize("logit", ANY)
@pytest.mark.parametrize("exponent", SITES["exponent"].choices)
def test_p_bar_of_the_maximum_is_one_or_of_an_fma_off_by_up_to_half_a_unit_of_m(exponent: str, logit: float) -> None:
    x = one_hot(high=logit, shape=(8, 64, 2, 64))
    numerics = AttentionSpec(sites=(f"exponent={exponent}",)).resolve()
    form = exponent_of(make_problem(x.p.q, x.p.k, x.p.v, numerics.key(), x.scale, True, 0.0))
    s = form.scores(WHOLE, WHOLE)
    off = form.exp(s, form.row_max(s)).amax(dim=-1).double().log2().abs().max().item()
    half = half_a_unit(x) if exponent == "fma" else 0.0
    assert half / 2 <= off <= half * 1.01 + (2.0**-23 if half else 0.0)


def test_the_multiply_add_rounds_once() -> None:
    generator = torch.Generator().manual_seed(1)
    s = torch.randn(500, generator=generator) * 1e6
    form = Fma(make_problem(*torch.ones(3, 1, 1, 1, 1), AttentionSpec().resolve().key(), 0.0883, True, 0.0))
    m = (s * form.c) * (1 + torch.randint(-2, 3, (500,), generator=generator) * 2.0**-20)
    found = form.exp(s, m).double().log2()
    for one_s, one_m, one in zip(s.tolist(), m.tolist(), found.tolist(), strict=True):
        exact = float(Fraction(one_s) * Fraction(form.c) - Fraction(one_m))
        if -20 < exact < 20:
            assert one == pytest.approx(exact, abs=2.0**-22, rel=2.0**-22)


@given(chosen=CHOSEN, scale=st.sampled_from((0.125, 0.0, -1.0)), softcap=st.sampled_from((0.0, 50.0)))
@settings(deadline=None)
def test_sites_that_fit_act_alike_and_others_are_refused(chosen: dict[str, str], scale: float, softcap: float) -> None:
    """Refused with the site, in one line: only an L that is rounded and not there. Formed in S' only where S, m, l and L are FP32."""
    codes = pytest.importorskip("attention.triton.codes")
    spec = partial(AttentionSpec, preset="flash_separate_multiply", sites=tuple(f"{k}={v}" for k, v in chosen.items()))
    if chosen["saved_statistics"] == "max_and_sum" and chosen["logsumexp"] != "fp32":
        refused = "^attention numerics saved_statistics = 'max_and_sum': expected logsumexp where .*$"
        with pytest.raises(UserError, match=refused):
            spec().resolve().concrete("bf16")
        return
    n = spec().resolve().concrete("bf16")
    rounded = {chosen[name] for name in ("scores", "statistics", "logsumexp")} != {"fp32"}
    forms = {"fma": Fma, "subtract_first": SubtractFirst, "separate_multiply": SeparateMultiply}
    acts = not rounded and not softcap and scale > 0
    problem = make_problem(*torch.ones(3, 1, 1, 1, 1).bfloat16(), n.key(), scale, True, softcap)
    assert type(exponent_of(problem)) is (forms[chosen["exponent"]] if acts else SubtractFirst)
    expected = getattr(codes, chosen["exponent"].upper()) if acts else codes.S_IS_SCALED
    assert codes.exponent_code(n, scale, softcap) == expected.value


def test_apart_dq_and_dk_of_a_single_key_are_zero() -> None:
    """P = 1, so that delta from P is dP to the bit, and dS = 0; from L, dS = P dP (1 - P)."""
    x = one_hot(high=2e5, shape=(2, 64, 2, 64))
    assert all(not gradient.any() for gradient in x.run(preset=CURE)[1:3])
    assert all(gradient.any() for gradient in x.run(preset="flash_delta_from_p")[1:3])


@pytest.mark.parametrize("logit", [2e4, 1e6])
@pytest.mark.parametrize("preset", ["flash", "flash_subtract_first", "flash_separate_multiply", "flash_rounded_sum"])
def test_o_of_a_single_key_is_v_but_of_an_fma_at_large_logits(preset: str, logit: float, runner: Runner) -> None:
    """From 2^16 ln 2 = 45,426 on m log2(e) has a unit of 2^-7 and more, and P_bar of the maximum may be 2^-9 below 1."""
    x = kernel_rows(logit, runner.device)
    assert torch.equal(x.run(backend=runner.backend, preset=preset)[0], x.p.v) == (preset != "flash" or logit < 4.5e4)


@pytest.mark.parametrize("saved", SITES["saved_statistics"].choices)
@pytest.mark.parametrize("exponent", SITES["exponent"].choices)
def test_p_of_a_single_key_is_one_but_of_an_fma_from_l(exponent: str, saved: str, runner: Runner) -> None:
    """As P^T dO with dO = 1 has it: off by up to half a unit of L. From m and l apart it is P_bar = 1 + x over l = 1 + x."""
    x = kernel_rows(2e5, runner.device)
    q, k, v = (a.float() for a in (x.p.q, x.p.k, x.p.v))  # so that gradients are stored unrounded
    x = dataclasses.replace(x, p=Problem(q, k, v, torch.ones_like(q)))
    dv = x.run(f"exponent={exponent}", f"saved_statistics={saved}", backend=runner.backend)[3]
    off = dv.double().log2().abs().max().item()
    # The kernels keep L in the unit of log2, in which m of a plain S has a rounding of its own.
    rounded = exponent == "fma" or (exponent, runner.backend) == ("subtract_first", "flash")
    half = half_a_unit(x) if rounded and saved == "logsumexp" else 0.0
    assert half / 2 <= off <= half * 1.01 + 2.0**-21


@pytest.mark.parametrize("exponent", SITES["exponent"].choices)
def test_the_shift_of_tied_maxima_is_held_to_the_cap_in_any_unit(exponent: str, runner: Runner) -> None:
    """P_bar in BF16 tells shifts apart: where all keys tie at 100 and the cap is 1 it is exp(-1), rounded by 0.2 %; l is not."""
    p = kernel_rows(1.0, runner.device).p
    q, k = (torch.zeros_like(p.q[:1, :16]) for _ in range(2))
    q[..., 0], k[..., 0] = 20.0, 10.0
    form = ("row_max=stabilized_safe", "row_max_cap=1", f"exponent={exponent}")
    spec = AttentionSpec(sites=(*form, *BLOCKS, "output=fp32"), backend=runner.backend)
    o = run(Problem(q, k, torch.ones_like(q), q), spec, scale=0.5)[0]
    p_bar = torch.tensor(-1.0).exp()
    assert (o[:, 0] - 1).abs().max() < 1e-4
    assert (o[:, 1:] - (p_bar.bfloat16().float() / p_bar).to(runner.device)).abs().max() < 1e-4
