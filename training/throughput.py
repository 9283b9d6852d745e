"""Tokens a second, model FLOPs utilization, and what the GPU does for them."""

import importlib.util
import re
from typing import Any

import torch

# Dense BF16 tensor-core peaks in FLOP/s, from the vendor's datasheets.
PEAK_FLOPS = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100": 989.4e12,
    "GH200": 989.4e12,
    "H200": 989.4e12,
    "B200": 2250e12,
}
_OTHER_PEAK = re.compile(r"\b(NVL|MIG)\b")
"""Slower variants of these cards, and parts of a card."""


def peak_flops(device: torch.device) -> float | None:
    """Peak FLOP/s of one device, the datasheet's; None for one that is not known by name."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    if _OTHER_PEAK.search(name):
        return None
    return next((peak for known, peak in PEAK_FLOPS.items() if re.search(rf"\b{known}\b", name)), None)


def mfu(tokens_per_second: float, flops_per_token: int, world_size: int, peak: float | None) -> float | None:
    """Model FLOPs utilization (PaLM, arXiv 2204.02311, appendix B): useful FLOP/s over peak FLOP/s of all devices."""
    return None if peak is None else tokens_per_second * flops_per_token / (world_size * peak)


def clock_and_power() -> dict[str, float]:
    """``sm_mhz`` and ``watts`` of the current GPU, of its last sample (up to a second); nothing without a GPU or nvidia-ml-py."""
    if not torch.cuda.is_available() or importlib.util.find_spec("pynvml") is None:
        return {}
    return {"sm_mhz": torch.cuda.clock_rate(), "watts": torch.cuda.power_draw() / 1000}


def explain_clock_and_power(rows: list[dict[str, Any]]) -> str:
    """One line: the range over the rows that have what ``clock_and_power`` says."""
    clocks, powers = ([row[name] for row in rows if name in row] for name in ("sm_mhz", "watts"))
    if not clocks:
        return "SM clock, power: not measured: nvidia-ml-py is not installed, or there is no GPU"
    return f"SM clock, power: {min(clocks):.0f} to {max(clocks):.0f} MHz, {min(powers):.0f} to {max(powers):.0f} W"


def explain(flops_per_token: int, peak: float | None) -> str:
    rate = "unknown for this device" if peak is None else f"{peak / 1e12:g} TFLOP/s"
    return f"mfu = tokens/s x {flops_per_token / 1e6:.1f} MFLOP (6 N + 12 L C T) / (processes x peak); peak {rate}"
