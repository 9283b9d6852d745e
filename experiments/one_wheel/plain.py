r"""Plain attention, compiled: S and P rounded to the inputs' dtype, softmax in FP32. A control that is five times as fast as ``standard``.

PYTHONPATH=experiments/one_wheel python train.py configs/fast_failure.py \
    --attention.default.preset external --attention.default.kernel plain:attention
"""

import torch


@torch.compile(dynamic=False)
def _attention(q, k, v, causal: bool, scale: float):
    s = (q @ k.mT).float() * scale
    if causal:
        t = q.shape[-2]
        s = s.masked_fill(torch.ones(t, t, dtype=torch.bool, device=q.device).triu(1), float("-inf"))
    return torch.softmax(s, -1).to(q.dtype) @ v


def attention(q, k, v, causal, scale):
    return _attention(q, k, v, causal, scale)
