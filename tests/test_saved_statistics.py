"""The site ``saved_statistics``: P of the backward pass from L, one number a row that is rounded to FP32, or from m and log l apart.

Rows, logits and devices are those of ``test_exponent``; the kernels' tests on the CPU run in a pytest of their own (``kernel_tests``).
"""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from attention_cases import Problem, magnitudes, make, oracle, relative_errors, run
from kernel_tests import INTERPRETED, pass_in_the_interpreter
from test_exponent import ANY, DEVICES, EXACT_AT_THE_MAXIMUM, LOGITS, OneHot, kernel_rows, one_hot
from torch import Tensor

import attention
import config as configuration
from attention import AttentionConfig, AttentionSpec
from attention.flash_reference import row_deltas
from attention.numerics import SITES, numerics_from_key
from config import TrainConfig
from errors import UserError

APART = "saved_statistics=max_and_sum"
CURE = "flash_delta_from_p_subtracted"
LARGE = [logit for logit in LOGITS if logit > 1e5]
BLOCKS = ("tile_q=16", "tile_k=16")


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


@pytest.mark.skipif(INTERPRETED, reason="no kernel in it")
class TestReference:
    @pytest.mark.parametrize("logit", ANY)
    @pytest.mark.parametrize("form", EXACT_AT_THE_MAXIMUM)
    @pytest.mark.parametrize("saved", SITES["saved_statistics"].choices)
    def test_subtracted_or_unfused_p_of_a_single_key_is_one(self, saved: str, form: str, logit: float) -> None:
        """From L too: it is m there."""
        x = one_hot(high=logit, shape=(8, 64, 2, 64))
        assert torch.all(column_sums(x, f"exponent={form}", f"saved_statistics={saved}") == 1)

    @pytest.mark.parametrize("logit", LOGITS)
    def test_folded_and_apart_it_is_one_to_the_last_bits_of_fp32(self, logit: float) -> None:
        """P_bar = 1 + x over l = 1 + x."""
        x = one_hot(high=logit, shape=(8, 64, 2, 64))
        assert (column_sums(x, APART) - 1).abs().max() < 2.0**-22

    @pytest.mark.parametrize("logit", LOGITS)
    def test_folded_from_l_it_is_off_by_up_to_half_a_unit_of_l(self, logit: float) -> None:
        x = one_hot(high=logit, shape=(8, 64, 2, 64))
        off = column_sums(x).log2().abs().max().item()
        half = 2.0 ** (math.floor(math.log2(x.high / math.log(2))) - 24)
        assert half / 2 < off < half * 1.01 + 2.0**-22

    @pytest.mark.parametrize("form", SITES["exponent"].choices)
    @pytest.mark.parametrize("logit", LARGE)
    def test_two_tied_keys_have_one_half_each_apart(self, logit: float, form: str) -> None:
        """m + log 2 has no room for log 2: from L it is off. Unfused it is not: m and log2(2) = 1 have room in log2."""
        x = two_tied(one_hot(high=logit, shape=(8, 64, 2, 64)))
        apart, joined = (column_sums(x, f"exponent={form}", site) for site in (APART, "saved_statistics=logsumexp"))
        second = (apart[:, 1::2] - 0.5).abs().max()  # the keys that one row alone sees
        assert second < 2.0**-22
        assert ((joined[:, 1::2] - 0.5).abs().max() > 1e-3) == (form != "unfused")

    @pytest.mark.parametrize("form", SITES["exponent"].choices)
    def test_rows_of_many_keys_sum_to_one_only_apart(self, form: str) -> None:
        apart, joined = (
            (row_sums(f"exponent={form}", site) - 1).abs() for site in (APART, "saved_statistics=logsumexp")
        )
        assert apart.max() < 1e-6
        assert joined.max() > 1e-3

    @pytest.mark.parametrize("form", SITES["exponent"].choices)
    @pytest.mark.parametrize("logit", LOGITS)
    def test_delta_from_p_has_no_error_apart(self, logit: float, form: str) -> None:
        """n = 8,192 rows of a single key, against FP64. What is left is FP32's own: the largest of them is 6e-7."""
        errors = one_hot(high=logit).delta_errors("delta=rowsum_p_dp", f"exponent={form}", APART)
        assert len(errors) == 8192
        assert errors.abs().max() < 1e-6

    @pytest.mark.parametrize(("logit", "size"), [(2e5, 3.1e-3), (1e6, 1.9e-2)])
    def test_delta_from_p_from_l_has_the_published_error(self, logit: float, size: float) -> None:
        """attention/README.md; l is 1 there to within P_bar's rest, so that this is the rounding of m and then that of L."""
        errors = one_hot(high=logit).delta_errors("delta=rowsum_p_dp")
        assert errors.square().mean().sqrt().item() == pytest.approx(size, rel=0.03)

    @pytest.mark.parametrize("logit", LARGE)
    def test_the_error_of_delta_from_l_is_as_often_of_either_sign(self, logit: float) -> None:
        """n = 8,192: it is large, and no bias: L is rounded to nearest."""
        errors = one_hot(high=logit).delta_errors("delta=rowsum_p_dp")
        assert errors.mean().abs() < 3 * errors.std() / len(errors) ** 0.5
        assert 0.47 < (errors > 0).double().mean() < 0.53

    def test_apart_dq_and_dk_of_a_single_key_are_zero(self) -> None:
        """P = 1, so that delta from P is dP to the bit, and dS = 0; from L, dS = P dP (1 - P)."""
        x = one_hot(high=2e5, shape=(2, 64, 2, 64))
        assert all(not gradient.any() for gradient in x.run(preset=CURE)[1:3])
        assert all(gradient.any() for gradient in x.run(preset="flash_delta_from_p")[1:3])

    @pytest.mark.parametrize("delta", ["rowsum_do_o", "rowsum_p_dp", "recomputed_o"])
    @pytest.mark.parametrize("sites", [(), ("scores=m20",), ("row_max=stabilised_safe",)])
    def test_at_ordinary_logits_both_are_as_exact(self, sites: tuple[str, ...], delta: str) -> None:
        p = make("tied", torch.float32, torch.device("cpu"))
        chosen = (*BLOCKS, f"delta={delta}", *sites)
        apart, joined = (
            relative_errors(run(p, AttentionSpec(sites=(*chosen, *more))), oracle(p), magnitudes(p))
            for more in ((APART,), ())
        )
        assert all(a < 1.5 * b + 2.0**-22 for a, b in zip(apart, joined, strict=True))
        assert max(joined) < 2.0**-20

    def test_the_forward_pass_is_the_same(self) -> None:
        p = make("random", torch.bfloat16, torch.device("cpu"))
        assert torch.equal(
            *(run(p, AttentionSpec(sites=(f"saved_statistics={s}",)))[0] for s in SITES["saved_statistics"].choices)
        )

    def test_the_operator_passes_torchs_own_checks(self) -> None:
        p = make("random", torch.bfloat16, torch.device("cpu"), (1, 6, 2, 4))
        q, k, v = (x.clone().requires_grad_() for x in (p.q, p.k, p.v))
        key = AttentionSpec(preset=CURE).resolve().key()
        operator = torch.ops.attention.flash_reference_forward
        torch.library.opcheck(operator, (q, k, v, torch.tensor(0), key, 0.5, True, 0.0))

    @pytest.mark.timeout(300)
    def test_the_kernels_in_tritons_interpreter(self) -> None:
        pass_in_the_interpreter(__file__)


