"""The crash test of one kernel and its report."""

import contextlib
import csv
import io
import json
import platform
import shlex
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ..presets import PRESETS, unaliased
from ..user_error import invalid
from ..watching.log import strict
from . import judge, measures
from .classes import CLASSES, PACKAGED_DIM, Shape, captured, even, make, require_shape, shape_of
from .kernels import Kernel, find, first_calls, identity, place, told, versions

SCHEMA = 8
"""Version of the JSON report. It rises when a field changes its name, position or meaning."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LENGTHS = {"cuda": 1024, "cpu": 256}
"""What T is unless it is given."""
KNOWN_CLASSES = (*CLASSES, *measures.OWN)
WITH_CAUSAL = ("float_mask", "no_keys")
"""Classes of masks that hide what causal attention hides, too, always."""
MASKED = (*(name for name, chosen in CLASSES.items() if chosen.mask), *WITH_CAUSAL)
PACKAGED = tuple(name for name, chosen in CLASSES.items() if chosen.packaged)
OF_CAUSAL = (*PACKAGED, "mask_edges")
FULL = tuple(name for name, chosen in CLASSES.items() if not chosen.causal)
NOT_CAUSAL = (*MASKED, *FULL)
QUICK = (
    "gaussian", "common_part", "shared_direction", "peaked_1000", "odd_length", "grouped", "padding", "window", "scale",
    "captured_growing", "cancelling_queries", "one_hot", "mask_edges", "last_key", "repeatability",
)  # fmt: skip
"""The classes that tell most."""
MAY_RAISE = ("grouped", *MASKED)
"""Where a kernel raises ``NotImplementedError`` in these, and they were not asked for, they are not tried."""
DECISIVE = {"common_part", "shared_direction", "peaked_1000"}
"""Where delta shows: a kernel that raises in all of these has not been looked at."""
TELLING_LOGIT = 100.0
"""Captured inputs of less say nothing where a kernel is safe: flash, which fails, is so in captured_early and captured_healthy, of 43 and
58, and not in captured_growing, of 400."""
MODES = {None: "", True: ", causal alone", False: ", not causal"}
INSTEAD = "train with flash_consistent, or with this kernel under watch() and beside a control (scripts/crash_run.py of a clone)"


@dataclass(frozen=True)
class Case:
    """One class of inputs in one shape; ``reason`` says what was seen, of a safe case too if it is of note, or why nothing could be."""

    name: str
    shape: Shape
    verdict: str
    reason: str
    measures: dict[str, float]


@dataclass(frozen=True)
class Report:
    """``verdict``: the worst of its cases, see ``judge.ORDER``. ``shape`` is what was asked for; a class may have another."""

    kernel: str
    device: str
    dtype: str
    shape: Shape
    environment: dict[str, str]
    cases: tuple[Case, ...]
    not_tried: dict[str, str]
    """Classes that say nothing of this kernel in this dtype, or were left out, and why."""
    causal: bool | None = None
    """True for a kernel of causal attention alone, False for one without a causal mask."""
    without: tuple[str, ...] = ()
    """Classes that were to be left out."""

    @property
    def verdict(self) -> str:
        unseen = [judge.UNVERIFIED] * (self.is_unseen or not self.cases)
        return judge.worst([*unseen, *(case.verdict for case in self.cases)])

    @property
    def is_unseen(self) -> bool:
        """Whether none of ``DECISIVE`` was judged, though not only other classes were asked for."""
        verdicts = {case.verdict for case in self.cases if case.name in DECISIVE}
        return bool(verdicts or DECISIVE & {*self.not_tried}) and verdicts <= {judge.UNVERIFIED}

    @property
    def found(self) -> dict[str, list[str]]:
        """What was found, as a reason begins, and in which classes; empty where all are safe."""
        return reasons_of(self.cases)

    @property
    def left_out(self) -> list[str]:
        """Classes of ``without`` that would have been tried."""
        return [name for name in self.not_tried if name in self.without]

    @property
    def headline(self) -> str:
        """The verdict, what was found and what was left out, in a line."""
        bad = (judge.WRONG, judge.AT_RISK, judge.UNVERIFIED)
        parts = [f"{verdict}: {', '.join(reasons_of(cases))}" for verdict in bad if (cases := self._of(verdict))]
        if self.cases and len(self._of(judge.UNVERIFIED)) == len(self.cases):
            parts = [f"{judge.UNVERIFIED}: {self.cases[0].reason}"]
        why = f": none of {', '.join(sorted(DECISIVE))} was judged" * self.is_unseen
        left = [f"left out: {', '.join(self.left_out)}"] * bool(self.left_out)
        return "; ".join([*(parts or [self.verdict + why]), *left])

    def _of(self, verdict: str) -> list[Case]:
        return [case for case in self.cases if case.verdict == verdict]

    def json(self) -> str:
        """One document with ``schema``, the version of its form; numbers that are not finite are strings."""
        content = {"schema": SCHEMA, "verdict": self.verdict, **asdict(self), "mend": self.mend}
        return json.dumps(strict(content), indent=1, allow_nan=False)

    def text(self) -> str:
        """For people: the verdict; what is wrong, at risk, to mend, safe, not tried."""
        base = told_shape(self.cases[0], self) if self.cases else self.shape
        seen = dict.fromkeys(filter(None, self.environment.values()))
        about = ", ".join([self.kernel, self.dtype, f"{base}{MODES[self.causal]}", *seen])
        raised, safe = self._of(judge.UNVERIFIED), self._of(judge.SAFE)
        judged = [case for case in self.cases if case not in raised]
        if raised and not judged:
            return f"verdict: {self.headline}\n{about}"
        tried = sum(case.name in KNOWN_CLASSES for case in judged)
        among = f" ({tried} of {len(KNOWN_CLASSES)} classes tried)" if tried < len(KNOWN_CLASSES) else ""
        among = f" ({len(judged)} file{'s' * (len(judged) > 1)})" if judged and not tried else among
        lines = [f"verdict: {self.headline}{among}", about]

        def rows(verdict: str) -> list[str]:
            return _by_reason(
                verdict, ((f"{case.name}{_other_sizes(case, base)}", case.reason) for case in self._of(verdict))
            )

        lines += rows(judge.WRONG) + rows(judge.AT_RISK)
        if self.mend:
            lines += ["mend:", *(f"  {what}" for what in self.mend)]
        if safe:
            sums = [case.measures["rows"] for case in safe if "rows" in case.measures]
            most = f", rows of dS {max(sums):.1e} or less (limit {judge.ROWS_AT_RISK:.1e})" if sums else ""
            lines.append(f"safe{most}: {', '.join(case.name for case in safe)}")
        lines += dict.fromkeys(f"note: {case.reason}" for case in safe if case.reason)
        if self.verdict == judge.SAFE and {*(case.name for case in self.cases), *self.not_tried} == {*QUICK}:
            others = ", ".join(name for name in KNOWN_CLASSES if name not in QUICK)
            longer = "a longer T, " * (LENGTHS[torch.device(self.device).type] > self.shape.T)
            lines.append(f"note: not tried with --quick: {longer}{others}")
        lines += [
            f"{case.name}: largest logit {logit:.3g}: safe says nothing here, as kernels that fail are, too; take the layer that grows"
            for case in safe
            if case.name.endswith(".zip") and (logit := case.measures["largest_logit"]) < TELLING_LOGIT
        ]
        lines += rows(judge.UNVERIFIED)
        not_for = [] if self.is_unseen else raised  # as of a kernel without a backward pass: what is left tells little
        if self.causal is None:
            tried_full, raised_full = ([case for case in cases if case.name in FULL] for cases in (judged, raised))
            if self.is_unseen:
                only_full = raised and all(case.name in NOT_CAUSAL for case in judged)
                lines += ["if the kernel has no causal mask: --no-causal"] * bool(only_full)
            elif raised_full or (tried_full and tried_full == self._of(judge.WRONG)):
                lines.append("if the kernel is for causal attention alone: --causal")
                not_for = [case for case in raised if case not in raised_full]
        if options := " ".join(f"--without {name}" for name in self._not_for(not_for)):
            lines.append(f"if the kernel is not for what it raised in: {options}")
        lines += _by_reason("not tried", ((x, why) for x, why in self.not_tried.items() if x not in self.left_out))
        if self.verdict != judge.SAFE and self._of(self.verdict):
            lines += self._again()
        return "\n".join(lines)

    @property
    def mend(self) -> list[str]:
        """Advice."""
        judged = [case for case in self.cases if case.verdict != judge.UNVERIFIED]
        if any("layout: " in case.reason for case in judged):
            return ["the layout first, then run again: all else may follow from it"]
        seen = [case.reason for case in judged]
        if any(reason.endswith("at any logit") for reason in seen):  # rounding to one side keeps O = V in one-hot rows
            seen = [reason.replace("rounded to one side: ", "scale error: ") for reason in seen]
        mend = [cure for part, cure in judge.CURES.items() if any(part in reason for reason in seen)]
        scale = judge.CURES["scale error: "]
        if scale not in mend and any("x the exact one)" in reason and "to one side" not in reason for reason in seen):
            mend.append(judge.FACTOR)
        explained = self.found.keys() & {"delta or P", "scores"} or {scale, judge.FACTOR} & {*mend}
        if "dS" in self.found and self.verdict != judge.WRONG and not explained:
            mend.append(judge.HIDDEN_DELTA)
        names = [case.name for case in judged]
        if [case.name for case in judged if case.verdict == judge.WRONG] == ["scale"] != names:
            mend.append("scale: the argument is probably ignored")
        endless = {
            case.name: case.measures["largest_logit"] for case in judged if case.reason.startswith("not finite: o")
        }
        # exp(88) is the largest in FP32; in FP16 S itself may be infinite, and ties can make a NaN, too.
        if 88 < min(endless.values(), default=0) < 5000 and ("peaked_1000" in endless or "peaked_1000" not in names):
            mend.append("exp: subtract the row maximum before it")
        errors = {case.name: case.measures for case in judged if case.name in self.found.get("errors", [])}
        gaussian = next((case.measures for case in judged if case.name == "gaussian"), None)
        is_open = not explained and "cancelling_tiles" not in names
        mend += [f"errors: {x}" for x in judge.added(errors, gaussian, is_open)]
        if gaussian and "gaussian" in errors and judge.has_fewer_bits(gaussian):
            mend.append(judge.FEWER_BITS)
        if {judge.WRONG, judge.AT_RISK} <= {case.verdict for case in judged}:
            return ["what is wrong first, then run again: the rest may follow from it", *mend]
        instead = f"{'or' if mend else 'no advice is known:'} {INSTEAD}"
        return [*mend, instead] if self.verdict == judge.AT_RISK else mend

    def _not_for(self, raised: Sequence[Case]) -> list[str]:
        """Classes to leave out; without ``odd_length`` others that raised in that length have an even one."""
        names = [case.name for case in raised if case.name in KNOWN_CLASSES]
        if "odd_length" in names:
            return [name for name in names if name == "odd_length" or even(inputs_of(name), self.shape) == self.shape]
        return names

    def _again(self) -> list[str]:
        """How to see the first of its worst cases again, and its tensors."""
        case = next(case for case in self.cases if case.verdict == self.verdict)
        shape = even(inputs_of(case.name), self.shape) if "odd_length" in self.without else told_shape(case, self)
        more = "".join(f", {name}={value}" for name, value in _mode(case.name, self.causal).items())
        given = f'"{inputs_of(case.name)}", check.{shape!r}, {DTYPES[self.dtype]}, "{self.device}"{more}'
        masked = ", mask.visible" * (case.name in MASKED)
        lines = [
            f"again: --{'inputs' if case.name.endswith('.zip') else 'class'} {shlex.quote(case.name)}",
            f"import torch, {__package__} as check",
            f"p = check.make({given})  # q, k, v, do{_other_sizes(case, shape)}, scale, causal{masked}",
        ]
        if case.name in measures.OWN:
            kernel = "kernel" if "<" in self.kernel else repr(self.kernel)
            measure = measures.OWN[case.name].measure.__name__
            lines.append(f"check.measures.{measure}(check.kernels.find({kernel}).call, p)")
        return lines


def inputs_of(name: str) -> str:
    """The class whose inputs a class has, before its measure changes them."""
    return measures.OWN[name].inputs if name in measures.OWN else name


def _mode(name: str, causal: bool | None) -> dict[str, Any]:
    """``causal`` for what makes the inputs of a class, unless the class has it by itself or does not take it."""
    return {} if causal is None or causal != (name in FULL) or name in WITH_CAUSAL else {"causal": causal}


def reasons_of(cases: Sequence[Case]) -> dict[str, list[str]]:
    """Classes that are not safe by the beginnings of their reasons, and by what else is told in them."""
    found: dict[str, list[str]] = {}
    for case in cases:
        if case.reason and case.verdict != judge.SAFE:
            later = [what for what in ("layout", "errors", "delta or P", "scale error") if f" {what}: " in case.reason]
            for what in (case.reason.partition(": ")[0], *later):
                found.setdefault(what, []).append(case.name)
    return found


def _by_reason(title: str, pairs: Iterable[tuple[str, str]]) -> list[str]:
    """A line for each reason of names, under a title; none where there is none."""
    names: dict[str, list[str]] = {}
    for name, reason in pairs:
        names.setdefault(reason, []).append(name)
    return [f"{title}:"] * bool(names) + [f"  {', '.join(of)}: {reason}" for reason, of in names.items()]


def _other_sizes(case: Case, shape: Shape) -> str:
    """Those of a case that are not those of ``shape``, as " (T 269)"."""
    others = [f"{name} {n}" for name, n in case.shape.sizes().items() if shape.sizes().get(name) != n]
    return f" ({' '.join(others)})" * bool(others)


def table(reports: Sequence[Report]) -> str:
    lines = [
        "| kernel | shape | verdict | rows of dS | dQ / plain | one-hot rows right to | same bits |",
        "| --- | --- | --- | ---: | ---: | ---: | --- |",
    ]
    for report in reports:
        measured: dict[str, list[float]] = {}
        for case in report.cases:
            for name, value in case.measures.items():
                measured.setdefault(name, []).append(value)
        shown = [
            f"{max(measured[name]):{form}}" if name in measured else ""
            for name, form in (("rows", ".1e"), ("ratio_dq", ".1f"), ("limit", ",.0f"))
        ]
        bits = "".join("yes" if same else "no" for same in measured.get("deterministic", []))
        verdict = report.headline.replace("|", "\\|")  # a bar would end the cell
        shape = told_shape(report.cases[0], report) if report.cases else report.shape
        kernel = f"`{report.kernel}`{MODES[report.causal]}"
        lines.append(f"| {kernel} | {shape} | {verdict} | {' | '.join(shown)} | {bits} |")
    return "\n".join(lines)


COLUMNS = (
    "ratio_o", "ratio_dq", "ratio_dk", "ratio_dv", "error_dq", "rows", "rows_mean", "rows_mean_se",
    "signed", "bias_o", "bias_o_se", "limit", "deterministic",
)  # fmt: skip


def told_shape(case: Case, report: Report) -> Shape:
    """The one that was asked for; captured inputs have their own."""
    return case.shape if case.name.endswith(".zip") else report.shape


def csv_of(reports: Sequence[Report]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = ("head_dim", "batch", "heads", "key_heads", "length")
    unequal = any(report.shape.DV for report in reports)
    # Of --causal 1, of --no-causal 0, else empty. The last one, so that the others stay where they were.
    writer.writerow(["kernel", *names, *["value_dim"] * unequal, "class", "verdict", *COLUMNS, "reason", "causal"])
    for report in reports:
        causal = "" if report.causal is None else int(report.causal)
        left = (Case(name, report.shape, "left out", report.not_tried[name], {}) for name in report.left_out)
        for case in (*report.cases, *left):
            numbers = [f"{case.measures[name]:.3g}" if name in case.measures else "" for name in COLUMNS]
            shape = told_shape(case, report)
            sizes = (shape.D, shape.B, shape.H, shape.G, shape.T, *shape.dims[1:] * unequal)
            writer.writerow([report.kernel, *sizes, case.name, case.verdict, *numbers, case.reason, causal])
    return text.getvalue()


def check_attention(
    kernel: str | Callable[..., Any],
    *,
    device: str | None = None,
    dtype: str = "bf16",
    shape: Shape | None = None,
    classes: str | Sequence[str] = (),
    without: str | Sequence[str] = (),
    causal: bool | None = None,
    progress: Callable[[str], None] = lambda name: None,
) -> Report:
    """Run every class of inputs, or ``classes``, through a kernel and judge what comes out.

    Args:
        kernel: a function or a name, see ``kernels.find``.
        device: "cuda" where there is one, else "cpu".
        dtype: of q, k, v: bf16, fp16 or fp32.
        classes: their names, and paths of files of captured inputs, which end in .zip; or "quick": those that tell most. Of all, or these,
            those of masks and "grouped" are not tried where the kernel raises ``NotImplementedError``.
        without: classes to leave out, as "grouped", which the kernel is not for; the verdict's line names them. Without "odd_length"
            others of that length have an even one.
        causal: True for a kernel of causal attention alone: "full" is left out, the other classes are causal. False for one without a
            causal mask: classes have none, and those that are of one are not tried. Nor are files of the other kind.
        shape: sizes; on a CPU B 2, H 4, G 4, T 256, D 64 unless given, on a GPU T 1,024; T half as large for "quick".
        progress: told the name of each class before it runs.

    Raises ``UserError`` for unknown names, small shapes and what ``kernels.find`` refuses. What a kernel raises makes a case unverified.
    """
    classes, without = ((x,) if isinstance(x, str) else tuple(x) for x in (classes, without))
    is_quick = classes == ("quick",)
    may_raise = MAY_RAISE if is_quick or not classes else ()
    classes = QUICK if is_quick else classes
    if dtype not in DTYPES:
        raise invalid("dtype", dtype, tuple(DTYPES))
    for what, names in (("class", classes), ("without", without)):
        for name in names:
            if what == "class" and name.endswith(".zip"):
                captured(name)
            elif name not in KNOWN_CLASSES:
                raise invalid(what, name, KNOWN_CLASSES)
    if causal and "full" in classes:
        raise invalid("classes", "full", "another, as causal=True leaves it out")
    found = find(kernel)
    there = device_of(device)
    asked = Shape(T=LENGTHS[there.type] // (1 + is_quick)) if shape is None else shape
    require_shape(asked)
    if isinstance(kernel, str) and unaliased(kernel) in PRESETS and there.type == "cuda" and len(classes) != 1:
        # Its kernels are compiled beside each other, not one after another as cases need them; meanwhile torch loads those of the
        # reference. What cannot run says so in its case.
        with contextlib.suppress(Exception), ThreadPoolExecutor() as pool:
            p = make("gaussian", asked, DTYPES[dtype], there, causal)
            pool.submit(measures.exact, p)
            for call in first_calls(kernel, p):
                pool.submit(call)
    cases: list[Case] = []
    not_tried: dict[str, str] = {}
    # The mode that the caller is in, as around an evaluation, is no fault of the kernel: leaving inference mode turns gradients on.
    threads = one_thread() if there.type == "cpu" else contextlib.nullcontext()
    with torch.inference_mode(False), torch.autocast(there.type, enabled=False), threads:
        for name in classes or KNOWN_CLASSES:
            if name in without:
                not_tried[name] = "it is left out"
            elif name in MASKED and not found.masks and may_raise:
                not_tried[name] = "it has no argument attn_mask"
            elif causal is False and (name in OF_CAUSAL or (name.endswith(".zip") and captured(name).causal)):
                not_tried[name] = "it is of a causal mask"
            elif causal and (name == "full" or (name.endswith(".zip") and not captured(name).causal)):
                not_tried[name] = "it is not causal"
            elif name in PACKAGED and min(asked.dims) < PACKAGED_DIM:
                not_tried[name] = f"it has head dim {PACKAGED_DIM}"
            if name in not_tried:
                continue
            progress(name)
            try:
                chosen = even(inputs_of(name), asked) if "odd_length" in without else asked
                case = _case(found, name, chosen, DTYPES[dtype], there, causal, may_raise)
            except measures.OutOfRangeError as error:
                not_tried[name] = str(error)
                continue
            if name == "grouped" and case.verdict == judge.UNVERIFIED and asked.G == asked.H and found.call:
                case = replace(case, reason=f"{case.reason} (k and v have {case.shape.G} heads, q {case.shape.H})")
            cases.append(case)
        seen = environment(there) | {"kernel": identity(found.name)}
    return Report(found.name, there.type, dtype, asked, seen, tuple(cases), not_tried, causal, without)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """The tensors of a CPU run are small: more threads take up to six times as long on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def device_of(name: str | None) -> torch.device:
    """The device of that name, or of none the usual one. Raises ``UserError`` where there is none."""
    if name not in (None, "cpu", "cuda") or (name == "cuda" and not torch.cuda.is_available()):
        raise invalid("device", name, "cpu, or cuda where torch finds a GPU")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def _case(
    kernel: Kernel,
    name: str,
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    causal: bool | None,
    may_raise: Sequence[str],
) -> Case:
    used = shape_of(inputs_of(name), shape)
    if kernel.call is None:
        return Case(name, used, judge.UNVERIFIED, kernel.missing, {})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch tells each kernel that it did not take
            p = make(inputs_of(name), shape, dtype, device, **_mode(name, causal))
            own = measures.OWN.get(name)
            found = own.measure(kernel.call, p) if own else measures.accuracy(kernel.call, p, name)
    except measures.OutOfRangeError:
        raise
    except measures.WrongError as error:
        return Case(name, used, judge.WRONG, str(error), {})
    except (Exception, SystemExit) as error:  # whatever a foreign kernel raises: it could not be looked at
        if name in may_raise and isinstance(error, NotImplementedError):
            raise measures.OutOfRangeError(f"it is not for this: {told(error)}") from None
        return Case(name, used, judge.UNVERIFIED, f"{told(error)}{place(error)}", {})
    return Case(name, used, *judge.judge(name, found), found)


