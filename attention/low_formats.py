"""Casts to E4M3, E5M2, E2M1 and INT8, with or without a scale. Values stay in float32 tensors, as in ``rounding.py``.

Without a scale a cast gives the bits of the hardware's: PTX's ``cvt.rn.satfinite`` and, of INT8, ``cvt.rni.sat``. Too large values and
infinities become the largest one; a NaN becomes 6 in E2M1 and 0 in INT8, which have none.

A name is FORMAT[_SCALE][_stochastic] (``numerics.LOW_FORMATS``). A scaled value is scale * cast(x / scale), in FP32, where scale is, with a
the largest magnitude and c the format's:

- ``tensor``, ``head``, ``row``: a / c of the tensor, of the last two dimensions, of the last one
- ``tile``: the same of ``tile_k`` rows, which ``reference.tiles.Sites`` gives one by one
- ``mx``: 2^(floor(log2 a) - floor(log2 c)) of 32 neighbors in the last dimension (OCP Microscaling 1.0); what is above c scale saturates
- ``nv``, of E2M1 alone: a / c of 16 neighbors, cast to E4M3; there is no second scale of the tensor, so that up to 2^-10 c everything
  is 0; what is above 448 c saturates
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Format(NamedTuple):
    bits: int
    """Explicit mantissa bits."""
    exponent: int
    """Exponent of the smallest normal number. In INT8 all steps are 1."""
    least: float
    largest: float
    nan: float = math.nan

    @property
    def largest_exponent(self) -> int:
        return math.floor(math.log2(self.largest))


FORMATS = {
    "e4m3": Format(3, -6, -448.0, 448.0),
    "e5m2": Format(2, -14, -57344.0, 57344.0),
    "e2m1": Format(1, 0, -6.0, 6.0, nan=6.0),
    "int8": Format(6, 6, -128.0, 127.0, nan=0.0),
}
_BLOCK = {"mx": 32, "nv": 16}


def cast(x: Tensor, name: str, random_bits: Tensor | None = None) -> Tensor:
    """``x`` (float32, any shape) in an unscaled format: to nearest, ties to even, or, with ``rounding.random_bits`` of x's shape, up with
    the probability of the part cut off."""
    f = FORMATS[name]
    x = torch.where(x.isnan(), f.nan, x.clamp(f.least, f.largest))
    step = _power_of_two(_exponent(x).clamp(min=f.exponent) - f.bits)
    steps = x / step
    return step * (steps.round() if random_bits is None else (steps + (random_bits + 0.5) / 2**16).floor())


def round_low(x: Tensor, name: str, random_bits: Tensor | None = None) -> Tensor:
    """``x`` (float32 [..., rows, columns]) in one of ``numerics.LOW_FORMATS``; ``random_bits`` as ``cast`` takes them."""
    fmt, *scale = name.removesuffix("_stochastic").split("_")
    if not scale:
        return cast(x, fmt, random_bits)
    if scale[0] not in _BLOCK:
        dims = {"tensor": tuple(range(x.ndim)), "head": (-2, -1), "tile": (-2, -1), "row": (-1,)}[scale[0]]
        return _scaled(x, fmt, scale[0], dims, random_bits)
    width = x.shape[-1]
    blocks = [None if y is None else _blocks(y, _BLOCK[scale[0]]) for y in (x, random_bits)]
    assert blocks[0] is not None
    return _scaled(blocks[0], fmt, scale[0], (-1,), blocks[1]).flatten(-2)[..., :width]


def _scaled(x: Tensor, fmt: str, kind: str, dims: tuple[int, ...], random_bits: Tensor | None) -> Tensor:
    largest, c = x.abs().amax(dim=dims, keepdim=True), FORMATS[fmt].largest
    # On a GPU torch divides by a number as a product with 1 / c, which is not the quotient.
    scale = largest / torch.full_like(largest, c)
    if kind == "mx":
        scale = _power_of_two((_exponent(largest) - FORMATS[fmt].largest_exponent).clamp(min=-126))
    elif kind == "nv":
        scale = cast(scale, "e4m3")
    scale = scale.where(largest.isfinite(), math.nan)
    return scale * cast(x / scale.masked_fill(scale == 0, 1.0), fmt, random_bits)


def _blocks(x: Tensor, size: int) -> Tensor:
    return functional.pad(x, (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))


def _exponent(x: Tensor) -> Tensor:
    """floor(log2 |x|) as int32; of 0 and FP32's subnormals -127."""
    return ((x.contiguous().view(torch.int32) >> 23) & 0xFF) - 127


def _power_of_two(exponent: Tensor) -> Tensor:
    return ((exponent + 127) << 23).view(torch.float32)
