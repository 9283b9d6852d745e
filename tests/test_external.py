"""Any kernel as a backend of the trainer: it computes what it computes alone, and what it cannot serve is refused before the run."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import make
from tiny_runs import Place, column, lines, preset
from torch.nn import functional

from attention import AttentionConfig, AttentionRule, AttentionSpec, check_plans, replace_sdpa
from attention.check.classes import Shape
from attention.check.classes import make as inputs
from attention.check.measures import rows_from_outside
from attention.functional import scaled_dot_product_attention
from attention.reference.flash import row_residuals
from errors import UserError

CPU = torch.device("cpu")
MATH, FLASH = (AttentionSpec(preset="external", kernel=f"torch:{name}") for name in ("math", "flash"))
KERNELS = """
import warnings

import torch
from torch.nn.functional import scaled_dot_product_attention as torchs

def coarse(q, k, v, causal, scale):
    o = torchs(q, k, v, is_causal=causal, scale=scale)
    mantissa, exponent = torch.frexp(o.float())
    return o + (torch.ldexp((mantissa * 4).round() / 4, exponent).to(o.dtype) - o).detach()

def draws(q, k, v, causal, scale):
    o = torchs(q, k, v, is_causal=causal, scale=scale)
    return o * (1 + (torch.rand(o.shape) - 0.5) * 2**-8)

def other_layout(q, k, v, causal, scale):
    return torchs(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal, scale=scale).transpose(1, 2)

def forgets_strides(q, k, v, causal, scale):
    q, k, v = (torch.as_strided(x, x.shape, torch.empty(x.shape).stride()) for x in (q, k, v))
    return torchs(q, k, v, is_causal=causal, scale=scale)

def nan_gradients(q, k, v, causal, scale):
    o = torchs(q, k, v, is_causal=causal, scale=scale)
    o.register_hook(lambda do: do * float("nan"))
    return o

def nan(*given):
    return torchs(*given[:3], is_causal=given[3], scale=given[4]) * float("nan")

def no_backward(q, k, v, causal, scale):
    return torchs(q, k, v, is_causal=causal, scale=scale).detach()

def leaves(q, k, v, causal, scale):
    raise SystemExit(0)

def transposed(q, k, v, causal, scale):
    return torchs(q, k, v, is_causal=causal, scale=scale).transpose(1, 2)

def nothing(q, k, v, causal, scale):
    torchs(q, k, v, is_causal=causal, scale=scale)

def wide(q, k, v, causal, scale):
    return torchs(q, k, v, is_causal=causal, scale=scale).double()

def only_fp32(q, k, v, causal, scale):
    if q.dtype != torch.float32:
        warnings.warn("BF16 is not deterministic. (Triggered internally at a.cpp:1.)")
        raise NotImplementedError("FP32 alone\\nin two lines")
    return torchs(q, k, v, is_causal=causal, scale=scale)

