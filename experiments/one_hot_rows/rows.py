"""How far is O from V in rows that look at one key? python -m experiments.one_hot_rows.rows [PRESET ...]

O of such a row is one V, exactly, whatever the size of the logits. Keys are multiples of the unit vectors, so that Q K^T has no
rounding and every logit but one of a row is 0, too far below for FP32.
Printed: the root mean square error of delta = rowsum(dO * O) over that of delta, and the share of rows whose O is not V; then, of the
first preset, the mean over rows of (O - V) V / V^2, by how much O is too large, with its standard error.
By the PyTorch reference on a CPU; BF16, [B, T, H, D] = [128, 64, 1, 64].
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

import attention
from attention import AttentionConfig, AttentionSpec

B, T, H, D = 128, 64, 1, 64
SIZES = [2.0**exponent for exponent in range(10, 22)]
USUAL = ("flash", "flash_subtract_first", "flash_separate_multiply", "flash_fp32_pv", "flash_stochastic_o")


def make(largest: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, dO and the O of rows whose logits lie between half of ``largest`` and all of it; V and dO are normal."""
    generator = torch.Generator().manual_seed(0)
    key_BTH = torch.stack([torch.randint(t + 1, (B, H), generator=generator) for t in range(T)], dim=1)
    length = 2.0 ** round(math.log2(math.sqrt(largest * math.sqrt(D))))
    k_BTHD = torch.eye(D)[None, :, None].expand(B, T, H, D) * length
    logit_BTH = largest * (0.5 + 0.5 * torch.rand((B, T, H), generator=generator))
    q_BTHD = torch.nn.functional.one_hot(key_BTH, D) * (logit_BTH * math.sqrt(D) / length)[..., None]
    v_BTHD, do_BTHD = (torch.randn((B, T, H, D), generator=generator) for _ in range(2))
    q, k, v, do = (x.to(torch.bfloat16) for x in (q_BTHD, k_BTHD, v_BTHD, do_BTHD))
    return q, k, v, do, v.gather(1, key_BTH[..., None].expand(B, T, H, D))


def measure(preset: str, largest: float) -> tuple[float, float, float, float]:
    """(error of delta relative to delta, share of wrong rows, mean relative error of O with its sign, its standard error)."""
    q, k, v, do, exact = make(largest)
    (plan,) = AttentionConfig(default=AttentionSpec(preset=preset), flash_backend="flash_reference").resolve(1, H)
    with torch.no_grad():
        o = attention.run(q, k, v, plan, rounding_seed=torch.zeros((), dtype=torch.int64))
    off_BTHD = o.double() - exact.double()
    error, delta = ((do.double() * x).sum(dim=-1).square().mean().sqrt() for x in (off_BTHD, exact.double()))
    too_large = (off_BTHD * exact).sum(dim=-1) / exact.double().square().sum(dim=-1)
    mean, standard_error = too_large.mean(), too_large.std() / math.sqrt(too_large.numel())
    wrong = (off_BTHD != 0).any(dim=-1).double().mean()
    return (error / delta).item(), wrong.item(), mean.item(), standard_error.item()


def main(presets: Sequence[str]) -> None:
    columns = [*presets, f"O of {presets[0]} too large by"]
    print("| logits up to | " + " | ".join(columns) + " |\n| ---: |" + " ---: |" * len(columns))
    for size in SIZES:
        found = [measure(preset, size) for preset in presets]
        cells = [f"{error:.1e} ({wrong:.2f})" for error, wrong, _, _ in found]
        cells.append(f"{found[0][2]:.2e} ± {found[0][3]:.1e}")
        print(f"| {size:,.0f} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main(sys.argv[1:] or USUAL)
