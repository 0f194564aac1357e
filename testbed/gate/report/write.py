"""Writes reports: of a gate `report.html`, `report.md` and `junit.xml` beside its `summary.json`, of runs the page."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from testbed.gate.report.junit import junit
from testbed.gate.report.markdown import markdown
from testbed.gate.report.of_gate import view
from testbed.gate.report.page import page
from testbed.gate.report.view import View
from testbed.gate.result import GateResult

PAGE: Final = "report.html"
MARKDOWN: Final = "report.md"
JUNIT: Final = "junit.xml"


def write_gate(result: GateResult, folder: Path) -> None:
    """All of a gate's reports, into its folder."""
    made = view(result, folder)
    write_view(made, folder)
    (folder / JUNIT).write_bytes(junit(result))


def write_view(view: View, folder: Path, *, text: bool = True) -> None:
    """`report.html` and, unless a run has its own, `report.md`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PAGE).write_text(page(view), encoding="utf-8")
    if text:
        (folder / MARKDOWN).write_text(markdown(view), encoding="utf-8")
