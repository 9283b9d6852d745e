"""The site ``exponent``: what folding the scale into exp(S - m) does to rows whose weight lies on one key, where O should be that key's V.

q and k are such that S' = Q K^T is exact in FP32 in any order of summation, so that kernels and reference see the same last bits. The
kernels' tests on the CPU run in a pytest of their own (``kernel_tests``).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from attention_cases import Problem, make, relative_errors, run
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_tests import INTERPRETED, pass_in_the_interpreter
from torch import Tensor

import attention
from attention import AttentionConfig, AttentionSpec
from attention.exponent import Folded, Subtracted, Unfused, exponent_of
from attention.flash_reference import row_deltas
from attention.numerics import SITES
from attention.tiles import make_problem
from errors import UserError

THRESHOLD = 2**16 * math.log(2)
"""45,426: from here on m log2(e) has a unit of 2^-7 and more, and P_bar of the maximum may be 2^-9 below 1, half a unit of BF16."""
WHOLE = slice(0, 64)
LOGITS = (1e3, 2e4, 2e5, 1e6)
ANY = (*LOGITS, 1e7)
EXACT_AT_THE_MAXIMUM = ("subtracted", "unfused")
CHOSEN = st.fixed_dictionaries(
    {
        "exponent": st.sampled_from(SITES["exponent"].choices),
        "saved_statistics": st.sampled_from(SITES["saved_statistics"].choices),
        **{site: st.sampled_from(("fp32", "input", "m20")) for site in ("scores", "statistics", "logsumexp")},
    }
)
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


def exponents(x: OneHot, *sites: str) -> tuple[Tensor, Subtracted | Folded | Unfused]:
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

    @pytest.mark.parametrize("logit", ANY)
    @pytest.mark.parametrize(
        "sites", [("exponent=subtracted",), ("exponent=unfused",), ("probabilities=fp32",), ("divisor=rounded",)]
    )
    def test_subtracted_unfused_or_divided_by_the_p_bar_that_is_read_o_is_v(
        self, sites: tuple[str, ...], logit: float
    ) -> None:
        x = one_hot(high=logit)
        assert torch.equal(x.run(*sites)[0], x.p.v)
        assert x.delta_errors(*sites).abs().max() < 1e-6

    @pytest.mark.parametrize("logit", ANY)
    @pytest.mark.parametrize("preset", ["sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa_math"])
    def test_what_emulates_a_kernel_of_torchs_has_o_equal_to_v_as_the_kernel_has(
        self, preset: str, logit: float
    ) -> None:
        """The kernels: experiments/one_hot_rows."""
        x = one_hot(high=logit)
        assert torch.equal(x.run(f"exponent={AttentionSpec(preset=preset).resolve().exponent}")[0], x.p.v)

    @pytest.mark.parametrize("logit", ANY)
    @pytest.mark.parametrize("exponent", EXACT_AT_THE_MAXIMUM)
    def test_p_bar_of_the_maximum_is_one(self, exponent: str, logit: float) -> None:
        s, form = exponents(one_hot(high=logit, shape=(8, 64, 2, 64)), f"exponent={exponent}")
        assert torch.all(form.exp(s, form.row_max(s)).amax(dim=-1) == 1)

    @pytest.mark.parametrize("logit", ANY)
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

    def test_unfused_the_product_is_rounded_and_then_the_difference(self) -> None:
        """As IEEE has it, by numpy; S near m and far from it."""
        generator = torch.Generator().manual_seed(1)
        top = torch.randn(500, 1, generator=generator) * 1e6
        s = top - torch.rand(500, 8, generator=generator) * 50
        form = Unfused(make_problem(*torch.ones(3, 1, 1, 1, 1), AttentionSpec().resolve().key(), 0.0883, True, 0.0))
        m = form.row_max(torch.cat((s, top), dim=1))
        c = np.float32(form.c)
        assert np.array_equal(m.numpy(), top.numpy() * c)
        expected = torch.exp2(torch.from_numpy(s.numpy() * c - m.numpy()))
        assert torch.equal(form.exp(s, m), expected)
        assert not torch.equal(expected, Folded(form.problem).exp(s, m))

    @pytest.mark.parametrize("logit", [2e4, 2.4e5])
    def test_unfused_the_other_exponents_have_the_error_of_two_products(self, logit: float) -> None:
        """Two keys, the second 1 to 9 below in log2, n = 8,192, all in one binade: two roundings to nearest are sqrt(1/6) units apart in
        root mean square, up to a unit, and 0 in the mean. Subtracted there is none of it, and folded all of a row has the same."""
        s, exact = two_keys(logit)
        found = {form: exponent_errors(s, exact, form) for form in SITES["exponent"].choices}
        unit = 2.0 ** (math.floor(math.log2(logit / math.log(2))) - 23)
        unfused = found["unfused"] / unit
        assert unfused.square().mean().sqrt().item() == pytest.approx(6**-0.5, rel=0.05)
        assert 0.8 < unfused.abs().max() <= 1.0 + 2.0**-20 / unit
        assert unfused.mean().abs() < 3 * unfused.std() / len(unfused) ** 0.5
        assert 0.47 < (unfused > 0).double().mean() < 0.53
        assert max(found[form].abs().max().item() for form in ("subtracted", "folded")) < 2.0**-19

    @pytest.mark.parametrize("sites", [("scores=bf16",), ("statistics=bf16",), ("logsumexp=m20",), ()])
    def test_where_something_reads_s_it_is_subtracted_in_any_case(self, sites: tuple[str, ...]) -> None:
        p = make("random", torch.float32, torch.device("cpu"))
        found = [run(p, AttentionSpec(sites=(*sites, f"exponent={form}"))) for form in SITES["exponent"].choices]
        for one, other in itertools.combinations(found, 2):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)) == bool(sites)

    @pytest.mark.parametrize(("scale", "softcap"), [(-0.125, 0.0), (0.125, 50.0)])
    @pytest.mark.parametrize(("exponent", "form"), [("folded", Folded), ("unfused", Unfused)])
    def test_no_folding_with_a_soft_cap_or_a_negative_scale(
        self, exponent: str, form: type, scale: float, softcap: float
    ) -> None:
        p = one_hot(high=1.0, shape=(1, 4, 1, 16)).p
        key = AttentionSpec(sites=(f"exponent={exponent}",)).resolve().key()
        assert type(exponent_of(make_problem(p.q, p.k, p.v, key, scale, True, softcap))) is Subtracted
        assert type(exponent_of(make_problem(p.q, p.k, p.v, key, 0.125, True, 0.0))) is form

    @given(chosen=CHOSEN, scale=st.sampled_from((0.125, 0.0, -1.0)), softcap=st.sampled_from((0.0, 50.0)))
    @settings(deadline=None)
    def test_sites_that_fit_act_in_kernels_as_in_the_reference_and_others_are_refused(
        self, chosen: dict[str, str], scale: float, softcap: float
    ) -> None:
        """Refused with the site, in one line: only an L that is rounded and not there. Formed in S' only where S, m, l and L are FP32."""
        numerics = pytest.importorskip("attention.triton_numerics")
        spec = partial(AttentionSpec, preset="flash_unfused", sites=tuple(f"{k}={v}" for k, v in chosen.items()))
        if chosen["saved_statistics"] == "max_and_sum" and chosen["logsumexp"] != "fp32":
            refused = "^attention numerics saved_statistics = 'max_and_sum': expected logsumexp where .*$"
            with pytest.raises(UserError, match=refused):
                spec().resolve().concrete("bf16")
            return
        n = spec().resolve().concrete("bf16")
        rounded = {chosen[name] for name in ("scores", "statistics", "logsumexp")} != {"fp32"}
        codes = {"folded": numerics.FUSED, "subtracted": numerics.LATER, "unfused": numerics.UNFUSED}
        forms = {"folded": Folded, "subtracted": Subtracted, "unfused": Unfused}
        acts = not rounded and not softcap and scale > 0
        problem = make_problem(*torch.ones(3, 1, 1, 1, 1).bfloat16(), n.key(), scale, True, softcap)
        assert type(exponent_of(problem)) is (forms[chosen["exponent"]] if acts else Subtracted)
        expected = codes[chosen["exponent"]] if acts else numerics.SCALED
        assert numerics.exponent_code(n, scale, softcap) == expected.value

    @pytest.mark.parametrize("exponent", ["folded", "unfused"])
    def test_standard_attention_subtracts_only(self, exponent: str) -> None:
        spec = AttentionSpec(preset="standard", sites=(f"exponent={exponent}",))
        plans = AttentionConfig(default=spec).resolve(1, 1)
        with pytest.raises(UserError, match=r"exponent = .*, expected subtracted") as error:
            attention.check(plans, device=torch.device("cpu"), dtype=torch.bfloat16, head_dim=64)
        assert "\n" not in str(error.value)

    def test_torchs_kernels_and_unknown_forms_are_refused(self) -> None:
        with pytest.raises(UserError, match="attention numerics of sdpa_flash = 'hardware exponent=unfused'"):
            AttentionSpec(preset="sdpa_flash", sites=("exponent=unfused",))
        with pytest.raises(UserError, match="exponent = 'rounded': expected one of folded, subtracted, unfused"):
            AttentionSpec(sites=("exponent=rounded",))

    def test_run_a_can_subtract(self) -> None:
        changed = AttentionSpec(preset="flash_run_a", sites=("exponent=subtracted",)).resolve()
        assert changed.differences(AttentionSpec(preset="flash_run_a").resolve()) == ("exponent=subtracted",)
        x = one_hot(high=2e5, shape=(2, 64, 2, 64))
        assert torch.equal(x.run("exponent=subtracted", preset="flash_run_a")[0], x.p.v)

    @pytest.mark.timeout(300)
    def test_the_kernels_in_tritons_interpreter(self) -> None:
        pass_in_the_interpreter(__file__)


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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("logit", ANY)
@pytest.mark.parametrize("exponent", EXACT_AT_THE_MAXIMUM)
def test_kernels_that_subtract_or_do_not_fuse_give_the_v_of_a_single_key(
    exponent: str, logit: float, device: str
) -> None:
    x = kernel_rows(logit, device)
    assert torch.equal(x.run(backend="flash", preset=f"flash_{exponent}")[0], x.p.v)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("saved", SITES["saved_statistics"].choices)
