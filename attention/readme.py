"""The lists of README.md, made from the declarations: ``python -m attention.readme`` writes them.

Sites, bases and presets declare themselves (``numerics.py``, ``presets.py``).
"""

from collections.abc import Iterator
from pathlib import Path

from .numerics import BASES, DEFAULTS, HARDWARE, SITES, USES
from .plan import AttentionSpec
from .presets import PRESETS

README = Path(__file__).parent / "README.md"
LONGEST = 5
"""Most sites of a preset that the list shows: longer ones hide what the preset is for, and ``presets.py`` has them."""


def _sites() -> Iterator[str]:
    for name, declared in SITES.items():
        default = DEFAULTS[name] if isinstance(DEFAULTS[name], str) else f"{DEFAULTS[name]:.5g}"
        mark = "" if "standard" in declared.backends else "†" if "flash" in declared.backends else "‡"
        yield f"- `{name}`{mark} ({default}): {declared.doc}"


def _bases() -> Iterator[str]:
    for name, base in BASES.items():
        yield f"- `{name}`{_listed(base.differences(HARDWARE))}: {USES[name]}"


def _presets() -> Iterator[str]:
    for name, preset in PRESETS.items():
        sites = AttentionSpec(preset=name).resolve().differences(HARDWARE)
        mark = "§" if preset.of(BASES["microcosm"]).get("accumulator") == "fp32" else ""
        yield f"- `{name}`{mark}{_listed(sites) if len(sites) <= LONGEST else ''}: {preset.doc}"


def _listed(sites: tuple[str, ...]) -> str:
    return f" ({', '.join(f'`{site}`' for site in sites)})" if sites else ""


LISTS = {"## Presets": _presets, "## Rounding sites": _sites, "### Bases": _bases}


def written(text: str) -> str:
    """The document with the first list below each of these headings as the declarations make it."""
    lines = text.splitlines()
    for heading, made in LISTS.items():
        first = next(number for number in range(lines.index(heading), len(lines)) if lines[number].startswith("- `"))
        last = next(number for number in range(first, len(lines)) if not lines[number].startswith("- `"))
        lines[first:last] = made()
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    README.write_text(written(README.read_text()))
