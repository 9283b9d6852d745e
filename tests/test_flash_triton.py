"""The Triton kernels against ``flash_reference`` and fp64: in Triton's interpreter on the CPU, compiled on a GPU.

The interpreter is chosen when a kernel is defined, for the whole process, and inductor cannot live with it; so the tests of the CPU
run in a pytest of their own, which ``test_the_kernels_in_tritons_interpreter`` starts. There ``DEVICES`` is the CPU; elsewhere, a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from attention_cases import (
    CASES,
    Problem,
    magnitudes,
    make,
    oracle,
    relative_errors,
    run,
    share_apart,
    weights_seen,
)
from kernel_tests import pass_in_the_interpreter, poison_new_tensors
from test_bias import TOPS, rows
from torch import Tensor

import attention
from attention import AttentionConfig, AttentionRule, AttentionSpec
from attention.numerics import BASES
from attention.plan import PRESETS
from errors import UserError

triton = pytest.importorskip("triton")

INTERPRETED = bool(triton.knobs.runtime.interpret)
DEVICES = ["cpu"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)]
FLASH = [name for name, preset in PRESETS.items() if preset.backend == "flash" and name != "flash_run_a"]
TILES = ("tile_q=16", "tile_k=16")  # neither divides T = 40: partial blocks in both directions
on_gpu = pytest.mark.gpu if not INTERPRETED else pytest.mark.skip(reason="sizes for a GPU")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_tensors(monkeypatch)


def problem(
    case: str, device: torch.device, dtype: torch.dtype = torch.bfloat16, shape: tuple[int, ...] = (1, 40, 2, 16)
) -> Problem:
    p = make("random" if case == "huge" else case, dtype, device, shape)
    return Problem(p.q * 300, p.k * 300, p.v, p.do) if case == "huge" else p


def spec(
    preset: str, numerics: str = "hardware", sites: tuple[str, ...] = TILES, backend: str = "flash"
) -> AttentionSpec:
    own_tiles = preset == "flash_untiled"
    return AttentionSpec(preset=preset, numerics=numerics, sites=() if own_tiles else sites, backend=backend)


def assert_agree(
    p: Problem, preset: str, numerics: str = "hardware", sites: tuple[str, ...] = TILES, **settings
) -> None:  # type: ignore[no-untyped-def]
    """Kernel and reference differ by less than a quarter of the reference's own rounding error, or by FP32 noise."""
    found = run(p, spec(preset, numerics, sites), **settings)
    expected = run(p, spec(preset, numerics, sites, "flash_reference"), **settings)
    exact, unit = oracle(p, settings.get("softcap", 0.0)), magnitudes(p)
    apart = relative_errors(found, tuple(x.double() for x in expected), unit)
    for name, a, b, own in zip(
        ("o", "dq", "dk", "dv"), found, apart, relative_errors(expected, exact, unit), strict=True
    ):
        assert a.dtype == (expected[0].dtype if name == "o" else p.q.dtype)
        assert b <= max(own / 4, 2.0**-21), f"{preset} {numerics} {name}: {b:.2e} apart, own error {own:.2e}"


@pytest.mark.skipif(INTERPRETED, reason="this is the pytest it starts")
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_kernels_in_tritons_interpreter() -> None:
    pass_in_the_interpreter(__file__)


@pytest.mark.parametrize(
    ("chosen", "head_dim", "reason"),
    [
        (spec("flash"), 64, "it needs a CUDA device (or TRITON_INTERPRET=1); flash_reference runs anywhere"),
        (spec("flash"), 48, "it takes head dims 16, 32, 64, 128, not 48"),
        (spec("flash_stable", sites=("tile_k=24",)), 64, "it needs tile_k divisible by 16, not 24"),
        (spec("flash", sites=("tile_q=8", "gradient_accumulator=bf16")), 64, "it needs tile_q divisible by 16, not 8"),
    ],
)
def test_what_the_kernels_cannot_run_is_refused_with_the_reason(
    chosen: AttentionSpec, head_dim: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention.registry, "_interprets", lambda: "CUDA" not in reason)
    plans = AttentionConfig(default=chosen).resolve(1, 2)
    with pytest.raises(UserError) as error:
        attention.check(plans, device=torch.device("cpu"), dtype=torch.bfloat16, head_dim=head_dim)
    assert reason in str(error.value)
    assert "backends that can: " in str(error.value)


