"""Names -> (backend, numerics) -> groups of heads, and the errors of impossible plans."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from attention.numerics import BASES, HARDWARE, MICROCOSM, ROUNDED_FORWARD, Numerics, numerics_from_key
from attention.plan import AttentionConfig, AttentionRule, AttentionSpec, describe
from attention.presets import PRESETS
from attention.renamed import RENAMED
from errors import UserError
from training.retired import upgraded

ROOT = Path(__file__).resolve().parent.parent
FLASH = [name for name, preset in PRESETS.items() if preset.backend == "flash"]


@pytest.mark.parametrize("old", [name for name in RENAMED if "=" not in name])
def test_an_old_name_is_todays(old: str) -> None:
    field = "numerics" if old == "paper" else "preset"
    assert AttentionSpec(**{field: old}) == AttentionSpec(**{field: RENAMED[old]})
    assert getattr(AttentionSpec(**{field: old}), field) == RENAMED[old]


@pytest.mark.parametrize("old", [name for name in RENAMED if "=" in name])
def test_an_old_value_is_todays(old: str) -> None:
    (site, value), (_, now) = old.split("="), RENAMED[old].split("=")
    assert AttentionSpec(sites=(old,)) == AttentionSpec(sites=(RENAMED[old],))
    written = asdict(HARDWARE) | {site: value}
    assert getattr(numerics_from_key(json.dumps(written)), site) == now


def test_the_names_of_a_published_runs_record_are_read() -> None:
    """As experiments/fast_failure keeps it."""
    for run, preset in (("o_stochastic", "flash_stochastic_o"), ("flash_unfused", "flash_separate_multiply")):
        record = json.loads((ROOT / f"experiments/fast_failure/runs/{run}/config.json").read_text())
        assert upgraded(record["config"])["attention"]["default"]["preset"] == preset


@pytest.mark.parametrize("name", FLASH)
@pytest.mark.parametrize("base", BASES)
def test_every_flash_preset_works_on_every_base(name: str, base: str) -> None:
    numerics = AttentionSpec(preset=name, numerics=base).resolve()
    assert numerics_from_key(numerics.key()) == numerics


@pytest.mark.parametrize(
    ("preset", "sites"),
    [
        ("flash", ()),
        ("flash_subtract_first", ("exponent=subtract_first",)),
        ("flash_separate_multiply", ("exponent=separate_multiply",)),
        ("flash_rounded_sum", ("divisor=rounded",)),
        ("flash_delta_from_p", ("delta=rowsum_p_dp",)),
        (
            "flash_delta_from_p_subtract_first",
            ("saved_statistics=max_and_sum", "exponent=subtract_first", "delta=rowsum_p_dp"),
        ),
        ("flash_recompute_o", ("delta=recomputed_o",)),
        ("flash_fp32_o", ("delta_output=fp32",)),
        ("flash_fp32_pv", ("probabilities=fp32",)),
        ("flash_stochastic_p", ("probabilities_rounding=stochastic",)),
        ("flash_stochastic_p_o", ("probabilities_rounding=stochastic", "output_rounding=stochastic")),
        ("flash_o_stochastic_delta_nearest", ("output_rounding=stochastic", "delta_output=input")),
        ("flash_o_nearest_delta_stochastic", ("delta_output=input", "delta_rounding=stochastic")),
        ("flash_o_fp32_delta_nearest", ("output=fp32", "delta_output=input")),
    ],
)
def test_a_preset_changes_what_its_name_says_and_nothing_else(preset: str, sites: tuple[str, ...]) -> None:
    assert AttentionSpec(preset=preset).resolve().differences(HARDWARE) == sites


def test_the_bases_are_the_columns_of_the_table_of_sites() -> None:
    assert ROUNDED_FORWARD.differences(HARDWARE) == (
        "scores=input",
        "statistics=input",
        "exponent=subtract_first",
        "tile_product=input",
        "accumulator=input",
    )
    assert (ROUNDED_FORWARD.tile_q, ROUNDED_FORWARD.tile_k) == (512, 512)
    assert BASES["fp32"].delta_output == "fp32"
    assert BASES["fp32"].output == "input"
    assert (MICROCOSM.accumulator, MICROCOSM.output, MICROCOSM.scores) == ("m1", "m1", "m7")


def test_runs_a_to_d_round_the_two_uses_of_o_as_the_table_says() -> None:
    def roundings(run: str) -> tuple[str, str, str]:
        n = AttentionSpec(preset=RENAMED[f"flash_run_{run}"], numerics="microcosm").resolve()
        forward = n.output if n.output == "fp32" else n.output_rounding
        return forward, n.delta_output, n.delta_rounding

    assert roundings("a") == ("stochastic", "output", "nearest")
    assert roundings("b") == ("stochastic", "m1", "nearest")
    assert roundings("c") == ("fp32", "m1", "nearest")
    assert roundings("d") == ("nearest", "m1", "stochastic")


def test_numerics_written_before_p_bars_rounding_had_a_name_rounded_it_to_nearest() -> None:
    """A record of a run, as experiments/fast_failure keeps them."""
    written = json.loads((ROOT / "experiments/fast_failure/runs/o_stochastic/config.json").read_text())["attention"][0][
        "numerics"
    ]
    assert "probabilities_rounding" not in written
    assert numerics_from_key(json.dumps(written)) == AttentionSpec(preset="flash_stochastic_o").resolve()


@pytest.mark.parametrize("base", ["hardware", "rounded_forward", "microcosm"])
def test_numerics_written_before_the_exponent_had_a_name_are_those_of_their_base(base: str) -> None:
    written = asdict(BASES[base])
    del written["exponent"]
    assert numerics_from_key(json.dumps(written)) == BASES[base]


def test_fp32_numerics_written_before_the_exponent_had_a_name_were_folded_by_the_kernels() -> None:
    written = asdict(BASES["fp32"])
    del written["exponent"]
    assert numerics_from_key(json.dumps(written)).differences(BASES["fp32"]) == ("exponent=fma",)


def test_stochastic_p_rounds_p_bar_on_every_base() -> None:
    formats = {
        base: AttentionSpec(preset="flash_stochastic_p", numerics=base).resolve().probabilities for base in BASES
    }
    assert formats == {
        "hardware": "input",
        "rounded_forward": "input",
        "published": "input",
        "fp32": "input",
        "microcosm": "m7",
    }


def test_single_sites_override_the_preset() -> None:
    numerics = AttentionSpec(preset="flash_stable", sites=("row_max_beta=8", "tile_q=64")).resolve()
    assert (numerics.row_max, numerics.row_max_beta, numerics.tile_q) == ("stabilized", 8.0, 64)


def test_heads_of_a_layer_that_share_a_spec_share_a_group() -> None:
    special = AttentionSpec(preset="flash_fp32_o")
    config = AttentionConfig(
        rules=(
            AttentionRule(layers=(1,), heads=(0, 6), attention=special),
            AttentionRule(layers=(1,), heads=(7,), attention=special),
        )
    )
    plans = config.resolve(3, 12)
    assert [len(plan.groups) for plan in plans] == [1, 2, 1]
    assert plans[1].groups[0].heads == (0, 6, 7)
    assert sorted(h for group in plans[1].groups for h in group.heads) == list(range(12))
    assert plans[0].groups[0].heads == tuple(range(12))


def test_the_record_spells_out_every_site_and_every_head() -> None:
    config = AttentionConfig(
        rules=(AttentionRule(layers=(1,), heads=(2,), attention=AttentionSpec(preset="standard")),)
    )
    flash, standard = describe(config.resolve(2, 3))
    assert flash["numerics"] == asdict(HARDWARE)
    assert flash["heads_of_layer"] == {"0": [0, 1, 2], "1": [0, 1]}
    assert (standard["backend"], standard["heads_of_layer"]) == ("standard", {"1": [2]})


def test_the_record_names_heads_of_one_rounding_under_two_names() -> None:
    rule = AttentionRule(layers=(1,), heads=(1,), attention=AttentionSpec(preset="flash_stochastic_o"))
    config = AttentionConfig(default=AttentionSpec(preset="flash_stochastic_o"), rules=(rule,))
    (only,) = describe(config.resolve(2, 3))
    assert only["heads_of_layer"] == {"0": [0, 1, 2], "1": [0, 1, 2]}


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (AttentionRule(layers=(12,)), "attention.rules.0.layers = 12: expected 0 to 11"),
        (AttentionRule(heads=(-1,)), "attention.rules.0.heads = -1: expected 0 to 11"),
        (AttentionRule(layers=(1, 1)), "attention.rules.0.layers = (1, 1): expected each named once"),
        (AttentionRule(layers=1), "attention.rules.0.layers = 1: expected a tuple of whole numbers"),  # type: ignore[arg-type]
        (AttentionRule(heads=("1",)), "attention.rules.0.heads = ('1',): expected a tuple of"),  # type: ignore[arg-type]
    ],
)
def test_unknown_layers_and_heads_are_refused(rule: AttentionRule, message: str) -> None:
    with pytest.raises(UserError) as error:
        AttentionConfig(rules=(rule,)).resolve(12, 12)
    assert message in str(error.value)


def test_overlapping_rules_are_refused() -> None:
    rules = (AttentionRule(layers=(1,)), AttentionRule(layers=(0, 1), heads=(3,)))
    with pytest.raises(UserError, match=r"layer 1 head 3, which rule 0 names already"):
        AttentionConfig(rules=rules).resolve(2, 4)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"preset": "flsh"}, "attention preset = 'flsh'"),
        ({"numerics": "papr"}, "attention numerics = 'papr'"),
        ({"backend": "cuda"}, "attention backend = 'cuda'"),
        ({"sites": ("output",)}, "attention sites = 'output'"),
        ({"sites": ("otput=bf16",)}, "attention sites = 'otput'"),
        ({"sites": ("output=bf17",)}, "attention numerics output = 'bf17'"),
        ({"sites": ("exponent=exact",)}, "attention numerics exponent = 'exact'"),
        ({"sites": ("saved_statistics=both",)}, "attention numerics saved_statistics = 'both'"),
        ({"sites": ("tile_q=big",)}, "attention sites tile_q = 'big'"),
        (
            {"preset": "sdpa_flash", "numerics": "rounded_forward"},
            "attention numerics of sdpa_flash = 'rounded_forward'",
        ),
        (
            {"preset": "flash_fp32_pv", "sites": ("probabilities_rounding=stochastic",)},
            "attention numerics probabilities_rounding = 'stochastic'",
        ),
        (
            {"preset": "flash_stochastic_p", "sites": ("probabilities=fp32",)},
            "attention numerics probabilities_rounding = 'stochastic'",
        ),
        (
            {"sites": ("probabilities_rounding=toward_zero",)},
            "attention numerics probabilities_rounding = 'toward_zero'",
        ),
        (
            {"preset": "sdpa_flash", "sites": ("probabilities_rounding=stochastic",)},
            "attention numerics of sdpa_flash = 'hardware probabilities_rounding=stochastic'",
        ),
        ({"preset": "flash_stochastic_p", "backend": "sdpa_flash"}, "attention backend = 'sdpa_flash'"),
        ({"preset": "flash_stable", "backend": "sdpa_flash"}, "attention backend = 'sdpa_flash'"),
    ],
)
def test_bad_specs_name_field_value_and_choices(arguments: dict, field: str) -> None:
    with pytest.raises(UserError) as error:
        AttentionSpec(**arguments)
    assert str(error.value).startswith(field)
    assert "expected" in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"row_max_beta": 1.0},
        {"row_max_tolerance": -1e-3},
        {"row_max_cap": 0.0},
        {"tile_k": -1},
        {"delta": "rowsum"},
        {"output_rounding": "up"},
    ],
)
def test_numerics_out_of_range_are_refused(changes: dict) -> None:
    with pytest.raises(UserError):
        replace(Numerics(), **changes)


def test_input_becomes_the_dtype_and_nothing_else_changes() -> None:
    concrete = ROUNDED_FORWARD.concrete("bf16")
    assert concrete.scores == concrete.output == "bf16"
    assert concrete.delta_output == "output"
    assert concrete.logsumexp == "fp32"


def test_the_plan_needs_no_torch() -> None:
    code = "import sys, attention, attention.plan; attention.AttentionConfig().resolve(2, 2); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
