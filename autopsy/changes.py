"""Which rounding carries the bias, and what removes it: every answer is a measurement of the same tokens with other numerics.

q, k, v and dO stay as captured, but for the dithers of ``autopsy_bias``, which are the same for every change. Attention is computed
again by ``flash_reference`` with one site changed, or with another preset, and the error of delta is measured again, against
the delta that the changed backward pass itself should have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch

from attention.numerics import Numerics
from attention.plan import AttentionSpec
from attention.presets import PRESETS
from attention.reference.tiles import FORMAT_OF
from autopsy.measure import Subject
from autopsy.verdict import Bias, dithered_errors, head_with, measure_bias
from errors import UserError
from probes.capture import LayerCapture
from probes.delta_error import effective_numerics, group_of

REMOVED = 0.1
"""A change removes the bias if at most this much of the mean error is left, under dither."""
REDUCED = 0.5
"""It reduces it if at most this much is left."""

SITES = (
    "inputs",
    "scores",
    "statistics",
    "logsumexp",
    "probabilities",
    "tile_product",
    "accumulator",
    "output",
    "output_gradient",
    "delta_output",
    "delta_sum",
    "probability_gradients",
)
"""Sites on the way to delta. The others (dS, running dQ, dK, dV) come after it."""
KEPT_LONGEST = ("output", "statistics", "tile_product", "accumulator")
"""When a set of sites is made smaller, these are given back last: where O_bar and O themselves are rounded."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change and what it does to the error of delta."""

    name: str
    bias: Bias
    """Measured again."""
    left: float
    """|mean| over |mean| before."""

    @property
    def removes(self) -> bool:
        return self.left <= REMOVED

    @property
    def reduces(self) -> bool:
        return REMOVED < self.left <= REDUCED


@dataclass(frozen=True, kw_only=True)
class HeadChanges:
    """The changes tried on one head."""

    layer: int
    head: int
    before: Bias
    """With the head's own numerics, by ``flash_reference``: a kernel's O may differ from its O in the last bit."""
    sites: list[Change]
    """One site in FP32."""
    together: Change | None
    """All sites of a set that removes the bias and from which none can be given back; None where a single site does, or none."""
    presets: list[Change]


def rounding_sites(numerics: Numerics) -> list[str]:
    """The sites on the way to delta at which concrete ``numerics`` round; those whose values come in that format are left out."""
    given = {"output_gradient": numerics.output}
    rounds = [site for site in SITES if getattr(numerics, site) not in ("fp32", "output", given.get(site))]
    return rounds if numerics.delta == "rowsum_do_o" else [site for site in rounds if site != "delta_output"]


def preset_changes(spec: AttentionSpec, now: Numerics, dtype: str) -> dict[str, Numerics]:
    """The presets that would change this head's numerics, on its own base and single sites, by name; ``dtype`` is q's format."""
    changes: dict[str, Numerics] = {}
    for name, preset in PRESETS.items():
        if preset.backend.startswith("sdpa_"):
            continue
        try:
            numerics = dataclasses.replace(spec, preset=name, backend="").resolve()
            numerics.concrete(dtype)
        except UserError:  # a single site of this spec, or the dtype, contradicts the preset
            continue
        if numerics != now:
            changes[name] = numerics
    return changes


def try_changes(subject: Subject, accused: list[tuple[int, int]]) -> list[HeadChanges]:
    """Measure every change on every head (layer, head) named, on all batches; in that order."""
    operands: dict[tuple[int, int], list[LayerCapture]] = {place: [] for place in accused}
    specs: dict[tuple[int, int], AttentionSpec] = {}
    layers = sorted({layer for layer, _ in accused})
    for batch in range(subject.batches if accused else 0):
        for layer in subject.capture(batch, layers):
            for head in [head for where, head in accused if where == layer.layer]:
                group = group_of(layer, head)
                specs[layer.layer, head] = group.spec
                operands[layer.layer, head].append(head_with(layer, head, effective_numerics(group)))
    return [head_changes(*place, operands[place], specs[place]) for place in accused]


def head_changes(layer: int, head: int, batches: list[LayerCapture], spec: AttentionSpec) -> HeadChanges:
    """Every change on one head; ``batches`` are captures of this head alone, with its own numerics."""
    numerics = effective_numerics(batches[0].plan.groups[0])
    dtype = FORMAT_OF[batches[0].q_BTHD.dtype]
    concrete = numerics.concrete(dtype)
    # Presets that differ in nothing on the way to delta are measured once.
    known: dict[Numerics, Bias] = {}

    def measured(changed: Numerics) -> Bias:
        same = _up_to_delta(changed.concrete(dtype), batches[0].q_BTHD.shape[1])
        if same not in known:
            known[same] = _measure(batches, changed)
        return known[same]

    before = measured(numerics)

    def change(name: str, changed: Numerics) -> Change:
        bias = measured(changed)
        return Change(name=name, bias=bias, left=abs(bias.mean) / abs(before.mean) if before.mean else 0.0)

    def in_fp32(sites: tuple[str, ...]) -> Change:
        drawn = {} if "probabilities" not in sites else {"probabilities_rounding": "nearest"}
        return change(", ".join(sites), concrete.with_sites({**dict.fromkeys(sites, "fp32"), **drawn}))

    rounds = rounding_sites(concrete)
    if concrete.inputs == dtype:
        rounds = [site for site in rounds if site != "inputs"]
    sites = [in_fp32((site,)) for site in rounds]
    together = None if any(one.removes for one in sites) else smallest_set(rounds, in_fp32)
    presets = [change(name, changed) for name, changed in preset_changes(spec, numerics, dtype).items()]
    return HeadChanges(layer=layer, head=head, before=before, sites=sites, together=together, presets=presets)


def smallest_set(sites: list[str], in_fp32: Callable[[tuple[str, ...]], Change]) -> Change | None:
    """All sites in FP32, then given back one by one wherever the bias stays away; None if even all of them do not remove it."""
    left = tuple(sites)
    best = in_fp32(left)
    if not best.removes:
        return None
    for site in sorted(sites, key=lambda site: KEPT_LONGEST.index(site) if site in KEPT_LONGEST else -1):
        fewer = tuple(one for one in left if one != site)
        tried = in_fp32(fewer)
        if tried.removes:
            left, best = fewer, tried
    return best


def _up_to_delta(numerics: Numerics, length: int) -> Numerics:
    """Concrete ``numerics`` without what comes after delta; tiles that hold a whole sequence are one tile."""
    whole = {name: 0 for name in ("tile_q", "tile_k") if getattr(numerics, name) >= length}
    return numerics.with_sites({**whole, "score_gradients": "fp32", "gradient_accumulator": "fp32"})


def _measure(batches: list[LayerCapture], numerics: Numerics) -> Bias:
    pairs = [dithered_errors(layer, 0, numerics, batch) for batch, layer in enumerate(batches)]
    return measure_bias(torch.cat([error for error, _ in pairs]), torch.cat([size for _, size in pairs]))[0]
