"""What the attention of each layer read and passed on in one forward and backward pass: the material of every other probe.

Legend: B batch, T positions, C width (n_embd), H heads, D head width.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from attention.dispatch import head_index
from attention.plan import HeadGroup, LayerPlan
from model import GPT, CausalSelfAttention, Rotary


@dataclass(frozen=True, kw_only=True)
class LayerCapture:
    """The operands of one layer's attention, in the dtypes that attention saw, without a graph."""

    layer: int
    """Which layer, from 0."""
    x_BTC: Tensor
    """Input of ``c_attn`` (the block's normed input), before autocast rounds it for the product."""
    q_BTHD: Tensor
    """Queries as ``attention.run`` reads them: after QK-norm and rotation."""
    k_BTHD: Tensor
    """Keys, and values, of every head of queries: those that several share are repeated."""
    v_BTHD: Tensor
    o_BTHD: Tensor
    """Attention output as ``attention.run`` returns it: before a gate."""
    do_BTHD: Tensor
    """Gradient of the loss with respect to ``o_BTHD``, in its dtype; times ``loss_scale`` if one was given."""
    scale: float
    """Scale of Q K^T."""
    softcap: float
    """Soft-cap of the scores; 0 is off."""
    plan: LayerPlan
    """Which heads round how."""
    rounding_seed: Tensor
    """int64 []; as given to the model."""
    rotary: Rotary | None = None
    """What turned q and k."""

    def turned_back(self, dq_BHTD: Tensor) -> Tensor:
        """A gradient with respect to q as one with respect to W_q x, if no QK-norm is between: dW_q is its outer product with x."""
        return dq_BHTD if self.rotary is None else self.rotary(dq_BHTD.transpose(1, 2), inverse=True).transpose(1, 2)

    def seed(self, group: HeadGroup) -> Tensor:
        """What a group drew with, int64 []. Keys and values that heads share were drawn once, and draw here for each head."""
        return self.rounding_seed ^ group.seed_offset

    def heads(self, group: HeadGroup) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q, k, v, o and dO of the heads of a group, each [B, T, H of the group, D]."""
        tensors = (self.q_BTHD, self.k_BTHD, self.v_BTHD, self.o_BTHD, self.do_BTHD)
        if len(group.heads) == self.plan.n_head:
            return tensors
        chosen = head_index(group.heads, self.q_BTHD.device)
        return tuple(x_BTHD[:, :, chosen] for x_BTHD in tensors)  # type: ignore[return-value]


def capture(
    model: GPT,
    tokens_BT: Tensor,
    targets_BT: Tensor,
    layers: Sequence[int] | None = None,
    *,
    autocast: AbstractContextManager[object],
    rounding_seed: Tensor | None = None,
    loss_scale: float = 1.0,
) -> list[LayerCapture]:
    """One eager forward pass, and the gradient of the training loss with respect to the attention outputs alone.

    Nothing is left behind: no parameter's ``.grad`` is written, no hook of DDP runs, QK-clip's maxima are not fed, every
    module's mode and method is put back, also after an error. No random number is drawn, unless an external kernel does. Nothing waits
    for the device.

    Args:
        model: the plain ``GPT``; not what ``torch.compile`` or DDP made of it.
        tokens_BT, targets_BT: int64 on the model's device.
        layers: which, from 0, in the order of the result; all if None. They must exist.
        autocast: entered around the forward pass alone, as in training.
        rounding_seed: int64 [] on the device; None is 0.
        loss_scale: multiplies the loss before the backward pass: FP16 loses a mean loss's dO without it.
    """
    attentions = model.attentions()
    chosen = list(range(len(attentions))) if layers is None else list(layers)
    if rounding_seed is None:
        rounding_seed = torch.zeros((), dtype=torch.int64, device=tokens_BT.device)
    kept: dict[int, dict[str, Tensor]] = {layer: {} for layer in chosen}
    with torch.enable_grad(), _recording(attentions, kept):
        with autocast:
            _, loss = model(tokens_BT, targets_BT, rounding_seed)
        gradients = torch.autograd.grad(loss * loss_scale, [kept[layer]["o_BTHD"] for layer in chosen])
    return [
        LayerCapture(
            layer=layer,
            do_BTHD=do_BTHD,
            scale=model.config.head_width**-0.5,
            softcap=attentions[layer].softcap,
            plan=attentions[layer].plan,
            rounding_seed=rounding_seed,
            rotary=attentions[layer].rotary,
            **{name: tensor.detach() for name, tensor in kept[layer].items()},
        )
        for layer, do_BTHD in zip(chosen, gradients, strict=True)
    ]


@contextlib.contextmanager
def _recording(attentions: list[CausalSelfAttention], kept: dict[int, dict[str, Tensor]]) -> Iterator[None]:
    """Keep what the layers named by ``kept`` read and give in the block, O with its graph."""
    with contextlib.ExitStack() as undo:
        # Eval mode keeps QK-clip's running maxima as they are; nothing else in these modules asks for the mode.
        for attention in attentions:
            undo.callback(setattr, attention, "training", attention.training)
            attention.training = False
        for layer, tensors in kept.items():
            attention = attentions[layer]
            keep_input = functools.partial(lambda kept, _, inputs: kept.update(x_BTC=inputs[0]), tensors)
            undo.callback(attention.c_attn.register_forward_pre_hook(keep_input).remove)
            # In the instance, where it hides the class's method until it is deleted.
            attention.attend = functools.partial(_attend, attention.attend, tensors)  # type: ignore[method-assign]
            undo.callback(delattr, attention, "attend")
        yield


def _attend(
    attend: Callable[..., Tensor], kept: dict[str, Tensor], q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, seed: Tensor
) -> Tensor:
    o_BTHD = attend(q_BTHD, k_BTHD, v_BTHD, seed)
    k_BTHD, v_BTHD = (x.repeat_interleave(q_BTHD.shape[2] // x.shape[2], dim=2) for x in (k_BTHD, v_BTHD))
    kept.update(q_BTHD=q_BTHD, k_BTHD=k_BTHD, v_BTHD=v_BTHD, o_BTHD=o_BTHD)
    return o_BTHD
