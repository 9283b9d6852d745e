"""``flash_hopper``: what it refuses, what its kernels read of a row, and on a Hopper GPU its results beside the Triton kernels'."""

import functools
import importlib.metadata
import math
from unittest.mock import Mock

import kernel_tests
import pytest
import torch
from attention_cases import make, oracle, relative_errors, results, run, same
from torch import Tensor

from attention import AttentionSpec, backends, scaled_dot_product_attention
from attention.backends import Call, obstacle
from attention.rounding import low_bits, with_low_bits

pytest.importorskip("triton")
device = kernel_tests.device


def refusal(preset: str = "flash", sites: tuple[str, ...] = (), numerics: str = "hardware", **settings: object) -> str:
    n = AttentionSpec(preset=preset, sites=sites, numerics=numerics).resolve()
    call = {"device": "cuda", "dtype": "bf16", "head_dim": 64, "numerics": n} | settings
    return obstacle("flash_hopper", Call(**call)) or ""  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"preset": "flash_fp32_o"}, "it does not have this site: delta_output = 'fp32', expected output"),
        ({"preset": "flash_delta_from_p"}, "delta = 'rowsum_p_dp', expected rowsum_do_o"),
        ({"preset": "flash_consistent", "sites": ("delta_output=output",)}, "delta_output = 'output', expected low16"),
        ({"numerics": "published"}, "it does not have this site: "),
        ({"sites": ("score_gradients=fp32",)}, "score_gradients = 'fp32', expected bf16"),
        ({"features": ("softcap",)}, "it has no soft-cap"),
        ({"features": ("keys",)}, "it has no mask of keys"),
        ({"features": ("sinks",)}, "it has no attention sink"),
        ({"features": ("value_dim",), "value_dim": 32}, "it has no head dim of V other than that of K"),
        ({"head_dim": 80}, "head dims 64, 96 and 128, not 80"),
        ({"dtype": "fp32"}, "bfloat16 or float16 and not float32"),
        ({"device": "cpu"}, "compute capability 9.0 (Hopper), not cpu"),
    ],
    ids=str,
)
def test_what_it_does_not_have_is_refused_by_name(settings: dict[str, object], expected: str) -> None:
    reason = refusal(**settings)  # type: ignore[arg-type]
    assert expected in reason


CARD, PACKAGE = "a CUDA device of compute capability 9.0 (Hopper), not 10.0", "flash-attn-4 4.0.0b36, not "


@pytest.mark.parametrize(
    ("capability", "version", "expected"),
    [((9, 0), "4.0.0b35", f"{PACKAGE}4.0.0b35"), ((9, 0), None, f"{PACKAGE}none"), ((10, 0), None, CARD)],
)
def test_another_card_or_package_is_refused(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], version: str | None, expected: str
) -> None:
    missing = None if version else importlib.metadata.PackageNotFoundError
    monkeypatch.setattr(importlib.metadata, "version", Mock(return_value=version, side_effect=missing))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert f"it needs {expected}" in backends._no_hopper.__wrapped__()


