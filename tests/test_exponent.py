"""The sites ``exponent`` and ``saved_statistics`` at large logits: P_bar of a row's maximum, P from L or from m and l.

q and k are such that S' = Q K^T is exact in FP32 in any order of summation, so that kernels and reference see the same last bits. The
kernels' tests on the CPU run in a pytest of their own (``kernel_tests``).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from attention_cases import Problem, magnitudes, make, relative_errors, run
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_tests import INTERPRETED, pass_in_the_interpreter
from torch import Tensor

import attention
from attention import AttentionConfig, AttentionSpec
from attention.numerics import SITES, numerics_from_key
from attention.reference.exponent import Fma, SeparateMultiply, SubtractFirst, exponent_of
from attention.reference.flash import row_deltas
from attention.reference.tiles import make_problem
from errors import UserError

THRESHOLD = 2**16 * math.log(2)
"""45,426: from here on m log2(e) has a unit of 2^-7 and more, and P_bar of the maximum may be 2^-9 below 1, half a unit of BF16."""
WHOLE = slice(0, 64)
LOGITS = (1e3, 2e4, 2e5, 1e6)
ANY = (*LOGITS, 1e7)
SOME = (2e4, 1e6)
EXACT_AT_THE_MAXIMUM = ("subtract_first", "separate_multiply")
CHOSEN = st.fixed_dictionaries(
    {
        "exponent": st.sampled_from(SITES["exponent"].choices),
        "saved_statistics": st.sampled_from(SITES["saved_statistics"].choices),
        **{site: st.sampled_from(("fp32", "input", "m20")) for site in ("scores", "statistics", "logsumexp")},
    }
)
DEVICES = ["cpu"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)]
APART = "saved_statistics=max_and_sum"
CURE = "flash_delta_from_p_subtract_first"
LARGE = [logit for logit in LOGITS if logit > 1e5]
BLOCKS = ("tile_q=16", "tile_k=16")
reference = pytest.mark.skipif(INTERPRETED, reason="no kernel in it")


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


def exponents(x: OneHot, *sites: str) -> tuple[Tensor, SubtractFirst | Fma | SeparateMultiply]:
    """S of all rows in the unit of the form, and the form."""
    numerics = AttentionSpec(sites=sites).resolve()
    form = exponent_of(make_problem(x.p.q, x.p.k, x.p.v, numerics.key(), x.scale, True, 0.0))
    return form.scores(WHOLE, WHOLE), form


def float32(x: OneHot) -> OneHot:
    """The same numbers in FP32, so that gradients are stored unrounded; dO = 1."""
    q, k, v, _ = (a.float() for a in (x.p.q, x.p.k, x.p.v, x.p.do))
    return dataclasses.replace(x, p=Problem(q, k, v, torch.ones_like(q)))


def two_tied(x: OneHot) -> OneHot:
    """Rows 2 i and 2 i + 1 have one query and one key: the second row of each two has two keys of weight one half."""
    q, k = (a[:, ::2].repeat_interleave(2, dim=1) for a in (x.p.q, x.p.k))
    return dataclasses.replace(x, p=Problem(q, k, x.p.v, x.p.do))


def column_sums(x: OneHot, *sites: str, backend: str = "flash_reference") -> Tensor:
    """sum over rows of P, per key [B, T, H], as P^T dO with dO = 1 has it; P is made in FP32."""
    dv = float32(x).run(*sites, backend=backend)[3]
    assert torch.equal(dv, dv[..., :1].expand(dv.shape))
    return dv[..., 0].double()


def row_sums(*sites: str, logit: float = 2e5) -> Tensor:
    """rowsum(P) [H, T] of rows with many keys near their maximum: delta from P, where dP = dO V^T = 1."""
    shape = (1, 64, 2, 16)
    q, k, v = (torch.zeros(shape) for _ in range(3))
    q[..., 0], q[..., 1], k[..., 0], v[..., 0] = 2.0**17, 1.0, 1.0, 1.0
    k[0, :, 0, 1] = torch.arange(64) % 5
    numerics = AttentionSpec(sites=("delta=rowsum_p_dp", *sites)).resolve()
    return row_deltas(q, k, v, v, numerics, seed=torch.tensor(0), scale=logit / 2**17)[0].double()


def two_keys(logit: float, count: int = 8192) -> tuple[Tensor, Tensor]:
    """S' = S of rows of two keys [n, 2], the first near ``logit``, and the exact differences in log2, [n] float64."""
    generator = torch.Generator().manual_seed(2)
    top = logit * (1 - torch.rand(count, generator=generator) / 8)
    below = (1 + 8 * torch.rand(count, generator=generator)) * math.log(2)
    s = torch.stack((top, top - below), dim=1)
    return s, (s[:, 1].double() - s[:, 0].double()) / math.log(2)


