"""Tokens a second and model FLOPs utilization."""

from __future__ import annotations

import torch

# Dense BF16 tensor-core peaks in FLOP/s, from the vendor's datasheets.
PEAK_FLOPS = {"A100": 312e12, "H100": 989.4e12, "H200": 989.4e12, "B200": 2250e12}


def peak_flops(device: torch.device, configured_tflops: float) -> float | None:
    """Peak FLOP/s of one device: the configured one, else the datasheet's for a GPU known by name, else None."""
    if configured_tflops:
        return configured_tflops * 1e12
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in PEAK_FLOPS.items() if known in name), None)


def mfu(tokens_per_second: float, flops_per_token: int, world_size: int, peak: float | None) -> float | None:
    """Model FLOPs utilization (PaLM, arXiv 2204.02311, appendix B): useful FLOP/s over peak FLOP/s of all devices."""
    return None if peak is None else tokens_per_second * flops_per_token / (world_size * peak)


def explain(flops_per_token: int, peak: float | None) -> str:
    """The formula in words, printed once at the start of a run."""
    rate = "unknown for this device (set run.peak_tflops)" if peak is None else f"{peak / 1e12:g} TFLOP/s"
    return (
        f"mfu = tokens/s x {flops_per_token / 1e6:.1f} MFLOP a token (6 N + 12 L C T) / (processes x peak); peak {rate}"
    )
