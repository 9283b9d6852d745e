"""The Triton kernels against the PyTorch backends of the same numerics, and against fp64: in Triton's interpreter, or on a GPU.

The interpreter is chosen when a kernel is defined, for the whole process, and inductor cannot live with it; so the tests of the CPU
run in a pytest of their own, which ``test_the_kernels_in_tritons_interpreter`` starts. Single sites are in test_sites.py.
"""

from collections import defaultdict
from pathlib import Path
from unittest.mock import Mock

import kernel_tests
import pytest
import torch
from attention_cases import CASES, Problem, assert_agree, assert_as_exact, magnitudes, make, oracle, run, same
from kernel_tests import INTERPRETED, pass_in_the_interpreter
from torch import Tensor

import attention
from attention import AttentionConfig, AttentionSpec
from attention.low_formats import round_low
from attention.numerics import KERNEL_SCALES, LOW_FORMATS
from attention.presets import PRESETS
from attention.triton.codes import format_code
from attention.triton.round_blocks import round_to
from errors import UserError

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

device = kernel_tests.device
FLASH = [name for name, preset in PRESETS.items() if preset.backend == "flash"]
TILES = ("tile_q=16", "tile_k=16")  # neither divides T = 40: partial blocks in both directions
in_interpreter = pytest.mark.skipif(not INTERPRETED, reason="of the interpreter")
slow = pytest.mark.slow


def problem(
    case: str, device: torch.device, dtype: torch.dtype = torch.bfloat16, shape: tuple[int, ...] = (1, 40, 2, 16)
) -> Problem:
    p = make("random" if case == "huge" else case, dtype, device, shape)
    return Problem(p.q * 300, p.k * 300, p.v, p.do) if case == "huge" else p


def spec(preset: str, sites: tuple[str, ...] = TILES, backend: str = "flash", **base: str) -> AttentionSpec:
    return AttentionSpec(preset=preset, sites=() if preset == "flash_untiled" else sites, backend=backend, **base)


def flash_agrees(p: Problem, preset: str, numerics: str, sites: tuple[str, ...] = TILES, **more) -> None:
    """They differ by less than a quarter of the rounding error of the PyTorch backend, or by FP32 noise."""
    specs = (spec(preset, sites, backend, numerics=numerics) for backend in ("flash", "flash_reference"))
    found, expected = (run(p, asked, **more) for asked in specs)
    assert [x.dtype for x in found] == [expected[0].dtype, *[p.q.dtype] * 3]
    assert_agree(found, expected, oracle(p), magnitudes(p))


def kernels_are_as_exact(p: Problem, **settings) -> None:
    """Error against fp64 at most twice that of the PyTorch backend, the floor being the unit of the format and that of L in FP32."""
    largest_score = (p.q.float().norm(dim=-1).max() * p.k.float().norm(dim=-1).max()).item() * p.q.shape[-1] ** -0.5
    floor = max(2.0**-24 * max(largest_score, 16), 0 if p.q.dtype == torch.float32 else 2.0**-10)
    found, baseline = (run(p, spec("flash", backend=backend, **settings)) for backend in ("flash", "flash_reference"))
    assert_as_exact(found, baseline, oracle(p), magnitudes(p), floor)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("cases", ["not slow", pytest.param("slow", marks=slow)])
def test_the_kernels_in_tritons_interpreter(cases: str) -> None:
    pass_in_the_interpreter(__file__, "-m", cases)


# Small files with tests of kernels, in one process, as each start takes seconds.
SMALL = ("check", "exponent", "row_residual", "linear_cross_entropy", "hopper")


@pytest.mark.timeout(600)
def test_the_kernels_of_small_files_in_tritons_interpreter() -> None:
    pass_in_the_interpreter(*(f"{Path(__file__).parent}/test_{name}.py" for name in SMALL))


@triton.jit
def low_kernel(p_x, p_y, FORMAT: tl.constexpr, BY_KEYS: tl.constexpr):
    o_x = tl.program_id(0) * 4096 + tl.arange(0, 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
    tl.store(p_y + o_x, round_to(tl.load(p_x + o_x), FORMAT, BY_KEYS))


@pytest.mark.parametrize("fmt", [fmt for fmt in LOW_FORMATS if fmt.partition("_")[2] in KERNEL_SCALES])
def test_a_format_below_bf16_is_the_references_to_the_bit(fmt: str, device: torch.device) -> None:
    """On all values of BF16, and on FP32 between them, with blocks of zeros and of what is not finite; scales across and down."""
    bf16 = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()
    between = torch.randn(16, 64, 64, generator=torch.Generator().manual_seed(0)) * torch.randn(16, 64, 1).exp2()
    between[0, 3], between[1, 5, 7], between[2, 6, 9] = 0.0, torch.inf, torch.nan
    x = torch.cat((bf16.view(16, 64, 64), between, between * 1e4)).to(device)
    for by_keys in (False, True):
        y = torch.empty_like(x)
        low_kernel[(len(x),)](x, y, format_code(fmt), by_keys)
        turned = x.mT if by_keys else x
        expected = round_low(turned.contiguous(), fmt)
        expected = expected.mT if by_keys else expected
        same = (y.view(torch.int32) == expected.contiguous().view(torch.int32)) | (y.isnan() & expected.isnan())
        assert same.all()


def test_a_p_below_bf16_is_rounded_with_the_m_of_its_whole_tile(device: torch.device) -> None:
    """A tile is several blocks here, and m grows from block to block: P_bar of the first ones, rounded with their m, would be finer."""
    p = problem("random", device, torch.float32, (1, 150, 1, 16))
    p.q[:], p.k[:] = 1, torch.linspace(0, 3, 150, device=device)[None, :, None, None]
    sites, small = (("probabilities=e4m3", tile) for tile in ("tile_k=0", "tile_k=32"))
    found, whole, parts = (
        run(p, AttentionSpec(preset="flash_consistent", numerics="fp32", sites=chosen, backend=backend))[0]
        for backend, chosen in (("flash", sites), ("flash_reference", sites), ("flash_reference", small))
    )
    assert (found - whole).norm() < 1e-5 * whole.norm()
    assert (parts - whole).norm() > 1e-3 * whole.norm()


@pytest.mark.parametrize("numerics", ["hardware", *(pytest.param(x, marks=slow) for x in ("rounded_forward", "fp32"))])
@pytest.mark.parametrize("preset", FLASH)
def test_every_preset_agrees_with_the_reference(preset: str, numerics: str, device: torch.device) -> None:
    shape = (1, 40, 2 if "stochastic" in preset else 1, 16)
    p = problem("tied" if "stable" in preset else "random", device, shape=shape)
    flash_agrees(p, preset, numerics, seed=2**40 + 5)


@pytest.mark.parametrize("case", [*CASES, "huge"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=slow), torch.float32], ids=str)
def test_as_exact_as_in_pytorch_against_fp64(case: str, dtype: torch.dtype, device: torch.device) -> None:
    kernels_are_as_exact(problem(case, device, dtype, (1, 33, 1, 16)))


