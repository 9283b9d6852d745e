"""A look-up in a table whose gradient is summed by torch's own kernel, compiled or not.

torch.compile writes the gradient of an embedding as ``index_put``, which in deterministic mode gives all occurrences of one token to one
warp; a comma is every twentieth token of English. torch's kernel for embeddings sums sorted tokens in segments, always in the same order.

Legend: N tokens, V vocabulary, C width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


@torch.library.custom_op("fused::table_gradient", mutates_args=())
def _table_gradient(dx_NC: Tensor, tokens_N: Tensor, rows: int) -> Tensor:
    """[rows, C]: row t is the sum of dx where the token is t."""
    return torch.ops.aten.embedding_dense_backward(dx_NC, tokens_N, rows, -1, False)


@_table_gradient.register_fake
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
        return None, _table_gradient(dx_NC, ctx.saved_tensors[0], ctx.rows)


def lookup(tokens_BT: Tensor, table_VC: Tensor) -> Tensor:
    """Rows of the table, [B, T, C]: ``functional.embedding`` for int64 tokens."""
    return _Lookup.apply(tokens_BT.flatten(), table_VC).view(*tokens_BT.shape, -1)
