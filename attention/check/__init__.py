"""A crash test for attention kernels: ``python -m low_precision_attention.check KERNEL``, or ``check_attention(kernel)``."""

from .report import Case, Report, assert_safe, check_attention

__all__ = ["Case", "Report", "assert_safe", "check_attention"]
