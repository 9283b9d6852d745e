"""train.py, with 2^21 added to every logit: python -m experiments.invariant.train_at_large_logits RECIPE [OPTIONS]

The last feature of every query and key is replaced by one constant, so its product is the same for all pairs. In exact arithmetic a
softmax does not see it. FP32's spacing at 2^21 log2(e) is 1/4 in powers of 2, 0.17 in nats: L is rounded to that, and so is the product
in the FMA exponent of a row's maximum.
Probes put their own recorder in place of ``attend``, so they report logits without the constant.
"""

from __future__ import annotations

import torch
from torch import Tensor

import train
from model import CausalSelfAttention

LEVEL = 2.0**21
attend = CausalSelfAttention.attend


def at_level(
    self: CausalSelfAttention, q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, rounding_seed: Tensor
) -> Tensor:
    constant = q_BTHD.new_full((*q_BTHD.shape[:3], 1), (LEVEL * q_BTHD.shape[-1] ** 0.5) ** 0.5)
    q_BTHD, k_BTHD = (torch.cat((x_BTHD[..., :-1], constant), dim=-1) for x_BTHD in (q_BTHD, k_BTHD))
    return attend(self, q_BTHD, k_BTHD, v_BTHD, rounding_seed)


if __name__ == "__main__":
    CausalSelfAttention.attend = at_level  # type: ignore[method-assign]
    train.main()
