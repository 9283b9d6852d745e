"""Choosing heads by number without a copy from the host at every call."""

import functools

import torch
from torch import Tensor


@functools.cache  # without a bound: a CUDA graph goes on reading an index at the address that it was captured with
def head_index(heads: tuple[int, ...], device: torch.device) -> Tensor:
    """``heads`` as an int64 index on ``device``, made once.

    ``x[:, :, [0, 2]]`` makes that tensor on the host and copies it each time: the host waits, and no CUDA graph can hold it.
    """
    with torch.inference_mode(False):  # what is made in inference mode, autograd could not keep later
        return torch.tensor(heads, dtype=torch.int64, device=device)