def test_one_number_holds_m_and_the_divisor_and_delta_reads_all_of_o(device: torch.device) -> None:
    """For rows of every size of m and d; beyond the last row P is 0."""
    from attention.hopper.prepare import prepare

    B, T, H, D = 2, 70, 3, 96
    draw = torch.Generator().manual_seed(0)
    exact, do = (torch.randn(B, T, H, D, generator=draw) for _ in range(2))
    m = torch.randint(-2000, 2000, (B, H, T), generator=draw).float()
    d = torch.exp2(torch.rand(B, H, T, generator=draw) * 13 - 1)
    d[:, :, :4] = torch.tensor([0.5, 1.0, 2.0, 3.0])
    o, do = exact.bfloat16(), do.bfloat16()
    low = low_bits(exact, o.float(), "bf16")
    by_thread = low.view(B, T, H, D // 32, 4, 4, 2).transpose(4, 5).contiguous()  # as the forward kernel writes them
    operands = do, o, by_thread, torch.stack((m, 1 / d), 2)
    delta, packed = (x.cpu() for x in prepare(*(x.to(device) for x in operands), 128))
    expected = (do.float() * with_low_bits(o.float(), low, "bf16")).sum(3).transpose(1, 2)
    assert torch.allclose(delta[:, :, :T], expected, rtol=1e-5, atol=1e-5)
    assert not delta[:, :, T:].any()
    whole = (packed + 1.5 * 2**23) - 1.5 * 2**23  # as the kernel takes it apart
    factor = 1.5 - (packed - whole).double()
    assert torch.exp2(-whole[:, :, T:]).max() == 0
    inverse = factor[:, :, :T] * torch.exp2((m - whole[:, :, :T]).double())
    assert (inverse * d - 1).abs().max() < 2.0**-14 + 2.0**-23  # half a unit of m, and the rounding of 1 / d


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("length", [37, 1000, 1024])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("preset", ["flash", "flash_consistent"])
@pytest.mark.parametrize("case", ["random", "peaked", "tied", "common"])
def test_it_is_as_exact_as_the_triton_kernels(
    case: str, preset: str, head_dim: int, length: int, dtype: torch.dtype
) -> None:
    if (reason := refusal(preset)) != "":
        pytest.skip(reason)
    p = make(case, dtype, torch.device("cuda"), (2, length, 3, head_dim))
    torch.full((1 << 25,), math.nan, device="cuda")  # what memory holds that a kernel forgets to fill
    hopper, triton = (AttentionSpec(preset=preset, backend=backend) for backend in ("flash_hopper", "flash"))
    found = run(p, hopper)
    exact = oracle(p)
    for own, other in zip(relative_errors(found, exact), relative_errors(run(p, triton), exact), strict=True):
        assert own <= 1.1 * other + 2.0**-17
    for _ in range(20):
        assert same(found, run(p, hopper))


@pytest.mark.gpu
@pytest.mark.parametrize("group", [3, 4], ids=["apart", "packed"])
@pytest.mark.parametrize("preset", ["flash", "flash_consistent"])
def test_grouped_queries_of_any_layout_and_compiled(preset: str, group: int) -> None:
    """In torch's signature: as exact as Triton, and the same bits of operands that TMA cannot read, dO of stride 0 and a compiled call."""
    if (reason := refusal(preset)) != "":
        pytest.skip(reason)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 300, 128, device="cuda").bfloat16() for heads in (2 * group, 2, 2))
    do = torch.randn(2, 1, 1, 128, device="cuda").bfloat16().expand(q.shape)
    settings = {"is_causal": True, "enable_gqa": True}

    def attend(q: Tensor, k: Tensor, v: Tensor, backend: str = "flash_hopper") -> Tensor:
        return scaled_dot_product_attention(q, k, v, **settings, numerics=AttentionSpec(preset=preset, backend=backend))

    plain = results(attend, (q, k, v), do.contiguous())
    torchs = functools.partial(torch.nn.functional.scaled_dot_product_attention, **settings)
    exact = results(torchs, tuple(x.double() for x in (q, k, v)), do)
    triton = results(functools.partial(attend, backend="flash"), (q, k, v), do)
    for own, other in zip(relative_errors(plain, exact), relative_errors(triton, exact), strict=True):
        assert own <= 1.1 * other + 2.0**-17
    odd = torch.empty(q.numel() + 1, device="cuda", dtype=q.dtype)[1:].view(q.shape).copy_(q)
    strided = torch.empty(2, 2, 300, 132, device="cuda", dtype=q.dtype)[..., :128].copy_(k)
    laid_out = odd, strided, v.transpose(1, 2).contiguous().transpose(1, 2)
    assert same(results(attend, laid_out, do), plain)
    assert same(results(torch.compile(attend, fullgraph=True), (q, k, v), do), plain)