@pytest.mark.skipif(INTERPRETED, reason="no kernel in it")
class TestField:
    @pytest.mark.parametrize("fmt", ["bf16", "m20"])
    def test_apart_there_is_no_l_to_round(self, fmt: str) -> None:
        with pytest.raises(UserError) as error:
            AttentionSpec(sites=(APART, f"logsumexp={fmt}"))
        message = str(error.value)
        assert message.startswith("attention numerics saved_statistics = 'max_and_sum': expected logsumexp where")
        assert "\n" not in message

    @pytest.mark.parametrize("backend", ["flash", "flash_reference"])
    def test_an_l_in_the_format_of_q_is_refused_where_that_is_not_fp32(self, backend: str) -> None:
        plans = AttentionConfig(default=AttentionSpec(sites=(APART, "logsumexp=input"), backend=backend)).resolve(1, 1)
        device = torch.device("cpu")
        with pytest.raises(UserError) as error:
            attention.check(plans, device=device, dtype=torch.bfloat16, head_dim=16)
        if backend == "flash_reference":
            assert "saved_statistics = 'max_and_sum': expected logsumexp where" in str(error.value)
            attention.check(plans, device=device, dtype=torch.float32, head_dim=16)

    def test_standard_attention_refuses_with_field_value_and_choice(self) -> None:
        plans = AttentionConfig(default=AttentionSpec(preset="standard", sites=(APART,))).resolve(1, 1)
        with pytest.raises(UserError, match="saved_statistics = 'max_and_sum', expected logsumexp") as error:
            attention.check(plans, device=torch.device("cpu"), dtype=torch.bfloat16, head_dim=64)
        assert "\n" not in str(error.value)

    def test_torchs_kernels_refuse_it(self) -> None:
        with pytest.raises(
            UserError, match="attention numerics of sdpa_flash = 'hardware saved_statistics=max_and_sum'"
        ):
            AttentionSpec(preset="sdpa_flash", sites=(APART,))

    def test_numerics_written_before_it_had_a_name_kept_l(self) -> None:
        numerics = AttentionSpec().resolve()
        assert numerics_from_key(numerics.key().replace('"saved_statistics": "logsumexp", ', "")) == numerics
        assert '"saved_statistics"' in numerics.key()

    def test_it_comes_through_the_command_line_and_json(self) -> None:
        loaded = configuration.load(["configs/debug.py", "--attention.default.sites", APART])
        again = configuration.from_json(TrainConfig, json.loads(json.dumps(configuration.to_json(loaded))))
        assert again == loaded
        numerics = numerics_from_key(again.attention.resolve(1, 1)[0].groups[0].numerics)
        assert numerics.differences(AttentionSpec().resolve()) == (APART,)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("logit", [2e4, 2e5, 1e7])
