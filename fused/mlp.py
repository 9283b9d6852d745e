"""W_2 gelu(W_1 x) with GELU inside the products that make its input and read its gradient.

    h = x W_1^T, rounded to x's dtype;  a = gelu(h), rounded;  y = a W_2^T
    dh = (dy W_2, rounded) gelu'(h), rounded

The roundings are those of torch's path under autocast; what is saved is a pass that reads h, and one that reads and writes what comes
between product and GELU. Gradients of the weights are float32 as in ``fused.linear``.

Legend: N tokens, C width, F = 4 C.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fused.linear import float32_product


def _triton(device: torch.device) -> Any:
    """The kernels, where the device runs them. Triton is imported here, so that a machine without it runs everything else."""
    if device.type != "cuda":
        return None
    from fused import mlp_triton

    return mlp_triton


@torch.library.custom_op("fused::linear_gelu", mutates_args=())
def linear_gelu(x_NC: Tensor, weight_FC: Tensor) -> tuple[Tensor, Tensor]:
    """(h, a), both [N, F] in x's dtype, which is the weight's."""
    if (kernels := _triton(x_NC.device)) is not None:
        return kernels.launch_linear_gelu(x_NC.contiguous(), weight_FC.contiguous())
    with torch.autocast(x_NC.device.type, enabled=False):
        h_NF = x_NC @ weight_FC.mT
        return h_NF, functional.gelu(h_NF.float()).to(h_NF.dtype)


@linear_gelu.register_fake
def _(x_NC: Tensor, weight_FC: Tensor) -> tuple[Tensor, Tensor]:
    h_NF = x_NC.new_empty((x_NC.shape[0], weight_FC.shape[0]))
    return h_NF, torch.empty_like(h_NF)


@torch.library.custom_op("fused::gelu_gradient", mutates_args=())
def gelu_gradient(dy_NC: Tensor, weight_CF: Tensor, h_NF: Tensor) -> Tensor:
    """dh [N, F] of the module's docstring, ``weight_CF`` being W_2."""
    if (kernels := _triton(dy_NC.device)) is not None:
        return kernels.launch_gelu_gradient(dy_NC.contiguous(), weight_CF.contiguous(), h_NF)
    with torch.autocast(dy_NC.device.type, enabled=False):
        da_NF, h = (dy_NC @ weight_CF).float(), h_NF.float()
        slope_NF = 0.5 * (1 + torch.erf(h * math.sqrt(0.5))) + h * torch.exp(-0.5 * h * h) / math.sqrt(2 * math.pi)
        return (da_NF * slope_NF).to(h_NF.dtype)


@gelu_gradient.register_fake
def _(dy_NC: Tensor, weight_CF: Tensor, h_NF: Tensor) -> Tensor:
    return torch.empty_like(h_NF)


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NC: Tensor, up_FC: Tensor, down_CF: Tensor) -> Tensor:
        up_FC, down_CF = up_FC.to(x_NC.dtype), down_CF.to(x_NC.dtype)
        h_NF, a_NF = linear_gelu(x_NC, up_FC)
        ctx.save_for_backward(x_NC, h_NF, a_NF, up_FC, down_CF)
        return a_NF @ down_CF.mT

    @staticmethod
    def backward(ctx: Any, dy_NC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x_NC, h_NF, a_NF, up_FC, down_CF = ctx.saved_tensors
        dh_NF = gelu_gradient(dy_NC, down_CF, h_NF)
        return dh_NF @ up_FC, float32_product(dh_NF, x_NC), float32_product(dy_NC, a_NF)


def mlp(x_BTC: Tensor, up_FC: Tensor, down_CF: Tensor, dtype: torch.dtype) -> Tensor:
    """W_2 gelu(W_1 x), [B, T, C] in ``dtype`` (16 bits), which float32 weights and x are rounded to; exact GELU, no biases."""
    return _MLP.apply(x_BTC.reshape(-1, x_BTC.shape[-1]).to(dtype), up_FC, down_CF).view(x_BTC.shape)
