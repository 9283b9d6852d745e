"""What happens when a loss or a gradient is not finite: a choice of the config, recorded with the step either way."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from errors import check_size

Policy = Literal["stop", "skip"]
# What was done about a step: a policy, or float16's own remedy. It is the column ``nonfinite`` of the metrics.
Action = Literal["overflow", "stop", "skip"]


@dataclass(frozen=True, kw_only=True)
class NonFiniteConfig:
    """What to do where loss or gradient is not finite. FP16 overflows of the gradient alone are left to loss scaling, which counts them."""

    policy: Policy = "stop"
    """stop; or skip the update."""
    max_skips: int = 100
    """skip: after so many in a row, the next one stops the run."""

    def __post_init__(self) -> None:
        check_size("nonfinite.max_skips", self.max_skips, 0)


class FoundInf:
    """Decides on the device which updates are skipped, as a ``GradScaler`` does: nothing is read back.

    An update is skipped where loss or gradient norm is not finite. With ``stop`` all later updates are skipped too: the host learns of the
    bad step some steps later, and the weights must be those from before it.
    """

    def __init__(self, policy: Policy, device: torch.device):
        self._policy = policy
        self._stopped = torch.zeros((), dtype=torch.bool, device=device)

    def __call__(self, loss: Tensor, norm: Tensor, loss_scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """(overflow, found_inf) of a step, 0.0 or 1.0, float32 scalars on the device; ``loss_scale`` where there is one, as in float16.

        overflow: the gradient alone is not finite, and float16's loss scale is to blame. found_inf: the update is to be skipped.
        """
        bad = ~(loss.isfinite() & norm.isfinite())
        overflow = torch.zeros_like(bad)
        if loss_scale is not None:
            # A gradient that is not finite though the scale adds nothing to it is no overflow: halving would go on for ever.
            overflow = bad & loss.isfinite() & (loss_scale >= 1.0)
        if self._policy == "stop":
            self._stopped = self._stopped | (bad & ~overflow)
        return overflow.float(), (bad | self._stopped).float()


def step_unless(found_inf: Tensor, optimizer: Optimizer) -> None:
    """One update of ``optimizer`` unless ``found_inf``, a scalar on its device, is 1.0.

    A fused AdamW reads it on the device, as it does for a ``GradScaler``. For any other the host has to wait, as a ``GradScaler`` does.
    """
    if all(group.get("fused") for group in optimizer.param_groups):
        optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        optimizer.step()
    elif not found_inf.item():
        optimizer.step()


class NonFiniteGuard:
    """Counts the steps of a run that were not finite; ``saved``: its ``state`` in the checkpoint that the run goes on from."""

    def __init__(self, config: NonFiniteConfig, saved: dict[str, Any]):
        self.config = config
        self.overflow_steps, self.skips_in_a_row = (saved.get(n, 0) for n in ("overflow_steps", "skips_in_a_row"))

    def decide(self, overflow: bool) -> Action:
        """Count a step that was not finite (``overflow``: merely a float16 gradient); what is done about it."""
        if overflow:
            self.overflow_steps += 1
            return "overflow"
        self.skips_in_a_row += 1
        return "stop" if self.skips_in_a_row > self.config.max_skips else self.config.policy

    def finite(self) -> None:
        self.skips_in_a_row = 0

    def state(self) -> dict[str, int]:
        return {"overflow_steps": self.overflow_steps, "skips_in_a_row": self.skips_in_a_row}
