"""Reads configurations: recipes as Python files, overrides from the command line, the JSON that a run has written."""

import contextlib
import copy
import dataclasses
import io
import itertools
import re
import runpy
import traceback
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import tyro

from attention.backends import BACKENDS
from attention.numerics import SITES
from attention.plan import AttentionConfig, AttentionSpec
from errors import UserError, invalid
from training.settings import RunConfig, TrainConfig, to_json

__all__ = ["RECIPES", "RunConfig", "TrainConfig", "from_json", "load", "override", "to_json"]

RECIPES = Path(__file__).parent / "configs"


def from_json(kind: Any, content: Any, where: str = "") -> Any:
    """The config that ``to_json`` wrote, of dataclass ``kind``. Raises ``UserError`` for unknown keys, another type or choice."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        if not isinstance(content, dict):
            raise invalid(where or "config", content, f"a value of type {kind.__name__}")
        if unknown := sorted(content.keys() - hints.keys()):
            raise invalid(where or "config", unknown[0], hints)
        inside = {name: from_json(hints[name], one, f"{where}.{name}".strip(".")) for name, one in content.items()}
        return kind(**inside)
    if get_origin(kind) is tuple and isinstance(content, list | tuple):
        return tuple(from_json(get_args(kind)[0], item, f"{where}.{i}") for i, item in enumerate(content))
    if get_origin(kind) is Literal and content in get_args(kind):
        return content
    if kind is float and isinstance(content, int) and not isinstance(content, bool):
        return float(content)
    if isinstance(kind, type) and type(content) is kind:
        return content
    choices = get_args(kind) if get_origin(kind) is Literal else None
    example = ", for example (1,)" if kind == tuple[int, ...] else ""
    raise invalid(where, content, choices or f"a value of type {getattr(kind, '__name__', kind)}{example}")


def _exported(path: str, name: str, kind: Any, what: str) -> Any:
    """What a Python file sets ``name`` to, type-checked. Lists become tuples, whole numbers floats.

    Raises ``UserError`` for a file that is missing, raises or does not set it, and for a field of another type.
    """
    file = Path(path)
    if not file.is_file():
        folder = Path("configs") if Path("configs").resolve() == RECIPES.resolve() else RECIPES
        here = "*.py" if name == "config" else "ablations/*.py"
        known = sorted(str(folder / p.relative_to(RECIPES)) for p in RECIPES.glob(here) if "__" not in str(p))
        raise invalid(what, path, known)
    if file.suffix != ".py":
        raise invalid("config file", path, "a Python file, ending in .py")
    try:
        exported = runpy.run_path(path, run_name=f"preset_{file.stem}").get(name)
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # whatever a user's Python file may raise, SystemExit too
        frames = traceback.walk_tb(error.__traceback__)
        lines = [line for frame, line in frames if frame.f_code.co_filename == path]  # none where it does not parse
        told = f"{type(error).__name__}: {error}" + (f", at {path}:{lines[-1]}" if lines else "")
        frozen = isinstance(error, dataclasses.FrozenInstanceError)
        told += "; configs are frozen: dataclasses.replace makes a changed one" if frozen else ""
        raise UserError(f"config file = {path!r}: it raises {told}") from error
    if not isinstance(exported, kind):
        raise invalid(what, path, f"a Python file that sets `{name}`, of type {kind.__name__}")
    return from_json(kind, dataclasses.asdict(exported), "" if name == "config" else name)


def load(arguments: list[str]) -> TrainConfig:
    """``configs/RECIPE.py [configs/ablations/A.py] --section.field value ...`` as a config.

    A second file replaces the first one's attention but for flash_backend, so that an ablation fits every recipe with its layers and heads.
    Raises ``UserError``, one line, for whatever is wrong.
    """
    files = list(itertools.takewhile(lambda argument: not argument.startswith("-"), arguments))
    rest = arguments[len(files) :]
    if not files and {"-h", "--help"} & set(rest):
        return override(TrainConfig(), rest)
    if len(files) not in (1, 2):
        usage = "python train.py configs/RECIPE.py [configs/ablations/A.py] [--section.field value ...]"
        raise UserError(f"usage: {usage}; --help lists the fields")
    config = _exported(files[0], "config", TrainConfig, "config file")
    replaced = []
    if len(files) == 2:
        # The recipe chooses the flash backend: an ablation changes roundings, on any machine.
        attention = _exported(files[1], "attention", AttentionConfig, "ablation file")
        attention = dataclasses.replace(attention, flash_backend=config.attention.flash_backend)
        # Not checked against the recipe before the options: they may change its rules, or the model.
        replaced.append(config.attention.default)
        config = copy.copy(config)  # another file may have it from the recipe's module
        object.__setattr__(config, "attention", attention)
    config = override(config, rest)
    _check_bases(config, files[-1], replaced, typed={argument.partition("=")[0].replace("_", "-") for argument in rest})
    # A checkpoint's config has to be named again as it was, and a switch may take a preset that reads the site.
    for name, spec in _specs(config).items() if config.run.resume == "no" and not config.alarm.switches else ():
        for site, why in spec.unread().items():
            raise invalid(f"{name}.sites", " ".join(spec.sites), f"no {site}, as nothing reads it with {why}")
    return config


def _specs(config: TrainConfig) -> dict[str, AttentionSpec]:
    """The default and those of the rules, by their names as options."""
    rules = {f"attention.rules.{index}.attention": rule.attention for index, rule in enumerate(config.attention.rules)}
    return {"attention.default": config.attention.default} | rules


def _check_bases(config: TrainConfig, file: str, replaced: list[AttentionSpec], typed: set[str]) -> None:
    """Raise ``UserError`` where a rule or an ablation has lost the base, as neither inherits one: a rule on ``hardware`` beside a default
    on another base; and beside any base that rounds, what rounds nothing in FP32.

    ``file``: what gives the attention. ``replaced``: the recipe's default, if an ablation took its place. Not where the base is among the
    options ``typed``, nor of ``standard``, a control, or a kernel that rounds in its own way.
    """
    default = config.attention.default
    specs = _specs(config)
    bases = [one.numerics for one in (default, *replaced, *specs.values()) if one.numerics != "hardware"]
    rounds = config.precision.dtype != "float32" or not set(bases) - {"fp32"}

    def forgotten(name: str, spec: AttentionSpec) -> bool:
        own = spec.preset == "standard" or not BACKENDS[spec.resolved_backend].has_sites
        return not own and spec.numerics == "hardware" and f"--{name}.numerics" not in typed

    def lost(spec: AttentionSpec) -> bool:
        return spec.numerics != default.numerics or not (rounds or spec.rounds("fp32"))

    names = [name for name, spec in specs.items() if forgotten(name, spec)]
    if "attention.default" not in names or not lost(default):  # else with another default all are lost
        names = [name for name in names if lost(specs[name])]
    if names:
        meant = " ".join(f"--{name}.numerics {bases[0]}" for name in names)
        nothing = "which rounds nothing in FP32" if config.precision.dtype == "float32" else "as none is inherited"
        why = f"a base: {file} has hardware there, the default, {nothing}"
        expected = f"{why}: write numerics={bases[0]!r} in it, or type {meant}; or type hardware, if that is meant"
        raise invalid(f"{names[0]}.numerics", "hardware", expected)


def override(config: TrainConfig, arguments: list[str]) -> TrainConfig:
    # tyro would take the last one silently, of a switch and its negation, too.
    words = (argument.partition("=")[0].replace("_", "-") for argument in arguments if argument.startswith("--"))
    options = [word.replace(".no-", ".") for word in words]
    if twice := [option for option in options if options.count(option) > 1]:
        once = "each option once, with all its values behind it, and a switch or its negation"
        raise UserError(f"{twice[0]} is there twice: expected {once}")
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(TrainConfig, default=config, args=arguments, prog="train.py configs/X.py")
    except SystemExit as stop:
        if not stop.code:
            raise
        # tyro rewords every ValueError; keep the message of our field.
        error: BaseException | None = stop
        while not isinstance(error, UserError | None):
            error = error.__context__
        if error is not None:
            raise _by_option(error, arguments) from None
        said = _one_line(complaint.getvalue())
        behind = re.match(r"Unrecognized options: (\S+\.py)\b", said)
        late = UserError(f"{behind[1]} is behind an option: expected all files before the options") if behind else None
        raise _unknown(config, arguments) or late or UserError(said) from None


def _by_option(error: UserError, arguments: list[str]) -> UserError:
    """The error of a typed attention or threshold, with its option: what raised it does not know where in the config it stands."""
    if str(error).startswith(threshold := "GrowthRule "):
        return UserError("alarm.rule." + str(error).removeprefix(threshold))
    about, field, site = [*str(error).split(" "), "", ""][:3]
    field, said = field if about == "attention" else "", f"{about} {field}"
    if field == "numerics" and site in SITES:  # a value that no site has, or that others exclude
        field = "sites"
    typed = {one.partition("=")[0][2:].replace("-", "_") for one in arguments if one.startswith("--attention")}
    options = [option for option in typed if field and option.endswith(f".{field}")]
    return UserError(options[0] + str(error).removeprefix(said)) if len(options) == 1 else error


def _unknown(config: TrainConfig, arguments: list[str]) -> UserError | None:
    """The error for the first option that names no field or gives a switch a value; None if there is none."""
    for option, next_argument in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        if not option.startswith("--"):
            continue
        name, _, value = option[2:].replace("-", "_").partition("=")
        section: Any = config
        parts = name.split(".")
        for depth, part in enumerate(parts):
            members = dict(enumerate(section)) if isinstance(section, tuple) else getattr(section, "__dict__", {})
            known = {str(key): member for key, member in members.items()}
            # Switches have a negated form, which stands on the field and not on its section: --precision.no-compile.
            field_name = part.removeprefix("no_") if depth == len(parts) - 1 else part
            if field_name not in known:
                below = ".".join(parts[:depth])
                rules = "a rule of a file after the recipe and before the options, as in configs/ablations"
                choices = known or (rules if below == "attention.rules" else f"nothing below {below}")
                if isinstance(section, tuple) and known:
                    choices = f"a rule that there is, {below}.{f' or {below}.'.join(known)}, counted from 0"
                return invalid(name, value or next_argument, choices, typed=part)
            section = known[field_name]
        given = value or ("" if next_argument.startswith("-") else next_argument)
        if isinstance(section, bool) and given:
            *head, last = parts
            on, off = (".".join([*head, word + last.removeprefix("no_")]).replace("_", "-") for word in ("", "no_"))
            return invalid(name, given, f"--{on} or --{off}, which take no value")
    return None


def _one_line(box: str) -> str:
    """tyro's framed message without its title and its help. Where stdout is not in Unicode the frame is of spaces and hyphens."""
    lines = [line.strip("│ \n") for line in box.splitlines()[1:]]
    inside = itertools.dropwhile(_is_rule, lines)
    return f"{' '.join(itertools.takewhile(lambda line: not _is_rule(line), inside))}; --help lists the fields"


def _is_rule(line: str) -> bool:
    return not line.strip("─-╰╯ ")
