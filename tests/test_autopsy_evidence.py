"""The table of results/autopsy/README.md is that of the autopsy beside it."""

from __future__ import annotations

import collections
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "results/autopsy"


def test_the_table_is_made_of_the_heads() -> None:
    heads = collections.defaultdict(list)
    for line in (FOLDER / "sdpa_flash_1500.txt").read_text().splitlines():
        words = line.split()
        if len(words) >= 12 and words[0].isdigit() and words[1].isdigit():
            cosine, _, top, norm, logit = (float(word) for word in words[-5:])
            heads[int(words[0])].append((cosine, top, words[2] == "strained", norm, logit))
    assert [len(members) for members in heads.values()] == [12] * 12
    text = (FOLDER / "README.md").read_text()
    for layer, members in heads.items():
        cosine, top, strained, norm, logit = zip(*members, strict=True)
        means = f"{sum(cosine) / 12:.3f} | {sum(top) / 12:.3f}"
        assert f"| {layer} | {means} | {sum(strained)} | {max(norm):.3f} | {max(logit):,.0f} |" in text
