"""Appendix C argument by argument, in sentences made of the numbers of ``analysis.normaliser_study``."""

from __future__ import annotations

from analysis.normaliser_study import FP32_STATISTICS
from analysis.normaliser_tables import Evidence, Key, table


def _tied(variant: str, numerics: str = "paper", size: str = "usual", sign: str = "+", kind: str = "tie") -> Key:
    return numerics, kind, size, sign, variant


def _untied(variant: str, numerics: str, size: str = "usual") -> Key:
    return numerics, "no tie", size, "+", variant


class _Words:
    """Numbers of the evidence as the sentences need them."""

    def __init__(self, evidence: Evidence):
        self.evidence, self.bias = evidence, evidence.bias

    def rms(self, key: Key) -> str:
        """Of delta's error."""
        return f"{self.evidence.of(key).delta_rms:.1f}"

    def lost(self, key: Key) -> str:
        found = self.evidence.of(key)
        return f"{found.nonfinite + found.zero + found.subnormal:.0%}"

    def ones(self, key: Key) -> str:
        return f"{self.evidence.of(key).several_ones:.0%}"

    def limits(self, variant: str, maximum: str = "+") -> str:
        found = self.evidence.range("hardware", "tie", maximum, variant)
        return f"{found.subnormal_from:,g}, {found.zero_from:,g} and {found.nonfinite_from:,g}"


def summary(evidence: Evidence) -> str:
    """Markdown: each argument, what was measured, what follows. For docs/reproduction.md."""
    words = _Words(evidence)
    parts = (_repeated, _fixed, _unconditional, _gamma, _tolerance, _beta, _tiny, _untied_rows, _bounded)
    return table(["argument", "measured", "verdict"], [part(words) for part in parts])


def _repeated(w: _Words) -> list[str]:
    def small(name: str) -> Key:
        return _tied(name, "hardware", kind="tie small others")

    plain, beta_2, beta_7 = (_tied(name) for name in ("plain", "beta 2", "beta 7"))
    return [
        "Repeated maxima bias O, and Algorithm 3 removes that",
        f"`paper`: plain {w.bias(plain)}, beta 2 {w.bias(beta_2)}, beta 7 {w.bias(beta_7)}. `hardware`, other values small: plain "
        f"{w.bias(small('plain'))}, beta 2 {w.bias(small('beta 2'))}. Delta's root mean square error: from "
        f"{w.rms(plain)} to {w.rms(beta_2)} "
        f"(`paper`), from {w.rms(small('plain'))} to {w.rms(small('beta 2'))} (`hardware`, other values small) and from "
        f"{w.rms(_tied('plain', 'hardware'))} to {w.rms(_tied('beta 2', 'hardware'))} (`hardware`, other values "
        f"alike), since all features "
        f"of a row share the rounding of P_bar. `paper` with r from 8,192 on: plain "
        f"{w.bias(_tied('plain', size='failing'))}, as the next "
        "lower score in BF16 is too far below to decide a tie",
        "agrees on the bias; for kernels the error gets larger",
    ]


def _fixed(w: _Words) -> list[str]:
    def fp32(c: str) -> str:
        return f"{c} {w.bias(_tied(f'offset {c}', FP32_STATISTICS))}"

    def kernel(c: str) -> str:
        return f"{c} {w.bias(_tied(f'offset {c}', 'hardware'))}"

    exact = _tied("offset 7.0002", "hardware", kind="tie small others")
    hundreds = _tied("offset 1", size="hundreds")
    return [
        "A fixed offset, m = r + c, does not do instead",
        "All rows share one rounding of exp(-c), so that its error is a bias. `paper` with m and l in FP32: c = "
        f"{fp32('ln 2')}, {fp32('1')}, {fp32('2')}, {fp32('7')}; where exp(-c) is a BF16 number, {fp32('7.0002')}. "
        f"`hardware`: {kernel('1')}, "
        f"{kernel('2')}; 7.0002, other values small, {w.bias(exact)}. `paper` as it is rounds r + c: 1 "
        f"{w.bias(_tied('offset 1'))}, with r "
        f"from 64 to 1,024 {w.bias(hundreds)}. No row leaves the range",
        "agrees; a c with an exact exp(-c) does most of it under `paper`, nothing for kernels",
    ]


def _unconditional(w: _Words) -> list[str]:
    def rms(numerics: str) -> tuple[str, str]:
        return w.rms(_untied("plain", numerics)), w.rms(_untied("all beta 2", numerics))

    (paper, paper_all), (kernel, kernel_all) = rms("paper"), rms("hardware")
    beta_2, offset_1 = (w.bias(_untied(name, "hardware")) for name in ("all beta 2", "all offset 1"))
    return [
        "Shifting rows without a repeated maximum harms",
        f"Delta's root mean square error in such rows: plain {paper}, beta 2 {paper_all} (`paper`); {kernel} and "
        f"{kernel_all} (`hardware`). No bias "
        f"by beta 2 ({beta_2}), one by c = 1 ({offset_1}). With r from 64 to 1,024 beta 2 loses "
        f"{w.lost(_untied('all beta 2', 'hardware', 'hundreds'))} of them, and none is lost when they are left alone",
        "agrees: above all for the range",
    ]