FETCHED = ("flash", "flash_stable_safe", "flash_delta_from_p_subtract_first", "flash_consistent")


@in_interpreter
@pytest.mark.parametrize("preset", FETCHED)
def test_descriptors_fetch_the_same_blocks(preset: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of Hopper's copy engine, which the interpreter can walk: lengths that no block divides, and head dim 64."""
    from attention.triton import backward, forward

    p = problem("random", device, shape=(1, 70, 1, 64))
    asked = spec(preset, sites=("tile_q=64", "tile_k=32"))
    plain = run(p, asked)
    allowed = Mock(return_value=True)
    for module in (forward, backward):
        monkeypatch.setattr(module, "takes_descriptor", allowed)
    assert same(plain, run(p, asked))
    assert allowed.call_count > 1


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["flash_stochastic_p_o", "flash_delta_from_p", "flash_delta_from_p_subtract_first"])
def test_repeats_are_equal_to_the_bit_on_a_gpu(preset: str, device: torch.device) -> None:
    p = problem("random", device, shape=(2, 1000, 4, 64))
    first = run(p, spec(preset, sites=()), seed=3)
    for _ in range(50):
        assert same(first, run(p, spec(preset, sites=()), seed=3))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 1000, 1024, 2048])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_lengths_and_cases_on_a_gpu(length: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    for case in (*CASES, "huge"):
        p = problem(case, device, dtype, (2, length, 3, head_dim))
        kernels_are_as_exact(p, sites=("tile_q=64", "tile_k=64"))


def test_sums_of_other_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from attention.triton import layout

    def launch(p_q: Tensor, p_o: Tensor, p_d: Tensor, **_: object) -> None:
        """As if threads held elements of other rows."""
        p_o.copy_(p_q)
        p_d.copy_(p_q.float().sum(1).roll(1))

    monkeypatch.setattr(layout, "weighted_sum_kernel", defaultdict(lambda: launch))
    monkeypatch.setattr(torch.cuda, "get_device_name", str)
    with pytest.raises(UserError, match="lays products out otherwise"):
        layout.check_sums.__wrapped__(torch.device("cpu"))


@pytest.mark.gpu
def test_sums_are_of_the_rows_that_a_gpu_multiplies() -> None:
    from attention.triton import layout

    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("sums by tensor cores are for sm_90")
    layout.check_sums.__wrapped__(torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("preset", FLASH)
@pytest.mark.parametrize("numerics", ["hardware", "rounded_forward"])
def test_presets_at_real_sizes_on_a_gpu(preset: str, numerics: str, device: torch.device) -> None:
    sites = ("tile_q=512", "tile_k=512") if numerics == "rounded_forward" else ("tile_k=64",)
    flash_agrees(problem("tied", device, shape=(1, 1100, 2, 64)), preset, numerics, sites)


@pytest.mark.gpu
def test_indices_beyond_32_bits(device: torch.device) -> None:
    """More than 2^31 elements a tensor: the last batch entry must come out as it does alone."""
    generator = torch.Generator("cuda").manual_seed(0)
    fused = torch.randn(2800, 1024, 36, 64, device=device, dtype=torch.bfloat16, generator=generator).requires_grad_()
    plan = AttentionConfig(default=spec("flash", sites=())).resolve(1, 12)[0]
    seed = torch.tensor(0, device=device)
    o = attention.run(*fused.split(12, dim=2), plan, rounding_seed=seed)
    (gradient,) = torch.autograd.grad(o, fused, o.detach())
    alone = fused.detach()[-1:].clone().requires_grad_()
    o_alone = attention.run(*alone.split(12, dim=2), plan, rounding_seed=seed)
    assert torch.equal(o[-1:], o_alone)
    assert torch.equal(gradient[-1:], torch.autograd.grad(o_alone, alone, o_alone.detach())[0])
