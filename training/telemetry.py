"""What is watched while training: spectral norms, attention statistics and the error of delta, per layer and head, on a fixed batch.

A probe is a pass of its own over the plain model. It adds nothing to the model, writes no gradient, and changes no bit of the training
(what an external kernel draws, ``train.py`` puts back); the main process alone makes it. One line of ``telemetry.jsonl`` a probe, lists
by layer ([L]) or by layer and head ([L][H]); ``COLUMNS`` says what each is. The largest of them go to ``metrics.jsonl`` and W&B
(``summary_columns``).

Legend: L layers, H heads, B batch, T positions, D head width, C width.
"""

import functools
import itertools
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from attention.plan import HeadGroup
from attention.watching.measure import attention_statistics
from data.batches import Batches
from errors import check_size
from model import GPT
from probes.capture import LayerCapture, capture
from probes.delta_error import delta_errors, over_groups, problem_of, row_residuals, summarize
from probes.spectral import attention_norms
from training.metrics import JsonLines
from training.optim import learning_rate
from training.precision import rounding_seed

if TYPE_CHECKING:
    from training.settings import TrainConfig

TELEMETRY_FILE = "telemetry.jsonl"
STATISTICS = ("ties", "max_logit", "min_row_max", "sink", "entropy", "top_1")
"""Of ``attention_statistics``."""
FP16_LOSS_SCALE = 2.0**10
"""dO of a mean loss underflows in FP16 without it."""

COLUMNS = {
    "w_q_norm": "[L] spectral norm of W_Q, by power iteration: never above the true norm (probes/spectral.py)",
    "w_k_norm": "[L] the same of W_K",
    "qk_head_norm": "[L][H] of W_Q^T W_K of the head, without 1 / sqrt(D)",
    "max_logit": "[L][H] largest score, as rounded at the site `scores`",
    "min_row_max": "[L][H] smallest row maximum",
    "entropy": "[L][H] mean entropy of a row, nats",
    "sink": "[L][H] mean probability of key 0, rows 1 and later",
    "top_1": "[L][H] mean largest probability of a row",
    "ties_1e3": "[L][H] share of rows whose maximum is attained more than once to within 1e-3, the paper's tolerance",
    "v_one_signed": "[L][H] share of V's features with one sign at 90 % of the positions or more",
    "delta_error_mean": "[L][H] mean over tokens of delta as the run has it, less delta with an FP32 O; it falls as 1 / tokens",
    "delta_error_se": "[L][H] standard error of that mean, from blocks of 32 tokens",
    "delta_error_rms": "[L][H] root mean square of the error",
    "delta_rms": "[L][H] root mean square of delta with an FP32 O: what the error is an error of",
    "row_residual_mean": "[L][H] mean over rows of r = rowsum(dS) that dQ keeps, 0 in exact arithmetic, in the units of delta",
    "row_residual_rms": "[L][H] root mean square of r: what delta_rms is to be compared with",
}
"""Columns of ``telemetry.jsonl``. Besides them: ``step``; ``batch``, the next to be drawn; ``lr_sum``, the scheduled learning rates of
all steps so far; ``probe_seconds``, wall time; ``delta_units``, n of the standard errors.

An external kernel does not say how it rounds: its ``delta_error_*`` are NaN, its logits unrounded, and its ``row_residual_*`` are measured
from outside (``attention.check.measures.rows_from_outside``)."""


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """How often the probes run, and on what."""

    every: int = 100
    """Steps between two probes; 0 never."""
    sequences: int = 1
    """Sequences of the probe batch: the first of the validation data."""

    def __post_init__(self) -> None:
        check_size("telemetry.every", self.every, 0)
        check_size("telemetry.sequences", self.sequences, 1)


class Telemetry:
    """The probes of one run: its fixed batch, and the file.

    Each probe has stochastic roundings of its own: with the same ones an element is rounded the same way more often than not, probe after
    probe, and errors of delta, summed over probes, look like a bias.

    Raises ``UserError`` where the file is damaged.
    """

    def __init__(self, config: "TrainConfig", model: GPT, batches: Batches, folder: Path, device: torch.device):
        self._config, self._model, self._device = config, model, device
        rates = (learning_rate(step, config.optim) for step in range(config.run.steps))
        self._lr_sums = list(itertools.accumulate(rates, initial=0.0))
        batch = batches.validation_windows(0, config.telemetry.sequences)
        self._tokens_BT, self._targets_BT = (x.to(device) for x in batch)
        self.file = JsonLines(folder / TELEMETRY_FILE)

    def probe(self, step: int, batch: int) -> dict[str, Any]:
        """Measure, write the line and return it; ``batch``: the next to be drawn."""
        began, precision = time.perf_counter(), self._config.precision
        seed = torch.full((), rounding_seed(self._config.run.seed, step, 0), dtype=torch.int64, device=self._device)
        scale = FP16_LOSS_SCALE if precision.dtype == "float16" else 1.0
        autocast = precision.autocast(self._device)
        measured, units = measure(self._model, self._tokens_BT, self._targets_BT, seed, autocast, scale)
        columns = {name: tensor.tolist() for name, tensor in measured.items()}
        record: dict[str, Any] = {"step": step, "batch": batch, "lr_sum": self._lr_sums[step]}
        record |= {"probe_seconds": time.perf_counter() - began, "delta_units": units} | columns
        self.file.append(record)
        return record