@pytest.mark.parametrize("logit", ANY)
def test_kernels_that_do_not_fuse_have_o_and_dv_of_a_single_key_as_the_reference_to_the_bit(
    logit: float, saved: str, device: str
) -> None:
    """From L too, which is m there: P is 1, and dV is dO."""
    x = kernel_rows(logit, device)
    site = f"saved_statistics={saved}"
    found, expected = (x.run(site, backend=b, preset="flash_unfused") for b in ("flash", "flash_reference"))
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[3], expected[3])
    assert torch.equal(found[3], x.p.do)


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
@pytest.mark.parametrize("logit", LOGITS)
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
    subtracted, folded = (x.run(backend="flash", preset=preset) for preset in ("flash_subtracted", "flash"))
    for name, a, b in zip(("dq", "dk"), subtracted[1:3], folded[1:3], strict=True):
        assert a.double().norm() < 1e-2 * b.double().norm(), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("exponent", SITES["exponent"].choices)
def test_kernels_hold_the_shift_of_tied_maxima_to_the_same_cap(exponent: str, device: str) -> None:
    """P_bar in BF16 tells shifts apart: where all keys tie at 100 and the cap is 1 it is exp(-1), rounded by 0.2 %; l is not."""
    p = kernel_rows(1.0, device).p
    q, k = (torch.zeros_like(p.q[:1, :16]) for _ in range(2))
    q[..., 0], k[..., 0] = 10.0, 10.0
    v = torch.ones_like(q)
    sites = (
        "row_max=stabilised_safe",
        "row_max_cap=1",
        "tile_q=16",
        "tile_k=16",
        "output=fp32",
        f"exponent={exponent}",
    )
    plan = AttentionConfig(default=AttentionSpec(sites=sites, backend="flash")).resolve(1, q.shape[2])[0]
    o = attention.run(q, k, v, plan, rounding_seed=torch.tensor(0, device=device), scale=1.0)
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
@pytest.mark.parametrize("exponent", ["folded", "subtracted"])
def test_kernels_weights_near_a_maximum_of_200_000_are_exact_folded_or_subtracted(exponent: str, device: str) -> None:
    """Folded, x is common to a row and drops out of P_bar / l unrounded."""
    o, exact = near_a_large_maximum(exponent, device, "flash")
    assert (o - exact).abs().max() < 1e-5


@pytest.mark.parametrize("device", DEVICES)
def test_kernels_unfused_are_off_there_as_the_reference_is(device: str) -> None:
    """Each key has a rounding of its own: the errors are the reference's, product by product."""
    (o, exact), (expected, _) = (near_a_large_maximum("unfused", device, b) for b in ("flash", "flash_reference"))
    assert (expected - exact).abs().max() > 1e-3
    assert (o - expected).abs().max() < 1e-5
