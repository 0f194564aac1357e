"""All that a report says, as data: `page.py` and `markdown.py` write it, `of_gate.py` and `of_runs.py` make it.

Every text is plain, whoever wrote it: what writes it escapes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Glyph:
    """An effect and its interval in units of the least effect that counts, positive for better; None for an open end.
    What is drawn reaches from -REACH to REACH."""

    low: float | None
    effect: float
    high: float | None


REACH = 4.0


@dataclass(frozen=True, slots=True)
class Cell:
    """text: what stands there. more: smaller, below it. state: better, worse, held, broken ... : how it looks."""

    text: str
    more: str = ""
    state: str = ""
    glyph: Glyph | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """columns: (title, whether numbers stand in it). The first cell of a row is its heading. note: how to read it.
    folded: it is there for who asks for it. compact: of many short rows."""

    title: str
    columns: list[tuple[str, bool]]
    rows: list[list[Cell]]
    note: str = ""
    folded: bool = False
    compact: bool = False


@dataclass(frozen=True, slots=True)
class Told:
    """A request that is worth a look. was_s: its TTFT in the run it is compared with, None for no such one."""

    request_id: str
    ttft_s: float | None
    was_s: float | None
    sentences: list[str]
    command: str


@dataclass(frozen=True, slots=True)
class Requests:
    """Some of them, under one heading. beside: what `was_s` is of."""

    title: str
    note: str
    told: list[Told]
    beside: str = "the baseline"


@dataclass(frozen=True, slots=True)
class Section:
    """One scenario, or one comparison of runs.

    arms: their names, the first is what the others are compared with. charts: what `page.js` draws, {} for nothing
    (`arms`, one `arm.drawn` each; `slo_s`; `load`, `differences` or None). runs: what of it is drawn, a sentence.
    """

    title: str
    state: str
    sentence: str
    description: str
    arms: list[str]
    runs: str
    charts: dict[str, Any]
    tables: list[Table]
    requests: list[Requests]
    open: bool = False


@dataclass(frozen=True, slots=True)
class View:
    """A whole report. sentence: the verdict in one. facts: what it depends on. meanings: what its words mean. Both are
    (term, words)."""

    title: str
    state: str
    sentence: str
    reasons: list[str]
    notes: list[str]
    overview: Table | None
    sections: list[Section]
    facts: list[tuple[str, str]]
    meanings: list[tuple[str, str]] = field(default_factory=list)
    heading: str = "What changed, and where"
