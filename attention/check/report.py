"""The crash test of one kernel and its report."""

from __future__ import annotations

import functools
import json
import math
import platform
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from ..presets import PRESETS
from ..user_error import invalid
from . import judge, measures
from .classes import CLASSES, Shape, captured, shape_of
from .kernels import PACKAGES, Kernel, find

SCHEMA = 2
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
KNOWN_CLASSES = (*CLASSES, *measures.OWN)
LIMITS = (
    "A verdict on roundings, not a proof: 'at risk' is the pattern of kernels whose runs explode here, at BF16 and GPT-2's size; 'safe' is "
    "the absence of the patterns that we know."
)


@dataclass(frozen=True)
class Case:
    """One class of inputs in one shape; ``reason`` says what was seen, or why nothing could be."""

    name: str
    shape: str
    verdict: str
    reason: str
    measures: dict[str, float]


@dataclass(frozen=True)
class Report:
    """``verdict``: the worst of its cases, see ``judge.ORDER``."""

    kernel: str
    dtype: str
    environment: dict[str, str]
    cases: tuple[Case, ...]
    not_tried: tuple[str, ...] = ()
    """Classes with a mask, where the kernel has no argument for one."""

    @property
    def verdict(self) -> str:
        return judge.worst([case.verdict for case in self.cases])

    def json(self) -> str:
        """One document with ``schema``, the version of its form."""
        content = {"schema": SCHEMA, "verdict": self.verdict, **asdict(self)}
        return json.dumps(content, indent=1, allow_nan=True)

    def markdown(self) -> str:
        """A table, a row a case."""
        head = [
            "| class | verdict | rows of dS | dQ / plain | O / plain | why |",
            "| --- | --- | ---: | ---: | ---: | --- |",
        ]
        return "\n".join([f"**{self.kernel}**, {self.dtype}: {self.verdict}", "", *head, *map(_row, self.cases)])

    def text(self) -> str:
        """Lines for a terminal."""
        width = max(len(case.name) for case in self.cases)
        lines = [f"{self.kernel}, {self.dtype}, {', '.join(self.environment.values())}"]
        reasons = {case.reason for case in self.cases}
        if self.verdict == judge.UNVERIFIED and len(reasons) == 1:
            return "\n".join([*lines, f"verdict: {judge.UNVERIFIED}: {reasons.pop()}"])
        for case in self.cases:
            ratio = case.measures.get("ratio_dq", math.inf)
            numbers = f"rows {case.measures['rows']:.1e}  dq x {ratio:.1f}" if "rows" in case.measures else ""
            lines.append(f"  {case.name:{width}}  {case.verdict:10}  {numbers:24}  {case.reason}".rstrip())
        tried = sum(case.name in KNOWN_CLASSES for case in self.cases)
        among = f" ({tried} of {len(KNOWN_CLASSES)} classes tried)" if tried < len(KNOWN_CLASSES) else ""
        inputs = f"Inputs: low_precision_attention.check.classes.make(CLASS, Shape(...), dtype, device); here {self.cases[0].shape}."
        if self.not_tried:
            lines.append(f"  not tried, as it has no argument attn_mask: {', '.join(self.not_tried)}")
        return "\n".join([*lines, f"verdict: {self.verdict}{among}", inputs, LIMITS])


def _row(case: Case) -> str:
    numbers = [
        f"{case.measures[name]:.2g}" if name in case.measures else "" for name in ("rows", "ratio_dq", "ratio_o")
    ]
    return "| " + " | ".join([case.name, case.verdict, *numbers, case.reason]) + " |"


def check_attention(
    kernel: str | Callable[..., Any],
    *,
    device: str | None = None,
    dtype: str = "bf16",
    shape: Shape | None = None,
    classes: str | Sequence[str] = (),
    progress: Callable[[str], None] = lambda name: None,
) -> Report:
    """Run every class of inputs, or ``classes``, through a kernel and judge what comes out.

    Args:
        kernel: a function or a name, see ``kernels.find``.
        device: "cuda" where there is one, else "cpu".
        dtype: of q, k, v: bf16, fp16 or fp32.
        classes: their names, and paths of files of captured inputs, which end in .zip.
        shape: sizes; on a CPU B 2, H 4, G 4, T 256, D 64 unless given, on a GPU T 1,024.
        progress: told the name of each class before it runs.

    Raises ``UserError`` for names that do not exist. What a kernel raises makes a case unverified.
    """
    classes = (classes,) if isinstance(classes, str) else tuple(classes)
    if dtype not in DTYPES:
        raise invalid("dtype", dtype, tuple(DTYPES))
    for name in classes:
        if name.endswith(".zip"):
            captured(name)
        elif name not in KNOWN_CLASSES:
            raise invalid("class", name, KNOWN_CLASSES)
    found = find(kernel)
    if device not in (None, "cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise invalid("device", device, "cpu, or cuda where torch finds a GPU")
    there = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    asked = shape or Shape(T=1024 if there.type == "cuda" else 256)
    cases = []
    masked = tuple(name for name, c in CLASSES.items() if c.mask and not classes and not found.masks)
    for name in classes or (name for name in KNOWN_CLASSES if name not in masked):
        progress(name)
        cases.append(_case(found, name, asked, DTYPES[dtype], there))
    return Report(found.name, dtype, environment(there) | package_of(found.name), tuple(cases), masked)


def _case(kernel: Kernel, name: str, shape: Shape, dtype: torch.dtype, device: torch.device) -> Case:
    used = shape if name in measures.OWN else shape_of(name, shape)
    if kernel.call is None:
        return Case(name, str(used), judge.UNVERIFIED, kernel.missing, {})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch tells each kernel that it did not take
            measure = measures.OWN[name][1] if name in measures.OWN else functools.partial(measures.accuracy, name=name)
            found = measure(kernel.call, shape=shape, dtype=dtype, device=device)
    except Exception as error:  # whatever a foreign kernel raises: it could not be looked at
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        return Case(name, str(used), judge.UNVERIFIED, reason, {})
    return Case(name, str(used), *judge.judge(name, found), found)


def environment(device: torch.device) -> dict[str, str]:
    """What a report depends on beside the kernel."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "device": f"{device.type} {name}",
        "torch": f"torch {torch.__version__}",
        "python": f"Python {platform.python_version()}",
    }


def package_of(kernel: str) -> dict[str, str]:
    """The version of the package that a public kernel is from."""
    package = PACKAGES.get(kernel.partition(":")[0], "triton" if kernel in PRESETS else "")
    try:
        return {package: f"{package} {version(package)}"} if package else {}
    except PackageNotFoundError:
        return {}


def assert_safe(kernel: str | Callable[..., Any], *, unverified: bool = False, **options: Any) -> None:
    """For a test: ``AssertionError`` with the report unless every case is safe, or ``unverified`` where that is allowed."""
    report = check_attention(kernel, **options)
    allowed = (judge.SAFE, judge.UNVERIFIED) if unverified else (judge.SAFE,)
    if any(case.verdict not in allowed for case in report.cases):
        raise AssertionError(report.text())


def reasons() -> dict[str, str]:
    """Why each class is there."""
    return {name: c.reason for name, c in CLASSES.items()} | {name: r for name, (r, _) in measures.OWN.items()}