@pytest.mark.skipif(not INTERPRETED, reason="faults of the interpreter")
def test_the_two_faults_of_the_interpreter_that_triton_numerics_works_around() -> None:
    """If this fails because Triton mended one, drop the workaround in ``attention/triton_numerics.py``."""
    import triton.language as tl

    @triton.jit
    def fault_kernel(p_x, p_y, p_cast, p_dot):  # type: ignore[no-untyped-def]
        o = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
        b_x = tl.load(p_x + o)
        tl.store(p_cast + o, tl.load(p_y + o).to(tl.bfloat16))
        tl.store(p_dot + o, tl.dot(b_x, b_x))

    x = torch.ones(16, 16, dtype=torch.bfloat16)
    y = torch.full((16, 16), 1 + 0.75 * 2**-7)
    cast, product = torch.zeros_like(x), torch.zeros(16, 16)
    fault_kernel[(1,)](x, y, cast, product)
    assert torch.all(cast == 1)  # nearest is 1 + 2^-7
    assert not torch.any(product == 16)


@pytest.mark.parametrize("numerics", ["hardware", "paper", "fp32"])
@pytest.mark.parametrize("preset", FLASH)
def test_every_preset_agrees_with_the_reference(preset: str, numerics: str, device: torch.device) -> None:
    assert_agree(problem("tied" if "stable" in preset else "random", device), preset, numerics, seed=5)


@pytest.mark.parametrize("case", [*CASES, "huge"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_as_exact_as_the_reference_against_fp64(case: str, dtype: torch.dtype, device: torch.device) -> None:
    assert_as_exact(problem(case, device, dtype), "flash")


def assert_as_exact(p: Problem, preset: str, sites: tuple[str, ...] = TILES) -> None:
    """Error against fp64 at most twice the reference's, the floor being the unit of the format and that of L in FP32."""
    exact, unit = oracle(p), magnitudes(p)
    largest_score = (p.q.float().norm(dim=-1).max() * p.k.float().norm(dim=-1).max()).item() * p.q.shape[-1] ** -0.5
    floor = max(2.0**-24 * max(largest_score, 16), 0 if p.q.dtype == torch.float32 else 2.0**-10)
    own = relative_errors(run(p, spec(preset, sites=sites, backend="flash_reference")), exact, unit)
    errors = relative_errors(run(p, spec(preset, sites=sites)), exact, unit)
    for name, error, limit in zip(("o", "dq", "dk", "dv"), errors, own, strict=True):
        assert error <= 2 * max(limit, floor), f"{preset} {name}: {error:.2e}, reference {limit:.2e}"


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 33])
def test_any_length_works(length: int, device: torch.device) -> None:
    for preset in ("flash", "flash_stable_safe"):
        assert_as_exact(problem("random", device, torch.float32, (2, length, 1, 16)), preset)


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_other_head_dims_and_default_tiles(head_dim: int, device: torch.device) -> None:
    assert_agree(problem("random", device, shape=(1, 33, 1, head_dim)), "flash", sites=())


@pytest.mark.parametrize("preset", ["flash", "flash_stable", "flash_fp32_o"])
@pytest.mark.parametrize("tile", [0, 32, 48])
def test_a_tile_of_many_blocks_is_kept(preset: str, tile: int, device: torch.device) -> None:
    """tile_k = 48 is no block size, 0 is the whole sequence: the kernel walks the tile in blocks and rounds once a tile."""
    sites = (f"tile_k={tile}", "tile_q=16", "statistics=bf16", "tile_product=bf16", "accumulator=m4")
    assert_agree(problem("tied", device, shape=(1, 70, 1, 16)), preset, sites=sites)


SITES = """inputs scores statistics logsumexp probabilities tile_product accumulator output output_gradient delta_output
delta_sum probability_gradients score_gradients gradient_accumulator"""


@pytest.mark.parametrize("site", SITES.split())
def test_each_site_rounds_as_in_the_reference(site: str, device: torch.device) -> None:
    p = problem("random", device, torch.float32, (1, 35, 1, 16))
    tiles = ("tile_q=32", "tile_k=16")
    assert_agree(p, "flash", sites=(f"{site}=m3", *tiles))
    rounded, plain = (run(p, spec("flash", sites=s)) for s in ((f"{site}=m3", *tiles), tiles))
    assert not all(torch.equal(a, b) for a, b in zip(rounded, plain, strict=True))


