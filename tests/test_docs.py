"""What the documents say that can be checked: tables against the code, links and paths against the tree, examples by running them."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from prose import prose

import config
from attention.numerics import BASES, Numerics
from attention.plan import PRESETS, AttentionSpec
from errors import UserError

ROOT = Path(__file__).resolve().parent.parent
ATTENTION = ROOT / "attention" / "README.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
SITES = [field.name for field in dataclasses.fields(Numerics)]
# Folders that git ignores or that hold what runs and tools write.
NOT_OURS = {"runs", "wandb", "tokens", "__pycache__", "build", "node_modules"}


def documents() -> list[Path]:
    found = (path.relative_to(ROOT) for path in ROOT.rglob("*.md"))
    return sorted(p for p in found if not any(part in NOT_OURS or part.startswith(".") for part in p.parts))


def table(document: Path, first_heading: str) -> list[dict[str, str]]:
    """Rows of the table whose first column has that heading, by heading; backquotes taken off."""
    lines = iter(document.read_text().splitlines())
    heads = next(cells for line in lines if (cells := _cells(line)) and cells[0] == first_heading)
    next(lines)
    rows: list[dict[str, str]] = []
    for line in lines:
        if not line.startswith("|"):
            return rows
        rows.append(dict(zip(heads, _cells(line), strict=True)))
    return rows


def _cells(line: str) -> list[str]:
    return [cell.strip().replace("`", "") for cell in line.strip("|").split("|")] if line.startswith("|") else []


def blocks(document: Path, language: str) -> list[str]:
    """Fenced code blocks of a language ("" for none)."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [block for name, block in fenced if name == language]


def test_the_table_of_sites_has_every_site_in_order() -> None:
    assert [row["site"] for row in table(ATTENTION, "site")] == SITES


@pytest.mark.parametrize("base", BASES)
def test_the_table_of_sites_has_the_values_of_the_base(base: str) -> None:
    values = {name: getattr(BASES[base], name) for name in SITES}
    expected = {name: value if isinstance(value, str) else f"{value:.5g}" for name, value in values.items()}
    assert {row["site"]: row[base] for row in table(ATTENTION, "site")} == expected


def test_every_base_is_a_column() -> None:
    assert list(table(ATTENTION, "site")[0])[2:] == list(BASES)


def test_every_rounding_site_is_in_an_equation() -> None:
    equations = "".join(blocks(ATTENTION, "math"))
    switches = ("row_max", "tile_q", "tile_k", "probabilities_rounding", "output_rounding", "delta_rounding", "delta")
    sites = [name for name in SITES if name not in switches and not name.startswith("row_max_")]
    assert [name for name in sites if rf"\mathrm{{{name}}}".replace("_", r"\_") not in equations] == []


def test_the_table_of_presets_has_every_preset_and_its_backend() -> None:
    expected = [(name, preset.backend) for name, preset in PRESETS.items()]
    assert [(row["preset"], row["backend"]) for row in table(ATTENTION, "preset")] == expected


def changes(preset: str, base: str) -> tuple[str, ...] | None:
    """The sites a preset changes in a base; None where it refuses the base."""
    try:
        return AttentionSpec(preset=preset, numerics=base).resolve().differences(BASES[base])
    except UserError:
        return None


@pytest.mark.parametrize("preset", PRESETS)
def test_the_table_of_presets_says_what_each_changes(preset: str) -> None:
    row = next(row for row in table(ATTENTION, "preset") if row["preset"] == preset)
    on_hardware, on_paper = changes(preset, "hardware"), changes(preset, "paper")
    assert on_hardware is not None
    further = "refused" if on_paper is None else ", ".join(s for s in on_paper if s not in on_hardware) or "none"
    assert row["changes on hardware"] == (", ".join(on_hardware) or "none")
    assert row["on paper, further"] == further


def test_the_layout_names_files_that_exist() -> None:
    named = [path for row in table(ARCHITECTURE, "path") for path in row["path"].split(", ")]
    assert len(named) > 20
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_layout_names_every_module_of_the_larger_folders() -> None:
    layout = ARCHITECTURE.read_text().partition("## Layout")[2].partition("\n## ")[0]
    folders = ("training", "data", "analysis", "scripts")
    modules = [path for folder in folders for path in sorted((ROOT / folder).glob("[!_]*.*")) if path.is_file()]
    names = {path: (f"`{path.relative_to(ROOT)}`", f"`{path.name}`") for path in modules}
    assert len(names) > 80
    assert [path.name for path, either in names.items() if not any(name in layout for name in either)] == []


def test_the_order_of_imports_is_that_of_its_test() -> None:
    from test_imports import ORDER

    assert ", ".join(f"`{part}`" for part in ORDER) in prose(ARCHITECTURE)


def test_python_examples_of_attention_run() -> None:
    examples = blocks(ATTENTION, "python")
    assert examples
    for example in examples:
        exec(compile(example, str(ATTENTION), "exec"), {})


def training_commands() -> list[list[str]]:
    """Arguments of every ``python train.py ...`` of the attention document."""
    lines = [line for block in blocks(ATTENTION, "") for line in block.splitlines()]
    return [shlex.split(line, comments=True)[2:] for line in lines if line.startswith("python train.py ")]


@pytest.mark.parametrize("arguments", training_commands(), ids=" ".join)
def test_training_commands_are_understood(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert config.load(arguments) != config.load(arguments[:1])


def links(document: Path) -> Iterator[tuple[str, str]]:
    """(path, anchor) of the relative links; code is no text."""
    text = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text)):
        if not re.match(r"[a-z]+:", target):
            path, _, anchor = target.partition("#")
            yield path, anchor


def anchors(document: Path) -> set[str]:
    """The anchors that GitHub gives a document's headings."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", documents(), ids=str)
def test_relative_links_lead_somewhere(document: Path) -> None:
    broken = []
    for path, anchor in links(ROOT / document):
        target = (ROOT / document).parent / path if path else ROOT / document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(f"{path}#{anchor}".rstrip("#"))
    assert broken == []