def exponent_errors(s: Tensor, exact: Tensor, exponent: str) -> Tensor:
    """Error of log2 of P_bar of the second key over that of the first, float64; scale = 1."""
    key = AttentionSpec(sites=(f"exponent={exponent}",)).resolve().key()
    form = exponent_of(make_problem(*torch.ones(3, 1, 1, 1, 1), key, 1.0, True, 0.0))
    p_bar = form.exp(s, form.row_max(s)).double()
    return (p_bar[:, 1] / p_bar[:, 0]).log2() - exact


def kernel_rows(logit: float, device: str) -> OneHot:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return one_hot(high=logit, shape=(1, 64, 2, 64) if INTERPRETED else (4, 256, 4, 64), device=device)


@reference
def test_rows_see_themselves_alone() -> None:
    x = one_hot(low=1e3)
    assert x.high < 2.2 * x.low
    assert torch.equal(x.run("exponent=subtract_first")[0], x.p.v)


@reference
def test_folded_the_error_starts_where_the_unit_of_m_passes_that_of_p_bar() -> None:
    assert torch.equal(one_hot(high=THRESHOLD - 1).run()[0], one_hot(high=THRESHOLD - 1).p.v)
    above = one_hot(low=THRESHOLD + 1)
    assert (above.run()[0] != above.p.v).any(dim=-1).double().mean() > 0.1


@reference
def test_folded_the_error_leans_towards_a_smaller_delta() -> None:
    """n = 8,192 rows of logits from 45,427 to twice that: P_bar just above 1 rounds to 1, but l does not."""
    errors = one_hot(low=THRESHOLD + 1).delta_errors()
    assert len(errors) == 8192
    standard_error = errors.std() / len(errors) ** 0.5
    assert errors.mean() < -10 * standard_error


@reference
@pytest.mark.parametrize("logit", ANY)
@pytest.mark.parametrize(
    "sites",
    [("exponent=subtract_first",), ("exponent=separate_multiply",), ("probabilities=fp32",), ("divisor=rounded",)],
)
def test_subtracted_unfused_or_divided_by_the_p_bar_that_is_read_o_is_v(sites: tuple[str, ...], logit: float) -> None:
    x = one_hot(high=logit)
    assert torch.equal(x.run(*sites)[0], x.p.v)
    assert x.delta_errors(*sites).abs().max() < 1e-6


@reference
@pytest.mark.parametrize("logit", ANY)
@pytest.mark.parametrize("exponent", EXACT_AT_THE_MAXIMUM)
def test_p_bar_of_the_maximum_is_one(exponent: str, logit: float) -> None:
    s, form = exponents(one_hot(high=logit, shape=(8, 64, 2, 64)), f"exponent={exponent}")
    assert torch.all(form.exp(s, form.row_max(s)).amax(dim=-1) == 1)


@reference
@pytest.mark.parametrize("logit", ANY)
def test_folded_p_bar_of_the_maximum_is_off_by_up_to_half_a_unit_of_m(logit: float) -> None:
    x = one_hot(high=logit, shape=(8, 64, 2, 64))
    s, form = exponents(x)
    off = form.exp(s, form.row_max(s)).amax(dim=-1).double().log2().abs().max().item()
    half = 2.0 ** (math.floor(math.log2(x.high / math.log(2))) - 24)
    assert half / 2 < off < half * 1.01 + 2.0**-23


@reference
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


@reference
def test_unfused_the_product_is_rounded_and_then_the_difference() -> None:
    """As IEEE has it, by numpy; S near m and far from it."""
    generator = torch.Generator().manual_seed(1)
    top = torch.randn(500, 1, generator=generator) * 1e6
    s = top - torch.rand(500, 8, generator=generator) * 50
    form = SeparateMultiply(
        make_problem(*torch.ones(3, 1, 1, 1, 1), AttentionSpec().resolve().key(), 0.0883, True, 0.0)
    )
    m = form.row_max(torch.cat((s, top), dim=1))
    c = np.float32(form.c)
    assert np.array_equal(m.numpy(), top.numpy() * c)
    expected = torch.exp2(torch.from_numpy(s.numpy() * c - m.numpy()))
    assert torch.equal(form.exp(s, m), expected)
    assert not torch.equal(expected, Fma(form.problem).exp(s, m))


