"""`report.html`: a view as one file that needs nothing else, not even a network, whatever is in its texts.

Jinja escapes every text; data for the charts is JSON in which no markup can begin. A content security policy in the
page forbids it to fetch anything.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Final

import orjson
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from testbed.gate.report.view import REACH, Glyph, View

HERE: Final = Path(__file__).parent
WIDTH: Final = 160.0
"""Of a glyph, in its own units."""
MARGIN: Final = 6.0


def page(view: View) -> str:
    """The whole page."""
    return _environment().get_template("page.html").render(
        view=view,
        css=_file("page.css"),
        js=_file("page.js"),
        plotly=_file("vendor/plotly-basic.min.js"),
        json=_json,
        at=_at,
        reach=REACH,
        spoken=spoken,
    )  # fmt: skip


@cache
def _environment() -> Environment:
    return Environment(loader=FileSystemLoader(HERE), autoescape=True, trim_blocks=True)


@cache
def _file(name: str) -> Markup:
    """A file of ours that is put in as it is."""
    return Markup((HERE / name).read_text(encoding="utf-8"))


def _json(data: Any) -> Markup:
    """JSON as it may stand in a script element: nothing in it ends the element, or begins a comment."""
    return Markup(orjson.dumps(data).decode().replace("<", "\\u003c").replace(">", "\\u003e"))


def _at(units: float) -> float:
    """Where a number of least effects is drawn; what is beyond REACH, at the edge."""
    share = (max(-REACH, min(REACH, units)) + REACH) / (2 * REACH)
    return round(MARGIN + share * (WIDTH - 2 * MARGIN), 1)


def spoken(glyph: Glyph) -> str:
    """The same in words."""
    low, high = ("open" if end is None else f"{end:+.2g}" for end in (glyph.low, glyph.high))
    return f"{glyph.effect:+.2g} times what counts, {low} to {high}; positive is better"
