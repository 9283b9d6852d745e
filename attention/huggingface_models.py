"""Models of transformers that cannot have our attention, refused when they are made and when they are switched.

transformers takes any registered name for any model. A model with attention code of its own never calls what stands for the name, but gets
the mask that was made for it. So each module under one of our names is looked at: what its code calls says whether it computes attention
itself, and whether it asks transformers' registry for it.
"""

import dis
import functools
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

from .user_error import refuse

_REGISTRY = {"ALL_ATTENTION_FUNCTIONS", "AttentionInterface", "get_interface"}
_SOFTMAXES = {"softmax", "Softmax", "log_softmax", "logsumexp"}
_PRODUCTS = {"@", "matmul", "bmm", "baddbmm", "einsum", "tensordot"}
_FUSED = re.compile(
    "scaled_dot_product|flash_attn_|flash_attention_forward|efficient_attention|head_attention_forward|flex_attention"
)
# A model that declares none of them may use its mask for more than attention, in the form that "eager" has (NLLB-MoE's router).
_DECLARED = ("_supports_attention_backend", "_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn")
_CHECKED = "_checked_attention"
"""Attribute of a model: the name of its attention when it was looked at, so that no call has to again."""


class Hook:
    """A hook of ours on a model. In a copy of the model, or in a pickle, a function that does nothing stands in its place."""

    def __init__(self, run: Callable[..., None]):
        self._run = run

    def __call__(self, *arguments: Any) -> None:
        self._run(*arguments)

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")  # of Python's own: it loads where this package is not


class _KeptInCopies(Hook):
    def __deepcopy__(self, _: Any) -> Hook:
        return self


class Traits(NamedTuple):
    """What the code of a class of modules calls."""

    registry: bool
    """transformers' registry of attention functions."""
    own: bool
    """A fused attention, or a softmax beside a matrix product; and no registry."""
    named: bool
    """Its name says that it is attention."""
    masks: frozenset[str]
    """Functions of transformers that it makes masks with."""


def guard() -> None:
    """Have transformers' models that are made from now on looked at when made and called, all when switched; again changes nothing."""
    from transformers import PreTrainedModel

    if hasattr(PreTrainedModel.post_init, "looks_at_attention"):
        return
    post_init, switch = (getattr(PreTrainedModel, name) for name in ("post_init", "set_attn_implementation"))

    @functools.wraps(post_init)
    def checked_post_init(model: Any, *arguments: Any, **settings: Any) -> Any:
        check(model)
        return post_init(model, *arguments, **settings)

    @functools.wraps(switch)
    def checked_switch(model: Any, attn_implementation: Any, *arguments: Any, **settings: Any) -> None:
        if not any(map(is_ours, _values(attn_implementation))):
            return switch(model, attn_implementation, *arguments, **settings)
        configs = [config for config, _ in _configs(model)]
        before = [config._attn_implementation for config in configs]
        try:
            switch(model, attn_implementation, *arguments, **settings)
            check_switched(model, attn_implementation)
        except Exception:
            for config, name in zip(configs, before, strict=True):
                config._attn_implementation_internal = name
            raise

    def checked(make: Any) -> Any:
        @functools.wraps(make)
        def checked_make(model_class: Any, *arguments: Any, **settings: Any) -> Any:
            try:
                made = make(model_class, *arguments, **settings)
            except KeyError as error:  # of a model that keeps a table of its own classes by name
                name = error.args[0] if error.args else None
                refuse(
                    is_ours(name),
                    f"{model_class.__name__}: its table of attention classes has no {name!r}: expected 'eager'",
                )
                raise
            model, asked = made[0] if isinstance(made, tuple) else made, settings.get("attn_implementation")
            if isinstance(asked, dict) and any(map(is_ours, _values(asked))):
                check_switched(model, asked)
            else:
                check(model)  # also what was put into it after its post_init
            return made

        return classmethod(checked_make)

    checked_post_init.looks_at_attention = True  # type: ignore[attr-defined]
    new = {"post_init": checked_post_init, "set_attn_implementation": checked_switch}
    new |= {name: checked(vars(PreTrainedModel)[name].__func__) for name in ("_from_config", "from_pretrained")}
    for name, function in new.items():
        setattr(PreTrainedModel, name, function)


