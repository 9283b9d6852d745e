"""What the attention of each layer read and passed on in one forward and backward pass: the material of every other probe.

Legend: B batch, T positions, C width (n_embd), H heads, D head width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from attention.heads import head_index
from attention.plan import HeadGroup, LayerPlan
from model import GPT, CausalSelfAttention


@dataclass(frozen=True, kw_only=True)
class LayerCapture:
    """The operands of one layer's attention, in the dtypes that attention saw, without a graph."""

    layer: int
    """Which layer, from 0."""
    x_BTC: Tensor
    """Input of ``c_attn`` (the block's normed input), before autocast rounds it for the product."""
    q_BTHD: Tensor
    """Queries as ``attention.run`` reads them: after QK-norm."""
    k_BTHD: Tensor
    v_BTHD: Tensor
    o_BTHD: Tensor
    """Attention output as ``attention.run`` returns it: before a gate."""
    do_BTHD: Tensor
    """Gradient of the loss with respect to ``o_BTHD``, in its dtype; times ``loss_scale`` if one was given."""
    scale: float
    """Of Q K^T."""
    softcap: float
    """Of the scores; 0 is off."""
    plan: LayerPlan
    """Which heads round how."""
    rounding_seed: Tensor
    """int64 []; as given to the model."""
    rotary: tuple[Tensor, Tensor] | None = None
    """Cosines and sines [T, D] of a rotation of q and k behind their projections (Llama's, by halves); GPT-2 has none."""

    def heads(self, group: HeadGroup) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q, k, v, o and dO of the heads of a group, each [B, T, H of the group, D]."""
        tensors = (self.q_BTHD, self.k_BTHD, self.v_BTHD, self.o_BTHD, self.do_BTHD)
        if len(group.heads) == self.plan.n_head:
            return tensors
        chosen = head_index(group.heads, self.q_BTHD.device)
        return tuple(x_BTHD[:, :, chosen] for x_BTHD in tensors)  # type: ignore[return-value]


@dataclass(kw_only=True)
class Record:
    """What the hooks of one layer saw; O still in the graph."""

    x_BTC: Tensor | None = None
    rotary: tuple[Tensor, Tensor] | None = None
    qkv: tuple[Tensor, Tensor, Tensor] | None = None
    o_BTHD: Tensor | None = None
    scale: float = 1.0

    def keep(self, q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, o_BTHD: Tensor, scale: float) -> Tensor:
        """Keep what attention read and gave; O, with a graph."""
        # Weights that take no gradient give an output without a graph; the pass behind it needs one all the same.
        self.o_BTHD = o_BTHD if o_BTHD.requires_grad else o_BTHD.requires_grad_()
        self.qkv, self.scale = (q_BTHD.detach(), k_BTHD.detach(), v_BTHD.detach()), scale
        return self.o_BTHD

    def finished(
        self, layer: int, do_BTHD: Tensor, plan: LayerPlan, rounding_seed: Tensor, softcap: float = 0.0
    ) -> LayerCapture:
        """The capture, after the backward pass."""
        assert self.x_BTC is not None
        assert self.qkv is not None
        assert self.o_BTHD is not None
        q_BTHD, k_BTHD, v_BTHD = self.qkv
        return LayerCapture(
            layer=layer,
            x_BTC=self.x_BTC,
            q_BTHD=q_BTHD,
            k_BTHD=k_BTHD,
            v_BTHD=v_BTHD,
            o_BTHD=self.o_BTHD.detach(),
            do_BTHD=do_BTHD,
            scale=self.scale,
            softcap=softcap,
            plan=plan,
            rounding_seed=rounding_seed,
            rotary=self.rotary,
        )


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

    Nothing is left behind: no parameter's ``.grad`` is written and no hook of DDP runs (gradients are asked for by
    ``torch.autograd.grad``, which stops at the outputs named), QK-clip's maxima are not fed, no random number is drawn, every
    module's mode and method is put back, also after an error. Nothing waits for the device.

    Args:
        model: the plain ``GPT``; not what ``torch.compile`` or DDP made of it.
        tokens_BT, targets_BT: int64 on the model's device.
        layers: which, from 0; all if None.
        autocast: entered around the forward pass alone, as in training.
        rounding_seed: int64 [] on the device; None is 0, as in ``GPT.forward``.
        loss_scale: the loss is multiplied by it before the backward pass (FP16 loses a mean loss's dO without it); a power
            of two changes no mantissa.

    Returns:
        One ``LayerCapture`` a layer asked for, in that order.

    Raises:
        ValueError: a layer that does not exist.
    """
    attentions = model.attentions()
    chosen = list(range(len(attentions))) if layers is None else list(layers)
    for layer in chosen:
        if not 0 <= layer < len(attentions):
            raise ValueError(f"layer {layer}: the model has layers 0 to {len(attentions) - 1}")
    if rounding_seed is None:
        rounding_seed = torch.zeros((), dtype=torch.int64, device=tokens_BT.device)
    records = {layer: Record() for layer in chosen}
    with torch.enable_grad(), _recording(attentions, records):
        with autocast:
            _, loss = model(tokens_BT, targets_BT, rounding_seed)
        outputs = [records[layer].o_BTHD for layer in chosen]
        gradients = torch.autograd.grad(loss * loss_scale, outputs)  # type: ignore[arg-type]
    return [
        records[layer].finished(
            layer, gradient, attentions[layer].plan, rounding_seed, softcap=attentions[layer].softcap
        )
        for layer, gradient in zip(chosen, gradients, strict=True)
    ]


@contextlib.contextmanager
def _recording(attentions: list[CausalSelfAttention], records: dict[int, Record]) -> Iterator[None]:
    """Watch the layers named by ``records`` for the time of the block."""
    # Eval mode keeps QK-clip's running maxima as they are; nothing else in these modules asks for the mode.
    modes = [attention.training for attention in attentions]
    with contextlib.ExitStack() as undo:
        for attention, mode in zip(attentions, modes, strict=True):
            undo.callback(setattr, attention, "training", mode)
            attention.training = False
        for layer, record in records.items():
            attention = attentions[layer]
            undo.callback(attention.c_attn.register_forward_pre_hook(_keep_input(record)).remove)
            # In the instance, where it hides the class's method until it is deleted.
            attention.attend = _recorder(attention.attend, record)  # type: ignore[method-assign]
            undo.callback(delattr, attention, "attend")
        yield


def _keep_input(record: Record) -> Callable[..., None]:
    def hook(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        record.x_BTC = inputs[0].detach()

    return hook


def _recorder(attend: Callable[..., Tensor], record: Record) -> Callable[..., Tensor]:
    def recorded(q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, rounding_seed: Tensor) -> Tensor:
        o_BTHD = attend(q_BTHD, k_BTHD, v_BTHD, rounding_seed)
        return record.keep(q_BTHD, k_BTHD, v_BTHD, o_BTHD, q_BTHD.shape[-1] ** -0.5)

    return recorded
