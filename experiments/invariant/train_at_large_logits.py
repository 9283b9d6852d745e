"""train.py, with a power of 2 added to every logit: python -m experiments.invariant.train_at_large_logits EXPONENT RECIPE [OPTIONS]

The last feature of every query and key is replaced by one constant, so its product is the same for all pairs. In exact arithmetic a
softmax does not see it. Kernels keep m and L as powers of 2. For logits of 2^21 these are 3.0e6, where FP32 has a spacing of 1/4, or
0.17 in nats; for 2^23 it is 0.69. L is rounded to that, and so is m of the FMA exponent.
Probes record q and k before that, so they report logits without the constant, and with the feature that it replaces.
"""

from __future__ import annotations

import functools
import sys

import torch
from torch import Tensor

import train
from model import CausalSelfAttention

attend = CausalSelfAttention.attend


def at_level(
    self: CausalSelfAttention, q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, rounding_seed: Tensor, *, level: float
) -> Tensor:
    constant = q_BTHD.new_full((*q_BTHD.shape[:3], 1), (level * q_BTHD.shape[-1] ** 0.5) ** 0.5)
    q_BTHD, k_BTHD = (torch.cat((x_BTHD[..., :-1], constant), dim=-1) for x_BTHD in (q_BTHD, k_BTHD))
    return attend(self, q_BTHD, k_BTHD, v_BTHD, rounding_seed)


if __name__ == "__main__":
    level = 2.0 ** int(sys.argv.pop(1))
    CausalSelfAttention.attend = functools.partialmethod(at_level, level=level)  # type: ignore[assignment]
    train.main()
