"""Kernels compile to the PTX that is recorded (ptx_digests.py names what differs). Interpreted, this module has nothing to say."""

from __future__ import annotations

import re
import warnings

import ptx_digests
import pytest
from kernel_tests import INTERPRETED

pytest.importorskip("triton")


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
compiler = pytest.importorskip("triton.compiler")
sites = pytest.importorskip("attention.triton.codes")
layout = pytest.importorskip("attention.triton.layout")

pytestmark = pytest.mark.skipif(INTERPRETED, reason="compiled, though not run")


def test_tensor_cores_sum_p_bar_from_the_registers_that_they_multiply() -> None:
    """So that its elements are where ``rounded_and_summed`` takes them to be: both products want them in the same order."""
    signature = dict.fromkeys(("p_q", "p_k", "p_v"), "*bf16") | dict.fromkeys(("p_o", "p_d"), "*fp32")
    source = compiler.ASTSource(layout.weighted_sum_kernel, signature | {"N": "constexpr"}, {(5,): 64})
    made = triton.compile(
        source,
        target=triton.backends.compiler.GPUTarget("cuda", 90, 32),
        options={"num_warps": 4, "enable_fp_fusion": sites.FP_FUSION},
    )
    ptx = made.asm["ptx"]
    names = dict(re.findall(r"mov\.b32\s+(%r\d+), (%r\d+);", ptx))
    read = re.findall(r"mma\.sync\S+ \{[^}]*\}, \{([^}]*)\}", ptx)
    multiplied = re.findall(r"wgmma\.mma_async\S+ \{[^}]*\}, \{([^}]*)\}", ptx)
    assert len(read) == 4
    assert [[names.get(r, r) for r in text.replace(" ", "").split(",")] for text in read] == [
        [names.get(r, r) for r in text.replace(" ", "").split(",")] for text in multiplied
    ]
