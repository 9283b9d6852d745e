"""Which attention each layer and head uses: names a user types -> (backend, Numerics) -> groups of heads. No torch before ``check_plans``.

Layers and heads count from 0; the paper counts from 1, so its "layer 2" is layer 1 here.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .backends import BACKENDS, FLASH_BACKENDS, Call, numerics_of, obstacle
from .numerics import BASES, LOW_FORMATS, MANTISSA_FORMATS, Numerics, lacked_by, parse_site, unread
from .presets import EXTERNAL, PRESETS, named, unaliased
from .user_error import UserError, invalid

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """One attention: a preset on a base of roundings, single sites changed, and, if need be, another backend.

    Raises ``UserError`` for unknown names and for roundings asked of a kernel that has its own.
    """

    preset: str = "flash"
    """Name of a preset: standard, sdpa_flash, flash, flash_delta_from_p, ... (all in attention/README.md), or robust, the recommended
    one, or external, a kernel by name. The default is flash, which has no fix, unlike that of ``scaled_dot_product_attention``."""
    numerics: str = "hardware"
    """Base roundings: hardware (our Triton kernels), rounded_forward (our first emulation of the published forward pass), published (as the
    paper's code runs), fp32, microcosm."""
    sites: tuple[str, ...] = ()
    """Single sites changed after that, as site=value, for example accumulator=m1."""
    backend: str = ""
    """Implementation in place of the preset's own, for this spec alone; empty keeps it (see ``AttentionConfig.flash_backend``)."""
    kernel: str = ""
    """The kernel of preset external: MODULE:FUNCTION, or a public one such as torch:flash (docs/kernels.md)."""

    def __post_init__(self) -> None:
        for name in ("preset", "numerics", "backend", "kernel"):
            if not isinstance(value := getattr(self, name), str):
                raise invalid(f"attention {name}", value, "a name")
        if not isinstance(self.sites, tuple | list) or not all(isinstance(site, str) for site in self.sites):
            raise invalid("attention sites", self.sites, "a tuple of site=value, for example ('output=bf16',)")
        object.__setattr__(self, "preset", unaliased(self.preset))
        object.__setattr__(self, "sites", tuple(self.sites))
        names = [site.partition("=")[0] for site in self.sites]
        if twice := [name for name in names if names.count(name) > 1]:
            raise invalid("attention sites", " ".join(self.sites), f"{twice[0]} once")
        if self.preset in BASES:
            beside = f"a preset, with numerics = {self.preset!r} beside it, as this names a base of roundings"
            raise invalid("attention preset", self.preset, beside)
        if self.preset not in (*PRESETS, EXTERNAL):
            raise invalid("attention preset", self.preset, ("robust", *PRESETS, EXTERNAL))
        if (self.preset == EXTERNAL) != bool(self.kernel):
            expected = "MODULE:FUNCTION or a public kernel, as torch:flash, with preset = 'external'"
            expected = "none without preset = 'external'" if self.kernel else expected
            raise invalid("attention kernel", self.kernel, expected)
        if self.kernel and self.backend:
            raise invalid("attention backend", self.backend, "empty with preset = 'external'")
        if self.numerics not in BASES:
            raise invalid("attention numerics", self.numerics, BASES)
        if self.backend and self.backend not in BACKENDS:
            raise invalid("attention backend", self.backend, BACKENDS)
        if self.backend not in ("", self.preset) and not BACKENDS[self.backend].has_sites:
            by = "empty: its roundings are its own, so it is chosen by a preset of its name"
            raise invalid("attention backend", self.backend, by)
        if not BACKENDS[self.resolved_backend].has_sites and (self.numerics != "hardware" or self.sites):
            chosen = " ".join((self.numerics, *self.sites))
            raise invalid(f"attention numerics of {self.preset}", chosen, "hardware, no sites: it rounds as its kernel")
        self.resolve()

    @property
    def resolved_backend(self) -> str:
        return self.backend or named(self.preset).backend

    def resolve(self) -> Numerics:
        """The roundings: base, then the preset's sites, then ``sites``."""
        base = BASES[self.numerics]
        return base.with_sites(named(self.preset).of(base)).with_sites(dict(parse_site(s) for s in self.sites))

    def unread(self) -> dict[str, str]:
        """Those of ``sites`` that nothing reads, by name, and what is why, as ``site=value``."""
        why = unread(asdict(self.resolve()))
        return {name: why[name] for name, _ in map(parse_site, self.sites) if name in why}

    def rounds(self, dtype: str) -> bool:
        """Whether it rounds anything where q, k and v are ``dtype`` (``fp32``, ``bf16`` or ``fp16``), or as its kernel does."""
        backend = self.resolved_backend
        return not BACKENDS[backend].has_sites or _round(_sites_read(self.resolve().concrete(dtype), backend))

    def label(self, *, default_base: str = "hardware") -> str:
        """Short name for curves and tables, for example ``flash_delta_from_p (published)``: ``hardware`` only beside another default."""
        base = "" if self.kernel or self.numerics == default_base == "hardware" else self.numerics
        extra = ", ".join(filter(None, (base, *self.sites, self.backend)))
        return f"{self.preset} ({extra})" if extra else self.kernel or self.preset


@dataclass(frozen=True, kw_only=True)
class AttentionRule:
    """An exception to the default: these heads of these layers use another attention. Empty means all."""

    layers: tuple[int, ...] = ()
    """Layers, from 0; empty: all."""
    heads: tuple[int, ...] = ()
    """Heads, from 0; empty: all."""
    attention: AttentionSpec = field(default_factory=AttentionSpec)
    """The attention that these layers and heads use."""


@dataclass(frozen=True)
class HeadGroup:
    """Heads of one layer that share one call. Names are resolved when the plan is made: a compiled model only reads them."""

    heads: tuple[int, ...]
    spec: AttentionSpec
    backend: str
    numerics: str
    """Key of the resolved ``Numerics``; of an external kernel, whose roundings are its own, its name."""
    seed_offset: int = 0
    """Makes the seeds of layers and groups differ; Philox makes unrelated streams of any two. Made with the plan: a layer's number may be a
    variable to a compiler, and the product does not fit 64 bits."""


@dataclass(frozen=True)
class LayerPlan:
    """The attention of one layer: its groups cover every head once."""

    layer: int
    n_head: int
    groups: tuple[HeadGroup, ...]
    flash_backend: str = "flash"


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """The attention of a model: a default, and rules for the layers and heads that differ."""

    default: AttentionSpec = field(default_factory=AttentionSpec)
    """What every layer and head uses unless a rule says otherwise."""
    rules: tuple[AttentionRule, ...] = ()
    """Exceptions; no two may name the same head of the same layer."""
    flash_backend: str = "flash"
    """What computes the ``flash`` presets: flash (Triton kernels, on CUDA), flash_reference (PyTorch, anywhere, slow) or flash_hopper
    (FlashAttention-4's kernels with the roundings of flash and flash_consistent, on Hopper; extra fast)."""

    def __post_init__(self) -> None:
        if not isinstance(self.default, AttentionSpec):
            raise invalid("attention.default", self.default, "an AttentionSpec")
        if not isinstance(self.rules, tuple | list) or not all(isinstance(rule, AttentionRule) for rule in self.rules):
            raise invalid("attention.rules", self.rules, "a tuple of AttentionRules, for example (AttentionRule(),)")
        for index, rule in enumerate(self.rules):
            if not isinstance(rule.attention, AttentionSpec):
                raise invalid(f"attention.rules.{index}.attention", rule.attention, "an AttentionSpec")
        if self.flash_backend not in FLASH_BACKENDS:
            raise invalid("attention.flash_backend", self.flash_backend, FLASH_BACKENDS)

    def resolve(self, n_layer: int, n_head: int) -> tuple[LayerPlan, ...]:
        """One plan per layer. Raises ``UserError`` for layers or heads that do not exist and for overlapping rules."""
        specs = {(layer, head): self.default for layer in range(n_layer) for head in range(n_head)}
        owner: dict[tuple[int, int], int] = {}
        for index, rule in enumerate(self.rules):
            for layer in _members(f"attention.rules.{index}.layers", rule.layers, n_layer):
                for head in _members(f"attention.rules.{index}.heads", rule.heads, n_head):
                    if (layer, head) in owner:
                        clash = f"layer {layer} head {head}, which rule {owner[layer, head]} names already"
                        raise invalid(f"attention.rules.{index}", clash, "rules that do not overlap")
                    owner[layer, head] = index
                    specs[layer, head] = rule.attention
        layers = ([specs[layer, head] for head in range(n_head)] for layer in range(n_layer))
        return tuple(_plan_layer(layer, heads, self.flash_backend) for layer, heads in enumerate(layers))

    def label(self) -> str:
        """Short name for curves: the default, then each rule as ``layers:heads spec``."""
        parts = [self.default.label()]
        for rule in self.rules:
            where = ",".join(map(str, rule.layers)) or "*"
            heads = ":" + ",".join(map(str, rule.heads)) if rule.heads else ""
            parts.append(f"layer {where}{heads} {rule.attention.label(default_base=self.default.numerics)}")
        return "; ".join(parts)


def switched(plan: LayerPlan, preset: str, backend: str = "") -> LayerPlan:
    """The layer with all its heads moved to another preset; the base roundings and single sites of each head stay.

    A backend in place of the preset's own stays where old and new preset are made for the same one, unless ``backend`` names one.
    Raises ``UserError`` for an unknown preset or backend, and where the base does not suit them.
    """
    preset = unaliased(preset)

    def moved(spec: AttentionSpec) -> AttentionSpec:
        if preset not in PRESETS:
            raise invalid("attention preset", preset, ("robust", *PRESETS))
        stays = PRESETS[preset].backend == named(spec.preset).backend
        return replace(spec, preset=preset, backend=backend or (spec.backend if stays else ""), kernel="")

    specs = {head: moved(group.spec) for group in plan.groups for head in group.heads}
    return _plan_layer(plan.layer, [specs[head] for head in range(plan.n_head)], plan.flash_backend)


def outline(plans: Sequence[LayerPlan], dtype: str) -> list[str]:
    """A line for each attention: its layers, its heads unless all, its name, and the sites that it reads and that are not as in base
    ``fp32``, where q, k and v are ``dtype`` (``fp32``, ``bf16`` or ``fp16``). Of one that rounds nothing there it says so."""
    places: dict[tuple[str, str, str], dict[str, list[int]]] = {}
    alike = all(group.spec.numerics == "hardware" for plan in plans for group in plan.groups)
    beside = "hardware" if alike else ""
    for plan in plans:
        for group in plan.groups:
            some = "heads" if len(group.heads) > 1 else "head"
            heads = f" {some} {_ranges(group.heads)}" if len(plan.groups) > 1 else ""
            where = places.setdefault((group.spec.label(default_base=beside), group.backend, group.numerics), {})
            where.setdefault(heads, []).append(plan.layer)
    told = []
    for (label, backend, key), where in places.items():
        sites = _sites_read(numerics_of(backend, key).concrete(dtype), backend)
        parts = [", ".join(f"{name}={value}" for name, value in sites.items())] if sites else []
        if not _round(sites):
            advice = "" if " (fp32" in label else ": a base such as numerics=microcosm does"
            parts.append(f"rounds nothing in {dtype}{advice}")
        rounds = "; ".join(parts) if BACKENDS[backend].has_sites else "rounds as its kernel does"
        layers = "; ".join(f"layer {_ranges(layers)}{heads}" for heads, layers in where.items())
        told.append(f"{'all layers' if len(places) == 1 else layers}: {label}: {rounds}")
    return told


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as in ``0, 2-11``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _sites_read(numerics: Numerics, backend: str) -> dict[str, Any]:
    """The sites, of concrete numerics, that the backend reads and that are not as in base ``fp32``."""
    exact = asdict(BASES["fp32"].concrete("fp32"))
    sites = {name: value for name, value in asdict(numerics).items() if value != exact[name]}
    if numerics.delta_error != "none":
        sites["delta_error_size"] = numerics.delta_error_size
    # A flash backend refuses the sites that it lacks.
    lacked = lacked_by(backend) if backend not in FLASH_BACKENDS else {}
    return {name: value for name, value in sites.items() if name not in unread(asdict(numerics)) | lacked}


def _round(sites: dict[str, Any]) -> bool:
    """Whether these sites, as ``_sites_read`` has them, round anything or add an error to delta."""
    return "delta_error" in sites or not {"bf16", "fp16", *MANTISSA_FORMATS, *LOW_FORMATS}.isdisjoint(sites.values())


def describe(plans: tuple[LayerPlan, ...]) -> list[dict[str, Any]]:
    """The plans as JSON for a run's record: every rounding site spelled out, as presets may change their meaning, or
    an external kernel's name."""
    places: dict[tuple[str, str], dict[str, list[int]]] = {}
    for plan in plans:
        for group in plan.groups:
            # Specs of different names can come to the same roundings.
            heads = places.setdefault((group.backend, group.numerics), {}).setdefault(str(plan.layer), [])
            heads[:] = sorted([*heads, *group.heads])
    told = []
    for (backend, numerics), where in places.items():
        rounds = {"kernel": numerics} if backend == EXTERNAL else {"numerics": json.loads(numerics)}
        told.append({"backend": backend, **rounds, "heads_of_layer": where})
    return told


def _members(name: str, chosen: tuple[int, ...], count: int) -> tuple[int, ...]:
    if not isinstance(chosen, Sequence) or any(type(value) is not int for value in chosen):
        raise invalid(name, chosen, "a tuple of whole numbers, for example (1,)")
    for value in chosen:
        if not 0 <= value < count:
            raise invalid(name, value, f"0 to {count - 1}, counted from 0")
    if len(set(chosen)) != len(chosen):
        raise invalid(name, chosen, "each named once")
    return chosen or tuple(range(count))


def _plan_layer(layer: int, specs: list[AttentionSpec], flash_backend: str) -> LayerPlan:
    groups: dict[AttentionSpec, list[int]] = {}
    for head, spec in enumerate(specs):
        groups.setdefault(spec, []).append(head)

    def backend(spec: AttentionSpec) -> str:
        return flash_backend if not spec.backend and spec.resolved_backend == "flash" else spec.resolved_backend

    def group(spec: AttentionSpec, heads: list[int]) -> HeadGroup:
        offset = (layer * len(specs) + heads[0] + 1) * 0x9E3779B97F4A7C15 & (2**62 - 1)
        return HeadGroup(tuple(heads), spec, backend(spec), spec.kernel or spec.resolve().key(), offset)

    made = [group(spec, heads) for spec, heads in groups.items()]
    return LayerPlan(layer, len(specs), tuple(made), flash_backend)


def check_plans(
    plans: Iterable[LayerPlan],
    *,
    device: "torch.device | str",
    dtype: "torch.dtype",
    head_dim: int,
    softcap: float = 0.0,
    features: tuple[str, ...] = (),
    length: int = 128,
) -> None:
    """Raise ``UserError`` for the first group that this machine cannot run, with the reason and the backends that can (with the same
    roundings), and for dtypes other than float32, bfloat16 and float16.

    ``features``: of ``numerics.FEATURES``, those that calls will use besides a soft-cap. ``length``: of the sequences with which an
    external kernel is tried.
    """
    import torch

    from .rounding import FORMAT_OF

    if dtype not in FORMAT_OF:
        raise invalid("dtype", dtype, "float32, bfloat16 or float16")
    kind, fmt = torch.device(device).type, FORMAT_OF[dtype]
    asked = (*features, *(("softcap",) if softcap else ()))
    for plan in plans:
        for group in plan.groups:
            call = Call(kind, fmt, head_dim, numerics_of(group.backend, group.numerics), asked)
            reason = obstacle(group.backend, call)
            if reason is None and group.backend == EXTERNAL:
                from .external import check

                check(group.numerics, torch.device(device), dtype, head_dim, length, grouped="grouped" in features)
            if reason is None:
                continue
            able = [name for name, backend in BACKENDS.items() if backend.has_sites and not obstacle(name, call)]
            what = f"backend {group.backend} cannot do this on {kind} with {str(dtype).removeprefix('torch.')}"
            others = f"; backends that can: {', '.join(able)}" if able else ""
            raise UserError(f"attention of layer {plan.layer} = {group.spec.label()!r}: {what}: {reason}{others}")
