"""FlashAttention-4's kernels for Hopper with the roundings of ``flash`` and ``flash_consistent``."""

from ..packages import add_cutlass

add_cutlass()
