"""Tables from the runs here: python experiments/fast_failure/tables.py [one_hot | jumps]

1. How far logits of layer 1 grow, by what delta shares with the O that the model reads (kinds.csv); Markdown.
2. The error of delta in heads of layer 1 whose rows look at one key, by the head's largest logit (one_hot_heads.csv.gz);
   one_hot: CSV.
3. The gradient norm before and after the largest logit of layer 1 passes 2^16 ln 2 and twice that, here and in other_recipes; jumps: CSV.
   Runs whose loss had exploded before are left out.
"""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path

import pandas as pd

HERE = Path(__file__).resolve().parent
THRESHOLD = 2.0**16 * math.log(2)
FROM, EARLY, LATE = 1000, 2400, 5000
SHARES = ("P_bar and O", "O", "P_bar", "nothing, own error", "nothing, hardly an error")
ROWS = ("nearest", "stochastic", "p_unrounded", "subtracted", "unfused", "rounded_sum", "torch", "paper", "untiled")
EDGES = (0.0, THRESHOLD / 4, THRESHOLD / 2, THRESHOLD, 2 * THRESHOLD, 4 * THRESHOLD, math.inf)


def read(run: str, file: str, study: Path = HERE) -> pd.DataFrame:
    return pd.read_csv(study / "runs" / run / file).set_index("step")


def markdown(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def table(heads: list[str], rows: list[list[str]]) -> str:
    return "\n".join(",".join(line) for line in [heads, *rows])


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def spread(values: list[float]) -> str:
    found = pd.Series(values).dropna()
    return f"{number(found.median())} ({number(found.min())} - {number(found.max())})" if len(found) else "-"


def growth() -> str:
    kinds = pd.read_csv(HERE / "kinds.csv").set_index("run")["delta_shares"]
    rows = []
    for kind in SHARES:
        probes = [read(run, "probes.csv") for run in kinds.index[kinds == kind]]
        probes = [probe for probe in probes if probe.index.max() >= FROM]
        logits = [probe["max_logit_1"] for probe in probes]
        passed = [int(logit.index[logit >= 2 * THRESHOLD][0]) for logit in logits if (logit >= 2 * THRESHOLD).any()]
        rows.append(
            [kind, str(len(probes)), str(sum((logit[logit.index >= FROM] > 1000).any() for logit in logits))]
            + [spread([float(logit.get(step, math.nan)) for logit in logits]) for step in (EARLY, LATE)]
            + [str(len(passed)), f"{min(passed):,} - {max(passed):,}" if passed else "-"]
        )
    heads = ["delta shares the rounding of", "runs", "logit beyond 1,000"]
    heads += [f"largest logit at {step:,}: median (range)" for step in (EARLY, LATE)]
    return markdown([*heads, f"beyond {2 * THRESHOLD:,.0f}", "first at step"], rows)


def one_hot() -> str:
    heads = pd.read_csv(HERE / "one_hot_heads.csv.gz")
    rows = []
    for low, high in itertools.pairwise(EDGES):
        cells = [f"{low:.0f}", f"{high:.0f}"]
        for kind in ROWS:
            here = heads[(heads["kind"] == kind) & (heads["max_logit"] >= low) & (heads["max_logit"] < high)]
            cells.append(f"{here['delta_error'].median():.1e} ({len(here)})" if len(here) else "-")
        rows.append(cells)
    return table(["largest_logit_from", "to", *ROWS], rows)


def jumps() -> str:
    rows = []
    studies = (HERE, HERE.parent / "other_recipes")
    folders = [path for study in studies for path in sorted((study / "runs").iterdir())]
    exploded = {study: pd.read_csv(study / "summary.csv").set_index("run")["exploded_at"].dropna() for study in studies}
    for run, study in ((path.name, path.parents[1]) for path in folders):
        logit = read(run, "probes.csv", study)["max_logit_1"]
        norms = read(run, "metrics.csv", study)["grad_norm"].dropna()
        beyond = logit.index[logit >= 2 * THRESHOLD]
        if not len(beyond):
            continue
        norms = norms[norms.index % 10 == 0]
        first, step = int(logit.index[logit >= THRESHOLD][0]), int(beyond[0])
        if exploded[study].get(run, math.inf) < first:
            continue
        before = norms[(norms.index >= first - 500) & (norms.index < first)].median()
        after = norms[(norms.index >= step) & (norms.index < step + 200)].median()
        rows.append(
            [run, str(first), str(step), f"{logit[step]:.0f}", f"{before:.3f}", f"{after:.3g}", f"{after / before:.1f}"]
        )
    heads = ["run", "beyond_45426_at", "beyond_90852_at", "largest_logit_there"]
    heads += ["grad_norm_500_steps_before", "grad_norm_200_steps_after", "times"]
    return table(heads, rows)


def main() -> None:
    print({"one_hot": one_hot, "jumps": jumps}.get(sys.argv[-1], growth)())


if __name__ == "__main__":
    main()
