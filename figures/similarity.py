"""Figure 4: (P K)[T], X[T] and their outer products, which are alike at different tokens and steps.

By equations 2 and 3 of arXiv 2510.04212 the gradient error of W_Q is a sum of these outer products weighted by the error of delta; it grows
in one direction if they are alike. Legend: T positions, D head width, C width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor

from figures import canvas
from figures.canvas import Drawn
from probes.capture import LayerCapture
from probes.low_rank import Coherence, coherence, cross_coherence, weighted_keys

TOKENS, FEATURES = 32, 32


@dataclass(frozen=True, kw_only=True)
class RankOne:
    source: str
    """The model: rows of one source share their ``coherence``."""
    label: str
    head: int
    token: int
    pk_TD: Tensor
    x_TC: Tensor
    coherence: Coherence
    """Coherence of all tokens of the capture."""

    def outer(self, token: int | None = None) -> Tensor:
        """(P K)[T]^T X[T], [D, C]; of ``self.token`` unless another is named."""
        at = self.token if token is None else token
        return torch.outer(self.pk_TD[at], self.x_TC[at])

    @property
    def within(self) -> float:
        """Mean cosine of the outer products of two tokens."""
        return float(self.coherence.within_H[self.head])


def rank_one(layer: LayerCapture, *, head: int, batch: int, token: int, source: str, label: str) -> RankOne:
    """The factors that Figure 4 shows, FP32 on the CPU."""
    pk_BHTD = layer.turned_back(weighted_keys(layer))
    return RankOne(
        source=source,
        label=label,
        head=head,
        token=token,
        pk_TD=pk_BHTD[batch, head].float().cpu(),
        x_TC=layer.x_BTC[batch].float().cpu(),
        coherence=coherence(pk_BHTD, layer.x_BTC),
    )


def cosine(a_DC: Tensor, b_DC: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a_DC.flatten().double(), b_DC.flatten().double(), dim=0))


def draw_similarity(rows: Sequence[RankOne]) -> Drawn:
    """Figure 4: (P K), X and (P K)[T]^T X[T] at two tokens, of two sequences or two checkpoints, a column each.

    32 tokens and the 32 input features of largest mean |X| are shown; cosines are of the whole matrices. The table has P K and X at the
    tokens shown and at T: the factors of the outer product are its rows T, whose cosine with the first column's is beside them.
    """
    mean_C = torch.stack([row.x_TC.abs().mean(dim=0) for row in rows]).mean(dim=0)
    features = mean_C.topk(min(FEATURES, len(mean_C))).indices.sort().values.tolist()
    figure = canvas.sheet(4.3)
    grid = figure.subplots(3, len(rows), squeeze=False)
    tables = []
    for column, row in enumerate(rows):
        length = len(row.pk_TD)
        tokens = torch.linspace(0, length - 1, min(TOKENS, length)).round().long().tolist()
        alike = cosine(rows[0].outer(), row.outer())
        title = r"(P K)[T]$^{\top}$X[T], T = " + str(row.token)
        if column:
            title += f"\ncosine with the left one: {alike:.3f}"
        pictures = (
            (row.pk_TD[tokens], f"{canvas.wrapped(row.label, 1.5)}\n(P K)[T]", "head feature", "token"),
            (row.x_TC[tokens][:, features], "X[T]", "input feature", "token"),
            (row.outer()[:, features], title, "input feature", "head feature"),
        )
        for axes, (values, name, across, down) in zip(grid[:, column], pictures, strict=True):
            canvas.heat(figure, axes, values.numpy())
            canvas.style_axes(axes, x=across, y="" if column else down, title=name, grid="")
            if down == "token":
                axes.set_yticks(places := [0, len(tokens) // 2, len(tokens) - 1], [tokens[place] for place in places])
            if across == "input feature":
                axes.set_xticks(places := [0, len(features) // 2], [features[place] for place in places])
        told = sorted({*tokens, row.token})
        for name, matrix, shown in (("P K", row.pk_TD, list(range(row.pk_TD.shape[1]))), ("X", row.x_TC, features)):
            of = {"of": row.label, "matrix": name, "token": told, "outer_product": [t == row.token for t in told]}
            of |= {"cosine": [alike] * len(told)}
            tables.append(pd.DataFrame(of).join(pd.DataFrame(matrix[told][:, shown].numpy(), columns=shown)))
    figure.supxlabel(canvas.wrapped(_similarities(rows)), fontsize=canvas.SMALL)
    return Drawn(figure, pd.concat(tables))


def _similarities(rows: Sequence[RankOne]) -> str:
    within = dict.fromkeys(f"{row.within:.3f}" for row in rows)
    text = f"mean cosine of the outer products of two tokens: {', '.join(within)}"
    if len(rows) > 1 and rows[0].source != rows[1].source:
        across = float(cross_coherence(rows[0].coherence, rows[1].coherence)[rows[0].head])
        text += f"; one of each: {across:.3f}"
    return text
