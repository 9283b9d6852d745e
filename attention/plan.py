"""Which attention each layer and head uses: names a user types -> (backend, Numerics) -> groups of heads. Plain Python, no torch.

Layers and heads count from 0; the paper counts from 1, so its "layer 2" is layer 1 here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from attention.numerics import BASES, HARDWARE, Numerics, parse_site
from errors import invalid

BACKENDS = (
    "standard",
    "standard_triton",
    "sdpa_flash",
    "sdpa_cudnn",
    "sdpa_efficient",
    "sdpa_math",
    "flash",
    "flash_reference",
)
FLASH_BACKENDS = ("flash", "flash_reference")
_SDPA = tuple(name for name in BACKENDS if name.startswith("sdpa_"))
_SDPA_EXPONENTS = {name: "subtracted" if name == "sdpa_math" else "unfused" for name in _SDPA}
"""What comes nearest to each: none is folded, as rows at one key have O = V at any size (``results/one_key_rows``). Flash and
memory-efficient round S c before they subtract m c; of cuDNN nothing but such rows is known. On CUDA: torch's flash kernel for CPUs
subtracts first. For emulations alone: kernels do as they do."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A name users type: a backend, and the sites it changes in the base numerics."""

    backend: str
    sites: Callable[[Numerics], dict[str, Any]]
    summary: str


def _fixed(**sites: Any) -> Callable[[Numerics], dict[str, Any]]:
    return lambda base: dict(sites)


def _standard_sites(base: Numerics) -> dict[str, Any]:
    # Eager attention writes S and dP to memory in the input's dtype; a base that rounds S itself keeps its own format.
    rounds = base in (HARDWARE, BASES["paper"], BASES["published"])
    eager = {"scores": "input", "probability_gradients": "input"} if rounds else {}
    unused: dict[str, Any] = dict.fromkeys(("statistics", "tile_product", "accumulator"), "fp32")
    unused |= {"delta_output": "output", "row_sum_floor": 0.0, "hidden_tiles": "skipped"}
    # torch's softmax subtracts the row maximum first.
    return {**eager, **unused, "exponent": "subtracted", "delta": "rowsum_p_dp", "tile_q": 0, "tile_k": 0}


def _stochastic_p(base: Numerics) -> dict[str, Any]:
    """A base that leaves P_bar unrounded rounds it to the dtype of q here: there has to be something to draw."""
    rounded = {"probabilities": "input"} if base.probabilities == "fp32" else {}
    return {**rounded, "probabilities_rounding": "stochastic"}


_FP32_ACCUMULATION = {"tile_product": "fp32", "accumulator": "fp32"}


def _apart(output_rounding: str, delta_rounding: str | None) -> Callable[[Numerics], dict[str, Any]]:
    """O forward and O in delta rounded apart (None: the same values), from one FP32 accumulation."""

    def sites(base: Numerics) -> dict[str, Any]:
        delta = {"delta_output": "output"} if delta_rounding is None else {"delta_output": base.output}
        return {
            **_FP32_ACCUMULATION,
            **delta,
            "output_rounding": output_rounding,
            "delta_rounding": delta_rounding or "nearest",
        }

    return sites


def _flash(summary: str, sites: Callable[[Numerics], dict[str, Any]]) -> Preset:
    return Preset(backend="flash", sites=sites, summary=summary)


def _stable(**sites: Any) -> Callable[[Numerics], dict[str, Any]]:
    """Ties are counted in one tile: on ``hardware`` that of a kernel, 64 columns; other bases have tiles of their own."""
    return lambda base: {**sites, **({"tile_k": 64} if base == HARDWARE else {})}


