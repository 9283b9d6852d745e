"""Every rounding site in every backend and direction, from one table (``sites.py``); kernels in Triton's interpreter or on a GPU."""

from __future__ import annotations

import functools

import pytest
import torch
from attention_cases import magnitudes, make, oracle, relative_errors, run
from kernel_tests import INTERPRETED, pass_in_the_interpreter
from sites import CASES, CHOICES, DEFAULT, FIELDS, PLAIN, SITES, is_format, sites_of
from torch import Tensor

import attention
from attention import AttentionConfig, AttentionSpec
from attention.numerics import numerics_from_key
from errors import UserError

NAMES = ("o", "dq", "dk", "dv")
SHAPE = (1, 40, 1, 16)  # which tiles of 32 x 16 do not divide
KERNELS = [pytest.param("cpu" if INTERPRETED else "cuda", marks=[] if INTERPRETED else [pytest.mark.gpu])]
here = pytest.mark.skipif(INTERPRETED, reason="no kernel in it")
STANDARD = [case for case in CASES if SITES[case[0]].standard is not None]
REFUSED = [
    ("exponent", "folded" if value == "subtracted" else value) if name == "exponent" else (name, value)
    for name, value in CASES
]
REFUSED = [case for case in REFUSED if SITES[case[0]].standard is None and not case[0].startswith("row_max_")]
REFUSED.remove(("delta", "rowsum_p_dp"))  # which is what it has


@functools.cache
def results(backend: str, sites: tuple[str, ...], device: str = "cpu") -> tuple[Tensor, ...]:
    """O, dQ, dK and dV of FP32 inputs with ties, by a preset of the backend."""
    p = make("tied", torch.float32, torch.device(device), SHAPE)
    preset = "standard" if backend.startswith("standard") else "flash"
    return run(p, AttentionSpec(preset=preset, sites=sites, backend=backend), seed=5)


def standard_sites(sites: tuple[str, ...]) -> tuple[str, ...]:
    """Without tiles, which ``standard`` has not."""
    return tuple(site for site in sites if not site.startswith("tile_"))


def moved(found: tuple[Tensor, ...], plain: tuple[Tensor, ...]) -> str:
    return " ".join(name for name, a, b in zip(NAMES, found, plain, strict=True) if not torch.equal(a, b))


def apart(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], device: str) -> dict[str, tuple[float, float]]:
    """Distance of two results, and how far it may be: a quarter of the rounding error of the second against FP64, or FP32 noise."""
    p = make("tied", torch.float32, torch.device(device), SHAPE)
    unit = magnitudes(p)
    distances = relative_errors(found, tuple(x.double() for x in expected), unit)
    own = relative_errors(expected, oracle(p), unit)
    return {n: (d, max(o / 4, 2.0**-21)) for n, d, o in zip(NAMES, distances, own, strict=True)}


@here
def test_every_site_has_a_row() -> None:
    assert tuple(SITES) == FIELDS


@here
@pytest.mark.parametrize(("site", "value"), CASES)
def test_a_site_moves_what_it_reaches_in_the_reference(site: str, value: str) -> None:
    found, plain = (results("flash_reference", sites_of(site, text)) for text in (value, ""))
    assert moved(found, plain) == SITES[site].moves


@here
@pytest.mark.parametrize(("site", "value"), STANDARD)
def test_a_site_moves_what_it_reaches_in_standard_attention(site: str, value: str) -> None:
    found, plain = (results("standard", standard_sites(sites_of(site, text))) for text in (value, ""))
    assert moved(found, plain) == SITES[site].standard


@pytest.mark.parametrize("backend", ["standard", "standard_triton"])
@pytest.mark.parametrize(("site", "value"), REFUSED)
def test_standard_attention_refuses_a_site_that_it_has_not(site: str, value: str, backend: str) -> None:
    """The kernels' own refusal is seen where they could run otherwise."""
    if backend == "standard_triton" and not INTERPRETED:
        pytest.skip("no GPU that is asked")
    spec = AttentionSpec(preset="standard", sites=(f"{site}={value}",), backend=backend)
    with pytest.raises(UserError) as error:
        attention.check(AttentionConfig(default=spec).resolve(1, 2), device="cpu", dtype=torch.float32, head_dim=16)
    assert "\n" not in str(error.value)
    assert f"backend {backend} cannot do this: " in str(error.value)
    assert "standard" not in str(error.value).partition("backends that can: ")[2]


