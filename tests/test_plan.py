"""Names -> (backend, numerics) -> groups of heads, and the errors of impossible plans."""

import re
from collections.abc import Callable
from dataclasses import asdict, replace

import pytest

from attention.numerics import HARDWARE, Numerics
from attention.plan import AttentionConfig, AttentionRule, AttentionSpec, describe, round_nothing
from attention.presets import RECOMMENDED
from errors import UserError


def test_an_alias_is_the_preset_that_it_stands_for() -> None:
    assert AttentionSpec(preset="robust").preset == RECOMMENDED


def test_single_sites_override_the_preset() -> None:
    numerics = AttentionSpec(preset="flash_stable", sites=("row_max_beta=8", "tile_q=64")).resolve()
    assert (numerics.row_max, numerics.row_max_beta, numerics.tile_q) == ("stabilized", 8.0, 64)


@pytest.mark.parametrize(
    ("spec", "nothing"),
    [
        (AttentionSpec(), True),
        (AttentionSpec(numerics="microcosm"), False),
        (AttentionSpec(sites=("delta_output=bf16",)), False),
        (AttentionSpec(preset="fp8"), False),
        (AttentionSpec(preset="standard"), False),
    ],
)
def test_a_flash_preset_without_a_rounding_in_float32_is_told(spec: AttentionSpec, nothing: bool) -> None:
    assert round_nothing(AttentionConfig(default=spec).resolve(2, 2)) == nothing


def test_the_record_spells_out_every_site_and_every_head() -> None:
    rule = AttentionRule(layers=(1,), heads=(2,), attention=AttentionSpec(preset="standard"))
    flash, standard = describe(AttentionConfig(rules=(rule,)).resolve(2, 3))
    assert flash["numerics"] == asdict(HARDWARE)
    assert flash["heads_of_layer"] == {"0": [0, 1, 2], "1": [0, 1]}
    assert (standard["backend"], standard["heads_of_layer"]) == ("standard", {"1": [2]})


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([{"layers": (12,)}], "attention.rules.0.layers = 12: expected 0 to 11"),
        ([{"layers": (1, 1)}], "attention.rules.0.layers = (1, 1): expected each named once"),
        ([{"layers": (1,)}, {"layers": (0, 1), "heads": (3,)}], "layer 1 head 3, which rule 0 names already"),
    ],
)
def test_rules_that_cannot_be_are_refused(rules: list[dict], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        AttentionConfig(rules=tuple(AttentionRule(**rule) for rule in rules)).resolve(12, 12)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"preset": "flsh"}, "attention preset = 'flsh'"),
        ({"backend": "cuda"}, "attention backend = 'cuda'"),
        ({"sites": ("output",)}, "attention sites = 'output'"),
        ({"sites": ("tile_q=big",)}, "attention sites tile_q = 'big'"),
        ({"sites": ("output=bf16",) * 2}, "attention sites"),
        ({"preset": "external"}, "attention kernel = ''"),
        ({"kernel": "plain"}, "attention kernel = 'plain'"),
        ({"preset": "flash_fp32_pv", "sites": ("probabilities_rounding=stochastic",)}, "attention numerics prob"),
        ({"sites": ("output=fp32", "output_rounding=stochastic")}, "attention numerics output_rounding"),
        ({"sites": ("delta_rounding=stochastic",)}, "attention numerics delta_rounding"),
        ({"preset": "sdpa_flash", "sites": ("tile_q=16",)}, "attention numerics of sdpa_flash = 'hardware tile_q=16'"),
    ],
)
def test_bad_specs_name_field_value_and_choices(arguments: dict, field: str) -> None:
    with pytest.raises(ValueError) as error:  # as programs that use the package expect
        AttentionSpec(**arguments)
    assert str(error.value).startswith(field)
    assert "expected" in str(error.value)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: AttentionSpec(preset=["a"]), "attention preset"),
        (lambda: AttentionSpec(numerics=[]), "attention numerics"),
        (lambda: AttentionSpec(backend=None), "attention backend"),
        (lambda: AttentionSpec(preset="external", kernel=3), "attention kernel"),
        (lambda: AttentionSpec(sites=(3,)), "attention sites"),
        (lambda: AttentionRule(attention="flash"), "attention of a rule"),
        (lambda: AttentionConfig(rules=AttentionRule()), "attention.rules"),
        (lambda: AttentionConfig(rules=("x",)), "attention.rules"),
        (lambda: AttentionConfig(flash_backend="sdpa_math"), "attention.flash_backend"),
    ],
)
def test_values_of_another_kind_are_refused(make: Callable[[], object], field: str) -> None:
    with pytest.raises(UserError, match=f"^{field} = .*: expected (an?|one of) "):
        make()


@pytest.mark.parametrize("changes", [{"row_max_beta": 1.0}, {"row_sum_floor": 2.0}, {"tile_k": 16.5}])
def test_numerics_out_of_range_are_refused(changes: dict) -> None:
    with pytest.raises(UserError):
        replace(Numerics(), **changes)


def test_a_rule_that_forgets_the_default_s_base_shows_it() -> None:
    one_site = AttentionSpec(preset="flash", sites=("score_gradients=m1",))
    default = AttentionSpec(preset="flash", numerics="microcosm")
    config = AttentionConfig(default=default, rules=(AttentionRule(layers=(0,), attention=one_site),))
    assert config.label() == "flash (microcosm); layer 0 flash (hardware, score_gradients=m1)"
    assert replace(config, default=AttentionSpec()).label().endswith("layer 0 flash (score_gradients=m1)")
    external = AttentionRule(layers=(1,), attention=AttentionSpec(preset="external", kernel="plain"))
    assert replace(config, rules=(external,)).label() == "flash (microcosm); layer 1 plain"