def is_ours(name: object) -> bool:
    """Whether ``name`` stands for an attention of ours, which another copy of this package may have put there."""
    from transformers import AttentionInterface

    return isinstance(name, str) and hasattr(AttentionInterface._global_mapping.get(name), "rounded_as")


def check(model: Any) -> None:
    """``ValueError`` where attention code under one of our names never calls ours, or may read masks in another way."""
    import transformers

    governed = [(module, config, traits_of(module)) for module, config in _governed(model) if is_ours(_name(config))]
    for module, config, traits in governed:
        if traits.own:
            _refuse(model, module, config, _name(config))
    parts = [part for part in model.modules() if isinstance(part, transformers.PreTrainedModel)]
    for part in parts:
        if is_ours(_name(part.config)):
            calls = [module for module in _own_modules(part) if traits_of(module).registry]
            declared = any(getattr(part, flag, False) for flag in _DECLARED)
            why = "declares support of no attention but 'eager' (_supports_sdpa and others): expected 'eager'"
            refuse(bool(calls) and not declared, f"{type(part).__name__}: it {why}")
            causal = [type(module).__name__ for module in calls if getattr(module, "is_causal", False) is True]
            masks = traits_of(part).masks
            # Such a mask is left out where nothing is hidden, and the module would then take it for a causal one.
            wrong = causal and masks and all("bidirectional" in mask for mask in masks)
            why = f"makes no causal mask, but its {', '.join(causal[:1])} has is_causal = True: expected 'eager'"
            refuse(bool(wrong), f"{type(part).__name__}: it {why}")
    if not any(traits.registry for *_, traits in governed):
        for module, config, traits in governed:
            if traits.named:
                _refuse(model, module, config, _name(config))
    for part in parts:
        setattr(part, _CHECKED, _name(part.config))
        # Each call, too, is looked at, as a config can be given one of our names by hand.
        if _LOOK not in part._forward_pre_hooks.values():
            part.register_forward_pre_hook(_LOOK, with_kwargs=True)


def look_at_call(model: Any, arguments: Any, settings: dict[str, Any]) -> None:
    """``ValueError`` for a model that ``check`` refuses, and for ``output_attentions``, which many do not hand to their attention."""
    name = _name(model.config)
    if name != getattr(model, _CHECKED, None) and is_ours(name):
        torch.compiler.disable(check)(model)  # with fullgraph=True: switch by set_attn_implementation(name) instead
    asked = settings.get("output_attentions")
    if (getattr(model.config, "output_attentions", False) if asked is None else asked) and is_ours(name):
        refuse(True, f"{type(model).__name__}: output_attentions: expected False, it keeps no P; 'eager' does")


_LOOK = _KeptInCopies(look_at_call)


def check_switched(model: Any, asked: Any) -> None:
    """``ValueError`` where ``model`` has not become what ``asked`` says (transformers only logs that), or no part of it has ours."""
    check(model)
    reached = [(module, config, traits_of(module)) for module, config in _governed(model)]
    for config, key in _configs(model):
        wanted: Any = asked
        for part in key.split(".") if key and isinstance(asked, dict) else ():
            wanted = wanted.get(part) if isinstance(wanted, dict) else None
        if isinstance(wanted, dict):
            wanted = wanted.get("") if key or config is model.config else None
        if is_ours(wanted) and _name(config) != wanted:
            left = [(module, traits) for module, of_module, traits in reached if of_module is config]
            for module, traits in left:
                if traits.own:
                    _refuse(model, module, config, wanted)
            what = f"{type(model).__name__}: transformers cannot switch its {key or 'attention'} to {wanted!r}"
            held = isinstance(asked, dict) or any(traits.registry for _, traits in left)
            refuse(held, f"{what}: expected the model to be made or loaded with it, or 'eager' there")
    able = [config for _, config, traits in reached if traits.registry]
    if not any(is_ours(_name(config)) for config in able):
        # A dict's "" is for the model's own config alone.
        keys = [key for config, key in _configs(model) if any(config is one for one in able)]
        refuse(
            bool(keys),
            f"{type(model).__name__}: {asked} leaves its attention as it is: expected ours for one of {keys}",
        )
        refuse(True, f"{type(model).__name__}: no part of it has attention that can be switched")


