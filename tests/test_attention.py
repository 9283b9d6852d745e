"""Every backend and every numerics against fp64, and the promises of the dispatch."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_cases import CASES, assert_as_exact, magnitudes, make, oracle, relative_errors, run, same

import attention
from attention import AttentionConfig, AttentionRule, AttentionSpec
from attention.backends import BACKENDS, Backend, lacking
from attention.mask import NO_MASK
from attention.numerics import FEATURES
from attention.presets import PRESETS
from errors import UserError

TILES = ("tile_q=16", "tile_k=8")  # unequal, and neither divides T = 40: partial tiles in both directions
FLASH = [name for name, preset in PRESETS.items() if preset.backend == "flash"]
SDPA = [name for name in PRESETS if name.startswith("sdpa_")]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def spec_of(preset: str, numerics: str = "hardware") -> AttentionSpec:
    tiled = preset in FLASH and preset != "flash_untiled"
    return AttentionSpec(preset=preset, numerics=numerics, sites=TILES if tiled else ())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("numerics", ["hardware", "rounded_forward", "fp32"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_flash_presets_are_exact(case: str, numerics: str, dtype: torch.dtype, device: torch.device) -> None:
    """Error against fp64 at most twice that of standard attention, for O, dQ, dK, dV of every preset, in units of ``magnitudes``.

    The floor is the unit of the format; for FP32 that of L, from which flash attention recomputes P = exp(S - L): |L| 2^-24.
    """
    p = make(case, dtype, device)
    exact, unit = oracle(p), magnitudes(p)
    largest_score = (p.q.float().norm(dim=-1).max() * p.k.float().norm(dim=-1).max() / 4).item()
    floor = 2.0**-24 * max(largest_score, 16) if dtype == torch.float32 else 2.0**-9
    baseline = run(p, AttentionSpec(preset="standard", numerics=numerics))
    # In FP16 the published stabilizer pushes P_bar below 2^-14, where fewer bits are left: see the test after this one.
    beyond_range = ("flash_stable", "flash_stable_exact_ties") if dtype == torch.float16 else ()
    # FP32 has no rounding of P_bar or O to draw; that is refused.
    drawn = [name for name in FLASH if "stochastic" in name and dtype == torch.float32]
    for preset in (name for name in FLASH if name not in (*beyond_range, *drawn)):
        assert_as_exact(run(p, spec_of(preset, numerics)), baseline, exact, unit, floor, preset)


@pytest.mark.parametrize("preset", ["standard", *SDPA])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matrix_backends_agree_with_fp64(preset: str, dtype: torch.dtype, device: torch.device) -> None:
    plan = AttentionConfig(flash_backend="flash_reference", default=AttentionSpec(preset=preset)).resolve(1, 3)
    try:
        attention.check_plans(plan, device=device, dtype=dtype, head_dim=16)
    except UserError as reason:
        pytest.skip(str(reason))
    for case in CASES:
        p = make(case, dtype, device)
        floor = 2.0**-20 if dtype == torch.float32 else 2.0**-9
        found, baseline = run(p, AttentionSpec(preset=preset)), oracle(p, dtype=dtype)
        assert_as_exact(found, baseline, oracle(p), magnitudes(p), floor, case)


@pytest.mark.parametrize("preset", ["standard", "flash", "flash_delta_from_p"])
def test_softcap_gradients_agree_with_fp64(preset: str) -> None:
    """Also where no interpreter of kernels is."""
    p = make("peaked", torch.float32, torch.device("cpu"))
    errors = relative_errors(run(p, spec_of(preset), softcap=5.0), oracle(p, softcap=5.0))
    assert max(errors) < 2e-6


def test_heads_of_a_mixture_get_what_they_would_get_alone() -> None:
    """Heads 0 and 3 share a call, so that those of all calls are not in order, nor a swap of two away from it."""
    p = make("random", torch.bfloat16, torch.device("cpu"), (2, 40, 4, 16))
    specs = [AttentionSpec(preset=name) for name in ("flash", "standard", "flash_fp32_o", "flash")]
    rules = tuple(AttentionRule(heads=(head,), attention=specs[head]) for head in (1, 2))
    config = AttentionConfig(flash_backend="flash_reference", default=specs[0], rules=rules)
    q, k, v = (x.clone().requires_grad_() for x in (p.q, p.k, p.v))
    o = attention.run(q, k, v, config.resolve(1, 4)[0], rounding_seed=torch.tensor(0))
    mixed = (o.detach(), *torch.autograd.grad(o, (q, k, v), p.do))
    for head, spec in enumerate(specs):
        for found, alone in zip(mixed, run(p, spec), strict=True):
            assert torch.equal(found[:, :, head], alone[:, :, head])


@pytest.mark.parametrize("preset", ["flash_stochastic_o", "flash_stochastic_p"])
def test_stochastic_presets_follow_seed_layer_and_nothing_else(preset: str) -> None:
    p = make("random", torch.bfloat16, torch.device("cpu"))
    spec = AttentionSpec(preset=preset)
    plans = AttentionConfig(flash_backend="flash_reference", default=spec).resolve(2, 3)

    def o(layer: int, seed: int) -> torch.Tensor:
        return attention.run(p.q, p.k, p.v, plans[layer], rounding_seed=torch.tensor(seed))

    assert torch.equal(o(0, 1), o(0, 1))
    assert not torch.equal(o(0, 1), o(0, 2))
    assert not torch.equal(o(0, 1), o(1, 1))


COMPILED = ["standard", "sdpa_flash", "sdpa_math", "flash_stable", "flash_stochastic_o", "flash_o_fp32_delta_nearest"]
COMPILED += ["flash_stochastic_p"]


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("preset", ["flash", *(pytest.param(name, marks=pytest.mark.slow) for name in COMPILED)])
def test_compiled_equals_eager_to_the_bit(preset: str, device: torch.device) -> None:
    """With BF16 ties, where a fused FP32 chain would find none. The casts around attention are the compiler's to fuse."""
    p = make("tied", torch.bfloat16, device)
    spec = AttentionSpec(preset=preset, numerics="rounded_forward" if preset in FLASH else "hardware")
    eager = run(p, spec, seed=3)

    def through_float32(q, k, v, plan, **settings):
        q, k, v = ((x.float() * 1.0).bfloat16() for x in (q, k, v))
        return attention.run(q, k, v, plan, **settings)

    torch.compiler.reset()
    compiled = run(p, spec, seed=3, call=torch.compile(through_float32))
    assert same(eager, compiled)


