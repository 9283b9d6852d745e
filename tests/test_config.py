"""Presets and ablations fit together, survive JSON unchanged, and take overrides; mistakes are one line that says what would do."""

import dataclasses
import io
import json
import math
import sys
from pathlib import Path

import pytest

from attention import AttentionConfig, AttentionRule, AttentionSpec
from config import RECIPES, TrainConfig, from_json, load, to_json
from data.batches import DataConfig
from errors import UserError
from model import ModelConfig

FILES = sorted(RECIPES.glob("*.py"))
ABLATIONS = sorted((RECIPES / "ablations").glob("*.py"))
DEBUG = str(RECIPES / "debug.py")


def test_a_file_of_ones_own_is_read_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    (tmp_path / "mine.py").write_text("from configs.debug import config\n")
    assert load([str(tmp_path / "mine.py")]) == load([DEBUG])
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]


def test_a_base_that_rounds_nothing_can_be_typed() -> None:
    files = [str(RECIPES / "quickstart.py"), str(RECIPES / "ablations/tiny_layer_1.py")]
    load([*files, "--attention.default.numerics", "hardware"])
    load([*files, "--attention.default.preset", "standard", "--attention.default.numerics=hardware"])


@pytest.mark.parametrize("ablation", [None, *ABLATIONS], ids=lambda path: path.stem if path else "")
@pytest.mark.parametrize("recipe", FILES, ids=lambda path: path.stem)
def test_recipes_and_ablations_on_them_survive_json(recipe: Path, ablation: Path | None) -> None:
    files = [str(path) for path in (recipe, ablation) if path]
    if recipe.stem == "quickstart" and ablation and ablation.stem not in ("tiny_layer_1", "outlier_heads"):
        lost = ("--attention.default.numerics", "--attention.rules.0.attention.numerics")
        options = "".join(f"{option} microcosm[ ;]" for option in lost)
        base = rf"a base: {ablation} has hardware there, the default, which rounds nothing in FP32: write numerics='microcosm' in it"
        base = f"{base}, or type {options}"
        with pytest.raises(UserError, match=rf"^attention\.default\.numerics = 'hardware': expected {base}"):
            load(files)
        return
    if "outlier_heads" in files[-1] and load(files[:1]).model.n_head < 12:
        with pytest.raises(UserError, match=r"^attention\.rules\.0\.heads = \d: expected 0 to \d, counted from 0$"):
            load(files)
        return
    config = load(files)
    assert from_json(TrainConfig, json.loads(json.dumps(to_json(config)))) == config
    assert config.attention.flash_backend == load(files[:1]).attention.flash_backend


def test_only_a_rule_that_there_is_can_be_changed() -> None:
    said = r"^attention\.rules\.1\.layers = '0': expected a rule that there is, attention\.rules\.0, counted from 0$"
    with pytest.raises(UserError, match=said):
        load([DEBUG, str(RECIPES / "ablations/only_layer_1.py"), "--attention.rules.1.layers", "0"])


def test_a_second_file_that_is_missing_is_an_ablation() -> None:
    with pytest.raises(UserError, match=r"^ablation file = 'x\.py': .*only_layer_1\.py") as error:
        load([DEBUG, "x.py"])
    assert "quickstart.py" not in str(error.value)


@pytest.mark.parametrize("option", ["--model.n-head 16", "--attention.rules.0.heads 0"])
def test_an_ablation_is_checked_after_the_options(option: str) -> None:
    load([DEBUG, str(RECIPES / "ablations/outlier_heads.py"), *option.split()])


@pytest.mark.parametrize("spec", ["preset='flash_fp32_o'", "sites=('values=e4m3_row',)"])
@pytest.mark.parametrize("base", ["microcosm", "fp32"])
def test_a_rule_that_lost_the_base_of_its_ablation_s_default_is_named(tmp_path: Path, base: str, spec: str) -> None:
    (ablation := tmp_path / "lost.py").write_text(
        "from attention import AttentionConfig, AttentionRule, AttentionSpec\n"
        f"rules = (AttentionRule(attention=AttentionSpec({spec})),)\n"
        f"attention = AttentionConfig(default=AttentionSpec(numerics='{base}'), rules=rules)\n"
    )
    files = [str(RECIPES / "quickstart.py"), str(ablation)]
    with pytest.raises(UserError, match=r"^attention\.rules\.0\.attention\.numerics = 'hardware': expected a base"):
        load(files)
    load([*files, "--attention.rules.0.attention.numerics", "hardware"])