def _refuse(model: Any, module: nn.Module, config: Any, name: str) -> None:
    own = [one for part, one in _governed(model) if traits_of(part).own]

    def cured(config: Any) -> Any:
        """What to ask for, with a name for each part: one without keeps what it has."""
        parts = {key: getattr(config, key, None) for key in getattr(config, "sub_configs", ())}
        cures = {key: cured(part) for key, part in parts.items() if hasattr(part, "_attn_implementation")}
        here = "eager" if any(config is one for one in own) else name
        return {"": here} | cures if cures else here

    is_part = any(one is config and key for one, key in _configs(model))
    cure = cured(model.config) if is_part else "'eager' (within a larger model by a dict: docs/huggingface.md)"
    message = f"its {type(module).__name__} has attention code of its own, which never calls {name!r}"
    refuse(True, f"{type(model).__name__}: {message}: expected attn_implementation = {cure}")


def _governed(module: nn.Module, config: Any = None) -> Iterator[tuple[nn.Module, Any]]:
    """Each module with the nearest config that names an attention."""
    own = getattr(module, "config", None)
    config = own if hasattr(own, "_attn_implementation") else config
    yield module, config
    for child in module.children():
        yield from _governed(child, config)


def _own_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Modules of a model, but not those of models in it."""
    from transformers import PreTrainedModel

    for child in module.children():
        if not isinstance(child, PreTrainedModel):
            yield child
            yield from _own_modules(child)


def _name(config: Any) -> Any:
    return getattr(config, "_attn_implementation", None)


def _values(asked: Any) -> Iterator[Any]:
    if isinstance(asked, dict):
        for value in asked.values():
            yield from _values(value)
    else:
        yield asked


def _configs(model: Any) -> Iterator[tuple[Any, str]]:
    """Configs of a model and of its parts, each once, with its key in the model's own config, "" where it has none."""
    found: dict[int, tuple[Any, str]] = {}

    def add(config: Any, key: str) -> None:
        if hasattr(config, "_attn_implementation") and id(config) not in found:
            found[id(config)] = config, key
            for part in getattr(config, "sub_configs", ()):
                add(getattr(config, part, None), f"{key}.{part}" if key else part)

    add(model.config, "")
    for module in model.modules():
        add(getattr(module, "config", None), "")
    yield from found.values()


def traits_of(module: nn.Module) -> Traits:
    """What the methods of its class, and the functions that they call, use by name. torch's own classes use nothing."""
    module_class: Any = type(module)
    return _traits(module_class)


@functools.cache
def _traits(module_class: Any) -> Traits:
    seen: set[FunctionType] = set()
    names: set[str] = set()
    left = [found for base in module_class.__mro__ if not _torchs(base) for found in _functions(vars(base).values())]
    while left:
        function = left.pop()
        if function not in seen:
            seen.add(function)
            here, outer = _names(function.__code__), function.__globals__
            names |= here
            left += _functions(outer[name] for name in here if name in outer)
    registry = bool(names & _REGISTRY)
    fused = any(map(_FUSED.search, names))
    own = not registry and (fused or bool(names & _SOFTMAXES and names & _PRODUCTS))
    name = module_class.__name__.lower()
    masks = frozenset(name for name in names if re.fullmatch(r"create_.*masks?(_for_generate)?", name))
    return Traits(registry, own, "attention" in name or "attn" in name, masks)


def _torchs(thing: Any) -> bool:
    """torch's, or what all models of transformers share."""
    shared = (
        "modeling_utils generation utils integrations.peft modeling_flash_attention_utils masking_utils cache_utils"
    )
    own = ("torch.", "builtins.", *(f"transformers.{part}." for part in shared.split()))
    return f"{thing.__module__}.".startswith(own)


def _functions(values: Any) -> list[FunctionType]:
    """The functions of Python among ``values``, without their decorators."""
    found = []
    for value in values:
        if isinstance(value, staticmethod | classmethod | property):
            value = value.fget if isinstance(value, property) else value.__func__
        while "__wrapped__" in getattr(value, "__dict__", ()):
            value = value.__wrapped__
        value = value.func if isinstance(value, functools.partial) else value
        if isinstance(value, FunctionType) and not _torchs(value):
            found.append(value)
    return found


@functools.cache
def _names(code: CodeType) -> frozenset[str]:
    names = set(code.co_names)
    names |= {"@" for step in dis.get_instructions(code) if step.argrepr in ("@", "@=")}
    return frozenset(names.union(*(_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))))
