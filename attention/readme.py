"""The tables of README.md, made from the declarations: ``python -m attention.readme`` writes them.

Sites, bases and presets declare themselves (``numerics.py``, ``presets.py``); a table is found by the name of its first column.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .numerics import BASES, DEFAULTS, HARDWARE, SITES, USES
from .plan import AttentionSpec
from .presets import PRESETS

README = Path(__file__).parent / "README.md"


def tables() -> dict[str, list[str]]:
    """Lines of each table by the name of its first column."""
    return {
        "site": list(_table(("site", "what it rounds or chooses", "default"), _sites())),
        "base": list(_table(("base", "for", "differs from `hardware` in"), _bases())),
        "preset": list(_table(("preset", "changes on `hardware`", "for"), _presets())),
    }


def _sites() -> Iterator[tuple[str, ...]]:
    for name, declared in SITES.items():
        default = DEFAULTS[name] if isinstance(DEFAULTS[name], str) else f"{DEFAULTS[name]:.5g}"
        mark = "" if "standard" in declared.backends else "†" if "flash" in declared.backends else "‡"
        yield f"`{name}`{mark}", declared.doc, default


def _bases() -> Iterator[tuple[str, ...]]:
    for name, base in BASES.items():
        yield f"`{name}`", USES[name], _listed(base.differences(HARDWARE))


def _presets() -> Iterator[tuple[str, ...]]:
    for name, preset in PRESETS.items():
        yield f"`{name}`", _listed(AttentionSpec(preset=name).resolve().differences(HARDWARE)), preset.doc


def _listed(sites: tuple[str, ...]) -> str:
    return ", ".join(f"`{site}`" for site in sites) or "nothing"


def _table(heads: tuple[str, ...], rows: Iterator[tuple[Any, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for cells in rows:
        yield f"| {' | '.join(cells)} |"


def written(text: str) -> str:
    """The document with its tables as the declarations make them."""
    lines = text.splitlines()
    for name, table in tables().items():
        first = next(number for number, line in enumerate(lines) if line.startswith(f"| {name} |"))
        last = next(number for number in range(first, len(lines)) if not lines[number].startswith("|"))
        lines[first:last] = table
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    README.write_text(written(README.read_text()))
