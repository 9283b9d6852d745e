"""The error of delta under two readings: what a bias of O's rounding makes of it, and what O's correlation with its own gradient does.

Write o = O + e for the output that a layer hands on, e its rounding error. The error of delta = rowsum(dO * o) is e . dO, and dO depends on
e, since the loss was computed through it. To first order dO(O + e) = dO(O) + H e, H the curvature of the loss in O, so that

    e . dO(O + e)  =  e . dO(O)   +   e . (dO(O + e) - dO(O))
                      first part      second part, about e . H e

The first has a mean where e is biased given O: the explanation of arXiv 2510.04212, section 3.3. The second has the mean tr(H Cov e) even
if e has none: self-correlation. Subtracting the two gradients of the *same* batch takes away what makes e . dO noisy, so that a second part
is seen that no mean of e . dO itself would show.

What an error of delta does to W_Q is not its mean over tokens: it enters with a weight of its own at every token (analysis/low_rank.py,
equation 3). ``pull`` is that weight in the direction in which W_Q's largest singular value grows, so that the mean of a part times pull,
its *drift*, is that part's share in the growth.

Everything but the layer under study is FP32, weights and attention, so that no other rounding enters the difference; q, k and v are
rounded as the layer would get them. o is made by ``flash_reference`` with the layer's numerics: for torch's own kernels, their roundings
as this project names them, not their bits.

Legend: B batch, T positions, H heads, D head width.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from analysis.capture import LayerCapture, capture
from analysis.delta_error import effective_numerics, forward_pass, high_outputs, over_groups
from analysis.low_rank import weighted_keys
from attention import AttentionSpec
from attention.exact import exact_float32
from attention.numerics import Numerics
from attention.plan import AttentionConfig, LayerPlan
from model import GPT

EXACT = AttentionConfig(default=AttentionSpec(preset="standard", numerics="fp32"))
"""Attention of the other layers."""

Change = Callable[[Numerics], Numerics]

ROUNDINGS: dict[str, Change] = {
    "as trained": lambda numerics: numerics,
    "stochastic": lambda numerics: numerics.with_sites({"output_rounding": "stochastic"}),
    "O unrounded": lambda numerics: numerics.with_sites({"output": "fp32", "output_rounding": "nearest"}),
}
"""O as the layer's plan rounds it; in the same format without bias; and with the other sites' errors alone, P_bar's above all.

The last is what an FP32 O in delta leaves, and what runs B and C have in common with it."""


@dataclass(frozen=True)
class Reading:
    """e . dO of one layer and rounding, token by token, in its two parts; units of delta (mean loss of the batch)."""

    first_BHT: Tensor
    """e . dO(O): not 0 on average where the rounding is biased."""
    second_BHT: Tensor
    """e . (dO(O + e) - dO(O)): not 0 on average where the loss is curved, whatever the rounding."""
    delta_BHT: Tensor
    """O . dO(O), what the error is an error of."""
    pull_BHT: Tensor
    """(P K)[T] . u times X[T] . v, with u, v the top singular pair of the head's rows of W_Q: a step of descent makes their singular value
    larger by lr * scale * sum over tokens of (error of delta) * pull, to first order."""


@dataclass(frozen=True)
class Mean:
    """A mean over sequences, in units of delta's root mean square."""

    mean: float
    standard_error: float
    """From the spread over sequences."""
    sequences: int

    @property
    def z(self) -> float:
        """Mean over standard error; 0 where there is no error at all."""
        return 0.0 if self.mean == 0 else self.mean / self.standard_error


def readings(
    model: GPT,
    plan: LayerPlan,
    tokens_BT: Tensor,
    targets_BT: Tensor,
    dtype: torch.dtype,
    *,
    seed: Tensor,
    roundings: Mapping[str, Change] = ROUNDINGS,
) -> dict[str, Reading]:
    """Both parts of e . dO in one layer on one batch.

    Args:
        model: its weights count, its attention does not: for the time of the call all layers compute in FP32 (``EXACT``).
        plan: the layer, and how it rounds.
        tokens_BT, targets_BT: int64 on the model's device.
        dtype: of q, k and v in training.
        seed: int64 []; draws of stochastic roundings.
        roundings: what to make of the numerics of each group of heads.

    Returns:
        A ``Reading`` for each rounding, float32.
    """
    with _exact_attention(model), exact_float32(tokens_BT.device):
        (seen,) = capture(model, tokens_BT, targets_BT, [plan.layer], autocast=contextlib.nullcontext())
        rounded = (x.to(dtype) for x in (seen.q_BTHD, seen.k_BTHD, seen.v_BTHD))
        q, k, v = rounded
        layer = dataclasses.replace(seen, q_BTHD=q, k_BTHD=k, v_BTHD=v, plan=plan, rounding_seed=seed)
        high_BHTD = high_outputs(layer)
        exact_BHTD = _gradient(model, plan.layer, high_BHTD, tokens_BT, targets_BT)
        delta_BHT = (high_BHTD * exact_BHTD).sum(dim=-1)
        pull_BHT = _pull(layer, model.w_q(plan.layer))
        found = {}
        for name, change in roundings.items():
            o_BHTD = _output(layer, change)
            e_BHTD = o_BHTD - high_BHTD
            difference_BHTD = _gradient(model, plan.layer, o_BHTD, tokens_BT, targets_BT) - exact_BHTD
            found[name] = Reading(
                first_BHT=(e_BHTD * exact_BHTD).sum(dim=-1),
                second_BHT=(e_BHTD * difference_BHTD).sum(dim=-1),
                delta_BHT=delta_BHT,
                pull_BHT=pull_BHT,
            )
        return found


