"""From measures to a verdict. The thresholds, and what they were calibrated on.

A kernel fails in training here when rows of its dS do not sum to zero because delta, made from an O in 16 bits, disagrees with P. Over 46
kernels ``rows``, at its largest, is 9.7e-4 or less or 5.5e-3 or more on a CPU; of the former no run failed, of the latter about a third
(docs/kernels.md has the error rates). The limit is 2^-9, half a unit in the last place of BF16.
"""

import math
from collections.abc import Iterable
from typing import Any

SAFE, AT_RISK, WRONG, UNVERIFIED = "safe", "at risk", "wrong", "unverified"
ORDER = (SAFE, UNVERIFIED, AT_RISK, WRONG)
"""From the best to the worst."""

ROWS_AT_RISK = 2.0**-9
RATIO_AT_RISK = 3.0
"""Largest ratio of a tensor's error to plain attention's. FlashAttention's own tests allow 2, beside a formula with a BF16 softmax."""
SIZE_WRONG = 2.0**-5
"""Largest error of a row over its size without cancellation. No rounding to BF16 exceeds it: 0.008 is the worst of right kernels."""
EASY = ("gaussian", "tiny", "huge", "odd_length", "grouped", "full", "padding", "window")
WELL_CONDITIONED = 6.0
"""Largest ratio of errors in the classes EASY, where nothing enlarges a rounding error. Right kernels have 2.2 or less in any dtype (dV
with grouped keys), those with dQ added or L in BF16 2.6 and 4.0 at T 1,024; a dQ that is 2 % too large has 7."""
NEARER = 0.5
"""Largest distance of an O to one of a rounded S, in what the latter is off. Kernels that round S have 0.32 or less, others 1."""
BIAS = 0.5
"""Largest bias of O, in 2^-9 of its elements, where it is beyond ten standard errors. Rounding to one side gives 1.2, to nearest 0.12 or
less."""
ROUNDED_TWICE = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-7}
"""Rounding P and O to one side makes O less than this, relative, too large or small, by the dtype of q, k, v. In FP32 a kernel may round
P to BF16."""
FMA_LIMIT = 1e5
"""Kernels with the FMA exponent lose O = V between 45,426 and this, by head dim."""
REORDERED = {"bfloat16": 2.0**-10, "float16": 2.0**-13, "float32": 2.0**-20}
"""Largest relative difference of like calls that atomic sums in FP32 explain, which are no risk, by the dtype of the results: emulated ones
of dQ leave up to 2.4e-5, 7e-6 and 9e-8, sums in BF16 6e-3, in FP16 2.7e-4 or more."""
REORDERED_ROW = 2.0**-6
"""The same of one row, over its own size, in any dtype: atomic sums in FP32 leave 1.4e-3. A race in one row drowns in the whole."""

_NAMES = ("o", "dq", "dk", "dv")
_LEAKS = {
    "seen": "O or dV reads what is masked",
    "hidden": "dK or dV of keys that are masked is not 0",
    "idle": "dQ of rows without dO is not 0",
}
REPEATED = {
    "again": "called again",
    "alone": "a sequence alone",
    "strides": "in other strides",
    "kept": "the next call overwrites O",
    "between": "with another forward pass before its backward pass",
    "some": "where only some need a gradient",
    "do_strides": "with a dO in other strides",
}
"""Calls of the class ``repeatability``."""


