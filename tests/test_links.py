"""Every Markdown file: relative links lead to files and headings that exist, and commands to scripts and options that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import config

ROOT = Path(__file__).resolve().parent.parent
# Folders of the project, not those that a user's runs and environments make.
FOLDERS = ("attention", "data", "docs", "experiments", "replay_batches", "scripts", "tests")
PAGES = sorted([*ROOT.glob("*.md"), *(page for name in FOLDERS for page in (ROOT / name).rglob("*.md"))])
# Pages for users: a reader types what stands there. Pages of single studies name the commands of the commit that they were made at.
USERS = [page for page in PAGES if "experiments" not in page.parts]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


def links(page: Path) -> list[str]:
    """Targets of the page's links and pictures, but for addresses of the web."""
    text = re.sub(r"`[^`\n]*`", "", _FENCE.sub("", page.read_text()))
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]


def anchors(page: Path) -> set[str]:
    """Names of the page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", page.read_text()), flags=re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


def commands(page: Path) -> list[list[str]]:
    """Words of the page's lines of code that call Python or bash on a file of this checkout."""
    code = "\n".join(body for language, body in _FENCE.findall(page.read_text()) if not language)
    lines = code.replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if re.match(r"(python|bash) \S+\.(py|sh)", line)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: no such file"
        assert not anchor or anchor in anchors(target), f"{link}: no such heading"


@pytest.mark.parametrize("page", USERS, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_name_what_exists(page: Path) -> None:
    for script, *arguments in commands(page):
        assert (ROOT / script).is_file(), script
        if script != "train.py":
            source = (ROOT / script).read_text()
            missing = [word for word in arguments if word.startswith("--") and word.split("=")[0] not in source]
            assert not missing, f"{script} has no {missing}"


@pytest.mark.parametrize("page", USERS, ids=lambda page: str(page.relative_to(ROOT)))
def test_training_commands_are_understood(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for script, *arguments in commands(page):
        if script == "train.py" and not any(word.isupper() for word in arguments):
            assert config.load(arguments) != config.load(arguments[:1])