@pytest.mark.parametrize(
    ("form", "saved"), [("subtracted", "max_and_sum"), ("unfused", "max_and_sum"), ("unfused", "logsumexp")]
)
def test_kernels_that_subtract_have_p_of_one_apart_and_unfused_from_l_too(
    form: str, saved: str, logit: float, device: str
) -> None:
    sites = f"exponent={form}", f"saved_statistics={saved}"
    assert torch.all(column_sums(kernel_rows(logit, device), *sites, backend="flash") == 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("logit", LOGITS)
def test_kernels_that_fold_have_p_of_one_apart_to_the_last_bits(logit: float, device: str) -> None:
    assert (column_sums(kernel_rows(logit, device), APART, backend="flash") - 1).abs().max() < 2.0**-21


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", ["folded", "subtracted"])
@pytest.mark.parametrize("logit", LARGE)
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
        (("exponent=folded",), 0.0),
        (("exponent=subtracted",), 0.0),
        (("exponent=folded", "row_max=stabilised_safe"), 0.0),
        (("exponent=subtracted", "row_max=stabilised_safe"), 0.0),
        (("exponent=unfused",), 0.0),
        (("exponent=unfused", "row_max=stabilised_safe"), 0.0),
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


@pytest.mark.parametrize("device", DEVICES)
def test_the_kernels_operators_pass_torchs_own_checks(device: str) -> None:
    from attention.flash_triton import _forward

    p = kernel_rows(1.0, device).p
    q, k, v = (x[:1, :6, :1, :16].clone().requires_grad_() for x in (p.q, p.k, p.v))
    key = AttentionSpec(preset=CURE).resolve().key()
    arguments = (q, k, v, torch.tensor(0, device=device), key, 0.5, True, 0.0)
    torch.library.opcheck(
        _forward, arguments, test_utils=("test_schema", "test_faketensor", "test_autograd_registration")
    )