def environment(device: torch.device) -> dict[str, str]:
    """What a report depends on beside the kernel."""
    name = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, threads {torch.get_num_threads()}"
    if device.type == "cuda":
        name = f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    own, _, _ = str(__package__).partition(".")  # a checkout may lie beside an installed package of another version
    return {
        "device": f"{device.type} {name}",
        "torch": f"torch {torch.__version__}",
        "python": f"Python {platform.python_version()}",
        "check": ", ".join(versions(own) if own == "low_precision_attention" else []) or "check of a checkout",
    }


def assert_safe(
    kernel: str | Callable[..., Any],
    *,
    unverified: bool = False,
    device: str | None = None,
    dtype: str = "bf16",
    shape: Shape | None = None,
    classes: str | Sequence[str] = (),
    without: str | Sequence[str] = (),
    causal: bool | None = None,
) -> None:
    """For a test: raises ``AssertionError`` with the report unless all cases are safe.

    Args:
        unverified: classes in which the kernel raises do not count, if others have run, and not all of ``common_part``,
            ``shared_direction`` and ``peaked_1000``, where delta shows, are among them, nor all that are not causal: ``causal=True``
            makes these causal.

    The others are those of ``check_attention``, which says what else this raises.
    """
    report = check_attention(
        kernel, device=device, dtype=dtype, shape=shape, classes=classes, without=without, causal=causal
    )
    verdicts = {case.verdict for case in report.cases} - ({judge.UNVERIFIED} if unverified else set())
    full = {case.verdict for case in report.cases if case.name in FULL}
    if verdicts != {judge.SAFE} or report.is_unseen or (causal is None and full == {judge.UNVERIFIED}):
        raise AssertionError(report.text())


def reasons() -> dict[str, str]:
    """Why each class is there."""
    return {name: c.reason for name, c in CLASSES.items()} | {name: own.reason for name, own in measures.OWN.items()}
