"""The log's lines: one an event, whatever is in it; the same in every room that starts processes."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from emulator.log import LEVELS, Log, Logfmt, configure
from testbed.logs import Event

ROOT = Path(__file__).parents[1]
log = Log("test")


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What a process called `node` logs from `info` on; afterwards logging is what it was."""
    root, ours = logging.getLogger(), logging.getLogger("prfaas")
    before = root.handlers[:], root.level, ours.level
    out = io.StringIO()
    monkeypatch.setattr("sys.stderr", out)
    configure("node", "info")
    yield out
    root.handlers[:], root.level = before[:2]
    ours.setLevel(before[2])


def one(lines: io.StringIO) -> Event:
    (line,) = lines.getvalue().splitlines()
    event = Event.parse(line)
    assert event is not None, line
    return event


def test_both_rooms_write_the_same_lines() -> None:
    assert (ROOT / "emulator/log.py").read_text() == (ROOT / "netem/log.py").read_text()


def test_an_event_is_one_line_of_fields(lines: io.StringIO) -> None:
    log.info("routed", request_id="r-1", attempt=1, t_s=12.5, nothing=None, reason="a long one")
    event = one(lines)
    assert event.fields.pop("time").endswith("Z")
    assert event.fields == {
        "level": "info",
        "process": "node",
        "event": "routed",
        "request_id": "r-1",
        "attempt": "1",
        "t_s": "12.5",
        "reason": "a long one",
    }


@pytest.mark.parametrize(
    "text",
    ["", " ", "a b", 'say "hi"', "back\\slash", "x=1 level=error", "two\nlines", "\r\x1b[31m", "naïve ✓", "\ud800"],
)
def test_no_text_leaves_its_field(lines: io.StringIO, text: str) -> None:
    """A client may name its request whatever it likes."""
    log.info(f"told {text}", request_id=text, after=1)
    event = one(lines)
    assert (event.fields["event"], event.fields["request_id"], event.fields["after"]) == (f"told {text}", text, "1")
    assert event.level == "info"


def test_below_the_level_nothing_is_written(lines: io.StringIO) -> None:
    log.debug("every message")
    assert lines.getvalue() == ""


def test_an_error_has_its_traceback_on_its_line(lines: io.StringIO) -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        log.error("broken", cause=error, request_id="r")
    event = one(lines)
    assert event.fields["error"] == "ValueError: two\nlines"
    assert 'raise ValueError("two' in event.fields["traceback"]
    assert event.text().splitlines()[1] == "    Traceback (most recent call last):"


def test_libraries_are_heard_when_they_warn(lines: io.StringIO) -> None:
    logging.getLogger("asyncio").info("selecting")
    logging.getLogger("asyncio").warning("took %d s", 3)
    event = one(lines)
    assert (event.level, event.fields["event"], event.fields["logger"]) == ("warning", "took 3 s", "asyncio")


def test_times_sort_as_texts() -> None:
    format_line = Logfmt("node").format
    stamps = [1.0, 1.0004, 1.25, 59.9999, 60.0, 1e9]
    records = [
        logging.makeLogRecord({"name": "x", "created": stamp, "msg": "x", "levelname": "INFO"}) for stamp in stamps
    ]
    written = [format_line(record) for record in records]
    assert written == sorted(written)
    assert written[2].startswith("time=1970-01-01T00:00:01.250Z ")


def test_levels_are_in_order() -> None:
    numbers = [logging.getLevelNamesMapping()[level.upper()] for level in LEVELS]
    assert numbers == sorted(numbers)
