"""A look-up in a table whose gradient is summed in a fixed order, fast also where few tokens make up much of a text.

torch's deterministic gradient of a look-up gives all occurrences of one token to one warp, one after the other through memory; a comma is
every twentieth token of English. Here tokens are sorted, blocks of ``ROWS`` sorted occurrences are summed side by side, and what a
run of one token has left in several blocks is added up afterwards, block after block. No atomics.

Legend: N tokens, V vocabulary, C width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# Occurrences a block: a constant, so that sums come out in one order on every device.
ROWS = 32


def _triton(device: torch.device) -> Any:
    """The kernels, where the device runs them. Triton is imported here, so that a machine without it runs everything else."""
    if device.type != "cuda":
        return None
    from fused import embedding_triton

    return embedding_triton


@torch.library.custom_op("fused::table_gradient", mutates_args=())
def table_gradient(dx_NC: Tensor, tokens_N: Tensor, rows: int) -> Tensor:
    """Gradient [rows, C] of a table by the gradients of what was looked up in it: row t is the sum of dx where the token is t."""
    table_VC = dx_NC.new_zeros(rows, dx_NC.shape[1])
    if (kernels := _triton(dx_NC.device)) is not None:
        kernels.add_rows(dx_NC.contiguous(), *torch.sort(tokens_N.to(torch.int32), stable=True), table_VC, ROWS)
        return table_VC
    return table_VC.index_add_(0, tokens_N, dx_NC)


@table_gradient.register_fake
def _(dx_NC: Tensor, tokens_N: Tensor, rows: int) -> Tensor:
    return dx_NC.new_empty((rows, dx_NC.shape[1]))


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens_N: Tensor, table_VC: Tensor) -> Tensor:
        ctx.save_for_backward(tokens_N)
        ctx.rows = table_VC.shape[0]
        return functional.embedding(tokens_N, table_VC)

    @staticmethod
    def backward(ctx: Any, dx_NC: Tensor) -> tuple[None, Tensor]:
        (tokens_N,) = ctx.saved_tensors
        return None, table_gradient(dx_NC, tokens_N, ctx.rows)


def lookup(tokens_BT: Tensor, table_VC: Tensor) -> Tensor:
    """Rows of the table, [B, T, C]: ``functional.embedding`` but for the order in which its gradient is summed."""
    return _Lookup.apply(tokens_BT.flatten(), table_VC).view(*tokens_BT.shape, -1)
