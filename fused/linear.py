"""A linear layer whose weight's gradient leaves its matrix product in float32.

Under autocast torch rounds that gradient to 16 bits, because its operands have 16, and widens it again for the float32 weight: a pass over
it, and a rounding, that nothing needs. The products of 16-bit operands are exact in float32 and summed there either way.

Legend: N tokens, C inputs, O outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


@torch.library.custom_op("fused::float32_product", mutates_args=())
def float32_product(a_NO: Tensor, b_NC: Tensor) -> Tensor:
    """a^T b [O, C], summed and returned in float32."""
    if a_NO.device.type == "cuda" and a_NO.dtype != torch.float32:
        return torch.mm(a_NO.mT, b_NC, out_dtype=torch.float32)
    with torch.autocast(a_NO.device.type, enabled=False):
        return torch.mm(a_NO.mT.float(), b_NC.float())


@float32_product.register_fake
def _(a_NO: Tensor, b_NC: Tensor) -> Tensor:
    return a_NO.new_empty((a_NO.shape[1], b_NC.shape[1]), dtype=torch.float32)


class _Product(torch.autograd.Function):
    """x W^T of a 16-bit x and a float32 W, which is rounded on the way in."""

    @staticmethod
    def forward(ctx: Any, x_NC: Tensor, weight_OC: Tensor) -> Tensor:
        operand_OC = weight_OC.to(x_NC.dtype)
        ctx.save_for_backward(x_NC, operand_OC)
        return x_NC @ operand_OC.mT

    @staticmethod
    def backward(ctx: Any, dy_NO: Tensor) -> tuple[Tensor, Tensor]:
        x_NC, operand_OC = ctx.saved_tensors
        return dy_NO @ operand_OC, float32_product(dy_NO, x_NC)


class Linear(nn.Linear):
    """``nn.Linear``, with the gradient of its weight as the module's docstring says while ``float32_gradient`` is on.

    That concerns autocast only: without it everything is float32 as it is.
    """

    float32_gradient = False

    def forward(self, x: Tensor) -> Tensor:
        """As ``nn.Linear``: [..., C] -> [..., O]."""
        device = x.device.type
        if not (self.float32_gradient and torch.is_autocast_enabled(device)):
            return super().forward(x)
        dtype = torch.get_autocast_dtype(device)
        y_NO = _Product.apply(x.reshape(-1, x.shape[-1]).to(dtype), self.weight)
        y = y_NO.view(*x.shape[:-1], y_NO.shape[-1])
        return y if self.bias is None else y + self.bias.to(dtype)
