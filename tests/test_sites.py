"""Every rounding site in every backend and direction, from one table (``sites.py``); kernels in Triton's interpreter or on a GPU."""

import functools

import kernel_tests
import pytest
import torch
from attention_cases import (
    NAMES,
    PAIRED,
    Problem,
    assert_agree,
    in_small_tiles,
    magnitudes,
    make,
    oracle,
    relative_errors,
    run,
)
from kernel_tests import pass_in_the_interpreter
from sites import CASES, CHOICES, DECLARED, DEFAULT, FIELDS, PLAIN, SITES, TOGETHER, Case, Meeting
from torch import Tensor

from attention import AttentionSpec
from errors import UserError

SHAPE = (1, 40, 1, 16)  # which tiles of 32 x 16 do not divide
CPU, device = torch.device("cpu"), kernel_tests.device
KERNELS = [case for case in CASES if all("flash" in DECLARED[site].backends for site in case.changed)]
STANDARD = [case for case in CASES if case.row.standard is not None]


def cases(chosen: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", chosen, ids=str)


@functools.cache
def results(backend: str, sites: tuple[str, ...], device: torch.device = CPU) -> tuple[Tensor, ...]:
    """O, dQ, dK and dV of FP32 inputs whose row maxima are tied and differ from tile to tile, by a preset of the backend."""
    p = paired(device)
    preset = "standard" if backend.startswith("standard") else "flash"
    return run(p, AttentionSpec(preset=preset, sites=sites, backend=backend), seed=5)


def moved(found: tuple[Tensor, ...], plain: tuple[Tensor, ...]) -> str:
    return " ".join(name for name, a, b in zip(NAMES, found, plain, strict=True) if not torch.equal(a, b))


def assert_near(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], p: Problem, softcap: float = 0.0) -> None:
    assert_agree(found, expected, oracle(p, softcap), magnitudes(p))


def paired(device: torch.device) -> Problem:
    return make(PAIRED, torch.float32, device, SHAPE)


def test_every_site_has_a_row() -> None:
    without = set(FIELDS) ^ set(SITES)
    assert not without, f"add a row to tests/sites.py: {without}"


@cases(CASES)
def test_a_site_is_declared_for_the_passes_and_backends_that_it_reaches(case: Case) -> None:
    assert "o" not in case.row.moves.split() or "forward" in DECLARED[case.site].acts_in
    assert ("standard" in DECLARED[case.site].backends) == (case.row.standard is not None)


@cases(CASES)
def test_a_site_moves_what_it_reaches_in_the_reference(case: Case) -> None:
    found, plain = (results("flash_reference", case.sites(changed=changed)) for changed in (True, False))
    assert moved(found, plain) == case.row.moves


@cases(STANDARD)
def test_a_site_moves_what_it_reaches_in_standard_attention(case: Case) -> None:
    """Which has no tiles."""
    sites = (case.sites(changed=changed) for changed in (True, False))
    found, plain = (results("standard", tuple(x for x in some if not x.startswith("tile_"))) for some in sites)
    assert moved(found, plain) == case.row.standard


def test_a_call_is_refused_a_site_that_its_backend_has_not() -> None:
    """Also where nobody asked ``check`` first."""
    with pytest.raises(UserError, match=r"it does not have this site: tile_k = 16, expected 0$"):
        run(paired(CPU), AttentionSpec(preset="standard", sites=("tile_k=16",)))


@pytest.mark.parametrize("site", [name for name in FIELDS if DECLARED[name].is_format])
def test_more_bits_of_a_site_are_a_smaller_error(site: str) -> None:
    """Four bits more are an error of a sixteenth against FP64, in the tensor that the site moves most; one bit off would be 8 or 32."""
    p = paired(CPU)
    errors = [
        max(relative_errors(results("flash_reference", (*PLAIN, f"{site}=m{bits}")), oracle(p), magnitudes(p)))
        for bits in (3, 7, 11)
    ]
    assert 8 < errors[0] / errors[1] < 32
    assert 8 < errors[1] / errors[2] < 32


@pytest.mark.parametrize("site", sorted(CHOICES))
def test_a_value_that_a_site_has_not_is_refused_with_its_choices(site: str) -> None:
    with pytest.raises(UserError) as error:
        AttentionSpec(sites=(f"{site}=qqq",))
    assert str(error.value).startswith(f"attention numerics {site} = 'qqq': expected one of {CHOICES[site][0]}, ")


@pytest.mark.parametrize("site", [name for name in FIELDS if getattr(DEFAULT, name) == "input"])
def test_input_is_the_format_of_q(site: str) -> None:
    assert {getattr(DEFAULT.concrete(fmt), site) for fmt in ("bf16", "fp16", "fp32")} == {"bf16", "fp16", "fp32"}


@pytest.mark.timeout(600)
def test_the_kernels_in_tritons_interpreter() -> None:
    pass_in_the_interpreter(__file__)


@cases(KERNELS)
def test_a_site_moves_what_it_reaches_in_the_flash_kernels(case: Case, device: torch.device) -> None:
    found, plain = (results("flash", case.sites(changed=changed), device) for changed in (True, False))
    if case.value == "zero_sum" and device.type == "cpu":
        # V and dO are wider in its launch, and the interpreter's products are a BLAS's, which may add them in another order.
        assert (found[3] - plain[3]).norm() < 1e-6 * plain[3].norm()
        found = (*found[:3], plain[3])
    assert moved(found, plain) == case.row.moves


@cases(KERNELS)
def test_the_flash_kernels_round_as_the_reference(case: Case, device: torch.device) -> None:
    found, expected = (results(backend, case.sites(changed=True), device) for backend in ("flash", "flash_reference"))
    assert_near(found, expected, paired(device))


@pytest.mark.parametrize("meeting", TOGETHER, ids=str)
def test_sites_that_meet_are_rounded_by_the_kernels_as_in_the_reference(meeting: Meeting, device: torch.device) -> None:
    """At a length that no block divides, with 13 rows behind a tile of 48."""
    p = make(meeting.inputs, meeting.dtype, device, (1, 61, 1, 16))
    sites = in_small_tiles(*meeting.sites.split())
    found, expected = (
        run(
            p,
            AttentionSpec(numerics=meeting.numerics, sites=sites, backend=backend),
            seed=2**40 + 7,
            softcap=meeting.softcap,
        )
        for backend in ("flash", "flash_reference")
    )
    assert_near(found, expected, p, meeting.softcap)
