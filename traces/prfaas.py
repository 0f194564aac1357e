"""Our own trace file: JSON lines with the fields of a Request, nothing lost and nothing to interpret. Replay reads it.

Arrivals are written as they are (the shortest digits that give the same float back), so a load that was saved and
loaded is equal.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import orjson

from traces.request import Request, TraceError
from traces.rows import JUDGED_ROWS, JsonLines, Rows, check_not_too_coarse, shown

FIELDS = ("arrival_s", "input_tokens", "output_tokens", "block_hashes", "block_size", "session")
REQUIRED = FIELDS[:3]


def to_rows(requests: Iterable[Request]) -> bytes:
    """One JSON object a line, all of FIELDS, in order, with a newline at the end of each."""
    return b"".join(
        orjson.dumps({name: getattr(request, name) for name in FIELDS}, option=orjson.OPT_APPEND_NEWLINE)
        for request in requests
    )


def read(file: JsonLines, check_units: bool = True) -> Rows:
    """The requests of a parsed file, in its order; every row is kept. The hash fields and session may be left out.

    Raises TraceError for a missing or unknown field, a wrong type or value, and (with check_units) when arrival_s holds
    whole numbers that can only be ms.
    """
    requests = []
    for number, record in zip(file.lines, file.records, strict=True):
        where = f"{file.source}, line {number}"
        _check(record, where)
        try:
            requests.append(Request(**{**record, "block_hashes": tuple(record.get("block_hashes", ()))}))
        except TraceError as error:
            raise TraceError(f"{where}: {error}; correct or remove the row") from None
    stamps = np.array([request.arrival_s for request in requests], dtype=np.float64)
    if check_units and len(stamps) >= JUDGED_ROWS and bool((stamps == np.floor(stamps)).all()):
        check_not_too_coarse(
            stamps, "arrival_s", "arrival_s", file.source, "divide it by 1000 if it holds milliseconds"
        )
    return Rows(requests, len(requests))


def _check(record: dict[str, Any], where: str) -> None:
    for name in REQUIRED:
        if name not in record:
            raise TraceError(f"{where}: no field {name!r}; a row has {', '.join(FIELDS)}")
    for name, value in record.items():
        if name not in FIELDS:
            raise TraceError(f"{where}: unknown field {name!r}; a row has {', '.join(FIELDS)}")
        if name == "arrival_s":
            good = type(value) in (int, float)
        elif name == "session":
            good = isinstance(value, str)
        elif name == "block_hashes":
            good = isinstance(value, list) and all(type(block) is int for block in value)
        else:
            good = type(value) is int
        if not good:
            raise TraceError(f"{where}: {name} = {shown(repr(value))} has the wrong type; correct or remove the row")
