"""Whose rounding makes this gradient? The training gradient of one set of weights, with one attention after another.

Where the gradient norm of a run leaps, the first question is which rounding makes it: the same weights and the same batches with other
attention answer it in a few passes. dW_Q is compared with that of a *reference*, attention in FP32 with delta = rowsum(P * dP) in the same
places, all else as trained. An error that is drawn anew in every batch averages out of the mean gradient; a systematic one stays in it.

O as handed on, and dq, dk and dv, have the input's dtype in the reference, too, and under autocast the product that makes dW_Q rounds its
result: differences below some units of that dtype's rounding are no statement about attention.

Legend: B batch, T positions, C width (n_embd), H heads, D head width.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from analysis.spectral import spectral_norm
from attention.exact import exact_float32
from attention.numerics import BASES, parse_site
from attention.plan import FLASH_BACKENDS, PRESETS, AttentionConfig, AttentionRule, AttentionSpec, LayerPlan
from errors import invalid
from model import GPT, largest_logits

OWN = "run"
"""Name of the run's own attention among those to measure."""
REFERENCE = "standard numerics=fp32"
"""Attention in FP32, delta from P, as ``parse_attention`` reads it."""


@dataclass(frozen=True)
class Named:
    """An attention as a user names it: what stands in place of the run's."""

    preset: str
    numerics: str = ""
    """Base roundings; empty keeps those of the heads that it is put in place of."""
    sites: tuple[str, ...] = ()
    """Single sites, as site=value. Those of the run do not stay."""

    def spec(self, base: str) -> AttentionSpec:
        """It, where the heads' base is ``base``. Raises ``UserError`` where the two do not go together."""
        return AttentionSpec(preset=self.preset, numerics=self.numerics or base, sites=self.sites)


def parse_attention(text: str) -> Named | None:
    """``PRESET [numerics=BASE] [SITE=VALUE ...]``; ``run`` is the run's own, None. Raises ``UserError`` for unknown names."""
    if text.split() == [OWN]:
        return None
    preset, *words = text.split() or [""]
    if preset not in PRESETS:
        raise invalid("--attention", preset, (OWN, *PRESETS))
    bases = [word.removeprefix("numerics=") for word in words if word.startswith("numerics=")]
    if len(bases) > 1:
        raise invalid("--attention", text, "one numerics=BASE at most")
    if bases and bases[0] not in BASES:
        raise invalid("--attention numerics", bases[0], BASES)
    sites = tuple(word for word in words if not word.startswith("numerics="))
    for site in sites:
        parse_site(site)
    return Named(preset, bases[0] if bases else "", sites)


def served_by(plans: Sequence[LayerPlan], flash_backend: str) -> tuple[LayerPlan, ...]:
    """The plans with their flash presets computed by ``flash_backend`` ("" leaves them)."""
    if not flash_backend:
        return tuple(plans)
    return tuple(
        dataclasses.replace(
            plan,
            flash_backend=flash_backend,
            groups=tuple(
                dataclasses.replace(group, backend=flash_backend) if group.backend in FLASH_BACKENDS else group
                for group in plan.groups
            ),
        )
        for plan in plans
    )


def replaced(own: Sequence[LayerPlan], named: Named | None, layer: int | None = None) -> tuple[LayerPlan, ...]:
    """The plans with ``named`` in place of every head's attention, in ``layer`` alone or in all; None leaves them.

    Raises ``UserError`` where it does not go with the base roundings of a head.
    """
    if named is None:
        return tuple(own)
    found = []
    for plan in own:
        if layer not in (None, plan.layer):
            found.append(plan)
            continue
        rules = tuple(
            AttentionRule(layers=(plan.layer,), heads=group.heads, attention=named.spec(group.spec.numerics))
            for group in plan.groups
        )
        config = AttentionConfig(rules=rules, flash_backend=plan.flash_backend)
        found.append(config.resolve(len(own), plan.n_head)[plan.layer])
    return tuple(found)


@dataclass(frozen=True)
class Gradient:
    """The training gradient on one batch, or its average over several."""

    loss: float
    """Nats a token, z-loss included where the run has one; the mean for several batches."""
    norm: float
    """Of the whole model's gradient."""
    dw_q_CC: Tensor
    """Of the layer in question; float32 from one batch, float64 from several."""
    max_logit: float
    """Largest q . k / sqrt(D) in that layer, before a soft-cap; of all batches."""


@dataclass(frozen=True)
class Comparison:
    """dW_Q of one attention, and how far it is from that of the reference."""

    spectral: float
    frobenius: float
    difference: float
    """||dW - dW_ref|| / ||dW_ref||, Frobenius; NaN where both are 0."""
    cosine: float
    """Of dW and dW_ref as vectors; NaN where one is 0."""


