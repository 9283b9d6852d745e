"""Formats below BF16: casts against torch's and ml_dtypes' types, scales by their definitions, and their sites in the reference."""

import functools
import itertools
import math

import pytest
import torch
from attention_cases import Problem, in_small_tiles, make, relative_errors, run
from sites import SITES as ROWS
from test_sites import CPU, moved, paired, results

from attention import AttentionSpec, scaled_dot_product_attention
from attention.low_formats import cast, round_low
from attention.numerics import SITES, Numerics
from attention.reference.flash import row_residuals
from attention.reference.tiles import OF_PLACES, Sites
from attention.rounding import NUMBERS_OF_SITES, random_bits

BF16_VALUES = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()
OPERANDS = [name for name, declared in SITES.items() if "e4m3" in declared.choices]


def expected(x: torch.Tensor, name: str) -> torch.Tensor:
    """What other people's casts give, saturated before them, as they overflow to NaN or infinity."""
    if name == "int8":
        return x.nan_to_num(nan=0.0).clamp(-128, 127).round()
    if name == "e2m1":
        ml_dtypes = pytest.importorskip("ml_dtypes")
        fours = x.nan_to_num(nan=6.0).clamp(-6, 6).numpy().astype(ml_dtypes.float4_e2m1fn)
        return torch.from_numpy(fours.astype("float32"))
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[name]
    most = torch.finfo(dtype).max
    return x.clamp(-most, most).to(dtype).float()


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m1", "int8"])
def test_a_cast_is_that_of_other_libraries_to_the_bit(name: str) -> None:
    """On all values of BF16, and on FP32 between them."""
    between = (torch.randn(200_000, generator=torch.Generator().manual_seed(0)) * 4).exp2()
    x = torch.cat((BF16_VALUES, between, -between * 16))
    found, wanted = cast(x, name), expected(x, name)
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.view(torch.int32)[~found.isnan()], wanted.view(torch.int32)[~found.isnan()])


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m1", "int8"])
def test_a_stochastic_cast_is_unbiased_and_keeps_what_is_on_the_grid(name: str) -> None:
    n = 200_000
    x = torch.randn(n, generator=torch.Generator().manual_seed(1)).clamp(-5, 5)
    error = cast(x, name, random_bits(torch.tensor(2), 0, x.shape)).double() - x
    assert error.mean().abs() < 4 * error.std() / n**0.5
    grid = cast(x * 30, name)
    assert torch.equal(cast(grid, name, torch.full((n,), 2**16 - 1)), grid)


@pytest.mark.parametrize("scale", ["tensor", "head", "row", "mx", "nv"])
@pytest.mark.parametrize(("fmt", "most"), [("e4m3", 448), ("e2m1", 6), ("int8", 127)])
def test_a_scale_is_that_of_its_definition(fmt: str, most: int, scale: str) -> None:
    x = torch.randn(2, 3, 5, 40, generator=torch.Generator().manual_seed(3))
    found, size = round_low(x, f"{fmt}_{scale}"), {"mx": 32, "nv": 16}.get(scale, 40)
    for at, (b, h, t) in itertools.product(range(0, 40, size), ((0, 0, 0), (1, 2, 4))):
        row = x[b, h, t, at : at + size]
        a = {"tensor": x, "head": x[b, h]}.get(scale, row).abs().max()
        unit = a / most
        if scale == "mx":
            unit = torch.tensor(2.0 ** (math.floor(math.log2(a)) - math.floor(math.log2(most))))
        elif scale == "nv":
            unit = unit.to(torch.float8_e4m3fn).float()
        assert torch.equal(found[b, h, t, at : at + size], unit * cast(row / unit, fmt))


@pytest.mark.parametrize("name", ["e4m3_row", "e2m1_nv", "int8_tensor", "e4m3_mx"])
def test_zeros_stay_and_what_has_no_largest_is_nan(name: str) -> None:
    assert torch.equal(round_low(torch.zeros(1, 1, 2, 20), name), torch.zeros(1, 1, 2, 20))
    assert round_low(torch.full((1, 1, 2, 20), math.inf), name).isnan().all()


@pytest.mark.parametrize("site", OPERANDS)
@pytest.mark.parametrize("fmt", ["e5m2_row", "e4m3_mx_stochastic"])
def test_an_operand_below_bf16_moves_what_the_site_reaches(site: str, fmt: str) -> None:
    """The same a second time; a stochastic one follows the seed."""
    spec = AttentionSpec(sites=("exponent=subtract_first", f"{site}={fmt}"), backend="flash_reference")
    found, again, other = (run(paired(CPU), spec, seed=seed) for seed in (5, 5, 6))
    plain = results("flash_reference", ("exponent=subtract_first",))
    assert moved(found, plain) == ROWS[site][0].moves
    assert moved(found, again) == ""
    assert bool(moved(found, other)) == fmt.endswith("stochastic")