@pytest.mark.parametrize(
    ("sites", "said"),
    [
        ("row_max_beta=3", "no row_max_beta, as nothing reads it with row_max=plain"),
        ("delta_error_size=0.5", "no delta_error_size, as nothing reads it with delta_error=none"),
        ("delta=rowsum_p_dp delta_output=fp32", "no delta_output, as nothing reads it with delta=rowsum_p_dp"),
    ],
)
def test_a_typed_site_that_nothing_reads_is_refused(sites: str, said: str) -> None:
    with pytest.raises(UserError, match=rf"^attention\.default\.sites = '{sites}': expected {said}$"):
        load([DEBUG, "--attention.default.sites", *sites.split()])


@pytest.mark.parametrize(
    "more", [["--run.resume", "yes"], ["--alarm.switches", "10:1:flash_stable"]], ids=["resume", "switch"]
)
def test_a_site_that_is_in_a_checkpoint_or_that_a_switch_may_read_is_not(more: list[str]) -> None:
    load([DEBUG, "--attention.default.sites", "row_max_beta=3", *more])


@pytest.mark.parametrize("ablation", ABLATIONS, ids=lambda path: path.stem)
def test_ablation_changes_attention_only(ablation: Path) -> None:
    recipe = str(RECIPES / "gpt2_paper.py")
    plain, changed = load([recipe]), load([recipe, str(ablation)])
    assert changed.attention != plain.attention
    assert dataclasses.replace(changed, attention=plain.attention) == plain


def test_every_run_of_the_reproduction_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(RECIPES.parent)
    lines = (RECIPES / "reproduction.txt").read_text().splitlines()
    runs = dict(line.partition(":")[::2] for line in lines if not line.startswith("#"))
    loaded = {name: load([str(RECIPES / "fast_failure.py"), *flags.split()]) for name, flags in runs.items()}
    assert len(loaded) > 30
    assert len({str(config.attention) for config in loaded.values()}) > 15


def test_overrides_replace_single_fields() -> None:
    plain = load([DEBUG])
    arguments = ["--optim.lr", "2e-3", "--attention.default.preset", "flash_delta_from_p"]
    config = load([DEBUG, *arguments, "--data.record", "r", "--precision.deterministic", "--run.name=x.1"])
    assert config == dataclasses.replace(
        plain,
        run=dataclasses.replace(plain.run, name="x.1"),
        optim=dataclasses.replace(plain.optim, lr=2e-3),
        attention=dataclasses.replace(plain.attention, default=AttentionSpec(preset="flash_delta_from_p")),
        data=dataclasses.replace(plain.data, record="r"),
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--optim.lrr 1", r"^optim\.lrr = '1': did you mean lr\? expected one of optimizer, lr, min_lr, .*fused$"),
        ("--run.steps 5 --run.seed 1 --run.steps=6", r"^--run\.steps is there twice: expected each option once"),
        ("--model.bias --model.no-bias", r"^--model\.bias is there twice: .* a switch or its negation$"),
        (
            "--attention.default.sites output=m3 output=bf16",
            r"^attention\.default\.sites = '.*': expected output once$",
        ),
        ("--attention.default.sites tile_k=-3", r"^attention\.default\.sites tile_k = -3: expected a size"),
        ("--attention.default.sites tile_k=m7", r"^attention\.default\.sites tile_k = 'm7': expected a size"),
        ("--attention.default.sites output=m23", r"^attention\.default\.sites output = 'm23': expected one of"),
        ("--alarm.rule.exponent nan", r"^alarm\.rule\.exponent = nan: expected 0 or a positive number$"),
        (
            "--telemetry.sequences 999",
            r"^telemetry\.sequences = 999: expected at most data\.validation_sequences = \d+$",
        ),
        ("--run.steps x", r"^Error parsing --run\.steps: .* 'x'; --help lists the fields$"),
        ("--nonfinite.policy ignore", r"'ignore'.*--nonfinite\.policy.*'stop', 'skip'"),
        ("--attention.rules.1.layers 0", r"^attention\.rules\.1\.layers = '0': expected a rule of a file"),
        ("--run.steps 5 mine.py", r"^mine\.py is behind an option: expected all files before the options$"),
        ("--model.bias True", r"^model\.bias = 'True': expected --model\.bias or --model\.no-bias"),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])  # by which tyro draws its frame
