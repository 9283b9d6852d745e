"""torch's scaled_dot_product_attention with the kernel pinned by name: never "auto", which picks another one when shapes change.

Legend: B batch, H heads, T sequence, D head dim.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..operators import TORCHS

KERNELS = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa_math": SDPBackend.MATH,
}


def _sdpa(kernel: SDPBackend, q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, scale: float, causal: bool) -> Tensor:
    # Fused kernels take a last stride of 1 alone. ``contiguous`` would leave another one where the head dim is 1.
    dense = (
        x if x.stride(3) == 1 else x.clone(memory_format=torch.contiguous_format) for x in (q_BTHD, k_BTHD, v_BTHD)
    )
    q, k, v = (x.transpose(1, 2) for x in dense)
    with sdpa_kernel(kernel):
        grouped = bool(q.shape[1] != k.shape[1])  # a tensor while torch.jit traces
        return TORCHS(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped).transpose(1, 2)


# The math kernel is ordinary PyTorch that a compiler would fuse, moving its roundings; the others are opaque by nature.
_sdpa_uncompiled = torch.compiler.disable(_sdpa)


def run(name: str, q: Tensor, k: Tensor, v: Tensor, numerics: str, *, scale: float, causal: bool, **_: Any) -> Tensor:
    """The backend of that name on [B, T, H, D]; numerics and other settings are given, too, and ignored."""
    call = _sdpa_uncompiled if name == "sdpa_math" else _sdpa
    return call(KERNELS[name], q, k, v, scale, causal)