def _gamma(w: _Words) -> list[str]:
    def below(gamma: str) -> str:
        return f"{gamma} {w.bias(_tied(f'gamma {gamma}', sign='-'))}"

    ones, ones_fp32 = (w.ones(_tied("gamma 0.999", numerics, sign="-")) for numerics in ("paper", FP32_STATISTICS))
    overflow = w.evidence.range("hardware", "tie", "-", "gamma 2").nonfinite_from
    return [
        "m = gamma r with gamma near 1 does not do for r < 0",
        f"`paper`, r from -8 to -0.5: gamma 0 (m = 0) {w.bias(_tied('beta 2', sign='-'))}, {below('0.5')}, "
        f"{below('0.9')}, {below('0.99')}, "
        f"{below('0.999')}, where P_bar is still 1 in {ones} of rows, or with m in FP32 in {ones_fp32}. The range is "
        f"wider: subnormal, zero, not "
        f"finite from r = minus {w.limits('beta 2', '-')} (gamma 0), {w.limits('gamma 0.99', '-')} (0.99). gamma 2 "
        f"overflows from minus {overflow:g}",
        "agrees for usual sizes; for large ones gamma 0 is what fails",
    ]


def _tolerance(w: _Words) -> list[str]:
    def cells(kind: str) -> str:
        names = {"0": "beta 2 exact", "1e-3": "beta 2", "2^-9": "beta 2 to 2^-9"}
        return ", ".join(f"{shown} {w.bias(_tied(name, 'hardware', kind=kind))}" for shown, name in names.items())

    return [
        "Tolerance of a tie: 0, 1e-3, 2^-9",
        "S in BF16 (`paper`), r from 0.5 to 8: no difference. S in FP32 (`hardware`), second score up to 1e-3 below the first: "
        f"{cells('within 1e-3')}; 1e-3 to 2^-9 below: {cells('within 2^-9')}; further below, up to 2^-7, where none applies: "
        f"{w.bias(_tied('beta 2 to 2^-9', 'hardware', kind='within 2^-7'))}",
        "for kernels 2^-9 is needed, and enough for P_bar = 1",
    ]


def _beta(w: _Words) -> list[str]:
    lost = [w.lost(_tied(name, "hardware", "hundreds")) for name in ("beta 2", "beta 7")]
    return [
        "beta 2 or 7",
        f"Both remove the bias. Tied rows are subnormal, zero, not finite from r = {w.limits('beta 2')} (beta 2) and "
        f"{w.limits('beta 7')} "
        f"(beta 7). With r from 64 to 1,024 they lose {lost[0]} and {lost[1]} of them",
        "beta 2 reaches further, neither as far as the logits of a failing run",
    ]


def _tiny(w: _Words) -> list[str]:
    def bias(name: str, numerics: str) -> str:
        return w.bias(_tied(name, numerics, "tiny"))

    return [
        "Beyond the appendix: very small maxima",
        f"r from 2^-13 to 2^-9: the shift is so small that P_bar rounds back to 1. beta 2: {bias('beta 2', 'paper')} "
        f"(`paper`; plain "
        f"{bias('plain', 'paper')}), {bias('beta 2', 'hardware')} (`hardware`; plain {bias('plain', 'hardware')}, as "
        f"l keeps the shift that "
        "P_bar loses)",
        "a gap in Algorithm 3",
    ]


def _untied_rows(w: _Words) -> list[str]:
    def plain(numerics: str, size: str) -> str:
        return w.bias(_untied("plain", numerics, size))

    return [
        "Beyond the appendix: rows without a repeated maximum",
        f"plain, r from 0.5 to 8: {plain('paper', 'usual')} (`paper`), {plain('hardware', 'usual')} (`hardware`). r "
        f"from 64 to 1,024: "
        f"{plain('paper', 'hundreds')} (`paper`), {plain('hardware', 'hundreds')} (`hardware`): scores in BF16 leave "
        f"so few gaps that rows "
        "share the roundings of P_bar and l, as with a fixed offset. Size and sign are those of the gaps drawn here",
        "`paper` biases rows that Algorithm 3 does not touch",
    ]


def _bounded(w: _Words) -> list[str]:
    def small(name: str) -> str:
        return w.bias(_tied(name, "hardware", "hundreds", kind="tie small others"))

    safe, plain = (w.bias(_tied(name, "hardware", "failing")) for name in ("safe", "plain"))
    return [
        "Beyond the appendix: the bounded shift of `flash_stable_safe`",
        f"No row is lost. But from r = 7 on it is a fixed offset. `paper`, r from 64 to 1,024: "
        f"{w.bias(_tied('safe', size='hundreds'))}. "
        f"`hardware` divides by l, and a factor that all keys share drops out: {small('safe')} with other values small (plain "
        f"{small('plain')}). From 8,192 on r + c is rounded to a c whose exp(-c) is not exact: {safe} (plain {plain})",
        "keeps the range; for kernels' large maxima it is no cure",
    ]
