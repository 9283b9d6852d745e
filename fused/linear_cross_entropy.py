"""The output head and its cross-entropy in one operator, a block of tokens at a time, gradients included.

Autograd keeps the logits [N, V] of the whole batch for the backward pass (3.3 GB in BF16 at 32,768 tokens of GPT-2), and reads and
writes them once more a pass. Here the logits of a block become their own gradient in place, which is multiplied into the
gradients of x and of W at once; the backward pass only scales those two (the arrangement of Liger-Kernel, arXiv 2410.10989).

For each row x of x_NC with target t, w_v the rows of W, and lse = log sum_v exp(s_v):

    s_v = x . w_v                              rounded to x's dtype, as autocast leaves it
    loss = lse - s_t
    dloss/ds_v = exp(s_v - lse) - [v = t]      rounded to x's dtype

What differs from autograd's path: the gradient of the logits is rounded before it is divided by the number of targets, not after
(the same bits where that number is a power of two); the gradient of W is summed in float32 over blocks and never rounded to x's
dtype, as autocast's product does. Nothing is summed by atomics: the same bits every time.

Legend: N tokens, C width, V vocabulary.
"""

import torch
from torch import Tensor

IGNORED_TARGET = -1
CHUNK = 32_768
"""Tokens whose logits exist at once, and are the operator's memory beside the gradients: 3.3 GB in BF16 for GPT-2."""


@torch.library.custom_op("fused::linear_cross_entropy", mutates_args=())
def _sum_and_gradients(x_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """(sum of the losses [], its gradients by x [N, C] in x's dtype and by W [V, C] in W's)."""
    with torch.autocast(x_NC.device.type, enabled=False):
        operand_VC, targets_N = weight_VC.to(x_NC.dtype), targets_N.contiguous()
        dx_NC = torch.empty_like(x_NC)
        dweight_VC: Tensor | None = None
        loss_N = torch.empty(x_NC.shape[0], dtype=torch.float32, device=x_NC.device)
        buffer = torch.empty(min(chunk, x_NC.shape[0]), weight_VC.shape[0], dtype=x_NC.dtype, device=x_NC.device)
        for rows in (slice(start, start + chunk) for start in range(0, x_NC.shape[0], chunk)):
            x = x_NC[rows]
            logits = torch.mm(x, operand_VC.mT, out=buffer[: x.shape[0]])
            _softmax(x.device)(logits, targets_N[rows], loss_N[rows])
            torch.mm(logits, operand_VC, out=dx_NC[rows])
            part = _float32_product(logits.mT, x)
            dweight_VC = part if dweight_VC is None else dweight_VC.add_(part)
        assert dweight_VC is not None
        return loss_N.sum(), dx_NC, dweight_VC.to(weight_VC.dtype)


@_sum_and_gradients.register_fake
def _(x_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, chunk: int):  # type: ignore[no-untyped-def]
    return x_NC.new_empty((), dtype=torch.float32), torch.empty_like(x_NC), torch.empty_like(weight_VC)


def _keep_gradients(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])


def _scale_gradients(ctx, dloss, *_):  # type: ignore[no-untyped-def]
    dx_NC, dweight_VC = ctx.saved_tensors
    # In float32: a product of dtypes would round dloss, a scalar, to that of dx first.
    return (dloss * dx_NC.float()).to(dx_NC.dtype), dloss * dweight_VC, None, None


_sum_and_gradients.register_autograd(_scale_gradients, setup_context=_keep_gradients)


def _float32_product(a: Tensor, b: Tensor) -> Tensor:
    """a b, accumulated and returned in float32: exact products of 16-bit operands."""
    if a.device.type == "cuda" and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a.float(), b.float())


def _softmax(device: torch.device):  # type: ignore[no-untyped-def]
    if device.type != "cuda":
        return softmax_rows
    # Triton is imported where its kernel is used, so that a machine without it runs everything else.
    from fused.softmax_triton import softmax_rows_triton

    return softmax_rows_triton


def softmax_rows(logits_NV: Tensor, targets_N: Tensor, loss_N: Tensor) -> None:
    """Write the loss of every row into ``loss_N`` and turn its logits into their gradient, in place; ignored rows become 0.

    ``loss_N`` float32; the equations on top of the module, all in float32 but for the one rounding at the end.
    """
    s_NV = logits_NV.float()
    lse_N = torch.logsumexp(s_NV, dim=-1)
    counted_N = targets_N != IGNORED_TARGET
    target_N1 = targets_N.clamp(min=0)[:, None]
    losses_N = lse_N - s_NV.gather(1, target_N1)[:, 0]
    loss_N.copy_(torch.where(counted_N, losses_N, 0.0))
    ds_NV = torch.exp(s_NV - lse_N[:, None])
    ds_NV.scatter_add_(1, target_N1, torch.full_like(target_N1, -1, dtype=torch.float32))
    logits_NV.copy_(torch.where(counted_N[:, None], ds_NV, 0.0))


def linear_cross_entropy(x_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, *, chunk: int = CHUNK) -> Tensor:
    """Mean loss of the equations on top, float32 [], over targets other than -1 (NaN where there is none).

    Args:
        x_NC: what the head reads, already in the dtype of its products (bfloat16 under autocast).
        weight_VC: the head's weight, float32 master copy; rounded to x's dtype inside. Its gradient is float32.
        targets_N: int64, -1 for none.
        chunk: tokens whose logits exist at once.
    """
    total = _sum_and_gradients(x_NC, weight_VC, targets_N, chunk)[0]
    return total / (targets_N != IGNORED_TARGET).sum()