@reference
@pytest.mark.parametrize("logit", [2e4, 2.4e5])
def test_unfused_the_other_exponents_have_the_error_of_two_products(logit: float) -> None:
    """Two keys, the second 1 to 9 below in log2, n = 8,192, all in one binade: two roundings to nearest are sqrt(1/6) units apart in
    root mean square, up to a unit, and 0 in the mean. Subtracted there is none of it, and folded all of a row has the same."""
    s, exact = two_keys(logit)
    found = {form: exponent_errors(s, exact, form) for form in SITES["exponent"].choices}
    unit = 2.0 ** (math.floor(math.log2(logit / math.log(2))) - 23)
    unfused = found["separate_multiply"] / unit
    assert unfused.square().mean().sqrt().item() == pytest.approx(6**-0.5, rel=0.05)
    assert 0.8 < unfused.abs().max() <= 1.0 + 2.0**-20 / unit
    assert unfused.mean().abs() < 3 * unfused.std() / len(unfused) ** 0.5
    assert 0.47 < (unfused > 0).double().mean() < 0.53
    assert max(found[form].abs().max().item() for form in ("subtract_first", "fma")) < 2.0**-19


@reference
@pytest.mark.parametrize("sites", [("scores=bf16",), ("statistics=bf16",), ("logsumexp=m20",), ()])
def test_where_something_reads_s_it_is_subtracted_in_any_case(sites: tuple[str, ...]) -> None:
    p = make("random", torch.float32, torch.device("cpu"))
    found = [run(p, AttentionSpec(sites=(*sites, f"exponent={form}"))) for form in SITES["exponent"].choices]
    for one, other in itertools.combinations(found, 2):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)) == bool(sites)


@reference
@given(chosen=CHOSEN, scale=st.sampled_from((0.125, 0.0, -1.0)), softcap=st.sampled_from((0.0, 50.0)))
@settings(deadline=None)
def test_sites_that_fit_act_in_kernels_as_in_the_reference_and_others_are_refused(
    chosen: dict[str, str], scale: float, softcap: float
) -> None:
    """Refused with the site, in one line: only an L that is rounded and not there. Formed in S' only where S, m, l and L are FP32."""
    numerics = pytest.importorskip("attention.triton.arithmetic")
    spec = partial(AttentionSpec, preset="flash_separate_multiply", sites=tuple(f"{k}={v}" for k, v in chosen.items()))
    if chosen["saved_statistics"] == "max_and_sum" and chosen["logsumexp"] != "fp32":
        refused = "^attention numerics saved_statistics = 'max_and_sum': expected logsumexp where .*$"
        with pytest.raises(UserError, match=refused):
            spec().resolve().concrete("bf16")
        return
    n = spec().resolve().concrete("bf16")
    rounded = {chosen[name] for name in ("scores", "statistics", "logsumexp")} != {"fp32"}
    codes = {"fma": numerics.FMA, "subtract_first": numerics.LATER, "separate_multiply": numerics.SEPARATE_MULTIPLY}
    forms = {"fma": Fma, "subtract_first": SubtractFirst, "separate_multiply": SeparateMultiply}
    acts = not rounded and not softcap and scale > 0
    problem = make_problem(*torch.ones(3, 1, 1, 1, 1).bfloat16(), n.key(), scale, True, softcap)
    assert type(exponent_of(problem)) is (forms[chosen["exponent"]] if acts else SubtractFirst)
    expected = codes[chosen["exponent"]] if acts else numerics.SCALED
    assert numerics.exponent_code(n, scale, softcap) == expected.value


@reference
@pytest.mark.parametrize("logit", ANY)
@pytest.mark.parametrize("form", EXACT_AT_THE_MAXIMUM)
@pytest.mark.parametrize("saved", SITES["saved_statistics"].choices)
def test_subtracted_or_unfused_p_of_a_single_key_is_one(saved: str, form: str, logit: float) -> None:
    """From L too: it is m there."""
    x = one_hot(high=logit, shape=(8, 64, 2, 64))
    assert torch.all(column_sums(x, f"exponent={form}", f"saved_statistics={saved}") == 1)


