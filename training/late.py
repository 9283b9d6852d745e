"""Values read one step late: numbers on their way to the host, and an optimiser step that the device withholds by itself."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from training.nonfinite import Policy


class Reading:
    """A small tensor on its way to the host: ``read`` waits for its copy, not for what was launched after it."""

    def __init__(self, values: Tensor):
        self._copied: torch.cuda.Event | None = None
        self._values = values.detach()
        if values.device.type == "cuda":
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> list[float]:
        """The values, once they are here."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values.tolist()


class DeviceGuard:
    """Withholds the update of a step that is not finite, on the device, as a ``GradScaler`` does: by the fused AdamW's ``found_inf``.

    With the policy ``stop`` all later updates are withheld too: the host learns of the bad step after it has launched the next
    one, and the weights must be those from before. With ``continue`` none is withheld.
    """

    def __init__(self, policy: Policy, device: torch.device):
        self._policy = policy
        self._withhold = torch.zeros((), device=device)

    def step(self, optimizer: Optimizer, loss: Tensor, norm: Tensor) -> None:
        """One update, if ``loss`` and ``norm`` (scalars on the device) are finite; nothing is read back."""
        if self._policy != "continue":
            bad = 1.0 - (loss.isfinite() & norm.isfinite()).float()
            self._withhold = torch.maximum(self._withhold, bad) if self._policy == "stop" else bad
            optimizer.found_inf = self._withhold  # type: ignore[attr-defined]
        optimizer.step()
