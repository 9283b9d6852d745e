"""training/throughput.py: which peak a GPU has by its name."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from training.throughput import peak_flops


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GB200", None),
    ],
)
def test_a_peak_is_that_of_the_card_or_none(name: str, tflops: float | None) -> None:
    with mock.patch("torch.cuda.get_device_name", return_value=name):
        assert peak_flops(torch.device("cuda"), 0.0) == (None if tflops is None else tflops * 1e12)
        assert peak_flops(torch.device("cuda"), 3.0) == 3e12
