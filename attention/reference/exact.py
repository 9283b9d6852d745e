"""A guard for code that rounds on purpose: inside it, float32 products are float32 products."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# The setting is the process's. Autograd has a thread for each GPU, so the first one in changes it, and the last one out puts it back.
_LOCK = threading.Lock()
_RESTORE: list[Callable[[], None]] = []
_inside = 0


@contextmanager
def exact_float32(device: torch.device) -> Iterator[None]:
    """Autocast off and TF32 off, restored on leaving: both would move or add rounding sites unseen."""
    global _inside
    with _LOCK:
        if not _inside:
            _RESTORE.append(_without_tf32())
        _inside += 1
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        with _LOCK:
            _inside -= 1
            if not _inside:
                _RESTORE.pop()()


def _without_tf32() -> Callable[[], None]:
    """Switch TF32 off. Returns what puts it back, in the one of torch's two ways that the process uses: it refuses a mix of them."""
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:
        mkldnn: Any = torch.backends.mkldnn
        places = (torch.backends.cuda.matmul, mkldnn.matmul)
        before = [place.fp32_precision for place in places]

        def put(precisions: list[str]) -> None:
            for place, value in zip(places, precisions, strict=True):
                place.fp32_precision = value

        put(["ieee"] * len(places))
        return lambda: put(before)
    torch.set_float32_matmul_precision("highest")
    return lambda: torch.set_float32_matmul_precision(precision)