"""


@pytest.fixture(scope="module")
def place(place: Place) -> Any:
    (place.folder / "kernels_of_a_test.py").write_text(KERNELS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(place.folder))
        yield place


def external(kernel: str) -> dict[str, Any]:
    return {"attention": AttentionConfig(default=AttentionSpec(preset="external", kernel=kernel))}


def test_a_run_is_to_the_bit_that_of_the_same_kernel_under_its_own_preset(place: Place) -> None:
    named = place.train("by_name", external("torch:math"))
    own = place.train("by_preset", {"attention": preset("sdpa_math")})
    for name in ("train_loss", "grad_norm", "val_loss", "max_logit_max"):
        assert column(named, name) == column(own, name), name
    written, heads = json.loads((named / "config.json").read_text()), {"0": [0, 1], "1": [0, 1]}
    assert written["config"]["attention"]["default"]["kernel"] == written["attention_name"] == "torch:math"
    assert written["attention"] == [{"backend": "external", "kernel": "torch:math", "heads_of_layer": heads}]


@pytest.mark.parametrize("kernel", ["coarse", "draws"])
def test_a_resumed_run_has_the_same_bits_and_takes_no_other_kernel(place: Place, kernel: str) -> None:
    fields, whole, resumed = external(f"kernels_of_a_test:{kernel}"), f"whole_{kernel}", f"resumed_{kernel}"
    runs = place.train(whole, fields), place.train_until(15, resumed, fields)
    with pytest.raises(UserError, match=rf"default.kernel = 'torch:math': expected .*kernels_of_a_test:{kernel}"):
        place.train(resumed, {**external("torch:math"), "run.resume": "yes"})
    place.train(resumed, {**fields, "run.resume": "yes"})
    assert lines(runs[0]) == lines(runs[1])


@pytest.mark.parametrize("measures", ["evaluation", "telemetry"])
def test_measuring_moves_no_generator_that_a_kernel_draws_from(place: Place, measures: str) -> None:
    fields = external("kernels_of_a_test:draws") | {"evaluation.every": 0, "telemetry.every": 0}
    runs = place.train(f"no_{measures}", fields), place.train(f"with_{measures}", {**fields, f"{measures}.every": 4})
    assert column(runs[0], "train_loss") == column(runs[1], "train_loss")


def test_heads_of_one_layer_may_have_it_and_probes_do_not_invent_its_delta(place: Place) -> None:
    coarse = AttentionSpec(preset="external", kernel="kernels_of_a_test:coarse")
    rules = (AttentionRule(layers=(1,), heads=(0,), attention=coarse),)
    run = place.train("mixed", {"attention": replace(preset("flash_consistent"), rules=rules)})
    for probe in lines(run, name="telemetry.jsonl"):
        for name in ("delta_error_mean", "delta_error_rms"):
            unknown = [[value == "nan" for value in heads] for heads in probe[name]]
            assert unknown == [[False, False], [True, False]], name
        for name in ("max_logit", "delta_rms", "row_residual_rms"):
            assert torch.tensor(probe[name]).isfinite().all(), name


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        ("torch:flsh", "did you mean torch:flash?"),
        ("kernels_of_a_test:other_layout", "O is off by"),
        ("kernels_of_a_test:forgets_strides", "O is off by"),
        ("kernels_of_a_test:nan", "O is off by nan"),
        ("kernels_of_a_test:nan_gradients", "gradients are not finite"),
        ("kernels_of_a_test:leaves", "it raises SystemExit: 0"),
        ("kernels_of_a_test:no_backward", "it raises RuntimeError: "),
        ("kernels_of_a_test:only_fp32", "NotImplementedError: FP32 alone in two lines BF16 is not deterministic."),
    ],
)
def test_what_cannot_serve_is_refused_before_the_run(kernel: str, reason: str, place: Place) -> None:
    with pytest.raises(UserError) as error:
        place.train("refused", {**external(kernel), "precision.dtype": "bfloat16"})
    assert reason in str(error.value)
    assert f"kernel = {kernel!r}" in str(error.value)
    assert not (place.runs / "refused").exists()


def test_a_soft_cap_is_refused_and_grouped_heads_are_tried() -> None:
    plans = AttentionConfig(default=MATH).resolve(1, 4)
    settings: dict[str, Any] = {"device": CPU, "dtype": torch.bfloat16, "head_dim": 16}
    with pytest.raises(UserError, match="it has no soft-cap"):
        check_plans(plans, **settings, softcap=30.0)
    check_plans(plans, **settings, features=("grouped",))


@pytest.mark.parametrize("beside", [None, AttentionSpec(preset="flash_stochastic_o")], ids=["alone", "seeded"])
def test_one_compiled_function_serves_all_layers(beside: AttentionSpec | None) -> None:
    """At the break, a layer's number is a variable to the compiler, and so is what becomes of it."""
    from attention import run as attend

    p = make("random", torch.bfloat16, CPU, (1, 16, 2, 8))
    rules = () if beside is None else (AttentionRule(heads=(1,), attention=beside),)
    plans = AttentionConfig(flash_backend="flash_reference", default=MATH, rules=rules).resolve(3, 2)

    def layer(q, k, v, plan):  # type: ignore[no-untyped-def]
        return attend(q, k, v, plan, rounding_seed=torch.tensor(5)) * 1.0

    torch.compiler.reset()
    compiled = torch.compile(layer, backend="aot_eager")
    for plan in plans:
        assert torch.equal(compiled(p.q, p.k, p.v, plan), layer(p.q, p.k, p.v, plan))


def test_the_drop_in_takes_it_too() -> None:
    q = torch.randn(1, 2, 16, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    a, b = (scaled_dot_product_attention(q, q, q, is_causal=True, numerics=n) for n in (FLASH, "sdpa_flash"))
    assert torch.equal(a, b)


def test_a_kernel_that_calls_torchs_function_is_refused_in_its_own_block(place: Place) -> None:
    q, spec = torch.randn(1, 2, 16, 8), AttentionSpec(preset="external", kernel="kernels_of_a_test:coarse")
    with replace_sdpa(spec):
        for _ in range(2):
            with pytest.raises(
                UserError, match=r"it calls torch's function, which it replaces here: .* replace_sdpa\(None\)"
            ):
                functional.scaled_dot_product_attention(q, q, q)
    assert scaled_dot_product_attention(q, q, q, numerics=spec).isfinite().all()


@pytest.mark.parametrize(("kernel", "given"), [("transposed", "shape"), ("nothing", "a NoneType"), ("wide", "float64")])
def test_the_drop_in_refuses_what_is_no_output(kernel: str, given: str, place: Place) -> None:
    q, spec = torch.randn(1, 2, 16, 8), AttentionSpec(preset="external", kernel=f"kernels_of_a_test:{kernel}")
    with pytest.raises(UserError, match=f"kernel = 'kernels_of_a_test:{kernel}': it gives .*{given}"):
        scaled_dot_product_attention(q, q, q, numerics=spec)


def test_the_drop_in_names_a_kernel_that_takes_other_arguments() -> None:
    q, spec = torch.randn(1, 2, 16, 8), AttentionSpec(preset="external", kernel="os:getcwd")
    with pytest.raises(UserError, match=r"kernel = 'os:getcwd': it raises TypeError: .*\(5 given\)"):
        scaled_dot_product_attention(q, q, q, numerics=spec)


def test_rows_measured_from_outside_are_those_inside() -> None:
    """A kernel of ours with a coarse O, whose rows of dS the reference sums; one feature of Q is 0, so that S is the same for both."""
    p = inputs("gaussian", Shape(B=2, H=2, G=2, T=64, D=16), torch.float32, CPU)
    q, k = p.q.clone(), p.k.clone()
    q[..., 3], k[..., 3] = 0, 0
    p = replace(p, q=q, k=k)
    spec = AttentionSpec(sites=("output=m4", "score_gradients=fp32"))

    def kernel(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Any:
        return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, numerics=spec)

    settings: dict[str, Any] = {"seed": torch.tensor(0), "scale": p.scale}
    inside = row_residuals(*(x.transpose(1, 2) for x in (p.q, p.k, p.v, p.do)), spec.resolve(), **settings)
    assert (rows_from_outside(kernel, p) - inside).norm() < 1e-3 * inside.norm()