@reference
@pytest.mark.parametrize("logit", LOGITS)
def test_folded_and_apart_it_is_one_to_the_last_bits_of_fp32(logit: float) -> None:
    """P_bar = 1 + x over l = 1 + x."""
    x = one_hot(high=logit, shape=(8, 64, 2, 64))
    assert (column_sums(x, APART) - 1).abs().max() < 2.0**-22


@reference
@pytest.mark.parametrize("logit", LOGITS)
def test_folded_from_l_it_is_off_by_up_to_half_a_unit_of_l(logit: float) -> None:
    x = one_hot(high=logit, shape=(8, 64, 2, 64))
    off = column_sums(x).log2().abs().max().item()
    half = 2.0 ** (math.floor(math.log2(x.high / math.log(2))) - 24)
    assert half / 2 < off < half * 1.01 + 2.0**-22


@reference
@pytest.mark.parametrize("form", SITES["exponent"].choices)
@pytest.mark.parametrize("logit", LARGE)
def test_two_tied_keys_have_one_half_each_apart(logit: float, form: str) -> None:
    """m + log 2 has no room for log 2: from L it is off. Unfused it is not: m and log2(2) = 1 have room in log2."""
    x = two_tied(one_hot(high=logit, shape=(8, 64, 2, 64)))
    apart, joined = (column_sums(x, f"exponent={form}", site) for site in (APART, "saved_statistics=logsumexp"))
    second = (apart[:, 1::2] - 0.5).abs().max()  # the keys that one row alone sees
    assert second < 2.0**-22
    assert ((joined[:, 1::2] - 0.5).abs().max() > 1e-3) == (form != "separate_multiply")


@reference
@pytest.mark.parametrize("form", SITES["exponent"].choices)
def test_rows_of_many_keys_sum_to_one_only_apart(form: str) -> None:
    apart, joined = ((row_sums(f"exponent={form}", site) - 1).abs() for site in (APART, "saved_statistics=logsumexp"))
    assert apart.max() < 1e-6
    assert joined.max() > 1e-3


@reference
@pytest.mark.parametrize("form", SITES["exponent"].choices)
@pytest.mark.parametrize("logit", LOGITS)
def test_delta_from_p_has_no_error_apart(logit: float, form: str) -> None:
    """n = 8,192 rows of a single key, against FP64. What is left is FP32's own: the largest of them is 6e-7."""
    errors = one_hot(high=logit).delta_errors("delta=rowsum_p_dp", f"exponent={form}", APART)
    assert len(errors) == 8192
    assert errors.abs().max() < 1e-6


@reference
@pytest.mark.parametrize("logit", LARGE)
def test_the_error_of_delta_from_l_is_as_often_of_either_sign(logit: float) -> None:
    """n = 8,192: it is large, and no bias: L is rounded to nearest."""
    errors = one_hot(high=logit).delta_errors("delta=rowsum_p_dp")
    assert errors.mean().abs() < 3 * errors.std() / len(errors) ** 0.5
    assert 0.47 < (errors > 0).double().mean() < 0.53


@reference
def test_apart_dq_and_dk_of_a_single_key_are_zero() -> None:
    """P = 1, so that delta from P is dP to the bit, and dS = 0; from L, dS = P dP (1 - P)."""
    x = one_hot(high=2e5, shape=(2, 64, 2, 64))
    assert all(not gradient.any() for gradient in x.run(preset=CURE)[1:3])
    assert all(gradient.any() for gradient in x.run(preset="flash_delta_from_p")[1:3])


@reference
@pytest.mark.parametrize("backend", ["flash", "flash_reference"])
def test_an_l_in_the_format_of_q_is_refused_where_that_is_not_fp32(backend: str) -> None:
    plans = AttentionConfig(default=AttentionSpec(sites=(APART, "logsumexp=input"), backend=backend)).resolve(1, 1)
    device = torch.device("cpu")
    with pytest.raises(UserError) as error:
        attention.check(plans, device=device, dtype=torch.bfloat16, head_dim=16)
    if backend == "flash_reference":
        assert "saved_statistics = 'max_and_sum': expected logsumexp where" in str(error.value)
        attention.check(plans, device=device, dtype=torch.float32, head_dim=16)


