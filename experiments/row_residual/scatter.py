"""r of every published attention (rows.csv, by measure_rows.py) beside the logits of its runs: python -m experiments.row_residual.scatter

Endpoint: the largest logit of layer 1 at step 2,400. Prints Spearman's rank correlations, over all runs and within each kind of error of
delta, and the runs that fit least; writes correlations.csv and scatter.png.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from attention.numerics import numerics_from_key
from attention.plan import HeadGroup
from experiments.draw_pictures import BLUE, GRAY, GREEN, ORANGE, page, save
from experiments.row_residual.measure_rows import EXPERIMENTS, STUDIES, variant_of

HERE = Path(__file__).resolve().parent
LAYER = 1
END = "max_logit_1_at_2400"
COLUMNS = ("r_rms", "r_delta_rms", "growth", "growth_delta", "head_growth", "size", "dw_q_error", "dw_q_growth")
DRAWN = {"r_delta_rms": "r over delta (root mean squares)", "growth_delta": "coherent part of r over delta, absolute"}
COLORS = {"O": ORANGE, "P_bar": BLUE, "P": GRAY, "none": GREEN}
CELLS = ["checkpoint", "step", "captured"]


def kind_of(group: HeadGroup) -> str:
    """What makes r before dS is rounded: the O in delta, P_bar in an O that is not rounded, rows of P, or hardly anything."""
    n = numerics_from_key(group.numerics)
    if n.row_residual != "kept":
        return "none"
    if n.delta == "rowsum_do_o":
        if n.delta_output != "fp32" and not n.delta_output.startswith("residual"):
            return "O"
        return "none" if n.probabilities == "fp32" else "P_bar"
    return "P" if n.delta == "rowsum_p_dp" and n.statistics != "fp32" else "none"


def runs() -> pd.DataFrame:
    """Run, study, attention, kind and endpoint of the published runs that reached it."""
    rows: list[dict[str, object]] = []
    names: dict[tuple[str, float], str] = {}
    for study in STUDIES:
        ends = pd.read_csv(EXPERIMENTS / study / "summary.csv").set_index("run")[END]
        for run in sorted((EXPERIMENTS / study / "runs").iterdir()):
            name, chosen, softcap = variant_of(run)
            plan = chosen.resolve(24, 16)  # the largest model's, so that every rule has its place
            group = plan[LAYER].groups[0]
            same = repr([(group.heads, group.backend, group.numerics) for layer in plan for group in layer.groups])
            name = names.setdefault((same, softcap), name)  # one attention can be written in several ways
            place = {"run": run.name, "study": study, "attention": name}
            rows.append({**place, "kind": kind_of(group), END: ends[run.name]})
    return pd.DataFrame(rows).dropna(subset=[END])


def spearman(table: pd.DataFrame, column: str) -> float:
    """Of |column| and the endpoint; NaN for fewer than four runs."""
    if len(table) < 4:
        return float("nan")
    return float(table[column].abs().rank().corr(table[END].rank()))


def groups(table: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """All runs of the recipe itself, then those of one kind."""
    same = table[table["study"] != "other_recipes"]
    yield "all", same
    for kind in COLORS:
        yield kind, same[same["kind"] == kind]


def by_kind(rows: pd.DataFrame) -> str:
    """The page's table: r on the same tensors for all, and the runs of the recipe itself."""
    plain = rows[(rows["captured"] == "plain") & (rows["layer"] == LAYER)]
    wide = plain.pivot(index="attention", columns="step", values="r_delta_rms")
    table = runs()
    table = table[table["study"] != "other_recipes"].merge(wide, left_on="attention", right_index=True)
    header = ["r made by", "runs", *(f"r at {step:,}" for step in wide), "logit above 1,000", "median logit (range)"]
    lines = [" | ".join(header), " | ".join(["---"] + ["---:"] * (len(header) - 1))]
    for kind, some in table.groupby(pd.Categorical(table["kind"], list(COLORS)), observed=True):
        ranges = [f"{some[step].min():.1e} - {some[step].max():.1e}" for step in wide]
        ends = f"{some[END].median():,.0f} ({some[END].min():,.0f} - {some[END].max():,.0f})"
        lines.append(" | ".join([str(kind), str(len(some)), *ranges, str((some[END] > 1000).sum()), ends]))
    return "\n".join(f"| {line} |" for line in lines)


def main() -> None:
    rows = pd.read_csv(HERE / "rows.csv")
    print(by_kind(rows))
    rows = rows[rows["layer"] == LAYER]
    found: list[dict[str, object]] = []
    cells = list(rows.groupby(CELLS, sort=False))
    figure, [panels] = page(3.9, 1, len(DRAWN), sharey=True)
    for place, of_cell in cells:
        table = runs().merge(of_cell, on="attention")
        where = f"{place[0]}, step {place[1]:,}, {place[2]}"
        print(f"\n{where}: {len(table)} runs")
        for group, chosen in groups(table):
            values = {column: round(spearman(chosen, column), 2) for column in COLUMNS}
            found.append({**dict(zip(CELLS, place, strict=True)), "runs": group, "n": len(chosen), **values})
            print(
                f"  {group:5} n = {len(chosen):2}  "
                + "  ".join(f"{name} {value:5.2f}" for name, value in values.items())
            )
        for column in ("r_delta_rms", "growth_delta"):
            same = table[table["study"] != "other_recipes"]
            apart = same[END].rank() - same[column].abs().rank()
            worst = apart.abs().nlargest(8).index
            print(f"  least fit {column}: " + ", ".join(f"{table['run'][i]} {apart[i]:+.0f}" for i in worst))
        if place[1:] != (rows["step"].max(), "plain"):
            continue
        for (column, words), axis in zip(DRAWN.items(), panels, strict=True):
            for kind, color in COLORS.items():
                for study, marker in (("", "o"), ("other_recipes", "x")):
                    some = table[(table["kind"] == kind) & ((table["study"] == "other_recipes") == bool(study))]
                    axis.scatter(
                        some[column].abs(), some[END], color=color, marker=marker, s=22, label=None if study else kind
                    )
            axis.set(xscale="log", yscale="log")
            axis.set_xlabel(words, fontsize=11)
    panels[0].set_title("largest logit of layer 1 at 2,400 (x: another recipe)", fontsize=12, loc="left")
    panels[0].legend(fontsize=10, title="r made by", loc="upper left")
    pd.DataFrame(found).to_csv(HERE / "correlations.csv", index=False, lineterminator="\n")
    save(figure, HERE / "scatter.png")


if __name__ == "__main__":
    main()
