"""P_bar as P_bar V reads it, in the reference: what O is divided by (site ``divisor``).

The bits of the draws are in test_rounding.py, their bias in test_bias.py, the kernels in test_kernels.py.
"""

from __future__ import annotations

import torch
from attention_cases import Problem, make, run
from torch import Tensor

from attention import AttentionSpec

CPU = torch.device("cpu")
TILES = ("tile_q=16", "tile_k=16")
WHOLE = ("tile_q=0", "tile_k=0", "exponent=subtract_first")


def o_by(divisor: str, p: Problem, *sites: str) -> Tensor:
    """O in FP32."""
    return run(p, AttentionSpec(sites=(*sites, f"divisor={divisor}", "output=fp32")), seed=3)[0]


def test_o_is_a_mean_by_the_weights_that_are_read() -> None:
    p = make("random", torch.bfloat16, CPU)
    q, k, v = (x.double().transpose(1, 2) for x in (p.q, p.k, p.v))
    s = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(torch.ones(40, 40, dtype=torch.bool).triu(1), -torch.inf)
    p_bar = torch.exp(s - s.amax(dim=-1, keepdim=True)).to(p.q.dtype).double()
    expected = (p_bar @ v / p_bar.sum(dim=-1, keepdim=True)).transpose(1, 2)
    found, plain = (o_by(divisor, p, *WHOLE).double() for divisor in ("rounded", "unrounded"))
    assert (found - expected).norm() / expected.norm() < 1e-5  # but for P_bar at a boundary of BF16
    assert (plain - expected).norm() / expected.norm() > 1e-4


def test_the_sum_is_of_what_was_drawn() -> None:
    """O is V where V is the same at all keys."""
    p = make("random", torch.bfloat16, CPU)
    p.v = p.v[:, :1].expand_as(p.v).contiguous()
    drawn = o_by("rounded", p, *TILES, "probabilities_rounding=stochastic")
    assert (drawn - p.v.float()).abs().max() < 2.0**-20 * p.v.float().abs().max()