def mean_of(
    parts_BHT: list[Tensor],
    deltas_BHT: list[Tensor],
    head: int | None = None,
    *,
    pulls_BHT: list[Tensor] | None = None,
) -> Mean:
    """Mean of one part of several batches over tokens, relative to delta's root mean square; of one head, or of all.

    With ``pulls_BHT`` it is the drift: of the part times pull, each head's pull in units of its root mean square, so that no head with long
    keys speaks for all.

    One sequence is one draw for the standard error: tokens of one share their keys, and e . H e couples them. NaN for a single one.
    """
    chosen = slice(None) if head is None else slice(head, head + 1)
    part_NHT = torch.cat(parts_BHT)[:, chosen].double()
    if pulls_BHT is not None:
        pull_NHT = torch.cat(pulls_BHT)[:, chosen].double()
        part_NHT = part_NHT * pull_NHT / pull_NHT.square().mean(dim=(0, 2), keepdim=True).sqrt()
    size = torch.cat(deltas_BHT)[:, chosen].double().square().mean().sqrt().item()
    mean_N = part_NHT.mean(dim=(1, 2))
    n = len(mean_N)
    spread = mean_N.std().item() / math.sqrt(n) if n > 1 else math.nan
    return Mean(mean=mean_N.mean().item() / size, standard_error=spread / size, sequences=n)


def _pull(layer: LayerCapture, w_q_CC: Tensor) -> Tensor:
    """See ``Reading.pull_BHT``."""
    pk_BHTD = weighted_keys(layer)
    _, H, _, D = pk_BHTD.shape
    w_q_HDC = w_q_CC.detach().double().unflatten(0, (H, D))
    # The eigenvectors of W W^T are W's left singular vectors, the largest last.
    u_HD = torch.linalg.eigh(w_q_HDC @ w_q_HDC.mT).eigenvectors[..., -1]
    v_HC = torch.nn.functional.normalize(torch.einsum("hdc,hd->hc", w_q_HDC, u_HD), dim=-1)
    along_u_BHT = torch.einsum("bhtd,hd->bht", pk_BHTD.float(), u_HD.float())
    return along_u_BHT * torch.einsum("btc,hc->bht", layer.x_BTC.float(), v_HC.float())


def _output(layer: LayerCapture, change: Change) -> Tensor:
    """O of the layer under changed numerics, float32 [B, H, T, D]."""
    return over_groups(
        layer,
        lambda group: forward_pass(layer, group, change(effective_numerics(group)))[0].transpose(1, 2).float(),
    )


def _gradient(model: GPT, layer: int, o_BHTD: Tensor, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
    """dLoss / dO, float32 [B, H, T, D], where the layer hands on ``o_BHTD`` in place of its own output."""
    attention = model.attentions()[layer]
    handed_BTHD = o_BHTD.transpose(1, 2).contiguous().requires_grad_()
    attention.attend = lambda *_: handed_BTHD  # type: ignore[method-assign]
    try:
        with torch.enable_grad():
            _, loss = model(tokens_BT, targets_BT)
            assert loss is not None
            (gradient_BTHD,) = torch.autograd.grad(loss, [handed_BTHD])
    finally:
        del attention.attend
    return gradient_BTHD.transpose(1, 2)


@contextlib.contextmanager
def _exact_attention(model: GPT) -> Iterator[None]:
    """All layers in FP32 for the time of the block."""
    before = tuple(attention.plan for attention in model.attentions())
    model.set_plans(EXACT.resolve(model.config.n_layer, model.config.n_head))
    try:
        yield
    finally:
        model.set_plans(before)
