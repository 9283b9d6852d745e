"""``scaled_dot_product_attention`` against torch's in float64 and in the same precision: what it gives, what it takes, what it refuses."""

import contextlib
import copy
import functools
import itertools
import math
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from attention_cases import results, same
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias, causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as torchs
from torch.utils.checkpoint import checkpoint

import attention.attn_mask
from attention import AttentionSpec, operators, replace_sdpa, scaled_dot_product_attention
from attention.mask import split
from attention.operators import TORCHS

ROOT = Path(__file__).resolve().parent.parent


def drawn(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


def tensors(
    *, groups: int = 4, queries: int = 40, keys: int = 40, width: int = 16, value_width: int = 0, **kind: Any
) -> tuple[Tensor, ...]:
    """q, k, v and dO, BF16 on a CPU if ``kind`` does not have another dtype or device."""
    of_queries, of_keys, of_values = (2, 4, queries), (2, groups, keys), value_width or width
    found = drawn((*of_queries, width), (*of_keys, width), (*of_keys, of_values), (*of_queries, of_values))
    return tuple(x.to(**({"dtype": torch.bfloat16} | kind)) for x in found)


def errors(found: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> list[float]:
    return [(a.double() - b).norm().item() for a, b in zip(found, exact, strict=True)]


def padded(q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> Tensor:
    """torch's function with q, k and v padded to one head dim, without which its flash kernel serves no other one of v."""
    width = max(q.shape[3], v.shape[3])
    scale = settings.pop("scale", None) or q.shape[3] ** -0.5
    q, k, wide = (functional.pad(x, (0, width - x.shape[3])) for x in (q, k, v))
    return torchs(q, k, wide, scale=scale, **settings)[..., : v.shape[3]]


def assert_as_exact_as_torch(inputs: tuple[Tensor, ...], **settings: Any) -> None:
    """O and all gradients are as near to float64 as those of torch's flash kernel in the same dtype (1.5 times its error at most)."""
    *inputs, do = inputs
    exact = results(torchs, tuple(x.double() for x in inputs), do, **settings)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True):
        baseline = errors(results(padded, inputs, do, **settings), exact)
    found = results(scaled_dot_product_attention, inputs, do, **settings)
    assert all(x.dtype == inputs[0].dtype for x in found)
    assert all(error <= 1.5 * allowed for error, allowed in zip(errors(found, exact), baseline, strict=True))


SHAPES: dict[str, dict[str, Any]] = {
    "as many": {},
    "one head of keys": {"groups": 1},
    "groups of two": {"groups": 2},
    "V narrower": {"width": 96, "value_width": 64, "groups": 2},
    "V wider": {"width": 12, "value_width": 20},
    "latent attention": {"width": 576, "value_width": 512, "groups": 2},
    "one query": {"queries": 1},
    "fewer queries": {"queries": 33},
    "fewer keys": {"keys": 33},
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [*((shape, torch.bfloat16) for shape in SHAPES), ("as many", torch.float16), ("as many", torch.float32)],
)
def test_outputs_and_gradients(shape: str, dtype: torch.dtype, is_causal: bool, device: torch.device) -> None:
    if device.type == "cuda" and SHAPES[shape].get("width", 0) > 256:
        pytest.skip("more than the kernels take")
    inputs = tensors(**SHAPES[shape], dtype=dtype, device=device)
    assert_as_exact_as_torch(inputs, enable_gqa="groups" in SHAPES[shape], is_causal=is_causal)


T = torch.arange(40)[:, None]
S = torch.arange(40)
BATCH = torch.tensor([3, 11])[:, None, None, None]
MASKS = {
    "keys in any place": (BATCH + S * 7) % 5 > 1,
    "padding": S < 40 - BATCH,
    "padding on the left": (S >= BATCH) & (S <= T),
    "window": ((S <= T) & (S > T - 8)).expand(1, 1, 40, 40),
    "packed": (S <= T) & ((S + BATCH) // 16 == (T + BATCH) // 16),
    "prefix": (S <= T) | (S < BATCH),
    "padding in the middle": (S <= T) & ((S < 9) | (S >= 9 + BATCH)),
    "a window on padding alone": (S <= T) & (S > T - 8) & ((S < 9) | (S >= 9 + BATCH)),
    "packed, with padding in the middle": (S <= T) & (S // 16 == T // 16) & ((S < 9) | (S >= 9 + BATCH)),
}


@pytest.mark.parametrize("mask", MASKS)
def test_boolean_masks(mask: str, device: torch.device) -> None:
    """Rows without a key, which torch's kernels do not agree on, are 0 and pass no gradient."""
    *inputs, do = tensors(device=device)
    allowed = MASKS[mask].to(device)
    seen = allowed.any(dim=-1, keepdim=True).expand(2, 1, 40, 1)
    assert_as_exact_as_torch((*inputs, do * seen), attn_mask=allowed)
    found = results(scaled_dot_product_attention, inputs, do, attn_mask=allowed)
    assert all(x[~seen[..., 0].expand(2, 4, 40)].count_nonzero() == 0 for x in found[:2])


def test_a_mask_and_causal_hide_both() -> None:
    *inputs, do = tensors()
    for mask in MASKS.values():
        joined = results(scaled_dot_product_attention, inputs, do, attn_mask=mask & (S <= T))
        assert same(results(scaled_dot_product_attention, inputs, do, attn_mask=mask, is_causal=True), joined)


def test_autocast_casts_as_torchs_function_does() -> None:
    *inputs, do = tensors(dtype=torch.float32)
    rounded = tuple(x.bfloat16() for x in inputs)
    expected = results(scaled_dot_product_attention, rounded, do, is_causal=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert torchs(*inputs).dtype == torch.bfloat16
        found = scaled_dot_product_attention(*inputs, is_causal=True)
        assert torch.equal(found, expected[0])
        mixed = scaled_dot_product_attention(inputs[0], rounded[1], inputs[2], is_causal=True)
        assert torch.equal(mixed, expected[0])
    leaves = [x.requires_grad_() for x in inputs]
    with torch.autocast("cpu", torch.bfloat16):
        o = scaled_dot_product_attention(*leaves, is_causal=True)
    assert same(torch.autograd.grad(o, leaves, do.bfloat16()), [x.float() for x in expected[1:]])


@pytest.mark.parametrize("autocast", [False, True])
def test_compiled_as_one_graph_gives_the_same_bits(autocast: bool, device: torch.device) -> None:
    *inputs, do = tensors(groups=2, dtype=torch.float32 if autocast else torch.bfloat16, device=device)
    mask = MASKS["packed, with padding in the middle"].to(device)
    backend = "aot_eager" if device.type == "cpu" else "inductor"
    compiled = torch.compile(scaled_dot_product_attention, fullgraph=True, backend=backend)
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        for settings in ({"is_causal": True}, {"attn_mask": mask}):
            eager, found = (
                results(function, inputs, do, enable_gqa=True, **settings)
                for function in (scaled_dot_product_attention, compiled)
            )
            assert same(eager, found)


@pytest.mark.parametrize("changes", [{"width": 24}, {"queries": 30, "keys": 30}, {"scale": 0.3}, {"softcap": 5.0}])
def test_compiled_for_any_shape_and_number_gives_the_same_bits(changes: dict[str, Any]) -> None:
    compiled, numbers = eager_or_compiled("compiled"), {"scale": 0.2, "softcap": 3.0}
    for case in ({}, changes):
        *inputs, do = tensors(**{name: size for name, size in case.items() if name not in numbers})
        settings = {name: case.get(name, number) for name, number in numbers.items()}
        eager, found = (results(f, inputs, do, **settings) for f in (scaled_dot_product_attention, compiled))
        assert same(eager, found)


NAMES = ("standard", "flash", "flash_consistent", "fp8", "sage_bwd", "sdpa_math")


@pytest.mark.parametrize(("numerics", "how"), [*((name, "eager") for name in NAMES), ("sage_bwd", "compiled")])
def test_keys_behind_the_last_causal_query_are_never_read(numerics: str, how: str) -> None:
    """Nor have they a part in a scale, or in the mean key."""
    (q, k, v, do), function = tensors(queries=8, keys=32), eager_or_compiled(how)
    inputs = q, *(functional.pad(x[:, :, :8], (0, 0, 0, 24), value=math.nan) for x in (k, v))
    o, dq, dk, dv = results(function, inputs, do, is_causal=True, numerics=numerics)
    alone = (q, k[:, :, :8], v[:, :, :8])
    assert same((o, dq, dk[:, :, :8], dv[:, :, :8]), results(function, alone, do, is_causal=True, numerics=numerics))
    assert dk[:, :, 8:].count_nonzero() == dv[:, :, 8:].count_nonzero() == 0


def test_exported_for_free_numbers_of_causal_queries_and_keys_gives_the_same_bits() -> None:
    class Causal(torch.nn.Module):
        def forward(self, *qkv: Tensor) -> Tensor:
            return scaled_dot_product_attention(*qkv, is_causal=True)

    queries, keys = torch.export.Dim("queries", min=2, max=512), torch.export.Dim("keys", min=2, max=1024)
    *example, _ = tensors(queries=8, keys=32)
    sizes = ({2: queries}, {2: keys}, {2: keys})
    exported = torch.export.export(Causal(), tuple(example), dynamic_shapes=(sizes,)).module()
    for T, S in ((8, 32), (8, 8), (16, 8), (9, 40), (3, 2)):
        *inputs, _ = tensors(queries=T, keys=S)
        assert torch.equal(exported(*inputs), Causal()(*inputs))


@pytest.mark.parametrize("dimensions", [2, 3, 4])
def test_a_mask_is_looked_at_once_and_again_if_edited(dimensions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Mock(side_effect=attention.attn_mask.split)
    monkeypatch.setattr(attention.attn_mask, "split", looks)
    mask = torch.ones((1, 1, 40, 40)[4 - dimensions :], dtype=torch.bool).tril()
    *inputs, _ = tensors()
    for _ in range(2):
        assert scaled_dot_product_attention(*inputs, attn_mask=mask).count_nonzero() > 0
    assert looks.call_count == 1
    mask.fill_(False)
    assert scaled_dot_product_attention(*inputs, attn_mask=mask).count_nonzero() == 0


def test_a_mask_is_looked_at_again_where_it_broadcasts_otherwise() -> None:
    mask = torch.stack((torch.ones(4, 4), torch.ones(4, 4).tril())).bool().view(2, 1, 1, 4, 4)
    for batches in ((1, 2, 3), (3, 2, 1)):
        assert_as_torch(drawn(*((*batches, 1, 4, 8),) * 3), STANDARD, attn_mask=mask)


def test_what_a_fake_mode_makes_of_a_mask_serves_no_later_call() -> None:
    (*inputs, _), mask = tensors(), torch.ones(40, 40, dtype=torch.bool).tril()
    with FakeTensorMode(allow_non_fake_inputs=True):
        scaled_dot_product_attention(*inputs, attn_mask=mask)
    assert type(scaled_dot_product_attention(*inputs, attn_mask=mask)) is Tensor


TRACERS: dict[str, Callable[..., Any]] = {
    "make_fx": lambda f, example: make_fx(f)(*example),
    "make_fx before autograd": lambda f, example: make_fx(f, pre_dispatch=True)(*example),
    "torch.jit": torch.jit.trace,
}


@pytest.mark.parametrize("trace", TRACERS)
def test_a_traced_graph_looks_at_the_mask_that_it_gets(trace: str) -> None:
    *inputs, _ = tensors()
    seen, other = MASKS["window"], MASKS["packed"]
    scaled_dot_product_attention(*inputs, attn_mask=seen)

    def attend(*given: Tensor) -> Tensor:
        return scaled_dot_product_attention(*given)

    graph = TRACERS[trace](attend, (*inputs, seen))
    assert torch.equal(graph(*inputs, other), attend(*inputs, other))


@pytest.mark.parametrize("hidden", [-math.inf, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("shape", [(40, 40), (2, 4, 40, 40), (2, 4, 1, 40)])
def test_other_masks_hide_what_boolean_ones_hide(shape: tuple[int, ...], hidden: float, device: torch.device) -> None:
    torch.compiler.reset()
    *inputs, do = tensors(device=device)
    seen = torch.ones(shape, dtype=torch.bool, device=device).tril(20 if shape[-2] == 1 else 0)
    of_one = seen if seen.ndim == 2 else seen[:, :1]
    expected = results(scaled_dot_product_attention, inputs, do, attn_mask=of_one)
    floating = torch.zeros(shape, device=device).masked_fill(~seen, hidden)
    compiled = torch.compile(scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    for function, mask in itertools.product((scaled_dot_product_attention, compiled), (seen, floating)):
        assert same(results(function, inputs, do, attn_mask=mask), expected)


@pytest.mark.parametrize("first", ["made", "seen"])
@pytest.mark.parametrize("shape", [(2, 1, 1, 40), (2, 1, 40, 40)])
def test_a_mask_of_inference_mode_serves_training(shape: tuple[int, ...], first: str) -> None:
    *inputs, do = tensors()
    mask = torch.ones(shape, dtype=torch.bool)
    with torch.inference_mode():
        mask = mask.clone() if first == "made" else mask
        scaled_dot_product_attention(*inputs, attn_mask=mask)
    expected = results(scaled_dot_product_attention, inputs, do)
    assert same(results(scaled_dot_product_attention, inputs, do, attn_mask=mask), expected)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("numerics", ["flash_consistent", "standard"])
def test_the_default_dtype_of_torch_changes_no_bit(numerics: str, default: torch.dtype) -> None:
    (*inputs, do), sinks = tensors(), torch.linspace(-1, 1, 4)

    def attend(*leaves: Tensor) -> Tensor:
        return scaled_dot_product_attention(*leaves[:3], is_causal=True, sinks=leaves[3], numerics=numerics)

    expected = results(attend, (*inputs, sinks), do)
    torch.set_default_dtype(default)
    try:
        assert same(results(attend, (*inputs, sinks), do), expected)
    finally:
        torch.set_default_dtype(torch.float32)


DRAWING = [
    "output_rounding=stochastic",
    "queries_and_keys=e4m3_row_stochastic",
    "output_gradient=e5m2_stochastic",
    "delta_error=random",
    "delta_error=zero_sum",
    "delta_error=constant delta_error_rows=as_many_as_tied",
]


@pytest.mark.parametrize("sites", DRAWING)
def test_numerics_that_draw_are_refused_without_a_seed(sites: str) -> None:
    spec = AttentionSpec(preset="flash_delta_from_p", sites=tuple(sites.split()))
    with pytest.raises(ValueError, match="rounding_seed = None: these numerics draw at random"):
        scaled_dot_product_attention(*(X.bfloat16(),) * 3, numerics=spec)
    with pytest.raises(ValueError, match="none that draws at random"):
        replace_sdpa(spec)


@pytest.mark.gpu
def test_a_cuda_graph_replays_forward_and_backward() -> None:
    *inputs, do = tensors(groups=2, width=80, device="cuda")
    leaves = [x.requires_grad_() for x in inputs]

    def step() -> tuple[Tensor, ...]:
        o = scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
        return o, *torch.autograd.grad(o, leaves, do)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        expected = [x.clone() for x in step()]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for x in captured:
        x.detach().zero_()
    graph.replay()
    assert same(captured, expected)


X = torch.zeros(2, 4, 8, 16)
WINDOW, VISITED = torch.ones(8, 8).tril().triu(-2).bool(), AttentionSpec(sites=("hidden_tiles=visited",))
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dropout": ({"dropout_p": 0.1}, "dropout_p = 0.1"),
    "an additive mask": ({"attn_mask": torch.full((8, 8), -1.0)}, "attn_mask is torch.float32: expected"),
    "a mask of -1e9": (
        {"attn_mask": torch.full((8, 8), -1e9).triu(1)},
        "minimum.* 0 and -1e9 give attn_mask = mask == 0",
    ),
    "a mask of integers": ({"attn_mask": torch.ones(8, 8).tril().long()}, r"of 1 and 0 give mask\.bool\(\)"),
    "a learned mask": ({"attn_mask": torch.zeros(8, 8, requires_grad=True)}, "torch.float32 and learned"),
    "a mask of another shape": ({"attn_mask": torch.ones(8, 7, dtype=torch.bool)}, r"attn_mask has shape \[8, 7\]"),
    "a mask for each head": ({"attn_mask": torch.tril(torch.ones(2, 4, 8, 8)).cumsum(1) > 1}, "one mask for all heads"),
    "a mask with holes": ({"attn_mask": torch.eye(8).bool() | (S[:8] == 0)}, "batch entry 0: query 2 sees"),
    "a sparse mask": ({"attn_mask": torch.ones(8, 8, dtype=torch.bool).to_sparse()}, "attn_mask is nested or sparse"),
    "scale of no number": ({"scale": "1"}, "scale = '1'"),
    "a learned scale": ({"scale": torch.tensor(0.3, requires_grad=True)}, "scale is a learned tensor"),
    "softcap": ({"softcap": -1.0}, "softcap = -1.0"),
    "a soft-cap beyond FP32": ({"softcap": 1e39}, r"softcap = 1e\+39: expected 0 or a positive"),
    "a soft-cap that FP32 has not": ({"softcap": 1e-46}, "softcap = 1e-46"),
    "scale beyond FP32": ({"scale": 1e39}, r"scale = 1e\+39: expected a finite"),
    "five dimensions": ({"query": torch.stack([X] * 3), "key": torch.stack([X] * 2)}, "batches that broadcast"),
    "a mask of five": (
        {
            **dict.fromkeys(("query", "key", "value"), torch.stack([X] * 2)),
            "attn_mask": torch.ones(3, 1, 1, 8, 8).bool(),
        },
        r"attn_mask has shape \[3, 1, 1, 8, 8\]: expected batches that broadcast to \[2, ",
    ),
    "a backend of another device": ({"numerics": AttentionSpec(backend="flash_hopper")}, "flash_hopper"),
    "nested": ({"query": torch.nested.nested_tensor([X[0], X[1]])}, "query is nested or sparse"),
    "integers": ({"key": X.long()}, "key is torch.int64"),
    "dtypes that differ": ({"key": X.bfloat16()}, "expected one"),
    "batches that differ": ({"query": X.repeat(2, 1, 1, 1)}, "expected one batch size, or 1"),
    "values of another length": ({"value": X[:, :, :1]}, "key has shape"),
    "a head dim of 0": (dict.fromkeys(("query", "key"), X[..., :0]), "expected one head dim, at least 1"),
    "fewer key heads": ({"key": X[:, :2], "value": X[:, :2]}, "enable_gqa=True"),
    "no divisor": ({"key": X[:, :3], "value": X[:, :3], "enable_gqa": True}, "a divisor of 4"),
    "a seed that is no tensor": ({"rounding_seed": 3}, "rounding_seed = 3"),
    "unknown preset": ({"numerics": "flsh"}, "numerics = 'flsh': did you mean flash?"),
    "a preset in a tuple": ({"numerics": ("flash",)}, r"numerics = \('flash',\): expected the name of a preset or"),
    "a preset of another device": ({"numerics": "sdpa_cudnn"}, "cannot run here: it needs a CUDA device"),
    "a site with a soft-cap": ({"numerics": "flash_corrected_rows", "softcap": 3.0}, "row_residual"),
    "sinks of other heads": ({"sinks": torch.zeros(3)}, r"sinks have shape \[3\]: expected \[4\]"),
    "no sinks in a kernel": ({"sinks": torch.zeros(4), "numerics": "sdpa_math"}, "it has no attention sink"),
    "a site with sinks": (
        {"sinks": torch.zeros(4), "numerics": "flash_corrected_rows"},
        "row_residual.* with this attention sink",
    ),
    "no masks in a kernel": ({"attn_mask": WINDOW, "numerics": "sdpa_math"}, "it has no mask of keys"),
    "a site with a mask": ({"attn_mask": WINDOW, "numerics": VISITED}, "expected skipped with this mask of keys"),
    "a bias of other sizes": ({"attn_mask": causal_lower_right(8, 9)}, "of 8 queries, 9 keys: expected 8, 8"),
    "a bias and causal": ({"attn_mask": causal_lower_right(8, 8), "is_causal": True}, "expected one of both"),
    "a bias of no variant": ({"attn_mask": copy.copy(causal_upper_left(8, 8)).clone()}, "of no known variant"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_cannot_do_is_refused(case: str) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        scaled_dot_product_attention(**({"query": X, "key": X, "value": X} | changes))


COARSE, COARSER = (AttentionSpec(sites=(f"probabilities=m{bits}",)) for bits in (2, 1))


class Attention(torch.nn.Module):
    """A model that cannot be edited: it holds torch's function under a name of its own, and takes it from torch by turns."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = torchs(q, k, v, is_causal=True)
        return o + functional.scaled_dot_product_attention(q, k, v, dropout_p=0.0, is_causal=True)


HOW: dict[str, Callable[[Any], Any]] = {
    "plain": lambda model: model,
    "compiled": lambda model: torch.compile(model, fullgraph=True, backend="aot_eager"),
    "checkpointed": lambda model: functools.partial(checkpoint, model, use_reentrant=False),
}


@pytest.mark.parametrize("how", HOW)
def test_replaced_in_a_model_that_cannot_be_edited(how: str, device: torch.device) -> None:
    """On a GPU the checkpointed one attends again in a thread of autograd's."""
    torch.compiler.reset()
    *inputs, do = tensors(device=device)
    model = HOW[how](Attention())

    def ours(*qkv: Tensor) -> Tensor:
        return sum(scaled_dot_product_attention(*qkv, is_causal=True, numerics=COARSER) for _ in range(2))

    before, expected = results(model, inputs, do), results(ours, inputs, do)
    with replace_sdpa(COARSER):
        assert same(results(model, inputs, do), expected)
    assert same(results(model, inputs, do), before)


def test_a_module_imported_inside_the_block_has_torchs_function_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    *inputs, _ = tensors()
    original, late = torchs, ModuleType("imported_late")
    monkeypatch.setitem(sys.modules, late.__name__, late)
    with replace_sdpa():
        late.attend = functional.scaled_dot_product_attention
        late.attend(*inputs)
    assert late.attend is original


def test_what_no_block_can_serve_is_refused_and_a_block_without_a_call_is_said() -> None:
    with pytest.raises(ValueError, match="numerics = 'nope'"):
        replace_sdpa("nope")
    with pytest.raises(ValueError, match="dropout_p"), replace_sdpa():
        torchs(X, X, X, dropout_p=0.1)
    with pytest.warns(UserWarning, match="was not called"), replace_sdpa():
        torch.softmax(X, dim=-1)
    with pytest.warns(UserWarning, match="numerics = None changes nothing outside"), replace_sdpa(None):
        torchs(X, X, X)


def attend_by_name(*qkv: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(*qkv)


def by_name(compiled: bool, *, fullgraph: bool = True) -> Any:
    torch.compiler.reset()
    return torch.compile(attend_by_name, fullgraph=fullgraph, backend="eager") if compiled else attend_by_name


def assert_attends(spec: AttentionSpec | None, attend: Any = attend_by_name) -> None:
    """The function that stands for torch's gives the bits of ``spec``, and torch's own without one."""
    *inputs, _ = tensors()
    outputs = [
        operators.TORCHS(*inputs),
        *(scaled_dot_product_attention(*inputs, numerics=x) for x in (COARSE, COARSER)),
    ]
    found = attend(*inputs)
    assert [torch.equal(found, x) for x in outputs] == [spec is x for x in (None, COARSE, COARSER)]


def test_nested_blocks_end_in_order_and_one_can_be_entered_again() -> None:
    outer, inner = replace_sdpa(COARSE), replace_sdpa(COARSER)
    for _ in range(2):
        with outer:
            assert_attends(COARSE)
            with inner, outer:
                assert_attends(COARSE)
            with inner:
                assert_attends(COARSER)
            assert_attends(COARSE)
    assert functional.scaled_dot_product_attention is torchs


def test_a_block_inside_compiled_code_acts_and_closes() -> None:
    def attend(*qkv: Tensor) -> Tensor:
        with replace_sdpa(COARSER):
            return attend_by_name(*qkv)

    for f in (attend, replace_sdpa(COARSER)(attend_by_name)):
        torch.compiler.reset()
        assert_attends(COARSER, torch.compile(f, backend="eager"))
    assert functional.scaled_dot_product_attention is torchs


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_block_of_none_inside_another_is_torchs_function(compiled: bool) -> None:
    shared = by_name(compiled)
    with replace_sdpa(COARSE):
        for spec in (COARSE, None, COARSE):
            with replace_sdpa(None) if spec is None else contextlib.nullcontext():
                assert_attends(spec, shared)
                assert_attends(spec, lambda *qkv: in_a_thread_of_autograds(lambda: shared(*qkv)))


@pytest.mark.parametrize("compiled", [False, True])
def test_blocks_that_overlap_in_threads_are_each_threads_own(compiled: bool) -> None:
    """Opened and closed as 1, 2, 1, 2, beside a thread without one. Compiled: one function, which all threads call."""
    step, shared = threading.Barrier(3, timeout=60), by_name(compiled)

    def thread(spec: AttentionSpec | None, opens: int, closes: int) -> None:
        block = contextlib.nullcontext() if spec is None else replace_sdpa(spec)
        for at in range(4):
            if at == opens:
                block.__enter__()
            if at == closes:
                block.__exit__(None, None, None)
            step.wait()
            assert_attends(spec if opens <= at < closes else None, shared)
            step.wait()

    with ThreadPoolExecutor(3) as threads:
        for done in [threads.submit(thread, *x) for x in ((COARSE, 0, 2), (COARSER, 1, 3), (None, 4, 4))]:
            done.result()
    assert functional.scaled_dot_product_attention is torchs


class Deep(torch.autograd.Function):
    """The backward pass calls another, ``depth`` times, and then ``work``; autograd takes a thread of its own for the 60th."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, depth: int, work: Any) -> Tensor:
        ctx.depth, ctx.work = depth, work
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if ctx.depth == 0:
            ctx.work()
        else:
            with torch.enable_grad():
                Deep.apply(torch.zeros(1, requires_grad=True), ctx.depth - 1, ctx.work).backward()
        return gradients[0], None, None


def in_a_thread_of_autograds(compute: Any) -> Tensor:
    """As on a GPU."""
    found: list[Tensor] = []

    def work() -> None:
        assert threading.current_thread() is not threading.main_thread()
        found.append(compute())

    Deep.apply(torch.zeros(1, requires_grad=True), 80, work).backward()
    return found.pop()


@pytest.mark.parametrize("compiled", [False, True])
def test_a_backward_pass_in_threads_of_autograds_belongs_to_the_block_it_is_called_in(compiled: bool) -> None:
    shared = by_name(compiled, fullgraph=False)

    def call_backward(*qkv: Tensor) -> Tensor:
        return in_a_thread_of_autograds(lambda: shared(*qkv))

    for spec in (COARSE, COARSER, COARSE):
        with replace_sdpa(spec):
            assert_attends(spec, call_backward)
    assert_attends(None, call_backward)


def test_torch_jit_script_of_attention_is_refused_inside_a_block() -> None:
    class Scripted(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    with replace_sdpa(), pytest.raises(torch.jit.frontend.NotSupportedError):
        torch.jit.script(Scripted())


@pytest.mark.parametrize("numerics", ['"sdpa_math"', 'AttentionSpec(preset="external", kernel="torch:math")'])
def test_torchs_own_kernel_can_replace_torchs_function(numerics: str) -> None:
    """Where no other test has imported what the package imports late."""
    code = f"""
import torch
from torch.nn import functional
from attention import AttentionSpec, replace_sdpa
q = torch.randn(1, 1, 4, 8)
expected = functional.scaled_dot_product_attention(q, q, q)
with replace_sdpa({numerics}):
    torch.testing.assert_close(functional.scaled_dot_product_attention(q, q, q), expected)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def assert_as_torch(inputs: tuple[Tensor, ...], function: Any, **settings: Any) -> None:
    """O and gradients of plain float32 attention, and the shapes that torch gives."""
    o = TORCHS(*inputs, **settings)
    do = torch.linspace(-1, 1, o.numel(), device=o.device).view(o.shape)
    expected, found = (results(f, inputs, do, **settings) for f in (TORCHS, function))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


STANDARD = functools.partial(scaled_dot_product_attention, numerics="standard")


AS_TORCH: dict[str, tuple[tuple[tuple[int, ...], ...], dict[str, Any]]] = {
    "two dimensions": (((8, 16), (6, 16), (6, 16)), {}),
    "three": (((4, 8, 16), (4, 6, 16), (4, 6, 16)), {}),
    "five": (((2, 3, 4, 8, 16), (2, 1, 4, 6, 16), (1, 3, 4, 6, 16)), {}),
    "keys of batch 1": (((3, 4, 8, 16), (1, 4, 6, 16), (1, 4, 6, 16)), {}),
    "a query of batch 1": (((1, 4, 8, 16), (3, 4, 6, 16), (3, 4, 6, 16)), {}),
    "keys of one head": (((3, 4, 8, 16), (3, 1, 6, 16), (3, 1, 6, 16)), {}),
    "a query of one head": (((3, 1, 8, 16), (3, 4, 6, 16), (3, 4, 6, 16)), {}),
    "no queries": (((2, 4, 0, 16), (2, 4, 6, 16), (2, 4, 6, 16)), {"is_causal": True}),
    "no keys": (((2, 4, 8, 16), (2, 4, 0, 16), (2, 4, 0, 16)), {}),
    "a scale of 0": (((2, 4, 8, 16), (2, 4, 6, 16), (2, 4, 6, 16)), {"scale": 0.0}),
    "three, grouped": (((4, 8, 16), (2, 6, 16), (2, 6, 16)), {"enable_gqa": True}),
}


@pytest.mark.parametrize("case", AS_TORCH)
def test_shapes_are_read_as_torch_reads_them(case: str) -> None:
    shapes, settings = AS_TORCH[case]
    assert_as_torch(drawn(*shapes), STANDARD, **settings)


@pytest.mark.parametrize(("case", "mask"), [("three", (4, 1, 6)), ("five", (3, 1, 8, 6)), ("five", (2, 1, 1, 1, 6))])
def test_masks_of_other_dimensions_are_read_as_torch_reads_them(case: str, mask: tuple[int, ...]) -> None:
    """Another number of keys for each entry, so that none can be taken for another's."""
    entries = torch.arange(math.prod(mask[:-2])).view(*mask[:-2], 1, 1)
    assert_as_torch(drawn(*AS_TORCH[case][0]), STANDARD, attn_mask=(torch.arange(6) <= entries % 6).expand(mask))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "batch, heads, time": lambda x: x.contiguous(),
    "batch, time, heads": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "a slice of a fused projection": lambda x: x.transpose(1, 2).repeat(1, 1, 1, 3)[..., 16:32].transpose(1, 2),
    "expanded": lambda x: x[:1].expand(2, -1, -1, -1),
}


@pytest.mark.parametrize("shape", [(2, 4, 16, 8), (2, 4, 1, 8)])
@pytest.mark.parametrize("numerics", ["sdpa_flash", "sdpa_math", "standard", "flash_consistent"])
def test_a_head_dim_may_have_any_stride(numerics: str, shape: tuple[int, ...]) -> None:
    inputs = tuple(x.mT for x in drawn(*(shape,) * 3))
    attend = functools.partial(scaled_dot_product_attention, numerics=numerics)
    do = torch.ones_like(inputs[0])
    copies = tuple(x.clone(memory_format=torch.contiguous_format) for x in inputs)
    # Not the same bits: BLAS may add the products of a transposed matrix in another order, and on some CPUs does.
    for a, b in zip(results(attend, inputs, do), results(attend, copies, do), strict=True):
        torch.testing.assert_close(a, b)


def eager_or_compiled(how: str) -> Any:
    torch.compiler.reset()
    compiled = torch.compile(scaled_dot_product_attention, fullgraph=True, dynamic=True, backend="aot_eager")
    return compiled if how == "compiled" else scaled_dot_product_attention


@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_output_is_laid_out_as_torchs(layout: str, how: str) -> None:
    x = LAYOUTS[layout](drawn((2, 4, 8, 16))[0])
    assert eager_or_compiled(how)(x, x, x).stride() == TORCHS(x, x, x).stride()


@pytest.mark.parametrize("scale", [np.float32(0.3), torch.tensor(0.3), 2])
def test_a_scale_is_what_float_makes_a_number_and_a_parameter_a_tensor(scale: Any) -> None:
    q, k, v = drawn(*((1, 2, 8, 16),) * 3)
    expected = scaled_dot_product_attention(q, k, v, scale=float(scale))
    assert torch.equal(scaled_dot_product_attention(torch.nn.Parameter(q), k, v, scale=scale), expected)


@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("sizes", [(16, 16), (8, 16)])
def test_a_causal_bias_means_what_torch_means_by_it_whatever_its_storage_holds(
    sizes: tuple[int, int], make: Callable[..., CausalBias], how: str, device: torch.device
) -> None:
    T, S = sizes
    inputs = tuple(x.to(device) for x in drawn((2, 3, T, 8), (2, 3, S, 8), (2, 3, S, 8)))
    function = eager_or_compiled(how)
    for content in (0.0, math.nan):
        bias = make(T, S)
        with torch._C.DisableTorchFunctionSubclass():
            bias.fill_(content)
        assert_as_torch(inputs, function, attn_mask=bias)


def test_queries_that_a_lower_right_bias_shows_no_key_are_zero() -> None:
    with pytest.warns(UserWarning, match="Lower right causal bias"):
        bias = causal_lower_right(8, 6)
    o = scaled_dot_product_attention(*drawn((1, 1, 8, 16), (1, 1, 6, 16), (1, 1, 6, 16)), attn_mask=bias)
    assert (o == 0).all(dim=-1).flatten().tolist() == [True] * 2 + [False] * 6


class Unread(Tensor):
    """A subclass whose meaning is not its storage: to read anything of it is an error."""

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("__"):
            raise AssertionError(f"{name} of a subclass was read")
        return super().__getattribute__(name)


JAGGED = torch.nested.nested_tensor([X[0].transpose(0, 1)] * 2, layout=torch.jagged).transpose(1, 2)


@pytest.mark.parametrize("name", ["query", "key", "value", "attn_mask", "sinks"])
@pytest.mark.parametrize("subclass", [X.as_subclass(Unread), JAGGED], ids=["unread", "jagged"])
def test_a_subclass_is_refused_unread(subclass: Tensor, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is a {type(subclass).__name__}, a subclass of Tensor"):
        scaled_dot_product_attention(**({"query": X, "key": X, "value": X} | {name: subclass}))


@pytest.mark.parametrize("numerics", ["flash", "standard"])
def test_second_derivatives_are_refused_where_they_are_asked_for(numerics: str) -> None:
    x = drawn((1, 1, 4, 8))[0].requires_grad_()
    o = scaled_dot_product_attention(x, x, x, numerics=numerics)
    (gradient,) = torch.autograd.grad(o.sum(), x, create_graph=True)
    with pytest.raises(ValueError, match=r"no second derivatives.*replace_sdpa\(None\)"):
        gradient.sum().backward()


ONES = torch.ones(4)


def compiled_for_q(f: Any) -> Any:
    torch.compiler.reset()
    return torch.compile(lambda q: f(q, X, X), backend="eager")


def dual_level(f: Any) -> None:
    f(X)
    with forward_ad.dual_level():
        f(forward_ad.make_dual(X, X))


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (lambda f: torch.func.grad(lambda q: f(q, X, X).sum())(X), "query is within"),
        (lambda f: torch.func.vmap(f)(X[None], X[None], X[None]), "query is within"),
        (lambda f: torch.func.functionalize(f)(X, X, X), "query is within"),
        (lambda f: torch.func.jvp(lambda q: f(q, X, X), (X,), (X,)), "query has a tangent"),
        (lambda f: torch.func.jvp(lambda k: f(X, k, X), (X,), (X,)), "key has a tangent"),
        (lambda f: torch.func.jvp(lambda v: f(X, X, v), (X,), (X,)), "value has a tangent"),
        (lambda f: torch.func.jacfwd(lambda sinks: f(X, X, X, sinks=sinks))(ONES), "sinks has a tangent"),
        (lambda f: torch.func.vmap(lambda sinks: f(X, X, X, sinks=sinks))(ONES[None]), "sinks is within"),
        (lambda f: torch.func.jvp(lambda c: f(X, X, X, scale=c), (ONES[0],), (ONES[0],)), "scale has a tangent"),
        (lambda f: torch.func.jvp(compiled_for_q(f), (X,), (X,)), "query has a tangent"),
        (lambda f: compiled_for_q(lambda q, *kv: torch.func.jvp(f, (q, *kv), (X,) * 3))(X), "query has a tangent"),
        (lambda f: dual_level(compiled_for_q(f)), "query has a tangent"),
    ],
)
def test_transforms_of_torch_func_are_refused(transform: Any, message: str) -> None:
    """Tangents would be 0."""
    with pytest.raises(ValueError, match=message):
        transform(scaled_dot_product_attention)


def joined(ranges: Tensor, keys: Tensor) -> Tensor:
    s = torch.arange(keys.shape[1])
    first, last = ranges[..., None].unbind(1)
    return (s >= first) & (s < last) & keys[:, None]


def test_every_small_mask_that_is_ranges_and_padding_is_found_and_no_other() -> None:
    """All 512 masks of three queries and three keys, against all ranges and all paddings."""
    ranges = torch.tensor(list(itertools.product(range(4), repeat=6))).view(-1, 2, 3)
    ranges = ranges[(ranges.diff(dim=2) >= 0).all(dim=2).all(dim=1)]
    paddings = torch.tensor(list(itertools.product([False, True], repeat=3)))
    servable = {tuple(x) for p in paddings for x in joined(ranges, p.expand(len(ranges), 3)).flatten(1).tolist()}
    for bits in itertools.product([False, True], repeat=9):
        mask = torch.tensor(bits).view(1, 3, 3)
        if bits in servable:
            assert torch.equal(joined(*split(mask)[:2]), mask)
        else:
            with pytest.raises(ValueError, match="batch entry 0: query"):
                split(mask)
