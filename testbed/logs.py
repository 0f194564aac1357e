"""The processes' logs, read: events of all of them in the order of time, and those of one request or a level.

What is no event (a traceback of a process that died, a library's own words) stays with the event before it, or counts
as an error of its file's last change where there is none.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path

from emulator.log import LEVELS
from testbed.launch.state import TestbedError

_FIELD = re.compile(r'([A-Za-z_]\w*)=("(?:[^"\\]|\\.)*"|\S*)(?: |$)')


@dataclass(slots=True)
class Event:
    """One event. time: UTC, as it is written, which sorts by itself. more: lines after it that are none."""

    time: str
    level: str
    fields: dict[str, str]
    line: str
    more: list[str] = field(default_factory=list)

    @classmethod
    def parse(cls, line: str) -> Event | None:
        """The event of a line; None where it is none."""
        if not line.startswith("time="):
            return None
        fields, at = {}, 0
        while at < len(line):
            found = _FIELD.match(line, at)
            if found is None:
                return None
            name, text = found.groups()
            try:
                fields[name] = json.loads(text) if text.startswith('"') else text
            except ValueError:
                return None
            at = found.end()
        if fields.get("level") not in LEVELS or not fields["time"]:
            return None
        return cls(fields["time"], fields["level"], fields, line)

    def text(self) -> str:
        """For people: as it stands, and a traceback below it."""
        line, lines = self.line, list(self.more)
        if traceback := self.fields.get("traceback"):
            line = line[: line.rindex(" traceback=")]
            lines = [*traceback.rstrip().splitlines(), *lines]
        return "\n".join([line, *(f"    {one}" for one in lines)])


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which events: of `level` and worse, and of one request unless that is None."""

    level: str = "debug"
    request_id: str | None = None

    def __call__(self, event: Event) -> bool:
        mine = self.request_id is None or event.fields.get("request_id") == self.request_id
        return mine and LEVELS.index(event.level) >= LEVELS.index(self.level)


def find(folder: Path, names: Sequence[str] = ()) -> list[Path]:
    """The logs of these processes, of all of them without names. Raises TestbedError for a name that has none, and
    where there are none at all."""
    found = {path.stem: path for path in sorted(folder.glob("*.log"))}
    if not found:
        raise TestbedError(
            f"{folder}: has no logs, since no testbed was started; start one (prfaas up), or set PRFAAS_STATE"
        )
    for name in names:
        if name not in found:
            raise TestbedError(f"no log of {name!r}; there are: {', '.join(found)}")
    return [found[name] for name in names or found]


class Reader:
    """Logs as they grow: each call of `more` has what was added since the one before, the first one all there is. A log
    that begins anew is read from its beginning."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._read = dict.fromkeys(paths, 0)
        self._part = dict.fromkeys(paths, b"")

    def more(self, *, ended: bool = True) -> list[Event]:
        """Events in the order of time. ended: also of a line that has no end yet."""
        found: list[Event] = []
        for path, begun in self._read.items():
            try:
                with path.open("rb") as file:
                    begun = begun if file.seek(0, os.SEEK_END) >= begun else 0
                    file.seek(begun)
                    new = file.read()
            except OSError as error:
                raise TestbedError(f"{path}: cannot be read ({error.strerror})") from None
            whole, newline, part = ((self._part[path] if begun else b"") + new).rpartition(b"\n")
            self._read[path] = begun + len(new)
            self._part[path] = b"" if ended else part
            text = whole + newline + (part if ended else b"")
            found += _events(text.decode(errors="replace").splitlines(), path)
        return sorted(found, key=attrgetter("time"))


def _events(lines: Iterable[str], path: Path) -> Iterator[Event]:
    event: Event | None = None
    for line in lines:
        parsed = Event.parse(line)
        if parsed is not None:
            if event is not None:
                yield event
            event = parsed
        elif event is not None:
            event.more.append(line)
        else:
            event = _unknown(line, path)
    if event is not None:
        yield event


def _unknown(line: str, path: Path) -> Event:
    changed = datetime.fromtimestamp(path.stat().st_mtime, UTC)
    time = changed.strftime("%Y-%m-%dT%H:%M:%S.") + f"{changed.microsecond // 1000:03d}Z"
    return Event(time, "error", {"process": path.stem}, f"time={time} level=error process={path.stem} {line}")
