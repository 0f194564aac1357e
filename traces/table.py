"""Any other CSV, through a map from our names to its columns: ``{"arrival_s": "Time", "input_tokens": "In", ...}``.

The map says the unit of the stamps by its key. Since a wrong unit is silent (the load is a thousand times too slow),
the rate that it would mean is judged, and refused when nobody can have meant it.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping

from traces.request import Request, TraceError
from traces.rows import (
    UNIT_S,
    Rows,
    Table,
    check_not_negative,
    check_not_too_coarse,
    check_not_too_fine,
    from_columns,
    unit_doubt,
)

ARRIVAL_KEYS = (*UNIT_S, "arrival_time")
FINER = {
    "arrival_s": "map arrival_ms= to this column if it holds milliseconds",
    "arrival_ms": "map arrival_us= to this column if it holds microseconds",
    "arrival_us": "map arrival_ns= to this column if it holds nanoseconds",
    "arrival_ns": "correct the column",
}
REQUIRED_KEYS = ("input_tokens", "output_tokens")
OPTIONAL_KEYS = ("session",)


def own_map(columns: Mapping[str, object]) -> dict[str, str] | None:
    """The map of a file whose columns already carry our names, or None."""
    named = {key: key for key in (*ARRIVAL_KEYS, *REQUIRED_KEYS, *OPTIONAL_KEYS) if key in columns}
    arrivals = [key for key in ARRIVAL_KEYS if key in named]
    return named if len(arrivals) == 1 and all(key in named for key in REQUIRED_KEYS) else None


def read(table: Table, columns: Mapping[str, str], check_units: bool = True) -> Rows:
    """Requests in the file's order, arrival_s seconds after the earliest row; rows of zero tokens are dropped, named.

    columns: exactly one of arrival_s, arrival_ms, arrival_us, arrival_ns (numbers >= 0) or arrival_time (dates);
        input_tokens and output_tokens; optionally session. Each maps to a column of the file.
    check_units: judge whether the unit can be meant, see ``traces.rows``.
    Raises TraceError for a bad map, a missing column, a bad cell, or a unit that nobody can have meant.
    """
    key = _arrival_key(columns, table.source)
    name = columns[key]
    notes: list[str] = []
    if key == "arrival_time":
        arrival_s = table.stamps_s(name)
    else:
        stamps = table.numbers(
            name, "must be a finite number (a date is mapped by arrival_time=); correct or remove the row"
        )
        check_not_negative(stamps, table.lines, name, table.source)
        if check_units:
            check_not_too_coarse(stamps, key, name, table.source, FINER[key])
            notes += unit_doubt(stamps, key, name)
            if key != "arrival_s":
                check_not_too_fine(
                    stamps, key, name, table.source, "map the coarser unit, such as arrival_s=, to this column"
                )
        else:
            notes.append(f"the unit of {name}, {key}, was not checked")
        # Division, not multiplication by 1e-3: whole ms then give the nearest float to their seconds.
        arrival_s = (stamps - stamps.min()) / round(1 / UNIT_S[key])
    rows = from_columns(
        table,
        arrival_s,
        columns["input_tokens"],
        columns["output_tokens"],
        table.column(columns["session"]) if "session" in columns else None,
    )
    rows.notes += notes
    return rows


def to_rows(requests: Iterable[Request]) -> bytes:
    """The requests as a table with our own names, which ``own_map`` knows; arrivals with the digits that give the same
    float back."""
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    names = ("arrival_s", *REQUIRED_KEYS, *OPTIONAL_KEYS)
    writer.writerow(names)
    writer.writerows([getattr(request, name) for name in names] for request in requests)
    return out.getvalue().encode()


def _arrival_key(columns: Mapping[str, str], source: str) -> str:
    known = (*ARRIVAL_KEYS, *REQUIRED_KEYS, *OPTIONAL_KEYS)
    for key in columns:
        if key not in known:
            raise TraceError(f"{source}: the map has an unknown key {key!r}; its keys are {', '.join(known)}")
    arrivals = [key for key in ARRIVAL_KEYS if key in columns]
    if len(arrivals) != 1:
        found = f"has {' and '.join(arrivals)}" if arrivals else "has no arrival"
        raise TraceError(f"{source}: the map {found}; give exactly one of {', '.join(ARRIVAL_KEYS)}")
    for key in REQUIRED_KEYS:
        if key not in columns:
            raise TraceError(f"{source}: the map has no {key}; name the column that holds it")
    return arrivals[0]