@pytest.mark.parametrize("preset", ["standard", "flash"])
def test_autocast_and_tf32_settings_do_not_reach_inside(preset: str, device: torch.device) -> None:
    p = make("random", torch.float32, device)
    plain = run(p, AttentionSpec(preset=preset))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            inside = run(p, AttentionSpec(preset=preset))
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert same(plain, inside)


@pytest.mark.parametrize(
    ("choose", "read"),
    [
        ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", "torch.backends.cuda.matmul.fp32_precision"),
        ("torch.set_float32_matmul_precision('high')", "torch.get_float32_matmul_precision()"),
    ],
)
def test_tf32_is_off_inside_and_comes_back_however_it_was_chosen_and_in_any_thread(choose: str, read: str) -> None:
    code = f"""
import sys, torch
from concurrent.futures import ThreadPoolExecutor
from attention.reference.exact import exact_float32
sys.setswitchinterval(1e-5)
{choose}
chosen = {read}
def inside(_):
    with exact_float32(torch.device("cpu")):
        return {read}
with ThreadPoolExecutor(4) as threads:
    assert chosen not in set(threads.map(inside, range(400)))
assert {read} == chosen
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)


@pytest.mark.parametrize("preset", ["standard", "flash", "flash_fp32_o"])
def test_operators_pass_torchs_own_checks(preset: str) -> None:
    from attention.reference import flash, standard

    p = make("random", torch.float32, torch.device("cpu"), (1, 6, 2, 4))
    key = replace(AttentionSpec(preset=preset).resolve(), tile_q=0, tile_k=0).key()
    q, k, v = (x.clone().requires_grad_() for x in (p.q, p.k, p.v))
    op = standard._forward if preset == "standard" else flash._forward
    torch.library.opcheck(op, (q, k, v, torch.tensor(0), key, 0.5, True, 0.0, None, *NO_MASK))


def test_a_backend_has_no_feature_that_it_does_not_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "new", Backend(lambda *_, **__: None))
    assert [lacking("new", [feature]) for feature in FEATURES] == [f"it has no {words}" for words in FEATURES.values()]


DRAWN_P = ("probabilities_rounding=stochastic",)
# What is asked for, a reason, and backends that can do it.
CANNOT: list[tuple[dict[str, Any], str, str]] = [
    ({"preset": "sdpa_cudnn"}, "it needs a CUDA device", "flash_reference"),
    ({"preset": "sdpa_flash", "softcap": 30.0}, "no soft-cap", "flash_reference"),
    ({"backend": "standard"}, "exponent = 'fma', expected subtract_first", "flash_reference"),
    ({"preset": "standard", "sites": DRAWN_P}, "rounding = 'stochastic'", "flash_reference"),
    ({"sites": DRAWN_P, "dtype": torch.float32}, "expected nearest where probabilities is fp32", ""),
    (
        {"numerics": "published", "sites": ("row_max=scaled",), "dtype": torch.float16},
        "row_max = 'scaled': expected a row_sum_floor above 0, which scales the rows, and statistics other than fp16",
        "",
    ),
    ({"backend": "flash", "interprets": False}, "(or TRITON_INTERPRET=1); flash_reference runs", "flash_reference"),
    ({"backend": "flash", "head_dim": 44}, "head dims divisible by 8 from 16 to 256, not 44", "flash_reference"),
    ({"backend": "flash", "preset": "flash_stable", "sites": ("tile_k=24",)}, "tile_k divisible by 16, not 24", ""),
    ({"backend": "flash", "sites": ("score_gradients=e5m2_row", "tile_k=64")}, "it needs tile_k 16 or 32, not 64", ""),
    *(
        ({"backend": "flash", "sites": (site,)}, reason, "flash_reference")
        for site, reason in (
            ("tile_sum=bf16", "it does not have this site: tile_sum = 'bf16', expected fp32"),
            ("output_gradient_in_dv=e4m3", "does not have this site: output_gradient_in_dv = 'e4m3', expected fp32"),
            ("score_gradients=e4m3_head", "block by block: score_gradients = 'e4m3_head', expected no scale, or row"),
            ("probabilities=int8_stochastic", "block by block: probabilities = 'int8_stochastic', expected no scale"),
            ("score_gradients=e5m2_row", "that of a tile, and it needs tile_k 16 or 32, not 512"),
            ("probabilities=e4m3_mx", "is 1, not just below: row_max_rounding = 'unrounded', expected up"),
        )
    ),
    *(
        ({"backend": "flash", "preset": "flash_consistent", "sites": sites}, reason, "flash_reference")
        for sites, reason in (
            (
                ("probabilities_in_dv=int8_mx", "exponent=separate_multiply", "row_max_rounding=unrounded"),
                "row_max_rounding = 'unrounded', expected up",
            ),
            (
                ("probabilities_in_dv=int8_mx", "backward_probabilities=unrounded"),
                "backward_probabilities = 'unrounded', expected forward",
            ),
            (("probabilities_in_dv=int8_mx", "probabilities=m7"), "probabilities = 'm7', expected bf16, or e4m3, e5m2"),
            (("probabilities=e4m3_row", "probabilities_in_dv=int8_mx", "tile_k=32"), "'e4m3_row', expected bf16, or"),
            (("probability_gradients=e5m2_row", "tile_k=64"), "and it needs tile_k 16 or 32, not 64"),
        )
    ),
    ({"preset": "standard", "sites": ("output_gradient=e4m3_row",)}, "no formats below BF16", "flash_reference"),
    (
        {"preset": "standard", "sites": ("values=e4m3_row",)},
        "not have this site: values = 'e4m3_row', expected fp32",
        "flash_reference",
    ),
]


@pytest.mark.parametrize(("spec", "reason", "can"), CANNOT, ids=str)
def test_what_cannot_run_here_is_refused(spec: dict[str, Any], reason: str, can: str, monkeypatch: Any) -> None:
    call = {"device": torch.device("cpu"), "dtype": torch.bfloat16, "head_dim": 16, "softcap": 0.0}
    call |= {name: spec[name] for name in call if name in spec}
    spec = {name: value for name, value in spec.items() if name not in call}
    interprets = spec.pop("interprets", spec.get("backend") == "flash")
    monkeypatch.setattr(attention.backends, "_interprets", lambda: interprets)
    plans = AttentionConfig(flash_backend="flash_reference", default=AttentionSpec(**spec)).resolve(2, 2)
    with pytest.raises(UserError) as error:
        attention.check_plans(plans, **call)
    assert reason in str(error.value)
    able = str(error.value).partition("backends that can: ")[2].split(", ")
    assert set(can.split(", ")) <= {*able, ""}
    assert "sdpa_cudnn" not in able


Q = torch.randn(2, 8, 3, 16)


def test_compiled_code_refuses_a_soft_cap_that_a_backend_lacks() -> None:
    (plan,) = AttentionConfig(default=AttentionSpec(preset="sdpa_math")).resolve(1, 3)
    compiled = torch.compile(attention.run, backend="eager")
    with pytest.raises(Exception, match="it has no soft-cap"):
        compiled(Q, Q, Q, plan, rounding_seed=torch.tensor(0), softcap=5.0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        # [B, H, T, D], as torch has it, would attend over heads, and come back in the same shape.
        (dict.fromkeys("qkv", Q.transpose(1, 2)), r"layer 0: q has shape \(2, 3, 8, 16\): .* the 3 heads"),
        (dict.fromkeys("kv", Q[:1]), "k has shape"),
        ({"v": Q[:, :4]}, "v has shape"),
        ({"k": Q.bfloat16()}, "k is torch.bfloat16"),
        (dict.fromkeys("qkv", Q.double()), "q is torch.float64"),
        (dict.fromkeys("qkv", Q[:, :0]), "none of them 0"),
        ({"plan": ()}, "^plan is a tuple: expected a "),
        ({"scale": torch.nan}, "scale = nan: expected a finite number"),
        ({"softcap": -1.0}, "softcap = -1.0: expected 0 or a positive number"),
        ({"causal": "no"}, "causal = 'no': expected True or False"),
        *(
            ({"rounding_seed": x}, "^rounding_seed = .*: expected an int64 tensor")
            for x in (0, torch.tensor([0]), torch.tensor(0.0))
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change: dict[str, Any], reason: str) -> None:
    """Kernels would read beyond tensors of other shapes."""
    plan = AttentionConfig(flash_backend="flash_reference").resolve(1, 3)[0]
    named = dict.fromkeys("qkv", Q) | {"plan": plan, "rounding_seed": torch.tensor(0)} | change
    q, k, v = (named.pop(name) for name in "qkv")
    with pytest.raises(ValueError, match=reason):
        attention.run(q, k, v, **named)


def test_keys_behind_the_last_causal_query_are_never_read() -> None:
    (plan,) = AttentionConfig(default=AttentionSpec(preset="sage_bwd")).resolve(1, 3)
    more = torch.cat((Q, torch.full_like(Q, torch.nan)), dim=1)
    found, alone = (attention.run(Q, x, x, plan, rounding_seed=torch.tensor(0)) for x in (more, Q))
    assert torch.equal(found, alone)


@pytest.mark.parametrize("spec", [{"preset": "standard"}, {"preset": "external", "kernel": "torch:math"}], ids=str)
@pytest.mark.parametrize("settings", [{"causal": False}, {"causal": False, "scale": 0.0}, {"scale": 0.7}, {}], ids=str)
def test_causal_and_scale_are_those_of_the_call(settings: dict[str, Any], spec: dict[str, str]) -> None:
    (plan,) = AttentionConfig(default=AttentionSpec(**spec)).resolve(1, 3)  # type: ignore[arg-type]
    q, k, v = Q, Q[:, :, :1].contiguous(), Q[:, :, 1:2, : 16 if "kernel" in spec else 8].contiguous()
    o = attention.run(q, k, v, plan, rounding_seed=torch.tensor(0), **settings)
    named = {"is_causal": settings.get("causal", True), "scale": settings.get("scale"), "enable_gqa": True}
    expected = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), **named)
    torch.testing.assert_close(o.transpose(1, 2), expected)


def test_forward_mode_is_refused() -> None:
    """Tangents would be 0."""
    plan = AttentionConfig(flash_backend="flash_reference").resolve(1, 3)[0]
    with pytest.raises(ValueError, match="v has a tangent"):
        torch.func.jvp(lambda v: attention.run(Q, Q, v, plan, rounding_seed=torch.tensor(0)), (Q,), (Q,))
