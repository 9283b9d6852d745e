"""Documents as the tests of their sentences read them."""

from __future__ import annotations

from pathlib import Path


def prose(path: Path) -> str:
    """The text with every stretch of white space as one blank, so that a sentence is found wherever its lines break."""
    return " ".join(path.read_text().split())
