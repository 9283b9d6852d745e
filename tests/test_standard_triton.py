"""``standard_triton`` against ``standard`` and fp64: in Triton's interpreter on the CPU, compiled on a GPU (as in test_flash_triton.py)."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from attention_cases import CASES, Problem, magnitudes, make, oracle, relative_errors, run
from kernel_tests import pass_in_the_interpreter, poison_new_tensors

import attention
from attention import AttentionConfig, AttentionSpec
from errors import UserError

triton = pytest.importorskip("triton")

INTERPRETED = bool(triton.knobs.runtime.interpret)
DEVICES = ["cpu"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)]
on_gpu = pytest.mark.gpu if not INTERPRETED else pytest.mark.skip(reason="sizes for a GPU")
NAMES = ("o", "dq", "dk", "dv")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_tensors(monkeypatch)


def spec(backend: str = "standard_triton", numerics: str = "hardware", sites: tuple[str, ...] = ()) -> AttentionSpec:
    return AttentionSpec(preset="standard", numerics=numerics, sites=sites, backend=backend)


def assert_agree(p: Problem, numerics: str = "hardware", sites: tuple[str, ...] = (), **settings) -> None:  # type: ignore[no-untyped-def]
    """Kernels and matrices differ by less than a quarter of the latter's own rounding error, by FP32 noise, that of an exponent of the
    size of the largest score, or, up to half of the rounding error, by what the noise of long sums makes of a rounding. Tensor cores cut
    their sums toward zero, here taken as one last place for 16 terms: noise that all terms of one sign have in common. A share noise / u
    of values then rounds to the neighbour, u away, where u is sqrt(12) times the rounding error: sqrt(u * noise) in the root of the mean
    square. That is so of O; gradients average many roundings, and half of their error is what a site that is left out passes."""
    largest_score = (p.q.float().norm(dim=-1).max() * p.k.float().norm(dim=-1).max()).item() * p.q.shape[-1] ** -0.5
    found = run(p, spec("standard_triton", numerics, sites), **settings)
    expected = run(p, spec("standard", numerics, sites), **settings)
    exact, unit = oracle(p, settings.get("softcap", 0.0)), magnitudes(p)
    apart = relative_errors(found, tuple(x.double() for x in expected), unit)
    own = relative_errors(expected, exact, unit)
    noise = 2.0**-24 * p.q.shape[1] / 16
    for name, x, y, error, limit in zip(NAMES, found, expected, apart, own, strict=True):
        assert x.dtype == y.dtype
        flips = min((12**0.5 * limit * noise) ** 0.5, limit / 2)
        allowed = max(limit / 4, 2.0**-24 * max(largest_score, 16), flips)
        assert error <= allowed, f"{numerics} {name}: {error:.2e} apart, own error {limit:.2e}"


@pytest.mark.skipif(INTERPRETED, reason="this is the pytest it starts")
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_kernels_in_tritons_interpreter() -> None:
    pass_in_the_interpreter(__file__)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("numerics", ["hardware", "paper", "fp32", "microcosm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_it_agrees_with_the_matrices(case: str, numerics: str, dtype: torch.dtype, device: torch.device) -> None:
    assert_agree(make(case, dtype, device, (1, 40, 2, 16)), numerics)


@pytest.mark.parametrize("case", ["random", "peaked", "tied", "one_signed_v"])
def test_o_has_the_bits_of_the_matrices(case: str, device: torch.device) -> None:
    """P is rounded at one place to one grid, so that only another order of FP32 sums is left; P_bar rounded before the division by l,
    as in ``flash``, gives other bits in a part of O that is seen."""
    p = make(case, torch.bfloat16, device, (1, 128, 2, 32))
    found, expected = run(p, spec())[0], run(p, spec("standard"))[0]
    flash = run(p, AttentionSpec(preset="flash", backend="flash_reference"))[0]
    assert (found == expected).float().mean() > 0.995
    assert (flash == expected).float().mean() < 0.95


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 33, 70])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_any_length_works(length: int, dtype: torch.dtype, device: torch.device) -> None:
    assert_agree(make("random", dtype, device, (2, length, 1, 16)))


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_other_head_dims(head_dim: int, device: torch.device) -> None:
    assert_agree(make("random", torch.bfloat16, device, (1, 33, 1, head_dim)))


SITES = "inputs scores probabilities output output_gradient delta_sum probability_gradients score_gradients"


@pytest.mark.parametrize("site", SITES.split())
def test_each_site_rounds_as_in_the_matrices(site: str, device: torch.device) -> None:
    p = make("random", torch.float32, device, (1, 35, 1, 16))
    assert_agree(p, sites=(f"{site}=m3",))
    rounded, plain = run(p, spec(sites=(f"{site}=m3",))), run(p, spec())
    assert not all(torch.equal(a, b) for a, b in zip(rounded, plain, strict=True))


@pytest.mark.parametrize("site", ["logsumexp=m3", "gradient_accumulator=m3"])
def test_sites_that_it_has_not_round_nothing(site: str, device: torch.device) -> None:
    """As in ``standard``: it has neither an L nor running sums of gradients."""
    p = make("random", torch.float32, device, (1, 35, 1, 16))
    for backend in ("standard", "standard_triton"):
        rounded, plain = run(p, spec(backend, sites=(site,))), run(p, spec(backend))
        assert all(torch.equal(a, b) for a, b in zip(rounded, plain, strict=True))


@pytest.mark.parametrize("rounding", ["stochastic", "toward_zero"])
def test_output_roundings_draw_the_same_bits(rounding: str, device: torch.device) -> None:
    p = make("random", torch.float32, device, (2, 17, 2, 16))
    assert_agree(p, sites=("output=m3", f"output_rounding={rounding}"), seed=2**40 + 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_softcap_agrees(dtype: torch.dtype, device: torch.device) -> None:
    assert_agree(make("peaked", dtype, device, (1, 33, 1, 16)), softcap=5.0)


def test_full_attention_agrees_in_both_directions(device: torch.device) -> None:
    p = make("random", torch.float32, device, (1, 35, 2, 16))

    def full(q, k, v, plan, **settings):  # type: ignore[no-untyped-def]
        return attention.run(q, k, v, plan, causal=False, **settings)

    found, expected = run(p, spec(), call=full), run(p, spec("standard"), call=full)
    assert max(relative_errors(found, tuple(x.double() for x in expected))) < 1e-6


def test_large_logits_give_finite_numbers(device: torch.device) -> None:
    p = make("random", torch.bfloat16, device, (1, 40, 2, 16))
    p = Problem(p.q * 3000, p.k * 3000, p.v, p.do)
    assert all(x.isfinite().all() for x in run(p, spec()))
    assert_agree(p)


def test_strided_views_give_the_same_bits(device: torch.device) -> None:
    p = make("random", torch.bfloat16, device, (1, 40, 2, 16))
    plan = AttentionConfig(default=spec()).resolve(1, 2)[0]
    seed = torch.tensor(0, device=device)
    fused = torch.cat([p.q, p.k, p.v], dim=2).requires_grad_()
    apart = [x.clone().requires_grad_() for x in (p.q, p.k, p.v)]
    outputs = [attention.run(*views, plan, rounding_seed=seed) for views in (fused.split(2, dim=2), apart)]
    assert torch.equal(*outputs)
    expanded = p.do[:, :1, :, :1].expand(p.do.shape)  # strides of 0
    (found,) = torch.autograd.grad(outputs[0], fused, expanded)
    assert torch.equal(found, torch.cat(torch.autograd.grad(outputs[1], apart, expanded.contiguous()), dim=2))


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU the kernels take this path by themselves")
def test_blocks_fetched_through_descriptors_are_the_same(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from attention import standard_triton, triton_backward

    p = make("random", torch.bfloat16, device, (1, 70, 2, 64))
    plain = run(p, spec())
    allowed = Mock(return_value=True)
    for module in (standard_triton, triton_backward):
        monkeypatch.setattr(module, "takes_descriptor", allowed)
    through = run(p, spec())
    assert allowed.call_count > 1
    assert all(torch.equal(a, b) for a, b in zip(plain, through, strict=True))


def test_repeats_are_equal_to_the_bit(device: torch.device) -> None:
    p = make("random", torch.bfloat16, device, (1, 40, 2, 16) if INTERPRETED else (2, 1000, 4, 64))
    first = run(p, spec())
    for _ in range(1 if INTERPRETED else 50):
        assert all(torch.equal(a, b) for a, b in zip(first, run(p, spec()), strict=True))


def test_the_operator_passes_torchs_own_checks(device: torch.device) -> None:
    from attention.standard_triton import _forward

    p = make("random", torch.bfloat16, device, (1, 6, 1, 16))
    q, k, v = (x.clone().requires_grad_() for x in (p.q, p.k, p.v))
    arguments = (q, k, v, torch.tensor(0, device=device), spec().resolve().key(), 0.5, True, 0.0)
    torch.library.opcheck(
        _forward, arguments, test_utils=("test_schema", "test_faketensor", "test_autograd_registration")
    )


def test_compiled_equals_eager_to_the_bit(device: torch.device) -> None:
    p = make("tied", torch.bfloat16, device, (1, 40, 2, 16))
    torch.compiler.reset()
    compiled = torch.compile(attention.run, backend="aot_eager" if INTERPRETED else "inductor")
    found = run(p, spec(), call=compiled)
    assert all(torch.equal(a, b) for a, b in zip(run(p, spec()), found, strict=True))


@pytest.mark.parametrize(
    ("chosen", "head_dim", "reason"),
    [
        (spec(), 64, "it needs a CUDA device (or TRITON_INTERPRET=1); standard runs anywhere"),
        (spec(), 48, "it takes head dims 16, 32, 64, 128, not 48; standard runs anywhere"),
        (AttentionSpec(preset="flash", backend="standard_triton"), 64, "it has delta = rowsum(P * dP) only"),
        (spec(sites=("exponent=folded",)), 64, "it subtracts the row maximum from S first"),
    ],
)
def test_what_it_cannot_run_is_refused_with_the_reason(
    chosen: AttentionSpec, head_dim: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention.registry, "_interprets", lambda: "CUDA" not in reason)
    plans = AttentionConfig(default=chosen).resolve(1, 2)
    with pytest.raises(UserError) as error:
        attention.check(plans, device=torch.device("cpu"), dtype=torch.bfloat16, head_dim=head_dim)
    assert reason in str(error.value)


@on_gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 1000, 1024, 2048])
def test_lengths_and_cases_on_a_gpu(length: int, head_dim: int) -> None:
    for case in CASES:
        for dtype in (torch.bfloat16, torch.float16):
            assert_agree(make(case, dtype, torch.device("cuda"), (2, length, 3, head_dim)))