@here
@pytest.mark.parametrize("site", [name for name in FIELDS if is_format(name)])
def test_more_bits_of_a_site_are_a_smaller_error(site: str) -> None:
    """Four bits more are an error of a sixteenth against FP64, in the tensor that the site moves most; one bit off would be 8 or 32."""
    p = make("tied", torch.float32, torch.device("cpu"), SHAPE)
    errors = [
        max(relative_errors(results("flash_reference", (*PLAIN, f"{site}=m{bits}")), oracle(p), magnitudes(p)))
        for bits in (3, 7, 11)
    ]
    assert 8 < errors[0] / errors[1] < 32
    assert 8 < errors[1] / errors[2] < 32


@here
@pytest.mark.parametrize("site", sorted(CHOICES))
def test_a_value_that_a_site_has_not_is_refused_with_its_choices(site: str) -> None:
    with pytest.raises(UserError) as error:
        AttentionSpec(sites=(f"{site}=wrong",))
    assert str(error.value).startswith(f"attention numerics {site} = 'wrong': expected one of {CHOICES[site][0]}, ")


@here
@pytest.mark.parametrize(("site", "value"), CASES)
def test_a_site_is_kept_in_the_record(site: str, value: str) -> None:
    numerics = AttentionSpec(sites=sites_of(site, value)).resolve()
    assert str(getattr(numerics, site)).startswith(value)
    assert numerics_from_key(numerics.key()) == numerics


@here
@pytest.mark.parametrize("site", [name for name in FIELDS if getattr(DEFAULT, name) == "input"])
def test_input_is_the_format_of_q(site: str) -> None:
    assert {getattr(DEFAULT.concrete(fmt), site) for fmt in ("bf16", "fp16", "fp32")} == {"bf16", "fp16", "fp32"}


@here
@pytest.mark.timeout(300)
def test_the_kernels_in_tritons_interpreter() -> None:
    pass_in_the_interpreter(__file__)


# What the interpreter computes exactly, and tensor cores do not.
EXACT_THERE = {"products"} if INTERPRETED else set()


@pytest.mark.parametrize("device", KERNELS)
@pytest.mark.parametrize(("site", "value"), CASES)
def test_a_site_moves_what_it_reaches_in_the_flash_kernels(site: str, value: str, device: str) -> None:
    found, plain = (results("flash", sites_of(site, text), device) for text in (value, ""))
    assert moved(found, plain) == ("" if site in EXACT_THERE else SITES[site].moves)


@pytest.mark.parametrize("device", KERNELS)
@pytest.mark.parametrize(("site", "value"), CASES)
def test_the_flash_kernels_round_as_the_reference(site: str, value: str, device: str) -> None:
    found, expected = (results(backend, sites_of(site, value), device) for backend in ("flash", "flash_reference"))
    for name, (distance, allowed) in apart(found, expected, device).items():
        assert distance <= allowed, name


@pytest.mark.parametrize("device", KERNELS)
@pytest.mark.parametrize(("site", "value"), STANDARD)
def test_the_standard_kernels_round_as_the_matrices(site: str, value: str, device: str) -> None:
    sites = standard_sites(sites_of(site, value))
    found, expected = (results(backend, sites, device) for backend in ("standard_triton", "standard"))
    for name, (distance, allowed) in apart(found, expected, device).items():
        assert distance <= allowed, name


@pytest.mark.parametrize("device", KERNELS)
@pytest.mark.parametrize(("site", "value"), STANDARD)
def test_a_site_moves_what_it_reaches_in_the_standard_kernels(site: str, value: str, device: str) -> None:
    found, plain = (results("standard_triton", standard_sites(sites_of(site, text)), device) for text in (value, ""))
    assert moved(found, plain) == SITES[site].standard