PRESETS: dict[str, Preset] = {
    "standard": Preset(backend="standard", sites=_standard_sites, summary="S and P as matrices; delta from P"),
    **{
        name: Preset(backend=name, sites=_fixed(exponent=exponent), summary="torch's kernel of that name")
        for name, exponent in _SDPA_EXPONENTS.items()
    },
    "flash": _flash("FlashAttention-2", _fixed()),
    "flash_subtracted": _flash(
        "S - m before the scale, so that P_bar of a row's maximum is 1", _fixed(exponent="subtracted")
    ),
    "flash_unfused": _flash(
        "S c rounded before m is subtracted, as torch's copy has it: P_bar of a row's maximum is 1",
        _fixed(exponent="unfused"),
    ),
    "flash_rounded_sum": _flash(
        "O divided by the sum of the rounded P_bar: its weights sum to 1", _fixed(divisor="rounded")
    ),
    "flash_untiled": _flash("one tile, the whole sequence", _fixed(tile_q=0, tile_k=0)),
    "flash_stable": _flash(
        "Algorithm 3, later version: beta 2, ties within 1e-3",
        _stable(row_max="stabilised", row_max_beta=2.0, row_max_tolerance=1e-3),
    ),
    "flash_stable_exact_ties": _flash(
        "Algorithm 3, first version: beta 7, exact ties",
        _stable(row_max="stabilised", row_max_beta=7.0, row_max_tolerance=0.0),
    ),
    "flash_stable_safe": _flash(
        "Algorithm 3 with a bounded shift: l >= exp(-7) for scores below 1.5e9",
        _stable(row_max="stabilised_safe", row_max_beta=2.0, row_max_tolerance=2.0**-9),
    ),
    "flash_fp32_pv": _flash("P V in FP32, O still rounded", _fixed(probabilities="fp32", **_FP32_ACCUMULATION)),
    "flash_fp32_pv_tf32x3": _flash(
        "P V by three TF32 products", _fixed(probabilities="fp32", products="tf32x3", **_FP32_ACCUMULATION)
    ),
    "flash_fp32_pv_o": _flash(
        "P V in FP32, and an unrounded O in delta",
        _fixed(probabilities="fp32", delta_output="fp32", **_FP32_ACCUMULATION),
    ),
    "flash_fp32_o": _flash("delta from an unrounded O kept for the backward pass", _fixed(delta_output="fp32")),
    "flash_compensated_delta": _flash(
        "delta from O and the 8 bits that follow its own",
        _fixed(delta_output="residual8", **_FP32_ACCUMULATION),
    ),
    "flash_compensated_delta_16": _flash(
        "delta from O and the 16 bits that follow its own",
        _fixed(delta_output="residual16", **_FP32_ACCUMULATION),
    ),
    "flash_delta_from_p": _flash("delta = rowsum(P * dP)", _fixed(delta="rowsum_p_dp")),
    "flash_delta_from_p_subtracted": _flash(
        "delta = rowsum(P * dP), S - m before the scale in both directions",
        _fixed(delta="rowsum_p_dp", exponent="subtracted", saved_statistics="max_and_sum"),
    ),
    "flash_delta_normalised": _flash(
        "delta = rowsum(P * dP) / rowsum(P): rows of dS sum to 0", _fixed(delta="rowsum_p_dp_normalised")
    ),
    "flash_corrected_rows": _flash(
        "rowsum(dS) taken out of dQ along P K, and of the delta in dK", _fixed(row_residual="corrected_rows")
    ),
    "flash_centred_keys": _flash("rowsum(dS) times the mean key taken out of dQ", _fixed(row_residual="centred_keys")),
    "flash_recompute_o": _flash("delta from an O recomputed in FP32", _fixed(delta="recomputed_o")),
    "flash_stochastic_o": _flash("O rounded stochastically, the same values in delta", _apart("stochastic", None)),
    "flash_stochastic_p": _flash("P_bar rounded stochastically for P_bar V, O to nearest", _stochastic_p),
    "flash_stochastic_p_o": _flash(
        "P_bar and O rounded stochastically, the same O in delta",
        lambda base: {**_stochastic_p(base), **_apart("stochastic", None)(base)},
    ),
    "flash_run_a": _flash("O stochastic; delta: the same values", _apart("stochastic", None)),
    "flash_run_b": _flash("O stochastic; delta: nearest", _apart("stochastic", "nearest")),
    "flash_run_c": _flash(
        "O unrounded into an FP32 projection; delta: nearest",
        lambda base: {**_FP32_ACCUMULATION, "output": "fp32", "delta_output": base.output},
    ),
    "flash_run_d": _flash("O nearest; delta: stochastic, drawn apart", _apart("nearest", "stochastic")),
}


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """One attention: a preset on a base of roundings, single sites changed, and, if need be, another backend.

    Raises ``UserError`` for unknown names and for roundings asked of a kernel that has its own.
    """

    preset: str = "flash"
    """Name of a preset: standard, sdpa_flash, flash, flash_delta_from_p, ... (all in attention/README.md)."""
    numerics: str = "hardware"
    """Base roundings: hardware (as GPU kernels), paper (as the paper says), published (as the paper's code runs), fp32, microcosm."""
    sites: tuple[str, ...] = ()
    """Single sites changed after that, as site=value, for example accumulator=m1."""
    backend: str = ""
    """Implementation in place of the preset's own, for this spec alone; empty keeps it (see ``AttentionConfig.flash_backend``)."""

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise invalid("attention preset", self.preset, PRESETS)
        if self.numerics not in BASES:
            raise invalid("attention numerics", self.numerics, BASES)
        if self.backend and self.backend not in BACKENDS:
            raise invalid("attention backend", self.backend, BACKENDS)
        if self.resolved_backend in _SDPA and (self.numerics != "hardware" or self.sites):
            chosen = " ".join((self.numerics, *self.sites))
            raise invalid(
                f"attention numerics of {self.preset}", chosen, "hardware and no sites: it rounds as its kernel does"
            )
        if self.resolved_backend in _SDPA and self.backend and self.backend != self.preset:
            raise invalid(
                "attention backend", self.backend, f"empty: {self.preset} names roundings that a kernel has not"
            )
        self.resolve()

    @property
    def resolved_backend(self) -> str:
        return self.backend or PRESETS[self.preset].backend

    def resolve(self) -> Numerics:
        """The roundings: base, then the preset's sites, then ``sites``."""
        base = BASES[self.numerics]
        return base.with_sites(PRESETS[self.preset].sites(base)).with_sites(dict(parse_site(s) for s in self.sites))

    def label(self) -> str:
        """Short name for curves and tables, for example ``flash_delta_from_p (paper)``."""
        extra = ", ".join(
            part
            for part in (*([] if self.numerics == "hardware" else [self.numerics]), *self.sites, self.backend)
            if part
        )
        return f"{self.preset} ({extra})" if extra else self.preset