@reference
def test_numerics_written_before_it_had_a_name_kept_l() -> None:
    numerics = AttentionSpec().resolve()
    assert numerics_from_key(numerics.key().replace('"saved_statistics": "logsumexp", ', "")) == numerics
    assert '"saved_statistics"' in numerics.key()


@reference
@pytest.mark.timeout(300)
def test_the_kernels_in_tritons_interpreter() -> None:
    pass_in_the_interpreter(__file__)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("logit", SOME)
@pytest.mark.parametrize("exponent", EXACT_AT_THE_MAXIMUM)
def test_kernels_that_subtract_or_do_not_fuse_give_the_v_of_a_single_key(
    exponent: str, logit: float, device: str
) -> None:
    x = kernel_rows(logit, device)
    assert torch.equal(x.run(backend="flash", preset=f"flash_{exponent}")[0], x.p.v)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("saved", SITES["saved_statistics"].choices)
@pytest.mark.parametrize("logit", SOME)
def test_kernels_that_do_not_fuse_have_o_and_dv_of_a_single_key_as_the_reference_to_the_bit(
    logit: float, saved: str, device: str
) -> None:
    """From L too, which is m there: P is 1, and dV is dO."""
    x = kernel_rows(logit, device)
    site = f"saved_statistics={saved}"
    found, expected = (x.run(site, backend=b, preset="flash_separate_multiply") for b in ("flash", "flash_reference"))
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[3], expected[3])
    assert torch.equal(found[3], x.p.do)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("logit", SOME)
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
@pytest.mark.parametrize("logit", SOME)
def test_kernels_that_divide_by_the_p_bar_that_is_read_give_the_v_of_a_single_key(logit: float, device: str) -> None:
    x = kernel_rows(logit, device)
    assert torch.equal(x.run(preset="flash_rounded_sum", backend="flash")[0], x.p.v)


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
    subtracted, folded = (x.run(backend="flash", preset=preset) for preset in ("flash_subtract_first", "flash"))
    for name, a, b in zip(("dq", "dk"), subtracted[1:3], folded[1:3], strict=True):
        assert a.double().norm() < 1e-2 * b.double().norm(), name