def test_bad_overrides_are_named(arguments: str, message: str, encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    with pytest.raises(UserError, match=message) as error:
        load([DEBUG, *arguments.split()])
    assert "\n" not in str(error.value)
    assert "---" not in str(error.value)


RULE = "from attention import AttentionConfig, AttentionRule\nattention = AttentionConfig(rules={rules})\n"


def test_a_python_files_lists_are_tuples_and_its_choices_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(RULE.format(rules="[AttentionRule(layers=[1], heads=[0, 2])]"))
    assert load([DEBUG, str(path), "--run.steps", "5"]).attention.rules == (AttentionRule(layers=(1,), heads=(0, 2)),)
    path.write_text(
        "import dataclasses\nfrom configs.debug import config\n"
        "config = dataclasses.replace(config, model=dataclasses.replace(config.model, norm='batch'))\n"
    )
    with pytest.raises(UserError, match=r"^model\.norm = 'batch': expected one of layer, rms$"):
        load([str(path)])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("1 / 0", "ZeroDivisionError: .*, at {path}:3$"),
        ("config.run.steps = 5", "FrozenInstanceError: .*, at {path}:3; configs are frozen: dataclasses.replace .*"),
    ],
)
def test_an_error_of_a_config_file_has_its_line(tmp_path: Path, line: str, said: str) -> None:
    (path := tmp_path / "mine.py").write_text(f"from configs.debug import config\n\n{line}\n")
    with pytest.raises(UserError, match="it raises " + said.format(path=path)):
        load([str(path)])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"data": {"batch": 1}}, r"^data = 'batch': .*expected one of dataset, sequence_length"),
        ({"alarm": None}, r"^alarm = None: expected a value of type AlarmConfig$"),
        ({"data": {"global_batch": "8"}}, r"^data\.global_batch = '8': expected a value of type int$"),
        ({"attention": {"rules": [{"layers": 1}]}}, r"rules\.0\.layers = 1: .* tuple, for example \(1,\)$"),
        ({"attention": {"rules": [{"layers": ["a"]}]}}, r"^attention\.rules\.0\.layers\.0 = 'a': expected"),
    ],
)
def test_foreign_json_is_refused(content: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_json(TrainConfig, content)


# Of each section, a value that each rule refuses.
REFUSED = """
run: steps=0 name=241*'x' seed=2**64 name='a/b'
model: n_head=5 n_layer=0 n_embd=64.0 vocab_multiple=0 attention_softcap=-1.0
data: sequence_length=0 global_batch=0 global_batch=30 micro_batch=-1 validation_sequences=0 seed=-1
optim: lr=0.0 lr=nan min_lr=1.0 warmup_steps=-1 decay_steps=2000 beta1=1.0 beta2=-0.1
optim: lr=1e308 min_lr=1e308 eps=1e308 weight_decay=1e308 grad_clip=1e308
run: name=5 seed='x' timeout='x' timeout=None
model: rotary_base='x' attention_softcap=None qk_clip_tau=True
data: seed='x' record=5
optim: lr='x' lr=None warmup_steps=2.5
optim: eps=0.0 weight_decay=-0.1 grad_clip=-1.0 muon_momentum=1.0
checkpoint: every=-1 keep_last=0 keep_every=-5
telemetry: every=-1 sequences=0
evaluation: every=-1
wandb: project=''
alarm: switches=('5:1',) switches=('5:1:flash','5:1:standard') switches='5:1:flash' switches=(5,) warm_up=-2 warm_up=None
"""
VALUES = [
    (line.partition(":")[0], word)
    for line in REFUSED.split("\n")
    for word in line.partition(": ")[2].split(" ")
    if word
]


@pytest.mark.parametrize(("section", "setting"), VALUES)
def test_a_value_that_cannot_be_is_refused_by_name(section: str, setting: str) -> None:
    field, _, text = setting.partition("=")
    kind = type(getattr(TrainConfig(), section))
    with pytest.raises(UserError, match=rf"^{section}\.{field} = .*expected "):
        kind(**{field: eval(text, {"nan": math.nan})})


@pytest.mark.parametrize("section", [one.name for one in dataclasses.fields(TrainConfig)])
def test_a_section_of_another_type_is_named(section: str) -> None:
    kind = type(getattr(TrainConfig(), section)).__name__
    with pytest.raises(UserError, match=rf"^{section} = None: expected a value of type {kind}$"):
        TrainConfig(**{section: None})


def test_a_rule_that_parts_heads_of_shared_keys_is_named_with_its_layer() -> None:
    rules = (
        AttentionRule(heads=(0, 1)),
        AttentionRule(layers=(1, 2), heads=(3,), attention=AttentionSpec(preset="standard")),
    )
    with pytest.raises(
        UserError, match=r"^attention\.rules\.1\.heads = \(3,\): expected in layer 1 whole groups of 2 heads"
    ):
        TrainConfig(model=ModelConfig(n_kv_head=6), attention=AttentionConfig(rules=rules))


def test_recording_and_replaying_at_once_is_refused() -> None:
    with pytest.raises(UserError, match=r"^data\.record = 'a': expected nothing while data\.replay = 'b' is set"):
        DataConfig(record="a", replay="b")
