"""A process's log: one line an event, in logfmt, with the request's id wherever there is one.

    time=2026-11-30T21:04:05.123Z level=info process=pd-d-1 event=admitted request_id=r0000012 attempt=1 landed_s=12.345

Texts that logfmt cannot hold are JSON strings, so that whatever somebody put into a name stays on its line. The rooms
that start processes have this same file each, as rooms import only themselves (tests/test_log.py holds them equal).
"""

from __future__ import annotations

import json
import logging
import re
import time
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import Final

LEVELS: Final = ("debug", "info", "warning", "error")
OURS: Final = "prfaas"
_PLAIN: Final = re.compile(r"[\w.:/+@,;%()\[\]<>-]+")


class Log:
    """The events of one part of a process. A field is a number, a text or None, which is left out."""

    def __init__(self, part: str) -> None:
        self._logger = logging.getLogger(f"{OURS}.{part}")
        self._enabled = self._logger.isEnabledFor

    def debug(self, event: str, **fields: object) -> None:
        if self._enabled(logging.DEBUG):
            self._tell(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        if self._enabled(logging.INFO):
            self._tell(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        if self._enabled(logging.WARNING):
            self._tell(logging.WARNING, event, fields)

    def error(self, event: str, *, cause: BaseException | None = None, **fields: object) -> None:
        """cause: what was raised, for its traceback."""
        self._tell(logging.ERROR, event, fields, cause)

    def _tell(self, level: int, event: str, fields: Mapping[str, object], cause: BaseException | None = None) -> None:
        raised = None if cause is None else (type(cause), cause, cause.__traceback__)
        record = logging.LogRecord(self._logger.name, level, "", 0, event, None, raised)
        record.fields = fields
        self._logger.handle(record)


class Logfmt(logging.Formatter):
    """Our own records, and those of the libraries, whose message is then the event."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = value(process)
        self._second, self._stamp = -1, ""

    def format(self, record: logging.LogRecord) -> str:
        second = int(record.created)
        if second != self._second:
            self._second, self._stamp = second, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        milliseconds = int((record.created - second) * 1000)
        level = record.levelname.lower()
        head = f"time={self._stamp}.{milliseconds:03d}Z level={level} process={self._process}"
        parts = [head, f"event={value(record.getMessage())}"]
        fields: Mapping[str, object] | None = getattr(record, "fields", None)
        if fields is None:
            fields = {} if record.name.startswith(OURS) else {"logger": record.name}
        parts += [f"{name}={value(field)}" for name, field in fields.items() if field is not None]
        if record.exc_info and record.exc_info[1] is not None:
            parts += _raised(record.exc_info[1], record.exc_info[2])
        return " ".join(parts)


def value(field: object) -> str:
    """A field's value as it stands in a line."""
    if type(field) is float:
        return f"{field:.10g}"
    text = str(field)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def _raised(error: BaseException, where: TracebackType | None) -> list[str]:
    lines = "".join(traceback.format_exception(type(error), error, where))
    return [f"error={value(f'{type(error).__name__}: {error}')}", f"traceback={value(lines)}"]


def configure(process: str, level: str) -> None:
    """Everything that this process logs goes to standard error, from `level` on; of libraries only warnings."""
    handler = logging.StreamHandler()
    handler.setFormatter(Logfmt(process))
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(level=max(number, logging.WARNING), handlers=[handler], force=True)
    logging.getLogger(OURS).setLevel(number)