@contextlib.contextmanager
def larger_logits(model: GPT, layer: int, factor: float) -> Iterator[None]:
    """For the time of the block W_Q and W_K of a layer are the square root of ``factor`` times themselves; then as before, to the bit."""
    kept = [(w, w.detach().clone()) for w in (model.w_q(layer), model.w_k(layer))]
    try:
        with torch.no_grad():
            for w, _ in kept:
                w.mul_(factor**0.5)
        yield
    finally:
        with torch.no_grad():
            for w, before in kept:
                w.copy_(before)


def layer_of_largest_w_q(model: GPT) -> int:
    """The layer whose W_Q has the largest spectral norm."""
    norms = [float(spectral_norm(model.w_q(layer).detach())) for layer in range(model.config.n_layer)]
    return max(range(len(norms)), key=norms.__getitem__)


def gradients(
    model: GPT,
    plans: tuple[LayerPlan, ...],
    batches: Sequence[tuple[Tensor, Tensor]],
    layer: int,
    *,
    autocast: Callable[[], AbstractContextManager[object]],
    loss_scale: float = 1.0,
    tick: Callable[[], object] = lambda: None,
) -> tuple[list[Gradient], Gradient]:
    """The gradient of the training loss on every batch, and the average over them, with ``plans`` in place of the model's own.

    Forward under autocast and backward outside it, as in training. The rounding seed of a batch is its number, so that stochastic
    roundings draw the same for all attentions. No parameter's ``.grad`` is written; the model's plans are put back.

    Args:
        model: the plain ``GPT`` in training mode.
        plans: what this machine can run (``registry.check``).
        batches: (tokens, targets) int64 [B, T] of equal sizes, on any device.
        layer: whose dW_Q and logits.
        autocast: a new context for every pass.
        loss_scale: for FP16, a power of two; gradients are divided by it again.
        tick: called behind every batch.
    """
    device = next(model.parameters()).device
    weights = list(model.parameters())
    at = next(i for i, weight in enumerate(weights) if weight is model.attentions()[layer].c_attn.weight)
    sums = [torch.zeros_like(weight, dtype=torch.float64) for weight in weights]
    found = []
    with _attention(model, plans):
        for number, (tokens_BT, targets_BT) in enumerate(batches):
            seed = torch.full((), number, dtype=torch.int64, device=device)
            with torch.enable_grad(), _largest_logit(model, layer) as logits:
                with autocast():
                    _, loss = model(tokens_BT.to(device), targets_BT.to(device), seed)
                scaled = torch.autograd.grad(loss * loss_scale, weights)
            made = [gradient.float() / loss_scale for gradient in scaled]
            dw_q_CC = made[at][: model.config.n_embd].clone()
            found.append(Gradient(loss.item(), _norm(made), dw_q_CC, logits[0]))
            for total, gradient in zip(sums, made, strict=True):
                total += gradient
            tick()
    count = len(found)
    average = Gradient(
        loss=sum(one.loss for one in found) / count,
        norm=_norm(sums) / count,
        dw_q_CC=sums[at][: model.config.n_embd] / count,
        max_logit=float(torch.tensor([one.max_logit for one in found]).max()),
    )
    return found, average


def compare(found: Gradient, reference: Gradient) -> Comparison:
    """Norms of dW_Q, and its distance from the reference's, in FP64."""
    dw_CC, reference_CC = found.dw_q_CC.double(), reference.dw_q_CC.double()
    size, of_reference = torch.linalg.vector_norm(dw_CC), torch.linalg.vector_norm(reference_CC)
    return Comparison(
        spectral=float(spectral_norm(dw_CC)),
        frobenius=float(size),
        difference=float(torch.linalg.vector_norm(dw_CC - reference_CC) / of_reference),
        cosine=float((dw_CC * reference_CC).sum() / (size * of_reference)),
    )


def _norm(gradients: Sequence[Tensor]) -> float:
    return float(
        torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients]))
    )


@contextlib.contextmanager
def _attention(model: GPT, plans: tuple[LayerPlan, ...]) -> Iterator[None]:
    """The model with these plans for the time of the block."""
    before = tuple(attention.plan for attention in model.attentions())
    model.set_plans(plans)
    try:
        yield
    finally:
        model.set_plans(before)


@contextlib.contextmanager
def _largest_logit(model: GPT, layer: int) -> Iterator[list[float]]:
    """The largest logit that a layer's attention is given in the block, in a list."""
    attention, seen = model.attentions()[layer], list[float]()
    attend = attention.attend

    def watched(q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, rounding_seed: Tensor) -> Tensor:
        with exact_float32(q_BTHD.device):
            seen.append(float(largest_logits(q_BTHD, k_BTHD).max()))
        return attend(q_BTHD, k_BTHD, v_BTHD, rounding_seed)

    # In the instance, where it hides the class's method until it is deleted.
    attention.attend = watched  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        del attention.attend
