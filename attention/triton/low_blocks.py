"""Formats below BF16 around the kernels and in them: emulated, in FP32 operands, so slower than BF16.

What has a whole tensor is rounded outside, by the reference's own code: Q, K, V and dO before a launch, the O of delta after it. P, dP and
dS are rounded inside, block by block (``round_low``), to the bits of ``low_formats.round_low``.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..low_formats import FORMATS
from ..numerics import KERNEL_SCALES, LOW_FORMATS, SITES, Numerics
from ..reference.tiles import Problem, keeps_own_output, make_problem
from ..rounding import storage_dtype

LOW = tl.constexpr(32)
"""The first number of a format below BF16: this + 4 * its place in ``FORMATS`` + that of its scale in ``KERNEL_SCALES``."""
_BITS, _EXPONENTS, _LEAST, _LARGEST, _NAN = (
    tl.constexpr(column)
    for column in zip(*((f.bits, f.exponent, f.least, f.largest, f.nan) for f in FORMATS.values()), strict=True)
)
_LARGEST_EXPONENTS = tl.constexpr(tuple(f.largest_exponent for f in FORMATS.values()))
_E4M3 = tl.constexpr(list(FORMATS).index("e4m3"))
_UNSCALED, _ROW, _MX, _NV = (tl.constexpr(code) for code in range(len(KERNEL_SCALES)))
_OUTSIDE = {
    "inputs": "fp32",
    "queries_and_keys": "fp32",
    "values": "fp32",
    "values_in_dp": "values",
    "output_gradient": "fp32",
}


def low_code(fmt: str) -> int:
    """The number by which kernels know one of ``numerics.LOW_FORMATS``."""
    name, _, scale = fmt.partition("_")
    return LOW.value + len(KERNEL_SCALES) * list(FORMATS).index(name) + KERNEL_SCALES.index(scale)


def emulated(n: Numerics) -> bool:
    """Whether some operand is in a format below BF16, or rounded by a site that kernels do not have."""
    apart = (n.queries_and_keys, n.values, n.values_in_dp) != ("fp32", "fp32", "values")
    return apart or any(getattr(n, name) in LOW_FORMATS for name in SITES)


def operands(
    q: Tensor, k: Tensor, v: Tensor, seed: Tensor, n: Numerics, *settings: Any
) -> tuple[Problem, Tensor, Tensor, Tensor, Tensor, Numerics]:
    """What the kernels get: Q, K and the V of P V and of dO V^T, float32 [B, T, H, D], and ``n`` without what was rounded outside.

    ``n`` is concrete; ``settings`` as ``make_problem`` has them.
    """
    problem = make_problem(q, k, v, n.key(), *settings, seed=seed)
    changes: dict[str, Any] = dict(_OUTSIDE)
    if n.delta_output in LOW_FORMATS:
        changes["delta_output"] = "fp32"
    k, v, v_of_dp = (x[:, :: problem.group].transpose(1, 2) for x in (problem.k, problem.v, problem.v_of_dp))
    return problem, problem.q.transpose(1, 2), k, v, v_of_dp, n.with_sites(changes)


def rounded_output_gradient(problem: Problem, do: Tensor) -> Tensor:
    """dO as the products read it, float32 [B, T, H, D]."""
    return problem.sites.output_gradient(problem.visible_rows(do.transpose(1, 2).float())).transpose(1, 2)


def stored_outputs(problem: Problem, o: Tensor, of_delta: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """O and the O of delta in the dtypes of ``empty_outputs`` for a q of ``dtype``."""
    n = problem.sites.numerics
    keep = keeps_own_output(n)
    if keep and n.delta_output in LOW_FORMATS:
        of_delta = problem.sites.delta_output(of_delta.transpose(1, 2)).transpose(1, 2).contiguous()
    return o.to(storage_dtype(n.output, dtype)), of_delta.to(storage_dtype(n.delta_output, dtype) if keep else dtype)


@triton.jit
def cast(b_x, KIND: tl.constexpr):
    """``low_formats.cast`` to nearest, of any block."""
    LEAST_POWER: tl.constexpr = 2.0 ** _EXPONENTS[KIND]
    b_x = tl.where(b_x != b_x, _NAN[KIND], tl.minimum(tl.maximum(b_x, _LEAST[KIND]), _LARGEST[KIND]))
    b_power = (b_x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    # FP32 has steps of the format's there; the product is exact, fused or not.
    b_far = tl.maximum(b_power, LEAST_POWER) * (1.5 * 2.0 ** (23 - _BITS[KIND]))
    b_y = (b_x + b_far) - b_far
    return tl.where(b_y == 0, b_x * 0.0, b_y)  # -0 stays


@triton.jit
def _scaled(b_x, b_top, KIND: tl.constexpr, SCALE: tl.constexpr):
    """scale * cast(x / scale); ``b_top``: the largest magnitude of what shares a scale, NaN where that is not finite."""
    if SCALE == _MX:
        b_exponent = ((b_top.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127 - _LARGEST_EXPONENTS[KIND]
        b_scale = ((tl.maximum(b_exponent, -126) + 127) << 23).to(tl.float32, bitcast=True)
        b_scale = tl.where(b_top != b_top, b_top, b_scale)
    else:
        b_scale = tl.div_rn(b_top, tl.full(b_top.shape, _LARGEST[KIND], tl.float32))
        if SCALE == _NV:
            b_scale = cast(b_scale, _E4M3)
    b_divisor = tl.broadcast_to(tl.where(b_scale == 0, 1.0, b_scale), b_x.shape)
    return b_scale * cast(tl.div_rn(b_x, b_divisor), KIND)


@triton.jit
def round_low(b_x, FORMAT: tl.constexpr):
    """``low_formats.round_low`` on a float32 block [rows, keys] whose columns begin and end where those of a scale do."""
    KIND: tl.constexpr = (FORMAT - LOW) // 4
    SCALE: tl.constexpr = (FORMAT - LOW) % 4
    if SCALE == _UNSCALED:
        b_y = cast(b_x, KIND)
    elif SCALE == _ROW:
        b_top = tl.max(tl.abs(b_x), 1) + tl.sum(b_x * 0.0, 1)  # the sum is NaN where something is not finite
        b_y = _scaled(b_x, b_top[:, None], KIND, SCALE)
    else:
        ROWS: tl.constexpr = b_x.shape[0]
        KEYS: tl.constexpr = b_x.shape[1]
        SIZE: tl.constexpr = min(KEYS, 32 if SCALE == _MX else 16)
        b_parts = tl.reshape(b_x, [ROWS, KEYS // SIZE, SIZE])
        b_top = tl.max(tl.abs(b_parts), 2) + tl.sum(b_parts * 0.0, 2)
        b_y = tl.reshape(_scaled(b_parts, b_top[:, :, None], KIND, SCALE), [ROWS, KEYS])
    return b_y