@pytest.mark.parametrize(
    ("backend", "device"),
    [("flash", "cpu")]
    if INTERPRETED
    else [("flash_reference", "cpu"), pytest.param("flash", "cuda", marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize("exponent", SITES["exponent"].choices)
def test_the_shift_of_tied_maxima_is_held_to_the_cap_in_any_unit(exponent: str, backend: str, device: str) -> None:
    """P_bar in BF16 tells shifts apart: where all keys tie at 100 and the cap is 1 it is exp(-1), rounded by 0.2 %; l is not."""
    p = kernel_rows(1.0, device).p
    q, k = (torch.zeros_like(p.q[:1, :16]) for _ in range(2))
    q[..., 0], k[..., 0] = 20.0, 10.0
    v = torch.ones_like(q)
    form = ("row_max=stabilized_safe", "row_max_cap=1", f"exponent={exponent}")
    spec = AttentionSpec(sites=(*form, *BLOCKS, "output=fp32"), backend=backend)
    plan = AttentionConfig(default=spec).resolve(1, q.shape[2])[0]
    o = attention.run(q, k, v, plan, rounding_seed=torch.tensor(0, device=device), scale=0.5)
    p_bar = torch.tensor(-1.0).exp()
    assert (o[:, 0] - 1).abs().max() < 1e-4
    assert (o[:, 1:] - (p_bar.bfloat16().float() / p_bar).to(device)).abs().max() < 1e-4


def near_a_large_maximum(exponent: str, device: str, backend: str) -> tuple[Tensor, Tensor]:
    """O of rows whose keys are all near their maximum of 200,000, P_bar and O unrounded, and in FP64; the scale is no power of two."""
    shape, scale = (1, 64, 1, 16), 0.37
    p = kernel_rows(1.0, device).p
    q, k = (torch.zeros(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    q[..., 0], q[..., 1], k[..., 0] = 2.0**19, 1.0, 1.0
    k[0, :, 0, 1] = torch.arange(64, device=device) % 5
    v = p.v[:1, :64, :1, :16].contiguous()
    spec = AttentionSpec(sites=("probabilities=fp32", "output=fp32", f"exponent={exponent}"), backend=backend)
    plan = AttentionConfig(default=spec).resolve(1, 1)[0]
    o = attention.run(q, k, v, plan, rounding_seed=torch.tensor(0, device=device), scale=scale)
    s = scale * torch.einsum("bthd,bshd->bhts", q.double(), k.double())
    s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf)
    return o.double(), torch.einsum("bhts,bshd->bthd", torch.softmax(s, dim=-1), v.double())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("exponent", ["fma", "subtract_first"])
def test_kernels_weights_near_a_maximum_of_200_000_are_exact_folded_or_subtracted(exponent: str, device: str) -> None:
    """Folded, x is common to a row and drops out of P_bar / l unrounded."""
    o, exact = near_a_large_maximum(exponent, device, "flash")
    assert (o - exact).abs().max() < 1e-5


@pytest.mark.parametrize("device", DEVICES)
def test_kernels_unfused_are_off_there_as_the_reference_is(device: str) -> None:
    """Each key has a rounding of its own: the errors are the reference's, product by product."""
    (o, exact), (expected, _) = (
        near_a_large_maximum("separate_multiply", device, b) for b in ("flash", "flash_reference")
    )
    assert (expected - exact).abs().max() > 1e-3
    assert (o - expected).abs().max() < 1e-5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("logit", SOME)
@pytest.mark.parametrize(
    ("form", "saved"),
    [("subtract_first", "max_and_sum"), ("separate_multiply", "max_and_sum"), ("separate_multiply", "logsumexp")],
)
def test_kernels_that_subtract_have_p_of_one_apart_and_unfused_from_l_too(
    form: str, saved: str, logit: float, device: str
) -> None:
    sites = f"exponent={form}", f"saved_statistics={saved}"
    assert torch.all(column_sums(kernel_rows(logit, device), *sites, backend="flash") == 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("logit", SOME)
def test_kernels_that_fold_have_p_of_one_apart_to_the_last_bits(logit: float, device: str) -> None:
    assert (column_sums(kernel_rows(logit, device), APART, backend="flash") - 1).abs().max() < 2.0**-21


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", ["fma", "subtract_first"])
@pytest.mark.parametrize("logit", [2e5])
def test_kernels_are_off_from_l_folded_or_subtracted(logit: float, form: str, device: str) -> None:
    off = (column_sums(kernel_rows(logit, device), f"exponent={form}", backend="flash") - 1).abs().max()
    assert off > 2e-3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", SITES["exponent"].choices)
def test_kernels_have_one_half_for_two_tied_keys(form: str, device: str) -> None:
    x = two_tied(kernel_rows(2e5, device))
    assert (column_sums(x, f"exponent={form}", APART, backend="flash")[:, 1::2] - 0.5).abs().max() < 2.0**-21


@pytest.mark.parametrize("device", DEVICES)
def test_kernels_dq_and_dk_of_a_single_key_are_zero(device: str) -> None:
    """delta sums the same FP32 products as dP: what is left is the order of a sum of 64."""
    x = kernel_rows(2e5, device)
    cured, joined = (x.run(backend="flash", preset=preset)[1:3] for preset in (CURE, "flash_delta_from_p"))
    for a, b in zip(cured, joined, strict=True):
        assert a.double().norm() < 1e-3 * b.double().norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("sites", "softcap"),
    [
        (("exponent=fma",), 0.0),
        (("exponent=subtract_first",), 0.0),
        (("exponent=fma", "row_max=stabilized_safe"), 0.0),
        (("exponent=subtract_first", "row_max=stabilized_safe"), 0.0),
        (("exponent=separate_multiply",), 0.0),
        (("exponent=separate_multiply", "row_max=stabilized_safe"), 0.0),
        (("scores=m20", "statistics=m20", "tile_k=48"), 0.0),
        (("delta=recomputed_o",), 5.0),
    ],
)
def test_kernels_gradients_are_the_references(sites: tuple[str, ...], softcap: float, device: str) -> None:
    """At ordinary logits, in FP32, at a length that no block divides, in every unit that S and m may have."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    p = make("tied", torch.float32, torch.device(device), (1, 41, 2, 16))
    chosen = (*BLOCKS, APART, "delta=rowsum_p_dp", *sites)
    found, expected = (
        run(p, AttentionSpec(sites=chosen, backend=backend), softcap=softcap)
        for backend in ("flash", "flash_reference")
    )
    apart = relative_errors(found, tuple(x.double() for x in expected), magnitudes(p))
    assert max(apart) < 2.0**-20, apart
