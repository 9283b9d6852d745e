"""What happens when a loss or a gradient is not finite: a choice of the config, recorded with step and batch either way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from errors import check_size, invalid

Policy = Literal["stop", "skip", "continue"]
# What was done about a step: a policy, or float16's own remedy. It is the column ``nonfinite`` of the metrics.
Action = Literal["overflow", "stop", "skip", "continue"]


@dataclass(frozen=True, kw_only=True)
class NonFiniteConfig:
    """What to do where loss or gradient is not finite. FP16 overflows of the gradient alone are left to loss scaling, which counts them."""

    policy: Policy = "stop"
    """stop; skip the update; continue as if nothing were (float16 still skips)."""
    max_skips: int = 100
    """skip: after so many in a row, the next one stops the run."""

    def __post_init__(self) -> None:
        if self.policy not in get_args(Policy):
            raise invalid("nonfinite.policy", self.policy, get_args(Policy))
        check_size("nonfinite.max_skips", self.max_skips, 0)


class Withholding:
    """Decides on the device which updates are left out, as a ``GradScaler`` does: nothing is read back.

    An update is left out where loss or gradient norm is not finite; with the policy ``continue``, in float16 only. With ``stop`` all later
    ones are left out too: the host learns some steps later of the bad one, and the weights must be those from before it.
    """

    def __init__(self, policy: Policy, device: torch.device):
        self._policy = policy
        self._stopped = torch.zeros((), dtype=torch.bool, device=device)

    def __call__(self, loss: Tensor, norm: Tensor, loss_scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """(overflow, withheld) of a step, 0.0 or 1.0, float32 scalars on the device; ``loss_scale`` where there is one, as in float16."""
        bad = ~(loss.isfinite() & norm.isfinite())
        overflow = torch.zeros_like(bad)
        if loss_scale is not None:
            # A gradient that is not finite though the scale adds nothing to it is no overflow: halving would go on for ever.
            overflow = bad & loss.isfinite() & (loss_scale >= 1.0)
        if self._policy == "stop":
            self._stopped = self._stopped | (bad & ~overflow)
        withheld = bad | self._stopped
        if self._policy == "continue" and loss_scale is None:
            withheld = torch.zeros_like(bad)
        return overflow.float(), withheld.float()


class NonFiniteGuard:
    """Counts what went wrong in a run; its state travels in checkpoints."""

    def __init__(self, config: NonFiniteConfig):
        self.config = config
        self.overflow_steps = 0
        self.skips_in_a_row = 0

    def decide(self, overflow: bool) -> Action:
        """Count a step that was not finite (``overflow``: merely a float16 gradient) and say what to do about it."""
        if overflow:
            self.overflow_steps += 1
            return "overflow"
        policy, skips = self.config.policy, self.skips_in_a_row
        self.skips_in_a_row = skips + 1 if policy == "skip" else 0
        return "stop" if policy == "skip" and skips >= self.config.max_skips else policy

    def finite(self) -> None:
        """Note a step that was finite."""
        self.skips_in_a_row = 0

    def state(self) -> dict[str, int]:
        """Plain numbers for a checkpoint."""
        return {"overflow_steps": self.overflow_steps, "skips_in_a_row": self.skips_in_a_row}

    def load_state(self, state: dict[str, Any]) -> None:
        """The inverse of ``state``."""
        self.overflow_steps, self.skips_in_a_row = state["overflow_steps"], state["skips_in_a_row"]