def judge(name: str, found: dict[str, Any]) -> tuple[str, str]:
    """Verdict and its reason, of the measures of one class; where it is safe "" or a note."""
    if name == "one_hot":
        if not found["off"] < SIZE_WRONG:
            return WRONG, f"one-hot: O is off from V by {found['off']:.1e}"
        if found["limit"] >= FMA_LIMIT:
            return SAFE, ""
        if not found["limit"]:  # an exponent is right at the smallest logit
            return AT_RISK, f"one-hot: O is off from V by {found['off']:.1e} at any logit"
        return AT_RISK, f"exponent: one-hot rows have O = V to logits of {found['limit']:g} only"
    if name == "signs":
        if found["signed"] <= ROWS_AT_RISK:
            return SAFE, ""
        if not math.isfinite(found["signed"]):
            return WRONG, "not finite: rows of dS"
        return AT_RISK, f"dS: sums with random signs are off by {found['signed']:.1e} of its rows"
    if endless := [x for x in _NAMES if math.isinf(found.get(f"error_{x}", 0))]:
        return WRONG, f"not finite: {', '.join(endless)}"
    leaks = [text for what, text in _LEAKS.items() if found.get(what, 0) != 0]
    leaks += ["O of query 0 is not V of key 0"] * (not found.get("first_row", 0) < SIZE_WRONG)
    mask = "mask: " + ", ".join(leaks)
    if name == "mask_edges":
        return (WRONG, mask) if leaks else (SAFE, "")
    if name == "float_mask":
        for given in dict.fromkeys(measure.partition("_off_")[0] for measure in found):
            if beyond := [x for x in _NAMES if not found[f"{given}_off_{x}"] <= WELL_CONDITIONED]:
                what = "O" if beyond[0] == "o" else ", ".join(beyond)
                return WRONG, f"float mask: an additive mask in {given} gives another {what}"
        return SAFE, ""
    if name == "last_key":
        weak = "last key: it has too little weight in an odd length"
        return (SAFE, "") if found["missed"] < SIZE_WRONG else (WRONG, weak)
    if name == "no_keys":
        spread = found["dead"] and math.isinf(found["gradients_off"])  # as eager attention's, which a run shows at once
        if not found["o_off"] < SIZE_WRONG or not (spread or found["gradients_off"] < SIZE_WRONG):
            others = f"O of others is off by {found['o_off']:.1e}, gradients by {found['gradients_off']:.1e}"
            return WRONG, f"rows without keys: {others}"
        reason = "NaN in rows without keys: in O" + " and, though nothing reads it, in gradients" * bool(spread)
        return (AT_RISK, reason) if found["dead"] else (SAFE, "")
    if name == "not_a_number":
        if found["spread"]:
            return AT_RISK, f"NaN: {found['spread']:.0f} numbers are not finite where none depends on it"
        return (SAFE, "") if found["arrives"] else (AT_RISK, "NaN: that of a query shows not in O, or in no gradient")
    if name == "repeatability":
        for what, where in REPEATED.items():
            if not found[f"{what}_off"] < SIZE_WRONG:
                return WRONG, f"{where}: it has other results, by {found[f'{what}_off']:.1e}"
        if found["again_over"] > 1:
            seen = f"calls differ by {found['again_off']:.1e}, a row by {found['again_row']:.1e}"
            return AT_RISK, f"not deterministic: {seen}, more than by an order of sums in FP32"
        return SAFE, "" if found["deterministic"] else "not deterministic: a run cannot be replayed"
    verdict, reason = _accuracy(name, found)
    return (WRONG, mask + f"; {reason}" * (verdict == WRONG)) if leaks else (verdict, reason)


def _accuracy(name: str, found: dict[str, float]) -> tuple[str, str]:
    # Over what is about 0 no error is told.
    found = dict.fromkeys((f"{what}_{x}" for what in ("error", "eager") for x in _NAMES), math.inf) | found
    if found.get("layout_off", math.inf) < SIZE_WRONG:
        return WRONG, "layout: O is right for [batch, length, heads, head dim]: expected heads before length"
    # An O that is as one of a rounded S: its gradients may be off as that rounding puts them off.
    scores = found["ratio_o"] > RATIO_AT_RISK and found["from_eager_o"] < NEARER * found["eager_o"]
    own = [x for x in _NAMES if not (scores and found[f"error_{x}"] <= RATIO_AT_RISK * found[f"eager_{x}"])]
    beyond = [x for x in own if max(found[f"size_{x}"], found[f"worst_{x}"]) > SIZE_WRONG]
    far = [x for x in own if found[f"ratio_{x}"] > WELL_CONDITIONED and name in EASY]
    rows = f"rows of dS sum to {found['rows']:.1e} of their size"
    if wrong := beyond or far:
        seen = [
            f"{x} has {found[f'ratio_{x}']:.0f} x plain's{_fit(x, found)}" if wrong is far else _off(x, found)
            for x in wrong
        ]
        # In a dQ that is itself wrong rows of dS cannot be read.
        tells = "dq" not in wrong and ROWS_AT_RISK < found["rows"] < math.inf
        return WRONG, f"errors: {', '.join(seen)}{f'; delta or P: {rows}' * tells}"
    default = found.get("default_scale_off", 0)
    if not default < SIZE_WRONG:
        return WRONG, f"scale: without the argument O is off by {default:.1e}: expected 1 / sqrt(head dim)"
    if scores:
        what = "q times its scale" if found.get("eager_scales_q") else "S"
        return AT_RISK, f"scores: O is off by {found['error_o']:.1e}, as where {what} is rounded to 16 bits"
    if not math.isfinite(found["rows"]):  # where a multiple of dO overflows and dO does not
        return WRONG, "not finite: rows of dS"
    side = f"rounded to one side: O is off by {found['bias_o']:.1f} x 2^-9 in the mean"
    if _fit("o", found) and found["factor_over"] > 1:
        side = f"scale error: O is {found['factor_o']:.4g} x the exact one"
    biased = abs(found["bias_o"]) > max(BIAS, 10 * found["bias_o_se"])
    if found["rows"] > ROWS_AT_RISK:
        error = f", dQ has {found['ratio_dq']:.1f} x plain's error" * (found["ratio_dq"] > 1)
        return AT_RISK, f"delta or P: {rows}{error}{f'; {side}' * biased}"
    coarse = [x for x in _NAMES if found[f"ratio_{x}"] > RATIO_AT_RISK]
    if coarse:
        ratios = ", ".join(f"{x} has {found[f'ratio_{x}']:.1f} x plain's{_fit(x, found)}" for x in coarse)
        tells = biased and "o" in coarse and name != "equal_keys"  # see below
        return AT_RISK, f"errors: {ratios}{f'; {side}' * tells}"
    if biased and name == "values_of_one_sign":  # where keys are alike, so are roundings of P
        return AT_RISK, f"errors: {side}"
    return SAFE, f"O is float{found['unrounded_o']:.0f}, delta reads it unrounded" if found.get("unrounded_o") else ""


