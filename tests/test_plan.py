"""Names -> (backend, numerics) -> groups of heads, and the errors of impossible plans."""

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest

from attention.numerics import HARDWARE, Numerics
from attention.plan import AttentionConfig, AttentionRule, AttentionSpec, describe, outline
from attention.presets import RECOMMENDED
from errors import UserError


def test_an_alias_is_the_preset_that_it_stands_for() -> None:
    assert AttentionSpec(preset="robust").preset == RECOMMENDED


def test_single_sites_override_the_preset() -> None:
    numerics = AttentionSpec(preset="flash_stable", sites=("row_max_beta=8", "tile_q=64")).resolve()
    assert (numerics.row_max, numerics.row_max_beta, numerics.tile_q) == ("stabilized", 8.0, 64)


def test_a_preset_of_what_a_base_gets_and_of_fixed_sites_has_both() -> None:
    numerics = AttentionSpec(preset="flash_stochastic_p_o", numerics="fp32").resolve()
    assert (numerics.probabilities, numerics.output_rounding) == ("input", "stochastic")


@pytest.mark.parametrize(
    ("spec", "nothing"),
    [
        (AttentionSpec(), True),
        (AttentionSpec(numerics="microcosm"), False),
        (AttentionSpec(sites=("delta_output=bf16",)), False),
        (AttentionSpec(preset="fp8"), False),
        (AttentionSpec(preset="standard"), True),
        (AttentionSpec(preset="flash_delta_from_p", sites=("delta_error=constant",)), False),
    ],
)
def test_an_attention_without_a_rounding_in_float32_is_told(spec: AttentionSpec, nothing: bool) -> None:
    (line,) = outline(AttentionConfig(default=spec).resolve(2, 2), "fp32")
    assert line.startswith("all layers: ")
    assert ("rounds nothing" in line) == nothing


def test_the_outline_has_layers_heads_and_sites_of_each_attention() -> None:
    rule = AttentionRule(layers=(1,), heads=(0, 2), attention=AttentionSpec(sites=("output=m3",)))
    plans = AttentionConfig(default=AttentionSpec(numerics="fp32"), rules=(rule,)).resolve(12, 3)
    exact, coarse = outline(plans, "bf16")
    assert exact == "layer 0, 2-11; layer 1 head 1: flash (fp32): inputs=bf16, output=bf16"
    assert coarse.startswith("layer 1 heads 0, 2: flash (hardware, output=m3): ")
    assert " output=m3, " in coarse


def test_each_attention_that_rounds_nothing_is_told_beside_one_that_rounds() -> None:
    rule = AttentionRule(layers=(1,), attention=AttentionSpec())
    default = AttentionSpec(numerics="microcosm")
    coarse, exact = outline(AttentionConfig(default=default, rules=(rule,)).resolve(3, 2), "fp32")
    assert "rounds nothing" not in coarse
    nothing = "rounds nothing in fp32: a base such as numerics=microcosm does"
    assert exact == f"layer 1: flash (hardware): exponent=fma, delta_output=output; {nothing}"


def test_base_fp32_is_no_mistake_where_it_rounds_nothing() -> None:
    (line,) = outline(AttentionConfig(default=AttentionSpec(numerics="fp32")).resolve(2, 2), "fp32")
    assert line == "all layers: flash (fp32): rounds nothing in fp32"


@pytest.mark.parametrize(
    ("spec", "sites"),
    [
        (AttentionSpec(preset="standard", numerics="fp32"), "inputs=bf16, output=bf16"),
        (
            AttentionSpec(
                preset="flash_delta_from_p", numerics="fp32", sites=("delta_error=scale", "delta_output=bf16")
            ),
            "inputs=bf16, output=bf16, delta=rowsum_p_dp, delta_error=scale, delta_error_size=0.01",
        ),
    ],
)
def test_the_outline_has_what_is_read_alone(spec: AttentionSpec, sites: str) -> None:
    (line,) = outline(AttentionConfig(default=spec).resolve(2, 2), "bf16")
    assert line == f"all layers: {spec.label()}: {sites}"


def test_the_record_spells_out_every_site_and_every_head() -> None:
    rule = AttentionRule(layers=(1,), heads=(2,), attention=AttentionSpec(preset="standard"))
    flash, standard = describe(AttentionConfig(rules=(rule,)).resolve(2, 3))
    assert flash["numerics"] == asdict(HARDWARE)
    assert flash["heads_of_layer"] == {"0": [0, 1, 2], "1": [0, 1]}
    assert (standard["backend"], standard["heads_of_layer"]) == ("standard", {"1": [2]})


def resolved(*rules: dict[str, Any]) -> object:
    return AttentionConfig(rules=tuple(AttentionRule(**rule) for rule in rules)).resolve(12, 12)


