"""The residual sum and the layer norm behind it in one operator, in both directions.

    x' = x + y                                    float32; y is what a branch returned, in the dtype of its products
    n = (x' - mean) / sqrt(var + eps) * w + b     float32, rounded once to the dtype that the next product reads

The backward pass reads x' again in place of a normalised copy that autograd's path stores for it, adds the gradient that reaches x'
along the residual stream, and sums the gradients of w and b over the rows on the way: partial sums of blocks of rows, then a sum
over those, in a fixed order, so that the same bits come every time.

Legend: N tokens, C width, P blocks of rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

EPS = 1e-5


def _triton(device: torch.device) -> Any:
    """The kernels, where the device runs them. Triton is imported here, so that a machine without it runs everything else."""
    if device.type != "cuda":
        return None
    from fused import add_norm_triton

    return add_norm_triton


@torch.library.custom_op("fused::add_norm", mutates_args=())
def _forward(
    x_NC: Tensor, y_NC: Tensor | None, weight_C: Tensor, bias_C: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x' [N, C] float32, n [N, C] of ``dtype``, mean [N], 1 / deviation [N])."""
    if (kernels := _triton(x_NC.device)) is not None:
        return kernels.launch_forward(x_NC, y_NC, weight_C, bias_C, dtype, EPS)
    with torch.autocast(x_NC.device.type, enabled=False):
        sum_NC = x_NC.clone() if y_NC is None else x_NC + y_NC
        variance_N1, mean_N1 = torch.var_mean(sum_NC, -1, correction=0, keepdim=True)
        inverse_N1 = torch.rsqrt(variance_N1 + EPS)
        n_NC = (sum_NC - mean_N1) * inverse_N1 * weight_C
        n_NC = n_NC if bias_C is None else n_NC + bias_C
        return sum_NC, n_NC.to(dtype), mean_N1[:, 0].clone(), inverse_N1[:, 0].clone()


@_forward.register_fake
def _(x_NC: Tensor, y_NC: Tensor | None, weight_C: Tensor, bias_C: Tensor | None, dtype: torch.dtype):  # type: ignore[no-untyped-def]
    row_N = x_NC.new_empty(x_NC.shape[0])
    return torch.empty_like(x_NC), torch.empty_like(x_NC, dtype=dtype), row_N, torch.empty_like(row_N)


@torch.library.custom_op("fused::add_norm_backward", mutates_args=())
def _backward(
    dn_NC: Tensor, dsum_NC: Tensor | None, sum_NC: Tensor, mean_N: Tensor, inverse_N: Tensor, weight_C: Tensor, bias: bool,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dx [N, C] float32, dy of ``dtype`` or an empty tensor where there is no y, dw [C], db [C] or an empty tensor)."""
    if (kernels := _triton(dn_NC.device)) is not None:
        return kernels.launch_backward(dn_NC, dsum_NC, sum_NC, mean_N, inverse_N, weight_C, bias, dtype)
    with torch.autocast(dn_NC.device.type, enabled=False):
        dn_NC = dn_NC.float()
        normed_NC = (sum_NC - mean_N[:, None]) * inverse_N[:, None]
        dnormed_NC = dn_NC * weight_C
        means_N1 = dnormed_NC.mean(-1, keepdim=True), (dnormed_NC * normed_NC).mean(-1, keepdim=True)
        dx_NC = (dnormed_NC - means_N1[0] - normed_NC * means_N1[1]) * inverse_N[:, None]
        dx_NC = dx_NC if dsum_NC is None else dsum_NC + dx_NC
        dy_NC = dx_NC.new_empty(0) if dtype is None else dx_NC.to(dtype, copy=True)
        return dx_NC, dy_NC, (dn_NC * normed_NC).sum(0), dn_NC.sum(0) if bias else dn_NC.new_empty(0)


@_backward.register_fake
def _(dn_NC, dsum_NC, sum_NC, mean_N, inverse_N, weight_C, bias, dtype):  # type: ignore[no-untyped-def]
    dy_NC = sum_NC.new_empty(0) if dtype is None else torch.empty_like(sum_NC, dtype=dtype)
    return torch.empty_like(sum_NC), dy_NC, torch.empty_like(weight_C), weight_C.new_empty(len(weight_C) if bias else 0)


def _setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
    _, y_NC, weight_C, bias_C, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(output[0], *output[2:], weight_C)
    ctx.branch, ctx.bias = None if y_NC is None else y_NC.dtype, bias_C is not None


def _autograd_backward(ctx, dsum_NC, dn_NC, *_):  # type: ignore[no-untyped-def]
    sum_NC, mean_N, inverse_N, weight_C = ctx.saved_tensors
    if dn_NC is None:
        raise NotImplementedError("add_norm: nothing reads n")
    dx, dy, dw, db = _backward(dn_NC, dsum_NC, sum_NC, mean_N, inverse_N, weight_C, ctx.bias, ctx.branch)
    return dx, dy if ctx.branch is not None else None, dw, db if ctx.bias else None, None


_forward.register_autograd(_autograd_backward, setup_context=_setup_context)


def add_norm(x_BTC: Tensor, y_BTC: Tensor | None, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """(x + y, its layer norm) of any leading shape: the sum float32, the norm in autocast's dtype where that is on, else float32.

    ``x_BTC`` float32; ``y_BTC`` of any floating dtype, or None for x alone; ``norm`` over the last dimension.
    """
    device, C = x_BTC.device.type, x_BTC.shape[-1]
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32
    y_NC = None if y_BTC is None else y_BTC.reshape(-1, C)
    sum_NC, n_NC, _, _ = _forward(x_BTC.reshape(-1, C), y_NC, norm.weight, norm.bias, dtype)
    return sum_NC.view(x_BTC.shape), n_NC.view(x_BTC.shape)
