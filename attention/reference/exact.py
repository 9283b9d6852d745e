"""A guard for code that rounds on purpose: inside it, float32 products are float32 products."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def exact_float32(device: torch.device) -> Iterator[None]:
    """Autocast off and TF32 off, restored on leaving: both would move or add rounding sites unseen."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