@pytest.mark.parametrize("sites", [("output=m3",), ("delta_output=m3",), ("output=fp16", "delta_output=m1")])
@pytest.mark.parametrize("rounding", ["stochastic", "toward_zero"])
def test_output_roundings_draw_the_references_bits(sites: tuple[str, ...], rounding: str, device: torch.device) -> None:
    p = problem("random", device, torch.float32, (2, 17, 2, 16))
    extra = (f"output_rounding={rounding}", f"delta_rounding={rounding}", *TILES)
    assert_agree(p, "flash", sites=(*sites, *extra), seed=2**40 + 7)


@pytest.mark.parametrize(
    "sites",
    [
        (),
        ("probabilities_rounding=stochastic",),
        ("delta_output=fp32", "accumulator=m5"),
        ("delta_output=residual8",),
        ("statistics=m4", "tile_product=m6"),
        ("saved_statistics=max_and_sum",),
        ("row_max=stabilised_safe",),
        ("tile_k=0", "statistics=m4"),
        ("tile_k=48", "delta_output=fp32", "accumulator=m5"),
    ],
    ids=" ".join,
)
def test_o_is_divided_by_the_sum_that_the_reference_makes(sites: tuple[str, ...], device: torch.device) -> None:
    """P_bar in three bits, so that its sum is far from l; rows of blocks without and with hidden columns."""
    p = problem("random", device, torch.float32, (2, 70, 2, 16))
    tiles = ("tile_q=16", "tile_k=16", "probabilities=m3")
    assert_agree(p, "flash_rounded_sum", sites=(*tiles, *sites), seed=5)
    found, plain = (run(p, spec(name, sites=(*tiles, *sites)), seed=5)[0] for name in ("flash_rounded_sum", "flash"))
    assert (found - plain).norm() / plain.norm() > 1e-3


@pytest.mark.parametrize("shape", [(2, 40, 2, 16), (1, 70, 2, 32), (1, 33, 1, 64)])
@pytest.mark.parametrize("tiles", [(16, 16), (64, 32), (32, 48), (64, 64)])
def test_p_bar_draws_the_references_bits(shape: tuple[int, ...], tiles: tuple[int, int], device: torch.device) -> None:
    """Of P_bar one by one. Exponentials may differ in the last bit of FP32, which seldom shows; other bits would, in a third of them."""
    sites = (f"tile_q={tiles[0]}", f"tile_k={tiles[1]}")
    found = weights_seen(spec("flash_stochastic_p", sites=sites), device, shape, seed=2**40 + 7)
    expected = weights_seen(
        spec("flash_stochastic_p", sites=(), backend="flash_reference"), device, shape, seed=2**40 + 7
    )
    assert share_apart(found, expected) < 1e-3


@pytest.mark.parametrize(
    ("dtype", "sites"),
    [
        (torch.float16, ()),
        (torch.float32, ("probabilities=m3",)),  # fewer random bits than are cut off
        (torch.float32, ("probabilities=m9",)),
        (torch.bfloat16, ("probabilities=m5",)),
        (
            torch.bfloat16,
            ("tile_k=48", "statistics=m12", "tile_product=m12", "accumulator=m12"),
        ),  # tiles of many blocks
        (torch.bfloat16, ("row_max=stabilised_safe", "tile_k=16")),
        (torch.bfloat16, ("products=tf32x3",)),
        (torch.bfloat16, ("output_rounding=stochastic", "delta_output=m4", "delta_rounding=stochastic")),
    ],
)
def test_draws_of_p_bar_agree_in_other_formats_and_tiles(
    dtype: torch.dtype, sites: tuple[str, ...], device: torch.device
) -> None:
    p = problem("random", device, dtype, (2, 40, 1, 16))
    assert_agree(p, "flash", sites=(*TILES, "probabilities_rounding=stochastic", *sites), seed=2**40 + 7)


def test_microcosm_numerics_agree(device: torch.device) -> None:
    p = problem("random", device, torch.float32, (1, 40, 1, 16))
    for preset in ("flash", "flash_delta_from_p", "flash_stochastic_o"):
        assert_agree(p, preset, "microcosm", sites=())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("preset", ["flash", "flash_delta_from_p", "flash_recompute_o"])
def test_softcap_agrees(preset: str, dtype: torch.dtype, device: torch.device) -> None:
    assert_agree(problem("peaked", device, dtype, (1, 33, 1, 16)), preset, softcap=5.0)


def test_full_attention_agrees_in_both_directions(device: torch.device) -> None:
    p = problem("random", device, torch.float32, (1, 35, 2, 16))

    def full(q, k, v, plan, **settings):  # type: ignore[no-untyped-def]
        return attention.run(q, k, v, plan, causal=False, **settings)

    found = run(p, spec("flash"), call=full)
    expected = run(p, spec("flash", backend="flash_reference"), call=full)
    assert max(relative_errors(found, tuple(x.double() for x in expected))) < 1e-6