DRAWN = "_rounding=stochastic"


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: AttentionSpec(preset="flsh"), "attention preset = 'flsh'"),
        (lambda: AttentionSpec(preset=["a"]), "attention preset = ['a']"),
        (lambda: AttentionSpec(numerics=[]), "attention numerics = []"),
        (lambda: AttentionSpec(backend="cuda"), "attention backend = 'cuda'"),
        (lambda: AttentionSpec(backend=None), "attention backend = None"),
        (lambda: AttentionSpec(preset="external"), "attention kernel = ''"),
        (lambda: AttentionSpec(preset="external", kernel=3), "attention kernel = 3"),
        (lambda: AttentionSpec(kernel="plain"), "attention kernel = 'plain'"),
        (lambda: AttentionSpec(sites=(3,)), "attention sites = (3,)"),
        (lambda: AttentionSpec(sites=("output",)), "attention sites = 'output'"),
        (lambda: AttentionSpec(sites=("tile_q=big",)), "attention numerics tile_q = 'big'"),
        (lambda: AttentionSpec(sites=("output=bf16",) * 2), "attention sites = 'output=bf16 output=bf16'"),
        (lambda: AttentionSpec(preset="flash_fp32_pv", sites=(f"probabilities{DRAWN}",)), "attention numerics prob"),
        (lambda: AttentionSpec(sites=("output=fp32", f"output{DRAWN}")), "attention numerics output_rounding"),
        (lambda: AttentionSpec(sites=(f"delta{DRAWN}",)), "attention numerics delta_rounding"),
        (lambda: AttentionSpec(sites=("delta_error=random",)), "attention numerics delta_error = 'random'"),
        (
            lambda: AttentionSpec(sites=("delta=rowsum_p_dp", "delta_error_rows=tied")),
            "attention numerics delta_error_rows",
        ),
        (lambda: AttentionSpec(sites=("values=e4m3_nv",)), "attention numerics values = 'e4m3_nv'"),  # it would be 0
        (
            lambda: AttentionSpec(preset="sdpa_flash", sites=("tile_q=16",)),
            "attention numerics of sdpa_flash = 'hardware t",
        ),
        (
            lambda: AttentionSpec(numerics="microcosm", backend="sdpa_math"),
            "attention backend = 'sdpa_math': expected empty: its roundings are its own, so it is chosen by a preset of its name",
        ),
        (lambda: Numerics(row_max_beta=1.0), "attention numerics row_max_beta = 1.0"),
        (lambda: Numerics(row_sum_floor=2.0), "attention numerics row_sum_floor = 2.0"),
        (lambda: Numerics(tile_k=16.5), "attention numerics tile_k = 16.5"),
        (lambda: resolved({}, {"attention": "flash"}), "attention.rules.1.attention = 'flash'"),
        (lambda: AttentionConfig(rules=AttentionRule()), "attention.rules = AttentionRule("),
        (lambda: AttentionConfig(rules=("x",)), "attention.rules = ('x',)"),
        (lambda: AttentionConfig(flash_backend="sdpa_math"), "attention.flash_backend = 'sdpa_math'"),
        (lambda: resolved({"layers": (12,)}), "attention.rules.0.layers = 12: expected 0 to 11"),
        (lambda: resolved({"layers": (1, 1)}), "attention.rules.0.layers = (1, 1): expected each named once"),
        (
            lambda: resolved({"layers": (1,)}, {"layers": (0, 1), "heads": (3,)}),
            "attention.rules.1 = 'layer 1 head 3, which rule 0 names already'",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_field_value_and_choices(make: Callable[[], object], found: str) -> None:
    """By a ``ValueError``, as programs that use the package expect."""
    with pytest.raises(ValueError) as error:
        make()
    assert type(error.value) is UserError
    assert str(error.value).startswith(found)
    assert "expected " in str(error.value)


@pytest.mark.parametrize(
    ("site", "said"),
    [
        ("delta_output=fp8", r"= 'fp8': expected one of output, input, .*, low16, m1 to m22, e4m3 or e5m2 \(FP8\), .*"),
        ("o_in_delta=fp32", r"attention sites = 'o_in_delta': expected one of .*"),
        (
            "output=m3,delta_output=m3",
            r"= 'output=m3,delta_output=m3': expected a space between two sites, not a comma",
        ),
    ],
)
def test_a_mistaken_site_is_told_in_few_words(site: str, said: str) -> None:
    with pytest.raises(UserError, match=f".*{said}$") as error:
        AttentionSpec(sites=(site,))
    assert len(str(error.value)) < 1000


def test_a_rule_that_forgets_the_default_s_base_shows_it() -> None:
    one_site = AttentionSpec(preset="flash", sites=("score_gradients=m1",))
    default = AttentionSpec(preset="flash", numerics="microcosm")
    config = AttentionConfig(default=default, rules=(AttentionRule(layers=(0,), attention=one_site),))
    assert config.label() == "flash (microcosm); layer 0 flash (hardware, score_gradients=m1)"
    assert replace(config, default=AttentionSpec()).label().endswith("layer 0 flash (score_gradients=m1)")
    external = AttentionRule(layers=(1,), attention=AttentionSpec(preset="external", kernel="plain"))
    assert replace(config, rules=(external,)).label() == "flash (microcosm); layer 1 plain"