def _off(x: str, found: dict[str, float]) -> str:
    """The error of a tensor over its size, or, where it should be about 0, over its size without cancellation; or that of its worst row,
    unless a factor explains it.
    """
    error, size, row = (found[f"{what}_{x}"] for what in ("error", "size", "worst"))
    fit = _fit(x, found)
    if size <= SIZE_WRONG < row and not fit:
        return f"a row of {x} is off by {_share(row)} its size without cancellation"
    seen = f"{_share(error)} its size{fit}" if error < 100 else f"{_share(size)} its size without cancellation"
    return f"{x} is off by {seen}"


def _share(x: float) -> str:
    return f"{100 * x:.3g} % of" if x < 9.99 else f"{x:.3g} x"


def _fit(x: str, found: dict[str, float]) -> str:
    """The factor that a tensor is off by, where without it half of the error, or less, is left."""
    explained = found.get(f"unfit_{x}", math.inf) < 0.5 * found[f"error_{x}"]
    return f" ({found[f'factor_{x}']:.4g} x the exact one)" if explained else ""


def worst(verdicts: Iterable[str]) -> str:
    return max(verdicts, key=ORDER.index)


_DELTA = (
    "delta = rowsum(P * dP) / rowsum(P) in FP32, of the P and dP that make dS; or delta = rowsum(dO * O) with O in FP32, if O, the sum "
    "it is divided by, and dS all use the same exp(S - max), rounded to 16 bits"
)
CURES = {
    "scale error: ": "O: it has a factor, or the sum that it is divided by has: delta follows from it",
    "delta or P: ": f"delta or P: {_DELTA}",
    "exponent: ": "exponent: exp2(c * (S - max)), not exp2(c * S - c * max), where one FMA rounds c * max and not c * S",
    "as where S is rounded": "scores: keep S in FP32 up to the softmax",
    "as where q times its scale is rounded": "scores: multiply S by the scale, not q",
    "rounded to one side": "O: round P and O to nearest, ties to even",
}
"""Advice by a part of a reason, where we know any (docs/results.md)."""
FACTOR = "errors: a factor is wrong, such as that of scale or ln 2"
HIDDEN_DELTA = f"dS: delta is probably off, and hidden in the sums of rows: {_DELTA}"
"""Advice on dS, unless what is wrong, delta or P, scores, or a scale error, beside it explain it."""
FEWER_BITS = (
    "errors: if P or an operand has 8 bits these are usual, as limits here are those of 16 bits: then mend the rest, and train beside "
    "a control"
)


def has_fewer_bits(found: dict[str, float]) -> bool:
    """Whether gaussian inputs have errors far above what 16 bits make, of a size that mantissas of two or three bits explain. Those of
    P and operands of the forward pass show in O; a term that dK or dV lost does not."""
    beyond = [x for x in _NAMES if found[f"ratio_{x}"] > WELL_CONDITIONED]
    return "o" in beyond and all(found[f"error_{x}"] < 2.0**-3 and not _fit(x, found) for x in beyond)


def added(errors: dict[str, dict[str, float]], gaussian: dict[str, float] | None, is_open: bool = False) -> list[str]:
    """Advice on sums in 16 bits, from measures of the classes with errors and of ``gaussian``, None if that was not tried. ``is_open``:
    nothing else explains a coarse dQ, and cancelling_tiles was not tried.

    An error over plain's is then at least twice as much where sums cancel; of another coarse rounding it is as much or less. A tile that is
    left out may have as much, too, but then some class has an error that no rounding makes.
    """
    if any(
        found[f"{what}_{x}"] > SIZE_WRONG for found in errors.values() for what in ("size", "worst") for x in _NAMES
    ):
        return []
    advice = []
    for name, tensors, over in (
        ("cancelling_tiles", ("o", "dq"), "keys"),
        ("cancelling_queries", ("dk", "dv"), "queries"),
    ):
        found = errors.get(name, {})
        coarse = [x for x in tensors if found.get(f"ratio_{x}", 0) > RATIO_AT_RISK]
        if "o" in coarse:
            coarse = ["o"]  # delta, and so dQ, has its error
        sums = f"{' and '.join(coarse)} in 16 bits between tiles of {over}"
        if coarse and gaussian is None:
            advice.append(f"run the class gaussian, too: it tells whether the kernel adds {sums}")
        elif (
            coarse and gaussian and all(2 * gaussian.get(f"ratio_{x}", math.inf) <= found[f"ratio_{x}"] for x in coarse)
        ):
            advice.append(f"the kernel probably adds {sums}: add in FP32")
    is_open = is_open and not any((gaussian or {}).get(f"ratio_{x}", 0) > RATIO_AT_RISK for x in ("dk", "dv"))
    if is_open and ["dq"] in (
        [x for x in _NAMES if found.get(f"ratio_{x}", 0) > RATIO_AT_RISK] for found in errors.values()
    ):
        advice.append("run --class cancelling_tiles --class gaussian: they tell whether the kernel adds dq in 16 bits")
    return advice
