"""A crash test for attention kernels: ``python -m low_precision_attention.check KERNEL``, or ``check_attention(kernel)``.

``capture`` takes inputs for it from a model of one's own.
"""

from .captured import Inputs, capture, load
from .classes import Shape, make
from .report import Case, Report, assert_safe, check_attention

__all__ = ["Case", "Inputs", "Report", "Shape", "assert_safe", "capture", "check_attention", "load", "make"]
