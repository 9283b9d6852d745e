"""GPT-2's MLP and head by quack-kernels (https://github.com/Dao-AILab/quack), on Hopper: ``speed.quack``.

Its products finish what follows them while the result is still on chip:

    h = x W_1^T,  a = gelu(h)          one product; h is stored rounded, gelu reads it unrounded
    dh = (dy W_2) * gelu'(h)           one product; the slope reads the stored h, dy W_2 is not rounded before it
    loss and gradients of the head     one product writes exp(s - m) of every tile of logits in bfloat16; two more read that
                                       and scale it by row, so that the gradient of the logits is never stored

All other products are torch's, as are the dtypes of gradients. No atomics: the same bits every time. Other last bits than
``fused.gelu`` and ``fused.linear_cross_entropy``.

Legend: N tokens, C width, F width inside the MLP, V vocabulary.
"""

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

from fused.linear_cross_entropy import CHUNK, IGNORED_TARGET, keep_gradients, scale_gradients

MULTIPLE = 128
"""The padded vocabulary is a multiple of this, the widths of 8."""


def installed() -> bool:
    return importlib.util.find_spec("quack") is not None


@functools.cache
def _slope_epilogue():  # type: ignore[no-untyped-def]
    """quack's own backward epilogue recomputes and writes gelu(h) as well, which takes as long as it saves."""
    from quack.activation import dgelu_erf
    from quack.epilogue.frontend import gemm_epilogue

    @gemm_epilogue()
    def times_gelu_slope(acc, c):  # type: ignore[no-untyped-def]
        scaled, _ = dgelu_erf(c, acc)
        return {"D": scaled}

    return times_gelu_slope


@torch.library.custom_op("fused::quack_linear_gelu", mutates_args=(), device_types="cuda")
def _linear_gelu(x_NC: Tensor, weight_FC: Tensor) -> tuple[Tensor, Tensor]:
    """(h, gelu(h)), [N, F] in x's dtype, of h = x W^T."""
    from quack.gemm_interface import gemm_act

    h_NF = x_NC.new_empty(x_NC.shape[0], weight_FC.shape[0])
    a_NF = torch.empty_like(h_NF)
    # Not tuned: a choice by timing could give other bits in another process.
    gemm_act(x_NC, weight_FC.mT, activation="gelu_erf", preact_out=h_NF, postact_out=a_NF, tuned=False)
    return h_NF, a_NF


@_linear_gelu.register_fake
def _(x_NC: Tensor, weight_FC: Tensor) -> tuple[Tensor, Tensor]:
    h_NF = x_NC.new_empty(x_NC.shape[0], weight_FC.shape[0])
    return h_NF, torch.empty_like(h_NF)


@torch.library.custom_op("fused::quack_times_gelu_slope", mutates_args=(), device_types="cuda")
def _times_gelu_slope(dy_NC: Tensor, weight_CF: Tensor, h_NF: Tensor) -> Tensor:
    """(dy W) * gelu'(h), [N, F] in h's dtype."""
    dh_NF = torch.empty_like(h_NF)
    _slope_epilogue()(dy_NC, weight_CF, h_NF, out={"D": dh_NF}, tuned=False)
    return dh_NF


@_times_gelu_slope.register_fake
def _(dy_NC: Tensor, weight_CF: Tensor, h_NF: Tensor) -> Tensor:
    return torch.empty_like(h_NF)


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NC: Tensor, in_FC: Tensor, out_CF: Tensor) -> Tensor:
        h_NF, a_NF = _linear_gelu(x_NC, in_FC)
        ctx.save_for_backward(x_NC, in_FC, out_CF, h_NF, a_NF)
        return torch.mm(a_NF, out_CF.mT)

    @staticmethod
    def backward(ctx: Any, dy_NC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x_NC, in_FC, out_CF, h_NF, a_NF = ctx.saved_tensors
        dy_NC = dy_NC.contiguous()
        dh_NF = _times_gelu_slope(dy_NC, out_CF, h_NF)
        return torch.mm(dh_NF, in_FC), torch.mm(dh_NF.mT, x_NC), torch.mm(dy_NC.mT, a_NF)


def mlp(x_BTC: Tensor, in_FC: Tensor, out_CF: Tensor) -> Tensor:
    """gelu(x W_in^T) W_out^T, [B, T, C] bfloat16, weights float32 master copies. Raises ``ValueError`` outside bfloat16 autocast."""
    device, dtype = x_BTC.device.type, torch.bfloat16
    if not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device) != dtype:
        raise ValueError("the MLP of quack-kernels runs under torch.autocast to bfloat16")
    x_NC = x_BTC.to(dtype).flatten(0, 1)
    return _Mlp.apply(x_NC, in_FC.to(dtype), out_CF.to(dtype)).view(x_BTC.shape)


@torch.library.custom_op("fused::quack_linear_cross_entropy", mutates_args=(), device_types="cuda")
def _sum_and_gradients(x_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """As ``fused.linear_cross_entropy``'s."""
    from quack.linear_cross_entropy import scaled_exp_linear_cross_entropy_fwd

    with torch.autocast("cuda", enabled=False):
        rows = x_NC.shape[0]
        losses, dx, dweight_VC = scaled_exp_linear_cross_entropy_fwd(
            x_NC.contiguous(), weight_VC.to(x_NC.dtype), targets_N.contiguous(), chunk, IGNORED_TARGET
        )
        # quack pads rows to its tiles.
        return losses[:rows].sum(), dx[:rows].contiguous(), dweight_VC.to(weight_VC.dtype)


@_sum_and_gradients.register_fake
def _(x_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, chunk: int):  # type: ignore[no-untyped-def]
    return x_NC.new_empty((), dtype=torch.float32), torch.empty_like(x_NC), torch.empty_like(weight_VC)


_sum_and_gradients.register_autograd(scale_gradients, setup_context=keep_gradients)


def linear_cross_entropy(x_NC: Tensor, weight_VC: Tensor, targets_N: Tensor) -> Tensor:
    """``fused.linear_cross_entropy.linear_cross_entropy``; x bfloat16."""
    total = _sum_and_gradients(x_NC, weight_VC, targets_N, CHUNK)[0]
    return total / (targets_N != IGNORED_TARGET).sum()
