"""What is watched while training. A probe reads weights; it adds nothing to the model and changes no bit of the training."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from analysis.spectral import spectral_norm
from errors import invalid
from model import GPT


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """How often the probes run."""

    every: int = 100
    """Steps between two measurements of the spectral norms of W_Q; 0 never."""

    def __post_init__(self) -> None:
        if self.every < 0:
            raise invalid("telemetry.every", self.every, "0 (never) or a positive number of steps")


@torch.no_grad()
def probe(model: GPT) -> dict[str, float]:
    """Largest singular value of each layer's W_Q [C, C] (the paper's Fig. 4 watches layer index 1), and the largest of all."""
    norms_L = spectral_norm(torch.stack([model.w_q(layer) for layer in range(model.config.n_layer)]))
    each = {f"w_q_norm_{layer}": norm for layer, norm in enumerate(norms_L.tolist())}
    return each | {"w_q_norm_max": norms_L.max().item()}  # torch's maximum: NaN stays NaN
