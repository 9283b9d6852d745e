"""Kernels compile to the PTX that is recorded (ptx_digests.py names what differs); ``exponent`` as compilers leave it, for sm_90."""

import re
import warnings
from typing import Any

import ptx_digests
import pytest

from attention.numerics import BACKWARD, Numerics


def _holds(*options: str) -> None:
    code, printed = ptx_digests.in_a_process("--check", *options)
    if "no digest was compared" in printed:
        warnings.warn(printed.splitlines()[-1], stacklevel=2)
    assert code == 0, printed


def test_ptx_is_that_recorded() -> None:
    _holds("--quick")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_ptx_is_that_recorded() -> None:
    _holds()


triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
compiler = pytest.importorskip("triton.compiler")
sites = pytest.importorskip("attention.triton.codes")
layout = pytest.importorskip("attention.triton.layout")
softmax = pytest.importorskip("attention.triton.softmax")

probabilities, rescaling, row_normalizer = softmax.probabilities, softmax.rescaling, softmax.row_normalizer
NEAREST = sites.NEAREST
N = 128


@triton.jit
def exponent_kernel(p_s, p_p, unit, SITES: tl.constexpr, N: tl.constexpr):
    """P of a row [N] of S from its own maximum, and exp(m - m') of m and its last score, in the unit of m."""
    o_s = tl.arange(0, N)
    b_s = tl.load(p_s + o_s)
    FOLD: tl.constexpr = SITES.exponent
    b_m = row_normalizer(tl.max(b_s, 0, keep_dims=True), unit, FOLD, NEAREST)
    b_last = row_normalizer(tl.load(p_s + tl.arange(0, 1)), unit, FOLD, NEAREST)
    tl.store(p_p + o_s, probabilities(b_s, b_m, b_last, unit, SITES))
    tl.store(p_p + N + tl.arange(0, 1), rescaling(b_m, b_last, unit, FOLD))


def exponents(**chosen: str) -> list[str]:
    """What makes the operands of each exp2, innermost first, as PTX has it: the operation and that of its first operand."""
    chosen_sites = sites.kernel_sites(Numerics(**chosen).concrete("bf16"), (BACKWARD,), 1.0, 0.0, False)
    signature = dict.fromkeys(("p_s", "p_p"), "*fp32") | {"unit": "fp32"}
    values = {(3,): chosen_sites, (4,): N}
    source = compiler.ASTSource(exponent_kernel, signature | dict.fromkeys(("SITES", "N"), "constexpr"), values)
    written = {
        register: (operation, operands)
        for operation, register, operands in re.findall(r"^\s*([a-z][\w.]*f32)\s+(%\w+), (.*);", ptx_of(source), re.M)
    }
    return [
        " of ".join(_chain(written, operands))
        for operation, operands in written.values()
        if operation.startswith("ex2")
    ]


def ptx_of(source: Any, **options: Any) -> str:
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    return triton.compile(source, target=target, options={"enable_fp_fusion": sites.FP_FUSION, **options}).asm["ptx"]


def _chain(written: dict[str, tuple[str, str]], operands: str) -> list[str]:
    """The operations behind the first operand, back to what is loaded or a maximum."""
    found = written.get(operands.split(", ")[0])
    if found is None or found[0].startswith(("ld", "max")):
        return []
    return [found[0], *_chain(written, found[1])]


def test_the_fma_is_named() -> None:
    assert exponents(exponent="fma")[0] == "fma.rn.f32"


@pytest.mark.parametrize("saved", ["logsumexp", "max_and_sum"])
def test_separate_multiply_rounds_it_and_then_subtracts(saved: str) -> None:
    found = exponents(exponent="separate_multiply", saved_statistics=saved)
    subtracted = "sub.f32 of mul.rn.f32"
    assert found == ["sub.f32 of " * (saved == "max_and_sum") + subtracted, subtracted]


def test_tensor_cores_sum_p_bar_from_the_registers_that_they_multiply() -> None:
    """So that its elements are where ``rounded_and_summed`` takes them to be: both products want them in the same order."""
    signature = dict.fromkeys(("p_q", "p_k", "p_v"), "*bf16") | dict.fromkeys(("p_o", "p_d"), "*fp32")
    source = compiler.ASTSource(layout.weighted_sum_kernel, signature | {"N": "constexpr"}, {(5,): 64})
    ptx = ptx_of(source, num_warps=4)
    names = dict(re.findall(r"mov\.b32\s+(%r\d+), (%r\d+);", ptx))
    read = re.findall(r"mma\.sync\S+ \{[^}]*\}, \{([^}]*)\}", ptx)
    multiplied = re.findall(r"wgmma\.mma_async\S+ \{[^}]*\}, \{([^}]*)\}", ptx)
    assert len(read) == 4
    assert [[names.get(r, r) for r in text.replace(" ", "").split(",")] for text in read] == [
        [names.get(r, r) for r in text.replace(" ", "").split(",")] for text in multiplied
    ]