@torch.no_grad()
def measure(
    model: GPT,
    tokens_BT: Tensor,
    targets_BT: Tensor,
    seed: Tensor,
    autocast: AbstractContextManager[object],
    loss_scale: float = 1.0,
) -> tuple[dict[str, Tensor], int]:
    """One probe of the plain model: the columns as tensors on its device, and n of the standard errors.

    ``loss_scale`` multiplies the loss before the backward pass; what is reported is divided by it. Nothing waits for the device.
    """
    attentions = model.attentions()
    L, H = len(attentions), model.config.n_head
    w_q_LCC, w_k_LKC = (torch.stack([weight(layer) for layer in range(L)]) for weight in (model.w_q, model.w_k))
    measured = attention_norms(w_q_LCC, w_k_LKC, H)
    layers = capture(model, tokens_BT, targets_BT, autocast=autocast, rounding_seed=seed, loss_scale=loss_scale)
    parts, units = zip(*(_measure_layer(layer, loss_scale) for layer in layers), strict=True)
    return measured | {name: torch.stack([part[name].float() for part in parts]) for name in parts[0]}, units[0]


def _measure_layer(layer: LayerCapture, loss_scale: float) -> tuple[dict[str, Tensor], int]:
    """The columns of one layer, each [H], and n of the standard errors."""
    ties_H, *statistics = over_groups(layer, functools.partial(_statistics, layer))
    delta = delta_errors(layer)
    error = summarize(delta.error_BHT / loss_scale)
    r_BHT = row_residuals(layer) / loss_scale
    negative_HD = (layer.v_BTHD < 0).float().mean(dim=(0, 1))
    measured = {
        "ties_1e3": ties_H,
        **dict(zip(STATISTICS[1:], statistics, strict=True)),
        "v_one_signed": (torch.maximum(negative_HD, 1 - negative_HD) >= 0.9).float().mean(dim=-1),
        "delta_error_mean": error.mean_H,
        "delta_error_se": error.standard_error_H,
        "delta_error_rms": error.rms_H,
        "delta_rms": (delta.high_BHT / loss_scale).square().mean(dim=(0, 2)).sqrt(),
        "row_residual_mean": r_BHT.mean(dim=(0, 2)),
        "row_residual_rms": r_BHT.square().mean(dim=(0, 2)).sqrt(),
    }
    return measured, error.units


def _statistics(layer: LayerCapture, group: HeadGroup) -> Tensor:
    """``STATISTICS`` of a group of heads, with its roundings: [statistic, heads of the group]."""
    problem = problem_of(layer, group)
    q_BTHD, k_BTHD = (x_BHTD.transpose(1, 2) for x_BHTD in (problem.q, problem.k))
    fmt = problem.sites.numerics.scores
    found = attention_statistics(q_BTHD, k_BTHD, scale=layer.scale, softcap=layer.softcap, scores_format=fmt)
    return torch.stack([found[name] for name in STATISTICS])


def summary_columns(record: dict[str, Any]) -> dict[str, float | int]:
    """What ``metrics.jsonl`` and W&B get of a probe: each layer's W_Q norm, and extremes of other columns.

    NaN is the extreme of everything.
    """
    of = {name: np.array(values) for name, values in record.items()}
    return {
        **{f"w_q_norm_{layer}": norm for layer, norm in enumerate(record["w_q_norm"])},
        "w_q_norm_max": of["w_q_norm"].max().item(),
        "w_q_norm_layer": of["w_q_norm"].argmax().item(),
        "w_k_norm_max": of["w_k_norm"].max().item(),
        "qk_norm_max": of["qk_head_norm"].max().item(),
        "max_logit_max": of["max_logit"].max().item(),
        "max_logit_layer": of["max_logit"].max(axis=1).argmax().item(),
        "entropy_min": of["entropy"].min().item(),
        **{
            f"{n}_max": of[n].max().item()
            for n in ("top_1", "ties_1e3", "v_one_signed", "delta_error_rms", "row_residual_rms")
        },
    }
