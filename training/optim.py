"""AdamW, or Muon beside AdamW, and the learning rate as a pure function of the step."""

import functools
import math
import re
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from errors import check_types, invalid
from training.muon import GraphedMuon, captured

OptimizerName = Literal["adamw", "muon"]
Schedule = Literal["cosine", "constant"]
Fused = Literal["auto", "on", "off"]

LARGEST = 1e18
"""Largest learning rate, and the like: its square is still a float32, which the optimizer's kernels take."""

# The matrices inside a block; a wrapper's prefix ("module.", "_orig_mod.") may stand before them.
_HIDDEN_MATRIX = re.compile(r"(^|\.)h\.\d+\.(attn|mlp)\.(.+\.)?weight$")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Optimizer, learning-rate schedule and gradient clipping."""

    optimizer: OptimizerName = "adamw"
    """adamw for everything, or muon for the blocks' matrices beside adamw for embeddings, head and 1-D parameters."""
    lr: float = 6e-4
    """Peak learning rate. Muon's updates are scaled to AdamW's RMS, so it uses the same value."""
    min_lr: float = 1e-5
    """Where the cosine ends; unused when the schedule is constant."""
    warmup_steps: int = 2000
    """Steps of linear warm-up before the peak."""
    decay_steps: int = 600_000
    """Step at which the cosine reaches min_lr; unused when the schedule is constant."""
    schedule: Schedule = "cosine"
    """What follows the warm-up."""
    beta1: float = 0.9
    """AdamW: decay of the first moment."""
    beta2: float = 0.95
    """AdamW: decay of the second moment."""
    eps: float = 1e-8
    """AdamW: added to the root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled, on parameters of two or more dimensions only."""
    grad_clip: float = 1.0
    """Largest global gradient norm; 0 switches clipping off."""
    muon_momentum: float = 0.95
    """Muon: Nesterov momentum."""
    fused: Fused = "auto"
    """AdamW's single-kernel update; auto means on CUDA only."""

    def __post_init__(self) -> None:
        check_types("optim", self)
        cosine = self.schedule == "cosine"
        bounds: tuple[tuple[str, bool, str], ...] = (
            ("lr", 0 < self.lr <= LARGEST, f"a number above 0, at most {LARGEST:g}"),
            ("min_lr", 0 <= self.min_lr <= LARGEST, f"a number from 0 to {LARGEST:g}"),
            ("min_lr", not cosine or self.min_lr <= self.lr, f"at most optim.lr = {self.lr}"),
            ("warmup_steps", self.warmup_steps >= 0, "at least 0"),
            (
                "decay_steps",
                not cosine or self.decay_steps > self.warmup_steps,
                f"more than optim.warmup_steps = {self.warmup_steps}",
            ),
            ("beta1", 0 <= self.beta1 < 1, "at least 0 and below 1"),
            ("beta2", 0 <= self.beta2 < 1, "at least 0 and below 1"),
            ("eps", 0 < self.eps <= LARGEST, f"a number above 0, at most {LARGEST:g}"),
            ("weight_decay", 0 <= self.weight_decay <= LARGEST, f"a number from 0 to {LARGEST:g}"),
            ("grad_clip", 0 <= self.grad_clip <= LARGEST, f"a number from 0 (no clipping) to {LARGEST:g}"),
            ("muon_momentum", 0 <= self.muon_momentum < 1, "at least 0 and below 1"),
        )
        for name, fine, expected in bounds:
            if not fine:
                raise invalid(f"optim.{name}", getattr(self, name), expected)


def learning_rate(step: int, config: OptimConfig) -> float:
    """The learning rate of optimizer step ``step`` (0-based), as in nanoGPT's ``get_lr``.

    Warm-up: lr * (step + 1) / (warmup_steps + 1), so that step 0 already moves and step ``warmup_steps`` is the first
    at the peak. Cosine: min_lr + (lr - min_lr) * (1 + cos(pi * x)) / 2, x going from 0 at the end of the warm-up to 1
    at ``decay_steps``; min_lr ever after. Constant: lr.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return config.lr
    if step >= config.decay_steps:
        return config.min_lr
    progress = (step - config.warmup_steps) / (config.decay_steps - config.warmup_steps)
    return config.min_lr + (config.lr - config.min_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))


class MuonWithAdamW(Optimizer):
    """Two optimizers with the interface of one, for the loop, a ``GradScaler`` and checkpoints.

    The pair owns the state and the parameter groups (Muon's first), and both parts work on the same objects; therefore
    torch's own ``state_dict``, ``load_state_dict`` and ``zero_grad`` work for the pair.
    """

    def __init__(self, muon: Muon, adamw: AdamW):
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self.muon, self.adamw = muon, adamw
        self._share()

    def _share(self) -> None:
        split = len(self.muon.param_groups)
        self.muon.param_groups, self.adamw.param_groups = self.param_groups[:split], self.param_groups[split:]
        self.muon.state = self.adamw.state = self.state

    def step(self) -> None:  # type: ignore[override]
        self.muon.step()
        self.adamw.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which makes new objects of state and groups; the two parts then share those."""
        super().load_state_dict(state_dict)
        self._share()


def build_optimizer(model: nn.Module, config: OptimConfig, device: torch.device | str) -> Optimizer:
    """The optimizer of ``config`` over the trainable parameters of ``model`` (tied ones once), which is on ``device``.

    AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101) decays parameters of two or more dimensions only. Muon
    (``torch.optim.Muon``; on CUDA its iterations are replayed as a graph, to the same bits) takes the blocks' matrices, each
    orthogonalized whole (the fused Q, K, V projection is one matrix), with updates scaled by 0.2 * sqrt(max(rows, columns)) to
    AdamW's RMS (Moonshot, arXiv 2502.16982).
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if config.optimizer == "adamw":
        return _adamw([parameter for _, parameter in named], config, device)
    hidden = [parameter for name, parameter in named if parameter.ndim == 2 and _HIDDEN_MATRIX.search(name)]
    taken = {id(parameter) for parameter in hidden}
    adamw = _adamw([parameter for _, parameter in named if id(parameter) not in taken], config, device)
    return MuonWithAdamW(_muon(hidden, config, torch.device(device)), adamw)


def _muon(parameters: list[nn.Parameter], config: OptimConfig, device: torch.device) -> Muon:
    settings: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay, "momentum": config.muon_momentum}
    settings["adjust_lr_fn"] = "match_rms_adamw"
    if device.type != "cuda":
        return Muon(parameters, **settings)
    return GraphedMuon(parameters, record=functools.partial(captured, device), **settings)


def _adamw(parameters: list[nn.Parameter], config: OptimConfig, device: torch.device | str) -> AdamW:
    fused = config.fused == "on" or (config.fused == "auto" and torch.device(device).type == "cuda")
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups, betas = [group for group in groups if group["params"]], (config.beta1, config.beta2)
    # fused=None, unlike False, leaves torch its fast multi-tensor update on CUDA.
    return AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True if fused else None)


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scale all gradients in place so that their global 2-norm is at most ``max_norm``; 0 leaves them untouched.

    Returns the norm before clipping, a scalar on the gradients' device, not synchronized. A non-finite norm is returned
    as it is, and then clipping makes the gradients non-finite as well: look at the norm before taking the step.
    """
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm
