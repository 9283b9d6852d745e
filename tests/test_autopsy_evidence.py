"""The tables of results/autopsy/README.md are those of the autopsies beside it."""

from __future__ import annotations

import collections
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "results/autopsy"


@pytest.mark.parametrize("name", ["sdpa_flash_1500.txt", "run_a_seed_1_2000.txt"])
def test_the_table_is_made_of_the_heads(name: str) -> None:
    heads = collections.defaultdict(list)
    for line in (FOLDER / name).read_text().splitlines():
        words = line.split()
        if len(words) >= 12 and words[0].isdigit() and words[1].isdigit():
            cosine, _, top, norm, logit = (float(word) for word in words[-5:])
            heads[int(words[0])].append((cosine, top, words[2] == "strained", norm, logit))
    assert [len(members) for members in heads.values()] == [12] * 12
    text = (FOLDER / "README.md").read_text().partition(f"[{name}]")[2].partition("\n## ")[0]
    for layer, members in heads.items():
        cosine, top, strained, norm, logit = zip(*members, strict=True)
        means = f"{sum(cosine) / 12:.3f} | {sum(top) / 12:.3f}"
        assert f"| {layer} | {means} | {sum(strained)} | {max(norm):.3f} | {max(logit):,.0f} |" in text
