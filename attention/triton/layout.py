"""A check of what ``round_blocks.rounded_and_summed`` takes for granted: which thread of a warpgroup holds which elements of Q K^T."""

import functools

import torch
import triton
import triton.language as tl

from ..user_error import UserError
from .codes import FP_FUSION
from .round_blocks import rounded_and_summed

N = 64


@triton.jit
def weighted_sum_kernel(p_q, p_k, p_v, p_o, p_d, N: tl.constexpr):
    """P_bar V and rowsum(P_bar) [N], P_bar = Q K^T, of Q, K and V [N, N]: as the forward kernel forms them from warpgroups' products."""
    o_n = tl.arange(0, N)
    o_block = o_n[:, None] * N + o_n[None, :]
    b_s = tl.dot(tl.load(p_q + o_block), tl.trans(tl.load(p_k + o_block)))
    b_weights, b_d = rounded_and_summed(b_s)
    tl.store(p_o + o_block, tl.dot(b_weights, tl.load(p_v + o_block)))
    tl.store(p_d + o_n, b_d)


@functools.cache
def check_sums(device: torch.device) -> None:
    """Raise ``UserError`` where a GPU's threads hold other elements than ``rounded_and_summed`` sums. Runs once a process and device.

    Small whole numbers stand for P_bar: BF16 holds them, and FP32 their sums. So a sum is right, or has elements of other rows.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise UserError("attention in a CUDA graph: expected a call before the capture, in which sums of P are checked")
    generator = torch.Generator().manual_seed(0)
    p = torch.randint(128, (N, N), generator=generator).to(device, torch.bfloat16)
    identity = torch.eye(N, device=device, dtype=torch.bfloat16)
    o, d = (torch.empty(shape, device=device, dtype=torch.float32) for shape in ((N, N), (N,)))
    weighted_sum_kernel[(1,)](
        p_q=p, p_k=identity, p_v=identity, p_o=o, p_d=d, N=N, num_warps=4, enable_fp_fusion=FP_FUSION
    )
    if not torch.equal(o, p.float()) or not torch.equal(d, p.float().sum(1)):
        raise UserError(
            f"attention on {torch.cuda.get_device_name(device)}: Triton {triton.__version__} lays products out otherwise than its "
            "sums of P expect; use a version that the tests passed with, or backend='flash_reference'"
        )
