"""QK-clip: after an optimizer step, heads whose attention logits grew past tau have W_q and W_k scaled back.

Kimi K2 (arXiv 2507.20534, section 2.1, MuonClip): gamma_h = min(1, tau / S_max_h), S_max_h being the largest
logit q . k / sqrt(D) that head h saw in the step's forward passes, and W_q, W_k of that head (with their biases) times
sqrt(gamma_h) each. The same input then gives that head gamma_h times the logits; other heads keep theirs to the last bit.

Legend: L layers, H heads, D head width, C width.
"""

import math

import torch
from torch import Tensor

from model import GPT
from training.distributed import all_reduce_max


@torch.no_grad()
def clip_qk(model: GPT, found_inf: Tensor | None = None) -> None:
    """Scale W_q and W_k back to ``model.config.qk_clip_tau``; call on the bare model after the optimizer's step.

    Every process must call it: each saw other sequences, and all clip by the maximum over processes. The maxima are then
    forgotten. Nothing is read back to the CPU. Where ``found_inf``, a scalar on the device, is not 0 the weights stay as they are.
    """
    C, D, tau = model.config.n_embd, model.config.head_width, model.config.qk_clip_tau
    max_logit_LH = all_reduce_max(torch.stack([attention.max_logit_H for attention in model.attentions()]))
    # Maxima that are not finite are left to the nonfinite policy.
    gamma_LH = torch.where(max_logit_LH.isfinite() & (max_logit_LH > tau), tau / max_logit_LH, 1.0)
    if found_inf is not None:
        gamma_LH = torch.where(found_inf > 0, 1.0, gamma_LH)
    for attention, gamma_H in zip(model.attentions(), gamma_LH, strict=True):
        rows = gamma_H.sqrt().repeat_interleave(D).repeat(2)  # [2C]: the rows of W_q, then those of W_k
        attention.c_attn.weight[: 2 * C].mul_(rows[:, None])
        if attention.c_attn.bias is not None:
            attention.c_attn.bias[: 2 * C].mul_(rows)
        attention.max_logit_H.fill_(-math.inf)