DRAWN = {
    "queries_and_keys": "1011000000100111",
    "values": "0110101110101010",
    "values_in_dp": "0110100101100101",
    "probabilities": "0101000011110001",
    "probabilities_in_dv": "0110001011000000",
    "output_gradient": "1111011001110000",
    "output_gradient_in_dv": "1000100011000011",
    "delta_output": "0001111111001000",
    "probability_gradients": "0110110000001100",
    "score_gradients": "0110001111111011",
}


@pytest.mark.parametrize("site", DRAWN)
def test_a_site_draws_the_bits_that_it_has_always_drawn(site: str) -> None:
    """Where a number is half way between two of E2M1. Runs of other commits replay by them."""
    sites = Sites(Numerics(**{site: "e2m1_stochastic"}), torch.float32, torch.tensor(5))
    rounded = getattr(sites, site)(torch.full((1, 1, 4, 4), 0.25), (torch.arange(1), slice(0, 4), slice(0, 4)))
    assert "".join(str(int(up)) for up in (rounded > 0).flatten()) == DRAWN[site]


def test_q_and_k_draw_apart() -> None:
    sites = Sites(Numerics(queries_and_keys="e2m1_stochastic"), torch.float32, torch.tensor(5))
    x = torch.full((1, 1, 4, 4), 0.25)
    assert not torch.equal(sites.queries_and_keys(x), sites.queries_and_keys(x))


def test_one_value_of_ds_is_drawn_once() -> None:
    """With Q = K = 1 dQ is dS and dK is dS^T."""
    p = make("random", torch.float32, CPU, (1, 16, 1, 16))
    p.q[:], p.k[:] = torch.eye(16)[None, :, None], torch.eye(16)[None, :, None]
    sites = ("score_gradients=e2m1_row_stochastic", "tile_q=8", "tile_k=4")
    _, dq, dk, _ = run(p, AttentionSpec(numerics="fp32", sites=sites, backend="flash_reference"), scale=1.0)
    assert torch.equal(dq[0, :, 0], dk[0, :, 0].T)


def test_dp_in_delta_is_the_dp_in_ds() -> None:
    """In each head of a group: rows of dS sum to 0. Where a feature of K is 1 and the same of Q is 0, dQ is their sum."""
    p = make("random", torch.float32, CPU, (2, 40, 4, 16))
    p.k, p.v = p.k[:, :, :2], p.v[:, :, :2]
    p.q[..., 0], p.k[..., 0] = 0.0, 1.0
    sites = in_small_tiles("probability_gradients=e4m3_row_stochastic")
    spec = AttentionSpec(preset="flash_delta_normalized", numerics="fp32", sites=sites, backend="flash_reference")
    assert run(p, spec)[1][..., 0].abs().max() < 1e-5


def test_draws_do_not_follow_the_number_of_tiles() -> None:
    p = make("random", torch.float32, CPU)
    spec = AttentionSpec(sites=in_small_tiles("probabilities=e4m3_row_stochastic"), backend="flash_reference")
    qkv = (x.transpose(1, 2) for x in (p.q, p.k, p.v))
    attend = functools.partial(scaled_dot_product_attention, *qkv, numerics=spec, rounding_seed=torch.tensor(5))
    torch.testing.assert_close(attend(is_causal=True), attend(attn_mask=torch.ones(40, 40).tril().bool()))


def test_each_stochastic_site_has_a_number_of_its_own() -> None:
    assert sorted(NUMBERS_OF_SITES) == sorted(OPERANDS), "give the site a new number in attention/rounding.py"
    assert len(set(NUMBERS_OF_SITES.values())) == len(NUMBERS_OF_SITES)


@pytest.mark.parametrize("site", OF_PLACES)
def test_a_scale_of_tiles_is_that_of_one_head_whatever_is_computed_beside_it(site: str) -> None:
    p = make("random", torch.bfloat16, CPU, (2, 40, 2, 16))
    p.q[1], p.do[1] = p.q[1] * 4, p.do[1] * 4
    of_all, of_one = (
        run(p, AttentionSpec(sites=("tile_q=16", "tile_k=16", f"{site}=int8_{scale}"), backend="flash_reference"))
        for scale in ("tensor", "head")
    )
    assert moved(of_all, of_one) == ""


def test_a_scale_of_tiles_is_that_of_tile_k_rows() -> None:
    x = torch.randn(1, 1, 32, 4, generator=torch.Generator().manual_seed(4))
    found = Sites(Numerics(values="int8_tile", tile_q=16, tile_k=8), torch.float32).values(x)
    assert torch.equal(found, round_low(x.view(1, 4, 8, 4), "int8_head").view(1, 1, 32, 4))


def test_rows_of_ds_sum_to_zero_only_where_both_passes_read_one_p_and_o() -> None:
    p, largest = paired(CPU), {}
    for preset in ("fp8", "fp8_consistent"):
        numerics = AttentionSpec(preset=preset, sites=("score_gradients=fp32",)).resolve()
        r = row_residuals(p.q, p.k, p.v, p.do, numerics, seed=torch.tensor(0), scale=0.25)
        largest[preset] = r.abs().max()
    assert largest["fp8_consistent"] < 1e-5 < 1e-3 < largest["fp8"]