@dataclass(frozen=True, kw_only=True)
class AttentionRule:
    """An exception to the default: these heads of these layers use another attention. Empty means all."""

    layers: tuple[int, ...] = ()
    """Layers, from 0; empty: all."""
    heads: tuple[int, ...] = ()
    """Heads, from 0; empty: all."""
    attention: AttentionSpec = field(default_factory=AttentionSpec)
    """What they use."""


@dataclass(frozen=True)
class HeadGroup:
    """Heads of one layer that share one call. Names are resolved when the plan is made: a compiled model only reads them."""

    heads: tuple[int, ...]
    spec: AttentionSpec
    backend: str
    numerics: str
    """Key of the resolved ``Numerics``."""


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
    """What computes the ``flash`` presets: flash (Triton kernels, on CUDA) or flash_reference (PyTorch, anywhere, slow)."""

    def __post_init__(self) -> None:
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
            parts.append(f"layer {where}{heads} {rule.attention.label()}")
        return "; ".join(parts)


def switched(plan: LayerPlan, preset: str, backend: str = "") -> LayerPlan:
    """The layer with all its heads moved to another preset; the base roundings and single sites of each head stay.

    A backend in place of the preset's own stays where old and new preset are made for the same one, unless ``backend`` names one.
    Raises ``UserError`` for an unknown preset or backend, and where the base does not suit them.
    """

    def moved(spec: AttentionSpec) -> AttentionSpec:
        if preset not in PRESETS:
            raise invalid("attention preset", preset, PRESETS)
        stays = PRESETS[preset].backend == PRESETS[spec.preset].backend
        return replace(spec, preset=preset, backend=backend or (spec.backend if stays else ""))

    specs = {head: moved(group.spec) for group in plan.groups for head in group.heads}
    return _plan_layer(plan.layer, [specs[head] for head in range(plan.n_head)], plan.flash_backend)


def describe(plans: tuple[LayerPlan, ...]) -> list[dict[str, Any]]:
    """The plans as JSON for a run's record, every rounding site spelled out: names of presets may come to mean something else."""
    places: dict[tuple[str, str], dict[str, list[int]]] = {}
    for plan in plans:
        for group in plan.groups:
            # Specs of different names can come to the same roundings.
            heads = places.setdefault((group.backend, group.numerics), {}).setdefault(str(plan.layer), [])
            heads[:] = sorted([*heads, *group.heads])
    return [
        {"backend": backend, "numerics": json.loads(numerics), "heads_of_layer": where}
        for (backend, numerics), where in places.items()
    ]


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

    made = [HeadGroup(tuple(heads), spec, backend(spec), spec.resolve().key()) for spec, heads in groups.items()]
    return LayerPlan(layer, len(specs), tuple(made), flash_backend)
