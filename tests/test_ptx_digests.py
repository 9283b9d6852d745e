"""Kernels compile to the PTX that is recorded: see ptx_digests.py, which names what differs."""

from __future__ import annotations

import warnings

import ptx_digests
import pytest

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


PTX = """
.version 8.6
.target sm_90a
.entry name(
.param .u64 name_param_0,
.param .u32 name_param_1,
.param .u32 name_param_2
)
{
.loc 1 2 3
ld.param.u64 %rd1, [name_param_0]; // a comment
ld.param.u32 %r1, [name_param_2];
}
.section .debug_abbrev
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [("8.6", "8.7"), ("name", "other"), (".loc 1 2 3", ".loc 4 5 6"), ("a comment", ""), ("_param_2", "_param_1")],
)
def test_a_digest_leaves_out_what_does_not_count(old: str, new: str) -> None:
    assert ptx_digests.digest(PTX.replace(old, new)) == ptx_digests.digest(PTX)


@pytest.mark.parametrize(("old", "new"), [("sm_90a", "sm_80"), ("%r1", "%r2"), ("_param_2]", "_param_0]")])
def test_a_digest_has_what_counts(old: str, new: str) -> None:
    assert ptx_digests.digest(PTX.replace(old, new)) != ptx_digests.digest(PTX)


def test_a_digest_tells_parameters_that_change_places() -> None:
    swapped = (
        PTX.replace("[name_param_0]", "[x]")
        .replace("[name_param_2]", "[name_param_0]")
        .replace("[x]", "[name_param_2]")
    )
    assert ptx_digests.digest(swapped) != ptx_digests.digest(PTX)