def as_published(p: Problem, preset: str) -> tuple[torch.Tensor, ...]:
    """O, dQ, dK, dV [T, D] of one head, over whole rows: in the order of Attn-QAT's kernel, or of Algorithms 1 and 2 of SageBwd."""

    def int8(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        tiles = x.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        unit = (tiles.abs().amax((1, 3), keepdim=True) / 127).clamp(min=1e-30)
        return (unit * (tiles / unit).round()).flatten(2, 3).flatten(0, 1)

    q, k, v, do = (x[0, :, 0].float() for x in (p.q, p.k, p.v, p.do))
    (T, D), scale = q.shape, q.shape[1] ** -0.5
    qat = preset == "attn_qat"
    tile = 32 if qat else 64

    def of_operand(x: torch.Tensor) -> torch.Tensor:
        return round_low(x, "e2m1_nv") if qat else int8(x, 64, x.shape[1])

    def bf16(x: torch.Tensor) -> torch.Tensor:
        return x.bfloat16().float()

    q, k = of_operand(q), of_operand(k if qat else k - k.mean(0))
    v_of_dp, v = of_operand(v) if qat else v, of_operand(v)
    s = (scale * q @ k.T).masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
    m = s.unflatten(1, (-1, tile)).amax(2).cummax(1).values.repeat_interleave(tile, 1)  # of the tiles so far
    p_bar, rescale = (s - m).exp(), (m - m[:, -1:]).exp()
    summed = bf16(p_bar) if qat else p_bar
    of_tiles = summed.unflatten(1, (-1, tile)).sum(2)
    row_sum = (rescale[:, ::tile] * (bf16(of_tiles) if qat else of_tiles)).sum(1, keepdim=True)
    o = bf16(rescale * (of_operand(p_bar) if qat else int8(p_bar, 1, 64)) @ v / row_sum)
    of_delta = bf16(rescale * summed @ v / row_sum) if qat else o
    weights = (s - m[:, -1:]).exp() / row_sum
    ds = weights * (do @ v_of_dp.T - (do * of_delta).sum(1, keepdim=True))
    ds = bf16(ds) if qat else int8(ds, 64, 64)
    dv = of_operand(weights).T @ do if qat else int8(weights, 64, 64).T @ int8(do, 64, D)
    return o, bf16(scale * ds @ k), bf16(scale * ds.T @ q), bf16(dv)


@pytest.mark.parametrize("preset", ["attn_qat", "sage_bwd"])
def test_a_published_preset_rounds_in_the_published_order(preset: str) -> None:
    p = make("random", torch.bfloat16, CPU, (1, 128, 1, 32))
    found = run(p, AttentionSpec(preset=preset))
    expected = tuple(x[None, :, None] for x in as_published(p, preset))
    assert max(relative_errors(found, expected)) < 2.0**-12


def by_its_list(p: Problem, preset: str) -> tuple[torch.Tensor, ...]:
    """O, dQ, dK, dV [T, D] of one head in one tile, as the sites of ``fp8`` and ``fp8_consistent`` say."""
    bf16, one_p = torch.bfloat16, preset == "fp8_consistent"
    q, k, v = (round_low(x[0, :, 0].float(), "e4m3_row") for x in (p.q, p.k, p.v))
    do, scale = round_low(p.do[0, :, 0].float(), "e5m2_row"), q.shape[1] ** -0.5
    s = (scale * q @ k.T).masked_fill(torch.ones(len(q), len(q)).triu(1).bool(), -math.inf)
    m = s.amax(1, keepdim=True)
    p_bar = (s - ((m / math.log(2)).ceil() * math.log(2) if one_p else m)).exp()
    read = cast(p_bar, "e4m3")
    o = read @ v / (read if one_p else p_bar).sum(1, keepdim=True)
    weights = read / read.sum(1, keepdim=True) if one_p else s.softmax(1)
    delta = (do * (o if one_p else o.to(bf16).float())).sum(1, keepdim=True)
    ds = round_low(weights * (do @ v.T - delta), "e5m2_row")
    dv = (weights if one_p else cast(weights, "e4m3")).T @ do
    return tuple(x.to(bf16) for x in (o, scale * ds @ k, scale * ds.T @ q, dv))


@pytest.mark.parametrize("preset", ["fp8", "fp8_consistent"])
def test_a_preset_in_fp8_rounds_what_its_list_says(preset: str) -> None:
    p = make("random", torch.bfloat16, CPU, (1, 64, 1, 32))
    expected = tuple(x[None, :, None].float() for x in by_its_list(p, preset))
    assert max(relative_errors(run(p, AttentionSpec(preset=preset)), expected)) < 1e-3