def test_strided_views_and_gradients_give_the_same_bits(device: torch.device) -> None:
    p = problem("random", device)
    plan = AttentionConfig(default=spec("flash")).resolve(1, 2)[0]
    seed = torch.tensor(0, device=device)
    fused = torch.cat([p.q, p.k, p.v], dim=2).requires_grad_()
    apart = [x.clone().requires_grad_() for x in (p.q, p.k, p.v)]
    outputs = [attention.run(*views, plan, rounding_seed=seed) for views in (fused.split(2, dim=2), apart)]
    assert torch.equal(*outputs)
    assert outputs[0].is_contiguous()
    expanded = p.do[:, :1, :, :1].expand(p.do.shape)  # strides of 0
    (found,) = torch.autograd.grad(outputs[0], fused, expanded)
    assert torch.equal(found, torch.cat(torch.autograd.grad(outputs[1], apart, expanded.contiguous()), dim=2))


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU the kernels take this path by themselves")
def test_blocks_fetched_through_descriptors_are_the_same(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of Hopper's copy engine, which the interpreter can walk: lengths that no block divides, and head dim 64."""
    from attention import triton_backward, triton_forward

    p = problem("random", device, shape=(1, 70, 2, 64))
    for preset in ("flash", "flash_stable_safe", "flash_delta_from_p", "flash_delta_from_p_subtracted"):
        plain = run(p, spec(preset, sites=("tile_q=64", "tile_k=32")))
        allowed = Mock(return_value=True)
        with monkeypatch.context() as patch:
            for module in (triton_forward, triton_backward):
                patch.setattr(module, "takes_descriptor", allowed)
            through = run(p, spec(preset, sites=("tile_q=64", "tile_k=32")))
        assert allowed.called
        assert all(torch.equal(a, b) for a, b in zip(plain, through, strict=True))


def test_heads_of_a_mixture_get_what_they_would_get_alone(device: torch.device) -> None:
    p = problem("random", device, shape=(1, 20, 3, 16))
    specs = [spec("flash"), spec("flash_delta_from_p"), spec("flash_fp32_o")]
    rules = tuple(AttentionRule(heads=(h,), attention=specs[h]) for h in (1, 2))
    q, k, v = (x.clone().requires_grad_() for x in (p.q, p.k, p.v))
    plan = AttentionConfig(default=specs[0], rules=rules).resolve(1, 3)[0]
    o = attention.run(q, k, v, plan, rounding_seed=torch.tensor(0, device=device))
    mixed = (o.detach(), *torch.autograd.grad(o, (q, k, v), p.do))
    for head, chosen in enumerate(specs):
        for found, alone in zip(mixed, run(p, chosen), strict=True):
            assert torch.equal(found[:, :, head], alone[:, :, head])


def signed_errors(problem, backend: str, sites: tuple[str, ...], numerics: str) -> Tensor:  # type: ignore[no-untyped-def]
    """Row means of the error of O, one row each of the rows of test_bias."""
    q, k = (torch.nn.functional.pad(x, (0, problem.v.shape[3] - x.shape[3])) for x in (problem.q, problem.k))
    plan = AttentionConfig(default=spec("flash", numerics, sites, backend)).resolve(1, 1)[0]
    seed = torch.tensor(0, device=q.device)
    o = attention.run(q, k, problem.v, plan, rounding_seed=seed, causal=False, scale=1.0)
    return (o[:, 0, 0].double().cpu() - problem_exact(problem)).mean(dim=-1)


def problem_exact(problem) -> Tensor:  # type: ignore[no-untyped-def]
    return problem.exact().cpu()


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_signed_bias_is_the_references(sign: float, device: torch.device) -> None:
    """Tied maxima, V of one sign, paper numerics: the bias is there, and it is the same bias."""
    case = rows(sign, others=1.0)
    n = len(TOPS) // 4 if INTERPRETED else len(case.q)
    case = replace(
        case, **{name: getattr(case, name)[-n:, ..., : 16 if name == "v" else None].to(device) for name in "qkv"}
    )
    found, expected = (signed_errors(case, b, TILES, "paper") for b in ("flash", "flash_reference"))
    standard_error = expected.std().item() / n**0.5
    assert sign * found.mean() > 10 * standard_error
    assert abs(found.mean() - expected.mean()) < standard_error / 4


def test_repeats_are_equal_to_the_bit(device: torch.device) -> None:
    p = problem("random", device, shape=(1, 40, 2, 16) if INTERPRETED else (2, 1000, 4, 64))
    for preset in (
        "flash",
        "flash_stochastic_o",
        "flash_stochastic_p",
        "flash_delta_from_p",
        "flash_delta_from_p_subtracted",
    ):
        first = run(p, spec(preset, sites=()), seed=3)
        for _ in range(1 if INTERPRETED else 50):
            assert all(torch.equal(a, b) for a, b in zip(first, run(p, spec(preset, sites=()), seed=3), strict=True))


def test_operators_pass_torchs_own_checks(device: torch.device) -> None:
    from attention.flash_triton import _forward

    p = problem("random", device, shape=(1, 6, 1, 16))
    q, k, v = (x.clone().requires_grad_() for x in (p.q, p.k, p.v))
    for preset in ("flash", "flash_fp32_o"):
        arguments = (q, k, v, torch.tensor(0, device=device), spec(preset).resolve().key(), 0.5, True, 0.0)
        torch.library.opcheck(
            _forward, arguments, test_utils=("test_schema", "test_faketensor", "test_autograd_registration")
        )


def test_compiled_equals_eager_to_the_bit(device: torch.device) -> None:
    p = problem("tied", device)
    torch.compiler.reset()
    compiled = torch.compile(attention.run, backend="aot_eager" if INTERPRETED else "inductor")
    for preset in ("flash", "flash_stochastic_o", "flash_delta_from_p_subtracted"):
        eager = run(p, spec(preset, "paper"), seed=3)
        assert all(
            torch.equal(a, b) for a, b in zip(eager, run(p, spec(preset, "paper"), seed=3, call=compiled), strict=True)
        )


@on_gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 1000, 1024, 2048])
def test_lengths_and_cases_on_a_gpu(length: int, head_dim: int) -> None:
    for case in (*CASES, "huge"):
        for dtype in (torch.bfloat16, torch.float16):
            p = problem(case, torch.device("cuda"), dtype, (2, length, 3, head_dim))
            assert_as_exact(p, "flash", sites=("tile_q=64", "tile_k=64"))


