"""`report.md`: a view for a pull request's comment or a job's summary: the verdict, a short table, and the rest folded.

GitHub takes 65,536 characters in a comment; what is beyond MOST_BYTES is left out, and the text says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from testbed.gate.report.view import Cell, Section, Table, View

MOST_BYTES: Final = 60_000
MARKS: Final = {
    "worse": "🔴",
    "better": "🟢",
    "same": "⚪",
    "inconclusive": "🟡",
    "invalid": "🟡",
    "valid": "⚪",
    "failed": "🔴",
}
SPECIAL: Final = re.compile(r"([\\`*_{}\[\]()#|~!$@:])")
PLAIN: Final = 300
"""A text of somebody else's is not told longer than this in a table."""


def markdown(view: View) -> str:
    """The report as text, never longer than MOST_BYTES."""
    kept: list[str] = []
    size = 0
    for block in _blocks(view):
        size += len(block.encode()) + 2
        if size > MOST_BYTES:
            kept.append("*The rest is left out here: report.html has all of it.*")
            break
        kept.append(block)
    return "\n\n".join(kept) + "\n"


def _blocks(view: View) -> Iterator[str]:
    yield f"## {MARKS.get(view.state, '')} {plain(view.sentence)}".replace("  ", " ")
    if view.reasons:
        yield "\n".join(f"- {plain(reason)}" for reason in view.reasons)
    for note in view.notes:
        yield f"> Note: {plain(note)}."
    if view.overview is not None:
        yield _table(view.overview)
        if view.overview.note:
            yield f"<sub>{plain(view.overview.note)}</sub>"
    for section in view.sections:
        yield _section(section)
    if view.facts:
        facts = "\n".join(f"- {plain(term)}: {plain(words)}" for term, words in view.facts)
        yield _folded("What this depends on", facts)
    yield "`report.html` has distributions, timelines and what the words mean."


def _section(section: Section) -> str:
    lines = [plain(section.description), plain(section.runs)]
    for table in section.tables:
        lines += [f"**{plain(table.title)}**", _table(table)]
    for requests in section.requests:
        if requests.told:
            told = [
                f"- **{plain(one.request_id)}**"
                + ("" if one.was_s is None else f" (in {plain(requests.beside)} {one.was_s:.2f} s)")
                + f": {plain(' '.join(one.sentences))}"
                for one in requests.told
            ]
            lines += [f"**{plain(requests.title)}**", "\n".join(told)]
    mark = MARKS.get(section.state, "")
    return _folded(f"{mark} {plain(section.title)}: {plain(section.sentence)}".strip(), "\n\n".join(lines))


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{text}\n\n</details>"


def _table(table: Table) -> str:
    """Without the columns that hold drawings alone."""
    shown = [i for i in range(len(table.columns)) if not any(row[i].glyph for row in table.rows)]
    titles = "| " + " | ".join(plain(table.columns[i][0]) for i in shown) + " |"
    rule = "|" + "|".join("---:" if table.columns[i][1] else "---" for i in shown) + "|"
    rows = ["| " + " | ".join(_cell(row[i], heading=i == 0) for i in shown) + " |" for row in table.rows]
    return "\n".join([titles, rule, *rows])


def _cell(cell: Cell, *, heading: bool) -> str:
    text = plain(cell.text if len(cell.text) <= PLAIN else f"{cell.text[:PLAIN]}…")
    mark = f"{MARKS[cell.state]} " if not heading and cell.text == cell.state and cell.state in MARKS else ""
    return mark + (f"**{text}**" if cell.state in ("worse", "broken") and text else text)


def plain(text: str) -> str:
    """Text that means itself: no markup, no link, nobody mentioned, one line."""
    one_line = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    escaped = SPECIAL.sub(r"\\\1", one_line)
    return escaped.replace("\\@", "&#64;").replace("\\:", "&#58;" if "//" in text else ":")
