"""Figures 4 and 8: (P K)[T], X[T] and their outer products, which are alike at different tokens and steps.

By equations 2 and 3 of arXiv 2510.04212 the gradient error of W_Q is a sum of these outer products weighted by the error of delta; it grows
in one direction if they are alike. Legend: B batch, T positions, H heads, D head width, C width.

Their tables have a line a row of a matrix and a column a feature (of the head in P K, of the input in X), empty where a matrix has none.
An outer product is its factors, a row of `outer P K` and one of `outer X`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from figures import canvas
from figures.canvas import Drawn
from probes.capture import LayerCapture
from probes.low_rank import Coherence, coherence, cross_coherence, weighted_keys

TOKENS, FEATURES = 32, 32
COLUMNS = ("of", "matrix", "row")

Line = tuple[str, str, int, dict[int, float]]
"""A row of a matrix: of what, the matrix, the row, and its values by feature."""


@dataclass(frozen=True, kw_only=True)
class RankOne:
    """The factors of one head in one sequence of one model."""

    source: str
    """The model: rows of one source share their ``coherence``."""
    label: str
    head: int
    token: int
    pk_TD: Tensor
    x_TC: Tensor
    coherence: Coherence
    """Of all tokens of the capture."""

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
    pk_BHTD = weighted_keys(layer)
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
    """Cosine of two matrices as vectors."""
    return float(torch.nn.functional.cosine_similarity(a_DC.flatten().double(), b_DC.flatten().double(), dim=0))


def shown_features(rows: Sequence[RankOne]) -> Tensor:
    """The input features with the largest mean |X| over all ``rows``, increasing; all where there are no more than ``FEATURES``."""
    mean_C = torch.stack([row.x_TC.abs().mean(dim=0) for row in rows]).mean(dim=0)
    return mean_C.topk(min(FEATURES, len(mean_C))).indices.sort().values


def shown_tokens(length: int) -> Tensor:
    """Positions spread evenly over a sequence."""
    return torch.linspace(0, length - 1, min(TOKENS, length)).round().long()


@dataclass(frozen=True)
class _Picture:
    """One heat map: its name in the table, its values, and what its rows and columns are."""

    name: str
    values: Tensor
    down: Sequence[int]
    across: Sequence[int]
    title: str
    x: str
    y: str
    token: int | None = None
    """Of an outer product."""


def _pictures(row: RankOne, features: Sequence[int], outers: Sequence[tuple[int, str]]) -> list[_Picture]:
    """P K, X, and the outer products of the tokens named, with their titles."""
    tokens, inside = shown_tokens(len(row.pk_TD)).tolist(), range(row.pk_TD.shape[1])
    chosen = list(features)
    of_head, of_input = "head feature", "input feature"
    pictures = [
        _Picture("P K", row.pk_TD[tokens], tokens, inside, "(P K)[T]", of_head, "token"),
        _Picture("X", row.x_TC[tokens][:, chosen], tokens, chosen, "X[T]", of_input, "token"),
    ]
    for token, title in outers:
        values = row.outer(token)[:, chosen]
        pictures.append(_Picture("outer", values, inside, chosen, title, of_input, of_head, token))
    return pictures


def draw_similarity(rows: Sequence[RankOne]) -> Drawn:
    """Figure 4: (P K), X and (P K)[T]^T X[T] at two tokens, of two sequences or two checkpoints, a column each.

    32 tokens and the 32 input features of largest mean |X| are shown, of which three are numbered; cosines are of the whole matrices.
    """
    features = shown_features(rows)
    numbered = _apart(torch.stack([row.x_TC[:, features].abs().mean(dim=0) for row in rows]).mean(dim=0))
    figure = canvas.sheet(4.3)
    grid = figure.subplots(3, len(rows), squeeze=False)
    lines: list[Line] = []
    for column, row in enumerate(rows):
        title = r"(P K)[T]$^{\top}$X[T], T = " + str(row.token)
        if column:
            title += f"\ncosine with the left one: {cosine(rows[0].outer(), row.outer()):.3f}"
        pictures = _pictures(row, features.tolist(), [(row.token, title)])
        for axes, picture in zip(grid[:, column], pictures, strict=True):
            lines += _draw(figure, axes, row, picture, numbered)
        grid[0, column].set_title(f"{canvas.wrapped(row.label, 1.5)}\n(P K)[T]", fontsize=canvas.SMALL, loc="left")
        for axes in grid[:, column] if column else ():
            axes.set_ylabel("")
    figure.supxlabel(canvas.wrapped(_similarities(rows)), fontsize=canvas.SMALL)
    return Drawn(figure, table_of(lines))


def _similarities(rows: Sequence[RankOne]) -> str:
    within = dict.fromkeys(f"{row.within:.3f}" for row in rows)
    text = f"mean cosine of the outer products of two tokens: {', '.join(within)}"
    if len(rows) > 1 and rows[0].source != rows[1].source:
        across = float(cross_coherence(rows[0].coherence, rows[1].coherence)[rows[0].head])
        text += f"; one of each: {across:.3f}"
    return text


def draw_outer_products(row: RankOne, tokens: Sequence[int]) -> Drawn:
    """Figure 8: the same of a pretrained model: (P K), X and the outer products at four tokens, with their cosines to the first.

    The paper's is Llama-3.1-8B, layer 1 head 13 in its counting, on one sentence; here any local folder, or a checkpoint.
    """
    outers = [(tokens[0], f"T = {tokens[0]}")]
    outers += [(t, f"T = {t}: cosine {cosine(row.outer(tokens[0]), row.outer(t)):.6f}") for t in tokens[1:]]
    features = shown_features([row])
    numbered = _apart(row.x_TC[:, features].abs().mean(dim=0))
    pictures = _pictures(row, features.tolist(), outers)
    figure = canvas.sheet(4.5)
    grid = figure.subplots(3, 2).ravel()
    lines: list[Line] = []
    for axes, picture in zip(grid, pictures, strict=False):
        lines += _draw(figure, axes, row, picture, numbered)
    for axes in grid[len(pictures) :]:
        axes.set_visible(False)
    title = f"{row.label}\nmean cosine of the outer products of two tokens: {row.within:.4f}"
    figure.suptitle(canvas.wrapped(title), fontsize=canvas.SMALL)
    return Drawn(figure, table_of(lines))


def _draw(figure: Any, axes: Any, row: RankOne, picture: _Picture, numbered: Sequence[int]) -> list[Line]:
    """Draw it, number its axes; the lines of the table."""
    values = picture.values.numpy()
    canvas.heat(figure, axes, values, signed=True)
    canvas.dress(axes, x=picture.x, y=picture.y, title=picture.title, grid="")
    if picture.y == "token":
        places = [0, len(picture.down) // 2, len(picture.down) - 1]
        axes.set_yticks(places, [str(picture.down[place]) for place in places])
    if picture.x == "input feature":
        axes.set_xticks(numbered, [str(picture.across[place]) for place in numbered])
    if picture.token is None:
        return [
            (row.label, picture.name, down, dict(zip(picture.across, line, strict=True)))
            for down, line in zip(picture.down, values.tolist(), strict=True)
        ]
    pk_D, x_C = row.pk_TD[picture.token], row.x_TC[picture.token]
    factors = (("P K", pk_D, picture.down), ("X", x_C, picture.across))
    return [
        (row.label, f"{picture.name} {name}", picture.token, {feature: float(vector[feature]) for feature in features})
        for name, vector, features in factors
    ]


def table_of(lines: Sequence[Line]) -> canvas.Table:
    """The table of a figure, with a column for every feature that some line has."""
    features = sorted({feature for *_, values in lines for feature in values})
    rows = ((*place, *(values.get(feature, "") for feature in features)) for *place, values in lines)
    return canvas.table((*COLUMNS, *map(str, features)), rows)


def _apart(size_C: Tensor, count: int = 3, distance: int = 7) -> list[int]:
    """Places of the largest values that are far enough apart to be numbered."""
    places: list[int] = []
    for place in size_C.argsort(descending=True).tolist():
        if len(places) < count and all(abs(place - other) >= distance for other in places):
            places.append(place)
    return sorted(places)