@on_gpu
@pytest.mark.parametrize("preset", FLASH)
@pytest.mark.parametrize("numerics", ["hardware", "paper"])
def test_presets_at_real_sizes_on_a_gpu(preset: str, numerics: str) -> None:
    p = problem("tied", torch.device("cuda"), shape=(1, 1100, 2, 64))
    assert_agree(p, preset, numerics, sites=("tile_q=512", "tile_k=512") if numerics == "paper" else ("tile_k=64",))


@on_gpu
def test_indices_beyond_32_bits() -> None:
    """More than 2^31 elements a tensor: the last batch entry must come out as it does alone."""
    shape = (2800, 1024, 12, 64)
    generator = torch.Generator("cuda").manual_seed(0)
    fused = torch.randn(*shape[:2], 36, 64, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_()
    plan = AttentionConfig(default=spec("flash", sites=())).resolve(1, 12)[0]
    seed = torch.tensor(0, device="cuda")
    o = attention.run(*fused.split(12, dim=2), plan, rounding_seed=seed)
    (gradient,) = torch.autograd.grad(o, fused, o.detach())
    alone = fused.detach()[-1:].clone().requires_grad_()
    o_alone = attention.run(*alone.split(12, dim=2), plan, rounding_seed=seed)
    assert torch.equal(o[-1:], o_alone)
    assert torch.equal(gradient[-1:], torch.autograd.grad(o_alone, alone, o_alone.detach())[0])


@on_gpu
def test_cuda_graphs_replay_forward_and_backward() -> None:
    p = problem("random", torch.device("cuda"), shape=(2, 256, 4, 64))
    chosen = spec("flash_stochastic_p_o", sites=())
    expected = run(p, chosen, seed=1)
    plan = AttentionConfig(default=chosen).resolve(1, 4)[0]
    q, k, v = (x.clone().requires_grad_() for x in (p.q, p.k, p.v))
    seed = torch.tensor(0, device="cuda")

    def step() -> tuple[Tensor, ...]:
        o = attention.run(q, k, v, plan, rounding_seed=seed)
        return o, *torch.autograd.grad(o, (q, k, v), p.do)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    seed.fill_(1)  # a new seed needs no new graph
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


def test_the_bases_that_these_tests_know() -> None:
    assert set(BASES) == {"hardware", "paper", "fp32", "microcosm"}
