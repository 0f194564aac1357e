"""What the documentation tells people to call is there: commands of `prfaas`, their options, modules and files."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from testbed.cli import app

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    "Makefile",
    "action.yml",
    *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("*.md")),
]
COMMAND: Any = typer.main.get_command(app)


def code_of(page: str) -> list[str]:
    """The lines of a page that are code: indented, fenced, or between backticks."""
    text = (ROOT / page).read_text(encoding="utf-8")
    if not page.endswith(".md"):
        return text.splitlines()
    fenced = [line for block in re.findall(r"^```.*?\n(.*?)^```", text, re.M | re.S) for line in block.splitlines()]
    return [*fenced, *re.findall(r"^    (.+)$", text, re.M), *re.findall(r"`([^`\n]+)`", text)]


def calls(page: str) -> list[list[str]]:
    """The words of every call of `prfaas` on a page, without what follows a comment, a pipe or a semicolon."""
    found = []
    for line in code_of(page):
        for part in re.split(r"\s#\s*|\s\||;|&&|\s>", line.strip()):
            called = re.match(r"(?:\S*/)?prfaas(?= [a-z])(.*)", part.strip())
            if called:
                try:
                    found.append(shlex.split(called[1]))
                except ValueError:  # the quote ends on another line
                    found.append(called[1].split())
    return found


def unknown(words: list[str]) -> str | None:
    """What of a call there is not."""
    command, path = COMMAND, "prfaas"
    rest = list(words)
    while hasattr(command, "commands"):
        name = rest.pop(0) if rest else ""
        if name not in command.commands:
            if path != "prfaas report":
                return f"{path}: no command {name!r}"
            rest.insert(0, name)  # `report RUN...` needs no name
            name = "runs"
        command, path = command.commands[name], f"{path} {name}"
    options = {option for one in command.params for option in (*one.opts, *one.secondary_opts)} | {"--help", "-h"}
    asked = [word.partition("=")[0].rstrip(",.:") for word in rest if re.match(r"--[a-z]", word)]
    wrong = [option for option in asked if option not in options]
    return f"{path}: no option {', '.join(wrong)}" if wrong else None


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_options(page: str) -> None:
    assert [told for told in map(unknown, calls(page)) if told] == []


def test_something_is_read_at_all() -> None:
    assert sum(len(calls(page)) for page in PAGES) > 100
    assert unknown(["simulate", "paper", "--polcy", "x"])
    assert unknown(["simulat"])


@pytest.mark.parametrize("page", PAGES)
def test_modules(page: str) -> None:
    named = {
        name
        for line in code_of(page)
        for name in re.findall(r"python -m ((?:tests|testbed|emulator|netem)[\w.]*\w)", line)
    }
    assert [name for name in sorted(named) if importlib.util.find_spec(name) is None] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.endswith(".md")])
def test_files(page: str) -> None:
    """Paths from the repository's root, or beside the page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:testbed|emulator|netem|traces|tests|compose|docs)/[\w./-]+\w)`", text))
    linked = {target.partition("#")[0] for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text)} - {""}
    missing = [name for name in named if not (ROOT / name).exists()]
    missing += [name for name in linked if not ((ROOT / page).parent / name).exists()]
    assert missing == []
