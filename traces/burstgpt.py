"""BurstGPT traces, releases 1 to 3: CSV with Timestamp (s), Model, Request tokens, Response tokens, Total tokens, Log
Type.

Read by the names of the columns, since release 3 inserts Session ID and Elapsed time. Response tokens of 0 mark a
request that failed. The head of a file is nearly idle: take a slice from a busy hour. Source:
github.com/HPMLL/BurstGPT.
"""

from __future__ import annotations

from traces.rows import Rows, Table, check_not_negative, check_not_too_coarse, from_columns

COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
SESSION = "Session ID"
SLOWEST_GAP_S = 400.0
"""A mean gap from here up is taken for ms. The idle head of a release shows 50 s, a whole one in ms thousands."""


def read(table: Table, check_units: bool = True) -> Rows:
    """Requests in the file's order, arrival_s seconds after the earliest row; rows of zero tokens are dropped, named.

    The other columns are not used; Session ID, where there is one, names the conversation. Raises TraceError for a
    missing column, a bad cell, or (with check_units) stamps that can only be ms.
    """
    for name in COLUMNS:
        table.column(name)
    stamps = table.numbers("Timestamp")
    check_not_negative(stamps, table.lines, "Timestamp", table.source)
    if check_units:
        remedy = "divide milliseconds by 1000 (BurstGPT stamps are s)"
        check_not_too_coarse(stamps, "arrival_s", "Timestamp", table.source, remedy, SLOWEST_GAP_S)
    sessions = table.columns.get(SESSION)
    return from_columns(table, stamps - stamps.min(), "Request tokens", "Response tokens", sessions)
